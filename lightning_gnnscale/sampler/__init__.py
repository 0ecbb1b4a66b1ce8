"""What to sample: samplers as plain values, and the batch they fill."""

from .cluster import ClusterSampler, FullBatchSampler
from .layerwise import LayerwiseSampler
from .link_sampler import LinkSampler
from .links import AliasTable, sample_negatives, sample_positives
from .locality import LocalityBias
from .minibatch import MiniBatch, SparseFeatures
from .neighbor import NeighborSampler
from .protocol import BatchSampler, Subgraph, induced_subgraph, num_slices, seed_slices
from .saint import SaintSampler

__all__ = [
    "AliasTable",
    "BatchSampler",
    "ClusterSampler",
    "FullBatchSampler",
    "LayerwiseSampler",
    "LinkSampler",
    "LocalityBias",
    "MiniBatch",
    "NeighborSampler",
    "SaintSampler",
    "SparseFeatures",
    "Subgraph",
    "induced_subgraph",
    "num_slices",
    "sample_negatives",
    "sample_positives",
    "seed_slices",
]
