"""A partition store as the source of exact layer-wise inference: each rank's rows, in bounded blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..errors import wait_for_others
from ..model.layer_source import RowBlock
from ..partition_store import PartitionStore
from ..sampler.minibatch import sparse_rows_to_torch
from .link_evaluation import EvaluationLinks
from .scratch import Scratch


class StoreLayerSource:
    """The rows of some parts, and every node's features: implements the model's `LayerSource`.

    Args:
        store: the partition store.
        parts: parts whose rows this rank computes; over all ranks each part stands once.
        scratch: on a disk that all ranks reach; tables of hidden layers lie there while they are needed.
        block_arcs: arcs a block, at least one row's.
        stored_features: False gives none of them.
    """

    def __init__(
        self,
        store: PartitionStore,
        parts: list[int],
        scratch: Scratch,
        block_arcs: int = 1 << 20,
        stored_features: bool = True,
    ):
        if block_arcs < 1:
            raise ValueError(f"block_arcs must be at least 1, got {block_arcs}")
        self.store, self.parts, self.scratch, self.block_arcs = store, list(parts), scratch, block_arcs
        self.num_nodes = store.num_nodes
        self._features = store.features if stored_features else None

    def blocks(self) -> Iterator[RowBlock]:
        """Yield this rank's rows as CSC blocks of at most `block_arcs` arcs (one row may be longer), mapped."""
        csc, weight = self.store.csc, self.store.edge_weight
        for part in self.parts:
            start, end = int(self.store.part_offsets[part]), int(self.store.part_offsets[part + 1])
            while start < end:
                limit = csc.indptr[start] + self.block_arcs
                stop = int(np.searchsorted(csc.indptr[start + 1 : end + 1], limit, side="right")) + start
                stop = min(max(stop, start + 1), end)
                first, last = int(csc.indptr[start]), int(csc.indptr[stop])
                yield RowBlock(
                    rows=np.arange(start, stop),
                    indptr=np.asarray(csc.indptr[start : stop + 1]) - first,
                    indices=csc.indices[first:last],
                    edge_weight=None if weight is None else weight[first:last],
                )
                start = stop

    def gather(self, nodes: np.ndarray):
        """Return the features of some nodes: a (num, dim) tensor, or sparse rows as `x_csr`; None without features."""
        if self._features is None:
            return None
        rows = self._features.gather(nodes)
        return sparse_rows_to_torch(rows) if self._features.is_sparse else torch.from_numpy(rows)

    def degree(self, nodes: np.ndarray) -> np.ndarray:
        """Return the in-degree of some nodes, (num,) int64; sums of weights, float32, where the store has weights."""
        if self.store.edge_weight is not None:
            return self.store.weighted_degree[nodes]
        indptr = self.store.csc.indptr
        return np.asarray(indptr[np.asarray(nodes) + 1] - indptr[nodes])

    def table(self, name: str, dim: int) -> np.ndarray:
        """Return a (num_nodes, dim) float32 array on disk that all ranks share; every rank must ask for it."""
        if _rank() == 0:
            self.scratch.make_table(name, self.num_nodes, dim)
        self.barrier()
        return np.load(self.scratch.path(name), mmap_mode="r+")

    def barrier(self) -> None:
        """Wait for the other ranks."""
        wait_for_others()

    def close(self) -> None:
        """Remove the tables; every rank must call it."""
        self.barrier()
        if _rank() == 0:
            self.scratch.close()


@dataclass
class EvaluationPass:
    """One exact pass over this rank's rows: the single batch of the validation, test and predict loaders.

    Attributes:
        source: where layer-wise inference reads.
        split: "val", "test", or None to predict every node.
        labels: (num_nodes,) or (num_nodes, num_labels) in store ids, None without labels.
        masks: {"train" | "val" | "test": bool (num_nodes,)} in store ids.
        links: this rank's `EvaluationLinks`, or None.
    """

    source: StoreLayerSource
    split: str | None
    labels: np.ndarray | None
    masks: dict[str, np.ndarray]
    links: EvaluationLinks | None = None

    @property
    def rows(self) -> np.ndarray:
        """(num_rows,) int64 store ids that this rank computes, ascending within a part."""
        offsets = self.source.store.part_offsets
        ranges = [np.arange(offsets[part], offsets[part + 1]) for part in self.source.parts]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def to(self, device, non_blocking: bool = False) -> "EvaluationPass":
        """Return itself: blocks move to the device one by one."""
        return self


@dataclass(frozen=True)
class EvaluationLoader:
    """The validation, test or predict loader of a rank: one pass. (Lightning reads a list as several loaders.)"""

    evaluation: EvaluationPass

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvaluationPass]:
        yield self.evaluation


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
