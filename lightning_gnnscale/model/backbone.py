"""The base of all backbones: the loop over layers, trimming, and the layer-wise form; and the one without layers."""

import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import check_count, check_integer, short
from .block import Block, edge_counts, make_block, target_counts
from .dropout import RowDropout, drop, dropout
from .edge_bins import StreamedLayer
from .layer_inputs import MOST_CHANNELS, SparseInput, as_input, check_edge_attr, edge_features, is_sparse, num_rows
from .row_layers import RowEdges, edges_from

ACTIVATIONS = {"relu": F.relu, "elu": F.elu}
NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


def _remembering(init: Callable) -> Callable:
    """Keep the arguments of the outermost constructor as `given`: checkpoints store them to make the model again."""

    @functools.wraps(init)
    def remembered(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault("given", (args, kwargs))
        init(self, *args, **kwargs)

    return remembered


MOST_LAYERS = 10_000


class Backbone(nn.Module):
    """Base of the models that ship here: layers from PyG, run over CSC rows.

    After each layer but the last come the norm, the activation and dropout. A subclass gives `make_layer`, whose
    layers have `forward(x, block)`, `transform(x)`, `combine(projected, block)` and `projected_channels`; and
    `prepare(block)`, what is done to edges once for all layers (self-loops, normalisation).

    Args:
        in_channels, hidden_channels, out_channels: widths, >= 1.
        num_layers: number of layers, >= 1.
        dropout: probability, in [0, 1), after each hidden layer.
        input_dropout: probability, in [0, 1), on the features (of sparse features the nonzeros are dropped).
        norm: None, "batch" or "layer", after each hidden layer.
        activation: "relu" or "elu".

    Raises:
        ValueError: an argument outside what is listed here.
    """

    accepts_sparse = True
    needs_degree = False
    takes_negative_weights = True  # of edges; False where layers take the root or logarithm of weights
    symmetric_sums = False  # whether `row_scale` applies to sources too, and a row's own value is added
    edge_dim: int | None = None  # columns of the edge features that the layers read; None: they read none
    time_channels: int | None = None  # columns that encode the times of edges; None: times are not read
    reads_edge_types = False  # whether node types and edge types are read; such models derive from RelationalBackbone
    averages = False  # whether a neighbourhood is averaged, so that weights 1 / degree are the plain ones

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)

    @_remembering
    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        norm: str | None = None,
        activation: str = "relu",
    ):
        super().__init__()
        widths = {"in_channels": in_channels, "hidden_channels": hidden_channels, "out_channels": out_channels}
        for name, value in widths.items():
            check_integer(f"model.{name}", value, 1, MOST_CHANNELS)
        check_integer("model.num_layers", num_layers, 1, MOST_LAYERS)
        # layers of PyG read sizes that are not Python's as pairs
        in_channels, hidden_channels, out_channels, num_layers = map(int, (*widths.values(), num_layers))
        for name, value in {"dropout": dropout, "input_dropout": input_dropout}.items():
            if not 0 <= value < 1:
                raise ValueError(f"model.{name} must be in [0, 1), got {value}")
        if norm is not None and norm not in NORMS:
            raise ValueError(f"model.norm must be None or one of {sorted(NORMS)}, got {short(norm)}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"model.activation must be one of {sorted(ACTIVATIONS)}, got {short(activation)}")
        self.in_channels, self.hidden_channels, self.out_channels = in_channels, hidden_channels, out_channels
        self.num_layers, self.dropout, self.input_dropout = num_layers, dropout, input_dropout
        self.activation, self.time = activation, None  # a `TimeEncoding` with time_channels
        self.convs = nn.ModuleList(self.make_layer(index) for index in range(num_layers))
        drop_templates(self.modules())
        self.norms = nn.ModuleList(
            NORMS[norm](hidden_channels) if norm else nn.Identity() for _ in range(num_layers - 1)
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        drop_templates(self.modules())  # written for this process, too

    def make_layer(self, index: int) -> nn.Module:
        """Return layer `index`, from `layer_channels(index)` to `layer_channels(index + 1)`."""
        raise NotImplementedError

    def prepare(self, block: Block) -> Block:
        """Return the edges as the layers read them."""
        return block

    def layer_channels(self, index: int) -> int:
        """Return the width of layer `index`'s input; with `num_layers`, of the last one's output."""
        if index == 0:
            return self.in_channels
        return self.out_channels if index == self.num_layers else self.hidden_channels

    def reset_parameters(self) -> None:
        """Sample all parameters again."""
        for module in [*self.convs, *self.norms, self.time]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(
        self,
        x: Any,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        degree: Tensor | None = None,
        indptr: Tensor | None = None,
        num_sampled_nodes: Sequence[int] | None = None,
        edge_attr: Tensor | None = None,
        self_weight: Tensor | None = None,
        num_sampled_edges: Sequence[int] | None = None,
        edge_time: Tensor | None = None,
        seed_time: Tensor | None = None,
        seed_of: Tensor | None = None,
    ) -> Tensor:
        """Run all layers over a batch.

        Args:
            x: (num_nodes, in_channels) of any number type, or sparse rows; cast to the dtype of the parameters.
            edge_index: (2, num_edges) int64, source and target, grouped by target where indptr is given.
            edge_weight: (num_edges,) or None.
            degree: (num_nodes,) in-degrees in the full graph, or None: the edges given are the whole graph.
            indptr: (num_targets + 1,) int64 over the first nodes, or None: the edges are sorted first.
            num_sampled_nodes: nodes per hop, seeds first; each layer then computes only what later ones read.
            edge_attr: (num_edges, edge_dim) features of the edges, of any number type; None where edge_dim is.
            self_weight: (num_nodes,) weights of the self-loops that GCN adds, see `Block`; None: from the edges given.
            num_sampled_edges: edges per hop, those into the seeds first; without them a GPU is waited for each layer.
            edge_time, seed_time, seed_of: times of the edges and the seeds, and the seed of each node, as a `MiniBatch`
                has them; read with time_channels.

        Returns:
            (num_sampled_nodes[0], out_channels), or (num_nodes, out_channels) where that is None.

        Raises:
            ValueError: edge features that no layer reads, or none where layers do.
        """
        edge_attr = self.edge_inputs(edge_attr, edge_index[1], edge_time, seed_time, seed_of)
        x = as_input(x, self.reference)
        columns = {"edge_weight": edge_weight, "degree": degree, "edge_attr": edge_attr, "self_weight": self_weight}
        counts = edge_counts(num_sampled_nodes, num_sampled_edges)
        block = make_block(edge_index, num_rows(x), indptr, edges_of=counts, **columns)
        return self.run(drop(x, self.input_dropout, self.training), block, num_sampled_nodes)

    @property
    def edge_channels(self) -> int:
        """Columns of what layers read of an edge: its features and the encoding of its time; 0: nothing."""
        return (self.edge_dim or 0) + (self.time_channels or 0)

    def edge_inputs(self, edge_attr: Tensor | None, target: Tensor, *times: Tensor | None) -> Tensor | None:
        """Return what layers read of a batch's edges: their features, with the encoding of their times appended."""
        check_edge_attr(type(self).__name__, self.edge_dim, None if edge_attr is None else edge_attr.shape[-1])
        return edge_features(self.time, edge_attr, target, *times)

    def run(self, x: Tensor | SparseInput, block: Block, num_sampled_nodes: Sequence[int] | None) -> Tensor:
        """Run all layers over a batch's edges, each for the nodes that later layers read."""
        counts = target_counts(num_sampled_nodes, self.num_layers, block.num_sources)
        block = self.prepare(block.head(counts[0]))
        for index, count in enumerate(counts):
            x = self.apply_layer(index, x, block.head(count))
        return x

    def apply_layer(self, index: int, x: Tensor | SparseInput, block: Block) -> Tensor:
        """Run one layer, with norm, activation and dropout, over a block that `prepare` has seen."""
        return self.finish_layer(index, self.convs[index](x, block))

    def finish_layer(self, index: int, x: Tensor) -> Tensor:
        """Norm, activation and dropout after layer `index`; nothing after the last."""
        if index == self.num_layers - 1:
            return x
        return dropout(self.activate(index, x), self.dropout, self.training)

    def activate(self, index: int, x: Tensor) -> Tensor:
        """Norm and activation after hidden layer `index`."""
        return ACTIVATIONS[self.activation](self.norms[index](x))

    def forward_rows(self, x: Any, edges: RowEdges) -> Tensor:
        """Run all layers over the rows of one process; rows of other processes come through each layer's exchange.

        Args:
            x: (num_local + num_halo, in_channels) of any number type, or sparse rows.
            edges: as `row_edges` prepares them.

        Returns:
            (num_local, out_channels).
        """
        x = as_input(x, self.reference)
        h = self.convs[0].first_rows(x, edges, RowDropout.sample(self.input_dropout, self.training))
        for index in range(1, self.num_layers):
            h = self.activate(index - 1, h)
            h = self.convs[index].rows(h, edges, RowDropout.sample(self.dropout, self.training))
        return h

    def row_edges(self, block: Block, node_ids: Tensor, kept: dict, local_only: bool = False) -> RowEdges:
        """Prepare the edges of one process for `forward_rows`; they serve every step of a run.

        Args:
            block: complete rows of the local nodes, sources local nodes first; with `degree`.
            node_ids: (num_sources,) int64, the same number for a node on every process.
            kept: keeps products of the features, for one graph, one dtype and one value of local_only.
            local_only: leave out edges from the halo; degrees are then those of what is left.
        """
        for name, what in (("time_channels", "times"), ("edge_dim", "edge features")):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{type(self).__name__} with {name} reads {what}, which full-graph training does not: train on "
                    f"parts with PartitionDataModule, or leave {name} out"
                )
        if local_only:
            block = edges_from(replace(block, degree=None, self_weight=None), 0, block.num_targets)
            node_ids = node_ids[: block.num_targets]
        prepared = self.prepare_rows(block)
        plain = block.edge_weight is None and not local_only
        reverse = self.reverse_weight(edges_from(prepared, block.num_targets, block.num_sources)) if plain else None
        return RowEdges(prepared, node_ids, self.dtype, kept, local_only, reverse)

    @property
    def local_only(self) -> bool:
        """Whether training leaves out edges from other processes."""
        return any(layer.exchange.local_only for layer in self.convs)

    def prepare_rows(self, block: Block) -> Block:
        """Return complete rows as the layers read them, with the weights of a sum where layers are sums."""
        return self.prepare(block)

    def reverse_weight(self, outer: Block) -> Tensor | None:
        """Return the (num_edges,) weights of the reverses of prepared edges from the halo, in an undirected graph."""
        return None

    def layer(self, index: int, x: Any, block: Block) -> Tensor:
        """Compute layer `index` for the targets of one block, for layer-wise inference.

        Args:
            x: (num_sources, layer_channels(index)), or sparse rows for layer 0.
            block: complete rows; `degree` is needed where `needs_degree`.

        Returns:
            (num_targets, layer_channels(index + 1)).
        """
        return self.apply_layer(index, as_input(x, self.reference), self.prepare(block))

    def projected_channels(self, index: int, sparse: bool) -> int | None:
        """Return the width of `project(index, x)` where it pays to map each node once; None: read the input as it is.

        Args:
            sparse: the rows of layer 0 are sparse.
        """
        width = self.convs[index].projected_channels
        return width if (sparse and index == 0) or width < self.layer_channels(index) else None

    def project(self, index: int, x: Any) -> Tensor:
        """Return the (num_rows, projected_channels) part of layer `index` that needs no edges."""
        return self.convs[index].transform(as_input(x, self.reference))

    def layer_projected(self, index: int, projected: Tensor, block: Block) -> Tensor:
        """Compute the rest of layer `index` from `project`: equals `layer` of the projected rows."""
        projected = as_input(projected, self.reference)
        return self.finish_layer(index, self.convs[index].combine(projected, self.prepare(block)))

    def sum_channels(self, index: int, projected: bool) -> int | None:
        """Return the width of the one sum over edges that makes up layer `index`, or None where there is more.

        Such a layer can be computed from sources that stream past, with `row_scale` and `layer_from_sum`. Classes
        declare it by `sums_once = True` in their own body: a derived one may compute something else. `projected`: the
        edges read `project(index, x)`.
        """
        if any("sums_once" not in vars(type(module)) for module in (self, self.convs[index])):
            return None
        return self.convs[index].out_channels if projected else self.layer_channels(index)

    def row_scale(self, degree: Tensor, weighted: bool) -> Tensor | None:
        """Return the (num,) factors of the sums of some rows; with `symmetric_sums` of their sources too. None: 1.

        Args:
            degree: (num,) in-degrees in the full graph, as `needs_degree` has them; with `symmetric_sums` the added
                self-loop counts, see `Block.self_weight`.
            weighted: edges have weights.
        """
        return None

    def layer_from_sum(self, index: int, summed: Tensor, own: Tensor, projected: bool) -> Tensor:
        """Return what `layer` (or `layer_projected`) gives for some rows.

        Args:
            summed: (num_rows, sum_channels) scaled sums over their edges; with `symmetric_sums` they have the row's own
                value too, times `Block.self_weight`.
            own: (num_rows, width) what the edges read, of the rows themselves.
        """
        summed, own = as_input(summed, self.reference), as_input(own, self.reference)
        return self.finish_layer(index, self.convs[index].from_sum(summed, own, projected))

    def streamed_layer(self, index: int, projected: bool, sparse: bool) -> StreamedLayer | None:
        """Return how layer `index` is made from sources that stream past; None: its edges need more than a sum.

        Classes declare it by `streams = True` in their own body: a derived one may compute something else. Which form a
        layer has depends on the model alone, so that results do not depend on memory.
        """
        layer = self.convs[index]
        if any("streams" not in vars(type(module)) for module in (self, layer)):
            return None
        width, channels, adds_own = self.layer_channels(index), layer.out_channels, layer.adds_own
        if projected:
            return StreamedLayer(channels, layer.projected_channels, "projected", adds_own)
        maps = sparse or channels <= width * (1 + adds_own)
        return StreamedLayer(channels if maps else width, width, "map" if maps else "rows", adds_own)

    def map_sources(self, index: int, x: Any, edge_type: int | None = None) -> Tensor:
        """Return the (num, channels) values that sources give along their edges, or along those of an edge type."""
        return self.convs[index].map_sources(as_input(x, self.reference))

    def map_own(self, index: int, x: Any, node_type: Tensor | None = None) -> Tensor:
        """Return (num, channels), what rows add to their sums, where `StreamedLayer.adds_own` says so."""
        return self.convs[index].map_own(as_input(x, self.reference))

    def layer_from_total(self, index: int, total: Tensor) -> Tensor:
        """Return what `layer` gives for rows from the (num_rows, channels) sums of what was mapped."""
        return self.finish_layer(index, self.convs[index].from_total(as_input(total, self.reference)))

    def values_of_edge(self, width: int) -> int:
        """Return how many values an edge holds in a layer that is no sum and reads `width` columns; bounds memory."""
        return width if self.edge_dim is None else 3 * width + self.edge_dim  # messages are held

    @property
    def num_edge_types(self) -> int:
        """Edge types that layers tell apart."""
        return 1

    @property
    def reference(self) -> Tensor:
        """A parameter: its device and dtype are the model's."""
        return next(self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, to which features are cast."""
        return self.reference.dtype


def check_heads(heads: int, hidden_channels: int, attention_dropout: float | None = None) -> tuple[int, int]:
    """Return heads and hidden_channels, or raise ValueError: they do not divide, or a probability is not in [0, 1)."""
    check_count("model.heads", heads)
    check_count("model.hidden_channels", hidden_channels)
    if hidden_channels % heads:
        raise ValueError(f"model.hidden_channels must be a multiple of heads ({heads}), got {hidden_channels}")
    if attention_dropout is not None and not 0 <= attention_dropout < 1:
        raise ValueError(f"model.attention_dropout must be in [0, 1), got {attention_dropout}")
    return int(heads), int(hidden_channels)


def maps_first(x: Tensor | SparseInput, block: Block, in_channels: int, out_channels: int) -> bool:
    """Whether a layer should apply its linear map before it sums over edges: always for sparse x, else by cost."""
    return is_sparse(x) or block.transform_first(in_channels, out_channels)


def drop_templates(layers: Iterable[nn.Module]) -> None:
    """Delete the modules that PyG writes to the temporary folder for some layers and never deletes.

    They are loaded, and their lines are kept for tracebacks and `torch.jit.script`.
    """
    for kind in {type(layer) for layer in layers}:
        for function in ("propagate", "edge_updater"):
            module = sys.modules.get(f"{kind.__module__}_{kind.__name__}_{function}")
            path = Path(getattr(module, "__file__", None) or "")
            if path.is_file():
                lines = linecache.getlines(str(path))
                linecache.cache[str(path)] = sum(map(len, lines)), None, lines, str(path)  # None: of no file
                for written in (path, Path(getattr(module, "__cached__", None) or path)):
                    written.unlink(missing_ok=True)


class NoLayers(Backbone):
    """The rows of the nodes themselves, for decoders alone: no edge is read, in training or evaluation.

    Rows are learned where the module has `inputs=DistributedEmbedding(...)`; they may also be stored features.

    Args:
        in_channels: Width of the rows, and of the embeddings, >= 1.

    Raises:
        ValueError: in_channels is below 1.
    """

    accepts_sparse = False
    num_layers = 0

    def __init__(self, in_channels: int):
        nn.Module.__init__(self)
        if in_channels < 1:
            raise ValueError(f"model.in_channels must be at least 1, got {in_channels}")
        self.in_channels = self.out_channels = in_channels
        self.time = None
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)  # its device and dtype are the model's

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        """Return the (num_nodes, in_channels) rows as they are; edges and what they carry pass no message."""
        return x

    def layer_channels(self, index: int) -> int:
        """Return the width of the rows."""
        return self.in_channels

    def layer(self, index: int, x: Any, block: Any) -> Tensor:
        """Raise IndexError: there are no layers."""
        raise IndexError(f"NoLayers has no layer {index}")
