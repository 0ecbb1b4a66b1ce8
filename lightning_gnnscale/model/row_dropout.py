"""Dropout whose mask hangs on ids of rows, not on their positions: every process drops the same values of a node."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..jit import kernel
from ..rng import GOLDEN, fold
from ..rng import mix64 as mix_one
from .dropout import COMPILED
from .sparse_linear import SparseInput, is_sparse

_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class RowDropout:
    """Dropout of one layer in one step.

    Attributes:
        probability: in [0, 1); 0 changes nothing.
        key: uint64, the same on every process: one draw of torch's generator, which the strategy seeds alike.

    Cost: one hash for two values, one for each nonzero of sparse rows.
    """

    probability: float
    key: int = 0

    @classmethod
    def draw(cls, probability: float, training: bool) -> "RowDropout":
        """Return the dropout of the next layer; outside of training it does nothing and draws nothing."""
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
            ids: (num_rows,) int64, what a row's mask hangs on.
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
    _drop_rows(x.numpy(), ids.numpy(), np.uint64(key), _threshold(probability), scale, out.numpy())
    return out


def _threshold(probability: float) -> np.uint64:
    return np.uint64(round(probability * 2**32))


@kernel
def _drop_rows(x, ids, key, threshold, scale, out):
    """Write x * scale where the 32 bits of (key, id, column) reach the threshold, else 0."""
    zero, low, high = x.dtype.type(0), np.uint64(0xFFFFFFFF), np.uint64(32)
    width = x.shape[1]
    for row in range(x.shape[0]):
        row_key = mix_one(key + np.uint64(ids[row]) * GOLDEN)
        for pair in range((width + 1) // 2):
            bits = mix_one(row_key + np.uint64(pair) * GOLDEN)
            c = 2 * pair
            out[row, c] = x[row, c] * scale if (bits & low) >= threshold else zero
            if c + 1 < width:
                out[row, c + 1] = x[row, c + 1] * scale if (bits >> high) >= threshold else zero


def _keep(ids: Tensor, width: int, key: int, probability: float) -> Tensor:
    """Return the (num_rows, width) mask of `_drop_rows` in torch, on the device of ids."""
    golden = _signed(int(GOLDEN))
    row_key = mix64(_signed(key) + ids * golden)
    pairs = torch.arange((width + 1) // 2, device=ids.device)
    bits = mix64(row_key.unsqueeze(1) + pairs * golden)
    halves = torch.stack([bits & _LOW_32, (bits >> 32) & _LOW_32], dim=-1).flatten(1)[:, :width]
    return halves >= int(_threshold(probability))


def mix64(value: Tensor) -> Tensor:
    """Mix int64 into int64, elementwise: `rng.mix64` in torch's wrapping arithmetic."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
