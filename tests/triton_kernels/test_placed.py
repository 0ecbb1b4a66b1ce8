"""Sums over edges that come in groups of their sources."""

import numpy as np
import pytest
import torch

from lightning_gnnscale.triton_kernels.aggregate import add_placed_edges, cpu
from tests.says import said
from tests.tiers import all_pairs


@all_pairs
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_edges", [0, 1, 63, 1500])
def test_placed_edges_are_added_as_plain_torch_adds_them(monkeypatch, weighted, scaled, dtype, num_edges):
    rng = np.random.default_rng(num_edges)
    rows = np.sort(rng.integers(0, 40, num_edges)).astype(np.int32)
    chosen = np.sort(rng.permutation(256)[:70])
    position = np.full(256, -1, np.int32)
    position[chosen] = np.arange(70)
    local = rng.choice(chosen, num_edges).astype(np.uint16)
    x, before = (torch.from_numpy(rng.standard_normal((num, 9))).to(dtype) for num in (70, 40))
    factor = rng.random(40).astype(x.numpy().dtype) if scaled else None
    weight = rng.random(num_edges).astype(x.numpy().dtype) if weighted else None
    found = []
    for least in (1 << 30, 1):  # one thread, as many as there are
        monkeypatch.setattr(cpu, "MIN_WORK", least)
        out = before.clone()
        add_placed_edges(out, x, rows, local, position, factor, weight)
        found.append(out)
    assert torch.equal(*found)
    given = [None if values is None else torch.from_numpy(values) for values in (factor, weight)]
    places = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(position[local].astype(np.int64))
    shares = torch.ones(num_edges).double()
    for values, taken in zip(given, (places[0], slice(None)), strict=True):
        shares = shares if values is None else shares * values[taken]
    expected = before.double().index_add(0, places[0], shares.unsqueeze(1) * x.double()[places[1]])
    # Sums of up to 60 products of order 1.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_values_of_another_width_are_refused():
    rows, position = np.zeros(1, np.int32), np.zeros(4, np.int32)
    with pytest.raises(ValueError, match=said("x (num, 3) (2, 4)")):
        add_placed_edges(torch.zeros(2, 3), torch.zeros(2, 4), rows, rows, position)
