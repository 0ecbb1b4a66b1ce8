"""Flows between two parts: what they gain is what the cut falls by, caps are kept, and borders become straight."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel import flow
from lightning_gnnscale.partitioner.multilevel.flow import straighten
from lightning_gnnscale.partitioner.multilevel.weighted_graph import PART_DTYPE, part_loads
from tests.partitioner.multilevel.graphs import cut_of, loads_of, weighted_graph, weighted_graphs


@given(graph=weighted_graphs(max_nodes=24), num_parts=st.integers(1, 4), data=st.data())
def test_the_gain_is_what_the_cut_falls_by_and_caps_are_kept(graph, num_parts, data):
    part = np.array(
        data.draw(st.lists(st.integers(0, num_parts - 1), min_size=graph.num_nodes, max_size=graph.num_nodes))
    )
    part = part.astype(PART_DTYPE)
    before, load = cut_of(graph, part), part_loads(graph.node_weight, part, num_parts)
    cap = np.maximum(1, load + data.draw(st.integers(0, 3)))
    gained = straighten(graph, part, load, cap, data.draw(st.integers(0, 3)))
    assert gained == before - cut_of(graph, part) >= 0
    assert np.array_equal(load, loads_of(graph, part, num_parts)) and (load <= cap).all()


def test_the_least_cut_of_a_corridor_is_found():
    """Two pairs of triangles and a path of weights between them: the lightest edge of the path is cut."""
    path = dict(zip(zip(range(20), range(1, 21), strict=True), [9, 8, 7, 2, *[6] * 16], strict=True))
    ends = {(20 + i, 21 + i): 9 for i in range(20)}
    graph = weighted_graph(41, path | ends)
    part = (np.arange(41) > 5).astype(PART_DTYPE)
    load = part_loads(graph.node_weight, part, 2)
    assert straighten(graph, part, load, np.array([[8], [39]]), 1) == 4
    assert np.array_equal(part, np.arange(41) > 3) and load.ravel().tolist() == [4, 37]


def test_jagged_borders_of_a_grid_become_straight(monkeypatch):
    monkeypatch.setattr(flow, "MOST_BORDER", 1.0)
    rows, columns = 12, 120
    at = lambda r, c: columns * r + c  # noqa: E731
    edges = [(at(r, c), at(r, c + 1)) for r in range(rows) for c in range(columns - 1)]
    edges += [(at(r, c), at(r + 1, c)) for r in range(rows - 1) for c in range(columns)]
    row, column = np.divmod(np.arange(rows * columns), columns)
    part = (column >= 40 + row % 3).astype(PART_DTYPE) + (column >= 80 - 2 * (row % 2)).astype(PART_DTYPE)
    graph, cap = weighted_graph(rows * columns, edges), np.full((3, 1), 500)
    load, before = part_loads(graph.node_weight, part, 3), cut_of(graph, part)
    assert straighten(graph, part, load, cap, 4) == before - 2 * rows > 0
    assert load.max() <= 500
