import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.partition_process import measure
from lightning_gnnscale.edge_stream import SyntheticGraph, write_edges
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.hdrf import ReplicaState
from tests.oracles.full_parts import filled
from tests.oracles.hdrf import place_hdrf
from tests.oracles.masters import master_parts
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import listed, simple_graphs, stream_of
from tests.partitioner.test_spring import random_edges
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WEIGHTS = [0, 0.3, 1, 1.1, 4, 50.5]


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts = data.draw(st.integers(1, num_nodes))
    rule = data.draw(st.sampled_from(["majority", "last", "random"]))
    options = {"balance_weight": data.draw(st.sampled_from(WEIGHTS)), "epsilon": data.draw(st.sampled_from([1, 0.01]))}
    stream = stream_of(
        directed_edges, num_nodes, layout=layout if edges else "auto", chunk_edges=data.draw(st.integers(1, 20))
    )
    p = partition(stream, "hdrf", num_parts, masters=rule, evaluate=False, **options)
    placed = place_hdrf(simple_edges(directed_edges, p.notes["layout"]), num_nodes, num_parts, **options)
    assert p.part_id.tolist() == filled(master_parts(placed, num_nodes, num_parts, rule), num_parts)
    assert p.notes["edges_per_part"] == np.bincount([e[2] for e in placed], minlength=num_parts).tolist()


@pytest.mark.parametrize("balance_weight", [0, 1, 1.1, 50.5])
@pytest.mark.parametrize("order", ["as sampled", "by source"])
@pytest.mark.parametrize("num_parts", [5, 33, 100])
def test_the_candidates_hold_the_best_of_all_parts(balance_weight, order, num_parts):
    edges = random_edges()
    if order == "by source":  # hubs come in one piece, and loads drift apart
        edges = edges[np.argsort(edges[:, 0], kind="stable")]
    p = partition(
        stream_of(edges, 300, layout="once"), "hdrf", num_parts, balance_weight=balance_weight, evaluate=False
    )
    placed = place_hdrf([tuple(e) for e in edges.tolist()], 300, num_parts, balance_weight)
    assert p.part_id.tolist() == filled(master_parts(placed, 300, num_parts), num_parts)


def test_more_weight_on_balance_evens_out_the_loads():
    edges = random_edges()
    edges = stream_of(edges[np.argsort(edges[:, 0], kind="stable")], 300, layout="once")
    spread = []
    for balance_weight in (0, 1, 10):
        load = partition(edges, "hdrf", 4, balance_weight=balance_weight, evaluate=False).notes["edges_per_part"]
        assert sum(load) == edges.num_edges
        spread.append(max(load) - min(load))
    assert spread[0] > spread[1] > spread[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance_weight": -0.5}, "partitioner.balance_weight >= 0 -0.5"),
        ({"balance_weight": float("inf")}, "partitioner.balance_weight"),
        ({"epsilon": 0}, "partitioner.epsilon"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=said(message)):
        partition(stream_of([(0, 1)], 2), "hdrf", 2, **options)


def test_a_degree_that_its_counter_cannot_hold_is_an_error():
    with pytest.raises(GNNScaleError, match=said("node 4294967296 edges 4294967295 counted")):
        ReplicaState.empty(np.array([1, 2**32]), 2)


@pytest.mark.sweep
def test_memory_is_rows_and_digits_and_two_chunks(tmp_path):
    num_nodes, num_parts, chunk_edges = 1_500_000, 16, 1 << 17
    graph = SyntheticGraph(num_nodes, num_edges=1_000_000)
    path = write_edges(graph.stream(), tmp_path / "edges.bin", dtype="int32")
    found = measure(path, num_nodes, "hdrf", num_parts, chunk_edges=chunk_edges, layout="once", repeats=0)
    block_buffers = (1 << 16) * (3 * 4 + 8)  # both ends and the part of an edge, and the part once more for counting
    allocator_slack = 2 << 20  # what malloc and the interpreter keep for themselves
    bound = (8 + num_parts) * num_nodes + 2 * chunk_edges * 8 + block_buffers + allocator_slack
    assert 20 * num_nodes < found["peak_bytes"] <= bound  # a lower figure was not measured
