"""The edges that one layer reads: CSC rows over local node ids, with what a layer needs to weigh them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import TypeCounts
from ..triton_kernels.aggregate import aggregate
from ..triton_kernels.edge_attention import EdgesBySource, group_by_source

# Reading one value along an edge costs about as much as this many multiply-adds of a matrix product
# (measured on an AMD EPYC core: 0.45 ns against 0.028 ns, 1,000,000 edges, 128 channels, float32).
MULTIPLY_ADDS_PER_READ = 16


class TargetPairs(NamedTuple):
    """The pairs (edge type, target) that have edges, by edge type, then target: the rows that edge types map.

    Attributes:
        relation, target: (num_pairs,) int64, edge type and target.
        counts: Pairs of each edge type where the host knows them, see `TypeCounts`; else None.
        indptr: (num_pairs + 1,) int64, the edges of each pair, in the order of `edges`.
        edges: (num_edges,) int64, positions of the edges in the block.
        sources: (num_edges,) the source of each of them.
        target_indptr: (num_targets + 1,) int64, the pairs of each target.
        target_pairs: (num_pairs,) int64, positions of the pairs, by target.
    """

    relation: Tensor
    target: Tensor
    indptr: Tensor
    edges: Tensor
    sources: Tensor
    target_indptr: Tensor
    target_pairs: Tensor
    counts: list[int] | None = None

    @property
    def place(self) -> Tensor:
        """(num_edges,) int64: where in `edges` each edge of the block is."""
        numbers = torch.arange(len(self.edges), device=self.edges.device)
        return torch.empty_like(self.edges).index_copy(0, self.edges, numbers)

    def pair_of_edges(self) -> Tensor:
        """Return (num_edges,) int64: the pair of each edge of the block."""
        pairs = torch.arange(len(self.target), device=self.indptr.device)
        pair = torch.empty_like(self.edges)
        pair[self.edges] = torch.repeat_interleave(pairs, self.indptr.diff(), output_size=len(self.edges))
        return pair


class SourcePairs(NamedTuple):
    """The pairs (edge type, source) that have edges, by edge type, then source.

    Attributes:
        relation, source: (num_pairs,) int64, edge type and source.
        place: (num_edges,) int64, the pair of each edge of the block.
        counts: Pairs of each edge type where the host knows them, see `TypeCounts`; else None.
    """

    relation: Tensor
    source: Tensor
    place: Tensor
    counts: list[int] | None = None


@dataclass(frozen=True)
class Block:
    """In-edges of the first `num_targets` of `num_sources` nodes: targets are a prefix of the sources.

    Attributes:
        indptr: (num_targets + 1,) int64.
        indices: (num_edges,) int32 or int64 in [0, num_sources).
        num_sources: nodes whose values the layer is given.
        edge_weight: (num_edges,) floating or None.
        degree: (num_sources,) in-degrees in the full graph, or None: the edges given are all.
        edge_attr: (num_edges, edge_dim) features of the edges, or None.
        row: (num_edges,) int64, the target of each edge, or None: worked out where it is needed.
        edge_type: (num_edges,) int64 edge type of each edge, or None.
        node_type: (num_sources,) int64 node type of each node, or None.
        by_edge_type: (num_edges,) int64, the edges by edge type, then target; None: sorted where they are needed.
        self_weight: (num_sources,) floating, the weight of the self-loop that GCN adds to each node: 1, or where a node
            has self-loops the weight of its last one, less the weights of all of them. None: from the edges given.
        edges_of: Maps numbers of first targets to the numbers of edges into them, as far as the host knows them: a GPU
            would have to be asked.
        type_counts: Nodes and pairs of each type, as far as the host knows them.
        num_edge_types: Number of edge types.
    """

    indptr: Tensor
    indices: Tensor
    num_sources: int
    edge_weight: Tensor | None = None
    degree: Tensor | None = None
    row: Tensor | None = None
    edge_attr: Tensor | None = None
    edge_type: Tensor | None = None
    node_type: Tensor | None = None
    by_edge_type: Tensor | None = None
    self_weight: Tensor | None = None
    edges_of: Mapping[int, int] | None = None
    type_counts: TypeCounts | None = None
    num_edge_types: int = 1

    @property
    def num_targets(self) -> int:
        return len(self.indptr) - 1

    def head(self, num_targets: int) -> "Block":
        """Return the block of the first num_targets nodes; rows that are missing have no edges."""
        missing = num_targets - self.num_targets
        if missing == 0:
            return self
        if missing > 0:
            return replace(self, indptr=torch.cat([self.indptr, self.indptr[-1:].expand(missing)]))
        indptr = self.indptr[: num_targets + 1]
        known = None if indptr.device.type == "cpu" or self.edges_of is None else self.edges_of.get(num_targets)
        num_edges = int(indptr[-1]) if known is None else known
        columns = {name: column[:num_edges] for name, column in self._columns_of_edges()}
        order = self.by_edge_type
        order = None if order is None else order[places_of(order < num_edges, num_edges)]
        return replace(self, indptr=indptr, indices=self.indices[:num_edges], by_edge_type=order, **columns)

    def _columns_of_edges(self) -> Iterator[tuple[str, Tensor]]:
        found = ((name, getattr(self, name)) for name in ("edge_weight", "row", "edge_attr", "edge_type"))
        return ((name, column) for name, column in found if column is not None)

    def target_of_edges(self) -> Tensor:
        """Return (num_edges,) int64: the target of each edge."""
        if self.row is not None:
            return self.row
        rows = torch.arange(self.num_targets, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=len(self.indices))

    def edges_by_type(self) -> Tensor:
        """Return (num_edges,) int64: the edges by edge type, then target."""
        return stable_order(self.edge_type) if self.by_edge_type is None else self.by_edge_type

    @cached_property
    def target_pairs(self) -> TargetPairs:
        """The pairs of an edge type and a target; O(num_edges) where `by_edge_type` is given."""
        edges = self.edges_by_type()
        target, relation = self.target_of_edges()[edges], self.edge_type[edges]
        counts = self._counts("targets")
        begins = places_of(_begins(relation * self.num_targets + target), None if counts is None else sum(counts))
        indptr = torch.cat([begins, begins.new_full((1,), len(edges))])
        target, relation = target[begins], relation[begins]
        target_indptr = indptr_of(target, self.num_targets)
        pairs = stable_order(target)
        return TargetPairs(relation, target, indptr, edges, self.indices[edges], target_indptr, pairs, counts)

    def node_counts(self, num_nodes: int, num_node_types: int) -> list[int] | None:
        """Return how many of the first nodes are of each node type, where the host knows; else None."""
        return None if self.type_counts is None else self.type_counts.of("nodes", num_nodes, num_node_types)

    def _counts(self, what: str) -> list[int] | None:
        known = self.type_counts
        return None if known is None else known.of(what, self.num_targets, self.num_edge_types)

    @cached_property
    def by_source(self) -> EdgesBySource:
        """The edges by source: what gradients walk along; made once for all layers and steps that share the block."""
        return group_by_source(self.indptr, self.indices, self.num_sources)

    @cached_property
    def by_source_pair(self) -> EdgesBySource:
        """The edges by pair of edge type and source."""
        return group_by_source(self.indptr, self.source_pairs.place, len(self.source_pairs.source))

    @cached_property
    def source_pairs(self) -> SourcePairs:
        """The pairs of an edge type and a source; O(num_edges log num_edges)."""
        keys, counts = self.edge_type * self.num_sources + self.indices, self._counts("sources")
        if counts is None:
            keys, place = torch.unique(keys, return_inverse=True)
        else:
            keys, order = keys.sort()
            begins = _begins(keys)
            place = torch.empty_like(order).scatter_(0, order, begins.cumsum(0) - 1)
            keys = keys[places_of(begins, sum(counts))]
        return SourcePairs(keys // max(1, self.num_sources), keys % max(1, self.num_sources), place, counts)

    def transform_first(self, in_channels: int, out_channels: int) -> bool:
        """Whether a linear map costs less before the sum over edges than after it; a function of shapes alone."""
        map_cost, num_edges = in_channels * out_channels, len(self.indices)
        before = self.num_sources * map_cost + MULTIPLY_ADDS_PER_READ * num_edges * out_channels
        after = self.num_targets * map_cost + MULTIPLY_ADDS_PER_READ * num_edges * in_channels
        return before < after


def make_block(edge_index: Tensor, num_nodes: int, indptr: Tensor | None, **columns: Any) -> Block:
    """Build the block of a batch from PyG's arguments.

    Args:
        edge_index: (2, num_edges) int64, source and target; grouped by target where indptr is given.
        num_nodes: nodes of the batch.
        indptr: (num_targets + 1,) int64 or None: the edges are sorted by target first.
        columns: further attributes of the block, in the order of edge_index.

    Raises:
        ValueError: a target is not below num_nodes, or indptr has more rows than there are nodes.
    """
    source, target = edge_index
    if indptr is not None:
        if len(indptr) - 1 > num_nodes:
            raise ValueError(f"indptr has {len(indptr) - 1} rows, more than the {num_nodes} rows of x")
        return Block(indptr, source, num_nodes, row=target, **columns)
    target, order = torch.sort(target, stable=True)
    counts = torch.bincount(target, minlength=num_nodes)
    if len(counts) > num_nodes:
        raise ValueError(f"edge_index has targets up to {len(counts) - 1}, x has {num_nodes} rows")
    block = Block(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), source[order], num_nodes, **columns)
    sorted_columns = {name: column[order] for name, column in block._columns_of_edges()}
    return replace(block, **(sorted_columns | {"row": target}))


def places_of(chosen: Tensor, count: int | None) -> Tensor:
    """Return the (count,) int64 places of the true ones among booleans, ascending.

    Args:
        chosen: (num,) bool.
        count: How many are true, where the host knows; None: a device is asked.
    """
    if count is None or chosen.device.type == "cpu":
        return torch.nonzero(chosen).flatten()
    number = torch.where(chosen, chosen.cumsum(0) - 1, count)
    places = torch.arange(len(chosen), device=chosen.device)
    return number.new_empty(count + 1).scatter_(0, number, places)[:count]


def indptr_of(numbers: Tensor, size: int) -> Tensor:
    """Return (size + 1,) int64: where each number's rows begin when (num,) numbers below size are in order."""
    if numbers.device.type == "cpu":
        counts = torch.bincount(numbers, minlength=size)
    else:
        counts = numbers.new_zeros(size).index_add_(0, numbers, torch.ones_like(numbers))
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _begins(keys: Tensor) -> Tensor:
    """Return (num,) bool: whether a key differs from the one before it."""
    begins = torch.ones_like(keys, dtype=torch.bool)
    begins[1:] = keys[1:] != keys[:-1]
    return begins


def stable_order(numbers: Tensor) -> Tensor:
    """Return the (num,) int64 positions of some numbers >= 0 in ascending order, equal ones in the order given."""
    if numbers.device.type != "cpu":
        return torch.argsort(numbers, stable=True)
    values = numbers.numpy()
    if len(values) and int(values.max()) < 1 << 16:
        values = values.astype(np.uint16)  # sorted by their digits, in linear time
    return torch.from_numpy(np.argsort(values, kind="stable"))


def target_counts(num_sampled_nodes: list[int] | None, num_layers: int, num_nodes: int) -> list[int]:
    """Return how many nodes each layer must compute, so that the last one has its seeds.

    num_sampled_nodes: nodes per hop, seeds first, those beyond the hops as one hop more; None: all nodes in all layers.
    ValueError: the hops hold more than num_nodes.
    """
    if num_sampled_nodes is None:
        return [num_nodes] * num_layers
    hops = [int(count) for count in num_sampled_nodes]
    rest = num_nodes - sum(hops)
    if rest < 0:
        raise ValueError(f"num_sampled_nodes {hops} add up to more than the {num_nodes} rows of x")
    hops.append(rest)
    return [sum(hops[: num_layers - index]) for index in range(num_layers)]


def edge_counts(num_sampled_nodes: Sequence[int] | None, num_sampled_edges: Sequence[int] | None) -> dict | None:
    """Return `Block.edges_of` of a batch from nodes and edges per hop, seeds first; None where they are not counted."""
    if num_sampled_nodes is None or num_sampled_edges is None:
        return None
    return dict(zip(accumulate(num_sampled_nodes), accumulate(num_sampled_edges), strict=False))


def normalized(block: Block, dtype: torch.dtype) -> Block:
    """Weigh edges symmetrically and let each target have one self-loop, as PyG's GCNConv does.

    The weight of an edge u -> v is w / sqrt(D_u D_v), where D are the full graph's in-degrees (without them: the sums
    of the weights of the edges given); where edges carry stored weights, sums of weights. Self-loops of a node count
    once, with the weight of the last: they stay edges, and one is added with what is missing, see `Block.self_weight`.
    A row that holds fewer edges than its degree (it was sampled, or it is a halo row cut to the core) and whose edges
    carry no weight is scaled up by degree / edges: unbiased for a sampled row, an extrapolation for a cut one; the
    added self-loop is not scaled.

    Returns:
        A block with num_targets more edges, the added self-loop first in each row, and `edge_weight` of the dtype.
    """
    row = block.target_of_edges()
    weight = None if block.edge_weight is None else block.edge_weight.to(dtype)
    own = _self_weight(block, row, weight, dtype) if block.self_weight is None else block.self_weight.to(dtype)
    if block.degree is not None:
        degree = block.degree.to(dtype)
    else:
        into_targets = block.indptr.diff().to(dtype) if weight is None else row_sums(weight, block.indptr, row)
        degree = F.pad(into_targets, (0, block.num_sources - block.num_targets))
    scale = inverse_root(degree + own)
    into = targets = scale[: block.num_targets]
    if block.degree is not None and weight is None:
        counts = block.indptr.diff().clamp(min=1)
        into = targets * (degree[: block.num_targets] / counts).clamp(min=1)
    factors = into[row] * scale[block.indices]
    loops = own[: block.num_targets] * targets * targets
    return _insert_loops(block, row, factors if weight is None else factors * weight, loops)


def row_sums(values: Tensor, indptr: Tensor, row: Tensor) -> Tensor:
    """Return the (num_rows, ...) sums of values over the edges of each row, in their order on every device.

    Args:
        values: (num_edges,) or (num_edges, channels) floating, grouped by row.
        indptr, row: (num_rows + 1,) and (num_edges,) int64, the edges of each row and the row of each edge.
    """
    if values.device.type == "cpu":
        return values.new_zeros((len(indptr) - 1, *values.shape[1:])).index_add_(0, row, values)
    edges = torch.arange(len(values), device=indptr.device)
    wide = values if values.dim() == 2 else values.unsqueeze(1)
    return aggregate(wide, indptr, edges).view(len(indptr) - 1, *values.shape[1:])


def inverse_root(degree: Tensor) -> Tensor:
    """Return 1 / sqrt(degree), 0 where a degree is 0."""
    return degree.rsqrt().masked_fill(degree <= 0, 0.0)


def _self_weight(block: Block, row: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `Block.self_weight` from the edges given."""
    own = block.indptr.new_ones(block.num_sources, dtype=dtype)
    if not len(row):
        return own
    if row.device.type != "cpu":  # all edges, as the number of loops would have to be waited for
        loops = block.indices == row
        values = torch.ones_like(row, dtype=dtype) if weight is None else weight
        places = torch.arange(len(row), device=row.device).masked_fill(~loops, -1)
        last = row.new_full((block.num_sources,), -1).scatter_reduce_(0, row, places, "amax")
        own = torch.where(last >= 0, values[last.clamp(min=0)], own)
        return own.index_add(0, row, values.masked_fill(~loops, 0), alpha=-1)
    loops = torch.nonzero(block.indices == row).flatten()
    if not len(loops):
        return own
    nodes = row[loops]
    values = own.new_ones(len(loops)) if weight is None else weight[loops]
    # Of rows with several the last one's weight counts: places ascend, so the largest of a node is its last.
    places = torch.arange(len(loops), device=loops.device)
    last = loops.new_full((block.num_sources,), -1).scatter_reduce_(0, nodes, places, "amax")
    looped = last >= 0
    own = torch.where(looped, values[last.clamp(min=0)], own)
    return own.index_add(0, nodes, values, alpha=-1)


def with_self_loops(block: Block) -> Block:
    """Replace the self-loops of each target by exactly one, as PyG's GATConv does.

    An added loop has weight 1, and the mean of the features of the edges into its target, which are floating. On a GPU
    the others stay with weight 0, whose attention is 0: their number would have to be waited for.
    """
    row = block.target_of_edges()
    kept = block.indices != row
    counts = None
    if row.device.type != "cpu":
        dtype = torch.float32 if block.edge_attr is None else block.edge_attr.dtype
        weight = torch.ones_like(row, dtype=dtype) if block.edge_weight is None else block.edge_weight
        counts = torch.zeros_like(block.indptr[1:]).index_add_(0, row, kept.long())
        attr = None if block.edge_attr is None else block.edge_attr.masked_fill(~kept.unsqueeze(1), 0)
        block = replace(block, edge_weight=weight.masked_fill(~kept, 0), edge_attr=attr)
    elif not bool(kept.all()):
        passed = torch.cat([block.indptr.new_zeros(1), kept.cumsum(0)])
        weight = None if block.edge_weight is None else block.edge_weight[kept]
        attr = None if block.edge_attr is None else block.edge_attr[kept]
        indptr, indices = passed[block.indptr], block.indices[kept]
        block = replace(block, indptr=indptr, indices=indices, edge_weight=weight, row=None, edge_attr=attr)
        row = row[kept]
    weight = block.edge_weight
    loops = None if weight is None else weight.new_ones(block.num_targets)
    attr = block.edge_attr
    if attr is None:
        return _insert_loops(block, row, weight, loops)
    counts = block.indptr.diff() if counts is None else counts
    means = row_sums(attr, block.indptr, row) / counts.clamp(min=1).unsqueeze(1)
    looped = _insert_loops(block, row, weight, loops)
    return replace(looped, edge_attr=_insert_loops(block, row, attr, means).edge_weight)


def _insert_loops(block: Block, row: Tensor, weight: Tensor | None, loop_weight: Tensor | None) -> Block:
    """Put an edge v -> v at the head of each row v.

    Args:
        block: its features of edges are left out.
        row: (num_edges,) the row of each edge.
        weight, loop_weight: (num_edges, ...) and (num_targets, ...), what becomes `edge_weight`; or None.
    """
    known = None if block.edges_of is None else {count: edges + count for count, edges in block.edges_of.items()}
    block = replace(block, edges_of=known)
    target = torch.arange(block.num_targets, device=row.device)
    place = torch.arange(1, len(row) + 1, device=row.device) + row
    loop_place = block.indptr[:-1] + target
    indptr = block.indptr + torch.arange(block.num_targets + 1, device=row.device)
    indices = block.indices.new_empty(len(row) + block.num_targets)
    indices[place] = block.indices
    indices[loop_place] = target.to(indices.dtype)
    if weight is None:
        return replace(block, indptr=indptr, indices=indices, row=None, edge_attr=None)
    merged = weight.new_empty((len(indices), *weight.shape[1:]))
    merged[place] = weight
    merged[loop_place] = loop_weight
    return replace(block, indptr=indptr, indices=indices, edge_weight=merged, row=None, edge_attr=None)
