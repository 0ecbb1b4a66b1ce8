"""Sums over edges: compiled against plain torch, gradients against finite differences, threads against none."""

import multiprocessing
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.triton_kernels.aggregate import (
    add_edges,
    aggregate,
    cpu,
    edge_add,
    edge_dot,
    edge_softmax,
    reference,
    take_rows,
)
from lightning_gnnscale.triton_kernels.edge_attention import group_by_source
from tests.says import said
from tests.tiers import all_pairs


def random_rows(num_dst, num_src, num_edges, seed, index_dtype=torch.int64):
    """Edges thrown at random rows: some rows stay empty, some hold many, sources repeat."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(num_dst, (num_edges,), generator=generator) if num_edges else torch.zeros(0, dtype=torch.int64)
    counts = torch.bincount(row, minlength=num_dst)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.randint(max(1, num_src), (num_edges,), generator=generator).to(index_dtype)
    return indptr, indices, generator


def equal_bits(one, two):
    return one.dtype == two.dtype and torch.equal(one, two)


@all_pairs
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("heads", "channels"), [(1, 63), (4, 5), (3, 1)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_equals_plain_torch_forward_and_backward(reduce, weighted, heads, channels, index_dtype):
    indptr, indices, generator = random_rows(37, 53, 211, 0, index_dtype)
    values = {}
    for name in ("compiled", "plain"):
        generator.manual_seed(1)
        x = torch.randn(53, heads, channels, dtype=torch.float64, generator=generator).requires_grad_()
        weight = torch.rand(211, heads, dtype=torch.float64, generator=generator).requires_grad_() if weighted else None
        if name == "compiled":
            out = aggregate(x, indptr, indices, weight, reduce)
        else:
            out = reference.aggregate(x, indptr, indices, weight, reduce == "mean")
        out.backward(torch.randn(out.shape, dtype=torch.float64, generator=generator))
        values[name] = [out.detach(), x.grad, *([weight.grad] if weighted else [])]
    for compiled, plain in zip(values["compiled"], values["plain"], strict=True):
        # float64: sums of at most about 20 terms of order 1 in another order
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-13)


@settings(max_examples=settings.default.max_examples // 6)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 12), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_gradients_against_finite_differences(num_dst, num_src, num_edges, heads, mean, seed):
    indptr, indices, generator = random_rows(num_dst, num_src, num_edges, seed)
    x = torch.randn(num_src, heads, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(num_edges, heads, dtype=torch.float64, generator=generator, requires_grad=True)
    reduce = "mean" if mean else "sum"
    assert torch.autograd.gradcheck(lambda x, w: aggregate(x, indptr, indices, w, reduce), (x, weight))
    if num_edges:
        assert torch.autograd.gradcheck(lambda w: edge_softmax(w, indptr), (weight,))
    dst = torch.randn(num_dst, heads, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, d: edge_add(s, d, indptr, indices), (x[:, :, 0], dst))


def test_rows_and_edges_that_are_not_there():
    x = torch.randn(4, 6, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    out = aggregate(x, torch.zeros(4, dtype=torch.int64), empty, reduce="mean")
    assert equal_bits(out, torch.zeros(3, 6))
    out.sum().backward()
    assert equal_bits(x.grad, torch.zeros(4, 6))
    assert aggregate(x, torch.zeros(1, dtype=torch.int64), empty).shape == (0, 6)
    assert edge_softmax(torch.zeros(0, 2), torch.zeros(4, dtype=torch.int64)).shape == (0, 2)
    assert aggregate(torch.zeros(3, 2, 0), torch.tensor([0, 1]), torch.tensor([2])).shape == (1, 2, 0)


def test_one_weight_for_all_heads_and_flat_values():
    indptr, indices, generator = random_rows(9, 9, 40, 3)
    x = torch.randn(9, 2, 7, generator=generator)
    weight = torch.rand(40, generator=generator)
    both = aggregate(x, indptr, indices, weight.unsqueeze(1).expand(-1, 2))
    assert equal_bits(aggregate(x, indptr, indices, weight), both)
    assert equal_bits(aggregate(x[:, 1].contiguous(), indptr, indices, weight), both[:, 1])
    assert equal_bits(aggregate(x[:, 1], indptr, indices, weight), both[:, 1])  # strided


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(dtype):
    indptr = torch.tensor([0, 4096])
    indices = torch.zeros(4096, dtype=torch.int64)
    x = torch.full((1, 3), 1.0, dtype=dtype, requires_grad=True)
    out = aggregate(x, indptr, indices)
    assert equal_bits(out, torch.full((1, 3), 4096.0, dtype=dtype))  # a running sum in bfloat16 stops at 256
    out.sum().backward()
    assert equal_bits(x.grad, torch.full((1, 3), 4096.0, dtype=dtype))


def everything(indptr, indices, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    share = edge_softmax(edge_add(x[..., 0], x[: len(indptr) - 1, :, 1], indptr, indices) + weight, indptr)
    out = aggregate(x, indptr, indices, share, "mean")
    out.backward(grad)
    return out.detach(), x.grad, weight.grad


@pytest.fixture
def sample():
    indptr, indices, generator = random_rows(3000, 4000, 30_000, 5)
    x = torch.randn(4000, 2, 16, generator=generator)
    return (
        indptr,
        indices,
        x,
        torch.randn(30_000, 2, generator=generator),
        torch.randn(3000, 2, 16, generator=generator),
    )


def test_the_number_of_threads_changes_no_bit(sample, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_WORK", 64)  # threads even where the work is small
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(everything(*sample))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(equal_bits(one, other) for one, other in zip(results[0], result, strict=True))


def test_several_python_threads_at_once(sample, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_WORK", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected, results = everything(*sample), []
    threads = [threading.Thread(target=lambda: results.append(everything(*sample))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        assert all(equal_bits(one, other) for one, other in zip(expected, result, strict=True))


def _sum_in_child(queue, indptr, indices, x):
    queue.put(float(aggregate(x, indptr, indices).double().sum()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_threads(sample, monkeypatch):
    indptr, indices, x, _, _ = sample
    monkeypatch.setattr(cpu, "MIN_WORK", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = float(aggregate(x, indptr, indices).double().sum())  # the parent's pool has run
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(queue, indptr, indices, x), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=60) == expected
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()


def test_softmax_over_rows():
    logits = torch.tensor([[1.0], [1.0], [1000.0], [-torch.inf], [-torch.inf]])
    out = edge_softmax(logits, torch.tensor([0, 2, 2, 4, 5]))
    assert equal_bits(out, torch.tensor([[0.5], [0.5], [1.0], [0.0], [0.0]]))


def test_softmax_equals_plain_torch():
    indptr, _, generator = random_rows(20, 20, 90, 7)
    logits = torch.randn(90, 3, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(edge_softmax(logits, indptr), reference.edge_softmax(logits, indptr), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.tensor([0, 5])}, "indices [0, 5) 0 5"),
        ({"indices": torch.tensor([-1, 0])}, "-1 0"),
        ({"indices": torch.tensor([0, 1, 2])}, "0 num_edges 3 0 2"),
        ({"indices": torch.tensor([0.0, 1.0])}, "int32 int64"),
        ({"indptr": torch.tensor([0, 3, 2])}, "rise 0"),
        ({"indptr": torch.tensor([0, 2], dtype=torch.int32)}, "1-D int64"),
        ({"indptr": torch.zeros(0, dtype=torch.int64)}, "at least one entry"),
        ({"x": torch.zeros(5, 2, dtype=torch.int64)}, "x must be floating"),
        ({"weight": torch.zeros(3)}, "weight (2, 1) (2,), (3,)"),
        ({"reduce": "median"}, "'min' 'max' 'median'"),
        ({"reduce": "max", "weight": torch.ones(2)}, "reduce='max' weight"),
    ],
)
def test_refuses(change, message):
    arguments = {"x": torch.zeros(5, 2), "indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([0, 4])}
    with pytest.raises(ValueError, match=said(message)):
        aggregate(**{**arguments, **change})


def test_refuses_targets_that_do_not_fit():
    with pytest.raises(ValueError, match=said("dst_value (2, 3) (1, 3)")):
        edge_add(torch.zeros(5, 3), torch.zeros(1, 3), torch.tensor([0, 1, 2]), torch.tensor([0, 4]))


def test_transposed_edges_keep_the_order_of_rows():
    indptr, indices = np.array([0, 2, 3, 5]), np.array([1, 0, 1, 1, 3])
    offsets, rows, weights = cpu.transpose_kernel(indptr, indices, np.arange(5.0)[:, None], True, True, 4)
    assert offsets.tolist() == [0, 1, 4, 4, 5]
    assert rows.tolist() == [0, 0, 1, 2, 2]
    assert weights[:, 0].tolist() == [0.5, 0.0, 2.0, 1.5, 2.0]


def test_rows_taken_along_edges_sum_their_gradients_in_order():
    indptr, indices, generator = random_rows(9, 12, 60, 2)
    offsets, edges = group_by_source(indptr, indices, 20)[::2]
    x = torch.randn(12, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    grad = torch.randn(60, 5, dtype=torch.float64, generator=generator)
    out = take_rows(x, indices, offsets, edges)
    assert equal_bits(out, x.detach()[indices])
    expected = torch.zeros(12, 5, dtype=torch.float64).index_add_(0, indices, grad)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], expected, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=said("groups 12 60 (11, 60)")):
        take_rows(x, indices, offsets[:12], edges)


@pytest.mark.gpu
def test_the_path_of_a_device_equals_the_cpu():
    indptr, indices, generator = random_rows(50, 60, 400, 11)
    x, weight = torch.randn(60, 4, 8, generator=generator), torch.rand(400, 4, generator=generator)
    there = aggregate(x.cuda(), indptr.cuda(), indices.cuda(), weight.cuda()).cpu()
    torch.testing.assert_close(there, aggregate(x, indptr, indices, weight), rtol=1e-5, atol=1e-5)


@all_pairs
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 7, 53])
def test_sums_of_sources_that_come_in_chunks_are_equal_to_the_bit(weighted, dtype, step):
    indptr, indices, generator = random_rows(37, 53, 211, 0, torch.int32)
    for start, stop in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
        indices[start:stop] = indices[start:stop].sort().values
    x = torch.randn(53, 9, dtype=dtype, generator=generator)
    weight = torch.rand(211, dtype=dtype, generator=generator) if weighted else None
    out, cursor = torch.zeros(37, 6, dtype=dtype), indptr[:-1].clone()
    for first in range(0, 53, step):
        add_edges(out, x[first : first + step], first, indptr, indices, cursor, weight)
    assert equal_bits(out, aggregate(x, indptr, indices, weight)[:, :6])
    assert torch.equal(cursor, indptr[1:])
    with pytest.raises(ValueError, match=said("x (num, 6) (53, 5)")):
        add_edges(out, x[:, :5].contiguous(), 0, indptr, indices, cursor)


@pytest.mark.parametrize(("num_dst", "num_src", "num_edges", "heads"), [(37, 53, 211, 3), (5, 4, 0, 1), (1, 1, 1, 2)])
def test_products_of_ends_are_those_of_plain_torch(num_dst, num_src, num_edges, heads):
    indptr, indices, generator = random_rows(num_dst, num_src, num_edges, 0)
    left = torch.randn(num_dst, heads, 7, dtype=torch.float64, generator=generator)
    right = torch.randn(num_src, heads, 7, dtype=torch.float64, generator=generator)
    grad = torch.randn(num_edges, heads, dtype=torch.float64, generator=generator)
    found = []
    for product in (edge_dot, reference.edge_dot):
        ends = [left.clone().requires_grad_(), right.clone().requires_grad_()]
        out = product(*ends, indptr, indices)
        found.append([out.detach(), *torch.autograd.grad(out, ends, grad)])
    for compiled, plain in zip(*found, strict=True):
        # float64: sums of at most about 20 terms of order 1 in another order
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=said("dst_value")):
        edge_dot(left[:, :, :6], right, indptr, indices)
