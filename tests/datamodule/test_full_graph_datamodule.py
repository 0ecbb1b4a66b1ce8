"""The full-graph DataModule: blocks of the store as one batch an epoch, and one line for what does not fit."""

from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from community_graph import small_dataset
from lightning.pytorch.callbacks import EarlyStopping

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.full_graph import count_labels
from lightning_gnnscale.errors import PartitionStoreError, StrategyError
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.strategy import EpochFixed, SkipBroadcast
from tests.says import said

SHARED, OWN = (SimpleNamespace(equal_batches=equal, passes_per_epoch=1) for equal in (True, False))


def trainer_of(rank: int, world_size: int, **given) -> SimpleNamespace:
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        accumulate_grad_batches=1,
        callbacks=[],
        **{"strategy": None, "lightning_module": None, **given},
    )


def on_rank(store, rank: int, world_size: int, weights=SHARED, **options) -> gs.FullGraphDataModule:
    """A DataModule as a process of a run sees it."""
    dm = gs.FullGraphDataModule(store=store, **options)
    strategy = SimpleNamespace(exchange=gs.NoExchange(), weights=weights)
    dm.trainer = trainer_of(rank, world_size, strategy=strategy)
    dm.setup("fit")
    return dm


def only(loader):
    assert len(loader) == 1
    (batch,) = list(loader)
    return batch


def write(root, dataset, num_parts: int = 3, **changed) -> gs.PartitionStore:
    arrays = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks, **changed}
    parts = gs.partition(dataset.stream, "random", num_parts=num_parts, seed=1)
    return gs.write_partition_store(root, dataset.stream, parts, **arrays)


class Recorder(L.LightningModule):
    """Trains a line, and notes the key and the epoch of each batch."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.line = torch.nn.Linear(dim, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((batch.epoch, batch.key))
        return self.line(batch.x[: batch.batch_size]).square().mean()

    def validation_step(self, batch, batch_idx):
        assert (batch.split, batch.key) == ("val", 0)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(dm, model, **options) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    checkpoint = options.pop("ckpt_path", None)
    trainer = L.Trainer(**{**quiet, "accelerator": "cpu", "devices": 1, **options})
    trainer.fit(model, dm, ckpt_path=checkpoint)
    return trainer


def test_one_process_holds_the_graph(store_root):
    dm = gs.FullGraphDataModule(store=store_root)
    dm.setup("fit")
    batch, store = only(dm.train_dataloader()), dm.store
    assert batch.full_graph and batch.split is None
    assert (batch.batch_size, batch.num_nodes_global, batch.part, batch.epoch) == (400, 400, 0, 0)
    assert batch.n_id.tolist() == list(range(400))
    assert np.array_equal(batch.indptr, store.csc.indptr) and np.array_equal(batch.indices, store.csc.indices)
    assert np.array_equal(batch.x, store.features.array)
    assert np.array_equal(batch.y, store.labels)
    for name in ("train", "val", "test"):
        assert np.array_equal(getattr(batch, f"{name}_mask"), store.masks[name])
    assert (batch.y[~batch.train_mask] >= 0).any(), "labels outside the train mask are kept: the masks tell"
    assert batch.edge_weight is None and batch.x_csr is None


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_holds_its_rows_and_the_features_of_the_halo(store_root, rank):
    dm = on_rank(store_root, rank, 3)
    batch, blocks, store = only(dm.train_dataloader()), dm.blocks, dm.store
    own = slice(*blocks.offsets[rank : rank + 2])
    assert (batch.part, batch.batch_size, batch.num_nodes_global) == (rank, blocks.num_local, 400)
    assert np.array_equal(batch.n_id, blocks.nodes) and 0 < blocks.num_halo
    assert np.array_equal(batch.x, store.features.array[blocks.nodes])
    assert np.array_equal(batch.degree, np.diff(store.csc.indptr)[blocks.nodes])
    assert np.array_equal(batch.indptr, blocks.csc.indptr) and np.array_equal(batch.indices, blocks.csc.indices)
    assert np.array_equal(batch.y, store.labels[own])
    for name in ("train", "val", "test"):
        assert np.array_equal(getattr(batch, f"{name}_mask"), store.masks[name][own])
    assert dm.parts_of_rank(rank, 3) == [rank]


def test_keys_follow_the_epoch_and_are_the_same_on_every_rank(store_root):
    loaders = [on_rank(store_root, rank, 2, seed=7).train_dataloader() for rank in range(2)]
    for epoch in (0, 1, 5):
        for loader in loaders:
            loader.batch_sampler.sampler.set_epoch(epoch)
        assert {(only(loader).epoch, only(loader).key) for loader in loaders} == {(epoch, batch_key(7, epoch, 0, 0))}
    other = on_rank(store_root, 0, 2, seed=7).train_dataloader()
    other.load_state_dict(loaders[0].state_dict())
    assert only(other).key == batch_key(7, 5, 0, 0)


def test_lightning_sets_the_epoch_and_resumes_it(store_root, tmp_path):
    model = Recorder()
    trainer = fit(gs.FullGraphDataModule(store=store_root, seed=3), model, max_epochs=3)
    assert model.seen == [(epoch, batch_key(3, epoch, 0, 0)) for epoch in range(3)]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Recorder()
    fit(gs.FullGraphDataModule(store=store_root, seed=3), again, max_epochs=5, ckpt_path=tmp_path / "last.ckpt")
    assert again.seen == [(epoch, batch_key(3, epoch, 0, 0)) for epoch in (3, 4)]


def test_a_block_is_a_part_to_model_averaging(store_root):
    model = Recorder()
    fit(gs.FullGraphDataModule(store=store_root), model, max_epochs=2, strategy="gnnscale")
    assert len(model.seen) == 2


def test_early_stopping_counts_from_the_exact_epochs_at_the_end(store_root):
    stop = EarlyStopping("val_acc", patience=2, min_delta=9.0, mode="max")  # nothing improves by that much
    policy = SkipBroadcast(EpochFixed(1), cooldown_epochs=0.5)
    strategy = gs.GNNScaleStrategy(weights=gs.GradientAveraging(), exchange=policy)
    dm = gs.FullGraphDataModule(store=store_root)
    dm.setup("fit")
    model = gs.NodeClassifier(gs.model.GCN(dm.num_features, 8, dm.num_classes, num_layers=2), lr=0.01)
    fit(dm, model, max_epochs=12, callbacks=[stop], strategy=strategy, num_sanity_val_steps=0)
    assert stop.stopped_epoch == 7  # the second epoch of the six at the end


def test_evaluation_has_its_split_and_no_key(store_root):
    dm = on_rank(store_root, 1, 2, seed=7)
    loaders = {"val": dm.val_dataloader(), "test": dm.test_dataloader(), "predict": dm.predict_dataloader()}
    for split, loader in loaders.items():
        batch = only(loader)
        assert (batch.split, batch.key) == (split, 0)
        assert batch.x_dense is only(dm.train_dataloader()).x_dense, "loaders share the features"
    known = {split: int(dm.store.masks[split].sum()) for split in ("val", "test")}
    assert {split: only(loader).loss_count for split, loader in loaders.items()} == {**known, "predict": 0}


def test_labels_are_counted_over_the_graph_or_over_the_block(tmp_path, dataset):
    labels = np.array(dataset.labels)
    labels[::3] = -1
    store = write(tmp_path / "s", dataset, labels=labels)
    known = dataset.masks["train"] & (labels >= 0)
    assert 0 < known.sum() < dataset.masks["train"].sum()
    blocks = [int(known[store.original_nid[slice(*store.part_offsets[p : p + 2])]].sum()) for p in range(3)]
    for rank in range(3):
        shared, own = on_rank(store, rank, 3), on_rank(store, rank, 3, weights=OWN)
        batch = only(shared.train_dataloader())
        assert (batch.loss_count, batch.loss_is_share) == (known.sum(), True)
        batch = only(own.train_dataloader())
        assert (batch.loss_count, batch.loss_is_share) == (blocks[rank], False)
        assert own.part_weights.dtype == np.float64 and own.part_weights.tolist() == blocks
    batch = only(on_rank(store, 1, 3, weights=None).train_dataloader())
    assert (batch.loss_count, batch.loss_is_share) == (known.sum(), True), "another strategy averages no models"


def test_of_several_labels_each_known_one_counts(tmp_path, dataset, monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (400, 5))
    labels[:40] = -1
    store = write(tmp_path / "s", dataset, labels=labels)
    train = labels[dataset.masks["train"]]
    monkeypatch.setattr("lightning_gnnscale.datamodule.full_graph._LABEL_ROWS", 7)
    assert count_labels(store, "train", 0, 400) == ((train >= 0).any(1).sum(), (train >= 0).sum())
    dm = on_rank(store, 0, 2)
    batch = only(dm.train_dataloader())
    assert (batch.loss_nodes, batch.loss_count) == count_labels(store, "train", 0, 400)
    assert batch.y.shape == (batch.batch_size, 5)
    assert dm.part_weights.sum() == (train >= 0).any(1).sum() < len(train)


@pytest.mark.parametrize("loss", ["ce", lambda out, y: (out - y).square().mean(dim=1)], ids=["of labels", "of nodes"])
def test_the_loss_of_the_full_graph_is_that_of_its_labels_or_nodes(tmp_path, dataset, loss):
    labels = np.random.default_rng(0).integers(-1, 2, (400, 5))
    labels[:40] = -1
    dm = on_rank(write(tmp_path / "s", dataset, labels=labels), 0, 1)
    model = gs.NodeClassifier(gs.model.GCN(dm.num_features, 8, 5), multilabel=True, loss=loss)
    model.eval()  # without dropout
    full, mini = only(dm.train_dataloader()), only(dm.train_dataloader())
    mini.loss_count = mini.loss_nodes = None  # a batch that counts for itself
    with torch.no_grad():
        assert float(model.training_step(full)) == pytest.approx(float(model.training_step(mini)), rel=1e-6)


def test_sparse_features_come_compressed_and_dense_on_demand(tmp_path, dataset):
    import scipy.sparse

    dense = np.where(np.random.default_rng(0).random((400, 30)) < 0.1, dataset.features[:, :1], 0).astype(np.float16)
    store = write(tmp_path / "s", dataset, features=scipy.sparse.csr_array(dense.astype(np.float32)))
    dm = on_rank(store, 1, 3)
    batch = only(dm.train_dataloader())
    expected = dense.astype(np.float32)[store.original_nid[dm.blocks.nodes]]
    assert batch.x_dense is None and batch.x_csr.num_rows == len(batch.n_id)
    with torch.inference_mode():
        x = batch.x
    assert np.array_equal(x, expected) and not x.is_inference()
    assert only(dm.train_dataloader()).x is x
    assert batch.x is x and batch.to("cpu").x is x


def test_stored_dtype_and_weights_are_kept(tmp_path, dataset):
    weight = np.random.default_rng(0).uniform(1, 9, 2400).astype(np.float32)
    store = write(tmp_path / "s", dataset, features=dataset.features.astype(np.float16), edge_weight=weight)
    dm = on_rank(store, 2, 3)
    batch = only(dm.train_dataloader())
    assert batch.x.dtype == torch.float16
    assert np.array_equal(batch.edge_weight, dm.blocks.edge_weight)
    assert np.array_equal(batch.degree, store.weighted_degree[dm.blocks.nodes])


def test_tensors_move_once(store_root):
    dm = on_rank(store_root, 0, 2)
    loader = dm.train_dataloader()
    first, second, val = only(loader), only(loader), only(dm.val_dataloader())
    assert first.to("cpu") is first
    with torch.inference_mode():
        there = first.to("meta")
    assert there is first.to("meta") and there.to("meta") is there
    assert {value.device.type for value in vars(there).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert not there.x.is_inference(), "what validation moves must train as well"
    assert second.to("meta") is not there
    for name in ("x", "indptr", "indices", "y", "train_mask", "degree", "n_id"):
        assert getattr(second.to("meta"), name) is getattr(there, name) is getattr(val.to("meta"), name)
    assert (there.key, there.epoch, there.split, there.loss_count) == (first.key, 0, None, first.loss_count)
    assert val.to("meta").split == "val"


def test_a_memo_is_kept_by_device(store_root):
    dm = on_rank(store_root, 0, 2)
    loader = dm.train_dataloader()
    first, second, val = only(loader), only(loader), only(dm.val_dataloader())
    first.memo["product"] = 1
    first.to("meta").memo["product"] = 2
    assert second.memo["product"] == 1 and second.to("meta").memo["product"] == 2
    assert val.memo is first.memo, "what training prepares serves validation"
    moved = first.to("meta").x
    dm.teardown("fit")
    assert not only(loader).memo
    assert only(loader).to("meta").x is not moved


def test_another_x_stays_with_its_batch(store_root):
    loader = on_rank(store_root, 0, 2).train_dataloader()
    changed, other = only(loader), only(loader)
    changed.x = torch.zeros(len(changed.n_id), 2)
    assert changed.x.shape[1] == changed.to("meta").x.shape[1] == 2
    assert other.x.shape[1] == other.to("meta").x.shape[1] == 16


def test_block_is_loaded_once(store_root):
    dm = on_rank(store_root, 1, 2)
    blocks = dm.blocks
    dm.setup("test")
    assert dm.blocks is blocks


def test_auto_parts_are_at_least_the_processes(tmp_path, dataset):
    def frugal(num_parts=None, **options):
        return gs.plan(num_parts=num_parts or 2, **options)

    options = {"root": tmp_path / "s", "dataset": dataset, "partitioner": "random", "planner": frugal}
    alone = gs.FullGraphDataModule(**options)
    alone.prepare_data()
    assert alone.store.num_parts == 2
    many = gs.FullGraphDataModule(**options)
    assert many.make_plan(num_devices=3).num_parts == 3
    many.trainer = trainer_of(0, 3)
    assert many.planned_parts() == 3, "a store that exists has too few"
    assert gs.FullGraphDataModule(**options, num_parts=5).planned_parts() == 5
    assert gs.FullGraphDataModule(store=tmp_path / "s").make_plan(num_devices=3).num_parts == 2


def test_both_datamodules_take_the_same_store(tmp_path, dataset):
    options = {"root": tmp_path / "s", "dataset": dataset, "partitioner": "random", "num_parts": 2}
    gs.PartitionDataModule(**options).prepare_data()
    before = (tmp_path / "s" / "manifest.json").stat().st_mtime_ns
    dm = gs.FullGraphDataModule(**options)
    dm.prepare_data()
    assert (tmp_path / "s" / "manifest.json").stat().st_mtime_ns == before
    assert (dm.num_features, dm.num_classes, dm.partitioning_facts["num_parts"]) == (16, 8, 2)


def test_more_processes_than_parts(store_root):
    with pytest.raises(StrategyError, match=said("5 4 devices=4")):
        on_rank(store_root, 0, 5)


def test_a_strategy_without_exchange(store_root):
    dm = gs.FullGraphDataModule(store=store_root)
    dm.trainer = trainer_of(0, 2, strategy=SimpleNamespace())
    with pytest.raises(StrategyError, match=said('exchanges rows Trainer(strategy="gnnscale")')):
        dm.setup("fit")


def test_what_a_store_lacks(tmp_path, dataset):
    write(tmp_path / "bare", dataset, features=None)
    with pytest.raises(PartitionStoreError, match="no features"):
        gs.FullGraphDataModule(store=tmp_path / "bare").setup("fit")
    write(tmp_path / "unlabelled", dataset, labels=None)
    write(tmp_path / "unmasked", dataset, masks={"val": dataset.masks["val"]})
    for name in ("unlabelled", "unmasked"):
        dm = gs.FullGraphDataModule(store=tmp_path / name)
        with pytest.raises(StrategyError, match=said("labels train mask")):
            dm.setup("fit")
        dm.setup("predict")
        assert only(dm.predict_dataloader()).batch_size == 400
    with pytest.raises(StrategyError, match="test mask"):
        dm.test_dataloader()
    assert only(dm.val_dataloader()).split == "val"
    write(tmp_path / "train", dataset, masks={"train": dataset.masks["train"]})
    dm = gs.FullGraphDataModule(store=tmp_path / "train")
    dm.setup("fit")
    assert dm.val_dataloader() == []


def test_bad_arguments(tmp_path, dataset):
    with pytest.raises(ValueError, match=said("store dataset")):
        gs.FullGraphDataModule(root=tmp_path)
    with pytest.raises(ValueError, match=said("num_parts 1 0")):
        gs.FullGraphDataModule(root=tmp_path, dataset=small_dataset(), num_parts=0)


def test_numbers_of_nodes_are_predicted_on_the_full_graph(tmp_path):
    """The loss is the mean over the known targets of all training nodes; ranks' losses add up to it."""
    dataset, rng = small_dataset(), np.random.default_rng(0)
    targets = rng.random((400, 2)).astype(np.float32)
    targets[::5, 0], targets[::7] = np.nan, np.nan
    store = write(tmp_path / "s", dataset, labels=targets, regression=True)
    train, y = np.asarray(store.masks["train"]), np.asarray(store.labels)
    known = ~np.isnan(y) & train[:, None]
    assert count_labels(store, "train", 0, 400) == (int(known.any(axis=1).sum()), int(known.sum()))
    torch.manual_seed(0)
    module = gs.NodeRegressor(gs.model.GraphSAGE(16, 8, 2, num_layers=2, dropout=0.0))
    dm = gs.FullGraphDataModule(store=store)
    dm.setup("fit")
    batch = only(dm.train_dataloader())
    loss = module.training_step(batch)
    loss.backward()
    assert all(value.grad.isfinite().all() for value in module.parameters())
    outputs = module(batch).detach().numpy()
    assert float(loss.detach()) == pytest.approx(float(((outputs - y)[known] ** 2).mean()), rel=1e-5)
    own = gs.NodeRegressor(module.backbone, loss=lambda a, b: torch.nn.functional.mse_loss(a, b, reduction="none"))
    assert float(own.training_step(batch).detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    counts = [only(on_rank(store, rank, 3).train_dataloader()).loss_count for rank in range(3)]
    assert counts == [int(known.sum())] * 3
    trainer = fit(dm, module, max_epochs=30)
    assert {"val_mae", "val_rmse", "train_loss"} <= set(trainer.callback_metrics)
    tested = trainer.test(module, dm, verbose=False)[0]
    held = ~np.isnan(y) & np.asarray(store.masks["test"])[:, None]
    errors = (module(batch).detach().numpy() - y)[held]
    assert tested["test_mae"] == pytest.approx(float(np.abs(errors).mean()), rel=1e-4)
    exact = gs.PartitionDataModule(store=store)
    assert trainer.test(module, exact, verbose=False)[0]["test_mae"] == pytest.approx(tested["test_mae"], rel=1e-4)
