"""Positive and negative samples, and the batches of links, against plain Python."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import links as oracle
from oracles.parts import part_loader, small_world

from lightning_gnnscale.graph import CSC, GraphSchema, build_csc
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import (
    AliasTable,
    ClusterSampler,
    LayerwiseSampler,
    LinkSampler,
    NeighborSampler,
    sample_negatives,
    sample_positives,
)
from lightning_gnnscale.sampler.link_sampler import LinkState
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.says import said
from tests.tiers import all_pairs

WORLD = small_world()
PART = WORLD.load_part(1)
CORE = np.arange(PART.num_core)
KEYS = [0, 1, 0x123456789ABCDEF, (1 << 64) - 1]


def rows_of(csc) -> list[list[int]]:
    return [csc.indices[csc.indptr[v] : csc.indptr[v + 1]].tolist() for v in range(csc.num_rows)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("walk_length", "choose"), [(1, "end"), (4, "end"), (4, "any")])
def test_positives_equal_the_oracles(key, walk_length, choose):
    seeds = np.random.default_rng(0).integers(0, PART.num_local, 200)
    expected = oracle.positives(rows_of(PART.csc), seeds.tolist(), key, walk_length, choose)
    assert sample_positives(PART.csc, seeds, key, walk_length, choose).tolist() == expected


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("weighted", [False, True])
def test_negatives_equal_the_oracles(key, weighted):
    weights = np.random.default_rng(1).random(77) ** 4 * (np.arange(77) % 5 > 0)
    table = AliasTable.of(weights) if weighted else None
    expected = oracle.negatives(77, 500, key, oracle.alias_table(weights.tolist()) if weighted else None)
    assert sample_negatives(77, 500, key, table).tolist() == expected


def chi_square(found, probabilities) -> float:
    """Distance of counts from their expectation, in standard deviations of the chi-square distribution."""
    probabilities = np.asarray(probabilities) / np.sum(probabilities)
    counts = np.bincount(found, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    known = probabilities > 0
    expected = probabilities[known] * len(found)
    assert expected.min() > 10
    freedom = known.sum() - 1
    return (((counts[known] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


# A correct sample exceeds 6 standard deviations in less than one of 10**5 keys (the upper tail of a chi-square with 39
# degrees of freedom beyond 39 + 6 * sqrt(78) = 92 is 4e-6); a wrong power or a missing node is hundreds away.
def test_negatives_come_in_proportion_to_degree_to_the_three_quarters():
    degree = np.arange(40)
    table = AliasTable.of(degree**0.75)
    found = np.concatenate([sample_negatives(40, 5000, key, table) for key in range(40)])
    assert abs(chi_square(found, degree**0.75)) < 6
    assert abs(chi_square(found, degree)) > 100
    assert abs(chi_square(sample_negatives(40, 100_000, 3), np.ones(40))) < 6


def test_a_walk_visits_nodes_with_the_probabilities_of_its_chain():
    """Against powers of the transition matrix; 6 standard deviations, as above."""
    csc = build_csc(np.array([1, 2, 2, 0, 3, 3, 4, 0]), np.array([0, 0, 1, 2, 2, 1, 3, 4]), 5)
    step = np.zeros((5, 5))
    for node, row in enumerate(rows_of(csc)):
        for neighbor in row:
            step[node, neighbor] += 1 / len(row)
    seeds = np.zeros(100_000, np.int64)
    powers = [np.linalg.matrix_power(step, length)[0] for length in (1, 2, 3)]
    assert abs(chi_square(sample_positives(csc, seeds, 5, 3), powers[2])) < 6
    assert abs(chi_square(sample_positives(csc, seeds, 6, 3, "any"), sum(powers))) < 6
    assert abs(chi_square(sample_positives(csc, seeds, 6, 3, "any"), powers[2] + 1e-3)) > 30


def test_a_seed_without_neighbours_gets_itself():
    csc = CSC(np.array([0, 0, 1]), np.array([0], np.int32))
    assert sample_positives(csc, np.array([0, 1, 1]), 7, 5).tolist() == [0, 0, 0]


def sample_all(sampler, part=PART, targets=CORE, batch_size=16, order=7):
    state = sampler.prepare(part, targets, seed=3)
    items = sampler.items(state, batch_size, False, order)
    assert len(items) == sampler.num_batches(len(targets), batch_size, False)
    space = Workspace(part.num_local, part.csc.indices.dtype)
    return [sampler.sample(state, item, batch_key(3, 0, 1, i), space, np.empty, True) for i, item in enumerate(items)]


@all_pairs
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("inner", [NeighborSampler([4, 3]), LayerwiseSampler(32, 2)])
@pytest.mark.parametrize("positives", ["neighbor", "walk", "edge"])
def test_batches_hold_links_of_the_part_and_negatives_of_its_core(positives, inner, share):
    sampler = LinkSampler(inner, positives, walk_length=2, num_negatives=3, share_negatives=share)
    rows = rows_of(PART.csc)
    near = [set(row).union(*(rows[u] for u in row)) if positives == "walk" else set(row) for row in rows]
    sampled = sample_all(sampler)
    for batch in sampled:
        seeds = batch.n_id[: batch.num_seeds]
        assert len(set(seeds.tolist())) == len(seeds)
        if batch.num_sampled_nodes is not None:
            assert batch.num_sampled_nodes[0] == batch.num_seeds
        source, other = seeds[batch.pairs]
        assert all(v in near[u] and u != v for u, v in zip(source.tolist(), other.tolist(), strict=True))
        assert batch.negatives.shape == (1 if share else len(source), 3)
        assert (seeds[batch.negatives] < PART.num_core).all()
        used = {*batch.pairs.ravel().tolist(), *batch.negatives.ravel().tolist()}
        if positives == "edge" and share:
            assert used == set(range(batch.num_seeds))
    firsts = np.concatenate([batch.n_id[batch.pairs[0]] for batch in sampled])
    if positives == "neighbor":
        linked = [v for v in CORE if rows[v] and rows[v] != [v]]
        assert set(firsts) <= set(linked)
        assert len(firsts) > 0.9 * len(linked)  # but for the self-loops sampled
    assert sum(len(b.n_id) for b in sampled) > 0


def test_edges_are_sampled_alike_and_none_twice_before_all_were_seen():
    rows = rows_of(PART.csc)
    edges = sorted((v, u) for v in CORE for u in rows[v] if u != v)
    per_node = -(-sum(len(rows[v]) for v in CORE) // len(CORE))
    sampler = LinkSampler(NeighborSampler([2]), "edge", edges_per_node=per_node)
    found = []
    for batch in sample_all(sampler, batch_size=64):
        found += list(zip(*batch.n_id[batch.pairs].tolist(), strict=True))
    assert set(found) == set(edges)
    once = sample_all(LinkSampler(NeighborSampler([2]), "edge"), batch_size=64)
    firsts = [pair for batch in once for pair in zip(*batch.n_id[batch.pairs].tolist(), strict=True)]
    assert len(set(firsts)) == len(firsts)


def test_edges_of_a_pass_take_no_memory_of_all_edges():
    """Of 2**40 edges, as many as there are targets are sampled, wherever they lie."""
    sampler = LinkSampler(NeighborSampler([4]), "edge")
    state = LinkState(None, np.arange(1000), 1000, None, np.linspace(0, 2**40, 1001).astype(np.int64))
    sampled = np.concatenate(sampler.items(state, 64, drop_last=False, order_key=5))
    assert len(np.unique(sampled)) == 1000
    assert np.histogram(sampled, 10, (0, 2**40))[0].min() > 50


def test_excluded_pairs_leave_their_edges_and_no_others():
    plain = sample_all(LinkSampler(NeighborSampler([-1, 3]), "edge"))
    without = sample_all(LinkSampler(NeighborSampler([-1, 3]), "edge", exclude_pairs=True))
    removed = 0
    for full, less in zip(plain, without, strict=True):
        np.testing.assert_array_equal(full.n_id, less.n_id)
        ends = {frozenset(pair) for pair in zip(*full.pairs.tolist(), strict=True)}
        edges = list(zip(*full.edge_index.tolist(), full.e_id.tolist(), strict=True))
        kept = [edge for edge in edges if frozenset(edge[:2]) not in ends]
        assert kept == list(zip(*less.edge_index.tolist(), less.e_id.tolist(), strict=True))
        np.testing.assert_array_equal(
            np.repeat(np.arange(len(less.indptr) - 1), np.diff(less.indptr)), less.edge_index[1]
        )
        assert sum(less.num_sampled_edges) == len(kept)
        first = (less.edge_index[1] < less.num_sampled_nodes[0]).sum()
        assert less.num_sampled_edges[0] == first
        removed += len(edges) - len(kept)
    assert removed > 0


def loader(num_threads, parts=(0, 1, 2), **options):
    targets = {p: np.arange(*WORLD.part_offsets[p : p + 2]) for p in range(3)}
    sampler = LinkSampler(NeighborSampler([3, 2]), **options)
    return part_loader(
        parts, WORLD.load_part, WORLD.features, targets, sampler, batch_size=20, seed=5, num_threads=num_threads
    )


@pytest.mark.parametrize("options", [{"positives": "walk"}, {"positives": "edge", "exclude_pairs": True}])
def test_threads_and_the_walk_change_no_batch(options):
    alone = {batch.key: batch for batch in loader(0, **options)}
    count = 0
    for batch in [*loader(2, (2, 0), **options), *loader(1, (1,), **options)]:
        same = alone[batch.key]
        for name in ("n_id", "edge_index", "pairs", "negatives", "x"):
            assert torch.equal(getattr(batch, name), getattr(same, name)), name
        count += 1
    assert count == len(alone)


def test_a_batch_has_pygs_names_and_moves():
    batch = next(iter(loader(0, share_negatives=True))).to("cpu")
    assert torch.equal(batch.src_index, batch.pairs[0])
    assert torch.equal(batch.dst_pos_index, batch.pairs[1])
    assert batch.dst_neg_index.shape == (batch.pairs.shape[1], 5)


def test_negatives_of_the_whole_graph_come_from_all_nodes():
    whole = WholeGraph.of(WORLD.csc, 0)
    sampler = LinkSampler(NeighborSampler([1]), negatives="uniform", num_negatives=20)
    sampled = sample_all(sampler, whole, np.arange(0, 300, 3), batch_size=50)
    seen = np.concatenate([batch.n_id[batch.negatives].ravel() for batch in sampled])
    assert len(np.unique(seen)) > 290  # 300 (1 - e**-6.6) = 299.6 of 300


@pytest.mark.parametrize("positives", ["neighbor", "walk", "edge"])
def test_parts_without_edges_or_targets(positives):
    lonely = WholeGraph.of(CSC(np.zeros(6, np.int64), np.zeros(0, np.int32)), 0)
    for batch in sample_all(LinkSampler(NeighborSampler([2]), positives), lonely, np.arange(5), batch_size=2):
        assert batch.pairs.shape == (2, 0)
        assert batch.negatives.shape == (0, 5)
    assert sample_all(LinkSampler(NeighborSampler([2]), positives), lonely, np.arange(0)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positives": "all"}, "positives neighbor walk edge 'all'"),
        ({"negatives": "hard"}, "negatives degree uniform all 'hard'"),
        ({"num_negatives": 0}, "num_negatives 1 0"),
        ({"walk_length": 0}, "walk_length 1 0"),
        ({"sampler": ClusterSampler(4)}, "NeighborSampler LayerwiseSampler ClusterSampler"),
        ({"sampler": LayerwiseSampler(8), "exclude_pairs": True}, "exclude_pairs False"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=said(message)):
        LinkSampler(**options)


def test_bad_samples():
    with pytest.raises(ValueError, match=said("walk_length 1 0")):
        sample_positives(PART.csc, CORE, 1, 0)
    with pytest.raises(ValueError, match=said("choose 'start'")):
        sample_positives(PART.csc, CORE, 1, 2, "start")
    with pytest.raises(ValueError, match=said("num_nodes negative [1, 2147483648] 0")):
        sample_negatives(0, 1, 1)
    with pytest.raises(ValueError, match=said("3 nodes 2")):
        sample_negatives(3, 1, 1, AliasTable.of([1, 2]))
    with pytest.raises(ValueError, match=said(">= 0 0")):
        AliasTable.of([1, -2])


# A graph with edge types 0 to 2, and 3 to 5 for the reverses that were added; parallel edges and edges of one node too.
def typed(reverses: bool):
    rng = np.random.default_rng(5)
    triples = np.unique(np.stack([rng.integers(0, 12, 70), rng.integers(0, 3, 70), rng.integers(0, 12, 70)]), axis=1)
    edges = triples
    if reverses:
        edges = np.concatenate([triples, np.stack([triples[2], triples[1] + 3, triples[0]])], axis=1)
    edges = edges[:, np.lexsort((edges[1], edges[0], edges[2]))]
    schema = GraphSchema(
        ("node",),
        tuple(("node", str(number), "node") for number in range(6 if reverses else 3)),
        (3, 4, 5, 0, 1, 2) if reverses else (),
    )
    csc = build_csc(edges[0], edges[2], 12)
    assert csc.indices.tolist() == edges[0].tolist()
    part = replace(WholeGraph.of(csc, 0), schema=schema, columns={"edge_type": edges[1].astype(np.uint8)})
    return part, {tuple(triple) for triple in triples.T.tolist()}


def triples_of(batch) -> list[tuple]:
    (head, tail), relation = batch.n_id[batch.pairs], batch.pair_type
    return list(zip(head.tolist(), relation.tolist(), tail.tolist(), strict=True))


@pytest.mark.parametrize("reverses", [False, True])
@pytest.mark.parametrize("neighborhoods", [False, True])
def test_a_pass_samples_each_listed_triple_once_and_no_added_reverse(reverses, neighborhoods):
    part, listed = typed(reverses)
    assert any(h == t for h, _, t in listed)
    sampler = LinkSampler(
        NeighborSampler([2]), "edge", edges_per_node=-(-len(listed) // 12), neighborhoods=neighborhoods
    )
    found = [triple for batch in sample_all(sampler, part, np.arange(12), batch_size=5) for triple in triples_of(batch)]
    assert set(found) == listed
    assert len(found) < len(listed) + 12


@pytest.mark.parametrize("reverses", [False, True])
def test_relations_that_are_asked_for_are_sampled_alone(reverses):
    part, listed = typed(reverses)
    sampler = LinkSampler(NeighborSampler([2]), "edge", edges_per_node=6, relations=[2, 0])
    found = [triple for batch in sample_all(sampler, part, np.arange(12), batch_size=9) for triple in triples_of(batch)]
    assert set(found) == {triple for triple in listed if triple[1] in (0, 2)}
    if reverses:
        sampler = LinkSampler(NeighborSampler([2]), "edge", edges_per_node=6, relations=[4])
        found = [t for batch in sample_all(sampler, part, np.arange(12), batch_size=9) for t in triples_of(batch)]
        assert set(found) == {(t, r + 3, h) for h, r, t in listed if r == 1}


@pytest.mark.parametrize("share", [False, True])
def test_false_heads_are_sampled_beside_false_tails(share):
    options = {"share_negatives": share, "num_negatives": 4, "negatives": "uniform"}
    part, _ = typed(False)
    one, both = (LinkSampler(NeighborSampler([2]), "edge", corrupt=corrupt, **options) for corrupt in ("other", "both"))
    for first, second in zip(*(sample_all(s, part, np.arange(12), batch_size=6) for s in (one, both)), strict=True):
        assert first.source_negatives is None
        tails, heads = (second.n_id[ends] for ends in (second.negatives, second.source_negatives))
        assert tails.tolist() == first.n_id[first.negatives].tolist()
        assert heads.shape == tails.shape == (1 if share else 6, 4)
        assert (heads.tolist() == tails.tolist()) == share
    assert both.seeds_per_item == (2 if share else 10)


def test_all_nodes_are_negatives_once():
    part, _ = typed(True)
    sampler = LinkSampler(NeighborSampler([2]), "edge", negatives="all", corrupt="both")
    for batch in sample_all(sampler, part, np.arange(12), batch_size=6):
        assert sorted(batch.n_id[batch.negatives[0]].tolist()) == list(range(12))
        assert batch.negatives.shape == (1, 12)
        assert batch.source_negatives.tolist() == batch.negatives.tolist()


def test_batches_without_neighbourhoods_are_the_links_alone():
    with_edges, without = (
        sample_all(LinkSampler(NeighborSampler([3]), "edge", share_negatives=True, neighborhoods=sampled))
        for sampled in (True, False)
    )
    for one, two in zip(with_edges, without, strict=True):
        assert two.n_id.tolist() == one.n_id[: one.num_seeds].tolist()
        assert two.pairs.tolist() == one.pairs.tolist()
        assert two.negatives.tolist() == one.negatives.tolist()
        assert two.edge_index.shape == (2, 0)
        assert not two.indptr.any()
        assert len(two.indptr) == two.num_seeds + 1
    assert LinkSampler(NeighborSampler([3]), neighborhoods=False).per_hop == ()


def test_links_of_a_graph_without_relations_have_none():
    for batch in sample_all(LinkSampler(NeighborSampler([3]), "edge")):
        assert batch.pair_type is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corrupt": "heads"}, "corrupt 'heads'"),
        ({"relations": [1]}, "edge types positives=\"edge\" positives='neighbor'"),
        ({"relations": [], "positives": "edge"}, "relations >= 0 None"),
        ({"relations": [-1], "positives": "edge"}, "relations >= 0 None"),
    ],
)
def test_bad_arguments_of_triples(options, message):
    with pytest.raises(ValueError, match=said(message)):
        LinkSampler(**options)


def test_relations_that_a_graph_has_not():
    sampler = LinkSampler(NeighborSampler([2]), "edge", relations=[7])
    with pytest.raises(ValueError, match=said("relations 6 [7]")):
        sample_all(sampler, typed(True)[0], np.arange(12))
    with pytest.raises(ValueError, match=said("relations=[7] graph edge types")):
        sample_all(sampler)
