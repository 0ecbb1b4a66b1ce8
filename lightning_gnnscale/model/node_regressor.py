"""The Lightning module that predicts numbers of nodes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, Metric

from ..errors import StrategyError, check_count, short
from ..traits import BackboneTraits
from .backbone_module import MAKE_OPTIMIZER, MAKE_SCHEDULER
from .node_classifier import NodeModule
from .node_inputs import NodeInputs

LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss}


class NodeRegressor(NodeModule):
    """Predict one or more numbers of each node.

    A training batch is a `MiniBatch`, or the `FullGraphBatch` of a block; the loss is the mean over the known targets
    of its seeds that are in the train mask. An evaluation batch is an `EvaluationShare` (exact, layer by layer over the
    full graph, each node once over all ranks), a `MiniBatch` (its seeds, from the sampled neighbours) or a
    `FullGraphBatch`. Logged: `train_loss`, and for val and test `*_loss`, `*_mae` and `*_rmse`, over all known targets
    alike. Targets are (num_nodes,) or (num_nodes, num_targets) floating; NaN = unknown.

    Args:
        backbone: As for `NodeClassifier`.
        lr, weight_decay: Learning rate and weight decay of Adam, used if no optimizer is given.
        num_targets: Numbers a node; None: the backbone's `out_channels`.
        loss: "mse", "l1", or a callable (outputs, targets) -> (num_rows, num_targets) losses, as those of torch with
            reduction="none". Where a target is unknown it is given the output, and its loss is left out.
        optimizer, scheduler, inputs: As for `NodeClassifier`.

    Raises:
        ValueError: num_targets is neither given nor the backbone's; an unknown loss.
    """

    def __init__(
        self,
        backbone: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        num_targets: int | None = None,
        loss: str | Callable[[Tensor, Tensor], Tensor] = "mse",
        optimizer: MAKE_OPTIMIZER | None = None,
        scheduler: MAKE_SCHEDULER | None = None,
        inputs: NodeInputs | None = None,
    ):
        lr, weight_decay = float(lr), float(weight_decay)  # checkpoints hold no numpy numbers
        super().__init__(backbone, lr, weight_decay, optimizer, scheduler, inputs)
        if num_targets is not None:
            check_count("num_targets", num_targets)
        num_targets = num_targets or BackboneTraits(backbone).out_channels
        if num_targets is None:
            raise ValueError("num_targets must be given: the backbone has no out_channels to take it from")
        num_targets = int(num_targets)
        if not callable(loss) and loss not in LOSSES:
            raise ValueError(f"loss must be a callable or one of {list(LOSSES)}, got {short(loss)}")
        self.save_hyperparameters(ignore=["backbone", "optimizer", "scheduler", "loss", "inputs"])
        self.num_targets = self.channels = num_targets
        self.loss = loss
        self.scores = nn.ModuleDict({split: self._scores() for split in ("val", "test")})
        self.losses = nn.ModuleDict({split: MeanMetric() for split in ("val", "test")})

    def saved_arguments(self) -> dict[str, Any]:
        """Return the loss, where it has a name."""
        return {} if callable(self.loss) else {"loss": self.loss}

    def read_labels(self, labels: Any) -> Tensor:
        values = torch.as_tensor(labels)
        if not values.is_floating_point():
            raise StrategyError(
                f"NodeRegressor predicts floating targets, NaN = unknown, but labels are {values.dtype}: write the "
                "store with regression=True"
            )
        values = values.unsqueeze(1) if values.dim() == 1 else values
        if values.shape[1] != self.num_targets:
            raise StrategyError(
                f"NodeRegressor predicts {self.num_targets} targets a node, but labels have {values.shape[1]}: say "
                f"out_channels={values.shape[1]}"
            )
        return values

    def unknown(self, labels: Tensor) -> Tensor:
        return torch.full_like(labels, torch.nan)

    def metrics(self, split: str) -> dict[str, Metric]:
        return dict(self.scores[split].items())

    def add_scores(self, split: str, outputs: Tensor, labels: Tensor) -> None:
        known = ~labels.isnan()
        for metric in self.scores[split].values():
            metric.update(outputs[known], labels[known].to(outputs.dtype))

    def row_losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        known = ~labels.isnan()
        targets = torch.where(known, labels.to(outputs.dtype), outputs.detach())  # NaN would be in the gradient
        if callable(self.loss):
            losses = self.loss(outputs, targets)
            if losses.shape != targets.shape:
                raise ValueError(
                    f"model.loss must return a loss a target, of shape {tuple(targets.shape)}, got "
                    f'{tuple(losses.shape)}: a loss of torch does so with reduction="none"'
                )
        else:
            losses = LOSSES[self.loss](outputs, targets, reduction="none")
        return torch.where(known, losses, torch.zeros_like(losses)).sum(dim=-1), known.sum(dim=-1)

    def decide(self, outputs: Tensor) -> Tensor:
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs  # which numpy does not know

    def _scores(self) -> nn.ModuleDict:
        return nn.ModuleDict({"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)})
