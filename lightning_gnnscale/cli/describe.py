"""What functions and classes take, as an import tells it, and the file that says so of all that ships.

`python -m lightning_gnnscale.cli.describe` (`make settings`) writes `settings.json`, which commands read in place of
importing torch; a test compares the two.
"""

import inspect
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, version
from importlib.resources import files
from pathlib import Path

from hydra.core.default_element import ConfigDefault
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from .compose import GROUPS, compose_config, own_configs
from .settings import FILE, PACKAGE, Setting, Taker

_KINDS = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    Path: "str",
    os.PathLike: "str",
    types.NoneType: "null",
    list: "list",
    tuple: "list",
    Sequence: "list",
    dict: "dict",
    Mapping: "dict",
    typing.Any: "any",
    object: "any",
}
_SHOWN = {None: "null", True: "true", False: "false"}


def taker_of(target: str) -> Taker:
    """Return what the function or class of a dotted name takes; it is imported.

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
    from ..partitioner.registry import SHARED

    found, told = inspect.signature(partitioner).parameters.values(), _told(partitioner)
    if any(one.kind is one.VAR_KEYWORD for one in found):
        return None
    own = [one for one in found if one.kind is one.KEYWORD_ONLY and one.name not in SHARED]
    return {one.name: _setting(one, told.get(one.name, "")) for one in own}


def _setting(one: inspect.Parameter, told: str) -> Setting:
    kinds = []
    if one.annotation is not one.empty and not isinstance(one.annotation, str):
        is_union = isinstance(one.annotation, types.UnionType) or typing.get_origin(one.annotation) is typing.Union
        options = typing.get_args(one.annotation) if is_union else (one.annotation,)
        kinds = [_KINDS.get(typing.get_origin(option) or option, "other") for option in options]
        kinds += ["null"] if one.default is None else []
    return Setting("|".join(dict.fromkeys(kinds)), None if one.default is one.empty else _shown(one.default), told)


def _shown(value: typing.Any) -> str:
    """Return a default as the command line says it."""
    if value is None or isinstance(value, bool):
        return _SHOWN[value]
    value = getattr(value, "__name__", None) or (list(value) if isinstance(value, tuple) else value)
    return re.sub(r" at 0x\w+", "", str(value)).replace(" ", "")


def _told(taker) -> dict[str, str]:
    """Return the text of the "Args:" of a docstring by parameter, with those of bases and of what keywords go on to."""
    further = [*getattr(taker, "passes_on_to", ())]
    if inspect.isclass(taker):
        further += [taker.__init__, *(base for base in taker.__bases__ if base is not object)]
    told = {name: text for one in reversed(further) for name, text in _told(one).items()}
    section = re.search(r"^Args:\n((?:[ \t]+\S.*\n?|\n)+)", inspect.cleandoc(taker.__doc__ or ""), re.M)
    text = re.sub(r"\n {5,}", " ", section[1]) if section else ""
    for names, words in re.findall(r"^ {4}([\w, *]+): (.*)$", text, re.M):
        told |= {name.strip(" *"): words.strip() for name in names.split(",")}
    return told


def describe() -> dict:
    """Return what `settings.json` holds: commands, choices of groups, targets, options of partitioners, versions."""
    from ..partitioner.registry import get_partitioner

    conf = Path(str(files(GROUPS)))
    choices = _choices(conf)
    commands = sorted((*conf.glob("*.yaml"), *conf.glob("bench/*.yaml")))
    commands = [
        str(one.relative_to(conf).with_suffix("")) for one in commands if not one.stem.endswith(("_run", "_folder"))
    ]
    paths = [*conf.rglob("*.yaml"), *Path(str(files(f"{PACKAGE}.recipes"))).rglob("*.yaml")]
    texts = [json.dumps(choices), *(path.read_text() for path in paths)]
    named = {found for text in texts for found in re.findall(r'_target_"?: *"?([\w.]+)', text)}
    targets = {target: taker_of(target)._asdict() for target in sorted(named)}
    others = {target.partition(".")[0] for target in targets} - {PACKAGE}
    return {
        "versions": {name: version(name) for name in sorted(others) if _is_installed(name)},
        "commands": {name: _plain(compose_config(name, [])) for name in commands},
        "choices": choices,
        "partitioners": {name: options_of(get_partitioner(name)) for name in choices["partitioner"]},
        "targets": targets,
    }


def _is_installed(name: str) -> bool:
    return bool(packages_distributions().get(name))


def _choices(conf: Path) -> dict[str, dict]:
    """Return what each choice of each group says: of the files, and of what the code knows by name."""
    found: dict[str, dict] = {}
    with own_configs() as loader:
        for path in sorted(conf.rglob("*.yaml")):
            group = str(path.parent.relative_to(conf))
            if group not in (".", "bench"):
                found.setdefault(group, {})[path.stem] = _plain(_merged(loader, group, path.stem))
    for group, name, base, changed in _choices_of_code():
        if name not in found[group]:
            found[group][name] = _plain(OmegaConf.merge(found[group][base], changed))
    return found


def _merged(loader, group: str, name: str) -> DictConfig:
    """Return a choice with the one that it changes: a composition would take ten times as long."""
    found = loader.repository.load_config(f"{group}/{name}")
    plain = [one.path for one in found.defaults_list or [] if isinstance(one, ConfigDefault) and one.path != "_self_"]
    return OmegaConf.merge(*(_merged(loader, group, one) for one in plain), found.config)


def _choices_of_code() -> typing.Iterator[tuple[str, str, str, dict]]:
    """Yield (group, name, base, changed) of every partitioner, placement, scheduling, bound and backbone with a name.

    Each is a file of its group, which documents the settings, with the one thing changed that its name says:
    `placement=pagraph` is `placement/rule.yaml` with `method: pagraph`. Names that have a file of their own keep it.
    """
    from ..partitioner import available_partitioners
    from ..placement.place import METHODS
    from ..strategy.exchange.bounds import BOUNDS

    for name in available_partitioners():
        yield "partitioner", name, "streaming_multilevel", {"method": name}
    for name in METHODS:
        yield "placement", name, "rule", {"method": name}
    yield "source", "fixed_prefetch", "task_graphs", {"scheduling": "fixed_prefetch"}
    for name, bound in BOUNDS.items():
        defaults = {key: one.default for key, one in inspect.signature(bound).parameters.items()}
        given = {key: value for key, value in defaults.items() if value is not None}
        target = f"{PACKAGE}.strategy.{bound.__name__}"
        yield "strategy/exchange", f"skip_{name}", "skip_broadcast", {"bound": {"_target_": target, **given}}
    heads = {"": "graphsage", "link_": "link_predictor", "edge_": "edge_classifier", "regress_": "node_regressor"}
    for head, base in heads.items():
        for backbone in ("GCN", "GAT", "GINE", "NGNN", "RGCN", "RGAT", "HGT"):
            changed = {"backbone": {"_target_": f"{PACKAGE}.model.{backbone}"}}
            yield "model", head + backbone.lower(), base, changed


def _plain(config: DictConfig) -> dict:
    return OmegaConf.to_container(config, resolve=False)


def text_of(described: dict, indent: str = "") -> str:
    """Return `settings.json`: a line for each setting, so that changes can be read and merged."""
    if not isinstance(described, dict) or not described:
        return json.dumps(described)
    lines = [f"{indent} {json.dumps(key)}: {text_of(value, f'{indent} ')}" for key, value in described.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


if __name__ == "__main__":
    FILE.write_text(text_of(describe()) + "\n")
