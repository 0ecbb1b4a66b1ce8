"""`FullGraphDataModule`: each process holds a block of rows of the full graph, and an epoch is one batch."""

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Unpack

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from ..errors import StrategyError
from ..keywords import passes_on
from ..partition_store import PartitionStore, StoreMaking, StoreSource
from ..partition_store.block_rows import BlockRows, load_block_rows, part_runs
from ..planner import Plan
from ..traits import BackboneTraits, ModuleTraits, StrategyTraits
from .full_graph_batch import FullGraphBatch, FullGraphLoader, block_batch
from .stored_graph import StoredGraphDataModule, check_edge_features, check_model, policy_of

if TYPE_CHECKING:
    from torch_geometric.data import Data

UNKNOWN = -1
_LABEL_ROWS = 1 << 18


class FullGraphDataModule(StoredGraphDataModule):
    """Train on the full graph: every process owns a contiguous run of parts, and reads rows of the others.

    The strategy's exchange policy decides how rows of other ranks arrive. Under weight policies that average models, a
    rank's block is its part and has a loss of its own. Models are those of this package, or any of PyG's
    `MessagePassing` layers called as (x, edge_index); these are given `edge_weight` and `edge_attr` too, where the
    store has them and `forward` names them.

    Args:
        store: Folder or URL of a partition store, an open store, or a `StoreSource`; or a `Data` of PyG.
        seed: Seed of the partitioning, and of the keys of epochs.
        making: What the store is made from: the keywords of `StoreSource.of` and `StoreSource`. num_parts="auto": the
            planner's number, but at least one per process.

    Attributes:
        blocks: The `BlockRows` of this rank, after `setup`.
        whole_block: Its `FullGraphBatch`, which the batches are made from, after `setup`.

    Raises:
        ValueError, PartitionStoreError, StrategyError: one line with the remedy.

    Cost: a rank holds its edges, and features of own and halo rows, on the host and on its device.
    """

    takes_inputs = False
    trains_full_graph = True
    kernel_set = "full_graph"  # compiled ahead

    @passes_on(StoreSource.of, StoreSource, pack_halo=False)
    def __init__(
        self,
        store: "str | os.PathLike | PartitionStore | StoreSource | Data | None" = None,
        *,
        seed: int = 0,
        **making: Unpack[StoreMaking],
    ):
        super().__init__(store, seed, **making)
        self.blocks: BlockRows | None = None
        self.whole_block: FullGraphBatch | None = None
        self._loaders: list[FullGraphLoader] = []

    def planned_parts(self) -> int:
        """Return the number of parts: as given; else of an existing store, or the planner's, at least one a process."""
        parts = super().planned_parts()
        return max(parts, self._rank_and_world()[1]) if self._chooses_parts else parts

    def make_plan(self, num_devices: int | None = None, **options) -> Plan:
        plan = super().make_plan(num_devices, **options)
        if not self._chooses_parts or plan.num_parts >= plan.num_devices:
            return plan
        return super().make_plan(num_devices, **{**options, "num_parts": plan.num_devices})

    def check_processes(self, world_size: int) -> None:
        """Refuse what is known to fail, before processes start and a store is written; raises as `setup` does."""
        if self.dataset is None:
            super().setup()
            self._check_trainable()
            part_runs(self.store.num_parts, world_size)
            return
        missing = [name for name in ("features", "labels") if getattr(self.dataset, name) is None]
        missing += [] if "train" in self.dataset.masks else ["a train mask"]
        if missing:
            raise StrategyError(
                f"full-graph training needs {missing[0]}, but {self.dataset.name} has none: give it with the graph"
            )
        if self.trainer is not None:
            self.check_trainer(self.trainer)
        if not self._chooses_parts:
            part_runs(self.store_source.num_parts, world_size)

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse what one batch an epoch cannot do, and processes that exchange nothing; raises as `setup` does."""
        _check_one_batch(trainer)
        _check_exchanges(trainer)

    def setup(self, stage: str | None = None) -> None:
        """Open the store, and load this rank's block.

        Raises:
            PartitionStoreError: the store has no features.
            StrategyError: the graph has several edge types; to train it has no labels or no train mask; there are more
                processes than parts; the strategy of several processes exchanges nothing.
        """
        super().setup(stage)
        if self.store.schema is not None:
            raise StrategyError(
                "training on the full graph does not distinguish edge types, and the store has "
                f"{self.store.schema.num_edge_types}: use PartitionDataModule"
            )
        if stage == "fit":
            self._check_trainable()
            module = self._module
            check_model(module, self.store)
            if BackboneTraits(ModuleTraits(module).backbone).forward_rows:
                check_edge_features(
                    module, self.store.edge_column("edge_features", False), "write the store without them"
                )
        if self.trainer is not None:
            _check_exchanges(self.trainer)
        rank, world_size = self._rank_and_world()
        if self.blocks is None or (self.blocks.rank, self.blocks.world_size) != (rank, world_size):
            self.blocks = load_block_rows(self.store, rank, world_size)
            self.whole_block = block_batch(self.store, self.blocks)

    @property
    def _chooses_parts(self) -> bool:
        return self.store_source is not None and self.store_source.num_parts == "auto"

    def _check_trainable(self) -> None:
        super()._check_trainable()
        if self.trainer is not None:
            _check_one_batch(self.trainer)

    @property
    def part_weights(self) -> np.ndarray:
        """(world_size,) float64: training nodes with a label of each block, the weights of model averaging."""
        ranges = pairwise(self.blocks.offsets.tolist())
        return np.array([count_labels(self.store, "train", begin, end)[0] for begin, end in ranges], np.float64)

    def parts_of_rank(self, rank: int, world_size: int) -> list[int]:
        """Return the parts of a rank under model averaging: its block."""
        return [rank]

    def train_dataloader(self) -> FullGraphLoader:
        """Return the loader of one batch an epoch; its key is the same on every rank."""
        self._check_trainable()
        return self._loader("train", None)

    def val_dataloader(self) -> FullGraphLoader | list:
        """Return the loader of the validation nodes of this rank's block; an empty list if a fit has none."""
        if "val" not in self.store.masks:
            return self._without_validation("a val mask", "write the store with masks={'val': ...}")
        self._check_labels("validation")
        return self._loader("val", "val")

    def test_dataloader(self) -> FullGraphLoader:
        """Return the loader of the test nodes of this rank's block."""
        self._check_testable()
        return self._loader("test", "test")

    def predict_dataloader(self) -> FullGraphLoader:
        """Return the loader of all nodes of this rank's block."""
        return self._loader(None, "predict")

    def teardown(self, stage: str) -> None:
        """Free the devices' memory; the block stays on the host."""
        for loader in self._loaders:
            loader.release()
        self._loaders.clear()

    def _loader(self, mask: str | None, split: str | None) -> FullGraphLoader:
        # Under a policy that averages models each rank has a loss of its own.
        weights = policy_of(self.trainer)
        whole = weights is None or weights.equal_batches
        offsets, rank = self.blocks.offsets.tolist(), self.blocks.rank
        begin, end = (offsets[0], offsets[-1]) if whole else offsets[rank : rank + 2]
        known = mask is not None and self.store.labels is not None
        counts = count_labels(self.store, mask, begin, end) if known else (0, 0)
        self._loaders.append(FullGraphLoader(self.whole_block, counts, whole, self.seed, split))
        return self._loaders[-1]

    def _batch_shape(self) -> dict:
        return {"batch_size": None, "fanouts": (), "prefetch_batches": 1}


def _check_one_batch(trainer: pl.Trainer) -> None:
    """Refuse what an epoch of one batch cannot do: accumulated gradients, several passes over the data."""
    given = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
    accumulates = trainer.accumulate_grad_batches != 1
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            given, accumulates = f"GradientAccumulationScheduler({callback.scheduling})", True
    if accumulates:
        raise StrategyError(
            f"{given}: an epoch of the full graph is one batch, whose gradient would be divided but not accumulated: "
            "leave it at 1"
        )
    weights = policy_of(trainer)
    passes = 1 if weights is None else weights.passes_per_epoch
    if passes != 1:
        raise StrategyError(
            f"ModelAveraging(every_n_epochs={passes}, part_major=True) makes {passes} passes an epoch, and an epoch of "
            f"the full graph is one: leave part_major out, and train {passes} times the epochs"
        )


def _check_exchanges(trainer: pl.Trainer) -> None:
    if trainer.world_size > 1 and StrategyTraits(trainer.strategy).exchange is None:
        raise StrategyError(
            f"{type(trainer.strategy).__name__} exchanges no rows between the {trainer.world_size} processes: "
            'use Trainer(strategy="gnnscale")'
        )


def count_labels(store: PartitionStore, mask: str, begin: int, end: int) -> tuple[int, int]:
    """Count known labels of the nodes of a mask in a range of store ids.

    Args:
        store: A store with labels; -1 is unknown; NaN for numbers to predict.
        mask: Name of one of its masks.
        begin, end: First store id of the range, and its end (exclusive).

    Returns:
        The number of nodes that have a known label, and the number of known labels; they differ where a node has
        several.

    Cost: one read of the range's mask, and of its labels where the mask is set; a few MB.
    """
    num_nodes = num_labels = 0
    for start in range(begin, end, _LABEL_ROWS):
        rows = slice(start, min(start + _LABEL_ROWS, end))
        labels = store.labels[rows][np.asarray(store.masks[mask][rows])]
        known = ~np.isnan(labels) if store.regression else labels != UNKNOWN
        num_labels += int(np.count_nonzero(known))
        num_nodes += int(np.count_nonzero(known if known.ndim == 1 else known.any(axis=1)))
    return num_nodes, num_labels
