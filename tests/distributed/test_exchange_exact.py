"""What must not change a bit: bounds of zero, validation between epochs, and a resumed run."""

import pytest
import torch
from exchange_runs import fit_and_tell
from full_graph_runs import fit, make_model, make_trainer, write_store
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.strategy import (
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    HaloExchange,
    NoExchange,
    Quantized,
    SkipBroadcast,
    VariationGap,
)

pytestmark = pytest.mark.sweep

WORLD_SIZE = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store")


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# -- bounds of zero

EXACT = {
    "halo": HaloExchange(),
    "halo, pulled": HaloExchange(backward="auto"),
    "broadcast": BroadcastExchange(),
}
BOUNDS = (EpochFixed(0), EpochAdaptive(0), VariationGap(0))
ZERO = [
    (backbone, inner) for inner in EXACT for backbone in ("gcn", "gat") if (backbone, inner) != ("gat", "halo, pulled")
]


def train_with_bounds_of_zero(folder, root):
    results = {}
    for backbone, inner in ZERO:
        policies = {"exact": EXACT[inner]} | {
            (type(bound).__name__, rows): SkipBroadcast(bound, EXACT[inner], rows=rows)
            for bound in BOUNDS
            for rows in ("block", "row")
        }
        for name, policy in policies.items():
            weights, metrics = fit(folder, root, make_model(backbone, dropout=0.3), policy, max_epochs=4)
            results[backbone, inner, name] = weights, [epoch["train_loss"] for epoch in metrics]
    return results


def test_a_bound_of_zero_is_the_exact_exchange_bit_for_bit(root, tmp_path):
    for results in launch(WORLD_SIZE, train_with_bounds_of_zero, tmp_path, root, limit_s=280):
        for backbone, inner, name in results:
            weights, losses = results[backbone, inner, name]
            exact_weights, exact_losses = results[backbone, inner, "exact"]
            assert equal(weights, exact_weights) and losses == exact_losses, (backbone, inner, name)


# -- evaluation

EVALUATED = {
    "halo": HaloExchange(),
    "broadcast": BroadcastExchange(),
    "4-bit differences": Quantized(4, backward_threshold=1.0),
    "2 bits": Quantized(2, delta=False),
    "blocks in turns": SkipBroadcast(EpochAdaptive(2)),
    "changed rows": SkipBroadcast(VariationGap(0.05), rows="row"),
    "quantised and extrapolated": SkipBroadcast(EpochFixed(1), Quantized(8), stale="extrapolate"),
    "none": NoExchange(),
}


def train_with_and_without_validation(folder, root):
    results = {}
    for name, policy in EVALUATED.items():
        backbone = "gat" if name == "changed rows" else "gcn"
        runs = []
        for limit in (0, 1.0):
            model = make_model(backbone, dropout=0.3)
            options = {"max_epochs": 4, "limit_val_batches": limit, "num_sanity_val_steps": -1 if limit else 0}
            runs.append(fit(folder, root, model, policy, **options))
        results[name] = backbone, *runs, evaluate(folder, root, model, policy)
    return results


def evaluate(folder, root, model, policy=None):
    """Test and predict with a trained model; return metrics, and (nodes, outputs) of this rank."""
    trainer = make_trainer(folder, policy or HaloExchange(), limit_val_batches=1.0)
    model.predict_logits = True
    data = gs.FullGraphDataModule(store=root)
    metrics = trainer.validate(model, data, verbose=False)[0] | trainer.test(model, data, verbose=False)[0]
    (predicted,) = trainer.predict(model, data)
    return metrics, torch.from_numpy(predicted["nodes"]), predicted["prediction"]


def evaluate_all(folder, root, trained):
    """Evaluate weights on one process."""
    results = {}
    for name, (backbone, weights) in trained.items():
        model = make_model(backbone, dropout=0.3)
        model.load_state_dict(weights)
        results[name] = evaluate(folder, root, model)
    return results


@pytest.fixture(scope="module")
def evaluated(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    runs = launch(WORLD_SIZE, train_with_and_without_validation, folder / "train", root, limit_s=280)
    trained = {name: (backbone, with_validation[0]) for name, (backbone, _, with_validation, _) in runs[0].items()}
    return runs, launch(1, evaluate_all, folder / "alone", root, trained)[0]


@pytest.mark.parametrize("name", list(EVALUATED))
def test_validation_between_epochs_changes_nothing(evaluated, name):
    for results in evaluated[0]:
        _, (without, losses), (with_validation, losses_with), _ = results[name]
        assert equal(without, with_validation)
        assert [epoch["train_loss"] for epoch in losses] == [epoch["train_loss"] for epoch in losses_with]
        assert len({epoch["val_loss"] for epoch in losses_with}) == len(losses_with)


@pytest.mark.parametrize("name", list(EVALUATED))
def test_evaluation_is_that_of_one_process_with_the_same_weights(evaluated, name):
    runs, alone = evaluated
    single, nodes, outputs = alone[name]
    assert nodes.tolist() == list(range(len(nodes)))
    # counts are the same, sums of float32 losses are taken in another order
    for results in runs:
        _, _, (_, epochs), (metrics, _, _) = results[name]
        for split in ("val", "test"):
            assert metrics[f"{split}_acc"] == single[f"{split}_acc"]
            assert metrics[f"{split}_loss"] == pytest.approx(single[f"{split}_loss"], rel=1e-6)
        assert (epochs[-1]["val_acc"], epochs[-1]["val_loss"]) == (metrics["val_acc"], metrics["val_loss"])
    assert torch.equal(torch.cat([results[name][3][1] for results in runs]), nodes)
    gathered = torch.cat([results[name][3][2] for results in runs])
    assert torch.allclose(gathered, outputs, rtol=0, atol=1e-12)


# -- resuming

RESUMED_FROM, RESUMED_EPOCHS = 2, 5  # two epochs are done, so that epoch 2 is the first after the resume
RESUMED = {
    "halo": HaloExchange(backward="auto"),
    "broadcast": BroadcastExchange(),
    "16 bits, no differences": Quantized(16, delta=False, backward_threshold=1.0),
    "none": NoExchange(),
    # both send everything in epoch 2 and then know the same
    "every other epoch": SkipBroadcast(EpochFixed(1)),
    "rows every other epoch": SkipBroadcast(EpochFixed(1), rows="row"),
}
RESTARTED = {
    "every fourth epoch": SkipBroadcast(EpochFixed(3)),
    "in turns, by row": SkipBroadcast(EpochAdaptive(2), rows="row"),
    "known versions": SkipBroadcast(EpochAdaptive(3, [0, 0, 0])),
    "changed blocks": SkipBroadcast(VariationGap(1e6)),
    "4-bit differences": Quantized(4),
}


def train_and_resume(folder, root):
    results = {}
    for name, policy in (RESUMED | RESTARTED).items():
        runs, path = [], folder / name / f"epoch={RESUMED_FROM - 1}.ckpt"
        for given in (None, path):
            kept = ModelCheckpoint(dirpath=folder / name, filename="{epoch}", save_top_k=-1)
            run = fit_and_tell(
                folder, f"{name}{'' if given is None else ', resumed'}", root, make_model("gcn", dropout=0.3), policy,
                callbacks=[kept] if given is None else [], ckpt_path=given, max_epochs=RESUMED_EPOCHS,
                enable_checkpointing=given is None,
            )  # fmt: skip
            runs.append(run)
        results[name] = runs
    return results


@pytest.fixture(scope="module")
def resumed(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    return folder, launch(WORLD_SIZE, train_and_resume, folder, root, limit_s=280)


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(resumed, name):
    for results in resumed[1]:
        (whole, metrics, _), (again, metrics_again, _) = results[name]
        assert equal(whole, again)
        losses, losses_again = ([epoch["train_loss"] for epoch in run] for run in (metrics, metrics_again))
        assert losses[RESUMED_FROM:] == losses_again


def forward_bytes(event):
    return sum(entry["bytes"] for entry in event["bytes"] if entry["direction"] == "forward")


@pytest.mark.parametrize("name", list(RESTARTED))
def test_the_first_epoch_after_a_resume_is_exact(resumed, name):
    """Rows of float64 as they are, all of them, and the first loss is that of exact training from the checkpoint."""
    exact = [forward_bytes(results["halo"][0][2][0]) for results in resumed[1]]
    for rank, results in enumerate(resumed[1]):
        (_, _, whole), (_, _, told) = results[name]
        assert [event["epoch"] for event in told] == list(range(RESUMED_FROM, RESUMED_EPOCHS))
        assert forward_bytes(told[0]) == exact[rank]
        assert all(row["skipped"] == 0 for row in told[0]["rows"])
        # else it would show nothing
        assert forward_bytes(whole[RESUMED_FROM]) < exact[rank]


def first_epoch_exactly(folder, root, path):
    model = make_model("gcn", dropout=0.3)
    _, metrics = fit(folder, root, model, HaloExchange(), ckpt_path=path, max_epochs=RESUMED_FROM + 1)
    return metrics[0]["train_loss"]


def test_the_first_loss_after_a_resume_is_the_exact_one(resumed, root, tmp_path):
    folder, runs = resumed
    name = "4-bit differences"
    path = folder / name / f"epoch={RESUMED_FROM - 1}.ckpt"
    (exact,) = launch(1, first_epoch_exactly, tmp_path, root, path)
    assert runs[0][name][1][1][0]["train_loss"] == pytest.approx(exact, abs=1e-12)
    assert runs[0][name][0][1][RESUMED_FROM]["train_loss"] != pytest.approx(exact, abs=1e-6)


# When the rows were sent that receivers hold; of changed blocks each rank knows its own alone.
STAMPS = {
    "every other epoch": lambda epoch: [epoch - epoch % 2] * WORLD_SIZE,
    "changed blocks": lambda epoch: [min(epoch, 1)],
    "4-bit differences": lambda epoch: [epoch] * WORLD_SIZE,
    "halo": lambda epoch: [-1] * WORLD_SIZE,
}


@pytest.mark.parametrize("name", list(RESUMED | RESTARTED))
def test_checkpoints_hold_stamps_and_no_rows(resumed, name):
    folder, _ = resumed
    for epoch in range(RESUMED_EPOCHS):
        checkpoint = torch.load(folder / name / f"epoch={epoch}.ckpt", weights_only=True)
        stamps = checkpoint["gnnscale_exchange"]
        assert stamps["policy"] == repr((RESUMED | RESTARTED)[name])
        assert len(stamps["versions"]) == WORLD_SIZE
        for versions in stamps["versions"]:
            assert set(versions) == {1, 2}
            assert all(layer.dtype == torch.int64 and layer.dim() == 1 for layer in versions.values())
            if name in STAMPS:
                assert [layer.tolist() for layer in versions.values()] == [STAMPS[name](epoch)] * 2
        plain = make_model("gcn").state_dict()
        assert {key: value.shape for key, value in checkpoint["state_dict"].items()} == {
            key: value.shape for key, value in plain.items()
        }
