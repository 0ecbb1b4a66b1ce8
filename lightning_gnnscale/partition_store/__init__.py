"""A partitioned graph on disk: made once from a data set, memory-mapped by every process."""

from ..dataset.columns import Columns
from .disk import WriteBudget
from .features import Column, CSRFeatures, DenseFeatures, LoadedRows, SparseRows
from .inputs import input_fingerprint
from .packed_features import PackedFeatures, features_of_part
from .part_graph import PartGraph, WholeGraph
from .planned_reads import RankedNodes
from .preparation import partitioning_facts
from .published import publish
from .reader import PartitionStore
from .store_source import StoreMaking, StoreSource
from .stored_dataset import load_store
from .update import update_store
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
    "StoreMaking",
    "StoreSource",
    "WholeGraph",
    "WriteBudget",
    "features_of_part",
    "input_fingerprint",
    "load_store",
    "partitioning_facts",
    "publish",
    "update_store",
    "write_partition_store",
]
