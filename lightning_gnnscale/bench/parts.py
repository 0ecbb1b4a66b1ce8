"""Training on the parts of each partitioner, beside central training: accuracy, and the seconds to come to it."""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, pstdev

from rich.console import Console
from rich.table import Table

from ..events import read_log
from .central import curve_text, seconds_to, train_central
from .experiment import run_rows
from .reduced_graph import reduced_graph
from .results import mean_of, write_csv

QUALITY = ("edge_cut_ratio", "replication_factor", "node_balance")
CLOCK = "lightning_gnnscale.bench.epoch_clock.EpochClock"
CENTRAL = "central (PyG's loop)"
SPLIT = (0.7, 0.15, 0.15)  # of nodes, where a graph with reduced features has no split of its own
NEAR = 0.005  # of central training's best validation accuracy: what counts as reaching it
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
    central: bool = False,
    feature_dim: int | None = None,
    overrides: list[str] | None = None,
) -> list[dict]:
    """Train the same model on the parts of each partitioner, with each way of joining the weights.

    Args:
        output_dir: Folder for `rows.csv` (one row per run), `parts.csv` (means over seeds), the plot and the runs.
        graphs: Maps the name of a graph to the overrides of `train` that choose it, or to None, which leaves it out.
        partitioners: Names in the config group `partitioner`.
        weights: Maps the name of a way of joining weights to the overrides of `train` that choose it, or to None, which
            leaves it out.
        num_parts, devices: Number of parts, and of processes.
        seeds: Seeds of the training runs.
        max_epochs: Epochs of every run; there is no early stopping.
        central: Whether each graph is also trained whole in PyG's plain loop; see `train_central`.
        feature_dim: Number of columns that the features of graphs chosen by `dataset.name=` are reduced to, see
            `reduced_graph`; None: features are used as they are.
        overrides: Further overrides of `train`.

    Returns:
        One row per graph, partitioner and way of joining weights: cut, replication factor, node balance, test accuracy
        in percent, seconds per epoch (the median; of the slowest process, without validation), and CPU seconds per
        epoch (of all processes). With `central` also the difference to its accuracy in points, and the training seconds
        until the validation accuracy was within half a point of central training's best ("" if for at least one seed it
        never was).

    Raises:
        ValueError: graphs or weights lack their overrides.
    """
    _check_overrides("graphs", graphs, "{cora: [dataset=npz, dataset.name=cora]}")
    _check_overrides("weights", weights, "{every tenth: [strategy.weights.every_n_epochs=10]}")
    graphs, weights = (
        {name: choice for name, choice in given.items() if choice is not None} for given in (graphs, weights)
    )
    if feature_dim is not None:
        graphs = {name: _reduced(choice, Path(output_dir) / "graphs", feature_dim) for name, choice in graphs.items()}
    common = [
        f"num_parts={num_parts}",
        f"trainer.devices={devices}",
        f"trainer.max_epochs={max_epochs}",
        f"+callbacks.epoch_clock._target_={CLOCK}",
        "evaluation.sample=1",
        *(overrides or []),
    ]
    wholes = _train_wholes(output_dir, graphs, seeds, common) if central else []
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
    table = []
    for graph in graphs:
        whole = [row for row in wholes if row["graph"] == graph]
        table += [_mean(whole, whole, graph, "", CENTRAL)] if whole else []
        table += [_mean(rows, whole, graph, method, policy) for method in partitioners for policy in weights]
    write_csv(Path(output_dir) / "parts.csv", table)
    for graph in graphs:
        _print([row for row in table if row["graph"] == graph], num_parts, devices, len(seeds))
    _plot(Path(output_dir) / "parts.png", [row for row in table if row["weights"] != CENTRAL])
    return table


def _train_wholes(output_dir, graphs: Mapping[str, list[str]], seeds: list[int], common: list[str]) -> list[dict]:
    cases = [
        (
            {"graph": graph, "partitioner": "", "weights": CENTRAL, "seed": seed},
            [*choice, f"seed={seed}", *common],
        )
        for graph, choice in graphs.items()
        for seed in seeds
    ]
    return run_rows(output_dir, cases, log="central_rows.csv", run=train_central)


def _reduced(choice: list[str], folder: Path, dim: int) -> list[str]:
    """Return the overrides of a graph with those that name it naming one with fewer features."""
    key = "dataset.name="
    names = [word.removeprefix(key) for word in choice if word.startswith(key)]
    return [word for word in choice if not word.startswith(key)] + [
        f"{key}{reduced_graph(name, folder, dim, list(SPLIT))}" for name in names
    ]


def _check_overrides(name: str, given, example: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"bench.{name} must name overrides of train for each of its {name}, got {given}; for example "
            f"'~bench.{name}' '+bench.{name}={example}'"
        )


def _measure(folder: Path) -> dict:
    """Return what a run says of its parts and its epochs."""
    quality = json.loads((folder / "summary.json").read_text())["quality"]
    epochs: dict[int, list[dict]] = {}
    for event in read_log(folder / "events.jsonl"):
        if event["event"] == "epoch":
            epochs.setdefault(event["epoch"], []).append(event)
    seconds = [max(event["seconds"] for event in of_ranks) for of_ranks in epochs.values()]
    reached = [of_ranks[0].get("val_acc", 0.0) for of_ranks in epochs.values()]
    return {
        **{name: round(quality[name], 4) for name in QUALITY},
        "epoch_s": round(median(seconds), 4),
        "epoch_cpu_s": round(median(sum(event["cpu_s"] for event in of_ranks) for of_ranks in epochs.values()), 4),
        "curve": curve_text(list(zip(itertools.accumulate(seconds), reached, strict=True))),
    }


def _mean(rows: list[dict], wholes: list[dict], graph: str, method: str, policy: str) -> dict:
    case = (graph, method, policy)
    chosen = [row for row in rows if (row["graph"], row["partitioner"], row["weights"]) == case]

    def average(name: str, digits: int) -> float | str:
        values = [row.get(name, "") for row in chosen]
        return "" if "" in values else round(mean(map(float, values)), digits)

    compared = {}
    if wholes:
        targets = {str(row["seed"]): float(row["best_val_acc"]) - NEAR for row in wholes}
        times = [seconds_to(row["curve"], targets[str(row["seed"])]) for row in chosen]
        central = mean(100 * float(row["test_acc"]) for row in wholes)
        compared = {
            "difference": round(mean(100 * float(row["test_acc"]) for row in chosen) - central, 2),
            "to_central_s": "" if None in times else round(mean(times), 2),
        }

    accuracies = [100 * float(row["test_acc"]) for row in chosen]
    return {
        "graph": graph,
        "partitioner": method,
        "weights": policy,
        **{name: average(name, 4) for name in QUALITY},
        "test_acc": round(mean(accuracies), 2),
        "test_acc_std": round(pstdev(accuracies), 2),
        "epoch_s": average("epoch_s", 3),
        "epoch_cpu_s": average("epoch_cpu_s", 3),
        **compared,
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
