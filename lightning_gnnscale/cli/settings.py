"""One description of every setting, from which checks, hints, help and completion follow.

`settings.json` lists what the configs hold, and what the functions and classes that they name take, so that a wrong
word is refused before torch is imported; `make settings` writes it. Anything else is found by an import.
"""

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import now_called
from .errors import did_you_mean
from .signatures import PACKAGE, Setting, Taker, options_of

FILE = Path(__file__).with_name("settings.json")
OPTIONS = "storage_options"  # whose entries another package reads
UNSET = "???"  # of a setting that a config does not name
_BY_RUN = ("stream", "progress", "callbacks")  # arguments that the run fills in, not the user
_OF_TOP = ("store", "dataset", "partitioner", "planner", "num_parts", "overwrite", "feature_storage", "pack_halo")
_OF_TOP += ("sampler", "source", "rows", "evaluation")
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
