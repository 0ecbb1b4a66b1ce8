"""The base of the Lightning modules: a backbone run on batches, on rows and layer by layer, and its optimizer."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from ..errors import StrategyError, check_count, short
from ..graph import COLUMNS, StepBatches, batch_of, batches_of
from ..traits import BackboneTraits, arguments_of, named_by
from .backbone import Backbone
from .checkpoint_file import MODEL_KEY, plain
from .inference import LayerwiseOutput, layerwise_inference
from .layer_inputs import check_edge_attr, check_times
from .made_again import check_plain_arguments, make_backbone, target_of, wrong_value
from .node_inputs import NodeInputs, TakesInputs
from .row_layers import prepared_rows
from .row_model import RowModel, RowPlan, uncompiled
from .row_trial import try_out

CHUNK_BYTES = 64 << 20  # of embeddings read at once while links are scored
BATCH_ARGUMENTS = ("edge_weight", "degree", "indptr", "num_sampled_nodes", "num_sampled_edges", "edge_attr")
BATCH_ARGUMENTS += ("edge_type", "node_type", "type_counts", "edge_time", "seed_time", "seed_of", "self_weight")
# Of these, what comes from a column of the graph alone: the name in `graph.COLUMNS`.
_COLUMN_OF = {
    "edge_attr": "edge_features",
    "edge_type": "edge_types",
    "node_type": "edge_types",
    "edge_time": "edge_time",
}
MAKE_OPTIMIZER = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MAKE_SCHEDULER = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class BackboneModule(TakesInputs):
    """Base of the Lightning modules.

    Args:
        backbone: A model of this package, or any module called as (x, edge_index). It is also given those of
            `edge_weight`, `edge_attr`, `degree`, `indptr`, `num_sampled_nodes`, `edge_type`, `node_type`, `edge_time`,
            `seed_time`, `seed_of` and `self_weight` that its `forward` names; on the full graph, of `edge_weight` and
            `edge_attr`. Of further columns of the nodes, it is given those that its `forward` names.
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
        if not isinstance(backbone, nn.Module):
            raise ValueError(f"backbone must be a model such as gs.model.GraphSAGE(...), got {short(backbone)}")
        self.inputs = inputs
        self.lr, self.weight_decay = lr, weight_decay
        self.backbone, self.make_optimizer, self.make_scheduler = backbone, optimizer, scheduler
        self._accepted = named_by(uncompiled(backbone), BATCH_ARGUMENTS)  # a compiled one seems to take all
        self._named = frozenset(arguments_of(uncompiled(backbone)))
        # runs a model of PyG's layers over the rows of one process; models of this package do so themselves
        self.row_model = None if BackboneTraits(backbone).forward_rows else RowModel(backbone)
        self.write_predictions: Callable | None = None  # takes rows as `predict_step` does; `PredictionWriter` sets it
        self.backbone_settings: dict[str, Any] | None = None  # Hydra's, if it has none

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store in the checkpoint how to make the backbone again, if known, for `load_from_checkpoint`.

        It is known for `Backbone`s with plain arguments, and for models of the command line.
        """
        super().on_save_checkpoint(checkpoint)
        described = self.described_backbone()
        if described is not None:
            checkpoint[MODEL_KEY] = {"backbone": plain(described), **self.saved_arguments()}

    def described_backbone(self) -> dict[str, Any] | None:
        """Return the class of the backbone and its arguments, as far as they are known."""
        return self.backbone_settings or _described(self.backbone)

    def saved_arguments(self) -> dict[str, Any]:
        """Return plain arguments of the module that `save_hyperparameters` leaves out."""
        return {}

    @classmethod
    def made_again(cls, saved: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that a caller of `load_from_checkpoint` need not give: the backbone, from its settings.

        Args:
            saved, given: The entries of `on_save_checkpoint`; arguments of the caller.

        Raises:
            CheckpointError: the backbone is of a class that a checkpoint may not name, or an argument is not plain.
        """
        taken = inspect.signature(cls.__init__).parameters
        left_out = {name: value for name, value in saved.items() if name in taken and name not in given}
        check_plain_arguments(left_out)
        if "backbone" in left_out:
            left_out["backbone"] = make_backbone(left_out["backbone"])
        return left_out

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log `train_loss`, by epoch: the mean over all ranks' seeds, or the sum of shares of one loss.

        Here and not in `training_step`, which a rank without a batch of its own skips: every rank must log it.
        """
        shares = batch_of(batch).loss_is_share
        losses = [*(batch.losses if isinstance(batch, StepBatches) else ()), (outputs or {}).get("loss")]
        for one, loss in zip(batches_of(batch), losses, strict=True):
            # Of counts Lightning takes the integer part of the mean over ranks: times their number it loses nothing.
            count = 0 if loss is None else self._num_losses(one) * self.trainer.world_size
            # Lightning has divided it by the batches of a step.
            loss = torch.zeros((), device=self.device) if loss is None else loss * self.trainer.accumulate_grad_batches
            self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True,
                     reduce_fx="sum" if shares else "mean", batch_size=count)  # fmt: skip

    def on_validation_epoch_start(self) -> None:
        """Reset the validation metrics."""
        self._reset("val")

    def on_test_epoch_start(self) -> None:
        """Reset the test metrics."""
        self._reset("test")

    def validation_step(self, batch: Any, batch_idx: int = 0) -> Tensor | None:
        """Score the validation nodes or links of an `EvaluationShare`, or of a batch, whose outputs are returned."""
        return self._evaluate(batch_of(batch), "val")

    def test_step(self, batch: Any, batch_idx: int = 0) -> Tensor | None:
        """Score the test nodes or links of an `EvaluationShare`, or of a batch, whose outputs are returned."""
        return self._evaluate(batch_of(batch), "test")

    def _evaluate(self, batch: Any, split: str) -> Tensor | None:
        raise NotImplementedError

    def _reset(self, split: str) -> None:
        # Counts that were reset in inference mode cannot be added to outside of it, and Lightning leaves that mode
        # where the process group is gloo: a module that goes from one Trainer to another would fail.
        with torch.inference_mode(False):
            for metric in (self.losses[split], *self.metrics(split).values()):
                metric.reset()

    def _make_metrics(self, make: Callable[[], nn.Module]) -> None:
        """Make `scores`, a metric or several by name for each split, and `losses`."""
        self.scores = nn.ModuleDict({split: make() for split in ("val", "test")})
        self.losses = nn.ModuleDict({split: MeanMetric() for split in ("val", "test")})

    def metrics(self, split: str) -> dict[str, Metric]:
        """Return the metrics of a split that are logged beside the loss, by the name after `val_`."""
        found = self.scores[split]
        return dict(found.items()) if isinstance(found, nn.ModuleDict) else {"acc": found}

    def _log_metrics(self, split: str, size: int) -> None:
        # Metric objects, not numbers: they add up counts over ranks, so nothing weighs more on one of them.
        for name, metric in self.metrics(split).items():
            on_bar = not name.startswith("hits")
            self.log(f"{split}_{name}", metric, on_step=False, on_epoch=True, prog_bar=on_bar, batch_size=size)
        self.log(f"{split}_loss", self.losses[split], on_step=False, on_epoch=True, batch_size=size)

    def forward(self, batch: Any) -> Tensor:
        """Return the outputs for a mini-batch, (num_rows, out_channels) with the seeds first."""
        batch = batch_of(batch)
        if batch.full_graph:
            return self._forward_rows(batch)
        self._check_batch(batch)
        x = self._features(batch)
        if isinstance(x, Tensor):
            x = x.to(next(self.backbone.parameters()).dtype)
        arguments = {name: getattr(batch, name) for name in self._accepted}
        arguments |= {name: rows for name, rows in batch.columns.items() if name in self._named}
        if "edge_weight" in arguments:
            arguments["edge_weight"] = self._edge_weight(batch)
        elif batch.edge_weight is not None:
            raise StrategyError(
                f"{type(self.backbone).__name__}.forward takes no edge_weight, but the batches carry one: "
                "use another sampler, or let forward take edge_weight"
            )
        if batch.edge_attr is not None and not self.reads_edge_features:
            check_edge_attr(type(self.backbone).__name__, None, batch.edge_attr.shape[1])
        if "num_sampled_nodes" in arguments and arguments["num_sampled_nodes"] is None:
            arguments["num_sampled_nodes"] = [batch.batch_size]
        return self.backbone(x, batch.edge_index, **{k: v for k, v in arguments.items() if v is not None})

    @property
    def requires(self) -> dict[str, str]:
        """What the graph must have, see `graph.check_requires`: its own, and what forward cannot do without."""
        backbone, name = uncompiled(self.backbone), type(uncompiled(self.backbone)).__name__
        found = dict(BackboneTraits(backbone).requires)
        for argument in list(_needed_arguments(backbone))[2:]:  # the first two are x and edge_index
            if argument in _COLUMN_OF or argument not in BATCH_ARGUMENTS:
                column = _COLUMN_OF.get(argument, argument)
                given = f"{column}=" if column in COLUMNS else f'node_columns={{"{column}": rows}}'
                line = f"{name}.forward needs {argument}, which the store does not have: write it with {given}"
                found.setdefault(column, f"{line}, or give the argument a default")
        return found

    def check_edge_types(self, several: bool, own_features: bool) -> None:
        """Refuse, as a StrategyError, several edge types or features by node type that the backbone does not read."""
        name = type(self.backbone).__name__
        if several and "edge_type" not in self._accepted:
            raise StrategyError(
                f"{name} does not read edge_type, and the graph has several edge types: train RGCN, RGAT, HGT or "
                "Hetero(model), or let forward take edge_type"
            )
        if own_features and "node_type" not in self._accepted:
            raise StrategyError(
                f"{name} reads one table of features, but node types have features of their own: train RGCN, RGAT, "
                "HGT or Hetero(model), or let forward take node_type, and x as RowsByNodeType"
            )

    def _check_batch(self, batch: Any) -> None:
        edge_type, schema, several = batch.edge_type, batch.schema, False
        if edge_type is not None and "edge_type" not in self._accepted:
            several = schema.num_edge_types > 1 if schema is not None else bool((edge_type != edge_type[:1]).any())
        self.check_edge_types(several, batch.x_by_node_type is not None)

    @property
    def reads_edge_features(self) -> bool:
        """Whether the backbone reads features of edges: it has an `edge_dim`, or its forward takes `edge_attr`."""
        backbone = uncompiled(self.backbone)
        if isinstance(backbone, Backbone):
            return backbone.edge_dim is not None
        # PyG's own models name edge_attr, and some ignore it.
        return "edge_attr" in self._accepted and BackboneTraits(backbone).supports_edge_attr

    def _features(self, batch: Any) -> Any:
        """Return what the backbone reads of a mini-batch; sparse rows stay sparse where it takes them."""
        if self.inputs is not None:
            return self.features_of(batch)
        sparse = batch.x_csr if BackboneTraits(self.backbone).accepts_sparse else None
        return batch.x if sparse is None else sparse

    def _check_full_graph(self) -> None:
        if BackboneTraits(self.backbone).reads_edge_types:
            raise StrategyError(
                f"{type(self.backbone).__name__} reads node types and edge types, which full-graph training does "
                "not: train on parts with PartitionDataModule"
            )

    def _forward_rows(self, batch: Any) -> Tensor:
        """Return the outputs of this process's rows of the whole graph."""
        backbone = self.backbone
        self._check_full_graph()
        if self.inputs is not None:
            raise StrategyError("inputs= is for mini-batches, not for the whole graph: use PartitionDataModule")
        with_gradient = torch.is_grad_enabled()
        # What is prepared at the first call serves training too, which cannot use tensors made in inference mode.
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradient):
            if self.row_model is not None:
                return self.row_model(batch, self.training)
            x, edges = prepared_rows(backbone, batch, self.training and backbone.local_only)
            return backbone.forward_rows(x, edges)

    def try_out_rows(self, batch: Any) -> RowPlan:
        """Return how a backbone of PyG's layers is run by several processes on the full graph; see `try_out`."""
        self._check_full_graph()
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
            # It steps where there is a loss to monitor.
            every = self._trainer.check_val_every_n_epoch if self._trainer is not None else None
            scheduler["frequency"] = every or 1
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _num_losses(self, batch: Any) -> int:
        """Return the number of seeds in the mean of a batch's loss."""
        return batch.batch_size

    def _infer(self, batch: Any) -> LayerwiseOutput:
        if BackboneTraits(self.backbone).layer is None:
            raise StrategyError(
                f"{type(self.backbone).__name__} has no layer(index, x, block), so it cannot be evaluated layer by "
                'layer: give the DataModule evaluation="sampled"'
            )
        trainer = self._trainer
        try:
            check_times(type(self.backbone).__name__, BackboneTraits(self.backbone).time_channels)
        except ValueError as error:
            raise StrategyError(str(error)) from None
        needed = None if batch.needed is None else batch.needed(self.backbone.num_layers)
        return layerwise_inference(
            self.backbone,
            self.source_of(batch),
            device=self.device,
            needed=needed,
            table_dtype=batch.table_dtype,
            layers=batch.layers,
            num_local=max(1, trainer.world_size // trainer.num_nodes) if trainer is not None else 1,
        )

    def _rows(self, output: LayerwiseOutput, nodes: np.ndarray) -> Tensor:
        """Return the embeddings of some nodes where the model is, in its dtype."""
        dtype = next(self.backbone.parameters()).dtype
        return torch.from_numpy(np.asarray(output.read(nodes))).to(device=self.device, dtype=dtype)

    def _predict_nodes(self, batch: Any, decide: Callable[[Tensor], Tensor], channels: int) -> dict[str, Any]:
        """Return the seeds of a batch, or a pass's nodes of this rank, and what `decide` makes of their outputs.

        Nodes of a pass are written a block at a time where `write_predictions` takes them.

        Args:
            decide: (num_rows, channels) outputs -> (num_rows, ...) predictions.
            channels: Width of the outputs.
        """
        batch = batch_of(batch)
        if not is_pass(batch):
            nodes = batch.n_id[: batch.batch_size].cpu().numpy()
            return {"nodes": nodes, "prediction": decide(self(batch)[: batch.batch_size]).cpu()}
        result = self._infer(batch)
        nothing = {"nodes": result.rows[:0], "prediction": decide(torch.zeros(0, channels))}
        chunks = (
            {"nodes": nodes, "prediction": decide(torch.from_numpy(outputs))} for nodes, outputs in result.chunks()
        )
        rows = self._kept(chunks, nothing)
        batch.source.barrier()
        return rows

    def _kept(self, chunks: Iterable[dict[str, Any]], nothing: dict[str, Any]) -> dict[str, Any]:
        """Return predicted rows in one, `nothing` where `write_predictions` takes them, a chunk at a time."""
        kept = [nothing]
        for rows in chunks:
            if self.write_predictions is None:
                kept.append(rows)
            else:
                self.write_predictions(rows)
        return {
            name: (torch.cat if isinstance(first, Tensor) else np.hstack)([rows[name] for rows in kept])
            for name, first in nothing.items()
        }

    def _edge_weight(self, batch: Any) -> Tensor | None:
        """Return the batch's edge weights, as the backbone sums them.

        Samplers that weigh edges give them the weights of a mean, with 1 / degree in them (`averaging_weights`); a
        backbone that does not average has that factor taken out again.
        """
        weight = batch.edge_weight
        if weight is None or not batch.averaging_weights or BackboneTraits(self.backbone).averages:
            return weight
        return weight * batch.degree[batch.edge_index[1]]


def width_of(name: str, given: int | None, backbone: nn.Module) -> int:
    """Return the width of a module's outputs: as given, else the backbone's; ValueError where neither is known."""
    if given is not None:
        check_count(name, given)
    width = given or BackboneTraits(backbone).out_channels
    if width is None:
        raise ValueError(f"{name} must be given: the backbone has no out_channels to take it from")
    return int(width)


def known_to_numpy(outputs: Tensor) -> Tensor:
    """Return outputs in a dtype that numpy has: bfloat16 as float32."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def _described(backbone: nn.Module) -> dict[str, Any] | None:
    """Return the class of a backbone and its arguments; None where one of them is not a plain value."""
    backbone = uncompiled(backbone)
    if not isinstance(backbone, Backbone):
        return None
    args, kwargs = backbone.given
    arguments = inspect.signature(type(backbone)).bind(*args, **kwargs).arguments
    arguments = {
        **{name: value for name, value in arguments.items() if name != "kwargs"},
        **arguments.get("kwargs", {}),
    }
    values = [plain(_without_types(value)) for value in arguments.values()]
    described = {"_target_": target_of(type(backbone)), **dict(zip(arguments, values, strict=True))}
    return None if any(map(wrong_value, arguments, values)) else described


def _without_types(value: Any) -> Any:
    """Return a value with dicts and lists for other mappings and sequences (Hydra's), and for a schema."""
    if hasattr(value, "as_json"):
        return value.as_json()
    if isinstance(value, Mapping):
        return {key: _without_types(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_types(entry) for entry in value]
    return value


def is_pass(batch: Any) -> bool:
    """Whether an evaluation batch is an `EvaluationShare`."""
    return batch_of(batch).source is not None


def _needed_arguments(backbone: nn.Module) -> Iterator[str]:
    for parameter in inspect.signature(backbone.forward).parameters.values():
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY,
        ):  # fmt: skip
            yield parameter.name
