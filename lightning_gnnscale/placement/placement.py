"""A placement: which feature rows are on which device, and where each device finds a row."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import PlacementError
from ..jit import kernel
from ..triton_kernels.gather_rows import pack_places

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
        rows, groups, prob: as in `read_shares`.
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


DISK_TABLE, HOST_TABLE, FIRST_DEVICE = 0, 1, 2  # device d is table FIRST_DEVICE + d; the cache comes last


def first_place(table: int) -> int:
    """Return the place of the first row of a table."""
    return pack_places(np.array(table), np.array(0)).item()


OUTSIDE = first_place(FIRST_DEVICE)  # places below are on no device of the group


# The tables of some devices in memory, None for what is not read, without the cache's; and the (num_host,) rows of the
# host table, ascending; None: all, by id.
LaidRows = tuple[list, np.ndarray | None]


@dataclass(frozen=True)
class RowLayout:
    """A placement and the rows that it places.

    Attributes:
        placement: Placement of the rows.
        features: A dense table over a memory map; its rows are laid out as they are stored.
        copies_host: Whether host rows are copied to memory of their own.
        memory_bytes: Capacity for rows on each device, bytes; None: what there is.
    """

    placement: Placement
    features: Any
    copies_host: bool = False
    memory_bytes: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.features.dim * np.dtype(self.features.dtype).itemsize

    def host_ids(self, devices: list[int]) -> np.ndarray | None:
        """Return the rows of the host table of some devices, None for the memory map."""
        return host_rows(self.placement, devices) if self.copies_host else None

    def device_rows(self, device: int, free_bytes: int | None = None) -> np.ndarray:
        """Return the ids of a device's rows; PlacementError if it has no space for them, as far as that is known."""
        ids = self.placement.rows[device]
        space = min((size for size in (self.memory_bytes, free_bytes) if size is not None), default=None)
        if space is not None:
            check_space(len(ids), self.row_bytes, space, device)
        return ids


def tier_of_tables(device: int, num_devices: int) -> list[str]:
    """Return the tier that each table is, read from one device."""
    devices = ["local" if other == device else "peer" for other in range(num_devices)]
    return ["disk", "host", *devices, "cache"]


def group_of(placement: Placement, device: int) -> tuple[int, ...]:
    """Return the devices that a device reads, itself included."""
    return next(group for group in placement.groups if device in group)


def host_rows(placement: Placement, devices: list[int]) -> np.ndarray:
    """Return the ids, ascending, of the rows that some of the devices read from host memory."""
    needed = np.zeros(placement.num_nodes, bool)
    for group in placement.groups:
        if set(group) & set(devices):
            needed |= placement.lookup(group[0])[0] == HOST
    return np.flatnonzero(needed)


def bytes_by_tier(placement: Placement, device: int, devices: list[int], row_bytes: np.ndarray | int) -> dict[str, int]:
    """Return the bytes of the rows on a device, on its peers beyond those, in the host table, and left in the store.

    Args:
        devices: The devices of its host, which share the host table.
        row_bytes: (num_nodes,) bytes of each row as it is stored, or those of every row.
    """
    widths = np.broadcast_to(np.asarray(row_bytes, np.int64), (placement.num_nodes,))
    dev_num, on_host = placement.lookup(device)[0], host_rows(placement, devices)
    near = {"device": dev_num == device, "peer": (dev_num >= 0) & (dev_num != device)}
    found = {tier: int(widths[held].sum()) for tier, held in near.items()} | {"pinned": int(widths[on_host].sum())}
    return found | {"store": int(widths[dev_num == DISK].sum())}


def row_places(placement: Placement, device: int, host_ids: np.ndarray | None) -> np.ndarray:
    """Return the (num_nodes,) int64 place of each row, as one device reads it; host_ids: see `LaidRows`."""
    dev_num, buf_pos = placement.lookup(device)
    if host_ids is not None:
        on_host = np.flatnonzero(dev_num == HOST)
        buf_pos[on_host] = np.searchsorted(host_ids, on_host)
    return pack_places(dev_num - DISK + DISK_TABLE, buf_pos)


def check_layout(placement: Placement, features, device: int, fingerprint: str) -> None:
    """Refuse features that the placement was not made for.

    Raises:
        PlacementError: sparse features, another store, another number of rows, rows that are not nodes.
        ValueError: device is not one of the placement's.
    """
    if features is None or features.is_sparse:
        kind = "there are none" if features is None else "they are sparse (CSR)"
        raise PlacementError(f"a placement needs dense features, and {kind}: store dense rows, or go without placement")
    if placement.num_nodes != features.num_rows:
        raise PlacementError(
            f"the placement is for {placement.num_nodes} nodes, the features have {features.num_rows} rows: "
            f"make it again with place()"
        )
    if placement.fingerprint and fingerprint and placement.fingerprint != fingerprint:
        raise PlacementError(
            f"the placement was made for another store (fingerprint {placement.fingerprint[:12]}, this store has "
            f"{fingerprint[:12]}): make it again with place(..., store=store)"
        )
    if not 0 <= device < placement.num_devices:
        raise ValueError(f"device must be in [0, {placement.num_devices}), got {device}")
    for number, rows in enumerate(placement.rows):
        if len(rows) and not (rows.min() >= 0 and rows.max() < placement.num_nodes):
            raise PlacementError(
                f"rows of device {number} must be in [0, {placement.num_nodes}), got {rows.min()} to {rows.max()}"
            )


def check_host_space(num_rows: int, row_bytes: int, free_bytes: int) -> None:
    """Refuse host rows that would take more memory than is free; the error has the largest number that fits."""
    if num_rows * row_bytes > free_bytes:
        raise PlacementError(
            f"{num_rows} host rows of {row_bytes} bytes are pinned in {num_rows * row_bytes} bytes of memory, and "
            f"{free_bytes} are free: host_rows must be at most {free_bytes // row_bytes}"
        )


def check_space(num_rows: int, row_bytes: int, memory_bytes: int, device) -> None:
    """Refuse a buffer larger than what is free on its device; the error has the largest number of rows that fit."""
    if num_rows * row_bytes > memory_bytes:
        raise PlacementError(
            f"{num_rows} rows of {row_bytes} bytes need {num_rows * row_bytes} bytes on device {device}, which has "
            f"{memory_bytes}: buffer_rows must be in [1, {memory_bytes // row_bytes}]"
            if memory_bytes >= row_bytes
            else f"device {device} has {memory_bytes} bytes, less than one row of {row_bytes}: train without placement"
        )
