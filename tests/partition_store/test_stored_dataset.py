"""A store's graph is a data set again, by the user's ids, without what it was written from."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import load_store, write_partition_store
from tests.partition_store.small_graphs import Given

NUM = 30
RNG = np.random.default_rng(0)
EDGES = RNG.integers(0, NUM, (2, 90))
NAMES = {"row numbers": None, "integers": np.arange(NUM) * 7 - 3, "strings": np.array([f"n{i}" for i in range(NUM)])}


def by_name(store):
    """Edges with their weights, and rows of each column, by the user's ids."""
    ids = [str(name) for name in store.user_ids(np.arange(store.num_nodes))]
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    ends = zip(store.csc.indices.tolist(), target.tolist(), store.edge_weight.tolist(), strict=True)
    features = store.features.read(np.arange(store.num_nodes))
    features = features.dense() if store.features.is_sparse else features
    edges = sorted((ids[src], ids[dst], weight) for src, dst, weight in ends)
    return edges, {
        name: (features[at].tolist(), int(store.labels[at]), bool(store.masks["train"][at]), int(store.node_time[at]))
        for at, name in enumerate(ids)
    }


def write(root, stream, features, **columns):
    p, labels, masks = Given(RNG.integers(0, 3, NUM), 3), np.arange(NUM), {"train": np.arange(NUM) < 9}
    columns |= {"labels": labels, "masks": masks, "node_time": np.arange(NUM), "edge_weight": RNG.random(90)}
    return write_partition_store(root, stream, p, features=features, **columns)


@pytest.mark.parametrize("form", ["dense", "int8", "sparse"])
@pytest.mark.parametrize("to_undirected", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_it_is_the_same_graph_with_other_parts(no_disk_wait, tmp_path, names, to_undirected, form):
    ids = NAMES[names]
    stream = open_edge_stream(EDGES if ids is None else ids[EDGES], nodes=ids, to_undirected=to_undirected,
                              num_nodes=NUM if ids is None else None)  # fmt: skip
    features = RNG.random((NUM, 4)).astype(np.float32)
    columns = {"edge_time": np.arange(90)} if form == "dense" else {}
    columns |= {"feature_storage": "int8"} if form == "int8" else {}
    old = write(tmp_path / "old", stream, csr_matrix(features) if form == "sparse" else features, **columns)
    dataset = load_store(old.root)
    again = write_partition_store(tmp_path / "new", dataset.stream, Given(RNG.integers(0, 2, NUM), 2), dataset)
    again.verify()
    assert by_name(again) == by_name(old) and again.symmetric == old.symmetric
    assert again.feature_storage == old.feature_storage
    assert again.manifest["to_undirected"] == to_undirected
    assert load_store(again).stream.fingerprint() != dataset.stream.fingerprint()


def test_its_edges_are_read_from_any_chunk_on(no_disk_wait, tmp_path):
    store = write_partition_store(tmp_path / "s", open_edge_stream(EDGES, num_nodes=NUM), Given(np.arange(NUM) % 3, 3))
    stream = load_store(store).stream
    stream.chunk_edges = 20
    chunks = list(stream.chunks())
    for start in range(5):
        later = list(stream.chunks(start))
        assert [one.first_edge for one in later] == [one.first_edge for one in chunks[start:]]
        assert all(
            np.array_equal(a.src, b.src) and np.array_equal(a.dst, b.dst)
            for a, b in zip(later, chunks[start:], strict=True)
        )
