"""`elastic=true`: runs whose processes torchrun starts again, on what is left, go on from their last checkpoint."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, open_dict

from ..datamodule.stored_graph import policy_of
from ..errors import check_count
from .errors import UsageError
from .ranks import started_from_outside
from .run_paths import CHECKPOINTS, last_checkpoint

_NO_ID = ("", "none", "default")  # what torchrun calls runs that nobody has named


def take_what_is_there(config: DictConfig, folder: Path) -> None:
    """Set the processes to those that torchrun has started, and `resume` to the run's last checkpoint, if any.

    Args:
        config: Config composed from `train.yaml`, changed in place.
        folder: Folder of the run, the same at each start.

    Raises:
        UsageError: torchrun has not started this process, or machines have different numbers of processes.
    """
    if not started_from_outside() or "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UsageError(
            "elastic=true: torchrun starts processes again, and has not started this one: say torchrun --nnodes=1:4 "
            "--max-restarts=10 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=ID --no-python gnnscale train, "
            "or elastic=false"
        )
    if os.environ["TORCHELASTIC_RUN_ID"] in _NO_ID:
        raise UsageError("elastic=true: a run is found again by its name: say --rdzv-id=ID to torchrun")
    local, world_size = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if world_size % local:
        raise UsageError(
            f"elastic=true: {world_size} processes, of which this machine has {local}: start equally many on each "
            "(--nproc-per-node)"
        )
    check_count("save_steps", config.save_steps)
    with open_dict(config.trainer):
        config.trainer.devices, config.trainer.num_nodes = local, world_size // local
    if any((folder / CHECKPOINTS).glob("*.ckpt")):
        config.resume = last_checkpoint(str(folder))


def save_within_epochs(trainer: Any, folder: Path, steps: int) -> None:
    """Let a Trainer save every so many steps.

    Raises:
        UsageError: the weight policy goes on within an epoch on as many processes only.
    """
    check_policy(policy_of(trainer))
    trainer.callbacks.append(StepCheckpoint(folder / CHECKPOINTS / "last-within.ckpt", steps))


def check_policy(weights: Any) -> None:
    """Refuse weights that go on within an epoch on as many processes only.

    Raises:
        UsageError: weights is another policy than gradient averaging.
    """
    if weights is None or not weights.equal_batches:
        raise UsageError(
            f"elastic=true goes on within an epoch on other processes, and {type(weights).__name__} does not: say "
            "strategy/weights=gradient_averaging, or resume= from the end of an epoch"
        )


def planned(config: DictConfig, weights: Any) -> str:
    """Return what an elastic run will do, on one line; raises as `check_policy`, and ValueError for save_steps."""
    check_policy(weights)
    check_count("save_steps", config.save_steps)
    ranks = config.strategy.get("logical_ranks")
    most = "as many as it begins with (say strategy.logical_ranks)" if ranks is None else f"{ranks} at most"
    return f"processes that torchrun starts, {most}; a checkpoint every {config.save_steps} steps"


class StepCheckpoint(Callback):
    """Saves every so many optimizer steps; after the last step of an epoch only once all else of the epoch is done.

    A run that goes on from a checkpoint with the last batch of an epoch would leave out the epoch's validation.

    Args:
        path: File of the checkpoint, which is replaced.
        steps: Steps from one to the next, >= 1.
    """

    def __init__(self, path: Path, steps: int):
        self.path, self.steps = path, steps
        self._saved = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from the step that the run goes on from."""
        self._saved = trainer.global_step // self.steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save within an epoch."""
        if not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save after an epoch."""
        self._save(trainer)

    def _save(self, trainer: Any) -> None:
        due = trainer.global_step // self.steps
        if due > self._saved:
            self._saved = due
            trainer.save_checkpoint(self.path)
