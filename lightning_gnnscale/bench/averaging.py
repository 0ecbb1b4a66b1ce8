"""SDT-GNN's case studies: the averaging interval, and the hops of halo."""

import os
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from .experiment import run_rows
from .results import mean_of, write_csv


def run(
    output_dir: str | os.PathLike,
    graph: str = "amazon_computers",
    num_parts: int = 8,
    devices: int = 2,
    intervals: list[int] = (1, 2, 5, 10, 20, 50),
    halo_hops: list[int] = (0, 1, 2, 3),
    seeds: list[int] = (0,),
    max_epochs: int = 50,
    overrides: list[str] | None = None,
) -> dict[str, list[dict]]:
    """Train with each interval, and with each number of halo hops; plot both.

    Args:
        output_dir: Folder for the CSV files, the plot and the runs.
        graph: A name that `load_npz` knows.
        num_parts, devices: Number of parts, and of processes.
        intervals: Epochs between two averagings, `every_n_epochs`.
        halo_hops: Numbers of halo hops, 0 to 3; 0 gives each cross edge to one of its parts.
        seeds: Seeds of the training runs.
        max_epochs: Epochs of every run; there is no early stopping.
        overrides: Further overrides of `train`.

    Returns:
        {"interval": rows, "halo_hops": rows} of means over seeds.

    Source: SDT-GNN, case studies of the averaging interval and of halo nodes.
    """
    common = [
        "dataset=npz",
        f"dataset.name={graph}",
        f"num_parts={num_parts}",
        f"trainer.devices={devices}",
        f"trainer.max_epochs={max_epochs}",
        f"name=averaging-{graph}",
        *(overrides or []),
    ]
    result = {}
    for setting, values, key in (
        ("interval", intervals, "strategy.weights.every_n_epochs"),
        ("halo_hops", halo_hops, "datamodule.halo_hops"),
    ):
        cases = [
            ({setting: value, "seed": seed}, [*common, f"{key}={value}", f"seed={seed}"])
            for value in values
            for seed in seeds
        ]
        rows = run_rows(output_dir, cases, log=f"{setting}_rows.csv")
        result[setting] = [_mean(rows, setting, value) for value in values]
        write_csv(Path(output_dir) / f"{setting}.csv", result[setting])
        _print(setting, result[setting], graph, num_parts, len(seeds))
    _plot(Path(output_dir) / "averaging.png", result, graph, num_parts)
    return result


def _mean(rows: list[dict], setting: str, value: int) -> dict:
    chosen = [row for row in rows if int(row[setting]) == value]
    return {
        setting: value,
        "test_acc": round(100 * mean(float(row["test_acc"]) for row in chosen), 2),
        "average_ms_per_epoch": round(1000 * mean(float(row["average_s"]) / int(row["epochs"]) for row in chosen), 3),
        "evaluation_average_ms_per_epoch": round(
            1000 * mean(float(row["evaluation_average_s"]) / int(row["epochs"]) for row in chosen), 3
        ),
        "train_s": round(mean(float(row["train_s"]) for row in chosen), 2),
    }


def _print(setting: str, rows: list[dict], graph: str, num_parts: int, num_seeds: int) -> None:
    table = Table(title=f"{graph}, {num_parts} parts, {mean_of(num_seeds)}", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=max(Console().width, 120)).print(table)


def _plot(path: Path, result: dict[str, list[dict]], graph: str, num_parts: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = result["interval"]
    left.plot([row["interval"] for row in rows], [row["test_acc"] for row in rows], "o-", color="tab:blue")
    left.set(
        xscale="log", xlabel="epochs between averages", ylabel="test accuracy, %", title=f"{graph}, {num_parts} parts"
    )
    left.set_xticks([row["interval"] for row in rows], [str(row["interval"]) for row in rows])
    left.minorticks_off()
    time = left.twinx()
    time.plot([row["interval"] for row in rows], [row["average_ms_per_epoch"] for row in rows], "s--", color="tab:red")
    time.set_ylabel("synchronisation, ms an epoch", color="tab:red")
    rows = result["halo_hops"]
    accuracies = [row["test_acc"] for row in rows]
    right.plot([row["halo_hops"] for row in rows], accuracies, "o-", color="tab:blue")
    # At least two points high: less is noise between seeds, and would fill the picture.
    middle, half = (min(accuracies) + max(accuracies)) / 2, max(1.0, 0.6 * (max(accuracies) - min(accuracies)))
    right.set_ylim(middle - half, middle + half)
    right.set(xlabel="halo hops (0: each cross edge in one part)", ylabel="test accuracy, %", title="halo")
    right.set_xticks([row["halo_hops"] for row in rows])
    figure.savefig(path, dpi=120)
