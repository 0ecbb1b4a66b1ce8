"""Evaluation in proportion: reads in runs of the file, closures over parts, a sample of the validation nodes."""

import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from community_graph import small_dataset

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.datamodule import StoreLayerSource, evaluation, layer_source
from lightning_gnnscale.datamodule.evaluation import evaluation_work, sample_order
from lightning_gnnscale.datamodule.layer_source import FileRows
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import edge_bins
from lightning_gnnscale.model.inference import layerwise_inference
from lightning_gnnscale.model.layer_source import NodeSet, closure
from lightning_gnnscale.scratch import open_scratch
from tests.says import said
from tests.tiers import all_pairs


@pytest.fixture
def store(store_root):
    return gs.PartitionStore.open(store_root)


@pytest.fixture
def source(store, tmp_path):
    made = StoreLayerSource(store, list(range(store.num_parts)), open_scratch(tmp_path / "s", None, None))
    yield made
    made.close()


def classifier(dm, kind=gs.model.GraphSAGE):
    torch.manual_seed(0)
    return gs.NodeClassifier(kind(dm.num_features, 16, dm.num_classes, num_layers=2), lr=0.02)


def trainer(**options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options}
    return L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", **options)


@all_pairs
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8])
@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize(("gap", "read"), [(0, 1), (8, 64), (1 << 16, 1 << 22)])
@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("short", [0, 1 << 16])  # reads that are announced
def test_rows_read_in_runs_are_those_of_plain_indexing(tmp_path, monkeypatch, dtype, dim, gap, read, past_cache, short):
    monkeypatch.setattr(layer_source, "_SHORT_READ", short)
    monkeypatch.setattr(layer_source, "GAP_BYTES", gap)
    monkeypatch.setattr(layer_source, "READ_BYTES", read)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 250, (500, dim)).astype(dtype)
    np.save(tmp_path / "rows.npy", rows)
    offset = (tmp_path / "rows.npy").stat().st_size - rows.nbytes
    file = FileRows(tmp_path / "rows.npy", offset, rows.dtype, (dim,), past_cache)
    for nodes in ([], [0], [499], range(500), [5, 3, 3, 499, 0], np.flatnonzero(rng.random(500) < 0.2)):
        nodes = np.asarray(nodes, np.int64)
        assert np.array_equal(file.read(nodes, nodes + 1), rows[nodes])
    begins = np.array([0, 7, 7, 30, 490], np.int64)
    ends = np.array([5, 7, 20, 400, 500], np.int64)
    expected = np.concatenate([rows[begin:end] for begin, end in zip(begins, ends, strict=True)])
    assert np.array_equal(file.read(begins, ends), expected)


@pytest.mark.parametrize("past_cache", [False, True])
def test_expected_rows_are_read_once_and_others_as_ever(tmp_path, past_cache):
    rows = np.random.default_rng(0).random((500, 3), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    file = FileRows(tmp_path / "rows.npy", 128, rows.dtype, (3,), past_cache)
    nodes = np.arange(1, 400, 3)
    for asked in ([nodes[:50], nodes[50:]], [nodes[:50], nodes[51:]], [nodes[:50], nodes[:50]], [nodes[2:], nodes]):
        file.expect(nodes)
        assert all(np.array_equal(file.rows(some), rows[some]) for some in asked)
    file.expect(nodes)
    os.truncate(tmp_path / "rows.npy", 0)
    assert np.array_equal(file.rows(nodes[:100]), rows[nodes[:100]])
    assert np.array_equal(file.rows(nodes[100:]), rows[nodes[100:]])
    with pytest.raises(gs.errors.PartitionStoreError, match=said("rows.npy")):
        file.rows(nodes)


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_file_that_was_cut_short_is_named(tmp_path, past_cache, monkeypatch):
    monkeypatch.setattr(layer_source, "_SHORT_READ", 0)
    np.save(tmp_path / "rows.npy", np.zeros((100, 4), np.float32))
    file = FileRows(tmp_path / "rows.npy", 128, np.dtype(np.float32), (4,), past_cache)
    os.truncate(tmp_path / "rows.npy", 400)
    with pytest.raises(gs.errors.PartitionStoreError, match=said("rows.npy 100")):
        file.read(np.array([0]), np.array([100]))


def test_features_and_tables_are_gathered_bit_for_bit(source, store):
    rng = np.random.default_rng(0)
    table = source.table("t", 5, 60)
    values = rng.standard_normal((60, 5)).astype(np.float32)
    source.write(table, np.arange(40), values[:40])
    source.write(table, np.arange(40, 60)[::3], values[40::3])
    nodes = np.sort(rng.choice(40, 20, replace=False))
    assert np.array_equal(source.gather(nodes, table).numpy(), values[nodes])
    assert np.array_equal(np.asarray(table)[40::3], values[40::3])
    nodes = rng.permutation(store.num_nodes)
    assert np.array_equal(source.gather(nodes).numpy(), np.asarray(store.features.array)[nodes])
    again = source.table("t", 2, 10)  # another file of the same name
    source.write(again, np.arange(10), np.ones((10, 2), np.float32))
    assert source.gather(np.arange(10), again).numpy().tolist() == [[1, 1]] * 10


@pytest.mark.parametrize("nodes", [[0], [399], range(0, 400, 7), range(120, 140), []])
def test_needed_rows_have_their_edges(source, store, nodes):
    nodes = np.asarray(nodes, np.int64)
    for block_edges in (1, 50, 1 << 20):
        source.block_edges = block_edges
        found = list(source.blocks(NodeSet.of(nodes, 400)))
        rows = np.concatenate([np.zeros(0, np.int64), *(block.rows for block in found)])
        assert np.array_equal(rows, nodes)
        for block in found:
            assert len(block.rows) == 1 or len(block.indices) <= block_edges
            for i, row in enumerate(block.rows):
                edges = slice(*store.csc.indptr[row : row + 2])
                assert np.array_equal(block.indices[slice(*block.indptr[i : i + 2])], store.csc.indices[edges])
    assert source.num_edges(NodeSet.of(nodes, 400)) == sum(len(block.indices) for block in found)


def test_a_split_that_stands_in_one_part_is_evaluated_like_the_whole_graph(source, store):
    torch.manual_seed(0)
    model = gs.model.GCN(16, 8, 4, num_layers=2).eval()
    expected = np.array(layerwise_inference(model, source).table)
    wanted = np.arange(*store.part_offsets[1:3])[::5]
    sets = closure(source, NodeSet.of(wanted, 400), 2, most=1.0)
    assert len(wanted) == len(sets[2]) < len(sets[1])
    output = layerwise_inference(model, source, needed=sets)
    assert np.allclose(output.read(wanted), expected[wanted], atol=1e-5)


def test_edges_are_read_once_a_hop_and_features_once_a_bucket(store, source, tmp_path, monkeypatch):
    """Where files are beyond memory: rows that the closure has read are kept for the layers."""
    read = Counter()

    def counted(name, size):
        plain = getattr(FileRows, name)

        def run(self, *args):
            read[Path(self.path).stem] += size(self, *args)
            return plain(self, *args)

        monkeypatch.setattr(FileRows, name, run)

    counted("_read_direct", lambda file, first, last: (last - first) * file.row_bytes)
    counted("_fill", lambda file, out, first: out.nbytes)
    monkeypatch.setattr(layer_source, "GAP_BYTES", 0)
    monkeypatch.setattr(edge_bins, "FIXED_BYTES", 0)
    torch.manual_seed(0)
    model, wanted = gs.model.GraphSAGE(16, 8, 4, num_layers=2).eval(), NodeSet.of(np.array([7]), 400)
    expected = layerwise_inference(model, source, 50, needed=closure(source, wanted, 2), broadcast=True).read([7])
    beyond = StoreLayerSource(store, [0, 1, 2, 3], open_scratch(tmp_path / "s", None, None))
    monkeypatch.setattr(layer_source, "is_beyond_memory", lambda num_bytes: True)
    read.clear()
    with beyond.keeping_rows():
        sets = closure(beyond, wanted, 2, most=1.0)
    edges = store.csc.indices.itemsize * (source.num_edges(sets[2]) + source.num_edges(sets[1]))
    assert 0 < 4 * source.num_edges(sets[1]) <= len(store.csc.indices) and read["csc_indices"] == edges
    output = layerwise_inference(model, beyond, needed=sets, broadcast=True, memory_bytes=200)
    assert np.array_equal(output.read([7]), expected)
    first = [event for event in events.recent() if event["event"] == "broadcast_layer"][-2]
    assert first["layer"] == 0 and first["num_buckets"] > 1
    sizes = store.features.array[:1].nbytes * len(sets[0])
    assert read["csc_indices"] == edges and sizes < read["features"] <= 64 + first["num_buckets"] * sizes
    beyond.close()


@pytest.mark.parametrize("feature_storage", [None, "int8", "bfloat16"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [gs.model.GCN, gs.model.GraphSAGE])
def test_broadcasting_from_a_store_equals_groups_of_rows(dataset, tmp_path, feature_storage, weighted, kind):
    parts = gs.partition(dataset.stream, "random", num_parts=3, seed=1)
    weight = np.random.default_rng(0).uniform(0.1, 1, 2400) if weighted else None
    options = {"edge_weight": weight, "feature_storage": feature_storage}
    store = gs.write_partition_store(tmp_path / "store", dataset.stream, parts, features=dataset.features, **options)
    source = StoreLayerSource(store, [2, 0, 1], open_scratch(tmp_path / "s", None, None))
    torch.manual_seed(0)
    model = kind(16, 8, 4, num_layers=2).eval()
    tables = [
        np.array(layerwise_inference(model, source, memory_bytes=size, broadcast=way).table)
        for size, way in ((1 << 20, False), (9000, True), (1 << 20, True))
    ]
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-4, atol=1e-5)
    assert np.array_equal(tables[1], tables[2])
    assert not list(source.scratch.folder.glob("edges*"))
    source.close()


@pytest.mark.parametrize("nodes", [range(0, 400, 7), range(400)])
def test_rows_and_edges_are_counted(store, source, nodes):
    nodes, degree = np.asarray(nodes, np.int64), np.diff(store.csc.indptr)
    expected = len(nodes), int(degree[nodes].sum())
    assert source.counts(NodeSet.of(nodes, 400)) == expected
    assert len(nodes) < 400 or source.counts() == expected
    assert source.row_bytes == store.features.array.itemsize * 16


def test_memory_does_not_grow_with_the_rows_that_stream_past(tmp_path):
    """A pass over 64 MiB of features that may hold 4 MiB takes less than 32 beside its scratch of 4 bytes a node."""
    import tracemalloc

    count, dim = 1 << 17, 128
    rng = np.random.default_rng(0)
    stream = gs.open_edge_stream(rng.integers(0, count, (2, 2 * count)), num_nodes=count)
    np.save(tmp_path / "x.npy", rng.standard_normal((count, dim)).astype(np.float32))
    parts = gs.partition(stream, "range", num_parts=2)
    store = gs.write_partition_store(tmp_path / "s", stream, parts, features=tmp_path / "x.npy")
    source = StoreLayerSource(store, [0, 1], open_scratch(tmp_path / "s", None, None), block_edges=1 << 14)
    model = gs.model.GraphSAGE(dim, 64, 4, num_layers=2)
    tracemalloc.start()
    layerwise_inference(model, source, memory_bytes=4 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    source.close()
    assert peak - 4 * count < 32 << 20 < store.features.nbytes


def test_work_is_counted_as_plain_python_does(source, store):
    nodes = np.array([3, 200])
    csc, work, rows = store.csc, 0, set(nodes.tolist())
    for _ in range(2):
        edges = [csc.indices[csc.indptr[row] : csc.indptr[row + 1]] for row in rows]
        work += len(rows) + sum(map(len, edges))
        rows |= {int(node) for row in edges for node in row}
    assert evaluation_work(source, nodes, 2) == work + len(rows)
    assert evaluation_work(source, np.arange(400), 2, limit=10) > 10


def test_the_order_of_samples_is_that_of_original_ids(dataset, tmp_path):
    orders = []
    for method, parts in (("random", 2), ("range", 5)):
        split = gs.partition(dataset.stream, method, num_parts=parts)
        store = gs.write_partition_store(tmp_path / method, dataset.stream, split, features=dataset.features)
        orders.append(store.original_nid[sample_order(np.arange(400), store.original_nid, seed=3)].tolist())
    assert orders[0] == orders[1] != sorted(orders[0])


def fitted(store_root, **options):
    dm = gs.PartitionDataModule(store=store_root, batch_size=32, sampler=gs.NeighborSampler([3, 2]), **options)
    model, run = classifier(dm), trainer()
    run.fit(model, dm)
    return dm, model, run


def test_a_small_graph_is_validated_whole(store_root, monkeypatch):
    seen = []
    monkeypatch.setattr(
        gs.NodeClassifier, "validation_step", lambda self, batch, index: seen.append(len(batch.wanted()))
    )
    fitted(store_root)
    assert seen == [int(gs.PartitionStore.open(store_root).masks["val"].sum())]


def test_a_large_one_by_a_sample_that_is_told(store_root, monkeypatch, caplog):
    monkeypatch.setattr(evaluation, "SMALL_WORK", 0)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.validation"):
        dm, model, run = fitted(store_root)
    (line,) = [record.getMessage() for record in caplog.records if "fixed sample" in record.getMessage()]
    assert "of 86 nodes" in line and "of an epoch's work; trainer.validate uses all nodes" in line
    event = [event for event in gs.events.recent() if event["event"] == "validation_sample"][-1]
    assert 1 <= event["num_sampled"] < event["num_nodes"] == 86
    assert event["work"] <= evaluation.EPOCH_SHARE * event["epoch_work"]
    sampled = float(run.callback_metrics["val_acc"])
    assert sampled * event["num_sampled"] == pytest.approx(round(sampled * event["num_sampled"]), abs=1e-3)
    exact = trainer().validate(model, dm, verbose=False)[0]["val_acc"]
    assert exact * 86 == pytest.approx(round(exact * 86), abs=1e-3)


def test_a_given_share_is_taken(store_root):
    sizes = []
    for share in (0.1, 0.5, 1):
        dm = gs.PartitionDataModule(store=store_root, evaluation=gs.EvaluationOptions(sample=share))
        run = trainer(callbacks=[Wanted(sizes)])
        run.fit(classifier(dm), dm)
    assert [len(nodes) for nodes in sizes] == [9, 43, 86]
    assert set(sizes[0]) < set(sizes[1]) < set(sizes[2])


class Wanted(L.Callback):
    """Notes which nodes are validated."""

    def __init__(self, sizes):
        self.sizes = sizes

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.sizes.append(batch.wanted().within(0, 400))


def test_tables_in_bfloat16_are_near(store_root):
    dm = gs.PartitionDataModule(store=store_root)
    model = classifier(dm, gs.model.GCN)
    exact = trainer().test(model, dm, verbose=False)[0]["test_loss"]
    rounded = gs.PartitionDataModule(store=store_root, evaluation=gs.EvaluationOptions(table_dtype="bfloat16"))
    near = trainer().test(model, rounded, verbose=False)[0]["test_loss"]
    assert near != exact and near == pytest.approx(exact, rel=2**-6)


def test_links_are_evaluated_by_the_rows_that_their_ends_need(tmp_path):
    from lightning_gnnscale.dataset import LinkSet

    dataset = small_dataset(num_nodes=2000, num_edges=3000)
    parts = gs.partition(dataset.stream, "random", num_parts=3)
    gs.write_partition_store(tmp_path / "s", dataset.stream, parts, features=dataset.features)
    joined = {tuple(sorted(edge)) for chunk in dataset.stream.chunks() for edge in np.stack([chunk.src, chunk.dst], 1)}
    edges = np.array([pair for pair in ((i, i + 7) for i in range(40)) if pair not in joined]).T
    links = {"test": LinkSet(edges, None)}
    torch.manual_seed(0)
    model = gs.LinkPredictor(gs.model.GraphSAGE(16, 8, 8, num_layers=2))
    sampler = gs.LinkSampler(gs.NeighborSampler([3, 3]))
    results = []
    for most in (0.75, 0.0):  # none of the rows left out, the second time
        dm = gs.PartitionDataModule(
            store=tmp_path / "s", sampler=sampler, evaluation=gs.EvaluationOptions(links=links, negatives=2)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_source, "closure", lambda *args, most=most: closure(*args, most))
            sets = []
            patch.setattr(layer_source.EvaluationPass, "needed", noted(layer_source.EvaluationPass.needed, sets))
            results.append(trainer().test(model, dm, verbose=False)[0])
        assert (sets[0][2] is None) == (most == 0)
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def noted(method, results):
    def call(self, num_layers):
        results.append(method(self, num_layers))
        return results[-1]

    return call


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exact"}, "evaluation layerwise sampled 'exact'"),
        ({"sample": 0}, "evaluation.sample auto (0, 1] 0"),
        ({"sample": "half"}, "evaluation.sample auto share"),
        ({"sample": True}, "evaluation.sample auto share"),
        ({"mode": "sampled", "sample": 0.5}, 'evaluation.sample=0.5 mode="layerwise"'),
        ({"table_dtype": "float16"}, "evaluation.table_dtype float32 bfloat16 'float16'"),
        ({"block_edges": 0}, "evaluation.block_edges 1 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.EvaluationOptions(**options)


def test_a_mode_is_named_or_given(store_root):
    with pytest.raises(ValueError, match=said("evaluation layerwise sampled EvaluationOptions")):
        gs.PartitionDataModule(store=store_root, evaluation="exact")
    options = gs.EvaluationOptions(mode="sampled")
    assert gs.PartitionDataModule(store=store_root, evaluation=options).evaluation is options
    assert gs.PartitionDataModule(store=store_root, evaluation="sampled").evaluation == options
    assert replace(options, mode="layerwise") == gs.EvaluationOptions()


def test_a_sample_of_links_is_refused(tmp_path):
    dataset = small_dataset()
    parts = gs.partition(dataset.stream, "random", num_parts=2)
    gs.write_partition_store(tmp_path / "s", dataset.stream, parts, features=dataset.features)
    edges = np.array([[0, 1], [399, 398]])
    dm = gs.PartitionDataModule(
        store=tmp_path / "s",
        sampler=gs.LinkSampler(gs.NeighborSampler([3, 3])),
        evaluation=gs.EvaluationOptions(sample=0.5, links={"val": gs.dataset.LinkSet(edges, None)}),
    )
    with pytest.raises(StrategyError, match=said("evaluation.sample=0.5 node links")):
        trainer().fit(gs.LinkPredictor(gs.model.GraphSAGE(16, 8, 8, num_layers=2)), dm)
