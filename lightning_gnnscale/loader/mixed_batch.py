"""One batch made of batches of several parts: its gradient covers all of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise, repeat, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..events import clock
from ..graph import TypeCounts
from ..sampler.device_stream import MadeOnDevice
from ..sampler.minibatch import MiniBatch, RowsByNodeType, SparseFeatures, columns_of
from .batch_columns import with_rows
from .device_batches import tensors_of
from .type_counts import counted

Take = Callable[[tuple[int, ...], np.dtype], np.ndarray]
_OF_NODES, _OF_EDGES, _OF_SEEDS = (columns_of(what) for what in ("nodes", "edges", "seeds"))


def run_lengths(num_chunks: int, chunks: int, start: int = 0, num_ranks: int = 1) -> Iterator[int]:
    """Yield the chunks of each batch of an epoch, those of a step for one rank after the other.

    Args:
        num_chunks: Of one rank in the epoch.
        chunks: Of a batch; the last one may have fewer.
        start: Step to begin at.
        num_ranks: Ranks that are computed here.
    """
    for first in range(start * chunks, num_chunks, chunks):
        yield from repeat(min(chunks, num_chunks - first), num_ranks)


def mixed_batches(batches, runs: Iterable[int], take: Take):
    """Yield each run of batches as one.

    Args:
        batches: iterator of `MiniBatch`, closed with this one.
        runs: batches of each run, see `run_lengths`.
        take: allocates (shape, dtype), as `BufferPool.take` does.
    """
    try:
        for length in runs:
            chunks = list(islice(batches, length))
            batch = mix(chunks, take)
            del chunks
            yield batch
            del batch
    finally:
        batches.close()


def mix(chunks: Sequence[MiniBatch], take: Take) -> MiniBatch:
    """Return one batch that holds the graphs of several, separately.

    Nodes are ordered hop by hop, the seeds of all chunks first, as in a batch that is sampled at once. A node that
    several chunks have read appears once for each. `part` and `key` are those of the first chunk.

    Args:
        chunks: batches without links to train on, all sampled by one sampler from one store.
        take: allocates (shape, dtype), as `BufferPool.take` does.

    Cost: one copy of the chunks; of those that a device made, there. Features that are `unread` are read into the
        batch, and not copied.
    """
    if len(chunks) == 1:
        return _read_all(chunks, take)[0]
    chunks = _in_one_place(chunks)
    if _read_apart(chunks):
        chunks = _read_all(chunks, take)
    hops = [_hop_ends(chunk) for chunk in chunks]
    depth = max(len(ends) for ends in hops)
    hops = [ends + [ends[-1]] * (depth - len(ends)) for ends in hops]
    # (hop, chunk, start, stop): where each run of nodes of the mixed batch comes from
    runs = [(hop, at, ends[hop], ends[hop + 1]) for hop in range(depth - 1) for at, ends in enumerate(hops)]
    shifts = [[0] * (depth - 1) for _ in chunks]
    num_nodes = 0
    for hop, at, start, stop in runs:
        shifts[at][hop] = num_nodes - start
        num_nodes += stop - start
    places = [_places(ends, shift) for ends, shift in zip(hops, shifts, strict=True)]
    ends_of_edges = [_edge_ends(chunk, ends) for chunk, ends in zip(chunks, hops, strict=True)]
    edges = [(ends_of_edges[at][hop], ends_of_edges[at][hop + 1]) for hop, at, *_ in runs]

    def joined(name: str, spans) -> Tensor | None:
        values = [getattr(chunk, name) for chunk in chunks]
        if values[0] is None:
            return None
        return _joined([values[at][start:stop] for (_, at, *_), (start, stop) in zip(runs, spans, strict=True)], take)

    nodes = [(start, stop) for _, _, start, stop in runs]
    edge_index, indptr = _joined_edges(chunks, runs, edges, places, shifts, take)
    mixed = MiniBatch(
        edge_index=edge_index,
        indptr=indptr,
        batch_size=sum(chunk.batch_size for chunk in chunks),
        part=chunks[0].part,
        key=chunks[0].key,
        num_sampled_nodes=_sums([chunk.num_sampled_nodes for chunk in chunks]),
        num_sampled_edges=_sums([chunk.num_sampled_edges for chunk in chunks]),
        x_csr=_joined_rows(chunks, runs),
        x_by_node_type=_joined_node_types(chunks, places),
        schema=chunks[0].schema,
        seed_of=_joined_seeds(chunks, places),
        **{
            name: None if getattr(chunks[0], name) is None else torch.cat([getattr(chunk, name) for chunk in chunks])
            for name in _OF_SEEDS
        },
        averaging_weights=chunks[0].averaging_weights,
        **({} if chunks[0].made is None else _made_there(chunks, runs)),
        **{name: joined(name, nodes) for name in _OF_NODES},
        **{name: joined(name, edges) for name in _OF_EDGES},
    )
    return mixed if chunks[0].unread is None else _read(mixed, chunks, runs, take)


def _read_all(chunks: Sequence[MiniBatch], take: Take) -> Sequence[MiniBatch]:
    """Read the features of chunks into memory of their own."""
    return [chunk if chunk.unread is None else _read(chunk, [chunk], (), take) for chunk in chunks]


def _read_apart(chunks: Sequence[MiniBatch]) -> bool:
    """Whether chunks have columns of their own that cannot be read run by run: their rows are not dense."""
    columns = [chunk.unread for chunk in chunks]
    if all(column is columns[0] for column in columns):
        return False
    return any(column is None or column.is_sparse or column.by_node_type for column in columns)


def _read(mixed: MiniBatch, chunks: Sequence[MiniBatch], runs, take: Take) -> MiniBatch:
    """Read the features of a mixed batch from the columns of its chunks, into its own memory, and return it."""
    first = chunks[0].unread
    with clock.doing("read"):
        if all(chunk.unread is first for chunk in chunks):
            mixed.unread = None
            return with_rows(mixed, first.read(mixed.host_ids, take))
        rows, end = take((mixed.num_nodes, first.dim), np.dtype(first.dtype)), 0
        for _, at, start, stop in runs:
            if stop > start:
                begin, end = end, end + stop - start
                chunks[at].unread.read(chunks[at].host_ids[start:stop], rows[begin:end])
    return with_rows(mixed, rows)


def _joined_edges(chunks: Sequence[MiniBatch], runs, edges, places, shifts, take: Take) -> tuple[Tensor, Tensor]:
    """Return `edge_index` and `indptr` of a mixed batch.

    Args:
        chunks: Its chunks.
        runs, edges: Where each run of its nodes, and of their edges, comes from.
        places: By chunk, the place of each of its nodes in the mixed batch.
        shifts: By chunk and hop, how far a run of nodes moves.
        take: As of `mix`.
    """
    device = chunks[0].indptr.device
    targets = [max(0, min(stop, chunks[at].num_targets) - start) for _, at, start, stop in runs]
    spans = zip(runs, edges, targets, strict=True)
    if device.type != "cpu":
        moved = [place.to(device)[chunk.edge_index] for place, chunk in zip(places, chunks, strict=True)]
        ends = [moved[at][:, start:stop] for (_, at, *_), (start, stop) in zip(runs, edges, strict=True)]
        lengths = [chunks[at].indptr.diff()[start : start + num] for (_, at, start, _), _, num in spans]
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), *lengths]).cumsum(0)
        return torch.cat(ends, dim=1), indptr
    edge_index = take((2, sum(stop - start for start, stop in edges)), np.dtype(np.int64))
    indptr = take((sum(targets) + 1,), np.dtype(np.int64))
    indptr[0] = edge = row = 0
    given = [
        (chunk.edge_index.numpy(), chunk.indptr.numpy(), place.numpy())
        for chunk, place in zip(chunks, places, strict=True)
    ]
    for (hop, at, first, _), (start, stop), num in spans:
        ends, counts, place = given[at]
        there = edge_index[:, edge : edge + stop - start]
        np.take(place, ends[0, start:stop], out=there[0], mode="clip")  # which does not copy, as "raise" does
        np.add(ends[1, start:stop], shifts[at][hop], out=there[1])
        indptr[row + 1 : row + 1 + num] = counts[first + 1 : first + 1 + num] + (edge - start)
        edge, row = edge + stop - start, row + num
    return torch.from_numpy(edge_index), torch.from_numpy(indptr)


def _in_one_place(chunks: Sequence[MiniBatch]) -> Sequence[MiniBatch]:
    """Return chunks that are all on the host, or all on the device that made them, whose stream is joined."""
    for chunk in chunks:
        if chunk.made is not None:
            chunk.made.join(tensors_of(chunk))
    if len({chunk.made is None for chunk in chunks}) == 1:
        return chunks
    return [replace(chunk.to("cpu"), made=None) for chunk in chunks]  # a part had no space on the device


def _hop_ends(batch: MiniBatch) -> list[int]:
    """Return 0 and where the seeds and the nodes of each hop end; targets and the rest where batches have no hops."""
    counts = batch.num_sampled_nodes
    if counts is None:
        counts = [batch.batch_size, batch.num_targets - batch.batch_size, batch.num_nodes - batch.num_targets]
    return [0, *accumulate(int(count) for count in counts)]


def _places(ends: list[int], shifts: list[int]) -> Tensor:
    """Return (num_nodes,) int64, the place in the mixed batch of each node of a chunk."""
    out = np.arange(ends[-1])  # by numpy: torch would wake a second thread for it, and wait until that has a core
    for (first, last), by in zip(pairwise(ends), shifts, strict=True):
        out[first:last] += by
    return torch.from_numpy(out)


def _edge_ends(batch: MiniBatch, ends: list[int]) -> list[int]:
    """Return 0 and where the edges of each run of nodes end; nodes beyond the targets have none."""
    if batch.num_sampled_nodes is not None and batch.num_sampled_edges is not None:  # a device is not asked
        found = [0, *accumulate(int(count) for count in batch.num_sampled_edges)]
        return [*found[: len(ends)], *[found[-1]] * (len(ends) - len(found))]
    last = batch.num_targets
    return [int(batch.indptr[min(end, last)]) for end in ends]


def _made_there(chunks: Sequence[MiniBatch], runs) -> dict[str, Any]:
    """Return what the host has of a batch that is mixed on a device: `made` and `type_counts`."""
    counts = [counted(chunk).type_counts for chunk in chunks]
    made = MadeOnDevice(lambda: [_joined_ids(chunks, runs)])
    return {"made": made, "type_counts": None if counts[0] is None else TypeCounts.sum(counts)}


def _joined_ids(chunks: Sequence[MiniBatch], runs) -> np.ndarray:
    """Return the (num_nodes,) ids of a mixed batch from those of its chunks on the host."""
    ids = [chunk.host_ids for chunk in chunks]
    return np.concatenate([ids[at][start:stop] for _, at, start, stop in runs])


def _joined(values: list[Tensor], take: Take) -> Tensor:
    if values[0].device.type != "cpu":
        return torch.cat(values)
    arrays = [value.numpy() for value in values]
    out = take((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return torch.from_numpy(np.concatenate(arrays, out=out))


def _joined_rows(chunks: Sequence[MiniBatch], runs) -> SparseFeatures | None:
    if chunks[0].x_csr is None:
        return None
    spans = []
    for _, at, start, stop in runs:
        rows = chunks[at].x_csr
        spans.append((rows, rows.indptr[start : stop + 1].diff(), int(rows.indptr[start]), int(rows.indptr[stop])))
    lengths = [length for _, length, _, _ in spans]
    return SparseFeatures(
        indptr=torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0),
        indices=torch.cat([rows.indices[start:stop] for rows, _, start, stop in spans]),
        data=torch.cat([rows.data[start:stop] for rows, _, start, stop in spans]),
        dim=chunks[0].x_csr.dim,
    )


def _joined_node_types(chunks: Sequence[MiniBatch], places: list[Tensor]) -> RowsByNodeType | None:
    """Return the features of node types, those of each in the order of its nodes in the mixed batch."""
    if chunks[0].x_by_node_type is None:
        return None
    rows, where = [chunk.x_by_node_type for chunk in chunks], torch.cat(places)
    node_type = torch.cat([one.node_type for one in rows])
    in_order = torch.empty_like(node_type)
    in_order[where] = node_type
    tables: list = []
    for number, table in enumerate(rows[0].tables):
        order = torch.argsort(where[node_type == number])
        given = [one.tables[number] for one in rows]
        if table is None:
            tables.append(None)
        elif isinstance(table, SparseFeatures):
            tables.append(_sparse_in_order(given, order))
        else:
            tables.append(torch.cat(given)[order])
    return RowsByNodeType(in_order, tables)


def _sparse_in_order(tables: list[SparseFeatures], order: Tensor) -> SparseFeatures:
    lengths = torch.cat([table.indptr.diff() for table in tables])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])[:-1][order]
    taken = lengths[order]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), taken.cumsum(0)])
    at = torch.arange(int(indptr[-1])) + torch.repeat_interleave(starts - indptr[:-1], taken)
    indices, data = (torch.cat([getattr(table, name) for table in tables])[at] for name in ("indices", "data"))
    return SparseFeatures(indptr, indices, data, tables[0].dim)


def _joined_seeds(chunks: Sequence[MiniBatch], places: list[Tensor]) -> Tensor | None:
    """Return the seed that each node was sampled for; those of a chunk follow those of the chunk before."""
    if chunks[0].seed_of is None:
        return None
    before = [0, *accumulate(chunk.batch_size for chunk in chunks)]
    seeds = torch.cat([chunk.seed_of + first for chunk, first in zip(chunks, before, strict=False)])
    out = torch.empty_like(seeds)
    out[torch.cat(places).to(out.device)] = seeds
    return out


def _sums(counts: list[list[int] | None]) -> list[int] | None:
    """Return counts a hop, added up over the chunks; None where batches have no hops."""
    if counts[0] is None:
        return None
    return [sum(int(count) for count in of_hop) for of_hop in zip_longest(*counts, fillvalue=0)]
