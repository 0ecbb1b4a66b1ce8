"""Several runs on one page: names that distinguish them, and the settings in which they differ."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .run_record import RunRecord

_SAME_ANYWAY = ("paths.", "hydra.", "name")  # settings that do not change what a run does
_MOST_SETTINGS = 3  # in a name
_LONGEST = 32  # characters of a value in a name

_SPLIT = ("dataset.fractions", "dataset.split_seed", "dataset.masks", "dataset.hold_out")


def labelled(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with labels that distinguish them.

    Runs of one name are labelled by the settings that differ, `lr 0.01` and `lr 0.003`; if these do not suffice, by
    their folders too, and finally by their place.
    """
    labels = [run.label for run in runs]
    for name in {name for name, times in Counter(labels).items() if times > 1}:
        same = [at for at, label in enumerate(labels) if label == name]
        for at, words in zip(same, _words([runs[at] for at in same]), strict=True):
            labels[at] = words or name
    labels = [_apart(labels, at, f" {run.folder.resolve().name}") for at, run in enumerate(runs)]
    labels = [_apart(labels, at, f" ({at + 1})") for at in range(len(runs))]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def other_split(runs: Sequence[RunRecord]) -> str | None:
    """Return a sentence where runs train on different nodes, so that they are not tested on the same ones either."""
    counts = [sum(run.parts.get("train") or []) for run in runs]
    settings = [name for name in differing(runs) if name in _SPLIT]
    if not settings and (len(set(counts)) == 1 or not all(counts)):
        return None
    because = (
        f"{', '.join(settings)} differ" if settings else f"they train on {', '.join(f'{one:,}' for one in counts)}"
    )
    return f"These runs split their nodes differently ({because}): an accuracy of one is not of the other's test nodes."


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the settings in which runs differ, each with the value of every run; "" where a run has none."""
    flat = [_flat(run.config) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one if not name.startswith(_SAME_ANYWAY))
    values = {name: [one.get(name, "") for one in flat] for name in names}
    return {name: told for name, told in values.items() if len(set(told)) > 1}


def _apart(labels: list[str], at: int, more: str) -> str:
    return labels[at] + more if labels.count(labels[at]) > 1 else labels[at]


def _words(runs: Sequence[RunRecord]) -> list[str]:
    """Return a label for each run from the settings in which they differ; "" where they are the same."""
    found = differing(runs)
    short = {name: _short_name(name, found) for name in found}
    words: list[list[str]] = [[] for _ in runs]
    for name in found if len(found) <= _MOST_SETTINGS else _sufficient(found):
        for one, value in zip(words, found[name], strict=True):
            one.append(f"{short[name]} {_short_value(name, value)}")
    return [", ".join(one) for one in words]


def _sufficient(found: dict[str, list[str]]) -> list[str]:
    """Return a few settings that distinguish the runs as well as all do: each separates some that the others do not."""
    chosen: list[str] = []
    groups = 1
    for name in sorted(found, key=lambda name: -len(set(found[name]))):
        told = len(set(zip(*(found[one] for one in (*chosen, name)), strict=True)))
        if told > groups and len(chosen) < _MOST_SETTINGS:
            chosen, groups = [*chosen, name], told
    return chosen


def _short_name(name: str, others: dict[str, list[str]]) -> str:
    """Return the last word of a setting's name, `lr` of model.lr; the whole name where another has the same ending."""
    owner = name.removesuffix("._target_")
    last = owner.rpartition(".")[2]
    ends = [other.removesuffix("._target_").rpartition(".")[2] for other in others]
    return last if ends.count(last) == 1 else owner


def _short_value(name: str, value: str) -> str:
    value = value.rpartition(".")[2] if name.endswith("._target_") else value or "none"
    return value if len(value) <= _LONGEST else f"…{value[1 - _LONGEST :]}"


def _flat(config: Any, name: str = "") -> dict[str, str]:
    if not isinstance(config, dict) or not config:
        return {name: "null" if config is None else str(config)} if name else {}
    found: dict[str, str] = {}
    for key, value in config.items():
        found |= _flat(value, f"{name}.{key}" if name else str(key))
    return found
