"""`PartitionDataModule`: partitions in `prepare_data`, trains on parts, evaluates exactly."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from ..dataset import GraphDataset
from ..errors import PartitionStoreError, StrategyError
from ..loader import PartLoader, parts_of_rank
from ..partition_store import PartitionStore
from ..partitioner import Partitioning, partition
from ..planner import Plan, plan
from ..sampler import ClusterSampler, FullBatchSampler, NeighborSampler
from .clustering import clusters_by
from .layer_source import EvaluationLoader, EvaluationPass, StoreLayerSource
from .preparation import made_from, partitioning_facts, preparation_fingerprint, prepare_store
from .scratch import open_scratch
from .train_loader import (
    LoaderOptions,
    check_scope,
    make_evaluation_loader,
    make_graph_loader,
    make_part_loader,
    part_targets,
)

MODES = ("mini_batch", "full_batch")
SCOPES = ("auto", "part", "graph")


class PartitionDataModule(L.LightningDataModule):
    """Train on the parts of a graph, one part at a time on each process.

    Give either a store that stands (`store`), or what to make one from (`dataset`, or `stream` with `features`,
    `labels`, `masks`, all in the stream's node order) and where to put it (`root`). Parts go to the ranks
    cyclically, so there may be more parts than ranks.

    Args:
        store: folder of a partition store, or an open one.
        root: folder that the store is written to; skipped where the same one stands.
        dataset: a `GraphDataset`; instead of `stream`, `features`, `labels`, `masks`.
        stream, features, labels, masks, edge_weight: see `write_partition_store`.
        partitioner: name of a method, or a callable (stream, num_parts, seed, masks, progress) -> Partitioning.
        num_parts: parts; "auto" asks the planner.
        planner: callable with the arguments of `gs.plan`, for "auto"; it may carry memory sizes.
        mode: "mini_batch", or "full_batch": each part is one batch.
        sampler: what a mini-batch draws; None: `NeighborSampler([25, 10])`. A `ClusterSampler` without clusters of
            its own gets SPRING's.
        batch_size: seeds a batch, >= 1.
        halo_hops: hops of halo that a part sees, 0 to 3; 0 gives each cross edge to one of its two parts.
        scope: "part": batches stay inside core and halo; "graph": they cross parts and ranks get equal shares of the
            seeds; "auto": "graph" under gradient averaging, else "part".
        evaluation: "layerwise": exact, a layer at a time over the whole graph; "sampled": batches with all neighbours
            of as many hops as the sampler has fan-outs (2 without), exact too, for any backbone, and dearer.
        seed: of partitioning, seed order and sampling.
        num_threads, prefetch_batches: threads that prepare batches on each rank, and how many stand ready.
        shuffle: new seed order every epoch.
        block_arcs: arcs a block of layer-wise inference.
        overwrite: replace a store made from other input.
        progress: (what, done, total), called while the store is made.

    Raises:
        ValueError, PartitionStoreError, StrategyError: one line with the remedy.

    Source: SDT-GNN, training and evaluation. Differs: evaluation is exact layer-wise inference shared over ranks.
    """

    def __init__(
        self,
        store: str | os.PathLike | PartitionStore | None = None,
        *,
        root: str | os.PathLike | None = None,
        dataset: GraphDataset | None = None,
        stream=None,
        features=None,
        labels=None,
        masks=None,
        edge_weight=None,
        partitioner: str | Callable[..., Partitioning] = "spring",
        num_parts: int | str = "auto",
        planner: Callable[..., Plan] | None = None,
        mode: str = "mini_batch",
        sampler=None,
        batch_size: int = 512,
        halo_hops: int = 1,
        scope: str = "auto",
        evaluation: str = "layerwise",
        seed: int = 0,
        num_threads: int = 1,
        prefetch_batches: int = 2,
        shuffle: bool = True,
        block_arcs: int = 1 << 20,
        overwrite: bool = False,
        progress: Callable[[str, int, int | None], None] | None = None,
    ):
        super().__init__()
        _check_choice("mode", mode, MODES)
        _check_choice("scope", scope, SCOPES)
        _check_choice("evaluation", evaluation, ("layerwise", "sampled"))
        _check_count("batch_size", batch_size)
        _check_count("num_threads", num_threads)
        if halo_hops not in (0, 1, 2, 3):
            raise ValueError(f"halo_hops must be 0, 1, 2 or 3, got {halo_hops!r}")
        if num_parts != "auto":
            _check_count("num_parts", num_parts)
        if stream is not None:
            dataset = GraphDataset("graph", stream, features, labels, masks or {}, edge_weight=edge_weight)
        if (store is None) == (dataset is None):
            raise ValueError("give either store, or dataset (or stream) together with root")
        if dataset is not None and root is None:
            raise ValueError("root must name the folder that the partition store is written to")
        self.dataset, self.root = dataset, _folder(root if store is None else store)
        self.partitioner, self.num_parts, self.planner = partitioner, num_parts, planner or plan
        self.mode, self.scope, self.evaluation = mode, scope, evaluation
        self.sampler = FullBatchSampler() if mode == "full_batch" else sampler or NeighborSampler([25, 10])
        if isinstance(self.sampler, ClusterSampler) and self.sampler.cluster is None:
            self.sampler = replace(self.sampler, cluster=clusters_by("spring"))
        self.halo_hops, self.seed = halo_hops, seed
        self.block_arcs, self.overwrite, self.progress = block_arcs, overwrite, progress
        self.loader_options = LoaderOptions(batch_size, num_threads, prefetch_batches, shuffle, seed)
        self._store: PartitionStore | None = None
        self._scratch: Path | None = None

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
        )

    def fingerprint(self, num_parts: int) -> str:
        """Return a digest of what a store of this many parts is made from: input, partitioner, seed."""
        method = self.partitioner if isinstance(self.partitioner, str) else _describe(self.partitioner)
        return preparation_fingerprint(self.dataset, {"partitioner": method, "seed": self.seed}, num_parts)

    def planned_parts(self) -> int:
        """Return the number of parts: as given; else that of a store of this input that stands; else the planner's."""
        if self.num_parts != "auto":
            return self.num_parts
        standing = self.partitioning_facts.get("num_parts")
        if standing is not None and made_from(self.root) == self.fingerprint(standing):
            return standing
        return self.make_plan().num_parts

    def make_plan(self, num_devices: int | None = None, **options) -> Plan:
        """Return the plan for this graph.

        Args:
            num_devices: None takes the Trainer's, or 1 without one.
            options: further arguments of `predict_training`.
        """
        devices = num_devices or (self.trainer.world_size if self.trainer is not None else 1)
        return self.planner(
            **self._sizes(),
            num_devices=devices,
            batch_size=self.loader_options.batch_size if self.mode == "mini_batch" else None,
            fanouts=getattr(self.sampler, "fanouts", ()),
            prefetch_batches=self.loader_options.prefetch_batches + 1,
            **options,
        )

    def _sizes(self) -> dict:
        """Return what the planner asks of the graph: from its input, or from a store that was given."""
        if self.dataset is None:
            table = self.store.features
            sizes = {"num_parts": self.store.num_parts, "feature_dim": 0 if table is None else table.dim}
            return sizes | {
                "num_nodes": self.store.num_nodes,
                "num_edges": self.store.num_arcs,
                "feature_bytes": 0 if table is None or table.is_sparse else table.array.nbytes,
            }
        num_nodes, num_edges = self.dataset.stream.count()
        twice = 2 if self.dataset.stream.to_undirected and self.dataset.stream.layout != "both_ways" else 1
        return {
            "num_parts": None if self.num_parts == "auto" else self.num_parts,
            "num_nodes": num_nodes,
            "num_edges": twice * num_edges,
            "feature_bytes": self.dataset.feature_bytes,
            "feature_dim": self.dataset.feature_dim,
            "feature_row_bytes": self.dataset.batch_row_bytes,
        }

    def setup(self, stage: str | None = None) -> None:
        """Open the store, and give every rank its parts."""
        if self._store is None:
            self._store = PartitionStore.open(self.root)
        if self._store.features is None:
            raise PartitionStoreError(f"{self.root}: the store has no features; write it with features= to train on it")
        if self._scratch is None:
            self._scratch = open_scratch(self.root, self.trainer)

    @property
    def store(self) -> PartitionStore:
        """The open store; opened on first use."""
        if self._store is None:
            self._store = PartitionStore.open(self.root)
        return self._store

    @property
    def part_weights(self) -> np.ndarray:
        """(num_parts,) float64: training nodes of each part, the weights of model averaging."""
        return np.array([len(nodes) for nodes in part_targets(self.store).values()], np.float64)

    def parts_of_rank(self, rank: int, world_size: int) -> list[int]:
        """Return the parts of a rank, in the order of their visits: rank, rank + world_size, ..."""
        return parts_of_rank(self.store.num_parts, rank, world_size)

    @property
    def num_features(self) -> int:
        return self.store.features.dim

    @property
    def num_classes(self) -> int:
        """Classes, or labels a node where there are several."""
        if self.dataset is not None and self.dataset.num_classes is not None:
            return self.dataset.num_classes
        labels = self.store.labels
        return int(labels.shape[1] if labels.ndim == 2 else labels.max(initial=-1) + 1)

    @property
    def partitioning_facts(self) -> dict:
        """What partitioning measured when the store was made; empty if unknown."""
        return partitioning_facts(self.root)

    def train_dataloader(self):
        """Return this rank's batches: a plain iterable that shards itself."""
        if self.store.labels is None or "train" not in self.store.masks:
            raise StrategyError(f"{self.root}: training needs labels and a train mask; write the store with both")
        # Under another strategy than this package's there is one part's worth of everything a policy would say.
        weights = getattr(getattr(self.trainer, "strategy", None), "weights", None)
        scope = self.scope
        if scope == "auto":
            scope = "graph" if getattr(weights, "equal_batches", False) else "part"
        check_scope(scope, weights, self.sampler, self.store)
        ranks = self._rank_and_world()
        if scope == "graph":
            return make_graph_loader(self.store, self.sampler, self.loader_options, *ranks)
        passes = getattr(weights, "passes_per_epoch", 1)
        return make_part_loader(self.store, self.sampler, self.halo_hops, passes, self.loader_options, *ranks)

    def val_dataloader(self):
        return self._evaluation("val") if "val" in self.store.masks else []

    def test_dataloader(self):
        if "test" not in self.store.masks:
            raise StrategyError(f"{self.root}: testing needs a test mask; write the store with masks={{'test': ...}}")
        return self._evaluation("test")

    def predict_dataloader(self):
        return self._evaluation(None)

    def teardown(self, stage: str) -> None:
        """Remove the scratch folder."""
        if self._scratch is not None:
            StoreLayerSource(self.store, [], self._scratch).close()
            self._scratch = None

    def _evaluation(self, split: str | None) -> EvaluationLoader | PartLoader:
        rank, world_size = self._rank_and_world()
        if self.evaluation == "sampled":
            hops = len(getattr(self.sampler, "fanouts", ())) or 2
            return make_evaluation_loader(self.store, hops, split, self.loader_options, rank, world_size)
        source = StoreLayerSource(self.store, self.parts_of_rank(rank, world_size), self._scratch, self.block_arcs)
        return EvaluationLoader(EvaluationPass(source, split, self.store.labels, self.store.masks))

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _partition(self, num_parts: int) -> Partitioning:
        options: dict[str, Any] = {"num_parts": num_parts, "seed": self.seed, "masks": self.dataset.masks}
        if isinstance(self.partitioner, str):
            return partition(self.dataset.stream, method=self.partitioner, progress=self.progress, **options)
        return self.partitioner(self.dataset.stream, progress=self.progress, **options)


def _describe(partitioner: Callable) -> str:
    """Name a callable by what decides its result: a partial by its arguments."""
    keywords = getattr(partitioner, "keywords", {})
    function = getattr(partitioner, "func", partitioner)
    return f"{function.__module__}.{function.__qualname__}({sorted(keywords.items())})"


def _folder(store: str | os.PathLike | PartitionStore) -> Path:
    return store.root if isinstance(store, PartitionStore) else Path(store)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
