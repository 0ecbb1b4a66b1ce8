"""SGC over CSC rows."""

from torch import Tensor, nn
from torch_geometric.nn import SGConv

from ..triton_kernels.aggregate import aggregate
from .backbone import Backbone
from .block import Block, normalized
from .sparse_linear import SparseInput, as_input, dense_rows, linear


class SGC(Backbone):
    """Simplified graph convolution: num_layers propagations, one linear map, nothing between them.

    The map commutes with propagation: it comes first where it makes rows narrower. Each hop of a sampled batch is
    one propagation.

    Args:
        in_channels, out_channels: widths.
        hidden_channels: not used; it stands here so that all backbones are built alike.
        num_layers: propagations, >= 1.
        dropout: probability on the features (the model has no hidden layer to drop).
        input_dropout: as dropout; the larger of the two counts.

    Raises:
        ValueError: out_channels is missing, or see `Backbone`.

    Source: Wu et al., Simplifying graph convolutional networks, ICML 2019.
    """

    needs_degree = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int | None = None,
        out_channels: int | None = None,
        num_layers: int = 2,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ):
        if out_channels is None:
            raise ValueError("model.out_channels must be given")
        super().__init__(in_channels, out_channels, out_channels, num_layers, dropout, max(dropout, input_dropout))
        self.conv = SGConv(in_channels, out_channels, K=num_layers)
        self.maps_first = out_channels <= in_channels

    def make_layer(self, index: int) -> nn.Module:
        return nn.Identity()  # a propagation has no parameters

    def prepare(self, block: Block) -> Block:
        return normalized(block, self.dtype)

    def layer_channels(self, index: int) -> int:
        if index == 0:
            return self.in_channels
        return self.out_channels if self.maps_first or index == self.num_layers else self.in_channels

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()

    def apply_layer(self, index: int, x: Tensor | SparseInput, block: Block) -> Tensor:
        if index == 0:
            x = linear(x, self.conv.lin.weight) if self.maps_first else dense_rows(x)
        return self._propagate(index, x, block)

    def projected_channels(self, index: int, sparse: bool) -> int | None:
        narrower = self.out_channels < self.in_channels or sparse
        return self.out_channels if index == 0 and self.maps_first and narrower else None

    def project(self, index: int, x) -> Tensor:
        return linear(as_input(x, self.reference), self.conv.lin.weight)

    def layer_projected(self, index: int, projected: Tensor, block: Block) -> Tensor:
        return self._propagate(index, as_input(projected, self.reference), self.prepare(block))

    def _propagate(self, index: int, x: Tensor, block: Block) -> Tensor:
        x = aggregate(x, block.indptr, block.indices, block.edge_weight)
        if index < self.num_layers - 1:
            return x
        lin = self.conv.lin
        return x + lin.bias if self.maps_first else linear(x, lin.weight, lin.bias)
