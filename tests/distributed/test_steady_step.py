"""In the steady step on a GPU the host waits for nothing, and collectives take tensors of the device alone.

No GPU is needed: see `tests/fake_gpu.py`. The last tests run the same on a card, under torch's own check.
"""

import pytest
import torch
from full_graph_runs import fit, make_model, write_store
from lightning.pytorch.callbacks import Callback
from partition_stand_ins import Classifier, PartsData, train

from lightning_gnnscale.strategy import (
    BoundedGradientStaleness,
    BroadcastExchange,
    EpochFixed,
    GNNScaleStrategy,
    GradientAveraging,
    HaloExchange,
    ModelAveraging,
    SkipBroadcast,
)
from tests.fake_gpu import CUDA, FakeAccelerator, fake_gpu


class Steady(Callback):
    """Notes waits from the third batch of an epoch up to its last one."""

    def __init__(self, begin, end):
        self.begin, self.end = begin, end

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self.begin()
        if trainer.is_last_batch:
            self.end()


WEIGHTS = {
    "gradients": lambda: GradientAveraging(),
    "gradients, small buckets": lambda: GradientAveraging(bucket_bytes=64),
    "gradients, after the backward": lambda: GradientAveraging(overlap=False),
    "gradients, clipped": lambda: GradientAveraging(local_clip=1.0),
    "models": lambda: ModelAveraging(),
    "models, every second": lambda: ModelAveraging(every_n_epochs=2),
    "models, control variates": lambda: ModelAveraging(control_variates=True),
}


def here(data):
    """Let the loader's batches lie on the device, as `DeviceBatches` gives them."""
    make = data.train_dataloader

    def on_device():
        loader = make()
        loader.parts = [(part, [(x.to(CUDA), y.to(CUDA)) for x, y in batches]) for part, batches in loader.parts]
        return loader

    data.train_dataloader = on_device
    return data


def fit_on_fake(folder, monkeypatch, weights, model=None):
    """Train this rank of two for two epochs on the stand-in; return what the host waited for in the steady steps."""
    with fake_gpu(monkeypatch, world_size=2) as gpu:
        steady = Steady(lambda: setattr(gpu, "steady", True), lambda: setattr(gpu, "steady", False))
        strategy = GNNScaleStrategy(weights=weights, process_group_backend="fake")
        train(
            folder, model=model or Classifier(dropout=0.3), data=here(PartsData(sizes=(24, 24))), strategy=strategy,
            accelerator=FakeAccelerator(), devices=1, num_nodes=2, max_epochs=2, callbacks=[steady],
            limit_val_batches=0, log_every_n_steps=1000,
        )  # fmt: skip
        assert "allreduce_" in gpu.collectives
        return gpu.waits


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_the_host_waits_for_nothing(tmp_path, monkeypatch, name):
    assert fit_on_fake(tmp_path, monkeypatch, WEIGHTS[name]()) == []


def test_what_the_host_waits_for_is_found(tmp_path, monkeypatch):
    class Reading(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() < 1e9 else None

    class Unused(Classifier):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.ones(3))

    waits = fit_on_fake(tmp_path, monkeypatch, GradientAveraging(), Reading())
    assert {wait.split(":")[0] for wait in waits} == {"item"}
    waits = fit_on_fake(tmp_path, monkeypatch, GradientAveraging(), Unused())
    assert set(waits) == {"tolist: lightning_gnnscale/strategy/weights/gradient_buckets.py, take"}


EXCHANGES = {
    "halo, pushed": lambda: HaloExchange(backward="push"),
    "halo, pulled": lambda: HaloExchange(backward="pull"),
    "broadcast": lambda: BroadcastExchange(),
    "every second epoch": lambda: SkipBroadcast(EpochFixed(1)),
    "gradients of others kept": lambda: HaloExchange(backward="push"),
}


_OF = "lightning_gnnscale/strategy/exchange"
# Rows of zeros are left out of what is pulled: how many there are must be known before they are sent.
FULL_GRAPH_WAITS = {
    "halo, pulled": {
        f"a mask as an index: {_OF}/layer_exchange.py, sample_rows",
        f"a mask as an index: {_OF}/layer_exchange.py, _sampled_gradients",
        f"a mask as an index: {_OF}/message.py, pack_chosen",
        f"copy from memory that is not pinned: {_OF}/transport.py, _agree_and_begin",
        f"tolist: {_OF}/transport.py, _agree_and_begin",
    },
    # Replicas are averaged where gradients are joined again, and Adam counts its steps on the CPU.
    "gradients of others kept": {
        "item: lightning_gnnscale/strategy/averaging.py, averaged",
        "copy from memory that is not pinned: lightning_gnnscale/strategy/averaging.py, weighted_sum",
        "copy to the host: lightning_gnnscale/strategy/averaging.py, load_state",
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store")


@pytest.mark.parametrize("backbone", ["gcn", "graphsage"])
@pytest.mark.parametrize("name", list(EXCHANGES))
def test_the_host_waits_for_nothing_in_a_step_on_the_full_graph(tmp_path, monkeypatch, root, name, backbone):
    take = GNNScaleStrategy.optimizer_step
    with fake_gpu(monkeypatch, world_size=2) as gpu:

        def step(self, *given, **named):
            gpu.steady = self.lightning_module.trainer.current_epoch >= 2
            out = take(self, *given, **named)
            gpu.steady = False
            return out

        monkeypatch.setattr(GNNScaleStrategy, "optimizer_step", step)
        weights = BoundedGradientStaleness(1) if name == "gradients of others kept" else None
        fit(
            tmp_path, root, make_model(backbone, dropout=0.3, dtype=torch.float32), EXCHANGES[name](), weights,
            max_epochs=5, accelerator=FakeAccelerator(), devices=1, num_nodes=2,
        )  # fmt: skip
        assert {"alltoall_base_", "broadcast_"} & {*gpu.collectives}
        assert {*gpu.waits} == FULL_GRAPH_WAITS.get(name, set())


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_on_a_card_torch_finds_no_wait_either(tmp_path, name):
    mode = torch.cuda.set_sync_debug_mode
    steady = Steady(lambda: mode("error"), lambda: mode("default"))
    try:
        train(
            tmp_path, WEIGHTS[name](), Classifier(), here(PartsData(sizes=(24, 24))), accelerator="gpu", devices=1,
            max_epochs=2, callbacks=[steady], limit_val_batches=0, log_every_n_steps=1000,
        )  # fmt: skip
    finally:
        mode("default")
