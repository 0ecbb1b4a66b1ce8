"""What each process really held while it trained and evaluated: the figures that stand beside the planner's."""

import lightning as L
import torch

from ..events import record
from ..memory import MemoryPeak, process_bytes


class PeakRecorder(L.Callback):
    """Record the events `training_peak` and `evaluation_peak` on every rank, at the end of training and of testing.

    `peak_bytes` is the device's peak of allocated memory on CUDA; on a CPU the peak of the process (anonymous and
    shared memory, sampled 20 times a second) beyond `start_bytes`, which it held at the start.
    """

    def __init__(self):
        self._peak: MemoryPeak | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end("training_peak", trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(pl_module)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end("evaluation_peak", trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._peak is not None:
            self._peak.__exit__()
            self._peak = None

    def _begin(self, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        else:
            self._peak = MemoryPeak(measure=process_bytes).__enter__()

    def _end(self, event: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = 0
        if self._peak is None:
            peak = torch.cuda.max_memory_allocated(pl_module.device)
        else:
            self._peak.__exit__()
            start = self._peak.start_bytes
            peak = self._peak.peak_bytes - start
            self._peak = None
        device = pl_module.device.type
        record(event, rank=trainer.global_rank, device=device, peak_bytes=peak, start_bytes=start)
