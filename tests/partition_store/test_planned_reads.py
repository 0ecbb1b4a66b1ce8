"""Planned reads: rows that are read into memory ahead are those of plain indexing, bit for bit."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_packed_features import dense, rows_by_hand, sparse, sparse_rows

from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import CSRFeatures, DenseFeatures, LoadedRows, RankedNodes, features_of_part
from lightning_gnnscale.partition_store import planned_reads as module
from lightning_gnnscale.partition_store.planned_reads import read_once, read_ranges, read_rows
from tests.says import said
from tests.tiers import all_pairs, each_value


def mapped(path, array: np.ndarray) -> np.ndarray:
    np.save(path, array)
    return np.asarray(np.load(path, mmap_mode="r"))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> np.ndarray:
    """(20,000, 6) int16 on a file, each value its own position."""
    values = np.arange(120_000).astype(np.int16).reshape(20_000, 6)
    return mapped(tmp_path_factory.mktemp("rows") / "table.npy", values)


@all_pairs
@pytest.mark.parametrize("gap", [0, 100, 1 << 20])
@pytest.mark.parametrize("run_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 1.0])
def test_rows_of_a_file(table, monkeypatch, gap, run_bytes, density):
    monkeypatch.setattr(module, "GAP_BYTES", gap)
    monkeypatch.setattr(module, "RUN_BYTES", run_bytes)
    rows = np.flatnonzero(np.random.default_rng(7).random(len(table)) < density)
    np.testing.assert_array_equal(read_rows(table, rows), table[rows])
    np.testing.assert_array_equal(read_rows(np.array(table), rows), table[rows])


def test_a_slice_of_a_file_is_read_where_it_lies(table):
    rows = np.array([0, 1, 5, 99])
    np.testing.assert_array_equal(read_rows(table[1000:1100], rows), table[1000:1100][rows])


def test_ranges_of_any_length(table):
    rng = np.random.default_rng(3)
    ends = np.sort(rng.choice(table.nbytes, 400, replace=False)).reshape(-1, 2)
    ends[5, 1] = ends[5, 0]  # an empty one
    plain = np.array(table).reshape(-1).view(np.uint8)
    expected = np.concatenate([plain[begin:end] for begin, end in ends])
    np.testing.assert_array_equal(read_ranges(table, *ends.T), expected)


@pytest.mark.parametrize("fits", [True, False])
def test_a_run_is_read_once_with_memory_behind_it(tmp_path, monkeypatch, fits):
    monkeypatch.setattr(module, "fits_twice", lambda num_bytes: fits)
    values = np.arange(30_000, dtype=np.int32)
    array = mapped(tmp_path / "ids.npy", values)
    for begin, end, spare in ((0, 0, 5), (3, 20_000, 7), (29_999, 30_000, 100_000), (0, 30_000, 0)):
        found = read_once(array[begin:end], spare)
        assert len(found) == end - begin + spare and found.dtype == values.dtype
        found[end - begin :] = -1
        np.testing.assert_array_equal(found[: end - begin], values[begin:end])
    with open(tmp_path / "ids.npy", "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(PartitionStoreError, match="was shortened"):
        read_once(array)


def test_a_file_that_was_shortened_is_one_line(tmp_path):
    array = mapped(tmp_path / "rows.npy", np.zeros((4000, 16), np.float32))
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(100_000)
    assert len(read_rows(array, np.arange(1000))) == 1000
    with pytest.raises(PartitionStoreError, match=said("rows.npy 100000")):
        read_rows(array, np.arange(4000))


@given(st.lists(st.lists(st.integers(0, 199), max_size=30), max_size=4))
def test_ranked_nodes_rank_its_nodes(added):
    held, all_nodes = RankedNodes.empty(200), set()
    for nodes in added:
        assert held.add(np.array(nodes, np.int32)) == len(set(nodes) - all_nodes)
        all_nodes |= set(nodes)
    expected = np.array(sorted(all_nodes), np.int64)
    assert len(held) == len(expected)
    np.testing.assert_array_equal(held.nodes, expected)
    np.testing.assert_array_equal(held.count().ranks(expected), np.arange(len(expected)))
    for missing in {-1, 0, 63, 64, 199, 200, 10**9} - all_nodes:
        with pytest.raises(ValueError, match=said(f"{missing} {len(expected)}")):
            held.ranks(np.array([*expected, missing]))


def held_rows(features, nodes: np.ndarray) -> LoadedRows:
    held = RankedNodes.empty(features.num_rows)
    held.add(nodes)
    return LoadedRows.of(features, held)


def same(found, expected) -> None:
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
        return
    for name in ("indptr", "indices", "data", "dim"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_dense_and_sparse_rows_gathered_from_memory(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.integers(0, 100, (500, 7)).astype(np.int16)
    csr = sparse_rows(values)
    files = [mapped(tmp_path / f"{name}.npy", getattr(csr, name)) for name in ("indptr", "indices", "data")]
    for features in (DenseFeatures(mapped(tmp_path / "dense.npy", values)), CSRFeatures(*files, csr.dim)):
        nodes = rng.integers(0, 500, 200)
        loaded = held_rows(features, nodes)
        asked = rng.choice(nodes, 300)
        same(loaded.read(asked), features.read(asked))
        assert (loaded.num_rows, loaded.dim, loaded.dtype) == (features.num_rows, features.dim, features.dtype)
        assert loaded.is_sparse == features.is_sparse
        assert loaded.nbytes > 0
    space = np.zeros((3, 7), np.int16)
    dense_rows = held_rows(DenseFeatures(values), np.arange(500))
    assert dense_rows.read(np.array([4, 2, 4]), space) is space
    np.testing.assert_array_equal(space, values[[4, 2, 4]])


@each_value
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("packed", [dense, sparse])
def test_packed_rows_are_read_where_they_are_packed(packed, part):
    table = features_of_part(packed(), part)
    nodes = np.array([0, 5, 7, 9, 12, 15, 19])
    loaded = held_rows(table, nodes)
    asked = np.array([15, 15, 0, 9, 7])
    same(loaded.read(asked), table.read(asked))
    if packed is dense:
        np.testing.assert_array_equal(loaded.read(asked)[:, 0], rows_by_hand(part, asked))
    whole = held_rows(packed(), nodes)
    same(whole.read(asked), packed().owned.read(asked))


def test_reads_of_forked_processes_do_not_meet(tmp_path):
    """Buffers that are used again are a process's own."""
    values = np.arange(400_000, dtype=np.int64).reshape(50_000, 8)
    table = mapped(tmp_path / "rows.npy", values)
    read_rows(table, np.arange(0, 50_000, 3))  # buffers are there
    children = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            rows = np.arange(number, 50_000, 2 + number)
            os._exit(not all(np.array_equal(read_rows(table, rows), values[rows]) for _ in range(30)))
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def test_a_packed_row_of_two_nodes_is_damage():
    table = features_of_part(replace(dense(), halo_places=np.zeros(7, np.int32)), 0)
    with pytest.raises(PartitionStoreError, match=said("halo_places 0")):
        table.load(np.arange(20))
