"""Test accuracy at every validation, by which policies are compared; models are chosen by validation accuracy."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class ScoreTestNodes(Callback):
    """Log `test_beside_acc`, the accuracy on the test nodes, whenever the model is validated on the full graph."""

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        correct = outputs.argmax(-1) == batch.y
        chosen = batch.test_mask & (batch.y >= 0)
        counts = torch.stack([(correct & chosen).sum(), chosen.sum()]).double()
        counts = trainer.strategy.reduce(counts, reduce_op="sum")
        pl_module.log("test_beside_acc", counts[0] / counts[1].clamp(min=1), batch_size=1)
