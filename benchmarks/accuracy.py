"""CATGNN's table: test accuracy of training on parts, compared with the same model trained on one part."""

from dataclasses import dataclass
from itertools import product
from statistics import pstdev

from .experiment import run_rows
from .pinned import pinned
from .present import average, grouped, mean_of, plain_columns, show
from .runner import Runner, benchmark, check_names, write_csv

PRESETS = {
    "gcn": ["model=gcn", "sampler=full_neighbor"],
    "gat": ["model=gat", "sampler=full_neighbor"],
    "graphsage": ["model=graphsage", "sampler=neighbor"],
}


@dataclass(frozen=True)
class AccuracyBench:
    """Train every graph, model and number of parts, each compared with central training (1 part, 1 process).

    The settings are the paper's, whatever the defaults are: SPRING, models averaged every epoch by their training
    nodes, 2 layers of 256, Adam at 0.01, batches of 512. Writes `rows.csv` (one row per run), `configs/` (the whole
    config of each), `accuracy.csv` (means over seeds) and the runs.

    Attributes:
        graphs: Names that `load_npz` knows.
        models: Any of gcn, gat (both with full neighbourhoods) and graphsage (fan-outs 25, 10).
        parts: Numbers of parts.
        devices: Number of processes that train the parts.
        max_epochs, patience: Largest number of epochs, and patience of early stopping on the validation accuracy; None:
            all epochs are trained, as in the paper. The best checkpoint is tested.

    Source: Huang et al., SDT-GNN and CATGNN.
    """

    graphs: list[str]
    models: list[str]
    parts: list[int]
    seeds: list[int]
    devices: int = 2
    max_epochs: int = 100
    patience: int | None = None
    overrides: list[str] | None = None

    def __post_init__(self):
        check_names("models", self.models, PRESETS)

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, model and number of parts: accuracies in percent, their difference in points."""
        cases = [
            (
                {"graph": graph, "model": model, "parts": num_parts, "seed": seed},
                self._words(graph, model, num_parts, seed),
            )
            for seed, graph, model, num_parts in product(self.seeds, self.graphs, self.models, (1, *self.parts))
        ]
        found, means = grouped(run_rows(runner, cases), "graph", "model", "parts"), []
        for graph, model, num_parts in product(self.graphs, self.models, self.parts):
            sides = {"central": found.get((graph, model, 1)), "parted": found.get((graph, model, num_parts))}
            if all(sides.values()):
                row = {"graph": graph, "model": model, "parts": num_parts}
                for side, runs in sides.items():
                    row[side] = average(runs, "test_acc", 2, factor=100)
                    row[f"{side}_std"] = round(pstdev(100 * run["test_acc"] for run in runs), 2)
                means.append(row | {"difference": round(row["parted"] - row["central"], 2)})
        write_csv(runner.folder / "accuracy.csv", means)
        show(means, plain_columns(means, ("graph", "model")), f"test accuracy, %, {mean_of(len(self.seeds))}")
        return means

    def _words(self, graph: str, model: str, num_parts: int, seed: int) -> list[str]:
        own = [
            f"dataset.name={graph}",
            *PRESETS[model],
            f"num_parts={num_parts}",
            f"trainer.devices={1 if num_parts == 1 else self.devices}",
            f"seed={seed}",
            f"name=accuracy-{graph}",
            f"trainer.max_epochs={self.max_epochs}",
        ]
        if self.patience is not None:
            own += ["callbacks=early_stopping", f"callbacks.early_stopping.patience={self.patience}"]
        return pinned("sdt_gnn", [*own, *(self.overrides or [])])


run = benchmark(AccuracyBench)
