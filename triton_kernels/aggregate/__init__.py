"""Reductions over the in-edges of each node: sums, means, extremes, softmax over a row, sums and products of ends."""

from .cpu import add_placed_edges
from .op import Transposed, add_edges, aggregate, edge_add, edge_dot, edge_softmax, take_rows, transpose

__all__ = [
    "Transposed",
    "add_edges",
    "add_placed_edges",
    "aggregate",
    "edge_add",
    "edge_dot",
    "edge_softmax",
    "take_rows",
    "transpose",
]
