"""Test accuracy of training on parts, by default as by any overrides, beside the same model trained on one part."""

import os
from pathlib import Path
from statistics import mean, pstdev

from rich.console import Console
from rich.table import Table

from .experiment import run_rows
from .results import mean_of, write_csv

PRESETS = {
    "gcn": ["model=gcn", "sampler=full_neighbor"],
    "gat": ["model=gat", "sampler=full_neighbor"],
    "graphsage": ["model=graphsage", "sampler=neighbor"],
}


def run(
    output_dir: str | os.PathLike,
    graphs: list[str],
    models: list[str],
    parts: list[int],
    seeds: list[int],
    devices: int = 2,
    max_epochs: int = 100,
    patience: int = 10,
    overrides: list[str] | None = None,
) -> list[dict]:
    """Train every graph, model and number of parts, each beside central training (1 part, 1 process).

    Args:
        output_dir: Folder for `rows.csv` (one row per run), `accuracy.csv` (means over seeds) and the runs.
        graphs: Names that `load_npz` knows.
        models: Any of gcn, gat (both with full neighbourhoods) and graphsage (fan-outs 25, 10).
        parts: Numbers of parts.
        seeds: Seeds of the training runs.
        devices: Number of processes that train the parts.
        max_epochs, patience: Largest number of epochs, and patience of early stopping on the validation accuracy; the
            best checkpoint is tested.
        overrides: Further overrides of `train`, for both sides.

    Returns:
        One row per graph, model and number of parts: accuracies in percent, and their difference in points.
    """
    unknown = sorted(set(models) - set(PRESETS))
    if unknown:
        raise ValueError(f"bench.models must be of {', '.join(PRESETS)}; got {', '.join(unknown)}")
    common = [f"trainer.max_epochs={max_epochs}", f"++callbacks.early_stopping.patience={patience}", *(overrides or [])]
    cases = [
        (
            {"graph": graph, "model": model, "parts": num_parts, "seed": seed},
            _overrides(graph, model, num_parts, seed, devices, common),
        )
        for seed in seeds
        for graph in graphs
        for model in models
        for num_parts in (1, *parts)
    ]
    rows = run_rows(output_dir, cases)
    table = [_compare(rows, graph, model, p) for graph in graphs for model in models for p in parts]
    write_csv(Path(output_dir) / "accuracy.csv", table)
    _print(table, len(seeds))
    return table


def _overrides(graph: str, model: str, num_parts: int, seed: int, devices: int, common: list[str]) -> list[str]:
    return [
        "dataset=npz",
        f"dataset.name={graph}",
        "callbacks=early_stopping",
        *PRESETS[model],
        f"num_parts={num_parts}",
        f"trainer.devices={1 if num_parts == 1 else devices}",
        f"seed={seed}",
        f"name=accuracy-{graph}",
        *common,
    ]


def _compare(rows: list[dict], graph: str, model: str, num_parts: int) -> dict:
    def accuracies(parts):
        return [
            100 * float(row["test_acc"])
            for row in rows
            if (row["graph"], row["model"], int(row["parts"])) == (graph, model, parts)
        ]

    central, parted = accuracies(1), accuracies(num_parts)
    return {
        "graph": graph,
        "model": model,
        "parts": num_parts,
        "central": round(mean(central), 2),
        "central_std": round(pstdev(central), 2),
        "parted": round(mean(parted), 2),
        "parted_std": round(pstdev(parted), 2),
        "difference": round(mean(parted) - mean(central), 2),
    }


def _print(rows: list[dict], num_seeds: int) -> None:
    table = Table(title=f"test accuracy, %, {mean_of(num_seeds)}", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("graph", "model") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=max(Console().width, 120)).print(table)
