"""The DataModule: partitions once, says in one line what is wrong, evaluates exactly."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from community_graph import small_dataset
from scipy.sparse import csr_matrix

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import StoreLayerSource, callbacks, train_loader
from lightning_gnnscale.datamodule.train_loader import check_even_parts
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.errors import PartitionStoreError, StrategyError
from lightning_gnnscale.loader import RankPlace
from lightning_gnnscale.model.inference import layerwise_inference
from tests.says import said
from tests.tiers import all_pairs, first


def trainer(**options) -> L.Trainer:
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options}
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, **options}
    return L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", **options)


def classifier(dm, backbone=None, **options) -> gs.NodeClassifier:
    torch.manual_seed(0)
    backbone = backbone or gs.model.GraphSAGE(dm.num_features, 16, dm.num_classes, num_layers=2, dropout=0.2)
    return gs.NodeClassifier(backbone, lr=0.02, **options)


def test_partitions_once_and_is_skipped_after(tmp_path, dataset):
    def counted(stream, num_parts, progress, **options):
        progress("asked", num_parts, None)
        return gs.partition(stream, method="random", num_parts=num_parts, **options)

    counted.fingerprint = "counted"
    calls = []

    def count(what, done, total):
        if what == "asked":
            calls.append(done)

    for _ in range(2):
        options = {"dataset": dataset, "partitioner": counted, "progress": count}
        dm = gs.PartitionDataModule(root=tmp_path / "s", num_parts=3, **options)
        dm.prepare_data()
    assert calls == [3]
    assert dm.store.num_parts == 3
    assert dm.partitioning_facts["quality"]["node_balance"] >= 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["s"]


def test_a_store_of_other_input_is_refused_and_kept(tmp_path, dataset):
    options = {"root": tmp_path / "s", "partitioner": "random", "num_parts": 2}
    gs.PartitionDataModule(dataset=dataset, **options).prepare_data()
    before = gs.PartitionStore.open(tmp_path / "s").fingerprint
    other = small_dataset(seed=5)
    with pytest.raises(PartitionStoreError, match=said("input overwrite=True")):
        gs.PartitionDataModule(dataset=other, **options).prepare_data()
    assert gs.PartitionStore.open(tmp_path / "s").fingerprint == before
    gs.PartitionDataModule(dataset=other, overwrite=True, **options).prepare_data()
    assert gs.PartitionStore.open(tmp_path / "s").fingerprint != before


def test_packed_halos_make_another_store(tmp_path, dataset):
    options = {"dataset": dataset, "partitioner": "random", "num_parts": 2}
    packed = gs.PartitionDataModule(root=tmp_path / "s", pack_halo=True, **options)
    packed.prepare_data()
    assert packed.store_source.fingerprint(2) != gs.PartitionDataModule(
        root=tmp_path / "s", **options
    ).store_source.fingerprint(2)
    assert len(packed.store.part_features.halo_nodes) == len(packed.store.halo(0)) + len(packed.store.halo(1)) > 0
    with pytest.raises(ValueError, match=said("pack_halo store=")):
        gs.PartitionDataModule(tmp_path / "s", pack_halo=True)


def test_auto_parts_ask_the_planner(tmp_path, dataset):
    seen = {}

    def planner(**options):
        seen.update(options)
        return gs.plan(**{**options, "num_parts": 5})

    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, partitioner="random", planner=planner)
    dm.prepare_data()
    assert dm.store.num_parts == 5
    assert (seen["num_nodes"], seen["num_edges"]) == (400, 4800)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "batch"}, "mini_batch full_batch 'batch'"),
        ({"scope": "all"}, "scope auto part graph"),
        ({"seed_order": "parts"}, "seed_order graph part 'parts'"),
        ({"seed_order": "part"}, 'seed_order scope="auto" scope="graph"'),
        (
            {"seed_order": "part", "scope": "graph", "sampler": gs.SaintSampler("walk")},
            "seed_order NeighborSampler LayerwiseSampler SaintSampler",
        ),
        ({"seed_order": "part", "scope": "graph", "rows": "owners"}, "rows=owners seed_order"),
        ({"batch_size": 0}, "batch_size 1 0"),
        ({"halo_hops": 4}, "halo_hops 0 1 2 3 4"),
        ({"num_parts": "many"}, "num_parts 1 'many'"),
    ],
)
def test_bad_arguments(tmp_path, dataset, options, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.PartitionDataModule(**{"root": tmp_path / "s", "dataset": dataset, **options})


@pytest.mark.parametrize("kind", [gs.PartitionDataModule, gs.FullGraphDataModule])
def test_what_is_known_is_printed_and_nothing_is_read(tmp_path, dataset, store_root, kind, monkeypatch):
    name, batches = kind.__name__, ", batch_size=512" if kind is gs.PartitionDataModule else ""
    sizes = f"num_features={dataset.feature_dim}, num_classes={dataset.num_classes}{batches}"
    made = kind(dataset=dataset, num_parts=2)
    num_nodes = dataset.stream.num_nodes
    nodes = "" if num_nodes is None else f"num_nodes={num_nodes}, "
    assert str(made) == f"{name}(num_parts=2, {nodes}{sizes})"
    made = kind(dataset=dataset, num_parts=2, partitioner="random", root=tmp_path / "s")
    made.prepare_data()
    assert str(made) == f"{name}(store={tmp_path / 's'}, num_parts=2, num_nodes={dataset.stream.num_nodes}, {sizes})"
    given = kind(store_root)
    monkeypatch.setattr(gs.PartitionStore, "open", None)
    for _ in range(2):
        known = f"num_parts=4, num_nodes={dataset.stream.num_nodes}, num_features={dataset.feature_dim}{batches}"
        assert str(given) == f"{name}(store={store_root}, {known})"
    assert str(kind(tmp_path / "nothing")) == f"{name}(store={tmp_path / 'nothing'}{batches})"


def test_neither_store_nor_data(tmp_path):
    with pytest.raises(ValueError, match=said("store dataset")):
        gs.PartitionDataModule(root=tmp_path)


def test_missing_store_says_so(tmp_path):
    with pytest.raises(PartitionStoreError, match="none"):
        gs.PartitionDataModule(store=tmp_path / "none").prepare_data()


@pytest.mark.parametrize("asked", ["num_features", "store", "feature_dims", "num_edge_features"])
def test_a_store_that_is_not_made_yet_names_the_next_call(tmp_path, dataset, asked):
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, num_parts=2)
    with pytest.raises(PartitionStoreError, match=said("not made yet prepare_data()")):
        getattr(dm, asked)


@pytest.mark.parametrize("kind", [gs.PartitionDataModule, gs.FullGraphDataModule])
def test_validation_without_nodes_for_it_names_the_mask(tmp_path, dataset, kind):
    parts = gs.partition(dataset.stream, "random", num_parts=2)
    masks = {"train": dataset.masks["train"]}
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": masks}
    gs.write_partition_store(tmp_path / "s", dataset.stream, parts, **rows)
    dm = kind(store=tmp_path / "s")
    with pytest.raises(StrategyError, match=said("validation val mask masks=")):
        trainer().validate(classifier(dm), dm, verbose=False)
    dm.trainer = None
    assert dm.val_dataloader() == []


@pytest.mark.parametrize("name", ["features", "labels", "masks", "sparse"])
def test_more_rows_than_the_edges_name_nodes_ask_for_num_nodes(tmp_path, name):
    stream = gs.open_edge_stream(np.array([[0, 1], [1, 2]]))
    rows = {"features": np.zeros((5, 2)), "labels": np.zeros(5, int), "masks": {"train": np.ones(5, bool)}}
    rows["sparse"] = csr_matrix(np.eye(5, 2, dtype=np.float32))
    given = {"features" if name == "sparse" else name: rows[name]}
    with pytest.raises(ValueError, match=said("3 5 num_nodes=5")) as error:
        gs.write_partition_store(tmp_path / "s", stream, gs.partition(stream, "random", num_parts=1), **given)
    assert "\n" not in str(error.value)


def test_store_without_features_or_masks(tmp_path, dataset):
    parts = gs.partition(dataset.stream, "random", num_parts=2)
    gs.write_partition_store(tmp_path / "bare", dataset.stream, parts)
    with pytest.raises(PartitionStoreError, match="no features"):
        gs.PartitionDataModule(store=tmp_path / "bare").setup("fit")
    gs.write_partition_store(tmp_path / "x", dataset.stream, parts, features=dataset.features)
    dm = gs.PartitionDataModule(store=tmp_path / "x")
    with pytest.raises(StrategyError, match=said("labels train mask")):
        dm.setup("fit")
    with pytest.raises(StrategyError, match=said("labels train mask")):
        dm.train_dataloader()


def test_evaluation_equals_the_full_graph(store_root):
    dm = gs.PartitionDataModule(store=store_root)
    dm.setup()
    model = classifier(dm).backbone.eval()
    store = dm.store
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    edge_index = torch.from_numpy(np.stack([store.csc.indices, target]).astype(np.int64))
    with torch.no_grad():
        expected = model(torch.from_numpy(np.array(store.features.array)), edge_index).numpy()
    tables = []
    for parts in ([0, 2], [1, 3]):
        source = StoreLayerSource(store, parts, dm._scratch, block_edges=100)
        rows = np.concatenate([block.rows for block in source.blocks()])
        assert max(len(block.indices) for block in source.blocks()) <= max(100, int(np.diff(store.csc.indptr).max()))
        tables.append(rows)
    assert np.array_equal(np.sort(np.concatenate(tables)), np.arange(store.num_nodes))
    output = layerwise_inference(model, next(iter(dm.val_dataloader())).source)
    assert np.allclose(output.table[output.rows], expected[output.rows], atol=1e-5)
    dm.teardown("fit")
    assert not list(store_root.parent.glob(".small.scratch/*"))


@pytest.mark.parametrize("mode", ["mini_batch", "full_batch"])
def test_fit_and_test_learn(store_root, mode):
    dm = gs.PartitionDataModule(store=store_root, mode=mode, sampler=None, batch_size=32)
    dm.prepare_data()
    model = classifier(dm)
    run = trainer(max_epochs=15 if mode == "mini_batch" else 60)
    run.fit(model, dm)
    assert run.callback_metrics["val_acc"] > 0.8
    assert run.test(model, dm, verbose=False)[0]["test_acc"] > 0.8


def test_predictions_come_by_original_ids(store_root, tmp_path):

    dm = gs.PartitionDataModule(store=store_root)
    model = classifier(dm)
    path = tmp_path / "out" / "predictions.parquet"
    run = trainer()
    run.callbacks.append(gs.PredictionWriter(path))
    run.predict(model, dm, return_predictions=False)
    table = pq.read_table(path)
    assert table["node"].to_pylist() == list(range(400))
    dm.setup("predict")
    output = layerwise_inference(model.backbone.eval(), next(iter(dm.predict_dataloader())).source)
    expected = output.table.argmax(1)[dm.store.store_nid]
    assert table["prediction"].to_pylist() == expected.tolist()
    assert list(path.parent.iterdir()) == [path]
    dm.teardown("predict")


def test_predictions_are_joined_in_chunks_where_memory_is_short(tmp_path, store_root, monkeypatch):
    dm = gs.PartitionDataModule(store=store_root)
    model, written = classifier(dm), []
    for name, most in (("whole", 1 << 20), ("chunks", 1000)):
        monkeypatch.setattr(callbacks, "JOINED_BYTES", most)
        run = trainer()
        run.callbacks.append(gs.PredictionWriter(tmp_path / name))
        run.predict(model, dm, return_predictions=False)
        written.append(pq.ParquetFile(tmp_path / name))
    assert written[0].num_row_groups == 1 and written[1].num_row_groups > 3
    assert written[0].read().equals(written[1].read())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunks", "whole"]
    assert written[1].read()["node"].to_pylist() == list(range(400))


def test_gradient_averaging_samples_across_parts(store_root):
    dm = gs.PartitionDataModule(store=store_root, batch_size=64)
    strategy = gs.GNNScaleStrategy(weights=gs.GradientAveraging())
    options = {"max_epochs": 15, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    run = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options)
    model = classifier(dm)
    run.fit(model, dm)
    assert run.test(model, dm, verbose=False)[0]["test_acc"] > 0.8


def test_a_model_of_pyg_trains_and_is_evaluated_by_full_neighbour_batches(store_root):
    from torch_geometric.nn.models import GraphSAGE

    dm = gs.PartitionDataModule(store=store_root, batch_size=64, evaluation="sampled")
    dm.prepare_data()
    model = classifier(dm, GraphSAGE(dm.num_features, 16, 2, dm.num_classes), num_classes=dm.num_classes)
    run = trainer(max_epochs=10)
    run.fit(model, dm)
    assert run.test(model, dm, verbose=False)[0]["test_acc"] > 0.8
    rows = run.predict(model, dm)
    assert sum(len(result["nodes"]) for result in rows) == dm.store.num_nodes
    layerwise = gs.PartitionDataModule(store=store_root)
    with pytest.raises(StrategyError, match='evaluation="sampled"'):
        trainer().test(model, layerwise, verbose=False)


@first(1)
@pytest.mark.parametrize(
    "sampler", [gs.ClusterSampler(8, clusters_per_batch=2), gs.SaintSampler("walk", num_roots=20, num_norm_samples=5)]
)
def test_subgraph_samplers_learn(store_root, sampler):
    dm = gs.PartitionDataModule(store=store_root, sampler=sampler)
    dm.prepare_data()
    torch.manual_seed(0)
    model = classifier(dm, gs.model.GCN(dm.num_features, 16, dm.num_classes, num_layers=2, dropout=0.2))
    run = trainer(max_epochs=30)
    run.fit(model, dm)
    assert run.test(model, dm, verbose=False)[0]["test_acc"] > 0.8


def test_clusters_cover_the_core(store_root):
    from lightning_gnnscale.sampler.clusters_by import clusters_by

    part = gs.PartitionStore.open(store_root).load_part(1)
    cluster_id = clusters_by("spring")(part, 5, seed=0)
    assert cluster_id.shape == (part.num_core,)
    assert set(cluster_id) == set(range(5))


def test_features_that_are_not_numbers_are_named(tmp_path, dataset):
    spoiled = np.array(dataset.features)
    spoiled[5, 3] = np.nan
    dm = gs.PartitionDataModule(
        root=tmp_path / "s", stream=dataset.stream, features=spoiled, partitioner="random", num_parts=2
    )
    with pytest.raises(ValueError, match=said("features 5 3 nan")):
        dm.prepare_data()


def test_scope_and_policy_must_fit(store_root):
    dm = gs.PartitionDataModule(store=store_root, scope="graph")
    strategy = gs.GNNScaleStrategy(weights=gs.ModelAveraging())
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    with pytest.raises(StrategyError, match=said("part GradientAveraging")):
        L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **quiet).fit(classifier(dm), dm)
    dm = gs.PartitionDataModule(store=store_root, scope="part", sampler=gs.SaintSampler("walk"))
    with pytest.raises(StrategyError, match=said("batches rank")):
        trainer().fit(classifier(dm), dm)


def test_neighbors_are_counted_by_the_rank_that_owns_them(store_root, monkeypatch):
    monkeypatch.setattr(train_loader, "_CHUNK_EDGES", 7)
    store, owner = gs.PartitionStore.open(store_root), np.arange(8) % 3
    owner_of = np.repeat(owner[: store.num_parts], np.diff(store.part_offsets))
    nodes = np.arange(1, store.num_nodes, 5)
    rows = [
        np.bincount(owner_of[store.csc.indices[slice(*store.csc.indptr[node : node + 2])]], minlength=3)
        for node in nodes
    ]
    counted = train_loader._neighbors_by_rank(store, owner[: store.num_parts], 3, nodes)
    assert counted.sum() > 0 and (counted == rows).all()


@pytest.mark.parametrize(
    ("options", "weights", "scope"),
    [
        ({}, gs.GradientAveraging(), "part"),
        ({}, gs.ModelAveraging(), "part"),
        ({"sampler": gs.LayerwiseSampler([64, 64])}, gs.GradientAveraging(), "part"),
        ({"sampler": gs.SaintSampler("walk")}, gs.GradientAveraging(), "graph"),
        ({"sampler": gs.SaintSampler("walk")}, gs.ModelAveraging(), "part"),
        ({"rows": "tiered"}, gs.GradientAveraging(), "graph"),
        ({"mode": "full_batch"}, gs.GradientAveraging(), "part"),
    ],
)
def test_the_scope_follows_from_the_settings(store_root, options, weights, scope):
    dm = gs.PartitionDataModule(store=store_root, **options)
    assert dm.scope_under(weights) == scope
    mixes = scope == "part" and weights.equal_batches and options.get("mode") != "full_batch"
    assert dm.mixed_parts(weights) == (4 if mixes else 0)


def test_seeds_by_part_make_chunks_of_one_part_with_neighbours_of_any(store_root):
    store = gs.PartitionStore.open(store_root)
    options = {"seed_order": "part", "scope": "graph", "interleave_parts": 2, "batch_size": 8}
    seeds, crossing = [], 0
    for rank in range(2):
        dm = gs.PartitionDataModule(store=store, **options)
        with closing(dm.trial_loader(RankPlace(rank, 2), gs.GradientAveraging())) as loader:
            chunks = list(loader.sampled_chunks())
            assert sum(batch.batch_size for batch in loader) == sum(chunk.batch_size for chunk in chunks)
        for chunk in chunks:
            nodes = chunk.n_id.numpy()
            assert set(store.part_of(nodes[: chunk.batch_size]).tolist()) == {chunk.part}
            crossing += len(set(store.part_of(nodes).tolist())) > 1
            seeds += nodes[: chunk.batch_size].tolist()
    assert crossing and set(seeds) == set(np.flatnonzero(store.masks["train"]).tolist())


def test_defaults_mix_parts_of_a_low_cut(dataset, tmp_path):
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, num_parts=4, batch_size=16)
    dm.prepare_data()
    run = trainer(max_epochs=1)
    assert isinstance(run.strategy.weights, gs.GradientAveraging)
    run.fit(classifier(dm), dm)
    assert dm.partitioning_facts["method"] == "streaming_multilevel"
    batch = next(iter(dm.train_dataloader()))
    assert len(set(dm.store.part_of(batch.n_id[: batch.batch_size].numpy()).tolist())) == 4


def test_parts_that_are_a_batch_each_are_shared_evenly():
    targets = {part: np.arange(part > 0) for part in range(4)}
    check_even_parts(targets, 1)
    with pytest.raises(StrategyError, match=said("1 2 weights=ModelAveraging")):
        check_even_parts(targets, 2)


def test_edge_weights_train_and_are_evaluated_as_on_the_full_graph(tmp_path, dataset):
    rng = np.random.default_rng(0)
    weighted = gs.GraphDataset(
        "w", dataset.stream, dataset.features, dataset.labels, dataset.masks, edge_weight=rng.uniform(1, 9, 2400)
    )
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=weighted, partitioner="random", num_parts=3)
    dm.prepare_data()
    torch.manual_seed(0)
    model = classifier(dm, gs.model.GCN(dm.num_features, 16, dm.num_classes, num_layers=2, dropout=0.2))
    run = trainer(max_epochs=30)
    run.fit(model, dm)
    assert run.callback_metrics["val_acc"] > 0.8
    store = dm.store
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    edge_index = torch.from_numpy(np.stack([store.csc.indices, target]).astype(np.int64))
    x, weight = torch.from_numpy(np.array(store.features.array)), torch.from_numpy(np.array(store.edge_weight))
    with torch.no_grad():
        expected = model.backbone.eval()(x, edge_index, weight).numpy()
    dm.setup("predict")
    output = layerwise_inference(model.backbone, next(iter(dm.predict_dataloader())).source)
    assert np.allclose(output.table, expected, atol=1e-4)
    dm.teardown("predict")
    saint = gs.PartitionDataModule(store=store.root, sampler=gs.SaintSampler("walk", num_roots=5))
    with pytest.raises(StrategyError, match=said("drop store's edge weights")):
        trainer().fit(model, saint)


def test_several_labels_a_node(tmp_path, dataset):
    labels = np.eye(8, dtype=np.int64)[dataset.labels]
    many = gs.GraphDataset("m", dataset.stream, dataset.features, labels, dataset.masks)
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=many, partitioner="random", num_parts=2)
    dm.prepare_data()
    assert dm.num_classes == 8
    model = classifier(dm, multilabel=True)
    run = trainer(max_epochs=60)
    run.fit(model, dm)
    assert run.test(model, dm, verbose=False)[0]["test_acc"] > 0.8


def test_a_part_without_known_labels_counts_for_nothing(tmp_path, dataset):
    labels = np.eye(8, dtype=np.int64)[dataset.labels]
    half = np.arange(len(labels)) % 2
    labels[half == 1] = -1
    many = gs.GraphDataset("m", dataset.stream, dataset.features, labels, dataset.masks)
    given = gs.Partitioning(half.astype(np.int32), 2, method="given", options={}, seed=0)
    parts = lambda *_, **__: given  # noqa: E731
    parts.fingerprint = "given"
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=many, partitioner=parts, num_parts=2)
    dm.prepare_data()
    assert dm.part_weights.tolist() == [(many.masks["train"] & (half == 0)).sum(), 0]


def test_nothing_is_scored_without_labels(tmp_path, dataset):
    bare = gs.GraphDataset("b", dataset.stream, dataset.features, None, dataset.masks)
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=bare, partitioner="random", num_parts=2)
    dm.prepare_data()
    model = gs.NodeClassifier(gs.model.GraphSAGE(dm.num_features, 4, 3))
    for score, purpose in [(trainer().validate, "validation"), (trainer().test, "testing")]:
        with pytest.raises(StrategyError, match=said(f"{purpose} labels=")):
            score(model, dm, verbose=False)
    assert trainer().predict(model, dm)


def test_plan_of_a_store_that_stands(store_root):
    plan = gs.PartitionDataModule(store=store_root).make_plan(num_devices=2)
    assert (plan.num_parts, plan.num_nodes) == (4, 400)


@all_pairs
@pytest.mark.parametrize("ids", [np.arange(6), np.array([f"node {i}" for i in range(6)], dtype=object)])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("kinds", [None, ("author", "paper")])
def test_predictions_of_a_rank_without_rows_join_those_of_others(ids, shape, kinds):
    schema = None if kinds is None else gs.GraphSchema(kinds, ((kinds[0], "writes", kinds[1]),))
    kind = np.array([1, 0, 1, 0, 1, 0])
    store = SimpleNamespace(
        original_nid=np.arange(6), user_ids=lambda nodes: ids[nodes], schema=schema, node_type=lambda nodes: kind[nodes]
    )
    results = [
        {"nodes": np.arange(count), "prediction": torch.zeros(count, *shape, dtype=torch.float32)} for count in (2, 0)
    ]
    joined = pa.concat_tables([gs.PredictionWriter._table(store, result) for result in results])
    assert joined["node"].to_pylist() == list(ids[:2])
    assert kinds is None or joined["node_type"].to_pylist() == ["paper", "author"]


def test_overfitting_trains_on_the_same_seeds(store_root):
    class Seen(L.Callback):
        def __init__(self):
            self.seeds = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seeds.append(batch.n_id[: batch.batch_size].tolist())

    for options, same in (({"overfit_batches": 1}, True), ({"limit_train_batches": 1}, False)):
        dm, seen = gs.PartitionDataModule(store=store_root, batch_size=8), Seen()
        weights = gs.GNNScaleStrategy(weights="gradient_averaging")
        run = L.Trainer(
            accelerator="cpu", devices=1, strategy=weights, max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, num_sanity_val_steps=0, callbacks=[seen], **options,
        )  # fmt: skip
        run.fit(classifier(dm), dm)
        assert (seen.seeds[0] == seen.seeds[1] == seen.seeds[2]) == same


def test_the_store_that_was_written_is_the_one_trained_on(tmp_path, dataset):
    options = {"root": tmp_path / "s", "partitioner": "random", "num_parts": 2}
    gs.PartitionDataModule(dataset=dataset, **options).prepare_data()
    other = small_dataset(seed=5)
    this_rank, another = (gs.PartitionDataModule(dataset=other, overwrite=True, **options) for _ in range(2))
    assert this_rank.num_features == another.num_features == 16  # opens the store that exists
    this_rank.prepare_data()
    for dm in (this_rank, another):
        dm.setup("fit")
        batch = next(iter(dm.train_dataloader()))
        rows = np.asarray(other.features)[dm.store.original_nid[batch.n_id.numpy()]]
        assert np.array_equal(batch.x.numpy(), rows)
        dm.teardown("fit")


def test_both_directions_ask_for_both_in_the_store(tmp_path, dataset):
    dataset = replace(dataset, stream=SyntheticGraph(400, 2400, 8, seed=1).stream())
    sampler = gs.NeighborSampler([5], direction="both")
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, num_parts=2, sampler=sampler)
    dm.prepare_data()
    dm.setup()
    assert next(iter(dm.train_dataloader())).batch_size
    with pytest.raises(StrategyError, match=said('direction="both" to_undirected=True')):
        dm.test_dataloader()
    dm.teardown("test")
    full = gs.sampler.FullBatchSampler(direction="both")
    assert gs.PartitionDataModule(store=tmp_path / "s", mode="full_batch", sampler=full).sampler is full


def test_a_sampler_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=said("sampler gs.NeighborSampler [15, 10]")):
        gs.PartitionDataModule(store=tmp_path, sampler=[15, 10])


def test_an_empty_mask_says_so(tmp_path, dataset):
    dataset = replace(dataset, masks={**dataset.masks, "val": np.zeros(400, bool)})
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, num_parts=2, evaluation="sampled")
    dm.prepare_data()
    dm.setup()
    with pytest.raises(StrategyError, match=said("node val mask")):
        dm.val_dataloader()
    dm.teardown("test")
