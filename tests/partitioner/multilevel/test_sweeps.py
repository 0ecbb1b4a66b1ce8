"""Sweeps over the rows of a graph on disk: they never enter a full part, and never cut more within the caps."""

import numpy as np
import pytest

from lightning_gnnscale.partitioner.graph_access.external_csc import open_external_csc
from lightning_gnnscale.partitioner.multilevel.sweeps import sweep
from lightning_gnnscale.partitioner.multilevel.weighted_graph import PART_DTYPE, BlockGraph, RowThreads, part_loads
from tests.partitioner.graphs import stream_of
from tests.partitioner.streamed_runs import cut_of, planted, use_threads_everywhere


@pytest.fixture
def opened(tmp_path):
    edges, group = planted(size=60, outside=4)
    with open_external_csc(stream_of(edges, 240, layout="once"), tmp_path, block_edges=300) as csc:
        yield edges, group, BlockGraph(csc, np.ones((1, 1), np.int32))


@pytest.mark.parametrize("backwards", [False, True])
def test_what_a_sweep_gains_is_what_the_cut_falls_by(opened, backwards, monkeypatch):
    edges, group, graph = opened
    use_threads_everywhere(monkeypatch)
    start = np.where(np.random.default_rng(0).random(240) < 0.3, np.arange(240) % 4, group).astype(PART_DTYPE)
    found = {}
    for num_threads in (1, 3):
        part, cap, threads = start.copy(), np.full((4, 1), 70), RowThreads(num_threads)
        load = part_loads(graph.node_weight, part, 4)
        border = np.ones(240, np.bool_)
        gained = sweep(graph, part, load, cap, np.zeros(cap.shape), 16.0, 1.0, threads, backwards, border)
        threads.close()
        assert gained == cut_of(edges, start) - cut_of(edges, part) > 0
        assert np.array_equal(load, part_loads(graph.node_weight, part, 4)) and load.max() <= 70
        found[num_threads] = part
    assert np.array_equal(found[1], found[3])


def test_a_part_over_its_cap_is_left(opened):
    _, group, graph = opened
    part = np.where((group == 1) & (np.arange(240) % 3 > 0), 0, group).astype(PART_DTYPE)
    load, cap = part_loads(graph.node_weight, part, 4), np.full((4, 1), 62)
    before = load[:, 0].tolist()
    sweep(graph, part, load, cap, np.zeros(cap.shape), 100.0, 1.0, RowThreads(1), False, np.ones(240, np.bool_))
    assert before[0] > 90 and load[0, 0] < before[0] and before[1] < load[1, 0] <= 62


def test_sweeps_along_the_border_are_sweeps_over_all_rows(opened):
    edges, group, graph = opened
    start = np.where(np.random.default_rng(1).random(240) < 0.3, np.arange(240) % 4, group).astype(PART_DTYPE)
    found, cap, kept = [], np.full((4, 1), 66), np.ones(240, np.bool_)
    for border in (kept, None):
        part, price = start.copy(), np.zeros(cap.shape)
        load = part_loads(graph.node_weight, part, 4)
        for number, pressure in enumerate((4.0, 8.0, 16.0, 16.0)):
            every = np.ones(240, np.bool_) if border is None else border
            sweep(graph, part, load, cap, price, pressure, 1.1, RowThreads(1), number % 2 == 0, every)
        found.append((part, price, load))
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
    across = np.zeros(240, np.bool_)
    across[edges[part[edges[:, 0]] != part[edges[:, 1]]].ravel()] = True
    assert (kept >= across).all() and not kept.all()
