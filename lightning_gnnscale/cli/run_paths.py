"""A run on disk: files to read, its folder and checkpoint, what its settings may make; and the benchmarks."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ..object_store import is_url, query_of
from ..report.run_files import read_settings, value_at
from .errors import UsageError, did_you_mean
from .settings import PACKAGE, described

CONFIG = "config.yaml"  # the settings that a run leaves, all values filled in
CHECKPOINTS = "checkpoints"
SOURCE = "GNNSCALE_SOURCE"  # names a source tree, for its benchmarks
_LOADERS = ("load_files", "hetero_graph")  # whose settings of these names are paths
_ARRAYS = ("features", "labels", "nodes", "masks", "train_mask", "val_mask", "test_mask", "time", "weight")
_FILES = ("edges", *_ARRAYS, "edge_weight", "edge_features", "edge_label")


def run_of(path: str) -> Path:
    """Return the folder of the run that a path names: the folder itself, or a checkpoint in it."""
    given = Path(path).expanduser().absolute()
    if not given.exists():
        raise UsageError(f"{path}: no such run; a run's folder is printed at its end, and is under paths.runs")
    folders = [given] if given.is_dir() else [given.parent.parent, given.parent]
    found = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if found is not None:
        return found
    jobs = sorted(one.parent.name for one in given.glob(f"*/{CONFIG}"))
    if jobs:
        shown = ", ".join(jobs[:5]) + (", ..." if len(jobs) > 5 else "")
        raise UsageError(f"{path} holds several runs: give one of them ({shown})")
    raise UsageError(
        f"{path}: not a run's folder, nor a checkpoint in one ({CONFIG} is missing): give the settings of train, "
        f"dataset= and model= among them, and resume={path}"
    )


def last_checkpoint(path: str) -> str:
    """Return the checkpoint that `resume=` names: the file given, or the last epoch's of a run's folder."""
    given = Path(path).expanduser()
    if not given.is_dir():
        return path
    folder = given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given
    found = [one for one in folder.glob("*.ckpt") if one.exists()]
    if not found:
        raise UsageError(f"resume={path}: there is no checkpoint in {folder}")
    # Lightning names the second one of a folder last-v1.ckpt; the last epoch's is also written after the best one.
    last = [one for one in found if one.name.startswith("last")]
    return str(max(last or found, key=lambda one: one.stat().st_mtime))


def find_benchmarks() -> Path:
    """Make `benchmarks` importable, here and in started processes; return the source tree that has it.

    It is that of GNNSCALE_SOURCE where that is set, else the one that this package is installed from, else the current
    folder.
    """
    named = os.environ.get(SOURCE)
    trees = [Path(named).expanduser()] if named else [Path(__file__).parents[2], Path.cwd()]
    found = next((tree.absolute() for tree in trees if (tree / "benchmarks" / "runner.py").is_file()), None)
    if found is None:
        looked = " or ".join(str(tree / "benchmarks") for tree in trees)
        raise UsageError(
            f"no benchmarks in {looked}: the source tree has them, a wheel does not; clone it, and pip install -e "
            f". there, or set {SOURCE} to its folder"
        )
    if str(found) not in sys.path:
        sys.path.insert(0, str(found))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(found) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(found), *filter(None, paths)])
    return found


def run_bench(config: DictConfig) -> None:
    """Run one benchmark; tables, CSV and plots go to the run folder. Its config's `_target_` is what runs."""
    instantiate(config.bench, output_dir=HydraConfig.get().runtime.output_dir)


def check_paths(config: DictConfig) -> None:
    """Refuse missing files, before anything is imported to read them."""
    dataset, store = config.get("dataset"), config.get("store")
    if not OmegaConf.is_dict(dataset):  # a command of its own
        return
    if store is not None and not is_url(store) and not os.path.exists(_expanded(store)):
        raise UsageError(_not_there("store", store))
    resume = config.get("resume")
    if resume is not None and not is_url(resume) and not os.path.exists(_expanded(resume)):
        found = ", ".join(sorted(one.name for one in Path(_expanded(resume)).parent.glob("*.ckpt"))[:5])
        remedy = f"beside it: {found}" if found else "give a checkpoint that a run left under its checkpoints/"
        raise UsageError(f"resume: {resume}: no such checkpoint; {remedy}")
    if store is None and str(dataset.get("_target_")).endswith(_LOADERS):
        for key, path in _files_of(OmegaConf.to_container(dataset, resolve=False), "dataset"):
            if query_of(path) is not None:
                if not os.path.exists(query_of(path)[0]):
                    raise UsageError(_not_there(key, query_of(path)[0]))
            elif not (is_url(path) or "${" in path or path == "???" or any(mark in path for mark in "*?[")):
                file = re.sub(r"(?<=\w):[^/:]*$", "", path)  # nodes.csv:label names a column
                if not os.path.exists(_expanded(path)) and not os.path.exists(_expanded(file)):
                    raise UsageError(_not_there(key, file))


def _files_of(node: dict, path: str) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, dict) and key != "reader":
            yield from _files_of(value, f"{path}.{key}")
        elif isinstance(value, list) and key == "edges":  # of dataset=hetero, "source,name,target=path"
            for at, entry in enumerate(value):
                if isinstance(entry, dict):
                    yield from _files_of(entry, f"{path}.{key}[{at}]")
                elif isinstance(entry, str) and "=" in entry:
                    yield f"{path}.{key}[{at}]", entry.partition("=")[2].strip()
        elif isinstance(value, str) and (key in _FILES or path.endswith(".edges")):
            yield f"{path}.{key}", value


def _expanded(path: str) -> str:
    return os.path.expanduser(str(path))


def _not_there(key: str, given: str) -> str:
    path = Path(_expanded(given))
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    where = "" if path.is_absolute() else f", looked for in {Path.cwd()}"
    return f"{key}: {given}: no such file or folder{did_you_mean(path.name, names)}{where}"


@contextmanager
def removed_unless_begun(folder: Path, runs: Path) -> Iterator[None]:
    """Remove a run's folder, and that of all runs if it is empty, where it fails before it has done anything."""
    try:
        yield
    except BaseException:
        is_ours = os.environ.get("RANK", "0") == "0" and not Path.cwd().is_relative_to(folder)
        if is_ours and not _has_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in folder.parents:
                if not parent.is_relative_to(runs):
                    break
                with suppress(OSError):  # other runs are in it
                    parent.rmdir()
        raise


def _has_begun(folder: Path) -> bool:
    """Whether a run's folder holds more than its settings and the record of opened data."""
    for path in folder.rglob("*"):
        is_own = (
            path.parent.name == ".hydra" or path.name in (".hydra", CONFIG, "events.jsonl") or path.suffix == ".log"
        )
        if not is_own:
            return True
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    return any('"event": "stage"' in line and '"stage": "load"' not in line for line in lines)


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

    What the words of the command line set or remove is the user's and not checked.
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
    """Take `trust_config=` out of the words of a command line; it is never read from a file."""
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{TRUST}=")]
    wrong = [value for value in given if value.lower() not in ("true", "false")]
    if wrong:
        raise UsageError(f"{TRUST} must be true or false, got {wrong[0]}")
    return given[-1:] in (["true"], ["True"]), [w for w in words if not w.lstrip("+").startswith(f"{TRUST}=")]


@cache
def known_targets() -> frozenset[str]:
    """Return what a run's settings may make: what the shipped configs and recipes name, and the like."""
    found = {
        *(f"{PACKAGE}.model.{name}" for name in _MODELS),
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
    node = value_at(config, parent.removeprefix(above).strip(".") if parent != above else "")
    return above != "" or (isinstance(node, Mapping) and str(node.get("_target_")).endswith(".load_pyg"))


def _take_out(config: dict[str, Any], word: str) -> None:
    """Leave out of a config what would be refused but is set or removed on the command line."""
    found = re.match(r"[+~]*([A-Za-z_]\w*(?:\.\w+)*)(?:=|$)", word)
    if found is None:
        return
    above, _, last = found[1].rpartition(".")
    node = value_at(config, above)
    if isinstance(node, dict) and last in node and any(_refusals({last: node[last]}, above)):
        node[last] = "" if word.startswith("~") else None  # Hydra removes no null


def _remedy(key: str = "") -> str:
    instead = f", or give {key}= yourself" if key and not key.endswith("_") else ""
    return f"say {TRUST}=true if you trust its author{instead}"
