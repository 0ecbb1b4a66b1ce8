"""Dropout whose mask is a hash of (key, position): torch's own costs more than a layer's sums on the CPU."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..jit import kernel
from ..rng import GOLDEN, fold, mix64

COMPILED = (torch.float32, torch.float64)


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero values at random and scale the others by 1 / (1 - probability); differentiable.

    The key is one draw of torch's generator, so whoever seeds torch decides the mask. The backward draws the same
    mask again: none is kept. Other devices and half types take torch's own dropout.

    Args:
        x: any shape.
        probability: in [0, 1), kept to 32 bits.
        training: False returns x itself.

    Cost: one hash for two values. Measured on a busy core, 6,400,000 float32 values, forward: 30 ms, torch's 280.
    """
    if probability == 0 or not training:
        return x
    if x.device.type != "cpu" or x.dtype not in COMPILED:
        return F.dropout(x, probability)
    key = fold(int(torch.randint(torch.iinfo(torch.int64).max, ())))
    return _Dropout.apply(x, key, probability)


class _Dropout(Function):
    @staticmethod
    def forward(ctx, x, key, probability):
        ctx.key, ctx.probability = key, probability
        return _dropped(x, key, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _dropped(grad, ctx.key, ctx.probability), None, None


def _dropped(x: Tensor, key: int, probability: float) -> Tensor:
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    threshold = np.uint64(round(probability * 2**32))
    scale = x.numpy().dtype.type(1 / (1 - probability))
    _drop(x.view(-1).numpy(), np.uint64(key), threshold, scale, out.view(-1).numpy())
    return out


@kernel
def _drop(x, key, threshold, scale, out):
    """Write x * scale where the position's 32 bits reach the threshold, else 0: low bits first, then high ones."""
    zero = x.dtype.type(0)
    low = np.uint64(0xFFFFFFFF)
    for pair in range(len(x) // 2):
        bits = mix64(key + np.uint64(pair) * GOLDEN)
        i = 2 * pair
        out[i] = x[i] * scale if (bits & low) >= threshold else zero
        out[i + 1] = x[i + 1] * scale if (bits >> np.uint64(32)) >= threshold else zero
    if len(x) % 2:
        last = len(x) - 1
        out[last] = x[last] * scale if (mix64(key + np.uint64(last // 2) * GOLDEN) & low) >= threshold else zero
