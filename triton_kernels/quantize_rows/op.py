"""Checked entry points; the device of the rows decides which form runs, and all give the same bits."""

from types import ModuleType

import torch
from torch import Tensor

from .. import triton_kernels_of
from . import cpu, reference

BITS = (16, 8, 4, 2)


def row_bytes(width: int, bits: int) -> int:
    """Return the bytes of an encoded row: 2 of scale, and ceil(width * bits / 8) of codes.

    Raises:
        ValueError: width is below 1, or bits is not 16, 8, 4 or 2.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be 16, 8, 4 or 2, got {bits}")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    return 2 + -(-width * bits // 8)


def encode_rows(
    x: Tensor, bits: int, key: int, row_ids: Tensor, held: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Encode each row as a bfloat16 scale and codes of a few bits, rounded at random so that the mean is the value.

    With L = 2**(bits - 1) - 1 levels on either side and s the row's largest magnitude rounded up to bfloat16 (at least
    2**-100), v * (L / s) is rounded up with the probability of its fraction, else down, to q in [-L, L]; q * (s / L)
    is what `decode_rows` gives, at most s / L from v. The mean over keys is v up to s / L * 2**-17 and the rounding of
    the dtype. A row of zeros decodes to zeros. A row with NaN, infinity or a magnitude above bfloat16's largest,
    3.39e38, decodes to NaN.

    A row of out: the scale's two bytes, low byte first; then q + L as unsigned codes, value i of a byte in the bits
    from i * bits up, spare bits 0; 16-bit codes are q itself as little-endian int16.

    Args:
        x: (num_rows, width) float32 or float64, width >= 1.
        bits: 16, 8, 4 or 2 (2 gives -s, 0 and s).
        key: in [0, 2**64); the random bits depend on (key, row id, column), never on the position of a row.
        row_ids: (num_rows,) int64.
        held: (num_rows, width), dtype and device of x, contiguous: what the receiver holds. The codes are then those
            of x - held, and held is changed in place to held + decoded, the bits of `decode_rows(..., add_to=held)`.
        out: (num_rows, row_bytes(width, bits)) uint8, contiguous, filled in place; fresh memory if None.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, device, bits or key that does not fit.

    Cost: reads x, and reads and writes held, once; on one CPU core about 1 ns a value at width 128.
    Source: Alistarh et al., QSGD, NeurIPS 2017, section 3 (with the largest magnitude for the norm); ternary codes as
        in Wen et al., TernGrad, NeurIPS 2017. Differs: the scale is rounded up to bfloat16.
    """
    _check_rows(x, "x")
    shape = (len(x), row_bytes(x.shape[1], bits))
    if not 0 <= key < 1 << 64:
        raise ValueError(f"key must be in [0, 2**64), got {key}")
    _check(row_ids, "row_ids", (len(x),), torch.int64, x.device)
    if held is not None:
        _check(held, "held", tuple(x.shape), x.dtype, x.device)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=x.device)
    _check(out, "out", shape, torch.uint8, x.device)
    if len(x) == 0:
        return out
    x, row_ids = x.detach().contiguous(), row_ids.contiguous()
    held = None if held is None else held.detach()
    if x.device.type == "cpu":
        cpu.encode(x.numpy(), None if held is None else held.numpy(), key, row_ids.numpy(), bits, out.numpy())
    elif x.device.type == "cuda" and _triton_kernels() is not None:
        with torch.cuda.device(x.device):
            encode_with_triton(x, held, key, row_ids, bits, out)
    else:
        reference.encode(x, held, key, row_ids, bits, out)
    return out


def decode_rows(
    codes: Tensor,
    width: int,
    bits: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Decode what `encode_rows` wrote.

    Args:
        codes: (num_rows, row_bytes(width, bits)) uint8.
        width, bits: as they were encoded.
        dtype: float32 or float64, of fresh memory; `out` and `add_to` have their own. Bits agree with the sender's
            `held` where the dtypes agree.
        out: (num_rows, width) float32 or float64, contiguous, filled in place; fresh memory if None.
        add_to: the same, added to in place; not together with `out`.

    Returns:
        (num_rows, width): `add_to`, `out` or fresh memory.

    Raises:
        ValueError: a shape, dtype, device or bits that does not fit, or both `out` and `add_to`.

    Cost: reads codes and writes the rows once; on one CPU core about 0.3 ns a value at width 128.
    """
    num_bytes = row_bytes(width, bits)
    if out is not None and add_to is not None:
        raise ValueError("out and add_to must not both be given: pass the one that is to be filled or added to")
    if codes.dim() != 2 or codes.shape[1] != num_bytes or codes.dtype != torch.uint8:
        raise ValueError(
            f"codes must be uint8 of shape (num_rows, {num_bytes}) for width {width} and bits {bits}, "
            f"got {codes.dtype} of shape {tuple(codes.shape)}"
        )
    target, name = (out, "out") if add_to is None else (add_to, "add_to")
    if target is None:
        target = torch.empty((len(codes), width), dtype=dtype, device=codes.device)
    _check_rows(target, name)
    _check(target, name, (len(codes), width), target.dtype, codes.device)
    if len(codes) == 0:
        return target
    codes, values, add = codes.contiguous(), target.detach(), add_to is not None
    if codes.device.type == "cpu":
        cpu.decode(codes.numpy(), bits, values.numpy(), add)
    elif codes.device.type == "cuda" and _triton_kernels() is not None:
        with torch.cuda.device(codes.device):
            decode_with_triton(codes, bits, values, add)
    else:
        reference.decode(codes, bits, values, add)
    return target


def encode_with_triton(x: Tensor, held: Tensor | None, key: int, row_ids: Tensor, bits: int, out: Tensor) -> None:
    """Launch the Triton form on the current device; arguments as for `encode_rows`, contiguous, num_rows >= 1."""
    width = x.shape[1]
    groups = _power_of_two(-(-width // 4), 32, 1024)
    signed = key - (1 << 64) if key >> 63 else key  # a Python int above 2**63 would be another type, and compile again
    _triton_kernels().encode_kernel[(len(x),)](
        x, x if held is None else held, row_ids, out, signed, width, out.shape[1],
        BITS=bits, HAS_HELD=held is not None, GROUPS=groups, num_warps=min(8, groups // 32), enable_fp_fusion=False,
    )  # fmt: skip


def decode_with_triton(codes: Tensor, bits: int, out: Tensor, add: bool) -> None:
    """Launch the Triton form on the current device; arguments as for `decode_rows`, contiguous, num_rows >= 1."""
    block = _power_of_two(out.shape[1], 128, 4096)
    _triton_kernels().decode_kernel[(len(codes),)](
        codes, out, out.shape[1], codes.shape[1],
        BITS=bits, ADD=add, BLOCK=block, num_warps=min(8, block // 128), enable_fp_fusion=False,
    )  # fmt: skip


def _triton_kernels() -> ModuleType | None:
    return triton_kernels_of(__package__)


def _power_of_two(value: int, least: int, most: int) -> int:
    return min(most, max(least, 1 << (value - 1).bit_length()))


def _check_rows(tensor: Tensor, name: str) -> None:
    if tensor.dim() != 2 or tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64 of shape (num_rows, width), "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def _check(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    given = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if given != (shape, dtype, device):
        raise ValueError(
            f"{name} must be {dtype} of shape {shape} on {device}, got {given[1]} of shape {given[0]} on {given[2]}"
        )
    if name != "row_ids" and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}: pass its .contiguous() copy")
