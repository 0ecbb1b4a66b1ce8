"""What the DataModules share: a partition store that stands, or what one is made from."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from ..dataset import GraphDataset
from ..errors import PartitionStoreError, StrategyError, check_count
from ..partition_store import PartitionStore
from ..partitioner import Partitioning, partition
from ..partitioner.graph_access.layout import lists_both_ways
from ..planner import Plan, plan
from .partitioner_identity import describe_partitioner
from .preparation import (
    expected_store_fingerprint,
    partitioning_facts,
    preparation_fingerprint,
    prepare_store,
    standing_arcs,
    standing_parts,
)


class StoredGraphDataModule(L.LightningDataModule):
    """Base of the DataModules: partitions and writes the store in `prepare_data`, opens it in `setup`.

    Give either a store that stands (`store`), or what to make one from (`dataset`, or `stream` with `features`,
    `labels`, `masks`, all in the stream's node order) and where to put it (`root`).

    Args:
        store: folder of a partition store, or an open one.
        root: folder that the store is written to; skipped where the same one stands.
        dataset: a `GraphDataset`; instead of `stream`, `features`, `labels`, `masks`.
        stream, features, labels, masks, edge_weight, edge_features: see `write_partition_store`.
        partitioner: name of a method, or a callable (stream, num_parts, seed, masks, progress) -> Partitioning.
        num_parts: parts; "auto" asks the planner.
        planner: callable with the arguments of `gs.plan`, for "auto"; it may carry memory sizes.
        seed: of partitioning.
        pack_halo: a store that is written also has the feature rows of each part's halo beside the part.
        overwrite: replace a store made from other input, or a damaged one.
        progress: (what, done, total), called while the store is made.

    Raises:
        ValueError: an argument is out of range, or neither or both of store and data are given.
    """

    takes_inputs = True  # whether the model may bring rows in place of features

    def __init__(
        self,
        store: str | os.PathLike | PartitionStore | None,
        *,
        root: str | os.PathLike | None,
        dataset: GraphDataset | None,
        stream,
        features,
        labels,
        masks,
        edge_weight,
        partitioner: str | Callable[..., Partitioning],
        num_parts: int | str,
        planner: Callable[..., Plan] | None,
        seed: int,
        overwrite: bool,
        progress: Callable[[str, int, int | None], None] | None,
        pack_halo: bool = False,
        edge_features=None,
    ):
        super().__init__()
        if num_parts != "auto":
            check_count("num_parts", num_parts)
        if stream is not None:
            edges = {"edge_weight": edge_weight, "edge_features": edge_features}
            dataset = GraphDataset("graph", stream, features, labels, masks or {}, **edges)
        if (store is None) == (dataset is None):
            raise ValueError("give either store, or dataset (or stream) together with root")
        if dataset is not None and root is None:
            raise ValueError("root must name the folder that the partition store is written to")
        if pack_halo and store is not None:
            raise ValueError(
                "pack_halo says how a store is written, and store= stands: leave it out; what it has packed is read"
            )
        self.dataset, self.root = dataset, _folder(root if store is None else store)
        self.partitioner, self.num_parts, self.planner = partitioner, num_parts, planner or plan
        self.seed, self.overwrite, self.progress, self.pack_halo = seed, overwrite, progress, pack_halo
        self.stored_features = True
        self._store: PartitionStore | None = None
        self._both_ways: bool | None = None  # of a stream with layout "auto", once it has been read

    def prepare_data(self) -> None:
        """Partition and write the store; nothing to do where the same store stands."""
        if self.dataset is None:
            PartitionStore.open(self.root)
            return
        num_parts = self.planned_parts()
        prepare_store(
            self.root,
            self.dataset,
            lambda: self._partition(num_parts),
            self.fingerprint(num_parts),
            overwrite=self.overwrite,
            progress=self.progress,
            store_fingerprint=lambda: self._store_fingerprint(num_parts),
            pack_halo=self.pack_halo,
        )

    def fingerprint(self, num_parts: int) -> str:
        """Return a digest of what a store of this many parts is made from: input, partitioner, seed."""
        made = {"partitioner": describe_partitioner(self.partitioner), "seed": self.seed}
        return preparation_fingerprint(self.dataset, made | ({"pack_halo": True} if self.pack_halo else {}), num_parts)

    def _store_fingerprint(self, num_parts: int) -> str | None:
        return expected_store_fingerprint(self.dataset, self.partitioner, num_parts, self.seed, self.pack_halo)

    def planned_parts(self) -> int:
        """Return the number of parts: as given; else that of a store of this input that stands; else the planner's."""
        if self.num_parts != "auto":
            return self.num_parts
        standing = None if self.dataset is None else self._standing_parts()
        return self.make_plan().num_parts if standing is None else standing

    def _standing_parts(self) -> int | None:
        return standing_parts(self.root, self.fingerprint, self._store_fingerprint)

    def make_plan(self, num_devices: int | None = None, **options) -> Plan:
        """Return the plan for this graph.

        Args:
            num_devices: None takes the Trainer's, or 1 without one.
            options: further arguments of `gs.plan` and `predict_training`; they go before the DataModule's own.

        Cost: nothing is read but counts; where reverses are added to edges of layout "auto", and no store of this
        input and number of parts stands, the edges once: those that are listed both ways are as many as will be stored.
        """
        devices = num_devices or self._rank_and_world()[1]
        made = self.planner(**{**self._sizes(), **self._batch_shape(), "num_devices": devices, **options})
        return replace(made, edges_note=self._count_arcs()[1])

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Refuse settings of a Trainer that cannot go with this DataModule, before a store is made; `setup` calls it.

        Raises:
            StrategyError: the message names the setting and the remedy.
        """

    def setup(self, stage: str | None = None) -> None:
        """Open the store.

        Raises:
            PartitionStoreError: it has no features, and the model brings none.
            StrategyError: the Trainer does not go with this DataModule.
        """
        if stage == "fit" and self.trainer is not None:
            self.check_trainer(self.trainer)
        inputs = getattr(getattr(self.trainer, "lightning_module", None), "inputs", None)
        if not self.stored_features and inputs is None:
            raise StrategyError("stored_features=False leaves batches without features, and the model has no inputs=")
        if self.store.features is None and (inputs is None or not self.takes_inputs):
            remedy = ", or train embeddings: inputs=DistributedEmbedding(...) of the model" if self.takes_inputs else ""
            raise PartitionStoreError(
                f"{self.root}: the store has no features; write it with features= to train on it{remedy}"
            )

    @property
    def store(self) -> PartitionStore:
        """The open store; opened on first use."""
        if self._store is None:
            self._store = PartitionStore.open(self.root)
        return self._store

    @property
    def num_features(self) -> int:
        """Width of the stored features that batches have; 0 without."""
        return 0 if self.store.features is None or not self.stored_features else self.store.features.dim

    @property
    def num_classes(self) -> int:
        """Classes, or labels a node where there are several."""
        if self.dataset is not None and self.dataset.num_classes is not None:
            return self.dataset.num_classes
        labels = self.store.labels
        if labels is None:
            raise StrategyError(
                f"{self.root}: the store has no labels, and so no number of classes: write it with labels="
            )
        return int(labels.shape[1] if labels.ndim == 2 else labels.max(initial=-1) + 1)

    @property
    def partitioning_facts(self) -> dict:
        """What partitioning measured when the store was made; empty if unknown."""
        return partitioning_facts(self.root)

    def _batch_shape(self) -> dict[str, Any]:
        """Return what `predict_training` asks of the batches."""
        raise NotImplementedError

    def _check_trainable(self) -> None:
        if self.store.labels is None or "train" not in self.store.masks:
            raise StrategyError(f"{self.root}: training needs labels and a train mask; write the store with both")

    def _check_testable(self) -> None:
        if "test" not in self.store.masks:
            raise StrategyError(f"{self.root}: testing needs a test mask; write the store with masks={{'test': ...}}")

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _sizes(self) -> dict[str, Any]:
        """Return what the planner asks of the graph: from its input, or from a store that was given."""
        if self.dataset is None:
            table = self.store.features
            sizes = {"num_parts": self.store.num_parts, "feature_dim": 0 if table is None else table.dim}
            return sizes | {
                "num_nodes": self.store.num_nodes,
                "num_edges": self.store.num_arcs,
                "feature_bytes": 0 if table is None else table.nbytes,
                "feature_row_bytes": 0.0 if table is None else table.batch_row_bytes,
            }
        num_arcs = self._count_arcs()[0]
        return {
            "num_parts": None if self.num_parts == "auto" else self.num_parts,
            "num_nodes": self.dataset.stream.count()[0],
            "num_edges": num_arcs,
            "feature_bytes": self.dataset.feature_bytes,
            "feature_dim": self.dataset.feature_dim,
            "feature_row_bytes": self.dataset.batch_row_bytes,
        }

    def _count_arcs(self) -> tuple[int, str]:
        """Return the arcs that a store has, and how they were counted where that is not plain."""
        if self.dataset is None:
            return self.store.num_arcs, ""
        num_parts = self._standing_parts() if self.num_parts == "auto" else self.num_parts
        num_arcs = None if num_parts is None else standing_arcs(self.root, self.fingerprint(num_parts))
        if num_arcs is not None:
            return num_arcs, ""
        stream = self.dataset.stream
        if not stream.to_undirected:
            return stream.count()[1], ""
        layout = stream.layout
        if layout == "auto":
            if self._both_ways is None:
                self._both_ways = lists_both_ways(stream)
            layout = "both_ways" if self._both_ways else "auto"
        num_edges = stream.count()[1]
        if layout == "both_ways":
            return num_edges, "both directions of each edge are listed"
        return 2 * num_edges, "reverses added" if layout == "once" else "at most: reverses added, repeats to be dropped"

    def _partition(self, num_parts: int) -> Partitioning:
        """Partition, and count in the figures the feature rows that a part loads."""
        made = self._assign(num_parts)
        num_nodes, feature_bytes = self.dataset.stream.num_nodes, self.dataset.feature_bytes
        if made.quality is None or not num_nodes or made.quality.feature_bytes:
            return made
        return replace(made, quality=made.quality.with_feature_bytes(feature_bytes / num_nodes))

    def _assign(self, num_parts: int) -> Partitioning:
        options: dict[str, Any] = {"num_parts": num_parts, "seed": self.seed, "masks": self.dataset.masks}
        if isinstance(self.partitioner, str):
            return partition(self.dataset.stream, method=self.partitioner, progress=self.progress, **options)
        return self.partitioner(self.dataset.stream, progress=self.progress, **options)


def _folder(store: str | os.PathLike | PartitionStore) -> Path:
    return store.root if isinstance(store, PartitionStore) else Path(store)
