"""Neighbour sampling in Triton: one program samples one row, the neighbours that the CPU form samples, in its order.

What is not asked for is left out when a kernel is compiled. Launch with `enable_fp_fusion=False`: a fused
multiplication and addition would change probabilities, clocks and weights.
"""

import triton
import triton.language as tl

from ..random_bits import GOLDEN, mix64, sample_below
from .choice import LN2_HIGH, LN2_LOW, LOG_TERMS, ROOT_HALF_BITS

_ALL = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_TO_UNIT = tl.constexpr(2.0**-53)
_LARGEST = tl.constexpr(1.7976931348623157e308)
_ROOT_HALF_BITS = tl.constexpr(ROOT_HALF_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
_L1, _L2, _L3, _L4, _L5, _L6, _L7 = (tl.constexpr(term) for term in LOG_TERMS)

# Positions of edges that are wanted: none, those in the row before it was split, what the edge type calls them.
NO_POSITION, IN_ROW, NAMED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def look_up_kernel(
    indptr_ptr, node_ptr, num_ptr, owner_ptr, limit_ptr, time_ptr, indices_ptr, positive_ptr, start_ptr, degree_ptr,
    take_ptr, num_rows, fanout, steps,
    TIMED: tl.constexpr, BY_EDGE: tl.constexpr, STRICT: tl.constexpr, WEIGHTED: tl.constexpr, REPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Look up rows, and how many samples each gives; rows from num[0] on give none.

    Args:
        start_ptr, degree_ptr, take_ptr: (num_rows,) int64, filled.
        limit_ptr: (num_seeds,) int64 times of seeds, by owner; read if TIMED.
        positive_ptr: (num_edges + 1,) int64 edges of a weight above 0 before each; read if WEIGHTED.
        steps: Halvings that find an edge in the longest row.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < tl.load(num_ptr)
    node = tl.load(node_ptr + row, mask=there, other=0)
    start = tl.load(indptr_ptr + node, mask=there, other=0)
    degree = tl.load(indptr_ptr + node + 1, mask=there, other=0) - start
    if TIMED:
        limit = tl.load(limit_ptr + tl.load(owner_ptr + row, mask=there, other=0), mask=there, other=0)
        low, high = start, start + degree
        for _ in range(steps):
            is_open = low < high
            middle = (low + high) >> 1
            if BY_EDGE:
                when = tl.load(time_ptr + middle, mask=is_open, other=0)
            else:
                source = tl.load(indices_ptr + middle, mask=is_open, other=0).to(tl.int64)
                when = tl.load(time_ptr + source, mask=is_open, other=0)
            early = (when < limit) | ((when == limit) & (STRICT == 0))
            low = tl.where(is_open & early, middle + 1, low)
            high = tl.where(is_open & (early == 0), middle, high)
        degree = low - start
    take = degree
    if WEIGHTED:
        before = tl.load(positive_ptr + start, mask=there, other=0)
        take = tl.load(positive_ptr + start + degree, mask=there, other=0) - before
    if REPLACE:
        take = tl.where(take > 0, fanout, 0)
    elif fanout >= 0:
        take = tl.minimum(take, fanout)
    tl.store(start_ptr + row, start, mask=row < num_rows)
    tl.store(degree_ptr + row, degree, mask=row < num_rows)
    tl.store(take_ptr + row, take.to(tl.int64), mask=row < num_rows)


@triton.jit
def emit(edges, row_start, places, chosen, indices_ptr, position_ptr, neighbor_ptr, edge_ptr, POSITION: tl.constexpr):
    """Read the neighbours at positions `edges` of the CSC into `places` of the outputs, where `chosen`."""
    neighbor = tl.load(indices_ptr + edges, mask=chosen, other=0)
    tl.store(neighbor_ptr + places, neighbor.to(tl.int64), mask=chosen)
    if edge_ptr is not None:
        if POSITION == IN_ROW:
            edges = row_start + tl.load(position_ptr + edges, mask=chosen, other=0).to(tl.int64)
        elif POSITION == NAMED:
            edges = tl.load(position_ptr + edges, mask=chosen, other=0).to(tl.int64)
        tl.store(edge_ptr + places, edges, mask=chosen)


@triton.jit
def sample_in_register(key, degree, take):
    """Return a uint64 with `take` of its lowest `degree` bits set; 0 <= take < degree <= 64.

    Floyd's method on the smaller of the set and its complement.
    """
    few = tl.minimum(take, degree - take)
    one = tl.full((), 1, tl.uint64)
    sampled = tl.full((), 0, tl.uint64)
    for sample in range(few):
        last = degree - few + sample
        bit = one << sample_below(key, sample, last + 1)
        sampled |= tl.where((sampled & bit) != 0, one << last.to(tl.uint64), bit)
    everyone = tl.full((), _ALL, tl.uint64) >> (64 - degree).to(tl.uint64)
    return tl.where(few == take, sampled, sampled ^ everyone)


@triton.jit
def sample_by_search(key, degree, take, BLOCK: tl.constexpr):
    """Return (BLOCK,) int32, the first `take` of them distinct and below `degree`: Floyd's method, in its order."""
    lanes = tl.arange(0, BLOCK)
    sampled = tl.full((BLOCK,), -1, tl.int32)
    for sample in range(take):
        last = degree - take + sample
        position = sample_below(key, sample, last + 1).to(tl.int32)
        seen = tl.max((sampled == position).to(tl.int32), 0)
        position = tl.where(seen == 1, last.to(tl.int32), position)
        sampled = tl.where(lanes == sample, position, sampled)
    return sampled


@triton.jit
def pick_group(key, row_start, start, degree, take, out, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
               POSITION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sample `take` of positions start .. start + degree - 1 into the outputs from `out` on; `_pick_group` of cpu.py.

    BLOCK is at least `take` where not all are taken.
    """
    if take == degree:
        for begin in range(0, take, BLOCK):
            offset = begin + tl.arange(0, BLOCK)
            emit(start + offset, row_start, out + offset, offset < take, indices_ptr, position_ptr, neighbor_ptr,
                 edge_ptr, POSITION)  # fmt: skip
    elif degree <= 64:
        bits = tl.arange(0, 64)
        chosen = ((sample_in_register(key, degree, take) >> bits.to(tl.uint64)) & 1).to(tl.int32)
        emit(start + bits, row_start, out + tl.cumsum(chosen, 0) - chosen, chosen == 1, indices_ptr, position_ptr,
             neighbor_ptr, edge_ptr, POSITION)  # fmt: skip
    else:
        lanes = tl.arange(0, BLOCK)
        emit(start + sample_by_search(key, degree, take, BLOCK), row_start, out + lanes, lanes < take, indices_ptr,
             position_ptr, neighbor_ptr, edge_ptr, POSITION)  # fmt: skip


@triton.jit
def unit(word):
    """Map uint64 to float64 in [0, 1): `rng.unit`."""
    return (word >> 11).to(tl.int64).to(tl.float64) * _TO_UNIT


@triton.jit
def minus_log(x):
    """Return -log(x) of float64 in (0, 1]: `choice.minus_log`, operation by operation."""
    bits = x.to(tl.int64, bitcast=True)
    power = (bits - _ROOT_HALF_BITS) >> 52
    f = (bits - (power << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_L2 + w * (_L4 + w * _L6))
    odd = z * (_L1 + w * (_L3 + w * (_L5 + w * _L7)))
    half = 0.5 * f * f
    k = power.to(tl.float64)
    return ((half - (s * (half + (odd + even)) + k * _LN2_LOW)) - f) - k * _LN2_HIGH


@triton.jit
def pick_with_replacement(key, start, degree, take, out, running_ptr, steps, indices_ptr, position_ptr, neighbor_ptr,
                          edge_ptr, WEIGHTED: tl.constexpr, POSITION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sample with replacement, by the running sums of a row's weights if WEIGHTED."""
    for begin in range(0, take, BLOCK):
        sample = begin + tl.arange(0, BLOCK)
        chosen = sample < take
        if WEIGHTED:
            aim = unit(mix64(key + (sample + 1).to(tl.uint64) * GOLDEN)) * tl.load(running_ptr + start + degree - 1)
            low = tl.zeros((BLOCK,), tl.int64)
            high = low + degree - 1
            for _ in range(steps):
                is_open = low < high
                middle = (low + high) >> 1
                above = tl.load(running_ptr + start + middle, mask=is_open, other=0.0) > aim
                high = tl.where(is_open & above, middle, high)
                low = tl.where(is_open & (above == 0), middle + 1, low)
        else:
            low = sample_below(key, sample, degree).to(tl.int64)
        emit(start + low, start, out + sample, chosen, indices_ptr, position_ptr, neighbor_ptr, edge_ptr, POSITION)


@triton.jit
def pick_positive(start, degree, skip, out, weight_ptr, positive_ptr, indices_ptr, position_ptr, neighbor_ptr,
                  edge_ptr, POSITION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take the edges of a row that have a weight above 0, but for the first `skip` of them."""
    before = tl.load(positive_ptr + start) + skip
    for begin in range(0, degree, BLOCK):
        edge = start + begin + tl.arange(0, BLOCK)
        within = edge < start + degree
        place = tl.load(positive_ptr + edge, mask=within, other=0) - before
        chosen = within & (tl.load(weight_ptr + edge, mask=within, other=0) > 0) & (place >= 0)
        emit(edge, start, out + place, chosen, indices_ptr, position_ptr, neighbor_ptr, edge_ptr, POSITION)


@triton.jit
def pick_by_clocks(key, start, degree, take, out, weight_ptr, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
                   POSITION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take the `take` smallest exponential clocks of a row, in its order. BLOCK is at least `take`."""
    lanes = tl.arange(0, BLOCK)
    best = tl.where(lanes < take, float("inf"), -float("inf")).to(tl.float64)
    position = tl.full((BLOCK,), 0, tl.int64)
    worst = tl.max(best, 0)
    for begin in range(0, degree, BLOCK):
        j = (begin + lanes).to(tl.int64)
        weight = tl.load(weight_ptr + start + j, mask=j < degree, other=0).to(tl.float64)
        there = weight > 0
        share = 1.0 - unit(mix64(key + (j + 1).to(tl.uint64) * GOLDEN))
        clock = tl.minimum(minus_log(share) / tl.where(there, weight, 1.0), _LARGEST)
        clock = tl.where(there, clock, float("inf"))
        least = tl.min(clock, 0)
        while least < worst:
            found = tl.argmin(clock, 0)
            into = lanes == tl.argmax(best, 0)
            best = tl.where(into, least, best)
            position = tl.where(into, begin + found, position)
            clock = tl.where(lanes == found, float("inf"), clock)
            worst, least = tl.max(best, 0), tl.min(clock, 0)
    rank = tl.zeros((BLOCK,), tl.int32)
    for number in range(take):
        rank += (position > tl.sum(tl.where(lanes == number, position, 0), 0)).to(tl.int32)
    emit(start + position, start, out + rank, lanes < take, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
         POSITION)  # fmt: skip


@triton.jit
def share_samples(scale, fanout, degree, inside, word):
    """Divide the samples of one row between its two groups: `_share_samples` of cpu.py, operation by operation."""
    preferred, others = inside.to(tl.float64), (degree - inside).to(tl.float64)
    samples, length = fanout.to(tl.float64), degree.to(tl.float64)
    total = scale * preferred + others
    capped = scale * samples > total
    mean = scale * preferred * samples / total
    count = mean.to(tl.int64)
    count += ((word >> 11).to(tl.int64).to(tl.float64) * _TO_UNIT < mean - count.to(tl.float64)).to(tl.int64)
    count = tl.maximum(tl.minimum(tl.minimum(count, inside), fanout), fanout - (degree - inside))
    weight = total / (samples * length)
    beyond = tl.maximum(samples - preferred, 1.0)  # at least 1 wherever it counts
    first = tl.where(capped, 1.0 / length, weight * (1.0 / scale))
    return tl.where(capped, inside, count), first, tl.where(capped, others / (beyond * length), weight)


@triton.jit(do_not_specialize=["hop_key", "scale_bits", "fanout", "steps"])
def sample_rows_kernel(
    start_ptr, degree_ptr, offset_ptr, node_ptr, owner_ptr, indices_ptr, inside_ptr, position_ptr, weight_ptr,
    running_ptr, positive_ptr, neighbor_ptr, edge_ptr, split_weight_ptr,
    hop_key, scale_bits, num_nodes, fanout, steps,
    SPLIT: tl.constexpr, REPLACE: tl.constexpr, WEIGHTED: tl.constexpr, LATEST: tl.constexpr, TREES: tl.constexpr,
    POSITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample offset[i + 1] - offset[i] neighbours of node[i] into the outputs from offset[i] on, for program i.

    Args:
        start_ptr, degree_ptr: Rows that `look_up_kernel` found.
        owner_ptr: Seeds of the nodes, read if TREES.
        inside_ptr: Counts of split rows, read if SPLIT.
        position_ptr: What POSITION says.
        weight_ptr, running_ptr, positive_ptr: Weights, their running sums in each row, and counts of those above 0
            before each; read if WEIGHTED.
        edge_ptr: Filled with positions; None: not wanted.
        split_weight_ptr: Filled if SPLIT.
        hop_key: Bits of a uint64.
        scale_bits: Bits of a float64, read if SPLIT.
        BLOCK: A power of two, at least the fan-out if there is one.
    """
    row = tl.program_id(0).to(tl.int64)
    out = tl.load(offset_ptr + row)
    take = tl.load(offset_ptr + row + 1) - out
    if take > 0:
        node = tl.load(node_ptr + row)
        start = tl.load(start_ptr + row)
        degree = tl.load(degree_ptr + row)
        name = node
        if TREES:
            name += tl.load(owner_ptr + row) * num_nodes
        row_key = mix64(hop_key.to(tl.uint64) + name.to(tl.uint64) * GOLDEN)
        if SPLIT:
            first = 1.0 / tl.maximum(degree, 1).to(tl.float64)
            other, count, inside = first, take, degree
            other_key = mix64(row_key)
            if take < degree:
                inside = tl.load(inside_ptr + node).to(tl.int64)
                scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)
                count, first, other = share_samples(scale, take, degree, inside, other_key)
            pick_group(row_key, start, start, inside, count, out, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
                       POSITION, BLOCK)  # fmt: skip
            pick_group(other_key, start, start + inside, degree - inside, take - count, out + count, indices_ptr,
                       position_ptr, neighbor_ptr, edge_ptr, POSITION, BLOCK)  # fmt: skip
            for begin in range(0, take, BLOCK):
                lanes = begin + tl.arange(0, BLOCK)
                weight = tl.where(lanes < count, first, other).to(tl.float32)
                tl.store(split_weight_ptr + out + lanes, weight, mask=lanes < take)
        elif LATEST and WEIGHTED:
            skip = tl.load(positive_ptr + start + degree) - tl.load(positive_ptr + start) - take
            pick_positive(start, degree, skip, out, weight_ptr, positive_ptr, indices_ptr, position_ptr, neighbor_ptr,
                          edge_ptr, POSITION, BLOCK)  # fmt: skip
        elif LATEST:
            pick_group(row_key, start, start + degree - take, take, take, out, indices_ptr, position_ptr,
                       neighbor_ptr, edge_ptr, POSITION, BLOCK)  # fmt: skip
        elif REPLACE:
            pick_with_replacement(row_key, start, degree, take, out, running_ptr, steps, indices_ptr, position_ptr,
                                  neighbor_ptr, edge_ptr, WEIGHTED, POSITION, BLOCK)  # fmt: skip
        elif WEIGHTED:
            if degree <= fanout:
                pick_positive(start, degree, 0, out, weight_ptr, positive_ptr, indices_ptr, position_ptr,
                              neighbor_ptr, edge_ptr, POSITION, BLOCK)  # fmt: skip
            else:
                pick_by_clocks(row_key, start, degree, take, out, weight_ptr, indices_ptr, position_ptr, neighbor_ptr,
                               edge_ptr, POSITION, BLOCK)  # fmt: skip
        else:
            pick_group(row_key, start, start, degree, take, out, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
                       POSITION, BLOCK)  # fmt: skip


@triton.jit
def read_kernel(values_ptr, index_ptr, out_ptr, num, BLOCK: tl.constexpr):
    """Read values[index[i]] into out[i]; the values may be in pinned host memory."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i, mask=i < num, other=0)
    tl.store(out_ptr + i, tl.load(values_ptr + index, mask=i < num, other=0), mask=i < num)
