"""How many bytes of feature rows each tier takes: a GPU, its peers, pinned memory, the page cache, the disk."""

from typing import Any, NamedTuple

import numpy as np

from ..memory import format_bytes

PLACE_BYTES_A_NODE = 8  # where a placement has the row of each node, on the device and on the host
SPARE_SHARE = 0.1  # of free device memory: for fragments, and what other libraries take later
STEP_SPREAD = 0.5  # by which a later batch may be larger than the first
PINNED_SHARE = 0.5  # of free host memory: pinned pages are nobody else's, and the page cache serves the rest


class FreeMemory(NamedTuple):
    """Memory that rows may take.

    Attributes:
        device: Bytes free on the GPU that has least, after the model's first step.
        host: Bytes free on the host, page cache included.
        pinnable: Bytes of these that may be pinned.
        step: The most bytes that the first step held beyond what stays; its memory serves later steps too.
        evaluation: Bytes that evaluation takes of the device, predicted.
    """

    device: int
    host: int
    pinnable: int
    step: int = 0
    evaluation: int = 0

    @classmethod
    def of_host(cls, device: int, host: int, step: int = 0, evaluation: int = 0) -> "FreeMemory":
        """Return what rows may take where a share of the host's free memory may be pinned."""
        return cls(int(device), int(host), int(PINNED_SHARE * host), int(step), int(evaluation))

    def least(self, others: "list[FreeMemory]") -> "FreeMemory":
        """Return what every process of a run has."""
        space = [min(own) for own in zip(*(one[:3] for one in [self, *others]), strict=True)]
        needs = [max(own) for own in zip(*(one[3:] for one in [self, *others]), strict=True)]
        return FreeMemory(*space, *needs)


class TierSizes(NamedTuple):
    """Bytes of the rows of each tier, as one device reads them.

    Attributes:
        device: In its own memory.
        peer: In that of the peers of its group, beyond its own; at most so many, the placement may keep copies.
        pinned: In pinned memory of the host, which the device reads in place.
        host: In the store's files, as far as the page cache holds them.
        disk: In the store's files, beyond it.
        most_pinned: Most bytes that are pinned where devices of a group keep copies, so that peers have fewer rows.
        table: Bytes of all rows that can be placed.
        num_nodes: Number of nodes.
    """

    device: int
    peer: int
    pinned: int
    host: int
    disk: int
    most_pinned: int
    table: int
    num_nodes: int

    @property
    def buffer_rows(self) -> int:
        """Rows of the mean width that each device's buffer takes, at least 1."""
        return max(1, self._rows(self.device))

    @property
    def host_rows(self) -> int:
        """Rows of the mean width that are pinned at most."""
        return self._rows(self.most_pinned)

    def by_tier(self) -> dict[str, int]:
        """Return the bytes by name."""
        return dict(zip(self._fields[:5], self[:5], strict=True))

    def __str__(self) -> str:
        told = {
            "on each device": self.device,
            "on its peers": self.peer,
            "pinned": self.pinned,
            "in the page cache": self.host,
            "from disk": self.disk,
        }
        kept = ", ".join(f"{format_bytes(size)} {where}" for where, size in told.items() if size)
        return f"{kept or 'no rows'}, of {format_bytes(self.table)}"

    def _rows(self, num_bytes: int) -> int:
        return min(self.num_nodes, num_bytes * self.num_nodes // self.table) if self.table else 0


def size_tiers(
    free: FreeMemory,
    table_bytes: int,
    num_nodes: int,
    prob: np.ndarray | None = None,
    row_bytes: Any = None,
    group_size: int = 1,
    given_rows: int | None = None,
) -> TierSizes:
    """Decide how many bytes of feature rows each tier takes.

    Rows that no batch reads take no memory of a device, and are not pinned. The likeliest of the others fill the
    device, then its peers, then pinned memory.

    Args:
        free: What rows may take.
        table_bytes: Bytes of all rows that can be placed, as they are stored.
        num_nodes: Number of nodes, those without such rows included.
        prob: (num_nodes,) or (num_devices, num_nodes), how likely batches read each node; None: all alike.
        row_bytes: (num_nodes,) bytes of each row; None: all are alike.
        group_size: Devices that read each other's memory, this one included.
        given_rows: Rows of the mean width on each device, whatever is free; None: as many as fit.

    Cost: a pass over the probabilities.
    """
    read = table_bytes if prob is None else _read_bytes(np.asarray(prob), table_bytes, row_bytes)
    spare = max(int(SPARE_SHARE * free.device), int(STEP_SPREAD * free.step), free.evaluation - free.step)
    space = free.device - spare - PLACE_BYTES_A_NODE * num_nodes
    if given_rows is not None:
        space = given_rows * table_bytes // max(1, num_nodes)
    device = max(0, min(read, space))
    peer = min(read - device, (group_size - 1) * device)
    most_pinned = max(0, min(read - device, free.pinnable))
    pinned = min(read - device - peer, most_pinned)
    left = table_bytes - device - peer - pinned
    host = max(0, min(left, free.host - pinned - PLACE_BYTES_A_NODE * num_nodes))
    return TierSizes(device, peer, pinned, host, left - host, most_pinned, table_bytes, num_nodes)


def _read_bytes(prob: np.ndarray, table_bytes: int, row_bytes: np.ndarray | None) -> int:
    """Return the bytes of the rows that are ever read."""
    read = (prob if prob.ndim == 1 else prob.max(axis=0)) > 0
    if row_bytes is not None:
        return int(row_bytes[read].sum(dtype=np.int64))
    return -(-table_bytes * int(np.count_nonzero(read)) // max(1, len(read)))


def plan_tiers(
    placed_rows: Any,
    pinned_rows: int | None,
    num_nodes: int,
    row_bytes: float,
    gpu_bytes: int | None,
    host_bytes: int | None,
    num_devices: int,
) -> TierSizes:
    """Predict how many bytes each tier of a run on GPUs takes, before its probabilities are known.

    Args:
        placed_rows: Rows in each device's buffer, a number or a share of all, or "auto": as many as fit.
        pinned_rows: Rows that host memory has space for; None: as many as may be pinned.
        num_nodes, row_bytes: Number of rows, and bytes of one as it is stored.
        gpu_bytes: Memory of a GPU that training leaves; None: unlimited.
        host_bytes: Memory of the host that training leaves; None: unlimited.
        num_devices: Devices, which are taken to read each other's memory.
    """
    table = int(num_nodes * row_bytes)
    unlimited = 4 * (table + PLACE_BYTES_A_NODE * num_nodes)
    device, host = (unlimited if size is None else max(0, size) for size in (gpu_bytes, host_bytes))
    free = FreeMemory.of_host(device, host)
    if pinned_rows is not None:
        free = free._replace(pinnable=min(free.pinnable, int(pinned_rows * row_bytes)))
    rows = None if placed_rows == "auto" else placed_rows
    if isinstance(rows, float):
        rows = round(rows * num_nodes)
    return size_tiers(free, table, num_nodes, group_size=num_devices, given_rows=rows)
