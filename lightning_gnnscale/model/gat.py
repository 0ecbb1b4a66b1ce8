"""GAT over CSC rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv

from ..keywords import passes_on
from ..triton_kernels.edge_attention import edge_attention
from .backbone import Backbone, check_heads
from .block import Block, with_self_loops
from .dropout import RowDropout, dropout
from .layer_inputs import SparseInput, TimeEncoding, check_edge_inputs, linear
from .row_layers import RowEdges, RowLayer, SentRows


class GATLayer(GATConv, RowLayer):
    """PyG's `GATConv` (same parameters and names) over a block that has its self-loops."""

    @property
    def projected_channels(self) -> int:
        return self.heads * self.out_channels

    def transform(self, x: Tensor | SparseInput) -> Tensor:
        return linear(x, self.lin.weight)

    def combine(self, projected: Tensor, block: Block, edge_ids: Tensor | None = None) -> Tensor:
        """Return (num_targets, width): values summed by attention.

        Args:
            projected: (num_sources, heads * out_channels), from `transform`.
            block: edges with self-loops, and with features where the layer has an edge_dim.
            edge_ids: (num_edges,) int64 that decide dropout of the attention; None: positions.
        """
        # A block-diagonal map sums each head's channels in one matrix product.
        src_score = F.linear(projected, torch.block_diag(*self.att_src[0]))
        dst_score = F.linear(projected[: block.num_targets], torch.block_diag(*self.att_dst[0]))
        edge_score = None
        if block.edge_attr is not None:
            by_head = self.lin_edge.weight.view(self.heads, self.out_channels, -1) * self.att_edge[0].unsqueeze(-1)
            edge_score = F.linear(block.edge_attr, by_head.sum(dim=1))
        out = edge_attention(
            projected.view(-1, self.heads, self.out_channels), src_score, dst_score, block.indptr, block.indices,
            edge_score, None if block.edge_weight is None else block.edge_weight.to(src_score.dtype).log(),
            self.drop_shares(edge_ids), self.negative_slope,
            block.by_source if projected.is_cuda and projected.requires_grad else None,
        )  # fmt: skip
        return (out.flatten(1) if self.concat else out.mean(dim=1)) + self.bias

    def drop_shares(self, edge_ids: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """Return the dropout of the attention, or None where there is none."""
        if self.dropout == 0 or not self.training:
            return None
        if edge_ids is None:
            return partial(dropout, probability=self.dropout, training=True)
        return partial(RowDropout.sample(self.dropout, True), ids=edge_ids)

    def forward(self, x: Tensor | SparseInput, block: Block) -> Tensor:
        return self.combine(self.transform(x), block)

    def first_rows(self, x: Tensor | SparseInput, edges: RowEdges, drop: RowDropout) -> Tensor:
        return self.combine(self.transform(drop(x, edges.node_ids)), edges.block, edges.edge_ids)

    def rows(self, h: Tensor, edges: RowEdges, drop: RowDropout) -> Tensor:
        if edges.local_only:
            return self.combine(self.transform(drop(h, edges.own_ids)), edges.block, edges.edge_ids)
        sent = SentRows(h, self.exchange, self.training)
        own = self.transform(drop(sent.rows, edges.own_ids))
        halo = self.transform(drop(sent.halo(), edges.halo_ids))
        return self.combine(torch.cat([own, halo]), edges.block, edges.edge_ids)


class GAT(Backbone):
    """Graph attention network: hidden heads side by side, the heads of the last layer averaged, as PyG's GAT.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation: see
            `Backbone`; hidden_channels is the width of all heads together.
        heads: attention heads of each layer, >= 1; divides hidden_channels.
        attention_dropout: probability in [0, 1) on attention; None = dropout.
        edge_dim: columns of the edge features, which then have a share in each edge's score, as in PyG's `GATConv`; the
            self-loop has the mean of those of the edges into its node. None: they are not read.
        time_channels: cosines of the time between an edge and its seed (`TimeEncoding`), which are read as further
            columns of the edge features; batches must be disjoint trees with times. None: times are not read.

    An `edge_weight` w multiplies an edge's share before the softmax divides (log w is added to its score); the
    self-loop has w = 1.

    Raises:
        ValueError: hidden_channels is not a multiple of heads.

    Source: Velickovic et al., Graph attention networks, ICLR 2018.
    """

    takes_negative_weights = False

    @passes_on(Backbone, activation="elu")
    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        heads: int = 4,
        attention_dropout: float | None = None,
        edge_dim: int | None = None,
        time_channels: int | None = None,
        **options,
    ):
        self.heads, hidden_channels = check_heads(heads, hidden_channels, attention_dropout)
        check_edge_inputs(edge_dim, time_channels)
        self.attention_dropout, self.edge_dim, self.time_channels = attention_dropout, edge_dim, time_channels
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **options)
        self.time = None if time_channels is None else TimeEncoding(time_channels)

    def make_layer(self, index: int) -> GATLayer:
        last = index == self.num_layers - 1
        width = self.out_channels if last else self.hidden_channels // self.heads
        options = {"heads": self.heads, "concat": not last, "dropout": self.dropout}
        if self.attention_dropout is not None:
            options["dropout"] = self.attention_dropout
        return GATLayer(self.layer_channels(index), width, edge_dim=self.edge_channels or None, **options)

    def prepare(self, block: Block) -> Block:
        if block.edge_attr is not None:
            block = replace(block, edge_attr=block.edge_attr.to(self.dtype))
        return with_self_loops(block)
