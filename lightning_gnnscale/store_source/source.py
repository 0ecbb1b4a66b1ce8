"""`StoreSource`: a graph, a partitioner, a number of parts, and the partition store that comes of them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..dataset import GraphDataset
from ..errors import check_count
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


class StoreSource:
    """What a partition store is made from. Its root and its number of parts may be set until the store is made.

    Args:
        dataset: the graph and its rows.
        root: folder that the store is written to; skipped where the same one stands.
        partitioner: name of a method, or a callable (stream, num_parts, seed, masks, progress) -> Partitioning.
        num_parts: parts; "auto" asks the planner.
        planner: callable with the arguments of `gs.plan`; it may carry memory sizes. None: `gs.plan`.
        seed: of partitioning.
        overwrite: replace a store made from other input, or a damaged one.
        pack_halo: a store that is written also has the feature rows of each part's halo beside the part.
        feature_storage: How a store that is written holds features, see `write_partition_store`; None: the data set's.
        progress: (what, done, total), called while the store is made.

    Raises:
        ValueError: num_parts is out of range.
    """

    def __init__(
        self,
        dataset: GraphDataset,
        root: str | os.PathLike,
        *,
        partitioner: str | Callable[..., Partitioning] = "spring",
        num_parts: int | str = "auto",
        planner: Callable[..., Plan] | None = None,
        seed: int = 0,
        overwrite: bool = False,
        pack_halo: bool = False,
        feature_storage: str | None = None,
        progress: Callable[[str, int, int | None], None] | None = None,
    ):
        if num_parts != "auto":
            check_count("num_parts", num_parts)
        self.dataset, self.root = dataset, Path(root)
        if feature_storage is not None:
            self.dataset = replace(dataset, feature_storage=feature_storage)
        self.partitioner, self.num_parts, self.planner = partitioner, num_parts, planner or plan
        self.seed, self.overwrite, self.pack_halo, self.progress = seed, overwrite, pack_halo, progress
        self._both_ways: bool | None = None  # of a stream with layout "auto", once it has been read

    def prepare(self, num_parts: int) -> PartitionStore:
        """Partition and write the store, or open the same one where it stands; see `prepare_store` for errors."""
        return prepare_store(
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

    def standing_parts(self) -> int | None:
        """Return the number of parts of the store at root where it was made from this, else None."""
        return standing_parts(self.root, self.fingerprint, self._store_fingerprint)

    @property
    def partitioning_facts(self) -> dict:
        """What partitioning measured when the store at root was made; empty if unknown."""
        return partitioning_facts(self.root)

    def make_plan(self, num_devices: int = 1, **options) -> Plan:
        """Return the plan for this graph.

        Args:
            num_devices: devices that train.
            options: further arguments of `gs.plan` and `predict_training`; they go before what the graph tells.

        Cost: nothing is read but counts; where reverses are added to edges of layout "auto", and no store of this
        input and number of parts stands, the edges once: those that are listed both ways are as many as will be stored.
        """
        num_arcs, note = self._count_arcs()
        sizes = {
            "num_parts": None if self.num_parts == "auto" else self.num_parts,
            "num_nodes": self.dataset.stream.count()[0],
            "num_edges": num_arcs,
            "feature_bytes": self.dataset.feature_bytes,
            "edge_row_bytes": self.dataset.edge_row_bytes,
            "feature_dim": self.dataset.feature_dim,
            "feature_row_bytes": self.dataset.batch_row_bytes,
        }
        return replace(self.planner(**{**sizes, "num_devices": num_devices, **options}), edges_note=note)

    def _store_fingerprint(self, num_parts: int) -> str | None:
        return expected_store_fingerprint(self.dataset, self.partitioner, num_parts, self.seed, self.pack_halo)

    def _count_arcs(self) -> tuple[int, str]:
        """Return the arcs that the store will have, and how they were counted where that is not plain."""
        num_parts = self.standing_parts() if self.num_parts == "auto" else self.num_parts
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
