"""What parts hold, counted against the edges and labels that were given."""

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.partition_store.composition import store_composition
from tests.partition_store.small_graphs import Given

pytestmark = pytest.mark.usefixtures("no_disk_wait")


def stored(folder, num_nodes: int, num_parts: int, num_edges: int, labels=None, seed: int = 0, **options):
    """A random graph, stored; returns the store, its edges and the part of each node, in the order given."""
    sample = np.random.default_rng(seed)
    edges = sample.integers(0, num_nodes, (2, num_edges))
    edges = np.unique(edges[:, edges[0] != edges[1]], axis=1)
    part_id = sample.integers(0, num_parts, num_nodes).astype(np.int32)
    part_id[:num_parts] = np.arange(num_parts)
    stream = open_edge_stream(edges, num_nodes=num_nodes)
    write_partition_store(folder, stream, Given(part_id, num_parts), labels=labels, **options)
    return PartitionStore.open(folder), edges, part_id


def test_parts_are_counted_exactly_where_all_edges_are_read(tmp_path):
    labels = np.random.default_rng(1).integers(-1, 3, 200)
    train = np.arange(200) % 3 == 0
    features = np.ones((200, 6), np.float32)
    given = {"labels": labels, "masks": {"train": train}, "features": features}
    store, edges, part_id = stored(tmp_path / "store", 200, 4, 3000, **given)
    found = store_composition(store)
    directed_edges = np.zeros((4, 4), int)
    np.add.at(directed_edges, (part_id[edges[1]], part_id[edges[0]]), 1)  # into, from
    assert found["edges"] == directed_edges.tolist()
    assert found["edges_share"] == 1.0
    assert found["parts"] == [0, 1, 2, 3]
    assert found["nodes"] == np.bincount(part_id).tolist()
    assert found["train"] == np.bincount(part_id[train], minlength=4).tolist()
    assert found["halo"] == [len(store.halo(part)) for part in range(4)]
    assert found["labels"] == [0, 1, 2]
    counts = [[int(((part_id == part) & (labels == label)).sum()) for label in range(3)] for part in range(4)]
    assert found["label_counts"] == counts
    assert (found["row_bytes"], found["packs_halo"]) == (24.0, False)


def test_a_share_of_the_rows_stands_for_all(tmp_path):
    labels = np.random.default_rng(1).integers(0, 2, 4000)
    store, _, _ = stored(tmp_path / "store", 4000, 3, 60000, labels=labels)
    whole, part = store_composition(store), store_composition(store, most_edges=15000)
    assert 0.2 < part["edges_share"] < 0.3
    for name in ("nodes", "halo", "train", "parts", "labels"):
        assert part[name] == whole[name]
    for name in ("edges", "label_counts"):
        np.testing.assert_allclose(part[name], whole[name], rtol=0.2)
        np.testing.assert_allclose(np.sum(part[name], 1), np.sum(whole[name], 1), rtol=0.01)


def test_several_labels_count_each_and_many_parts_are_counted_in_groups(tmp_path):
    labels = np.random.default_rng(1).integers(0, 2, (400, 3)).astype(np.int8)
    store, edges, part_id = stored(tmp_path / "store", 400, 200, 3000, labels=labels)
    found = store_composition(store)
    assert len(found["parts"]) == len(found["nodes"]) == len(found["edges"]) == 128
    group = np.arange(200) * 128 // 200
    assert found["nodes"] == np.bincount(group[part_id], minlength=128).tolist()
    assert np.sum(found["edges"]) == edges.shape[1]
    assert np.sum(found["label_counts"], 0).tolist() == labels.sum(0).tolist()
    assert [group[first] for first in found["parts"]] == list(range(128))


def test_a_graph_without_edges_or_labels_is_counted_too(tmp_path):
    store, _, _ = stored(tmp_path / "store", 5, 2, 0)
    found = store_composition(store)
    assert found["edges"] == [[0, 0], [0, 0]]
    assert (found["labels"], found["label_counts"], found["train"], found["row_bytes"]) == (None, None, None, 0)
