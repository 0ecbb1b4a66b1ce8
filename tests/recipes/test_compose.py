"""Every recipe composes, every group's choice names a target that takes its settings."""

from pathlib import Path

import pytest
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.overrides import _check_node
from lightning_gnnscale.cli.recipe import available_recipes, bench_of, recipes_folder, take_recipe

CONF = Path(__file__).parent.parent.parent / "conf"
CHOICES = sorted(
    str(path.relative_to(CONF).with_suffix(""))
    for path in CONF.rglob("*.yaml")
    if path.parent not in (CONF, CONF / "bench")
)
BENCH_OF = {name: bench_of(recipes_folder() / f"{name}.yaml") for name in available_recipes()}
# Batch sources are settings of the loader, chosen as source=processes; evaluation is the DataModule's.
PACKAGES = {
    "trainer": "lightning",
    "callbacks": None,
    "paths": None,
    "source": ("lightning_gnnscale.loader", "lightning_gnnscale.remote"),
    "evaluation": "lightning_gnnscale.datamodule",
}


@pytest.mark.parametrize("name", [name for name, bench in BENCH_OF.items() if bench is None])
def test_recipe_composes_and_every_key_is_taken(name):
    config_dir, config_name, _ = take_recipe("train", [f"recipe={name}"])
    config = compose_config(config_name, [], config_dir)
    _check_node(config, config, "")
    assert config.strategy._target_.endswith("GNNScaleStrategy")
    for group in ("sampler", "callbacks", "strategy"):
        assert instantiate(config[group]) is not None


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
    _check_node(config, config, "")
    assert config.bench._target_ == compose_config(BENCH_OF[name], []).bench._target_
    assert config.name != compose_config(BENCH_OF[name], []).name


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_targets_its_own_package(choice):
    group = choice.split("/")[0]
    node = OmegaConf.load(CONF / f"{choice}.yaml")
    target = node.get("_target_")
    if choice == "placement/none":
        assert not node, "nothing is placed, nothing is made"
        return
    if PACKAGES.get(group, f"lightning_gnnscale.{group}") is None:
        assert target is None
        return
    assert target.startswith(PACKAGES.get(group, f"lightning_gnnscale.{group}"))
    assert callable(get_object(target))


@pytest.mark.parametrize("model", ["gcn", "gat", "graphsage", "sgc", "ngnn", "link_predictor", "link_gcn", "link_gat"])
def test_models_instantiate_and_every_key_is_taken(model):
    config = compose_config("train", [f"model={model}"])
    _check_node(config, config, "")
    backbone = instantiate(config.model.backbone, in_channels=8, out_channels=3)
    module = instantiate(
        OmegaConf.create({k: v for k, v in config.model.items() if k != "backbone"}), backbone=backbone
    )
    assert sum(parameter.numel() for parameter in module.parameters()) > 0


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "bench").glob("*.yaml")))
def test_benchmarks_compose_and_every_key_is_taken(name):
    config = compose_config(f"bench/{name}", [])
    _check_node(config, config, "")
    assert callable(get_object(config.bench._target_))
