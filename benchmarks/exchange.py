"""Exchange policies side by side: what each sends, and what accuracy is left."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np

from lightning_gnnscale.events import read_log
from lightning_gnnscale.memory import format_bytes

from .experiment import run_rows
from .pinned import pinned
from .present import LEFT, average, grouped, legend, panels, save, show, styles, tell
from .reduced_graph import reduced_graph
from .runner import Runner, benchmark, write_csv

CASE = ("graph", "partitioner", "world_size")
WHOLE = "cagnet"  # the policy that seconds of exchanging are counted against
EXACT = "halo"  # the policy that losses and shares are counted against
CALLBACK = "benchmarks.score_test_nodes.ScoreTestNodes"
CAPTION = (
    "accuracy, %, at the best validation and late; points lost; bytes of training, % of CAGNET's and the halo's; "
    "weights: bytes of gradients and weights that were joined"
)
COLUMNS = {
    "policy": ("policy", LEFT),
    "best_test_acc": ("best", ".2f"),
    "best_test_acc_lost": ("lost", ".2f"),
    "late_acc": ("late", ".2f"),
    "late_acc_lost": ("lost", ".2f"),
    "bytes": ("bytes", format_bytes),
    "share_of_cagnet": ("CAGNET", ".2f"),
    "share_of_halo": ("halo", ".2f"),
    "exchange_s": ("exchange,\ns", ".2f"),
    "exchange_over_cagnet": ("over\nCAGNET's", ".2f"),
    "weight_bytes": ("weights", format_bytes),
    "train_s": ("s", ".2f"),
}


@dataclass(frozen=True)
class ExchangeBench:
    """Train a full-graph GCN under every policy, on real processes; all other settings are fixed by `pinned`.

    Writes `rows.csv` (one row per run), `exchange.csv` (means over seeds), `exchange.png` and the runs.

    Attributes:
        graphs: Names that `load_npz` knows, or "planted:EDGES:NODES" for a generated graph. Graphs are symmetrised, and
            their features are reduced to feature_dim; the split is the public one, or made by fractions.
        policies: Maps a name to overrides of `train`, or to None, which leaves the policy out. The others are compared
            with "halo".
        partitioners: Methods that make the parts, one part per process.
        world_sizes: Numbers of processes.
        hidden_channels, num_layers: Width and number of layers of the GCN.
        max_epochs, evaluate_every: Number of epochs, and of epochs between two evaluations.
        late_evaluations: Number of last evaluations; late accuracy is the mean of (validation + test) / 2 over them.
        feature_dim, fractions: See `reduced_graph`.
    """

    graphs: list[str]
    policies: Mapping[str, list[str]]
    partitioners: list[str]
    world_sizes: list[int]
    seeds: list[int]
    hidden_channels: int = 128
    num_layers: int = 3
    max_epochs: int = 200
    evaluate_every: int = 5
    late_evaluations: int = 10
    feature_dim: int = 128
    fractions: list[float] = (0.6, 0.2, 0.2)
    overrides: list[str] | None = None

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, partitioner, number of processes and policy.

        It has accuracies in percent, seconds and bytes of exchanging in training, bytes of joined gradients of weights,
        and the ratios of the bytes to CAGNET's (num_nodes x (world_size - 1) x width x 4 bytes per layer but the first,
        and per direction) and to the exact halo's, and of the seconds to CAGNET's.
        """
        size = (self.feature_dim, list(self.fractions))
        files = {graph: reduced_graph(graph, runner.folder / "graphs", *size) for graph in self.graphs}
        policies = {name: words for name, words in self.policies.items() if words is not None}
        cases = []
        axes = (self.seeds, self.graphs, self.partitioners, self.world_sizes, policies)
        for seed, graph, method, world_size, policy in product(*axes):
            key = {"graph": graph, "partitioner": method, "world_size": world_size, "policy": policy, "seed": seed}
            cases.append((key, self._words(files[graph], key, policies[policy])))
        rows = run_rows(runner, cases, measure=partial(_measure, late_evaluations=self.late_evaluations))
        # forward and backward, each layer but the first, float32
        bytes_per_row = 2 * (self.num_layers - 1) * self.hidden_channels * 4 * self.max_epochs
        node_bytes = {graph: len(np.load(file)["y"]) * bytes_per_row for graph, file in files.items()}
        means = _compare(rows, node_bytes)
        write_csv(runner.folder / "exchange.csv", means)
        for (graph, method, world_size), own in grouped(means, *CASE).items():
            title = f"{graph}, {method} parts, {world_size} processes, seeds: {len(self.seeds)}"
            show(own, COLUMNS, title, CAPTION)
        if not _plot(runner.folder / "exchange.png", means):
            tell(f"exchange.png is left out: it shows what is lost against the policy {EXACT!r}, which did not run")
        return means

    def _words(self, file: Path, key: Mapping, policy: list[str]) -> list[str]:
        own = [
            f"dataset.name={file}",
            f"partitioner={key['partitioner']}",
            f"num_parts={key['world_size']}",
            f"trainer.devices={key['world_size']}",
            f"seed={key['seed']}",
            f"name=exchange-{key['graph'].replace(':', '-')}",
            f"+callbacks.score_test_nodes._target_={CALLBACK}",
            "test=false",
            *policy,
            f"model.backbone.hidden_channels={self.hidden_channels}",
            f"model.backbone.num_layers={self.num_layers}",
            f"trainer.max_epochs={self.max_epochs}",
            f"trainer.check_val_every_n_epoch={self.evaluate_every}",
            *(self.overrides or []),
        ]
        return pinned("sancus", own)


run = benchmark(ExchangeBench)


def _measure(folder: Path, late_evaluations: int) -> dict:
    """Return what a run's metrics say: accuracies in percent, bytes of all ranks over all epochs, seconds."""
    with open(folder / "metrics" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    evaluations = [(float(row["val_acc"]), float(row["test_beside_acc"])) for row in rows if row.get("val_acc")]
    late = [(val + test) / 2 for val, test in evaluations[-late_evaluations:]]

    def total(name: str) -> float:
        return sum(float(row[name]) for row in rows if row.get(name))

    joined = [event for event in read_log(folder / "events.jsonl") if event["event"] == "average"]
    return {
        "best_test_acc": round(100 * max(evaluations, key=lambda pair: pair[0])[1], 3),
        "late_acc": round(100 * mean(late), 3),
        "forward_bytes": int(total("exchange_forward_bytes")),
        "backward_bytes": int(total("exchange_backward_bytes")),
        "exchange_s": round(total("exchange_ms") / 1e3, 3),
        "wait_s": round(total("exchange_wait_ms") / 1e3, 3),
        "weight_bytes": sum(event["bytes"] for event in joined),
        "rows_sent": int(total("rows_sent")),
        "rows_skipped": int(total("rows_skipped")),
        "cache_bytes": int(max(float(row["exchange_cache_bytes"] or 0) for row in rows)),
    }


def _compare(rows: list[dict], node_bytes: Mapping[str, int]) -> list[dict]:
    """Return means over seeds, with what is lost against the exact halo and what share of bytes is sent."""
    for row in rows:
        row["bytes"] = row["forward_bytes"] + row["backward_bytes"]
    means = []
    for (graph, method, world_size), own in grouped(rows, *CASE).items():
        policies = {policy: runs for (policy,), runs in grouped(own, "policy").items()}
        for policy, runs in policies.items():
            row = {"graph": graph, "partitioner": method, "world_size": world_size, "policy": policy}
            row |= _means(runs, policies.get(EXACT), node_bytes[graph] * (world_size - 1))
            whole = average(policies.get(WHOLE) or [], "exchange_s")
            means.append(row | {"exchange_over_cagnet": round(row["exchange_s"] / whole, 3) if whole else None})
    return means


def _means(runs: list[dict], exact: list[dict] | None, cagnet_bytes: int) -> dict:
    row: dict = {}
    for name in ("best_test_acc", "late_acc"):
        row[name] = average(runs, name, 2)
        row[f"{name}_lost"] = None if exact is None else round(average(exact, name) - average(runs, name), 2)
    sent, exactly = average(runs, "bytes"), average(exact or [], "bytes")
    row["bytes"] = round(sent)
    row["share_of_cagnet"] = round(100 * sent / cagnet_bytes, 2)
    row["share_of_halo"] = round(100 * sent / exactly, 2) if exactly else None
    rows_sent, skipped = average(runs, "rows_sent"), average(runs, "rows_skipped")
    row["rows_skipped_share"] = round(100 * skipped / max(1.0, rows_sent + skipped), 1)
    row["cache_bytes"] = round(average(runs, "cache_bytes"))
    return (
        row
        | {name: average(runs, name, 2) for name in ("train_s", "exchange_s", "wait_s", "weight_bytes")}
        | {"seeds": len(runs)}
    )


def _plot(path: Path, rows: list[dict]) -> bool:
    """Plot late points lost over the share of CAGNET's bytes, a panel a case; return whether there was anything."""
    rows = [row for row in rows if row["late_acc_lost"] is not None]
    if not rows:
        return False
    titles = {case: "{}, {} parts, {} processes".format(*case) for case in grouped(rows, *CASE)}
    figure, found = panels(titles.values(), across=3, size=(5.5, 4.3), beside=0)
    looks = styles(row["policy"] for row in rows)
    for case, own in grouped(rows, *CASE).items():
        axes = found[titles[case]]
        for row in own:
            share = max(row["share_of_cagnet"], 0.1)
            axes.plot(share, row["late_acc_lost"], label=row["policy"], linestyle="", **looks[row["policy"]])
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(xscale="log", ylabel="late accuracy lost, points")
        axes.set_xlabel("bytes, % of CAGNET (no exchange: at the left edge)")
    legend(figure, found, "outside lower center", ncols=3 * min(3, len(titles)))
    save(figure, path)
    return True
