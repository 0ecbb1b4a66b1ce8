"""Two ranks that train from the same Ray workers: rank 0 starts Ray, both share a coordinator, and no bit changes."""

import tempfile
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch
from full_graph_runs import write_store
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale import events

pytestmark = pytest.mark.sweep

pytest.importorskip("ray", reason="the extra [ray] is not installed")

RUNS = {
    "averaged models": (gs.ModelAveraging, {"num_workers": 2}, {}),
    "averaged gradients": (
        gs.GradientAveraging,
        {"num_workers": 2, "batches_per_group": 2, "cache_rows": 20},
        {"scope": "part", "interleave_parts": 2},
    ),
}


class NewSampler(L.Callback):
    """Gives the loader its sampler again after the first epoch, as `LocalityController` does: its source is another."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0 and trainer.datamodule.scope == "part":
            trainer.datamodule._train_loader.set_sampler(trainer.datamodule.sampler)


def train(folder: Path, root: str, name: str) -> tuple[dict, dict, dict, list[str]]:
    """Train from threads, then from Ray."""
    tempfile.tempdir = str(folder)
    return _fit(folder, root, name, "threads"), *_from_ray(folder, root, name)


def _from_ray(folder: Path, root: str, name: str) -> tuple[dict, dict, list[str]]:
    weights = _fit(folder, root, name, gs.RayWorkers(**RUNS[name][1]))
    told = [event for event in events.recent() if event["event"] == "preparation"]
    return weights, told[-1], [child.name() for child in psutil.Process().children(recursive=True)]


def _fit(folder: Path, root: str, name: str, source) -> dict:
    weights, _, options = RUNS[name]
    dm = gs.PartitionDataModule(
        store=root, sampler=gs.NeighborSampler([3, 3]), batch_size=8, seed=1, source=source, **options
    )
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes), lr=0.02)
    L.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=[NewSampler()],
        strategy=gs.GNNScaleStrategy(weights=weights()),
    ).fit(model, dm)  # fmt: skip
    return model.state_dict()


@pytest.mark.parametrize("name", [pytest.param("averaged models", marks=pytest.mark.slow), "averaged gradients"])
def test_two_ranks_share_workers(tmp_path, name):
    root = tmp_path / "store"
    write_store(root)
    both = launch(2, train, tmp_path / "ranks", str(root), name, limit_s=200)
    assert not list(tmp_path.rglob("gnnscale-ray-*")), "where ranks met is removed"
    for plain, weights, told, children in both:
        assert all(torch.equal(weights[key], plain[key]) for key in plain)
        assert told["num_batches"] > 0
        assert not [child for child in children if "ray" in child], "Ray ended with the fit"
    batches, groups = (sum(told[key] for _, _, told, _ in both) for key in ("num_batches", "num_groups"))
    assert batches > 1.2 * groups if name == "averaged gradients" else batches == groups
