"""Dropout by hash: what it keeps, that the backward samples the same mask, what decides the mask."""

import numpy as np
import pytest
import torch

from lightning_gnnscale.model.dropout import _drop, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_keeps_its_share_and_scales_it(dtype, probability):
    torch.manual_seed(0)
    out = dropout(torch.ones(301, 333, dtype=dtype), probability, True)
    kept = out != 0
    assert out[kept].unique().tolist() == [float(torch.tensor(1 / (1 - probability), dtype=torch.float64).to(dtype))]
    # 100,233 samples: 5 standard deviations of the share are below 0.008
    assert abs(float(kept.float().mean()) - (1 - probability)) < 0.008
    rows, columns = kept.float().mean(1), kept.float().mean(0)
    for share in (rows, columns):  # means of over 300 samples each, 6 standard deviations
        assert (share - (1 - probability)).abs().max() < 6 * (probability * (1 - probability) / 301) ** 0.5


def test_the_gradient_goes_through_the_same_mask():
    x = torch.randn(41, 7, requires_grad=True)  # an odd number of values
    out = dropout(x, 0.4, True)
    out.backward(torch.full_like(x, 3.0))
    assert torch.equal(x.grad != 0, out != 0)
    torch.testing.assert_close(x.grad[out != 0], torch.full_like(x.grad[out != 0], 3 / 0.6))

    def seeded(values):
        torch.manual_seed(5)
        return dropout(values, 0.4, True)

    assert torch.autograd.gradcheck(seeded, (torch.randn(5, 3, dtype=torch.float64, requires_grad=True),))


def test_the_seed_of_torch_decides_the_mask():
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5, True), first)
    # two masks agree in half of their places: 500 of 1000, 6 standard deviations = 95
    assert abs(int((first == second).sum()) - 500) < 95


def test_a_value_depends_on_its_position_alone():
    x, key = np.ones(100, np.float32), np.uint64(77)
    whole, part = np.empty_like(x), np.empty(37, np.float32)
    _drop(x, key, np.uint64(1 << 31), np.float32(2), whole)
    _drop(x[:37], key, np.uint64(1 << 31), np.float32(2), part)
    assert np.array_equal(whole[:37], part)


def test_nothing_is_dropped_outside_of_training():
    x = torch.ones(3)
    assert dropout(x, 0.5, False) is x
    assert dropout(x, 0.0, True) is x
    assert dropout(torch.ones(0, 4), 0.5, True).shape == (0, 4)
