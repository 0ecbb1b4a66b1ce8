"""`gnnscale COMMAND --help`: the choices, the settings with their values, and what else each of them takes."""

import inspect
import re
from collections.abc import Iterator
from importlib.resources import files

from omegaconf import DictConfig, OmegaConf

from .commands import COMMANDS, TAKES, Command
from .compose import GROUPS, compose_config, group_choices, partitioner_options, prepare_overrides
from .declared import declared

_WIDTH = 116
_LONG = ("lightning.Trainer",)  # whose arguments Lightning's own pages tell
_FILLED = ("stream", "num_parts", "progress", "dataset", "root", "store", "callbacks", "logger", "strategy")


def print_help(command: Command) -> None:
    """Print the help of a command line, with the settings of the choices that it makes.

    Args:
        command: The command, with its words.
    """
    flags = [word for word in command.words if word.startswith("-")]
    words = [word for word in command.words if word not in flags and not word.startswith("hydra")]
    config = compose_config(command.config_name, prepare_overrides(words), command.config_dir)
    what = " ".join([command.name, *([command.config_name.partition("/")[2]] if command.name == "bench" else [])])
    print(f"gnnscale {what}: {COMMANDS[command.name]}\n")
    recipe = "" if command.name in ("stores", "report", "doctor") else "[recipe=NAME | recipe=FILE.yaml] "
    print(f"usage: gnnscale {what} {TAKES.get(command.name, '')}{recipe}[key=value ...] [--multirun] [--cfg job]\n")
    groups = {group: choices for group, choices in group_choices().items() if _has(config, group)}
    if groups:
        print("choices (key=NAME; their settings below change with them):")
        for group, choices in groups.items():
            _wrapped(f"  {group + '=':<22} ", ", ".join(choices))
        print()
    print("settings (key.name=value):")
    told = _told_in_file(command.primary)
    for line in OmegaConf.to_yaml(config, resolve=False).rstrip().splitlines():
        text = told.get(line.partition(":")[0])
        print(f"  {line:<26}  # {text}" if text else f"  {line}")
    further = list(_further(config))
    if further:
        print("\nfurther settings, which need no + either:")
    for path, lines in further:
        print(f"  {path}.")
        for name, text in lines:
            _wrapped(f"    {name:<34} ", text)
    if "partitioner" in config:
        print("\noptions of partitioners (partitioner=NAME partitioner.option=value; = stands before the default):")
        for method in group_choices().get("partitioner", []):
            options = partitioner_options(method)
            told = "any" if options is None else ", ".join(_shown(one) for one in options.values()) or "none"
            _wrapped(f"  {method:<22} ", told)
    if "dataset" in config:
        print("\nsettings of data sets (dataset=NAME dataset.setting=value):")
        for name in group_choices().get("dataset", []):
            node = compose_config("train", [f"dataset={name}"]).dataset
            found = declared(node._target_)
            own = {key: node._get_node(key)._value() for key in node if key != "_target_"}
            taken = {} if found is None else {one.name: one.default for one in found.parameters.values()}
            every = {**{key: value for key, value in taken.items() if key not in _FILLED}, **own}
            _wrapped(f"  {name:<22} ", ", ".join(_named(key, value) for key, value in every.items()))
    print("\nflags: --multirun runs every combination of key=a,b; --cfg job prints the settings; GNNSCALE_TRACEBACK=1")


def _told_in_file(primary: str) -> dict[str, str]:
    """Return what the comments of a command's own config say of its keys."""
    lines = files(GROUPS).joinpath(f"{primary}.yaml").read_text().splitlines()
    return {found[1]: found[2] for line in lines if (found := re.match(r"(\w+):.*?[ ]#[ ](.*)", line))}


def _has(config: DictConfig, group: str) -> bool:
    return OmegaConf.select(config, group.replace("/", ".")) is not None


def _further(node: DictConfig, path: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (path, (name=default, what it is)) of arguments that no file lists."""
    target = OmegaConf.to_container(node, resolve=False).get("_target_")
    found = declared(target) if target and target not in _LONG else None
    if found is not None and path:
        rest = [one for one in found.parameters.values() if one.name not in node and one.name not in _FILLED]
        lines = [(_shown(one), found.told.get(one.name, "")) for one in rest if one.default is not one.empty]
        if lines:
            yield path, lines
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _further(child, f"{path}.{key}" if path else str(key))


def _shown(one: inspect.Parameter) -> str:
    return _named(one.name, one.default)


def _named(name: str, default) -> str:
    """Return name=default as the command line takes it."""
    if default is inspect.Parameter.empty or str(default) == "???":
        return f"{name}=?"
    words = {None: "null", True: "true", False: "false"}
    text = words[default] if default is None or isinstance(default, bool) else default
    text = str(list(text) if isinstance(text, tuple) else text).replace(" ", "")
    return f"{name}={text}"


def _wrapped(head: str, text: str) -> None:
    """Print a head and a text beside it, in lines of a bounded width."""
    line, indent = head, " " * len(head)
    for word in text.split(" "):
        if len(line) + len(word) > _WIDTH and line.strip() and line != indent:
            print(line.rstrip())
            line = indent
        line += word + " "
    print(line.rstrip())
