"""`elastic=true`: runs whose processes torchrun starts again, on what is left, go on from their last checkpoint."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, open_dict

from ..datamodule.stored_graph import policy_of
from ..errors import check_count
from .errors import UsageError
from .ranks import started_from_outside
from .run_paths import CHECKPOINTS, last_checkpoint

_NO_ID = ("", "none", "default")  # what torchrun calls runs that nobody has named


def is_elastic(words: list[str]) -> bool:
    """Whether the words of a command ask for an elastic run."""
    given = [word.partition("=")[2] for word in words if word.partition("=")[0].lstrip("+") == "elastic"]
    return bool(given) and given[-1].lower() in ("true", "yes", "on", "1")


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
            "--max-restarts=10 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=ID --no-python gnnscale train"
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
    weights = policy_of(trainer)
    if weights is None or not weights.equal_batches:
        raise UsageError(
            f"elastic=true goes on within an epoch on other processes, and {type(weights).__name__} does not: say "
            "strategy/weights=gradient_averaging, or resume= from the end of an epoch"
        )
    saving = ModelCheckpoint(
        folder / CHECKPOINTS, "last-within", every_n_train_steps=steps, enable_version_counter=False
    )
    trainer.callbacks.append(saving)
