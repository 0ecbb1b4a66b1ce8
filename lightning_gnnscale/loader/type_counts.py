"""How many nodes, edges and pairs of each type a batch has: counted ahead of its use, so that no step asks a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..graph import GraphSchema, TypeCounts
from ..sampler.minibatch import MiniBatch

_LARGEST_TABLE = 1 << 28  # bytes, one a pair that may be; beyond it pairs are sorted


def hop_ends(
    num_nodes: int, num_edges: int, of_nodes: Sequence[int] | None, of_edges: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return the nodes up to each hop, and the edges into them; of a batch that is not in hops all of them.

    Args:
        num_nodes, num_edges: Of the batch.
        of_nodes, of_edges: Its `num_sampled_nodes` and `num_sampled_edges`.
    """
    if of_nodes is None or of_edges is None:
        return [num_nodes], [num_edges]
    ends, edges = ([int(end) for end in accumulate(counts)] for counts in (of_nodes, of_edges))
    return ends, [*edges[: len(ends)], *[num_edges] * (len(ends) - len(edges))]


def type_table(
    schema: GraphSchema,
    node_type: Tensor | None,
    edge_type: Tensor | None,
    edge_index: Tensor,
    ends: tuple[list[int], list[int]],
) -> Tensor:
    """Return (num_hops + 1, num_node_types + 3 * num_edge_types) int64 on the device of the batch; see `TypeCounts`.

    Args:
        schema, node_type, edge_type, edge_index: As a `MiniBatch` has them; None: all are of one type.
        ends: What `hop_ends` returns.

    Cost: a byte for each pair of a node and an edge type up to _LARGEST_TABLE, else two sorts of the edges.
    """
    num_types = schema.num_edge_types
    source, target = edge_index
    nodes = source.new_zeros(ends[0][-1]) if node_type is None else node_type
    edges = torch.zeros_like(source) if edge_type is None else edge_type
    into, out, rows = target * num_types + edges, source * num_types + edges, []
    for num_nodes, num_edges in zip(*ends, strict=True):
        rows += [
            _counts(nodes[:num_nodes], schema.num_node_types),
            _counts(edges[:num_edges], num_types),
            _distinct(into[:num_edges], num_nodes, num_types),
            _distinct(out[:num_edges], ends[0][-1], num_types),
        ]
    return torch.cat(rows).view(len(ends[0]), -1)


def read_table(schema: GraphSchema, table: np.ndarray, ends: Sequence[int]) -> TypeCounts:
    """Return the counts of a `type_table` that is on the host; ends: the nodes up to each hop."""
    rows = table.reshape(len(ends), -1)
    at = schema.num_node_types + schema.num_edge_types * np.arange(3)
    parts = (tuple(map(tuple, part.tolist())) for part in np.split(rows, at, axis=1))
    return TypeCounts(tuple(ends), *parts)


def counted(batch: MiniBatch) -> MiniBatch:
    """Return a batch with its `type_counts`; one of a graph without types as it is. Waits for a device that made it."""
    if batch.schema is None or batch.type_counts is not None:
        return batch
    given = batch.num_nodes, batch.num_edges, batch.num_sampled_nodes, batch.num_sampled_edges
    ends = hop_ends(*given)
    if batch.made is not None:
        table = batch.made.read()[-1]  # `DeviceColumns` has counted them there
    else:
        table = type_table(batch.schema, batch.node_type, batch.edge_type, batch.edge_index, ends).numpy()
    return replace(batch, type_counts=read_table(batch.schema, table, ends[0]))


def _counts(types: Tensor, num_types: int) -> Tensor:
    if types.device.type == "cpu":
        return torch.bincount(types, minlength=num_types)
    return types.new_zeros(num_types).index_add_(0, types, torch.ones_like(types))


def _distinct(keys: Tensor, num_nodes: int, num_types: int) -> Tensor:
    """Return (num_types,) how many distinct keys of each type there are; a key is node * num_types + type."""
    if num_nodes * num_types <= _LARGEST_TABLE:
        seen = torch.zeros(num_nodes * num_types, dtype=torch.bool, device=keys.device)
        seen[keys] = True
        return seen.view(num_nodes, num_types).sum(0)
    keys = keys.sort().values
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    return _counts(torch.where(first, keys % num_types, num_types), num_types + 1)[:num_types]
