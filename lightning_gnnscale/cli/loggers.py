"""Where a run logs: metrics.csv, and W&B, TensorBoard or MLflow beside it; they get the config and the results too."""

import csv
import inspect
import os
import secrets
import time
from pathlib import Path

from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from omegaconf import DictConfig

from ..report.terminal import print_line
from .errors import UsageError

METRICS = "metrics"


def make_loggers(chosen: DictConfig, folder: Path) -> list[Logger]:
    """Return a run's loggers: the CSV file of its folder, and those that are chosen, None for one that is left out.

    `save_dir` is the run's folder where it is null. UsageError: a package that a logger needs is not installed.
    """
    loggers: list[Logger] = [CSVLogger(folder, name=METRICS, version="")]
    for name, node in chosen.items():
        if node is None:
            continue
        target = get_object(node._target_)
        filled = {}
        if "save_dir" in inspect.signature(target).parameters and node.get("save_dir") is None:
            filled["save_dir"] = str(folder)
        # Processes for training and for evaluation each open the run with this id.
        if target is WandbLogger and node.get("id") is None:
            filled["id"] = secrets.token_hex(4)
        try:
            logger = instantiate(node, **filled)
            if target is MLFlowLogger:
                logger.run_id  # noqa: B018 (creates the run, which started processes then find)
            loggers.append(logger)
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, ImportError):
                raise UsageError(
                    f"logger={name} needs a package that is missing ({' '.join(str(cause).split())}): "
                    f"pip install 'lightning-gnnscale[{name}]'"
                ) from None
            raise
    return loggers


class EpochLines(Callback):
    """Print a line after each epoch of training: its number, loss, validation metrics and seconds."""

    def __init__(self):
        self._begin, self._validated = 0.0, False

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        """Note when the epoch began."""
        self._begin, self._validated = time.monotonic(), False

    def on_validation_end(self, trainer, pl_module) -> None:
        """Note that the validation metrics belong to this epoch."""
        self._validated = True

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        """Print the line, on rank 0."""
        metrics = trainer.callback_metrics  # read on every rank: they may still have to be averaged
        if not trainer.is_global_zero:
            return
        shown = {name: value for name, value in metrics.items() if name.startswith("val_") and self._validated}
        shown = {name: metrics[name] for name in ("train_loss",) if name in metrics} | shown
        last = trainer.max_epochs
        told = [f"{name} {float(value):.4f}" for name, value in shown.items()]
        told = ", ".join([*told, f"{time.monotonic() - self._begin:.1f} s"])
        print_line(f"epoch {trainer.current_epoch + 1}{f' of {last}' if last and last > 0 else ''}: {told}")


def log_results(loggers: list[Logger], metrics: dict[str, float], folder: Path) -> None:
    """Log the results of the evaluation after training, by name, at the last step; the first rank calls it."""
    metrics = {name: value for name, value in metrics.items() if not name.startswith("best_")}  # logged as they came
    if not metrics:
        return
    last = _append_row(folder / METRICS / "metrics.csv", metrics)
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            logger.log_metrics(metrics, step=None if last is None else last + 1)
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _append_row(path: Path, values: dict[str, float]) -> int | None:
    """Add a row to a CSV file that another process may have written, and return the step of the row before it.

    The file is complete at any time. None: the file does not exist or is empty.
    """
    if not path.is_file():
        return None
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        rows, names = list(reader), list(reader.fieldnames or ())
    if not rows:
        return None
    place = {name: rows[-1][name] for name in ("epoch", "step") if name in names}
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *(name for name in values if name not in names)])
        writer.writeheader()
        writer.writerows([*rows, place | values])
    os.replace(temporary, path)
    return int(place["step"]) if place.get("step") else None
