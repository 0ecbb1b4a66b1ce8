"""`recipe=NAME` or `recipe=path/to/file.yaml`: a whole experiment as the primary config."""

from importlib.resources import files
from pathlib import Path

from omegaconf import OmegaConf

from .errors import UsageError

_BENCH = "bench/"


def recipes_folder() -> Path:
    """Return the folder of the recipes that ship with the package."""
    return Path(str(files("lightning_gnnscale.recipes")))


def available_recipes() -> list[str]:
    """Return the names that `recipe=` takes, sorted."""
    folder = recipes_folder()
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def take_recipe(config_name: str, words: list[str]) -> tuple[str | None, str, list[str]]:
    """Take `recipe=` out of the words of a command line.

    Args:
        config_name: Primary config of the command, for example "train" or "bench/partition".
        words: Words of the command line.

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
    elif name in available_recipes():
        path = recipes_folder() / f"{name}.yaml"
    else:
        raise UsageError(f"recipe={name}: no such recipe; there are {', '.join(available_recipes())}")
    _check_command(name, path, config_name)
    return str(path.resolve().parent), path.stem, others


def _check_names(name: str, folder: Path) -> None:
    """Refuse a folder whose files hide configs of the package from Hydra, or are hidden by them."""
    own = files("lightning_gnnscale.conf")
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
