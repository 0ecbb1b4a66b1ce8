"""Rows by node that hosts share: learnable embeddings, and features that live on other hosts."""

from .distributed_embedding import DistributedEmbedding
from .optimizers import SparseAdam, SparseSGD
from .remote_features import RemoteFeatures

__all__ = ["DistributedEmbedding", "RemoteFeatures", "SparseAdam", "SparseSGD"]
