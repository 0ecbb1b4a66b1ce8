"""The graph of `gnnscale bench gpu`: generated in seconds where training runs, and the forms that it is read in."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnnscale.graph import CSC, numbered_schema
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import DenseFeatures
from lightning_gnnscale.partition_store.typed_features import NodeTypes
from lightning_gnnscale.placement import FeatureBuffer, Placement

from .graphs import NUM_CLASSES, some_seeds
from .page_cache import evict

NUM_EDGE_TYPES = 4
_CHUNK = 1 << 24  # ends sampled at a time


@dataclass(frozen=True)
class GPUGraph:
    """A generated graph in host memory.

    Attributes:
        csc: Its rows; neighbours are in no order within a row.
        features: (num_nodes, dim) float32.
        seeds: (num_seeds,) int64 training nodes, ascending.
        folder: Folder for the features as a file.
    """

    csc: CSC
    features: np.ndarray
    seeds: np.ndarray
    folder: Path

    @property
    def num_nodes(self) -> int:
        return self.csc.num_rows

    @cached_property
    def labels(self) -> np.ndarray:
        """(num_nodes,) int64."""
        return np.arange(self.num_nodes) % NUM_CLASSES

    @cached_property
    def edge_type(self) -> np.ndarray:
        """(num_edges,) uint8 edge types in turn."""
        return (np.arange(self.csc.num_edges, dtype=np.uint32) % NUM_EDGE_TYPES).astype(np.uint8)

    def whole(self, typed: bool) -> WholeGraph:
        """Return the graph as loaders take it, with edge types or without."""
        whole = WholeGraph.of(self.csc, 0)
        if not typed:
            return whole
        node_types = NodeTypes.of_runs(np.array([0, self.num_nodes]), 1)
        schema, columns = numbered_schema(NUM_EDGE_TYPES, "bench"), {"edge_type": self.edge_type}
        return replace(whole, schema=schema, node_types=node_types, columns=columns)

    @cached_property
    def features_on_disk(self) -> DenseFeatures:
        """The features in a file, of which nothing is in memory."""
        path = self.folder / "features.npy"
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(path, self.features)
        evict(path)
        return DenseFeatures(np.load(path, mmap_mode="r"))

    def close(self) -> None:
        """Remove the file."""
        (self.folder / "features.npy").unlink(missing_ok=True)

    def buffer(self, tier: str, device: torch.device) -> FeatureBuffer:
        """Return the features with all rows in one tier: "device", "pinned" or "disk"."""
        num = self.num_nodes
        own = np.arange(num if tier == "device" else 1)
        on_disk = np.ones(num, bool) if tier == "disk" else None
        placement = Placement((own,), ((0,),), num, on_disk, {}, ({},), tier)
        table = self.features_on_disk if tier == "disk" else DenseFeatures(self.features)
        return FeatureBuffer(placement, table, on="cpu" if device.type == "cpu" else str(device))


def generate(
    num_nodes: int, num_edges: int, dim: int, num_seeds: int, seed: int, device: torch.device, folder: Path
) -> GPUGraph:
    """Generate a heavy-tailed graph: both ends of an edge are sampled in proportion to Pareto(1.8) + 1 weights.

    Targets are counted, and sources sampled row after row, so that nothing is sorted.

    Args:
        num_nodes, num_edges, dim: Size of the graph, and columns of its features.
        num_seeds: Number of training nodes.
        seed: Seed of all of it; another device gives another graph.
        device: Device that generates.
        folder: See `GPUGraph`.
    """
    random = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(num_nodes, generator=random, device=device, dtype=torch.float64)
    upper = (1 - uniform).pow_(-1 / 1.8).cumsum(0)
    degree = torch.zeros(num_nodes, dtype=torch.int64, device=device)
    indices = np.empty(num_edges, np.int32)
    for first in range(0, num_edges, _CHUNK):
        size = min(_CHUNK, num_edges - first)
        degree += torch.bincount(_ends(upper, size, random), minlength=num_nodes)
        indices[first : first + size] = _ends(upper, size, random).int().cpu().numpy()
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)]).cpu().numpy()
    features = np.empty((num_nodes, dim), np.float32)
    step = max(1, _CHUNK // dim)
    for first in range(0, num_nodes, step):
        rows = torch.from_numpy(features[first : first + step])
        rows.copy_(torch.rand(rows.shape, generator=random, device=device))
    return GPUGraph(CSC(indptr, indices), features, some_seeds(num_nodes, num_seeds, seed), folder)


def _ends(upper: Tensor, size: int, random: torch.Generator) -> Tensor:
    uniform = torch.rand(size, generator=random, device=upper.device, dtype=torch.float64)
    return torch.searchsorted(upper, uniform * upper[-1]).clamp_(max=len(upper) - 1)
