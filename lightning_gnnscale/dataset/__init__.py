"""A graph with its features, labels and masks, in the order of its stream."""

from .files import load_files
from .generated import generate
from .generated_kinds import load_leaky_events, load_mag_shape
from .graph_dataset import CSRArrays, GraphDataset
from .npz import load_npz
from .ogb import load_ogb
from .pyg import load_pyg
from .relbench import load_relbench
from .split import LinkSet, hold_out_edges, random_split
from .typed_files import load_typed
from .typed_graph import TypedGraph

__all__ = [
    "CSRArrays",
    "GraphDataset",
    "LinkSet",
    "TypedGraph",
    "generate",
    "hold_out_edges",
    "load_files",
    "load_leaky_events",
    "load_mag_shape",
    "load_npz",
    "load_ogb",
    "load_pyg",
    "load_relbench",
    "load_typed",
    "random_split",
]
