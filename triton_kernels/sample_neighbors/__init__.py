"""Fan-out neighbour sampling over a CSC, uniform or with a preference for a set of nodes."""

from .choice import SplitRows, split_range, split_rows
from .cpu import Workspace
from .edge_types import Relation, group_edge_types
from .hops import HopSampling, SampledNeighbors, check_fanouts
from .op import sample_neighbors
from .rows import SampleOptions

__all__ = [
    "HopSampling",
    "Relation",
    "SampleOptions",
    "SampledNeighbors",
    "SplitRows",
    "Workspace",
    "check_fanouts",
    "group_edge_types",
    "sample_neighbors",
    "split_range",
    "split_rows",
]
