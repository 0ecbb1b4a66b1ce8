"""Layer-wise sampling on a device: the batches of `sample_layers`, bit for bit, by torch alone.

All sums that decide are of whole numbers, so that no order of adding matters. The host learns the sizes of a hop (its
new nodes, its edges, and the edges of the rows to come) in one read.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...graph import CSC
from ...rng import combine_int
from ..sample_neighbors import SampledNeighbors
from ..sample_neighbors.device import UNSEEN, DeviceWorkspace, extended, read_at, repeated
from ..sample_neighbors.device_graph import DeviceRelation
from ..sample_neighbors.hops import place_seeds
from ..sample_neighbors.whole_rows import WholeRows, compressed, summed
from .checks import MOST_SCALE, check_layer_sizes, check_preferred, fraction_bits


def sample_layers_on_device(
    graph: CSC | DeviceRelation,
    seeds: np.ndarray | Tensor,
    nodes_per_layer: Sequence[int],
    key: int,
    space: DeviceWorkspace,
    *,
    preferred: Sequence[Tensor] | None = None,
    scale: float = 1.0,
    return_e_id: bool = False,
) -> SampledNeighbors:
    """Sample as `sample_layers` does; the result is tensors on the device of the workspace.

    Args:
        graph: The graph, in the device's memory or in pinned host memory.
        seeds: As there; or how many of the workspace's nodes are seeds, a tensor.
        preferred: As there, uint8.
        nodes_per_layer, key, scale, return_e_id: As there.
        space: Fits the graph.

    Raises:
        ValueError: as `sample_layers`.

    Cost: O(edges of the rows) memory on the device, and a sort of the candidates a hop.
    """
    sizes, num_nodes = check_layer_sizes(nodes_per_layer), len(graph.indptr) - 1
    check_preferred(None, scale, len(sizes), num_nodes)
    count = seeds if isinstance(seeds, Tensor) else place_seeds(space, seeds, num_nodes)
    node, most = space.node, space.most
    nodes, edges, parts, begin, first = [], [], [], 0, 0
    try:
        rows = WholeRows.of(graph.indptr, node[:most], count)
        end, num_edges = space.read([count, rows.degree.sum()])
        nodes.append(end)
        space.finish(end)
        for hop, size in enumerate(sizes):
            rows = WholeRows(rows.start[: end - begin], rows.degree[: end - begin])
            mask = None if preferred is None or scale == 1 else preferred[hop]
            layer = _Layer(graph, space, rows, num_edges, mask, scale)
            node, found = layer.sample(size, node, end, hop == len(sizes) - 1, combine_int(key, hop))
            bound = end + min(len(layer.candidate), size)
            to_come = WholeRows.of(graph.indptr, node[end:bound], found)
            found, kept, num_edges = space.read([found, layer.num_kept, to_come.degree.sum()])
            parts.append(layer.edges(first, kept))
            nodes.append(found)
            edges.append(kept)
            begin, end, first, rows = end, end + found, first + kept, to_come
    except BaseException:
        space.finish(space.num_nodes)
        raise
    source, ends, edge, weight = (torch.cat(part) for part in zip(*parts, strict=True))
    indptr = torch.cat([ends.new_zeros(1), ends])
    target = repeated(torch.arange(begin, device=indptr.device), indptr, first)
    return SampledNeighbors(
        node[:end], torch.stack([source, target]), indptr, edge if return_e_id else None, nodes, edges, weight
    )


class _Layer:
    """The candidates of one hop, and those that are sampled of them.

    Args:
        graph, space: As `sample_layers_on_device` has them.
        rows: Rows of the hop.
        num_edges: Edges of them all.
        mask: (num_nodes,) uint8, nodes that are preferred; None: none is.
        scale: How much more important these are.
    """

    def __init__(self, graph, space, rows: WholeRows, num_edges: int, mask: Tensor | None, scale: float):
        self._space, self._degree = space, rows.degree
        self._offset, self._edge = rows.edges(num_edges)
        self._neighbor = read_at(graph.indices, self._edge).long()
        self._local, _ = space.number(self._neighbor, 0)
        self.candidate = space.node[: space.most]
        bits = fraction_bits(len(rows.degree), 1.0 if mask is None else scale)
        square = ((1 << bits) // (rows.degree * rows.degree).clamp(min=1)).clamp(min=1)
        importance = self._edge.new_zeros(space.most)
        importance.index_add_(0, self._local, repeated(square, self._offset, num_edges))
        if mask is not None:
            chosen = read_at(mask, self.candidate.clamp(max=len(mask) - 1)) > 0
            importance = torch.where(chosen, (importance.double() * min(scale, MOST_SCALE)).long(), importance)
        self._importance = importance

    def sample(self, size: int, node: Tensor, end: int, is_last: bool, key: int) -> tuple[Tensor, Tensor]:
        """Sample candidates after the `end` nodes so far; return the nodes, and how many of them are new."""
        importance, space = self._importance, self._space
        sure, left, rest = _sure(importance, size)
        factor = left.double() / rest.clamp(min=1)
        self._probability = torch.where(sure, 1.0, factor * importance)
        line = torch.where(sure, 0, importance).cumsum(0)
        reach = (line * factor - (key >> 11) * 2.0**-53).ceil().long()
        reach = torch.where(line == rest, left, torch.minimum(reach, left))
        passed = torch.cat([reach.new_zeros(1), reach])[:-1]
        taken = sure | ((reach > passed) & (line > 0) & (importance > 0))
        position = torch.full_like(importance, -1)
        if is_last:  # nodes that the batch holds already: their last copy
            held = space.label[node[:end]].long()
            held = torch.where(held == UNSEEN, len(position), held)
            position = torch.cat([position, position.new_zeros(1)])
            position = position.scatter_reduce(0, held, torch.arange(end, device=held.device), "amax")[:-1]
        fresh = taken & (position < 0)
        numbered = end + fresh.cumsum(0) - 1
        self._position = torch.where(fresh, numbered, torch.where(taken, position, -1))
        most = end + min(len(importance), size)
        node = extended(node, end, most, torch.where(fresh, numbered, most), self.candidate)
        space.label[self._neighbor] = UNSEEN
        space.most = 0
        self._source = self._position[self._local]
        self._kept = summed(self._source >= 0)
        return node, fresh.sum()

    @property
    def num_kept(self) -> Tensor:
        """Edges from candidates that were sampled."""
        return self._kept[-1]

    def edges(self, first: int, num_kept: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sources, the ends of rows, positions and weights of the kept edges, after `first` of earlier hops."""
        share = repeated(1.0 / self._degree.double(), self._offset, len(self._local))
        weight = (share / self._probability[self._local]).float()
        kept = compressed(self._source >= 0, self._kept, num_kept, self._source, self._edge, weight)
        return kept[0], self._kept[self._offset[1:]] + first, *kept[1:]


def _sure(importance: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which candidates are sampled for certain, and of the others the samples and the sum of importance.

    In descending order a candidate is certain if its importance times the samples left is at least the sum from it on;
    all of those before it are then, so that they are those that `include` finds pass by pass.
    """
    ordered = importance.sort(descending=True).values
    through = ordered.cumsum(0)
    left = (size - torch.arange(len(ordered), device=ordered.device)).clamp(min=1)
    rest = through[-1:] - through + ordered
    num_sure = (ordered >= torch.div(rest + left - 1, left, rounding_mode="floor")).long().cumprod(0).sum().view(1)
    least = torch.cat([ordered.new_full((1,), torch.iinfo(torch.int64).max), ordered]).gather(0, num_sure)
    sure = (importance >= least) & (importance > 0)
    rest = torch.cat([rest, rest.new_zeros(1)]).gather(0, num_sure)
    return sure, (size - num_sure).clamp(min=0), rest
