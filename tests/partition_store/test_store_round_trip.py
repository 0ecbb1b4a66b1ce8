"""Everything that goes into a store comes out of it: edges, ids, rows of features, parts."""

import pickle
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import PartitionStore, WriteBudget, write_partition_store
from lightning_gnnscale.partition_store import csc_writer as rows
from tests.oracles.partition_store import StoreOracle
from tests.partition_store.small_graphs import TINY, SmallGraph, random_graph, small_graphs
from tests.says import said
from tests.tiers import each_value

FAST = settings(
    max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(graph: SmallGraph, folder: str, budget=TINY, chunk_edges=7, **arrays) -> PartitionStore:
    return write_partition_store(
        Path(folder) / "store", graph.stream(chunk_edges), graph.given, budget=budget, **arrays
    )


def original_rows(store, graph, weight):
    """{original node: sorted [(original source, edge id)]} of a PartGraph."""
    names = store.original_nid[graph.nodes]
    rows = {}
    for row, node in enumerate(names.tolist()):
        edges = slice(graph.csc.indptr[row], graph.csc.indptr[row + 1])
        indices = graph.csc.indices[edges]
        assert (np.diff(indices) >= 0).all()
        ids = weight[graph.edge_id[edges]].astype(int)
        rows[node] = sorted(zip(names[indices].tolist(), ids.tolist(), strict=True))
    return rows


@FAST
@given(graph=small_graphs())
def test_every_edge_is_in_exactly_one_core_row(no_disk_wait, graph):
    oracle = StoreOracle(graph.edges, graph.part_id, graph.to_undirected, graph.remove_self_loops)
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder, edge_weight=graph.edge_ids)
        store.verify()
        assert (store.num_nodes, store.num_edges, store.num_parts) == (
            graph.num_nodes,
            oracle.num_edges,
            graph.num_parts,
        )
        assert store.symmetric == oracle.symmetric
        found = {node: [] for node in range(graph.num_nodes)}
        for part in range(store.num_parts):
            begin, end = store.part_offsets[part : part + 2]
            assert store.original_nid[begin:end].tolist() == oracle.core(part)
            for row in range(begin, end):
                edges = slice(store.csc.indptr[row], store.csc.indptr[row + 1])
                assert (np.diff(store.csc.indices[edges]) >= 0).all()
                sources = store.original_nid[store.csc.indices[edges]].tolist()
                ids = store.edge_weight[edges].astype(int).tolist()
                found[int(store.original_nid[row])] += sorted(zip(sources, ids, strict=True))
        assert found == oracle.rows


@FAST
@given(graph=small_graphs(min_nodes=1), hops=st.integers(0, 3))
def test_parts_are_those_of_the_oracle(no_disk_wait, graph, hops):
    oracle = StoreOracle(graph.edges, graph.part_id, graph.to_undirected, graph.remove_self_loops, graph.seed)
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder, edge_weight=graph.edge_ids)
        for part in range(store.num_parts):
            halo, rows = oracle.part(part, hops)
            loaded = store.load_part(part, hops)
            assert np.array_equal(store.halo(part, hops), loaded.halo_nodes)
            assert (np.diff(loaded.halo_nodes) > 0).all()
            assert set(store.original_nid[loaded.halo_nodes].tolist()) == halo
            assert original_rows(store, loaded, store.edge_weight) == rows
            assert loaded.degree.tolist() == [len(oracle.rows[int(v)]) for v in store.original_nid[loaded.nodes]]
            assert loaded.csc.indices.dtype == np.int32
            assert loaded.num_local == len(loaded.nodes) == loaded.csc.num_rows


@FAST
@given(graph=small_graphs(min_nodes=1), hops=st.integers(0, 2))
def test_symmetrised_holds_both_directions_once(no_disk_wait, graph, hops):
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder, edge_weight=graph.edge_ids)
        for part in range(store.num_parts):
            loaded = store.load_part(part, hops)
            both = loaded.symmetrised()
            assert both.symmetric
            if loaded.symmetric:
                assert both is loaded
            else:
                assert (both.degree == np.maximum(loaded.degree, both.csc.in_degree)).all()
            targets = np.repeat(np.arange(loaded.num_local), np.diff(loaded.csc.indptr)).tolist()
            edges = set(zip(loaded.csc.indices.tolist(), targets, strict=True))
            targets = np.repeat(np.arange(both.num_local), np.diff(both.csc.indptr)).tolist()
            found = list(zip(both.csc.indices.tolist(), targets, strict=True))
            if loaded.symmetric and not graph.to_undirected:
                assert set(found) == edges  # repeats stay as given where nothing had to be added
                continue
            assert sorted(found) == sorted(edges | {(v, u) for u, v in edges})
            ends = [graph.edges[int(i)] for i in store.edge_weight[both.edge_id]]
            names = store.original_nid[both.nodes].tolist()
            assert all({names[u], names[v]} == set(end) for (u, v), end in zip(found, ends, strict=True))


@FAST
@given(graph=small_graphs())
def test_ids_round_trip(no_disk_wait, graph):
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder)
        nodes = np.arange(graph.num_nodes)
        assert np.array_equal(store.original_nid[store.store_nid[nodes]], nodes)
        assert np.array_equal(store.store_nid[store.original_nid[nodes]], nodes)
        assert store.part_of(store.store_nid).tolist() == graph.part_id
        assert store.edge_weight is None and store.features is None and store.labels is None
        assert np.array_equal(store.user_ids(store.store_nid[nodes]), nodes)


@each_value
@pytest.mark.parametrize("pack_halo", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.float64, np.int64, ">f4"])
def test_dense_rows_come_out_bit_for_bit(no_disk_wait, tmp_path, dtype, pack_halo):
    graph = random_graph(300, 900, 5)
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, 300 * 6 * np.dtype(dtype).itemsize, dtype=np.uint8)
    features = bits.view(dtype).reshape(300, 6)  # NaN patterns included
    options = {"features": features, "pack_halo": pack_halo, "check_finite": False}
    store = write(graph, tmp_path, WriteBudget(block_bytes=500), **options)
    store.verify()
    nodes = rng.integers(0, 300, 77)
    expected = features.astype(np.dtype(dtype).newbyteorder("<"))[store.original_nid[nodes]]
    assert store.features.dtype == expected.dtype and store.features.dim == 6 and not store.features.is_sparse
    assert store.features.read(nodes).tobytes() == expected.tobytes()
    out = np.empty((77, 6), expected.dtype)
    assert store.features.read(nodes, out=out) is out
    assert out.tobytes() == expected.tobytes()
    for part, hops in [(0, 1), (4, 1), (2, 0), (3, 2)]:
        loaded = store.load_part(part, hops)
        assert store.load_features(loaded).tobytes() == store.features.read(loaded.nodes).tobytes()


@pytest.mark.parametrize("pack_halo", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.bool_])
def test_sparse_rows_come_out_bit_for_bit(no_disk_wait, tmp_path, dtype, pack_halo):
    scipy = pytest.importorskip("scipy.sparse", reason="the extra [test] is not installed: scipy")
    graph = random_graph(200, 700, 4)
    matrix = scipy.random(200, 50, 0.1, "csr", random_state=0)
    matrix.data = (matrix.data * 100 + 1).astype(dtype)
    store = write(graph, tmp_path, WriteBudget(block_bytes=300), features=matrix, pack_halo=pack_halo)
    store.verify()
    assert store.features.is_sparse and store.features.dim == 50 and store.features.dtype == dtype
    nodes = np.random.default_rng(0).integers(0, 200, 63)
    rows = store.features.read(nodes)
    expected = scipy.csr_matrix((matrix.data.astype(float), matrix.indices, matrix.indptr), (200, 50))[
        store.original_nid[nodes]
    ]  # scipy has no float16
    assert rows.indptr.dtype == np.int64 and rows.indices.dtype == np.int32
    assert np.array_equal(rows.indptr, expected.indptr) and np.array_equal(rows.indices, expected.indices)
    assert rows.data.tobytes() == expected.data.astype(dtype).tobytes()
    out = np.full((63, 50), 1, dtype)
    assert np.array_equal(rows.dense(out), expected.toarray())
    loaded = store.load_part(1)
    assert store.load_features(loaded).data.tobytes() == store.features.read(loaded.nodes).data.tobytes()
    assert np.array_equal(store.load_features(loaded).dense(), store.features.read(loaded.nodes).dense())


def test_labels_masks_and_edge_features_follow_their_nodes_and_edges(no_disk_wait, tmp_path):
    graph = random_graph(100, 400, 3, to_undirected=True)
    rng = np.random.default_rng(2)
    labels = rng.integers(-1, 5, 100).astype(np.int16)
    masks = {"train": rng.random(100) < 0.5, "test": rng.random(100) < 0.3}
    edge_features = rng.random((400, 3)).astype(np.float16)
    store = write(graph, tmp_path, labels=labels, masks=masks, edge_features=edge_features, edge_weight=graph.edge_ids)
    assert store.labels.dtype == np.int64
    assert np.array_equal(store.labels, labels[store.original_nid])
    assert sorted(store.masks) == ["test", "train"]
    for name, mask in masks.items():
        assert store.masks[name].dtype == bool and np.array_equal(store.masks[name], mask[store.original_nid])
    assert store.edge_weight.dtype == np.float32
    assert np.array_equal(store.edge_features, edge_features[store.edge_weight.astype(int)])


@pytest.mark.parametrize("block_bytes", [12, 1 << 20])
def test_weights_of_each_row_are_added_up(no_disk_wait, tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(rows, "_EDGE_BLOCK_BYTES", block_bytes)  # 3 edges: rows begin and end within blocks
    graph = random_graph(100, 400, 3, to_undirected=True)
    weight = np.random.default_rng(0).uniform(0.5, 2, 400)
    store = write(graph, tmp_path, edge_weight=weight)
    expected = [store.edge_weight[begin:end].sum(dtype=np.float64) for begin, end in pairwise(store.csc.indptr)]
    assert store.weighted_degree.dtype == np.float32
    assert np.allclose(store.weighted_degree, expected, rtol=1e-6, atol=0)


def test_labels_unknown_as_nan_and_several_labels(no_disk_wait, tmp_path):
    graph = random_graph(10, 20, 2)
    labels = np.array([np.nan, 1, 2, 0, np.nan, 3, 1, 1, 0, 2])[:, None]
    store = write(graph, tmp_path / "one", labels=labels)
    assert store.labels.tolist() == np.nan_to_num(labels[:, 0], nan=-1)[store.original_nid].tolist()
    several = np.random.default_rng(0).random((10, 4)) < 0.5
    store = write(graph, tmp_path / "many", labels=several)
    assert store.labels.dtype == np.float32 and np.array_equal(store.labels, several[store.original_nid])


@pytest.mark.parametrize("ids", [[70, -3, 10**12, 5], [7, 2**63 + 5, 1, 0], ["ann", "bøb", "", "dee" * 900]])
def test_user_ids_are_kept(no_disk_wait, tmp_path, ids):
    users = np.array(ids, np.uint64 if 2**63 + 5 in ids else None)
    edges = {name: users[ends] for name, ends in (("src", [0, 1, 2, 3]), ("dst", [1, 2, 3, 0]))}
    pq.write_table(pa.table(edges), tmp_path / "edges.parquet")
    stream = open_edge_stream(tmp_path / "edges.parquet", relabel=True, num_nodes=4)
    store = write_partition_store(tmp_path / "store", stream, SmallGraph(4, [], [1, 0, 1, 0], 2).given)
    store.verify()
    assert store.user_ids(store.store_nid).tolist() == ids
    assert sum(path.stat().st_size for path in store.root.glob("user_id*")) < 5000
    one = np.array([2])
    assert store.user_ids(store.store_nid[one]).tolist() == [ids[2]]


def test_a_store_is_pickled_by_its_path(no_disk_wait, tmp_path):
    graph = random_graph(50, 100, 2)
    store = write(graph, tmp_path, features=np.ones((50, 40_000), np.float32))
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).csc.indices, store.csc.indices)


def test_arrays_are_plain_npy_files(no_disk_wait, tmp_path):
    store = write(random_graph(50, 100, 2), tmp_path, features=np.ones((50, 3), np.float16))
    for path in store.root.glob("*.npy"):
        array = np.load(path)
        entry = store.manifest["files"][path.stem]
        assert list(array.shape) == entry["shape"] and array.dtype == np.dtype(entry["dtype"])
    assert not store.csc.indices.flags.writeable and type(store.csc.indices) is np.ndarray


def test_ids_outside_the_store_are_refused(no_disk_wait, tmp_path):
    store = write(random_graph(50, 100, 2), tmp_path, features=np.ones((50, 3), np.float16))
    for nodes in ([-1], [50], [0.5]):
        with pytest.raises(ValueError, match="node ids must be"):
            store.features.read(np.array(nodes))
    with pytest.raises(ValueError, match=said("part [0, 2) 2")):
        store.load_part(2)
    with pytest.raises(ValueError, match="hops must be"):
        store.load_part(0, -1)


def owned_rows(store, part, pack_halo):
    """{file: rows} of what a part owns or lists as halo; files of any other row may be lost."""
    begin, end = store.part_offsets[part : part + 2]
    edges = range(store.csc.indptr[begin], store.csc.indptr[end])
    halo = range(*np.load(store.root / "halo_offsets.npy")[part : part + 2])
    code = [] if store.symmetric else range(*np.load(store.root / "halo_code_offsets.npy")[part : part + 2])
    core = list(range(begin, end))
    with_halo = core + store.halo(part).tolist()
    owned = {
        "csc_indptr": [*core, end],
        "csc_indices": edges,
        "halo_nodes": halo,
        "halo_code": code,
        "in_degree": with_halo,
        "features": core if pack_halo else with_halo,
        "original_nid": with_halo,
    }
    return owned | ({"halo_features": halo, "halo_places": halo} if pack_halo else {})


@pytest.mark.parametrize("pack_halo", [False, True])
@pytest.mark.parametrize("to_undirected", [False, True])
def test_a_part_loads_from_what_it_owns_or_lists(no_disk_wait, tmp_path, pack_halo, to_undirected):
    graph = random_graph(120, 400, 4, to_undirected=to_undirected)
    features = np.random.default_rng(0).random((120, 3)) + 1
    store = write(graph, tmp_path, features=features, pack_halo=pack_halo)
    for part in range(store.num_parts):
        root = tmp_path / f"only_{part}"
        root.mkdir()
        owned = owned_rows(store, part, pack_halo)
        for path in store.root.iterdir():
            content = path.read_bytes()
            if path.suffix == ".npy" and not path.stem.endswith("_offsets"):
                array = np.load(path)
                rows = list(owned.get(path.stem, []))
                kept = np.zeros_like(array)
                kept[rows] = array[rows]
                content = content[:128] + kept.tobytes()
            (root / path.name).write_bytes(content)
        alone = PartitionStore.open(root, verify=False)
        for hops in (1, 0):
            expected, found = store.load_part(part, hops), alone.load_part(part, hops)
            assert np.array_equal(found.nodes, expected.nodes)
            assert np.array_equal(found.csc.indptr, expected.csc.indptr)
            assert np.array_equal(found.csc.indices, expected.csc.indices)
            assert np.array_equal(found.degree, expected.degree)
        near = store.load_part(part)
        assert np.array_equal(alone.load_features(near), store.load_features(near))
