"""Exchange policies side by side: what each sends, and what accuracy is left."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import numpy as np
from rich.console import Console
from rich.table import Table

from ..units import format_bytes
from .exchange_plots import plot_exchange
from .experiment import run_rows
from .reduced_graph import reduced_graph
from .results import write_csv

EXACT = "halo"  # the policy that losses and shares are counted against
CALLBACK = "lightning_gnnscale.bench.score_test_nodes.ScoreTestNodes"


def run(
    output_dir: str | os.PathLike,
    graphs: list[str],
    policies: Mapping[str, list[str]],
    partitioners: list[str],
    world_sizes: list[int],
    seeds: list[int],
    hidden_channels: int = 128,
    num_layers: int = 3,
    max_epochs: int = 200,
    evaluate_every: int = 5,
    late_evaluations: int = 10,
    feature_dim: int = 128,
    fractions: list[float] = (0.6, 0.2, 0.2),
    overrides: list[str] | None = None,
) -> list[dict]:
    """Train a full-graph GCN under every policy, on real processes.

    Args:
        output_dir: Folder for `rows.csv` (one row per run), `exchange.csv` (means over seeds), the plot and the runs.
        graphs: Names that `load_npz` knows, or "planted:EDGES:NODES" for a generated graph. Graphs are symmetrised, and
            their features are reduced to feature_dim; the split is the public one, or made by fractions.
        policies: Maps a name to overrides of `train`, or to None, which leaves the policy out. The others are compared
            with "halo".
        partitioners: Methods that make the parts, one part per process.
        world_sizes: Numbers of processes.
        seeds: Seeds of the training runs.
        hidden_channels, num_layers: Width and number of layers of the GCN.
        max_epochs, evaluate_every: Number of epochs, and of epochs between two evaluations.
        late_evaluations: Number of last evaluations; late accuracy is the mean of (validation + test) / 2 over them.
        feature_dim, fractions: See `reduced_graph`.
        overrides: Further overrides of `train`, for all sides.

    Returns:
        One row per graph, partitioner, number of processes and policy: accuracies in percent, bytes sent in training,
        and the ratios of these bytes to CAGNET's (num_nodes x (world_size - 1) x width x 4 bytes per layer but the
        first, and per direction) and to the exact halo's.
    """
    output_dir = Path(output_dir)
    policies = {name: changes for name, changes in policies.items() if changes is not None}
    files = {graph: reduced_graph(graph, output_dir / "graphs", feature_dim, list(fractions)) for graph in graphs}
    common = [
        f"model.backbone.hidden_channels={hidden_channels}",
        f"model.backbone.num_layers={num_layers}",
        f"trainer.max_epochs={max_epochs}",
        f"trainer.check_val_every_n_epoch={evaluate_every}",
        *(overrides or []),
    ]
    cases = [
        (
            {"graph": graph, "partitioner": method, "world_size": size, "policy": policy, "seed": seed},
            [*_overrides(files[graph], graph, method, size, seed), *policies[policy], *common],
        )
        for seed in seeds
        for graph in graphs
        for method in partitioners
        for size in world_sizes
        for policy in policies
    ]
    rows = run_rows(output_dir, cases, measure=lambda folder: _measure(folder, late_evaluations))
    # forward and backward, each layer but the first, float32
    bytes_per_row = 2 * (num_layers - 1) * hidden_channels * 4 * max_epochs
    cagnet_bytes = {
        (graph, size): len(np.load(file)["y"]) * (size - 1) * bytes_per_row
        for graph, file in files.items()
        for size in world_sizes
    }
    table = _compare(rows, cagnet_bytes)
    write_csv(output_dir / "exchange.csv", table)
    _print(table, len(seeds))
    if not plot_exchange(output_dir / "exchange.png", table):
        Console().print(
            f"exchange.png is left out: it shows what is lost against the policy {EXACT!r}, which did not run"
        )
    return table


def _overrides(file: Path, graph: str, method: str, world_size: int, seed: int) -> list[str]:
    return [
        "dataset=npz",
        f"dataset.name={file}",
        "datamodule=full_graph",
        "model=gcn",
        "model.weight_decay=5.0e-4",
        "strategy/weights=gradient_averaging",
        f"partitioner={method}",
        f"num_parts={world_size}",
        f"trainer.devices={world_size}",
        f"seed={seed}",
        f"name=exchange-{graph.replace(':', '-')}",
        f"+callbacks.score_test_nodes._target_={CALLBACK}",
        "test=false",
    ]


def _measure(folder: Path, late_evaluations: int) -> dict:
    """Return what a run's metrics say: accuracies in percent, bytes of all ranks over all epochs, seconds."""
    with open(folder / "metrics" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    evaluations = [(float(r["val_acc"]), float(r["test_beside_acc"])) for r in rows if r.get("val_acc")]
    best = max(evaluations, key=lambda pair: pair[0])[1]
    late = [(val + test) / 2 for val, test in evaluations[-late_evaluations:]]

    def total(name: str) -> float:
        return sum(float(row[name]) for row in rows if row.get(name))

    return {
        "best_test_acc": round(100 * best, 3),
        "late_acc": round(100 * mean(late), 3),
        "forward_bytes": int(total("exchange_forward_bytes")),
        "backward_bytes": int(total("exchange_backward_bytes")),
        "exchange_s": round(total("exchange_ms") / 1e3, 3),
        "wait_s": round(total("exchange_wait_ms") / 1e3, 3),
        "rows_sent": int(total("rows_sent")),
        "rows_skipped": int(total("rows_skipped")),
        "cache_bytes": int(max(float(row["exchange_cache_bytes"] or 0) for row in rows)),
    }


def _compare(rows: list[dict], cagnet_bytes: Mapping[tuple, int]) -> list[dict]:
    """Return means over seeds, with what is lost against the exact halo and what share of bytes is sent."""
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        case = (row["graph"], row["partitioner"], int(row["world_size"]))
        groups.setdefault(case, {}).setdefault(row["policy"], []).append(row)
    return [
        _row(case, policy, runs, policies.get(EXACT), cagnet_bytes[case[0], case[2]])
        for case, policies in groups.items()
        for policy, runs in policies.items()
    ]


def _row(case: tuple, policy: str, runs: list[dict], exact: list[dict] | None, cagnet_bytes: int) -> dict:
    def average(of: list[dict], name: str) -> float:
        return mean(float(run[name]) for run in of)

    def sent(of: list[dict]) -> float:
        return average(of, "forward_bytes") + average(of, "backward_bytes")

    row = dict(zip(("graph", "partitioner", "world_size"), case, strict=True)) | {"policy": policy}
    for name in ("best_test_acc", "late_acc"):
        row[name] = round(average(runs, name), 2)
        row[f"{name}_lost"] = "" if exact is None else round(average(exact, name) - average(runs, name), 2)
    row["bytes"] = round(sent(runs))
    row["share_of_cagnet"] = round(100 * sent(runs) / cagnet_bytes, 2)
    row["share_of_halo"] = "" if exact is None or not sent(exact) else round(100 * sent(runs) / sent(exact), 2)
    rows_sent, skipped = average(runs, "rows_sent"), average(runs, "rows_skipped")
    row["rows_skipped_share"] = round(100 * skipped / max(1.0, rows_sent + skipped), 1)
    row["cache_bytes"] = round(average(runs, "cache_bytes"))
    for name in ("train_s", "exchange_s", "wait_s"):
        row[name] = round(average(runs, name), 2)
    row["seeds"] = len(runs)
    return row


COLUMNS = {
    "policy": "policy",
    "best_test_acc": "best",
    "best_test_acc_lost": "lost",
    "late_acc": "late",
    "late_acc_lost": "lost",
    "bytes": "bytes",
    "share_of_cagnet": "CAGNET",
    "share_of_halo": "halo",
    "train_s": "s",
}


def _print(rows: list[dict], num_seeds: int) -> None:
    cases = dict.fromkeys((row["graph"], row["partitioner"], row["world_size"]) for row in rows)
    for graph, method, size in cases:
        title = f"{graph}, {method} parts, {size} processes, seeds: {num_seeds}"
        caption = (
            "accuracy, %, at the best validation and late; points lost; bytes of training, % of CAGNET's and the halo's"
        )
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        for column in COLUMNS.values():
            table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column == "policy")
        for row in rows:
            if (row["graph"], row["partitioner"], row["world_size"]) == (graph, method, size):
                shown = row | {"bytes": format_bytes(row["bytes"])}
                table.add_row(*(_shown(shown[name]) for name in COLUMNS))
        Console(width=max(Console().width, 100)).print(table)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
