"""What models make of batches sampled with locality: linear models stay unbiased, attention gets 1 / probability."""

from math import sqrt
from statistics import NormalDist

import numpy as np
import pytest
import torch
from locality_runs import PLACED, WEIGHT, WORLD, batches, biased
from oracles.parts import part_loader, small_world
from torch import nn

import lightning_gnnscale as gs
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import GAT, GCN, SGC, GraphSAGE, backbone
from tests.says import said
from tests.tiers import all_pairs

ERROR_RATE = 1e-6  # of a false alarm over all comparisons of one statistical test
NUM_KEYS = 800


@pytest.fixture
def linear(monkeypatch):
    """Return a maker of models without a nonlinearity: what they say is linear in every sampled sum."""
    monkeypatch.setitem(backbone.ACTIVATIONS, "identity", nn.Identity())

    def make(kind, num_layers):
        torch.manual_seed(0)
        options = {} if kind is SGC else {"activation": "identity"}
        model = kind(16, 4, 3, num_layers=num_layers, dropout=0.0, **options)
        return gs.NodeClassifier(model).eval()

    return make


def keyed_outputs(loader, function, num_keys):
    """Return (num_keys, ...): the function of the first batch of as many epochs, always of the same seeds."""
    found = []
    for epoch in range(num_keys):
        loader.set_epoch(epoch)
        with torch.no_grad():
            found.append(function(next(iter(loader))).double().numpy())
    return np.stack(found)


def assert_mean(results, exact):
    """Every mean over keys within the two-sided normal bound at ERROR_RATE, shared out over the values."""
    assert results.std(0).max() > 1e-3  # it was sampled
    error = results.std(0, ddof=1) / sqrt(len(results)) + 1e-6  # float32 sums of values below 10
    bound = NormalDist().inv_cdf(1 - ERROR_RATE / (2 * exact.size))
    assert (np.abs(results.mean(0) - exact) / error).max() < bound


@all_pairs
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, SGC])
def test_linear_models_are_unbiased(linear, kind, num_layers, stored):
    """Invariant 6: the mean over keys of what a linear model says is what it says with all neighbours."""
    model = linear(kind, num_layers)
    options = {"graph": "graph", "edge_weight": WEIGHT if stored else None, "shuffle": False, "batch_size": 8}

    def outputs(batch):
        return model(batch)[:8]

    (exact,) = keyed_outputs(batches(gs.NeighborSampler([-1] * num_layers), **options), outputs, 1)
    results = keyed_outputs(batches(biased([3] * num_layers, scale=3.0), **options), outputs, NUM_KEYS)
    assert_mean(results, exact)


def test_attention_gets_one_over_the_probability():
    """GAT:

    exp(score) of an edge is multiplied by 1 / probability, so numerator and denominator are both unbiased sums.
    """
    torch.manual_seed(0)
    model = gs.NodeClassifier(GAT(16, 4, 3, num_layers=1, heads=1, dropout=0.0)).eval()
    layer = model.backbone.convs[0]
    options = {"graph": "graph", "shuffle": False, "batch_size": 8}
    degree = WORLD.csc.in_degree

    def sums(batch):
        """Denominators, and numerators, of the attention of the seeds, by plain torch."""
        probability = 1 / model._edge_weight(batch)
        sampled = torch.from_numpy(degree)[batch.n_id[batch.edge_index[1]]] * batch.edge_weight
        torch.testing.assert_close(sampled, 1 / probability)
        h = layer.lin(batch.x)
        src, dst = batch.edge_index
        loops = src == dst  # the layer puts one self-loop of weight 1 in their place
        score = (h * layer.att_src[0, 0]).sum(-1)[src] + (h * layer.att_dst[0, 0]).sum(-1)[dst]
        share = torch.where(loops, 0, torch.nn.functional.leaky_relu(score, 0.2).exp() / probability)
        own = torch.nn.functional.leaky_relu((h * (layer.att_src + layer.att_dst)[0, 0]).sum(-1), 0.2).exp()
        total = own.index_add(0, dst, share)
        values = (own.unsqueeze(-1) * h).index_add(0, dst, share.unsqueeze(-1) * h[src])
        torch.testing.assert_close(values[:8] / total[:8, None] + layer.bias, model(batch)[:8])
        return torch.cat([total[:8, None], values[:8]], dim=1)

    loader = batches(biased([-1], scale=3.0), **options)
    (exact,) = keyed_outputs(loader, sums, 1)
    whole = next(iter(batches(gs.NeighborSampler([-1]), **options)))
    torch.testing.assert_close(model(next(iter(loader)))[:8], model(whole)[:8])
    assert_mean(keyed_outputs(batches(biased([3], scale=3.0), **options), sums, NUM_KEYS), exact)


def test_edges_followed_both_ways_keep_gcn_unbiased(linear):
    """In a directed graph rows of both directions are longer than in-degrees; weights and degrees speak of the same."""
    world = small_world(both_ways=False, seed=4)
    part = world.load_part(1).symmetrised()
    targets = np.arange(8)
    locality = gs.LocalityBias(gs.Placement((np.arange(0, 300, 3),), ((0,),), 300, None, {}, (), "test"), 3.0)
    model = linear(GCN, 1)

    def loader(sampler):
        store_ids = {1: targets + part.core_start}
        return part_loader([1], world.load_part, world.features, store_ids, sampler, num_threads=0, shuffle=False)

    def outputs(batch):
        return model(batch)[:8]

    whole = gs.NeighborSampler([-1], direction="both")
    (exact,) = keyed_outputs(loader(whole), outputs, 1)
    assert (part.csc.in_degree[targets] > world.load_part(1).degree[targets]).any()
    for sampler in (gs.NeighborSampler([4], direction="both"), gs.NeighborSampler([4], False, "both", locality)):
        assert_mean(keyed_outputs(loader(sampler), outputs, NUM_KEYS), exact)


def test_a_model_that_takes_no_weights_is_refused():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 5)

        def forward(self, x, edge_index):
            return self.lin(x)

    model = gs.NodeClassifier(Plain(), num_classes=5)
    with pytest.raises(StrategyError, match=said("Plain.forward edge_weight")):
        model(next(iter(batches(biased()))))
    at_scale_1 = gs.NeighborSampler([4, 3], locality=gs.LocalityBias(PLACED, 1.0))
    assert model(next(iter(batches(at_scale_1)))).shape[1] == 5
