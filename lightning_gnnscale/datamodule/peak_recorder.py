"""What each training process really held: the figure that stands beside the planner's."""

import lightning as L
import torch

from ..events import record
from ..memory import process_bytes


class PeakRecorder(L.Callback):
    """Record the event `training_peak` on every rank at the end of training.

    `peak_bytes` is the device's peak of allocated memory on CUDA; on a CPU what the process came to hold (anonymous
    and shared memory, sampled after every epoch) beyond what it held at the start.
    """

    def __init__(self):
        self._start = self._peak = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self._start = self._peak = process_bytes()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._peak = max(self._peak, process_bytes())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        on_gpu = pl_module.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(pl_module.device) if on_gpu else self._peak - self._start
        record("training_peak", rank=trainer.global_rank, device=pl_module.device.type, peak_bytes=peak)
