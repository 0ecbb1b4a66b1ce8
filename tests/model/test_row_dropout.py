"""Dropout by ids of rows: both forms give the same bits, a row's mask goes with its id."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model.graphs import to_sparse

from lightning_gnnscale.model import dropout
from lightning_gnnscale.model.dropout import RowDropout, combine, mix64
from lightning_gnnscale.model.layer_inputs import dense_rows
from lightning_gnnscale.rng import combine_array, mix64_array
from tests.tiers import all_pairs

KEYS = st.integers(0, (1 << 64) - 1)


def torch_form(x, ids, key, probability, monkeypatch):
    """What devices without compiled loops run."""
    with monkeypatch.context() as patch:
        patch.setattr(dropout, "COMPILED", ())
        return RowDropout(probability, key)(x, ids)


@all_pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 7, 64])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.97])
def test_both_forms_give_the_same_bits(dtype, width, probability, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(30, width, dtype=dtype)
    x[3, 0], x[4, 0], x[5, 0], x[6] = float("inf"), float("nan"), torch.finfo(dtype).tiny / 4, -0.0
    ids = torch.randint(-(1 << 62), 1 << 62, (30,))
    ids[:3] = torch.tensor([0, (1 << 63) - 1, -(1 << 63)])
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    for key in (0, 12345, (1 << 64) - 1):
        compiled = RowDropout(probability, key)(x, ids)
        assert torch.equal(compiled.view(bits), torch_form(x, ids, key, probability, monkeypatch).view(bits))


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=20))
def test_mixing_in_torch_equals_numpy(values):
    values = np.array(values, np.uint64)
    mixed = mix64(torch.from_numpy(values.view(np.int64))).numpy().view(np.uint64)
    assert np.array_equal(mixed, mix64_array(values))


@given(key=KEYS, width=st.integers(1, 9), order=st.permutations(range(8)), num_rows=st.integers(0, 8))
def test_a_row_has_its_mask_in_any_position(key, width, order, num_rows):
    ids, drop = torch.arange(8) * 1_000_003, RowDropout(0.5, key)
    x = torch.arange(1.0, 8 * width + 1).view(8, width)
    whole, some = drop(x, ids), torch.tensor(order[:num_rows], dtype=torch.int64)
    assert torch.equal(drop(x[some], ids[some]), whole[some])
    # and columns keep theirs whatever else stands in the row
    assert torch.equal(drop(x[:, :1].contiguous(), ids), whole[:, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_keeps_its_share_and_scales_it(dtype, probability):
    out = RowDropout(probability, 5)(torch.ones(301, 333, dtype=dtype), torch.arange(301) + 7)
    kept = out != 0
    assert out[kept].unique().tolist() == [float(torch.tensor(1 / (1 - probability), dtype=torch.float64).to(dtype))]
    # 100,233 samples: 5 standard deviations of the share are below 0.008
    assert abs(float(kept.float().mean()) - (1 - probability)) < 0.008
    for share in (kept.float().mean(1), kept.float().mean(0)):  # means of over 300 samples each, 6 standard deviations
        assert (share - (1 - probability)).abs().max() < 6 * (probability * (1 - probability) / 301) ** 0.5


def test_keys_and_ids_decide_the_mask():
    x, ids = torch.ones(10, 100), torch.arange(10)
    first = RowDropout(0.5, 1)(x, ids)
    assert torch.equal(RowDropout(0.5, 1)(x, ids), first)
    for other in (RowDropout(0.5, 2)(x, ids), RowDropout(0.5, 1)(x, ids + 10)):
        # two masks agree in half of 1000 places, 6 standard deviations = 95
        assert abs(int((first == other).sum()) - 500) < 95


@pytest.mark.parametrize("probability", [0.3, 0.5])
def test_the_gradient_goes_through_the_same_mask(probability):
    drop, ids = RowDropout(probability, 9), torch.arange(5) * 17
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    out = drop(x, ids)
    out.backward(torch.full_like(x, 3.0))
    expected = (out != 0).double() * (3 / (1 - probability))
    torch.testing.assert_close(x.grad, expected, rtol=1e-15, atol=0)
    assert torch.autograd.gradcheck(lambda values: drop(values, ids), (x,))
    strided = torch.randn(3, 5, dtype=torch.float64).t()
    assert torch.equal(drop(strided, ids), drop(strided.contiguous(), ids))


def test_sparse_rows_drop_their_nonzeros_by_id_and_column():
    torch.manual_seed(0)
    dense = torch.rand(40, 30, dtype=torch.float64) * (torch.rand(40, 30) < 0.3)
    ids, drop = torch.arange(40) * 31, RowDropout(0.4, 77)
    whole = drop(to_sparse(dense), ids)
    out = dense_rows(whole)
    kept = out != 0
    torch.testing.assert_close(out[kept], dense[kept] / 0.6, rtol=1e-15, atol=0)
    num_nonzeros = int((dense != 0).sum())
    spread = (0.4 * 0.6 / num_nonzeros) ** 0.5
    assert abs(float(kept.sum()) / num_nonzeros - 0.6) < 5 * spread
    some = torch.tensor([39, 3, 17])
    assert torch.equal(dense_rows(drop(to_sparse(dense[some]), ids[some])), out[some])
    # a nonzero's mask does not hang on the other nonzeros of its row
    thinner = dense.clone()
    thinner[:, ::2] = 0
    assert torch.equal(dense_rows(drop(to_sparse(thinner), ids))[:, 1::2], out[:, 1::2])
    data = to_sparse(dense).data.clone().requires_grad_()
    drop(to_sparse(dense)._replace(data=data), ids).data.sum().backward()
    assert torch.equal(data.grad != 0, whole.data != 0)


def test_sampling_takes_one_number_of_torch():
    torch.manual_seed(3)
    first, second = RowDropout.sample(0.5, True), RowDropout.sample(0.5, True)
    assert first.active and first.key != second.key and 0 <= first.key < 1 << 64
    torch.manual_seed(3)
    assert RowDropout.sample(0.5, True) == first
    state = torch.get_rng_state()
    assert not RowDropout.sample(0.5, False).active and not RowDropout.sample(0.0, True).active
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_dropped_at_probability_zero():
    x = torch.ones(3, 2)
    assert RowDropout(0.0)(x, torch.arange(3)) is x
    assert RowDropout(0.5, 1)(torch.ones(0, 4), torch.arange(0)).shape == (0, 4)


def test_ids_are_folded_on_their_device_to_the_bits_of_the_host():
    ids = np.array([0, 1, 2**40, 2**62, 2**63 - 1], np.int64)
    for key in (0, 5, 2**63, 2**64 - 1):
        assert combine(key, torch.from_numpy(ids)).numpy().view(np.uint64).tolist() == combine_array(key, ids).tolist()
