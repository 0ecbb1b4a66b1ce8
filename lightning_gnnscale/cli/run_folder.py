"""The folder of a run: files of earlier runs, temporary files, the checkpoint to evaluate, the summary."""

import csv
import dataclasses
import getpass
import math
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from .. import events
from ..across_ranks import failing_together, first_in_folder, rank, send_file
from ..errors import CheckpointError, GNNScaleError, disk_errors
from ..memory import format_bytes
from ..model.checkpoint_file import check_is_lightnings, read_checkpoint
from ..placement.feature_buffer import TIERS
from ..report.run_record import BESIDE
from ..report.terminal import stage_rows
from ..scratch import close_at_exit, temporary_scratch
from ..traits import CheckpointTraits
from .errors import UsageError, one_line
from .ranks import is_first_rank

_OTHER_FOLDER = "free space, or name another folder by hydra.run.dir="
REPLACED = ("summary.json", "report.html", "metrics/metrics.csv", "metrics/hparams.yaml")


def keep_earlier_run(folder: Path) -> Path | None:
    """Move files of an earlier run, which this run would replace, to `earlier/1`, `earlier/2`, ...; None: no files.

    Checkpoints stay where they are: Lightning gives those of the next run other names (its last one is last-v1.ckpt).
    Events of all runs are in one log.
    """
    found = [folder / name for name in REPLACED if (folder / name).is_file()]
    if not found:
        return None
    number = 1
    while (folder / "earlier" / str(number)).exists():
        number += 1
    kept = folder / "earlier" / str(number)
    kept.mkdir(parents=True)
    for path in found:
        os.replace(path, kept / path.name)
    return kept


@contextmanager
def temporary_folder() -> Iterator[None]:
    """Have this process, and those that it starts, keep temporary files in one folder that is removed at the end.

    The next run removes files of killed runs. Compiled kernels stay. Sockets of multiprocessing are used as long as
    the process lives, also by the next jobs of a sweep: they go at its end.
    """
    before, variables = tempfile.tempdir, dict(os.environ)
    system = tempfile.gettempdir()
    folder = temporary_scratch()
    if folder is None:
        yield  # the system's folder is used as it is
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{system}/torchinductor_{getpass.getuser()}")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder.folder)
    os.environ[events.SYSTEM_TEMPORARY] = system
    try:
        yield
    finally:
        tempfile.tempdir = before
        for name in ("TMPDIR", events.SYSTEM_TEMPORARY):
            os.environ.pop(name) if name not in variables else os.environ.update({name: variables[name]})
        close_at_exit(folder) if any(folder.folder.glob("pymp-*")) else folder.close()


def leave_report(folder: Path) -> None:
    """Write the report of a run; the run is complete without it, so an error is only printed."""
    if not is_first_rank():
        return
    from ..report.page import write_report  # imports plotly and Jinja, which nothing before needs

    try:
        write_report([folder])
    except GNNScaleError as error:
        print(f"gnnscale: no report: {one_line(error)}", file=sys.stderr)


class EarlierBest(Callback):
    """Keep in every checkpoint which one was the best before the run, and its score; Lightning forgets it elsewhere."""

    def __init__(self, path: str, score: float):
        self.path, self.score = path, score

    def state_dict(self) -> dict[str, Any]:
        return {"path": self.path, "score": self.score}


def earlier_best(resume: str | None, checkpoint: ModelCheckpoint | None) -> EarlierBest | None:
    """Return the best checkpoint that the resumed one knows; None where it knows none, or nothing is resumed.

    What the run's `ModelCheckpoint` monitored otherwise does not compare. UsageError: the file is no checkpoint.
    """
    if resume is None:
        return None
    try:
        states = _callback_states(resume)
    except CheckpointError as error:
        raise UsageError(f"resume: {error}") from None
    if CheckpointTraits(checkpoint).monitor is None:
        return None
    before = states.get(EarlierBest.__qualname__)
    known = [_saved_best(states, checkpoint), EarlierBest(before["path"], before["score"]) if before else None]
    return _best([one for one in known if one is not None], checkpoint.mode)


def best_checkpoint(checkpoint: ModelCheckpoint | None, earlier: EarlierBest | None) -> tuple[str | None, str]:
    """Return the checkpoint to evaluate, and a note where it is not, or may not be, the run's own best.

    Returns:
        (path, or None for the weights as they are; line, or "").
    """
    own = (checkpoint.best_model_path or None) if checkpoint is not None else None
    if earlier is None or (own == earlier.path and Path(own).is_file()):
        return own, ""
    if own is not None and own != earlier.path:
        # Started processes return the path alone; the score is in the file.
        score = _saved_best(_callback_states(own), checkpoint)
        if score is not None and _best([score, earlier], checkpoint.mode) is score:
            return own, ""
    told = f"{earlier.path} ({checkpoint.monitor} {earlier.score:.4f})"
    if Path(earlier.path).is_file():
        return earlier.path, f"{told}, of an earlier run, is better than this run's"
    rest = None if own == earlier.path else own
    return rest, f"{rest or 'the last weights'}; {told}, of an earlier run, is better, but the file is gone"


def _saved_best(states: dict[str, Any], checkpoint: ModelCheckpoint) -> EarlierBest | None:
    """Return the best checkpoint that the `ModelCheckpoint` of a file knew when it was saved."""
    state = states.get(checkpoint.state_key) or {}
    if not state.get("best_model_path") or state.get("best_model_score") is None:
        return None
    return EarlierBest(state["best_model_path"], float(state["best_model_score"]))


def _best(known: list[EarlierBest], mode: str) -> EarlierBest | None:
    """Return the best of some checkpoints, the first of equal ones."""
    choose = min if mode == "min" else max
    return choose(known, key=lambda one: one.score, default=None)


def _callback_states(path: str) -> dict[str, Any]:
    # Tensors stay in the file: only small values are read.
    return check_is_lightnings(read_checkpoint(path, mmap=True), path).get("callbacks") or {}


def fit_facts(folder: Path, checkpoint, resume: str | None = None) -> dict:
    """Return the results of training, read from its metrics file, because started processes do not share their state.

    With `resume`, a checkpoint, the result says that earlier epochs do not count.
    """
    path = folder / "metrics" / "metrics.csv"
    if not path.is_file():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    epochs = {int(row["epoch"]) for row in rows if row.get("epoch")}
    facts: dict[str, Any] = {"epochs": 1 + max(epochs, default=-1)}
    if resume is not None:
        facts["epochs of this run"] = len(epochs)
        facts["goes on from"] = f"{resume} (all other figures are of this run alone)"
    monitor = CheckpointTraits(checkpoint).monitor or "val_acc"
    values = [value for _, value in _logged(rows, monitor) if isfinite(value)]
    if values:
        best = min if CheckpointTraits(checkpoint).mode == "min" else max
        facts[f"best {monitor}"] = best(values)
    lost = next((epoch for epoch, loss in _logged(rows, "train_loss") if not isfinite(loss)), None)
    if lost is not None:
        facts["train_loss"] = f"not finite from epoch {int(lost) + 1} on: say a lower model.lr"
    return facts


def bring_events(log: Path, begin: int) -> None:
    """Append the events of other machines' logs, from byte `begin`, to the first rank's log; every rank calls it."""
    for number, first in enumerate(first_in_folder(log.parent, _OTHER_FOLDER)):
        if first != number or number == 0:
            continue
        part = Path(f"{log}.{number}")
        with failing_together(), disk_errors(part, "written", _OTHER_FOLDER):
            if rank() == number:
                with open(log, "rb") as file, open(part, "wb") as out:
                    file.seek(begin)
                    shutil.copyfileobj(file, out)
        send_file(number, [0], part, _OTHER_FOLDER)
        with failing_together(), disk_errors(log, "written", _OTHER_FOLDER):
            if rank() == 0:
                with open(part, "rb") as file, open(log, "ab") as out:
                    shutil.copyfileobj(file, out)
        if rank() in (0, number):
            part.unlink()


def sampled_validation(folder: Path) -> str:
    """Return on which nodes a run validated during training; "" where on all."""
    log = events.last_run(events.read_log(folder / "events.jsonl"))
    chosen = [event for event in log if event["event"] == "validation_sample"]
    if not chosen:
        return ""
    return f"of a sample, {chosen[-1]['num_sampled']:,} of {chosen[-1]['num_nodes']:,} nodes"


def _logged(rows: list[dict], name: str) -> list[tuple[str, float]]:
    """Return (epoch, value) of every row of a metrics file that has the metric."""
    return [(row["epoch"], float(row[name])) for row in rows if row.get(name)]


def exchange_counts(log: list[dict]) -> dict[str, int | float]:
    """Return what full-graph training sent between processes, from its events; empty without exchange."""
    exchanges = [event for event in log if event["event"] == "exchange"]
    if not exchanges:
        return {}
    counts: Counter = Counter()
    for event in exchanges:
        for entry in event["bytes"]:
            # What is exchanged once serves the forward pass.
            counts["forward" if entry["direction"] == "static" else entry["direction"]] += entry["bytes"]
        for entry in event["rows"]:
            counts["sent"] += entry["sent"]
            counts["skipped"] += entry["skipped"]
    for event in log:
        counts["evaluation"] += event["bytes"] if event["event"] == "exchange_evaluation" else 0
    caches: Counter = Counter()
    for event in exchanges:
        caches[event["rank"]] = max(caches[event["rank"]], event["cache_bytes"])
    return {
        **{f"{name}_exchange_bytes": counts[name] for name in ("forward", "backward", "evaluation")},
        "skipped_row_share": counts["skipped"] / max(1, counts["sent"] + counts["skipped"]),
        "exchange_cache_bytes": max(caches.values()),
    }


def _exchange_facts(log: list[dict]) -> dict[str, str]:
    counts = exchange_counts(log)
    if not counts:
        return {}
    forward, backward, evaluation = (
        format_bytes(counts[f"{name}_exchange_bytes"]) for name in ("forward", "backward", "evaluation")
    )
    facts = {"exchanged": f"{forward} forward, {backward} backward, {evaluation} to evaluate (all processes)"}
    if counts["skipped_row_share"]:
        facts["rows skipped"] = f"{counts['skipped_row_share']:.1%}"
    facts["exchange caches"] = f"{format_bytes(counts['exchange_cache_bytes'])} on the fullest process"
    return facts


def owner_counts(log: list[dict]) -> dict[str, float]:
    """Return what processes requested from other machines; empty without requests.

    `remote_row_share`: share of the feature rows of batches that came from other machines; `remote_bytes`: bytes that
    came, neighbours included.
    """
    told = [event for event in log if event["event"] == "owner_reads"]
    if not told:
        return {}
    return {
        "remote_row_share": sum(event["rows_away"] for event in told) / max(1, sum(event["rows"] for event in told)),
        "remote_bytes": sum(event["bytes_away"] for event in told),
    }


_BLOCKS = ("wait", *BESIDE, "exchange")  # what training waits for: batches, or the making of them, and learned rows


def blocked_share(log: list[dict]) -> dict[str, float]:
    """Return `fetch_blocked_share`; empty where no process asked another for anything.

    It is the share of the training time in which a process waited for batches, for whatever reason, or made them
    itself, and for learned rows: the largest of all processes, of epochs but the first, without validation and saving.
    """
    asked = (owner_counts(log), learned_row_counts(log), worker_counts(log))
    epochs = [event for event in log if event["event"] == "epoch_times"]
    warm = [event for event in epochs if event["epoch"] > min(one["epoch"] for one in epochs)] or epochs
    if not any(asked) or not warm:
        return {}
    blocked: dict[int, float] = defaultdict(float)
    ran: dict[int, float] = defaultdict(float)
    for event in warm:
        spent = event["training"]
        blocked[event["rank"]] += sum(spent.get(name, 0.0) for name in _BLOCKS)
        ran[event["rank"]] += event["seconds"] - sum(spent.get(name, 0.0) for name in ("validation", "save"))
    return {"fetch_blocked_share": max(blocked[rank] / max(ran[rank], 1e-9) for rank in ran)}


def learned_row_counts(log: list[dict]) -> dict[str, float]:
    """Return what processes exchanged of learned rows; empty where nothing came from another process.

    `learned_row_bytes`: bytes of rows and gradients that came; `learned_rows_blocked_share`: the largest share of a
    process' time that was spent waiting for rows; `stale_rows`, `greatest_staleness`: rows that were used though a step
    had changed them since they were pulled, and the most steps that one had missed.
    """
    told = [event for event in log if event["event"] == "learned_rows"]
    if not any(event["bytes_away"] or event["staleness"] for event in told):
        return {}
    return {
        "learned_row_bytes": sum(event["bytes_away"] for event in told),
        "learned_rows_blocked_share": max(event["waiting_share"] for event in told),
        "stale_rows": sum(event["rows_stale"] for event in told),
        "greatest_staleness": max(event["greatest_age"] for event in told),
    }


def _learned_facts(counts: dict[str, float]) -> dict[str, str]:
    if not counts:
        return {}
    stale = f"{counts['stale_rows']:,} used stale, by {counts['greatest_staleness']} steps at most"
    return {
        "learned rows": f"{format_bytes(counts['learned_row_bytes'])} received, training waited for them "
        f"{counts['learned_rows_blocked_share']:.1%} of its time; {stale if counts['stale_rows'] else 'none stale'}"
    }


def worker_counts(log: list[dict]) -> dict[str, float]:
    """Return what workers of `source=ray` did for a run; empty without workers.

    `parts_read`: reads of parts by workers; `workers_busy`: share of their time in which they
    prepared batches; `workers_needed`: number that keeps a machine's trainers busy, the most of all machines. Where
    they ask each other for rows, `remote_row_share` and `remote_bytes` are as in `owner_counts`.
    """
    last = {event["node"]: event for event in log if event["event"] == "preparation" and "busy_s" in event}
    if not last:
        return {}
    busy, able = (sum(event[name] for event in last.values()) for name in ("busy_s", "num_workers"))
    seconds = max(event["seconds"] for event in last.values())
    asked = [event for event in last.values() if "rows_away" in event]
    rows, away, away_bytes = (sum(one[name] for one in asked) for name in ("rows_gathered", "rows_away", "bytes_away"))
    needed = [event["busy_s"] / max(event["seconds"] - event["waited_s"], 1e-9) for event in last.values()]
    return {
        "parts_read": sum(event["parts_read"] for event in last.values()),
        "workers_busy": min(1.0, busy / max(able * seconds, 1e-9)),
        "workers_needed": math.ceil(max(needed)),
        **({"remote_row_share": away / max(1, rows), "remote_bytes": away_bytes} if asked else {}),
    }


def _worker_facts(counts: dict[str, float]) -> dict[str, str]:
    if not counts:
        return {}
    facts = {
        "workers": f"{counts['workers_needed']} workers keep this trainer busy; those of this run were at work "
        f"{counts['workers_busy']:.1%} of the time, and read {counts['parts_read']} parts"
    }
    if "remote_row_share" in counts:
        facts["rows of other machines"] = (
            f"{counts['remote_row_share']:.1%} of those that workers gathered, {format_bytes(counts['remote_bytes'])}"
        )
    return facts


def _owner_facts(counts: dict[str, float]) -> dict[str, str]:
    if not counts:
        return {}
    return {
        "rows of other machines": f"{counts['remote_row_share']:.1%}, {format_bytes(counts['remote_bytes'])} received"
    }


def _blocked_facts(counts: dict[str, float]) -> dict[str, str]:
    if not counts:
        return {}
    return {"blocked by fetching": f"{counts['fetch_blocked_share']:.1%} of the training time, learned rows included"}


def _placement_facts(log: list[dict]) -> dict[str, str]:
    """Return where feature rows were placed and the share of reads of each tier; empty without placement."""
    placed = [event for event in log if event["event"] == "placement"]
    if not placed:
        read = [event for event in log if event["event"] == "row_reads"]
        if not read:
            return {}
        why = f" ({read[-1]['not_placed']})" if read[-1].get("not_placed") else ""
        return {"feature rows": f"{read[-1]['how']}: {read[-1]['why']}{why}"}
    bytes_held = max(event["buffer_bytes"] for event in placed)
    facts = {
        "placement": f"{placed[0]['method']}, {placed[0]['buffer_rows']:,} rows on each of {len(placed)} devices, "
        f"{format_bytes(bytes_held)} with look-up"
    }
    tiers = min(placed, key=lambda event: event["rank"]).get("tier_bytes") or {}
    if tiers:
        facts["feature rows"] = ", ".join(f"{format_bytes(size)} {tier}" for tier, size in tiers.items() if size)
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
        facts["slowest device's reads"] = _slowest_reads(placed, reads)
    return facts


def _by_rank(log: list[dict], name: str, field: str) -> list:
    """Return what the last event of a name says of a field, one value a rank; empty without such events."""
    found = {event["rank"]: event.get(field) for event in log if event["event"] == name}
    return [found[rank] for rank in sorted(found)]


def _read_facts(log: list[dict]) -> dict:
    """Return what a mean epoch has read, where rows were not left to the page cache."""
    found = read_counts(log).get("epoch_reads")
    if not found:
        return {}
    used, rows, others = (found[name] for name in ("used_bytes", "feature_bytes", "other_bytes"))
    text = f"{format_bytes(rows)} of features and {format_bytes(others)} of edges and all else"
    text += f", {(rows + others) / max(used, 1):.1f} times the {format_bytes(used)} of features in batches"
    predicted = found["predicted_bytes"]
    return {"read in an epoch": text + (f" (features predicted {format_bytes(predicted)})" if predicted else "")}


def read_counts(log: list[dict]) -> dict:
    """Return what a mean epoch of training read, all processes together: {"epoch_reads": {name: number}}, or {}."""
    told = [event for event in log if event["event"] == "rows_read"]
    if not told:
        return {}
    num_epochs = len({event["epoch"] for event in told})
    totals = {
        name: sum(event.get(name) or 0 for event in told) / num_epochs
        for name in ("rows", "used_bytes", "feature_bytes", "disk_bytes", "predicted_bytes")
    }
    others = max(totals["disk_bytes"] - totals["feature_bytes"], 0)
    passes = [event["passes"] for event in told if "passes" in event]
    more = {"passes": round(sum(passes) / len(passes), 2)} if passes else {}
    return {"epoch_reads": {name: int(value) for name, value in totals.items()} | {"other_bytes": int(others)} | more}


def _slowest_reads(placed: list[dict], reads: list[dict]) -> str:
    """Return the cost of the slowest device's reads over that of reading all from the host, and the prediction."""

    def cost(counts: dict, alpha: float) -> float:
        return counts["host"] + counts["disk"] + alpha * counts["peer"]

    pairs = [(event, at) for event in reads for at in placed if at["rank"] == event["rank"]]
    event, at = max(pairs, key=lambda pair: cost(pair[0], pair[1]["alpha"]))
    counted = cost(event, at["alpha"]) / max(sum(event[tier] for tier in TIERS), 1)
    predicted = cost(at["predicted"], at["alpha"])
    return f"{counted:.1%} of the cost of reading all from the host (predicted {predicted:.1%})"


def run_summary(name: str, folder: Path, datamodule, plan, facts: dict, command: str = "train") -> dict:
    """Return the results of a run: what is shown at its end (title, stages, facts), and all figures.

    `metrics` holds the model's metrics by name: `best_val_acc`, `test_acc`, ... Sizes end in `_bytes`. Earlier runs in
    the same folder are not counted. facts: results of training and testing, {title: number or text}.
    """
    quality = datamodule.partitioning_facts.get("quality") or {}
    predicted = dict(plan.host_peak_bytes)
    if "evaluate" in predicted:
        predicted["validate"] = predicted["predict"] = predicted["evaluate"]  # a pass over the same layers
    log = events.last_run(events.read_log(folder / "events.jsonl"))
    shown = {
        "graph": f"{datamodule.store.num_nodes:,} nodes, {datamodule.store.num_edges:,} edges",
        "parts": f"{datamodule.store.num_parts} ({datamodule.partitioning_facts.get('method', 'given')})",
    }
    for key in ("edge_cut_ratio", "replication_factor", "node_balance"):
        if key in quality:
            shown[key.replace("_", " ")] = float(quality[key])
    owners, workers, learned = owner_counts(log), worker_counts(log), learned_row_counts(log)
    shown |= facts | _exchange_facts(log) | _placement_facts(log) | _owner_facts(owners) | _worker_facts(workers)
    blocked = blocked_share(log)
    shown |= _learned_facts(learned) | _blocked_facts(blocked)
    shown |= _read_facts(log)
    peaks = [event["peak_bytes"] for event in log if event["event"] == "training_peak"]
    if command == "train":
        shown["training peak of a process"] = (
            f"{format_bytes(max(peaks, default=0))}, predicted {format_bytes(plan.device_peak_bytes)} (beyond the "
            "interpreter)"
        )
    shown |= {"store": str(datamodule.root), "run folder": str(folder)}
    if command == "train":
        shown["report"] = str(folder / "report.html")
    return {
        "title": name,
        "command": command,
        "stages": stage_rows(log, predicted),
        "facts": shown,
        "metrics": {key.replace(" ", "_"): value for key, value in facts.items() if isinstance(value, float)},
        "epochs": facts.get("epochs"),
        "num_nodes": datamodule.store.num_nodes,
        "num_edges": datamodule.store.num_edges,
        "num_parts": datamodule.store.num_parts,
        "method": datamodule.partitioning_facts.get("method"),
        "training_peak_bytes": max(peaks, default=None),
        "predicted_peak_bytes": plan.device_peak_bytes,
        "store": str(datamodule.root),
        "run_folder": str(folder),
        "quality": quality,
        "plan": dataclasses.asdict(plan),
        "plan_terms": dict(plan.terms()),
        "tier_bytes": _by_rank(log, "placement", "tier_bytes"),
        "gpus": [gpu for gpu in _by_rank(log, "training_peak", "gpu") if gpu],
        **exchange_counts(log),
        **read_counts(log),
        **owners,
        **workers,
        **learned,
        **blocked,
    }
