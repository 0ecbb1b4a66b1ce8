"""One sweep for all processes of a machine: one of them reads each range for the batches of all, into shared memory.

The batches of all processes at one place of the epoch are a round. The lowest process sweeps, in a thread, for rounds
as a process alone does for batches: each process tells it the nodes of its batches, and which rounds it has trained.
What they tell each other lies on a board in shared memory. Rows, and which slots hold them, are mapped by all.
"""

import fcntl
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from ..errors import GNNScaleError, PlacementError
from ..partition_store.features import DenseFeatures
from ..placement.shared_rows import RowHandle, SharedRows, gather_objects, machine_id
from ..planner.sweep_plan import STEPS_AHEAD
from .row_reads import RowReads
from .row_sweep import RangeRead, RowSweep, SweptRows, ranges_of
from .waiting_batch import WaitingBatch

_log = logging.getLogger("lightning.pytorch.rows")
_ROUNDS_AHEAD = 4  # that a process samples beyond those that the sweep has taken
_RING = 512  # groups and steps that are told of: more than there are marks, and those of a pass
_PAUSES_S = 0.0002, 0.005  # from a look at the board to the next
_PATIENCE_S = 60.0  # until a line says who is waited for
_ALL = np.iinfo(np.int64).max
_WHY_BYTES = 400


def board_dtype(num_processes: int) -> np.dtype:
    """Return the dtype of the board: `open` and `failed` are numbers of sweeps, the rest is of the one that is open.

    Rounds `added` to the sweep, steps `done`, groups told of, descriptor and number of slots. Of each group its first
    step and the end of its rounds; of each step the descriptor of its table, 64s of its nodes, and rows. Of each
    process: the sweeps that it has begun, batches posted, their number at the end (-1: unknown), rounds freed; of each
    batch posted the descriptor of its nodes, their number and bytes each, and bytes that wait.
    """
    process = [(name, "i8") for name in ("begun", "posted", "ended", "freed")]
    process += [("posts", "i8", (_ROUNDS_AHEAD, 4))]
    fields = [(name, "i8") for name in ("open", "failed", "added", "done", "num_groups")]
    fields += [("slots", "i8", 2), ("groups", "i8", (_RING, 2)), ("steps", "i8", (_RING, 3))]
    return np.dtype([*fields, ("processes", process, num_processes), ("why", f"S{_WHY_BYTES}")])


class MachineSweeps:
    """The processes of one machine that sweep together, and the board that they share.

    `with` it, one thread of one process at a time reads and writes the board.

    Args:
        own: What shows to the others that this process lives; of the lowest process the board.
        handles: That of each process, the lowest one's first.
        number: This process among them.

    Attributes:
        sweeps: Sweeps that this process has begun.
        server: That of the last sweep, where this process is the lowest.
        left: Nodes of batches that were told of in a sweep that was left before its end.

    Raises:
        PlacementError, OSError: the board cannot be mapped.
    """

    def __init__(self, own: SharedRows, handles: list[RowHandle], number: int):
        self.handles, self.number, self.sweeps = handles, number, 0
        self.server: _Server | None = None
        self.left: deque[SharedRows] = deque()
        self._own, board = own, handles[0]
        self._board = SharedRows.attach(board, write=True)
        self._state = self._board.array.view(board_dtype(len(handles)))[0, 0]
        self._file = os.open(_place(board), os.O_RDWR)  # of its own: a lock is that of an opened file
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._file)

    @classmethod
    def join(
        cls, reads: RowReads | None, num_processes: int, exchange: Callable[[object], list] = gather_objects
    ) -> "tuple[RowReads, MachineSweeps] | None":
        """Agree with the other processes of this machine on one sweep; a collective of all processes of a run.

        Args:
            reads: How this process would read; None: it has no batches.
            num_processes: Of this machine.
            exchange: Returns the values of all ranks, in their order.

        Returns:
            The reads of the lowest process, and those that share it; None: it does not sweep, or memory cannot be
            shared.
        """
        own = None
        with suppress(PlacementError):  # Linux alone shares memory so
            own = SharedRows.create(1, board_dtype(num_processes).itemsize, np.uint8)
        told = exchange((machine_id(), own and own.handle, reads))
        here = [(handle, one) for machine, handle, one in told if machine == machine_id()]
        first, sweeps, handles = here[0][1], None, [handle for handle, _ in here]
        if first is not None and first.shared_by == num_processes == len(here) and None not in handles:
            with suppress(GNNScaleError, OSError):  # containers may not see each other
                sweeps = cls(own, handles, handles.index(own.handle))
        agreed = [joined for machine, joined in exchange((machine_id(), sweeps is not None)) if machine == machine_id()]
        if not all(agreed):
            return None
        # What is read, and predicted, counts once a machine.
        return (first if sweeps.number == 0 else replace(first, predicted_bytes=None)), sweeps

    def __enter__(self) -> np.void:
        self._lock.acquire()
        try:
            while not self._locked():
                self.pause(_PAUSES_S[0])
        except BaseException:
            self._lock.release()
            raise
        return self._state

    def __exit__(self, *_) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._lock.release()

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def pause(self, seconds: float) -> None:
        """Wait; GNNScaleError: another process has ended."""
        time.sleep(seconds)
        for handle in self.handles:
            if not os.path.lexists(_place(handle)):
                raise GNNScaleError(
                    f"process {handle.pid} has ended, and rows are read for all processes of this machine together: "
                    "see what it said, and go on from the last checkpoint"
                )

    def begin(self, features: DenseFeatures, reads: RowReads) -> "SharedSweep":
        """Begin the next sweep, which all of the processes begin."""
        self.sweeps += 1
        return SharedSweep(self, features, reads)


def _place(handle: RowHandle) -> str:
    return f"/proc/{handle.pid}/fd/{handle.fd}"


class SharedSweep:
    """A process's end of a sweep for all processes of its machine; used by one thread, as a `RowSweep` is.

    Args:
        machine: The processes.
        features, reads: The rows, and what of them is held for all processes.

    Raises:
        GNNScaleError: another process has ended; so do all methods.
    """

    def __init__(self, machine: MachineSweeps, features: DenseFeatures, reads: RowReads):
        self.machine, self.features, self.sweep = machine, features, machine.sweeps
        self._shift, self._num_ranges = ranges_of(features.num_rows)
        self._batches: deque[WaitingBatch] = deque()
        self._posts: deque[SharedRows] = deque()
        self._posted = self._taken = self._group = 0
        self._is_ended = self._is_closed = False
        self._tables: dict[int, RangeRead] = {}
        self._slots = np.empty((0, *features.raw.array.shape[1:]), features.raw.array.dtype)
        self._server: _Server | None = None
        with machine as state:
            state["processes"][machine.number]["begun"] = self.sweep
        if machine.number == 0:
            self._server = machine.server = _Server(machine, features, reads, machine.server)
        try:
            self._until(lambda state: state["open"] == self.sweep)
        except BaseException:
            self.close()
            raise

    @property
    def passes(self) -> float | None:
        """How often the table was gone through; None: another process tells it."""
        return None if self._server is None else self._server.passes

    @property
    def takes_more(self) -> bool:
        """Whether another batch can be added now."""
        return self._look(self._has_place)

    def _has_place(self, state: np.void) -> bool:
        return not self._is_ended and self._posted < state["added"] + _ROUNDS_AHEAD

    def add(self, batch: WaitingBatch) -> None:
        """Tell the nodes of the batch of the next round."""
        nodes = SharedRows.create(1, len(batch.nodes), batch.nodes.dtype)
        nodes.array[0] = batch.nodes
        self._batches.append(batch)
        self._posts.append(nodes)
        place = nodes.handle.fd, len(batch.nodes), batch.nodes.itemsize, batch.nbytes
        with self.machine as state:
            own = state["processes"][self.machine.number]
            own["posts"][self._posted % _ROUNDS_AHEAD] = place
            self._posted += 1
            own["posted"] = self._posted
            while self._posted - len(self._posts) < state["added"]:
                self._posts.popleft()

    def end(self) -> None:
        """Be told that no batch follows."""
        self._is_ended = True
        with self.machine as state:
            state["processes"][self.machine.number]["ended"] = self._posted
        self.free()

    def advance(self) -> None:
        """Do nothing: the sweep goes on by itself."""

    @property
    def is_ready(self) -> bool:
        """Whether the next batch can be handed over."""
        return bool(self._batches) and self._look(self._is_read)

    def _is_read(self, state: np.void) -> bool:
        while self._group < state["num_groups"]:
            entry, end = state["groups"][self._group % _RING]
            if end > self._taken:
                return bool(state["done"] >= entry + self._num_ranges)
            self._group += 1
        return False

    @property
    def is_empty(self) -> bool:
        """Whether no batch of this process waits."""
        return not self._batches

    def wait(self) -> None:
        """Wait until a batch can be added or handed over."""
        self._until(lambda state: self._has_place(state) or self._is_read(state))

    def take(self) -> tuple[WaitingBatch, SweptRows]:
        """Return the next batch and a column with its rows, which serves until the next call."""
        with self.machine as state:
            self._check(state)
            entry = int(state["groups"][self._group % _RING][0])
            steps = range(entry, entry + self._num_ranges)
            new = {step: state["steps"][step % _RING].tolist() for step in steps if step not in self._tables}
            descriptor, num_slots = state["slots"].tolist()
        try:
            self._map(descriptor, num_slots, new)
        except PlacementError:
            self._look(lambda state: True)  # where the sweep was ended, its line
            raise
        for step in [step for step in self._tables if step < entry]:
            del self._tables[step]
        ranges = [None] * self._num_ranges
        for step in steps:
            ranges[step % self._num_ranges] = self._tables[step]
        self._taken += 1
        table = replace(self.features, array=self._slots)
        return self._batches.popleft(), SweptRows(table, ranges, self._shift, self.features.num_rows)

    def _map(self, descriptor: int, num_slots: int, steps: dict[int, list[int]]) -> None:
        """Map the slots, where there are more than were mapped, and tables of steps."""
        pid, shape, dtype = self.machine.handles[0].pid, self._slots.shape[1:], self._slots.dtype
        if num_slots != len(self._slots):
            handle = RowHandle(pid, descriptor, (num_slots, int(np.prod(shape))), dtype.str)
            self._slots = SharedRows.attach(handle, write=True).array.reshape(num_slots, *shape)
        for step, (table, num_words, num_rows) in steps.items():
            handle = RowHandle(pid, table, (1, 3 * num_words + num_rows), "<i4")
            self._tables[step] = _table_of(SharedRows.attach(handle, write=True).array[0], num_words)

    def free(self) -> None:
        """Tell that the rows of all batches that were taken are needed no more."""
        is_done = self._is_ended and not self._batches
        with self.machine as state:
            state["processes"][self.machine.number]["freed"] = _ALL if is_done else self._taken

    def close(self) -> None:
        """Leave the sweep, at its end or before; it goes on for the others."""
        if self._is_closed:
            return
        self._is_closed = True
        if not (self._is_ended and self.is_empty):
            with suppress(GNNScaleError), self.machine as state:
                own = state["processes"][self.machine.number]
                own["ended"], own["freed"] = state["added"], _ALL
            self.machine.left = self._posts  # the sweep may be about to take them
        self._tables, self._posts, self._slots = {}, deque(), self._slots[:0].copy()

    def _look(self, holds: Callable[[np.void], bool]) -> bool:
        with self.machine as state:
            self._check(state)
            return bool(holds(state))

    def _until(self, holds: Callable[[np.void], bool]) -> None:
        pause, begun = _PAUSES_S[0], time.monotonic()
        while not self._look(holds):
            self.machine.pause(pause)
            pause = min(2 * pause, _PAUSES_S[1])
            if time.monotonic() - begun > _PATIENCE_S:
                begun = _ALL
                self._tell_who()

    def _tell_who(self) -> None:
        """Say which processes have not come as far."""
        with self.machine as state:
            late = np.flatnonzero(state["processes"]["begun"] < self.sweep)
        pids = [self.machine.handles[number].pid for number in late]
        if pids:
            _log.warning(
                "Processes %s of this machine have not begun this epoch, in which rows are read together", pids
            )

    def _check(self, state: np.void) -> None:
        if state["failed"] == self.sweep:
            if self._server is not None and self._server.error is not None:
                raise self._server.error
            raise GNNScaleError(state["why"].decode(errors="replace"))


class _Server:
    """The thread that sweeps for all processes of a machine.

    Attributes:
        passes: How often the table was gone through.
        error: What ended it early; None: nothing.
    """

    def __init__(self, machine: MachineSweeps, features: DenseFeatures, reads: RowReads, last: "_Server | None" = None):
        self._machine, self._given, self._sweep_number, self._last = machine, (features, reads), machine.sweeps, last
        self.passes, self.error = 0.0, None
        self._thread = threading.Thread(target=self._run, name="gnnscale-sweep")
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end: all processes are at the end of their epoch, or one is not there."""
        self._thread.join()

    def _run(self) -> None:
        with self._failing():
            self._serve()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell all processes what is raised here, and end with it."""
        try:
            yield
        except Exception as error:
            self.error = error
            with suppress(GNNScaleError), self._machine as state:
                state["why"] = str(error).encode()[:_WHY_BYTES]
                state["failed"] = self._sweep_number

    def _serve(self) -> None:
        machine, number = self._machine, self._sweep_number
        self._until(lambda state: (state["processes"]["begun"] == number).all())
        if self._last is not None:
            self._last.wait()  # all have left its sweep
            self._last = None
        features, reads = self._given
        with machine as state:
            processes = state["processes"]
            processes["posted"], processes["freed"], processes["ended"] = 0, 0, -1
            state["added"] = state["done"] = state["num_groups"] = 0
        sweep = _MachineSweep(features, reads, machine)
        with machine as state:
            state["open"] = number
        with self._failing():  # which is told before its memory is closed
            try:
                self._sweep_all(sweep)
            except PlacementError:  # nodes of a batch are gone with who told of them
                self._check()
                raise
        self.passes = sweep.passes
        sweep.close()

    def _sweep_all(self, sweep: "_MachineSweep") -> None:
        pause = _PAUSES_S[0]
        while True:
            before = sweep.added, sweep.taken, sweep.steps
            sweep.take_freed()
            sweep.add_rounds()
            sweep.advance()
            if sweep.is_left or (sweep.is_empty and sweep.is_ended):
                return
            self.passes = sweep.passes
            if before != (sweep.added, sweep.taken, sweep.steps):
                pause = _PAUSES_S[0]
                continue
            sweep.wait_for(pause)
            self._check()
            pause = min(2 * pause, _PAUSES_S[1])

    def _until(self, holds: Callable[[np.void], bool]) -> None:
        while True:
            with self._machine as state:
                if holds(state):
                    return
            self._check()
            time.sleep(_PAUSES_S[1])

    def _check(self) -> None:
        """Raise where a process is not there any more."""
        self._machine.pause(0)
        if not threading.main_thread().is_alive():
            raise GNNScaleError(
                f"process {os.getpid()} has ended, and rows are read for all processes of this machine together: see "
                "what it said, and go on from the last checkpoint"
            )


class _MachineSweep(RowSweep):
    """A `RowSweep` of rounds, in memory that other processes map.

    Attributes:
        added, taken: Rounds that were added, and that all processes have trained.
        is_ended: Whether no round follows.
        is_left: Whether all processes have left: none waits for what is not read yet.
    """

    def __init__(self, features: DenseFeatures, reads: RowReads, machine: MachineSweeps):
        self._machine, self._shared, self._given = machine, None, deque()
        self.added, self.taken, self.is_left = 0, 0, False
        super().__init__(features, reads.window_bytes, reads.waiting_bytes)

    @property
    def is_ended(self) -> bool:
        """Whether no round follows."""
        return self._is_ended

    def add_rounds(self) -> None:
        """Add the rounds that all processes have told of, as many as can wait."""
        while self.takes_more:
            with self._machine as state:
                processes = state["processes"]
                comes = (processes["ended"] < 0) | (processes["ended"] > self.added)
                if not comes.any():
                    self.end()
                    return
                if (processes["posted"][comes] <= self.added).any():
                    return
                posts = processes["posts"][:, self.added % _ROUNDS_AHEAD].tolist()
            nodes, waiting_bytes = [], 0
            for number in np.flatnonzero(comes):
                descriptor, num_nodes, itemsize, num_bytes = posts[number]
                handle = RowHandle(self._machine.handles[number].pid, descriptor, (1, num_nodes), f"<i{itemsize}")
                nodes.append(SharedRows.attach(handle, write=True).array[0])
                waiting_bytes += num_bytes
            self.add(WaitingBatch(np.concatenate(nodes), 0, {}, waiting_bytes))
            round_ = self._forming.batches.pop()
            self._forming.batches.append(replace(round_, nodes=round_.nodes[:0].copy()))  # they wait where they train
            self.added += 1
            with self._machine as state:
                state["added"] = self.added

    def take_freed(self) -> None:
        """Free what all processes have trained."""
        with self._machine as state:
            freed = int(state["processes"]["freed"].min())
        self.is_left = freed == _ALL
        while self.taken < freed and self.is_ready:
            self.take()
            self.free()
            self.taken += 1
        oldest = self._flight[0].entry if self._flight else self.steps
        while self._given and self._given[0][0] < oldest:
            self._given.popleft()

    def advance(self) -> None:
        """Begin the steps that can be begun, and tell of those that are done."""
        # Where the oldest group is a ring of steps old, it is read, and steps wait until it is trained.
        if not self._flight or self.steps - self._flight[0].entry < _RING - STEPS_AHEAD:
            super().advance()
        else:
            self._settle()
        with self._machine as state:
            state["done"] = self.steps - len(self._under_way)

    def wait_for(self, seconds: float) -> None:
        """Wait for a read, or so long."""
        if self._under_way:
            wait([self._under_way[0]], seconds)
        else:
            time.sleep(seconds)

    def _begin(self, number: int, num_rows: int) -> RangeRead:
        step = self.steps
        read = super()._begin(number, num_rows)
        num_words = len(read.words)
        table = SharedRows.create(1, 3 * num_words + num_rows, np.int32)
        into = _table_of(table.array[0], num_words)
        into.words[:], into.before[:], into.slots[:] = read.words, read.before, read.slots
        self._given.append((step, table))
        with self._machine as state:
            state["steps"][step % _RING] = table.handle.fd, num_words, num_rows
            if self._flight[-1].entry == step:
                at = int(state["num_groups"])
                state["groups"][at % _RING] = step, self.added
                state["num_groups"] = at + 1
        return read

    def _memory(self, num_slots: int) -> np.ndarray:
        array = self.features.raw.array
        if self._shared is None:
            self._shared = SharedRows.create(num_slots, int(np.prod(array.shape[1:])), array.dtype)
        else:
            self._shared.extend(num_slots)
        with self._machine as state:
            state["slots"] = self._shared.handle.fd, num_slots
        return self._shared.array.reshape(num_slots, *array.shape[1:])

    def close(self) -> None:
        """End the reads, and let go of the memory."""
        super().close()
        self._given.clear()
        if self._shared is not None:
            self._shared.release()


def _table_of(array: np.ndarray, num_words: int) -> RangeRead:
    """Return which slots hold the rows of a range, as parts of one (3 * num_words + num_rows,) int32 array."""
    words = array[: 2 * num_words].view(np.uint64)
    return RangeRead(words, array[2 * num_words : 3 * num_words], array[3 * num_words :])
