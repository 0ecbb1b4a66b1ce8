"""When every training epoch starts, its seconds without its validation, and the accuracy that it came to."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_gnnscale.events import record


class EpochClock(Callback):
    """Write events: `epoch_start`, and `epoch` with the seconds that this process trained, averages included.

    `cpu_s` are the seconds of all its threads; `val_acc` is there where the epoch was validated.
    """

    def __init__(self) -> None:
        self._spent, self._since = (0.0, 0.0), (0.0, 0.0)  # seconds, CPU seconds

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        record("epoch_start", epoch=trainer.current_epoch, rank=trainer.global_rank)
        self._spent = (0.0, 0.0)
        self._resume()

    def on_validation_start(self, *_: Any) -> None:
        self._pause()

    def on_validation_end(self, *_: Any) -> None:
        self._resume()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._pause()
        accuracy = trainer.callback_metrics.get("val_acc")
        reached = {} if accuracy is None else {"val_acc": float(accuracy)}
        ran = dict(zip(("seconds", "cpu_s"), self._spent, strict=True))
        record("epoch", epoch=trainer.current_epoch, rank=trainer.global_rank, **ran, **reached)

    def _pause(self) -> None:
        seconds, cpu_s = time.perf_counter() - self._since[0], time.process_time() - self._since[1]
        self._spent = (self._spent[0] + seconds, self._spent[1] + cpu_s)

    def _resume(self) -> None:
        self._since = (time.perf_counter(), time.process_time())
