"""The Lightning modules with an output for each node: classes, or numbers; they train, evaluate exactly, predict."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

from ..errors import StrategyError, short
from ..graph import batch_of
from ..traits import BackboneTraits, InputsTraits
from .backbone import Backbone
from .backbone_module import (
    MAKE_OPTIMIZER,
    MAKE_SCHEDULER,
    BackboneModule,
    is_pass,
    known_to_numpy,
    uncompiled,
    width_of,
)
from .layer_source import NodeReader
from .node_inputs import NodeInputs

UNKNOWN = -1  # label of a node that has none


class NodeModule(BackboneModule):
    """Base of the modules with an output for each node: how they train, evaluate and predict.

    Attributes:
        channels: Width of the outputs.
        loss: Name of a loss, or a callable.
        reader_of: Returns the reader of a store. Models know no stores: the package sets it, as it registers the
            strategy, for all modules.
    """

    channels: int
    loss: str | Callable[[Tensor, Tensor], Tensor]
    reader_of: ClassVar[Callable[[Any], NodeReader]]

    @property
    def counts_nodes(self) -> bool:
        """Whether a loss is the mean over nodes, also of several labels each; else over labels."""
        return False

    def read_labels(self, labels: Any) -> Tensor:
        """Return the labels of nodes, an array or a tensor, in the dtype that losses take."""
        raise NotImplementedError

    def unknown(self, labels: Tensor) -> Tensor:
        """Return labels of the same shape that are all unknown."""
        raise NotImplementedError

    def add_scores(self, split: str, outputs: Tensor, labels: Tensor) -> None:
        """Update the metrics of a split; rows may be unknown."""
        raise NotImplementedError

    def row_losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (num_rows,) losses, 0 where all is unknown, and the (num_rows,) number of labels in each."""
        raise NotImplementedError

    def decide(self, outputs: Tensor) -> Tensor:
        """Return what is predicted from (num_rows, channels) outputs."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the loss over the batch's training seeds; 0, with zero gradients, where there are none."""
        batch = batch_of(batch)
        outputs, labels, _ = self._seeds(batch, "train")
        losses, counts = self.row_losses(outputs, labels)
        weight, loss_count = batch.loss_weight, batch.loss_nodes if self.counts_nodes else batch.loss_count
        if loss_count is not None:
            return losses.sum() / max(1, loss_count)
        if weight is not None:  # of a node, whose labels count as one
            return (losses / counts.clamp(min=1) * weight).sum()
        return losses.sum() / counts.sum().clamp(min=1)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Predict this rank's nodes (`EvaluationShare`) or the seeds (`MiniBatch`).

        Returns:
            "nodes": (num_rows,) int64 array of store ids; "prediction": (num_rows, ...) on the CPU, what `decide` makes
            of their outputs.
        """
        return self._predict_nodes(batch, self.decide, self.channels)

    @torch.no_grad()
    def predict_nodes(
        self,
        store: Any,
        nodes: Any,
        fanouts: Sequence[int] | None = None,
        seed: int = 0,
        by_store_id: bool = False,
    ) -> dict[str, Any]:
        """Predict a few nodes of a store at once, new ones too, without a Trainer: what a service calls.

        Exact outputs are those of `trainer.predict`, to 1e-12 in float64, and in float32 to its rounding (sums of
        other lengths are added in one piece: 1e-5 of the outputs' size). It is one call at a time: the model is put
        into eval mode meanwhile.

        Args:
            store: A `PartitionStore`, any version of that of the training. What is opened is kept with it: use the
                same one again.
            nodes: (num,) your ids, integers or strings, in any order.
            fanouts: Neighbours a node for each hop, one entry a layer, -1 for all; None: the full neighbourhoods of the
                model's layers, whose outputs are exact.
            seed: Of the neighbours that are sampled; those of a node depend on it and the node alone.
            by_store_id: Whether `nodes` are store ids.

        Returns:
            What `predict_step` returns, a row for each given node, in their order.

        Raises:
            ValueError: an id that the store does not have.
            StrategyError: the model does not read what the store has.

        Cost: the edges of the neighbourhood, and its features; nothing that grows with the graph after the first call,
            which keeps 4 bytes a node.
        """
        self._check_store(store)
        reader = NodeModule.reader_of(store)
        ids = reader.store_ids(nodes, by_store_id)
        if not len(ids):
            return {"nodes": ids, "prediction": self.decide(torch.zeros(0, self.channels))}
        training = [module for module in self.modules() if module.training]
        for module in training:
            module.training = False
        try:
            return {"nodes": ids, "prediction": self._outputs_of(reader, ids, fanouts, seed)}
        finally:
            for module in training:
                module.training = True

    def _outputs_of(self, reader: NodeReader, ids: np.ndarray, fanouts: Sequence[int] | None, seed: int) -> Tensor:
        """Return what is predicted of (num,) store ids."""
        each, places = np.unique(ids, return_inverse=True)
        batch = None
        if fanouts is not None:
            batch = reader.sampled(each, fanouts, seed, self.reads_edge_features)
        elif self._depth() and self.inputs is None and isinstance(uncompiled(self.backbone), Backbone):
            batch = reader.whole(each, self._depth(), self.reads_edge_features)
        if batch is None:
            share = reader.exact_pass(each, self._depth(), self.reads_edge_features)
            outputs = torch.from_numpy(self._infer(share).read(np.searchsorted(share.source.nodes, ids)))
            return self.decide(outputs)
        return self.decide(self(batch.to(self.device))[: len(each)]).cpu()[torch.from_numpy(places)]

    def _depth(self) -> int:
        traits = BackboneTraits(self.backbone)
        if traits.layer is None or traits.num_layers is None:
            raise StrategyError(
                f"{type(self.backbone).__name__} has no layer(index, x, block), so it has no exact outputs of a few "
                "nodes: give fanouts=, such as [-1] for each of its layers"
            )
        return traits.num_layers

    def _check_store(self, store: Any) -> None:
        """Refuse a store whose nodes have no features, or others than the model reads."""
        if self.inputs is not None and not (self.inputs.is_local and self.inputs.num_nodes == store.num_nodes):
            raise StrategyError(
                f"{type(self.inputs).__name__} must have rows of this process for the {store.num_nodes} nodes of "
                f"{store.root}, got rows for {self.inputs.num_nodes}: load the checkpoint into a model of this store"
            )
        reads, features = BackboneTraits(self.backbone).in_channels, store.features
        if features is None and self.inputs is None:
            raise StrategyError(f"{store.root} has no features, and the model reads {reads or 'some'} a node: add them")
        if not isinstance(reads, int) or reads < 0 or BackboneTraits(self.backbone).type_channels:
            return
        width = (0 if features is None else features.dim) + InputsTraits(self.inputs).dim
        if width != reads:
            raise StrategyError(
                f"the model reads {reads} features a node, and {store.root} has {width}: give a version of the store "
                "that it was trained on"
            )

    def _evaluate(self, batch: Any, split: str) -> Tensor | None:
        outputs = None
        if is_pass(batch):
            result = self._infer(batch)
            if not len(result.rows):  # more ranks than parts
                self._update(split, torch.empty(0, self.channels), self.read_labels(batch.labels[result.rows]))
            for nodes, rows in result.chunks():
                chosen = batch.masks[split][nodes]
                labels = self.read_labels(batch.labels[nodes[chosen]])
                self._update(split, torch.from_numpy(rows[chosen]), labels)
            batch.source.barrier()
            size = max(1, len(result.rows))
        else:
            outputs, labels, size = self._seeds(batch, split)
            self._update(split, outputs, labels)
        self._log_metrics(split, size)
        return outputs

    def _update(self, split: str, outputs: Tensor, labels: Tensor) -> None:
        outputs, labels = outputs.detach().to(self.device).float(), labels.to(self.device)
        if len(labels) == 0:  # a metric wants a row, and a rank without an update would be warned about
            outputs = outputs.new_zeros(1, self.channels)
            labels = self.unknown(labels.new_zeros((1, *labels.shape[1:])))
        losses, counts = self.row_losses(outputs, labels)
        total = counts.sum()
        self.losses[split].update(losses.sum() / total.clamp(min=1), weight=total)
        self.add_scores(split, outputs, labels)

    def _seeds(self, batch: Any, split: str) -> tuple[Tensor, Tensor, int]:
        """Return outputs and labels of a batch's seeds, unknown outside the split's mask, and their number."""
        size = batch.batch_size
        labels, mask = self.read_labels(batch.y[:size]), getattr(batch, f"{split}_mask")
        if mask is not None:
            mask = mask[:size] if labels.dim() == 1 else mask[:size].unsqueeze(-1)
            labels = torch.where(mask, labels, self.unknown(labels))
        return self(batch)[:size], labels, max(1, size)


class NodeClassifier(NodeModule):
    """Classify nodes: cross-entropy over one class per node, or over several labels per node.

    A training batch is a `MiniBatch`; the loss covers its seeds that are in the train mask and have a label. An
    evaluation batch is an `EvaluationShare` (exact, layer by layer over the full graph, each node once over all ranks)
    or a `MiniBatch` (its seeds, from the sampled neighbours). Logged: `train_loss`, `val_loss`, `val_acc`, `test_loss`,
    `test_acc`. With several labels `acc` is the micro-averaged F1 score; the name stays, so that callbacks need not
    change.

    Args:
        backbone: A model of this package, or any module called as (x, edge_index). It is also given those of
            `edge_weight`, `edge_attr`, `degree`, `indptr`, `num_sampled_nodes`, `edge_type`, `node_type`, `edge_time`,
            `seed_time` and `seed_of` that its `forward` names; on the full graph, of `edge_weight` and `edge_attr`.
        lr, weight_decay: Learning rate and weight decay of Adam, used if no optimizer is given.
        multilabel: Whether labels are (num_nodes, num_labels) of 0 and 1, -1 = unknown.
        num_classes: Number of classes, or of labels per node; None: the backbone's `out_channels`.
        optimizer: Callable parameters -> optimizer (a partial); None: Adam.
        scheduler: Callable optimizer -> learning-rate scheduler, stepped each epoch; None: no scheduler.
        loss: "ce" (binary for several labels), or a callable (outputs, labels) -> (num_rows,) losses.
        predict_logits: Whether predictions are the (num_rows, num_classes) outputs instead of the (num_rows,) int64
            class (or the (num_rows, num_labels) 0/1 labels).
        inputs: Rows by node that are appended to the stored features, or replace them if there are none: a
            `DistributedEmbedding`, which is trained too. None: stored features alone. The backbone's `in_channels`
            must count them.

    Raises:
        ValueError: num_classes is neither given nor the backbone's; an unknown loss.
    """

    def __init__(
        self,
        backbone: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        multilabel: bool = False,
        num_classes: int | None = None,
        optimizer: MAKE_OPTIMIZER | None = None,
        scheduler: MAKE_SCHEDULER | None = None,
        loss: str | Callable[[Tensor, Tensor], Tensor] = "ce",
        predict_logits: bool = False,
        inputs: NodeInputs | None = None,
    ):
        lr, weight_decay = float(lr), float(weight_decay)  # checkpoints hold no numpy numbers
        super().__init__(backbone, lr, weight_decay, optimizer, scheduler, inputs)
        num_classes = width_of("num_classes", num_classes, backbone)
        if not callable(loss) and loss != "ce":
            raise ValueError(f"loss must be a callable or one of ['ce'], got {short(loss)}")
        self.save_hyperparameters(ignore=["backbone", "optimizer", "scheduler", "loss", "inputs"])
        self.multilabel, self.num_classes, self.loss = multilabel, num_classes, loss
        self.channels = num_classes
        self.predict_logits = predict_logits
        self._make_metrics(self._score)

    @property
    def counts_nodes(self) -> bool:
        return callable(self.loss)

    def read_labels(self, labels: Any) -> Tensor:
        return torch.as_tensor(labels).long()

    def unknown(self, labels: Tensor) -> Tensor:
        return torch.full_like(labels, UNKNOWN)

    def add_scores(self, split: str, outputs: Tensor, labels: Tensor) -> None:
        self.scores[split].update(outputs.sigmoid() if self.multilabel else outputs.argmax(dim=-1), labels)

    def row_losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        known = labels != UNKNOWN
        if callable(self.loss):
            rows = known if known.dim() == 1 else known.any(dim=-1)
            losses = self.loss(outputs, torch.where(known, labels, torch.zeros_like(labels)))
            if losses.shape != rows.shape:
                raise ValueError(
                    f"model.loss must return a loss a row, of shape {tuple(rows.shape)}, got {tuple(losses.shape)}: a "
                    'loss of torch does so with reduction="none"'
                )
            return torch.where(rows, losses, torch.zeros_like(losses)), rows.long()
        if self.multilabel:
            losses = F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")
            return torch.where(known, losses, torch.zeros_like(losses)).sum(dim=-1), known.sum(dim=-1)
        return F.cross_entropy(outputs, labels, ignore_index=UNKNOWN, reduction="none"), known.long()

    def decide(self, outputs: Tensor) -> Tensor:
        if self.predict_logits:
            return known_to_numpy(outputs)
        return (outputs > 0).long() if self.multilabel else outputs.argmax(dim=-1)

    def _score(self) -> Metric:
        kind = MultilabelF1Score if self.multilabel else MulticlassAccuracy
        return kind(self.num_classes, average="micro", ignore_index=UNKNOWN, validate_args=False)


_LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss}


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
        num_targets = width_of("num_targets", num_targets, backbone)
        if not callable(loss) and loss not in _LOSSES:
            raise ValueError(f"loss must be a callable or one of {list(_LOSSES)}, got {short(loss)}")
        self.save_hyperparameters(ignore=["backbone", "optimizer", "scheduler", "loss", "inputs"])
        self.num_targets = self.channels = num_targets
        self.loss = loss
        self._make_metrics(self._scores)

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
            losses = _LOSSES[self.loss](outputs, targets, reduction="none")
        return torch.where(known, losses, torch.zeros_like(losses)).sum(dim=-1), known.sum(dim=-1)

    def decide(self, outputs: Tensor) -> Tensor:
        return known_to_numpy(outputs)

    def _scores(self) -> nn.ModuleDict:
        return nn.ModuleDict({"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)})
