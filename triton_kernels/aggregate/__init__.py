"""Reductions over the in-arcs of each node: weighted sums and means, softmax over a row, sums of end values."""

from .op import Transposed, add_arcs, aggregate, edge_add, edge_softmax, segment_mean, transpose

__all__ = ["Transposed", "add_arcs", "aggregate", "edge_add", "edge_softmax", "segment_mean", "transpose"]
