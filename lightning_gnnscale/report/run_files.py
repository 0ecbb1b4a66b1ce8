"""The files of a run folder as plain values: read within bounds and checked once; no reference is followed."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ..errors import GNNScaleError, is_count

_MOST_BYTES = 4 << 20  # of settings
_MOST_ENTRIES = 100_000
_DEEPEST = 40
_MOST_REFERENCES = 16  # in one text; each may hold others


class CutShort(GNNScaleError):
    """A file is cut off, as a killed run leaves it."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a run's `config.yaml`; GNNScaleError in one line: not YAML, tags, aliases, too large."""
    loaded = _load(path)
    if not isinstance(loaded, dict):
        raise GNNScaleError(f"{path}: settings of a run are names with values each, got a {type(loaded).__name__}")
    for name, fits, told in _SETTINGS:
        value = value_at(loaded, name)
        is_reference = isinstance(value, str) and "${" in value and fits is not is_mapping
        if value is not None and not is_reference and not fits(value):
            raise _wrong(path, name, told, value)
    return loaded


def value_at(node: Any, key: str) -> Any:
    """Return the entry of nested mappings at a dotted name, "" for the whole; None where there is none."""
    for name in key.split(".") if key else ():
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def read_words(path: Path) -> list[str]:
    """Return the words of a run's command, from its `overrides.yaml`; errors as of `read_settings`."""
    words = _load(path)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise GNNScaleError(f"{path}: must hold the words of a command, got {_short(words)}")
    return words


def _load(path: Path) -> Any:
    """Return the content of a run's YAML file, as plain values."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GNNScaleError(f"{path}: cannot be read as text ({_line(error)})") from None
    if len(content) > _MOST_BYTES:
        raise GNNScaleError(f"{path}: settings of a run take at most {_MOST_BYTES >> 20} MiB, but this file is larger")
    try:
        _check_events(text, path)
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except GNNScaleError:
        raise
    except Exception as error:  # raised by YAML's parser, or by the values that it makes
        where = yaml_problem(error)[1]
        kind = CutShort if isinstance(error, yaml.YAMLError) else GNNScaleError
        raise kind(f"{path}: not settings of a run ({_line(error)}{where})") from None


def read_summary(path: Path) -> dict[str, Any]:
    """Return a run's `summary.json`, or `run.json` of an older one; GNNScaleError names the file and the entry."""
    summary = read_object(path)
    for name, (fits, told) in _SUMMARY.items():
        if summary.get(name) is not None and not fits(summary[name]):
            raise _wrong(path, name, told, summary[name])
    for row in summary.get("stages") or []:
        for name, (fits, told) in _STAGE.items():
            if not fits(row.get(name)):
                raise _wrong(path, f"stages.{name}", told, row.get(name))
    for holder in (summary, summary.get("partitioning") or {}):
        if holder.get("quality") is not None:
            holder["quality"] = _quality(holder["quality"], path)
    return summary


def _quality(given: Any, path: Path) -> dict[str, Any]:
    """Return the figures of a partition; null means not measured."""
    if not is_mapping(given):
        raise _wrong(path, "quality", "figures by name", given)
    for name, value in given.items():
        fits, told = _QUALITY.get(name, (_is_figure, "numbers"))
        if not fits(value):
            raise _wrong(path, f"quality.{name}", told, value)
    return {name: value for name, value in given.items() if value is not None}


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds values by name; GNNScaleError in one line: it cannot be read, or does not."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        kind = CutShort if isinstance(error, json.JSONDecodeError) else GNNScaleError
        raise kind(f"{path}: cannot be read as JSON ({_line(error)})") from None
    if not isinstance(found, dict):
        raise GNNScaleError(f"{path}: must hold values by name, got {_short(found)}")
    return found


def check_events(log: list[Any], path: Path) -> list[dict[str, Any]]:
    """Return the events of a run's log; GNNScaleError in one line where it has what no run writes."""
    for number, event in enumerate(log):
        where = f"event {number + 1}"
        if not is_mapping(event) or not isinstance(event.get("event"), str):
            raise _wrong(path, where, "an object with the name of an event", event)
        kind = event["event"]
        for name in ("time", *_NEEDED.get(kind, ())):
            if name not in event:
                raise GNNScaleError(f"{path}: {where} ({kind[:80]}) has no {name}")
        for name, value in event.items() if kind in _NEEDED else [("time", event["time"])]:
            fits, told = _FIELDS.get((kind, name)) or _FIELDS.get(name) or (None, "")
            if fits is not None and not fits(value):
                raise _wrong(path, f"{where} ({kind[:80]}): {name}", told, value)
    return log


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of a metrics file, as text; GNNScaleError names the file, the row and the column."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise GNNScaleError(f"{path}: cannot be read as CSV ({_line(error)})") from None
    for number, row in enumerate(rows, start=2):
        for name, text in row.items():
            if not isinstance(name, str) or not isinstance(text, str | None):
                raise GNNScaleError(f"{path}: line {number} has more values than names")
            wanted = "a whole number of at least 0" if name in ("epoch", "step") else "a number"
            if text and not (text.isdecimal() if name in ("epoch", "step") else _is_numeral(text)):
                raise GNNScaleError(f"{path}: line {number}: {name[:80]} must be {wanted}, got {_short(text)}")
    return rows


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, not a bool."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) < 1e300 and not math.isnan(value)


def is_mapping(value: Any) -> bool:
    """Whether a value holds others by name."""
    return isinstance(value, Mapping)


def is_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    return isinstance(value, list) and all(is_number(one) or is_numbers(one) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1e12


def _is_rows(*names: str) -> Callable[[Any], bool]:
    """Return the test of a list of objects whose entries of these names are counts."""
    return _list_of(lambda one: is_mapping(one) and all(is_count(one.get(name)) for name in names))


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, float) or is_number(value)


def _is_figure(value: Any) -> bool:
    return _is_scalar(value) or is_numbers(value) or is_mapping(value)


def _is_lanes(value: Any) -> bool:
    lanes = list(value.values()) if is_mapping(value) else [None]
    return all(map(_list_of(is_number), lanes)) and len({len(lane) for lane in lanes}) < 2


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | bool | int | float | None)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: is_mapping(value) and all(map(fits, value.values()))


def _is_fanouts(value: Any) -> bool:
    lists = value.values() if is_mapping(value) else [value]
    return all(_is_scalar(one) or _list_of(_is_scalar)(one) for one in lists)


def _is_numeral(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return len(text) < 400


_COUNT = is_count, "a whole number of at least 0"
_SECONDS = _is_seconds, "a number of at least 0"
_TEXT = _is_text, "text"
_SHARES = _by_name(is_number), "numbers by name"
_LIST = _or_null(_list_of(is_number)), "a list of numbers"
_TABLE = _or_null(lambda value: isinstance(value, list) and _is_lanes(dict(enumerate(value)))), "rows of numbers"
_FIELDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("seconds", "time", "wait_seconds", "compute_seconds", "waited_s", "busy_s"), _SECONDS),
    **dict.fromkeys(("waiting_share", "alpha", "edges_share"), _SECONDS),
    **dict.fromkeys(("epoch", "rank", "node", "cache_bytes", "buffer_bytes", "buffer_rows", "start_bytes"), _COUNT),
    **dict.fromkeys(("rows_away", "bytes_away", "parts_read", "num_workers", "bytes_received", "num_sampled"), _COUNT),
    **dict.fromkeys(("rows_stale", "greatest_age", "staleness"), _COUNT),
    **dict.fromkeys(("peak_bytes", "row_bytes", "num_nodes", "num_parts"), _COUNT),
    **{("rows_read", name): _COUNT for name in ("epoch", "used_bytes", "feature_bytes", "predicted_bytes")},
    **{("reads", tier): _COUNT for tier in ("local", "peer", "host", "cache", "disk", "device")},
    **dict.fromkeys(("memory_bytes", "disk_bytes"), (_or_null(is_count), _COUNT[1])),
    **dict.fromkeys(("stage", "note", "command", "method", "lane"), (_or_null(_is_text), "text")),
    **dict.fromkeys(("counts", "training", "beside", "predicted", "tier_bytes", "free_bytes"), _SHARES),
    **dict.fromkeys(("hop_nodes", "hop_edges", "hop_rows"), _LIST),
    "bin_s": (lambda value: _is_seconds(value) and value > 0, "a number above 0"),
    "by_time": (_is_lanes, "lists of numbers by name, all of one length"),
    "machine": (_or_null(is_mapping), "values by name"),
    ("exchange", "bytes"): (_is_rows("bytes"), "a list of layers with their bytes"),
    ("exchange", "rows"): (_is_rows("sent", "skipped"), "a list of layers with their rows"),
    ("preparation", "node"): (_is_scalar, "a node"),
    ("reads", "rank"): (_is_scalar, "a rank"),
    "bytes": _COUNT,
    "rows": _COUNT,
    **{("parts", name): _LIST for name in ("parts", "nodes", "halo", "train", "rows")},
    **{("parts", name): _TABLE for name in ("edges", "label_counts")},
    **dict.fromkeys((("parts", "parts"), ("parts", "nodes")), (_list_of(is_number), "a list of numbers")),
    ("parts", "labels"): (_or_null(_list_of(_is_scalar)), "a list of labels"),
    ("parts", "row_bytes"): _SECONDS,
}
_NEEDED = {
    "stage": ("stage", "seconds", "peak_bytes"),
    "epoch_times": ("epoch", "rank", "seconds", "training", "beside", "counts"),
    "training_peak": ("rank", "peak_bytes", "start_bytes"),
    "evaluation_peak": ("rank", "peak_bytes", "start_bytes"),
    "timeline": ("epoch", "rank", "lane", "bin_s", "by_time"),
    "average": ("epoch", "bytes"),
    "exchange_evaluation": ("bytes",),
    "exchange": ("epoch", "rank", "bytes", "rows", "seconds", "wait_seconds", "compute_seconds"),
    "owner_reads": ("rows", "rows_away", "bytes_away", "waiting_share"),
    "learned_rows": ("rank", "bytes_away", "rows_stale", "greatest_age", "staleness", "waiting_share"),
    "placement": ("rank", "method", "buffer_bytes", "buffer_rows", "predicted", "alpha"),
    "reads": ("rank",),
    **dict.fromkeys(("run", "preparation", "gradients", "file_fetched", "store_fetched"), ()),
    "validation_sample": ("num_sampled", "num_nodes"),
    "parts": ("parts", "nodes"),
    "rows_read": ("epoch", "used_bytes", "feature_bytes"),
}
_QUALITY: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("edge_cut_ratio", "replication_factor", "feature_bytes"), (_or_null(_is_real), "a number")),
    **dict.fromkeys(("nodes_per_part", "halo_per_part", "train_per_part"), _LIST),
}
_OBJECT = is_mapping, "values by name"
_COSTS = ("training", "preparing", "seconds", "sent_bytes", "averaged_bytes")


def _is_cost(value: Any, names: tuple[str, ...] = _COSTS) -> bool:
    numbers = is_mapping(value) and all(is_number(value.get(name)) for name in names)
    return numbers and (value.get("price") is None or is_number(value["price"]))


def _is_costs(value: Any) -> bool:
    return (
        is_mapping(value)
        and _is_cost(value.get("predicted"))
        and _is_cost(value.get("measured"), _COSTS[2:])
        and isinstance(value.get("others"), list)
        and all(map(_is_cost, value["others"]))
        and is_mapping(value.get("batch"))
        and all(is_number(value["batch"].get(name)) for name in ("train_s", "prepare_s"))
    )


_SUMMARY = {
    "title": (_is_scalar, "text"),
    "facts": (_by_name(_is_scalar), "numbers or text by name"),
    "metrics": (_by_name(_is_scalar), "numbers by name"),
    "stages": (_list_of(is_mapping), "a list of stages"),
    **dict.fromkeys(("quality", "partitioning", "plan"), _OBJECT),
    "machines": (_is_costs, "what an epoch was predicted to take, and took"),
    **dict.fromkeys(("epochs", "num_nodes", "num_edges", "num_parts", "training_peak_bytes"), _COUNT),
}
_STAGE = {
    "stage": _TEXT,
    "seconds": _SECONDS,
    "peak_bytes": _COUNT,
    "predicted_bytes": (_or_null(_is_seconds), _SECONDS[1]),
    "note": (_or_null(_is_text), "text"),
}
# Settings that reports compute with; the others are shown as they are.
_SETTINGS = [
    *(
        (name, is_mapping, "values by name")
        for name in ("model", "dataset", "callbacks", "source", "trainer", "sampler")
    ),
    *((name, _is_text, "text") for name in ("model._target_", "model.backbone._target_", "dataset._target_")),
    *((name, _is_text, "text") for name in ("strategy.weights._target_", "strategy.exchange._target_")),
    *((name, _is_text, "text") for name in ("callbacks.checkpoint.monitor", "callbacks.checkpoint.mode")),
    *((name, is_count, _COUNT[1]) for name in ("datamodule.batch_size", "source.num_threads")),
    ("trainer.check_val_every_n_epoch", is_count, _COUNT[1]),
    ("model.lr", is_number, "a number"),
    ("sampler.fanouts", _is_fanouts, "a list of numbers"),
    ("name", _is_scalar, "text"),
    ("dataset.name", _is_scalar, "text"),
]


def _check_events(text: str, path: Path) -> None:
    """Refuse what would make objects or grow on loading, before anything is made."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.NodeEvent) and event.anchor:
            raise GNNScaleError(f"{path}: line {line}: settings of a run hold no aliases (& and *)")
        if str(getattr(event, "tag", None) or "!").strip("!"):
            raise GNNScaleError(f"{path}: line {line}: settings of a run hold no tags, got {str(event.tag)[:80]}")
        if isinstance(event, yaml.ScalarEvent) and event.value.count("${") > _MOST_REFERENCES:
            raise GNNScaleError(f"{path}: line {line}: more than {_MOST_REFERENCES} references in one text")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or count > _MOST_ENTRIES:
            what = f"nested {_DEEPEST} deep" if depth > _DEEPEST else f"{_MOST_ENTRIES:,} entries"
            raise GNNScaleError(f"{path}: line {line}: settings of a run are at most {what}")


def _wrong(path: Path, entry: str, allowed: str, given: Any) -> GNNScaleError:
    return GNNScaleError(f"{path}: {entry} must be {allowed}, got {_short(given)}")


def _short(value: Any) -> str:
    """Return a value on a line, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 1 << 63:  # Python may refuse to write its digits
        return f"an integer of {value.bit_length()} bits"
    told = repr(value) if _is_scalar(value) else f"a {type(value).__name__}"
    return told if len(told) <= 80 else f"{told[:80]}..."


def yaml_problem(error: Exception) -> tuple[str, str]:
    """Return what YAML's parser says, or another error's message, on one line; and " in line N", or ""."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    told = isinstance(error, yaml.MarkedYAMLError) and error.problem
    return told or " ".join(str(error).split()), f" in line {mark.line + 1}" if mark else ""


def _line(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) else yaml_problem(error)[0]
    return " ".join(str(told).split())[:200] or type(error).__name__
