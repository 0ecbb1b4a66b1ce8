"""From names to a config: choices and recipes, composition, and which keys and types a config may have."""

import inspect
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from ..object_store import FROM_ENVIRONMENT, carries_secret, check_storage_options, graph_name
from .checks import FILLED_IN
from .declared import constant, declared
from .environment import check_names
from .errors import UsageError, did_you_mean, in_place

_PACKAGE = "lightning_gnnscale"
GROUPS = f"{_PACKAGE}.conf"
_BENCH = "bench/"
_SWITCHES = ("test", "predict", "overwrite", "verify")
_TEXTS = ("resume", "output", "feature_storage", "store")
_NONE = type(None)
TOP_LEVEL = {
    "name": (str, int),
    "seed": (int,),
    "num_parts": (int, str),
    "pack_halo": (bool, str),
    "store_cache_bytes": (int, str, _NONE),
    "storage_timeout_s": (int, float),
    **dict.fromkeys(_SWITCHES, (bool,)),
    **dict.fromkeys(_TEXTS, (str, _NONE)),
}
OPEN_GROUPS = ("callbacks", "logger")  # whose entries may have any names
OPTIONS = "storage_options"  # whose entries another package reads
_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _name_of(key: str, *, _parent_: DictConfig) -> str:
    """Resolve ${name_of:edges}, the name of the graph whose edges a key beside it names."""
    # Hydra also resolves it where it lists the words of the command, beside which there are no keys.
    known = isinstance(_parent_, DictConfig) and key in _parent_ and not OmegaConf.is_missing(_parent_, key)
    return graph_name(str(_parent_[key])) if known else "graph"


OmegaConf.register_new_resolver("name_of", _name_of, replace=True)


def register_choices() -> None:
    """Make a choice of every partitioner, placement method, bound and backbone that the code knows by name.

    Each is a YAML file of its group, which documents the settings, with the one thing changed that its name says:
    `placement=pagraph` is `placement/rule.yaml` with `method: pagraph`. A partitioner of the user's own is a choice as
    soon as it is registered. Names that have a file of their own keep it.
    """
    from ..partitioner import available_partitioners  # the only import: a user's own are registered there

    for name in available_partitioners():
        _add_choice("partitioner", name, "streaming_multilevel", method=name)
    for name in constant(f"{_PACKAGE}.placement.place.METHODS"):
        _add_choice("placement", name, "rule", method=name)
    for name, bound in constant(f"{_PACKAGE}.strategy.exchange.bounds.BOUNDS").items():
        target = f"{_PACKAGE}.strategy.{bound}"
        defaults = {key: argument.default for key, argument in declared(target).parameters.items()}
        given = {key: value for key, value in defaults.items() if value is not None}
        _add_choice("strategy/exchange", f"skip_{name}", "skip_broadcast", bound={"_target_": target, **given})
    heads = {
        "{}": "graphsage",
        "link_{}": "link_predictor",
        "edge_{}": "edge_classifier",
        "regress_{}": "node_regressor",
    }
    for name, base in heads.items():
        for backbone in ("GCN", "GAT", "GINE", "NGNN", "RGCN", "RGAT", "HGT"):
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


def group_choices() -> dict[str, list[str]]:
    """Return the names that each group of settings takes, those of the code too; groups of benchmarks are left out."""
    register_choices()
    with _own_configs() as loader:
        folder = Path(str(files(GROUPS)))
        groups = sorted({str(path.parent.relative_to(folder)) for path in folder.rglob("*.yaml")} - {".", "bench"})
        return {group: loader.get_group_options(group) for group in groups}


def choices_with(key: str) -> list[str]:
    """Return the choices of a key's group that have this setting: of "dataset.edges", "dataset=files".

    Args:
        key: The setting, for example "model.backbone.heads".
    """
    *path, name = key.split(".")
    folder = files(GROUPS)
    depth = next((n for n in range(len(path), 0, -1) if folder.joinpath(*path[:n]).is_dir()), 0)
    group, inner = "/".join(path[:depth]), path[depth:]
    if group in ("", "bench"):  # whose files are commands of their own
        return []
    return [f"{group}={one}" for one in _options(group) if _has_setting(group, one, inner, name)]


def _options(group: str) -> list[str]:
    register_choices()
    with _own_configs() as loader:
        return loader.get_group_options(group)


@contextmanager
def _own_configs() -> Iterator[ConfigLoader]:
    """Read this package's configs apart from the Hydra application that may be running."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(GROUPS, version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = running


def _has_setting(group: str, choice: str, inner: list[str], name: str) -> bool:
    options = partitioner_options(choice) if group == "partitioner" and not inner else None
    if options is not None:
        return name in options
    node = OmegaConf.select(_choice(group, choice), ".".join(inner)) if inner else _choice(group, choice)
    if not OmegaConf.is_dict(node):
        return False
    found = declared(node._target_) if "_target_" in node else None
    path = ".".join([group.replace("/", "."), *inner])
    return name in node or (found is not None and name in found.parameters and _is_settable(path, name))


@cache
def _choice(group: str, name: str) -> DictConfig:
    """Return what a choice says, with the one that it changes: a composition would take ten times as long."""
    with _own_configs() as loader:
        found = loader.repository.load_config(f"{group}/{name}")
    plain = [one.path for one in found.defaults_list or [] if isinstance(one, ConfigDefault)]
    return OmegaConf.merge(*(_choice(group, one) for one in plain if one != "_self_"), found.config)


def _is_settable(path: str, name: str) -> bool:
    """Whether an argument is the user's to give, and not filled in by the run."""
    return name not in ("stream", "progress", "callbacks") and f"{path}.{name}" not in FILLED_IN


def _not_a_setting(key: str, allowed: list[str], taker: str) -> str:
    """Return what is said of an unknown key: the other choices of its group that have it, or what is allowed."""
    others = choices_with(key)
    ends = tuple(f"_{one.partition('=')[2]}" for one in others)
    others = sorted(others, key=lambda one: one.endswith(ends))  # gat before edge_gat
    if others:
        told = (
            " or ".join(others) if len(others) <= 3 else f"{', '.join(others[:3])} and {len(others) - 3} more choices"
        )
        return f"{key} is a setting of {told}: say {'that' if len(others) == 1 else 'one of them'} too"
    near = did_you_mean(key.rpartition(".")[2], allowed)
    return f"{key} is not a setting{near}; {taker} takes {', '.join(allowed) or 'none'}"


def prepare_overrides(words: list[str]) -> list[str]:
    """Let `a.b=c` set a key whether or not a YAML file lists it; `check_config` then says which keys exist.

    Hydra wants `+` for a key that no file lists. Whether a class takes an argument is a better test.
    """
    inner_key = re.compile(r"^(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")
    return [f"++{word}" if inner_key.match(word) else word for word in words]


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
    elif name in available_recipes():
        path = recipes_folder() / f"{name}.yaml"
    elif path.with_name(f"{path.name}.yaml").is_file():
        raise UsageError(f"recipe={name}: no such recipe in the package; of the file here say recipe={name}.yaml")
    else:
        near = did_you_mean(name, available_recipes())
        raise UsageError(f"recipe={name}: no such recipe{near}; there are {', '.join(available_recipes())}")
    _check_command(name, path, config_name)
    return str(path.resolve().parent), path.stem, others


def for_other_dataset(config_dir: str | None, config_name: str, words: list[str]) -> list[str]:
    """Return words that take back what a recipe says of its own data set, where `dataset=` chooses another.

    Its keys are set to what they are in the file of that data set, or are left out where they are not in it.

    Args:
        config_dir: folder of the recipe; None: there is none.
        config_name: name of its primary config.
        words: the words of the command line, which go before.
    """
    chosen = next((word.partition("=")[2] for word in words if re.match(r"dataset=[\w-]+$", word)), None)
    if config_dir is None or chosen is None:
        return []
    recipe = OmegaConf.to_container(OmegaConf.load(Path(config_dir) / f"{config_name}.yaml"))
    entries = [entry for entry in recipe.get("defaults") or [] if isinstance(entry, dict)]
    own = next((value for entry in entries for key, value in entry.items() if re.search(r"/dataset$", key)), None)
    file = files(GROUPS).joinpath("dataset", f"{chosen}.yaml")
    if "defaults" not in recipe or own == chosen or not file.is_file() or not isinstance(recipe.get("dataset"), dict):
        return []
    values = OmegaConf.to_container(OmegaConf.create(file.read_text()))
    given = {word.partition("=")[0].lstrip("+~") for word in words}
    keys = [key for key in recipe["dataset"] if f"dataset.{key}" not in given]
    return [
        f"dataset.{key}={json.dumps(values[key])}" if key in values else f"~dataset.{key}"
        for key in keys
        if key not in values or not isinstance(values[key], dict | list)
    ]


def fill_inputs(config: DictConfig) -> None:
    """Say what `model.inputs.dim=64` alone means: embeddings that the run learns; in place."""
    inputs = OmegaConf.select(config, "model.inputs")
    if OmegaConf.is_dict(inputs) and "_target_" not in inputs:
        with open_dict(inputs):
            inputs._target_ = f"{_PACKAGE}.embedding.DistributedEmbedding"
            inputs.setdefault("seed", config.get("seed", 0))


def _check_names(name: str, folder: Path) -> None:
    """Refuse a folder whose files hide configs of the package from Hydra, or are hidden by them."""
    own = files(GROUPS)
    for path in sorted(folder.glob("*.yaml")):
        if own.joinpath(path.name).is_file():
            raise UsageError(f"recipe={name}: {path} has the name of a config of the package; rename it, or move away")


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


def _check_command(name: str, path: Path, config_name: str) -> None:
    """Refuse a benchmark's recipe for another command, and any other recipe for a benchmark."""
    belongs, asked = bench_of(path), config_name if config_name.startswith(_BENCH) else None
    if belongs != asked:
        command = belongs.replace("/", " ") if belongs else "train"
        raise UsageError(f"recipe={name} is one of another command: gnnscale {command} recipe={name}")


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
    if config_dir is not None:
        recipe = OmegaConf.load(Path(config_dir) / f"{config_name}.yaml")
        plain = OmegaConf.to_container(recipe)
        dataset = plain.get("dataset")
        check_names(plain | {"dataset.name": dataset.get("name") if isinstance(dataset, dict) else None})
        for key in (OPTIONS, f"dataset.{OPTIONS}"):
            options = OmegaConf.select(recipe, key)
            check_storage_options(None if options is None else OmegaConf.to_container(options), key)


def check_config(
    config: DictConfig, primary: str, recipe: tuple[str, str] | None = None, imported: bool = True
) -> None:
    """Refuse unknown keys and values of the wrong type.

    Args:
        config: What was composed.
        primary: The command's own config, whose keys are those that untargeted nodes may have.
        recipe: Folder and name of the recipe or of the run's config that was composed; None: the command's own.
        imported: Import what the settings name; False: look at its source, and pass what cannot be told from there.

    Raises:
        UsageError: one line that names the key, the value and what is allowed.
    """
    base = _compose_base(primary, recipe)
    missing = [str(key) for key in base if key not in list(config)]
    if missing:
        start = f"/{primary}"
        raise UsageError(
            f"{recipe[1]}.yaml brings no {', '.join(missing)}: begin its defaults with {start}, then _self_"
        )
    written = OmegaConf.to_yaml(config, resolve=False) if recipe else ""
    _check_node(config, base, "", _parameters if imported else _declared_parameters, written)
    if "partitioner" in config:
        _check_partitioner(config.partitioner)


def partitioner_options(method: str) -> dict[str, inspect.Parameter] | None:
    """Return the options of a registered method by name; None where it takes any, or is not registered."""
    from ..partitioner.registry import SHARED, available_partitioners, get_partitioner

    if method not in available_partitioners():
        return None
    found = inspect.signature(get_partitioner(method)).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in found):
        return None
    return {each.name: each for each in found if each.kind is each.KEYWORD_ONLY and each.name not in SHARED}


def _check_partitioner(node: DictConfig) -> None:
    """Refuse options that the chosen method does not have."""
    method = node.get("method")
    options = partitioner_options(method) if node.get("_target_") == f"{_PACKAGE}.partitioner.partition" else None
    if options is None:
        return
    shared = declared(node._target_).parameters
    for key in node:
        if not str(key).startswith("_") and key not in options and key not in shared:
            names = [*options, *(name for name in shared if name in ("balance", "evaluate"))]
            raise UsageError(_not_a_setting(f"partitioner.{key}", names, f"partitioner={method}"))


def _sets_value(word: str) -> bool:
    """Whether `+key=` or `++key=` sets a value, and does not choose from a group."""
    added = re.match(r"^\+{1,2}([^/@=]+)=", word)
    if added is None:
        return False
    is_group = word[1] != "+" and GlobalHydra.instance().config_loader().get_group_options(added[1])
    return not is_group


def settings_at_top(primary: str) -> list[str]:
    """Return the top level's keys, for an error."""
    return [str(key) for key in compose_config(primary, [])]


def _compose_base(primary: str, recipe: tuple[str, str] | None) -> DictConfig:
    """Compose the command's config with the same choices and without anybody's values.

    A config without defaults, as a run leaves it, is its own base.
    """
    if recipe is not None:
        path = Path(recipe[0]) / f"{recipe[1]}.yaml"
        if "defaults" not in OmegaConf.load(path):
            return OmegaConf.load(path)
    chosen = HydraConfig.get().runtime.choices.items()
    choices = [f"{group}={name}" for group, name in chosen if not group.startswith("hydra/") and name is not None]
    try:
        return compose_config(primary, choices)
    except ConfigCompositionException:  # a recipe of the user's brings groups of its own
        words = [word for word in HydraConfig.get().overrides.task if not _sets_value(word)]
        return compose_config(primary, words) if recipe is None else compose_config(recipe[1], words, recipe[0])


def _check_node(node: DictConfig, base, path: str, parameters_of: Callable | None = None, written: str = "") -> None:
    parameters_of = parameters_of or _parameters
    target = OmegaConf.to_container(node, resolve=False).get("_target_")
    parameters, takes_more = parameters_of(target, path) if target else ({}, False)
    for key in node:
        here = f"{path}.{key}" if path else str(key)
        if path.split(".")[0] == OPTIONS:
            continue
        if target and not str(key).startswith("_"):
            if key not in parameters and not takes_more:
                if _is_put_in_place(path):
                    raise UsageError(
                        f"{here} is a setting of what {target} takes the place of: say {in_place(path, target)}"
                    )
                raise UsageError(_not_a_setting(here, [name for name in parameters if _is_settable(path, name)], path))
            if key in parameters and not _is_open(node, key) and not _brings_null(base, node, key):
                _check_type(node[key], parameters[key], here)
        elif not path and key in TOP_LEVEL and not OmegaConf.is_interpolation(node, key):
            _check_plain(node[key], TOP_LEVEL[key], here)
        elif path == "paths" and key in (base or ()) and not OmegaConf.is_interpolation(node, key):
            _check_plain(node[key], (str,), here)
        elif not target and base is not None and key not in list(base) and not _brings_target(node, key, path):
            if not path and re.search(rf"\$\{{{key}\b", written):  # a value that settings of the recipe refer to
                continue
            raise UsageError(_not_a_setting(here, [str(name) for name in base], path or "the top level"))
        if _is_open(node, key):
            continue
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            # An argument that is a plain dict may hold any keys: its target judges them.
            known = base._get_node(key) if not target and isinstance(base, DictConfig) and key in base else None
            known = known if isinstance(known, DictConfig) and not known._is_none() else None
            _check_node(child, known, here, parameters_of, written)


def _is_put_in_place(path: str) -> bool:
    """Whether a word gives the target of a node, and leaves its settings as they were chosen."""
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return any(word.lstrip("+").startswith(f"{path}._target_=") for word in words)


def _is_open(node: DictConfig, key) -> bool:
    """Whether a value is left to others: it is missing, or refers to another key."""
    return OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)


def _brings_null(base: DictConfig | None, node: DictConfig, key) -> bool:
    """Whether a null is the config's own: whoever wrote it there fills it in."""
    return node[key] is None and base is not None and key in base and not _is_open(base, key) and base[key] is None


def _brings_target(node: DictConfig, key, path: str) -> bool:
    """Whether a new entry of a group whose entries are objects says what it is."""
    child = node._get_node(key)
    return path in OPEN_GROUPS and isinstance(child, DictConfig) and not child._is_none() and "_target_" in child


def _declared_parameters(target: str, path: str) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return what a target takes as its source says it, or that it may take anything."""
    found = declared(target)
    if found is None or path.split(".")[0] == "partitioner":  # whose options the method knows
        return {}, True
    return found.parameters, found.takes_more


def _parameters(target: str, path: str) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the arguments a target takes, and whether it takes others as well.

    A class of this package that takes any keywords passes them on to its base.
    """
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named, takes_more = {}, True
    try:
        taker = get_object(target)
        while takes_more:
            found = inspect.signature(taker).parameters.values()
            named = {each.name: each for each in found if each.kind not in variable} | named
            takes_more = any(each.kind is each.VAR_KEYWORD for each in found)
            taker = taker.__base__ if inspect.isclass(taker) else None
            if not getattr(taker, "__module__", "").startswith("lightning_gnnscale."):
                break
    except Exception as error:
        raise UsageError(
            f"{path}._target_: {target!r} cannot be imported ({error.__cause__ or error}); modules are looked for in "
            "the current folder and on PYTHONPATH too"
        ) from None
    return named, takes_more


def _check_type(value, parameter: inspect.Parameter, path: str) -> None:
    """Compare a plain value with a plain annotation; what is not plain is left to the class itself."""
    annotation = parameter.annotation
    unknown = annotation is parameter.empty or isinstance(annotation, str)
    if unknown or (value is None and parameter.default is None):
        return
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    kinds = {typing.get_origin(option) or option for option in options} - {_NONE}
    if value is None and (_NONE in options or kinds & {typing.Any, object}):
        return
    if kinds <= {list, tuple, Sequence, Mapping} and Mapping in kinds and not OmegaConf.is_config(value):
        raise UsageError(f"{path} must be a list like [1,2], or lists by name like {{a: [1,2]}}, got {_said(value)}")
    if kinds <= {list, tuple, Sequence} and not OmegaConf.is_list(value):
        raise UsageError(f"{path} must be a list like [1,2], got {_said(value)}")
    if kinds <= {dict, Mapping} and not OmegaConf.is_dict(value):
        raise UsageError(f"{path} must hold names with values each, like {{name: value}}, got {_said(value)}")
    if kinds <= {str, Path, os.PathLike}:
        _check_plain(value, (str,), path)
    elif all(option in (*_PLAIN, _NONE) for option in options):
        _check_plain(value, options, path)
    elif value is None:
        raise UsageError(f"{path} must not be null")


def _check_plain(value, kinds: tuple[type, ...], path: str) -> None:
    accepted = kinds + ((int,) if float in kinds else ())
    is_bool_for_number = isinstance(value, bool) and bool not in kinds
    if not isinstance(value, accepted) or is_bool_for_number:
        allowed = " or ".join(_PLAIN[kind] for kind in kinds if kind is not _NONE)
        raise UsageError(f"{path} must be {allowed}, got {_said(value)}")


def _said(value) -> str:
    """Return a value as the command line says it."""
    return "null" if value is None else repr(value)


def _is_union(annotation) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
