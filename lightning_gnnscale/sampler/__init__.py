"""What to draw: samplers as plain values, and the batch they fill."""

from .full_batch import FullBatchSampler
from .minibatch import MiniBatch, SparseFeatures
from .neighbor import NeighborSampler
from .subgraph import BatchSampler, Subgraph

__all__ = ["BatchSampler", "FullBatchSampler", "MiniBatch", "NeighborSampler", "SparseFeatures", "Subgraph"]
