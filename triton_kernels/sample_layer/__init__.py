"""Layer-wise importance sampling: a fixed number of nodes sampled for a whole layer at a time."""

from .op import check_layer_sizes, sample_layers

__all__ = ["check_layer_sizes", "sample_layers"]
