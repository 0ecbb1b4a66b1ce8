"""A worker process that prepares batches: its own loop, and the end that the asking process holds."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ..errors import GNNScaleError
from .batch_segments import SegmentTicket
from .batch_source import BatchKey
from .shared_value import Ticket, pack

START_METHODS = ("forkserver", "spawn")  # a fork would copy threads' locks, and the pipes of the other workers
START_LIMIT_S = 120.0
_END_LIMIT_S = 5.0


class Made(NamedTuple):
    """A batch that lies in its segment."""

    meta: bytes
    spans: list[tuple[int, int]]


class NeedsRoom(NamedTuple):
    """A batch that waits for a segment of num_bytes, or for None: it is not wanted any more."""

    num_bytes: int


class Failed(NamedTuple):
    """What went wrong."""

    message: str


class WorkerProcess:
    """A started worker, from the side of the process that asks; it ends with that process, however that ends.

    Args:
        maker: ticket of a `BatchMaker`.
        start_method: "forkserver" (a start takes tens of milliseconds after the first) or "spawn".

    Raises:
        OSError, AssertionError, RuntimeError: it cannot be started.
    """

    def __init__(self, maker: Ticket, start_method: str):
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, maker), name="gnnscale-batch", daemon=True)
        try:
            self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    def wait_started(self) -> None:
        """Wait until it has opened its maker.

        Raises:
            GNNScaleError: it could not.
            OSError, EOFError: it ended.
        """
        if not self._connection.poll(START_LIMIT_S):
            raise EOFError(f"it did not answer within {START_LIMIT_S:.0f} s")
        answer = self._connection.recv()
        if isinstance(answer, Failed):
            raise GNNScaleError(answer.message)

    def ask(self, message: Any) -> Made | NeedsRoom | Failed:
        """Send a request and return the answer.

        Raises:
            OSError, EOFError: the process ended.
        """
        self._connection.send(message)
        return self._connection.recv()

    def tell(self, message: Any) -> None:
        """Send what has no answer."""
        self._connection.send(message)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process at once: it holds nothing that could be lost; may be called from any thread."""
        self._process.kill()

    def join(self) -> str:
        """Let go of a process that ends, and return how it ended."""
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


def serve(connection: Connection, maker_ticket: Ticket) -> None:
    """Prepare batches until the other end closes; what a worker process runs.

    Args:
        connection: requests come as (BatchKey, Ticket of the staged part, SegmentTicket or None).
        maker_ticket: of a `BatchMaker`.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asking process decides
    torch.set_num_threads(1)
    try:
        maker = maker_ticket.open()
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        return
    connection.send("started")
    parts: dict[int, Any] = {}
    try:
        while True:
            key, part, segment = connection.recv()
            connection.send(_make(connection, maker, parts, key, part, segment))
    except (EOFError, ConnectionError):
        return


def _make(connection: Connection, maker, parts: dict[int, Any], key: BatchKey, part: Ticket, segment):
    try:
        packed = pack(maker.make(key, lambda: _opened(parts, part, maker.parts_open)))
    except Exception as error:
        return Failed(str(error))
    if segment is None or segment.capacity < packed.num_bytes:
        connection.send(NeedsRoom(packed.num_bytes))
        segment = connection.recv()
    if segment is not None:
        _write(packed, segment)
    return Made(packed.meta, packed.spans)


def _opened(parts: dict[int, Any], ticket: Ticket, capacity: int):
    """Return a staged part; the latest ones stay mapped."""
    staged = parts.pop(ticket.number, None)
    while len(parts) >= capacity:
        del parts[next(iter(parts))]
    if staged is None:
        staged = ticket.open()
    parts[ticket.number] = staged
    return staged


def _write(packed, segment: SegmentTicket) -> None:
    try:
        fd = segment.open()
    except OSError as error:
        raise EOFError("the asking process has ended") from error
    try:
        packed.write(fd)
    finally:
        os.close(fd)
