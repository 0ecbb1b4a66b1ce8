"""The exchange of one layer: what it sends, what it holds, what comes back."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...rng import fold
from . import transport
from .coding import RawRows, RowCodec
from .gradient_rows import draw_rows
from .held_rows import HeldRows
from .message import Arrived, Packed, pack_all, pack_chosen, pack_nothing, unpack_all, unpack_chosen
from .transport import Message

if TYPE_CHECKING:
    from .run import ExchangeRun

RAW = RawRows()


@dataclass
class _Layout:
    """How one message is read."""

    codec: RowCodec
    width: int
    dtype: torch.dtype
    partial: bool  # behind a bitmap

    def read(self, message: Message, counts: tuple[int, ...]) -> Arrived:
        unpack = unpack_chosen if self.partial else unpack_all
        return unpack(message.wait(), message.sizes, counts, self.codec.row_bytes(self.width, self.dtype))


class LayerExchange:
    """The exchange of one layer of this process: the `RowExchange` that the model asks.

    Args:
        run: what all layers share.
        layer: number of the layer, from 0; the input of layer 0 is never exchanged.
        pulls: gradients are pulled.
    """

    local_only = False

    def __init__(self, run: "ExchangeRun", layer: int, pulls: bool):
        self.run, self.layer, self.pulls = run, layer, pulls
        self.versions = run.start_versions()
        self.sent: HeldRows | None = None
        self.received: HeldRows | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rows that this layer holds from step to step."""
        return sum(held.nbytes for held in (self.sent, self.received) if held is not None)

    def send(self, rows: Tensor, training: bool) -> "RowTransfer":
        """Start to send the rows that others read."""
        run, ledger = self.run, self.run.ledger
        with ledger.timed():
            boundary = rows[run.route.boundary]
        if not training:
            # Validation runs without gradients; what is exchanged once is asked for by a training step.
            direction = transport.STATIC if torch.is_grad_enabled() else transport.EVALUATION
            return self._send_exactly(rows, boundary, direction)
        ledger.sent_rows[self.layer] += len(boundary)
        if not run.keeps_rows:
            if run.codec is RAW:
                return self._send_exactly(rows, boundary, transport.FORWARD)
            codes = run.codec.encode(boundary, self._key("forward"), run.route.boundary_ids)
            return self._start(rows, pack_all(codes, run.route.leaving), run.codec, False)
        return self._send_changes(rows, boundary)

    def _send_exactly(self, rows: Tensor, boundary: Tensor, direction: str) -> "RowTransfer":
        packed = pack_all(RAW.encode(boundary, 0, self.run.route.boundary_ids), self.run.route.leaving)
        return self._start(rows, packed, RAW, False, direction)

    def _send_changes(self, rows: Tensor, boundary: Tensor) -> "RowTransfer":
        """Send the rows that are due, and note on this side what the receivers hold then."""
        run, route = self.run, self.run.route
        self._make_caches(rows)
        codec = RAW if run.exact_step else run.codec
        with run.ledger.timed():
            chosen, active = self._due(boundary)
            ids = route.boundary_ids
            if chosen is None:
                packed = pack_all(self._encode(codec, boundary, ids, None), route.leaving)
            elif chosen.any():
                places = chosen.nonzero().squeeze(1)
                codes = self._encode(codec, boundary[places], ids[places], places)
                packed = pack_chosen(codes, chosen, route.leaving)
            else:
                packed = pack_nothing(boundary, len(route.leaving))
        self._count_skipped(chosen, len(boundary))
        return self._start(rows, packed, codec, run.plan.by_row and not run.exact_step, active=active)

    def _encode(self, codec: RowCodec, rows: Tensor, ids: Tensor, places: Tensor | None) -> Tensor:
        if self.sent is None:
            return codec.encode(rows, self._key("forward"), ids)
        held = self.sent.at(self.run.epoch, places).clone()
        codes = codec.encode(rows, self._key("forward"), ids, held=held)
        self.sent.store(held, self.run.epoch, places)
        return codes

    def _make_caches(self, rows: Tensor) -> None:
        run = self.run
        if self.received is not None:
            return
        width, extrapolate = rows.shape[1], run.plan.extrapolate
        self.received = HeldRows(run.route.num_arriving, width, rows, extrapolate)
        if run.keeps_sent_rows:
            self.sent = HeldRows(len(run.route.boundary), width, rows, extrapolate)

    def _due(self, boundary: Tensor) -> tuple[Tensor | None, list[bool] | None]:
        """Return which rows of the boundary are due, and which ranks send where every rank can tell.

        Returns:
            (num_boundary,) bool, or None: all; and one bool a rank, or None: only each itself knows.
        """
        run, bound, epoch = self.run, self.run.plan.bound, self.run.epoch
        if bound is None or run.exact_step:
            if bound is not None:
                self.versions = bound.restart(epoch, run.sources)
            return None, [True] * len(run.route.leaving)
        nothing = torch.zeros(len(boundary), dtype=torch.bool, device=boundary.device)
        if bound.needs_change:
            due = bound.exceeded(boundary, self.sent.at(epoch), run.plan.by_row)
            if run.plan.by_row:
                return due, None
            return (None if bool(due) else nothing), None
        due = bound.due(epoch, self.versions)
        self.versions = np.where(due, epoch, self.versions)
        if run.plan.by_row:
            return torch.from_numpy(due).to(boundary.device), None
        return (None if due[run.route.rank] else nothing), due.tolist()

    def _count_skipped(self, chosen: Tensor | None, num_rows: int) -> None:
        if chosen is not None:
            skipped = num_rows - int(chosen.sum())
            self.run.ledger.sent_rows[self.layer] -= skipped
            self.run.ledger.skipped_rows[self.layer] += skipped

    def _start(
        self, rows: Tensor, packed: Packed, codec: RowCodec, partial: bool, direction=transport.FORWARD, active=None
    ) -> "RowTransfer":
        run, layout = self.run, _Layout(codec, rows.shape[1], rows.dtype, partial)
        counts = run.route.arriving
        if direction == transport.FORWARD and active is None and run.keeps_rows:
            sizes = run.transport.agree_on_sizes(packed.sizes, self.layer, direction)
        else:
            row_bytes = codec.row_bytes(layout.width, layout.dtype)
            sizes = [count * row_bytes if active is None or active[rank] else 0 for rank, count in enumerate(counts)]
        message = run.transport.start(packed.payload, packed.sizes, sizes, self.layer, direction)
        held = self.received if direction == transport.FORWARD else None
        return RowTransfer(self, message, layout, rows.shape, held, packed.payload)

    def pull(self, grad: Tensor) -> "PulledGradients | NoGradients":
        """Start to send gradients of this layer's output to the owners of the rows that they were made from."""
        run = self.run
        if not run.plan.remote_gradient:
            return NoGradients()
        with run.ledger.timed():
            boundary = grad[run.route.boundary]
            packed = self.pack_gradients(boundary, run.route.boundary_ids, run.route.leaving)
        message = self.start_gradients(packed, run.route.arriving, partial=True)
        layout = _Layout(run.gradient_codec, grad.shape[1], grad.dtype, True)
        return PulledGradients(self, message, layout, packed.payload)

    def pack_gradients(self, rows: Tensor, ids: Tensor, leaving: tuple[Tensor, ...]) -> Packed:
        """Pack the gradient rows that are drawn, behind bitmaps."""
        run, key = self.run, self._key("backward")
        chosen, drawn = draw_rows(rows, run.plan.backward_keep, fold(key, 1), ids)
        codes = run.gradient_codec.encode(drawn, key, ids[chosen])
        return pack_chosen(codes, chosen, leaving)

    def start_gradients(self, packed: Packed, counts: tuple[int, ...], partial: bool, row_bytes: int = 0) -> Message:
        """Start to send packed gradients; `counts` rows may come from each rank."""
        direction = transport.BACKWARD
        if partial:
            sizes = self.run.transport.agree_on_sizes(packed.sizes, self.layer, direction)
        else:
            sizes = [count * row_bytes for count in counts]
        return self.run.transport.start(packed.payload, packed.sizes, sizes, self.layer, direction)

    def _key(self, direction: str) -> int:
        kind = {"forward": 0, "backward": 1}[direction]
        return fold(self.run.plan.seed, self.run.epoch, self.layer, kind, self.run.route.rank)


class RowTransfer:
    """Rows on their way forward, and then their gradients on the way back; see the model's `Transfer`."""

    def __init__(self, exchange: LayerExchange, message: Message, layout: _Layout, shape, held, payload: Tensor):
        self._exchange, self._message, self._layout, self._held = exchange, message, layout, held
        self._shape, self._payload = shape, payload
        self._returned: Message | None = None

    def wait(self) -> Tensor:
        run, layout = self._exchange.run, self._layout
        arrived = layout.read(self._message, run.route.arriving)
        self._payload = None
        with run.ledger.timed():
            rows = self._decode(arrived)
            return rows if run.route.pick is None else rows[run.route.pick]

    def _decode(self, arrived: Arrived) -> Tensor:
        layout, held, epoch = self._layout, self._held, self._exchange.run.epoch
        if held is None:
            return layout.codec.decode(arrived.rows, layout.width, layout.dtype)
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
        self._layout = _Layout(run.gradient_codec, grad.shape[1], grad.dtype, partial)
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

    def __init__(self, exchange: LayerExchange, message: Message, layout: _Layout, payload: Tensor):
        self._exchange, self._message, self._layout, self._payload = exchange, message, layout, payload

    def wait(self) -> Tensor:
        run, layout = self._exchange.run, self._layout
        arrived = layout.read(self._message, run.route.arriving)
        self._payload = None
        with run.ledger.timed():
            rows = layout.codec.decode(arrived.rows, layout.width, layout.dtype)
            out = rows.new_zeros((run.route.num_arriving, layout.width))
            out[arrived.places] = rows
            return out if run.route.pick is None else out[run.route.pick]


class NoGradients:
    """What is pulled where nothing flows back."""

    def wait(self) -> None:
        return None
