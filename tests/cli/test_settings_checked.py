"""Settings that are unknown, without effect or out of range: one line before the store is made."""

import os
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph

from lightning_gnnscale.cli.checks import check_settings, planned_devices
from lightning_gnnscale.cli.compose import compose_config, written
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.cli.ranks import accelerator, set_matmul_precision, trains_on
from lightning_gnnscale.cli.recipes import available_recipes, recipes_folder, take_recipe
from tests.says import said
from tests.tiers import first

ONE_EPOCH = [*TINY, "trainer.max_epochs=1"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()


def refused_early(capsys, *words: str) -> str:
    line = refused(capsys, *words)
    assert not Path("stores").exists()
    return line


WITHOUT_FANOUTS = [word for word in ONE_EPOCH if not word.startswith("sampler.")]
NO_BATCHES = "has no effect, full-graph training has no batches of parts: leave it out"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["sampler=layerwise", "model.backbone.num_layers=3"], ["sampler.num_layers makes 2 hops", "num_layers is 3"]),
        (["sampler=layerwise", "sampler.num_layers=null", "sampler.nodes_per_layer=[8,8,8]"],
         ["sampler.nodes_per_layer makes 3 hops", "num_layers is 2"]),
        (["datamodule=full_graph", "rows=tiered"], [f"rows=tiered {NO_BATCHES}"]),
        (["datamodule=full_graph", "sampler.fanouts=[5,5]"], [f"sampler.fanouts=[5,5] {NO_BATCHES}"]),
        (["datamodule=full_graph", "pack_halo=true"], [f"pack_halo=true {NO_BATCHES}"]),
        (["datamodule.mode=full_batch", "sampler=cluster"], ["sampler=cluster has no effect, with datamodule.mode="]),
    ],
)  # fmt: skip
def test_training_refuses_samplers_that_do_not_go_with_the_run(capsys, words, parts):
    line = refused_early(capsys, "train", *WITHOUT_FANOUTS, *words)
    for part in parts:
        assert part in line


@first(34)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["+foo=3"], ["foo is not a setting; the top level takes dataset"]),
        (["+paths.foo=3"], ["paths.foo is not a setting; paths takes"]),
        (["+trainer.max_tim=1"], ["trainer.max_tim is not a setting", "max_time"]),
        (["+callbacks.foo.patience=3"], ["callbacks.foo is not a setting"]),
        (["trainer.strategy=ddp"], ["trainer.strategy=ddp has no effect", "say strategy="]),
        (["feature_storage=int2"], ["feature_storage must be null or one of float32, float16, bfloat16", "'int2'"]),
        (["datamodule.feature_storage=int8"], ["feature_storage=int8 has no effect", "say feature_storage="]),
        (["datamodule.batchsize=4"], ["datamodule.batchsize is not a setting", "takes mode, batch_size, halo_hops"]),
        (["+trainer.accumulate_grad_batches=0"], ["trainer.accumulate_grad_batches", "of at least 1, got 0"]),
        (["model.lr=-1"], ["model.lr must be a number above 0, got -1"]),
        (["datamodule.batch_size=0"], ["gnnscale: datamodule.batch_size must be an integer of at least 1, got 0"]),
        (["datamodule.scope=all"], ["gnnscale: datamodule.scope must be one of auto, part, parts, graph, got 'all'"]),
        (["sampler.fanouts=[0,5]"], ["gnnscale: sampler.fanouts[0] must be an integer >= 1, or -1 for all"]),
        (["strategy.timeout=-1"], ["gnnscale: strategy.timeout must be a number of seconds > 0, got -1"]),
        (["seed=-5"], ["seed must be an integer in [0, 4294967295], got -5"]),
        (["num_parts=many"], ["num_parts must be an integer of at least 1, or auto, got many"]),
        (["callbacks=early_stopping", "callbacks.early_stopping.patience=-1"],
         ["callbacks.early_stopping.patience must be an integer of at least 0, got -1"]),
        (["callbacks.checkpoint.monitor=val_accuracy"],
         ["callbacks.checkpoint.monitor: no val_accuracy is logged; NodeClassifier logs train_loss, val_loss, val_"]),
        (["callbacks.checkpoint.monitor=val_loss"],
         ["callbacks.checkpoint: mode=max keeps the largest val_loss; say callbacks.checkpoint.mode=min"]),
        (["sampler.fanouts=[2,2,2]"], ["sampler.fanouts makes 3 hops", "num_layers is 2"]),
        (["partitioner.num_parts=4"], ["partitioner.num_parts=4 has no effect", "say num_parts="]),
        (["trainer.logger=foo"], ["trainer.logger must be true, false or a logger with its _target_, got foo"]),
        (["callbacks.checkpoint=5"], ["callbacks.checkpoint must be null or settings with a _target_, got 5"]),
        (["seed=null"], ["seed must be an integer, got null"]),
        (["resume=5"], ["resume must be text, got 5"]),
        (["trainer.num_nodes=2"], ["trainer.num_nodes=2", "torchrun or srun"]),
        (["strategy/weights=model_averaging", "trainer.devices=3"],
         ["trainer.devices=3 is more than the 2 parts", "num_parts=3"]),
        (["model.backbone.dropout=2"], ["model.backbone.dropout must be in [0, 1), got 2"]),
        (["+model.loss=cee"], ["model.loss must be", "'cee'"]),
        (["dataset.reader=3"], ["dataset.reader must hold names with values each", "got 3"]),
        (["dataset.features=x.npz"], ["dataset.features: x.npz is an archive of x"]),
        (["dataset.labels=several.npy"], ["several labels per node must each be 0, 1 or -1", "nan in row 3, column 1"]),
        (["dataset.edge_weight=weight.npy"], ["edge_weight: edge 7 is nan"]),
        (["dataset.edge_weight=below.npy", "model=gcn"], ["edge_weight goes down to -2, and GCN needs weights"]),
        # More of these kinds, in `make test-all`.
        (["+trainerr.x=1"], ["trainerr is not a setting"]),
        (["++foo=3"], ["foo is not a setting"]),
        (["+callbacks.foo=3"], ["callbacks.foo is not a setting"]),
        (["trainer.callbacks=[1,2]"], ["trainer.callbacks=[1, 2] has no effect", "say callbacks="]),
        (["feature_storage=8"], ["feature_storage must be text, got 8"]),
        (["datamodule.num_parts=4"], ["datamodule.num_parts=4 has no effect", "say num_parts="]),
        (["planner.batch_size=0"], ["planner.batch_size=0 has no effect", "say datamodule.batch_size="]),
        (["model.lr=nan"], ["model.lr must be a number above 0, got nan"]),
        (["model.weight_decay=-1"], ["model.weight_decay must be a number of at least 0, got -1"]),
        (["source.num_threads=0"], ["gnnscale: source.num_threads must be an integer of at least 1, got 0"]),
        (["strategy/weights=model_averaging", "strategy.weights.every_n_epochs=0"],
         ["gnnscale: strategy.weights.every_n_epochs must be an integer of at least 1, got 0"]),
        (["num_parts=0"], ["num_parts must be an integer of at least 1, or auto, got 0"]),
        (["num_devices=3"], ["num_devices=3 has no effect here: say trainer.devices="]),
        (["trainer.check_val_every_n_epoch=0"], ["trainer.check_val_every_n_epoch", "of at least 1, got 0"]),
        (["name=null"], ["name must be text or an integer, got null"]),
        (["test=null"], ["test must be true or false, got null"]),
        (["model.lr=null"], ["model.lr must be a number, got null"]),
        (["model.backbone.hidden_channels=null"], ["model.backbone.hidden_channels must be an integer, got null"]),
        (["strategy/weights=model_averaging", "strategy.weights.every_n_epochs=null"],
         ["strategy.weights.every_n_epochs must be an integer, got null"]),
        (["trainer.devices=null"], ["trainer.devices must be an integer or text or a list like [1,2], got null"]),
        (["output=true"], ["output must be text, got True"]),
        (["evaluation.scratch=5"], ["evaluation.scratch must be text, got 5"]),
        (["paths.generated=5"], ["paths.generated must be text, got 5"]),
        (["+model.optimizer={_target_:torch.optim.SGD,_partial_:true,lr:-2}"], ["model.optimizer: ", "-2"]),
        (["dataset.hold_out=3"], ["dataset.hold_out must hold names with values each", "got 3"]),
        (["dataset.labels=empty.npy"], ["dataset.labels: empty.npy is not a .npy file"]),
    ],
)  # fmt: skip
def test_training_refuses_before_the_store_is_made(capsys, words, parts):
    Path("empty.npy").touch()
    np.savez("x.npz", x=np.ones((40, 2)))
    several = np.zeros((40, 3))
    several[3, 1] = np.nan
    np.save("several.npy", several)
    np.save("below.npy", np.where(np.arange(40) == 7, -2.0, 1.0))
    np.save("weight.npy", np.where(np.arange(40) == 7, np.nan, 1.0))
    line = refused_early(capsys, "train", *ONE_EPOCH, *words)
    for part in parts:
        assert part in line


MODELS = "strategy/weights=model_averaging"
FULL_GRAPH = ["datamodule=full_graph", "strategy/weights=gradient_averaging"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([MODELS, "+trainer.max_steps=10"], ["Trainer(max_steps=10) stops inside a round", "use max_epochs"]),
        ([MODELS, "+trainer.val_check_interval=0.5"], ["Trainer(val_check_interval=0.5) validates inside a round"]),
        ([MODELS, "trainer.check_val_every_n_epoch=null"], ["Trainer(check_val_every_n_epoch=None) counts validation"]),
        ([MODELS, "+trainer.max_time=00:00:10:00"], ["Trainer(max_time=...) stops inside a round"]),
        ([MODELS, "+trainer.sync_batchnorm=true", "trainer.devices=2"],
         ["Trainer(sync_batchnorm=True) makes ranks wait"]),
        ([MODELS, "+callbacks.checkpoint.every_n_train_steps=5"],
         ["ModelCheckpoint(every_n_train_steps=5) saves inside"]),
        ([*FULL_GRAPH, "+trainer.accumulate_grad_batches=2"], ["Trainer(accumulate_grad_batches=2)", "leave it at 1"]),
        ([*FULL_GRAPH, "strategy/exchange=halo", "trainer.precision=bf16-true"],
         ["HaloExchange sends rows of float32", "bf16-mixed"]),
        ([MODELS, "datamodule.scope=graph"], ['scope="graph" gives ModelAveraging batches that belong to no part']),
        (["strategy/weights=gradient_averaging", "datamodule.scope=part", "sampler=saint"],
         ["GradientAveraging needs as many batches on every rank"]),
    ],
)  # fmt: skip
def test_what_the_strategy_refuses_is_refused_before_the_store_is_made(capsys, words, parts):
    words_of_a_sampler = "sampler=saint" in words or "datamodule=full_graph" in words
    tiny = [word for word in ONE_EPOCH if not (words_of_a_sampler and word.startswith("sampler."))]
    line = refused_early(capsys, "train", *tiny, *words)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("command", ["plan", "partition"])
@pytest.mark.parametrize("devices", ["auto", "[]", "0", "-1"])
def test_a_plan_needs_a_number_of_devices(capsys, command, devices):
    line = refused_early(capsys, command, "recipe=cora", f"trainer.devices={devices}")
    assert f"trainer.devices={devices} gives the plan no number of devices; say num_devices=" in line


@pytest.mark.parametrize(
    ("words", "gpus", "taken"),
    [
        (["trainer.devices=2"], 1, "cpu"),
        (["trainer.devices=2"], 2, "auto"),
        (["trainer.devices=1"], 1, "auto"),
        (["trainer.devices=2"], 0, "auto"),
        (["trainer.devices=2", "trainer.accelerator=gpu"], 1, "gpu"),
        (["trainer.devices=auto"], 1, "auto"),
    ],
)
def test_more_processes_than_gpus_run_on_the_cpu(monkeypatch, capsys, words, gpus, taken):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert accelerator(compose_config("train", words).trainer) == taken
    said = "gnnscale: 2 processes and 1 GPU: they run on the CPU; trainer.devices=1 takes what there is"
    assert (said in capsys.readouterr().err) == (taken == "cpu")


@pytest.mark.parametrize("recipe", ["train", "data_placement", "cagnet"])
def test_a_run_takes_the_gpus_that_are_there(monkeypatch, capsys, recipe):
    """One GPU trains on the GPU; without one, two processes on the CPU, and four of the recipe that splits a graph."""
    on_cpu = 4 if recipe == "cagnet" else 2
    for gpus, words, number in [(0, (), on_cpu), (1, (), 1), (8, (), 8), (8, ("trainer.accelerator=cpu",), on_cpu)]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        folder = None if recipe == "train" else str(recipes_folder())
        config = compose_config(recipe, [*words], folder)
        assert (config.trainer.devices, planned_devices(config)) == (number, number)
        assert written(config)["trainer"]["devices"] == number
        accelerator(config.trainer)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "device", "count", "told"),
    [
        (0, "cpu", 2, "trains on the CPU in 2 processes: torch sees no GPU"),
        (1, "cpu", 1, "trains on the CPU in 1 process: its GPUs are not used: see trainer.accelerator"),
        (
            2,
            "cuda",
            2,
            "trains on 2 GPUs (H200), precision bf16-mixed; products of float32 in TF32 "
            "(trainer.precision=32-true matmul_precision=highest: all of float32)",
        ),
    ],
)
def test_the_first_line_says_what_a_run_takes(monkeypatch, gpus, device, count, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H200")
    root = SimpleNamespace(root_device=torch.device(device))
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    trainer = SimpleNamespace(
        num_devices=count, num_nodes=1, device_ids=[*range(count)], strategy=root, precision=precision
    )
    assert trains_on(trainer, "high") == told


@pytest.mark.parametrize(
    ("gpus", "capability", "words", "precision"),
    [
        (0, (9, 0), [], "32-true"),
        (2, (8, 0), [], "bf16-mixed"),
        (2, (7, 5), [], "32-true"),
        (2, (9, 0), ["trainer.accelerator=cpu"], "32-true"),
        (2, (9, 0), ["trainer.devices=3"], "32-true"),
        (2, (9, 0), ["trainer.devices=3", "trainer.accelerator=gpu"], "bf16-mixed"),
        (2, (9, 0), ["trainer.precision=32-true"], "32-true"),
    ],
)
def test_a_run_computes_in_what_its_gpus_have(monkeypatch, gpus, capability, words, precision):
    """A CPU computes as ever."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    config = compose_config("train", words)
    assert config.trainer.precision == precision
    for recipe in ("sdt_gnn", "sancus", "graphsaint"):
        assert compose_config(recipe, [], str(recipes_folder())).trainer.precision == "32-true", "as in the paper"


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["high"]), ("cpu", [])])
def test_products_of_a_cpu_stay_as_they_are(monkeypatch, device, expected):
    told = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", told.append)
    set_matmul_precision(
        "high", SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device))), None, "fit"
    )
    assert told == expected


@pytest.mark.parametrize("wanted", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there(monkeypatch, wanted):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    said = (
        rf"^trainer.accelerator={wanted}: no GPU was found; say trainer.accelerator=auto or cpu \(gnnscale doctor shows"
    )
    with pytest.raises(UsageError, match=said):
        accelerator(compose_config("train", [f"trainer.accelerator={wanted}"]).trainer)


def test_a_list_of_devices_is_counted():
    for devices, number in [("[0,1]", 2), ("3", 3), ("'4'", 4)]:
        assert planned_devices(compose_config("train", [f"trainer.devices={devices}"])) == number
    assert planned_devices(compose_config("train", ["trainer.devices=auto", "num_devices=5"])) == 5


@pytest.mark.parametrize(
    ("command", "words", "parts"),
    [
        ("plan", ["planner.fanouts=3"], ["planner.fanouts must be a list like [25, 10], one a hop, got 3"]),
        ("plan", ["planner.batch_size=0"], ["planner.batch_size must be an integer of at least 1, got 0"]),
        ("plan", ["+planner.num_parts=2.5"], ["planner.num_parts must be an integer", "got 2.5"]),
        ("plan", ["planner.num_devices=1.5"], ["planner.num_devices must be an integer", "got 1.5"]),
        ("partition", ["seed=-5"], ["seed must be an integer in [0, 4294967295], got -5"]),
        ("partition", ["+foo=3"], ["foo is not a setting"]),
        ("partition", ["num_devices=1.5"], ["num_devices=1.5 gives the plan no number of devices"]),
        ("partition", ["planner.num_parts=3"], ["planner.num_parts=3 has no effect", "say num_parts="]),
    ],
)
def test_other_commands_refuse_too(capsys, command, words, parts):
    line = refused_early(capsys, command, *words)
    for part in parts:
        assert part in line


def test_plus_still_adds_what_a_target_takes():
    words = [
        "+trainer.max_steps=-1",
        "+trainer.accumulate_grad_batches=1",
        "+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor",
        "callbacks.timer={_target_:lightning.pytorch.callbacks.Timer,interval:epoch}",
        "+strategy.weights.bucket_bytes=1000000",
        "strategy/weights=gradient_averaging",
        "test=false",
        "hydra.run.dir=run",
    ]
    main(["train", *ONE_EPOCH, *words])
    assert len(list(Path("run/checkpoints").glob("*.ckpt"))) == 2
    assert len(os.listdir("stores")) >= 1


@pytest.fixture
def own_sampler():
    """A sampler of the user's, in a module of the working folder, whose name no other test uses."""
    name = f"walks_{uuid.uuid4().hex}"
    text = (Path(__file__).parents[2] / "docs/howto/own_sampler.md").read_text()
    source = text[text.index("from dataclasses") : text.index("```\n\n`sample`")]
    Path(f"{name}.py").write_text(source.replace("    def num_b", "    length: int = 3\n\n    def num_b", 1))
    return f"{name}.SeedsOnly"


def test_a_module_of_the_working_folder_is_found(own_sampler):
    words = [word for word in ONE_EPOCH if not word.startswith("sampler.")]
    own = ["~sampler", f"+sampler={{_target_: {own_sampler}, length: 4}}", "source=processes", "test=false"]
    before = list(sys.path)
    main(["train", *words, *own, "hydra.run.dir=run"])
    assert "length: 4" in Path("run/config.yaml").read_text()
    assert sys.path == before


def test_the_form_that_puts_an_own_class_in_place_is_named(capsys, own_sampler):
    words = [word for word in ONE_EPOCH if not word.startswith("sampler.")]
    form = f"say '~sampler' '+sampler={{_target_: {own_sampler}, ...}}'"
    for given in (f"sampler._target_={own_sampler}", f"sampler={own_sampler}"):
        assert form in refused(capsys, "train", *words, given)
    missing = refused(capsys, "train", *words, "~sampler", f"+sampler={{_target_: no_{own_sampler}}}")
    assert "(No module named 'no_walks_" in missing and "looked for in the current folder and on PYTHONPATH" in missing


@pytest.mark.parametrize(
    "words",
    [
        ["datamodule=full_graph", "strategy/exchange=skip_epoch_fixed"],
        ["model=gat", "sampler=saint"],
        ["model=link_gcn", "sampler=links", "callbacks=links"],
        ["model=link_gcn", "sampler=links", "callbacks=links", "callbacks.checkpoint.monitor=val_hits@10"],
        ["callbacks=early_stopping", "callbacks.early_stopping=null"],
        ["callbacks.checkpoint.monitor=null", "datamodule.mode=full_batch", "model.backbone.num_layers=5"],
        ["trainer.devices=auto", "num_parts=auto"],
    ],
)
def test_settings_that_go_together(words):
    check_settings(compose_config("train", words))


@pytest.mark.parametrize("name", [name for name in available_recipes() if not name.startswith("bench/")])
def test_settings_of_recipes_go_together(name):
    config_dir, config_name, _ = take_recipe("train", [f"recipe={name}"])
    check_settings(compose_config(config_name, [], config_dir))


def test_monitors_of_links_are_their_own():
    words = ["model=link_gcn", "sampler=links", "callbacks=links"]
    with pytest.raises(UsageError, match=said("val_hits@7 LinkPredictor val_mrr val_hits@1")):
        check_settings(compose_config("train", [*words, "callbacks.checkpoint.monitor=val_hits@7"]))
    with pytest.raises(UsageError, match=said("val_acc LinkPredictor val_mrr callbacks=links")):
        check_settings(compose_config("train", words[:2]))
