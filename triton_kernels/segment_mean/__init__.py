"""Means and weighted sums over the in-arcs of each node in Triton, forward and backward, with no message in memory."""

from .op import segment_mean

__all__ = ["segment_mean"]
