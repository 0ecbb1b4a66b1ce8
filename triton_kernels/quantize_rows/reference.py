"""Row quantisation in plain torch: the oracle of the compiled forms, bit for bit, and the path where Triton is missing.

Divisions are of tensor by tensor: torch turns those by a number into products with its inverse on some devices.
"""

import torch
from torch import Tensor

from ...rng import GOLDEN

_MULTIPLY_1, _MULTIPLY_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SCALE_INF, SCALE_NAN = 0x7F80, 0x7FC0  # bits of bfloat16


def encode(x: Tensor, held: Tensor | None, key: int, row_ids: Tensor, bits: int, out: Tensor) -> None:
    """Write the codes of x, or of x - held, to out; arguments as for `encode_rows`.

    Cost: about 40 bytes of passing memory a value.
    """
    levels = 2 ** (bits - 1) - 1
    value = x if held is None else x - held
    scale = _scale(value)
    regular = ((scale != 0) & (scale != SCALE_NAN)).unsqueeze(1)
    number = _to_float(scale, x.dtype)
    most = torch.full_like(number, levels)
    scaled = torch.where(regular, value * (most / number), torch.zeros_like(value)).clamp(-levels, levels)
    lower = scaled.floor()
    sample = _samples(key, row_ids, x.shape[1]).to(x.dtype) * 2.0**-16 + 2.0**-17
    codes = lower.to(torch.int64) + (scaled - lower > sample)
    out[:, 0], out[:, 1] = (scale & 0xFF).to(torch.uint8), (scale >> 8).to(torch.uint8)
    out[:, 2:] = _pack(codes, levels, bits)
    if held is not None:
        held += codes.to(x.dtype) * (number / most)


def decode(codes: Tensor, bits: int, out: Tensor, add: bool) -> None:
    """Write the decoded rows to out, or add them to it; arguments as for `decode_rows`."""
    levels = 2 ** (bits - 1) - 1
    number = _to_float(codes[:, 0].to(torch.int64) | codes[:, 1].to(torch.int64) << 8, out.dtype)
    value = _unpack(codes[:, 2:], out.shape[1], levels, bits).to(out.dtype)
    value = value * (number / torch.full_like(number, levels))
    if add:
        out += value
    else:
        out.copy_(value)


def _scale(value: Tensor) -> Tensor:
    """Return (num_rows,) int64: the bits of the largest magnitude as bfloat16, rounded up; 0, or at least 2**-100."""
    if value.dtype == torch.float32:
        integer, shift, below, least = torch.int32, 16, 0, (127 - 100) << 23
    else:
        integer, shift, below, least = torch.int64, 45, (1023 - 127) << 52, (1023 - 100) << 52
    top = (value.contiguous().view(integer) & torch.iinfo(integer).max).amax(1).to(torch.int64)
    rounded = (top.clamp(min=least) - below + (1 << shift) - 1) >> shift
    rounded = torch.where(rounded < SCALE_INF, rounded, SCALE_NAN)
    return torch.where(top == 0, 0, rounded)


def _to_float(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (num_rows, 1): the bfloat16 numbers with these bits."""
    return (scale << 16).to(torch.int32).view(torch.float32).to(dtype).unsqueeze(1)


def _samples(key: int, row_ids: Tensor, width: int) -> Tensor:
    """Return (num_rows, width) int64 in [0, 2**16): the random bits of each value."""
    row_key = combine(key, row_ids).unsqueeze(1)
    column = torch.arange(width, device=row_ids.device)
    return mix64(row_key + (column // 4 + 1) * _signed(int(GOLDEN))) >> column % 4 * 16 & 0xFFFF


def combine(key: int, value: Tensor) -> Tensor:
    """Fold int64 tensors into a uint64 key: `rng.combine`, the bits held as int64."""
    return mix64(_signed(key) ^ mix64(value + _signed(int(GOLDEN))))


def mix64(value: Tensor) -> Tensor:
    """Mix int64 tensors as if they were uint64: `rng.mix64`."""
    value = (value ^ _shift_right(value, 30)) * _signed(_MULTIPLY_1)
    value = (value ^ _shift_right(value, 27)) * _signed(_MULTIPLY_2)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, count: int) -> Tensor:
    return value >> count & (1 << 64 - count) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _pack(codes: Tensor, levels: int, bits: int) -> Tensor:
    """Return (num_rows, num_bytes) uint8."""
    if bits == 16:
        return codes.to(torch.int16).view(torch.uint8)
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes + levels, (0, -codes.shape[1] % per_byte))
    lowest = torch.arange(per_byte, device=codes.device) * bits
    return (codes.view(len(codes), -1, per_byte) << lowest).sum(2).to(torch.uint8)


def _unpack(packed: Tensor, width: int, levels: int, bits: int) -> Tensor:
    """Return (num_rows, width) integer codes."""
    if bits == 16:
        return packed.contiguous().view(torch.int16)
    per_byte = 8 // bits
    lowest = torch.arange(per_byte, device=packed.device) * bits
    codes = packed.to(torch.int64).unsqueeze(2) >> lowest & 2**bits - 1
    return codes.view(len(packed), -1)[:, :width] - levels
