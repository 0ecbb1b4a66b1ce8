"""Every sampler that has a form for GPUs, part by part: the batches of the CPU, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.parts import small_world

import lightning_gnnscale as gs
from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.loader.device_batches import tensors_of
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.part_graph import load_part_graph, load_whole_graph
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import device_state, on_device
from lightning_gnnscale.sampler.on_device import DeviceSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from lightning_gnnscale.triton_kernels.sample_neighbors.device import UNSEEN, DeviceWorkspace
from tests.fake_gpu import fake_gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the interpreter takes CPU tensors
PART = small_world(90, 400).load_part(1)
COUNTS = {"author": 30, "paper": 60, "inst": 5}
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")


def compare(sampler, part, targets, *, num_batches=1, batch_size=5):
    """Sample some batches of a part both ways; return those of the CPU."""
    pytest.importorskip("triton")
    there, space, found = DeviceSampler(sampler, DEVICE), Workspace(part.num_local, part.csc.indices.dtype), []
    state = there.prepare(part, targets, 3)
    assert state.device is not None
    items = there.items(state, batch_size, False, 5)
    for number, item in enumerate([*items[:num_batches], items[-1][:1]]):
        key, with_e_id = batch_key(3, 0, 1, number), number == 0
        mine = there.sample(state, item, key, None, np.empty, with_e_id)
        other = sampler.sample(state.host, item, key, space, np.empty, with_e_id)
        for name, wanted in other._replace(node_type=None)._asdict().items():  # a device finds those with the columns
            one = getattr(mine, name)
            if isinstance(wanted, np.ndarray):
                assert one.dtype == wanted.dtype and one.shape == wanted.shape, name
                np.testing.assert_array_equal(one, wanted, err_msg=name)
            else:
                assert one == wanted, name
        found.append(other)
    with there._spaces.lend(part.num_local) as ((used,), _):
        assert (used.label[:-1] == UNSEEN).all()  # ready for the next batch
    return found


@pytest.mark.parametrize("direction", ["in", "both"])
def test_layers(direction):
    found = compare(gs.LayerwiseSampler([20, 9, 30], direction=direction), PART, np.arange(PART.num_core))
    assert all(batch.averaging_weights and batch.edge_weight is not None for batch in found)


INNER = [gs.NeighborSampler([3, 2]), gs.LayerwiseSampler(9, 2)]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"positives": "walk", "walk_length": 4, "num_negatives": 2},
        {"positives": "edge", "negatives": "uniform", "edges_per_node": 2},
        {"share_negatives": True, "num_negatives": 3, "corrupt": "both"},
        {"negatives": "all"},
        {"corrupt": "both", "num_negatives": 2},
        {"neighborhoods": False},
    ],
)
def test_links(inner, given):
    found = compare(gs.sampler.LinkSampler(inner, **given), PART, np.arange(PART.num_core))
    assert all(batch.pairs.shape[1] for batch in found[:-1])


@pytest.mark.parametrize("positives", ["neighbor", "walk", "edge"])
def test_links_whose_own_pairs_are_left_out(positives):
    inner = gs.NeighborSampler([-1])
    given = {"positives": positives, "walk_length": 3, "num_negatives": 2}
    found = compare(gs.sampler.LinkSampler(inner, exclude_pairs=True, **given), PART, np.arange(PART.num_core))
    whole = compare(gs.sampler.LinkSampler(inner, **given), PART, np.arange(PART.num_core))
    assert sum(len(batch.e_id) for batch in found[::2]) < sum(len(batch.e_id) for batch in whole[::2])


def test_links_whose_ends_have_trees_of_their_own():
    compare(gs.sampler.LinkSampler(gs.NeighborSampler([3, 2], disjoint=True)), PART, np.arange(PART.num_core))


@pytest.mark.parametrize("positives", ["neighbor", "edge"])
def test_links_of_a_graph_without_edges_or_with_loops_alone(positives):
    for csc in (build_csc(np.empty(0, int), np.empty(0, int), 5), build_csc(np.arange(5), np.arange(5), 5)):
        part = WholeGraph.of(csc, 0)
        sampler = gs.sampler.LinkSampler(gs.NeighborSampler([2]), positives, exclude_pairs=True)
        if positives == "neighbor" or csc.num_edges:
            compare(sampler, part, np.arange(5), batch_size=3)


@pytest.mark.parametrize("subgraph_type", ["induced", "bidirectional"])
@pytest.mark.parametrize("fanouts", [[4, 2], [-1]])
def test_subgraphs_of_all_edges_between_their_nodes(subgraph_type, fanouts):
    found = compare(gs.NeighborSampler(fanouts, subgraph_type=subgraph_type), PART, np.arange(PART.num_core))
    assert all(len(batch.indptr) == len(batch.n_id) + 1 for batch in found)


@pytest.mark.parametrize("direction", ["in", "both"])
def test_clusters(direction):
    found = compare(gs.ClusterSampler(6, 2, direction=direction), PART, np.arange(PART.num_core)[::2])
    assert all(batch.edge_index.size for batch in found)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A small graph of three node types, times, and reverses of its edges."""
    rng = np.random.default_rng(0)
    ends = [("author", "writes", "paper", 150), ("paper", "cites", "paper", 300), ("author", "at", "inst", 40)]
    edges = {
        (a, name, b): {
            "edges": np.stack([rng.integers(0, COUNTS[a], size), rng.integers(0, COUNTS[b], size)]),
            "time": rng.integers(0, 50, size),
        }
        for a, name, b, size in ends
    }
    nodes = {name: {"num_nodes": count, "time": rng.integers(0, 50, count)} for name, count in COUNTS.items()}
    for node_type in nodes.values():
        node_type["features"] = rng.random((node_type["num_nodes"], 2)).astype(np.float32)
    dataset = gs.hetero_graph(nodes, edges)
    columns = {"node_time": dataset.node_time, "edge_time": dataset.edge_time, "features": dataset.features}
    parts = gs.partition(dataset.stream, "spring", 2, evaluate=False)
    return gs.write_partition_store(tmp_path_factory.mktemp("typed") / "store", dataset.stream, parts, **columns)


def part_of(store, scope):
    part = load_part_graph(store, 1, 0) if scope == "part" else load_whole_graph(store, 0)
    return part, np.arange(part.num_core)


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize(
    "given",
    [
        {"fanouts": {"*": [2, 2], "author,writes,paper": [-1, 0], "at": [0, 0]}},
        {"fanouts": {"*": [2, 2]}, "temporal_strategy": "uniform"},
        {"fanouts": [2, 2], "temporal_strategy": "last", "strictly_before": True},
        {"fanouts": {"*": [2, 1]}, "subgraph_type": "induced"},
        {"fanouts": {"*": [2, 1]}, "subgraph_type": "bidirectional"},
    ],
)
def test_several_edge_types(store, scope, given):
    compare(gs.NeighborSampler(**given), *part_of(store, scope))


BEFORE = gs.NeighborSampler({"*": [2, 2]}, temporal_strategy="uniform", strictly_before=True)


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize(
    "given",
    [
        {"positives": "edge", "corrupt": "both", "num_negatives": 2},
        {"positives": "edge", "relations": [1], "share_negatives": True, "negatives": "uniform"},
        {"positives": "edge", "relations": [1], "negatives": "all", "corrupt": "both"},
        {"positives": "walk", "walk_length": 3, "corrupt": "both", "negatives": "uniform"},
        {"positives": "edge", "sampler": BEFORE, "num_negatives": 2},
        {"positives": "edge", "exclude_pairs": True, "corrupt": "both"},
    ],
)
def test_links_of_several_edge_types(store, scope, given):
    inner = gs.NeighborSampler({"*": [2, 2]})
    found = compare(gs.sampler.LinkSampler(**{"sampler": inner} | given), *part_of(store, scope))
    assert all(batch.pairs.shape[1] for batch in found[:-1])


def test_a_datamodule_of_several_edge_types(store, monkeypatch):
    pytest.importorskip("triton")
    sampler = gs.sampler.LinkSampler(gs.NeighborSampler({"*": [2]}), "edge", num_negatives=1)
    dm, batches = gs.PartitionDataModule(store=store, sampler=sampler, batch_size=60), []
    dm.setup("fit")
    monkeypatch.setattr(gs.PartitionDataModule, "_sending", lambda *_: None)
    for device in (None, DEVICE):
        monkeypatch.setattr(gs.PartitionDataModule, "_gpu", device)
        loader = dm.train_dataloader()
        assert isinstance(loader._maker.sampler, DeviceSampler) == (device is not None)
        batches.append([tensors_of(batch) for batch in loader])
        loader.close()
    for mine, other in zip(*batches, strict=True):
        assert all(torch.equal(one.cpu(), wanted) for one, wanted in zip(mine, other, strict=True))


def test_edges_with_classes(store):
    part, targets = part_of(store, "graph")
    part = replace(part, columns=part.columns | {"edge_label": np.arange(part.csc.num_edges) % 3})
    sampler = gs.sampler.LinkSampler(gs.NeighborSampler([2, 2]), "edge", labelled=True)
    found = compare(sampler, part, targets)
    assert all(batch.pair_edges is not None and batch.negatives.size == 0 for batch in found)


READ = "tolist: triton_kernels/sample_neighbors/device.py, read"


@pytest.mark.parametrize(
    ("sampler", "num_reads"),
    [
        (gs.LayerwiseSampler([9, 5]), 3),  # the rows of the seeds, then each hop
        (gs.ClusterSampler(6, 2), 2),  # the edges of the rows, and those that stay
        (gs.sampler.LinkSampler(gs.LayerwiseSampler([9])), 3),  # and how many links there are
        (gs.sampler.LinkSampler(gs.LayerwiseSampler([9]), "edge", negatives="uniform", corrupt="both"), 3),
        (gs.sampler.LinkSampler(gs.LayerwiseSampler([9]), "walk", share_negatives=True), 3),
    ],
)
def test_the_host_waits_for_sizes_alone(sampler, num_reads, monkeypatch):
    """On a stand-in for a GPU that notes every wait. Samplers of neighbours launch kernels, which it has not."""
    targets = np.arange(PART.num_core)
    with fake_gpu(monkeypatch) as gpu:
        there = DeviceSampler(sampler, torch.device("cpu"))
        host = sampler.prepare(PART, targets, 3)
        chosen = on_device._SAMPLED_THERE[type(sampler)](sampler, host)
        state = device_state.put_on_device(chosen, torch.device("cuda", 0), True)
        space = DeviceWorkspace(PART.num_local, "cuda:0")
        gpu.steady = True
        there._there.sample(state, sampler.items(host, 8, False, 5)[0], 7, space, np.empty, True)
        gpu.steady = False
    assert gpu.waits == [READ] * num_reads


def test_neighbours_near_the_reader_are_preferred():
    rows = np.sort(np.random.default_rng(0).permutation(90)[:40])
    placed = gs.Placement((rows,), ((0,),), 90, None, {}, (), "test")
    for scale in (1.0, 6.0):
        bias = gs.LocalityBias(placed, scale, neighbor_set_size=9)
        for sampler in (gs.LayerwiseSampler([9, 7], locality=bias), gs.NeighborSampler([3, 2], locality=bias)):
            compare(sampler, PART, np.arange(PART.num_core))
            links = gs.sampler.LinkSampler(sampler, num_negatives=1)
            compare(links, PART, np.arange(PART.num_core), batch_size=3)
