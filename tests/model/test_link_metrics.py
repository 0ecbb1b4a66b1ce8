"""Ranks of links, and the means over them."""

import pytest
import torch

from lightning_gnnscale.model import HitsAt, MeanReciprocalRank, link_ranks
from tests.says import said


def test_ranks_with_ties_and_missing_negatives():
    positive = torch.tensor([1.0, 1.0, 1.0, -5.0])
    negative = torch.tensor([[0.0, 2.0, 3.0], [1.0, 1.0, 0.0], [1.0, 2.0, -torch.inf], [-torch.inf] * 3])
    assert link_ranks(positive, negative).tolist() == [3, 2, 2.5, 1]


def test_means_weigh_each_link_alike_however_they_are_cut():
    torch.manual_seed(0)
    ranks = torch.randint(1, 50, (100,)).double()
    for metric, expected in ((MeanReciprocalRank(), (1 / ranks).mean()), (HitsAt(10), (ranks <= 10).double().mean())):
        for chunk in ranks.split([60, 0, 1, 39]):
            metric.update(chunk)
        assert metric.compute() == pytest.approx(float(expected), abs=1e-6)
        metric.reset()
        assert metric.compute() == 0


def test_hits_at_less_than_one_are_refused():
    with pytest.raises(ValueError, match=said("hits 1 0")):
        HitsAt(0)
