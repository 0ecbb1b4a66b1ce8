"""Whole training runs as the rows of a benchmark.

Rows are appended as they finish: a benchmark that was killed and is typed again with the same `hydra.run.dir=` goes on
at the first row that is missing.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from ..cli.compose import compose_config
from ..cli.train import train
from ..events import read_log
from ..rng import fold
from .results import append_row, read_rows


def run_rows(
    output_dir: str | os.PathLike,
    cases: Iterable[tuple[dict, list[str]]],
    log: str = "rows.csv",
    measure: Callable[[Path], dict] | None = None,
    run: Callable[[Path, dict, list[str], Callable | None], dict] | None = None,
) -> list[dict]:
    """Train each case once and return its row.

    Args:
        output_dir: folder of the benchmark; `log` in it is read first, so that finished cases are not run again.
        cases: (what the row says of the case, overrides of `train`).
        log: name of the CSV that rows are appended to.
        measure: run folder to further fields of its row.
        run: (output_dir, case, overrides, measure) to the row of a case; None: a run of `train`.

    Returns:
        One dict a case: the case's own fields, `test_acc`, `best_val_acc`, `epochs`, `train_s`, `average_s`.
    """
    path = Path(output_dir) / log
    done = read_rows(path)
    rows = []
    for case, overrides in cases:
        # A row stands for all its settings: other epochs or another patience are another row; the folder is not one.
        settings = repr(overrides).replace(str(output_dir), "")
        case = {**case, "settings": f"{fold(*settings.encode()) >> 32:08x}"}
        key = {name: str(value) for name, value in case.items()}
        row = next((old for old in done if all(old.get(name) == value for name, value in key.items())), None)
        if row is None:
            row = (run or _train_case)(Path(output_dir), case, overrides, measure)
            append_row(path, row)
            Console().print("  ".join(f"{name}={value}" for name, value in row.items()))
        rows.append(row)
    return rows


def _train_case(output_dir: Path, case: dict, overrides: list[str], measure: Callable[[Path], dict] | None) -> dict:
    folder = output_dir / "runs" / f"{fold(*repr(case).encode()) >> 32:08x}"
    shutil.rmtree(folder, ignore_errors=True)  # a killed run's events would be counted again
    start = time.perf_counter()
    config = compose_config("train", [*overrides, "++trainer.enable_progress_bar=false"])
    summary = train(config, folder)
    events = read_log(folder / "events.jsonl")
    averages = [event for event in events if event["event"] == "average" and event["rank"] == 0]
    stages = {row["stage"]: row["seconds"] for row in summary["stages"]}
    facts = summary["facts"]
    return {
        **case,
        "test_acc": facts.get("test_acc"),
        "best_val_acc": facts.get("best val_acc"),
        "epochs": facts.get("epochs"),
        "train_s": round(stages.get("train", 0.0), 2),
        "average_s": round(sum(event["seconds"] for event in averages if event["purpose"] == "round"), 4),
        "evaluation_average_s": round(sum(e["seconds"] for e in averages if e["purpose"] == "evaluation"), 4),
        "averages": len([event for event in averages if event["purpose"] == "round"]),
        "total_s": round(time.perf_counter() - start, 2),
        **(measure(folder) if measure else {}),
    }
