"""From names to a config: the choices of the groups, `recipe=`, and Hydra's composition."""

import inspect
from importlib.resources import files
from pathlib import Path

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from .errors import UsageError

_PACKAGE = "lightning_gnnscale"
GROUPS = f"{_PACKAGE}.conf"
_BENCH = "bench/"
_NOW = {  # recipes of earlier releases, and what is said in their place
    "sancus_a": "recipe=sancus",
    "sancus_e": "recipe=sancus strategy/exchange=skip_epoch_fixed",
    "sancus_h": "recipe=sancus strategy/exchange=skip_variation_gap",
}


def register_choices() -> None:
    """Make a choice of every partitioner, placement method, bound and backbone that the code knows by name.

    Each is a YAML file of its group, which documents the settings, with the one thing changed that its name says:
    `placement=pagraph` is `placement/rule.yaml` with `method: pagraph`. A partitioner of the user's own is a choice as
    soon as it is registered. Names that have a file of their own keep it.
    """
    from ..partitioner import available_partitioners
    from ..placement.place import METHODS
    from ..strategy.exchange.bounds import BOUNDS

    for name in available_partitioners():
        _add_choice("partitioner", name, "streaming_multilevel", method=name)
    for name in METHODS:
        _add_choice("placement", name, "rule", method=name)
    for name, bound in BOUNDS.items():
        defaults = {key: argument.default for key, argument in inspect.signature(bound).parameters.items()}
        given = {key: value for key, value in defaults.items() if value is not None}
        target = f"{_PACKAGE}.strategy.{bound.__name__}"
        _add_choice("strategy/exchange", f"skip_{name}", "skip_broadcast", bound={"_target_": target, **given})
    for name, base in (("{}", "graphsage"), ("link_{}", "link_predictor")):
        for backbone in ("GCN", "GAT", "NGNN"):
            target = f"{_PACKAGE}.model.{backbone}"
            _add_choice("model", name.format(backbone.lower()), base, backbone={"_target_": target})


def _add_choice(group: str, name: str, base: str, **changed) -> None:
    if not files(GROUPS).joinpath(group, f"{name}.yaml").is_file():
        ConfigStore.instance().store(group=group, name=name, node={"defaults": [base, "_self_"], **changed})


def compose_config(config_name: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Return a config, composed apart from the Hydra application that may be running.

    Args:
        config_name: a primary config, for example "train".
        overrides: as on the command line.
        config_dir: folder of the primary config; None: this package's own.
    """
    register_choices()
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        if config_dir is None:
            with initialize_config_module(GROUPS, version_base="1.3"):
                return compose(config_name, overrides=overrides)
        with initialize_config_dir(config_dir, version_base="1.3"):
            return compose(config_name, overrides=[f"hydra.searchpath=[pkg://{GROUPS}]", *overrides])
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = running


def recipes_folder() -> Path:
    """Return the folder of the recipes that ship with the package."""
    return Path(str(files(f"{_PACKAGE}.recipes")))


def available_recipes() -> list[str]:
    """Return the names that `recipe=` takes, sorted."""
    folder = recipes_folder()
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def take_recipe(config_name: str, words: list[str]) -> tuple[str | None, str, list[str]]:
    """Take `recipe=` out of the words of a command line.

    Args:
        config_name: the command's primary config, for example "train" or "bench/partition".
        words: the words of the command line.

    Returns:
        (folder to add to the search path or None, primary config, the other words).

    Raises:
        UsageError: there is no such recipe (the message lists those that exist), or it belongs to another command.
    """
    recipes = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    others = [word for word in words if not word.startswith("recipe=")]
    if not recipes:
        return None, config_name, others
    if len(recipes) > 1:
        raise UsageError(f"recipe= stands {len(recipes)} times; give it once")
    name = recipes[0]
    path = Path(name).expanduser()
    if path.suffix == ".yml":
        raise UsageError(f"recipe={name}: Hydra reads files that end in .yaml; rename it")
    if path.suffix == ".yaml":
        if not path.is_file():
            raise UsageError(f"recipe={name}: no such file; the recipes that ship are {', '.join(available_recipes())}")
        _check_names(name, path.resolve().parent)
    elif name in _NOW:
        raise UsageError(f"recipe={name} is {_NOW[name]} now")
    elif name in available_recipes():
        path = recipes_folder() / f"{name}.yaml"
    else:
        raise UsageError(f"recipe={name}: no such recipe; there are {', '.join(available_recipes())}")
    _check_command(name, path, config_name)
    return str(path.resolve().parent), path.stem, others


def _check_names(name: str, folder: Path) -> None:
    """Refuse a folder whose files hide configs of the package from Hydra, or are hidden by them."""
    own = files(GROUPS)
    for path in sorted(folder.glob("*.yaml")):
        if own.joinpath(path.name).is_file():
            raise UsageError(f"recipe={name}: {path} has the name of a config of the package; rename it, or move away")


def bench_of(path: Path) -> str | None:
    """Return the benchmark that a recipe's defaults start from, for example "bench/partition"; None for another one."""
    defaults = OmegaConf.to_container(OmegaConf.load(path)).get("defaults") or []
    named = [entry.lstrip("/") for entry in defaults if isinstance(entry, str)]
    return next((entry for entry in named if entry.startswith(_BENCH)), None)


def _check_command(name: str, path: Path, config_name: str) -> None:
    """Refuse a benchmark's recipe for another command, and any other recipe for a benchmark."""
    belongs, asked = bench_of(path), config_name if config_name.startswith(_BENCH) else None
    if belongs != asked:
        command = belongs.replace("/", " ") if belongs else "train"
        raise UsageError(f"recipe={name} is one of another command: gnnscale {command} recipe={name}")
