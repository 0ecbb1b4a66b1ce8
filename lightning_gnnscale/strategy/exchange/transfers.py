"""What is on its way: rows forward and their gradients back, as layers wait for them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .message import RAW, Arrived, RowCodec, pack_all, unpack_all, unpack_chosen
from .transport import Message

if TYPE_CHECKING:
    from .layer_exchange import LayerExchange


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
        """Return rows as they stand in an epoch: a copy, except of all rows where they are held as they came.

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


class RowTransfer:
    """Rows on their way forward, and then their gradients on the way back; see the model's `Transfer`."""

    def __init__(
        self,
        exchange: "LayerExchange",
        message: Message,
        layout: Layout,
        shape: torch.Size,
        held: ReceivedRows | None,
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
