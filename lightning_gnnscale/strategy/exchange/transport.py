"""Rows on their way, forward and back: the one place where buffers are handed to the process group and counted."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...device_time import DeviceTimer
from ...events import clock
from .. import averaging
from .message import Arrived, RowCodec, unpack_all, unpack_chosen
from .route import Route

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
        evaluation_seconds: Time spent in exchanging before `begin_step`.

    Args:
        device: Device of the rows, whose stream is timed on a GPU; None: the host.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._timer, self._wait_timer = DeviceTimer(device), DeviceTimer(device)
        self.clear()

    @property
    def seconds(self) -> float:
        """Time spent in exchanging since `begin_step`: writing and reading messages, and waiting; asks the device."""
        self._seconds += self._timer.take()
        return self._seconds

    @property
    def wait_seconds(self) -> float:
        """The part of `seconds` that was spent waiting."""
        self._wait_seconds += self._wait_timer.take()
        return self._wait_seconds

    def clear(self) -> None:
        self.bytes: Counter = Counter()
        self.sent_rows: Counter = Counter()
        self.skipped_rows: Counter = Counter()
        self.broadcasts: Counter = Counter()
        self.skipped_broadcasts: Counter = Counter()
        self._drop_seconds()
        self.evaluation_seconds = 0.0

    def begin_step(self) -> None:
        """Begin a training step: what was spent until now went into evaluation."""
        self.evaluation_seconds += self.seconds
        self._drop_seconds()

    def _drop_seconds(self) -> None:
        for timer in (self._timer, self._wait_timer):
            timer.take()
        self._seconds = self._wait_seconds = 0.0

    @contextmanager
    def timed(self, waiting: bool = False) -> Iterator[None]:
        """Add the time of the block; blocks do not nest."""
        with clock.doing("exchange"), self._timer.measure(), self._wait_timer.measure() if waiting else nullcontext():
            yield


class Begun(NamedTuple):
    """What has been begun: the (num_bytes,) uint8 that it fills, the bytes from each rank, the works to wait for."""

    buffer: Tensor
    sizes: list[int]
    works: list[dist.Work]


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
            for work in begun.works:
                work.wait()
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
        self,
        payload: Tensor,
        sizes: Sequence[int],
        arriving: Sequence[int] | None,
        layer: int,
        direction: str,
        by_thread: bool = True,
    ) -> Message:
        """Start to send bytes to every rank; every rank calls it.

        Args:
            payload: (sum(sizes),) uint8, for rank 0, then rank 1, ...; it must stay as it is until `wait` returns.
            sizes: bytes for each rank, own entry 0.
            arriving: bytes from each rank; None: only the sender knows, so that ranks exchange sizes first.
            layer, direction: where the bytes are counted.
            by_thread: Whether a thread waits for what ranks exchange first, so that the caller can work meanwhile;
                then nothing else may be sent before this message is waited for. On CUDA the caller waits.
        """
        if averaging.world_size() == 1:
            arriving = sizes if arriving is None else arriving
            return Message(Begun(self.buffer((layer, direction), sum(arriving)), list(arriving), []), self.ledger)
        if arriving is None and by_thread and self.device.type == "cpu":
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

    def broadcast(self, payload: Tensor, arriving: Sequence[int], layer: int, direction: str) -> Message:
        """Start to send the same bytes to every rank, without a copy for each; every rank calls it.

        Args:
            payload: (num_bytes,) uint8; it must stay as it is until `wait` returns.
            arriving: bytes from each rank, own entry 0.
            layer, direction: where the bytes are counted, once a receiver.
        """
        rank, buffer = averaging.rank(), self.buffer((layer, direction), sum(arriving))
        chunks, works = buffer.split(list(arriving)), []
        with averaging.clear_error("exchanging rows"):
            for source, chunk in enumerate(chunks):
                sent = payload if source == rank else chunk
                if len(sent):
                    works.append(dist.broadcast(sent, source, async_op=True))
        self.ledger.bytes[layer, direction] += len(payload) * (averaging.world_size() - 1)
        return Message(Begun(buffer, list(arriving), works), self.ledger)

    def agree(self, numbers: Tensor, layer: int) -> Message:
        """Start to send every rank numbers, and to receive theirs; every rank calls it.

        Args:
            numbers: (world_size, num) int64, a row for each rank; contiguous.
            layer: where the bytes are counted, as forward ones.

        Returns:
            The message, of the bytes of (world_size, num) int64: a row from each rank.
        """
        outgoing = numbers.view(torch.uint8).view(-1)
        row = [8 * numbers.shape[1]] * len(numbers)
        if averaging.world_size() == 1:
            return Message(Begun(outgoing, row, []), self.ledger)
        heard = torch.empty_like(outgoing)
        with averaging.clear_error("exchanging rows"):
            work = self._hand_over(heard, outgoing, row, row, layer, FORWARD)
        return Message(Begun(heard, row, [work]), self.ledger)

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
        return Begun(buffer, list(arriving), [work])

    def _hand_over(self, incoming, outgoing, arriving, sizes, layer, direction) -> dist.Work:
        rank = averaging.rank()
        self.ledger.bytes[layer, direction] += sum(sizes[:rank]) + sum(sizes[rank + 1 :])
        return dist.all_to_all_single(incoming, outgoing, arriving, sizes, async_op=True)


class ReceivedRows:
    """The copies of some rows that receivers hold, advanced to any epoch.

    Sender and receivers make the same changes in the same order, so they hold the same bits.

    Args:
        num_rows, width: Number and length of the rows; all values are 0 at first.
        like: Tensor whose dtype and device are used.
        extrapolate: Whether rows continue along their last change, in proportion to the epochs since.

    Cost: num_rows x width values; twice that, and 8 bytes a row, to extrapolate.
    """

    def __init__(self, num_rows: int, width: int, like: Tensor, extrapolate: bool):
        self._values = like.new_zeros((num_rows, width))
        self._slopes = like.new_zeros((num_rows, width)) if extrapolate else None
        self._versions = torch.full((num_rows,), -1, device=like.device) if extrapolate else None

    @property
    def nbytes(self) -> int:
        tensors = [self._values, self._slopes, self._versions]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def at(self, epoch: int, rows: Tensor | None = None) -> Tensor:
        """Return rows as they are in an epoch: a copy, except of all rows where they are held as they came.

        Args:
            epoch: not before any in which rows were stored.
            rows: (num,) int64, or None: all.
        """
        values = self._values if rows is None else self._values.index_select(0, rows)
        if self._slopes is None:
            return values
        chosen = slice(None) if rows is None else rows
        age = (epoch - self._versions[chosen]).unsqueeze(1).to(values.dtype)
        return values + self._slopes[chosen] * age

    def store(self, values: Tensor, epoch: int, rows: Tensor | None = None) -> None:
        """Replace rows (None: all) by (num, width) values that were sent in an epoch."""
        chosen = slice(None) if rows is None else rows
        if self._slopes is not None:
            age = (epoch - self._versions[chosen]).unsqueeze(1)
            known = (self._versions[chosen] >= 0).unsqueeze(1) & (age > 0)
            change = (values - self._values[chosen]) / age.clamp(min=1).to(values.dtype)
            self._slopes[chosen] = torch.where(known, change, torch.zeros_like(change))
            self._versions[chosen] = epoch
        self._values[chosen] = values


@dataclass
class Layout:
    """How a message is read.

    Attributes:
        codec, width, dtype: Codec, length and dtype of its rows.
        partial: Whether a bitmap precedes the rows.
    """

    codec: RowCodec
    width: int
    dtype: torch.dtype
    partial: bool

    def read(self, message: Message, counts: tuple[int, ...]) -> Arrived:
        unpack = unpack_chosen if self.partial else unpack_all
        return unpack(*message.wait(), counts, self.codec.row_bytes(self.width, self.dtype))


class Gradients:
    """Gradient rows on their way to the processes that they belong to.

    Args:
        ledger: Counts the time.
        message: Brings them.
        layout: How it is read.
        counts: Rows that may come from each process.
        payload: What is sent, which stays until it has left.
        held: What came before, which is used for what does not come; None: nothing does.
        stays: Whether `wait` may be called again, in a later step.
    """

    def __init__(
        self,
        ledger: Ledger,
        message: Message,
        layout: Layout,
        counts: tuple[int, ...],
        payload: Tensor,
        held: ReceivedRows | None,
        stays: bool,
    ):
        self._ledger, self._message, self._layout, self._counts = ledger, message, layout, counts
        self._payload, self._held, self._stays, self._found = payload, held, stays, None

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Return (num, width) rows and their places among all that may come, ascending by process; None: all."""
        if self._found is not None:
            return self._found
        layout = self._layout
        arrived = layout.read(self._message, self._counts)
        self._payload = None
        with self._ledger.timed():
            rows, places = layout.codec.decode(arrived.rows, layout.width, layout.dtype), arrived.places
            if self._held is not None:
                self._held.store(rows, 0, places)
                rows, places = self._held.at(0), None
            if self._stays:
                self._found = rows, places = rows.clone(), places
        return rows, places


class PulledGradients:
    """Gradients of the halo's outputs on their way; rows that do not come are zero."""

    def __init__(self, route: Route, ledger: Ledger, gradients: Gradients, width: int, dtype: torch.dtype):
        self._route, self._ledger, self._gradients = route, ledger, gradients
        self._width, self._dtype = width, dtype

    def wait(self) -> Tensor:
        route = self._route
        rows, places = self._gradients.wait()
        with self._ledger.timed():
            out = rows.new_zeros((route.num_arriving, self._width))
            if places is None:
                out.copy_(rows)
            else:
                out.index_copy_(0, places, rows)
            out = out.to(self._dtype)
            return out if route.pick is None else out.index_select(0, route.pick)


class NoGradients:
    """What is pulled where nothing flows back."""

    def wait(self) -> None:
        return None
