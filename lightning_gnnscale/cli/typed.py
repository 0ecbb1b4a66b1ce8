"""A config compared with the description of its settings: which keys exist, and which values they take."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .compose import key_of
from .errors import UsageError, in_place
from .settings import FILLED_IN, OPTIONS, Taker, described, is_settable, known_taker, not_a_setting, taker_at, taker_of

_KINDS = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": list, "dict": dict, "null": type(None)}
_SAID = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
_SAID |= {"list": "a list like [1,2]", "dict": "names with values each, like {name: value}"}
_OPEN_GROUPS = ("callbacks", "logger")  # their entries may have any name
# Of settings that no target takes, and of all folders of `paths`.
_TYPES = {
    "name": "str|int",
    "seed": "int",
    "num_parts": "int|str",
    "pack_halo": "bool|str",
    "changed": "bool|str",
    "store_cache_bytes": "int|str|null",
    "storage_timeout_s": "int|float",
    "step": "int|null",
    **dict.fromkeys(("test", "predict", "keep_layers", "overwrite", "verify"), "bool"),
    **dict.fromkeys(("resume", "output", "feature_storage", "edge_storage", "store"), "str|null"),
}
LARGEST_SEED = 2**32 - 1  # of numpy's generator
_COUNT = ("an integer of at least 1", lambda value: is_integer(value, 1))
# Ranges of settings that are not checked elsewhere before work begins, or not in these words.
_RANGES = {
    "seed": (f"an integer in [0, {LARGEST_SEED}]", lambda value: is_integer(value, 0) and value <= LARGEST_SEED),
    "num_parts": ("an integer of at least 1, or auto", lambda value: value == "auto" or is_integer(value, 1)),
    "trainer.logger": (
        "true, false or a logger with its _target_",
        lambda value: isinstance(value, bool | dict | list),
    ),
    "trainer.accumulate_grad_batches": _COUNT,
    "trainer.check_val_every_n_epoch": _COUNT,
    "model.lr": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "model.weight_decay": ("a number of at least 0", lambda value: _is_number(value) and value >= 0),
}
# Benchmarks: they go over every combination of these lists, and of other numbers these may be 0.
_BENCH_AXES = ("graphs", "models", "methods", "partitioners", "policies", "samplers", "sources", "workloads", "parts")
_BENCH_AXES += ("seeds", "world_sizes", "scales", "threads", "fanouts", "batch_sizes", "groups", "devices", "alphas")
_MAY_BE_ZERO = ("sample_ms", "minutes", "seed", "patience", "replicate_share", "requests_ahead", "warm_runs")
_MAY_BE_ZERO += ("import_repeats", "timed_batches", "column_bytes")
# Of each of the callbacks.
_RANGES_OF_CALLBACK = {
    "": ("null or settings with a _target_", lambda value: isinstance(value, dict)),
    ".patience": ("an integer of at least 0", lambda value: is_integer(value, 0)),
}


def check_config(
    config: DictConfig, primary: str, recipe: tuple[str, str] | None = None, imported: bool = True
) -> None:
    """Refuse unknown keys and values of the wrong type, by a UsageError with the key, the value and what is allowed.

    Args:
        config: What was composed.
        primary: The command's own config, whose keys are those that untargeted nodes may have.
        recipe: Folder and name of the recipe or of the run's config that was composed; None: the command's own.
        imported: Import what the description does not know; False: accept it.
    """
    given, base = OmegaConf.to_container(config, resolve=False), _base(primary, recipe)
    missing = [key for key in base if key not in given]
    if missing:
        raise UsageError(
            f"{recipe[1]}.yaml brings no {', '.join(missing)}: begin its defaults with /{primary}, then _self_"
        )
    if recipe is not None:  # a value that settings of the recipe refer to
        base |= dict.fromkeys(set(re.findall(r"\$\{(\w+)[\w.]*\}", json.dumps(given))) - base.keys())
    check_keys(given, base, known_taker if not imported else _imported)


def _base(primary: str, recipe: tuple[str, str] | None) -> dict:
    """Return the command's config with the same choices and without the user's values.

    A config without defaults, as a run leaves it, is its own base.
    """
    if recipe is not None:
        own = OmegaConf.load(Path(recipe[0]) / f"{recipe[1]}.yaml")
        if "defaults" not in own:
            return OmegaConf.to_container(own, resolve=False)
    base = dict(described()["commands"][primary])
    for group, name in HydraConfig.get().runtime.choices.items():
        if group in base:  # nothing is known of a user's own choice
            base[group] = described()["choices"].get(group, {}).get(name)
    return base


def check_keys(node: dict, base: dict | None, takes: Callable[[str], Taker | None], path: str = "") -> None:
    """Refuse unknown keys and values of the wrong type below a node.

    Args:
        node: A config, or a part of it, unresolved.
        base: The same with the choices' own values; None: unknown, any key is allowed where no target refuses it.
        takes: Returns what a target takes, or None.
        path: Key of the node.
    """
    target = node.get("_target_")
    try:
        taker = taker_at(node, takes) or Taker({}, True)
    except Exception as error:  # of the user's module
        raise UsageError(
            f"{path}._target_: {target!r} cannot be imported ({error.__cause__ or error}); modules are looked for in "
            "the current folder and on PYTHONPATH too"
        ) from None
    for key, value in node.items():
        here = f"{path}.{key}".lstrip(".")
        if here == OPTIONS or str(key).startswith("_"):
            continue
        kinds = _TYPES.get(here, "str" if path == "paths" else "")
        if target is not None:
            if key not in taker.settings and not taker.takes_more:
                raise UsageError(_unknown(here, path, target, taker))
            kinds = taker.settings[key].kinds if key in taker.settings else ""
        elif base is not None and key not in base and not _brings_target(value, path):
            raise UsageError(not_a_setting(here, [str(name) for name in base], path or "the top level"))
        is_own_null = value is None and base is not None and base.get(key, "") is None
        if kinds and not is_open(value) and not is_own_null:
            _check_kind(here, value, kinds.split("|"))
        if isinstance(value, dict):
            known = base.get(key) if target is None and base is not None else None
            check_keys(value, known if isinstance(known, dict) else None, takes, here)


def _unknown(here: str, path: str, target: str, taker: Taker) -> str:
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    if any(key_of(word) == f"{path}._target_" for word in words):
        return f"{here} is a setting of what {target} replaces: say {in_place(path, target)}"
    return not_a_setting(here, [name for name in taker.settings if is_settable(path, name)], path)


def is_open(value: Any) -> bool:
    """Whether a value is not checked: it is missing, or refers to another key."""
    return isinstance(value, str) and (value == "???" or "${" in value)


def _brings_target(value: Any, path: str) -> bool:
    """Whether a new entry of a group of objects has a `_target_`."""
    return path in _OPEN_GROUPS and isinstance(value, dict) and "_target_" in value


def _imported(target: str) -> Taker:
    return known_taker(target) or taker_of(target)


def _check_kind(key: str, value: Any, kinds: list[str]) -> None:
    """Compare a value with the kinds that a setting takes; objects are checked by their taker."""
    is_plain = not {"any", "other"} & set(kinds)
    fits = any(isinstance(value, _KINDS.get(kind, ())) for kind in kinds)
    if isinstance(value, bool):
        fits = "bool" in kinds
    if fits or "any" in kinds or (not is_plain and value is not None):
        return
    told = " or ".join(_SAID[kind] for kind in kinds if kind in _SAID) if is_plain else "given"
    shown = "null" if value is None else repr(value)
    raise UsageError(f"{key} must {'hold' if kinds[0] == 'dict' else 'be'} {told}, got {shown}")


def check_ranges(config: DictConfig) -> None:
    """Refuse values that are out of range or without effect; nothing is imported, and missing keys pass."""
    for name, value in (config.get("bench") or {}).items():
        lowest = 0 if name in _MAY_BE_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < lowest:
            raise UsageError(f"bench.{name} must be at least {lowest}, got {value}")
        if name in _BENCH_AXES and value is not None and not isinstance(value, int) and not value:
            raise UsageError(f"bench.{name} must name at least one, got {value}")
    if "dataset" not in config:  # the sizes that are planned for are given
        return
    for key, instead in FILLED_IN.items():
        value = plain(OmegaConf.select(config, key))
        if value is not None:
            raise UsageError(f"{key}={value} has no effect, the run fills it in: say {instead}")
    ranges = dict(_RANGES)
    for name in config.get("callbacks") or ():
        ranges |= {f"callbacks.{name}{key}": allowed for key, allowed in _RANGES_OF_CALLBACK.items()}
    for key, (allowed, fits) in ranges.items():
        value = plain(OmegaConf.select(config, key))
        if value is not None and not fits(value):
            raise UsageError(f"{key} must be {allowed}, got {value}")


def is_integer(value: Any, least: int) -> bool:
    """Whether a value is an integer of at least `least`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: Any) -> Any:
    """Return a value as it was typed, not as OmegaConf prints it."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
