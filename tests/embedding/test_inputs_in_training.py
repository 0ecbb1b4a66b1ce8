"""Embeddings as a model's inputs in one process: trained, evaluated, saved, resumed, refused."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from embedding_runs import NUM, embedding, fit, write_store
from own_process import OwnProcess

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PartitionStoreError, StrategyError
from lightning_gnnscale.model import TakesInputs
from tests.says import said
from tests.tiers import first


@first(1)
@pytest.mark.parametrize("features", [False, True])
def test_a_graph_is_learned_through_embeddings(tmp_path, features):
    store = write_store(tmp_path / "store", features)
    inputs = embedding(store)
    start = inputs.open().pull(np.arange(NUM)).clone()
    trainer, model, dm = fit(tmp_path, store.root, inputs)
    assert not any("inputs" in name for name, _ in model.named_parameters())
    assert not torch.equal(inputs.pull(np.arange(NUM)), start)
    assert float(trainer.callback_metrics["val_acc"]) > 0.8
    tested = trainer.test(model, dm, verbose=False)[0]
    path = trainer.checkpoint_callback.best_model_path
    rows = Path(f"{path}.rows")
    assert rows.is_dir()
    inputs.close()
    assert trainer.test(model, dm, ckpt_path=path, verbose=False)[0] == tested
    trainer.strategy.remove_checkpoint(path)
    assert not rows.exists()


def test_evaluation_by_layers_equals_evaluation_by_batches(tmp_path):
    store = write_store(tmp_path / "store", features=True)
    inputs = embedding(store)
    trainer, model, _ = fit(tmp_path, store.root, inputs, epochs=2)
    by = {}
    for evaluation in ("layerwise", "sampled"):
        dm = gs.PartitionDataModule(store=store.root, sampler=gs.NeighborSampler([5, 5]), evaluation=evaluation)
        by[evaluation] = trainer.test(model, dm, verbose=False)[0]
    assert by["layerwise"]["test_acc"] == by["sampled"]["test_acc"]
    assert by["layerwise"]["test_loss"] == pytest.approx(by["sampled"]["test_loss"], rel=1e-5)


def run_until(folder, root, epochs, kill_after):
    class Kill(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    keep_all = L.pytorch.callbacks.ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)
    fit(folder, root, embedding(gs.PartitionStore.open(root)), epochs=epochs, callbacks=[keep_all, Kill()])


@pytest.mark.sweep
def test_a_killed_run_that_is_resumed_equals_one_that_was_not(tmp_path):
    store = write_store(tmp_path / "store")
    killed = OwnProcess(tmp_path, run_until, tmp_path, store.root, 4, 2).wait(120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    inputs = embedding(store, seed=77)  # other rows, until they are read
    _, resumed, _ = fit(tmp_path / "b", store.root, inputs, epochs=4, resume=tmp_path / "checkpoints" / "epoch=1.ckpt")
    whole_inputs = embedding(store)
    _, whole, _ = fit(tmp_path / "c", store.root, whole_inputs, epochs=4)
    assert torch.equal(inputs.pull(np.arange(NUM)), whole_inputs.pull(np.arange(NUM)))
    assert all(torch.equal(one, other) for one, other in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_a_store_without_features_names_the_remedy(tmp_path):
    store = write_store(tmp_path / "store")
    with pytest.raises(PartitionStoreError, match=said("features train inputs=DistributedEmbedding(...)")):
        gs.PartitionDataModule(store=store.root).setup()
    model = gs.NodeClassifier(gs.model.GraphSAGE(16, 8, 4), inputs=embedding(store))
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, strategy="gnnscale", default_root_dir=tmp_path)
    with pytest.raises(PartitionStoreError, match=said("features features= train")):
        trainer.fit(model, gs.FullGraphDataModule(store=store.root))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strategy": "auto"}, 'GNNScaleStrategy SingleDeviceStrategy Trainer(strategy="gnnscale")'),
        ({"num_nodes": NUM + 1}, f"{NUM + 1} {NUM} num_nodes={NUM}"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, options, message):
    store = write_store(tmp_path / "store")
    inputs = gs.DistributedEmbedding(options.pop("num_nodes", NUM), 16)
    with pytest.raises(StrategyError, match=said(message)) as caught:
        fit(tmp_path, store.root, inputs, **options)
    assert "\n" not in str(caught.value)


def test_scaled_gradients_are_refused():
    trainer = SimpleNamespace(world_size=1, checkpoint_callbacks=[], precision="16-mixed")
    module = SimpleNamespace(trainer=trainer, inputs=gs.DistributedEmbedding(4, 2))
    with pytest.raises(StrategyError, match=said('"bf16-mixed" "32-true"')):
        TakesInputs.setup(module, "fit")


def test_one_process_without_checkpoints_needs_no_strategy(tmp_path):
    store = write_store(tmp_path / "store")
    trainer, _, _ = fit(tmp_path, store.root, embedding(store), strategy="auto", enable_checkpointing=False)
    assert float(trainer.callback_metrics["val_acc"]) > 0.8
