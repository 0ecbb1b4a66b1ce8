"""Learnable rows by node that hosts share."""

from .distributed_embedding import DistributedEmbedding
from .optimizers import SparseAdam, SparseSGD

__all__ = ["DistributedEmbedding", "SparseAdam", "SparseSGD"]
