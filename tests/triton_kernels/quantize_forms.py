"""Rows that are hard to quantise, and the three forms of the operation run alike."""

import numpy as np
import torch

from lightning_gnnscale.triton_kernels.quantize_rows import decode_rows, encode_rows, op, reference, row_bytes

BITS = [16, 8, 4, 2]
DTYPES = [torch.float32, torch.float64]
KEY = 0x9E3779B97F4A7C15  # above 2**63


def odd_rows(num_rows, width, dtype, seed):
    """Normal rows of magnitudes from subnormal to nearly infinite, rows of zeros, and values that are no number."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((num_rows, width))
    rows *= random.choice([1, 1, 1e-3, 1e-29, 1e-41, 1e37, 0, -0.0], (num_rows, 1))
    rows[random.random(rows.shape) < 0.05] = 0
    rows = torch.from_numpy(rows).to(dtype)
    for i in np.flatnonzero(random.random(num_rows) < 0.15):
        rows[i, random.integers(width)] = random.choice([np.nan, np.inf, -np.inf, 3.4e38])
    return rows


def odd_ids(num_rows, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**62, num_rows))


def same_bits(one, two):
    """Equal bit for bit, but for the payload of NaN."""
    if one.is_floating_point():
        assert torch.equal(one.isnan(), two.isnan())
        integer = torch.int32 if one.dtype == torch.float32 else torch.int64
        one, two = (value.nan_to_num(0.0, torch.inf, -torch.inf).view(integer) for value in (one, two))
    return one.dtype == two.dtype and torch.equal(one, two)


def run_form(form, x, bits, key, row_ids, held):
    """Encode, decode and add with one form; every output is filled with what must not stay."""
    width, device = x.shape[1], x.device
    codes = torch.full((len(x), row_bytes(width, bits)), 0xA5, dtype=torch.uint8, device=device)
    held = None if held is None else held.clone()
    fresh, added = torch.full_like(x, torch.nan), torch.ones_like(x)
    if form == "op":
        assert encode_rows(x, bits, key, row_ids, held, codes) is codes
        assert decode_rows(codes, width, bits, out=fresh) is fresh
        assert decode_rows(codes, width, bits, add_to=added) is added
    else:
        encode, decode = {
            "reference": (reference.encode, reference.decode),
            "triton": (op.encode_with_triton, op.decode_with_triton),
        }[form]
        with np.errstate(all="ignore"):  # the interpreter divides in numpy, by scales of 0 too
            encode(x, held, key, row_ids, bits, codes)
            decode(codes, bits, fresh, False)
            decode(codes, bits, added, True)
    return [value.cpu() for value in (codes, fresh, added, *([] if held is None else [held]))]
