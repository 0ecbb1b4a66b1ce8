"""A placement: which feature rows are on which device, and where each device finds a row."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..jit import kernel

HOST, DISK = -1, -2


@dataclass(frozen=True)
class Placement:
    """Feature rows on devices; rows that are on no device are in host memory or on disk.

    Attributes:
        rows: (num_rows,) int64 node ids for each device, in the order of its buffer.
        groups: Devices that read each other's buffers, one tuple per group.
        num_nodes: Number of nodes in the graph.
        on_disk: (num_nodes,) bool, True for rows that are not in host memory either; None: host memory has all of them.
        shares: Predicted share of reads from each tier ("local", "peer", "host", "disk"), averaged over devices.
        device_shares: The same for each device.
        method: Method that placed the rows.
        fingerprint: Fingerprint of the store that the placement was made for; "" if none was given.
        costs: Predicted cost of a batch's reads on each device, in reads from the host; those from disk count as such.
    """

    rows: tuple[np.ndarray, ...]
    groups: tuple[tuple[int, ...], ...]
    num_nodes: int
    on_disk: np.ndarray | None
    shares: dict[str, float]
    device_shares: tuple[dict[str, float], ...]
    method: str
    fingerprint: str = ""
    costs: tuple[float, ...] = ()

    @classmethod
    def none(cls, num_nodes: int, num_devices: int) -> "Placement":
        """Return a placement of no row: all are on disk."""
        rows, shares = np.empty(0, np.int64), {"local": 0.0, "peer": 0.0, "host": 0.0, "disk": 1.0}
        groups = tuple((device,) for device in range(num_devices))
        on_disk = np.ones(num_nodes, bool)
        return cls((rows,) * num_devices, groups, num_nodes, on_disk, shares, (shares,) * num_devices, "none")

    @property
    def num_devices(self) -> int:
        """Number of devices that rows are placed on."""
        return len(self.rows)

    @cached_property
    def dev_num(self) -> np.ndarray:
        """(num_devices, num_nodes) int32: where each reading device finds a row, HOST -1, DISK -2; itself first.

        Cost: with `buf_pos` 12 bytes a node and device; `lookup` makes the rows of one device alone.
        """
        return np.stack([self.lookup(device)[0] for device in range(self.num_devices)])

    @cached_property
    def buf_pos(self) -> np.ndarray:
        """(num_devices, num_nodes) int64: the row's place in the buffer it is read from; its id on host and disk."""
        return np.stack([self.lookup(device)[1] for device in range(self.num_devices)])

    def lookup(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the (num_nodes,) `dev_num` and `buf_pos` of one reading device."""
        dev_num = np.full(self.num_nodes, HOST, np.int32)
        if self.on_disk is not None:
            dev_num[self.on_disk] = DISK
        buf_pos = np.arange(self.num_nodes)
        for other in _from_far_to_near(device, self.groups):
            dev_num[self.rows[other]] = other
            buf_pos[self.rows[other]] = np.arange(len(self.rows[other]))
        return dev_num, buf_pos


def read_shares(
    rows: tuple[np.ndarray, ...], groups: tuple[tuple[int, ...], ...], on_disk: np.ndarray | None, prob: np.ndarray
) -> tuple[dict[str, float], ...]:
    """Return each device's share of reads by tier, where nodes are read in proportion to prob.

    Args:
        rows, groups, on_disk: see `Placement`.
        prob: (num_nodes,) >= 0; or (num_devices, num_nodes), those of each device.
    """
    shares = []
    for device, own in enumerate(np.broadcast_to(prob, (len(rows), prob.shape[-1]))):
        reads = _reads_by_holder(device, rows, groups, on_disk, own)
        near, (host, disk), total = reads[:-2], reads[-2:], max(reads.sum(), np.finfo(np.float64).tiny)
        tiers = {"local": near[device], "peer": np.delete(near, device).sum(), "host": host, "disk": disk}
        shares.append({name: float(value / total) for name, value in tiers.items()})
    return tuple(shares)


def read_costs(
    rows: tuple[np.ndarray, ...], groups: tuple[tuple[int, ...], ...], prob: np.ndarray, alphas: np.ndarray
) -> tuple[float, ...]:
    """Return the cost of a batch's reads on each device, in reads from the host; the largest should be small.

    Args:
        rows, groups: see `Placement`.
        prob: (num_nodes,) or (num_devices, num_nodes), as in `read_shares`.
        alphas: (num_devices, num_devices) cost of a read from each peer, over that from the host.
    """
    costs = []
    for device, own in enumerate(np.broadcast_to(prob, (len(rows), prob.shape[-1]))):
        reads = _reads_by_holder(device, rows, groups, None, own)
        costs.append(float(np.dot(reads[:-2], alphas[device]) + reads[-2]))
    return tuple(costs)


def _reads_by_holder(device: int, rows, groups, on_disk: np.ndarray | None, prob: np.ndarray) -> np.ndarray:
    """Return (num_devices + 2,) float64 how often a device reads from each device, from host memory and from disk."""
    num_devices = len(rows)
    holder = np.full(len(prob), num_devices, np.int32)
    if on_disk is not None:
        holder[on_disk] = num_devices + 1
    for other in _from_far_to_near(device, groups):
        holder[rows[other]] = other
    reads = np.zeros(num_devices + 2)
    _add_by_holder(holder, prob, reads)
    return reads


def _from_far_to_near(device: int, groups) -> list[int]:
    """Return the devices that a device reads: peers from last to first, then itself; the last with a row serves it."""
    peers = next(group for group in groups if device in group)
    return [*reversed([peer for peer in peers if peer != device]), device]


@kernel
def _add_by_holder(holder, prob, reads):
    for i in range(len(holder)):
        reads[holder[i]] += prob[i]


def mean_shares(device_shares: tuple[dict[str, float], ...]) -> dict[str, float]:
    """Return the mean over devices of each tier's share."""
    return {tier: float(np.mean([shares[tier] for shares in device_shares])) for tier in device_shares[0]}
