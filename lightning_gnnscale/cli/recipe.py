"""`recipe=NAME` or `recipe=path/to/file.yaml`: a whole experiment as the primary config."""

from importlib.resources import files
from pathlib import Path

from .errors import UsageError


def recipes_folder() -> Path:
    """Return the folder of the recipes that ship with the package."""
    return Path(str(files("lightning_gnnscale.recipes")))


def available_recipes() -> list[str]:
    """Return the names that `recipe=` takes, sorted."""
    folder = recipes_folder()
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def take_recipe(config_name: str, words: list[str]) -> tuple[str | None, str, list[str]]:
    """Take `recipe=` out of the words.

    Returns:
        (folder to add to the search path or None, primary config, the other words).

    Raises:
        UsageError: no such recipe; the message lists those that exist.
    """
    recipes = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    others = [word for word in words if not word.startswith("recipe=")]
    if not recipes:
        return None, config_name, others
    if len(recipes) > 1:
        raise UsageError(f"recipe= stands {len(recipes)} times; give it once")
    name = recipes[0]
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError(f"recipe={name}: no such file; the recipes that ship are {', '.join(available_recipes())}")
        return str(path.resolve().parent), path.stem, others
    if name not in available_recipes():
        raise UsageError(f"recipe={name}: no such recipe; there are {', '.join(available_recipes())}")
    return str(recipes_folder()), name, others
