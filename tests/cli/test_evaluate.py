"""`gnnscale predict` and `test` of a run, resume= of a run's folder, and the settings of train for all commands."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph
from omegaconf import OmegaConf
from own_process import gnnscale

import lightning_gnnscale as gs
from lightning_gnnscale.cli.commands import locate
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.cli.run_paths import last_checkpoint, run_of
from tests.says import said


def write_graph() -> None:
    """The tiny graph, its nodes under names of the user's, and with edges of a text file."""
    write_tiny_graph()
    names = np.array([f"node {i:02}" for i in range(40)])
    edges = np.load("edges.npy")
    Path("named.csv").write_text("".join(f"{names[u]},{names[v]}\n" for u, v in edges.T))
    np.save("names.npy", names)


NAMED = [*(word for word in TINY if not word.startswith("dataset.edges")), "dataset.edges=named.csv"]
NAMED += ["dataset.relabel=true", "dataset.nodes=names.npy", "trainer.max_epochs=3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working folder with a run in it."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_graph()
    done = gnnscale(folder, "train", *NAMED, "predict=true", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def _in_that_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)


def summary(folder: str) -> dict:
    return json.loads(Path(folder, "summary.json").read_text())


def test_the_summary_holds_numbers():
    told = summary("run")
    assert isinstance(told["metrics"]["test_acc"], float) and isinstance(told["metrics"]["best_val_acc"], float)
    assert (told["epochs"], told["num_nodes"], told["num_parts"], told["command"]) == (3, 40, 2, "train")
    assert isinstance(told["training_peak_bytes"], int) and told["plan"]["num_parts"] == 2
    assert {type(value) for value in told["metrics"].values()} == {float}


def test_predictions_come_by_the_users_ids_as_those_of_training_did():
    main(["predict", "run"])
    written, before = (pq.read_table(path) for path in ("run/predict/predictions.parquet", "run/predictions.parquet"))
    assert written.equals(before)
    assert sorted(written["node"].to_pylist()) == [f"node {i:02}" for i in range(40)]
    assert summary("run/predict")["facts"]["checkpoint"].startswith(str(Path("run/checkpoints/best-").absolute()))


def test_a_checkpoint_and_settings_may_be_given():
    main(["predict", "run/checkpoints/last.ckpt", "model.predict_logits=true", "hydra.run.dir=logits"])
    assert len(pq.read_table("logits/predictions.parquet")["prediction"][0]) == 2
    main(["predict", *NAMED, "resume=run", "hydra.run.dir=again"])
    assert pq.read_table("again/predictions.parquet").equals(pq.read_table("run/predictions.parquet"))


def test_testing_finds_what_training_found():
    main(["test", "run"])
    assert summary("run/test")["metrics"]["test_acc"] == summary("run")["metrics"]["test_acc"]
    assert summary("run")["command"] == "train"  # the run's own is as it was


def test_a_new_version_is_predicted_where_it_changed(caplog):
    logging.getLogger("lightning.pytorch.predictions").addHandler(caplog.handler)  # Lightning's may not propagate
    main(["predict", "run", "keep_layers=true"])
    Path("tonight.csv").write_text("id,a,b,c,d,e,f\nnode 40,1,0,0,0,0,1\n")
    Path("tonight_edges.csv").write_text("src,dst\nnode 03,node 40\nnode 40,node 20\n")
    rows = ["change.edges=tonight_edges.csv", "change.nodes=tonight.csv:id", "change.features=tonight.csv:a,b,c,d,e,f"]
    main(["update", summary("run")["store"], *rows, "output=grown", "drift=9", "overwrite=true"])
    main(["predict", "run", "store=grown", "hydra.run.dir=every"])
    main(["predict", "run", "store=grown", "changed=run/predict", "hydra.run.dir=few"])
    assert "Predictions: 7 of 41 nodes are computed again" in caplog.text
    assert "and hidden layers those of run/predict/predictions.layers" in caplog.text.replace(f"{Path.cwd()}/", "")
    few, every = (pq.read_table(f"{name}/predictions.parquet") for name in ("few", "every"))
    assert few.num_rows == 41 and few.equals(every)
    config = Path("run/config.yaml")
    before = config.read_text()
    try:  # that of a run of before the setting was there
        config.write_text("".join(line for line in before.splitlines(True) if not line.startswith("changed:")))
        caplog.clear()
        main(["predict", "run", "store=grown", "changed=true"])
        assert "Predictions: 7 of 41 nodes" in caplog.text
    finally:
        config.write_text(before)
        logging.getLogger("lightning.pytorch.predictions").removeHandler(caplog.handler)
    assert pq.read_table("run/predict/predictions.parquet").equals(every)


@pytest.mark.sweep
def test_two_processes_keep_layers_as_one_does(trained):
    edges = ["change.edges=some.csv", "drift=9", "overwrite=true", "output=linked"]
    Path("some.csv").write_text("src,dst\nnode 03,node 09\n")
    main(["update", summary("run")["store"], *edges])
    main(["predict", "run", "store=linked", "keep_layers=true", "hydra.run.dir=one"])
    for words in (["hydra.run.dir=two_all"], ["store=linked", "changed=two_all", "hydra.run.dir=two"]):
        done = gnnscale(trained, "predict", "run", *words, "keep_layers=true", "trainer.devices=2")
        assert done.returncode == 0, done.stderr
    assert "nodes are computed again" in done.stderr and "two_all/predictions.layers" in done.stderr
    assert pq.read_table("two/predictions.parquet").equals(pq.read_table("one/predictions.parquet"))
    tables = sorted(path.name for path in Path("one/predictions.layers").glob("*.npy"))
    assert tables == sorted(path.name for path in Path("two/predictions.layers").glob("*.npy")) == ["layer1.npy"]
    two, one = (np.load(f"{name}/predictions.layers/layer1.npy") for name in ("two", "one"))
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


def test_changed_goes_with_a_store_that_is_predicted(capsys):
    assert "changed=True goes with gnnscale predict RUN store=" in refused(capsys, "predict", "run", "changed=true")
    assert "changed=True goes with" in refused(capsys, "test", "run", "store=grown", "changed=true")
    line = refused(capsys, "train", "resume=run", "predict=false", "keep_layers=true")
    assert "keep_layers=true keeps the hidden layers of predictions, and none are written: say predict=true" in line
    line = refused(capsys, "predict", "run", "keep_layers=true", "evaluation.mode=sampled")
    assert "computed layer by layer: say evaluation=layerwise" in line
    line = refused(capsys, "predict", "run", "store=grown", "changed=nowhere.parquet")
    assert "changed=nowhere.parquet: no such file" in line


def test_a_graph_without_labels_is_predicted():
    main(["predict", "run", "dataset.labels=null", "hydra.run.dir=bare", "paths.stores=bare/stores"])
    assert pq.read_table("bare/predictions.parquet").equals(pq.read_table("run/predictions.parquet"))


def test_a_run_goes_on_from_its_folder():
    main(["train", *NAMED, "resume=run", "trainer.max_epochs=4", "hydra.run.dir=longer"])
    told = summary("longer")
    assert (told["epochs"], told["facts"]["epochs of this run"]) == (4, 1)
    assert told["facts"]["goes on from"].startswith("run/checkpoints/last.ckpt")


def test_a_run_goes_on_with_its_own_settings():
    Path("run/test").mkdir(exist_ok=True)  # as `gnnscale test` leaves it: no group of settings
    main(["train", "resume=run", "trainer.max_epochs=4", "test=false", "paths.runs=own"])
    (folder,) = Path("own/named").iterdir()
    told = summary(str(folder))
    assert (told["epochs"], told["num_nodes"], told["store"]) == (4, 40, summary("run")["store"])
    assert "hidden_channels: 4" in (folder / "config.yaml").read_text()


def test_a_choice_or_a_recipe_gives_all_settings(monkeypatch):
    own = locate("train", ["resume=run", "trainer.max_epochs=4", "~callbacks.last", "+trainer.max_steps=3"])
    assert OmegaConf.load(Path(own.config_dir, f"{own.config_name}.yaml")) == OmegaConf.load("run/config.yaml")
    for words in (["dataset=files"], ["strategy/weights=model_averaging"], ["recipe=demo"]):
        assert locate("train", ["resume=run", *words]).config_name in ("train", "demo")
    assert locate("train", ["resume=null"]).config_name == "train"
    own = locate("train", ["resume=run", "hydra.run.dir=there"])
    assert [word for word in own.words if word.startswith("hydra.run.dir=")] == ["hydra.run.dir=there"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # whose ranks share a folder
    assert not [word for word in locate("train", ["resume=run"]).words if word.startswith("hydra.run.dir=")]


def test_a_path_may_hold_an_equals_sign(capsys):
    folder = Path("lightning_logs/v=0/checkpoints")
    folder.mkdir(parents=True)
    shutil.copy("run/config.yaml", folder.parent)
    named = shutil.copy("run/checkpoints/last.ckpt", folder / "epoch=7-step=64.ckpt")
    main(["predict", str(named)])
    assert pq.read_table("lightning_logs/v=0/predict/predictions.parquet").num_rows == 40
    main(["inspect", str(named)])
    assert "GraphSAGE" in capsys.readouterr().out
    assert f"++resume='{Path(named).absolute()}'" in locate("train", [f"resume={named}"]).words
    assert f"resume='{named}'" in locate("train", [f"resume={named}", "recipe=demo"]).words


def test_an_unfinished_run_says_how_it_goes_on(capsys):
    for name in ("killed", "failed"):
        Path(name).mkdir()
        shutil.copy("run/config.yaml", name)
    shutil.copytree("run/checkpoints", "killed/checkpoints")
    main(["inspect", "killed"])
    assert "gnnscale train resume=killed goes on with the same settings" in capsys.readouterr().out
    main(["inspect", "failed"])
    told = capsys.readouterr().out
    assert "no, and no checkpoint was saved" in told and "resume=" not in told


def test_test_metrics_stand_in_the_metrics_file():
    lines = Path("run/metrics/metrics.csv").read_text().splitlines()
    last = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
    assert float(last["test_acc"]) == summary("run")["metrics"]["test_acc"] and last["epoch"] == "2"
    assert "hidden_channels: 4" in Path("run/metrics/hparams.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["predict"], "predict needs a checkpoint: say gnnscale predict RUN"),
        (["test", "run", "model=gcn"], "model= would change a choice of the run"),
        (["predict", "run", "recipe=demo"], "takes the settings of the run: leave recipe= out"),
        (["predict", "run", "again"], "predict takes one path, got run again"),
        (["predict", "edges.npy"], "edges.npy: not a run's folder, nor a checkpoint in one"),
        (["train", "run"], "run is not a setting: say key=value"),
        (["predict", "run", "model.backbone.hidden_channels=8"], "a checkpoint of another model than this"),
        (["train", "resume=nowhere"], "nowhere: no such run"),
        (["train", "resume=edges.npy"], "give the settings of train, dataset= and model= among them, and resume=edges"),
        (["train", *NAMED, "resume=stores"], "resume=stores: there is no checkpoint in stores"),
        (["inspect", "edges.npy"], "inspect takes a run's folder, a checkpoint, or a store"),
        (["inspect", "nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_what_does_not_fit_is_one_line(capsys, words, part):
    assert part in refused(capsys, *words)


def test_partition_verify_inspect_and_plan_take_the_words_of_train(capsys):
    for command, part in (
        ("partition", "edges stored"),
        ("verify", "all as written"),
        ("inspect", "labels                 2 classes"),
        ("plan", "p, parts"),
    ):
        main([command, *NAMED])
        assert part in capsys.readouterr().out
    assert "no store of named with these settings is in" in refused(capsys, "verify", *NAMED, "num_parts=3")


def test_inspect_tells_runs_and_checkpoints_and_stores(capsys):
    store = summary("run")["store"]
    for path, parts in (
        ("run", ["run named", "GraphSAGE", "last.ckpt", "test_acc"]),
        ("run/checkpoints/last.ckpt", ["GraphSAGE(in_channels=6, hidden_channels=4, out_channels=2", "best val_acc"]),
        (store, ["nodes                  40", "2 by random", "the user's own", "train nodes"]),
    ):
        main(["inspect", path])
        out = capsys.readouterr().out
        for part in parts:
            assert part in out
    stands = gs.PartitionStore.open(store)  # shown last
    for number, train in enumerate(np.split(stands.masks["train"], stands.part_offsets[1:-1])):
        part = stands.load_part(number)
        assert f" {number} {part.num_core} {part.num_halo} {train.sum()} " in " ".join(out.split()) + " "


def test_checkpoints_open_without_a_backbone():
    model = gs.NodeClassifier.load_from_checkpoint("run/checkpoints/last.ckpt")
    assert (model.backbone.in_channels, model.backbone.out_channels, model.num_classes) == (6, 2, 2)


def test_a_path_of_a_run_is_told_apart(tmp_path):
    assert run_of("run") == run_of("run/checkpoints/last.ckpt") == Path("run").absolute()
    for job in ("0", "1"):
        (tmp_path / job).mkdir()
        (tmp_path / job / "config.yaml").touch()
    with pytest.raises(UsageError, match=said("runs (0, 1)")):
        run_of(str(tmp_path))
    assert last_checkpoint("some.ckpt") == "some.ckpt"
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "epoch3.ckpt").touch()
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "last.ckpt")
