import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.two_phase import TwoPhaseState
from tests.oracles.full_parts import filled
from tests.oracles.masters import master_parts
from tests.oracles.spring import simple_edges
from tests.oracles.two_phase import place_two_phase
from tests.partitioner.graphs import listed, simple_graphs, stream_of
from tests.partitioner.test_spring import random_edges
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts, seed = data.draw(st.integers(1, num_nodes)), data.draw(st.integers(0, 2**40))
    rule = data.draw(st.sampled_from(["majority", "last", "random"]))
    options = {
        "max_volume": data.draw(st.sampled_from([None, 0, 3, 7.5, 1e9])),
        "alpha": data.draw(st.sampled_from([1, 1.05, 1.5])),
    }
    stream = stream_of(
        directed_edges, num_nodes, layout=layout if edges else "auto", chunk_edges=data.draw(st.integers(1, 20))
    )
    p = partition(stream, "two_phase", num_parts, seed=seed, masters=rule, evaluate=False, **options)
    placed = place_two_phase(
        simple_edges(directed_edges, p.notes["layout"]), num_nodes, num_parts, seed=seed, **options
    )
    assert p.part_id.tolist() == filled(master_parts(placed, num_nodes, num_parts, rule, seed), num_parts)
    assert p.notes["edges_per_part"] == np.bincount([e[2] for e in placed], minlength=num_parts).tolist()


@pytest.mark.parametrize("num_parts", [5, 32, 33, 100])
def test_replica_sets_of_any_width_equal_the_oracle(num_parts):
    edges = random_edges()
    p = partition(stream_of(edges, 300, layout="once"), "two_phase", num_parts, evaluate=False)
    placed = place_two_phase([tuple(e) for e in edges.tolist()], 300, num_parts)
    assert p.part_id.tolist() == filled(master_parts(placed, 300, num_parts), num_parts)


@pytest.mark.parametrize("alpha", [1, 1.05, 2])
def test_no_part_holds_more_than_its_share(alpha):
    clique = [(u, v) for u in range(30) for v in range(u)]
    chain = [(u, u + 1) for u in range(30, 400)]
    edges = clique + chain
    load = partition(stream_of(edges, 401, layout="once"), "two_phase", 6, alpha=alpha).notes["edges_per_part"]
    assert sum(load) == len(edges)
    assert max(load) <= max(alpha * len(edges) / 6, -(-len(edges) // 6))


def test_communities_stay_together():
    rng = np.random.default_rng(0)
    edges = [(25 * c + u, 25 * c + v) for c in range(8) for u in range(25) for v in range(u) if rng.random() < 0.5]
    edges = [edges[i] for i in rng.permutation(len(edges))]
    stream = stream_of(edges, 200, layout="once")
    cut = {m: partition(stream, m, 4).quality.edge_cut_ratio for m in ("two_phase", "dbh")}
    assert cut["two_phase"] < 0.6 * cut["dbh"]


def test_wide_volumes_give_the_same_parts(monkeypatch):
    stream = stream_of(random_edges(), 300)
    expected = partition(stream, "two_phase", 4, evaluate=False).part_id
    original = TwoPhaseState.start.__func__

    def wide(cls, *args):
        state = original(cls, *args)
        return state._replace(volume=state.volume.astype(np.int64))

    monkeypatch.setattr(TwoPhaseState, "start", classmethod(wide))
    assert np.array_equal(partition(stream, "two_phase", 4, evaluate=False).part_id, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.99}, "partitioner.alpha >= 1 0.99"),
        ({"max_volume": -1}, "partitioner.max_volume"),
        ({"max_volume": float("nan")}, "partitioner.max_volume"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=said(message)):
        partition(stream_of([(0, 1)], 2), "two_phase", 2, **options)
