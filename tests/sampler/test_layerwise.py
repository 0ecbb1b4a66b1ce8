"""Layer-wise batches of a part: their form, locality, models of both packages on them, unbiased to the output."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.parts import part_loader, small_world
from torch_geometric.nn import GraphConv
from torch_geometric.utils import trim_to_layer

import lightning_gnnscale as gs
from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.triton_kernels.sample_layer import sample_layers
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.says import said

WORLD = small_world()
PART = WORLD.load_part(1)
TARGETS = WORLD.targets(1) - PART.core_start


def sample_all(sampler, part=PART, targets=TARGETS, order=7, state=None):
    """Sample one pass in batches of 16, with one workspace that all share."""
    state = state or sampler.prepare(part, targets, seed=3)
    items = sampler.items(state, 16, False, order)
    assert len(items) == sampler.num_batches(len(targets), 16, False)
    space = Workspace(part.num_local, part.csc.indices.dtype)
    return [sampler.sample(state, item, batch_key(3, 0, 1, i), space, np.empty, True) for i, item in enumerate(items)]


def placed(rows):
    return gs.Placement((np.array(rows),), ((0,),), WORLD.csc.num_rows, None, {}, (), "test")


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True) if a is not None or b is not None)


def test_batches_of_a_pass():
    sampled = sample_all(gs.LayerwiseSampler([30, 20]))
    seeds = np.concatenate([batch.n_id[: batch.num_seeds] for batch in sampled])
    assert sorted(seeds.tolist()) == TARGETS.tolist() and seeds.tolist() != TARGETS.tolist()
    for batch in sampled:
        source, target = batch.edge_index
        np.testing.assert_array_equal(target, np.repeat(np.arange(len(batch.indptr) - 1), np.diff(batch.indptr)))
        np.testing.assert_array_equal(PART.csc.indices[batch.e_id], batch.n_id[source])
        row = batch.n_id[target]
        assert ((PART.csc.indptr[row] <= batch.e_id) & (batch.e_id < PART.csc.indptr[row + 1])).all()
        rows = [PART.csc.indices[slice(*PART.csc.indptr[v : v + 2])] for v in batch.n_id[: batch.num_seeds]]
        candidates = np.unique(np.concatenate(rows))
        assert batch.num_sampled_nodes[:2] == [batch.num_seeds, min(30, len(candidates))]
        assert len(batch.indptr) - 1 == sum(batch.num_sampled_nodes[:2])
        assert len(batch.n_id) == sum(batch.num_sampled_nodes)
        # A weight is 1 / degree over a probability: at least 1 / degree, and there exactly where a sample was certain.
        assert (batch.edge_weight * PART.csc.in_degree[row] >= 1 - 1e-6).all()


def test_the_number_of_nodes_does_not_grow_with_hops():
    world = small_world(num_nodes=2000, num_edges=30_000, num_parts=1)
    part, targets = world.load_part(0), world.targets(0)
    for batch in sample_all(gs.LayerwiseSampler(40, 4), part, targets)[:-1]:
        assert batch.num_sampled_nodes[:4] == [16, 40, 40, 40] and len(batch.n_id) <= 16 + 4 * 40


def test_both_directions():
    world = small_world(both_ways=False, seed=4)
    part, targets = world.load_part(0), world.targets(0)
    both = sample_all(gs.LayerwiseSampler(500, 1, direction="both"), part.symmetrised(), targets)
    one = sample_all(gs.LayerwiseSampler(500, 1), part, targets)
    assert sum(b.edge_index.shape[1] for b in both) > sum(b.edge_index.shape[1] for b in one)


class TestLocality:
    ROWS = np.sort(np.random.default_rng(0).permutation(WORLD.csc.num_rows)[:90])

    def test_each_hop_prefers_its_neighbour_set(self):
        bias = gs.LocalityBias(placed(self.ROWS), 4.0, neighbor_set_size=25)
        sampler = gs.LayerwiseSampler([30, 20], locality=bias)
        masks = []
        for nodes in bias.neighbor_sets(PART, 2):
            masks.append(np.isin(np.arange(PART.num_local), nodes))
        assert set(PART.nodes[masks[1]]) == set(self.ROWS) & set(PART.nodes)
        state = sampler.prepare(PART, TARGETS, 3)
        for number, (batch, items) in enumerate(
            zip(sample_all(sampler), sampler.items(state, 16, False, 7), strict=True)
        ):
            plain = sample_layers(PART.csc, items, [30, 20], batch_key(3, 0, 1, number), preferred=masks, scale=4.0)
            np.testing.assert_array_equal(batch.n_id, plain.n_id)
            np.testing.assert_array_equal(batch.edge_weight, plain.edge_weight)

    def test_reads_of_other_rows_fall_with_the_scale(self):
        near, reads = np.isin(PART.nodes, self.ROWS), []
        for scale in (1.0, 3.0, 8.0):
            bias = gs.LocalityBias(placed(self.ROWS), scale, neighbor_set_size=25)
            sampled = sample_all(gs.LayerwiseSampler([30, 30], locality=bias))
            reads.append(sum((~near[np.unique(batch.n_id)]).sum() for batch in sampled))
        assert reads[0] > reads[1] > reads[2]
        assert reads[2] < 0.9 * reads[0]

    def test_scale_one_samples_as_without(self):
        bias = gs.LocalityBias(placed(self.ROWS))
        for one, other in zip(
            sample_all(gs.LayerwiseSampler(30, locality=bias)), sample_all(gs.LayerwiseSampler(30)), strict=True
        ):
            assert equal(one, other)

    def test_the_scale_may_change_while_a_part_is_in_memory(self):
        sampler = gs.LayerwiseSampler([30, 30], locality=gs.LocalityBias(placed(self.ROWS)))
        state = sampler.prepare(PART, TARGETS, 3)
        louder = replace(sampler, locality=replace(sampler.locality, scale=8.0))
        changed = sample_all(louder, state=state)
        assert all(equal(a, b) for a, b in zip(changed, sample_all(louder), strict=True))
        assert not all(equal(a, b) for a, b in zip(changed, sample_all(sampler, state=state), strict=True))


def loader_of(sampler, csc=None, seeds=None, batch_size=16, **options):
    """Batches over a whole graph."""
    csc = WORLD.csc if csc is None else csc
    seeds = np.arange(0, csc.num_rows, 7) if seeds is None else seeds
    options = {"labels": WORLD.labels, "masks": WORLD.masks, "shuffle": False, "num_threads": 0} | options
    return part_loader(
        [0], lambda part: WholeGraph.of(csc, 0), WORLD.features, {0: seeds}, sampler, batch_size=batch_size, **options
    )


def test_threads_change_nothing():
    sampler = gs.LayerwiseSampler([30, 20], locality=gs.LocalityBias(placed(TestLocality.ROWS), 2.0))
    alone = list(loader_of(sampler, shuffle=True))
    for num_threads in (1, 3):
        for one, other in zip(alone, loader_of(sampler, shuffle=True, num_threads=num_threads), strict=True):
            assert torch.equal(one.n_id, other.n_id) and torch.equal(one.edge_index, other.edge_index)
            assert torch.equal(one.edge_weight, other.edge_weight) and torch.equal(one.x, other.x)


def without_self_loops():
    """GAT replaces the self-loops of a graph; an edge between two entries of a node is not seen as one."""
    target = np.repeat(np.arange(WORLD.csc.num_rows), WORLD.csc.in_degree)
    kept = target != WORLD.csc.indices
    return build_csc(WORLD.csc.indices[kept], target[kept], WORLD.csc.num_rows)


@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GAT", "SGC"])
def test_layers_wide_enough_give_the_full_graph(name):
    """With all candidates sampled every weight is 1 / degree: the outputs of seeds are those of the whole graph."""
    csc = without_self_loops()
    torch.manual_seed(0)
    model = gs.NodeClassifier(getattr(gs.model, name)(16, 8, 5, num_layers=3)).eval()
    target = np.repeat(np.arange(csc.num_rows), csc.in_degree)
    edge_index = torch.from_numpy(np.stack([csc.indices.astype(np.int64), target]))
    with torch.no_grad():
        expected = model.backbone(torch.from_numpy(WORLD.features.array), edge_index)
        for batch in loader_of(gs.LayerwiseSampler(1000, 3), csc):
            seeds = batch.n_id[: batch.batch_size]
            torch.testing.assert_close(model(batch)[: batch.batch_size], expected[seeds], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_outputs_of_a_linear_model_are_unbiased(scale):
    """SGC has no nonlinearity: 21 seeds, 5 classes and one bias less, |z| < 5 over 1,500 keys: error rate 6e-5.

    With one entry a node (a row sampled once for all layers) |z| reaches 24 on graphs as dense: `sample_layers`.
    """
    csc, seeds = without_self_loops(), np.arange(21)
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.SGC(16, None, 5, num_layers=2)).eval()
    target = np.repeat(np.arange(csc.num_rows), csc.in_degree)
    edge_index = torch.from_numpy(np.stack([csc.indices.astype(np.int64), target]))
    bias = gs.LocalityBias(placed(TestLocality.ROWS), scale, neighbor_set_size=40)
    sampler, values = gs.LayerwiseSampler([60, 60], locality=bias), []
    with torch.no_grad():
        expected = model.backbone(torch.from_numpy(WORLD.features.array), edge_index)[:21]
        loader = loader_of(sampler, csc, seeds, batch_size=21)
        for epoch in range(1500):
            loader.set_epoch(epoch)
            (batch,) = loader
            values.append(model(batch)[:21])
    values = torch.stack(values).double()
    z = (values.mean(dim=0) - expected) / (values.std(dim=0) / 1500**0.5)
    assert z.abs().max() < 5
    assert (values.std(dim=0) > 1e-3).all()


def test_a_model_of_pyg_with_trimming_and_without():
    """Layers that sum with `edge_weight` read the same for the seeds, trimmed by hops or not."""
    torch.manual_seed(0)
    layers = [GraphConv(16, 8), GraphConv(8, 8), GraphConv(8, 5)]
    for batch in loader_of(gs.LayerwiseSampler([20, 30, 40])):
        results = []
        for trim in (False, True):
            x, edge_index, weight = batch.x, batch.edge_index, batch.edge_weight
            for index, layer in enumerate(layers):
                if trim:
                    x, edge_index, weight = trim_to_layer(
                        index, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index, weight
                    )
                x = layer(x, edge_index, weight).relu()
            results.append(x[: batch.batch_size])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes_per_layer": 0}, "nodes_per_layer >= 1 0"),
        ({"nodes_per_layer": [8, -1]}, "nodes_per_layer[1] >= 1 -1"),
        ({"nodes_per_layer": [8, 8], "num_layers": 3}, "num_layers 3 2"),
        ({"nodes_per_layer": 8, "num_layers": 0}, "num_layers >= 1 0"),
        ({"nodes_per_layer": 8, "direction": "out"}, "direction in both 'out'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.LayerwiseSampler(**arguments)


def test_it_is_a_plain_value():
    assert gs.LayerwiseSampler(64) == gs.LayerwiseSampler([64, 64]) == gs.LayerwiseSampler((64, 64), 2)
    assert hash(gs.LayerwiseSampler(64, 3)) == hash(gs.LayerwiseSampler([64] * 3))


def test_stored_weights_are_divided_by_the_probability():
    stored = np.random.default_rng(1).random(WORLD.csc.num_edges, np.float32) + 0.5
    sampler = gs.LayerwiseSampler([20, 30])
    plain = loader_of(sampler, return_e_id=True)
    for batch, other in zip(loader_of(sampler, return_e_id=True, edges={"edge_weight": stored}), plain, strict=True):
        assert torch.equal(batch.n_id, other.n_id) and torch.equal(batch.e_id, other.e_id)
        assert other.averaging_weights and not batch.averaging_weights
        row = batch.n_id[batch.edge_index[1]]
        inverse = other.edge_weight * torch.from_numpy(WORLD.csc.in_degree)[row]
        expected = torch.from_numpy(stored)[batch.e_id] * inverse
        torch.testing.assert_close(batch.edge_weight, expected.float(), rtol=1e-5, atol=0)
