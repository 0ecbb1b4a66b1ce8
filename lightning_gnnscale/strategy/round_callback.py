"""The one callback of the strategy: Lightning's strategies have no hooks at the end of a batch."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from .weights import WeightPolicy

if TYPE_CHECKING:
    from .exchange.run import ExchangeRun


class RoundCallback(Callback):
    """Tells the policies of the moments that only callbacks see.

    It stands first in `trainer.callbacks`, so that loggers, checkpoints and early stopping find the averaged weights.

    Args:
        weights: the policy of the strategy that inserted this callback.
        exchange: the run of its exchange, or None.
    """

    def __init__(self, weights: WeightPolicy, exchange: "ExchangeRun | None" = None) -> None:
        self._weights, self._exchange = weights, exchange

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._weights.on_train_start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Validation runs before on_train_epoch_end: this is the last moment before it.
        if trainer.is_last_batch:
            metrics = self._weights.end_epoch()
            if self._exchange is not None:
                metrics |= self._exchange.end_epoch()
            for name, value in metrics.items():
                pl_module.log(name, value, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, reduce_fx="max")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._weights.publish()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._weights.publish()
