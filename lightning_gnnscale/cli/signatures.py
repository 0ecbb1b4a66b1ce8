"""What functions and classes take, read from their signatures and docstrings."""

import inspect
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra.utils import get_object

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
