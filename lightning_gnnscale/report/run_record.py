"""The records of a folder's last run; what an older or unfinished run lacks is empty."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import events
from ..errors import GNNScaleError
from .run_files import CutShort, check_events, read_metrics, read_settings, read_summary, value_at

# What the training thread does, in the order in which a step does it; see `events.ActivityClock`.
TRAINING = ("wait", "transfer", "read", "sample", "forward", "backward", "exchange", "average", "update", "ranks")
TRAINING += ("validation", "save", "other")
BESIDE = ("sample", "read")
_NO_CURVES = ("_ms", "_bytes", "passes", "step", "epoch", "rows_", "broadcasts_", "loading_share", "locality_scale")


@dataclass(frozen=True)
class RunRecord:
    """The last run of a folder. Epochs count from 1 here, as the log prints them; the files count from 0.

    Attributes:
        folder: Folder of the run.
        config: The composed settings.
        log: Events of the last run; see `events.py`.
        metrics: Rows of the metrics file, as text.
        summary: The run's closing summary; empty where it did not finish.
        label: Name of the run on a page of several.
    """

    folder: Path
    config: dict = field(default_factory=dict)
    log: list[dict] = field(default_factory=list)
    metrics: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    label: str = ""

    @classmethod
    def open(cls, folder: str | Path) -> "RunRecord":
        """Read a run folder; GNNScaleError: it has neither events nor a summary, or a file holds what no run writes."""
        folder = Path(folder)
        log = _from_one(_read_log(folder / "events.jsonl"))
        summary = _read_summary(folder, log)
        if not log and not summary:
            what = "holds no events.jsonl and no summary.json" if folder.is_dir() else "there is no such folder"
            raise GNNScaleError(f"{folder}: {what}; name the folder of a run, such as runs/demo/2026-01-31_12-00-00")
        config = _or_empty(read_settings, folder / "config.yaml")
        told = folder / "metrics" / "metrics.csv"
        metrics = _from_one(read_metrics(told) if _trains(log) and told.is_file() else [])
        name = str(summary.get("title") or config.get("name") or folder.name)
        return cls(folder, config or {}, log, metrics, summary, name)

    def of(self, *kinds: str) -> list[dict]:
        """Return the events of some kinds, oldest first."""
        return [event for event in self.log if event["event"] in kinds]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its dotted name; the default where it is missing or null."""
        found = value_at(self.config, key)
        is_reference = isinstance(found, str) and "${" in found  # to a value that only the run knew
        return default if found is None or is_reference else found

    def class_at(self, key: str) -> str:
        """Return the name of the class at a setting, without its modules; "" where there is none."""
        return str(self.get(f"{key}._target_", "")).rpartition(".")[2]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the run's summary, {title: text}."""
        return self.summary.get("facts") or {}

    @property
    def is_finished(self) -> bool:
        """Whether the run finished."""
        return bool(self.summary)

    @property
    def is_partitioning(self) -> bool:
        """Whether the run made a store and trained nothing: `gnnscale partition`."""
        return any(event.get("command") == "partition" for event in self.of("run"))

    @property
    def failed_stage(self) -> str | None:
        """The stage in which the run ended early, or None."""
        return next((event["stage"] for event in reversed(self.of("stage")) if event.get("failed")), None)

    @property
    def seconds(self) -> float:
        """Seconds from the run's first event to its last; of a run without events those of its stages."""
        if len(self.log) > 1:
            return self.log[-1]["time"] - self.log[0]["time"]
        return sum(row["seconds"] for row in self.stages)

    @cached_property
    def stages(self) -> list[dict]:
        """One row per stage, as `terminal.stage_rows` makes them; without predictions where the run did not finish."""
        from .terminal import stage_rows  # imports rich, which a report does not need

        return self.summary.get("stages") or stage_rows(self.log, {})

    @property
    def train_seconds(self) -> float | None:
        return next((row["seconds"] for row in self.stages if row["stage"] == "train"), None)

    @property
    def num_ranks(self) -> int:
        """Processes that trained; from the settings where no event has it."""
        told = [event.get("rank", 0) for event in self.of("epoch_times", "training_peak", "average")]
        devices = self.get("trainer.devices", 1)
        return 1 + max(told) if told else devices if isinstance(devices, int) else 1

    @cached_property
    def epochs(self) -> dict[int, list[dict]]:
        """Epoch to the event `epoch_times` of each rank."""
        found = defaultdict(list)
        for event in sorted(self.of("epoch_times"), key=lambda event: (event["epoch"], event["rank"])):
            found[event["epoch"]].append(event)
        return dict(found)

    @property
    def num_epochs(self) -> int:
        """Epochs that were trained in this run."""
        told = [event["epoch"] for event in self.of("epoch_times", "average", "exchange")]
        told += [int(row["epoch"]) for row in self.metrics if row.get("epoch")]
        return len(set(told))

    @property
    def warm_epochs(self) -> list[dict]:
        """The events of all epochs but the first, which compiles and reads cold data; its own if it is the only one."""
        chosen = sorted(self.epochs)[1:] or sorted(self.epochs)
        return [event for epoch in chosen for event in self.epochs[epoch]]

    @property
    def epoch_seconds(self) -> float | None:
        """Mean seconds of an epoch but the first; from the averages' events where epochs were not timed, or None."""
        if self.epochs:
            return _mean(event["seconds"] for event in self.warm_epochs)
        ends = [event["time"] for event in self.of("average", "exchange") if event.get("rank") == 0]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None

    @cached_property
    def shares(self) -> dict[str, float]:
        """Activity of the training thread to its share of an epoch, in [0, 1]; a mean over ranks, warm epochs."""
        return _shares(self.warm_epochs, "training")

    @cached_property
    def beside_shares(self) -> dict[str, float]:
        """Preparation beside training: activity to its seconds over the seconds of an epoch."""
        return _shares(self.warm_epochs, "beside")

    @property
    def waiting(self) -> float:
        """Share of an epoch in which training waited for batches, or made them itself."""
        return sum(self.shares.get(name, 0.0) for name in ("wait", *BESIDE))

    def prepares(self, activity: str) -> float:
        """Return the seconds of "sample" or "read", in any thread, over the seconds of an epoch."""
        return self.shares.get(activity, 0.0) + self.beside_shares.get(activity, 0.0)

    def per_epoch(self, name: str) -> float:
        """Return the mean over warm epochs of what all ranks count together: a name of `counts`, or "disk_bytes"."""
        chosen = self.warm_epochs
        num_epochs = len({event["epoch"] for event in chosen})
        values = [(event.get(name) or 0) if name == "disk_bytes" else event["counts"].get(name, 0) for event in chosen]
        return sum(values) / num_epochs if num_epochs else 0.0

    @cached_property
    def parts(self) -> dict:
        """The content of the parts, as `store_composition` counts it; for an older run from its quality."""
        told = self.of("parts")
        if told:
            return told[-1]
        quality = self.quality
        if not quality.get("nodes_per_part"):
            return {}
        return {
            "parts": list(range(len(quality["nodes_per_part"]))),
            "nodes": quality["nodes_per_part"],
            "halo": quality.get("halo_per_part"),
            "train": quality.get("train_per_part"),
            "row_bytes": quality.get("feature_bytes") or 0,
        }

    @property
    def quality(self) -> dict:
        """The figures of the partition, as `PartitionQuality` names them; empty where it was not measured."""
        return self.summary.get("quality") or (self.summary.get("partitioning") or {}).get("quality") or {}

    @property
    def method(self) -> str | None:
        """The partitioner's name."""
        told = self.of("partition")
        return told[-1].get("method") if told else self.get("partitioner.method")

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Metric to (epoch, value), of losses, accuracies and the like; values that are not numbers are left out."""
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        names = (
            [name for name in self.metrics[0] if not any(part in name for part in _NO_CURVES)] if self.metrics else []
        )
        for row in self.metrics:
            epoch = row.get("epoch")
            for name in names if epoch else ():
                if text := row[name]:
                    value = float(text)
                    if math.isfinite(value):
                        found[name].append((int(epoch), value))
        return dict(found)

    @property
    def monitor(self) -> str:
        """The metric by which the best epoch is chosen."""
        return self.get("callbacks.checkpoint.monitor", "val_acc")

    @property
    def is_maximised(self) -> bool:
        return self.get("callbacks.checkpoint.mode", "max") != "min"

    def best(self) -> tuple[int, float] | None:
        """Return (epoch, value) of the first best value of `monitor`; None without any."""
        values = self.curves.get(self.monitor)
        if not values:
            return None
        sign = 1 if self.is_maximised else -1
        return max(values, key=lambda one: sign * one[1])

    @property
    def results(self) -> dict[str, float]:
        """The metrics of testing and of the exact validation after training."""
        found = {}
        for name, text in self.facts.items():
            if str(name).startswith(("test_", "val_")):
                try:
                    found[name] = float(text)
                except (TypeError, ValueError):
                    continue
        return found

    @property
    def headline(self) -> tuple[str, float] | None:
        """The one figure of how well the run did: a test metric that is not a loss, else the best of validation."""
        for name, value in self.results.items():
            if name.startswith("test_") and "loss" not in name:
                return name, value
        best = self.best()
        return None if best is None else (self.monitor, best[1])

    @property
    def peak_bytes(self) -> int:
        """The largest memory of a stage, all processes together."""
        return max((row["peak_bytes"] for row in self.stages), default=0)

    @property
    def machine(self) -> dict:
        """Machine and versions from the run's first event; empty in an older run."""
        return next((event.get("machine") or {} for event in self.of("run")), {})

    @property
    def memory_limit(self) -> int | None:
        """Bytes of memory that a process of the run might take; None in an older run."""
        return next((event.get("memory_bytes") for event in self.of("run")), None)

    @property
    def traces(self) -> list[Path]:
        """Traces of Lightning's PyTorch profiler in the run folder."""
        return sorted(path for path in self.folder.rglob("*.pt.trace.json*") if "earlier" not in path.parts)

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint to resume from."""
        found = (self.folder / "checkpoints").glob("last*.ckpt")
        return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _from_one(rows: list[dict]) -> list[dict]:
    """Return rows of a file with their epochs counted from 1; those of the metrics file stay text."""
    found = []
    for row in rows:
        epoch = row.get("epoch")
        if isinstance(epoch, int):
            row = row | {"epoch": epoch + 1}
        elif isinstance(epoch, str) and epoch.isdecimal():
            row = row | {"epoch": str(int(epoch) + 1)}
        found.append(row)
    return found


def _trains(log: list[dict]) -> bool:
    """Whether the last run reached training: before that, the metrics in the folder are an earlier run's."""
    trains = {"average", "epoch_times", "training_peak", "exchange"}
    return not log or any(event["event"] in trains or event.get("stage") == "train" for event in log)


def _read_summary(folder: Path, log: list[dict]) -> dict:
    """Return the summary of the last run; empty where the file is an earlier run's."""
    for name in ("summary.json", "run.json"):
        path = folder / name
        if path.is_file() and (not log or path.stat().st_mtime >= log[0]["time"] - 1):
            return _or_empty(read_summary, path)
    return {}


def _or_empty(read: Callable[[Path], dict], path: Path) -> dict:
    """Return the content of a file; empty where it is missing or cut short."""
    try:
        return read(path) if path.is_file() else {}
    except CutShort:
        return {}


def _read_log(path: Path) -> list[dict]:
    """Return the events of the last run; none where there is no log."""
    try:
        log = events.read_log(path)
    except (OSError, ValueError):  # missing, or not text
        return []
    return events.last_run(check_events(log, path))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / max(len(values), 1)


def _shares(chosen: list[dict], lane: str) -> dict[str, float]:
    total = sum(event["seconds"] for event in chosen)
    found: dict[str, float] = defaultdict(float)
    for event in chosen:
        for name, seconds in event[lane].items():
            found[name] += seconds / total if total else 0.0
    return dict(found)
