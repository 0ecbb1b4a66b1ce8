"""How a source lists an undirected graph: once, both ways or as directed edges; found in one pass and O(1) memory.

Two sums of a 64-bit hash, of (u, v) and of (v, u), are equal exactly (but for collisions) when every edge is listed
with its reverse. Which of the other sources list a pair more than once is estimated from a sample: the pairs whose
hash lies below a threshold that falls as the sample fills, so that a pair is sampled with all its copies or not at all.
"""

from typing import NamedTuple

import numpy as np

from ...edge_stream.options import LAYOUTS
from ...errors import EdgeStreamError, short
from ...graph import id_dtype
from ...jit import kernel
from ...rng import mix64

SAMPLE_COPIES = 1 << 13  # copies of pairs that the sample holds at most
MAX_SCANNERS = 4  # threads that count degrees
MIN_REPEATED_SHARE = 0.01  # from here on a source counts as having repeats

# Positions in ScanState.counts.
_LISTED, _SELF_LOOPS, _FORWARD, _BACKWARD, _THRESHOLD, _SAMPLED, NEXT_CHUNK = range(7)
_SRC_FACTOR, _DST_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_ONE = np.uint64(1)
_MAX_COPIES = 3  # of one pair in the sample: more than the two that `both_ways` allows is all that matters
_BLOCK = 32  # edges
_DIGIT_BITS = 11  # of a hash, when it is sorted
_DIGITS, _DIGIT = 1 << _DIGIT_BITS, np.uint64((1 << _DIGIT_BITS) - 1)


class ScanState(NamedTuple):
    """The first pass as a value: saved after any chunk and given back, the pass goes on from there.

    Attributes:
        degree: (num_nodes,) `id_dtype(num_nodes)`, listed edges that end in a node, self-loops left out.
        counts: (7,) uint64: edges listed, self-loops, the two hash sums, the sample's threshold and size, next chunk.
        sample: (SAMPLE_COPIES,) uint64, hashes of listed pairs below the threshold; the lowest bit is the direction.
    """

    degree: np.ndarray
    counts: np.ndarray
    sample: np.ndarray

    @classmethod
    def empty(cls, num_nodes: int) -> "ScanState":
        counts = np.zeros(7, np.uint64)
        counts[_THRESHOLD] = np.iinfo(np.uint64).max
        return cls(np.zeros(num_nodes, id_dtype(num_nodes)), counts, np.zeros(SAMPLE_COPIES, np.uint64))


class LayoutReport(NamedTuple):
    """What the first pass found.

    Attributes:
        layout: "once", "both_ways" or "directed".
        detected: False where the stream's own setting was taken.
        num_listed, num_self_loops: edges of the source, and those among them that are self-loops.
        repeated_share: share of the pairs listed more often than the layout says, in [0, 1]; an estimate from at
            least SAMPLE_COPIES / 6 pairs, exact where the source has no more.
        checksum: uint64 sum of the edges' hashes, compared in every later pass.
    """

    layout: str
    detected: bool
    num_listed: int
    num_self_loops: int
    repeated_share: float
    checksum: int

    @property
    def has_repeats(self) -> bool:
        return self.repeated_share >= MIN_REPEATED_SHARE

    @property
    def asks_for_deduplication(self) -> bool:
        """Whether repeated edges are dropped where the user does not say."""
        return self.layout == "directed" or (self.detected and self.has_repeats)


def scan(
    stream, state: ScanState | None = None, progress=None, after_chunk=None, threads=None
) -> tuple[LayoutReport, np.ndarray]:
    """Read the stream once: degrees, layout, counts and checksum.

    Args:
        stream: an EdgeStream whose num_nodes is known.
        state: where an earlier pass stopped; None starts one. Changed in place.
        progress: called as progress("degrees", edges done, edges in all or None) once a chunk.
        after_chunk: called with the state once a chunk, so that it can be saved.
        threads: `RowThreads`, of which up to MAX_SCANNERS count degrees, each in an array of its own, unless there is
            an `after_chunk`. They do not change the result.

    Returns:
        The report, and (num_nodes,) degrees as listed: a source that lists both ways counts every edge twice.

    Raises:
        ValueError: the stream's layout is contradicted by its edges.
    """
    state = ScanState.empty(stream.num_nodes) if state is None else state
    counts, share = state.counts, _one_by_one if threads is None else threads.map
    scanners = 1 if threads is None or after_chunk is not None else min(MAX_SCANNERS, threads.num_threads)
    degrees = [state.degree, *(np.zeros_like(state.degree) for _ in range(1, scanners))]
    for chunk in stream.chunks(int(counts[NEXT_CHUNK])):
        done = 0
        while done < len(chunk.src):
            # As many edges again as have been seen: of more, too many would lie below a threshold that is still high.
            step = max(SAMPLE_COPIES, int(counts[_LISTED]))
            _scan_some(chunk.src[done : done + step], chunk.dst[done : done + step], degrees, state, share)
            done += step
        counts[NEXT_CHUNK] += _ONE
        if after_chunk is not None:
            after_chunk(state)
        if progress is not None:
            progress("degrees", int(counts[_LISTED]), stream.num_edges)
    for degree in degrees[1:]:
        np.add(state.degree, degree, out=state.degree)
    if len(state.degree) and state.degree.min() < 0:
        raise EdgeStreamError(f"{stream.name}: a node is listed in more than {np.iinfo(state.degree.dtype).max} edges")
    return _report(state, stream.layout), state.degree


def _scan_some(src, dst, degrees: list[np.ndarray], state: ScanState, share) -> None:
    """Count edges, a range for each array of degrees, then sample their pairs, in order."""
    counts, num_blocks = state.counts, -(-len(src) // _BLOCK)
    is_sampled = np.empty(num_blocks, np.bool_)
    bounds = [num_blocks * i // len(degrees) for i in range(len(degrees) + 1)]

    def scan_range(i: int) -> tuple:
        return _scan_edges(bounds[i], bounds[i + 1], src, dst, degrees[i], counts[_THRESHOLD], is_sampled)

    for forward, backward, self_loops in share(scan_range, range(len(degrees))):
        counts[_SELF_LOOPS:_THRESHOLD] += np.array([self_loops, forward, backward], np.uint64)
    counts[_LISTED] += np.uint64(len(src))
    _sample_pairs(src, dst, is_sampled, counts, state.sample)


def _one_by_one(function, items) -> list:
    return [function(item) for item in items]


def lists_both_ways(stream) -> bool:
    """Return whether a stream lists every edge in both directions, as `scan` decides it for layout "auto"; one pass."""
    sums = np.zeros(2, np.uint64)
    self_loops = sum(int(_add_hashes(chunk.src, chunk.dst, sums)) for chunk in stream.chunks())
    return bool(sums[0] == sums[1]) and stream.num_edges > self_loops


def _report(state: ScanState, given: str) -> LayoutReport:
    if given not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {short(given)}")
    listed, self_loops = int(state.counts[_LISTED]), int(state.counts[_SELF_LOOPS])
    symmetric = state.counts[_FORWARD] == state.counts[_BACKWARD] and listed > self_loops
    repeated, reversed_too = _sampled_shares(state, 2 if symmetric else 1)
    if given == "once" and symmetric:
        raise ValueError("layout is 'once', but every edge is listed in both directions: give 'both_ways' or 'auto'")
    if given == "both_ways" and not symmetric and listed > self_loops:
        raise ValueError("layout is 'both_ways', but some edges have no reverse: give 'once', 'directed' or 'auto'")
    layout = given
    if given == "auto":
        layout = "both_ways" if symmetric else "directed" if reversed_too >= MIN_REPEATED_SHARE else "once"
    return LayoutReport(layout, given == "auto", listed, self_loops, repeated, int(state.counts[_FORWARD]))


def _sampled_shares(state: ScanState, copies: int) -> tuple[float, float]:
    """Return the shares of sampled pairs with more copies than `copies`, and of those listed in both directions."""
    directed, direction_copies = np.unique(state.sample[: int(state.counts[_SAMPLED])], return_counts=True)
    pairs, first = np.unique(directed >> _ONE, return_index=True)
    if not len(pairs):
        return 0.0, 0.0
    pair_copies = np.add.reduceat(direction_copies, first)
    directions = np.diff(np.append(first, len(directed)))
    return float((pair_copies > copies).mean()), float((directions > 1).mean())


@kernel
def edge_hash(u, v):
    """Return a hash of an edge in this direction."""
    return mix64(np.uint64(u) * _SRC_FACTOR + np.uint64(v) * _DST_FACTOR)


@kernel
def _add_hashes(src, dst, sums):
    """Add a chunk's hashes, (u, v) and (v, u), to sums (2,), and return its self-loops."""
    forward, backward, self_loops = sums[0], sums[1], 0
    for i in range(len(src)):
        forward += edge_hash(src[i], dst[i])
        backward += edge_hash(dst[i], src[i])
        self_loops += src[i] == dst[i]
    sums[0], sums[1] = forward, backward
    return self_loops


@kernel
def _scan_edges(start, stop, src, dst, degree, threshold, is_sampled):
    """Count the edges of the blocks [start, stop), and mark blocks with a pair that may be sampled.

    Returns:
        The two hash sums, and the number of self-loops.
    """
    forward = backward = np.uint64(0)
    self_loops = 0
    for block in range(start, stop):
        # Slices and loops from zero: the compiler then knows that no index is negative, and makes vector code.
        first = block * _BLOCK
        block_src, block_dst = src[first : first + _BLOCK], dst[first : first + _BLOCK]
        sampled = 0
        for i in range(len(block_src)):
            there, back = edge_hash(block_src[i], block_dst[i]), edge_hash(block_dst[i], block_src[i])
            forward += there
            backward += back
            sampled += (there ^ back) <= threshold
        is_sampled[block] = sampled > 0
        for i in range(len(block_src)):
            u, v = block_src[i], block_dst[i]
            if u == v:
                self_loops += 1
            else:
                degree[u] += 1
                degree[v] += 1
    return forward, backward, self_loops


@kernel
def _sample_pairs(src, dst, is_sampled, counts, sample):
    """Sample the pairs of the blocks that are marked."""
    for block in range(len(is_sampled)):
        if not is_sampled[block]:
            continue
        for i in range(block * _BLOCK, min(len(src), (block + 1) * _BLOCK)):
            u, v = src[i], dst[i]
            if u == v:
                continue
            # The lowest bit gives way to the direction: two pairs become one only if 63 bits agree.
            pair = (edge_hash(u, v) ^ edge_hash(v, u)) & ~_ONE
            if pair < counts[_THRESHOLD]:
                if counts[_SAMPLED] == np.uint64(len(sample)):
                    _shrink_sample(counts, sample)
                    if pair >= counts[_THRESHOLD]:
                        continue
                sample[counts[_SAMPLED]] = pair | np.uint64(u < v)
                counts[_SAMPLED] += _ONE


@kernel
def _shrink_sample(counts, sample):
    """Make space: at most _MAX_COPIES copies of one pair and direction, then halve the threshold until half is free."""
    _sort_hashes(sample)
    kept = 0
    for i in range(len(sample)):
        if kept < _MAX_COPIES or sample[kept - _MAX_COPIES] != sample[i]:
            sample[kept] = sample[i]
            kept += 1
    while kept > len(sample) // 2:
        counts[_THRESHOLD] = counts[_THRESHOLD] >> _ONE
        while kept > 0 and (sample[kept - 1] & ~_ONE) >= counts[_THRESHOLD]:
            kept -= 1
    counts[_SAMPLED] = np.uint64(kept)


@kernel(inline="always")
def _sort_hashes(hashes):
    """Sort by six digits, the last first. Numba's own sort takes a second to compile."""
    other, places = np.empty_like(hashes), np.empty(_DIGITS + 1, np.int64)
    for digit in range(6):
        shift = np.uint64(_DIGIT_BITS * digit)
        places[:] = 0
        for one in hashes:
            places[((one >> shift) & _DIGIT) + _ONE] += 1
        for i in range(_DIGITS):
            places[i + 1] += places[i]
        for one in hashes:
            place = places[(one >> shift) & _DIGIT]
            other[place] = one
            places[(one >> shift) & _DIGIT] += 1
        hashes, other = other, hashes
