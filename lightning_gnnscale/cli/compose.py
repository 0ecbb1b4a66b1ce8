"""Configs composed from choices and words; values of environment variables are used, but never written or printed."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.resolvers import oc

from .. import events
from ..object_store import graph_name
from .errors import UsageError
from .settings import PACKAGE, described, own_partitioners

GROUPS = f"{PACKAGE}.conf"


def _name_of(key: str, *, _parent_: DictConfig) -> str:
    """Resolve ${name_of:edges}, the name of the graph whose edges a key beside it names."""
    # Hydra also resolves it where it lists the words of the command, beside which there are no keys.
    known = isinstance(_parent_, DictConfig) and key in _parent_ and not OmegaConf.is_missing(_parent_, key)
    return graph_name(str(_parent_[key])) if known else "graph"


def _default_devices(accelerator: str = "auto", on_cpu: int = 2) -> int:
    """Resolve ${default_devices:auto,2}: the GPUs that are there, or processes on the CPU."""
    from .ranks import num_gpus  # torch, which a wrong word is told without

    return num_gpus(accelerator) or on_cpu


def _default_precision(accelerator: str = "auto", devices: int | str = "auto") -> str:
    """Resolve ${default_precision:auto,1}: what a Trainer with that accelerator and number of devices computes in."""
    from .ranks import default_precision  # torch, as above

    return default_precision(accelerator, devices)


def _meeting_port(is_elastic: bool) -> str:
    """Resolve ${meeting_port:${elastic}} for a run's folder: what torchrun starts again meets at another port."""
    return "" if is_elastic else f"-{os.environ.get('MASTER_PORT', '0')}"


OmegaConf.register_new_resolver("meeting_port", _meeting_port, replace=True)
OmegaConf.register_new_resolver("name_of", _name_of, replace=True)
OmegaConf.register_new_resolver("default_devices", _default_devices, replace=True)
OmegaConf.register_new_resolver("default_precision", _default_precision, replace=True)


def register_choices() -> None:
    """Register every partitioner, bound and backbone of the code as a choice.

    A user's partitioner is a choice as soon as it is registered.
    """
    _register_described()
    for name in own_partitioners():
        node = {"defaults": ["streaming_multilevel", "_self_"], "method": name}
        ConfigStore.instance().store(group="partitioner", name=name, node=node)


@cache
def _register_described() -> None:
    for group, choices in described()["choices"].items():
        for name, node in choices.items():
            if not files(GROUPS).joinpath(group, f"{name}.yaml").is_file():
                ConfigStore.instance().store(group=group, name=name, node=node)


def compose_config(config_name: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Return a config of this package, or of a folder, composed separately from any running Hydra application."""
    register_choices()
    path = [] if config_dir is None else [f"hydra.searchpath=[pkg://{GROUPS}]"]
    with own_configs(config_dir):
        return compose(config_name, overrides=[*path, *overrides])


@contextmanager
def own_configs(config_dir: str | None = None) -> Iterator[ConfigLoader]:
    """Read this package's configs, or a folder's, separately from any running Hydra application."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with (
            initialize_config_module(GROUPS, version_base="1.3")
            if config_dir is None
            else initialize_config_dir(config_dir, version_base="1.3")
        ):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = running


def group_choices() -> dict[str, list[str]]:
    """Return the choices of each config group, those of the code too, without the groups of benchmarks."""
    own = {"partitioner": own_partitioners()}
    return {group: sorted([*names, *own.get(group, ())]) for group, names in sorted(described()["choices"].items())}


def choices_of(config: dict) -> dict[str, list[str]]:
    """Return the names that each group of a config takes."""
    present, groups = OmegaConf.create(config), group_choices()
    return {group: groups[group] for group in groups if OmegaConf.select(present, group.replace("/", ".")) is not None}


def key_of(word: str) -> str:
    """Return what a word sets or takes away: "model.lr" for ++model.lr=1, "sampler" for ~sampler, "" for a flag."""
    return re.match(r"[+~]*([\w./]*)", word)[1]


def prepare_overrides(words: list[str]) -> list[str]:
    """Let `a.b=c` set a key whether or not a YAML file lists it; `check_config` then refuses unknown keys.

    Hydra wants `+` for a key that no file lists. Whether a class takes an argument is a better test. Columns of a
    table, `dataset.features=nodes.csv:a,b`, are one value and no sweep: they are quoted.
    """
    inner_key = re.compile(r"^(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")
    plain = r"[^'\"{}\[\]=:]*"
    columns = re.compile(rf"^([+\w.]+)=((?:\w+://)?{plain}\.(?:csv|tsv|parquet)(?:\.gz)?:{plain},{plain})$")
    words = [columns.sub(r'\1="\2"', word) for word in words]
    return [f"++{word}" if inner_key.match(word) else word for word in words]


def fill_inputs(config: DictConfig) -> None:
    """Complete `model.inputs.dim=64`: embeddings that the run learns; changes the config in place."""
    inputs = OmegaConf.select(config, "model.inputs")
    if OmegaConf.is_dict(inputs) and "_target_" not in inputs:
        with open_dict(inputs):
            inputs._target_ = f"{PACKAGE}.embedding.DistributedEmbedding"
            inputs.setdefault("seed", config.get("seed", 0))


_NAMES = ("name", "dataset.name")  # of folders
_read: dict[str, str] = {}  # value to the reference that has read it
_as_written = False


def _env(key: str, *default: Any) -> Any:
    """Resolve ${oc.env:NAME} and ${oc.env:NAME,default}; while a config is written, to the reference itself."""
    text = ",".join([str(key), *("null" if one is None else str(one) for one in default)])
    reference = f"${{oc.env:{text}}}"
    if _as_written:
        return reference
    value = oc.env(key, *default)
    if isinstance(value, str) and os.environ.get(key) == value:
        _read[value] = reference
        events.hide(key, reference)
    return value


OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def written(config: DictConfig) -> dict[str, Any]:
    """Return a config as resolved plain values; references to environment variables stay references."""
    with _references():
        return OmegaConf.to_container(config, resolve=True)


# Settings without which a step is the same: who computes it, what is evaluated, and where files go.
_NOT_OF_STEPS = ("name", "resume", "elastic", "save_steps", "test", "predict", "changed", "step", "output", "overwrite")
_NOT_OF_STEPS += ("logger", "callbacks", "paths", "planner", "machines", "num_devices", "verify", "evaluation", "store")
_NOT_OF_STEPS += ("storage_options", "storage_timeout_s", "store_cache_bytes", "source", "rows", "pack_halo")
_NOT_OF_STEPS += ("keep_layers",)
_OF_PROCESSES = ("devices", "num_nodes", "logger", "limit_val_batches", "max_epochs", "enable_progress_bar")
_OF_PROCESSES += ("check_val_every_n_epoch", "log_every_n_steps", "profiler")


def settings_of_steps(config: DictConfig) -> dict[str, Any]:
    """Return the settings that decide what a step computes, by group: those whose digests a receipt has."""
    settings = {name: value for name, value in written(config).items() if name not in _NOT_OF_STEPS}
    trainer, strategy = dict(settings.get("trainer") or {}), dict(settings.get("strategy") or {})
    settings["trainer"] = {name: value for name, value in trainer.items() if name not in _OF_PROCESSES}
    settings["strategy"] = {
        name: value for name, value in strategy.items() if name not in ("start_method", "timeout", "logical_ranks")
    }
    return settings


def hidden(value: Any) -> Any:
    """Return text, or plain values of a summary, with references instead of environment variables' values."""
    return events.replaced(value, _read)


def check_names(settings: Mapping[str, Any]) -> None:
    """Refuse references to environment variables in settings, by dotted name, that name folders."""
    for name in _NAMES:
        if "oc.env" in str(settings.get(name, "")):
            raise UsageError(
                f"{name} names folders and appears in reports, and values of environment variables are kept out of "
                f"them: say {name}= itself; a shell fills in $NAME"
            )


@contextmanager
def _references() -> Iterator[None]:
    global _as_written
    _as_written = True
    try:
        yield
    finally:
        _as_written = False
