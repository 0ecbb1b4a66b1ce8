"""Batches made together for one trainer node: each node of their union is sent once, all else as narrow as it fits.

Rows are not part of a group: `unpack_group` and `unpack_one` take those of the union, however they came. What a node
is labelled is sent once for the union; integers go as narrow as they fit, masks as bits, and the targets of edges not
at all, since `indptr` says them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..jit import kernel
from ..partition_store.features import CSRFeatures, SparseRows, as_bits
from ..partition_store.typed_features import TypedRows
from ..rng import mix64
from ..sampler.minibatch import MiniBatch, RowsByNodeType, columns_of, sparse_rows_to_torch
from ..sampler.protocol import Allocate
from ..triton_kernels.gather_rows import RowCode, gather_rows
from ..triton_kernels.intrinsics import prefetch
from ..triton_kernels.sample_neighbors.cpu import emit_edges

NARROW = tuple(np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "int32"))
_WIDE = np.dtype(np.int64)
_AHEAD = 32  # items between a prefetch and its use


class Wire(NamedTuple):
    """An array in the form in which it is sent.

    Attributes:
        values: The values. Where all of them fit, int64 is replaced by a type of NARROW; bool is replaced by bits
            (uint8).
        dtype: Dtype of the original array.
        shape: Shape of the original array.
    """

    values: np.ndarray
    dtype: np.dtype
    shape: tuple[int, ...]


def narrowest(low: int, high: int) -> np.dtype:
    """Return the first dtype of NARROW that holds both, or int64."""
    return next((dtype for dtype in NARROW if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max), _WIDE)


def narrowed(array: np.ndarray) -> Wire:
    """Return an array as it is sent; it may share the array's memory."""
    values = np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        values = np.packbits(values)
    elif array.dtype == np.int64 and array.size:
        values = values.astype(narrowest(int(array.min()), int(array.max())), copy=False)
    return Wire(values, array.dtype, array.shape)


def _in_shape(wire: Wire) -> np.ndarray:
    """Return the values in the array's shape, their dtype maybe still narrow."""
    if wire.dtype == np.bool_:
        size = int(np.prod(wire.shape, dtype=np.int64))
        return np.unpackbits(wire.values, count=size).view(np.bool_).reshape(wire.shape)
    return wire.values


def widened(wire: Wire, allocate: Allocate) -> np.ndarray:
    """Return the original array."""
    out = allocate(wire.shape, wire.dtype)
    out[...] = _in_shape(wire)
    return out


def selected(wire: Wire, positions: np.ndarray | None, num: int, allocate: Allocate) -> np.ndarray:
    """Return the values at (num,) positions, of full width; positions None: the first `num`."""
    values = _in_shape(wire)
    out = allocate((num, *wire.shape[1:]), wire.dtype)
    if positions is None:
        out[...] = values[:num]
    elif values.ndim == 1:
        _select(values, positions, out)
    else:
        out[...] = values[positions]
    return out


@kernel
def _select(values, positions, out):
    num = len(positions)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(values, np.int64(positions[i + _AHEAD]))
        out[i] = values[positions[i]]


_AHEAD = 32  # items between a prefetch and its use
_DIRECT = 8  # ids an item, up to which a table by id is cheaper than one by hash


def unite(ids: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the distinct ids in order of first appearance, and where in them each of the given ones is."""
    total = sum(len(own) for own in ids)
    largest = max((int(own.max()) for own in ids if len(own)), default=0)
    union = np.empty(total + 1, np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    positions = [np.empty(len(own), np.int32 if total <= np.iinfo(np.int32).max else np.int64) for own in ids]
    count = 0
    if largest < _DIRECT * max(total, 1):
        label = np.full(largest + 1, -1, np.int32 if total <= np.iinfo(np.int32).max else np.int64)
        for own, places in zip(ids, positions, strict=True):
            count = _unite_by_id(own, label, union, count, places)
    else:
        table = np.full(1 << (2 * total - 1).bit_length(), -1, np.int64)
        for own, places in zip(ids, positions, strict=True):
            count = _unite_by_hash(own, table, union, count, places)
    return union[:count].copy(), positions


@kernel
def _unite_by_id(ids, label, union, count, positions):
    """Number the ids, new ones with count, count + 1, ...; return the number of all. label: -1 for ids not met yet."""
    num = len(ids)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(label, ids[i + _AHEAD])
        known = label[ids[i]]
        fresh = known < 0
        mine = count if fresh else np.int64(known)
        union[count] = ids[i]
        label[ids[i]] = mine
        positions[i] = mine
        count += fresh
    return count


@kernel
def _unite_by_hash(ids, table, union, count, positions):
    """Do as `_unite_by_id`; table: positions in the union by hash, -1 for none, a power of two of them."""
    num, last = len(ids), np.uint64(len(table) - 1)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(table, np.int64(mix64(np.uint64(ids[i + _AHEAD])) & last))
        place = np.int64(mix64(np.uint64(ids[i])) & last)
        while table[place] >= 0 and union[table[place]] != ids[i]:
            place = np.int64(np.uint64(place + 1) & last)
        if table[place] < 0:
            table[place] = count
            union[count] = ids[i]
            count += 1
        positions[i] = table[place]
    return count


_FEATURES = ("x_dense", "x_csr", "x_by_node_type")
_APART = {"n_id", "edge_index", *_FEATURES}
_NODE_FIELDS = tuple(name for name in columns_of("nodes") if name not in _APART)


class GroupedBatch(NamedTuple):
    """One batch of a group, without what the group's union already holds.

    Attributes:
        num_nodes: Number of nodes in the batch.
        positions: (num_nodes,) position of each node in the union, in any integer dtype; None: 0, 1, 2, ...
        sources: (num_edges,) positions of the first row of `edge_index`, in any integer dtype. None: `edge_index`
            is sent whole, because its edges are not in the order that `indptr` implies.
        arrays: The batch's other tensors by name.
        plain: Its other values by name.
    """

    num_nodes: int
    positions: np.ndarray | None
    sources: np.ndarray | None
    arrays: dict[str, Wire]
    plain: dict[str, Any]


@dataclass(frozen=True)
class BatchGroup:
    """Batches that share their rows. Plain arrays in plain containers: pickle protocol 5 sends them out of band.

    Attributes:
        union: (num_union,) int32, or int64 where ids need it: distinct store ids of all batches, in order of first
            appearance.
        node_values: degrees, labels and masks of the union, those that all batches agree about; batches of one part do.
        batches: in the order given.
    """

    union: np.ndarray
    node_values: dict[str, Wire]
    batches: list[GroupedBatch]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the arrays: what is sent besides rows, without a few hundred bytes of names and numbers a batch."""
        wires = [*self.node_values.values(), *(wire for batch in self.batches for wire in batch.arrays.values())]
        arrays = [self.union, *(wire.values for wire in wires)]
        arrays += [array for batch in self.batches for array in (batch.positions, batch.sources) if array is not None]
        return sum(array.nbytes for array in arrays)

    @property
    def weight(self) -> np.ndarray | None:
        """(num_union,) degrees: how likely a node is met again; None where batches do not agree about them."""
        return self.node_values["degree"].values if "degree" in self.node_values else None

    def __reduce__(self):
        return BatchGroup, (self.union, self.node_values, self.batches)


def pack_group(batches: Sequence[MiniBatch]) -> BatchGroup:
    """Return batches in the form in which they are sent together.

    Args:
        batches: on the CPU, without features; ids below 2**63. Their memory may be shared with the group.

    Raises:
        ValueError: there is none, or one has features: they are sent as rows of the union.

    Cost: O(nodes + edges of the batches); a table of 4 bytes an id, or of 24 a node where ids are many.
    """
    if not batches:
        raise ValueError("a group must have at least one batch, got none")
    for number, batch in enumerate(batches):
        if any(getattr(batch, name) is not None for name in _FEATURES):
            raise ValueError(f"batches[{number}] must come without features: make it with fill=False")
    union, positions = unite([batch.n_id.numpy() for batch in batches])
    shared = {}
    for name in _NODE_FIELDS:
        values = _agreed(batches, name, positions, len(union))
        if values is not None:
            shared[name] = narrowed(values)
    place_dtype = narrowest(0, len(union))
    packed = [
        _pack_one(batch, None if _counts_up(places) else places.astype(place_dtype, copy=False), shared)
        for batch, places in zip(batches, positions, strict=True)
    ]
    return BatchGroup(union, shared, packed)


def unpack_group(
    group: BatchGroup,
    rows: np.ndarray | SparseRows | TypedRows | None,
    allocate: Allocate = np.empty,
    code: RowCode | Sequence[RowCode | None] | None = None,
) -> list[MiniBatch]:
    """Return the batches of a group, bit for bit as `BatchMaker.make` does; arguments as for `unpack_one`."""
    return [unpack_one(group, number, rows, allocate, code) for number in range(len(group.batches))]


def unpack_one(
    group: BatchGroup,
    number: int,
    rows: np.ndarray | SparseRows | TypedRows | None,
    allocate: Allocate = np.empty,
    code: RowCode | Sequence[RowCode | None] | None = None,
) -> MiniBatch:
    """Return one batch of a group; the rows of the other batches are not read.

    Args:
        group: The group, as packed.
        number: Index of the batch, in [0, len(group.batches)).
        rows: (num_union, dim) array, or num_union sparse rows as `CSRFeatures.gather` returns them, or rows by node
            type as `TypedFeatures.gather` does; None: no features. Where the batch is alone in its group and the dense
            rows are writable, they become the batch's own without a copy.
        allocate: Allocates the arrays, for example `BufferPool.take`.
        code: Format of quantised dense rows; the batch gets them decoded. None: the batch gets rows as they are. For
            rows by node type, one per node type.

    Raises:
        ValueError: there are more or fewer rows than the union has nodes.
    """
    num_rows = None if rows is None else rows.num_rows if isinstance(rows, SparseRows | TypedRows) else len(rows)
    if num_rows not in (None, len(group.union)):
        raise ValueError(f"rows must be those of the union, {len(group.union)}, got {num_rows}")
    packed = group.batches[number]
    tensors = {name: torch.from_numpy(widened(wire, allocate)) for name, wire in packed.arrays.items()}
    for name, wire in group.node_values.items():
        tensors[name] = torch.from_numpy(selected(wire, packed.positions, packed.num_nodes, allocate))
    if packed.sources is not None:
        edge_index = allocate((2, len(packed.sources)), np.int64)
        emit_edges(packed.sources, tensors["indptr"].numpy(), edge_index)
        tensors["edge_index"] = torch.from_numpy(edge_index)
    ids = Wire(group.union, np.dtype(np.int64), group.union.shape)
    n_id = selected(ids, packed.positions, packed.num_nodes, allocate)
    batch = MiniBatch(n_id=torch.from_numpy(n_id), **tensors, **packed.plain)
    _give_rows(batch, packed, rows, len(group.batches) == 1, allocate, code)
    return batch


def _give_rows(batch: MiniBatch, packed: GroupedBatch, rows, alone: bool, allocate: Allocate, code) -> None:
    if rows is None:
        return
    if code is not None or isinstance(rows, SparseRows | TypedRows):
        places = np.arange(packed.num_nodes) if packed.positions is None else packed.positions
        if isinstance(rows, TypedRows):
            batch.x_by_node_type = _taken_by_node_type(rows, places, allocate, code or [None] * len(rows.tables))
        elif isinstance(rows, SparseRows):
            batch.x_csr = _taken(rows, places, allocate)
        else:
            batch.x_dense = _taken(rows, places, allocate, code)
        return
    own = alone and packed.positions is None and packed.num_nodes == len(rows)
    if not (own and rows.flags.writeable and rows.flags.c_contiguous):
        out = allocate((packed.num_nodes, *rows.shape[1:]), rows.dtype)
        if packed.positions is None:
            np.copyto(out, rows[: packed.num_nodes])
        else:
            gather_rows(rows, packed.positions, out)
        rows = out
    batch.x_dense = torch.from_numpy(rows)


def _taken(rows, places: np.ndarray, allocate: Allocate, code: RowCode | None = None):
    """Return the rows at some places as a batch has them: decoded where they are quantised."""
    if isinstance(rows, SparseRows):
        return sparse_rows_to_torch(CSRFeatures(rows.indptr, rows.indices, rows.data, rows.dim).read(places))
    shape = (len(places), rows.shape[1] if code is None else code.dim)
    out = allocate(shape, rows.dtype if code is None else np.float32)
    return torch.from_numpy(gather_rows(rows, places, out, code))


def _taken_by_node_type(rows: TypedRows, places: np.ndarray, allocate: Allocate, codes) -> RowsByNodeType:
    node_type, rank = rows.node_type[places].astype(np.int64), rows.rank()[places]
    tables = [
        None if table is None else _taken(table, rank[node_type == number], allocate, code)
        for number, (table, code) in enumerate(zip(rows.tables, codes, strict=True))
    ]
    return RowsByNodeType(torch.from_numpy(node_type), tables)


def _pack_one(batch: MiniBatch, positions: np.ndarray | None, shared: dict[str, Wire]) -> GroupedBatch:
    arrays, plain = {}, {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name in _APART or field.name in shared:
            continue
        if isinstance(value, torch.Tensor):
            arrays[field.name] = narrowed(value.numpy())
        else:
            plain[field.name] = value
    edge_index, num_nodes = batch.edge_index.numpy(), len(batch.n_id)
    sources = np.empty(edge_index.shape[1], narrowest(0, num_nodes))
    if not _narrow_edges(edge_index, batch.indptr.numpy(), sources):
        arrays["edge_index"], sources = narrowed(edge_index), None
    return GroupedBatch(num_nodes, positions, sources, arrays, plain)


def _agreed(batches: Sequence[MiniBatch], name: str, positions: list[np.ndarray], num_union: int) -> np.ndarray | None:
    """Return a field's values for the union, or None where batches lack it or disagree about a node."""
    values = [getattr(batch, name) for batch in batches]
    if any(value is None for value in values):
        return None
    values = [value.numpy() for value in values]
    first = values[0]
    if any(value.dtype != first.dtype or value.shape[1:] != first.shape[1:] for value in values):
        return None
    shared = np.empty((num_union, *first.shape[1:]), first.dtype)
    columns = as_bits(shared).reshape(num_union, shared[:1].size if num_union else 1)
    one_part = len({batch.part for batch in batches}) == 1  # whose tables they all were looked up in
    known = 0
    for value, places in zip(values, positions, strict=True):
        bits = as_bits(np.ascontiguousarray(value)).reshape(len(value), columns.shape[1])
        known = _share(bits, places, columns, known, not one_part)
        if known < 0:
            return None
    return shared


def _counts_up(places: np.ndarray) -> bool:
    """Return whether places are 0, 1, 2, ..., as those of a group's first batch are where its ids are distinct."""
    if len(places) and (places[0] != 0 or places[-1] != len(places) - 1):
        return False
    return bool(np.array_equal(places, np.arange(len(places), dtype=places.dtype)))


@kernel
def _share(bits, positions, shared, known, compare):
    """Write the values of nodes met first; return how many are known, or -1 where `compare` finds a difference.

    Args:
        bits: (num, columns). positions: (num,), new ones in ascending order from `known` on. shared: (num_union,
            columns), its first `known` rows filled.
    """
    num, columns = bits.shape
    for i in range(num):
        place = positions[i]
        if place == known:
            for column in range(columns):
                shared[place, column] = bits[i, column]
            known += 1
        elif compare:
            for column in range(columns):
                if shared[place, column] != bits[i, column]:
                    return -1
    return known


@kernel
def _narrow_edges(edge_index, indptr, sources):
    """Write the sources of edges; return whether their targets are those that indptr says."""
    if indptr[0] != 0 or indptr[-1] != len(sources):
        return False
    for target in range(len(indptr) - 1):
        for edge in range(indptr[target], indptr[target + 1]):
            sources[edge] = edge_index[0, edge]
            if edge_index[1, edge] != target:
                return False
    return True
