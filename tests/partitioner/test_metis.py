"""METIS: cut, balances, several at once, its library found and missing; the parts of pymetis, bit for bit."""

import sys

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.partitioner import metis as metis_module
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.metis import call_metis, find_metis_library
from tests.partitioner.graphs import ODD, stream_of
from tests.says import said
from tests.tiers import each_value, first

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(not metis_module.metis_is_installed(), reason="needs METIS: the extra [metis], or libmetis"),
]

GRID = [(10 * r + c, 10 * r + c + 1) for r in range(10) for c in range(9)] + [(v, v + 10) for v in range(90)]
COMMUNITIES = SyntheticGraph(4_000, 40_000, num_communities=24, homophily=0.85, seed=2)

METIS = sys.modules[find_metis_library.__module__]  # the package's `metis` is the function


@pytest.fixture
def without_library(monkeypatch):
    find_metis_library.cache_clear()
    monkeypatch.setattr(METIS, "_candidates", lambda: ["libnothing_of_this_name.so"])
    yield
    find_metis_library.cache_clear()


def test_a_grid_is_cut_better_than_at_random():
    stream = stream_of(GRID, 100)
    metis = partition(stream, "metis", 4)
    assert metis.quality.edge_cut_ratio < 0.25 * partition(stream, "random", 4).quality.edge_cut_ratio
    assert metis.quality.node_balance <= 1.04  # 1.03, and the whole node that it rounds to
    loose = partition(stream, "metis", 4, balance={"nodes": 1.2})
    assert loose.quality.node_balance <= 1.2
    both_ways = stream_of(GRID + [(v, u) for u, v in GRID], 100)
    assert partition(both_ways, "metis", 4).quality.num_edges == len(GRID)
    assert np.array_equal(partition(stream, "metis", 4, seed=5).part_id, partition(stream, "metis", 4, seed=5).part_id)


@each_value
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name):
    num_nodes, edges = ODD[name]
    for num_parts in {1, min(3, num_nodes)}:
        p = partition(stream_of(edges, num_nodes), "metis", num_parts)
        assert sum(p.quality.nodes_per_part) == num_nodes


@first(3)
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_with_two_balances(name):
    num_nodes, edges = ODD[name]
    masks = {"train": np.arange(num_nodes) % 2 == 0}
    num_parts = min(2, num_nodes)
    p = partition(stream_of(edges, num_nodes), "metis", num_parts, masks=masks, balance={"nodes": 2.0, "train": 2.0})
    assert sum(p.quality.nodes_per_part) == num_nodes
    assert p.notes["balance"]["train"] == p.quality.train_balance


def test_several_balances_are_kept_where_that_of_nodes_alone_breaks_them():
    # Training nodes and volume sit in few communities, so balancing nodes alone cannot balance them by probability.
    community = COMMUNITIES.communities()
    masks = {"train": (community < 6) & (np.arange(4_000) % 2 == 0)}
    balance = {"nodes": 1.05, "volume": 1.10, "train": 1.05}
    alone = partition(COMMUNITIES.stream(), "metis", 4, masks=masks)
    p = partition(COMMUNITIES.stream(), "metis", 4, masks=masks, balance=balance)
    assert alone.quality.train_balance > 1.3
    assert p.notes["balance_violations"] == {}
    assert p.quality.node_balance <= 1.05 and p.quality.volume_balance <= 1.10 and p.quality.train_balance <= 1.05
    assert p.notes["balance"] == pytest.approx(
        {"nodes": p.quality.node_balance, "volume": p.quality.volume_balance, "train": p.quality.train_balance}
    )
    assert p.quality.edge_cut_ratio < 0.6 * partition(COMMUNITIES.stream(), "random", 4).quality.edge_cut_ratio


def test_a_bound_that_metis_breaks_is_told(monkeypatch):
    monkeypatch.setattr(metis_module, "call_metis", lambda library, indptr, *rest: np.arange(len(indptr) - 1) == 0)
    with pytest.warns(UserWarning, match=said("balance 1.9800 1.2 0 99")):
        p = partition(stream_of(GRID, 100), "metis", 2, balance={"nodes": 1.2, "volume": 2.0})
    assert p.notes["balance_violations"] == {"nodes": 39}


@pytest.mark.parametrize("route_around_system", [False, True])
def test_every_library_at_hand_answers(monkeypatch, route_around_system):
    candidates = METIS._candidates()
    if route_around_system and len(candidates) < 2:
        pytest.skip("one METIS library is at hand, not two")
    find_metis_library.cache_clear()
    monkeypatch.setattr(METIS, "_candidates", lambda: candidates[1:] if route_around_system else candidates)
    library = find_metis_library()
    assert library.id_dtype in (np.int32, np.int64)
    p = partition(COMMUNITIES.stream(), "metis", 2, balance={"nodes": 1.05, "volume": 1.05})
    find_metis_library.cache_clear()
    assert p.quality.volume_balance <= 1.05
    assert p.quality.edge_cut_ratio < 0.35


def test_an_input_that_metis_refuses_is_an_error_of_ours(capfd):
    library = find_metis_library()
    indptr, indices = np.array([0, 1, 2]), np.array([1, 0])
    with pytest.raises(GNNScaleError, match="it refuses its input"):
        call_metis(library, indptr, indices, None, np.array([0.5]), 2, 0)
    assert "ubfactor" in capfd.readouterr().out


@pytest.mark.parametrize(("num_parts", "slack"), [(2, 1.03), (8, 1.2), (9, 1.03), (16, 1.001)])
def test_parts_are_those_of_pymetis(num_parts, slack):
    pymetis = pytest.importorskip("pymetis")
    src, dst = np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in COMMUNITIES.stream().chunks()], axis=1)
    both = np.unique(np.stack([np.r_[src, dst], np.r_[dst, src]])[:, np.r_[src, dst] != np.r_[dst, src]], axis=1)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(both[0], minlength=4_000))])
    options = pymetis.Options(seed=5, ufactor=max(1, round((slack - 1) * 1000)))
    lists = pymetis.CSRAdjacency(indptr, both[1])
    expected = pymetis.part_graph(num_parts, lists, options=options)[1]
    found = call_metis(find_metis_library(), indptr, both[1], None, np.array([slack]), num_parts, 5)
    assert found.tolist() == list(expected)


def test_missing_metis_is_one_line_with_the_remedy(without_library):
    with pytest.raises(GNNScaleError, match=said("'metis' METIS 'lightning-gnnscale[metis]'")):
        partition(stream_of(GRID, 100), "metis", 4)
    assert not metis_module.metis_is_installed()


def test_values_outside_their_range():
    stream = stream_of(GRID, 100)
    with pytest.raises(ValueError, match=said("partitioner.balance.train 'train'")):
        partition(stream, "metis", 4, balance={"train": 1.1})
    with pytest.raises(ValueError, match=said("partitioner.balance.nodes >= 1 0.5")):
        partition(stream, "metis", 4, balance={"nodes": 0.5})
    with pytest.raises(ValueError, match=said("seed [0, 2147483648) 2147483648")):
        partition(stream, "metis", 4, seed=1 << 31)
    with pytest.raises(ValueError, match=said("seed 0 -1")):
        partition(stream, "metis", 4, seed=-1)


def test_fast_looks_at_few_edges_of_nodes_that_have_many():
    rng = np.random.default_rng(0)
    edges = np.unique(np.sort(rng.integers(0, 300, (2, 8000)), axis=0), axis=1)
    edges = edges[:, edges[0] != edges[1]]
    both = build_csc(*np.concatenate([edges, edges[::-1]], axis=1), 300)
    few = metis_module.with_few_edges(both, 8, seed=1)
    directed_edges = {(int(u), v) for v in range(300) for u in few.indices[few.indptr[v] : few.indptr[v + 1]]}
    assert directed_edges == {(v, u) for u, v in directed_edges}, "as symmetric as before"
    assert min(np.diff(few.indptr)) >= 8 and few.num_edges < 0.5 * both.num_edges
    again, other = (metis_module.with_few_edges(both, 8, seed) for seed in (1, 2))
    assert np.array_equal(few.indices, again.indices) and not np.array_equal(few.indices, other.indices)
    everything = metis_module.with_few_edges(both, 300, seed=1)
    assert np.array_equal(everything.indices, both.indices)


def test_fast_cuts_nearly_as_well():
    plain, fast = (partition(COMMUNITIES.stream(), "metis", 4, fast=fast).quality for fast in (False, True))
    assert fast.node_balance <= 1.05
    assert fast.edge_cut_ratio < 1.5 * plain.edge_cut_ratio
