"""Reductions over the in-arcs of each node: weighted sums and means, softmax over a row, sums of end values."""

from .op import aggregate, edge_add, edge_softmax

__all__ = ["aggregate", "edge_add", "edge_softmax"]
