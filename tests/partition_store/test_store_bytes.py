"""A store's bytes are a function of input and options alone; odd graphs have stores like any other."""

import tracemalloc

import numpy as np
import pytest
from scipy.sparse import coo_matrix, csc_array, csc_matrix, csr_matrix

from lightning_gnnscale.dataset import value_checks as values
from lightning_gnnscale.dataset.columns import Columns
from lightning_gnnscale.partition_store import WriteBudget, array_file, inputs, write_partition_store
from lightning_gnnscale.partition_store.buckets import BucketLayout
from lightning_gnnscale.partition_store.disk import disk_bytes
from lightning_gnnscale.partition_store.inputs import check_inputs
from tests.partition_store.small_graphs import TINY, Given, SmallGraph, all_bytes, random_graph
from tests.says import said

ODD = {
    "no nodes": SmallGraph(0, [], [], 2),
    "one node": SmallGraph(1, [], [0], 1),
    "one node with a self-loop": SmallGraph(1, [(0, 0), (0, 0)], [0], 1, to_undirected=True),
    "isolated nodes": SmallGraph(6, [(0, 5)], [0, 1, 2, 0, 1, 2], 3),
    "a part without nodes": SmallGraph(4, [(0, 1), (1, 2), (3, 0)], [0, 0, 3, 3], 4),
    "self-loops removed": SmallGraph(3, [(0, 0), (1, 1), (0, 1)], [0, 1, 1], 2, remove_self_loops=True),
    "duplicates": SmallGraph(3, [(0, 1), (0, 1), (1, 0), (1, 2), (1, 2)], [0, 1, 1], 2, to_undirected=True),
    "duplicates as given": SmallGraph(3, [(0, 1), (0, 1), (1, 2), (1, 2)], [0, 1, 1], 2),
    "a hub": SmallGraph(40, [(i, 7) for i in range(40)], [i % 3 for i in range(40)], 3, to_undirected=True),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(no_disk_wait, tmp_path, name):
    graph = ODD[name]
    features = np.ones((graph.num_nodes, 2), np.float32)
    for budget, folder in ((TINY, "tiny"), (WriteBudget(), "large")):
        store = write_partition_store(
            tmp_path / folder, graph.stream(), graph.given, features=features, pack_halo=True, budget=budget
        )
        store.verify()
        for part in range(graph.num_parts):
            for hops in range(3):
                loaded = store.load_part(part, hops)
                assert store.load_features(loaded).shape == (loaded.num_local, 2)
                assert loaded.symmetrised().csc.num_rows == loaded.num_local
    assert all_bytes(tmp_path / "tiny") == all_bytes(tmp_path / "large")


@pytest.mark.parametrize("to_undirected", [False, True])
def test_buffers_and_chunks_do_not_change_bytes(no_disk_wait, tmp_path, to_undirected):
    graph = random_graph(500, 3000, 7, to_undirected=to_undirected)
    rng = np.random.default_rng(0)
    arrays = {
        "features": rng.random((500, 5)),
        "labels": rng.integers(0, 3, 500),
        "edge_features": rng.random((3000, 2)),
        "pack_halo": True,
    }
    budgets = [
        WriteBudget(),
        WriteBudget(spill_edges=100, sort_edges=50, block_bytes=1000, checkpoint_bytes=5000),
        WriteBudget(spill_edges=777, sort_edges=1 << 20, block_bytes=100),
    ]
    for i, (budget, chunk_edges) in enumerate(zip(budgets, (1 << 20, 64, 1000), strict=True)):
        write_partition_store(tmp_path / str(i), graph.stream(chunk_edges), graph.given, budget=budget, **arrays)
    assert all_bytes(tmp_path / "0") == all_bytes(tmp_path / "1") == all_bytes(tmp_path / "2")


def test_bytes_carry_neither_place_nor_time(no_disk_wait, tmp_path):
    graph = random_graph(20, 50, 2)
    roots = [tmp_path / "a", tmp_path / "deeper" / "b"]
    for root in roots:
        write_partition_store(root, graph.stream(), graph.given)
    assert all_bytes(roots[0]) == all_bytes(roots[1])
    assert str(tmp_path).encode() not in b"".join(all_bytes(roots[0]).values())


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_the_width_of_csr_pointers_does_not_matter(no_disk_wait, tmp_path, dtype):
    graph, matrix = random_graph(200, 400, 3), csr_matrix(np.random.default_rng(0).random((200, 30)))
    features = (matrix.indptr.astype(dtype), matrix.indices, matrix.data, matrix.shape)
    # A block takes more values than the narrow types can count.
    store = write_partition_store(
        tmp_path / "store", graph.stream(), graph.given, features=features, budget=WriteBudget(block_bytes=1 << 20)
    )
    assert np.array_equal(store.features.read(store.store_nid[:]).dense(), matrix.toarray())


def test_edge_features_that_lie_in_fortran_order_are_read_a_block_at_a_time(no_disk_wait, tmp_path, monkeypatch):
    for module, block in ((inputs, "_HASH_BLOCK"), (array_file, "_BLOCK_BYTES"), (values, "_BLOCK_VALUES")):
        monkeypatch.setattr(module, block, 1 << 16)
    graph, rows = random_graph(100, 50_000, 3), np.random.default_rng(0).random((50_000, 40))
    budget, peaks = WriteBudget(spill_edges=1 << 10, sort_edges=1 << 10, block_bytes=1 << 16), []
    for name, edge_features in (("compiled", rows), ("c", rows), ("fortran", np.asfortranarray(rows))):
        stream = graph.stream()
        tracemalloc.start()
        write_partition_store(tmp_path / name, stream, graph.given, edge_features=edge_features, budget=budget)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + rows.nbytes / 4
    assert all_bytes(tmp_path / "c") == all_bytes(tmp_path / "fortran")


def test_a_block_of_quantised_rows_counts_the_floats_that_they_are_made_from(no_disk_wait, tmp_path):
    graph, rows, peaks = random_graph(4000, 8000, 3), np.ones((4000, 256), np.float16), []
    for name, storage in (("compiled", "int8"), ("int8", "int8"), ("float16", None)):
        options = {"features": rows, "feature_storage": storage, "budget": WriteBudget(1 << 10, 1 << 10, 1 << 20)}
        tracemalloc.start()
        write_partition_store(tmp_path / name, graph.stream(), graph.given, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[2] + (3 << 19)


def test_a_row_of_a_bucket_is_an_int32_whatever_the_number_of_nodes():
    for num_nodes in (2**31 + 5, 2**32 + 1, 2**33):
        layout = BucketLayout.plan(num_nodes, 10**6, 1 << 23)
        assert layout.shift <= 31 and layout.num_buckets << layout.shift >= num_nodes


@pytest.mark.parametrize("form", [csc_matrix, csr_matrix, coo_matrix, csc_array])
def test_sparse_features_of_any_format_mean_the_same(no_disk_wait, tmp_path, form):
    graph = random_graph(20, 50, 2)
    features = np.where(np.random.default_rng(0).random((20, 20)) < 0.2, np.arange(400).reshape(20, 20), 0)
    store = write_partition_store(tmp_path / "store", graph.stream(), graph.given, features=form(features))
    assert np.array_equal(store.features.read(store.store_nid).dense(), features)


def test_the_disk_check_counts_packed_halos(no_disk_wait, tmp_path):
    graph = random_graph(200, 2000, 8)
    features, labels = np.ones((200, 64), np.float32), np.zeros(200, np.int8)
    given = graph.given
    inputs = check_inputs(
        graph.stream(), given, Columns(features=features, labels=labels, edge_weight=np.ones(2000, np.float16)), True
    )
    store = write_partition_store(
        tmp_path / "store", graph.stream(), given, features=features, labels=labels,
        edge_weight=np.ones(2000, np.float16), pack_halo=True,
    )  # fmt: skip
    assert sum(path.stat().st_size for path in store.root.glob("*.npy")) < disk_bytes(inputs) + 128 * 30  # heads


def test_many_parts_and_long_rows(no_disk_wait, tmp_path):
    rng = np.random.default_rng(3)
    num_nodes, num_edges = 3000, 20_000
    edges = np.stack([rng.integers(0, num_nodes, num_edges), rng.zipf(1.5, num_edges) % num_nodes], axis=1)
    part_id = rng.integers(0, 1024, num_nodes)
    graph = SmallGraph(num_nodes, [tuple(edge) for edge in edges.tolist()], part_id.tolist(), 1024, to_undirected=True)
    store = write_partition_store(
        tmp_path / "store", graph.stream(), graph.given, budget=WriteBudget(spill_edges=4000, sort_edges=1000)
    )
    store.verify()
    directed_edges = {(u, v) for u, v in graph.edges} | {(v, u) for u, v in graph.edges}
    assert store.num_edges == len(directed_edges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": Given(np.zeros(5, np.int32), 2)}, "part_id (20,), (5,)"),
        ({"p": Given(np.full(20, 2), 2)}, "part_id [0, 2) 2 2"),
        ({"p": Given(np.zeros(20, np.int32), 0)}, "num_parts 1 0"),
        ({"p": Given(np.zeros(20, np.int32), 2.7)}, "num_parts 1 2.7"),
        ({"p": Given(np.full(20, 0.7), 2)}, "part_id integers float64"),
        ({"p": Given(np.full(20, 2**32), 2)}, "part_id [0, 2) 4294967296"),
        ({"features": np.ones(20)}, "features (20, columns (20,)"),
        ({"features": np.ones((19, 3))}, "features (20, columns (19, 3)"),
        ({"features": "/no/such/features.npy"}, "features /no/such/features.npy"),
        ({"features": np.full((20, 2), "x")}, "features booleans"),
        ({"labels": np.ones(3)}, "labels must have shape"),
        ({"labels": np.full(20, 0.5)}, "labels must be whole numbers"),
        ({"masks": {"train": np.arange(5)}}, "masks['train'] (20,), int64"),
        ({"masks": {"../x": np.ones(20, bool)}}, "name plain word"),
        ({"edge_weight": np.ones(3)}, "edge_weight (50), (3,)"),
        ({"features": (np.arange(21), np.full(20, 9), np.ones(20), (20, 4))}, "row 0 [0, 4)"),
        ({"features": (np.arange(21) * 2, np.full(40, 1), np.ones(40), (20, 4))}, "row 0"),
        ({"features": (np.arange(21), np.zeros(5), np.ones(5), (20, 4))}, "CSR indptr rise"),
        ({"features": (np.r_[0:10, 5, 11:21].astype(np.uint32), np.zeros(20, int), np.ones(20), (20, 4))}, "must rise"),
    ],
)
def test_arguments_that_do_not_fit_are_named(no_disk_wait, tmp_path, change, message):
    graph = random_graph(20, 50, 2)
    arguments = {"p": graph.given, **change}
    with pytest.raises(ValueError, match=said(message)):
        write_partition_store(tmp_path / "store", graph.stream(), **arguments)


@pytest.mark.parametrize("to_undirected", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_bucketed_edges_go_as_they_are_sorted(no_disk_wait, tmp_path, to_undirected, weights):
    graph = random_graph(2000, 40_000, 4, to_undirected=to_undirected)
    arrays = {"edge_weight": graph.edge_ids} if weights else {}
    seen, folder = {}, tmp_path / "store.partial"

    def look(what, done, total):
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.npy")}
        runs = sum(size for name, size in sizes.items() if name.startswith("run_"))
        seen.setdefault(what, []).append((runs, sum(sizes.values())))

    write_partition_store(
        tmp_path / "store", graph.stream(), graph.given, progress=look,
        budget=WriteBudget(spill_edges=5000, sort_edges=1000), **arrays,
    )  # fmt: skip
    at_first, left = seen["bucketing edges"][-1][0], [runs for runs, _ in seen["sorting rows"]]
    assert left == sorted(left, reverse=True)
    assert sum(runs > at_first * 0.6 for runs in left) < len(left) * 0.6  # they go all along
    assert seen["listing halos"][0][0] == 0
    inputs = check_inputs(graph.stream(), graph.given, Columns(edge_weight=arrays.get("edge_weight")), False)
    most = max(total for sizes in seen.values() for _, total in sizes)
    assert most < disk_bytes(inputs) + 128 * 60  # heads
    if not weights:  # nothing that the final store has not, but for the bucketed edges
        assert disk_bytes(inputs) < 1.6 * at_first + sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
