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
from ..triton_kernels.gather_rows import gather_rows
from .optimizers import SparseAdam, SparseSGD, number_distinct
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
        is_empty: No rank has asked for any row by this call. May wait for others.
    """

    ids: np.ndarray
    is_empty: bool

    def wait(self) -> None:
        """Wait until the rows are there."""

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

    def pull(
        self, ids: np.ndarray, out: np.ndarray, sizes: Sequence[int] | None = None, ahead: bool = False
    ) -> PulledRows:
        """Ask for rows.

        Args:
            ids: (num,) int64.
            out: (num, dim), filled in place.
            sizes: How many of the ids each batch of the step that reads them has; None: outside of steps.
            ahead: A coming step reads them, and not the one that begins.
        """

    def meet(self) -> None:
        """Begin a step: wait until what is asked for from now on has seen all steps but the last `staleness`."""

    def renew(self, pulled: Any, other: tuple[np.ndarray, np.ndarray, Sequence[int]] | None = None) -> PulledRows:
        """Begin a step with rows that were asked for ahead, once they have missed at most `staleness` steps.

        Args:
            pulled: The rows.
            other: Other ids, `out` and `sizes`, that take their place where every rank makes the same calls; they come
                with the next `pull`. None: `pulled` are the rows of the step.
        """

    def push(self, ids: np.ndarray, gradients: np.ndarray, is_step: bool = True, coming: Any = None) -> None:
        """Send gradients to the owners, without waiting.

        Args:
            ids: (num,) int64, in the order of this process's logical ranks, distinct within each.
            gradients: (num, dim).
            is_step: They are of rows that the step has begun with; stale ones are counted. Else of any rows.
            coming: What was asked for ahead and is read next: what the step changes of it follows, without being asked
                for. None: nothing is.
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
    """Rows that a `GroupRows` was asked for. Only `wait` and `result` are for the thread that asks.

    Attributes:
        ids, out, sizes, ahead: As asked for.
        since: Steps that the rows of other hosts have seen.
        asked, asked_ids, counts: Rows that are asked of each rank, on their hosts, the first rank's first, their ids,
            and (world_size,) how many. Of a step they are all of its rows, the distinct ones of each batch: ranks of
            this host need not serve them, but step them. Else they are those of other hosts.
        places: Places of the rows of other hosts in `out`, in the order of `asked`; of repeats the first one's.
        nobody: No rank has asked for any row by the same call.
        served, wanted: Rows of this rank that the same pull of the others asked for, and (world_size,) how many each.
        late, later: Which of the rows in `places` the step that is under way may change, and follow when it has; and
            those of `served` that follow, with (world_size,) how many to each.
        first: By pull of the step that is under way, which of the rows in its `asked` and in its `served` some rank
            reads in this one, so that their gradients are sent first.
    """

    def __init__(self, ids: np.ndarray, out: np.ndarray, sizes: Sequence[int] | None, ahead: bool, rows: "GroupRows"):
        self.ids, self.out, self.sizes, self.ahead, self.since, self._rows = ids, out, sizes, ahead, -1, rows
        self._first: np.ndarray | None = None
        self.nobody = False
        self.first: list[tuple[np.ndarray, np.ndarray]] = []
        self.work: Future | None = None

    def sort(self) -> None:
        """Find out whom to ask for which rows."""
        hosts = self._rows.hosts
        host, row = self._rows.locate(self.ids)
        self._here = np.flatnonzero(host == hosts.host)
        self._here_rows = row[self._here]
        places, self._first = _distinct(self.ids, self.sizes or ())
        host, row = host[places], row[places]
        rank = rank_of_rows(host, row, hosts)
        order = np.argsort(rank, kind="stable")
        away = host[order] != hosts.host
        self.places = places[order[away]]
        if self.sizes is None:
            order = order[away]
        self.asked, self.asked_ids = row[order], self.ids[places[order]]
        self.counts = np.bincount(rank[order], minlength=len(hosts.host_of_rank)).astype(np.int64)
        self.served = self.asked[:0]
        self.late = np.zeros(len(self.places), bool)
        self.later = self.asked[:0], np.zeros_like(self.counts)

    @property
    def is_empty(self) -> bool:
        self.wait()
        return self.nobody

    def wait(self) -> None:
        if self.work is not None:
            self.work.result()

    def result(self) -> np.ndarray:
        self.wait()
        read = self._rows.owner.read
        if self._rows.hosts.num_hosts == 1:
            return read(self._rows.locate(self.ids)[1], self.out)
        if self._first is not None:
            self.out[:] = self.out[self._first]
        self.out[self._here] = read(self._here_rows)
        return self.out


def _distinct(ids: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the places of the first of equal ids of each batch, in their order, and of each id the first equal's.

    The second is None where no id comes twice in a batch. sizes: of the batches; () takes ids as they are.
    """
    first = np.arange(len(ids))
    if not sizes:
        return first, None
    start = 0
    for size in sizes:
        numbers, num = number_distinct(ids[start : start + size])
        if num < size:
            places = np.empty(num, np.int64)
            places[numbers[::-1]] = np.arange(size)[::-1]
            first[start : start + size] = start + places[numbers]
        start += size
    places = np.flatnonzero(first == np.arange(len(ids)))
    return places, None if len(places) == len(ids) else first


class GroupRows:
    """Rows in memory that the processes of a host share, and uneven all-to-alls between ranks; a `RowTransport`.

    Each row is served and stepped by one rank of its host. A thread enters the collectives, so that rows are pulled
    and pushed while the process computes; all ranks enter them in one order, after as many steps.

    A step that pulls ahead is two messages that the next step waits for: gradients of the rows that it reads, and
    these rows, which owners send as soon as they have stepped them. They are not sent with the others before: each row
    travels once. What comes before, ids and the other rows, is sent while the step computes, and the gradients of rows
    that the next step does not read while that one computes.

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
        self._alone, several = len(hosts.host_of_rank) == 1, hosts.num_hosts > 1
        self._asks = not self._alone and (several or not staleness)
        self._pushes: deque[Future] = deque()
        self.received_bytes = 0
        self.owner = RowOwner(table.arrays, optimizer, int(table.counter[0]), watched=several)
        self._away = np.array(hosts.host_of_rank) != hosts.host  # ranks of other hosts
        # What was pulled ahead for the step that begins, and what takes its place.
        self._begun: tuple[GroupPull, GroupPull | None] | None = None
        # Of the thread: what was asked for the step that is under way, and by rank the steps that its rows have seen.
        self._under_way: list[GroupPull] = []
        self._since = np.full(len(hosts.host_of_rank), -1, np.int64)
        self._jobs = None if self._alone else _Jobs()
        self._last: Future | None = None

    def owner_of(self, ids: np.ndarray) -> np.ndarray:
        return self.locate(ids)[0]

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (num,) int64 hosts of rows, and their rows there; see `Ownership.locate`."""
        return self._ownership.locate(ids)

    def pull(
        self, ids: np.ndarray, out: np.ndarray, sizes: Sequence[int] | None = None, ahead: bool = False
    ) -> GroupPull:
        pulled = GroupPull(ids, out, sizes if self.hosts.num_hosts > 1 else None, ahead, self)
        begun, self._begun = self._begun, None
        if self._asks:
            pulled.work = self._do("pulling rows", lambda: self._pull(pulled, begun))
            if begun is not None and begun[1] is not None:
                begun[1].work = pulled.work
        return pulled

    def meet(self) -> None:
        while len(self._pushes) > self._staleness:
            self._pushes.popleft().result()

    def renew(self, pulled: GroupPull, other: tuple[np.ndarray, np.ndarray, Sequence[int]] | None = None) -> GroupPull:
        instead = None if other is None else GroupPull(*other, False, self)
        self._begun = pulled, instead
        return pulled if instead is None else instead

    def push(
        self, ids: np.ndarray, gradients: np.ndarray, is_step: bool = True, coming: GroupPull | None = None
    ) -> None:
        if self._alone:
            self.owner.step([Pushed(self.locate(ids)[1], gradients)])
            self.table.counter[0] = self.owner.clock
            return
        rest: list[Callable[[], None]] = []
        pushed = self._do("pushing gradients", lambda: rest.extend(self._push(ids, gradients, is_step, coming)))
        self._pushes.append(pushed)
        if coming is not None and not self._staleness:
            coming.work = pushed
            self._do("pushing gradients", lambda: [job() for job in rest])

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
        self._begun, self._under_way = None, []
        self.owner = RowOwner(self.table.arrays, self.owner.optimizer, pushes, watched=self.hosts.num_hosts > 1)
        self.table.counter[0] = pushes

    def end(self) -> None:
        if self._jobs is not None:
            self._jobs.end()

    def _do(self, what: str, job: Callable[[], None]) -> Future:
        def clear() -> None:
            with clear_error(what):
                job()

        self._last = self._jobs.do(clear)
        return self._last

    def _pull(self, pulled: GroupPull, begun: tuple[GroupPull, GroupPull | None] | None = None) -> None:
        """Bring rows; where a step has begun, also those that take the place of what a rank had asked for ahead."""
        group, away = self.hosts.group, self._away
        pulled.sort()
        ahead, instead = begun or (None, None)
        told = np.empty((len(away), 3), np.int64)
        told[:, 0], told[:, 1], told[:, 2] = pulled.counts, instead is not None, pulled.counts.sum()
        pulled.wanted, others, asked = _exchange_counts(told, group).T
        pulled.nobody = not asked.any()
        if others.any():
            instead = instead or GroupPull(pulled.ids[:0], pulled.out[:0], (), False, self)
            self._pull(instead)
        if ahead is not None:
            self._under_way.append(ahead)
            self._since = np.where(others, self._since, ahead.since)
        pulled.since = self.owner.clock
        if not pulled.nobody:
            self._serve(pulled)
        if pulled.sizes is not None and not pulled.ahead:
            self._under_way.append(pulled)
            self._since = np.full_like(self._since, pulled.since)

    def _serve(self, pulled: GroupPull) -> None:
        group, away = self.hosts.group, self._away
        pulled.served = _all_to_all(pulled.asked, pulled.counts, pulled.wanted, group)
        rows, leaving = pulled.served[np.repeat(away, pulled.wanted)], pulled.wanted * away
        places, coming = pulled.places, pulled.counts * away
        if pulled.ahead and not self._staleness:
            step = self._under_way
            later = self.owner.among(rows, [one.served for one in step])
            first = [self.owner.among(one.served, [pulled.served]) for one in step]
            pulled.late, *known = _send_flags(
                [later, *first],
                [leaving, *(one.wanted for one in step)],
                [coming, *(one.counts for one in step)],
                group,
            )
            pulled.first = list(zip(known, first, strict=True))
            pulled.later = rows[later], _count(later, leaving)
            rows, leaving = rows[~later], leaving - pulled.later[1]
            places, coming = places[~pulled.late], coming - _count(pulled.late, coming)
        self._bring(pulled, places, rows, leaving, coming)

    def _push(
        self, ids: np.ndarray, gradients: np.ndarray, is_step: bool, coming: GroupPull | None
    ) -> list[Callable[[], None]]:
        """Send gradients, and what they change of the rows that come; return what is left to do."""
        host, rows = self.locate(ids)
        rank, gradients = rank_of_rows(host, rows, self.hosts), np.ascontiguousarray(gradients)
        order = np.argsort(rank, kind="stable")
        counts = np.bincount(rank, minlength=len(self._away)).astype(np.int64)
        since = np.where(self._away & is_step, self._since, -1)
        begun, self._under_way = self._under_way if is_step else [], [] if is_step else self._under_way
        if not begun:
            arriving = _exchange_counts(counts, self.hosts.group)
            self._send(rows[order], gather_rows(gradients, order), counts, arriving, since)
            return []
        # Owners know of so many rows; where a batch had no gradients, of more.
        known, arriving = (sum(getattr(one, name) for one in begun) for name in ("counts", "wanted"))

        def send(chosen: np.ndarray, counts: np.ndarray, known: np.ndarray, arriving: np.ndarray, **options) -> None:
            padded = _padded(rows[chosen], gather_rows(gradients, chosen), counts, known)
            self._send(*padded, known, arriving, since, **options)

        if coming is None or coming.nobody or self._staleness:
            send(order, counts, known, arriving)
            return []
        assert len(coming.first) == len(begun), "rows are pulled ahead when all of the step's are asked for"
        leads = _reads_first(ids[order], begun, [asked for asked, _ in coming.first])
        number = _count(leads, counts)
        asked = sum(_count(flags, one.counts) for (flags, _), one in zip(coming.first, begun, strict=True))
        served = sum(_count(flags, one.wanted) for (_, flags), one in zip(coming.first, begun, strict=True))
        send(order[leads], number, asked, served)
        # A message without rows is waited for, too: the ranks of this host have stepped theirs then.
        coming.since = self.owner.clock
        self._bring(coming, coming.places[coming.late], *coming.later, _count(coming.late, coming.counts * self._away))
        return [lambda: send(order[~leads], counts - number, known - asked, arriving - served, goes_on=True)]

    def _send(
        self,
        rows: np.ndarray,
        gradients: np.ndarray,
        leaving: np.ndarray,
        arriving: np.ndarray,
        since: np.ndarray,
        goes_on: bool = False,
    ) -> None:
        """Send gradients to the ranks that step their rows, and step those that arrive; this rank's are not sent.

        Args:
            rows, gradients: The first rank's first; rows of -1 are none.
            leaving, arriving: (world_size,) how many to and from each rank.
            since: (world_size,) steps that the rows of each rank had seen.
            goes_on: The step has begun with other rows.
        """
        here = self.hosts.rank
        start = int(leaving[:here].sum())
        own = slice(start, start + int(leaving[here]))
        others = np.arange(len(leaving)) != here
        received, values = _send_rows(
            _without(rows, own), _without(gradients, own), leaving * others, arriving * others, self.hosts.group
        )
        self.received_bytes += values.nbytes
        ends = np.cumsum(arriving * others)
        came = [(received[end - num : end], values[end - num : end]) for end, num in zip(ends, arriving, strict=True)]
        came[here] = rows[own], gradients[own]
        pushed = [Pushed(*_present(*one), int(clock)) for one, clock in zip(came, since, strict=True)]
        self.owner.step(pushed, goes_on)
        self.table.counter[0] = self.owner.clock

    def _bring(
        self, pulled: GroupPull, places: np.ndarray, rows: np.ndarray, leaving: np.ndarray, coming: np.ndarray
    ) -> None:
        """Send rows of this rank, and put those that come to some places."""
        _, received = _send_rows(None, self.owner.read(rows), leaving, coming, self.hosts.group)
        pulled.out[places] = received
        self.received_bytes += received.nbytes


def _count(chosen: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return how many are chosen of each rank; chosen: (sum of counts,) bool, the first rank's first."""
    return np.bincount(np.repeat(np.arange(len(counts)), counts)[chosen], minlength=len(counts)).astype(np.int64)


def _reads_first(ids: np.ndarray, begun: list[GroupPull], flags: list[np.ndarray]) -> np.ndarray:
    """Return (num,) bool, which rows of a step have a flag; ids: (num,) of its rows, the first rank's first."""
    asked, flagged = np.concatenate([one.asked_ids for one in begun]), np.concatenate(flags)
    return flagged if np.array_equal(asked, ids) else np.isin(ids, asked[flagged])


def _without(values: np.ndarray, left_out: slice) -> np.ndarray:
    """Return rows without a run of them; no copy where the run is at an end."""
    before, after = values[: left_out.start], values[left_out.stop :]
    return after if not len(before) else before if not len(after) else np.concatenate([before, after])


def _padded(
    rows: np.ndarray, gradients: np.ndarray, counts: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of each rank with their gradients, followed by rows of -1 up to as many as it knows of."""
    if np.array_equal(counts, known):
        return rows, gradients
    ends, starts = np.cumsum(known), np.cumsum(counts) - counts
    places = np.repeat(ends - known - starts, counts) + np.arange(len(rows))
    all_rows, all_gradients = np.full(ends[-1], -1), np.zeros((ends[-1], gradients.shape[1]), gradients.dtype)
    all_rows[places], all_gradients[places] = rows, gradients
    return all_rows, all_gradients


def _present(rows: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    there = rows >= 0
    return (rows, gradients) if there.all() else (rows[there], gradients[there])


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


def _send_flags(
    flags: list[np.ndarray], leaving: list[np.ndarray], coming: list[np.ndarray], group
) -> list[np.ndarray]:
    """Send several arrays of bool in one message to each rank; return those that come.

    Args:
        flags: Arrays, each the first rank's first.
        leaving, coming: By array, (world_size,) flags to and from each rank.
    """
    ranks = np.arange(len(leaving[0]))
    out, back = (np.concatenate([np.repeat(ranks, one) for one in counts]) for counts in (leaving, coming))
    sent = np.concatenate(flags).view(np.uint8)[np.argsort(out, kind="stable")]
    received = np.empty(len(back), bool)
    received[np.argsort(back, kind="stable")] = _all_to_all(sent, sum(leaving), sum(coming), group).view(bool)
    return np.split(received, np.cumsum([one.sum() for one in coming])[:-1])


def _all_to_all(values: np.ndarray, leaving: np.ndarray, coming: np.ndarray, group) -> np.ndarray:
    """Exchange unevenly; leaving, coming: (world_size,) items to and from each rank."""
    received = torch.empty(int(coming.sum()), dtype=torch.from_numpy(values[:0]).dtype)
    sent = torch.from_numpy(np.ascontiguousarray(values))
    dist.all_to_all_single(received, sent, coming.tolist(), leaving.tolist(), group=group)
    return received.numpy()
