"""Errors as one line: what was given, what is allowed, and what to do."""

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf

from ..errors import did_you_mean as did_you_mean
from ..errors import message_line, one_line_of


class Interrupted(KeyboardInterrupt):
    """The user stopped a run, or SIGTERM did; the message says how to resume, `code` is the command's exit code."""

    def __init__(self, message: str, terminated: bool = False):
        super().__init__(message)
        self.code = 143 if terminated else 130


class UsageError(ValueError):
    """Invalid arguments."""


def none_such(told: str, given: str, known: Iterable[str]) -> str:
    """Return the message on a word that is none of those known: what is told of it, a similar one, and all of them."""
    known = list(known)
    return f"{told}{did_you_mean(str(given), known)}; there are {', '.join(known) or 'none'}"


def in_place(key: str, target: str) -> str:
    """Return the words that replace the choice of a key by the user's class or function."""
    return f"'~{key}' '+{key}={{_target_: {target}, ...}}'"


def wants_traceback() -> bool:
    """Whether the user asked for tracebacks (`GNNSCALE_TRACEBACK=1`)."""
    return os.environ.get("GNNSCALE_TRACEBACK", "0") not in ("", "0")


def one_line(error: BaseException) -> str:
    """Return the cause below Hydra's and torch's wrappers, on one line."""
    kind = type(error).__name__
    if kind == "InstantiationException" and error.__cause__ is not None:
        key, cause = re.search(r"full_key: ([\w.]+)", str(error)), one_line(error.__cause__)
        target = re.search(r"call to(?: target)? '([\w.]+)'", str(error))
        return cause if key is None else _at_key(key[1], cause, target and target[1])
    if kind == "MissingMandatoryValue":
        key = re.search(r"full_key: ([\w.]+)", str(error))
        return f"{key[1] if key else 'a key'} has no value; give {key[1] if key else 'key'}=..."
    if kind == "OverrideParseException":
        told = getattr(error, "override", None) or "a word"
        if '{"' in told or "{'" in told:
            remedy = "write names within braces without quotes, or give a list"
            return f"{told} cannot be read: {remedy}, {told.partition('=')[0]}='[\"name=value\"]'"
        return f"{told} cannot be read as key=value; put a value with = , or blanks in quotes: key='\"...\"'"
    if kind in ("ProcessRaisedException", "ChildFailedError"):
        return _of_lost_process(_last_line(str(error)))
    if kind == "MissingConfigException" or "Could not find" in str(error):
        return _missing_choice(str(error))
    if kind == "ConfigCompositionException" and error.__cause__ is not None and "struct" in str(error.__cause__):
        key = re.search(r"Could not override '([^']+)'", str(error))
        return f"{key[1] if key else 'key'} is not a setting here; --help lists those that are"
    given = re.search(r"Error merging override \+*([\w.]+)=(.*)", str(error), re.S)
    if given and "Cannot merge DictConfig" in str(error.__cause__):
        key, value = given.groups()
        return f"{key} holds names with values each, got {value}; replace it whole: '~{key}' '+{key}={{name:...}}'"
    text = one_line_of(error) if str(error) else ""
    text = text if isinstance(error, UsageError) else in_words_of_shell(text)
    named = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("lightning_gnnscale")
    return text if named and text else _of_lost_process(f"{kind}: {text}")


@contextmanager
def own_settings(key: str, node: DictConfig) -> Iterator[None]:
    """Put a node's key before errors that begin with one of its settings: "datamodule.batch_size must be ...".

    Raises:
        UsageError: a ValueError of the block, with the key.
    """
    try:
        yield
    except ValueError as error:
        name = re.match(r"\w*", str(error))[0]
        if name in node and not OmegaConf.is_interpolation(node, name):
            raise UsageError(in_words_of_shell(f"{key}.{error}")) from None
        raise


# Arguments that errors and warnings name as in Python, by the node that has them as keys.
_KEYS = {
    "dataset": (
        *("relabel", "nodes", "num_nodes", "to_undirected", "remove_self_loops", "layout", "chunk_edges"),
        *("features", "labels", "masks", "train_mask", "val_mask", "test_mask"),
        *("edge_weight", "edge_features", "edge_label", "edge_type", "num_classes", "hold_out", "separate_reverses"),
    ),
    "dataset.reader": ("header", "separator", "comment", "src", "dst", "id_type", "bin_layout", "dtype"),
    "partitioner": ("deduplicate",),
    "datamodule": ("stored_features", "stored_edge_features", "halo_hops"),
    "": ("overwrite", "pack_halo", "feature_storage", "edge_storage", "evaluation", "num_parts"),
}
_KEY_OF = {name: f"{node}.{name}".removeprefix(".") for node, names in _KEYS.items() for name in names}
_ARGUMENT = re.compile(
    rf"(?<![\w.\"'])(edge_stream\.)?({'|'.join(_KEY_OF)})=(True|False|None|'[^']*'|\"[^\"]*\"|\d+|nodes\.csv:id\b|)(?![\w(\[])"
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def in_words_of_shell(text: str) -> str:
    """Return a message of the package with `header=True` written as `dataset.reader.header=true`."""

    def said(found: re.Match) -> str:
        value = _LITERALS.get(found[3], found[3].strip("'\""))
        return f"{_KEY_OF[found[2]]}={value}"

    text = re.sub(r"\b(choose|give) another root\b", r"\1 another output=", _ARGUMENT.sub(said, text))
    text = re.sub(r"^root(?= must be another folder)", "output", text)
    return re.sub(r"\bedge_stream\.(\w+)", lambda found: _KEY_OF.get(found[1], found[0]), text)


def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Print a warning as one line with keys as on the command line: a `warnings.showwarning`."""
    print(f"gnnscale: warning: {in_words_of_shell(message_line(' '.join(str(message).split())))}", file=sys.stderr)


def _at_key(key: str, message: str, target: str | None = None) -> str:
    """Put a node's key before a message of its class; of "model.backbone", before "model.dropout must be ..." too.

    The message may begin with an argument of target, the dotted name of the node's class or function, if known.
    """
    said = re.match(r"(?:(\w+)\.)?\w+(?:\[\d+\])? must ", message)
    if message.startswith(key):
        return message
    if said and (said[1] is None or said[1] in key.split(".")):
        return f"{key}.{message.removeprefix(f'{said[1]}.')}"
    first = re.match(r"(\w+)(?=[\s:=.]|$)", message)
    if first and target is not None and first[1] in _arguments(target):
        return f"{key}.{message}"
    return f"{key}: {message}"


def _arguments(target: str) -> set[str]:
    from hydra.utils import get_object

    try:
        return set(inspect.signature(get_object(target)).parameters)
    except (ImportError, ValueError, TypeError):
        return set()


def _of_lost_process(text: str) -> str:
    """Explain torch's message about a lost process: "[.../gloo/transport/tcp/pair.cc:547] ..."."""
    of_torch = r"gloo/|ncclRemoteError|ProcessGroupNCCL|TCPStore|DistNetworkError"
    if text.startswith("rank ") or not re.search(of_torch, text):
        return text
    return (
        f"another process of this run was lost or does not answer ({text}); start again from the last checkpoint "
        "(strategy.timeout is how long a process may be silent)"
    )


def _missing_choice(text: str) -> str:
    """'Could not find 'model/gnc'. Available options in 'model': ...' as one line."""
    found = re.search(r"Could not find '([^']+)'", text)
    options = re.search(r"Available options in '[^']*':\s*(.*?)(?:Config search path|$)", text, re.S)
    if not found:
        return " ".join(text.split())
    group, _, name = found[1].rpartition("/")
    if group and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
        return f"{group}={name}: no such choice; for a class of your own say {in_place(group.replace('/', '.'), name)}"
    choices = options[1].split() if options else []
    return none_such(f"{group or 'config'}={name}: no such choice", name, choices)


def _last_line(text: str) -> str:
    """The error at the end of a worker's traceback, without its class name."""
    lines = [line for line in text.splitlines() if line.strip()]
    start = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1) + 1
    message = " ".join(lines[start:] or lines[-1:])
    return re.sub(r"^[\w.]+(Error|Exception): ", "", message)
