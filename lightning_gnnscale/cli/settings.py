"""One description of every setting, from which checks, hints, help and completion follow.

`settings.json` lists what the configs hold, and what the functions and classes that they name take, so that a wrong
word is refused before torch is imported; `make settings` writes it. Anything else is read from signatures and
docstrings, by an import.
"""

import difflib
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import get_object

from ..errors import now_called
from .errors import did_you_mean

PACKAGE = "lightning_gnnscale"
_KINDS = {
    int: "int",
    float: "float",
    bool: "bool",
    types.NoneType: "null",
    **dict.fromkeys((str, Path, os.PathLike), "str"),
    **dict.fromkeys((list, tuple, Sequence), "list"),
    **dict.fromkeys((dict, Mapping), "dict"),
    **dict.fromkeys((typing.Any, object), "any"),
}
_ORDER = ("int", "float", "bool", "str", "list", "dict", "any", "other", "null")
_SHARED = ("seed", "masks", "balance", "progress")  # of all partitioners


class Setting(NamedTuple):
    """The description of a setting.

    Attributes:
        kinds: Kinds of values that it takes, as "int|null": of int, float, bool, str, list, dict, null, any and other;
            "": not known.
        default: As on the command line; None: it must be given.
        told: Its description, on one line.
    """

    kinds: str = ""
    default: str | None = None
    told: str = ""


class Taker(NamedTuple):
    """What a function or class takes: settings by name, and whether it takes any other keyword."""

    settings: dict[str, Setting]
    takes_more: bool


def taker_of(target: str) -> Taker:
    """Import the function or class of a dotted name, and return what it takes.

    A class of this package that takes any keywords passes them on to its base.
    """
    taker, named, told, takes_more = get_object(target), {}, {}, True
    while takes_more:
        found = inspect.signature(taker).parameters.values()
        named = {one.name: one for one in found if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)} | named
        told = _told(taker) | told
        takes_more = any(one.kind is one.VAR_KEYWORD for one in found)
        taker = taker.__base__ if inspect.isclass(taker) else None
        if not getattr(taker, "__module__", "").startswith(f"{PACKAGE}."):
            break
    return Taker({name: _setting(one, told.get(name, "")) for name, one in named.items()}, takes_more)


def options_of(partitioner: typing.Callable) -> dict[str, Setting] | None:
    """Return the options of a partitioner; None where it takes any."""
    found, told = inspect.signature(partitioner).parameters.values(), _told(partitioner)
    if any(one.kind is one.VAR_KEYWORD for one in found):
        return None
    own = [one for one in found if one.kind is one.KEYWORD_ONLY and one.name not in _SHARED]
    return {one.name: _setting(one, told.get(one.name, "")) for one in own}


def _setting(one: inspect.Parameter, told: str) -> Setting:
    kinds = []
    if one.annotation is not one.empty and not isinstance(one.annotation, str):
        is_union = isinstance(one.annotation, types.UnionType) or typing.get_origin(one.annotation) is typing.Union
        options = typing.get_args(one.annotation) if is_union else (one.annotation,)
        kinds = [_KINDS.get(typing.get_origin(option) or option, "other") for option in options]
        kinds += ["null"] if one.default is None else []
    kinds = sorted(set(kinds), key=_ORDER.index)  # an interpreter may give the members of a union in another order
    return Setting("|".join(kinds), None if one.default is one.empty else as_word(one.default), told)


def as_word(value: typing.Any) -> str:
    """Return a value as on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    value = getattr(value, "__name__", None) or (list(value) if isinstance(value, tuple) else value)
    return re.sub(r" at 0x\w+", "", str(value)).replace(" ", "")


def _told(taker) -> dict[str, str]:
    """Return the text of the "Args:" of a docstring by parameter, those of bases and of keywords' targets too."""
    further = [*getattr(taker, "passes_on_to", ())]
    if inspect.isclass(taker):
        further += [taker.__init__, *(base for base in taker.__bases__ if base is not object)]
    told = {name: text for one in reversed(further) for name, text in _told(one).items()}
    section = re.search(r"^Args:\n((?:[ \t]+\S.*\n?|\n)+)", inspect.cleandoc(taker.__doc__ or ""), re.M)
    text = re.sub(r"\n {5,}", " ", section[1]) if section else ""
    for names, words in re.findall(r"^ {4}([\w, *]+): (.*)$", text, re.M):
        told |= {name.strip(" *"): words.strip() for name in names.split(",")}
    return told


FILE = Path(__file__).with_name("settings.json")
OPTIONS = "storage_options"  # whose entries another package reads
UNSET = "???"  # of a setting that a config does not name
_BY_RUN = ("stream", "progress", "callbacks")  # arguments that the run fills in, not the user
_OF_TOP = ("store", "dataset", "partitioner", "planner", "num_parts", "overwrite", "feature_storage", "pack_halo")
_OF_TOP += ("edge_storage", "sampler", "source", "rows", "evaluation")
# Settings that the run fills in, so that a given value would be lost, and what to say instead.
FILLED_IN = {
    "trainer.strategy": "strategy= and strategy.weights, strategy.exchange",
    "trainer.callbacks": "callbacks=, for example callbacks=early_stopping",
    "trainer.default_root_dir": "hydra.run.dir=",
    "datamodule.root": "output=, or paths.stores=",
    "datamodule.stream": "dataset=",
    "datamodule.masks": "dataset=files and dataset.masks=, or train_mask=, val_mask=, test_mask=",
    **{f"datamodule.{key}": f"{key}=" for key in _OF_TOP},
    **{
        f"datamodule.{key}": f"dataset=files and dataset.{key}="
        for key in ("features", "labels", "edge_weight", "edge_features")
    },
    "partitioner.num_parts": "num_parts=",
    "datamodule.num_machines": "partitioner.num_machines=",
    "planner.num_parts": "num_parts=",
    "planner.num_devices": "trainer.devices=, or num_devices= where only the store is made",
    "planner.batch_size": "datamodule.batch_size=",
    "planner.fanouts": "sampler.fanouts=",
    "planner.prefetch_batches": "source.prefetch_batches=",
    **dict.fromkeys(("planner.num_nodes", "planner.num_edges"), "dataset=, whose graph is planned for"),
    **{
        f"planner.{key}": "dataset=, whose features are planned for"
        for key in ("feature_bytes", "placeable_bytes", "feature_dim", "feature_row_bytes", "stored_row_bytes")
    },
    "planner.edge_row_bytes": "dataset=, whose edges are planned for",
    "model.multilabel": "dataset=, which gives the labels",
    "model.edge_channels": "dataset=, which gives the edge features",
    "model.backbone.in_channels": "dataset=, which gives the features",
    "model.backbone.schema": "dataset=, which gives the edge types",
}


class Place(NamedTuple):
    """A setting in a config: its key, its value there or UNSET, its description, and the name of its taker."""

    key: str
    value: Any
    setting: Setting
    target: str | None


@cache
def described() -> dict:
    """Return `settings.json`."""
    return json.loads(FILE.read_text())


@cache
def known_taker(target: str) -> Taker | None:
    """Return what a dotted name takes, and None where an import is needed: users' own names, and other versions."""
    known, (top, _, name) = described()["targets"], target.partition(".")
    if target not in known and top == PACKAGE:  # another path to the same name of the package
        target = next((one for one in known if one.startswith(f"{PACKAGE}.") and one.endswith(f".{name}")), "")
    installed = {one.version for one in distributions(name=top)}
    if target not in known or described()["versions"].get(top) not in (None, *installed):
        return None
    settings = {key: Setting(*one) for key, one in known[target]["settings"].items()}
    return Taker(settings, known[target]["takes_more"])


def taker_at(node: dict, takes: Callable[[str], Taker | None] = known_taker) -> Taker | None:
    """Return what the target of a node takes: of `partitioner`, with the options of its method."""
    target = node.get("_target_")
    found = takes(target) if isinstance(target, str) else None
    if found is None or target != f"{PACKAGE}.partitioner.partition":
        return found
    options = options_of_method(node.get("method"))
    return Taker(found.settings | (options or {}), options is None)


def options_of_method(method: str | None) -> dict[str, Setting] | None:
    """Return the options of a partitioner by name; None where it takes any, or is unknown."""
    known = described()["partitioners"]
    if method not in known and method in own_partitioners():
        return options_of(own_partitioners()[method])
    return known.get(method) and {key: Setting(*one) for key, one in known[method].items()}


def own_partitioners() -> dict[str, Callable]:
    """Return the partitioners that users have registered in this process."""
    registry = sys.modules.get(f"{PACKAGE}.partitioner.registry")
    found = {} if registry is None else registry._PARTITIONERS
    return {name: one for name, one in found.items() if not one.__module__.startswith(f"{PACKAGE}.")}


def walk(node: dict, path: str = "") -> Iterator[Place]:
    """Yield the settings of a config: those that it names, those inside them, and its targets' other arguments."""
    taker = taker_at(node) or Taker({}, True)
    for name in dict.fromkeys([*node, *taker.settings]):
        key, setting = f"{path}.{name}".lstrip("."), taker.settings.get(name, Setting())
        if str(name).startswith("_") or (name not in node and not is_settable(path, name)):
            continue
        yield Place(key, node.get(name, UNSET), setting, node.get("_target_"))
        if isinstance(node.get(name), dict):
            yield from walk(node[name], key)


def is_settable(path: str, name: str) -> bool:
    """Whether the user gives an argument, not the run."""
    return name not in _BY_RUN and f"{path}.{name}" not in FILLED_IN


@cache
def keys_of_choices() -> dict[str, list[str]]:
    """Return the choices that have a setting, by key: for "dataset.edges", ["dataset=files", "dataset=hetero"]."""
    found: dict[str, list[str]] = {}
    for group, choices in described()["choices"].items():
        for name, node in choices.items():
            for place in walk(node, group.replace("/", ".")):
                found.setdefault(place.key, []).append(f"{group}={name}")
    return found


def elsewhere(name: str) -> str | None:
    """Return the shortest key of a setting, of any choice, whose last part is a name or is close to it."""
    known = sorted(keys_of_choices(), key=lambda one: one.count("."))
    names = dict.fromkeys(one.rpartition(".")[2] for one in known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    return next((one for one in known if close and one.endswith(f".{close[0]}")), None)


def not_a_setting(key: str, allowed: Iterable[str], taker: str) -> str:
    """Return the message on an unknown key: choices of its group that have it, a similar key, what is allowed."""
    others = keys_of_choices().get(key, [])
    ends = tuple(f"_{one.partition('=')[2]}" for one in others)
    others = sorted(others, key=lambda one: (one.endswith(ends), one))  # gat before edge_gat
    if others:
        more = f"{', '.join(others[:3])} and {len(others) - 3} more choices"
        told = " or ".join(others) if len(others) <= 3 else more
        return f"{key} is a setting of {told}: say {'that' if len(others) == 1 else 'one of them'} too"
    last = key.rpartition(".")[2]
    near = (
        now_called(last)
        or did_you_mean(last, allowed)
        or ((found := elsewhere(last)) and f" (did you mean {found}?)")
        or ""
    )
    return f"{key} is not a setting{near}; {taker} takes {', '.join(allowed) or 'none'}"
