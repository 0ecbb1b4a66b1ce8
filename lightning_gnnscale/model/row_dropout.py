"""Dropout whose mask depends on ids of rows, not on positions: every process drops the same values of a node."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..jit import kernel
from ..rng import GOLDEN, fold
from ..rng import mix64 as mix_one
from .dropout import COMPILED, GOLDEN_32, MULTIPLY_1, MULTIPLY_2, drop_below, drop_run
from .sparse_linear import SparseInput, is_sparse

_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class RowDropout:
    """Dropout of one layer in one step.

    Attributes:
        probability: in [0, 1); 0 changes nothing.
        key: uint64, the same on every process: one sample of torch's generator, which the strategy seeds alike.

    Cost: a 64-bit hash a row (or nonzero of sparse rows), a 32-bit hash a value.
    """

    probability: float
    key: int = 0

    @classmethod
    def sample(cls, probability: float, training: bool) -> "RowDropout":
        """Return the dropout of the next layer; outside of training it does nothing and samples nothing."""
        if probability == 0 or not training:
            return cls(0.0)
        return cls(probability, fold(int(torch.randint(torch.iinfo(torch.int64).max, ()))))

    @property
    def active(self) -> bool:
        return self.probability > 0

    def __call__(self, x: Tensor | SparseInput, ids: Tensor) -> Tensor | SparseInput:
        """Zero values at random and scale the others by 1 / (1 - probability); differentiable.

        Args:
            x: (num_rows, width), or sparse rows.
            ids: (num_rows,) int64, which decide the rows' masks.
        """
        if not self.active:
            return x
        if is_sparse(x):
            return x._replace(data=self._drop_nonzeros(x, ids))
        return _RowDropout.apply(x, ids, self.key, self.probability)

    def _drop_nonzeros(self, x: SparseInput, ids: Tensor) -> Tensor:
        row = torch.repeat_interleave(ids, x.indptr.diff(), output_size=len(x.data))
        return _RowDropout.apply(x.data.unsqueeze(1), row * x.dim + x.indices, self.key, self.probability).squeeze(1)


class _RowDropout(Function):
    @staticmethod
    def forward(ctx, x, ids, key, probability):
        ctx.save_for_backward(ids)
        ctx.key, ctx.probability = key, probability
        return _dropped(x, ids, key, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _dropped(grad, *ctx.saved_tensors, ctx.key, ctx.probability), None, None, None


def _dropped(x: Tensor, ids: Tensor, key: int, probability: float) -> Tensor:
    if x.device.type != "cpu" or x.dtype not in COMPILED:
        # not a product with the mask: infinity times 0 is NaN
        return (x * (1 / (1 - probability))).masked_fill(~_keep(ids, x.shape[1], key, probability), 0)
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    scale = x.numpy().dtype.type(1 / (1 - probability))
    flat = (x.view(-1).numpy(), x.shape[1], ids.numpy(), np.uint64(key), drop_below(probability), scale)
    _drop_rows(*flat, out.view(-1).numpy())
    return out


@kernel
def _drop_rows(x, width, ids, key, threshold, scale, out):
    for row in range(len(ids)):
        row_key = mix_one(key + np.uint64(ids[row]) * GOLDEN)
        drop_run(x, row * width, width, row_key, threshold, scale, out)


def _keep(ids: Tensor, width: int, key: int, probability: float) -> Tensor:
    """Return the (num_rows, width) mask of `_drop_rows` in torch, on the device of ids."""
    row_key = mix64(_signed(key) + ids * _signed(int(GOLDEN))).unsqueeze(1)
    low, high = row_key & _LOW_32, (row_key >> 32) & _LOW_32
    bits = (low + torch.arange(width, device=ids.device) * int(GOLDEN_32)) & _LOW_32
    bits = ((bits ^ (bits >> 16)) * int(MULTIPLY_1) + high) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * int(MULTIPLY_2)) & _LOW_32
    return (bits ^ (bits >> 16)) >= int(drop_below(probability))


def mix64(value: Tensor) -> Tensor:
    """Mix int64 into int64, elementwise: `rng.mix64` in torch's wrapping arithmetic."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def combine(key: int, ids: Tensor) -> Tensor:
    """Fold int64 ids into a uint64 key, elementwise, on their device: the bits of `rng.combine` as int64."""
    return mix64(mix64(ids + _signed(int(GOLDEN))) ^ _signed(key))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
