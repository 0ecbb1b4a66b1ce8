"""What the command line says of wrong words: one line, the key, and what is allowed; nothing is started."""

import os

import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.commands import locate
from lightning_gnnscale.cli.compose import prepare_overrides
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import flags_first, main
from tests.says import said


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["frobnicate"], ["no command 'frobnicate'", "train, test, predict, reproduce, partition, plan, verify"]),
        (["bench", "speed"], ["no benchmark 'speed'", "accuracy, averaging, elastic, exchange"]),
        (["train", "recipe=nothing"], ["recipe=nothing", "no such recipe", "demo"]),
        (["train", "recipe=./none.yaml"], ["recipe=./none.yaml", "no such file"]),
        (["train", "recipe=demo", "recipe=cora"], ["recipe= is given 2 times"]),
        (["train", "recipe=bench/scaling"], ["another command: gnnscale bench partition recipe=bench/scaling"]),
        (
            ["bench", "spring", "recipe=bench/scaling"],
            ["another command: gnnscale bench partition recipe=bench/scaling"],
        ),
        (["bench", "partition", "recipe=demo"], ["recipe=demo is one of another command: gnnscale train recipe=demo"]),
        (["bench", "partition", "bench.graph=x"], ["bench.graph is not a setting", "graphs, methods, parts"]),
        (["bench", "partition", "bench.methods=spring"], ["bench.methods must be a list"]),
        (
            ["bench", "parts", "bench.graphs=[cora]"],
            ["bench.graphs holds names", "got [cora]", "'+bench.graphs={name:"],
        ),
        (["bench", "partition", "bench.parts=[]"], ["bench.parts must name at least one, got []"]),
        (["bench", "averaging", "bench.devices=0"], ["bench.devices must be at least 1, got 0"]),
        (["train", "sead=1"], ["sead is not a setting", "seed"]),
        (["train", "model=gnc"], ["model=gnc", "gat", "gcn", "graphsage"]),
        (
            ["train", "partitioner=ldgg"],
            ["partitioner=ldgg: no such choice (did you mean ldg?); there are", "dbh, fennel", "ldg,", "metis"],
        ),
        (
            ["train", "rows=planed"],
            ["rows=planed: no such choice (did you mean planned?); there are auto, ", "owners", "tiered"],
        ),
        (["train", "strategy/exchange=skip_broadcast"], ["strategy.exchange.bound has no value"]),
        (["train", "datamodule.batchsize=4"], ["datamodule.batchsize is not a setting", "batch_size"]),
        (["train", "datamodule.batch_size=many"], ["datamodule.batch_size must be an integer", "'many'"]),
        (["train", "trainer.max_epoch=4"], ["trainer.max_epoch is not a setting", "max_epochs"]),
        (["train", "paths.run=x"], ["paths.run is not a setting", "runs, stores"]),
        (["train", "model.backbone.width=4"], ["model.backbone.width is not a setting", "hidden_channels"]),
        (["train", "dataset=npz", "dataset.name=corra"], ["corra"]),
        (["train", "dataset=files", "dataset.edges=none.npy"], ["none.npy"]),
        (["plan", "planner.num_devices=0"], ["num_devices must be an integer of at least 1, got 0"]),
        (["plan", "planner.device_memory_bytes=10zz"], ["device_memory_bytes", "24GiB"]),
    ],
)
def test_one_line(capsys, words, parts):
    line = refused(capsys, *words)
    for part in parts:
        assert part in line


def test_a_recipe_may_not_be_named_like_a_config_of_the_package(capsys, tmp_path):
    for name in ("mine.yaml", "verify.yaml"):
        (tmp_path / name).write_text("defaults: [/train, _self_]\nname: mine\n")
    for name in ("mine.yaml", "verify.yaml"):
        assert "verify.yaml has the name of a config of the package; rename it" in refused(
            capsys, "train", f"recipe={name}"
        )
    assert "recipe=mine: no such recipe in the package; for the file here say recipe=mine.yaml" in refused(
        capsys, "train", "recipe=mine"
    )
    (tmp_path / "mine.yml").touch()
    assert "files that end in .yaml; rename it" in refused(capsys, "train", "recipe=mine.yml")


def test_plan_prints_every_term(capsys):
    main(["plan", "planner.num_devices=4", "planner.device_memory_bytes=1GiB"])
    out = capsys.readouterr().out
    assert "S = CSC + features" in out
    assert "p, parts" in out
    assert not os.listdir()


def test_help_names_commands_and_recipes(capsys):
    main(["--help"])
    out = capsys.readouterr().out
    for word in ("train", "partition", "plan", "bench", "recipe=NAME", "demo"):
        assert word in out


def test_values_need_no_plus_and_hydra_keeps_its_own():
    words = ["a.b=1", "model=gcn", "hydra.run.dir=x", "+new.key=2", "seed=3", "--multirun", "~callbacks.checkpoint"]
    assert prepare_overrides(words) == ["++a.b=1", *words[1:]]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("dataset.features=nodes.csv:a,b", '"nodes.csv:a,b"'),
        ("dataset.features=s3://bucket/my data/n.tsv.gz:a b,c", '"s3://bucket/my data/n.tsv.gz:a b,c"'),
        ("dataset.features=a.csv:x,b.csv:x", "a.csv:x,b.csv:x"),  # two files: a sweep
        ("sampler.fanouts=15,10", "15,10"),
        ("dataset.features='nodes.csv:a,b'", "'nodes.csv:a,b'"),
        ("dataset.nodes={paper:{features:p.csv:a}}", "{paper:{features:p.csv:a}}"),
    ],
)
def test_columns_of_a_table_are_one_value(word, value):
    assert prepare_overrides([word]) == [f"++{word.partition('=')[0]}={value}"]


def test_traceback_when_asked(monkeypatch):
    """The error goes on to whoever shows it: `test_garbage_held` ends a program with one."""
    monkeypatch.setenv("GNNSCALE_TRACEBACK", "1")
    with pytest.raises(ValueError, match=said("num_devices 1 0")):
        main(["plan", "planner.num_devices=0"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a=1", "--multirun", "seed=0,1"], ["--multirun", "a=1", "seed=0,1"]),
        (["a=1", "-c", "job", "b=2", "--package=x"], ["-c", "job", "--package=x", "a=1", "b=2"]),
        (["a=-1", "~b"], ["a=-1", "~b"]),
        (["a=1", "--cfg"], ["--cfg", "a=1"]),
    ],
)
def test_flags_may_stand_anywhere(words, expected):
    assert flags_first(words) == expected


@pytest.mark.parametrize("word", ["~model.backbone", "~strategy/weights", "+dataset.x=1", "--cfg", "a.b=~/c"])
def test_what_takes_a_setting_away_is_no_path(word):
    assert locate("train", [word]).words == [word]


@pytest.mark.parametrize("command", ["stores", "report"])
def test_the_value_of_a_flag_is_no_action_and_no_run(command):
    assert locate(command, ["a=1", "--cfg", "job"]).words == ["a=1", "--cfg", "job"]


def test_paths_and_actions_are_settings():
    assert locate("stores", ["clean", "x", "dry_run=true"]).words == ["action=clean", "names=['x']", "dry_run=true"]
    assert locate("report", ["a", "output=o", "b"]).words == ["runs=['a','b']", "output=o"]
    assert locate("inspect", ["a"]).words == ["path='a'"] and locate("verify", ["a"]).words == ["store='a'"]


def test_the_value_of_a_flag_is_no_path(capsys):
    main(["train", "recipe=demo", "--cfg", "job", "seed=7"])
    assert "seed: 7\n" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["stores/mine", "~/stores/mine", "mine"])
def test_a_path_is_none_of_the_settings_of_train(word):
    with pytest.raises(UsageError, match=said("setting key=value")):
        locate("train", [word])
