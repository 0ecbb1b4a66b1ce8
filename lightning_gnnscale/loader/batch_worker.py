"""A worker process that prepares batches: its loop, and its handle in the asking process."""

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import GNNScaleError
from ..partition_store.packed_features import features_of_part
from ..sampler.minibatch import MiniBatch
from ..scratch import keep_sockets
from .batch_maker import BatchMaker, batch_error
from .batch_segments import SegmentHandle, SegmentMaps
from .batch_source import BatchKey
from .shared_value import LINE_BYTES, Handle, pack, unpack

START_METHODS = ("forkserver", "spawn")  # a fork would copy threads' locks, and the pipes of the other workers
_END_LIMIT_S = 5.0


class RowSpan(NamedTuple):
    """Where the dense features of a batch lie in its segment."""

    start: int
    shape: tuple[int, int]
    dtype: np.dtype

    @property
    def stop(self) -> int:
        return self.start + self.shape[0] * self.shape[1] * self.dtype.itemsize

    def of(self, memory: Any) -> np.ndarray:
        """Return them in memory that begins where the segment does."""
        count = self.shape[0] * self.shape[1]
        rows = np.frombuffer(memory, self.dtype, count, self.start) if count else np.empty(0, self.dtype)
        return rows.reshape(self.shape)


class Made(NamedTuple):
    """A batch in its segment, dense features last, and the times of its sampling and of reading its rows."""

    meta: bytes
    spans: list[tuple[int, int]]
    rows: RowSpan | None
    times: list[tuple[str, float, float]]

    def open(self, memory: memoryview) -> MiniBatch:
        """Return the batch in the memory of its segment, which lives as long as its tensors do."""
        batch = unpack(self.meta, self.spans, memory)
        if self.rows is not None:
            batch.x_dense = torch.from_numpy(self.rows.of(memory))
        return batch


class NeedsSpace(NamedTuple):
    """A batch that waits for a segment of num_bytes, or for None: it is no longer wanted."""

    num_bytes: int


class Failed(NamedTuple):
    """The error of a batch."""

    message: str


class WorkerProcess:
    """A started worker, seen from the asking process; it ends with that process, however that ends.

    Args:
        maker: handle of a `BatchMaker`.
        start_method: "forkserver" (a start takes tens of milliseconds after the first) or "spawn".

    Attributes:
        pid: its process id.
        is_fresh: it has not answered a request yet.

    Raises:
        OSError, AssertionError, RuntimeError: it cannot be started.
    """

    def __init__(self, maker: Handle, start_method: str):
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload([__name__])
            keep_sockets()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, maker), name="gnnscale-batch", daemon=True)
        try:
            self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self.pid, self.is_fresh = self._process.pid, True

    def wait_started(self, limit_s: float) -> None:
        """Wait until it has opened its maker.

        Raises:
            GNNScaleError: it could not, or did not answer within limit_s seconds.
            OSError, EOFError: it ended.
        """
        if not self._connection.poll(limit_s):
            raise GNNScaleError(f"it did not answer within {limit_s:g} s")
        answer = self._connection.recv()
        if isinstance(answer, Failed):
            raise GNNScaleError(answer.message)

    def ask(self, message: Any) -> Made | NeedsSpace | Failed:
        """Send a request and return the answer.

        Raises:
            OSError, EOFError: the process ended.
        """
        self._connection.send(message)
        answer = self._connection.recv()
        self.is_fresh = False
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process at once: it holds nothing that could be lost; may be called from any thread."""
        self._process.kill()

    def join(self) -> str:
        """Release an ending process, and return how it ended."""
        self._process.join(_END_LIMIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        self._connection.close()
        self._process.close()
        if code is None or code >= 0:
            return f"exit code {code}"
        return f"signal {-code} ({signal.Signals(-code).name})"


def serve(connection: Connection, maker_handle: Handle) -> None:
    """Prepare batches until the other end closes; what a worker process runs.

    Args:
        connection: Connection on which requests arrive as (BatchKey, Handle of the staged part, SegmentHandle or None).
        maker_handle: Handle of a `BatchMaker`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asking process decides
    torch.set_num_threads(1)
    try:
        maker = maker_handle.open()
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        return
    connection.send("started")
    parts: dict[int, Any] = {}
    maps = SegmentMaps()
    try:
        while True:
            key, part, segment = connection.recv()
            connection.send(_make(connection, maker, parts, maps, key, part, segment))
    except (EOFError, ConnectionError):
        return


def _make(
    connection: Connection,
    maker: BatchMaker,
    parts: dict[int, Any],
    maps: SegmentMaps,
    key: BatchKey,
    part: Handle,
    segment: SegmentHandle | None,
) -> Made | Failed:
    features = maker.table
    dense = features is not None and not (features.is_sparse or features.by_node_type)
    begin = time.perf_counter()  # one clock for all processes of a machine
    try:
        batch = maker.make(key, lambda: _opened(parts, part, maker.order.parts_open), fill=not dense)
        packed = pack(batch)
    except Exception as error:
        return Failed(str(error))
    times = [("sample", begin, time.perf_counter())]
    rows, num_bytes = None, packed.num_bytes
    if dense:
        start = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        rows = RowSpan(start, (len(batch.n_id), features.dim), np.dtype(features.dtype))
        num_bytes = rows.stop
    if segment is None or segment.capacity < num_bytes:
        connection.send(NeedsSpace(num_bytes))
        segment = connection.recv()
    if segment is not None:
        memory = maps.memory(segment)
        packed.copy_to(memory)
        begin = time.perf_counter()
        try:
            if rows is not None:
                features_of_part(features, batch.part).read(batch.n_id.numpy(), rows.of(memory))
        except Exception as error:
            return Failed(str(batch_error(key, f"{type(error).__name__}: {error}")))
        times.append(("read", begin, time.perf_counter()))
    return Made(packed.meta, packed.spans, rows, times)


def _opened(parts: dict[int, Any], handle: Handle, capacity: int):
    """Return a staged part; the latest ones stay mapped."""
    staged = parts.pop(handle.number, None)
    while len(parts) >= capacity:
        del parts[next(iter(parts))]
    if staged is None:
        staged = handle.open()
    parts[handle.number] = staged
    return staged
