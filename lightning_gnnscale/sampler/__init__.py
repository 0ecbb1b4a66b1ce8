"""What to draw: samplers as plain values, and the batch they fill."""

from .cluster import ClusterSampler
from .full_batch import FullBatchSampler
from .layerwise import LayerwiseSampler
from .locality import LocalityBias
from .minibatch import MiniBatch, SparseFeatures
from .neighbor import NeighborSampler
from .saint import SaintSampler
from .subgraph import BatchSampler, Subgraph

__all__ = [
    "BatchSampler",
    "ClusterSampler",
    "FullBatchSampler",
    "LayerwiseSampler",
    "LocalityBias",
    "MiniBatch",
    "NeighborSampler",
    "SaintSampler",
    "SparseFeatures",
    "Subgraph",
]
