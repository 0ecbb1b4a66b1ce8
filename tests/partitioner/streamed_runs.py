"""Graphs, checks and accidents that the tests of the streamed multilevel method share."""

import math

import numpy as np
import pytest

from lightning_gnnscale.partitioner.graph_input import Checkpoint
from lightning_gnnscale.partitioner.multilevel import clustering, pair_table, quotient, sweeps, weighted_graph
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads


def planted(num_groups=4, size=150, inside=14, outside=3, seed=0):
    """(edges in random order, group of every node): each node has about so many neighbours in its group, and others."""
    rng = np.random.default_rng(seed)
    num_nodes = num_groups * size
    group = rng.permutation(num_nodes) % num_groups
    pairs = np.sort(rng.integers(0, num_nodes, (40 * num_nodes * num_groups, 2)), axis=1)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    within = group[pairs[:, 0]] == group[pairs[:, 1]]
    near, far = (np.unique(pairs[chosen], axis=0) for chosen in (within, ~within))
    near, far = (
        rng.permutation(found)[: num_nodes * wanted // 2] for found, wanted in ((near, inside), (far, outside))
    )
    return rng.permutation(np.concatenate((near, far))), group


def cut_of(edges, part):
    return int((part[edges[:, 0]] != part[edges[:, 1]]).sum())


def weights_of(names, num_nodes, edges, masks):
    """One list of weights a constraint, from the edges of the undirected simple graph."""
    degree = [0] * num_nodes
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    known = {"nodes": [1] * num_nodes, "volume": degree}
    return {name: known[name] if name in known else [int(m) for m in masks[name]] for name in names}


def check_balance(p, num_nodes, edges, balance, masks=None):
    """The caps are kept, or what exceeds them is told to the unit; return the violations."""
    expected = {}
    balance = balance or {"nodes": 1.03}
    for name, weight in weights_of(balance, num_nodes, edges, masks).items():
        load = [0] * p.num_parts
        for part, w in zip(p.part_id.tolist(), weight, strict=True):
            load[part] += w
        mean = sum(weight) / p.num_parts
        cap = max(math.floor(balance[name] * mean + 1e-9), math.ceil(mean))
        assert p.notes["balance"][name] == pytest.approx(max(load) / mean)
        if max(load) > cap:
            expected[name] = max(load) - cap
    assert p.notes["balance_violations"] == expected
    told = p.notes.get("warnings", [])
    for name, over in expected.items():
        assert any(f"balance of {name} " in text and f", {over} more than its" in text for text in told)
    return expected


def use_threads_everywhere(monkeypatch):
    """Rows are shared out although the graph is small; the list returned gets the ranges that ran side by side."""
    monkeypatch.setattr(weighted_graph, "MIN_ENTRIES", 16)
    monkeypatch.setattr(sweeps, "MIN_ENTRIES", 1)
    monkeypatch.setattr(clustering, "MIN_SHARED_WORK", 1)
    original, shared = RowThreads.map, []

    def spy(self, function, items):
        items = list(items)
        shared.append(len(items) if self.num_threads > 1 else 1)
        return original(self, function, items)

    monkeypatch.setattr(RowThreads, "map", spy)
    return shared


def grow_tables(monkeypatch):
    monkeypatch.setattr(pair_table, "FIRST_BITS", 2)
    monkeypatch.setattr(quotient, "STEP_ENTRIES", 64)


def hubs_and_leaves(seed, num_nodes=500, num_edges=2_500):
    rng = np.random.default_rng(seed)
    weight = np.minimum(rng.pareto(1.3, num_nodes) + 1, 40)
    pairs = np.sort(rng.choice(num_nodes, (4 * num_edges, 2), p=weight / weight.sum()), axis=1)
    return rng.permutation(np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0))[:num_edges]


class Killed(Exception):
    pass


original_save = Checkpoint.save


def killed_after(saves, phases):
    left = [saves]

    def save(self, phase, arrays):
        original_save(self, phase, arrays)
        phases.append(phase)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return save
