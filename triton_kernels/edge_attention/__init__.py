"""Attention over the in-edges of each node: softmax of additive scores, and the sum that it weighs, in one pass."""

from .op import EdgesBySource, edge_attention, group_by_source

__all__ = ["EdgesBySource", "edge_attention", "group_by_source"]
