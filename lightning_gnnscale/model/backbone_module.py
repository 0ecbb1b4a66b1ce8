"""What the Lightning modules share: a backbone run on batches, on rows and layer by layer, and its optimizer."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StrategyError
from .backbone import Backbone, check_edge_attr
from .inference import LayerwiseOutput, layerwise_inference
from .node_inputs import NodeInputs, TakesInputs
from .row_layers import prepared_rows
from .row_model import RowModel, RowPlan
from .row_trial import try_out

BATCH_ARGUMENTS = ("edge_weight", "degree", "indptr", "num_sampled_nodes", "edge_attr")
MAKE_OPTIMIZER = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MAKE_SCHEDULER = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class BackboneModule(TakesInputs):
    """Base of the Lightning modules.

    Args:
        backbone: A model of this package, or any module called as (x, edge_index). It is also given those of
            `edge_weight`, `edge_attr`, `degree`, `indptr` and `num_sampled_nodes` that its `forward` names; on the full
            graph, of `edge_weight` and `edge_attr`.
        lr, weight_decay: Learning rate and weight decay of Adam, used if no optimizer is given. As attributes they may
            be changed before training.
        optimizer: Callable parameters -> optimizer (a partial); None: Adam.
        scheduler: Callable optimizer -> learning-rate scheduler, stepped each epoch by `val_loss`; None: no scheduler.
        inputs: Rows by node, see `TakesInputs`; None: none.
    """

    def __init__(
        self,
        backbone: nn.Module,
        lr: float,
        weight_decay: float,
        optimizer: MAKE_OPTIMIZER | None,
        scheduler: MAKE_SCHEDULER | None,
        inputs: NodeInputs | None = None,
    ):
        super().__init__()
        self.inputs = inputs
        self.lr, self.weight_decay = lr, weight_decay
        self.backbone, self.make_optimizer, self.make_scheduler = backbone, optimizer, scheduler
        self._accepted = _accepted_arguments(backbone)
        # how a model of PyG's layers is run over the rows of one process; models of this package have their own way
        self.row_model = None if hasattr(backbone, "forward_rows") else RowModel(backbone)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log `train_loss`, by epoch: the mean over all ranks' seeds, or the sum of what are shares of one loss.

        Here and not in `training_step`, which a rank without a batch of its own leaves out: every rank must log it.
        """
        shares = getattr(batch, "loss_is_share", False)
        loss = (outputs or {}).get("loss")
        # Of counts Lightning takes the integer part of the mean over ranks: times their number it loses nothing.
        count = 0 if loss is None else self._num_losses(batch) * self.trainer.world_size
        # Lightning has divided it by the batches of a step.
        loss = torch.zeros((), device=self.device) if loss is None else loss * self.trainer.accumulate_grad_batches
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True,
                 reduce_fx="sum" if shares else "mean", batch_size=count)  # fmt: skip

    def forward(self, batch: Any) -> Tensor:
        """Return the outputs for a mini-batch, (num_rows, out_channels) with the seeds first."""
        if getattr(batch, "full_graph", False):
            return self._forward_rows(batch)
        x = self._features(batch)
        if isinstance(x, Tensor):
            x = x.to(next(self.backbone.parameters()).dtype)
        arguments = {name: getattr(batch, name, None) for name in self._accepted}
        if "edge_weight" in arguments:
            arguments["edge_weight"] = self._edge_weight(batch)
        elif getattr(batch, "edge_weight", None) is not None:
            raise StrategyError(
                f"{type(self.backbone).__name__}.forward takes no edge_weight, but the batches carry one: "
                "use another sampler, or let forward take edge_weight"
            )
        if getattr(batch, "edge_attr", None) is not None and not self.reads_edge_features:
            check_edge_attr(type(self.backbone).__name__, None, batch.edge_attr.shape[1])
        if "num_sampled_nodes" in arguments and arguments["num_sampled_nodes"] is None:
            arguments["num_sampled_nodes"] = [batch.batch_size]
        return self.backbone(x, batch.edge_index, **{k: v for k, v in arguments.items() if v is not None})

    @property
    def reads_edge_features(self) -> bool:
        """Whether the backbone reads features of arcs: it has an `edge_dim`, or its forward takes `edge_attr`."""
        backbone = getattr(self.backbone, "_orig_mod", self.backbone)
        if isinstance(backbone, Backbone):
            return backbone.edge_dim is not None
        # PyG's own models name edge_attr, and some leave it alone.
        return "edge_attr" in self._accepted and getattr(backbone, "supports_edge_attr", True)

    def _features(self, batch: Any) -> Any:
        """Return what the backbone reads of a mini-batch; sparse rows stay sparse where it takes them."""
        if self.inputs is not None:
            return self.features_of(batch)
        sparse = getattr(batch, "x_csr", None) if getattr(self.backbone, "accepts_sparse", False) else None
        return batch.x if sparse is None else sparse

    def _forward_rows(self, batch: Any) -> Tensor:
        """Return the outputs of this process's rows of the whole graph."""
        backbone = self.backbone
        if self.inputs is not None:
            raise StrategyError("inputs= is for mini-batches, not for the whole graph: use PartitionDataModule")
        with_gradient = torch.is_grad_enabled()
        # What is prepared at the first call serves training too, which cannot use tensors made in inference mode.
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradient):
            if self.row_model is not None:
                return self.row_model(batch, self.training)
            x, arcs = prepared_rows(backbone, batch, self.training and backbone.local_only)
            return backbone.forward_rows(x, arcs)

    def try_out_rows(self, batch: Any) -> RowPlan:
        """Return how a backbone of PyG's layers is run by several processes on the full graph; see `try_out`.

        Args:
            batch: The `FullGraphBatch` of this process.

        Raises:
            StrategyError: a layer cannot be computed by blocks of nodes.
        """
        return try_out(self.row_model, batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with the scheduler where one is given."""
        if self.make_optimizer is not None:
            optimizer = self.make_optimizer(self.parameters())
        else:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "monitor": "val_loss"}
        if isinstance(scheduler["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
            # It steps where there is a loss to look at.
            every = self._trainer.check_val_every_n_epoch if self._trainer is not None else None
            scheduler["frequency"] = every or 1
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _num_losses(self, batch: Any) -> int:
        """Return how many seeds a batch's loss is the mean of."""
        return batch.batch_size

    def _infer(self, batch: Any) -> LayerwiseOutput:
        if not hasattr(self.backbone, "layer"):
            raise StrategyError(
                f"{type(self.backbone).__name__} has no layer(index, x, block), so it cannot be evaluated layer by "
                'layer: give the DataModule evaluation="sampled"'
            )
        trainer = self._trainer
        needed = batch.needed(self.backbone.num_layers) if hasattr(batch, "needed") else None
        return layerwise_inference(
            self.backbone,
            self.source_of(batch),
            device=self.device,
            needed=needed,
            table_dtype=getattr(batch, "table_dtype", "float32"),
            num_local=max(1, trainer.world_size // trainer.num_nodes) if trainer is not None else 1,
        )

    def _edge_weight(self, batch: Any) -> Tensor | None:
        """Return the batch's arc weights, as the backbone sums them.

        Samplers that weigh arcs give them the weights of a mean, with 1 / degree in them (`averaging_weights`); a
        backbone that does not average has that factor taken out again.
        """
        weight = getattr(batch, "edge_weight", None)
        averaging = getattr(batch, "averaging_weights", False)
        if weight is None or not averaging or getattr(self.backbone, "averages", True):
            return weight
        return weight * batch.degree[batch.edge_index[1]]


def is_pass(batch: Any) -> bool:
    """Whether an evaluation batch is an `EvaluationShare`."""
    return hasattr(batch, "source")


def _accepted_arguments(backbone: nn.Module) -> tuple[str, ...]:
    """Return which of a batch's further arguments a backbone's forward names (all, if it takes any keyword)."""
    backbone = getattr(backbone, "_orig_mod", backbone)  # torch.compile's wrapper seems to take anything
    parameters = inspect.signature(backbone.forward).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return BATCH_ARGUMENTS
    return tuple(name for name in BATCH_ARGUMENTS if name in parameters)
