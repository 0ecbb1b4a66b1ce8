"""Layer-wise importance sampling: a fixed number of nodes sampled for a whole layer at a time."""

from .checks import check_layer_sizes
from .device import sample_layers_on_device
from .op import sample_layers

__all__ = ["check_layer_sizes", "sample_layers", "sample_layers_on_device"]
