"""Run folders as `gnnscale train` leaves them, with figures that a test chooses."""

import csv
import json
from pathlib import Path

import yaml

from lightning_gnnscale.report.run_record import RunRecord

BEGAN = 1_700_000_000.0
CONFIG = {
    "name": "small",
    "seed": 0,
    "dataset": {"_target_": "lightning_gnnscale.dataset.generate", "name": "synthetic"},
    "model": {
        "lr": 0.01,
        "backbone": {"_target_": "lightning_gnnscale.model.GraphSAGE", "hidden_channels": 64, "num_layers": 2},
    },
    "datamodule": {"_target_": "lightning_gnnscale.datamodule.PartitionDataModule", "batch_size": 512},
    "sampler": {"_target_": "lightning_gnnscale.sampler.NeighborSampler", "fanouts": [10, 5]},
    "source": {"_target_": "lightning_gnnscale.loader.Threads", "num_threads": 1},
    "partitioner": {"method": "streaming_multilevel"},
    "strategy": {"weights": {"_target_": "lightning_gnnscale.strategy.GradientAveraging"}},
    "callbacks": {"checkpoint": {"monitor": "val_acc", "mode": "max"}},
    "trainer": {"devices": 2, "max_epochs": 4, "check_val_every_n_epoch": 1},
}
QUALITY = {
    "edge_cut_ratio": 0.0625,
    "replication_factor": 1.5,
    "node_balance": 1.02,
    "nodes_per_part": [600, 400],
    "halo_per_part": [200, 300],
    "train_per_part": [60, 40],
}
PARTS = {
    "parts": [0, 1],
    "nodes": [600, 400],
    "halo": [200, 300],
    "train": [60, 40],
    "row_bytes": 256.0,
    "packs_halo": False,
    "edges": [[900, 100], [50, 950]],
    "labels": [0, 1],
    "label_counts": [[300, 300], [100, 300]],
    "edges_share": 1.0,
}
COUNTS = {"batches": 10, "seeds": 50, "nodes": 4000, "edges": 9000, "row_bytes": 1 << 20}


def epoch_times(epoch: int, rank: int, seconds: float = 2.0, **shares: float) -> dict:
    """An event `epoch_times`: shares of the training thread's activities, "forward" the rest; beside_NAME beside it."""
    training = {name: share * seconds for name, share in shares.items() if not name.startswith("beside_")}
    training["forward"] = seconds - sum(training.values())
    beside = {name[7:]: share * seconds for name, share in shares.items() if name.startswith("beside_")}
    return {
        "event": "epoch_times",
        "epoch": epoch,
        "rank": rank,
        "began": BEGAN + 10 + epoch * seconds,
        "device": "cpu",
        "seconds": seconds,
        "training": training,
        "beside": beside,
        "counts": dict(COUNTS),
        "hop_nodes": [50, 950, 3000],
        "hop_edges": [2000, 7000],
        "disk_bytes": 1 << 19,
    }


def log_of(epochs: int = 4, ranks: int = 2, seconds: float = 2.0, **shares: float) -> list[dict]:
    """The events of a run whose every epoch went alike."""
    machine = {"cpu": "a processor", "cores": 2, "torch": "2.6.0", "lightning-gnnscale": "0.1.0"}
    log = [{"event": "run", "command": "train", "memory_bytes": 8 << 30, "machine": machine}]
    log.append({"event": "partition", "method": "streaming_multilevel"})
    log.append({"event": "stage", "stage": "load", "seconds": 1.0, "peak_bytes": 100 << 20, "failed": False})
    log.append({"event": "parts", **PARTS})
    for epoch in range(epochs):
        log += [epoch_times(epoch, rank, seconds, **shares) for rank in range(ranks)]
    for rank in range(ranks):
        bins = {"forward": [0.5, 0.5, 0.0, 0.5], "wait": [0.0, 0.0, 0.5, 0.0]}
        told = {"event": "timeline", "epoch": epochs - 1, "rank": rank, "began": BEGAN, "bin_s": 0.5}
        log.append(told | {"lane": "training", "by_time": bins})
        log.append(told | {"lane": "beside", "by_time": {"sample": [0.25, 0.0, 0.5, 0.0]}})
        log.append({"event": "training_peak", "rank": rank, "peak_bytes": 64 << 20, "start_bytes": 300 << 20})
    stage = {"event": "stage", "stage": "train", "seconds": 9.0, "peak_bytes": 1 << 30, "failed": False}
    return [*log, stage]


def summary_of(log: list[dict]) -> dict:
    """The summary that goes with a log."""
    stages = [
        {key: event[key] for key in ("stage", "seconds", "peak_bytes")} | {"note": "", "predicted_bytes": 1 << 29}
        for event in log
        if event["event"] == "stage"
    ]
    facts = {"graph": "1,000 nodes, 2,000 edges", "parts": "2 (streaming_multilevel)", "test_acc": "0.8125"}
    return {"title": "small", "stages": stages, "facts": facts, "quality": QUALITY, "plan": {"nodes": "1,000"}}


def write_run(
    folder: Path,
    log: list[dict] | None = None,
    accuracies=(0.5, 0.7, 0.76, 0.76),
    losses=(2.0, 1.5, 1.25, 1.25),
    config: dict | None = None,
    summary: dict | None = None,
    finished: bool = True,
) -> Path:
    """Write a run folder; `config` is merged into CONFIG at the top."""
    folder.mkdir(parents=True, exist_ok=True)
    log = log_of(len(accuracies)) if log is None else log
    lines = [json.dumps({"time": BEGAN + 2 * at, "pid": 1, **event}) for at, event in enumerate(log)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | (config or {})))
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary_of(log) if summary is None else summary))
    (folder / "metrics").mkdir(exist_ok=True)
    with open(folder / "metrics" / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["average_ms", "epoch", "step", "train_loss", "val_acc", "val_loss"])
        writer.writeheader()
        for epoch, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True)):
            writer.writerow({"epoch": epoch, "step": epoch, "val_acc": accuracy, "val_loss": loss})
            writer.writerow({"epoch": epoch, "step": epoch, "train_loss": loss})
    return folder


def recorded(folder: Path, **choices) -> RunRecord:
    """A run that was written and read again."""
    return RunRecord.open(write_run(folder, **choices))
