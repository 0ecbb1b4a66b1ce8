"""A partitioned graph on disk: written once, memory-mapped by every process."""

from .disk import WriteBudget
from .features import Column, CSRFeatures, DenseFeatures, LoadedRows, SparseRows
from .inputs import Columns, input_fingerprint
from .packed_features import PackedFeatures, features_of_part
from .part_graph import PartGraph, WholeGraph
from .planned_reads import RankedNodes
from .published import publish
from .reader import PartitionStore
from .writer import write_partition_store

__all__ = [
    "CSRFeatures",
    "Column",
    "Columns",
    "DenseFeatures",
    "LoadedRows",
    "PackedFeatures",
    "PartGraph",
    "PartitionStore",
    "RankedNodes",
    "SparseRows",
    "WholeGraph",
    "WriteBudget",
    "features_of_part",
    "input_fingerprint",
    "publish",
    "write_partition_store",
]
