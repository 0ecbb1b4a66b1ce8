"""Softmax over rows in Triton and in its permuted form: equal to plain torch, gradients, hubs and empty rows too."""

import pytest
import torch
from own_python import run_python

from lightning_gnnscale.triton_kernels.aggregate import device, edge_softmax, reference
from lightning_gnnscale.triton_kernels.aggregate.op import EdgeSoftmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors


def some_logits(rows, heads, seed, dtype=torch.float64):
    """Logits far apart, a quarter of them -inf, and a permutation of their places."""
    generator = torch.Generator().manual_seed(seed)
    logits = 30 * torch.randn(sum(rows), heads, generator=generator, dtype=torch.float64)
    logits[torch.rand(sum(rows), heads, generator=generator) < 0.25] = -torch.inf
    place = torch.randperm(sum(rows), generator=generator)
    grad = torch.randn(sum(rows), heads, generator=generator, dtype=torch.float64)
    indptr = torch.tensor([0, *rows]).cumsum(0)
    return [part.to(DEVICE) for part in (logits.to(dtype), indptr, place, grad.to(dtype))]


def expected(logits, indptr, place, grad):
    wide = logits.detach().double().requires_grad_()
    out = reference.edge_softmax(wide[place], indptr)
    out = torch.empty_like(out).index_copy(0, place, out)
    out.backward(grad.double())
    return out.detach(), wide.grad


@pytest.mark.parametrize("rows", [[9], [3, 20, 3], [0, 8, 0, 17, 9, 0], [40, 40], [4, 4, 5, 1], [0, 0]])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("placed", [False, True])
def test_shares_and_gradients_equal_plain_torch(monkeypatch, rows, heads, placed):
    """Rows of more edges than one program takes, into memory that holds NaN."""
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "LIMIT", 8)
    logits, indptr, place, grad = some_logits(rows, heads, len(rows))
    place = place if placed else torch.arange(len(logits), device=DEVICE)
    wanted = expected(logits, indptr, place, grad)
    logits.requires_grad_()
    for name in ("empty", "empty_like"):
        function = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _f=function, **b: _f(*a, **b).fill_(torch.nan))
    out = EdgeSoftmax.apply(device, logits, indptr, place if placed else None)
    out.backward(grad)
    monkeypatch.undo()
    # float64: sums of up to 40 terms below 1 in another order
    torch.testing.assert_close(out, wanted[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(logits.grad, wanted[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(dtype):
    pytest.importorskip("triton")
    logits, indptr, place, grad = some_logits([3, 0, 50], 2, 1, dtype)
    wanted = expected(logits, indptr, place, grad)
    out = EdgeSoftmax.apply(device, logits.requires_grad_(), indptr, place)
    out.backward(grad)
    limit = 2 * torch.finfo(dtype).eps  # shares are at most 1 and rounded once, as float32 powers of 30 * 2**-23 are
    torch.testing.assert_close(out.double(), wanted[0], rtol=0, atol=max(limit, 1e-5))
    torch.testing.assert_close(logits.grad.double(), wanted[1], rtol=0, atol=max(4 * limit, 4e-5))


def test_places_on_the_cpu():
    logits, indptr, place, grad = (part.cpu() for part in some_logits([3, 0, 20, 1], 2, 2))
    wanted = expected(logits, indptr, place, grad)
    out = edge_softmax(logits.requires_grad_(), indptr, place)
    torch.testing.assert_close(out, wanted[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(out, logits, grad)[0], wanted[1], rtol=0, atol=1e-13)


COMPILE = """
from tests.triton_kernels.hopper import compiled
from lightning_gnnscale.triton_kernels.aggregate import kernel as kernels

for values, sums in (("fp32", "fp32"), ("bf16", "fp32"), ("fp64", "fp64")):
    for back in (False, True):
        given = dict.fromkeys(("value_ptr", "grad_ptr", "out_ptr"), "*" + values)
        given |= dict.fromkeys(("partial_ptr", "row_ptr"), "*" + sums)
        given |= dict(place_ptr="*i64", indptr_ptr="*i64", num_rows="i32", num_edges="i32", heads="i32", BACK=back,
                      PLACED=back, LIMIT=1024, EDGES=128, HEADS=4)
        given |= dict(WRITES=back)
        for kernel in (kernels.softmax_kernel, kernels.softmax_hubs_kernel):
            found = compiled(kernel, **given)
            assert not found.atomics and found.spilled in (0, None), (values, found)
"""


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_without_atomics_and_spills(tmp_path):
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_cuda_equals_plain_torch_and_itself():
    logits, indptr, place, grad = some_logits([40] * 30 + [0, 3000], 4, 3)
    wanted, results = expected(logits, indptr, place, grad), []
    for _ in range(2):
        given = logits.clone().requires_grad_()
        out = edge_softmax(given, indptr, place)
        results.append([out.detach(), torch.autograd.grad(out, given, grad)[0]])
    for first, second, right in zip(*results, wanted, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, right, rtol=0, atol=1e-12)
