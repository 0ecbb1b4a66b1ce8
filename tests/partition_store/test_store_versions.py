"""Versions of a store: what a version says that it changed, what it shares with its parent, what is refused, kills."""

import multiprocessing
import os
import shutil
import tracemalloc

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import EdgeStreamError, PartitionStoreError
from lightning_gnnscale.partition_store import WriteBudget, array_file, update_store, write_partition_store
from lightning_gnnscale.partition_store.journal import writer_lock
from lightning_gnnscale.partition_store.place_nodes import Loads, place_nodes
from tests.partition_store.small_graphs import Given, all_bytes, random_graph
from tests.says import said

NUM = 12
EDGES = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8]])
BUDGET = WriteBudget(spill_edges=20, sort_edges=40, block_bytes=200, checkpoint_bytes=1)


def write(root, to_undirected=False, **columns):
    """Three rings of four nodes, one a part."""
    stream = open_edge_stream(EDGES, num_nodes=NUM, to_undirected=to_undirected)
    columns = columns or {
        "features": np.arange(24, dtype=np.float32).reshape(NUM, 2),
        "labels": np.arange(NUM) % 3,
        "masks": {"train": np.arange(NUM) < 6},
    }
    return write_partition_store(root, stream, Given(np.arange(NUM) // 4, 3), **columns)


def rows(num, value=1.0):
    return np.full((num, 2), value, np.float32)


def names(path):
    return sorted(one.name for one in path.iterdir())


@pytest.fixture
def store(no_disk_wait, tmp_path):
    return write(tmp_path / "store")


def test_a_version_says_which_nodes_changed(store):
    features = store.features.read(store.store_nid[[3, 4]])
    features[1] += 1
    new = gs.update_store(
        store, nodes=[3, 4, 12], features=np.concatenate([features, rows(1)]), labels=[0, 1, 2],
        edges=np.array([[12, 5], [0, 6]]), removed_edges=np.array([[8], [9]]),
    )  # fmt: skip
    changes = new.changes()
    assert changes.new.tolist() == [12]
    assert changes.features.tolist() == [4]  # that of 3 is as it was
    assert changes.labels.tolist() == []  # and these labels are theirs
    assert changes.in_edges.tolist() == [0, 6, 9]  # 5 -> 6 is there already, and a directed graph keeps both
    assert changes.removed.tolist() == []


def test_repeats_of_an_undirected_graph_change_nothing(no_disk_wait, tmp_path):
    old = write(tmp_path / "store", to_undirected=True)
    new = gs.update_store(old, edges=np.array([[1, 0], [0, 2]]))
    assert new.num_edges == old.num_edges + 2
    assert new.changes().in_edges.tolist() == [0, 2]
    assert not new.version["renumbered"]


def test_neighbours_of_removed_nodes_change_and_ids_stay_those_of_the_user(store):
    new = gs.update_store(store, removed_nodes=[1, 4])
    assert new.user_ids(np.arange(new.num_nodes)).tolist() == [0, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    changes = new.changes()
    assert sorted(new.user_ids(new.store_nid[changes.in_edges]).tolist()) == [2, 5]
    assert store.user_ids(changes.removed).tolist() == [1, 4]
    third = gs.update_store(new, nodes=[1], features=rows(1), edges=np.array([[1], [2]]))
    assert sorted(third.user_ids(np.arange(third.num_nodes)).tolist()) == [*range(4), *range(5, 12)]
    assert third.features.read(np.flatnonzero(third.user_ids(np.arange(11)) == 1)).tolist() == [[1, 1]]


def test_old_nodes_keep_their_part_and_new_ones_join_their_neighbours(store):
    new = gs.update_store(
        store, nodes=[12, 13], features=rows(2), edges=np.array([[12, 13, 12], [8, 12, 9]]), slack=0.5
    )
    part = {int(name): int(new.part_of(np.array([at]))[0]) for at, name in enumerate(new.user_ids(np.arange(14)))}
    assert [part[node] for node in range(NUM)] == (np.arange(NUM) // 4).tolist()
    assert part[12] == part[13] == 2
    star = np.array([[12, 13, 14], [8, 8, 8]])
    tight = gs.update_store(store, nodes=[12, 13, 14], features=rows(3), edges=star, slack=0,
                            root=store.root.with_name("tight"))  # fmt: skip
    assert np.diff(tight.part_offsets).tolist() == [5, 5, 5]


def test_what_does_not_change_is_the_same_file(store):
    labelled = gs.update_store(store, nodes=[0], labels=[2])
    assert (labelled.root / "labels.npy").stat().st_nlink == 1
    linked = [name for name in names(store.root) if name.endswith(".npy") and name != "labels.npy"]
    assert all((labelled.root / name).samefile(store.root / name) for name in linked)
    edged = gs.update_store(labelled, edges=np.array([[0], [2]]))
    kept = ("features.npy", "labels.npy", "mask_train.npy", "original_nid.npy", "store_nid.npy", "part_offsets.npy")
    assert all((edged.root / name).samefile(labelled.root / name) for name in kept)
    before = all_bytes(labelled.root)
    shutil.rmtree(store.root)
    labelled.verify(), edged.verify()
    assert all_bytes(labelled.root) == before


def test_a_disk_without_links_gets_copies(store, monkeypatch):
    def refuse(*args):
        raise OSError("no links here")

    linked = gs.update_store(store, nodes=[0], labels=[2])
    monkeypatch.setattr(os, "link", refuse)
    copied = gs.update_store(store, nodes=[0], labels=[2], root=store.root.with_name("copied"))
    assert not (copied.root / "features.npy").samefile(store.root / "features.npy")
    assert all_bytes(copied.root) == all_bytes(linked.root)


def test_nodes_are_found_in_every_earlier_version(store):
    second = gs.update_store(store, nodes=[20], features=rows(1), removed_nodes=[0])
    third = gs.update_store(second, edges=np.array([[20], [5]]))
    last = gs.update_store(third, nodes=[21], features=rows(1), removed_nodes=[7])
    assert [one.version["number"] for one in (second, third, last)] == [1, 2, 3]
    assert [one.root.name for one in (second, third, last)] == ["store-v1", "store-v2", "store-v3"]
    for earlier in (store, second, third, last):
        places = last.places_in(earlier.layout_fingerprint)
        own, there = last.user_ids(np.arange(last.num_nodes)), earlier.user_ids(np.arange(earlier.num_nodes))
        assert np.array_equal(there[places[places >= 0]], own[places >= 0])
        assert set(own[places < 0].tolist()) == set(own.tolist()) - set(there.tolist())
    shutil.rmtree(third.root)
    with pytest.raises(PartitionStoreError, match=said("store-v2 not there: restore")):
        last.places_in(store.layout_fingerprint)
    with pytest.raises(PartitionStoreError, match=said("neither nor an update")):
        store.places_in(last.layout_fingerprint)
    with pytest.raises(PartitionStoreError, match=said("written from a data set no update")):
        store.changes()


def test_a_chain_records_parent_counts_cut_and_balance(store):
    new = gs.update_store(store, nodes=[12], features=rows(1), edges=np.array([[12, 12], [0, 4]]), drift=5)
    version = new.version
    assert version["parent"]["name"] == "store" and version["parent"]["manifest"] == store.manifest_digest
    counts = {"new_nodes": 1, "removed_nodes": 0, "changed_features": 0, "changed_labels": 0}
    assert version["counts"] == {**counts, "new_edges": 2, "removed_edges": 0}
    assert version["cut"] == {"first": 0, "before": 0, "after": pytest.approx(1 / 14)}
    assert version["balance"] == {"before": 1, "after": pytest.approx(5 / (13 / 3))}


def test_a_cut_that_drifts_names_the_remedy(no_disk_wait, tmp_path):
    old = gs.update_store(write(tmp_path / "store"), edges=np.array([[0], [4]]))
    with pytest.warns(UserWarning, match=said("drift=0.1 gnnscale partition dataset=store")):
        gs.update_store(old, edges=np.array([[0, 1, 2], [5, 6, 7]]))


def test_the_same_change_is_not_written_twice_and_another_is_refused(store):
    one = gs.update_store(store, edges=np.array([[0], [5]]))
    before = (one.root / "manifest.json").stat().st_mtime_ns
    assert gs.update_store(store.root, edges=np.array([[0], [5]])).root == one.root
    assert (one.root / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(PartitionStoreError, match=said("store-v1 another input overwrite=True")):
        gs.update_store(store, edges=np.array([[0], [6]]))
    assert gs.update_store(store, edges=np.array([[0], [6]]), overwrite=True).changes().in_edges.tolist() == [6]


BAD = {
    "an unknown end": ({"edges": np.array([[0], [12]])}, "node 12 neither in the store"),
    "a new node that is not listed": (
        {"edges": np.array([[0], [13]]), "nodes": [12], "features": rows(1)},
        "node 13 neither",
    ),
    "an edge that is not there": ({"removed_edges": np.array([[0], [2]])}, "removed_edges from 0 to 2"),
    "an edge of a new node": (
        {"removed_edges": np.array([[0], [12]]), "nodes": [12], "features": rows(1)},
        "removed_edges 0 12",
    ),
    "a node that is not there": ({"removed_nodes": [99]}, "removed_nodes 99"),
    "a node that comes and goes": ({"nodes": [3], "labels": [1], "removed_nodes": [3]}, "node 3 nodes removed_nodes"),
    "a new edge of a node that goes": ({"edges": np.array([[0], [3]]), "removed_nodes": [3]}, "edge 0 3 removed_nodes"),
    "too few features": ({"nodes": [12], "features": np.ones((1, 3), np.float32)}, "features 2 columns 3"),
    "another dtype": ({"nodes": [0], "features": np.full((1, 2), 0.1)}, "features float32 float64 astype"),
    "sparse rows": ({"nodes": [0], "features": csr_matrix(rows(1))}, "features dense sparse"),
    "missing features": ({"nodes": [12]}, "features missing 1 new nodes"),
    "a new column": ({"nodes": [0], "node_time": [1]}, "node_time no such column"),
    "a new mask": ({"nodes": [0], "masks": {"val": np.array([True])}}, "masks['val'] no such column"),
    "a new column of edges": ({"edges": np.array([[0], [2]]), "edge_weight": [1.0]}, "edge_weight no such column"),
    "labels of another shape": ({"nodes": [0], "labels": np.zeros((1, 3))}, "labels num_rows"),
    "labels that are none": ({"nodes": [0], "labels": [-7]}, "labels -1 -7"),
    "features that are not finite": ({"nodes": [0], "features": rows(1, np.nan)}, "features row 0 nan"),
    "as many rows as nodes": ({"nodes": [0, 1], "features": rows(1)}, "features 2"),
    "a node twice": ({"nodes": [0, 0], "features": rows(2)}, "nodes 0 repeated"),
    "rows without nodes": ({"features": rows(1)}, "features without nodes"),
    "values without edges": ({"edge_weight": [1.0]}, "edge_weight without edges"),
    "ids of another kind": ({"removed_nodes": ["a"]}, "removed_nodes 'a'"),
    "names of new nodes of another kind": ({"nodes": ["a"], "features": rows(1)}, "nodes strings integers"),
    "reverses": ({"edges": open_edge_stream(EDGES, num_nodes=NUM, to_undirected=True)}, "to_undirected=True"),
    "an unknown argument of the parts": ({"slack": -1}, "slack at least 0 -1"),
    "no change": ({"change": 3}, "GraphChange 3"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_and_nothing_is_written(store, what):
    given, message = BAD[what]
    before = names(store.root.parent)
    with pytest.raises((ValueError, EdgeStreamError), match=said(message)) as told:
        gs.update_store(store, **given)
    assert "\n" not in str(told.value)
    assert names(store.root.parent) == before


def test_columns_that_the_store_has_are_needed_of_new_edges(no_disk_wait, tmp_path):
    old = write(tmp_path / "store", edge_weight=np.ones(12), edge_label=np.arange(12) % 2)
    with pytest.raises(ValueError, match=said("edge_weight missing 1 new edges")):
        gs.update_store(old, edges=np.array([[0], [2]]))
    new = gs.update_store(old, edges=np.array([[0], [2]]), edge_weight=[0.25])
    assert new.least_edge_weight == 0.25 and sorted(new.edge_label.tolist()) == [-1] + [0] * 6 + [1] * 6


def test_a_store_that_is_not_finished_or_in_use_is_refused(store):
    with pytest.raises(PartitionStoreError, match=said("no such partition store")):
        gs.update_store(store.root.with_name("none"), edges=np.array([[0], [2]]))
    (store.root / "manifest.json").rename(store.root / "away")
    with pytest.raises(PartitionStoreError, match="no manifest.json"):
        gs.update_store(store.root, edges=np.array([[0], [2]]))
    (store.root / "away").rename(store.root / "manifest.json")
    with pytest.raises(ValueError, match=said("root another folder")):
        gs.update_store(store, edges=np.array([[0], [2]]), root=store.root)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        context = pool.apply(_holding, (str(store.root),))
        assert context
        with pytest.raises(PartitionStoreError, match=said("store process updating lock_timeout_s")):
            gs.update_store(store, edges=np.array([[0], [2]]))


_held = []


def _holding(root):
    from pathlib import Path

    _held.append(writer_lock(Path(root), 0, "updating"))
    _held[-1].__enter__()
    return True


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_kill_at_any_point_leaves_the_old_version_and_is_gone_on_from(no_disk_wait, tmp_path, form):
    graph, rng = random_graph(60, 300, 3, to_undirected=True), np.random.default_rng(0)
    features = rng.random((60, 4)).astype(np.float32)
    features = csr_matrix(features * (features > 0.5)) if form == "sparse" else features
    columns = {"labels": np.arange(60), "edge_weight": rng.random(300), "pack_halo": True}
    old = write_partition_store(tmp_path / "old", graph.stream(40), graph.given, features=features, **columns)
    untouched, change = all_bytes(old.root), {
        "nodes": [60, 61, 3], "features": features[:3], "labels": [1, 2, 3], "removed_nodes": [7],
        "edges": rng.integers(20, 62, (2, 50)), "edge_weight": rng.random(50), "budget": BUDGET, "drift": 9,
    }  # fmt: skip
    steps = []
    whole = gs.update_store(old, root=tmp_path / "whole", progress=lambda *step: steps.append(step), **change)
    for at in range(len(steps)):
        seen = []

        def stop(*step, seen=seen, at=at):
            seen.append(step)
            if len(seen) == at + 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gs.update_store(old, root=tmp_path / "new", progress=stop, **change)
        assert not (tmp_path / "new").exists() and all_bytes(old.root) == untouched
        again = []
        found = gs.update_store(old, root=tmp_path / "new", progress=lambda *step, to=again: to.append(step), **change)
        assert all_bytes(found.root) == all_bytes(whole.root)
        assert len(again) < len(steps) or at < 2
        shutil.rmtree(tmp_path / "new")
    assert {step[0] for step in steps} >= {"storing features", "bucketing edges", "merging rows", "listing halos"}


def test_an_unfinished_version_of_another_change_is_told_and_may_go(store):
    def stop(*step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gs.update_store(store, edges=np.array([[0], [5]]), progress=stop)
    with pytest.raises(PartitionStoreError, match=said("store-v1.partial unfinished overwrite=True")):
        gs.update_store(store, edges=np.array([[0], [6]]))
    assert gs.update_store(store, edges=np.array([[0], [6]]), overwrite=True).changes().in_edges.tolist() == [6]
    assert not store.root.with_name("store-v1.partial").exists()


def test_memory_does_not_grow_with_the_edges(no_disk_wait, tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "_BLOCK_BYTES", 1 << 16)
    budget, rng, peaks = (
        WriteBudget(spill_edges=1 << 10, sort_edges=1 << 12, block_bytes=1 << 16),
        np.random.default_rng(0),
        [],
    )
    for num_edges in (10_000, 300_000):
        graph = random_graph(1000, num_edges, 3)
        old = write_partition_store(
            tmp_path / f"{num_edges}", graph.stream(1 << 10), graph.given, features=rng.random((1000, 8))
        )
        edges = open_edge_stream(rng.integers(0, 1000, (2, num_edges // 10)), num_nodes=1000, chunk_edges=1 << 10)
        gs.update_store(old, edges=np.array([[0], [1]]), root=tmp_path / f"{num_edges}-first", drift=9)  # compiles
        tracemalloc.start()
        gs.update_store(old, edges=edges, budget=budget, drift=9)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 300_000 * 4 / 4  # a quarter of the sources alone


def test_a_damaged_store_is_not_copied(store):
    path = store.root / "features.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(PartitionStoreError, match=said("features.npy damaged")):
        gs.update_store(store, nodes=[12], features=rows(1))


def test_new_nodes_spread_where_they_have_no_neighbours():
    loads = Loads.of(np.full((1, 3), 10), np.full((1, 3), 10), np.ones((9, 1)))
    part = place_nodes(
        np.zeros(10, np.int64), np.empty(0, np.int64), np.repeat(np.arange(3, dtype=np.int32), 10), loads
    )
    assert np.bincount(part).tolist() == [3, 3, 3]


def test_a_chain_of_new_nodes_follows_the_one_that_is_known():
    """Node i knows node i + 1 alone, and the last an old node: those with placed neighbours come first."""
    num = 5
    ends = [[num_old + i + 1 for num_old in (4,)] for i in range(num - 1)] + [[3]]
    neighbours = [end + ([4 + i - 1] if i else []) for i, end in enumerate(ends)]
    indptr = np.cumsum([0, *map(len, neighbours)])
    loads = Loads.of(np.full((1, 2), 2), np.full((1, 2), 2), np.ones((num, 1)), slack=9)
    part = place_nodes(indptr, np.concatenate(neighbours), np.array([0, 0, 1, 1], np.int32), loads)
    assert part.tolist() == [1] * num


def test_a_data_set_in_the_users_ids_is_a_change_too(no_disk_wait, tmp_path):
    names_of = np.array([f"n{i}" for i in range(NUM)])
    stream = open_edge_stream(names_of[EDGES], nodes=names_of)
    old = write_partition_store(tmp_path / "s", stream, Given(np.arange(NUM) // 4, 3), features=rows(NUM, 2.0))
    more = gs.GraphDataset("more", open_edge_stream(np.array([["x", "n3"], ["n0", "x"]]), nodes=["x", "n0", "n3"]),
                           features=np.array([[5, 5], [2, 2], [7, 7]], np.float32))  # fmt: skip
    new = gs.update_store(old, more, removed_edges=np.array([["n0"], ["n1"]]))
    ids = new.user_ids(np.arange(new.num_nodes))
    assert new.num_edges == 12 + 2 - 1 and new.num_nodes == NUM + 1
    changed = new.user_ids(new.store_nid[new.changes().features])
    assert changed.tolist() == ["n3"] and new.features.read(np.flatnonzero(ids == "x")).tolist() == [[5, 5]]
    numbered = update_store(
        write(tmp_path / "t"), gs.GraphDataset("g", open_edge_stream(np.array([[0], [2]]), num_nodes=NUM))
    )
    assert numbered.changes().in_edges.tolist() == [2]
