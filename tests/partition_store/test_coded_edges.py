"""Coded neighbours: the format as its page says, and every reader gives what it gives of ids."""

import shutil
from dataclasses import replace

import fsspec
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.partition_store import coded_neighbors, publish, published
from lightning_gnnscale.partition_store.edge_code import BLOCK, PADDING, decode, encode, id_bits
from tests.loader.test_typed_batches import description
from tests.partition_store.small_graphs import all_bytes, random_graph
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has", "ignore:.*listed after")
NODES, PARTS = 300, 4


def plainly_decoded(code: bytes, num: int, bits: int) -> list[int]:
    """One block, as the page of the format says."""
    widths, chosen = code[:4], code[4 : 4 + -(-num // 4)]
    values, at = int.from_bytes(code[4 + len(chosen) :], "little"), 0
    before, found = -1, []
    for i in range(num):
        width = widths[chosen[i // 4] >> 2 * (i % 4) & 3]
        before = (before + 1 + (values >> at & ((1 << width) - 1))) % (1 << bits)
        at += width
        found.append(before)
    assert at <= 8 * len(code[4 + len(chosen) :]) < at + 8
    return found


@pytest.mark.parametrize("num_nodes", [1, 2, 255, 256, 257, 1 << 24, (1 << 31) + 5, 1 << 50])
def test_the_code_is_the_one_of_the_page(num_nodes):
    rng, bits = np.random.default_rng(num_nodes % 97), id_bits(num_nodes)
    rows = [np.sort(rng.integers(0, num_nodes, rng.integers(0, 40))) for _ in range(40)]
    near = [np.arange(least := int(rng.integers(num_nodes)), min(num_nodes, least + 70)) for _ in range(10)]
    ids = np.concatenate([*rows, *near, np.full(9, num_nodes - 1), np.zeros(9, np.int64)])
    ids = ids.astype(np.int32 if num_nodes < 1 << 31 else np.int64)
    code, sizes = encode(ids, bits)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    blocks = [ids[first : first + BLOCK].tolist() for first in range(0, len(ids), BLOCK)]
    for block, begin, end in zip(blocks, offsets[:-1], offsets[1:], strict=True):
        assert plainly_decoded(code[begin:end].tobytes(), len(block), bits) == block
    out = np.empty_like(ids)
    assert decode(np.concatenate([code, np.full(PADDING, 255, np.uint8)]), offsets, bits, out)
    assert np.array_equal(out, ids)


def store_of(root, kind, edge_storage):
    if kind == "typed":
        dataset = replace(gs.hetero_graph(**description()), edge_storage=edge_storage)
        return gs.write_partition_store(
            root, dataset.stream, gs.partition(dataset.stream, "spring", 3, evaluate=False), dataset
        )
    graph, rng = random_graph(NODES, 2500, PARTS, 0, to_undirected=kind != "directed"), np.random.default_rng(1)
    columns = {"features": rng.random((NODES, 8)).astype(np.float32), "labels": np.arange(NODES) % 3}
    columns["masks"] = {name: np.arange(NODES) % 3 == at for at, name in enumerate(("train", "val", "test"))}
    if kind == "weighted":
        columns["edge_weight"] = rng.random(2500).astype(np.float32)
    return gs.write_partition_store(root, graph.stream(), graph.given, **columns, edge_storage=edge_storage)


KINDS = ("undirected", "directed", "weighted", "typed")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    return {kind: [store_of(folder / f"{kind}-{how}", kind, how) for how in (None, "delta")] for kind in KINDS}


def same_part(one, other, part, hops):
    return same_graph(one.load_part(part, hops), other.load_part(part, hops))


def same_graph(left, right):
    arrays = [(graph.nodes, *graph.csc, graph.degree, graph.edge_id) for graph in (left, right)]
    return all(np.array_equal(*pair) for pair in zip(*arrays, strict=True))


def used_memory(shape, dtype):
    out = np.empty(shape, dtype)
    out.view(np.uint8)[...] = 0xA5
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_the_same_in_memory_that_was_used(stores, kind):
    for store in stores[kind]:
        parts, pool = range(store.num_parts), BufferPool(1 << 20)
        for hops in (0, 1):
            loaded = [store.load_part(part, hops, used_memory) for part in parts]
            loaded += [store.load_part(part, hops, pool.take) for part in parts]
            assert all(same_graph(store.load_part(one.part, hops), one) for one in loaded)
        held = pool.held_bytes
        del loaded
        again = [store.load_part(part, 1, pool.take) for part in parts]
        assert pool.held_bytes == held > 0
        assert all(same_graph(store.load_part(one.part), one) for one in again)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_any_way_are_those_of_ids(stores, kind):
    plain, coded = stores[kind]
    coded.verify()
    assert "csc_indices" not in coded.manifest["files"] and coded.edge_storage == "delta"
    assert coded.manifest["files"]["csc_code"]["bytes"] < plain.manifest["files"]["csc_indices"]["bytes"] / 2
    assert all(same_part(plain, coded, part, hops) for part in range(plain.num_parts) for hops in (0, 1, 2))
    indices, ids, rng = coded.csc.indices, np.asarray(plain.csc.indices), np.random.default_rng(2)
    assert np.array_equal(coded.whole_csc.indices, ids) and len(indices) == len(ids)
    for first, last in [
        (0, 0),
        (0, 1),
        (BLOCK - 1, BLOCK + 1),
        (BLOCK, 2 * BLOCK),
        (7, len(ids)),
        (len(ids), len(ids)),
    ]:
        assert np.array_equal(indices[first:last], ids[first:last])
    places = rng.integers(0, len(ids), 99)
    assert np.array_equal(indices[places], ids[places])
    for count in (0, 1, 30, plain.num_nodes):
        nodes = np.sort(rng.choice(plain.num_nodes, count, replace=False))
        begin, end = plain.csc.indptr[nodes], plain.csc.indptr[nodes + 1]
        found = coded_neighbors.read_runs(indices, begin, end)
        assert np.array_equal(found, coded_neighbors.read_runs(plain.csc.indices, begin, end))


SAMPLERS = {
    "undirected": gs.NeighborSampler([3, 2]),
    "directed": gs.LayerwiseSampler([20, 20]),
    "weighted": gs.NeighborSampler([3, 2], weighted=True),
    "typed": gs.NeighborSampler({"*": [3, 3]}, temporal_strategy="uniform"),
}


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_ids(stores, kind, scope):
    if scope == "graph" and kind == "directed":
        scope = "part"  # a LayerwiseSampler stays in a part
    found = []
    for store in stores[kind]:
        module = gs.PartitionDataModule(store, sampler=SAMPLERS[kind], batch_size=16, scope=scope, source="threads")
        module.setup("fit")
        batches = list(module.train_dataloader())
        found.append([{n: v for n, v in vars(b).items() if isinstance(v, torch.Tensor)} for b in batches])
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_full_graph_and_exact_outputs_are_those_of_ids(stores):
    outputs, batches = [], []
    for store in stores["undirected"]:
        torch.manual_seed(0)
        model = gs.NodeClassifier(gs.model.GraphSAGE(8, 4, 3, 2), lr=0.1)
        outputs.append(model.predict_nodes(store, np.arange(40)))
        module = gs.FullGraphDataModule(store)
        module.setup("fit")
        batches.append(next(iter(module.train_dataloader())))
    assert outputs[0].keys() == outputs[1].keys() and len(outputs[0])
    assert all(np.array_equal(outputs[0][name], outputs[1][name]) for name in outputs[0])
    assert all(torch.equal(*(getattr(batch, name) for batch in batches)) for name in ("indices", "indptr", "n_id"))


def test_a_published_store_fetches_the_code_of_what_it_reads(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "BLOCK_BYTES", 256)
    monkeypatch.setenv("GNNSCALE_FETCHED", str(tmp_path / "fetched"))
    plain, coded = stores["directed"]
    memory = fsspec.filesystem("memory")
    if memory.exists("/coded"):
        memory.rm("/coded", recursive=True)
    publish(coded.root, "memory://coded/one")
    fetched = gs.PartitionStore.open("memory://coded/one")
    assert same_part(plain, fetched, 1, 1)
    held = (fetched.root / "csc_code.npy").read_bytes()
    assert held != (coded.root / "csc_code.npy").read_bytes()  # of that part alone
    nodes = np.array([3, 4, 200])
    csc = fetched.csc_of_parts([2], nodes)
    begin, end = plain.csc.indptr[nodes], plain.csc.indptr[nodes + 1]
    assert np.array_equal(csc.indices.read(begin, end), coded_neighbors.read_runs(plain.csc.indices, begin, end))
    assert np.array_equal(fetched.whole_csc.indices, plain.csc.indices)


def test_an_update_keeps_the_code(stores, tmp_path):
    rng = np.random.default_rng(5)
    new = rng.integers(0, NODES, (2, 60))
    made = []
    for store in stores["directed"]:
        target = np.repeat(np.arange(NODES), np.diff(store.csc.indptr))
        gone = store.original_nid[np.stack([store.csc.indices[:40:13], target[:40:13]])]
        version = gs.update_store(store, edges=new, removed_edges=gone, root=tmp_path / store.root.name)
        version.verify()
        made.append(version)
    assert made[1].edge_storage == "delta" and np.array_equal(made[1].csc.indices[:], made[0].csc.indices)
    assert all(same_part(*made, part, 1) for part in range(PARTS))


def test_a_kill_while_coding_goes_on_to_the_same_bytes(stores, tmp_path, monkeypatch):
    whole, calls = all_bytes(stores["weighted"][1].root), []

    def killed(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(*given)

    monkeypatch.setattr(coded_neighbors, "_AT_ONCE", 4 * BLOCK)
    monkeypatch.setattr(coded_neighbors, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        store_of(tmp_path / "store", "weighted", "delta")
    assert all_bytes(store_of(tmp_path / "store", "weighted", "delta").root) == whole


def test_damage_and_wrong_words_are_one_line(stores, tmp_path):
    with pytest.raises(ValueError, match=said("edge_storage null delta vbyte")):
        store_of(tmp_path / "wrong", "directed", "vbyte")
    shutil.copytree(stores["directed"][1].root, tmp_path / "store")
    path = tmp_path / "store" / "csc_code.npy"
    content = bytearray(path.read_bytes())
    content[140] ^= 8
    path.write_bytes(content)
    store = gs.PartitionStore.open(tmp_path / "store")
    with pytest.raises(PartitionStoreError, match=said("csc_code.npy overwrite=True")):
        store.load_part(0)
    unchecked = gs.PartitionStore.open(tmp_path / "store", verify=False)
    content[128:132] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    with pytest.raises(PartitionStoreError, match=said("csc_code.npy damaged")):
        unchecked.load_part(0)
