"""A partitioned graph on disk: written once, memory-mapped by every process."""

from .budget import WriteBudget
from .features import CSRFeatures, DenseFeatures, FeatureTable, SparseRows
from .inputs import input_fingerprint
from .part_graph import PartGraph
from .reader import PartitionStore
from .writer import write_partition_store

__all__ = [
    "CSRFeatures",
    "DenseFeatures",
    "FeatureTable",
    "PartGraph",
    "PartitionStore",
    "SparseRows",
    "WriteBudget",
    "input_fingerprint",
    "write_partition_store",
]
