"""What a training run came to, from its events and its metrics."""

import csv
from collections import Counter
from math import isfinite
from pathlib import Path

from .. import events
from ..placement.feature_buffer import TIERS
from ..report.summary import stage_rows
from ..units import format_bytes


def fit_facts(folder: Path, checkpoint, resume: str | None = None) -> dict:
    """Return the results of training, read from its metrics file, because started processes do not share their state.

    Args:
        folder: Folder of the run.
        checkpoint: The run's `ModelCheckpoint`, or None.
        resume: Checkpoint that the run resumed from, or None. With a checkpoint, the result says that earlier epochs do
            not count.
    """
    path = folder / "metrics" / "metrics.csv"
    if not path.is_file():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    epochs = {int(row["epoch"]) for row in rows if row.get("epoch")}
    facts = {"epochs": 1 + max(epochs, default=-1)}
    if resume is not None:
        facts["epochs"] = f"{facts['epochs']}, {len(epochs)} of them in this run"
        facts["goes on from"] = f"{resume} (all other figures are of this run alone)"
    monitor = getattr(checkpoint, "monitor", None) or "val_acc"
    values = [value for _, value in _logged(rows, monitor) if isfinite(value)]
    if values:
        best = min if getattr(checkpoint, "mode", "max") == "min" else max
        facts[f"best {monitor}"] = f"{best(values):.4f}"
    lost = next((epoch for epoch, loss in _logged(rows, "train_loss") if not isfinite(loss)), None)
    if lost is not None:
        facts["train_loss"] = f"not finite from epoch {lost} on: say a lower model.lr"
    return facts


def sampled_validation(folder: Path) -> str:
    """Return which nodes validation took while the run in a folder trained; "" where it took all of them."""
    log = events.last_run(events.read_log(folder / "events.jsonl"))
    chosen = [event for event in log if event["event"] == "validation_sample"]
    if not chosen:
        return ""
    return f"of a sample, {chosen[-1]['num_sampled']:,} of {chosen[-1]['num_nodes']:,} nodes"


def _logged(rows: list[dict], name: str) -> list[tuple[str, float]]:
    """Return (epoch, value) of every row of a metrics file that has the metric."""
    return [(row["epoch"], float(row[name])) for row in rows if row.get(name)]


def _exchange_facts(log: list[dict]) -> dict[str, str]:
    """Return what full-graph training sent between processes, from its events; nothing where nobody exchanged."""
    exchanges = [event for event in log if event["event"] == "exchange"]
    counts: Counter = Counter()
    for event in exchanges:
        for entry in event["bytes"]:
            # What is exchanged once serves the forward.
            counts["forward" if entry["direction"] == "static" else entry["direction"]] += entry["bytes"]
        for entry in event["rows"]:
            counts["sent"] += entry["sent"]
            counts["skipped"] += entry["skipped"]
    for event in log:
        counts["evaluation"] += event["bytes"] if event["event"] == "exchange_evaluation" else 0
    if not exchanges:
        return {}
    facts = {
        "exchanged": f"{format_bytes(counts['forward'])} forward, {format_bytes(counts['backward'])} backward, "
        f"{format_bytes(counts['evaluation'])} to evaluate (all processes)"
    }
    if counts["skipped"]:
        facts["rows skipped"] = f"{counts['skipped'] / (counts['sent'] + counts['skipped']):.1%}"
    caches: Counter = Counter()
    for event in exchanges:
        caches[event["rank"]] = max(caches[event["rank"]], event["cache_bytes"])
    facts["exchange caches"] = f"{format_bytes(max(caches.values()))} on the fullest process"
    return facts


def _placement_facts(log: list[dict]) -> dict[str, str]:
    """Return where feature rows lay and which tier served how many reads; nothing where none were placed."""
    placed = [event for event in log if event["event"] == "placement"]
    if not placed:
        return {}
    bytes_held = max(event["buffer_bytes"] for event in placed)
    facts = {
        "placement": f"{placed[0]['method']}, {placed[0]['buffer_rows']:,} rows on each of {len(placed)} devices, "
        f"{format_bytes(bytes_held)} with look-up"
    }
    reads = [event for event in log if event["event"] == "reads"]
    counts = {tier: sum(event[tier] for event in reads) for tier in TIERS}
    total = sum(counts.values())
    if total:
        shares = ", ".join(f"{count / total:.1%} {tier}" for tier, count in counts.items() if count)
        predicted = ", ".join(
            f"{sum(event['predicted'][tier] for event in placed) / len(placed):.1%} {tier}"
            for tier in TIERS
            if any(event["predicted"].get(tier) for event in placed)
        )
        facts["feature reads"] = f"{shares} (predicted {predicted})"
    return facts


def run_summary(name: str, folder: Path, datamodule, plan, facts: dict) -> dict:
    """Return the results of a run: stages, facts in the order they are shown, the parts' quality, the plan.

    Earlier runs in the same folder are not counted: the log marks where the last one begins.

    Args:
        name: Name of the run.
        folder: Folder of the run.
        datamodule, plan: DataModule and plan that the run used.
        facts: Results of training and testing, {title: text}.
    """
    quality = datamodule.partitioning_facts.get("quality") or {}
    predicted = dict(plan.host_peak_bytes)
    if "evaluate" in predicted:
        predicted["validate"] = predicted["predict"] = predicted["evaluate"]  # a pass over the same layers
    log = events.last_run(events.read_log(folder / "events.jsonl"))
    shown = {
        "graph": f"{datamodule.store.num_nodes:,} nodes, {datamodule.store.num_arcs:,} arcs",
        "parts": f"{datamodule.store.num_parts} ({datamodule.partitioning_facts.get('method', 'given')})",
    }
    for key in ("edge_cut_ratio", "replication_factor", "node_balance"):
        if key in quality:
            shown[key.replace("_", " ")] = f"{quality[key]:.4f}"
    shown |= facts | _exchange_facts(log) | _placement_facts(log)
    peaks = [event["peak_bytes"] for event in log if event["event"] == "training_peak"]
    shown |= {
        "training peak of a process": f"{format_bytes(max(peaks, default=0))}, predicted "
        f"{format_bytes(plan.device_peak_bytes)} (beyond the interpreter)",
        "store": str(datamodule.root),
        "run folder": str(folder),
    }
    return {
        "title": name,
        "stages": stage_rows(log, predicted),
        "facts": shown,
        "quality": quality,
        "plan": dict(plan.terms()),
    }
