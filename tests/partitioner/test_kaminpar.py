"""KaMinPar as a peer: the graph reaches it whole, and what it is asked for holds."""

import builtins

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.partitioner import metis as kaminpar_module
from lightning_gnnscale.partitioner import partition
from tests.partitioner.graphs import ODD, stream_of
from tests.says import said
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
needs_kaminpar = pytest.mark.skipif(
    not kaminpar_module.kaminpar_is_installed(), reason="needs the extra [kaminpar], which has no wheel everywhere"
)

COMMUNITIES = SyntheticGraph(4_000, 40_000, num_communities=24, homophily=0.85, seed=2)


@needs_kaminpar
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_file_holds_the_graph(tmp_path, dtype):
    import kaminpar

    indptr, indices = np.array([0, 2, 3, 3, 6, 8]), np.array([3, 4, 3, 0, 1, 4, 0, 3], dtype)
    with kaminpar_module._write_parhip(tmp_path, CSC(indptr, indices)) as file:
        graph = kaminpar.load_graph(f"/dev/fd/{file.fileno()}", kaminpar.GraphFileFormat.PARHIP)
    assert (graph.n(), graph.m()) == (5, 8)
    assert not graph.is_node_weighted() and not graph.is_edge_weighted()
    assert [[v for v, _ in graph.neighbors(u)] for u in range(5)] == [[3, 4], [3], [], [0, 1, 4], [0, 3]]
    assert list(tmp_path.iterdir()) == []


@needs_kaminpar
def test_communities_are_found_within_the_balance(tmp_path):
    p = partition(COMMUNITIES.stream(), "kaminpar", 4, seed=3, scratch=tmp_path)
    assert p.quality.node_balance <= 1.03 + 1e-9
    assert p.quality.edge_cut_ratio < 0.4 * partition(COMMUNITIES.stream(), "random", 4).quality.edge_cut_ratio
    assert np.array_equal(p.part_id, partition(COMMUNITIES.stream(), "kaminpar", 4, seed=3).part_id)
    tight = partition(COMMUNITIES.stream(), "kaminpar", 4, balance={"nodes": 1.001}, preset="fast", threads=2)
    assert tight.quality.node_balance <= 1.001


@first(6)
@needs_kaminpar
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name):
    num_nodes, edges = ODD[name]
    for num_parts in {1, min(3, num_nodes)}:
        p = partition(stream_of(edges, num_nodes), "kaminpar", num_parts)
        assert sum(p.quality.nodes_per_part) == num_nodes


@needs_kaminpar
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "partitioner.threads >= 1 0"),
        ({"preset": "quick"}, "partitioner.preset 'quick'"),
        ({"seed": 2**31}, "seed [0, 2147483648) 2147483648"),
        ({"balance": {"volume": 1.1}}, "'nodes' ['volume']"),
        ({"balance": {"nodes": 0.9}}, "partitioner.balance.nodes >= 1 0.9"),
        ({"scratch": None}, "graph file scratch="),
    ],
)
def test_values_outside_their_range(options, message):
    with pytest.raises(ValueError, match=said(message)):
        partition(stream_of([(0, 1), (1, 2)], 3), "kaminpar", 2, **options)


def test_a_missing_package_names_the_extra(monkeypatch):
    original = builtins.__import__

    def without_kaminpar(name, *args, **kwargs):
        if name == "kaminpar":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_kaminpar)
    with pytest.raises(GNNScaleError, match=r"pip install 'lightning-gnnscale\[kaminpar\]'"):
        partition(stream_of([(0, 1)], 2), "kaminpar", 2)
