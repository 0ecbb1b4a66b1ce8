"""What `settings.json` holds, made again from the configs and by importing what they name:

`make settings` writes it.
"""

import inspect
import json
import re
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from importlib.resources import files
from pathlib import Path

from hydra.core.default_element import ConfigDefault
from omegaconf import DictConfig, OmegaConf

from lightning_gnnscale.cli.compose import GROUPS, compose_config, own_configs
from lightning_gnnscale.cli.settings import FILE, PACKAGE, options_of, taker_of
from lightning_gnnscale.partitioner import available_partitioners as registered
from lightning_gnnscale.partitioner.registry import get_partitioner
from lightning_gnnscale.strategy.exchange.bounds import BOUNDS


def own_partitioners() -> list[str]:
    """Names of the partitioners of the package: in a test others may be registered, of benchmarks."""
    return [name for name in registered() if get_partitioner(name).__module__.startswith("lightning_gnnscale.")]


def describe() -> dict:
    """Return what `settings.json` holds: commands and comments on them, choices, targets, partitioners, versions."""
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
        "told": {name: _told(conf / f"{name}.yaml") for name in commands},
        "choices": choices,
        "partitioners": {name: options_of(get_partitioner(name)) for name in choices["partitioner"]},
        "targets": targets,
    }


def _told(path: Path) -> dict[str, str]:
    """Return the comments of a command's config by key; of a benchmark's, also its opening line, by ""."""
    text = path.read_text()
    opening = re.search(r"^# gnnscale bench \w+: (.*)", text, re.M)
    return ({"": opening[1]} if opening else {}) | dict(re.findall(r"^(\w+):.*?[ ]#[ ](.*)", text, re.M))


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


def _choices_of_code() -> Iterator[tuple[str, str, str, dict]]:
    """Yield (group, name, base, changed) of every partitioner, bound and backbone with a name.

    Each is a file of its group, which documents the settings, with the one thing changed that its name says:
    `partitioner=grem` is `partitioner/streaming_multilevel.yaml` with `method: grem`. Names that have a file of their
    own keep it.
    """
    for name in own_partitioners():
        yield "partitioner", name, "streaming_multilevel", {"method": name}
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
