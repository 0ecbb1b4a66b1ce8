"""Rows that a model reads by node, beside or instead of stored features: learnable embeddings, rows on other hosts."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ..errors import StrategyError, wait_for_others
from ..events import clock, record
from ..graph import batch_of, batches_of
from ..traits import BackboneTraits, DataTraits, InputsTraits, LoaderTraits, ModuleTraits, StrategyTraits
from .checkpoint_file import ROWS_KEY, LoadsWeightsOnly, bring_rows
from .layer_inputs import is_by_node_type, is_sparse
from .layer_source import LayerSource
from .made_again import named_as

CHUNK_ROWS = 1 << 16  # of learned rows that are written at once


class NodeInputs(Protocol):
    """What `embedding/` implements.

    Attributes:
        dim: width of a row. num_nodes: nodes of the graph. num_rows: rows, one a node where every node has one.
        is_local: no call waits for another rank.
        node_types: `NodeTypesWithRows`, the node types that have rows; None, or missing: every node has one.
    """

    dim: int
    num_nodes: int
    num_rows: int
    is_local: bool

    def join(self, rank_of_part: np.ndarray | None = None) -> Any:
        """Share the rows with the other ranks; all call it before anything else.

        Args:
            rank_of_part: (num_parts,) rank that trains most targets of each part; None: not known.
        """

    def __call__(self, nodes: Tensor) -> Tensor:
        """Return the (num, dim) rows of a batch on the device of its (num,) nodes, to be trained by `step`."""

    def step(self) -> None:
        """End a training step after its backward."""

    def skip(self) -> None:
        """Take part in a training step without a batch."""

    def rows_here(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (row ids, rows) of this rank's share; over all ranks each row appears once."""

    def row_ids(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 rows of (num,) nodes, in [0, num_rows)."""


class TakesInputs(LoadsWeightsOnly, L.LightningModule):
    """A LightningModule whose batches get rows of `inputs`: joined at set-up, stepped after every backward.

    Attributes:
        inputs: `NodeInputs`, or None.

    On several ranks the calls of a step are collectives, so every rank makes the same ones: the strategy's hook that
    sees every batch begins the step with the nodes of its batches; each calls `inputs` once in its forward and `step`
    once after its backward. A rank whose loader yields None calls `skip` instead. In sampled evaluation ranks have
    different numbers of batches: one that is done serves the others until all are.
    """

    inputs: NodeInputs | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights, also where they were saved, or are, within what `torch.compile` has made."""
        return super().load_state_dict(named_as(self, state_dict), *args, **kwargs)

    def setup(self, stage: str) -> None:
        """Make the rows, or share those of the other processes."""
        if self.inputs is None:
            return
        trainer = self.trainer
        if trainer.world_size > 1 or (trainer.checkpoint_callbacks and stage == "fit"):
            self._check_strategy()
        if trainer.precision == "16-mixed":
            raise StrategyError(
                f'{type(self.inputs).__name__} would push scaled gradients under Trainer(precision="16-mixed"): use '
                '"bf16-mixed" or "32-true"'
            )
        store = DataTraits(trainer.datamodule).store
        if store is not None and store.num_nodes != self.inputs.num_nodes:
            raise StrategyError(
                f"{type(self.inputs).__name__} has rows for {self.inputs.num_nodes} nodes, the store has "
                f"{store.num_nodes}: make it with num_nodes={store.num_nodes}"
            )
        if store is not None and _node_types_of(self.inputs) is not None:
            self._check_node_types(trainer.datamodule, _node_types_of(self.inputs))
        self.inputs.join(DataTraits(trainer.datamodule).rank_of_part)

    def features_of(self, batch: Any) -> Any:
        """Return a batch's features with its rows behind them, or the rows alone where it has no features.

        Where `inputs` has rows for some node types, these get theirs, behind their features where they have some.
        Where every node has one, the node types without features get the rows of their nodes; so do, behind their
        features, node types whose columns in the backbone's `in_channels` count them.

        Args:
            batch: with `n_id`, and `x` or None.
        """
        node_types = _node_types_of(self.inputs)
        x = (
            batch.x
            if batch.x is not None or node_types is None
            else self.inputs.without_features(batch.n_id.cpu().numpy())
        )
        if is_by_node_type(x):
            return rows_for_node_types(
                x, self.inputs, batch.n_id, self.inputs.dim, self._node_type_channels, node_types
            )
        rows = self.inputs(batch.n_id)
        return rows if x is None else torch.cat([x.to(rows.dtype), rows], dim=1)

    @property
    def _node_type_channels(self) -> Sequence[int] | None:
        """Columns that the backbone reads of each node type's nodes, if it says."""
        return BackboneTraits(ModuleTraits(self).backbone).type_channels

    def source_of(self, batch: Any) -> LayerSource:
        """Return what layer-wise inference over an `EvaluationShare` reads."""
        if self.inputs is None:
            return batch.source
        traits = InputsTraits(self.inputs)
        untouched = not traits.num_pushes and not traits.loaded
        if untouched and not (self._trainer is not None and self._trainer.sanity_checking):
            rank_zero_warn(
                f"the rows of {type(self.inputs).__name__} are as they were initialised: give ckpt_path= of a "
                "checkpoint, or call its open() before processes are forked"
            )
        return InputSource(batch.source, self.inputs, self._node_type_channels)

    def on_after_backward(self) -> None:
        """Push the gradients of the batch's rows."""
        if self.inputs is not None:
            with clock.doing("backward"):
                self.inputs.step()

    def on_train_epoch_start(self) -> None:
        """Let the loader tell which rows coming steps read, where they are pulled ahead."""
        ahead, loader = InputsTraits(self.inputs).batches_ahead, self.trainer.train_dataloader
        if ahead and LoaderTraits(loader).announce_steps is not None:
            loader.announce_steps(ahead, lambda step: self.inputs.announce(self._nodes_of(batches_of(step))))

    def on_step_begin(self, batches: Sequence[Any]) -> None:
        """Begin a step with its batches; none: this rank's loader has yielded None, and the others go on."""
        if self.inputs is None:
            return
        begin = InputsTraits(self.inputs).begin
        if not batches:
            self.inputs.skip()
        elif begin is not None and all(isinstance(batch_of(batch).n_id, Tensor) for batch in batches):
            with clock.doing("forward"):
                begin(self._nodes_of(batches))

    def on_validation_start(self) -> None:
        """Wait until all ranks have stepped the rows that sampled batches read without asking."""
        settle = InputsTraits(self.inputs).settle
        if settle is not None and self.trainer.world_size > 1:
            settle()
            wait_for_others()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Serve other ranks after the last batch: theirs may be more."""
        trainer = self.trainer
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._end_pulls(counts, batch_idx, dataloader_idx)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As `on_validation_batch_end`."""
        self._end_pulls(self.trainer.num_test_batches, batch_idx, dataloader_idx)

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As `on_validation_batch_end`."""
        self._end_pulls(self.trainer.num_predict_batches, batch_idx, dataloader_idx)

    def _end_pulls(self, counts: Sequence[int | float], batch_idx: int, dataloader_idx: int) -> None:
        end_pulls = InputsTraits(self.inputs).end_pulls
        if end_pulls is not None and batch_idx + 1 == counts[dataloader_idx]:
            end_pulls()

    def on_train_end(self) -> None:
        """Tell what was counted of the rows."""
        told = InputsTraits(self.inputs).told
        if told is not None:
            record("learned_rows", rank=self.trainer.global_rank, **told())

    def _nodes_of(self, batches: Sequence[Any]) -> list[np.ndarray]:
        """Return the nodes of each batch whose rows its forward asks for."""
        found = []
        for batch in map(batch_of, batches):
            nodes, table = batch.n_id.cpu(), batch.x_by_node_type
            if _node_types_of(self.inputs) is not None and table is None:
                table = self.inputs.without_features(nodes.numpy())
            if table is not None:
                takes = _node_types_taking(
                    table, self._node_type_channels, self.inputs.dim, _node_types_of(self.inputs)
                )
                nodes = nodes[torch.tensor(takes)[torch.as_tensor(table.node_type).cpu()]]
            found.append(nodes.numpy())
        return found

    def save_inputs(self, folder: str | Path, with_state: bool) -> dict[str, Any] | None:
        """Write this rank's learned rows beside a checkpoint, with the optimizer's state or not; None: no rows."""
        return None if InputsTraits(self.inputs).save is None else self.inputs.save(folder, with_state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to leave learned rows out of a checkpoint."""
        if InputsTraits(self.inputs).save is not None:
            self._check_strategy()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the rows beside a checkpoint."""
        saved = checkpoint.get(ROWS_KEY)
        if saved is None or InputsTraits(self.inputs).load is None:
            return
        if not self.inputs.is_open:
            self.inputs.open()
        if InputsTraits(self.inputs).files_read is not None:
            bring_rows(saved["folder"], self.inputs.files_read(saved["ranks"]))
        self.inputs.load(saved["folder"], saved["ranks"])

    def _check_node_types(self, datamodule: Any, node_types: Any) -> None:
        """Refuse rows of some node types that are not those of the store, or that the backbone does not read."""
        what, given = type(self.inputs).__name__, f"node_types={node_types.names}"
        if not node_types.fits(datamodule.store):
            raise StrategyError(
                f"{what} has rows for {given} of another store: make it by for_store() of the store that is trained on"
            )
        dims = DataTraits(datamodule).feature_dims
        if dims is None and DataTraits(datamodule).num_features:
            raise StrategyError(
                f"{what} has rows for {given}, but the store has features of all node types in one table, which "
                "they would extend: leave node_types= out, so that every node has a row"
            )
        for number, reads in enumerate(self._node_type_channels or ()):
            name, learned = node_types.node_types[number], self.inputs.dim * bool(node_types.has_rows[number])
            stored = (dims or {}).get(name, 0)
            if reads != stored + learned:
                raise StrategyError(
                    f"nodes of node type {name!r} have {stored} features and learned rows of {learned} columns, "
                    f"{type(self.backbone).__name__} reads {reads}: make it with in_channels of {stored + learned} for "
                    f"{name!r}, or {what} with other node types than {given[len('node_types=') :]}"
                )

    def _check_strategy(self) -> None:
        if StrategyTraits(self.trainer.strategy).exchange is None:
            raise StrategyError(
                f"{type(self.inputs).__name__} is joined, and saved beside checkpoints, by GNNScaleStrategy, got "
                f'{type(self.trainer.strategy).__name__}: use Trainer(strategy="gnnscale"); one process without '
                "checkpoints needs none"
            )


class InputSource:
    """A `LayerSource` whose features are rows of `inputs`, behind the stored ones where there are any.

    Rows on several hosts are written by their owners into a table of all ranks, one row for each; nothing waits for a
    request. type_channels: columns that the model reads of each node type's nodes, see `rows_for_node_types`.
    """

    def __init__(self, source: LayerSource, inputs: NodeInputs, type_channels: Sequence[int] | None = None):
        self._source, self._inputs, self._table, self._node_type_channels = source, inputs, None, type_channels
        self._lock = threading.Lock()  # several threads gather, and training has one that pulls
        settle = InputsTraits(inputs).settle
        if settle is not None:
            settle()  # pushes may still be under way
        source.barrier()  # all ranks have pushed
        if not inputs.is_local:
            self._table = source.table("inputs", inputs.dim, inputs.num_rows)
            for ids, rows in inputs.rows_here():
                for start in range(ids.start, ids.stop, CHUNK_ROWS):
                    chunk = np.arange(start, min(start + CHUNK_ROWS, ids.stop))
                    source.write(self._table, chunk, rows[start - ids.start :][: len(chunk)])
            source.barrier()  # and written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def row_bytes(self) -> float:
        """Bytes of a node's stored features and its row."""
        return self._source.row_bytes + 4 * self._inputs.dim

    def gather(self, nodes: np.ndarray, table: np.ndarray | None = None) -> Any:
        """Return (num, dim) of the stored features and the rows, or rows of a table of hidden layers."""
        if table is not None:
            return self._source.gather(nodes, table)
        stored, node_types = self._source.gather(nodes), _node_types_of(self._inputs)
        ids = self._source.store_ids(nodes)
        if stored is None and node_types is not None:
            stored = self._inputs.without_features(ids)
        if is_by_node_type(stored):
            return rows_for_node_types(
                stored,
                lambda some: self._rows(some.numpy()),
                torch.from_numpy(ids),
                self._inputs.dim,
                self._node_type_channels,
                node_types,
            )
        rows = self._rows(ids)
        if stored is None:
            return rows
        stored = stored.dense() if is_sparse(stored) else stored
        return torch.cat([torch.as_tensor(stored).to(rows.dtype), rows], dim=1)

    def _rows(self, nodes: np.ndarray) -> Tensor:
        if self._table is None:
            with self._lock:
                return self._inputs.pull(nodes)
        return torch.from_numpy(np.asarray(self._table[self._inputs.row_ids(nodes)]))


def rows_for_node_types(
    x: Any,
    rows_of: Callable[[Tensor], Tensor],
    nodes: Tensor,
    dim: int,
    channels: Sequence[int] | None,
    node_types: Any = None,
) -> Any:
    """Return the features of node types with the learned rows of those nodes that read some.

    Args:
        x: `RowsByNodeType`.
        rows_of: (num,) ids -> (num, dim) learned rows; called once.
        nodes: (num_nodes,) int64 ids of the nodes.
        dim: columns of a learned row.
        channels: columns that the model reads of each node type; a node type whose columns are those of its features
            and dim has the rows behind its features. None: node types without features alone have rows.
        node_types: `NodeTypesWithRows`, the node types that read rows, instead of `channels`; None: every
            node has a row.
    """
    node_type, device = torch.as_tensor(x.node_type), nodes.device
    takes = _node_types_taking(x, channels, dim, node_types)
    taking = torch.tensor(takes, device=device)[node_type.to(device)]
    chosen, tables = nodes[taking], list(x.tables)
    rows, of_node_type = rows_of(chosen), node_type.to(device)[taking]
    for number in np.flatnonzero(takes).tolist():
        own, table = rows[(of_node_type == number).to(rows.device)], tables[number]
        if table is not None:
            table = table.dense() if is_sparse(table) else torch.as_tensor(table)
            own = torch.cat([table.to(own.device, own.dtype), own], dim=1)
        tables[number] = own
    return x._replace(tables=tables)


def _node_types_taking(x: Any, channels: Sequence[int] | None, dim: int, node_types: Any) -> list[bool]:
    """Return for each node type whether its nodes read rows; arguments as of `rows_for_node_types`."""
    if node_types is not None:
        return node_types.has_rows.tolist()
    counts = [None] * len(x.tables) if channels is None else channels
    return [_takes_rows(table, count, dim) for table, count in zip(x.tables, counts, strict=True)]


def _takes_rows(table: Any, channels: int | None, dim: int) -> bool:
    if table is None:
        return channels is None or channels == dim
    width = table.dim if is_sparse(table) else table.shape[1]
    return channels is not None and channels == width + dim


def _node_types_of(inputs: NodeInputs) -> Any:
    return InputsTraits(inputs).node_types
