"""SDT-GNN's case studies: the averaging interval, and the hops of halo."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from .experiment import run_rows
from .pinned import pinned
from .present import average, grouped, lines, mean_of, panels, plain_columns, save, show, ticks
from .runner import Runner, benchmark, write_csv

KEYS = {"interval": "strategy.weights.every_n_epochs", "halo_hops": "datamodule.halo_hops"}


@dataclass(frozen=True)
class AveragingBench:
    """Train with each averaging interval, and with each number of halo hops, in the paper's settings; plot both.

    Writes `*_rows.csv` (one row per run), `interval.csv`, `halo_hops.csv` (means over seeds), `averaging.png` and the
    runs.

    Attributes:
        graph: A name that `load_npz` knows.
        num_parts, devices: Number of parts, and of processes.
        intervals: Epochs between two averagings, `every_n_epochs`.
        halo_hops: Numbers of halo hops, 0 to 3; 0 gives each cross edge to one of its parts.
        max_epochs: Epochs of every run; there is no early stopping.

    Source: SDT-GNN, case studies of the averaging interval and of halo nodes.
    """

    graph: str = "amazon_computers"
    num_parts: int = 8
    devices: int = 2
    intervals: list[int] = (1, 2, 5, 10, 20, 50)
    halo_hops: list[int] = (0, 1, 2, 3)
    seeds: list[int] = (0,)
    max_epochs: int = 50
    overrides: list[str] | None = None

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"interval": rows, "halo_hops": rows} of means over seeds."""
        result, title = {}, f"{self.graph}, {self.num_parts} parts"
        for setting, values in (("interval", self.intervals), ("halo_hops", self.halo_hops)):
            cases = [
                ({setting: value, "seed": seed}, self._words(setting, value, seed))
                for value, seed in product(values, self.seeds)
            ]
            runs = grouped(run_rows(runner, cases, f"{setting}_rows.csv"), setting)
            result[setting] = rows = [{setting: value, **_means(own)} for (value,), own in runs.items()]
            write_csv(runner.folder / f"{setting}.csv", rows)
            show(rows, plain_columns(rows), f"{title}, {mean_of(len(self.seeds))}")
        _plot(runner.folder / "averaging.png", result, title)
        return result

    def _words(self, setting: str, value: int, seed: int) -> list[str]:
        own = [
            f"dataset.name={self.graph}",
            f"num_parts={self.num_parts}",
            f"trainer.devices={self.devices}",
            f"trainer.max_epochs={self.max_epochs}",
            f"name=averaging-{self.graph}",
            *(self.overrides or []),
        ]
        return pinned("sdt_gnn", [*own, f"{KEYS[setting]}={value}", f"seed={seed}"])


run = benchmark(AveragingBench)


def _means(runs: list[dict]) -> dict:
    waits = {f"{name}_ms_per_epoch": f"{name}_s" for name in ("average", "evaluation_average")}
    an_epoch = [{name: run[column] / run["epochs"] for name, column in waits.items()} for run in runs]
    return {
        "test_acc": average(runs, "test_acc", 2, factor=100),
        **{name: average(an_epoch, name, 3, factor=1000) for name in waits},
        "train_s": average(runs, "train_s", 2),
    }


def _plot(path: Path, result: dict[str, list[dict]], title: str) -> None:
    figure, found = panels([title, "halo"], size=(5, 4), beside=0)
    left, right = found.values()
    left.set_xscale("log")
    for axes, (setting, rows) in zip(found.values(), result.items(), strict=True):
        lines(axes, rows, setting, "test_acc", "o-", color="tab:blue")
        axes.set_ylabel("test accuracy, %")
        ticks(axes, (row[setting] for row in rows))
    left.set_xlabel("epochs between averages")
    time = left.twinx()
    lines(time, result["interval"], "interval", "average_ms_per_epoch", "s--", color="tab:red")
    time.set_ylabel("synchronisation, ms an epoch", color="tab:red")
    accuracies = [row["test_acc"] for row in result["halo_hops"]]
    if accuracies:  # at least two points high: less is noise between seeds, and would fill the picture
        middle, half = (min(accuracies) + max(accuracies)) / 2, max(1.0, 0.6 * (max(accuracies) - min(accuracies)))
        right.set_ylim(middle - half, middle + half)
    right.set_xlabel("halo hops (0: each cross edge in one part)")
    save(figure, path)
