"""The one callback of the strategy: Lightning's strategies have no hooks at the end of a batch."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from . import averaging
from .weights import WeightPolicy


class RoundCallback(Callback):
    """Tells the policies of the moments that only callbacks see.

    It stands first in `trainer.callbacks`, so that loggers, checkpoints and early stopping find the averaged weights.

    Args:
        weights: the policy of the strategy that inserted this callback.
    """

    def __init__(self, weights: WeightPolicy) -> None:
        self._weights = weights

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Where the model has asked for `estimated_stepping_batches`, Lightning has made the loader too early to give it
        # the position of a checkpoint within an epoch; where it has not, nothing is left to load.
        trainer.fit_loop._load_combined_loader_states()
        self._weights.on_train_start()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._weights.before_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Validation runs before on_train_epoch_end: this is the last moment before it.
        if trainer.is_last_batch:
            metrics = self._weights.end_epoch()
            exchange = trainer.strategy.exchange_run
            if exchange is not None:
                metrics |= exchange.end_epoch(metrics.get("average_ms", 0.0) / 1e3)
            _share(metrics, trainer, trainer.current_epoch)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._weights.publish()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._weights.publish()
        exchange = trainer.strategy.exchange_run
        if exchange is not None:
            _share(exchange.end_training(), trainer, exchange.epoch)


def _share(metrics: dict[str, float], trainer: pl.Trainer, epoch: int) -> None:
    """Give callbacks and loggers the largest value of any rank, as `log` would, which takes a millisecond for each."""
    # float64: a count of bytes is no float32.
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=trainer.strategy.root_device)
    averaging.all_reduce(values, "max", "comparing the metrics of an epoch")
    shared = dict(zip(metrics, values.cpu(), strict=True))
    trainer.callback_metrics.update(shared)
    trainer.logged_metrics.update(shared)
    scalars = {"epoch": epoch, **{name: value.item() for name, value in shared.items()}}
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=max(0, trainer.global_step - 1))  # the step that Lightning logs epochs at
