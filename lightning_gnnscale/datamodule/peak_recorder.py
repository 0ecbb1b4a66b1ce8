"""What each training process really held: the figure that stands beside the planner's."""

import lightning as L
import torch

from ..events import record
from ..memory import MemoryPeak, process_bytes


class PeakRecorder(L.Callback):
    """Record the event `training_peak` on every rank at the end of training.

    `peak_bytes` is the device's peak of allocated memory on CUDA; on a CPU the peak of the process (anonymous and
    shared memory, sampled 20 times a second) beyond what it held at the start.
    """

    def __init__(self):
        self._peak: MemoryPeak | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        else:
            self._peak = MemoryPeak(measure=process_bytes).__enter__()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._peak is None:
            peak = torch.cuda.max_memory_allocated(pl_module.device)
        else:
            self._peak.__exit__()
            peak = self._peak.peak_bytes - self._peak.start_bytes
            self._peak = None
        record("training_peak", rank=trainer.global_rank, device=pl_module.device.type, peak_bytes=peak)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._peak is not None:
            self._peak.__exit__()
            self._peak = None
