"""Rows of a graph that are read whole on a device: all edges between some nodes, and edges that are left out."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .device import UNSEEN, DeviceWorkspace, read_at, repeated


class WholeRows(NamedTuple):
    """Rows of a graph: where each begins, and its length; (num_rows,) int64."""

    start: Tensor
    degree: Tensor

    @classmethod
    def of(cls, indptr: Tensor, node: Tensor, count: int | Tensor) -> "WholeRows":
        """Look up the rows of the first `count` of some nodes; others are empty."""
        there = torch.arange(len(node), device=node.device) < count
        node = torch.where(there, node, 0)
        start = read_at(indptr, node)
        return cls(start, torch.where(there, read_at(indptr, node + 1) - start, 0))

    def edges(self, num_edges: int) -> tuple[Tensor, Tensor]:
        """Return (num_rows + 1,) offsets of the rows one after the other, and the position of each of their edges."""
        offset = summed(self.degree)
        within = torch.arange(num_edges, device=offset.device)
        return offset, repeated(self.start - offset[:-1], offset, num_edges) + within


def summed(values: Tensor) -> Tensor:
    """Return (num + 1,) int64 running sums, 0 first."""
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=values.device), values.cumsum(0)])


def compressed(kept: Tensor, before: Tensor, num_kept: int, *arrays: Tensor | None) -> list[Tensor | None]:
    """Return the values that are kept of some arrays, in their order.

    Args:
        kept: (num,) bool.
        before: `summed(kept)`.
        num_kept: The last of these, which the host has learned.
    """
    place = torch.where(kept, before[1:] - 1, num_kept)
    return [
        None if values is None else values.new_empty(num_kept + 1).scatter_(0, place, values)[:num_kept]
        for values in arrays
    ]


def edges_between_tensors(
    indptr: Tensor, indices: Tensor, targets: Tensor, space: DeviceWorkspace, return_e_id: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return edge_index, indptr and e_id of all edges from nodes that the workspace has placed into some targets.

    Waits for the device twice: for the edges of the rows, and for those that are kept.
    """
    rows = WholeRows.of(indptr, targets, len(targets))
    (num_edges,) = space.read([rows.degree.sum()])
    offset, edge = rows.edges(num_edges)
    source = space.label[read_at(indices, edge).long()]
    kept = source != UNSEEN
    before = summed(kept)
    (num_kept,) = space.read([before[-1]])
    source, edge = compressed(kept, before, num_kept, source.long(), edge if return_e_id else None)
    inside = before[offset]
    target = repeated(torch.arange(len(targets), device=inside.device), inside, num_kept)
    return torch.stack([source, target]), inside, edge


def is_among(values: Tensor, others: Tensor) -> Tensor:
    """Return (num,) bool: which values are among others."""
    if not len(others):
        return torch.zeros_like(values, dtype=torch.bool)
    others = others.sort().values
    return others[torch.searchsorted(others, values).clamp(max=len(others) - 1)] == values


def left_edges(graph, kept: Tensor, space: DeviceWorkspace):
    """Return a graph on a device with some of its edges: a tuple with `Subgraph`'s fields.

    Args:
        graph: Its edges by target, with the hops of its nodes, or without.
        kept: (num_edges,) bool.
        space: Of the device, which is waited for once.
    """
    before = summed(kept)
    indptr = before[graph.indptr]
    hops = []
    if graph.num_sampled_edges is not None:
        ends = np.minimum(np.cumsum([0, *graph.num_sampled_nodes[:-1]]), len(indptr) - 1).tolist()
        hops = [indptr[end] for end in ends]
    num_kept, *hops = space.read([before[-1], *hops])
    names = ("e_id", "edge_weight", "edge_type")
    arrays = (*graph.edge_index, *(getattr(graph, name) for name in names))
    source, target, *others = compressed(kept, before, num_kept, *arrays)
    edges = None if graph.num_sampled_edges is None else np.diff(hops).tolist()
    given = dict(zip(names, others, strict=True))
    edge_index = torch.stack([source, target])
    return graph._replace(edge_index=edge_index, indptr=indptr, num_sampled_edges=edges, **given)


def both_ways(induced, sampled, space: DeviceWorkspace):
    """Return an induced graph with the edges alone that were sampled, or go back along one of them."""
    size = len(induced.n_id)
    back = sampled.edge_index[1] * size + sampled.edge_index[0]
    codes = induced.edge_index[0] * size + induced.edge_index[1]
    return left_edges(induced, is_among(induced.e_id, sampled.e_id) | is_among(codes, back), space)


def without_pairs(sampled, pairs: Tensor, linked: Tensor, space: DeviceWorkspace):
    """Return a graph without the edges between the two ends of any pair.

    Args:
        sampled: The graph, its seeds first.
        pairs: (2, num_pairs) positions of seeds.
        linked: (num_pairs,) bool, pairs that count.
        space: Of the device.
    """
    size = sampled.num_seeds
    codes = torch.cat([pairs[0] * size + pairs[1], pairs[1] * size + pairs[0]])
    source, target = sampled.edge_index
    found = is_among(source * size + target, torch.where(linked.repeat(2), codes, -1))
    return left_edges(sampled, ~(found & (source < size) & (target < size)), space)


def row_scale_of_tensors(indptr: Tensor, sampled) -> Tensor:
    """Return `row_scale` of a sampled graph on its device, operation by operation."""
    targets = sampled.n_id[: len(sampled.indptr) - 1]
    degree = (read_at(indptr, targets + 1) - read_at(indptr, targets)).clamp(min=1)
    if sampled.edge_weight is not None:
        return degree.float()
    return (degree.double() / sampled.indptr.diff().clamp(min=1)).float()
