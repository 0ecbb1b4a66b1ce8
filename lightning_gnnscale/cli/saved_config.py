"""Settings in a run's folder: only what a list names is made or looked up from them."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..report.run_files import read_settings
from .errors import UsageError
from .settings import described

_PACKAGE = "lightning_gnnscale"
TRUST = "trust_config"
_OF_HYDRA = ("hydra", "defaults")
_PYG_ROOT = "stores/generated/pyg"  # as conf/dataset/pyg.yaml says it
_FLAGS = {"_partial_": (bool,), "_recursive_": (bool,), "_convert_": (str, bool), "_args_": (list,)}
_MODELS = ("GCN", "GraphSAGE", "GAT", "GINE", "NGNN", "SGC", "RGCN", "RGAT", "HGT", "Hetero", "NoLayers")
_PYG_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN")
_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_SCHEDULERS = ("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR")
_SCHEDULERS += ("LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR")


def checked_config(path: Path, words: list[str], trusted: bool) -> dict[str, Any]:
    """Return the settings of a run to resume; unless trusted, what would make or look up anything else is refused.

    Args:
        path: The run's `config.yaml`.
        words: Words of the command line; what they set or remove is the user's and not checked.
        trusted: Whether the user said trust_config=true.

    Raises:
        UsageError: one line that names the first entry, and the remedy.
    """
    config = read_settings(path)
    if trusted:
        return config
    for word in words:
        _take_out(config, word)
    wrong = next(_refusals(config), None)
    if wrong:
        raise UsageError(f"{path}: {wrong}")
    return config


def take_trust(words: list[str]) -> tuple[bool, list[str]]:
    """Take `trust_config=` out of the words of a command line; it is never read from a file.

    Raises:
        UsageError: it is neither true nor false.
    """
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{TRUST}=")]
    wrong = [value for value in given if value.lower() not in ("true", "false")]
    if wrong:
        raise UsageError(f"{TRUST} must be true or false, got {wrong[0]}")
    return given[-1:] in (["true"], ["True"]), [w for w in words if not w.lstrip("+").startswith(f"{TRUST}=")]


@cache
def known_targets() -> frozenset[str]:
    """Return what a run's settings may make: what the shipped configs and recipes name, and the like."""
    found = {
        *(f"{_PACKAGE}.model.{name}" for name in _MODELS),
        *(f"{module}.{name}" for module in ("torch_geometric.nn", "torch_geometric.nn.models") for name in _PYG_MODELS),
        *(f"torch.optim.{name}" for name in _OPTIMIZERS),
        *(f"torch.optim.lr_scheduler.{name}" for name in _SCHEDULERS),
    }
    return frozenset(found | {name for name in described()["targets"] if not name.startswith("benchmarks.")})


def _entries(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every entry of nested settings with its dotted name, containers before what they hold."""
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, entry in pairs:
        here = f"{path}.{key}" if path else str(key)
        yield here, entry
        if isinstance(entry, Mapping | list):
            yield from _entries(entry, here)


def _refusals(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the reason for each entry that is refused: it makes, or looks up, what no list names."""
    for key, entry in _entries(config, above):
        name = key.rpartition(".")[2]
        parent = key.rpartition(".")[0]
        if not parent and (key in _OF_HYDRA or not re.fullmatch(r"\w+", key)):
            yield f"{key[:80]} is not a setting of train: {_remedy()}"
        elif not re.fullmatch(r"[^@$\n]*", name):
            yield f"{key[:80]!r} is not the name of a setting: {_remedy()}"
        elif name == "_target_" and (not isinstance(entry, str) or entry not in known_targets()):
            yield f"{key}={str(entry)[:120]} would be run, but a run's folder must not hold code: {_remedy(parent)}"
        elif name in _FLAGS and not isinstance(entry, _FLAGS[name]):
            yield f"{key} must be {' or '.join(kind.__name__ for kind in _FLAGS[name])}, got {str(entry)[:80]!r}"
        elif name == "address" and entry not in (None, "auto"):  # whose messages are unpickled
            yield f"{key}={str(entry)[:120]} would be connected to and trusted: {_remedy(key)}"
        elif name == "root" and isinstance(entry, str) and entry != _PYG_ROOT and _is_pyg(config, above, parent):
            yield f"{key}={entry[:120]}: files that PyG unpickles are not taken from there: {_remedy(key)}"
        elif isinstance(entry, str) and "${" in entry:
            yield f"{key}={entry[:120]} would be looked up outside of the run's folder: {_remedy(key)}"


def _is_pyg(config: Mapping[str, Any], above: str, parent: str) -> bool:
    """Whether an entry belongs to a data set that PyG reads."""
    node: Any = config
    for key in parent.removeprefix(above).strip(".").split(".") if parent != above else []:
        node = node.get(key) if isinstance(node, Mapping) else None
    return above != "" or (isinstance(node, Mapping) and str(node.get("_target_")).endswith(".load_pyg"))


def _take_out(config: dict[str, Any], word: str) -> None:
    """Leave out of a config what would be refused but is set or removed on the command line."""
    found = re.match(r"[+~]*([A-Za-z_]\w*(?:\.\w+)*)(?:=|$)", word)
    if found is None:
        return
    *above, last = found[1].split(".")
    node: Any = config
    for key in above:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict) and last in node and any(_refusals({last: node[last]}, ".".join(above))):
        node[last] = "" if word.startswith("~") else None  # Hydra removes no null


def _remedy(key: str = "") -> str:
    instead = f", or give {key}= yourself" if key and not key.endswith("_") else ""
    return f"say {TRUST}=true if you trust its author{instead}"
