"""Machines that fetch a store from a URL fetch the rows of their own parts: of nodes and edges, sparse and typed."""

import json
import os
from collections import Counter
from concurrent.futures import Future
from dataclasses import fields
from functools import partial

import fsspec
import numpy as np
import pytest
import torch
from scipy.sparse import random as random_sparse

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.train_loader import _data
from lightning_gnnscale.loader import LoaderOptions
from lightning_gnnscale.loader.batch_maker import BatchMaker
from lightning_gnnscale.partition_store import publish, published
from lightning_gnnscale.partition_store.part_graph import load_whole_graph
from lightning_gnnscale.remote.held_rows import DistributedFeatures, PartOwners, owned_columns
from lightning_gnnscale.remote.holder import StoreHolder
from lightning_gnnscale.remote.messages import ShardMap
from lightning_gnnscale.remote.sampling_owners import OwnedGraph, sampler_of_owners
from lightning_gnnscale.sampler import LayerwiseSampler, LinkSampler, NeighborSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*share its edge type", "ignore:.*listed more often")
BLOCK, OWNERS = 512, (0, 0, 1, 1)
EDGE_FILES = ("csc_indices", "edge_weight", "edge_features", "edge_label", "edge_time", "edge_type")
ROW_FILES = ("features_indices", "features_data", "kind0_features", "kind1_features")


def sparse_store(root):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 400, (2, 5000))
    stream = gs.open_edge_stream(edges[:, edges[0] != edges[1]], num_nodes=400)
    num = stream.count()[1]
    return gs.write_partition_store(
        root, stream, gs.partition(stream, "random", 4, seed=1), labels=rng.integers(0, 3, 400),
        features=random_sparse(400, 60, 0.2, "csr", np.float32, random_state=0), masks={"train": rng.random(400) < 0.5},
        edge_weight=rng.random(num, np.float32), edge_features=rng.random((num, 3), np.float32),
        edge_label=rng.integers(0, 4, num), node_time=rng.integers(0, 60, 400), edge_time=rng.integers(0, 60, num),
    )  # fmt: skip


def typed_store(root):
    rng, sizes = np.random.default_rng(1), {"paper": 240, "author": 160}
    ends = {("paper", "cites", "paper"): 2500, ("author", "writes", "paper"): 2000}
    nodes = {
        name: {
            "features": rng.random((num, 5 + 3 * (name == "author")), np.float32),
            "labels": rng.integers(0, 3, num),
            "masks": {"train": rng.random(num) < 0.5},
        }
        for name, num in sizes.items()
    }
    edges = {
        (a, name, b): {
            "edges": np.stack([rng.integers(0, sizes[a], num), rng.integers(0, sizes[b], num)]),
            "features": rng.random((num, 3), np.float32),
            "labels": rng.integers(0, 4, num),
        }
        for (a, name, b), num in ends.items()
    }
    graph = gs.hetero_graph(nodes, edges)
    return gs.write_partition_store(root, graph.stream, gs.partition(graph.stream, "random", 4, seed=1), graph)


STORES = {"sparse": sparse_store, "typed": typed_store}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp("owned") / name) for name, write in STORES.items()}


@pytest.fixture
def given(monkeypatch):
    """Bytes that were fetched, by the name of the file."""
    found = Counter()
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(published, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(published, "record", lambda event, **facts: found.update({facts["file"]: facts["bytes"]}))
    return found


def own_bytes(store, name: str, machine: int) -> tuple[int, int]:
    """The bytes of a file that the parts of a machine take, and those of the blocks that they may reach into."""
    entry, bounds = store.manifest["files"][name], store.part_offsets[[2 * machine, 2 * machine + 2]]
    row_bytes = np.dtype(entry["dtype"]).itemsize * int(np.prod(entry["shape"][1:]))
    if name in EDGE_FILES:
        bounds = store.csc.indptr[bounds]
    elif name.startswith("kind"):
        node_type = store.node_type(np.arange(*bounds))
        bounds = np.array([0, int((node_type == int(name[4])).sum())])
    elif name != "features":
        bounds = store.features.indptr[bounds]
    size = int(bounds[1] - bounds[0]) * row_bytes
    return size, size + 2 * BLOCK


def ask(answer, *asked) -> Future:
    future: Future = Future()
    future.set_result(answer(*asked))
    return future


def machine_of(store, holders, machine: int, sampler, columns):
    """A stage and a maker of a machine, over its store and what the holders of both answer."""
    owners, holder = PartOwners(store.part_offsets, OWNERS), holders[machine]
    rows = OwnedGraph(holder._rows, owners, lambda owner, requests: ask(holders[owner].sample_rows, requests), columns)
    features = DistributedFeatures.of(
        store.features, holder._features, owners, lambda owner, nodes: ask(holders[owner].gather_rows, nodes)
    )
    own = sampler_of_owners(sampler, rows)
    load = partial(load_whole_graph, store, edges=False)
    return _data(store, load, features, LoaderOptions(), True, edges=False), own, BatchMaker(own, features)


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("sparse", NeighborSampler([4, 3], weighted=True)),
        ("sparse", NeighborSampler([4, 3], temporal_strategy="uniform")),
        ("sparse", NeighborSampler([4, 3], subgraph_type="induced")),
        ("sparse", LayerwiseSampler([30, 20])),
        ("sparse", LinkSampler(NeighborSampler([3, 2]), positives="edge", labelled=True)),
        ("typed", NeighborSampler({"*": [3, 2]})),
        ("typed", LinkSampler(NeighborSampler({"*": [3, 2]}), positives="edge", labelled=True)),
    ],
    ids=["by weight", "by time", "induced", "layer-wise", "classes of edges", "by edge type", "classes of triples"],
)
def test_batches_are_those_of_one_machine_and_each_fetches_its_own_rows(tmp_path, stores, given, name, sampler):
    store, url = stores[name], f"memory://owned/{tmp_path.name}"
    publish(store.root, url)
    columns, fetched, holders, bytes_of = owned_columns(sampler, store), [], [], []
    for machine in range(2):
        given.clear()
        fetched.append(gs.PartitionStore.open(url, cache=tmp_path / f"machine{machine}"))
        roots = tuple(str(tmp_path / f"machine{one}" / fetched[0].root.name) for one in range(2))
        how = json.dumps(fetched[-1].fetched.settings)
        shard_map = ShardMap(roots, store.layout_fingerprint, OWNERS, ("a", "b"), fetching=how, columns=columns)
        holders.append(StoreHolder(shard_map, machine))
        bytes_of.append(dict(given))
    fsspec.filesystem("memory").rm("/owned", recursive=True)  # nothing is fetched from here on
    targets = np.flatnonzero(store.masks["train"])
    plain = _data(store, partial(load_whole_graph, store), store.features, LoaderOptions(), True)
    whole = plain.stager({0: targets}, sampler, 3)(0)
    for machine in range(2):
        assert fetched[machine].num_edge_classes == store.edge_label.max() + 1, "known without reading it"
        given_data, own, maker = machine_of(fetched[machine], holders, machine, sampler, columns)
        staged = given_data.stager({0: targets}, own, 3)(0)
        for number, items in enumerate(sampler.items(whole.state, 30, False, 5)[:3]):
            one = BatchMaker(sampler, store.features).build(whole, items, 50 + number)
            assert_same(one, maker.build(staged, items, 50 + number))
        for file in store.manifest["files"]:
            if file in (*EDGE_FILES, *ROW_FILES):
                least, most = own_bytes(store, file, machine)
                held = file in (*columns, "csc_indices", *ROW_FILES)
                assert (least if held else 0) <= bytes_of[machine].get(file, 0) <= (most if held else 0), file


def assert_same(one, other):
    """Two batches have the same bits."""

    def same(left, right) -> bool:
        if isinstance(left, torch.Tensor):
            return left.dtype == right.dtype and torch.equal(left, right)
        if isinstance(left, tuple | list):
            return len(left) == len(right) and all(map(same, left, right))
        return left == right

    for field in fields(one):
        pair = [getattr(batch, field.name) for batch in (one, other)]
        assert same(*pair), field.name
    assert one.edge_attr is not None
