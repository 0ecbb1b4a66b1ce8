"""Row quantisation in Triton: the bits of plain torch, the hash of the generator, exact arithmetic when compiled."""

import numpy as np
import pytest
import torch
from own_python import run_python
from quantize_forms import BITS, DTYPES, KEY, odd_ids, odd_rows, run_form, same_bits

from lightning_gnnscale import rng
from lightning_gnnscale.triton_kernels.quantize_rows import reference
from tests.tiers import all_pairs

LAUNCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors


@all_pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("num_rows", "width"), [(5, 1), (5, 3), (5, 63), (5, 64), (5, 65), (5, 130), (2, 4101)])
def test_triton_and_plain_torch_give_the_same_bits(num_rows, width, bits, dtype):
    pytest.importorskip("triton")
    x = odd_rows(num_rows, width, dtype, width + bits).to(LAUNCH_DEVICE)
    row_ids = odd_ids(num_rows, 1).to(LAUNCH_DEVICE)
    for held in (None, odd_rows(num_rows, width, dtype, 2).to(LAUNCH_DEVICE)):
        results = [run_form(form, x, bits, KEY, row_ids, held) for form in ("triton", "reference")]
        for launched, plain in zip(*results, strict=True):
            assert same_bits(launched, plain)


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_keys_of_any_size_reach_every_form(key):
    pytest.importorskip("triton")
    x, row_ids = odd_rows(2, 9, torch.float32, 3).to(LAUNCH_DEVICE), torch.tensor([0, -1], device=LAUNCH_DEVICE)
    results = [run_form(form, x, 4, key, row_ids, None) for form in ("op", "triton", "reference")]
    for values in zip(*results, strict=True):
        assert same_bits(values[0], values[1]) and same_bits(values[0], values[2])


VALUES = [0, 1, 2, 12345, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def test_plain_torch_hashes_as_the_generator_does():
    values = np.array(VALUES, np.uint64)
    signed = torch.from_numpy(values.view(np.int64))
    assert reference.mix64(signed).numpy().view(np.uint64).tolist() == rng.mix64_array(values).tolist()
    for key in VALUES:
        mixed = reference.combine(key, signed).numpy().view(np.uint64)
        assert mixed.tolist() == rng.combine_array(np.uint64(key), values).tolist()


def test_triton_hashes_as_the_generator_does():
    pytest.importorskip("triton")
    from hash_kernel import hash_kernel

    values = np.array(VALUES, np.uint64)
    given = torch.from_numpy(values.view(np.int64)).to(LAUNCH_DEVICE)
    mixed, folded = torch.zeros_like(given), torch.zeros_like(given)
    for key in VALUES:
        hash_kernel[(1,)](given, torch.full_like(given, key - 2**64 if key >= 2**63 else key), mixed, folded, num=8)
        assert mixed.cpu().numpy().view(np.uint64).tolist() == rng.mix64_array(values).tolist()
        assert folded.cpu().numpy().view(np.uint64).tolist() == rng.combine_array(np.uint64(key), values).tolist()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_gnnscale.triton_kernels.quantize_rows import kernel

for floating, bits, flag in [("fp32", 16, True), ("fp32", 4, False), ("fp32", 2, True), ("fp64", 8, True)]:
    encode = dict(x_ptr="*" + floating, held_ptr="*" + floating, row_ids_ptr="*i64", out_ptr="*u8", key="i64",
                  width="i32", row_bytes="i32", BITS=bits, HAS_HELD=flag, GROUPS=32)
    decode = dict(codes_ptr="*u8", out_ptr="*" + floating, width="i32", row_bytes="i32", BITS=bits, ADD=flag, BLOCK=128)
    for function, arguments in ((kernel.encode_kernel, encode), (kernel.decode_kernel, decode)):
        types = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
        constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
        source = ASTSource(function, signature=types, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        code = compiled.asm["ptx"]
        assert compiled.asm["cubin"] and "div.rn" in code
        for inexact in ("fma.", "mad.rn.f", "div.full", "div.approx", "rcp.", "mul.ftz", "add.ftz", "sub.ftz"):
            assert inexact not in code, (function, floating, bits, inexact)
"""


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_with_exact_arithmetic(tmp_path):
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_cuda_gives_the_bits_of_the_cpu(bits, dtype):
    for width in (1, 63, 65, 128, 5000):
        x, held, row_ids = odd_rows(300, width, dtype, 7), odd_rows(300, width, dtype, 8), odd_ids(300, 7)
        for before in (None, held):
            on_cpu = run_form("op", x, bits, KEY, row_ids, before)
            moved = None if before is None else before.cuda()
            on_gpu = run_form("op", x.cuda(), bits, KEY, row_ids.cuda(), moved)
            for one, two in zip(on_cpu, on_gpu, strict=True):
                assert same_bits(one, two)
