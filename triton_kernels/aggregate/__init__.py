"""Reductions over the in-arcs of each node: weighted sums and means, softmax over a row, sums of end values."""

from .op import Transposed, aggregate, edge_add, edge_softmax, transpose

__all__ = ["Transposed", "aggregate", "edge_add", "edge_softmax", "transpose"]
