"""Saves inside an epoch: they leave training as it was, and a run that goes on from one equals one that never ended."""

import lightning as L
import pytest
import torch
from full_graph_runs import write_store
from lightning.pytorch.plugins.precision import MixedPrecision
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.errors import StrategyError

NUM_EPOCHS, SAVED_EPOCH = 3, 1
# Parts have 1, 5, 1, 0 and 0 batches. One process saves between two parts and twice inside one, the last time inside a
# window; of two, rank 0 saves between two parts and when it has no batch left, and rank 1 inside its one part.
SAVED_BATCHES = (0, 2, 3)
ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
CASES = {
    "per part": {"weights": {}},
    "per part, interval 2": {"weights": {"every_n_epochs": 2}},
    "part-major, interval 2": {"weights": {"every_n_epochs": 2, "part_major": True}},
    "shared": {"weights": {"optimizer_state": "shared"}},
    "shared, interval 2": {"weights": {"optimizer_state": "shared", "every_n_epochs": 2}},
    "accumulated, shared, interval 2": {
        "weights": {"optimizer_state": "shared", "every_n_epochs": 2},
        "trainer": ACCUMULATED,
    },
    "accumulated, gradient scaler": {"weights": {}, "trainer": ACCUMULATED, "half": True},
    "accumulated, control variates": {"weights": {"control_variates": True}, "trainer": ACCUMULATED},
    "per part, steps estimated": {"weights": {}, "estimated": True},
    "gradients": {"data": {"scope": "part", "interleave_parts": 2, "batch_size": 2}},
    "gradients, steps estimated": {"data": {"batch_size": 2, "scope": "graph"}, "estimated": True},
    "gradients, accumulated": {
        "trainer": ACCUMULATED | {"accumulate_grad_batches": 3},
        "data": {"batch_size": 2, "scope": "graph"},
    },
}


class Halving(gs.NodeClassifier):
    """A classifier whose learning rate is halved every third step; it may ask how many steps there will be."""

    estimated = False

    def configure_optimizers(self):
        if self.estimated:
            assert self.trainer.estimated_stepping_batches > 0  # makes the loader before a checkpoint is read
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class SaveWithin(L.Callback):
    """Saves after some batches of an epoch, on every rank."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == SAVED_EPOCH and batch_idx in SAVED_BATCHES:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def fit(folder, root, case, callbacks=(), ckpt_path=None):
    weights = gs.ModelAveraging(**case["weights"]) if "weights" in case else gs.GradientAveraging()
    options = dict(case.get("trainer", {}))
    if case.get("half"):
        # It overflows at first, so that parts skip steps until their own scale has come down.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    dm = gs.PartitionDataModule(
        store=root, sampler=gs.NeighborSampler([3, 3]), seed=3, **{"batch_size": 4} | case.get("data", {})
    )
    torch.manual_seed(0)
    backbone = gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes, dropout=0.3, norm="batch")
    model = Halving(backbone)
    model.estimated = case.get("estimated", False)
    trainer = L.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), max_epochs=NUM_EPOCHS, logger=False,
        enable_checkpointing=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0, strategy=gs.GNNScaleStrategy(weights=weights), callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(model, dm, ckpt_path=ckpt_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {"epochs": torch.tensor(trainer.current_epoch), "steps": torch.tensor(trainer.global_step)}


def run_cases(folder, root, names):
    results = {}
    for name in names:
        own, case = folder / name, CASES[name]
        results[name] = {
            "undisturbed": fit(folder, root, case),
            "saved": fit(folder, root, case, [SaveWithin(own)]),
        }
        for batch in SAVED_BATCHES:
            results[name][batch] = fit(folder, root, case, ckpt_path=own / f"{batch}.ckpt")
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store", sizes=(3, 51, 12, 12, 12))


@pytest.fixture(scope="module", params=[1, 2])
def runs(request, root, tmp_path_factory):
    return launch(request.param, run_cases, tmp_path_factory.mktemp("runs"), root, list(CASES), limit_s=280)


def test_one_process_goes_on_within_a_round(root, tmp_path):
    (results,) = launch(1, run_cases, tmp_path, root, ["per part"])
    whole = results["per part"]["undisturbed"]
    for run, other in results["per part"].items():
        assert [key for key in whole if not torch.equal(whole[key], other[key])] == [], run


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(CASES))
def test_a_run_saved_within_an_epoch_equals_the_undisturbed_one_bit_for_bit(runs, name):
    for results in runs:
        whole = results[name]["undisturbed"]
        for run, other in results[name].items():
            assert [key for key in whole if not torch.equal(whole[key], other[key])] == [], run


@pytest.mark.sweep
def test_a_rank_without_training_nodes_has_no_optimizer_state_to_go_on_from(tmp_path):
    root = write_store(tmp_path / "store", sizes=(0, 66, 0, 12, 12))  # rank 0 owns the parts 0, 2 and 4
    for results in launch(2, run_cases, tmp_path / "runs", root, ["shared"]):
        whole = results["shared"]["undisturbed"]
        for run, other in results["shared"].items():
            assert [key for key in whole if not torch.equal(whole[key], other[key])] == [], run


def save_within(folder, root, name):
    fit(folder, root, CASES[name], [SaveWithin(folder)])


def resume_refused(folder, root, name, path):
    with pytest.raises(StrategyError) as caught:
        fit(folder, root, CASES[name], ckpt_path=path)
    return str(caught.value)


@pytest.mark.sweep
def test_another_number_of_processes_is_refused_within_an_epoch_of_averaged_models(root, tmp_path):
    launch(2, save_within, tmp_path / "2", root, "per part")
    message = launch(1, resume_refused, tmp_path / "1", root, "per part", tmp_path / "2" / "0.ckpt")[0]
    assert "is within an epoch of 2 processes, this run has 1" in message and "from the end of an epoch" in message
