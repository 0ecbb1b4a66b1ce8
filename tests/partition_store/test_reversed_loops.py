"""Every edge has one reverse where reverses are of another edge type: self-loops too."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.data import HeteroData

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import load_files, load_pyg
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partitioner.constraints import _edges_by_type

NUM_NODES = 40
_RNG = np.random.default_rng(5)
EDGES = np.stack(np.nonzero(~np.eye(NUM_NODES, dtype=bool)))
EDGES = EDGES[:, _RNG.choice(EDGES.shape[1], 300, replace=False)]
EDGES[:, ::43] = 5 * np.arange(7)  # self-loops
EDGES[:, 43] = EDGES[:, 0]  # one of them in two edge types
NODE_TYPE = _RNG.integers(0, 3, 300)
NODE_TYPE[[0, 43]] = 0, 1
NAMES = np.array(["a", "b", "c"])


def by_type() -> dict:
    return {("n", name, "n"): EDGES[:, NODE_TYPE == number] for number, name in enumerate(NAMES)}


def of_arrays(folder):
    return gs.GraphDataset("g", open_edge_stream(EDGES, num_nodes=NUM_NODES, to_undirected=True), edge_type=NODE_TYPE)


def of_files(folder):
    table = pd.DataFrame({"src": EDGES[0], "dst": EDGES[1], "kind": NAMES[NODE_TYPE]})
    table.to_csv(folder / "edges.csv", index=False)
    return load_files(str(folder / "edges.csv"), num_nodes=NUM_NODES, edge_type="kind")


def of_typed_graph(folder):
    return gs.hetero_graph({"n": NUM_NODES}, by_type(), separate_reverses=True)


def of_hetero_data(folder):
    data = HeteroData()
    data["n"].num_nodes = NUM_NODES
    for kind, edges in by_type().items():
        data[kind].edge_index = torch.from_numpy(edges)
    return load_pyg(data, to_undirected=True, separate_reverses=True)


def edges_of(store) -> Counter:
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    own = np.asarray(store.original_nid)
    return Counter(zip(own[store.csc.indices].tolist(), own[target].tolist(), store.edge_type.tolist(), strict=True))


def stored(folder, dataset, **values):
    made = gs.partition(dataset.stream, "spring", 2, evaluate=False)
    return gs.write_partition_store(folder / "store", dataset.stream, made, **values)


@pytest.mark.filterwarnings("ignore:.*listed more often")
@pytest.mark.parametrize("door", [of_arrays, of_files, of_typed_graph, of_hetero_data])
def test_every_edge_has_one_reverse(tmp_path, door):
    dataset = door(tmp_path)
    expected = Counter(zip(*EDGES.tolist(), NODE_TYPE.tolist(), strict=True))
    expected += Counter(zip(*EDGES[::-1].tolist(), (NODE_TYPE + 3).tolist(), strict=True))
    assert (EDGES[0] == EDGES[1]).sum() == 7 and max(expected.values()) == 1
    store = stored(tmp_path, dataset)
    assert edges_of(store) == expected and store.num_edges == 600
    into = _edges_by_type(dataset.stream, {"back": 4})["back"]
    assert into.tolist() == np.bincount(EDGES[0, NODE_TYPE == 1], minlength=NUM_NODES).tolist()


@pytest.mark.filterwarnings("ignore:.*listed more often")
@pytest.mark.parametrize("times", [None, np.arange(300)], ids=["once", "events"])
def test_a_loop_whose_reverse_is_of_its_own_type_stays_one_edge(tmp_path, times):
    dataset = gs.hetero_graph({"n": NUM_NODES}, by_type())
    found = edges_of(stored(tmp_path, dataset, **({} if times is None else {"edge_time": times})))
    loops = Counter({edge: count for edge, count in found.items() if edge[0] == edge[1]})
    listed = [(u, v, kind) for u, v, kind in zip(*EDGES.tolist(), NODE_TYPE.tolist(), strict=True) if u == v]
    assert loops == Counter(listed)


def test_loops_that_are_left_out_have_no_reverse(tmp_path):
    stream = open_edge_stream(EDGES, num_nodes=NUM_NODES, to_undirected=True, remove_self_loops=True)
    found = edges_of(stored(tmp_path, gs.GraphDataset("g", stream, edge_type=NODE_TYPE)))
    assert not [edge for edge in found if edge[0] == edge[1]]
    assert sum(found.values()) == 2 * (EDGES[0] != EDGES[1]).sum()


def test_the_reverse_of_a_loop_has_its_values(tmp_path):
    dataset = of_arrays(tmp_path)
    store = stored(tmp_path, dataset, edge_weight=np.arange(300, dtype=np.float32))
    target = np.repeat(np.arange(NUM_NODES), np.diff(store.csc.indptr))
    loops = np.asarray(store.csc.indices) == target
    listed = np.flatnonzero(EDGES[0] == EDGES[1]).tolist()
    assert sorted(np.asarray(store.edge_weight)[loops].tolist()) == sorted(2 * listed)
