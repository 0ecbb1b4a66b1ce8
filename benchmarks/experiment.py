"""Whole training runs as the rows of a benchmark."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from omegaconf import OmegaConf

from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.train import train
from lightning_gnnscale.events import read_log
from lightning_gnnscale.rng import fold

from .runner import Case, Runner, digest_of_text


def run_rows(
    runner: Runner,
    cases: Iterable[tuple[dict, list[str]]],
    log: str = "rows.csv",
    measure: Callable[[Path], dict] | None = None,
    train_case: Callable[[Path, list[str]], dict] | None = None,
) -> list[dict]:
    """Train each case once and return its row: its key, `test_acc`, `best_val_acc`, `epochs`, `train_s`, ...

    Args:
        runner, log: See `Runner.rows`.
        cases: What the row says of the case, and its overrides of `train`. A row is of the whole config that they
            compose to: other epochs, or another default of a setting, are another row; another folder is not. The
            config is kept beside the rows, as `configs/SETTINGS.yaml` of the row's column `settings`.
        measure: Maps a run's folder to further columns of its row.
        train_case: Maps a run's folder and its overrides to the columns of its row; None: a run of `train`.
    """

    def made() -> Iterator[Case]:
        for case, overrides in cases:
            text = OmegaConf.to_yaml(compose_config("train", overrides)).replace(str(runner.folder), ".")
            settings = digest_of_text(text)
            kept = runner.folder / "configs" / f"{settings}.yaml"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(text)
            case = {**case, "settings": settings}
            folder = runner.folder / "runs" / f"{fold(*repr(case).encode()) >> 32:08x}"
            yield Case(case, lambda folder=folder, overrides=overrides: run(folder, overrides))

    def run(folder: Path, overrides: list[str]) -> dict:
        found = (train_case or _train_case)(folder, overrides)
        return {**found, **(measure(folder) if measure else {})}

    return runner.rows(made(), log)


def _train_case(folder: Path, overrides: list[str]) -> dict:
    shutil.rmtree(folder, ignore_errors=True)  # a killed run's events would be counted again
    start = time.perf_counter()
    config = compose_config("train", [*overrides, "++trainer.enable_progress_bar=false"])
    summary = train(config, folder)
    averages = [e for e in read_log(folder / "events.jsonl") if e["event"] == "average" and e["rank"] == 0]
    stages = {row["stage"]: row["seconds"] for row in summary["stages"]}
    metrics = summary["metrics"]
    return {
        **{name: f"{metrics[name]:.4f}" if name in metrics else None for name in ("test_acc", "best_val_acc")},
        "epochs": summary["epochs"],
        "train_s": round(stages.get("train", 0.0), 2),
        "average_s": round(sum(event["seconds"] for event in averages if event["purpose"] == "round"), 4),
        "evaluation_average_s": round(sum(e["seconds"] for e in averages if e["purpose"] == "evaluation"), 4),
        "averages": len([event for event in averages if event["purpose"] == "round"]),
        "total_s": round(time.perf_counter() - start, 2),
    }
