"""No exchange while training, the exact one while evaluating."""

import torch
from torch import Tensor

from .layer_exchange import LayerExchange, RowTransfer
from .policy import ExchangePlan
from .route import Blocks
from .run import ExchangeRun


class LocalRows(ExchangeRun):
    """A run in which arcs between processes are dropped while training.

    Args:
        blocks: of this process.
        layers: the model's exchange layers.
        device: of the model.
    """

    def __init__(self, blocks: Blocks, layers: list, device: torch.device):
        super().__init__(ExchangePlan(), blocks, layers, [False] * len(layers), device)
        for module in layers:
            module.exchange = EvaluationOnly(module.exchange)


class EvaluationOnly:
    """An exchange that a layer asks outside of training alone.

    Args:
        exact: what it then asks.
    """

    local_only = True
    pulls = False

    def __init__(self, exact: LayerExchange):
        self._exact = exact

    def send(self, rows: Tensor, training: bool) -> RowTransfer:
        return self._exact.send(rows, False)
