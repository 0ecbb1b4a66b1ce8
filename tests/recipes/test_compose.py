"""Every recipe composes, every group's choice names a target that takes its settings."""

from pathlib import Path

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from lightning_gnnscale.cli.compose import GROUPS as CONF_MODULE
from lightning_gnnscale.cli.compose import compose_config, register_choices
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.recipes import (
    _composed,
    available_recipes,
    bench_of,
    for_other_choices,
    recipes_folder,
    take_recipe,
)
from lightning_gnnscale.cli.settings import known_taker, taker_of
from lightning_gnnscale.cli.typed import check_keys
from lightning_gnnscale.datamodule.train_loader import ROWS
from lightning_gnnscale.partitioner import available_partitioners, register_partitioner, registry
from lightning_gnnscale.strategy.exchange.bounds import BOUNDS

CONF = Path(__file__).parent.parent.parent / "conf"


def choices_of(group: str) -> list[str]:
    """Return the names that a group takes, of files and of the code."""
    register_choices()
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        return GlobalHydra.instance().config_loader().get_group_options(group)


GROUPS = sorted({str(path.parent.relative_to(CONF)) for path in CONF.rglob("*.yaml")} - {".", "bench"})
CHOICES = [f"{group}/{name}" for group in GROUPS for name in choices_of(group)]
BENCH_OF = {name: bench_of(recipes_folder() / f"{name}.yaml") for name in available_recipes()}
# Batch sources are settings of the loader, chosen as source=processes; evaluation is the DataModule's.
PACKAGES = {
    "trainer": "lightning",
    "callbacks": None,
    "logger": None,
    "paths": None,
    "source": ("lightning_gnnscale.loader", "lightning_gnnscale.remote"),
    "evaluation": "lightning_gnnscale.datamodule",
}


def check_every_key(config) -> None:
    """Every key is one that its target takes, as an import tells."""
    given = OmegaConf.to_container(config, resolve=False)
    check_keys(given, given, taker_of)


@pytest.mark.parametrize("name", [name for name, bench in BENCH_OF.items() if bench is None])
def test_recipe_composes_and_every_key_is_taken(name):
    config_dir, config_name, _ = take_recipe("train", [f"recipe={name}"])
    config = compose_config(config_name, [], config_dir)
    check_every_key(config)
    assert config.strategy._target_.endswith("GNNScaleStrategy")
    for group in ("sampler", "callbacks", "strategy"):
        assert instantiate(config[group]) is not None


# What a paper's recipe is known by, and a default elsewhere must not change.
SETTINGS_OF_PAPERS = {
    "sdt_gnn": {"num_parts": "auto", "partitioner.method": "spring"},
    "bytegnn": {
        "partitioner.method": "streaming_multilevel",
        "rows._target_": "lightning_gnnscale.remote.OwnerReads",
        "datamodule.scope": "graph",
    },
    "sancus": {
        "strategy.weights.local_clip": 1.0,
        "strategy.exchange.warmup_epochs": 0.25,
        "strategy.exchange.cooldown_epochs": 0.25,
    },
}


@pytest.mark.parametrize("name", SETTINGS_OF_PAPERS)
def test_a_recipe_of_a_paper_has_its_settings(name):
    config_dir, config_name, _ = take_recipe("train", [f"recipe={name}"])
    config = compose_config(config_name, [], config_dir)
    told = {key: OmegaConf.select(config, key) for key in SETTINGS_OF_PAPERS[name]}
    assert told == SETTINGS_OF_PAPERS[name]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("locality_sampling", "sancus") else pytest.mark.sweep)
        for name, bench in BENCH_OF.items()
        if bench is None
    ],
)
def test_a_recipe_composes_with_every_other_choice(name):
    config_dir, config_name, _ = take_recipe("train", [f"recipe={name}"])
    said = OmegaConf.create(_composed(Path(config_dir), config_name)[0])
    for group in GROUPS:
        choices = choices_of(group) if OmegaConf.select(said, group.replace("/", ".")) is not None else []
        for choice in choices:  # of groups of which it says nothing nothing can hang on
            word = f"{group}={choice}"
            folder, added, _ = for_other_choices(config_dir, config_name, [word])
            try:
                config = OmegaConf.to_container(compose_config(config_name, [*added, word], folder), resolve=False)
                check_keys(config, config, known_taker)
            except UsageError as error:
                pytest.fail(f"{word}: {error}")


@pytest.mark.parametrize("name", available_recipes())
def test_recipe_opens_with_its_launch_line_and_hardware(name):
    text = (recipes_folder() / f"{name}.yaml").read_text()
    command = (BENCH_OF[name] or "train").replace("/", " ")
    assert text.startswith(f"# gnnscale {command} recipe={name}")
    assert "# Tried on: " in text


@pytest.mark.parametrize("name", [name for name, bench in BENCH_OF.items() if bench])
def test_recipe_of_a_benchmark_composes_and_every_key_is_taken(name):
    config_dir, config_name, _ = take_recipe(BENCH_OF[name], [f"recipe={name}"])
    config = compose_config(config_name, [], config_dir)
    check_every_key(config)
    assert config.bench._target_ == compose_config(BENCH_OF[name], []).bench._target_
    assert config.name != compose_config(BENCH_OF[name], []).name
    if BENCH_OF[name] == "bench/parts":  # rows that it inherits would be trained, too
        own = OmegaConf.load(recipes_folder() / f"{name}.yaml").bench
        assert set(own.weights) == set(config.bench.weights)


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_targets_its_own_package(choice):
    group, (folder, _, name) = choice.split("/")[0], choice.rpartition("/")
    node = OmegaConf.select(compose_config("train", [f"{folder}={name}"]), folder.replace("/", "."))
    target = node.get("_target_")
    if group == "rows":
        assert "preset" in node or callable(get_object(target))
        return
    if PACKAGES.get(group, f"lightning_gnnscale.{group}") is None:
        assert target is None
        return
    if choice == "dataset/store":  # a graph that a store has kept
        assert target == "lightning_gnnscale.partition_store.load_store"
        return
    assert target.startswith(PACKAGES.get(group, f"lightning_gnnscale.{group}"))
    assert callable(get_object(target))


def test_every_file_of_a_group_is_a_choice():
    files = {str(path.relative_to(CONF).with_suffix("")) for group in GROUPS for path in (CONF / group).glob("*.yaml")}
    assert files <= set(CHOICES)


def test_names_of_the_code_are_choices():
    assert set(choices_of("partitioner")) >= set(available_partitioners())
    assert set(choices_of("rows")) == set(ROWS)
    assert set(choices_of("strategy/exchange")) >= {f"skip_{name}" for name in BOUNDS}
    for name in choices_of("partitioner"):
        assert compose_config("train", [f"partitioner={name}"]).partitioner.method == name
    for name, bound in BOUNDS.items():
        exchange = instantiate(compose_config("train", [f"strategy/exchange=skip_{name}"]).strategy.exchange)
        assert type(exchange.bound) is bound


def test_a_partitioner_of_the_users_own_is_a_choice(monkeypatch):
    monkeypatch.setattr(registry, "_PARTITIONERS", dict(registry._PARTITIONERS))
    register_partitioner("of_the_user")(lambda stream, num_parts, *, strength=1.0, **_: None)
    config = compose_config("train", ["partitioner=of_the_user", "++partitioner.strength=2"])
    assert config.partitioner.method == "of_the_user"
    assert config.partitioner.strength == 2


PLAIN = ["gcn", "gat", "graphsage", "sgc", "ngnn", "link_predictor", "link_gcn", "link_gat", "link_ngnn"]
RELATIONAL = ["rgcn", "rgat", "hgt", "hetero", "link_rgcn", "link_rgat", "link_hgt"]


@pytest.mark.parametrize("model", PLAIN + RELATIONAL)
def test_models_instantiate_and_every_key_is_taken(model):
    config = compose_config("train", [f"model={model}"])
    check_every_key(config)
    filled_in = {"in_channels": 8, "out_channels": 3}
    if model in RELATIONAL:
        schema = {"node_types": ["n", "m"], "edge_types": [["n", "a", "m"], ["m", "b", "n"]], "reverse": []}
        filled_in |= {"in_channels": {"n": 8, "m": 0}, "schema": schema}
    backbone = instantiate(config.model.backbone, **filled_in)
    module = instantiate(
        OmegaConf.create({k: v for k, v in config.model.items() if k != "backbone"}), backbone=backbone
    )
    assert sum(parameter.numel() for parameter in module.parameters()) > 0


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "bench").glob("*.yaml")))
def test_benchmarks_compose_and_every_key_is_taken(name):
    config = compose_config(f"bench/{name}", [])
    check_every_key(config)
    assert callable(get_object(config.bench._target_))
