import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import partition
from tests.oracles.external_csc import rows_of
from tests.oracles.full_parts import filled
from tests.partitioner.graphs import ODD, simple_graphs, stream_of
from tests.says import said


def ranges(stream, num_parts, **options):
    return partition(stream, "range", num_parts, evaluate=False, **options)


@given(num_nodes=st.integers(1, 300), data=st.data())
def test_ranges_differ_by_one_node_at_most(num_nodes, data):
    num_parts = data.draw(st.integers(1, num_nodes))
    balance = data.draw(st.sampled_from([None, {"nodes": 1.0}]))
    p = ranges(stream_of([], num_nodes), num_parts, balance=balance)
    assert (np.diff(p.part_id) >= 0).all()
    sizes = np.bincount(p.part_id, minlength=num_parts)
    assert sizes.max() - sizes.min() <= 1
    assert sizes.min() >= 1
    assert p.notes["balance"] == {"nodes": sizes.max() * num_parts / num_nodes}


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(graph=simple_graphs(), data=st.data())
def test_ranges_of_equal_volume_are_one_degree_off_at_most(graph, data):
    num_nodes, edges = graph
    num_parts = data.draw(st.integers(1, num_nodes))
    p = ranges(stream_of(edges, num_nodes), num_parts, balance={"volume": num_parts})
    assert "parts_filled" in p.notes or (np.diff(p.part_id) >= 0).all()
    degree = [len(row) for row in rows_of(edges, num_nodes, p.notes["layout"])]
    if edges:
        volumes = np.bincount(p.part_id, degree, num_parts)
        assert volumes.max() <= sum(degree) / num_parts + max(degree)
        before = np.cumsum([0, *degree[:-1]])
        middles = [(2 * int(before[v]) + degree[v]) * num_parts // (2 * sum(degree)) for v in range(num_nodes)]
        # Isolated nodes behind the last edge lie at the very end of the volume.
        assert p.part_id.tolist() == filled([min(num_parts - 1, middle) for middle in middles], num_parts)
    else:
        assert p.part_id.tolist() == ranges(stream_of([], num_nodes), num_parts).part_id.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name):
    num_nodes, edges = ODD[name]
    p = ranges(stream_of(edges, num_nodes), 1, balance={"volume": 1.0})
    assert p.part_id.tolist() == [0] * num_nodes
    assert p.part_id.dtype == np.int32


def test_a_volume_that_ranges_do_not_meet_is_told():
    star = [(0, v) for v in range(1, 20)] + [(v, v + 1) for v in range(1, 19)]
    with pytest.warns(UserWarning, match=said("balance 1.02")):
        p = ranges(stream_of(star, 20), 2, balance={"volume": 1.02})
    assert p.notes["balance_violations"]["volume"] > 0


@pytest.mark.parametrize("balance", [{"nodes": 1.1, "volume": 1.1}, {"train": 1.1}, {"nodes": 0.5}])
def test_other_constraints_are_refused(balance):
    with pytest.raises(ValueError, match=r"volume or one mask|there is no mask|partitioner\.balance\.nodes"):
        ranges(stream_of([(0, 1)], 2), 2, balance=balance)
