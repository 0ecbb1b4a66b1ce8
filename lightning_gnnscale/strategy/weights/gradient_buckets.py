"""Gradients on their way between ranks: buckets of about one size, sent after a backward or while it goes on."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import StrategyError
from .. import averaging


@torch.no_grad()
def reduce_gradients(parameters: list[Tensor], weight: float, bucket_bytes: int, mean: bool = True) -> int:
    """Replace gradients by their weighted mean or sum over all ranks, in place.

    Args:
        parameters: the same on every rank; `.grad` may be None.
        weight: this rank's weight, an integer >= 0.
        bucket_bytes: size of the messages, roughly.
        mean: divide by the sum of the weights.

    Returns:
        Bytes that this rank handed to the process group.

    Raises:
        StrategyError: a gradient is sparse, or another process was lost.
    """
    _check_dense(parameters)
    buckets = Buckets(parameters, bucket_bytes)
    with averaging.clear_error("averaging gradients"):
        works = [buckets.send(number, weight) for number in range(len(buckets.parameters))]
        works.append(buckets.send_header(weight))
        for work in works:
            work.wait()
    return buckets.take(mean)


class Buckets:
    """The gradients of one step on their way, in messages of about one size; ranks send them in one order.

    Args:
        parameters: the same on every rank; `.grad` may be None when it is sent.
        bucket_bytes: size of the messages, roughly.
    """

    def __init__(self, parameters: list[Tensor], bucket_bytes: int):
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        self.parameters = _buckets(parameters, max(1, bucket_bytes // self.dtype.itemsize))
        self._all, self._messages, self._header = parameters, [None] * len(self.parameters), None
        self._missing: list[int] = []

    def send(self, number: int, weight: float) -> dist.Work:
        """Begin to add up the gradients of a bucket over all ranks, each times its rank's weight."""
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters[number]]
        message = torch.cat([gradient.reshape(-1).to(self.dtype) for gradient in flat]).mul_(weight)
        self._messages[number] = message
        return dist.all_reduce(message, async_op=True)

    def send_header(self, weight: float) -> dist.Work:
        """Begin to add up the weights, and on how many ranks each parameter has a gradient; after the backward."""
        # Filled on the device, and read on the host only where a gradient is missing here: a GPU is not waited for.
        self._missing = [number for number, p in enumerate(self._all) if p.grad is None]
        header = torch.ones(1 + len(self._all), dtype=self.dtype, device=self._all[0].device)
        header[0] = weight
        for number in self._missing:
            header[1 + number] = 0
        self._header = header
        return dist.all_reduce(header, async_op=True)

    def take(self, mean: bool) -> int:
        """Put the joined gradients in place, once all messages are there; return the bytes that this rank sent."""
        header = self._header
        present = iter(header[1:].tolist() if self._missing else [1.0] * len(self._all))
        for bucket, message in zip(self.parameters, self._messages, strict=True):
            if mean:
                message.div_(header[0].clamp(min=1))  # counts; no targets at all leave a gradient of zero
            for p, values in zip(bucket, message.split([p.numel() for p in bucket]), strict=True):
                if next(present):
                    p.grad = values.reshape(p.shape).to(p.dtype)
        return sum(message.numel() * message.element_size() for message in (header, *self._messages))


class EarlyBuckets:
    """Sends buckets while a backward goes on, the last parameters' first, as soon as all their gradients are there.

    A bucket waits for those before it: autograd may finish in another order on another rank.

    Args:
        parameters: those of the optimizer that are trained.
        bucket_bytes: see `Buckets`.
    """

    def __init__(self, parameters: list[Tensor], bucket_bytes: int):
        self.parameters, self._bucket_bytes = parameters, bucket_bytes
        self._bucket_of = {
            p: number for number, own in enumerate(Buckets(parameters, bucket_bytes).parameters) for p in own
        }
        self._buckets: Buckets | None = None
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Whether these are its parameters."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    @contextmanager
    def sending(self, weight: float) -> Iterator[None]:
        """Send the gradients of the backward in the block, which is the last one of a step."""
        self._buckets, self._works, self._weight = Buckets(self.parameters, self._bucket_bytes), [], weight
        self._awaited = [len(own) for own in self._buckets.parameters]
        try:
            yield
        except BaseException:
            self._buckets = None
            raise

    def join(self, weight: float, mean: bool) -> int:
        """Send the rest, and put the joined gradients in place; see `reduce_gradients`."""
        buckets, self._buckets = self._buckets, None
        _check_dense(self.parameters)
        with averaging.clear_error("averaging gradients"):
            for number in range(len(buckets.parameters) - 1 - len(self._works), -1, -1):
                self._works.append(buckets.send(number, weight))
            for work in [*self._works, buckets.send_header(weight)]:
                work.wait()
        self._works = []
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
        while len(self._works) < len(self._awaited):
            number = len(self._awaited) - 1 - len(self._works)
            if self._awaited[number]:
                return
            with averaging.clear_error("averaging gradients"):
                self._works.append(buckets.send(number, self._weight))


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
