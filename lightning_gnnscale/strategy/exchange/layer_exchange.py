"""The exchange of one layer: what it sends, what it holds, what comes back."""

import math

import numpy as np
import torch
from torch import Tensor

from ...model.dropout import combine
from ...rng import combine_array, fold
from . import transport
from .bounds import Bound
from .message import RAW, Arrived, Packed, QuantisedRows, RowCodec, bitmap_bytes, pack_all, pack_chosen, pack_nothing
from .policies import ExchangePlan
from .route import Route
from .transport import Gradients, Layout, Message, NoGradients, PulledGradients, ReceivedRows, Transport


def sample_rows(rows: Tensor, threshold: float, key: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Choose rows with probability min(1, norm / (threshold x mean norm)), scaled so that their mean is what they were.

    Where norms are alike nearly all rows are sent; where a few rows carry most of the gradient, few are.

    Args:
        rows: (num_rows, width).
        threshold: in mean norms of the rows that are not zero, >= 0; 0 takes every row that is not zero.
        key: uint64. ids: (num_rows,) int64; with the norms the choice of a row depends on (key, id) alone.

    Returns:
        (num_rows,) bool, and the (num_chosen, width) chosen rows, each divided by its probability.

    Source: importance sampling; for a given expected number of rows, probabilities ~ norm have the least variance.
    """
    if threshold == 0:
        # by value, not by norm: the square of a small number is 0, and NaN is not above it
        chosen = (rows != 0).any(dim=1)
        return chosen, rows[chosen]
    probability = inclusion_probability(rows.norm(dim=1).double(), threshold)
    chosen = uniform(key, ids) < probability
    return chosen, rows[chosen] / probability[chosen].to(rows.dtype).unsqueeze(1)


def inclusion_probability(size: Tensor, threshold: float) -> Tensor:
    """Return (num,) float64 probabilities min(1, size / (threshold x mean size)); the mean is over sizes above 0.

    Args:
        size: (num,) float64, >= 0; one that is not finite is taken for certain: whoever receives it must learn of it.
        threshold: > 0.
    """
    finite = size.isfinite()
    counted = size[finite & (size > 0)]
    floor = threshold * counted.sum() / max(1, len(counted))
    probabilities = (size / floor.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1)
    return torch.where(finite, probabilities, torch.ones_like(probabilities))


def uniform(key: int, ids: Tensor) -> Tensor:
    """Return (num,) float64 in [0, 1), each a hash of (key, id), on the device of ids."""
    if ids.device.type != "cpu":
        return hashed(key, ids)
    bits = combine_array(np.uint64(key), ids.numpy()) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def hashed(key: int, ids: Tensor) -> Tensor:
    """Return the values of `uniform` by torch's arithmetic, where the ids are."""
    return ((combine(key, ids) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


class ExchangeClock:
    """The step under way: its epoch, and how its rows and gradients are written.

    Args:
        plan: How rows travel.
        num_epochs: Epochs of the run; exact epochs at its end, and shares, are counted from it.

    Attributes:
        epoch: Epoch of the step.
        exact_from: First epoch of the exact ones at the end; infinite: there are none.
        exact: Whether rows and gradients are exchanged exactly in this step.
        agreement: Bytes that each rank sends in this step, on their way; None: all ranks know.
    """

    def __init__(self, plan: ExchangePlan, num_epochs: int = 0):
        plan = plan.for_epochs(num_epochs)
        self.exact_from = num_epochs - plan.cooldown_epochs if plan.cooldown_epochs else math.inf
        self.plan, self.epoch, self.exact, self._first_epoch = plan, 0, True, None
        self.agreement: Message | None = None
        self._agreed: Tensor | None = None
        self._codec = (
            RAW if plan.quantisation.bits is None else QuantisedRows(plan.quantisation.bits, plan.quantisation.delta)
        )
        self._gradient_codec = RAW if plan.backward_bits is None else QuantisedRows(plan.backward_bits)

    def begin_step(self, epoch: int) -> None:
        """Begin the training step of an epoch.

        Rows and gradients are exchanged exactly in the epochs of the warm-up and of the end, in the first one under a
        bound that is not given its versions, and in the first one after a resume: what was held is not in the
        checkpoint. A policy that holds nothing goes on as if it had never stopped.
        """
        if self._first_epoch is None:
            self._first_epoch = epoch
        fresh, plan = epoch == self._first_epoch, self.plan
        resumed = fresh and epoch > 0 and plan.keeps_rows
        first_of_bound = fresh and plan.bound is not None and plan.given_versions is None
        at_an_end = epoch < plan.warmup_epochs or epoch >= self.exact_from
        self.epoch, self.exact = epoch, resumed or first_of_bound or at_an_end
        self.agreement = self._agreed = None

    def agreed(self, layer: int, direction: str) -> list[int]:
        """Return the bytes that each rank sends to this one in this step."""
        if self._agreed is None:
            numbers, sizes = self.agreement.wait()
            self._agreed = numbers.view(torch.int64).view(len(sizes), -1, 2)
        return self._agreed[:, layer - 1, int(direction == transport.BACKWARD)].tolist()

    @property
    def codec(self) -> RowCodec:
        """How rows are written in this step."""
        return RAW if self.exact else self._codec

    @property
    def gradient_codec(self) -> RowCodec:
        """How gradient rows are written in this step."""
        return RAW if self.exact else self._gradient_codec

    @property
    def gradient_threshold(self) -> float:
        """Mean norms below which gradient rows are sampled in this step; 0: all are sent."""
        return 0.0 if self.exact else self.plan.backward_threshold

    @property
    def quantises_gradients(self) -> bool:
        """Whether gradients that are pushed leave rows out, or write them in few bits."""
        return self.gradient_codec is not RAW or self.gradient_threshold > 0


class LayerExchange:
    """The exchange of one layer of this process: the `RowExchange` that the model asks.

    Args:
        route: Rows that leave and arrive.
        transport: Carries them; all layers share it.
        clock: Tells the epoch, and how rows are written in its step; all layers share it.
        layer: Number of the layer, from 0; the input of layer 0 is never exchanged.
        pulls: Whether gradients are pulled.
    """

    local_only = False

    def __init__(self, route: Route, transport: Transport, clock: ExchangeClock, layer: int, pulls: bool):
        self.route, self.transport, self.ledger = route, transport, transport.ledger
        self.clock, self.layer, self.pulls = clock, layer, pulls
        # Bounds of a block look at ranks, bounds of rows at nodes.
        self.sources = route.boundary_ids.cpu().numpy() if self.plan.by_row else np.arange(len(route.leaving))
        given = self.plan.given_versions
        self.versions = np.full(len(self.sources), -1) if given is None else np.asarray(given, np.int64)
        self.sent: ReceivedRows | None = None
        self.received: ReceivedRows | None = None
        self._due_at: int | None = None
        self._due_now: np.ndarray | None = None
        # Where changes decide: what will be due in the coming step, and what is in this one; of rows and of gradients.
        self._coming: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        self.gradient_versions = np.full(len(route.leaving), -1)
        self._gradients_sent: ReceivedRows | None = None
        self._gradients_held: ReceivedRows | None = None
        self._earlier: Gradients | None = None
        self._gradient_sent = True
        self._half: torch.dtype | None = None  # dtype of rows that are sent in two bytes a value
        self._width, self._dtype = 0, torch.float32

    @property
    def plan(self) -> ExchangePlan:
        """How rows travel."""
        return self.clock.plan

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rows that this layer holds from step to step."""
        kept = (self.sent, self.received, self._gradients_sent, self._gradients_held)
        return sum(held.nbytes for held in kept if held is not None)

    def coming_bytes(self) -> Tensor:
        """Return (world_size, 2) int64: bytes of rows and of gradients for each rank in the step that begins."""
        self._now = dict(self._coming)
        out = torch.zeros((len(self.route.leaving), 2), dtype=torch.int64)
        if not self._now:  # a layer that was not asked in the step before
            return out
        row_bytes = self.clock.codec.row_bytes(self._width, self._dtype)
        due = self._now[transport.FORWARD]
        for rank, positions in enumerate(self.route.leaving):
            count = int(due[positions].sum()) if self.plan.by_row else len(positions) * int(due)
            head = bitmap_bytes(len(positions)) if self.plan.by_row and count else 0
            out[rank, 0] = head + count * row_bytes
            if self._now.get(transport.BACKWARD):
                out[rank, 1] = self.route.arriving[rank] * self._width * self._dtype.itemsize
        return out

    def send(self, rows: Tensor, training: bool) -> "RowTransfer":
        """Start to send the rows that others read."""
        ledger = self.ledger
        with ledger.timed():
            boundary = rows if self.route.whole else rows.index_select(0, self.route.boundary)
            boundary = boundary.to(self._dtype_sent(boundary))
        if not training:
            # Validation runs without gradients; what is exchanged once is asked for by a training step.
            direction = transport.STATIC if torch.is_grad_enabled() else transport.EVALUATION
            return self._send_exactly(rows, boundary, direction)
        ledger.sent_rows[self.layer] += len(boundary)
        ledger.broadcasts[self.layer] += 1
        if not self.plan.keeps_rows:
            if self.clock.codec is RAW:
                return self._send_exactly(rows, boundary, transport.FORWARD)
            with ledger.timed():
                codes = self.clock.codec.encode(boundary, self._key("forward"), self.route.boundary_ids)
                packed = pack_all(codes, self.route.readers, self.route.whole)
            return self._start(rows, boundary.dtype, packed, self.clock.codec, False)
        return self._send_changes(rows, boundary)

    def _dtype_sent(self, rows: Tensor) -> torch.dtype:
        """Return the dtype of rows on their way: under autocast its own, unless they are quantised or extrapolated."""
        kind = rows.device.type
        half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        self._half = half if half.itemsize < 4 and not self.plan.counts_in_float32 else None
        return self._half or (rows.dtype if rows.dtype.itemsize >= 4 else torch.float32)

    def _send_exactly(self, rows: Tensor, boundary: Tensor, direction: str) -> "RowTransfer":
        with self.ledger.timed():
            codes = RAW.encode(boundary, 0, self.route.boundary_ids)
            packed = pack_all(codes, self.route.readers, self.route.whole)
        return self._start(rows, boundary.dtype, packed, RAW, False, direction)

    def _send_changes(self, rows: Tensor, boundary: Tensor) -> "RowTransfer":
        """Send the rows that are due, and note on this side what the receivers hold then."""
        route = self.route
        self._make_caches(boundary)
        codec = self.clock.codec
        with self.ledger.timed():
            chosen, active = self._due(boundary)
            ids = route.boundary_ids
            count = len(boundary) if chosen is None else self._count(chosen)
            if chosen is None:
                packed = pack_all(self._encode(codec, boundary, ids, None), route.readers, route.whole)
            elif count:
                places = chosen.nonzero().squeeze(1)
                codes = self._encode(codec, boundary.index_select(0, places), ids[places], places)
                packed = pack_chosen(codes, chosen, route.readers)
            else:
                packed = pack_nothing(boundary, len(route.readers))
        if chosen is not None:
            self._count_skipped(len(boundary) - count, len(boundary))
        partial = self.plan.by_row and not self.clock.exact
        return self._start(rows, boundary.dtype, packed, codec, partial, active=active)

    def _encode(self, codec: RowCodec, rows: Tensor, ids: Tensor, places: Tensor | None) -> Tensor:
        if self.sent is None:
            return codec.encode(rows, self._key("forward"), ids)
        held = self.sent.at(self.clock.epoch, places).clone()
        codes = codec.encode(rows, self._key("forward"), ids, held=held)
        self.sent.store(held, self.clock.epoch, places)
        return codes

    def _make_caches(self, boundary: Tensor) -> None:
        if self.received is not None:
            return
        width, extrapolate = boundary.shape[1], self.plan.extrapolate
        self._width, self._dtype = width, boundary.dtype
        self.received = ReceivedRows(self.route.num_arriving, width, boundary, extrapolate)
        if self.plan.keeps_sent_rows:
            self.sent = ReceivedRows(len(boundary), width, boundary, extrapolate)

    def _due(self, boundary: Tensor) -> tuple[Tensor | None, list[bool] | None]:
        """Return which rows of the boundary are due, and which ranks send where every rank knows.

        Returns:
            (num_boundary,) bool, or None: all; and one bool a rank, or None: only each itself knows.
        """
        bound, epoch, exact = self.plan.bound, self.clock.epoch, self.clock.exact
        everybody = [True] * len(self.route.leaving)
        nothing = torch.zeros(len(boundary), dtype=torch.bool, device=boundary.device)
        if bound is not None and bound.needs_change:
            return self._due_by_change(bound, boundary, nothing), everybody if exact else None
        if bound is None or exact:
            self.versions = np.full_like(self.versions, epoch) if bound is None else bound.restart(epoch, self.sources)
            return None, everybody
        # An optimizer may run the step of an epoch more than once (LBFGS): what is due is due each time.
        if self._due_at != epoch:
            self._due_at, self._due_now = epoch, bound.due(epoch, self.versions)
            self.versions = np.where(self._due_now, epoch, self.versions)
        due = self._due_now
        if self.plan.by_row:
            return torch.from_numpy(due).to(boundary.device), None
        return (None if due[self.route.rank] else nothing), due.tolist()

    def _due_by_change(self, bound: Bound, boundary: Tensor, nothing: Tensor) -> Tensor | None:
        """Return what was found due for this step, None for all of it, and find what is for the coming one."""
        by_row, epoch, exact = self.plan.by_row, self.clock.epoch, self.clock.exact
        now = True if exact else self._now[transport.FORWARD]
        own = self.versions if by_row else self.versions[self.route.rank : self.route.rank + 1]
        self._coming[transport.FORWARD] = foretold(bound, boundary, self.sent.at(epoch), own, epoch, now, by_row)
        if exact:
            self.versions = np.full_like(self.versions, epoch)
            return None
        if by_row:
            self.versions[now.cpu().numpy()] = epoch
            return now
        if bool(now):
            self.versions[self.route.rank] = epoch
        return None if bool(now) else nothing

    def _count(self, chosen: Tensor) -> int:
        """Return how many rows are due; a GPU is asked only where the host cannot know."""
        bound = self.plan.bound
        if bound.needs_change:
            return int(chosen.sum())
        return int(self._due_now.sum()) if self.plan.by_row else 0

    def _count_skipped(self, skipped: int, num_rows: int) -> None:
        ledger = self.ledger
        ledger.sent_rows[self.layer] -= skipped
        ledger.skipped_rows[self.layer] += skipped
        if skipped == num_rows:
            ledger.broadcasts[self.layer] -= 1
            ledger.skipped_broadcasts[self.layer] += 1

    def _start(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        packed: Packed,
        codec: RowCodec,
        partial: bool,
        direction: str = transport.FORWARD,
        active: list[bool] | None = None,
    ) -> "RowTransfer":
        layout = Layout(codec, rows.shape[1], dtype, partial)
        sizes = None
        if direction != transport.FORWARD or active is not None or not self.plan.keeps_rows:
            row_bytes = codec.row_bytes(layout.width, layout.dtype)
            counts = enumerate(self.route.arriving)
            sizes = [count * row_bytes if active is None or active[rank] else 0 for rank, count in counts]
        elif self.plan.foretells:
            sizes = self.clock.agreed(self.layer, direction)
        if self.route.whole:
            message = self._broadcast(packed.payload, sizes, direction)
        else:
            message = self.transport.start(packed.payload, packed.sizes, sizes, self.layer, direction)
        held = self.received if direction == transport.FORWARD else None
        return RowTransfer(self, message, layout, rows, held, packed.payload)

    def _broadcast(self, payload: Tensor, sizes: list[int] | None, direction: str) -> Message:
        if sizes is None:
            told = torch.full((len(self.route.leaving), 1), len(payload), dtype=torch.int64)
            told[self.route.rank] = 0
            heard, _ = self.transport.agree(told.to(self.transport.device), self.layer).wait()
            sizes = heard.view(torch.int64).tolist()
        return self.transport.broadcast(payload, sizes, self.layer, direction)

    def push(self, grad: Tensor) -> Gradients:
        """Start to send (num_arriving, width) gradients to the owners of the rows; see `_send_gradients`."""
        route = self.route
        return self._send_gradients(
            grad, route.arriving_ids, route.returning, route.returned, self.clock.quantises_gradients
        )

    def pull(self, grad: Tensor) -> PulledGradients | NoGradients:
        """Start to send gradients of this layer's output to the owners of the rows that they were made from."""
        if not self.plan.remote_gradient:
            return NoGradients()
        route = self.route
        with self.ledger.timed():
            boundary = grad.index_select(0, route.boundary)
        sent = self._send_gradients(boundary, route.boundary_ids, route.leaving, route.arriving, True)
        return PulledGradients(route, self.ledger, sent, grad.shape[1], grad.dtype)

    def _send_gradients(
        self, grad: Tensor, ids: Tensor, leaving: tuple[Tensor, ...], counts: tuple[int, ...], partial: bool
    ) -> Gradients:
        """Start to send gradient rows, where they are due; return those of this step, or of the one before.

        Args:
            grad: (num_rows, width).
            ids: (num_rows,) int64 by which they are rounded and sampled.
            leaving: One (num,) int64 tensor per process: the rows that it is sent.
            counts: Rows that may come from each process.
            partial: Whether rows are sampled, and sent behind bitmaps.
        """
        plan, clock, late = self.plan, self.clock, self.plan.late_gradient
        if late and self._earlier is not None:
            self._earlier.wait()  # its message fills the buffer that the coming one fills
        codec, sizes, held = clock.gradient_codec, None, None
        with self.ledger.timed():
            if codec is not RAW and grad.dtype.itemsize < 4:
                grad = grad.float()
            elif codec is RAW and self._half is not None:
                grad = grad.to(self._half)
            if plan.gradient_clip is not None and not clock.exact:
                grad = clipped(grad, plan.gradient_clip * len(leaving) ** 0.5)
            row_bytes = codec.row_bytes(grad.shape[1], grad.dtype)
            if partial:
                packed = self._sampled_gradients(grad, ids, leaving)
            else:
                packed = pack_all(RAW.encode(grad, 0, ids), leaving, in_order=True)
                active = self._gradients_due(grad, counts) if plan.skip_gradients else [True] * len(leaving)
                if active is not None:
                    sizes = [count * row_bytes * due for count, due in zip(counts, active, strict=True)]
        if not partial and plan.skip_gradients:
            held = self._gradients_held
            if sizes is None:
                sizes = clock.agreed(self.layer, transport.BACKWARD)
            if not self._gradient_sent:
                packed = pack_nothing(grad, len(leaving))
        message = self.transport.start(
            packed.payload, packed.sizes, sizes, self.layer, transport.BACKWARD, by_thread=not late
        )
        layout = Layout(codec, grad.shape[1], grad.dtype, partial)
        started = Gradients(self.ledger, message, layout, counts, packed.payload, held, late)
        if not late:
            return started
        before, self._earlier = self._earlier, started
        return started if clock.exact or before is None else before

    def _gradients_due(self, grad: Tensor, counts: tuple[int, ...]) -> list[bool] | None:
        """Return which ranks send gradients, None: only each itself knows; note what this rank does."""
        bound, clock, rank = self.plan.bound, self.clock, self.route.rank
        if self._gradients_held is None:
            self._gradients_held = ReceivedRows(sum(counts), grad.shape[1], grad, False)
            if bound.needs_change:
                self._gradients_sent = ReceivedRows(len(grad), grad.shape[1], grad, False)
        epoch, everybody = clock.epoch, [True] * len(counts)
        if not bound.needs_change:
            if clock.exact:
                self.gradient_versions = bound.restart(epoch, np.arange(len(counts)))
                due = np.array(everybody)
            else:
                due = bound.due(epoch, self.gradient_versions) | (self.gradient_versions == epoch)
                self.gradient_versions = np.where(due, epoch, self.gradient_versions)
            self._gradient_sent = bool(due[rank])
            return due.tolist()
        now = True if clock.exact else bool(self._now[transport.BACKWARD])
        held, own = self._gradients_sent.at(epoch), self.gradient_versions[rank : rank + 1]
        self._coming[transport.BACKWARD] = foretold(bound, grad, held, own, epoch, now, False)
        self._gradient_sent = now
        if now:
            self._gradients_sent.store(grad, epoch)
            self.gradient_versions[rank] = epoch
        return everybody if clock.exact else None

    def _sampled_gradients(self, rows: Tensor, ids: Tensor, leaving: tuple[Tensor, ...]) -> Packed:
        """Pack the gradient rows that are sampled, behind bitmaps."""
        clock, key = self.clock, self._key("backward")
        chosen, sampled = sample_rows(rows, clock.gradient_threshold, fold(key, 1), ids)
        codes = clock.gradient_codec.encode(sampled, key, ids[chosen])
        return pack_chosen(codes, chosen, leaving)

    def _key(self, direction: str) -> int:
        kind = {"forward": 0, "backward": 1}[direction]
        return fold(self.plan.seed, self.clock.epoch, self.layer, kind, self.route.rank)


class RowTransfer:
    """Rows on their way forward, and then their gradients on the way back; see the model's `Transfer`."""

    def __init__(
        self,
        exchange: LayerExchange,
        message: Message,
        layout: Layout,
        rows: Tensor,
        held: ReceivedRows | None,
        payload: Tensor,
    ):
        self._exchange, self._message, self._layout, self._held = exchange, message, layout, held
        self._shape, self._dtype, self._payload = rows.shape, rows.dtype, payload
        self._returned: Gradients | None = None

    def wait(self) -> Tensor:
        exchange, layout = self._exchange, self._layout
        arrived = layout.read(self._message, exchange.route.arriving)
        self._payload = None
        with exchange.ledger.timed():
            rows = self._decode(arrived).to(self._dtype)
            return rows if exchange.route.pick is None else rows.index_select(0, exchange.route.pick)

    def _decode(self, arrived: Arrived) -> Tensor:
        layout, held, epoch = self._layout, self._held, self._exchange.clock.epoch
        if held is None:
            rows = layout.codec.decode(arrived.rows, layout.width, layout.dtype)
            # Whoever reads may keep them for its backward, and the buffer serves the next message.
            return rows.clone() if layout.codec is RAW and self._exchange.route.pick is None else rows
        if arrived.places is None or len(arrived.places):
            base = held.at(epoch, arrived.places).clone()
            held.store(layout.codec.decode(arrived.rows, layout.width, layout.dtype, held=base), epoch, arrived.places)
        # A copy: the cache changes in the next epoch, and whoever reads may keep this for its backward.
        return held.at(epoch).clone()

    def send_back(self, grad: Tensor) -> None:
        exchange, route = self._exchange, self._exchange.route
        if not exchange.plan.remote_gradient:
            return
        with exchange.ledger.timed():
            if route.pick is not None:
                full = grad.new_zeros((route.num_arriving, grad.shape[1]))
                grad = full.index_copy_(0, route.pick, grad)
        self._returned = exchange.push(grad)

    def wait_back(self) -> Tensor | None:
        if self._returned is None:
            return None
        rows, places = self._returned.wait()
        with self._exchange.ledger.timed():
            targets = self._exchange.route.returned_rows
            targets = targets if places is None else targets[places]
            wide = rows if rows.dtype.itemsize > 2 else rows.float()  # many small shares add up
            return wide.new_zeros(self._shape).index_add_(0, targets, wide).to(self._dtype)


def foretold(
    bound: Bound, fresh: Tensor, held: Tensor, versions: np.ndarray, epoch: int, now: Tensor | bool, by_row: bool
) -> Tensor:
    """Return what a bound will find exceeded in the coming step, if values go on as they did since they were sent.

    The existing gap grows by its share of an epoch; what is sent in this step begins again with that share.

    Args:
        bound: Looks at changes.
        fresh: (num_rows, width) values of this step.
        held: (num_rows, width) what receivers held before it.
        versions: Epochs in which that was sent, one a row, or one.
        epoch: Epoch of this step.
        now: Whether it is sent in this step: by row, or all of it.
        by_row: Whether rows are looked at by themselves.

    Returns:
        (num_rows,) bool, or one bool.
    """
    age = torch.from_numpy(np.maximum(epoch - versions, 1)).to(fresh.device).double()
    sent = torch.as_tensor(now, device=fresh.device)
    factor = torch.where(sent, 1 / age, (age + 1) / age)
    return bound.exceeded(fresh, held, by_row, factor if by_row else factor[0])


def clipped(grad: Tensor, largest: float) -> Tensor:
    """Return values scaled so that their norm is at most `largest`."""
    norm = (grad if grad.dtype.itemsize > 2 else grad.float()).norm()
    return grad * (largest / norm).to(grad.dtype) if bool(norm > largest) else grad
