"""`NeighborSampler` with locality: what a part and a whole graph sample, index files, weights of batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from locality_runs import NUM_NODES, PLACED, WEIGHT, WORLD, batches, biased, placement
from oracles.parts import small_world

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from lightning_gnnscale.triton_kernels.sample_neighbors.reference import sample_neighbors_reference
from tests.says import said

PART = WORLD.load_part(1)
TARGETS = WORLD.targets(1) - PART.core_start


def sample(sampler, graph, items, key, return_e_id=True):
    state = sampler.prepare(graph, items, 0)
    space = Workspace(graph.num_local, graph.csc.indices.dtype)
    return sampler.sample(state, items, key, space, np.empty, return_e_id)


def masks(graph, sampler):
    made = [np.zeros(graph.num_local, bool) for _ in sampler.fanouts]
    for mask, nodes in zip(made, sampler.locality.neighbor_sets(graph, len(made)), strict=True):
        mask[nodes] = True
    return made


def assert_is_reference(sampled, sampler, graph, items, key):
    scale = sampler.locality.scale
    plain = sample_neighbors_reference(
        graph.csc, items, sampler.fanouts, key, preferred=masks(graph, sampler), scale=scale
    )
    for name in ("n_id", "edge_index", "indptr", "edge_weight", "e_id"):
        np.testing.assert_array_equal(getattr(sampled, name), getattr(plain, name), err_msg=name)


@pytest.mark.parametrize("direction", ["in", "both"])
def test_a_part_samples_as_the_reference(direction):
    world = small_world(both_ways=False, seed=3)
    part = world.load_part(1)
    part = part.symmetrised() if direction == "both" else part
    sampler, items = biased(direction=direction), np.arange(0, part.num_core, 3)
    sampled = sample(sampler, part, items, 5)
    assert sampled.averaging_weights and sampled.edge_weight.dtype == np.float32
    assert_is_reference(sampled, sampler, part, items, 5)


def test_scale_1_is_no_locality():
    for graph in (PART, WholeGraph.of(WORLD.csc, 0)):
        mine, plain = (
            sample(sampler, graph, TARGETS, 3) for sampler in (biased(scale=1.0), gs.NeighborSampler([4, 3]))
        )
        for one, other in zip(mine, plain, strict=True):
            np.testing.assert_array_equal(one, other)
        assert mine.edge_weight is None and not mine.averaging_weights


def test_the_scale_may_rise_after_a_part_was_prepared():
    state, space = biased(scale=1.0).prepare(PART, TARGETS, 0), Workspace(PART.num_local, np.int32)
    later = biased(scale=8.0)
    sampled = later.sample(state, TARGETS, 7, space, np.empty, True)
    assert_is_reference(sampled, later, PART, TARGETS, 7)


def test_a_whole_graph_reads_files_beside_its_store(tmp_path):
    sampler, items = biased(), np.arange(40)
    graph = replace(WholeGraph.of(WORLD.csc, 0), root=tmp_path, fingerprint="abc")
    sampled = sample(sampler, graph, items, 9, return_e_id=False)
    found = sorted((tmp_path / "locality").iterdir())
    assert len([path for path in found if path.suffix == ".npy"]) == 4  # two sets, rows and counts
    with_edges = sample(sampler, graph, items, 9)
    assert_is_reference(with_edges, sampler, graph, items, 9)
    np.testing.assert_array_equal(sampled.n_id, with_edges.n_id)
    assert sampled.e_id is None
    assert len(list((tmp_path / "locality").glob("*.position.npy"))) == 2
    assert not list((tmp_path / "locality").glob("*.partial"))
    in_memory = sample(sampler, WholeGraph.of(WORLD.csc, 0), items, 9)
    np.testing.assert_array_equal(in_memory.n_id, sampled.n_id)


def test_a_graph_in_no_store_may_be_given_a_folder(tmp_path):
    sampler, items = biased(folder=str(tmp_path / "here")), np.arange(40)
    assert_is_reference(
        sample(sampler, WholeGraph.of(WORLD.csc, 0), items, 2), sampler, WholeGraph.of(WORLD.csc, 0), items, 2
    )
    assert len(list((tmp_path / "here").glob("*.npy"))) == 6


def test_a_placement_of_another_store_is_refused(tmp_path):
    graph = replace(WholeGraph.of(WORLD.csc, 0), root=tmp_path, fingerprint="abc")
    sampler = gs.NeighborSampler([3], locality=gs.LocalityBias(placement(fingerprint="xyz"), 2.0))
    with pytest.raises(PlacementError, match=said("store xyz abc")):
        sampler.prepare(graph, np.arange(4), 0)
    sampler = gs.NeighborSampler([3], locality=gs.LocalityBias(placement(num_nodes=NUM_NODES + 1), 2.0))
    with pytest.raises(PlacementError, match="place its rows again"):
        sampler.prepare(graph, np.arange(4), 0)


def test_locality_with_replacement_is_refused():
    with pytest.raises(ValueError, match=said("False True")):
        gs.NeighborSampler([3], replace=True, locality=gs.LocalityBias(PLACED))


@pytest.mark.parametrize("graph", ["part", "graph"])
def test_threads_and_batches_change_nothing(graph):
    """Invariant 3, and samples keyed by node alone: a node's row does not depend on the others of its hop."""
    one, two = (list(batches(biased(), threads, graph=graph)) for threads in (0, 2))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index)
        assert torch.equal(a.edge_weight, b.edge_weight) and a.averaging_weights and b.averaging_weights
    sampler, items = biased([4]), np.arange(20)
    whole = WholeGraph.of(WORLD.csc, 0)
    many, few = sample(sampler, whole, items, 6), sample(sampler, whole, items[7:9], 6)
    rows = slice(many.indptr[7], many.indptr[9])
    np.testing.assert_array_equal(many.e_id[rows], few.e_id)
    np.testing.assert_array_equal(many.edge_weight[rows], few.edge_weight)


@pytest.mark.parametrize("graph", ["part", "graph"])
def test_stored_weights_are_divided_by_the_probability(graph):
    """Weight of an edge:

    stored weight times (1 / probability), which is 1 / probability = edge_weight * length of the row.
    """
    plain = list(batches(biased(), graph=graph, return_e_id=True))
    weighted = list(batches(biased(), graph=graph, return_e_id=True, edge_weight=WEIGHT))
    for a, b in zip(plain, weighted, strict=True):
        assert a.averaging_weights and not b.averaging_weights
        if graph == "part":
            csc, row_of = WORLD.load_part(a.part).csc, {int(n): i for i, n in enumerate(WORLD.load_part(a.part).nodes)}
            length = np.array([csc.in_degree[row_of[int(n)]] for n in a.n_id])
        else:
            length = WORLD.csc.in_degree[a.n_id]
        expected = WEIGHT[a.e_id] * a.edge_weight.numpy() * length[a.edge_index[1]]
        np.testing.assert_allclose(b.edge_weight, expected, rtol=1e-6)


def test_graphsaint_keeps_its_convention():
    for batch in batches(gs.SaintSampler("walk", num_roots=10, num_norm_samples=3)):
        assert batch.averaging_weights and batch.loss_weight is not None
    assert not any(batch.averaging_weights for batch in batches(gs.NeighborSampler([3])))
