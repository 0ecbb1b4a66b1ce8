"""Rows that a model reads by node, beside or instead of stored features: learnable embeddings, rows on other hosts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ..errors import StrategyError
from .checkpoint_file import ROWS_KEY, LoadsWeightsOnly, bring_rows
from .layer_source import LayerSource

CHUNK_ROWS = 1 << 16  # of learned rows that are written at once


class NodeInputs(Protocol):
    """What `embedding/` implements.

    Attributes:
        dim: width of a row. num_nodes: rows.
        is_local: no call waits for another rank.
    """

    dim: int
    num_nodes: int
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
        """Yield (ids, rows) of this rank's share; over all ranks each row comes once."""


class TakesInputs(LoadsWeightsOnly, L.LightningModule):
    """A LightningModule whose batches get rows of `inputs`: joined at set-up, stepped after every backward.

    Attributes:
        inputs: `NodeInputs`, or None.

    With rows on several hosts the calls of a step are collectives, so every rank makes the same ones: a rank with a
    batch calls `inputs` once in its forward and `step` once after its backward; a rank whose loader yields None calls
    `skip` in their place, from the strategy's hook that sees such batches. Evaluation enters none.
    """

    inputs: NodeInputs | None = None

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
        store = getattr(trainer.datamodule, "store", None)
        if store is not None and store.num_nodes != self.inputs.num_nodes:
            raise StrategyError(
                f"{type(self.inputs).__name__} has rows for {self.inputs.num_nodes} nodes, the store has "
                f"{store.num_nodes}: make it with num_nodes={store.num_nodes}"
            )
        self.inputs.join(getattr(trainer.datamodule, "rank_of_part", None))

    def features_of(self, batch: Any) -> Any:
        """Return a batch's features with its rows behind them, or the rows alone where it has no features.

        Args:
            batch: with `n_id`, and `x` or None.

        Raises:
            StrategyError: rows of other hosts are asked for outside of training.
        """
        if not (self.training or self.inputs.is_local):
            raise StrategyError(
                'evaluation="sampled" would wait for ranks with fewer batches where rows are on several hosts: use '
                'evaluation="layerwise"'
            )
        rows, x = self.inputs(batch.n_id), batch.x
        return rows if x is None else torch.cat([x.to(rows.dtype), rows], dim=1)

    def source_of(self, batch: Any) -> LayerSource:
        """Return what layer-wise inference over an `EvaluationShare` reads."""
        if self.inputs is None:
            return batch.source
        untouched = not getattr(self.inputs, "num_pushes", 1) and not getattr(self.inputs, "loaded", True)
        if untouched and not self.trainer.sanity_checking:
            rank_zero_warn(
                f"the rows of {type(self.inputs).__name__} are as they were initialised: give ckpt_path= of a "
                "checkpoint, or call its open() before processes are forked"
            )
        return InputSource(batch.source, self.inputs)

    def on_after_backward(self) -> None:
        """Push the gradients of the batch's rows."""
        if self.inputs is not None:
            self.inputs.step()

    def on_batch_missing(self) -> None:
        """Take part in a step of the others; the strategy calls it where this rank's loader yields None."""
        if self.inputs is not None:
            self.inputs.skip()

    def save_inputs(self, folder: str | Path, with_state: bool) -> dict[str, Any] | None:
        """Write this rank's learned rows beside a checkpoint; None: there are none.

        Args:
            folder: Folder on each machine.
            with_state: Whether the optimizer's state is written too.
        """
        return self.inputs.save(folder, with_state) if hasattr(self.inputs, "save") else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to leave learned rows out of a checkpoint."""
        if hasattr(self.inputs, "save"):
            self._check_strategy()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the rows that lie beside a checkpoint."""
        saved = checkpoint.get(ROWS_KEY)
        if saved is None or not hasattr(self.inputs, "load"):
            return
        if not self.inputs.is_open:
            self.inputs.open()
        if hasattr(self.inputs, "files_read"):
            bring_rows(saved["folder"], self.inputs.files_read(saved["ranks"]))
        self.inputs.load(saved["folder"], saved["ranks"])

    def _check_strategy(self) -> None:
        if not hasattr(self.trainer.strategy, "exchange_run"):
            raise StrategyError(
                f"{type(self.inputs).__name__} is joined, and saved beside checkpoints, by GNNScaleStrategy, got "
                f'{type(self.trainer.strategy).__name__}: use Trainer(strategy="gnnscale"); one process without '
                "checkpoints needs none"
            )


class InputSource:
    """A `LayerSource` whose features are rows of `inputs`, behind the stored ones where there are any.

    Rows on several hosts are written by their owners into a table of all ranks; nothing waits for a request.

    Args:
        source: the graph.
        inputs: the rows.
    """

    def __init__(self, source: LayerSource, inputs: NodeInputs):
        self._source, self._inputs, self._table = source, inputs, None
        if not inputs.is_local:
            self._table = source.table("inputs", inputs.dim)
            for ids, rows in inputs.rows_here():
                for start in range(ids.start, ids.stop, CHUNK_ROWS):
                    nodes = np.arange(start, min(start + CHUNK_ROWS, ids.stop))
                    source.write(self._table, nodes, rows[start - ids.start :][: len(nodes)])
        getattr(inputs, "settle", lambda: None)()  # pushes may still be under way
        source.barrier()  # all ranks have pushed, and written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def gather(self, nodes: np.ndarray, table: np.ndarray | None = None) -> Any:
        """Return (num, dim) of the stored features and the rows, or rows of a table of hidden layers."""
        if table is not None:
            return self._source.gather(nodes, table)
        rows = self._inputs.pull(nodes) if self._table is None else torch.from_numpy(np.asarray(self._table[nodes]))
        stored = self._source.gather(nodes)
        if stored is None:
            return rows
        stored = stored.dense() if hasattr(stored, "dense") else stored
        return torch.cat([torch.as_tensor(stored).to(rows.dtype), rows], dim=1)
