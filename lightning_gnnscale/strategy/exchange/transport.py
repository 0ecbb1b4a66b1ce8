"""The one place where buffers are handed to the process group, and where their bytes are counted."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import averaging

FORWARD, BACKWARD, STATIC, EVALUATION = "forward", "backward", "static", "evaluation"


class Ledger:
    """The cost of exchanging since the last `clear`, counted from the buffers that were sent, never estimated.

    Attributes:
        bytes: Maps (layer, direction) to the bytes that this rank sent to others. Directions are FORWARD, BACKWARD,
            STATIC (input that is exchanged once) and EVALUATION.
        sent_rows, skipped_rows: Map a layer to the rows of this rank's boundary that were sent forward, and to those
            that were left as they were.
        broadcasts, skipped_broadcasts: Map a layer to the training steps in which this rank sent rows, and to those in
            which it sent none.
        seconds: Time spent in exchanging since `begin_step`: writing and reading messages, and waiting. On CUDA it is
            the time that the process waits, not what the device does meanwhile.
        wait_seconds: The part of `seconds` that was spent waiting.
        evaluation_seconds: Time spent in exchanging before `begin_step`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.bytes: Counter = Counter()
        self.sent_rows: Counter = Counter()
        self.skipped_rows: Counter = Counter()
        self.broadcasts: Counter = Counter()
        self.skipped_broadcasts: Counter = Counter()
        self.seconds = self.wait_seconds = self.evaluation_seconds = 0.0

    def begin_step(self) -> None:
        """Begin a training step: what was spent until now went into evaluation."""
        self.evaluation_seconds += self.seconds
        self.seconds = self.wait_seconds = 0.0

    @contextmanager
    def timed(self, waiting: bool = False) -> Iterator[None]:
        """Add the time of the block; blocks do not nest."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.wait_seconds += seconds if waiting else 0.0


class Begun(NamedTuple):
    """A collective that has been begun: the (num_bytes,) uint8 that it fills, the bytes from each rank, its work."""

    buffer: Tensor
    sizes: list[int]
    work: dist.Work | None


class Message:
    """Bytes on their way to this rank.

    Args:
        begun: what brings them, or the future of it: ranks still agree on sizes.
        ledger: waiting is added to it.
    """

    def __init__(self, begun: Begun | Future[Begun], ledger: Ledger):
        self._begun, self._ledger = begun, ledger

    def wait(self) -> tuple[Tensor, list[int]]:
        """Return the (num_bytes,) uint8 once they are there, and how many came from each rank.

        Raises:
            StrategyError: another process was lost.
        """
        with self._ledger.timed(waiting=True), averaging.clear_error("exchanging rows"):
            begun = self._begun if isinstance(self._begun, Begun) else self._begun.result()
            if begun.work is not None:
                begun.work.wait()
        return begun.buffer, begun.sizes


class Transport:
    """Send bytes between all processes, in buffers that are kept for the next message.

    One message at a time: every rank waits for one before it starts the next.

    Args:
        ledger: Ledger that bytes and seconds are added to.
        device: Device of the buffers.
    """

    def __init__(self, ledger: Ledger, device: torch.device):
        self.ledger, self.device = ledger, device
        self._buffers: dict[tuple, Tensor] = {}
        self._agreeing = ThreadPoolExecutor(1, "exchange")  # starts its thread when it is first used

    def start(
        self, payload: Tensor, sizes: Sequence[int], arriving: Sequence[int] | None, layer: int, direction: str
    ) -> Message:
        """Start to send bytes to every rank; every rank calls it.

        Args:
            payload: (sum(sizes),) uint8, for rank 0, then rank 1, ...; it must stay as it is until `wait` returns.
            sizes: bytes for each rank, own entry 0.
            arriving: bytes from each rank; None: only the sender knows, so that ranks tell each other first. That is
                waited for by a thread, so that whoever calls can work meanwhile; on CUDA by the caller.
            layer, direction: where the bytes are counted.
        """
        if averaging.world_size() == 1:
            arriving = sizes if arriving is None else arriving
            return Message(Begun(self.buffer((layer, direction), sum(arriving)), list(arriving), None), self.ledger)
        if arriving is None and self.device.type == "cpu":
            # The thread sees what its caller's context holds.
            agree = copy_context().run
            return Message(
                self._agreeing.submit(agree, self._agree_and_begin, payload, sizes, layer, direction), self.ledger
            )
        with averaging.clear_error("exchanging rows"):
            if arriving is None:
                with self.ledger.timed(waiting=True):
                    begun = self._agree_and_begin(payload, sizes, layer, direction)
            else:
                begun = self._begin(payload, sizes, arriving, layer, direction)
        return Message(begun, self.ledger)

    def buffer(self, name: tuple, num_bytes: int) -> Tensor:
        """Return a (num_bytes,) uint8 buffer, the same memory for the same name as long as it is large enough."""
        kept = self._buffers.get(name)
        if kept is None or len(kept) < num_bytes:
            kept = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return kept[:num_bytes]

    def close(self) -> None:
        """Let the thread end."""
        self._agreeing.shutdown(wait=False)

    def _agree_and_begin(self, payload: Tensor, sizes: Sequence[int], layer: int, direction: str) -> Begun:
        outgoing = torch.tensor(sizes, dtype=torch.int64, device=self.device)
        incoming = torch.empty_like(outgoing)
        ones = [8] * len(sizes)
        self._hand_over(incoming.view(torch.uint8), outgoing.view(torch.uint8), ones, ones, layer, direction).wait()
        return self._begin(payload, sizes, incoming.tolist(), layer, direction)

    def _begin(
        self, payload: Tensor, sizes: Sequence[int], arriving: Sequence[int], layer: int, direction: str
    ) -> Begun:
        buffer = self.buffer((layer, direction), sum(arriving))
        work = self._hand_over(buffer, payload, list(arriving), list(sizes), layer, direction)
        return Begun(buffer, list(arriving), work)

    def _hand_over(self, incoming, outgoing, arriving, sizes, layer, direction) -> dist.Work:
        rank = averaging.rank()
        self.ledger.bytes[layer, direction] += sum(sizes[:rank]) + sum(sizes[rank + 1 :])
        return dist.all_to_all_single(incoming, outgoing, arriving, sizes, async_op=True)
