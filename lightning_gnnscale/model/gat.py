"""GAT over CSC rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv

from ..errors import check_count, check_integer
from ..triton_kernels.edge_attention import edge_attention
from .backbone import MOST_CHANNELS, Backbone, check_edge_attr
from .block import Block, edge_counts, make_block, with_self_loops
from .dropout import dropout
from .row_dropout import RowDropout
from .row_exchange import SentRows
from .row_layers import RowEdges, RowLayer
from .sparse_linear import SparseInput, as_input, drop, linear, num_rows
from .time_encoding import TimeEncoding, edge_features


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

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        norm: str | None = None,
        activation: str = "elu",
        heads: int = 4,
        attention_dropout: float | None = None,
        edge_dim: int | None = None,
        time_channels: int | None = None,
    ):
        check_count("model.heads", heads)
        check_count("model.hidden_channels", hidden_channels)
        heads, hidden_channels = int(heads), int(hidden_channels)
        if hidden_channels % heads:
            raise ValueError(f"model.hidden_channels must be a multiple of heads ({heads}), got {hidden_channels}")
        for name, value in (("edge_dim", edge_dim), ("time_channels", time_channels)):
            if value is not None:
                check_integer(f"model.{name}", value, 1, MOST_CHANNELS)
        self.heads, self.edge_dim, self.time_channels = heads, edge_dim, time_channels
        self.attention_dropout = dropout if attention_dropout is None else attention_dropout
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"model.attention_dropout must be in [0, 1), got {attention_dropout}")
        super().__init__(
            in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation
        )
        self.time = None if time_channels is None else TimeEncoding(time_channels)

    def forward(
        self,
        x: Any,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        degree: Tensor | None = None,
        indptr: Tensor | None = None,
        num_sampled_nodes: Sequence[int] | None = None,
        edge_attr: Tensor | None = None,
        edge_time: Tensor | None = None,
        seed_time: Tensor | None = None,
        seed_of: Tensor | None = None,
        num_sampled_edges: Sequence[int] | None = None,
    ) -> Tensor:
        """Run all layers over a batch, see `Backbone.forward`.

        Args:
            x, edge_index, edge_weight, degree, indptr, num_sampled_nodes, edge_attr, num_sampled_edges: as there.
            edge_time, seed_time, seed_of: times of the edges and the seeds, and the seed of each node, as a `MiniBatch`
                has them; read with time_channels.
        """
        if self.time is None:
            return super().forward(
                x, edge_index, edge_weight, degree, indptr, num_sampled_nodes, edge_attr, None, num_sampled_edges
            )
        check_edge_attr("GAT", self.edge_dim, None if edge_attr is None else edge_attr.shape[-1])
        edge_attr = edge_features(self.time, edge_attr, edge_index[1], edge_time, seed_time, seed_of)
        x = as_input(x, self.reference)
        block = make_block(edge_index, num_rows(x), edge_weight, degree, indptr, edge_attr)
        block = replace(block, edges_of=edge_counts(num_sampled_nodes, num_sampled_edges))
        return self.run(drop(x, self.input_dropout, self.training), block, num_sampled_nodes)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.time is not None:
            self.time.reset_parameters()

    def make_layer(self, index: int) -> GATLayer:
        last = index == self.num_layers - 1
        width = self.out_channels if last else self.hidden_channels // self.heads
        options = {"heads": self.heads, "concat": not last, "dropout": self.attention_dropout}
        columns = (self.edge_dim or 0) + (self.time_channels or 0)
        return GATLayer(self.layer_channels(index), width, edge_dim=columns or None, **options)

    def prepare(self, block: Block) -> Block:
        if block.edge_attr is not None:
            block = replace(block, edge_attr=block.edge_attr.to(self.dtype))
        return with_self_loops(block)
