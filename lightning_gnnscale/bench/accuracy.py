"""Test accuracy of training on parts, by default as by any overrides, beside the same model trained on one part."""

import os
from pathlib import Path
from statistics import pstdev

from .experiment import run_rows
from .present import average, grouped, mean_of, plain_columns, table, tell
from .runner import Runner, write_csv

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
    minutes: float | None = None,
    again: str = "none",
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
        minutes, again: See `Runner`.

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
    with Runner(output_dir, minutes, again) as runner:
        found = grouped(run_rows(runner, cases), "graph", "model", "parts")
        wanted = [(graph, model, num_parts) for graph in graphs for model in models for num_parts in parts]
        means = [_compare(key, found) for key in wanted if {key, (*key[:2], 1)} <= found.keys()]
        write_csv(Path(output_dir) / "accuracy.csv", means)
        tell(table(means, plain_columns(means, ("graph", "model")), f"test accuracy, %, {mean_of(len(seeds))}"))
    return means


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


def _compare(key: tuple, found: dict[tuple, list[dict]]) -> dict:
    row = dict(zip(("graph", "model", "parts"), key, strict=True))
    for side, runs in (("central", found[(*key[:2], 1)]), ("parted", found[key])):
        row[side] = average(runs, "test_acc", 2, factor=100)
        row[f"{side}_std"] = round(pstdev(100 * run["test_acc"] for run in runs), 2)
    return row | {"difference": round(row["parted"] - row["central"], 2)}
