"""A graph with its features, labels and masks, in the order of its stream."""

from .columns import CSRArrays
from .files import load_files
from .generated import generate, load_leaky_events, load_mag_shape
from .graph_change import GraphChange
from .graph_dataset import GraphDataset
from .hetero import hetero_graph
from .npz import load_npz
from .ogb import load_ogb
from .pyg import load_pyg
from .relbench import load_relbench
from .split import LinkSet, hold_out_edges, random_split

__all__ = [
    "CSRArrays",
    "GraphChange",
    "GraphDataset",
    "LinkSet",
    "generate",
    "hetero_graph",
    "hold_out_edges",
    "load_files",
    "load_leaky_events",
    "load_mag_shape",
    "load_npz",
    "load_ogb",
    "load_pyg",
    "load_relbench",
    "random_split",
]
