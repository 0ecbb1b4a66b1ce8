"""A trainer's view of a table whose rows are in Ray's actors: requests by owner, pushes that nobody waits for."""

import os
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from ..embedding.row_exchange import Hosts
from ..embedding.shared_table import SharedColumn
from ..errors import GNNScaleError, clear_error
from .cluster import check_answers, import_ray, join_ray, leave_ray, one_line, worker_handle
from .shard_keeper import STORE_BYTES, ShardKeeper, ShardSpec, note_use

BLOCK_BYTES = 8 << 20  # most bytes of rows in one request
BLOCKS_AHEAD = 2  # requests that are under way while another's rows are copied
_RETRY_S = 0.002
MOST_TOLD = 160  # characters of Ray's own message

_forked_with_ray = False  # this process has its parent's connection, which is dead


class ShardHandle(NamedTuple):
    """What another process needs to reach the rows.

    Attributes:
        spec: Description of the shards, without the initial values.
        address: Address of Ray.
    """

    spec: ShardSpec
    address: str


class ShardPull:
    """Rows that a `ShardTable` was asked for.

    Attributes:
        ids, out: As asked for.
        is_empty: They are none.
        of_shard: (shard, places in ids, rows of the shard) of every shard that has some.
        since: By shard, the steps that its rows have seen.
        left: (shard, places in ids, answer) that have not been copied.
    """

    def __init__(self, table: "ShardTable", ids: np.ndarray, out: np.ndarray):
        self.ids, self.out, self.is_empty, self._table = ids, out, not len(ids), table
        self.of_shard = [one for one in table.by_owner(ids) if len(one[1])]
        self.since: dict[int, int] = {}
        self.left: list[tuple[int, np.ndarray, Any]] = []

    def wait(self) -> None:
        self.result()

    def result(self) -> np.ndarray:
        left, self.left = self.left, []
        for shard, places, answer in left:
            clock, *chosen, values = self._table.answer(shard, answer)
            self.out[places[chosen[0]] if chosen else places] = values
            self.since[shard] = clock
            self._table.received_bytes += values.nbytes
        return self.out


class ShardTable:
    """Rows in the memory of workers: replaces a `SharedTable`, and is a `RowTransport`.

    A process connects with its first call. Rows of a worker that ended are lost, and every later call says so.

    Args:
        handle: Handle of the rows.
        pushes_under_way: Largest number of pushes that this process leaves unfinished.
        staleness: See `RowTransport`.
        keeper: Process that keeps the shards; given only in the process that made them.

    Attributes:
        token: Token that identifies these rows.
        arrays: Maps a name to its `RemoteColumn`.
        counter: Number of pushes so far, read as `counter[0]`.
    """

    together = False

    def __init__(
        self, handle: ShardHandle, pushes_under_way: int, staleness: int = 0, keeper: ShardKeeper | None = None
    ):
        spec = handle.spec
        self.handle, self.token, self._keeper = handle, spec.token, keeper
        self._ownership, self._limit, self._staleness = spec.ownership, pushes_under_way, staleness
        self._hosts, self._due, self.received_bytes = Hosts.alone(), 0, 0
        self._step: ShardPull | None = None  # the rows of the step that is under way
        self.arrays = {name: RemoteColumn(self, name, column) for name, column in spec.columns.items()}
        self.counter = RemoteCounter(self)
        self._actors: list[Any] = []
        self._under_way: deque[list[tuple[int, Any]]] = deque()
        self._user = 0  # process id of the one that connected
        self._left: Callable[[], None] = lambda: None
        self._ended = weakref.finalize(self, _end, keeper, os.getpid()) if keeper else lambda: None

    @classmethod
    def start(cls, spec: ShardSpec, pushes_under_way: int, staleness: int) -> "ShardTable":
        """Make the rows.

        Raises:
            GNNScaleError: Ray is not installed, does not answer, or the shards do not start.
        """
        try:
            ray = import_ray()
        except GNNScaleError as error:
            raise GNNScaleError(str(error).replace("source=ray", "WorkerEmbedding")) from None
        if ray.is_initialized() and spec.address is None:  # this process can only use one
            spec = spec._replace(address=ray.get_runtime_context().gcs_address)
        elif spec.address is None:
            spec = spec._replace(notes=tempfile.mkdtemp(prefix="gnnscale-rows-"))
        elif spec.address != "auto":
            check_answers(spec.address, spec.timeout_s)
        keeper = ShardKeeper(spec)
        small = spec._replace(initial=spec.initial._replace(node_keys=None))
        return cls(ShardHandle(small, keeper.address), pushes_under_way, staleness, keeper)

    def share(self, hosts: Hosts) -> None:
        """Step the rows with the other ranks; every rank calls it, and none has a step under way."""
        self._hosts = hosts
        if hosts.rank == 0:
            self.count(self.count())
        self._wait_for_ranks()
        self._due = self.count()
        self._wait_for_ranks()

    def owner_of(self, ids: np.ndarray) -> np.ndarray:
        return self._ownership.locate(ids)[0]

    def pull(self, ids: np.ndarray, out: np.ndarray, sizes: Any = None, ahead: bool = False) -> ShardPull:
        actors, pulled = self.connect(), ShardPull(self, ids, out)
        self._step = self._step if ahead or sizes is None else pulled
        pulled.left = [(shard, places, actors[shard].read.remote(rows)) for shard, places, rows in pulled.of_shard]
        return pulled

    def meet(self) -> None:
        self._finish(self._limit)
        if self._hosts.group is None:
            return  # workers answer in the order in which this process asks
        self._finish(self._staleness)
        if self._staleness == 0:
            self._wait_for_ranks()
        limit = time.monotonic() + self.handle.spec.timeout_s
        while self._staleness and self.count(least=True) < self._due - self._staleness:
            if time.monotonic() > limit:
                raise GNNScaleError(
                    f"another rank has not pushed to the rows of WorkerEmbedding within {self.handle.spec.timeout_s:g} "
                    "s: look for its own error above, or raise timeout_s where it is slow"
                )
            time.sleep(_RETRY_S)

    def renew(self, pulled: ShardPull, other: None = None) -> ShardPull:
        pulled.result()
        self._step, actors = pulled, self.connect()
        for shard, places, rows in pulled.of_shard:
            if not self._staleness or pulled.since[shard] < self._due - self._staleness:
                pulled.left.append((shard, places, actors[shard].changed.remote(rows, pulled.since[shard])))
        return pulled

    def fill(self, ids: np.ndarray, out: np.ndarray, name: str = "rows") -> np.ndarray:
        """Fill `out` with the rows of some ids, in requests of bounded size.

        Args:
            ids: (num,) int64.
            out: (num, width) of the array's dtype, filled in place.
            name: Name of the array.
        """
        actors, waiting = self.connect(), deque()
        for start, stop in _blocks(len(ids), out):
            asked = [
                (shard, start + places, actors[shard].pull.remote(name, rows))
                for shard, places, rows in self.by_owner(ids[start:stop])
                if len(rows)
            ]
            waiting.append(asked)
            if len(waiting) > BLOCKS_AHEAD:
                self._copy(waiting.popleft(), out)
        for asked in waiting:
            self._copy(asked, out)
        return out

    def push(self, ids: np.ndarray, gradients: np.ndarray, is_step: bool = True, coming: Any = None) -> None:
        """Send gradients to the owners of their rows, without waiting; every owner is told of every step."""
        actors, rank, num_ranks = self.connect(), self._hosts.rank, len(self._hosts.host_of_rank)
        since = self._step.since if is_step and self._step is not None else {}
        self._due += 1
        self._under_way.append([
            (shard, actors[shard].push.remote(rows, gradients[places], rank, num_ranks, since.get(shard, -1)))
            for shard, places, rows in self.by_owner(ids)
        ])  # fmt: skip
        self._finish(self._limit)

    def settle(self) -> None:
        if self._user == os.getpid():
            self._finish(0)

    def told(self) -> tuple[int, int]:
        if self._hosts.rank != 0:
            return 0, 0
        told = self._wait([(shard, actor.told.remote()) for shard, actor in enumerate(self.connect())])
        return sum(rows for rows, _ in told), max(age for _, age in told)

    def restart(self, pushes: int) -> None:
        self.settle()
        self._due = self.count(pushes)

    def end(self) -> None:
        """Do nothing: `close` lets go of the rows."""

    def write(self, name: str, ids: np.ndarray, values: np.ndarray) -> None:
        """Set rows of an array; values: (num, width)."""
        actors = self.connect()
        for start, stop in _blocks(len(ids), values):
            owned = self.by_owner(ids[start:stop])
            block = np.asarray(values[start:stop])
            self._wait([(shard, actors[shard].write.remote(name, rows, block[at])) for shard, at, rows in owned])

    def count(self, pushes: int | None = None, least: bool = False) -> int:
        """Return how many steps there were, after setting it where a number is given; least: of the last worker."""
        asked = [(shard, actor.pushes.remote(pushes)) for shard, actor in enumerate(self.connect())]
        return (min if least else max)(self._wait(asked))

    def close(self) -> None:
        """Release the rows; in the process that made them, they are freed."""
        self._actors = []
        self._under_way.clear()
        self._left()
        self._ended()

    def connect(self) -> list:
        """Return the actors, after this process was connected to Ray, which its source then uses too.

        Raises:
            GNNScaleError: Ray does not answer, is another one than this process uses, or a worker has ended.
        """
        if self._user == os.getpid():
            return self._actors
        if _forked_with_ray:
            raise GNNScaleError(
                "the process that this one was forked from used Ray, which does not survive a fork: use start_method "
                '"spawn" or "popen", or leave Ray and these rows alone before the ranks start'
            )
        address = self.handle.address
        found = join_ray(address, self.handle.spec.timeout_s, STORE_BYTES)
        if found != address:
            leave_ray()
            raise GNNScaleError(
                f"the rows are in the Ray at {address}, but this process uses that at {found}: give the source and the "
                "inputs the same address"
            )
        self._user, note = os.getpid(), note_use(self.handle.spec.notes)
        self._left = weakref.finalize(self, _leave, note, os.getpid())
        names = map(self.handle.spec.name, range(self.handle.spec.num_shards))
        try:
            self._actors = [worker_handle(name) for name in names]
        except ValueError:
            self._user = 0
            self._left()
            raise self._lost("a worker", "it is not there") from None
        return self._actors

    def by_owner(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (shard, places in ids, rows of the shard) of every shard."""
        owner, rows = self._ownership.locate(ids)
        num_shards = self._ownership.num_hosts
        order = np.argsort(owner, kind="stable")
        ends = np.cumsum(np.bincount(owner, minlength=num_shards))
        for shard, places in enumerate(np.split(order, ends[:-1])):
            yield shard, places, rows[places]

    def _copy(self, asked: list[tuple[int, np.ndarray, Any]], out: np.ndarray) -> None:
        for shard, places, ref in asked:
            out[places] = self.answer(shard, ref)

    def _finish(self, most: int) -> None:
        """Wait until at most so many pushes are under way."""
        while len(self._under_way) > most:
            self._wait(self._under_way.popleft())

    def _wait_for_ranks(self) -> None:
        if self._hosts.group is not None:
            with clear_error("pushing gradients"):
                dist.barrier(self._hosts.group)

    def _wait(self, asked: list[tuple[int, Any]]) -> list:
        return [self.answer(shard, ref) for shard, ref in asked]

    def answer(self, shard: int, ref: Any) -> Any:
        """Return what a worker answers; GNNScaleError: it has ended, or is silent."""
        ray, limit_s = import_ray(), self.handle.spec.timeout_s
        try:
            return ray.get(ref, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise GNNScaleError(
                f"worker {shard} of {self._ownership.num_hosts} that own rows did not answer within {limit_s:g} s: is "
                "its machine reachable? Raise timeout_s where it is slow, or resume from the last checkpoint"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise GNNScaleError(f"worker {shard} could not do it: {one_line(error)}") from None
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise self._lost(f"worker {shard} of {self._ownership.num_hosts}", one_line(error)) from None

    def _lost(self, who: str, how: str) -> GNNScaleError:
        return GNNScaleError(
            f"{who} that owned rows of WorkerEmbedding has ended or is out of reach, and its rows are lost to this run "
            f"({how[:MOST_TOLD]}): start again from the last checkpoint"
        )


class RemoteColumn:
    """One array of a `ShardTable`, read and written by slices of ids.

    Attributes:
        shape, dtype: Shape and dtype of the whole array.
    """

    def __init__(self, table: ShardTable, name: str, column: SharedColumn):
        self._table, self._name = weakref.proxy(table), name
        self.shape, self.dtype = (table._ownership.num_nodes, column.width), np.dtype(column.dtype)

    def __getitem__(self, ids: slice) -> np.ndarray:
        chosen = np.arange(*ids.indices(self.shape[0]))
        return self._table.fill(chosen, np.empty((len(chosen), self.shape[1]), self.dtype), self._name)

    def __setitem__(self, ids: slice, values: np.ndarray) -> None:
        self._table.write(self._name, np.arange(*ids.indices(self.shape[0])), values)


class RemoteCounter:
    """The pushes of a `ShardTable`, as an array of one number."""

    def __init__(self, table: ShardTable):
        self._table = weakref.proxy(table)

    def __getitem__(self, place: int) -> int:
        return self._table.count()

    def __setitem__(self, place: int, pushes: int) -> None:
        self._table.count(int(pushes))


def _after_fork() -> None:
    global _forked_with_ray
    ray = sys.modules.get("ray")
    _forked_with_ray = ray is not None and ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def _blocks(num_rows: int, values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of requests of bounded size."""
    size = max(1, BLOCK_BYTES // max(1, values.dtype.itemsize * values.shape[1]))
    for start in range(0, num_rows, size):
        yield start, min(start + size, num_rows)


def _leave(note, user: int) -> None:
    if os.getpid() == user and not sys.is_finalizing():
        leave_ray()
        if note is not None:
            note.unlink(missing_ok=True)


def _end(keeper: ShardKeeper, owner: int) -> None:
    if os.getpid() == owner:
        keeper.end()
