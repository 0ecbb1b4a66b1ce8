"""Which host owns the rows of which nodes: parts of consecutive ids, each in the memory of one host."""

from collections.abc import Iterator, Sequence

import numpy as np


class Ownership:
    """Parts given to hosts; a host keeps the rows of its parts one behind the other, in the order of their ids.

    Args:
        part_offsets: (num_parts + 1,) ascending from 0: part p is the ids [part_offsets[p], part_offsets[p + 1]).
        host_of_part: (num_parts,) in [0, num_hosts).
        num_hosts: >= 1.
    """

    def __init__(self, part_offsets: np.ndarray, host_of_part: Sequence[int], num_hosts: int):
        self.part_offsets = checked_offsets(part_offsets)
        self.host_of_part, self.num_hosts = np.asarray(host_of_part, np.int64), num_hosts
        if len(self.host_of_part) != self.num_parts or not np.isin(self.host_of_part, range(num_hosts)).all():
            raise ValueError(
                f"each of the {self.num_parts} parts needs a host in [0, {num_hosts}), got {list(host_of_part)}"
            )
        sizes = np.diff(self.part_offsets)
        self._shift = np.zeros(self.num_parts, np.int64)  # row of a node within its host, less its id
        self._rows = np.zeros(num_hosts, np.int64)
        for part, host in enumerate(self.host_of_part):
            self._shift[part] = self._rows[host] - self.part_offsets[part]
            self._rows[host] += sizes[part]

    @classmethod
    def by_rank(cls, part_offsets: np.ndarray, host_of_rank: Sequence[int]) -> "Ownership":
        """Give each part to the host of the rank that trains it: part p to rank p mod the number of ranks."""
        parts = len(part_offsets) - 1
        return cls(
            part_offsets, [host_of_rank[part % len(host_of_rank)] for part in range(parts)], max(host_of_rank) + 1
        )

    @property
    def num_parts(self) -> int:
        return len(self.part_offsets) - 1

    @property
    def num_nodes(self) -> int:
        return int(self.part_offsets[-1])

    def num_rows(self, host: int) -> int:
        """Return how many rows a host owns."""
        return int(self._rows[host])

    def locate(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (num,) int64 hosts and (num,) int64 rows within them; nodes: (num,) int64 in [0, num_nodes)."""
        part = np.searchsorted(self.part_offsets, nodes, side="right") - 1
        return self.host_of_part[part], nodes + self._shift[part]

    def parts(self, host: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (part, ids, rows within the host) of each part of a host that has nodes."""
        for part in np.flatnonzero(self.host_of_part == host).tolist():
            start, stop = int(self.part_offsets[part]), int(self.part_offsets[part + 1])
            if stop > start:
                yield part, slice(start, stop), slice(start + int(self._shift[part]), stop + int(self._shift[part]))


def checked_offsets(part_offsets: np.ndarray) -> np.ndarray:
    """Return the offsets of parts as int64, or raise ValueError unless they ascend from 0."""
    offsets = np.array(part_offsets, np.int64)
    if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"part_offsets must ascend from 0 and have at least two entries, got {part_offsets}")
    return offsets


def checked_nodes(nodes: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return ids as a contiguous (num,) int64 array, or raise ValueError unless all are in [0, num_nodes)."""
    nodes = np.asarray(nodes)
    if nodes.ndim != 1 or (nodes.dtype.kind not in "iu" and len(nodes)):
        raise ValueError(f"nodes must be one-dimensional integers, got {nodes.dtype} of shape {nodes.shape}")
    if len(nodes) and (nodes.min() < 0 or nodes.max() >= num_nodes):
        raise ValueError(f"nodes must be in [0, {num_nodes}), got {nodes.min()} to {nodes.max()}")
    return np.ascontiguousarray(nodes, np.int64)
