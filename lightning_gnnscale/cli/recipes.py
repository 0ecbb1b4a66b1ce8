"""What `recipe=` names: a recipe of the package or a file of the user's, and what it says of its data set."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ..object_store import FROM_ENVIRONMENT, carries_secret, check_storage_options
from .compose import GROUPS
from .environment import check_names
from .errors import UsageError, did_you_mean
from .settings import OPTIONS, PACKAGE, described

_BENCH = "bench/"


def recipes_folder() -> Path:
    """Return the folder of the recipes that ship with the package."""
    return Path(str(files(f"{PACKAGE}.recipes")))


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
    names = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    others = [word for word in words if not word.startswith("recipe=")]
    if not names:
        return None, config_name, others
    if len(names) > 1:
        raise UsageError(f"recipe= stands {len(names)} times; give it once")
    path = _file_of(names[0])
    belongs, asked = bench_of(path), config_name if config_name.startswith(_BENCH) else None
    if belongs != asked:
        command = belongs.replace("/", " ") if belongs else "train"
        raise UsageError(f"recipe={names[0]} is one of another command: gnnscale {command} recipe={names[0]}")
    return str(path.resolve().parent), path.stem, others


def _file_of(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix == ".yml":
        raise UsageError(f"recipe={name}: Hydra reads files that end in .yaml; rename it")
    if path.suffix == ".yaml":
        if not path.is_file():
            raise UsageError(f"recipe={name}: no such file; the recipes that ship are {', '.join(available_recipes())}")
        for one in sorted(path.resolve().parent.glob("*.yaml")):  # either would hide the other from Hydra
            if files(GROUPS).joinpath(one.name).is_file():
                raise UsageError(
                    f"recipe={name}: {one} has the name of a config of the package; rename it, or move away"
                )
        return path
    if name in available_recipes():
        return recipes_folder() / f"{name}.yaml"
    if path.with_name(f"{path.name}.yaml").is_file():
        raise UsageError(f"recipe={name}: no such recipe in the package; of the file here say recipe={name}.yaml")
    near = did_you_mean(name, available_recipes())
    raise UsageError(f"recipe={name}: no such recipe{near}; there are {', '.join(available_recipes())}")


def bench_of(path: Path) -> str | None:
    """Return the benchmark that a recipe's defaults start from, for example "bench/partition"; None for another one.

    Raises:
        UsageError: the file is no YAML, or no recipe.
    """
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # of the parser, which has none of its own
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"recipe={path}: no YAML ({what}{f' in line {mark.line + 1}' if mark else ''})") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get("defaults"), list):
        raise UsageError(
            f"recipe={path} has no list of defaults, so most settings would be missing: begin it with "
            "defaults: [/train, _self_]"
        )
    named = [entry.lstrip("/") for entry in recipe["defaults"] if isinstance(entry, str)]
    return next((entry for entry in named if entry.startswith(_BENCH)), None)


def for_other_dataset(config_dir: str | None, config_name: str, words: list[str]) -> list[str]:
    """Return words that take back what a recipe says of its own data set, where `dataset=` chooses another.

    Its keys are set to what they are in the file of that data set, or are left out where they are not in it.

    Args:
        config_dir: folder of the recipe; None: there is none.
        config_name: name of its primary config.
        words: the words of the command line, which go before.
    """
    chosen = next((found[1] for word in words if (found := re.match(r"dataset=([\w-]+)$", word))), None)
    values = described()["choices"]["dataset"].get(chosen)
    recipe = {} if config_dir is None else _read(config_dir, config_name)
    entries = [entry for entry in recipe.get("defaults") or [] if isinstance(entry, dict)]
    own = next((value for entry in entries for key, value in entry.items() if re.search(r"/dataset$", key)), None)
    if values is None or "defaults" not in recipe or own == chosen or not isinstance(recipe.get("dataset"), dict):
        return []
    given = {word.partition("=")[0].lstrip("+~") for word in words}
    keys = [key for key in recipe["dataset"] if f"dataset.{key}" not in given]
    return [
        f"dataset.{key}={json.dumps(values[key])}" if key in values else f"~dataset.{key}"
        for key in keys
        if not isinstance(values.get(key), dict | list)
    ]


def _read(config_dir: str, config_name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(Path(config_dir) / f"{config_name}.yaml"))


def check_no_credentials(config_name: str, config_dir: str | None, words: list[str]) -> None:
    """Refuse credentials among the words of a command or in its recipe, before Hydra writes them into a run folder.

    Raises:
        ValueError: one line that names the key, and not its value.
    """
    check_names(dict(word.lstrip("+").partition("=")[::2] for word in words))
    for word in words:
        for url in re.findall(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s,'\"\]}]*", word):
            if carries_secret(url):
                raise ValueError(f"{word.partition('=')[0]}: a URL holds a query or a password: {FROM_ENVIRONMENT}")
        if OPTIONS in word:
            for name in re.findall(r"([\w.-]+)\s*[:=]", word):
                check_storage_options({name.rpartition(".")[2]: None})
    plain = {} if config_dir is None else _read(config_dir, config_name)
    dataset = plain.get("dataset")
    check_names(plain | {"dataset.name": dataset.get("name") if isinstance(dataset, dict) else None})
    recipe = OmegaConf.create(plain)
    for key in (OPTIONS, f"dataset.{OPTIONS}"):
        options = OmegaConf.select(recipe, key) if OmegaConf.is_dict(recipe) else None
        check_storage_options(None if options is None else OmegaConf.to_container(options), key)
