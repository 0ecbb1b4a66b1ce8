"""A kernel that applies the generator's hash to arrays, so that tests can look at it."""

import triton
import triton.language as tl

from lightning_gnnscale.triton_kernels.random_bits import combine, mix64


@triton.jit
def hash_kernel(values_ptr, keys_ptr, mixed_ptr, folded_ptr, num: tl.constexpr):
    """Write mix64(value) and combine(key, value) of num uint64 values, held as int64."""
    at = tl.arange(0, num)
    values = tl.load(values_ptr + at).to(tl.uint64)
    tl.store(mixed_ptr + at, mix64(values).to(tl.int64))
    tl.store(folded_ptr + at, combine(tl.load(keys_ptr + at).to(tl.uint64), values).to(tl.int64))
