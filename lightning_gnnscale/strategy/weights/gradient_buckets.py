"""Gradients on their way between ranks: buckets of about one size, sent after a backward or while it goes on."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import StrategyError
from .. import averaging
from .tree_sum import TreeSum


class Buckets:
    """The gradients of one step on their way, in messages of about one size; ranks send them in one order.

    They become their weighted mean or sum over all logical ranks, added up in an order of the logical ranks alone. A
    process calls `hold` for each of its logical ranks but the last, then `send` for every bucket with the gradients of
    the last one, `send_header` and `take`.

    Args:
        parameters: the same on every rank; `.grad` may be None when it is sent.
        bucket_bytes: size of the messages, roughly.
        count: logical ranks; None: as many as processes.
        in_order: see `TreeSum`.
    """

    def __init__(self, parameters: list[Tensor], bucket_bytes: int, count: int | None = None, in_order: bool = True):
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        self.parameters = _buckets(parameters, max(1, bucket_bytes // self.dtype.itemsize))
        count = count or averaging.world_size()
        self._all, self._sums = parameters, [TreeSum(count, in_order) for _ in self.parameters]
        self._header: Tensor | None = None
        self._header_work: dist.Work | None = None
        self._missing: list[int] = []

    def hold(self, weight: float) -> None:
        """Add the gradients of a logical rank that others of this process follow, times its weight; it keeps none."""
        _check_dense(self._all)
        for number in range(len(self.parameters)):
            self._add(number, weight)
        self._add_header(weight)
        for p in self._all:
            p.grad = None

    def send(self, number: int, weight: float) -> None:
        """Add the gradients of a bucket times a weight, and begin to add it up over all processes."""
        self._add(number, weight)
        self._sums[number].send()

    def send_header(self, weight: float) -> None:
        """Begin to add up the weights, and on how many ranks each parameter has a gradient; after the backward."""
        self._add_header(weight)
        if averaging.world_size() > 1:
            self._header_work = dist.all_reduce(self._header, async_op=True)  # counts: exact in any order

    @torch.no_grad()
    def take(self, mean: bool) -> int:
        """Put the joined gradients in place, once all messages are there; return the bytes that this rank sent."""
        for one in self._sums:
            one.spread()
        if self._header_work is not None:
            self._header_work.wait()
        header = self._header
        present = iter(header[1:].tolist() if self._missing else [1.0] * len(self._all))
        for bucket, one in zip(self.parameters, self._sums, strict=True):
            message = one.total()
            if mean:
                message.div_(header[0].clamp(min=1))  # counts; no targets at all leave a gradient of zero
            for p, values in zip(bucket, message.split([p.numel() for p in bucket]), strict=True):
                if next(present):
                    p.grad = values.reshape(p.shape).to(p.dtype)
        sent = sum(one.num_bytes for one in self._sums)
        return sent + (0 if self._header_work is None else header.numel() * header.element_size())

    @torch.no_grad()
    def _add(self, number: int, weight: float) -> None:
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters[number]]
        self._sums[number].add(torch.cat([gradient.reshape(-1).to(self.dtype) for gradient in flat]).mul_(weight))

    def _add_header(self, weight: float) -> None:
        # Filled on the device, and read on the host only where a gradient is missing here: a GPU is not waited for.
        missing = [number for number, p in enumerate(self._all) if p.grad is None]
        header = torch.ones(1 + len(self._all), dtype=self.dtype, device=self._all[0].device)
        header[0] = weight
        for number in missing:
            header[1 + number] = 0
        self._missing += missing
        self._header = header if self._header is None else self._header.add_(header)


def reduce_gradients(buckets: Buckets, weight: float, mean: bool = True) -> int:
    """Replace gradients by their weighted mean or sum over all logical ranks, in place.

    Args:
        buckets: those of the parameters, with the gradients of this process's other logical ranks.
        weight: the last one's weight, an integer >= 0.
        mean: divide by the sum of the weights.

    Returns:
        Bytes that this process handed to the process group.

    Raises:
        StrategyError: a gradient is sparse, or another process was lost.
    """
    _check_dense([p for bucket in buckets.parameters for p in bucket])
    with averaging.clear_error("averaging gradients"):
        for number in range(len(buckets.parameters)):
            buckets.send(number, weight)
        buckets.send_header(weight)
        return buckets.take(mean)


class EarlyBuckets:
    """Sends buckets while a backward goes on, the last parameters' first, as soon as all their gradients are there.

    A bucket waits for those before it: autograd may finish in another order on another rank.

    Args:
        parameters: those of the optimizer that are trained.
        bucket_bytes: see `Buckets`.
    """

    def __init__(self, parameters: list[Tensor], bucket_bytes: int):
        self.parameters = parameters
        self._bucket_of = {
            p: number for number, own in enumerate(Buckets(parameters, bucket_bytes).parameters) for p in own
        }
        self._buckets: Buckets | None = None
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Whether these are its parameters."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    @contextmanager
    def sending(self, buckets: Buckets, weight: float) -> Iterator[None]:
        """Send the gradients of the backward in the block, which is the last one of a step.

        Args:
            buckets: of the same parameters, and about as large.
            weight: of the gradients.
        """
        self._buckets, self._sent, self._weight = buckets, 0, weight
        self._awaited = [len(own) for own in buckets.parameters]
        try:
            yield
        except BaseException:
            self._buckets = None
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send nothing while gradients of another logical rank are computed, in the block."""
        sending, self._buckets = self._buckets, None
        yield
        self._buckets = sending

    def join(self, weight: float, mean: bool) -> int:
        """Send the rest, and put the joined gradients in place; see `reduce_gradients`."""
        buckets, self._buckets = self._buckets, None
        _check_dense(self.parameters)
        with averaging.clear_error("averaging gradients"):
            for number in range(len(buckets.parameters) - 1 - self._sent, -1, -1):
                buckets.send(number, weight)
            buckets.send_header(weight)
            return buckets.take(mean)

    def close(self) -> None:
        """Leave the parameters."""
        for handle in self._handles:
            handle.remove()

    def _note(self, parameter: Tensor) -> None:
        """Count a gradient that is there, and send the buckets that are whole."""
        buckets = self._buckets
        if buckets is None:
            return
        own = self._bucket_of[parameter]
        self._awaited[own] -= 1
        if self._awaited[own] < 0:
            raise StrategyError(
                "GradientAveraging(overlap=True) needs one backward a step, and a gradient was added to after it was "
                "sent: say overlap=False"
            )
        _check_dense([parameter])
        while self._sent < len(self._awaited):
            number = len(self._awaited) - 1 - self._sent
            if self._awaited[number]:
                return
            with averaging.clear_error("averaging gradients"):
                buckets.send(number, self._weight)
            self._sent += 1


def _check_dense(parameters: list[Tensor]) -> None:
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise StrategyError("GradientAveraging cannot average sparse gradients: build the embedding with sparse=False")


def _buckets(parameters: list[Tensor], capacity: int) -> list[list[Tensor]]:
    buckets, space = [], 0
    for parameter in parameters:
        if not buckets or parameter.numel() > space:
            buckets.append([])
            space = capacity
        buckets[-1].append(parameter)
        space -= parameter.numel()
    return buckets
