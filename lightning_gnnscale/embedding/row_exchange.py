"""Rows pulled from the hosts that own them, and gradients pushed to them: uneven all-to-alls that all ranks enter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ..errors import clear_error
from ..placement.shared_rows import gather_objects, machine_id


class Ownership:
    """Parts given to hosts; a host keeps the rows of its parts one behind the other, in the order of their ids.

    Ids are those of rows, see `DistributedEmbedding.row_ids`; where every node has a row they are those of the nodes.

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
    def by_rank(
        cls, part_offsets: np.ndarray, host_of_rank: Sequence[int], rank_of_part: Sequence[int] | None = None
    ) -> "Ownership":
        """Give each part to the host of the rank that trains it; without `rank_of_part`, ranks take parts in turn."""
        if rank_of_part is None:
            rank_of_part = [part % len(host_of_rank) for part in range(len(part_offsets) - 1)]
        return cls(part_offsets, [host_of_rank[rank] for rank in rank_of_part], max(host_of_rank) + 1)

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

    def share(self, hosts: "Hosts") -> list[tuple[slice, slice]]:
        """Return (ids, rows within the host) of this rank's share of its host's rows."""
        position, ranks = hosts.place
        num_rows = self.num_rows(hosts.host)
        first, last = num_rows * position // ranks, num_rows * (position + 1) // ranks
        chunks = []
        for _, ids, rows in self.parts(hosts.host):
            start, stop = max(rows.start, first), min(rows.stop, last)
            if start < stop:
                shift = ids.start - rows.start
                chunks.append((slice(start + shift, stop + shift), slice(start, stop)))
        return chunks


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


@dataclass(frozen=True)
class Hosts:
    """The ranks of a run, grouped by host.

    Attributes:
        host_of_rank: (world_size,) host of each rank; hosts are numbered from 0 in the order of their first ranks.
        rank: Rank of this process.
        group: Process group of the ranks on the CPU; None if there is one host, so that nothing is sent.
        world: The default process group when the hosts were found.
    """

    host_of_rank: tuple[int, ...]
    rank: int
    group: object | None = None
    world: object | None = None

    @classmethod
    def alone(cls) -> "Hosts":
        """One process."""
        return cls((0,), 0)

    @classmethod
    def join(cls, hosts: Sequence[int] | None, before: "Hosts | None" = None) -> "Hosts":
        """Find out where the ranks run; every rank must call it.

        Args:
            hosts: host of each rank, any integers; None: by the machines that the ranks run on.
            before: what an earlier call returned, whose group is used again while it exists.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.alone()
        names = gather_objects(machine_id()) if hosts is None else list(hosts)
        if len(names) != dist.get_world_size():
            raise ValueError(f"hosts must name the host of each of {dist.get_world_size()} ranks, got {names}")
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        host_of_rank, world = tuple(numbers[name] for name in names), dist.group.WORLD
        if before is not None and before.host_of_rank == host_of_rank and before.world is world:
            return before
        group = dist.new_group(backend="gloo", timeout=_timeout_of(world)) if len(numbers) > 1 else None
        return cls(host_of_rank, dist.get_rank(), group, world)

    @property
    def host(self) -> int:
        return self.host_of_rank[self.rank]

    @property
    def num_hosts(self) -> int:
        return max(self.host_of_rank) + 1

    def ranks(self, host: int) -> list[int]:
        """Return the ranks on a host, ascending."""
        return [rank for rank, its_host in enumerate(self.host_of_rank) if its_host == host]

    @property
    def place(self) -> tuple[int, int]:
        """Return the position of this rank among those of its host, and how many they are."""
        here = self.ranks(self.host)
        return here.index(self.rank), len(here)


def _timeout_of(world: dist.ProcessGroup) -> timedelta | None:
    """Return how long a process of the run may be silent; a new group would have torch's own limit."""
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


class Requests:
    """Which rows of a call are here, and which go to which rank.

    Args:
        ids: (num,) int64 ids of rows.
        ownership, hosts: who owns them, and where this process runs.

    Attributes:
        here: (num_here,) positions of the rows that this host owns. rows: (num_here,) their rows.
        away: (num_away,) positions of the others, by the rank that is asked.
        asked: (num_away,) their rows on their host.
        counts: (world_size,) how many each rank is asked for.
    """

    def __init__(self, ids: np.ndarray, ownership: Ownership, hosts: Hosts):
        host, row = ownership.locate(ids)
        local = host == hosts.host
        self.here = np.flatnonzero(local)
        self.rows = row[self.here]
        away = np.flatnonzero(~local)
        rank = _rank_of_rows(host[away], row[away], hosts)
        order = np.argsort(rank, kind="stable")
        self.away = away[order]
        self.asked = row[self.away]
        self.counts = np.bincount(rank, minlength=len(hosts.host_of_rank)).astype(np.int64)


def _rank_of_rows(host: np.ndarray, row: np.ndarray, hosts: Hosts) -> np.ndarray:
    """Return the rank that serves each row: a host assigns its rows to its ranks, so that none is served by two."""
    sizes = np.array([len(hosts.ranks(number)) for number in range(hosts.num_hosts)])
    table = np.zeros((hosts.num_hosts, sizes.max()), np.int64)
    for number in range(hosts.num_hosts):
        table[number, : sizes[number]] = hosts.ranks(number)
    return table[host, row % sizes[host]]


def pull_rows(
    requests: Requests,
    hosts: Hosts,
    read: Callable[[np.ndarray], np.ndarray],
    out: np.ndarray,
) -> int:
    """Fill in the requested rows, from this host and from others; all ranks must enter.

    Requests are sent first; the rows of this host are read while they travel.

    Args:
        requests: Requests of this rank; may be empty.
        read: Maps (num,) rows of this host to their (num, dim) values, of the dtype of `out`.
        out: (num_nodes, dim), filled in place.

    Returns:
        Bytes of rows received from other hosts.
    """
    with clear_error("pulling rows"):
        wanted = _exchange_counts(requests.counts, hosts.group)
        asked, work = _all_to_all(requests.asked, requests.counts, wanted, hosts.group)
        out[requests.here] = read(requests.rows)
        work.wait()
        answers = np.ascontiguousarray(read(asked.numpy()))
        row_bytes = out.dtype.itemsize * out.shape[1]
        flat = answers.reshape(-1).view(np.uint8)
        received, work = _all_to_all(flat, wanted * row_bytes, requests.counts * row_bytes, hosts.group)
        work.wait()
        out[requests.away] = received.numpy().view(out.dtype).reshape(-1, out.shape[1])
    return len(received)


def push_rows(
    requests: Requests, hosts: Hosts, gradients: np.ndarray, apply_here: Callable[[], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Send (num_nodes, dim) gradients of the requests to the owners of their rows; all ranks must enter.

    `apply_here` is called while rows travel, to apply those that this host owns.

    Returns:
        (num_received,) int64 rows of this host and (num_received, dim) gradients, rank after rank, to be applied here.
    """
    with clear_error("pushing gradients"):
        coming = _exchange_counts(requests.counts, hosts.group)
        rows, rows_work = _all_to_all(requests.asked, requests.counts, coming, hosts.group)
        dim = gradients.shape[1]
        leaving = np.ascontiguousarray(gradients[requests.away]).reshape(-1)
        values, work = _all_to_all(leaving, requests.counts * dim, coming * dim, hosts.group)
        apply_here()
        rows_work.wait()
        work.wait()
    return rows.numpy(), values.numpy().reshape(-1, dim)


def _exchange_counts(counts: np.ndarray, group) -> np.ndarray:
    received = torch.empty(len(counts), dtype=torch.int64)
    dist.all_to_all_single(received, torch.from_numpy(counts), group=group)
    return received.numpy()


def _all_to_all(values: np.ndarray, leaving: np.ndarray, coming: np.ndarray, group):
    """Start an uneven exchange; leaving, coming: (world_size,) items to and from each rank."""
    received = torch.empty(int(coming.sum()), dtype=torch.from_numpy(values[:0]).dtype)
    sent = torch.from_numpy(values)
    work = dist.all_to_all_single(received, sent, coming.tolist(), leaving.tolist(), group=group, async_op=True)
    return received, work
