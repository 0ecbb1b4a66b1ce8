"""`gnnscale reproduce`: a step computed again is the same, and what has changed since the run is noticed."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph
from own_process import gnnscale

import lightning_gnnscale as gs
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.graph import batch_of
from lightning_gnnscale.strategy.receipt import RECEIPT, digest_of_batch, read_receipt
from tests.says import said

MODEL = """import lightning_gnnscale as gs


class Mine(gs.model.GraphSAGE):
    def layer(self, index, x, block):
        return super().layer(index, x, block) * 1.0

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * 1.0
"""
EVERY = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "filename": "'at-{step}'", "save_top_k": -1}
EVERY |= {"every_n_train_steps": 1, "auto_insert_metric_name": "false"}
RUN = [
    *(word for word in TINY if not word.startswith(("dataset", "partitioner", "num_parts"))), "store=kept", "seed=3",
    "model.backbone._target_=own_layers.Mine", "model.backbone.dropout=0.3", "trainer.max_epochs=3", "test=false",
    "datamodule.batch_size=4", "strategy.logical_ranks=2",
    *(f"++callbacks.every.{name}={value}" for name, value in EVERY.items()),
]  # fmt: skip
STORE = [word for word in TINY if word.startswith(("dataset", "partitioner", "num_parts"))]
STEPS = 4  # in an epoch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working folder with a run in it, of a model that lies there too."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny_graph()
        Path("own_layers.py").write_text(MODEL)
        main(["partition", *STORE, "output=kept"])
        main(["train", *RUN, "hydra.run.dir=run"])
    return folder


@pytest.fixture
def work(trained, tmp_path, monkeypatch):
    """A copy of that folder, to change."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace(str(trained), str(tmp_path / "work")))
    for path in Path("run/checkpoints").glob("best*"):
        path.unlink()
    sys.modules.pop("own_layers", None)
    return tmp_path / "work"


def reproduce(capsys, *words: str, run: str = "run") -> tuple[int, dict[str, str]]:
    """The exit code, and what is said of each thing."""
    capsys.readouterr()
    code = 0
    try:
        main(["reproduce", run, "trust_config=true", *words])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code != 2, err
    return code, dict(re.findall(r"^  (\w+) +(not the same|same|-) ", re.sub(r"$", " ", out, flags=re.M), re.M))


def differing(told: dict[str, str]) -> set[str]:
    return {what for what, verdict in told.items() if verdict == "not the same"}


def test_steps_are_the_same_from_the_seed_and_from_checkpoints(work, capsys):
    for step in (0, STEPS + 1):
        code, told = reproduce(capsys, f"step={step}")
        assert (code, differing(told)) == (0, set()), told
        assert {"code", "store", "start", "batch", "loss", "weights"} <= {k for k, v in told.items() if v == "same"}
    section = read_receipt("run")[0]
    assert [len(rows) for rows in section.epochs.values()] == [2 * STEPS] * 3
    assert section.rows(STEPS)[0] == 1 and len({row.key for row in section.rows(STEPS)[1]}) == 2
    # Of the first step there is always a digest of the weights, and at each epoch's end.
    assert section.rows(0)[1][-1].weights and [mark["step"] for mark in section.marks if not mark["saved"]] == [
        4,
        8,
        12,
    ]


def test_changed_weights_in_a_checkpoint_are_noticed(work, capsys):
    path = Path(f"run/checkpoints/at-{STEPS}.ckpt")
    saved = torch.load(path, weights_only=True)
    next(value for name, value in saved["state_dict"].items() if name.endswith("weight"))[0, 0] += 1e-6
    torch.save(saved, path)
    code, told = reproduce(capsys, f"step={STEPS}")
    assert code == 1 and differing(told) >= {"start", "weights"}
    assert told["batch"] == "same"
    path.unlink()  # from the one before it is the same
    assert reproduce(capsys, f"step={STEPS}") == (0, told | dict.fromkeys(differing(told), "same"))


def test_changed_code_of_a_step_is_noticed(work, capsys):
    Path("own_layers.py").write_text(MODEL.replace("edge_index) * 1.0", "edge_index) * 1.001"))
    code, told = reproduce(capsys, "step=1")
    assert code == 1 and differing(told) == {"code", "loss", "weights"}


def test_changed_settings_are_noticed(work, capsys):
    code, told = reproduce(capsys, "step=0", "model.lr=0.5")
    assert code == 1 and differing(told) == {"settings", "weights"}
    code, told = reproduce(capsys, "step=0", "sampler.fanouts=[1,1]")
    assert code == 1 and {"settings", "batch", "loss"} <= differing(told)
    assert reproduce(capsys, "step=0", "source.num_threads=2", "trainer.max_epochs=9")[0] == 0


def test_a_changed_store_is_refused_and_so_is_one_that_is_gone(work, capsys):
    np.save("x.npy", np.eye(40, 6, dtype=np.float32) * 2)
    shutil.move("kept", "old")
    line = refused(capsys, "reproduce", "run", "trust_config=true", "step=1")
    assert "store: kept: no such file or folder" in line
    main(["partition", *STORE, "output=kept"])
    line = refused(capsys, "reproduce", "run", "trust_config=true", "step=1")
    assert re.search(
        r"kept: the store has changed since the run: its manifest is \w{12}, and that of the run \w{12}", line
    )
    assert reproduce(capsys, "step=1", "store=old")[0] == 0


def test_wrong_input_is_refused(work, capsys):
    run = ("reproduce", "run", "trust_config=true")
    assert f"step must be in [0, {3 * STEPS - 1}]" in refused(capsys, *run, "step=99")
    assert "got -1" in refused(capsys, *run, "step=-1")
    assert f"say step=N, in [0, {3 * STEPS - 1}]" in refused(capsys, *run)
    assert "no such run" in refused(capsys, "reproduce", "nowhere", "step=1")
    assert "reproduce needs a run" in refused(capsys, "reproduce", "step=1")
    assert "step=2 goes with gnnscale reproduce RUN" in refused(capsys, "train", *RUN, "step=2")
    receipt = Path("run", RECEIPT)
    whole = receipt.read_text()
    receipt.write_text(whole.replace('"format": 1', '"format": 9'))
    assert "is of format 9, this version reads 1" in refused(capsys, *run, "step=1")
    receipt.write_text("\n".join(whole.splitlines()[:2]) + "\n" + whole.splitlines()[2][:50])  # a kill in a write
    assert "its receipt has no step" in refused(capsys, *run, "step=1")
    receipt.unlink()
    assert f"has no {RECEIPT}" in refused(capsys, *run, "step=1")


def test_a_run_that_went_on_begins_at_the_checkpoint_of_the_one_before(work, capsys):
    taken = Path(f"run/checkpoints/at-{STEPS}.ckpt")
    main(["train", *RUN, "hydra.run.dir=more", f"resume={taken}", "trust_config=true"])
    began = read_receipt("more")[0].began
    assert began["step"] == STEPS and began["checkpoint"].endswith(str(taken))
    code, told = reproduce(capsys, f"step={STEPS}", run="more")
    assert (code, told["start"], told["weights"]) == (0, "same", "same")
    assert f"step must be in [{STEPS}, " in refused(capsys, "reproduce", "more", "trust_config=true", "step=0")
    taken.unlink()
    line = refused(capsys, "reproduce", "more", "trust_config=true", f"step={STEPS}")
    assert f"{taken}, which is gone" in line
    # From one of its own, saved within the epoch that followed one of a last batch: Lightning had not counted it.
    assert reproduce(capsys, f"step={STEPS + 1}", run="more")[0] == 0


def test_a_trainer_in_python_keeps_a_receipt_beside_its_logs(tmp_path):
    edges = np.stack([np.arange(40), (np.arange(40) + 1) % 40])
    stream = gs.open_edge_stream(edges, num_nodes=40)
    parts = gs.partition(stream, method="random", num_parts=2)
    masks = {"train": np.ones(40, bool)}
    made = {"features": np.eye(40, 6, dtype=np.float32), "labels": np.arange(40) % 2, "masks": masks}
    store = gs.write_partition_store(tmp_path / "store", stream, parts, **made)

    def fresh(logger, ranks=2):
        torch.manual_seed(0)
        data = gs.PartitionDataModule(store=store, sampler=gs.NeighborSampler([2]), batch_size=5, seed=1)
        model = gs.NodeClassifier(gs.model.GraphSAGE(6, 4, 2, num_layers=1))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
        strategy = gs.GNNScaleStrategy(logical_ranks=ranks)
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=logger, strategy=strategy, **quiet)
        return trainer, model, data

    logger = L.pytorch.loggers.CSVLogger(tmp_path, version=0)
    trainer, model, data = fresh(logger)
    trainer.fit(model, data)
    lines: list[str] = []
    trainer, *rest = fresh(False)
    compared = gs.reproduce_step(logger.log_dir, 5, trainer, *rest, tell=lines.append)
    assert {one.what for one in compared if one.same is False} == set() and len(lines) == len(compared)
    start = next(one for one in compared if one.what == "start")
    assert "checkpoints" not in start.told  # the one that is there was saved after the step
    trainer, model, data = fresh(False)
    torch.nn.init.zeros_(next(model.parameters()))
    other = {
        one.what for one in gs.reproduce_step(logger.log_dir, 5, trainer, model, data, tell=None) if one.same is False
    }
    assert {"start", "loss", "weights"} <= other
    with pytest.raises(gs.StrategyError, match=said("the run had 2 logical ranks, the Trainer's strategy has 3")):
        gs.reproduce_step(logger.log_dir, 5, *fresh(False, 3), tell=None)


def test_the_digest_of_a_batch_sees_other_nodes_edges_and_seeds():
    def batch(nodes, edges=3, seeds=2):
        row = {"n_id": torch.tensor(nodes), "edge_index": torch.zeros(2, edges), "batch_size": seeds}
        return batch_of(SimpleNamespace(**row))

    one = digest_of_batch(batch([1, 2, 3]))
    assert digest_of_batch(batch([1, 2, 3])) == one
    typed = batch_of(SimpleNamespace(n_id={"a": 1}, edge_index={}, num_sampled_nodes={"a": [1, 2]}, batch_size="two"))
    assert digest_of_batch(typed)  # one of others is no error
    for other in (batch([1, 2, 4]), batch([2, 1, 3]), batch([1, 2, 3], edges=4), batch([1, 2, 3], seeds=1)):
        assert digest_of_batch(other) != one


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["gradient_averaging", "model_averaging"])
def test_steps_of_two_processes_are_computed_again_on_one(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()
    words = [*(word for word in TINY if "devices" not in word and "num_parts" not in word), "num_parts=4"]
    words += ["trainer.devices=2", "trainer.max_epochs=3", "datamodule.batch_size=4", f"strategy/weights={policy}"]
    done = gnnscale(tmp_path, "train", *words, "test=false", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    section = read_receipt("run")[0]
    assert section.began["processes"] == 2
    last = max(row.step for rows in section.epochs.values() for row in rows)
    for step in (0, last // 2, last):
        shutil.rmtree("stores")  # it is made again, the same
        code, told = reproduce(capsys, f"step={step}")
        assert (code, differing(told)) == (0, set()), (step, told)
        assert told["weights"] == told["loss"] == told["batch"] == "same"
