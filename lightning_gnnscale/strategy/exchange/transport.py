"""The one place where buffers are handed to the process group, and where their bytes are counted."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from .. import averaging

FORWARD, BACKWARD, STATIC, EVALUATION = "forward", "backward", "static", "evaluation"


class Ledger:
    """What exchanging cost since the last `clear`: counted from the buffers that were sent, never estimated.

    Attributes:
        bytes: (layer, direction) to bytes that this rank sent to others; directions are FORWARD, BACKWARD, STATIC
            (input that is exchanged once) and EVALUATION.
        sent_rows, skipped_rows: layer to rows of this rank's boundary that were sent, or left as they were, forward.
        seconds: spent in exchanging since `begin_step`: writing and reading messages, and waiting. On CUDA what the
            process waits for, not what the device does meanwhile.
        wait_seconds: of these, waiting.
        evaluation_seconds: spent before it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.bytes: Counter = Counter()
        self.sent_rows: Counter = Counter()
        self.skipped_rows: Counter = Counter()
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


class Message:
    """Bytes on their way to this rank.

    Args:
        buffer: (num_bytes,) uint8, filled when `wait` returns.
        sizes: bytes from each rank.
        work: of the process group, or None: nothing travels.
        ledger: waiting is added to it.
    """

    def __init__(self, buffer: Tensor, sizes: list[int], work: dist.Work | None, ledger: Ledger):
        self.buffer, self.sizes, self._work, self._ledger = buffer, sizes, work, ledger

    def wait(self) -> Tensor:
        """Return the buffer once it is filled.

        Raises:
            StrategyError: another process was lost.
        """
        if self._work is not None:
            with self._ledger.timed(waiting=True), averaging.clear_error("exchanging rows"):
                self._work.wait()
            self._work = None
        return self.buffer


class Transport:
    """Sends bytes between all processes, in buffers that it keeps for the next time.

    Args:
        ledger: bytes and seconds are added to it.
        device: of the buffers.
    """

    def __init__(self, ledger: Ledger, device: torch.device):
        self.ledger, self.device = ledger, device
        self._buffers: dict[tuple, Tensor] = {}

    def start(
        self, payload: Tensor, sizes: Sequence[int], arriving: Sequence[int], layer: int, direction: str
    ) -> Message:
        """Start to send bytes to every rank; every rank calls it.

        Args:
            payload: (sum(sizes),) uint8, for rank 0, then rank 1, ...; it must stay as it is until `wait` returns.
            sizes: bytes for each rank, own entry 0.
            arriving: bytes from each rank.
            layer, direction: where the bytes are counted.
        """
        buffer = self.buffer((layer, direction, "in"), sum(arriving))
        if averaging.world_size() == 1:
            return Message(buffer, list(arriving), None, self.ledger)
        work = self._hand_over(buffer, payload, list(arriving), list(sizes), layer, direction)
        return Message(buffer, list(arriving), work, self.ledger)

    def agree_on_sizes(self, sizes: Sequence[int], layer: int, direction: str) -> list[int]:
        """Return how many bytes each rank will send, where only the sender can know; every rank calls it."""
        if averaging.world_size() == 1:
            return list(sizes)
        outgoing = torch.tensor(sizes, dtype=torch.int64, device=self.device)
        incoming = torch.empty_like(outgoing)
        ones = [8] * len(sizes)
        work = self._hand_over(incoming.view(torch.uint8), outgoing.view(torch.uint8), ones, ones, layer, direction)
        Message(incoming, ones, work, self.ledger).wait()
        return incoming.tolist()

    def buffer(self, name: tuple, num_bytes: int) -> Tensor:
        """Return a (num_bytes,) uint8 buffer, the same memory for the same name as long as it is large enough."""
        kept = self._buffers.get(name)
        if kept is None or len(kept) < num_bytes:
            kept = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return kept[:num_bytes]

    def _hand_over(self, incoming, outgoing, arriving, sizes, layer, direction) -> dist.Work:
        rank = averaging.rank()
        self.ledger.bytes[layer, direction] += sum(sizes[:rank]) + sum(sizes[rank + 1 :])
        with averaging.clear_error("exchanging rows"):
            return dist.all_to_all_single(incoming, outgoing, arriving, sizes, async_op=True)
