"""Sums over rows in Triton: equal to plain torch in the interpreter for every dtype and odd size, forward and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_python import run_python

from lightning_gnnscale.triton_kernels.aggregate import aggregate, device, reference, transpose
from lightning_gnnscale.triton_kernels.aggregate.op import SegmentSum, Transposed
from tests.says import said
from tests.tiers import all_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors
# Sums of at most about 12 terms of order 1 in another order; halves are summed in float32 and rounded once at the end.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_rows(num_dst, num_src, num_edges, seed, index_dtype=torch.int64):
    """Edges thrown at random rows: some rows stay empty, one is long, sources repeat."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(num_dst, (num_edges,), generator=generator) if num_edges else torch.zeros(0, dtype=torch.int64)
    row[: num_edges // 4] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row, minlength=num_dst).cumsum(0)])
    indices = torch.randint(num_src, (num_edges,), generator=generator).to(index_dtype)
    return indptr.to(DEVICE), indices.to(DEVICE), generator


def values(shape, dtype, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def close(given, expected, dtype, scale=1.0):
    torch.testing.assert_close(given.double(), expected.double(), rtol=TOLERANCE[dtype], atol=scale * TOLERANCE[dtype])


def x_gradient(grad, indptr, indices, weight, mean, num_src):
    """What plain torch gives back to the sources: the sum is linear, so any sources will do."""
    x = grad.new_zeros((num_src, *grad.shape[1:])).requires_grad_()
    return torch.autograd.grad(reference.aggregate(x, indptr, indices, weight, mean), x, grad)[0]


def weight_gradient(grad, x, indptr, indices, mean):
    weight = grad.new_zeros((len(indices), grad.shape[1])).requires_grad_()
    return torch.autograd.grad(reference.aggregate(x.detach(), indptr, indices, weight, mean), weight, grad)[0]


@all_pairs
@pytest.mark.parametrize("dtype", list(device.DTYPES))
@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (1, 63), (3, 5), (1, 300), (2, 129)])
@pytest.mark.parametrize("mean", [False, True])
def test_forward_equals_plain_torch(dtype, heads, channels, mean):
    pytest.importorskip("triton")
    index_dtype = torch.int32 if channels % 2 else torch.int64
    indptr, indices, generator = random_rows(6, 9, 37, channels, index_dtype)
    x = values((9, heads, channels), dtype, generator)
    for weight in (None, values((37, heads), torch.float32, generator), values((37, 1), dtype, generator)):
        out = device.gather_sum(x, weight, indptr, indices, mean)
        factors = None if weight is None else weight.double()
        assert out.dtype == dtype
        close(out, reference.aggregate(x.double(), indptr, indices, factors, mean), dtype, 4)


@all_pairs
@pytest.mark.parametrize("dtype", list(device.DTYPES))
@pytest.mark.parametrize(
    ("heads", "channels", "shared"), [(1, 63, False), (3, 5, False), (2, 130, True), (1, 1, False)]
)
@pytest.mark.parametrize("mean", [False, True])
def test_gradients_equal_plain_torch(dtype, heads, channels, shared, mean):
    pytest.importorskip("triton")
    indptr, indices, generator = random_rows(5, 7, 29, heads)
    x = values((7, heads, channels), dtype, generator).requires_grad_()
    weight = values((29, 1 if shared else heads), torch.float32, generator).requires_grad_()
    grad = values((5, heads, channels), dtype, generator)
    SegmentSum.apply(device, x, weight, indptr, indices, mean, None).backward(grad)
    wide = [tensor.detach().double() for tensor in (grad, x, weight)]
    expected = x_gradient(wide[0], indptr, indices, wide[2], mean, 7)
    close(x.grad, expected, dtype, 4)
    assert x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    expected = weight_gradient(wide[0], wide[1], indptr, indices, mean)
    expected = expected.sum(dim=1, keepdim=True) if shared else expected
    # float32 sums of products of exact halves: float32's tolerance for all but float64, over up to 260 terms
    close(weight.grad, expected, torch.float32, 8)


@pytest.mark.parametrize("rows", [[9], [3, 20, 3], [0, 8, 0, 17, 9, 0], [40, 40], [4, 4, 4, 5, 1]])
@pytest.mark.parametrize("mean", [False, True])
def test_edges_of_hubs_are_shared_out(monkeypatch, rows, mean):
    """Hubs that begin and end within a chunk, at its edge, side by side; around them short and empty rows."""
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "LIMIT", 8)
    generator = torch.Generator().manual_seed(len(rows))
    indptr = torch.tensor([0, *rows]).cumsum(0).to(DEVICE)
    indices = torch.randint(6, (sum(rows),), generator=generator).to(DEVICE)
    x = values((6, 2, 19), torch.float64, generator).requires_grad_()
    weight = values((sum(rows), 2), torch.float64, generator).requires_grad_()
    grad = values((len(rows), 2, 19), torch.float64, generator)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(*shape, torch.nan, **options))
    out = SegmentSum.apply(device, x, weight, indptr, indices, mean, None)
    again = device.gather_sum(x.detach(), weight.detach(), indptr, indices, mean)
    out.backward(grad)
    monkeypatch.undo()
    assert torch.equal(out, again)
    wide = [tensor.detach() for tensor in (grad, x, weight)]
    close(out.detach(), reference.aggregate(wide[1], indptr, indices, wide[2], mean), torch.float64, 4)
    close(x.grad, x_gradient(wide[0], indptr, indices, wide[2], mean, 6), torch.float64, 4)
    close(weight.grad, weight_gradient(wide[0], wide[1], indptr, indices, mean), torch.float64, 8)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_edges_by_source_are_the_same_on_every_device(weighted, mean):
    """What fixed edges keep for all backward passes, made by the CPU's kernel and by torch on a device."""
    indptr, indices, generator = random_rows(5, 7, 29, 1)
    weight = values((29,), torch.float32, generator) if weighted else None
    ours = transpose(
        indptr.cpu(), indices.cpu(), None if weight is None else weight.cpu(), 7, "mean" if mean else "sum"
    )
    factors = device.edge_factors(None if weight is None else weight[:, None], indptr, 29, mean, torch.float32)
    factors, offsets, rows = device.by_source(indptr, indices, factors, 7)
    assert torch.equal(ours.indptr, offsets.cpu()) and torch.equal(ours.indices.long(), rows.cpu())
    if factors is None:
        assert not len(ours.weight)
    else:
        close(ours.weight, factors.cpu(), torch.float32)
    if not pytest.importorskip("triton") or not weighted:
        return
    x, grad = values((7, 1, 5), torch.float32, generator).requires_grad_(), values((5, 1, 5), torch.float32, generator)
    gradients = [
        torch.autograd.grad(SegmentSum.apply(device, x, weight[:, None], indptr, indices, mean, kept), x, grad)[0]
        for kept in (None, Transposed(offsets, rows, factors))
    ]
    assert torch.equal(*gradients)


def test_the_mean_without_weights_goes_back_too():
    pytest.importorskip("triton")
    indptr, indices, generator = random_rows(8, 6, 31, 3)
    x = values((6, 2, 17), torch.float64, generator).requires_grad_()
    grad = values((8, 2, 17), torch.float64, generator)
    SegmentSum.apply(device, x, None, indptr, indices, True, None).backward(grad)
    close(x.grad, x_gradient(grad, indptr, indices, None, True, 6), torch.float64)


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 12), st.integers(1, 3), st.integers(0, 99))
def test_gradients_are_those_of_finite_differences(num_dst, num_src, num_edges, heads, seed):
    indptr, indices, generator = (
        t.cpu() if isinstance(t, torch.Tensor) else t for t in random_rows(num_dst, num_src, num_edges, seed)
    )
    x = torch.randn(num_src, heads, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.aggregate(x, indptr, indices, None, True), (x,))
    assert torch.autograd.gradcheck(lambda x: aggregate(x, indptr, indices, reduce="mean"), (x,))


@pytest.mark.parametrize("shape", [(7, 5), (7, 2, 3)])
def test_the_mean_on_the_cpu(shape):
    indptr, indices = torch.tensor([0, 3, 3, 5]), torch.tensor([6, 0, 0, 1, 2])
    x = torch.randn(shape, requires_grad=True)
    out = aggregate(x, indptr, indices, reduce="mean")
    expected = reference.aggregate(x.reshape(7, 1, -1), indptr, indices, None, True)
    close(out, expected.view(3, *shape[1:]), torch.float32)
    close(out[0], (x[6] + 2 * x[0]) / 3, torch.float32)
    assert not out[1].any()
    out.sum().backward()
    close(x.grad[0], torch.full(shape[1:], 2 / 3), torch.float32)


def test_rows_edges_and_channels_that_are_not_there():
    pytest.importorskip("triton")
    pointers, none = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    x = torch.ones((3, 1, 5), device=DEVICE, requires_grad=True)
    out = SegmentSum.apply(device, x, None, pointers, none, True, None)
    assert out.shape == (3, 1, 5) and not out.any()
    out.sum().backward()
    assert not x.grad.any()
    assert device.gather_sum(x.detach(), None, pointers[:1], none, False).shape == (0, 1, 5)
    one, row = torch.tensor([0, 1], device=DEVICE), torch.tensor([2], device=DEVICE)
    narrow, weight = torch.ones((3, 2, 0), device=DEVICE), torch.ones((1, 2), device=DEVICE, requires_grad=True)
    SegmentSum.apply(device, narrow, weight, one, row, False, None).sum().backward()
    assert not weight.grad.any()


def test_pointers_and_ids_that_are_views():
    pytest.importorskip("triton")
    indptr, indices, generator = random_rows(4, 6, 20, 9)
    x, grad = values((6, 1, 5), torch.float64, generator), values((4, 1, 5), torch.float64, generator)
    x.requires_grad_()
    columns = torch.stack([indices, indices.flip(0)], dim=1)
    out = SegmentSum.apply(device, x, None, torch.stack([indptr, indptr], dim=1)[:, 0], columns[:, 0], False, None)
    out.backward(grad)
    close(out.detach(), reference.aggregate(x.detach(), indptr, indices, None, False), torch.float64, 4)
    close(x.grad, x_gradient(grad, indptr, indices, None, False, 6), torch.float64, 4)


def test_a_long_row_of_halves_is_summed_in_float32():
    pytest.importorskip("triton")
    indptr, indices = torch.tensor([0, 4096], device=DEVICE), torch.zeros(4096, dtype=torch.int64, device=DEVICE)
    x = torch.ones((1, 1, 3), dtype=torch.bfloat16, device=DEVICE)
    assert device.gather_sum(x, None, indptr, indices, False).tolist() == [[[4096.0] * 3]]


def test_refuses_what_aggregate_refuses():
    with pytest.raises(ValueError, match=said("indices [0, 5) 0 5")):
        aggregate(torch.zeros(5, 2), torch.tensor([0, 2]), torch.tensor([0, 5]), reduce="mean")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_cuda_equals_the_cpu_and_itself(dtype, reduce):
    indptr, indices, generator = random_rows(500, 700, 5000, 1, torch.int32)
    results = []
    for where in ("cuda", "cuda", "cpu"):
        generator.manual_seed(2)
        x = torch.randn(700, 4, 33, generator=generator).to(dtype).to(where).requires_grad_()
        weight = torch.rand(5000, 4, generator=generator).to(where).requires_grad_()
        out = aggregate(x, indptr.to(where), indices.to(where), weight, reduce)
        out.sum().backward()
        results.append([out.detach().cpu(), x.grad.cpu(), weight.grad.cpu()])
    for first, second, expected in zip(*results, strict=True):
        assert torch.equal(first, second)
        # rows of up to 1,250 edges: sums of that many terms of order 1 in float32, halves rounded once
        limit = max(1e-4, TOLERANCE[dtype])
        torch.testing.assert_close(first.float(), expected.float(), rtol=limit, atol=limit)


COMPILE = """
from tests.triton_kernels.hopper import compiled
from lightning_gnnscale.triton_kernels.aggregate import kernel

sizes = dict(num_rows="i32", num_edges="i64", width="i32", heads="i32", channels="i32")
CASES = [("fp32", "i32", True, True, 16), ("fp16", "i64", False, True, 128), ("bf16", "i64", True, True, 256),
         ("fp64", "i64", True, True, 64), ("fp32", "i64", False, False, 16)]
for values, index, weighted, indexed, block in CASES:
    sums = "fp64" if values == "fp64" else "fp32"
    given = dict(x_ptr="*" + values, grad_ptr="*" + values, indptr_ptr="*i64", indices_ptr="*" + index,
                 weight_ptr="*fp32", partial_ptr="*" + sums, INDEXED=indexed, WEIGHTED=weighted, MEAN=not weighted,
                 LIMIT=1024, EDGES=1024 // block, BLOCK=block)
    for kernel_of, own in (
        (kernel.sum_hubs_kernel, {}), (kernel.gather_sum_kernel, dict(out_ptr="*" + values)),
        (kernel.edge_dot_kernel, dict(out_ptr="*" + sums, HUBS=True)),
        (kernel.edge_dot_kernel, dict(out_ptr="*" + sums, HUBS=False)),
    ):
        found = compiled(kernel_of, options=dict(enable_fp_fusion=True), **(sizes | given | own))
        assert not found.atomics and found.spilled in (0, None), (kernel_of, found)
"""


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_without_atomics_and_spills(tmp_path):
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
