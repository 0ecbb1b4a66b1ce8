"""Training on the parts of each partitioner: what a better partition is worth once a model is trained on it."""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, pstdev

from rich.console import Console
from rich.table import Table

from ..events import read_log
from .experiment import run_rows
from .results import mean_of, write_csv

QUALITY = ("edge_cut_ratio", "replication_factor", "node_balance")
CLOCK = "lightning_gnnscale.bench.epoch_clock.EpochClock"
STYLES = ("o-", "s--", "^:")


def run(
    output_dir: str | os.PathLike,
    graphs: Mapping[str, list[str]],
    partitioners: list[str],
    weights: Mapping[str, list[str]],
    num_parts: int = 8,
    devices: int = 2,
    seeds: list[int] = (0, 1, 2),
    max_epochs: int = 15,
    overrides: list[str] | None = None,
) -> list[dict]:
    """Train the same model on parts by each partitioner, under each way of joining the weights.

    Args:
        output_dir: folder for `rows.csv` (one run a row), `parts.csv` (means over seeds), the plot and the runs.
        graphs: name of a graph to the overrides of `train` that choose it.
        partitioners: names of the config group `partitioner`.
        weights: name of a way of joining weights to the overrides of `train` that choose it.
        num_parts, devices: parts and processes.
        seeds: of training.
        max_epochs: epochs of every run; no early stopping.
        overrides: further overrides of `train`.

    Returns:
        One row a graph, partitioner and way of joining weights: cut, replication factor, node balance, test accuracy
        in percent, seconds of an epoch (the median; of the slowest process, without validation).

    Raises:
        ValueError: graphs or weights without their overrides.
    """
    _check_overrides("graphs", graphs, "{cora: [dataset=npz, dataset.name=cora]}")
    _check_overrides("weights", weights, "{every tenth: [strategy.weights.every_n_epochs=10]}")
    common = [
        f"num_parts={num_parts}",
        f"trainer.devices={devices}",
        f"trainer.max_epochs={max_epochs}",
        f"+callbacks.epoch_clock._target_={CLOCK}",
        *(overrides or []),
    ]
    cases = [
        (
            {"graph": graph, "partitioner": method, "weights": policy, "seed": seed},
            [*choice, f"partitioner={method}", f"name=parts-{graph}", f"seed={seed}", *common, *policy_choice],
        )
        for graph, choice in graphs.items()
        for method in partitioners
        for policy, policy_choice in weights.items()
        for seed in seeds
    ]
    rows = run_rows(output_dir, cases, measure=_measure)
    table = [_mean(rows, graph, method, policy) for graph in graphs for method in partitioners for policy in weights]
    write_csv(Path(output_dir) / "parts.csv", table)
    for graph in graphs:
        _print([row for row in table if row["graph"] == graph], num_parts, devices, len(seeds))
    _plot(Path(output_dir) / "parts.png", table)
    return table


def _check_overrides(name: str, given, example: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"bench.{name} must name overrides of train for each of its {name}, got {given}; for example "
            f"'~bench.{name}' '+bench.{name}={example}'"
        )


def _measure(folder: Path) -> dict:
    """Return what a run says of its parts and its epochs."""
    quality = json.loads((folder / "summary.json").read_text())["quality"]
    epochs: dict[int, float] = {}
    for event in read_log(folder / "events.jsonl"):
        if event["event"] == "epoch":
            epochs[event["epoch"]] = max(epochs.get(event["epoch"], 0.0), event["seconds"])
    return {
        **{name: round(quality[name], 4) for name in QUALITY},
        "epoch_s": round(median(epochs.values()), 4),
    }


def _mean(rows: list[dict], graph: str, method: str, policy: str) -> dict:
    case = (graph, method, policy)
    chosen = [row for row in rows if (row["graph"], row["partitioner"], row["weights"]) == case]

    def average(name: str) -> float:
        return mean(float(row[name]) for row in chosen)

    accuracies = [100 * float(row["test_acc"]) for row in chosen]
    return {
        "graph": graph,
        "partitioner": method,
        "weights": policy,
        **{name: round(average(name), 4) for name in QUALITY},
        "test_acc": round(mean(accuracies), 2),
        "test_acc_std": round(pstdev(accuracies), 2),
        "epoch_s": round(average("epoch_s"), 3),
    }


def _print(rows: list[dict], num_parts: int, devices: int, num_seeds: int) -> None:
    title = f"{rows[0]['graph']}, {num_parts} parts on {devices} processes, {mean_of(num_seeds)}"
    table = Table(title=title, title_justify="left")
    names = [name for name in rows[0] if name != "graph"]
    for name in names:
        is_name = name in ("partitioner", "weights")
        table.add_column(name.replace("_", " "), justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console(width=max(Console().width, 120)).print(table)


def _plot(path: Path, rows: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    graphs, policies = (list(dict.fromkeys(row[name] for row in rows)) for name in ("graph", "weights"))
    for graph, policy in itertools.product(graphs, policies):
        own = [row for row in rows if (row["graph"], row["weights"]) == (graph, policy)]
        own.sort(key=lambda row: row["edge_cut_ratio"])
        cuts = [row["edge_cut_ratio"] for row in own]
        color, style = f"C{graphs.index(graph)}", STYLES[policies.index(policy) % len(STYLES)]
        left.plot(cuts, [row["test_acc"] for row in own], style, color=color, label=f"{graph}, {policy}")
        right.plot(cuts, [row["epoch_s"] for row in own], style, color=color)
        if policy == policies[0]:
            for axes, name in ((left, "test_acc"), (right, "epoch_s")):
                _name_points(axes, own, name)
    left.set(xlabel="share of edges cut", ylabel="test accuracy, %")
    right.set(xlabel="share of edges cut", ylabel="seconds an epoch", ylim=(0, None))
    left.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)


def _name_points(axes, rows: list[dict], name: str) -> None:
    for row in rows:
        where = (row["edge_cut_ratio"], row[name])
        axes.annotate(row["partitioner"], where, xytext=(3, 4), textcoords="offset points", fontsize="x-small")
