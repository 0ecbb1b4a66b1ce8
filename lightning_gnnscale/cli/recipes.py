"""What `recipe=` names: a recipe of the package or a file of the user's, and how it sets its own choices."""

import atexit
import json
import re
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ..object_store import FROM_ENVIRONMENT, carries_secret, check_storage_options
from ..report.run_files import value_at, yaml_problem
from .compose import GROUPS, check_names
from .errors import UsageError, none_such
from .settings import OPTIONS, PACKAGE, Taker, described, taker_at, walk

_BENCH = "bench/"


def recipes_folder() -> Path:
    """Return the folder of the recipes that ship with the package."""
    return Path(str(files(f"{PACKAGE}.recipes")))


def available_recipes() -> list[str]:
    """Return the names that `recipe=` takes, sorted."""
    folder = recipes_folder()
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def take_recipe(config_name: str, words: list[str]) -> tuple[str | None, str, list[str]]:
    """Take `recipe=` out of the words of a command line whose primary config is `config_name`.

    Returns:
        (folder to add to the search path or None, primary config, the other words).

    Raises:
        UsageError: there is no such recipe, or it belongs to another command.
    """
    names = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    others = [word for word in words if not word.startswith("recipe=")]
    if not names:
        return None, config_name, others
    if len(names) > 1:
        raise UsageError(f"recipe= is given {len(names)} times; give it once")
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
        for one in sorted(path.resolve().parent.glob("*.yaml")):  # Hydra would find only one of them
            if files(GROUPS).joinpath(one.name).is_file():
                raise UsageError(f"recipe={name}: {one} has the name of a config of the package; rename it, or move it")
        return path
    if name in available_recipes():
        return recipes_folder() / f"{name}.yaml"
    if path.with_name(f"{path.name}.yaml").is_file():
        raise UsageError(f"recipe={name}: no such recipe in the package; for the file here say recipe={name}.yaml")
    raise UsageError(none_such(f"recipe={name}: no such recipe", name, available_recipes()))


def bench_of(path: Path) -> str | None:
    """Return the benchmark that a recipe's defaults start from, for example "bench/partition"; None for another one."""
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # the parser has no error class of its own
        what, where = yaml_problem(error)
        raise UsageError(f"recipe={path}: no YAML ({what}{where})") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get("defaults"), list):
        raise UsageError(
            f"recipe={path} has no list of defaults, so most settings would be missing: begin it with "
            "defaults: [/train, _self_]"
        )
    named = [entry.lstrip("/") for entry in recipe["defaults"] if isinstance(entry, str)]
    return next((entry for entry in named if entry.startswith(_BENCH)), None)


def for_other_choices(
    config_dir: str | None, config_name: str, words: list[str]
) -> tuple[str | None, list[str], list[str]]:
    """Drop a recipe's settings of choices that the command line replaces.

    Settings of a replaced data set take the values in the new one's file. Of another group's settings, those
    that the new choice does not have are left out.

    Returns:
        (folder of the recipe, or of a copy without what is left out; words to add; keys that are left out).
    """
    if config_dir is None or "defaults" not in _read(config_dir, config_name):
        return config_dir, [], []
    recipe, own = _composed(Path(config_dir), config_name)
    given = {word.partition("=")[0].lstrip("+~") for word in words}
    added, keys, changed = [], [], []
    for word in words:
        found = re.fullmatch(r"([a-z_]+(?:/[a-z_]+)*)=([\w-]+)", word)
        group, chosen = found.groups() if found else ("", "")
        node = described()["choices"].get(group, {}).get(chosen)
        if node is None or own.get(group) == chosen:
            continue
        changed.append(group)
        path = tuple(group.split("/"))
        said = value_at(recipe, ".".join(path))
        if isinstance(said, dict) and group == "dataset":
            added += _of_its_file(said, node, given)
        elif isinstance(said, dict):
            keys += [key for key in _not_taken(said, node, path) if ".".join(key) not in given]
    nested = [key for key in own if "@" in key and key.partition("@")[0] in changed]
    if keys or nested:
        config_dir = str(_copy_without(Path(config_dir), config_name, keys, nested))
    return config_dir, added, [".".join(key) for key in keys]


def _composed(folder: Path, name: str) -> tuple[dict, dict[str, str]]:
    """Return the settings of a recipe and of its bases, and their choices by group."""
    recipe, said, own = _read(folder, name), {}, {}
    for entry in recipe.pop("defaults", None) or []:
        if _is_base(folder, entry):
            base, choices = _composed(folder, entry)
            said, own = OmegaConf.to_container(OmegaConf.merge(said, base)), own | choices
        elif isinstance(entry, dict):
            own |= {_group_of(key): value for key, value in entry.items()}
    return OmegaConf.to_container(OmegaConf.merge(said, recipe)), own


def _is_base(folder: Path, entry: Any) -> bool:
    """Whether an entry of a recipe's defaults is another recipe beside it."""
    return isinstance(entry, str) and not entry.startswith("/") and (folder / f"{entry}.yaml").is_file()


def _group_of(key: str) -> str:
    """Return the group of an entry of defaults such as "override /dataset"."""
    return re.sub(r"^override +", "", key).lstrip("/")


def _of_its_file(said: dict, values: dict, given: set[str]) -> list[str]:
    """Return words that set a data set's settings to the values of its own file, or leave them out."""
    keys = [key for key in said if f"dataset.{key}" not in given]
    return [
        f"dataset.{key}={json.dumps(values[key])}" if key in values else f"~dataset.{key}"
        for key in keys
        if not isinstance(values.get(key), dict | list)
    ]


def _not_taken(said: dict, node: dict, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the outermost keys of a recipe's settings that a choice, a node of settings, does not have."""
    if node and (taker_at(node) or Taker({}, False)).takes_more:  # no key is known to be wrong
        return []
    allowed = {place.key: place.value for place in walk(node, ".".join(path))}
    found, rest = [], [(path, said)]
    while rest:
        above, entries = rest.pop()
        for key, value in entries.items():
            name = ".".join((*above, str(key)))
            whole = isinstance(value, dict) and "_target_" in value and name not in allowed  # made with any choice
            other_form = isinstance(value, dict) != isinstance(allowed.get(name), dict)
            if str(key).startswith("_") or (whole and "_target_" not in node):
                continue
            if name not in allowed or (other_form and isinstance(allowed[name], list | dict)):
                found.append((*above, key))
            elif isinstance(value, dict) and isinstance(allowed[name], dict):
                rest.append(((*above, key), value))
    return found


def _copy_without(folder: Path, name: str, keys: list[tuple[str, ...]], nested: list[str]) -> Path:
    """Return a folder with a copy of a recipe and its bases, without some keys and choices."""
    copies = Path(tempfile.mkdtemp(prefix="gnnscale_recipe_"))
    atexit.register(shutil.rmtree, copies, ignore_errors=True)
    names = [name]
    while names:
        one = names.pop()
        content = _read(folder, one)
        for *above, last in keys:
            holder = value_at(content, ".".join(above))
            if isinstance(holder, dict):
                holder.pop(last, None)
        entries = content.get("defaults") or []
        names += [entry for entry in entries if _is_base(folder, entry)]
        kept = [entry for entry in entries if not (isinstance(entry, dict) and _group_of(next(iter(entry))) in nested)]
        OmegaConf.save(OmegaConf.create(content | {"defaults": kept}), copies / f"{one}.yaml")
    return copies


def _read(config_dir: str | Path, config_name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(Path(config_dir) / f"{config_name}.yaml"))


def check_no_credentials(config_name: str, config_dir: str | None, words: list[str]) -> None:
    """Refuse credentials among the words of a command or in its recipe, before Hydra writes them down."""
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
