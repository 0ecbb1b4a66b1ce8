"""Heterogeneous graphs on 1, 2 and 4 processes: the weights of one, whatever saves and goes on (Invariants 2 and 7)."""

import lightning as L
import numpy as np
import pytest
import torch
from processes import launch

import lightning_gnnscale as gs

COUNTS = {"author": 120, "paper": 200, "institution": 12}
NUM_PARTS, NUM_EPOCHS = 5, 3  # parts do not divide by 2 or 4
SAVED_EPOCH, SAVED_BATCHES = 1, (0, 2)
FANOUTS = {"*": [3, 2], "author,writes,paper": [4, 2]}
CASES = {
    "models": {"weights": gs.ModelAveraging()},
    "models, shared state": {"weights": gs.ModelAveraging(optimizer_state="shared")},
    "models, in time": {"weights": gs.ModelAveraging(), "times": True},
    "gradients": {"weights": gs.GradientAveraging(), "scope": "graph"},
    "gradients, mixed parts": {"weights": gs.GradientAveraging(), "scope": "part", "interleave_parts": 2},
}
SAME = ("models", "models, in time")  # whose weights no number of processes changes
pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")]


class SaveWithin(L.Callback):
    """Saves after some batches of an epoch, on every rank."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == SAVED_EPOCH and batch_idx in SAVED_BATCHES:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def write_store(root):
    rng = np.random.default_rng(0)
    edges, nodes = {}, {node_type: {"num_nodes": count} for node_type, count in COUNTS.items()}
    for source, name, target, size in (
        ("author", "writes", "paper", 600),
        ("paper", "cites", "paper", 1200),
        ("author", "at", "institution", 150),
    ):
        ends = [rng.integers(0, COUNTS[node_type], size) for node_type in (source, target)]
        edges[source, name, target] = {"edges": np.stack(ends), "time": rng.integers(0, 1000, size)}
    labels = rng.integers(0, 4, COUNTS["paper"])
    nodes["paper"] |= {"labels": labels, "time": rng.integers(0, 1000, COUNTS["paper"])}
    rows = np.eye(4, 6)[labels] + 0.3 * rng.standard_normal((COUNTS["paper"], 6))
    nodes["paper"]["features"] = rows.astype(np.float32)
    nodes["author"]["features"] = rng.random((COUNTS["author"], 3), np.float32)
    data = gs.hetero_graph(nodes, edges, fractions=(0.6, 0.2, 0.2))
    arrays = {"features": data.features, "labels": data.labels, "masks": data.masks}
    parts = gs.partition(data.stream, "random", num_parts=NUM_PARTS)
    gs.write_partition_store(root, data.stream, parts, **arrays, node_time=data.node_time, edge_time=data.edge_time)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store")


def fit(folder, root, case, callbacks=(), ckpt_path=None):
    times = {"temporal_strategy": "uniform", "strictly_before": True} if case.get("times") else {}
    given = {"evaluation": "sampled" if times else "layerwise"}
    given |= {key: case[key] for key in ("scope", "interleave_parts") if key in case}
    dm = gs.PartitionDataModule(store=root, sampler=gs.NeighborSampler(FANOUTS, **times), batch_size=8, seed=3, **given)
    torch.manual_seed(0)
    store = dm.store
    widths = dict(zip(store.schema.node_types, store.features.dims, strict=True))
    model = gs.NodeClassifier(gs.model.RGCN(widths, 8, dm.num_classes, dropout=0.3, schema=store.schema), lr=0.02)
    trainer = L.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), max_epochs=NUM_EPOCHS, logger=False,
        enable_checkpointing=False, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, strategy=gs.GNNScaleStrategy(weights=case["weights"]), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(model, dm, ckpt_path=ckpt_path)
    state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    tested = trainer.test(model, dm, verbose=False)[0]
    return {"state": state, "acc": tested["test_acc"], "loss": float(trainer.callback_metrics["test_loss"])}


def run_cases(folder, root, names, resumed):
    results = {}
    for name in names:
        own, case = folder / name, CASES[name]
        found = results[name] = {"undisturbed": fit(folder, root, case)}
        if resumed:
            found["saved"] = fit(folder, root, case, [SaveWithin(own)])
            for batch in SAVED_BATCHES:
                found[batch] = fit(folder, root, case, ckpt_path=own / f"{batch}.ckpt")
    return results


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    names = {1: SAME, 2: list(CASES), 4: SAME}
    return {
        size: launch(size, run_cases, folder / str(size), root, given, size == 2, limit_s=280)
        for size, given in names.items()
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SAME)
def test_any_number_of_processes_gives_the_same_weights(runs, name, size):
    alone = runs[1][0][name]["undisturbed"]
    for result in (results[name]["undisturbed"] for results in runs[size]):
        for key, value in alone["state"].items():
            assert torch.allclose(result["state"][key], value, atol=1e-5, rtol=0), key
        assert result["acc"] == pytest.approx(alone["acc"], abs=0.03)
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-3)


@pytest.mark.parametrize("name", list(CASES))
def test_replicas_stay_equal(runs, name):
    first, other = (results[name]["undisturbed"] for results in runs[2])
    assert [key for key, value in first["state"].items() if not torch.equal(value, other["state"][key])] == []
    assert (other["acc"], other["loss"]) == (first["acc"], first["loss"])


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_saved_within_an_epoch_equals_the_undisturbed_one_bit_for_bit(runs, name):
    for results in runs[2]:
        whole = results[name]["undisturbed"]
        for run, other in results[name].items():
            differ = [key for key, value in whole["state"].items() if not torch.equal(value, other["state"][key])]
            assert differ == [] and other["loss"] == whole["loss"], run
