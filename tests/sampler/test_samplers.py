"""What each sampler samples from a part, against plain Python."""

from dataclasses import replace

import numpy as np
import pytest
from oracles.parts import small_world

from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import ClusterSampler, FullBatchSampler, NeighborSampler, SaintSampler
from lightning_gnnscale.sampler.cluster import breadth_first_clusters
from lightning_gnnscale.sampler.protocol import induced_subgraph
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.says import said

WORLD = small_world()
PART = WORLD.load_part(1)
TARGETS = WORLD.targets(1) - PART.core_start


def sample_all(sampler, part=PART, targets=TARGETS, batch_size=16, order=7, drop_last=False, e_id=True):
    """Sample one pass, with one workspace that all batches share."""
    if sampler.direction == "both":
        part = part.symmetrised()
    state = sampler.prepare(part, targets, seed=3)
    items = sampler.items(state, batch_size, drop_last, order)
    assert len(items) == sampler.num_batches(len(targets), batch_size, drop_last)
    space = Workspace(part.num_local, part.csc.indices.dtype)
    return [sampler.sample(state, item, batch_key(3, 0, 1, i), space, np.empty, e_id) for i, item in enumerate(items)]


def edges_of(csc) -> set[tuple[int, int]]:
    return set(zip(csc.indices.tolist(), np.repeat(np.arange(csc.num_rows), csc.in_degree).tolist(), strict=True))


def assert_well_formed(sampled, csc):
    """Edges exist, stand by target, and e_id says where."""
    assert len(np.unique(sampled.n_id)) == len(sampled.n_id)
    source, target = sampled.edge_index
    np.testing.assert_array_equal(target, np.repeat(np.arange(len(sampled.indptr) - 1), np.diff(sampled.indptr)))
    np.testing.assert_array_equal(csc.indices[sampled.e_id], sampled.n_id[source])
    pairs = set(zip(sampled.n_id[source].tolist(), sampled.n_id[target].tolist(), strict=True))
    assert pairs <= edges_of(csc)


def assert_induced(sampled, csc):
    """Exactly the edges between the sampled nodes, and every node is a target."""
    inside = set(sampled.n_id.tolist())
    expected = sorted((u, v) for u, v in edges_of(csc) if u in inside and v in inside)
    source, target = sampled.edge_index
    assert sorted(zip(sampled.n_id[source].tolist(), sampled.n_id[target].tolist(), strict=True)) == expected
    assert len(sampled.indptr) == len(sampled.n_id) + 1


class TestNeighborSampler:
    def test_every_target_once_and_only_core_nodes(self):
        sampled = sample_all(NeighborSampler([4, 3]))
        seeds = np.concatenate([batch.n_id[: batch.num_seeds] for batch in sampled])
        assert sorted(seeds.tolist()) == TARGETS.tolist()
        assert seeds.tolist() != TARGETS.tolist()
        for batch in sampled:
            assert_well_formed(batch, PART.csc)
            assert batch.num_sampled_nodes[0] == batch.num_seeds

    def test_natural_order_and_dropping_the_short_batch(self):
        sampled = sample_all(NeighborSampler([2]), order=None, drop_last=True)
        seeds = np.concatenate([batch.n_id[: batch.num_seeds] for batch in sampled])
        np.testing.assert_array_equal(seeds, TARGETS[: len(TARGETS) // 16 * 16])

    def test_full_fan_outs_reach_every_neighbour_of_the_core(self):
        for batch in sample_all(NeighborSampler([-1])):
            for i in range(batch.num_seeds):
                row = batch.n_id[batch.edge_index[0, batch.indptr[i] : batch.indptr[i + 1]]]
                start, end = PART.csc.indptr[batch.n_id[i] : batch.n_id[i] + 2]
                np.testing.assert_array_equal(row, PART.csc.indices[start:end])

    def test_both_directions(self):
        world = small_world(both_ways=False, seed=4)
        part = world.load_part(0)
        targets = world.targets(0)
        one = sample_all(NeighborSampler([-1]), part, targets)
        both = sample_all(NeighborSampler([-1], direction="both"), part, targets)
        assert sum(b.edge_index.shape[1] for b in both) > sum(b.edge_index.shape[1] for b in one)
        for batch in both:
            assert_well_formed(batch, part.symmetrised().csc)

    def test_row_scale_is_one_over_the_probability(self):
        for batch in sample_all(NeighborSampler([4, 3])):
            targets = batch.n_id[: len(batch.indptr) - 1]
            degree, taken = PART.csc.in_degree[targets], np.diff(batch.indptr)
            np.testing.assert_allclose(
                batch.row_scale, np.where(taken > 0, degree / np.maximum(taken, 1), 1), rtol=1e-6
            )
        assert all(batch.row_scale is None for batch in sample_all(NeighborSampler([4]), e_id=False))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"fanouts": [0]}, "fanouts[0]"),
            ({"fanouts": [5, -2]}, "fanouts[1] -2"),
            ({"fanouts": []}, "at least one hop"),
            ({"fanouts": [5], "direction": "out"}, "direction in both 'out'"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=said(message)):
            NeighborSampler(**arguments)

    def test_it_is_a_plain_value(self):
        assert NeighborSampler([5, 3]) == NeighborSampler((5, 3))
        assert hash(NeighborSampler([5])) == hash(NeighborSampler([5]))


def test_nodes_that_are_given_twice_are_refused_and_leave_the_workspace_clean():
    space, nodes = Workspace(PART.num_local, PART.csc.indices.dtype), TARGETS[:9]
    fresh = Workspace(PART.num_local, PART.csc.indices.dtype)
    expected = induced_subgraph(PART.csc, nodes, 4, fresh, np.empty, True)
    with pytest.raises(ValueError, match=said("nodes distinct 12 10 nodes")):
        induced_subgraph(PART.csc, TARGETS[[1, 3, 3, *range(4, 12), 1]], 4, space, np.empty, True)
    again = induced_subgraph(PART.csc, nodes, 4, space, np.empty, True)
    for name in ("n_id", "edge_index", "indptr", "e_id"):
        np.testing.assert_array_equal(getattr(again, name), getattr(expected, name))


class TestFullBatchSampler:
    def test_the_part_as_it_is(self):
        (batch,) = sample_all(FullBatchSampler())
        np.testing.assert_array_equal(batch.n_id, np.arange(PART.num_local))
        assert batch.num_seeds == PART.num_core
        assert batch.num_sampled_nodes is None
        assert_well_formed(batch, PART.csc)
        assert batch.edge_index.shape[1] == PART.csc.num_edges

    def test_a_part_without_targets_has_no_batch(self):
        assert FullBatchSampler().num_batches(0, 16, False) == 0


class TestClusterSampler:
    def test_each_core_node_in_one_batch_with_the_edges_between(self):
        sampled = sample_all(ClusterSampler(num_clusters=10, clusters_per_batch=3))
        nodes = np.concatenate([batch.n_id for batch in sampled])
        assert sorted(nodes.tolist()) == list(range(PART.num_core))
        for batch in sampled:
            assert_induced(batch, PART.csc)
            assert_well_formed(batch, PART.csc)
            is_target = np.isin(batch.n_id, TARGETS)
            assert is_target[: batch.num_seeds].all() and not is_target[batch.num_seeds :].any()

    def test_batches_without_targets_are_avoided(self):
        """Targets in 3 of 12 clusters and 3 batches: assigned out one each, whatever the order."""
        targets = np.array([0, PART.num_core // 2, PART.num_core - 1])

        def by_range(part, num_clusters, seed):
            return np.arange(part.num_core, dtype=np.int32) * num_clusters // part.num_core

        wide = np.concatenate([targets, np.flatnonzero(by_range(PART, 12, 0) == 0)[:10]])
        sampler = ClusterSampler(12, clusters_per_batch=4, cluster=by_range)
        for order in range(10):
            sampled = sample_all(sampler, targets=np.unique(wide), order=order)
            assert len(sampled) == 3
            assert all(batch.num_seeds > 0 for batch in sampled)

    def test_the_callable_decides_the_clusters(self):
        asked = []

        def cluster(part, num_clusters, seed):
            asked.append((part.part, num_clusters, seed))
            return (np.arange(part.num_core) % num_clusters).astype(np.int32)

        sampled = sample_all(ClusterSampler(5, cluster=cluster))
        assert asked == [(1, 5, 3)]
        for batch in sampled:
            assert len(set((batch.n_id % 5).tolist())) == 1

    @pytest.mark.parametrize(
        ("cluster_id", "message"),
        [
            (np.zeros(3, np.int32), "shape"),
            (np.full(PART.num_core, 5), "below 5"),
            (np.full(PART.num_core, -1), ">= 0"),
        ],
    )
    def test_a_wrong_clustering_is_named(self, cluster_id, message):
        with pytest.raises(ValueError, match=message):
            sample_all(ClusterSampler(5, cluster=lambda *_: cluster_id))

    def test_the_default_clusters_are_equal_and_local(self):
        cluster_id = breadth_first_clusters(PART, 7, seed=0)
        sizes = np.bincount(cluster_id, minlength=7)
        assert sizes.max() - sizes.min() <= 1
        ring = np.arange(600)
        csc = PART.csc._replace(
            indptr=np.arange(0, 1201, 2), indices=np.stack([ring - 1, ring + 1], 1).ravel().astype(np.int32) % 600
        )
        part = replace(PART, csc=csc, num_core=600, halo_nodes=np.zeros(0, np.int64))
        cluster_id = breadth_first_clusters(part, 6, seed=0)
        assert (cluster_id[ring - 1] != cluster_id).sum() <= 24  # a random cut would part 500 of 600 pairs

    @pytest.mark.parametrize(("num_clusters", "clusters_per_batch"), [(0, 1), (4, 0)])
    def test_bad_arguments(self, num_clusters, clusters_per_batch):
        with pytest.raises(ValueError, match=said("integer 1 0")):
            ClusterSampler(num_clusters, clusters_per_batch)


class TestSaintSampler:
    @pytest.mark.parametrize("kind", ["node", "edge", "walk"])
    def test_subgraphs_are_induced_and_depend_on_the_key_alone(self, kind):
        sampler = SaintSampler(kind, budget=60, num_roots=25, num_norm_samples=3, batches_per_pass=4)
        first, second = sample_all(sampler), sample_all(sampler, order=99)
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a.n_id, b.n_id)
            np.testing.assert_array_equal(a.edge_weight, b.edge_weight)
            assert_induced(a, PART.csc)
            assert_well_formed(a, PART.csc)
            is_target = np.isin(a.n_id, TARGETS)
            assert is_target[: a.num_seeds].all() and not is_target[a.num_seeds :].any()
            assert a.loss_weight.shape == (a.num_seeds,)
            assert a.loss_weight.dtype == a.edge_weight.dtype == np.float32
        assert len({batch.n_id.tobytes() for batch in first}) == 4

    def test_walks_start_at_targets(self):
        for batch in sample_all(SaintSampler("walk", num_roots=5, walk_length=1, num_norm_samples=1)):
            assert 0 < batch.num_seeds
            assert len(batch.n_id) <= 10

    @pytest.mark.parametrize("kind", ["node", "edge", "walk"])
    def test_weights_undo_the_sampling(self, kind):
        """The weighted loss has the mean over targets as its expectation, the weighted sum the neighbours' mean.

        Weights come from 2,000 subgraphs and are judged on 2,000 others. A core node that is judged was sampled over
        200
        times, each of its ten or so edges over 40 times in either half: an edge's weight is off by sqrt(2 / 40) = 0.22
        of itself, their mean by about 0.22 / sqrt(10) = 0.07 for values of deviation 1, and 0.25 is 3.6 deviations.
        """
        sampler = SaintSampler(kind, budget=150, num_roots=60, num_norm_samples=2000, batches_per_pass=2000)
        value = np.random.default_rng(0).normal(size=PART.num_local)
        losses, sums, sampled_count = [], np.zeros(PART.num_local), np.zeros(PART.num_local)
        for batch in sample_all(sampler):
            losses.append((batch.loss_weight * value[batch.n_id[: batch.num_seeds]]).sum())
            messages = batch.edge_weight * value[batch.n_id[batch.edge_index[0]]]
            sums[batch.n_id] += np.bincount(batch.edge_index[1], messages, len(batch.n_id))
            sampled_count[batch.n_id] += 1
        spread = np.std(losses) / np.sqrt(len(losses))
        assert abs(np.mean(losses) - value[TARGETS].mean()) < 6 * spread
        core = np.arange(PART.num_core)
        full = np.array(
            [value[PART.csc.indices[PART.csc.indptr[v] : PART.csc.indptr[v + 1]]].sum() for v in core]
        ) / np.maximum(PART.degree[core], 1)
        often = sampled_count[core] > 200
        assert often.sum() > 20
        np.testing.assert_allclose((sums[core] / np.maximum(sampled_count[core], 1))[often], full[often], atol=0.25)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"kind": "tree"}, "kind node edge walk 'tree'"),
            ({"budget": 10.5}, "budget 1 10.5"),
            ({"budget": 0}, "budget 1 0"),
            ({"num_norm_samples": 0}, "num_norm_samples 1"),
            ({"walk_length": -1}, "walk_length 1 -1"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=said(message)):
            SaintSampler(**arguments)
