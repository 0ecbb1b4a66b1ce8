"""What to draw: samplers as plain values, and the batch they fill."""

from .cluster import ClusterSampler
from .full_batch import FullBatchSampler
from .locality import LocalityBias
from .minibatch import MiniBatch, SparseFeatures
from .neighbor import NeighborSampler
from .saint import SaintSampler
from .subgraph import BatchSampler, Subgraph

__all__ = [
    "BatchSampler",
    "ClusterSampler",
    "FullBatchSampler",
    "LocalityBias",
    "MiniBatch",
    "NeighborSampler",
    "SaintSampler",
    "SparseFeatures",
    "Subgraph",
]
