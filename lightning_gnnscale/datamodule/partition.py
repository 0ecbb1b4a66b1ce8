"""`PartitionDataModule`: partitions in `prepare_data`, trains on parts, evaluates exactly."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset import GraphDataset
from ..loader import PartLoader, parts_of_rank
from ..partition_store import PartitionStore
from ..partitioner import Partitioning
from ..planner import Plan
from ..sampler import ClusterSampler, FullBatchSampler, NeighborSampler
from .clustering import clusters_by
from .layer_source import EvaluationLoader, EvaluationPass, StoreLayerSource
from .scratch import open_scratch
from .stored_graph import StoredGraphDataModule, check_count
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


class PartitionDataModule(StoredGraphDataModule):
    """Train on the parts of a graph, one part at a time on each process.

    Parts go to the ranks cyclically, so there may be more parts than ranks.

    Args:
        store, root, dataset, stream, features, labels, masks, edge_weight, partitioner, num_parts, planner, overwrite,
            progress: the store, or what it is made from; see `StoredGraphDataModule`.
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
        super().__init__(
            store,
            root=root,
            dataset=dataset,
            stream=stream,
            features=features,
            labels=labels,
            masks=masks,
            edge_weight=edge_weight,
            partitioner=partitioner,
            num_parts=num_parts,
            planner=planner,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
        _check_choice("mode", mode, MODES)
        _check_choice("scope", scope, SCOPES)
        _check_choice("evaluation", evaluation, ("layerwise", "sampled"))
        check_count("batch_size", batch_size)
        check_count("num_threads", num_threads)
        if halo_hops not in (0, 1, 2, 3):
            raise ValueError(f"halo_hops must be 0, 1, 2 or 3, got {halo_hops!r}")
        self.mode, self.scope, self.evaluation = mode, scope, evaluation
        self.sampler = FullBatchSampler() if mode == "full_batch" else sampler or NeighborSampler([25, 10])
        if isinstance(self.sampler, ClusterSampler) and self.sampler.cluster is None:
            self.sampler = replace(self.sampler, cluster=clusters_by("spring"))
        self.halo_hops, self.block_arcs = halo_hops, block_arcs
        self.loader_options = LoaderOptions(batch_size, num_threads, prefetch_batches, shuffle, seed)
        self._scratch: Path | None = None

    def setup(self, stage: str | None = None) -> None:
        """Open the store, and a scratch folder for evaluation."""
        super().setup(stage)
        if self._scratch is None:
            self._scratch = open_scratch(self.root, self.trainer)

    @property
    def part_weights(self) -> np.ndarray:
        """(num_parts,) float64: training nodes of each part, the weights of model averaging."""
        return np.array([len(nodes) for nodes in part_targets(self.store).values()], np.float64)

    def parts_of_rank(self, rank: int, world_size: int) -> list[int]:
        """Return the parts of a rank, in the order of their visits: rank, rank + world_size, ..."""
        return parts_of_rank(self.store.num_parts, rank, world_size)

    def train_dataloader(self):
        """Return this rank's batches: a plain iterable that shards itself."""
        self._check_trainable()
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
        self._check_testable()
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

    def _batch_shape(self) -> dict[str, Any]:
        return {
            "batch_size": self.loader_options.batch_size if self.mode == "mini_batch" else None,
            "fanouts": getattr(self.sampler, "fanouts", ()),
            "prefetch_batches": self.loader_options.prefetch_batches + 1,
        }


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
