"""Features stored in fewer bytes: what the store holds, what comes out, and what is refused."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.dataset.columns import Columns
from lightning_gnnscale.dataset.feature_storage import FEATURE_STORAGE, feature_bytes
from lightning_gnnscale.dataset.graph_change import GraphChange
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import (
    DenseFeatures,
    PartitionStore,
    WriteBudget,
    features_of_part,
    input_fingerprint,
    update_store,
    write_partition_store,
)
from lightning_gnnscale.partition_store.disk import disk_bytes
from lightning_gnnscale.partition_store.inputs import check_inputs
from lightning_gnnscale.triton_kernels.gather_rows import RowCode
from tests.oracles.gather_rows import decode_codes_reference, encode_codes_reference
from tests.partition_store.small_graphs import all_bytes, random_graph
from tests.says import said
from tests.tiers import all_pairs

GRAPH = random_graph(90, 500, 4, to_undirected=True)
BITS = {"bfloat16": 16, "int8": 8, "int4": 4}


def rows_of(dim, dtype=np.float32):
    rows = np.random.default_rng(dim).standard_normal((90, dim)) * np.exp(np.arange(90) % 7)[:, None]
    rows[::9] = 0
    return rows.astype(dtype)


def write(root, features, graph=GRAPH, **options):
    return write_partition_store(root, graph.stream(), graph.given, features=features, **options)


def expected(features, storage):
    """What comes out of a store, in original order, by plain arithmetic."""
    if storage in BITS:
        code = RowCode(features.shape[1], BITS[storage])
        return decode_codes_reference(encode_codes_reference(features, code), code)
    return features.astype(storage or features.dtype)


@all_pairs
@pytest.mark.parametrize("pack_halo", [False, True])
@pytest.mark.parametrize("storage", [None, *FEATURE_STORAGE])
@pytest.mark.parametrize("dim", [1, 5, 63, 64, 128])
def test_rows_come_out_of_every_storage(no_disk_wait, tmp_path, storage, dim, pack_halo):
    given = rows_of(dim)
    budget = WriteBudget(spill_edges=60, sort_edges=150, block_bytes=330, checkpoint_bytes=1)
    store = write(tmp_path / "store", given, feature_storage=storage, pack_halo=pack_halo, budget=budget)
    store.verify()
    wanted = expected(given, storage)[store.original_nid]
    nodes = np.random.default_rng(0).integers(0, 90, 200)
    table = store.features
    assert (table.num_rows, table.dim, table.dtype) == (90, dim, wanted.dtype)
    assert table.read(nodes).tobytes() == wanted[nodes].tobytes()
    assert table.nbytes == table.array.nbytes == feature_bytes(given, storage)
    assert (tmp_path / "store" / "features.npy").stat().st_size == 128 + table.nbytes
    copied = replace(table, array=np.array(table.array))
    assert copied.read(nodes).tobytes() == wanted[nodes].tobytes() and copied.dim == dim
    assert pickle.loads(pickle.dumps(copied)).read(nodes).tobytes() == wanted[nodes].tobytes()
    for part in range(4):
        loaded = store.load_part(part)
        assert store.load_features(loaded).tobytes() == wanted[loaded.nodes].tobytes()
        of_part = features_of_part(store.part_features, part)
        assert of_part.read(nodes).tobytes() == wanted[nodes].tobytes()
        if storage in BITS:
            half = np.empty((200, dim), np.float16)
            assert of_part.read(nodes, half).tobytes() == wanted[nodes].astype(np.float16).tobytes()
            upper = torch.empty(200, dim, dtype=torch.bfloat16)
            for column in (table, of_part):
                assert torch.equal(column.read(nodes, upper), torch.from_numpy(wanted[nodes]).bfloat16())
    assert ("halo_features" in store.manifest["files"]) == pack_halo
    assert store.feature_storage == storage


def test_a_row_is_one_run_of_the_bytes_that_are_promised(no_disk_wait, tmp_path):
    sizes = {
        storage: write(tmp_path / str(storage), rows_of(128), feature_storage=storage).features.nbytes // 90
        for storage in (None, *FEATURE_STORAGE)
    }
    assert sizes == {None: 512, "float32": 512, "float16": 256, "bfloat16": 256, "int8": 132, "int4": 68}


def test_nothing_said_changes_no_byte(no_disk_wait, tmp_path):
    store = write(tmp_path / "plain", rows_of(5))
    assert store.manifest["feature_storage"] is None
    assert write(tmp_path / "int8", rows_of(5), feature_storage="int8").manifest["feature_storage"] == "int8"
    options = (GRAPH.stream(), "given", 4, 0, {})
    plain = input_fingerprint(*options, Columns(features=rows_of(5)))
    assert plain == store.fingerprint
    others = {
        input_fingerprint(*options, Columns(features=rows_of(5), feature_storage=storage))
        for storage in FEATURE_STORAGE
    }
    assert len({plain, *others}) == 1 + len(FEATURE_STORAGE)
    with pytest.raises(PartitionStoreError, match="overwrite=True"):
        write(tmp_path / "plain", rows_of(5), feature_storage="int8")


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "int8", "int4"])
def test_buffers_and_interruptions_change_no_byte(no_disk_wait, tmp_path, storage):
    options = {"features": rows_of(7), "pack_halo": True, "feature_storage": storage}
    whole = all_bytes(write(tmp_path / "whole", **options).root)
    budget = WriteBudget(spill_edges=60, sort_edges=150, block_bytes=200, checkpoint_bytes=1)
    calls = []
    assert all_bytes(write(tmp_path / "b", budget=budget, progress=lambda *c: calls.append(c), **options).root) == whole
    steps = [i for i, (what, _, _) in enumerate(calls) if "features" in what]
    assert len(steps) > 10
    for last in steps[::3]:
        left = [last]

        def stop(*call, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / f"at {last}", budget=budget, progress=stop, **options)
        assert all_bytes(write(tmp_path / f"at {last}", budget=budget, **options).root) == whole


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_sparse_values_are_stored_as_told(no_disk_wait, tmp_path, storage, dtype):
    dense = rows_of(9) * (np.arange(9) % 3 == 0)
    matrix = csr_matrix(dense)
    matrix = (matrix.indptr, matrix.indices, matrix.data.astype(dtype), matrix.shape)
    store = write(tmp_path / "store", matrix, feature_storage=storage, pack_halo=True)
    assert store.features.data.dtype == storage
    loaded = store.load_part(1)
    rows = features_of_part(store.part_features, 1).read(loaded.nodes)
    wanted = dense.astype(dtype).astype(storage)[store.original_nid[loaded.nodes]]
    np.testing.assert_array_equal(rows.dense(), wanted)


@pytest.mark.parametrize(
    ("features", "storage", "message"),
    [
        (rows_of(3), "int9", "feature_storage null one float32 float16 bfloat16 int8 int4 'int9'"),
        (rows_of(3).astype(np.uint8), "int8", "feature_storage=int8 floats uint8"),
        (rows_of(3).astype(np.int64), "float16", "floats features int64"),
        (csr_matrix(rows_of(3)), "int8", "(CSR) float16 float32"),
        (None, "int4", "feature_storage=int4 features stored"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(tmp_path, features, storage, message):
    for refuse in (
        lambda: write(tmp_path / "store", features, feature_storage=storage),
        lambda: GraphDataset("graph", GRAPH.stream(), features, feature_storage=storage),
    ):
        with pytest.raises(ValueError, match=said(message)) as error:
            refuse()
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sparse", [False, True])
def test_values_that_float16_does_not_hold_are_named(no_disk_wait, tmp_path, sparse):
    rows = rows_of(3, np.float64)
    rows[4, 1] = 7e4
    given = csr_matrix(rows) if sparse else rows
    with pytest.raises(ValueError, match=said("row 4 1 70000.0 float16 65504")):
        write(tmp_path / "store", given, feature_storage="float16")
    rows[4, 1] = 3.4e38  # float32 has it
    with pytest.raises(ValueError, match=said("row 4 1 3.4e+38 bfloat16 3.38953e+38")):
        write(tmp_path / "store", rows, feature_storage="bfloat16")
    rows[4, 1] = 1e39
    with pytest.raises(ValueError, match=said("row 4 1 1e+39 float32 3.40282e+38")):
        write(tmp_path / "store", rows, feature_storage="int8")
    assert not (tmp_path / "store").exists() and not (tmp_path / "store.partial").exists()


@pytest.mark.parametrize("storage", FEATURE_STORAGE)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused_as_ever(no_disk_wait, tmp_path, storage, bad):
    rows = rows_of(3)
    rows[7, 2] = bad
    with pytest.raises(ValueError, match=said(f"features 7 2 {bad}")):
        write(tmp_path / "store", rows, feature_storage=storage)
    store = write(tmp_path / "store", rows, feature_storage=storage, check_finite=False)
    found = store.features.read(store.store_nid[[6, 7]])
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all() == (storage in ("int8", "int4"))


def test_a_table_of_other_bytes_than_its_code_is_no_table(no_disk_wait, tmp_path):
    with pytest.raises(ValueError, match=said("rows 5 8 uint8 (num_rows, 12)")):
        DenseFeatures(np.zeros((3, 5), np.float32), RowCode(5, 8))
    store = write(tmp_path / "store", rows_of(5), feature_storage="int8")
    path = store.root / "manifest.json"
    path.write_text(json.dumps(store.manifest | {"feature_dim": 50}))
    with pytest.raises(PartitionStoreError, match=said("manifest.json damaged")):
        PartitionStore.open(store.root)


def test_disk_and_plans_count_what_is_stored():
    given = rows_of(128)
    sizes = {}
    for storage in (None, "float16", "bfloat16", "int8", "int4"):
        inputs = check_inputs(GRAPH.stream(), GRAPH.given, Columns(features=given, feature_storage=storage), False)
        dataset = GraphDataset("graph", GRAPH.stream(), given, feature_storage=storage)
        sizes[storage] = dataset.feature_bytes, disk_bytes(inputs)
        assert dataset.batch_row_bytes == (128 * 6 if storage == "float16" else 512)
    assert [size for size, _ in sizes.values()] == [90 * 512, 90 * 256, 90 * 256, 90 * 132, 90 * 68]
    assert sizes[None][1] - sizes["int8"][1] == 90 * (512 - 132)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_many_halos_are_packed_first(no_disk_wait, tmp_path, sparse):
    features = rows_of(8) * (np.arange(720).reshape(90, 8) % 3 > 0)
    budget = WriteBudget(block_bytes=330, checkpoint_bytes=1)
    given = csr_matrix(features) if sparse else features
    store = write(tmp_path / "store", given, pack_halo=True, budget=budget)
    halos, table = [store.halo(part) for part in range(store.num_parts)], store.part_features
    count = np.bincount(np.concatenate(halos), minlength=90)
    np.testing.assert_array_equal(table.halo_count, count)
    assert len(set(count)) > 1
    for part, halo in enumerate(halos):
        first, last = table.halo_offsets[part : part + 2]
        packed = halo[np.argsort(table.halo_places[first:last])]
        np.testing.assert_array_equal(packed, sorted(halo, key=lambda node: (-count[node], node)))
        rows = table.packed.read(np.arange(first, last))
        rows = rows.dense() if sparse else rows
        np.testing.assert_array_equal(rows, features[store.original_nid[packed]])


def test_tensors_of_bfloat16_are_stored_as_they_are_and_updated(no_disk_wait, tmp_path):
    given = torch.from_numpy(rows_of(5)).bfloat16()
    store = write(tmp_path / "store", given, feature_storage="bfloat16")
    assert store.features.array.shape == (90, 12)  # 2 bytes a value, and 2 more of an odd number
    changed = torch.full((2, 5), 1.0 + 2**-8)  # a tie: rounded to the even 1
    after = update_store(store, GraphChange(nodes=[3, 90], features=changed), tmp_path / "after")
    rows = torch.cat([given, torch.ones(1, 5).bfloat16()])
    rows[3] = 1
    found = torch.empty(91, 5, dtype=torch.bfloat16)
    after.verify()
    assert torch.equal(after.features.read(after.store_nid, found), rows)
    assert torch.equal(torch.from_numpy(after.features.read(after.store_nid)), rows.float())
