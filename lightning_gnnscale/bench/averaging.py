"""SDT-GNN's case studies: the averaging interval, and the hops of halo."""

import os
from pathlib import Path

from .experiment import run_rows
from .present import average, grouped, lines, mean_of, panels, plain_columns, save, table, tell, ticks
from .runner import Runner, write_csv


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
    minutes: float | None = None,
    again: str = "none",
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
        minutes, again: See `Runner`.

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
    studies = (
        ("interval", intervals, "strategy.weights.every_n_epochs"),
        ("halo_hops", halo_hops, "datamodule.halo_hops"),
    )
    result, title = {}, f"{graph}, {num_parts} parts"
    with Runner(output_dir, minutes, again) as runner:
        for setting, values, key in studies:
            cases = [
                ({setting: value, "seed": seed}, [*common, f"{key}={value}", f"seed={seed}"])
                for value in values
                for seed in seeds
            ]
            runs = grouped(run_rows(runner, cases, log=f"{setting}_rows.csv"), setting)
            result[setting] = rows = [{setting: value, **_means(own)} for (value,), own in runs.items()]
            write_csv(runner.folder / f"{setting}.csv", rows)
            tell(table(rows, plain_columns(rows), f"{title}, {mean_of(len(seeds))}"))
        _plot(runner.folder / "averaging.png", result, title)
    return result


def _means(runs: list[dict]) -> dict:
    waits = ("average_s", "evaluation_average_s")
    an_epoch = [{name: run[name] / run["epochs"] for name in waits} for run in runs]
    return {
        "test_acc": average(runs, "test_acc", 2, factor=100),
        "average_ms_per_epoch": average(an_epoch, "average_s", 3, factor=1000),
        "evaluation_average_ms_per_epoch": average(an_epoch, "evaluation_average_s", 3, factor=1000),
        "train_s": average(runs, "train_s", 2),
    }


def _plot(path: Path, result: dict[str, list[dict]], title: str) -> None:
    figure, found = panels([title, "halo"], size=(5, 4), beside=0)
    left, right = found.values()
    lines(left, result["interval"], "interval", "test_acc", "o-", color="tab:blue")
    left.set(xscale="log", xlabel="epochs between averages", ylabel="test accuracy, %")
    ticks(left, (row["interval"] for row in result["interval"]))
    time = left.twinx()
    lines(time, result["interval"], "interval", "average_ms_per_epoch", "s--", color="tab:red")
    time.set_ylabel("synchronisation, ms an epoch", color="tab:red")
    lines(right, result["halo_hops"], "halo_hops", "test_acc", "o-", color="tab:blue")
    accuracies = [row["test_acc"] for row in result["halo_hops"]]
    if accuracies:  # at least two points high: less is noise between seeds, and would fill the picture
        middle, half = (min(accuracies) + max(accuracies)) / 2, max(1.0, 0.6 * (max(accuracies) - min(accuracies)))
        right.set_ylim(middle - half, middle + half)
    right.set(xlabel="halo hops (0: each cross edge in one part)", ylabel="test accuracy, %")
    ticks(right, (row["halo_hops"] for row in result["halo_hops"]))
    save(figure, path)
