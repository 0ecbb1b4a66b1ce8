"""What holds for every method that places edges."""

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from tests.oracles.dbh import place_dbh
from tests.oracles.full_parts import filled
from tests.oracles.hdrf import place_hdrf
from tests.oracles.masters import master_parts
from tests.oracles.powergraph import place_powergraph
from tests.oracles.spring import simple_edges
from tests.oracles.two_phase import place_two_phase
from tests.partitioner.graphs import ODD, listed, stream_of
from tests.partitioner.test_spring import Killed, original_save, random_edges, stop_after
from tests.says import said
from tests.tiers import each_value

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ORACLES = {"dbh": place_dbh, "hdrf": place_hdrf, "powergraph": place_powergraph, "two_phase": place_two_phase}
PASSES = {"two_phase": ["degrees", "clustering", "prepartitioning", "placing"]}
METHODS = sorted(ORACLES)


def expected_parts(method, edges, num_nodes, num_parts):
    return filled(master_parts(ORACLES[method](edges, num_nodes, num_parts), num_nodes, num_parts), num_parts)


@each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_equal_the_oracle(method, name):
    num_nodes, edges = ODD[name]
    for num_parts in {1, min(4, num_nodes), num_nodes}:
        p = partition(stream_of(edges, num_nodes), method, num_parts, evaluate=False)
        expected = expected_parts(method, simple_edges(edges, p.notes["layout"]), num_nodes, num_parts)
        assert p.part_id.tolist() == expected
        assert p.part_id.dtype == np.int32
    with pytest.raises(ValueError, match=said(f"num_parts [1, {num_nodes}] {num_nodes + 1}")):
        partition(stream_of(edges, num_nodes), method, num_nodes + 1)


@pytest.mark.parametrize("method", METHODS)
def test_source_chunks_and_id_dtype_change_nothing(tmp_path, method):
    edges = np.append(random_edges(), [[299, 0]], axis=0)
    expected = expected_parts(method, [tuple(e) for e in edges.tolist()], 300, 5)
    path = write_edges(stream_of(edges, 300, layout="once"), tmp_path / "edges.csv")
    for source in (path, edges.T.astype(np.int64), edges.T.astype(np.int32)):
        for num_nodes, chunk_edges in ((300, 7), (300, 1 << 20), (None, 512)):
            stream = open_edge_stream(source, num_nodes=num_nodes, layout="once", chunk_edges=chunk_edges)
            assert partition(stream, method, 5, evaluate=False).part_id.tolist() == expected


@each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("layout", "rule"), [("once", "majority"), ("both_ways", "random"), ("directed", "last")])
def test_resuming_after_a_kill_in_every_pass_is_bit_identical(tmp_path, monkeypatch, method, layout, rule):
    edges = listed([tuple(e) for e in random_edges().tolist()], layout)
    stream = stream_of(edges, 300, chunk_edges=len(edges) // 3 + 1, layout=layout)
    whole = partition(stream, method, 20, seed=9, masters=rule, evaluate=False)
    options = {"masters": rule, "checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}
    passes = PASSES.get(method, ["degrees", "placing"])
    for saves in range(1, 3 * len(passes) + 1):
        monkeypatch.setattr(Checkpoint, "save", stop_after(saves))
        with pytest.raises(Killed):
            partition(stream, method, 20, seed=9, evaluate=False, **options)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        steps = []
        options["progress"] = lambda *step, steps=steps: steps.append(step[0])
        resumed = partition(stream, method, 20, seed=9, evaluate=False, **options)
        assert np.array_equal(resumed.part_id, whole.part_id)
        assert resumed.notes["edges_per_part"] == whole.notes["edges_per_part"]
        assert sum(what in passes for what in steps) == 3 * len(passes) - saves
        assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, monkeypatch):
    stream = stream_of(random_edges(), 300, chunk_edges=100)
    path = tmp_path / "state.npz"
    monkeypatch.setattr(Checkpoint, "save", stop_after(12))
    with pytest.raises(Killed):
        partition(stream, "hdrf", 4, balance_weight=2, checkpoint=path, checkpoint_every=1)
    monkeypatch.setattr(Checkpoint, "save", original_save)
    for options in ({"balance_weight": 3}, {"masters": "last"}, {"seed": 1}):
        resumed = partition(stream, "hdrf", 4, checkpoint=path, evaluate=False, **options)
        assert np.array_equal(resumed.part_id, partition(stream, "hdrf", 4, evaluate=False, **options).part_id)


@each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_parts", [4, 20])
def test_a_graph_that_changes_between_passes_is_an_error(method, num_parts):
    edges = np.ascontiguousarray(random_edges().T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=300, layout="once", chunk_edges=1 << 16)

    def rewire(what, done, total):
        if what == "degrees":
            edges[0], edges[1] = 299, 298  # nodes of few edges, now of all

    with pytest.raises(EdgeStreamError, match="changed while they were partitioned"):
        partition(stream, method, num_parts, progress=rewire)


@pytest.mark.parametrize("method", METHODS)
def test_shared_options_are_checked(method):
    stream = stream_of([(0, 1)], 2)
    with pytest.raises(ValueError, match="takes no balance constraints"):
        partition(stream, method, 2, balance={"nodes": 1.05})
    with pytest.raises(ValueError, match="partitioner.checkpoint_every"):
        partition(stream, method, 2, checkpoint_every=0)
    with pytest.raises(ValueError, match=said(f"{method!r} lambda")):
        partition(stream, method, 2, **{"lambda": 1})
