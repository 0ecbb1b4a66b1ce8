"""Rows pulled from the hosts that own them, and gradients pushed to them: `RowTransport`, and the process group's."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..errors import clear_error
from ..placement.shared_rows import gather_objects, machine_id
from .optimizers import SparseAdam, SparseSGD
from .row_owner import Pushed, RowOwner
from .shared_table import SharedTable


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
        group: Process group of the ranks on the CPU; None if there is one rank.
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
        group = dist.new_group(backend="gloo", timeout=_timeout_of(world))
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


def rank_of_rows(host: np.ndarray, row: np.ndarray, hosts: Hosts) -> np.ndarray:
    """Return the rank that serves and steps each row: a host assigns its rows to its ranks, each to one."""
    sizes = np.array([len(hosts.ranks(number)) for number in range(hosts.num_hosts)])
    table = np.zeros((hosts.num_hosts, sizes.max()), np.int64)
    for number in range(hosts.num_hosts):
        table[number, : sizes[number]] = hosts.ranks(number)
    return table[host, row % sizes[host]]


class PulledRows(Protocol):
    """Rows that are asked for.

    Attributes:
        ids: (num,) int64 ids of the rows.
    """

    ids: np.ndarray

    def result(self) -> np.ndarray:
        """Return the (num, dim) rows, once they are there."""


class RowTransport(Protocol):
    """How a process reaches the rows, whoever owns them; calls take effect in the order in which they are made.

    It is made for a staleness: how many steps the rows of a step may have missed at most.

    Attributes:
        together: Every rank makes the same calls, where it has nothing to say with no ids. Else no call needs another
            rank, and a step is taken when every rank has pushed.
        received_bytes: Bytes of rows and gradients that have come to this process.
    """

    together: bool
    received_bytes: int

    def owner_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the (num,) number of the owner of each row."""

    def pull(self, ids: np.ndarray, out: np.ndarray) -> PulledRows:
        """Ask for rows; ids: (num,) int64; out: (num, dim), filled in place."""

    def meet(self) -> None:
        """Begin a step: wait until what is asked for from now on has seen all steps but the last `staleness`."""

    def renew(self, pulled: Any, other: tuple[np.ndarray, np.ndarray] | None = None) -> PulledRows:
        """Ask again for those rows that have missed more than `staleness` steps since they were read; return them.

        Args:
            pulled: The rows.
            other: Other ids, and `out`, of rows that are asked for in their place, where every rank makes the same
                calls; None: `pulled` are the rows of the step.
        """

    def push(self, ids: np.ndarray, gradients: np.ndarray, pulled: Any = None) -> None:
        """Send the gradients of a step to the owners, without waiting.

        Args:
            ids: (num,) int64, in the order of this process's logical ranks, distinct within each.
            gradients: (num, dim).
            pulled: The rows that they were computed with, by which stale ones are counted; None: not counted.
        """

    def any_asks(self, asks: bool) -> bool:
        """Return whether any rank asks for rows, outside of steps; with `together` every rank calls it."""

    def settle(self) -> None:
        """Wait until what this process has pushed is with its owners, and all that it was asked for is done."""

    def told(self) -> tuple[int, int]:
        """Return (rows used though steps had changed them, most steps that such a row had missed) so far.

        Each is counted where it is owned, so over all processes it is counted once.
        """

    def restart(self, pushes: int) -> None:
        """Go on from rows that were read from a checkpoint, after so many steps; every rank calls it."""

    def end(self) -> None:
        """Let go of what serves this process alone."""


_END_LIMIT_S = 5.0


class _Jobs:
    """A thread that enters collectives in the order in which they are asked for; after a failure it enters no more."""

    def __init__(self):
        self._asked: SimpleQueue = SimpleQueue()
        # A daemon: one that waits for a rank that is lost must not keep this process from ending.
        self._thread = Thread(target=self._run, name="learned rows", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> Future:
        done: Future = Future()
        self._asked.put((job, done))
        return done

    def end(self) -> None:
        """Do what was asked for, and end; within seconds, or without it."""
        self._asked.put(None)
        self._thread.join(_END_LIMIT_S)

    def _run(self) -> None:
        failure: BaseException | None = None
        while (asked := self._asked.get()) is not None:
            job, done = asked
            if failure is None:
                try:
                    job()
                except BaseException as error:
                    failure = error
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)
            del asked, job, done


class GroupPull:
    """Rows that a `GroupRows` was asked for.

    Attributes:
        ids, out: As asked for. since: Steps that the rows of other hosts have seen.
        here, rows: Positions of the rows that this host owns, and their rows, which are read by `result`.
        away, asked: Positions of the others, by the rank that is asked, and their rows on their host.
        counts: (world_size,) how many each rank is asked for.
        served, wanted: Rows of this rank that the same pull of the others asked for, and (world_size,) how many each.
    """

    def __init__(self, ids: np.ndarray, out: np.ndarray, ownership: Ownership, hosts: Hosts, owner: RowOwner):
        self.ids, self.out, self.since, self._owner = ids, out, -1, owner
        host, row = ownership.locate(ids)
        local = host == hosts.host
        self.here = np.flatnonzero(local)
        self.rows = row[self.here]
        away = np.flatnonzero(~local)
        rank = rank_of_rows(host[away], row[away], hosts)
        order = np.argsort(rank, kind="stable")
        self.away = away[order]
        self.asked = row[self.away]
        self.counts = np.bincount(rank, minlength=len(hosts.host_of_rank)).astype(np.int64)
        self.served, self.wanted = self.asked[:0], np.zeros_like(self.counts)
        self.work: Future | None = None

    def result(self) -> np.ndarray:
        if self.work is not None:
            self.work.result()
        if len(self.here) == len(self.out):
            return self._owner.read(self.rows, self.out)
        self.out[self.here] = self._owner.read(self.rows)
        return self.out


class GroupRows:
    """Rows in memory that the processes of a host share, and uneven all-to-alls between ranks; a `RowTransport`.

    Each row is served and stepped by one rank of its host. A thread enters the collectives, so that rows are pulled
    and pushed while the process computes; all ranks enter them in one order, after as many steps.

    Args:
        table: This host's rows.
        ownership, hosts: Who owns which, and where this process runs.
        optimizer: Steps the rows.
        staleness: See `RowTransport`.
    """

    together = True

    def __init__(
        self,
        table: SharedTable,
        ownership: Ownership,
        hosts: Hosts,
        optimizer: SparseAdam | SparseSGD,
        staleness: int = 0,
    ):
        self.table, self.hosts, self._ownership, self._staleness = table, hosts, ownership, staleness
        self._alone = len(hosts.host_of_rank) == 1
        self._asks = not self._alone and (hosts.num_hosts > 1 or not staleness)
        self._pushes: deque[Future] = deque()
        self.received_bytes = 0
        self.owner = RowOwner(table.arrays, optimizer, int(table.counter[0]), watched=hosts.num_hosts > 1)
        self._jobs = None if self._alone else _Jobs()
        self._last: Future | None = None

    def owner_of(self, ids: np.ndarray) -> np.ndarray:
        return self._ownership.locate(ids)[0]

    def pull(self, ids: np.ndarray, out: np.ndarray) -> GroupPull:
        pulled = self._of(ids, out)
        if self._asks:
            pulled.work = self._do("pulling rows", lambda: self._pull(pulled))
        return pulled

    def meet(self) -> None:
        while len(self._pushes) > self._staleness:
            self._pushes.popleft().result()

    def renew(self, pulled: GroupPull, other: tuple[np.ndarray, np.ndarray] | None = None) -> GroupPull:
        ids, out = other or (pulled.ids[:0], pulled.out[:0])
        if self._staleness or not self._asks:  # they were asked for so many steps ago, or lie in memory
            instead = self.pull(ids, out)
        else:
            instead = self._of(ids, out)
            pulled.work = instead.work = self._do(
                "pulling rows", lambda: self._renew(pulled, instead, other is not None)
            )
        return pulled if other is None else instead

    def push(self, ids: np.ndarray, gradients: np.ndarray, pulled: GroupPull | None = None) -> None:
        host, rows = self._ownership.locate(ids)
        if self._alone:
            self._step([Pushed(rows, gradients)])
        else:
            rank = rank_of_rows(host, rows, self.hosts)
            self._pushes.append(self._do("pushing gradients", lambda: self._push(rank, rows, gradients, pulled)))

    def any_asks(self, asks: bool) -> bool:
        asking = torch.tensor([int(asks)])
        if self._asks:
            self._do("asking for rows", lambda: dist.all_reduce(asking, group=self.hosts.group)).result()
        return bool(asking)

    def settle(self) -> None:
        if self._last is not None:
            self._last.result()
        self._pushes.clear()

    def told(self) -> tuple[int, int]:
        return self.owner.stale_rows, self.owner.greatest_age

    def restart(self, pushes: int) -> None:
        self.settle()
        self.owner = RowOwner(self.table.arrays, self.owner.optimizer, pushes, watched=self.hosts.num_hosts > 1)
        self.table.counter[0] = pushes

    def end(self) -> None:
        if self._jobs is not None:
            self._jobs.end()

    def _of(self, ids: np.ndarray, out: np.ndarray) -> GroupPull:
        return GroupPull(ids, out, self._ownership, self.hosts, self.owner)

    def _do(self, what: str, job: Callable[[], None]) -> Future:
        def clear() -> None:
            with clear_error(what):
                job()

        self._last = self._jobs.do(clear)
        return self._last

    def _pull(self, pulled: GroupPull) -> None:
        group, out, pulled.since = self.hosts.group, pulled.out, self.owner.clock
        pulled.wanted = _exchange_counts(pulled.counts, group)
        pulled.served = _all_to_all(pulled.asked, pulled.counts, pulled.wanted, group)
        _, received = _send_rows(None, self.owner.read(pulled.served), pulled.wanted, pulled.counts, group)
        out[pulled.away] = received
        self.received_bytes += received.nbytes

    def _renew(self, pulled: GroupPull, instead: GroupPull, is_other: bool) -> None:
        """Send the others what has changed of the rows that were pulled; or pull, where a rank asks for other rows.

        Training waits for it: what the others have asked for is known, so two messages do.
        """
        group, wanted = self.hosts.group, pulled.wanted
        changed = self.owner.changed(pulled.served, pulled.since)
        starts = np.cumsum(wanted) - wanted
        of_rank = np.searchsorted(np.cumsum(wanted), changed, side="right")
        leaving = np.bincount(of_rank, minlength=len(wanted)).astype(np.int64)
        told = np.stack([leaving, np.full_like(leaving, is_other)], axis=1)
        coming, others = _exchange_counts(told, group).T
        rows = self.owner.read(pulled.served[changed])
        places, received = _send_rows(changed - starts[of_rank], rows, leaving, coming, group)
        places += np.repeat(np.cumsum(pulled.counts) - pulled.counts, coming)
        pulled.out[pulled.away[places]] = received
        pulled.since = self.owner.clock
        self.received_bytes += received.nbytes
        if others.any():
            self._pull(instead)

    def _push(self, rank: np.ndarray, rows: np.ndarray, gradients: np.ndarray, pulled: GroupPull | None) -> None:
        group, order = self.hosts.group, np.argsort(rank, kind="stable")
        counts = np.bincount(rank, minlength=len(self.hosts.host_of_rank)).astype(np.int64)
        since = np.full(len(counts), -1 if pulled is None else pulled.since, np.int64)
        coming, read = _exchange_counts(np.stack([counts, since], axis=1), group).T
        received, values = _send_rows(rows[order], gradients[order], counts, coming, group)
        self.received_bytes += values.nbytes - int(coming[self.hosts.rank]) * gradients.itemsize * gradients.shape[1]
        ends, host_of_rank = np.cumsum(coming), self.hosts.host_of_rank
        self._step([
            Pushed(received[end - num : end], values[end - num : end], int(clock) if host != self.hosts.host else -1)
            for end, num, clock, host in zip(ends, coming, read, host_of_rank, strict=True)
        ])  # fmt: skip

    def _step(self, pushed: list[Pushed]) -> None:
        self.owner.step(pushed)
        self.table.counter[0] = self.owner.clock


def _exchange_counts(counts: np.ndarray, group) -> np.ndarray:
    sent = torch.from_numpy(np.ascontiguousarray(counts))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.numpy()


def _send_rows(
    ids: np.ndarray | None, rows: np.ndarray, leaving: np.ndarray, coming: np.ndarray, group
) -> tuple[np.ndarray | None, np.ndarray]:
    """Send rows, each behind its id, in one message to each rank; return the ids and the rows that come.

    Args:
        ids: (num,) int64; None: rows alone are sent.
        rows: (num, dim), of the same dim and dtype on every rank.
        leaving, coming: (world_size,) rows to and from each rank.
    """
    sent = np.ascontiguousarray(rows).view(np.uint8)
    if ids is not None:
        sent = np.concatenate([np.ascontiguousarray(ids, np.int64)[:, None].view(np.uint8), sent], axis=1)
    size = sent.shape[1]
    first = size - rows.itemsize * rows.shape[1]
    received = _all_to_all(sent.reshape(-1), leaving * size, coming * size, group).reshape(-1, size)
    values = np.ascontiguousarray(received[:, first:]).view(rows.dtype)
    return None if ids is None else np.ascontiguousarray(received[:, :first]).view(np.int64)[:, 0], values


def _all_to_all(values: np.ndarray, leaving: np.ndarray, coming: np.ndarray, group) -> np.ndarray:
    """Exchange unevenly; leaving, coming: (world_size,) items to and from each rank."""
    received = torch.empty(int(coming.sum()), dtype=torch.from_numpy(values[:0]).dtype)
    sent = torch.from_numpy(np.ascontiguousarray(values))
    dist.all_to_all_single(received, sent, coming.tolist(), leaving.tolist(), group=group)
    return received.numpy()
