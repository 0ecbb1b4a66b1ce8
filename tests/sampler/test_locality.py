"""Which nodes are preferred: the worked example, plain Python, parts, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.parts import small_world

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.sampler.locality import neighbor_sets
from tests.says import said

WORLD = small_world()


def paper_graph():
    """The example graph of the paper, without its self-loops."""
    ends = np.array([(0, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5)]).T
    return build_csc(np.concatenate([ends[0], ends[1]]), np.concatenate([ends[1], ends[0]]), 6)


def placement_of(rows, num_nodes, groups=None, fingerprint=""):
    groups = groups or (tuple(range(len(rows))),)
    return gs.Placement(tuple(np.array(r) for r in rows), groups, num_nodes, None, {}, (), "test", fingerprint)


def plain_sets(csc, rows, num_sets, size):
    """Q_1, Q_2, ... in plain Python, and the path counts of the last."""
    paths = {node: int(node in set(rows)) for node in range(csc.num_rows)}
    sets = [sorted(rows)]
    for _ in range(num_sets - 1):
        longer = dict(paths)
        for node in range(csc.num_rows):
            for source in csc.indices[csc.indptr[node] : csc.indptr[node + 1]].tolist():
                longer[node] += paths[source] if source != node else 0
        paths = longer
        ranked = sorted((-count, node) for node, count in paths.items() if count)
        sets.append(sorted(node for _, node in ranked[:size]))
    return sets, paths


def test_the_worked_example():
    """B = {1, 2, 3, 4}: v_2 = [1, 3, 4, 3, 2, 1], and the best three are 2, 1, 3."""
    csc, rows = paper_graph(), [1, 2, 3, 4]
    _, paths = plain_sets(csc, rows, 2, 3)
    assert [paths[node] for node in range(6)] == [1, 3, 4, 3, 2, 1]
    first, second = neighbor_sets(csc, np.array(rows), 2, 3)
    assert first.tolist() == rows  # Q_1 is not truncated
    assert second.tolist() == [1, 2, 3]
    order = [set(neighbor_sets(csc, np.array(rows), 2, size)[1]) for size in (1, 2, 3)]
    assert order == [{2}, {1, 2}, {1, 2, 3}]


def test_self_loops_of_the_graph_count_once():
    csc, loops = paper_graph(), np.arange(6)
    dst = np.repeat(loops, csc.in_degree)
    looped = build_csc(np.concatenate([csc.indices, loops]), np.concatenate([dst, loops]), 6)
    for size in (1, 2, 4, 6):
        for mine, theirs in zip(
            neighbor_sets(looped, [4, 5], 3, size), neighbor_sets(csc, [4, 5], 3, size), strict=True
        ):
            assert mine.tolist() == theirs.tolist()


@given(
    num_nodes=st.integers(1, 40),
    num_edges=st.integers(0, 200),
    seed=st.integers(0, 10**6),
    size=st.integers(1, 45),
    num_sets=st.integers(1, 4),
)
def test_equals_plain_python(num_nodes, num_edges, seed, size, num_sets):
    rng = np.random.default_rng(seed)
    csc = build_csc(rng.integers(0, num_nodes, num_edges), rng.integers(0, num_nodes, num_edges), num_nodes)
    rows = rng.permutation(num_nodes)[: rng.integers(0, num_nodes + 1)]
    mine = neighbor_sets(csc, rows, num_sets, size)
    assert [ids.tolist() for ids in mine] == plain_sets(csc, rows.tolist(), num_sets, size)[0]
    assert all(ids.dtype == np.int64 for ids in mine)


def test_hops_prefer_from_the_far_end():
    locality = gs.LocalityBias(placement_of([[1, 2], [4, 3]], 6), 2.0, neighbor_set_size=3)
    hops = locality.neighbor_sets(WholeGraph.of(paper_graph(), 0), 3)
    assert hops[-1].tolist() == [1, 2, 3, 4]
    assert hops[-2].tolist() == [1, 2, 3]
    assert len(hops) == 3


def test_only_rows_of_the_own_group_count():
    placed = placement_of([[0, 1], [1, 5], [7], [3]], 9, groups=((0, 1), (2, 3)))
    assert gs.LocalityBias(placed).rows.tolist() == [0, 1, 5]
    assert gs.LocalityBias(placed, device=3).rows.tolist() == [3, 7]


def test_a_part_is_asked_in_its_own_ids():
    part = WORLD.load_part(1)
    rows = np.sort(np.random.default_rng(0).permutation(WORLD.csc.num_rows)[:120])
    locality = gs.LocalityBias(placement_of([rows], WORLD.csc.num_rows), neighbor_set_size=20)
    second, first = locality.neighbor_sets(part, 2)
    assert part.nodes[first].tolist() == sorted(set(rows) & set(part.nodes), key=part.nodes.tolist().index)
    assert second.tolist() == plain_sets(part.csc, first.tolist(), 2, 20)[0][1]


def test_it_is_a_value_whose_scale_can_be_replaced():
    placed = placement_of([[0]], 3)
    locality = gs.LocalityBias(placed)
    assert locality == gs.LocalityBias(placed) and hash(locality) == hash(gs.LocalityBias(placed))
    assert replace(locality, scale=2.0) != locality
    assert replace(locality, scale=2.0).placement is placed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.5}, "scale >= 1 0.5"),
        ({"scale": float("nan")}, "scale >= 1 nan"),
        ({"scale": float("inf")}, "scale >= 1 inf"),
        ({"neighbor_set_size": 0}, "neighbor_set_size 1 0"),
        ({"device": 2}, "device [0, 2) 2"),
        ({"device": -1}, "device [0, 2) -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.LocalityBias(placement_of([[0], [1]], 5), **arguments)


def test_rows_and_counts_out_of_range():
    with pytest.raises(ValueError, match=said("rows [0, 6) 2 6")):
        neighbor_sets(paper_graph(), np.array([6, 2]), 2, 3)
    with pytest.raises(ValueError, match=said("num_sets 1 0")):
        neighbor_sets(paper_graph(), np.array([2]), 0, 3)
    with pytest.raises(ValueError, match=said("size 1 0")):
        neighbor_sets(paper_graph(), np.array([2]), 2, 0)


def test_a_placement_of_another_store_is_refused():
    locality = gs.LocalityBias(placement_of([[0]], 6, fingerprint="one"))
    locality.check_store(6, "one")
    locality.check_store(6)
    with pytest.raises(PlacementError, match=said("6 nodes graph 7 place rows")):
        locality.check_store(7, "one")
    with pytest.raises(PlacementError, match=said("store two place rows")):
        locality.check_store(6, "two")
