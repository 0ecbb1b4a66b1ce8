"""Overrides checked against what the settings' targets take, before any work starts."""

import inspect
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from .compose import compose_config
from .errors import UsageError

_SWITCHES = ("test", "predict", "overwrite", "verify")
_TEXTS = ("resume", "output", "feature_storage")
_NONE = type(None)
TOP_LEVEL = {
    "name": (str, int),
    "seed": (int,),
    "num_parts": (int, str),
    "pack_halo": (bool, str),
    "store": (str,),
    **dict.fromkeys(_SWITCHES, (bool,)),
    **dict.fromkeys(_TEXTS, (str, _NONE)),
}
_FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"),
    *("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"),
)
OPEN_GROUPS = ("callbacks",)  # whose entries may have any names
_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def prepare_overrides(words: list[str]) -> list[str]:
    """Let `a.b=c` set a key whether or not a YAML file lists it; `check_config` then says which keys exist.

    Hydra wants `+` for a key that no file lists. Whether a class takes an argument is a better test.
    """
    return [f"++{word}" if re.match(r"^[A-Za-z_]\w*(\.\w+)+=", word) and not _hydra(word) else word for word in words]


def flags_first(words: list[str]) -> list[str]:
    """Put Hydra's own flags before the overrides, which it wants in one row behind them."""
    flags, overrides = [], []
    words = iter(words)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
        elif word in _FLAGS_WITH_VALUE:
            flags += [word, *islice(words, 1)]
        else:
            flags.append(word)
    return [*flags, *overrides]


def shared_run_folder(words: list[str]) -> list[str]:
    """Give the ranks that torchrun started one run folder: each would name its own by the second it starts in."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or any(word.startswith("hydra.run.dir=") for word in words):
        return []
    return [f"hydra.run.dir=${{paths.runs}}/${{name}}/torchrun-{run_id}-{os.environ.get('MASTER_PORT', '0')}"]


def _hydra(word: str) -> bool:
    return word.startswith("hydra.")


def check_config(config: DictConfig, config_name: str, config_dir: str | None) -> None:
    """Refuse unknown keys and values of the wrong type.

    Raises:
        UsageError: one line that names the key, the value and what is allowed.
    """
    from hydra.core.hydra_config import HydraConfig

    choices = [word for word in HydraConfig.get().overrides.task if not _sets_value(word)]
    base = _compose_base(config_name, config_dir, choices)
    _check_node(config, base, "")


def _sets_value(word: str) -> bool:
    """Whether `+key=` or `++key=` sets a value, and does not choose from a group."""
    added = re.match(r"^\+{1,2}([^/@=]+)=", word)
    if added is None:
        return False
    is_group = word[1] != "+" and GlobalHydra.instance().config_loader().get_group_options(added[1])
    return not is_group


def allowed_at_top(config_name: str, config_dir: str | None) -> str:
    """Return the top level's keys, for an error."""
    return ", ".join(str(key) for key in _compose_base(config_name, config_dir, []))


def _compose_base(config_name: str, config_dir: str | None, choices: list[str]) -> DictConfig:
    """Compose the same config without the user's values: its keys are those that untargeted nodes allow."""
    return compose_config(config_name, choices, config_dir)


def _check_node(node: DictConfig, base, path: str) -> None:
    target = OmegaConf.to_container(node, resolve=False).get("_target_")
    parameters, takes_more = _parameters(target, path) if target else ({}, False)
    for key in node:
        here = f"{path}.{key}" if path else str(key)
        if target and not str(key).startswith("_"):
            if key not in parameters and not takes_more:
                raise UsageError(f"{here} is not a setting; {path} takes {', '.join(parameters)}")
            if key in parameters and not _is_open(node, key) and not _brings_null(base, node, key):
                _check_type(node[key], parameters[key], here)
        elif not path and key in TOP_LEVEL and not OmegaConf.is_interpolation(node, key):
            _check_plain(node[key], TOP_LEVEL[key], here)
        elif path == "paths" and key in (base or ()) and not OmegaConf.is_interpolation(node, key):
            _check_plain(node[key], (str,), here)
        elif not target and base is not None and key not in base and not _brings_target(node, key, path):
            allowed = ", ".join(str(name) for name in base)
            raise UsageError(f"{here} is not a setting; {path or 'the top level'} takes {allowed}")
        if _is_open(node, key):
            continue
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            # An argument that is a plain dict may hold any keys: its target judges them.
            known = base._get_node(key) if not target and isinstance(base, DictConfig) and key in base else None
            _check_node(child, known if isinstance(known, DictConfig) and not known._is_none() else None, here)


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
        raise UsageError(f"{path}._target_: {target!r} cannot be imported ({error})") from None
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
