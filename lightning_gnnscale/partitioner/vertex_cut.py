"""Shared by methods that place edges (vertex-cut): degrees, passes that place edges, and the owner of each node."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import short
from ..jit import kernel
from ..rng import combine, fold
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .constraints import pack_in_order
from .graph_access.simple_graph import BLOCK_EDGES
from .graph_input import FIRST_PASS, GraphInput

_SALT = 0x4D415354  # separates this use of the seed from all others
_ROWS_AHEAD, _COUNTS_AHEAD = 24, 12  # edges; a node's counts are asked for once its cursor has come
_NODES_AT_ONCE = 1 << 16
_FEW_PARTS = 16  # up to here every node has a digit for each part: half the time, and cursors are not needed


class EdgePass(NamedTuple):
    """One pass over the edges.

    Attributes:
        name: Name of its phase, as in `Partitioning.seconds` and in progress.
        place: Called as place(src, dst, state, part) with a block of edges. It changes the state in place, moves the
            edges that it places to the front of `src` and `dst`, writes their parts to `part`, and returns their
            number.
        begin: Called as begin(state) before the first edge; returns the state. None: there is nothing to do.
    """

    name: str
    place: Callable[[np.ndarray, np.ndarray, NamedTuple, np.ndarray], int]
    begin: Callable[[NamedTuple], NamedTuple] | None = None


def place_edges(
    graph: GraphInput, num_parts: int, masters: str, state_type: type, start: Callable, passes: Sequence[EdgePass]
) -> np.ndarray:
    """Place every edge in a part, and give every node a master among the parts that hold its edges.

    Args:
        graph: the graph, not opened yet; without `balance`: these methods balance edges.
        masters: "majority", "last" or "random": see `MASTERS`.
        state_type: a NamedTuple of arrays.
        start: called as start(degree) after the first pass, when `graph.simple` is open; returns the state. It may keep
            `degree`.

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.
    """
    if graph.balance:
        given = dict(graph.balance)
        raise ValueError(f"partitioner {graph.method!r} takes no balance constraints, got balance={given}")
    check_masters(masters)
    degree, names = graph.open_simple(), [edge_pass.name for edge_pass in passes]
    left = graph.left_in(graph.phase)
    if left:
        state, owners = _load(state_type, "state", left), _load(MASTERS[masters].__self__, "owners", left)
        placed = left["placed"]
    else:
        with phases.phase(FIRST_PASS):
            owners = MASTERS[masters](degree, num_parts, graph.seed)
            state, placed = start(degree), np.zeros(num_parts, np.int64)
    del degree, left
    for edge_pass in passes[names.index(graph.phase) if graph.phase else 0 :]:
        with phases.phase(edge_pass.name):
            if edge_pass.begin is not None and edge_pass.name != graph.phase:
                state = edge_pass.begin(state)
            _run_pass(graph, edge_pass, state, owners, placed)
    phases.note(edges_per_part=placed.tolist())
    del state
    with phases.phase("masters"):
        return assign_masters(owners, num_parts)


def _run_pass(graph: GraphInput, edge_pass: EdgePass, state, owners, placed: np.ndarray) -> None:
    """Read the edges once; state, owners and the (num_parts,) numbers of placed edges are changed in place."""
    num_parts, part = len(placed), np.empty(BLOCK_EDGES, np.int32)

    def place(src, dst) -> None:
        count = edge_pass.place(src, dst, state, part)
        owners.watch(src[:count], dst[:count], part[:count], num_parts)
        placed[:] += np.bincount(part[:count], minlength=num_parts)

    graph.run_pass(
        edge_pass.name, place, lambda: {**_save(state, "state"), **_save(owners, "owners"), "placed": placed}
    )


def _save(value: NamedTuple, name: str) -> dict[str, np.ndarray]:
    return {f"{name}.{field}": array for field, array in value._asdict().items()}


def _load(kind: type, name: str, arrays: dict[str, np.ndarray]):
    return kind(*(arrays[f"{name}.{field}"] for field in kind._fields))


class MajorityMasters(NamedTuple):
    """The part with most of a node's edges, the lowest of several; counted exactly.

    With up to 16 parts a node has one digit a part. With more, a node that has fewer edges than there are parts keeps
    the list of its edges' parts instead. A digit that comes round to 0 is carried to a wider one.

    Attributes:
        cursor: (num_nodes,) uint32, or uint64 where that is too small: twice a position in `counts`, plus 1 for a
            list; that of a list moves on as it fills. (0,) with up to 16 parts: node v has the position v * num_parts.
        counts: (size,) uint8, or uint16 or uint32 with more than 256 or 65,536 parts: digits and lists.
        hubs: (num_hubs,) ids of the nodes whose degree needs more than one digit, ascending.
        carries: (num_hubs, num_parts) uint8, uint16 or uint32, as the largest degree asks for.

    Cost: num_parts bytes a node with up to 16 parts. With more, 4 bytes (8 where `counts` has 2**31 entries or more)
        and min(degree, num_parts) entries. A hub takes 1 to 4 bytes a part besides.
    """

    cursor: np.ndarray
    counts: np.ndarray
    hubs: np.ndarray
    carries: np.ndarray

    @classmethod
    def start(cls, degree: np.ndarray, num_parts: int, seed: int) -> "MajorityMasters":
        digit = np.min_scalar_type(num_parts - 1)
        base = 1 << 8 * digit.itemsize
        hubs = np.flatnonzero(degree >= base)
        carries = np.zeros((len(hubs), num_parts), np.min_scalar_type(int(degree.max(initial=0)) // base))
        if num_parts <= _FEW_PARTS:
            return cls(np.zeros(0, np.uint32), np.zeros(len(degree) * num_parts, digit), hubs, carries)
        size = int(_lay_out(degree, num_parts, np.zeros(0, np.uint64)))
        cursor = np.empty(len(degree), np.uint32 if size < 1 << 31 else np.uint64)
        _lay_out(degree, num_parts, cursor)
        # One entry more: where stray writes go if the stream changes.
        return cls(cursor, np.zeros(size + 1, digit), hubs, carries)

    def watch(self, src: np.ndarray, dst: np.ndarray, part: np.ndarray, num_parts: int) -> None:
        """Count a block of placed edges."""
        if len(self.cursor):
            _count(src, dst, part, num_parts, *self)
        else:
            _count_digits(src, dst, part, num_parts, *self[1:])

    def choose(self, num_parts: int) -> np.ndarray:
        """Return (num_nodes,) int32 parts, -1 for nodes without an edge; the cursors' memory is used for them."""
        if self.cursor.dtype == np.uint32 and len(self.cursor):
            part_id = self.cursor.view(np.int32)
        else:
            part_id = np.empty(len(self.cursor) or len(self.counts) // num_parts, np.int32)
        _most(*self, np.zeros(num_parts, np.uint64), part_id)
        return part_id


class SingleMasters(NamedTuple):
    """One part at a time is kept, 4 bytes a node: that of the edge placed last, or one of all with equal probability.

    The former is what the published code of SDT-GNN does, the latter what its paper says: the part with the smallest
    hash of (seed, node, part), so that no set of parts need be kept.

    Attributes:
        part_id: (num_nodes,) int32, -1 for nodes that have met no edge.
        key: (1,) uint64, of the seed; (0,): the last part counts.
    """

    part_id: np.ndarray
    key: np.ndarray

    @classmethod
    def last(cls, degree: np.ndarray, num_parts: int, seed: int) -> "SingleMasters":
        return cls(np.full(len(degree), -1, np.int32), np.zeros(0, np.uint64))

    @classmethod
    def random(cls, degree: np.ndarray, num_parts: int, seed: int) -> "SingleMasters":
        return cls(np.full(len(degree), -1, np.int32), np.array([fold(seed, _SALT)], np.uint64))

    def watch(self, src: np.ndarray, dst: np.ndarray, part: np.ndarray, num_parts: int) -> None:
        """Remember the parts of a block of placed edges, or let them compete."""
        if len(self.key):
            _keep_smallest_hash(src, dst, part, self.key, self.part_id)
        else:
            _remember_last(src, dst, part, self.part_id)

    def choose(self, num_parts: int) -> np.ndarray:
        """Return (num_nodes,) int32 parts, -1 for nodes without an edge."""
        return self.part_id


# How a rule starts; the class that it returns is also the type of its state.
MASTERS = {"majority": MajorityMasters.start, "last": SingleMasters.last, "random": SingleMasters.random}


def check_masters(masters: str) -> None:
    """Raise ValueError unless there is such a rule."""
    if not isinstance(masters, str) or masters not in MASTERS:
        raise ValueError(f"partitioner.masters must be one of {', '.join(MASTERS)}, got {short(masters)}")


def assign_masters(masters: MajorityMasters | SingleMasters, num_parts: int) -> np.ndarray:
    """Return the (num_nodes,) int32 part of every node, once all edges have been watched by `masters`, used up by it.

    Nodes without an edge go, in their order, to the part with the fewest nodes; O(num_nodes log num_parts) time.
    """
    part_id = masters.choose(num_parts)
    filled = np.zeros(num_parts, np.int64)
    _fill(part_id, filled)
    for first in range(0, len(part_id), _NODES_AT_ONCE):
        some = part_id[first : first + _NODES_AT_ONCE]
        alone = np.flatnonzero(some < 0)
        if len(alone):
            some[alone] = pack_in_order(np.ones(len(alone), np.int64), filled)
    return part_id


@kernel
def _lay_out(degree, num_parts, cursor):
    """Write the cursors, unless there are none; return how many entries lists and digits take together."""
    position = np.int64(0)
    for v in range(len(degree)):
        is_list = degree[v] < num_parts
        if len(cursor):
            cursor[v] = 2 * position + is_list
        position += degree[v] if is_list else num_parts
    return position


@kernel
def _count_digits(src, dst, part, num_parts, counts, hubs, carries):
    length = len(src)
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(counts, num_parts * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(counts, num_parts * np.int64(dst[i + _ROWS_AHEAD]))
        for v in (src[i], dst[i]):
            position = num_parts * np.int64(v) + part[i]
            counts[position] += 1
            if counts[position] == 0:
                _carry(v, part[i], hubs, carries)


@kernel
def _count(src, dst, part, num_parts, cursor, counts, hubs, carries):
    length, stray = len(src), len(counts) - 1
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(cursor, np.int64(src[i + _ROWS_AHEAD]))
            prefetch(cursor, np.int64(dst[i + _ROWS_AHEAD]))
            prefetch(counts, np.int64(cursor[src[i + _COUNTS_AHEAD]] >> 1))
            prefetch(counts, np.int64(cursor[dst[i + _COUNTS_AHEAD]] >> 1))
        for v in (src[i], dst[i]):
            state = np.int64(cursor[v])
            is_list, is_digit = state & 1, 1 - (state & 1)
            # No branch on list or digits: it would be mispredicted every other time. Only a stream that has
            # changed since the first pass leads beyond the entries; the end of the pass reports that.
            position = min((state >> 1) + is_digit * part[i], stray)
            counts[position] = is_list * part[i] + is_digit * (counts[position] + 1)
            cursor[v] = state + 2 * is_list
            if is_digit and counts[position] == 0:
                _carry(v, part[i], hubs, carries)


@kernel
def _carry(v, part, hubs, carries):
    hub = np.searchsorted(hubs, v)
    if hub < len(hubs):  # beyond only where the stream has changed
        carries[hub, part] += 1


@kernel
def _most(cursor, counts, hubs, carries, totals, part_id):
    """Write each node's part with most edges; part_id may share the cursors' memory, as each is read before."""
    num_parts, base = len(totals), np.uint64(1) << np.uint64(8 * counts.itemsize)
    position, hub = np.int64(0), 0
    for v in range(len(part_id)):
        best, most = -1, np.uint64(0)
        if len(cursor) and cursor[v] & 1:
            stop = np.int64(cursor[v] >> 1)
            for k in range(position, stop):
                totals[counts[k]] += np.uint64(1)
            for k in range(position, stop):
                part = np.int64(counts[k])
                if totals[part] > most or (totals[part] == most and part < best):
                    best, most = part, totals[part]
            for k in range(position, stop):
                totals[counts[k]] = 0
            position = stop
        else:
            is_hub = hub < len(hubs) and hubs[hub] == v
            for part in range(num_parts):
                total = np.uint64(counts[position + part])
                if is_hub:
                    total += base * np.uint64(carries[hub, part])
                if total > most:
                    best, most = part, total
            position += num_parts
            hub += is_hub
        part_id[v] = best


@kernel
def _remember_last(src, dst, part, part_id):
    length = len(src)
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(part_id, np.int64(src[i + _ROWS_AHEAD]))
            prefetch(part_id, np.int64(dst[i + _ROWS_AHEAD]))
        part_id[src[i]] = part[i]
        part_id[dst[i]] = part[i]


@kernel
def _keep_smallest_hash(src, dst, part, key, part_id):
    length = len(src)
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(part_id, np.int64(src[i + _ROWS_AHEAD]))
            prefetch(part_id, np.int64(dst[i + _ROWS_AHEAD]))
        _compete(src[i], part[i], key[0], part_id)
        _compete(dst[i], part[i], key[0], part_id)


@kernel(inline="always")
def _compete(v, part, key, part_id):
    holder = part_id[v]
    if holder == part:
        return
    node_key = combine(key, v)
    if holder < 0 or combine(node_key, part) < combine(node_key, holder):
        part_id[v] = part


@kernel
def _fill(part_id, filled):
    for v in range(len(part_id)):
        if part_id[v] >= 0:
            filled[part_id[v]] += 1
