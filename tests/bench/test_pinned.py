"""A benchmark of a paper composes to the same settings, whatever the defaults of this package become."""

import shutil
from pathlib import Path

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

from benchmarks.accuracy import AccuracyBench
from benchmarks.averaging import AveragingBench
from benchmarks.exchange import ExchangeBench
from benchmarks.experiment import run_rows
from benchmarks.locality import LocalityBench
from benchmarks.pinned import CHOICES, PAPERS, pinned
from benchmarks.runner import Runner
from lightning_gnnscale.cli.compose import compose_config, group_choices

CONF, RECIPES = (Path(__file__).parents[2] / name for name in ("conf", "recipes"))
# What decides no figure: where files lie, what is printed, sizes that are planned or found, names of checkpoints.
FREE = ("paths", "planner", "machines", "num_devices", "verify", "overwrite", "output", "storage_options", "hydra")
FREE += ("storage_timeout_s", "store_cache_bytes", "callbacks.checkpoint.filename", "callbacks.last")
FREE += ("callbacks.checkpoint.auto_insert_metric_name",)
OTHERS = {
    "dataset": "files",
    "partitioner": "metis",
    "rows": "tiered",
    "sampler": "layerwise",
    "source": "processes",
    "datamodule": "full_graph",
    "evaluation": "sampled",
    "model": "sgc",
    "callbacks": "early_stopping",
    "weights": "bounded_gradient_staleness",
    "exchange": "quantized",
}


def changed(node, key=None):
    """Return a settings file's content with another value for each number and switch."""
    if isinstance(node, DictConfig):
        inner = {name: changed(node._get_node(name), name) for name in node}
        if "defaults" in inner:
            inner["defaults"] = [changed_choice(one) for one in inner["defaults"]]
        return inner
    if isinstance(node, ListConfig):
        return [changed(node._get_node(i)) for i in range(len(node))]
    value = node._value()
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


def changed_choice(one):
    if not isinstance(one, dict):
        return one
    return {group: OTHERS.get(group, choice) for group, choice in one.items()}


@pytest.fixture(scope="module")
def other_defaults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf") / "conf"
    shutil.copytree(CONF, folder, ignore=shutil.ignore_patterns("*.py", "bench", "__pycache__"))
    for path in folder.rglob("*.yaml"):
        head = "# @package _global_\n" if "@package _global_" in path.read_text() else ""
        path.write_text(head + OmegaConf.to_yaml(OmegaConf.create(changed(OmegaConf.load(path)))))
    return folder


def composed(words, folder=None):
    config = compose_config("train", words, None if folder is None else str(folder))
    for name in FREE:
        inner, _, last = name.rpartition(".")
        parent = OmegaConf.select(config, inner) if inner else config
        if parent is not None:
            OmegaConf.set_struct(config, False)
            parent.pop(last, None)
    return OmegaConf.to_container(config)


def runs_of_benchmarks():
    accuracy = AccuracyBench(["cora"], ["gcn"], [4], [0], patience=10)
    for model in ("gcn", "gat", "graphsage"):
        yield f"accuracy {model}", accuracy._words("cora", model, 4, 0)
    yield "accuracy to the end", AccuracyBench(["cora"], ["gcn"], [4], [0])._words("cora", "gcn", 1, 0)
    averaging = compose_config("bench/averaging", []).bench
    settings = OmegaConf.to_container(averaging)
    bench = AveragingBench(**{name: settings[name] for name in AveragingBench.__dataclass_fields__ if name in settings})
    yield "averaging", bench._words("interval", 5, 0)
    seen = []  # settings of a choice are the same wherever it is made
    for config in (compose_config("bench/exchange", []), compose_config("sancus", [], str(RECIPES / "bench"))):
        policies = OmegaConf.to_container(config.bench.policies, resolve=True)
        bench = ExchangeBench(
            ["g"], policies, ["random"], [4], [0], overrides=list(config.bench.get("overrides") or [])
        )
        key = {"graph": "g", "partitioner": "random", "world_size": 4, "seed": 0}
        for name, words in policies.items():
            made = {word for word in words or () if "." not in word.partition("=")[0]}
            if words is not None and made not in seen:
                seen.append(made)
                yield f"{config.name} {name}", bench._words(Path("g"), key, words)
    yield "locality", LocalityBench([])._words("g", Path("g"))


@pytest.mark.sweep
def test_other_defaults_change_no_benchmark_of_a_paper(other_defaults):
    free = composed(["dataset=npz"]), composed(["dataset=npz"], other_defaults)
    assert free[0]["partitioner"] != free[1]["partitioner"], "the defaults are others"
    assert free[0]["model"] != free[1]["model"]
    for name, words in runs_of_benchmarks():
        assert composed(words, other_defaults) == composed(words), name


@pytest.mark.parametrize("paper", PAPERS)
def test_what_a_benchmark_says_wins_over_what_the_paper_fixes(paper):
    config = compose_config("train", pinned(paper, ["model=gat", "model.lr=0.5", "seed=3", "sampler=full_neighbor"]))
    assert config.model.backbone._target_.endswith("GAT")
    assert config.model.lr == config.model.optimizer.lr == 0.5
    assert config.model.backbone.heads == 4
    assert config.seed == 3


def test_each_choice_that_settings_are_said_of_exists():
    known = group_choices()
    for choice in CHOICES:
        group, _, name = choice.partition("=")
        assert name in known[group], choice


def test_the_whole_config_is_kept_beside_the_rows_and_decides_them(tmp_path, monkeypatch):
    def rows(*words):
        with Runner(tmp_path) as runner:
            return run_rows(runner, [({"case": 1}, ["dataset=npz", *words])], train_case=lambda *_: {"test_acc": 0.5})

    (row,) = rows()
    kept = OmegaConf.load(tmp_path / "configs" / f"{row['settings']}.yaml")
    assert kept.partitioner.method == "streaming_multilevel"
    assert kept.strategy.weights._target_.endswith("GradientAveraging")
    assert rows() == [row]
    (other,) = rows("partitioner=spring")
    assert other["settings"] != row["settings"]
    assert len(list((tmp_path / "configs").iterdir())) == 2
