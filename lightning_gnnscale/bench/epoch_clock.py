"""When every training epoch starts, and its seconds without its validation."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from ..events import record


class EpochClock(Callback):
    """Write events: `epoch_start`, and `epoch` with the seconds that this process trained, averages included."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        record("epoch_start", epoch=trainer.current_epoch, rank=trainer.global_rank)
        self._seconds, self._since = 0.0, time.perf_counter()

    def on_validation_start(self, *_: Any) -> None:
        self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        seconds = self._seconds + time.perf_counter() - self._since
        record("epoch", epoch=trainer.current_epoch, rank=trainer.global_rank, seconds=seconds)
