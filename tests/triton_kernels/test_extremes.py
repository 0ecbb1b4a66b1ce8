"""Least and largest values over edges:

torch-scatter where it is installed, plain torch, and a loop agree to the bit.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.triton_kernels.aggregate import aggregate, reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["plain", "torch-scatter"])
def form(request, monkeypatch):
    """The two ways to find the edges; the second needs the package."""
    if request.param == "plain":
        monkeypatch.setattr(reference, "torch_scatter", lambda: None)
    else:
        package = pytest.importorskip("torch_scatter", reason="the extra [scatter] is not installed: make test-all")
        assert reference.torch_scatter() is package


def plain_loop(x, indptr, indices, grad, reduce):
    """The extremes, and the gradient of x, edge after edge."""
    out, x_grad = np.zeros(grad.shape), np.zeros(x.shape)
    for v, column in np.ndindex(grad.shape):
        edges = indices[indptr[v] : indptr[v + 1]]
        if len(edges):
            values = x[edges, column]
            first = edges[values.argmax() if reduce == "max" else values.argmin()]
            out[v, column] = x[first, column]
            x_grad[first, column] += grad[v, column]
    return out, x_grad


def found(x, indptr, indices, grad, reduce, device="cpu"):
    values = torch.from_numpy(x).to(device).requires_grad_()
    out = aggregate(values, torch.from_numpy(indptr).to(device), torch.from_numpy(indices).to(device), reduce=reduce)
    out.backward(torch.from_numpy(grad).to(device))
    return out.detach().cpu().numpy(), values.grad.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_equals_a_loop_forward_and_backward(form, device, reduce, index_dtype):
    """No two values are equal, and a third of the rows has no edge."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 60) * (np.arange(60) % 3 > 0)
    indptr, indices = np.append(0, counts.cumsum()), rng.integers(0, 40, counts.sum()).astype(index_dtype)
    x, grad = rng.permutation(40 * 7).reshape(40, 7) - 100.0, rng.normal(size=(60, 7))
    expected = plain_loop(x, indptr, indices, grad, reduce)
    for one, other in zip(found(x, indptr, indices, grad, reduce, device), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)  # float64: gradients of a source in another order


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=6), st.booleans(), st.integers(0, 99))
def test_ties_go_to_the_first_edge(num_src, counts, largest, seed):
    rng = np.random.default_rng(seed)
    indptr = np.append(0, np.cumsum(counts, dtype=np.int64))
    indices = rng.integers(0, num_src, indptr[-1])
    x, grad = rng.integers(-1, 2, (num_src, 2)).astype(float), rng.integers(1, 9, (len(counts), 2)).astype(float)
    reduce = "max" if largest else "min"
    expected = plain_loop(x, indptr, indices, grad, reduce)
    for package in {None, reference.torch_scatter()}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "torch_scatter", lambda package=package: package)
            for one, other in zip(found(x, indptr, indices, grad, reduce), expected, strict=True):
                np.testing.assert_array_equal(one, other)


def test_heads_half_types_and_rows_that_are_not_there(form):
    x = torch.tensor([[[1.0, -2.0], [3.0, 4.0]], [[5.0, -6.0], [-7.0, 8.0]]], dtype=torch.bfloat16)
    out = aggregate(x, torch.tensor([0, 2, 2]), torch.tensor([0, 1]), reduce="max")
    assert out.dtype == torch.bfloat16 and out.tolist() == [[[5.0, -2.0], [3.0, 8.0]], [[0.0, 0.0], [0.0, 0.0]]]
    nothing = torch.zeros(0, dtype=torch.int64)
    leaf = torch.ones(2, 3, requires_grad=True)
    empty = aggregate(leaf, torch.zeros(4, dtype=torch.int64), nothing, reduce="min")
    empty.sum().backward()
    assert empty.tolist() == [[0.0] * 3] * 3 and leaf.grad.tolist() == [[0.0] * 3] * 2
    assert aggregate(leaf, torch.zeros(1, dtype=torch.int64), nothing, reduce="max").shape == (0, 3)


def test_nan_and_infinities(form):
    x = torch.tensor([[torch.nan], [2.0], [-torch.inf], [torch.nan]], requires_grad=True)
    out = aggregate(x, torch.tensor([0, 2, 3, 4]), torch.tensor([0, 1, 2, 3]), reduce="max")
    assert out[:2].tolist() == [[2.0], [-torch.inf]] and out[2].isnan()
    out[:2].sum().backward()
    assert x.grad.tolist() == [[0.0], [1.0], [1.0], [0.0]]
