"""Which rows the batches of an epoch read, counted once, and what a placement makes of them."""

from dataclasses import dataclass

import numpy as np

from ..graph import CSC
from ..placement import Placement
from ..rng import batch_key, fold, permutation
from ..triton_kernels.sample_neighbors import Workspace, sample_neighbors

TIERS = ("local", "peer", "host", "disk")


@dataclass(frozen=True)
class Reads:
    """How often each device read each row.

    Attributes:
        counts: (num_devices, num_nodes) int64.
    """

    counts: np.ndarray

    def shares(self, placement: Placement) -> dict[str, np.ndarray]:
        """Return the share of each device's reads by tier: tier to (num_devices,)."""
        shares = {tier: np.zeros(placement.num_devices) for tier in TIERS}
        for device in range(placement.num_devices):
            counts = self.counts[device]
            total = max(1, int(counts.sum()))
            dev_num, _ = placement.lookup(device)
            for tier, chosen in _tiers(dev_num, device).items():
                shares[tier][device] = counts[chosen].sum() / total
        return shares


def count_epochs(
    csc: CSC,
    train_nodes: list[np.ndarray],
    fanouts: tuple[int, ...],
    batch_size: int,
    seed: int,
    num_epochs: int,
    workspace: Workspace,
) -> Reads:
    """Sample epochs and count the rows that each device reads.

    Args:
        csc: The graph.
        train_nodes: One array per device: its own nodes, shuffled among themselves ("local shuffling"). If several
            devices share one array (`is`), it is shuffled once, and they take its batches in turns ("global
            shuffling").
        fanouts, batch_size: Fan-outs and size of the batches.
        seed: Seed of the order of seeds and of sampling.
        num_epochs: Number of epochs, >= 1.
        workspace: Workspace of `sample_neighbors`.
    """
    counts = np.zeros((len(train_nodes), csc.num_rows), np.int64)
    orders: dict[int, list[int]] = {}
    for device, nodes in enumerate(train_nodes):
        orders.setdefault(id(nodes), []).append(device)
    turn = 0
    for epoch in range(num_epochs):
        for devices in orders.values():
            nodes = train_nodes[devices[0]]
            order = nodes[permutation(len(nodes), fold(seed, epoch, devices[0]))]
            for batch, start in enumerate(range(0, len(order), batch_size)):
                key = batch_key(seed, epoch, devices[0], batch)
                drawn = sample_neighbors(csc, order[start : start + batch_size], fanouts, key, workspace=workspace)
                counts[devices[turn % len(devices)], drawn.n_id] += 1
                turn += 1
    return Reads(counts)


def _tiers(dev_num: np.ndarray, device: int) -> dict[str, np.ndarray]:
    local = dev_num == device
    return {"local": local, "peer": (dev_num >= 0) & ~local, "host": dev_num == -1, "disk": dev_num == -2}
