"""What a part reads beyond its core: nodes from the sources of its rows; rows by transposing them, or from a code.

A halo node's row holds its sources in the core of the part. Where every edge has its reverse, the row is the transpose
of the core's own edges, and nothing of it is stored. Elsewhere the rows are a run of bytes, one halo node after the
other: the number of edges, the place of the first edge in a store with edge arrays, and the sources. With edge arrays
and both directions, only the places are stored. The edges of a row that come from one part are one run of the CSC, so
the places of all follow from that of the first.

A number takes 7 bits a byte, lowest first; the highest bit of a byte says that another byte follows (LEB128). Places
count from the edges of the halo node before, sources from the source before, so that most numbers take a byte or two.
"""

from dataclasses import dataclass

import numpy as np

from ..graph import CSC
from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from .planned_reads import RankedNodes

AHEAD = 64  # edges between a prefetch and its use
_BLOCK_EDGES = 1 << 20


@dataclass(frozen=True)
class HaloForm:
    """What of the halo's rows is stored.

    Attributes:
        rows: Whether the edges are: where some edge has no reverse.
        places: Whether the places of edges are: in a store with edge arrays.
    """

    rows: bool
    places: bool

    @property
    def stores_any(self) -> bool:
        return self.rows or self.places


def halo_of_rows(csc: CSC, begin: int, end: int, block_edges: int = _BLOCK_EDGES) -> RankedNodes | None:
    """Return the sources of edges into rows [begin, end) outside it; None where one is not a node of the graph.

    Args:
        csc: The whole graph.
        begin, end: Store ids that bound the core.
        block_edges: How many edges are looked at between two steps, so that a memory map is read in chunks.

    Cost: one read of the rows; memory of two bits a node of the whole graph.
    """
    held = RankedNodes.empty(csc.num_rows)
    first, last = int(csc.indptr[begin]), int(csc.indptr[end])
    for position in range(first, last, block_edges):
        sources = csc.indices[position : min(position + block_edges, last)]
        if add_sources(sources, begin, end, csc.num_rows, held) < 0:
            return None
    return held.count()


def add_sources(sources: np.ndarray, begin: int, end: int, num_nodes: int, held: RankedNodes) -> int:
    """Add the sources outside [begin, end) to a set, and count their edges.

    Args:
        sources: (num_edges,) store ids.
        held: The set; changed in place.

    Returns:
        The number of edges from outside; -1 where a source is not in [0, num_nodes).
    """
    crossing, new = _add_sources(sources, begin, end, num_nodes, held.words)
    held.size += new
    return crossing


def halo_and_edges(
    csc: CSC, begin: int, end: int, block_edges: int = _BLOCK_EDGES
) -> tuple[RankedNodes, tuple[int, int, int]]:
    """Do what `halo_of_rows` does, and count the edges of rows of a graph that lists each edge in both directions.

    Args:
        csc: the whole graph; the sources of a row are ascending, and repeats count once. Self-loops do not count.

    Returns:
        The halo; edges with both ends in the rows, edges with one end there, connected components of the former.

    Cost: one read of the rows; two bits a node of the whole graph, and 4 or 8 bytes a row.
    """
    indptr, held = np.asarray(csc.indptr[begin : end + 1]), RankedNodes.empty(csc.num_rows)
    parent, counts = np.arange(end - begin, dtype=csc.indices.dtype), np.zeros(2, np.int64)
    row = 0
    while row < end - begin:
        last = int(np.searchsorted(indptr, indptr[row] + block_edges, side="right")) - 1
        last = min(max(last, row + 1), end - begin)
        sources = csc.indices[int(indptr[row]) : int(indptr[last])]
        add_sources(sources, begin, end, csc.num_rows, held)
        _count_core(indptr[row : last + 1], sources, row, begin, parent, counts)
        row = last
    return held.count(), (int(counts[0]), int(counts[1]), int(_count_roots(parent)))


def count_halos(nodes: np.ndarray, count: np.ndarray) -> None:
    """Add to (num_nodes,) uint8 how often each node is in (num_halo,) ids; at most 255."""
    _count_halos(nodes, count)


def encode_halo(
    form: HaloForm, nodes: np.ndarray, held: RankedNodes, cross: tuple, state: tuple[int, int]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Encode the rows of some halo nodes of a part.

    Args:
        form: What is stored.
        nodes: (num_halo,) store ids of the part's halo, ascending; `held`: the same.
        cross: (node, source, place), each (num_edges,) and ascending by node and source: the edges from the core of the
            part to nodes beyond it, whether in the halo or not. `source` is a local id and `place` a position in the
            CSC; either is empty where the form does not need it.
        state: How many nodes are encoded, and the place behind the last edge; (0, 0) at first.

    Returns:
        (num_bytes,) uint8, and the state behind them. Nodes beyond the last edge are left for `encode_halo_end`.
    """
    flags = form.rows, form.places
    size, *_ = _encode(*flags, nodes, held.words, *cross, *state, np.empty(0, np.uint8))
    out = np.empty(size, np.uint8)
    _, *after = _encode(*flags, nodes, held.words, *cross, *state, out)
    return out, (int(after[0]), int(after[1]))


def encode_halo_end(form: HaloForm, num_halo: int, state: tuple[int, int]) -> np.ndarray:
    """Encode the empty rows behind the last edge; see `encode_halo`."""
    return np.zeros(num_halo - state[0] if form.rows else 0, np.uint8)


def decode_lengths(form: HaloForm, code: np.ndarray, indptr: np.ndarray) -> bool:
    """Decode how long the rows are.

    Args:
        form: What is stored; rows are.
        code: (num_bytes,) uint8, the whole halo of a part.
        indptr: (num_halo + 1,) int64, filled in place from its first value on.

    Returns:
        Whether the code is whole.
    """
    return bool(_decode_lengths(form.places, code, indptr))


def decode_halo(form: HaloForm, code: np.ndarray, csc: CSC, num_core: int, num_edges: int, places: np.ndarray) -> bool:
    """Decode sources and places into the halo rows of a part.

    Args:
        form: What is stored.
        code: (num_bytes,) uint8, the whole halo of a part.
        csc: The part in local ids; the indices of halo rows are filled in place where the form has rows.
        num_core, num_edges: Sources are below the one, places below the other.
        places: (part's edges,) int64, filled in place where the form has places.

    Returns:
        Whether the code is whole and every number in its range.
    """
    return bool(_decode(form.rows, form.places, code, csc.indptr[num_core:], num_core, num_edges, csc.indices, places))


def number_bytes(limit: int) -> int:
    """Return the most bytes that the code of a number below `limit` takes."""
    return -(-max(1, (limit - 1).bit_length()) // 7)


@kernel
def _add_sources(sources, begin, end, num_nodes, words):
    crossing, new, num = 0, 0, len(sources)
    for i in range(num):
        if i + AHEAD < num:
            prefetch(words, np.int64(sources[i + AHEAD]) >> 6)
        node = np.int64(sources[i])
        if begin <= node < end:
            continue
        if node < 0 or node >= num_nodes:
            return -1, new
        crossing += 1
        word, bit = words[node >> 6], np.uint64(1) << np.uint64(node & 63)
        if word & bit == np.uint64(0):
            new += 1
            words[node >> 6] = word | bit
    return crossing, new


@kernel
def _count_halos(nodes, count):
    for node in nodes:
        count[node] += count[node] < 255


@kernel
def _put(out, place, value):
    """Write a number unless the buffer is too short for it; return the place behind it."""
    while value >= 128:
        if place < len(out):
            out[place] = (value & 127) | 128
        value >>= 7
        place += 1
    if place < len(out):
        out[place] = value
    return place + 1


@kernel
def _take(code, at):
    """Return a number and the place behind it; -1 where the code ends early or the number is too large."""
    value, shift = np.int64(0), np.int64(0)
    while at < len(code) and shift < 63:
        byte = np.int64(code[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(-1), at


@kernel
def _skip(code, at, count):
    """Return the place behind some numbers."""
    while count > 0 and at < len(code):
        count -= code[at] < 128
        at += 1
    return at if count == 0 else np.int64(len(code) + 1)


@kernel
def _encode(rows, with_places, nodes, words, cross_node, cross_source, cross_place, pointer, behind, out):
    at, first = 0, 0
    while first < len(cross_node):
        node, last = np.int64(cross_node[first]), first
        while last < len(cross_node) and cross_node[last] == node:
            last += 1
        if (words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1):
            while nodes[pointer] != node:
                at = _put(out, at, 0) if rows else at
                pointer += 1
            pointer += 1
            if rows:
                at = _put(out, at, last - first)
            if with_places:
                at = _put(out, at, cross_place[first] - behind)
                behind = cross_place[last - 1] + 1
            if rows:
                before = np.int64(0)
                for i in range(first, last):
                    at = _put(out, at, cross_source[i] - before)
                    before = np.int64(cross_source[i])
        first = last
    return at, pointer, behind


@kernel
def _decode_lengths(with_places, code, indptr):
    at = np.int64(0)
    for row in range(len(indptr) - 1):
        count, at = _take(code, at)
        if count < 0 or count > len(code) - at:
            return False
        indptr[row + 1] = indptr[row] + count
        if count > 0:
            at = _skip(code, at, count + with_places)
    return at == len(code)


@kernel
def _decode(rows, with_places, code, indptr, num_core, num_edges, indices, places):
    at, behind = np.int64(0), np.int64(0)
    for row in range(len(indptr) - 1):
        first, last = indptr[row], indptr[row + 1]
        if rows:
            at = _skip(code, at, 1)
        if first == last:
            continue
        if with_places:
            gap, at = _take(code, at)
            if gap < 0 or gap > num_edges - behind - (last - first):
                return False
            behind += gap
            for i in range(first, last):
                places[i] = behind
                behind += 1
        if rows:
            source = np.int64(0)
            for i in range(first, last):
                step, at = _take(code, at)
                source += step
                if step < 0 or source >= num_core or source < 0:
                    return False
                indices[i] = source
    return at == len(code)


@kernel
def _count_core(indptr, sources, first_row, begin, parent, counts):
    """Count the edges inside and across, and join the ends of those inside; rows are local, sources are not."""
    length = len(parent)
    for i in range(len(indptr) - 1):
        row, before = first_row + i, np.int64(-1)
        for position in range(indptr[i] - indptr[0], indptr[i + 1] - indptr[0]):
            source = np.int64(sources[position])
            if source == before:
                continue
            before = source
            u = source - begin
            if not 0 <= u < length:
                counts[1] += 1
            elif u < row:  # each edge inside is in two rows
                counts[0] += 1
                v = np.int64(row)
                while parent[u] != u:
                    parent[u] = parent[parent[u]]
                    u = np.int64(parent[u])
                while parent[v] != v:
                    parent[v] = parent[parent[v]]
                    v = np.int64(parent[v])
                if u < v:
                    parent[v] = u
                else:
                    parent[u] = v


@kernel
def _count_roots(parent):
    roots = 0
    for v in range(len(parent)):
        roots += parent[v] == v
    return roots
