"""The end of the preparation layer that a trainer's rank holds: a `BatchSource` over the hub of its node."""

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import GNNScaleError
from ..events import record
from ..loader.batch_builder import BatchMaker, batch_error
from ..loader.batch_source import BatchKey
from ..loader.local_source import THREAD_NAME, stop
from ..loader.source_settings import RankPlace
from ..loader.staged_part import StagedPart
from ..partition_store.features import as_stored
from ..sampler.minibatch import MiniBatch
from .batch_group import unpack_one
from .cluster import Meeting, import_ray, one_line
from .hub_link import Link, setup_of
from .messages import Answer, GroupPayload

if TYPE_CHECKING:
    from .settings import RayWorkers

_sources = itertools.count()


class RaySource:
    """A `BatchSource` of Ray actors: workers make batches; a trainer node's hub requests them for all its ranks.

    The graph is not in this process. In an epoch each part belongs to one worker, dealt at random, and is read once. A
    batch arrives without its features, together with those rows of its group that are not cached. A thread of this
    process assembles it in memory of the maker's pool. Batches equal those of other sources bit for bit. If a worker
    ends, other workers make the batches it had under way, and Ray restarts it. If a trainer takes no batches,
    preparation stops once the credits are used up.

    Args:
        stage: Maps a part id to its `StagedPart`. Stage and maker must be picklable; the workers unpickle them.
        maker: Makes the batches.
        settings, meeting, place: See `RayWorkers.connect`.

    Attributes:
        bytes_received, row_bytes, num_batches, num_groups: What this rank has received so far: bytes in all, bytes of
            feature rows, batches and groups. A group counts for the rank that took its first batch.

    Cost: starting the source starts processes that import torch, which takes some seconds on a few cores. A batch costs
        two small messages and one copy of its arrays.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: BatchMaker,
        settings: "RayWorkers",
        meeting: Meeting | None = None,
        place: RankPlace | None = None,
    ):
        self._settings, self._place = settings, place or RankPlace()
        meeting = meeting or Meeting(f"{os.getpid()}-{next(_sources)}")
        self._stage, self._maker, self._code = stage, maker, None
        if maker.gathers:  # rows of codes travel as they are stored, and are decoded where the batch is put together
            builder = copy(maker.builder)
            builder.features, self._code = as_stored(builder.features)
            self._maker = replace(maker, builder=builder)
        self._link = Link(self._settings, meeting, self._place)
        self._end: Callable[[], None] | None = None
        self._unsent: list[BatchKey] = []
        self._pending: deque[tuple[BatchKey, Future | None]] = deque()
        self._unpacker: ThreadPoolExecutor | None = None
        self._taken = self._told = self._iteration = 0
        self._last: tuple[Any, Any] = (None, None)
        self.bytes_received = self.row_bytes = self.num_batches = self.num_groups = 0
        self.rows_asked = self.rows_received = 0

    def begin(self) -> None:
        """Connect to the hub of this node, and start what is not there.

        Raises:
            GNNScaleError: Ray or the workers cannot be started.
        """
        if self._end is not None:
            return
        end = weakref.finalize(self, self._link.close)
        self._iteration = 0
        try:
            self._link.open(setup_of(self._stage, self._maker, self._settings))
        except BaseException:
            end()
            raise
        self._end = end

    def request(self, key: BatchKey) -> None:
        """Note a batch that is wanted; the hub hears of it in `ready`.

        Raises:
            GNNScaleError: see `begin`.
        """
        self.begin()
        self._unsent.append(key)

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`."""
        self._send()
        if not self._pending:
            raise ValueError("no batch is requested: call request(key) before ready()")
        key, future = self._pending.popleft()
        if self._told < self._taken and not future.done():
            self._told = self._taken
            self._link.tell("took", self._iteration, self._taken)
        self._taken += 1
        batch = future.result()
        if batch is None:
            raise batch_error(key, "the hub of this node no longer knows it: resume from the last checkpoint")
        self.num_batches += 1
        return key, batch

    def expect_part(self, part: int) -> None:
        """Have the part's worker read it, unless its memory is capped."""
        if self._pending and self._end is not None:
            self._link.tell("expect", part, self._pending[-1][0])

    def forget(self) -> None:
        """Drop what was requested and not taken; the workers stay."""
        self._unsent.clear()
        unpacker, self._unpacker = self._unpacker, None
        if unpacker is not None:
            self._link.ask("forget")
            self._iteration += 1
            stop(unpacker)
            self._report()
        self._pending.clear()
        self._taken = self._told = 0
        self._last = (None, None)

    def close(self) -> None:
        """Forget, and end what this rank started; a request starts anew."""
        self.forget()
        if self._end is not None:
            self._end()
            self._end = None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that answer now."""
        return self.report().get("pids", [])

    def report(self) -> dict:
        """Return what the hub counts: rows and bytes sent, reads of parts by each worker, credits held."""
        return (self._link.ask("report", named=False) or {}) if self._end is not None else {}

    def _send(self) -> None:
        if not self._unsent:
            return
        if self._unpacker is None:
            self._unpacker = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-ray")
        first, taken = self._taken + len(self._pending), self._taken
        self._told = taken
        for place, key in enumerate(self._unsent, first):
            answer = self._link.tell("take", self._iteration, place, first, self._unsent, taken)
            self._pending.append((key, self._unpacker.submit(self._unpack, key, self._iteration, place, answer)))
        self._unsent = []

    def _unpack(self, key: BatchKey, iteration: int, place: int, answer) -> MiniBatch | None:
        """Return the batch of an answer, in memory of this process."""
        ray = import_ray()
        for _ in range(3):
            found: Answer | None = self._link.wait(answer)
            if found is None:
                return None
            for notice in found.notices:
                record(**notice)
            if found.error is not None:
                raise GNNScaleError(found.error)
            try:
                payload = self._payload(found.payload[0])
            except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError):
                answer = self._link.tell("again", iteration, place)
                continue
            except ray.exceptions.GetTimeoutError:
                raise batch_error(
                    key, f"it did not arrive from its worker within timeout_s={self._settings.timeout_s:g} s: is its "
                    "machine reachable? Raise source.timeout_s where it is slow, or resume from the last checkpoint"
                ) from None  # fmt: skip
            except ray.exceptions.RayError as error:
                raise batch_error(
                    key, f"{one_line(error)}: source.store_bytes={self._settings.store_bytes} caps what lies ready"
                ) from None
            self._count(found.header)
            return unpack_one(payload.group, found.number, payload.rows, self._maker.builder.pool.take, self._code)
        raise batch_error(key, "it was lost three times on its way from the worker: is a machine of the cluster full?")

    def _payload(self, ref) -> GroupPayload:
        if isinstance(ref, GroupPayload):
            return ref
        if self._last[0] != ref:
            self._last = (ref, import_ray().get(ref, timeout=self._settings.timeout_s))
        return self._last[1]

    def _count(self, header) -> None:
        if header is not None:
            self.num_groups += 1
            self.bytes_received += header.row_bytes + header.group_bytes
            self.row_bytes += header.row_bytes
            self.rows_asked += header.num_union
            self.rows_received += header.rows_sent

    def _report(self) -> None:
        names = ("num_batches", "num_groups", "bytes_received", "row_bytes", "rows_asked", "rows_received")
        record("preparation", rank=self._place.rank, **{name: getattr(self, name) for name in names})
