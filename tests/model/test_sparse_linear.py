"""Linear maps of sparse rows against dense ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.graphs import to_sparse

from lightning_gnnscale.model.dropout import drop
from lightning_gnnscale.model.layer_inputs import SparseInput, as_input, dense_rows, head_rows, linear, num_rows
from tests.says import said


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_equals_dense_forward_and_backward(rows, columns, outputs, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    x = x * (torch.rand(rows, columns, generator=generator) < 0.3)
    weight = torch.randn(outputs, columns, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(outputs, dtype=torch.float64, generator=generator, requires_grad=True) if with_bias else None
    grad = torch.randn(rows, outputs, dtype=torch.float64, generator=generator)
    inputs = [weight, bias] if with_bias else [weight]
    results = []
    for values in (x, to_sparse(x)):
        out = linear(values, weight, bias)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for dense, sparse in zip(*results, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-13)


def test_rows_from_arrays_repeats_and_heads():
    rows = SparseInput(torch.tensor([0, 2, 2, 4]), torch.tensor([1, 1, 0, 2]), torch.tensor([1.0, 2.0, 3.0, 4.0]), 3)
    like = torch.zeros(1, dtype=torch.float64)
    arrays = SparseInput(rows.indptr.numpy(), rows.indices.numpy(), rows.data.half().numpy(), 3)
    read = as_input(arrays, like)
    expected = torch.tensor([[0, 3, 0], [0, 0, 0], [3, 0, 4]], dtype=torch.float64)
    assert torch.equal(dense_rows(read), expected)
    assert num_rows(read) == 3
    for count in range(4):
        assert torch.equal(dense_rows(head_rows(read, count)), expected[:count])
    assert drop(read, 0.5, training=False).data is read.data


def test_refuses_another_width():
    rows = SparseInput(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), 3)
    with pytest.raises(ValueError, match=said("sparse rows 3 columns layer 4")):
        linear(rows, torch.zeros(2, 4))
