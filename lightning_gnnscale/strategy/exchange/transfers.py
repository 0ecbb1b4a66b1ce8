"""What is on its way: rows forward and their gradients back, as layers wait for them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .coding import RAW, RowCodec
from .held_rows import HeldRows
from .message import Arrived, pack_all, unpack_all, unpack_chosen
from .transport import Message

if TYPE_CHECKING:
    from .layer_exchange import LayerExchange


@dataclass
class Layout:
    """How one message is read.

    Attributes:
        codec, width, dtype: of its rows.
        partial: rows stand behind a bitmap.
    """

    codec: RowCodec
    width: int
    dtype: torch.dtype
    partial: bool

    def read(self, message: Message, counts: tuple[int, ...]) -> Arrived:
        unpack = unpack_chosen if self.partial else unpack_all
        return unpack(*message.wait(), counts, self.codec.row_bytes(self.width, self.dtype))


class RowTransfer:
    """Rows on their way forward, and then their gradients on the way back; see the model's `Transfer`."""

    def __init__(
        self,
        exchange: "LayerExchange",
        message: Message,
        layout: Layout,
        shape: torch.Size,
        held: HeldRows | None,
        payload: Tensor,
    ):
        self._exchange, self._message, self._layout, self._held = exchange, message, layout, held
        self._shape, self._payload = shape, payload
        self._returned: Message | None = None

    def wait(self) -> Tensor:
        run, layout = self._exchange.run, self._layout
        arrived = layout.read(self._message, run.route.arriving)
        self._payload = None
        with run.ledger.timed():
            rows = self._decode(arrived)
            return rows if run.route.pick is None else rows.index_select(0, run.route.pick)

    def _decode(self, arrived: Arrived) -> Tensor:
        layout, held, epoch = self._layout, self._held, self._exchange.run.epoch
        if held is None:
            rows = layout.codec.decode(arrived.rows, layout.width, layout.dtype)
            # Whoever reads may keep them for its backward, and the buffer serves the next message.
            return rows.clone() if layout.codec is RAW and self._exchange.run.route.pick is None else rows
        if arrived.places is None or len(arrived.places):
            base = held.at(epoch, arrived.places).clone()
            held.store(layout.codec.decode(arrived.rows, layout.width, layout.dtype, held=base), epoch, arrived.places)
        # A copy: the cache changes in the next epoch, and whoever reads may keep this for its backward.
        return held.at(epoch).clone()

    def send_back(self, grad: Tensor) -> None:
        exchange, run = self._exchange, self._exchange.run
        if not run.plan.remote_gradient:
            return
        with run.ledger.timed():
            if run.route.pick is not None:
                full = grad.new_zeros((run.route.num_arriving, grad.shape[1]))
                grad = full.index_copy_(0, run.route.pick, grad)
            partial = run.codes_gradients
            if partial:
                packed = exchange.pack_gradients(grad, run.route.arriving_ids, run.route.returning)
            else:
                packed = pack_all(RAW.encode(grad, 0, run.route.arriving_ids), run.route.returning)
        self._layout = Layout(run.gradient_codec, grad.shape[1], grad.dtype, partial)
        self._payload = packed.payload
        row_bytes = run.gradient_codec.row_bytes(grad.shape[1], grad.dtype)
        self._returned = exchange.start_gradients(packed, run.route.returned, partial, row_bytes)

    def wait_back(self) -> Tensor | None:
        if self._returned is None:
            return None
        run, layout = self._exchange.run, self._layout
        arrived = layout.read(self._returned, run.route.returned)
        with run.ledger.timed():
            rows = layout.codec.decode(arrived.rows, layout.width, layout.dtype)
            targets = run.route.returned_rows
            targets = targets if arrived.places is None else targets[arrived.places]
            self._payload = None
            return rows.new_zeros(self._shape).index_add_(0, targets, rows)


class PulledGradients:
    """Gradients of the halo's outputs on their way; rows that do not come are zero."""

    def __init__(self, exchange: "LayerExchange", message: Message, layout: Layout, payload: Tensor):
        self._exchange, self._message, self._layout, self._payload = exchange, message, layout, payload

    def wait(self) -> Tensor:
        run, layout = self._exchange.run, self._layout
        arrived = layout.read(self._message, run.route.arriving)
        self._payload = None
        with run.ledger.timed():
            rows = layout.codec.decode(arrived.rows, layout.width, layout.dtype)
            out = rows.new_zeros((run.route.num_arriving, layout.width))
            out.index_copy_(0, arrived.places, rows)
            return out if run.route.pick is None else out.index_select(0, run.route.pick)


class NoGradients:
    """What is pulled where nothing flows back."""

    def wait(self) -> None:
        return None
