"""What Lightning counts while it trains, where a policy takes steps that Lightning does not see."""

import lightning.pytorch as pl
import torch

from ..errors import StrategyError
from . import averaging


def count_steps(trainer: pl.Trainer, extra: int) -> None:
    """Add to this rank's `trainer.global_step`; `extra` may be negative."""
    if extra:
        total = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        total.ready += extra
        total.completed += extra


def agree_on_steps(trainer: pl.Trainer) -> None:
    """Let every rank count the steps of the busiest one.

    ModelCheckpoint compares global_step on every rank by itself: ranks that disagree would part there for ever.

    Raises:
        StrategyError: another process was lost.
    """
    step = torch.tensor([trainer.global_step], device=trainer.strategy.root_device)
    averaging.all_reduce(step, "max", "counting optimizer steps")
    count_steps(trainer, int(step) - trainer.global_step)


def count_missing_batch(trainer: pl.Trainer) -> None:
    """Count a None batch as one that was begun.

    Lightning does not, and then takes a checkpoint of its training batches for one from within a batch: the run that
    goes on from it would wait for a batch that there is not, and never see the end of its first epoch.
    """
    trainer.fit_loop.epoch_loop.batch_progress.increment_started()


def check_ranks(trainer: pl.Trainer, saved_ranks: int) -> None:
    """Refuse to go on within an epoch on another number of processes: their shares of it are others.

    Args:
        trainer: its loops are restored from the checkpoint.
        saved_ranks: processes that the checkpoint was saved by, >= 1.

    Raises:
        StrategyError: the message names both numbers.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    within_epoch = progress.current.ready > 0 and not progress.is_last_batch
    if within_epoch and saved_ranks != averaging.world_size():
        raise StrategyError(
            f"the checkpoint stands within an epoch of {saved_ranks} processes, this run has "
            f"{averaging.world_size()}: resume with as many as it was saved by, or from the end of an epoch"
        )
