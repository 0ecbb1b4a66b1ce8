"""The settings that a run has left in its folder: data, of which nothing is made or looked up but what a list names."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from .errors import UsageError

_PACKAGE = "lightning_gnnscale"
TRUST = "trust_config"
_MOST_BYTES = 4 << 20
_MOST_NODES = 100_000
_DEEPEST = 40
_MOST_REFERENCES = 16  # in one text; each may hold others
_OF_HYDRA = ("hydra", "defaults")
_FLAGS = {"_partial_": (bool,), "_recursive_": (bool,), "_convert_": (str, bool), "_args_": (list,)}
_MODELS = ("GCN", "GraphSAGE", "GAT", "GINE", "NGNN", "SGC", "RGCN", "RGAT", "HGT", "Hetero", "NoLayers")
_PYG_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN")
_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
)
_SCHEDULERS += ("LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR")


def read_saved_config(path: Path) -> dict[str, Any]:
    """Return the settings of a run's `config.yaml` as plain values; no reference in them is followed.

    Raises:
        UsageError: one line: the file cannot be read, is no YAML, holds tags or aliases, is too large or too deep.

    Cost: reads at most 4 MiB.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({_line(error)})") from None
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path}: settings of a run take at most {_MOST_BYTES >> 20} MiB, and this file is larger")
    try:
        _check_events(text, path)
        loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except UsageError:
        raise
    except Exception as error:  # of YAML's parser, and of the values that it makes
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}: no settings of a run ({_line(error)}{where})") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: settings of a run are names with values each, got a {type(loaded).__name__}")
    return loaded


def checked_config(path: Path, words: list[str], trusted: bool) -> dict[str, Any]:
    """Return the settings of a run to go on with: what would make or look up anything else is refused, unless trusted.

    Args:
        path: The run's `config.yaml`.
        words: Words of the command line; what they set or remove is the user's, and not looked at.
        trusted: Whether the user said trust_config=true.

    Raises:
        UsageError: one line that names the first entry, and the remedy.
    """
    config = read_saved_config(path)
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
    """Return what a run's settings may have made: what the configs and recipes that ship name, and their like."""
    found = {
        *(f"{_PACKAGE}.model.{name}" for name in _MODELS),
        *(f"{module}.{name}" for module in ("torch_geometric.nn", "torch_geometric.nn.models") for name in _PYG_MODELS),
        *(f"torch.optim.{name}" for name in _OPTIMIZERS),
        *(f"torch.optim.lr_scheduler.{name}" for name in _SCHEDULERS),
    }
    for folder in (files(f"{_PACKAGE}.conf"), files(f"{_PACKAGE}.recipes")):
        for path in Path(str(folder)).rglob("*.yaml"):
            found |= set(re.findall(r"_target_: *([\w.]+)", path.read_text()))
    return frozenset(name for name in found | _bounds() if not name.startswith(f"{_PACKAGE}.bench."))


def _bounds() -> set[str]:
    from .declared import constant

    return {f"{_PACKAGE}.strategy.{name}" for name in constant(f"{_PACKAGE}.strategy.exchange.bounds.BOUNDS").values()}


def _check_events(text: str, path: Path) -> None:
    """Refuse what would make objects or grow when it is loaded, before anything is made."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UsageError(f"{path}: line {line}: settings of a run hold no aliases (& and *)")
        if str(getattr(event, "tag", None) or "!").strip("!"):
            raise UsageError(f"{path}: line {line}: settings of a run hold no tags, got {str(event.tag)[:80]}")
        if isinstance(event, yaml.ScalarEvent) and event.value.count("${") > _MOST_REFERENCES:
            raise UsageError(f"{path}: line {line}: more than {_MOST_REFERENCES} references in one text")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or count > _MOST_NODES:
            what = f"nested {_DEEPEST} deep" if depth > _DEEPEST else f"{_MOST_NODES:,} entries"
            raise UsageError(f"{path}: line {line}: settings of a run are at most {what}")


def _entries(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every entry of nested settings with its dotted name, containers before what they hold."""
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, entry in pairs:
        here = f"{path}.{key}" if path else str(key)
        yield here, entry
        if isinstance(entry, Mapping | list):
            yield from _entries(entry, here)


def _refusals(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield why settings are not taken as data, an entry each: they make, or look up, what no list names."""
    for key, entry in _entries(config, above):
        name = key.rpartition(".")[2]
        parent = key.rpartition(".")[0]
        if not parent and (key in _OF_HYDRA or not re.fullmatch(r"\w+", key)):
            yield f"{key[:80]} is no setting of train: {_remedy()}"
        elif not re.fullmatch(r"[^@$\n]*", name):
            yield f"{key[:80]!r} is not the name of a setting: {_remedy()}"
        elif name == "_target_" and (not isinstance(entry, str) or entry not in known_targets()):
            yield f"{key}={str(entry)[:120]} would be run, and a run's folder is no code: {_remedy(parent)}"
        elif name in _FLAGS and not isinstance(entry, _FLAGS[name]):
            yield f"{key} must be {' or '.join(kind.__name__ for kind in _FLAGS[name])}, got {str(entry)[:80]!r}"
        elif isinstance(entry, str) and "${" in entry:
            yield f"{key}={entry[:120]} would be looked up outside of the run's folder: {_remedy(key)}"


def _take_out(config: dict[str, Any], word: str) -> None:
    """Leave out of a config what would be refused and a word of the command line sets or removes."""
    found = re.match(r"[+~]*([A-Za-z_]\w*(?:\.\w+)*)(?:=|$)", word)
    if found is None:
        return
    *above, last = found[1].split(".")
    node: Any = config
    for key in above:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict) and last in node and any(_refusals({last: node[last]}, ".".join(above))):
        node[last] = None


def _remedy(key: str = "") -> str:
    instead = f", or give {key}= yourself" if key and not key.endswith("_") else ""
    return f"say {TRUST}=true if you trust who made it{instead}"


def _line(error: Exception) -> str:
    told = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
    return " ".join(str(told).split())[:200] or type(error).__name__
