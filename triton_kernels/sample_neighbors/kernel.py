"""Neighbour sampling in Triton: one program samples one row, the neighbours that the CPU form samples, in its order.

Launch with `enable_fp_fusion=False`: a fused multiplication and addition would change probabilities and weights.
"""

import triton
import triton.language as tl

from ..random_bits import GOLDEN, mix64, sample_below

_ALL = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_TO_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def emit(edges, row_start, places, chosen, indices_ptr, position_ptr, neighbor_ptr, edge_ptr, WITH_EDGE: tl.constexpr,
         WITH_POSITION: tl.constexpr):  # fmt: skip
    """Read the neighbours at positions `edges` of the CSC into `places` of the outputs, where `chosen`."""
    neighbor = tl.load(indices_ptr + edges, mask=chosen, other=0)
    tl.store(neighbor_ptr + places, neighbor.to(tl.int64), mask=chosen)
    if WITH_EDGE:
        if WITH_POSITION:
            edges = row_start + tl.load(position_ptr + edges, mask=chosen, other=0).to(tl.int64)
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
               WITH_EDGE: tl.constexpr, WITH_POSITION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sample `take` of positions start .. start + degree - 1 into the outputs from `out` on; `_pick_group` of cpu.py.

    BLOCK is at least `take` where not all are taken.
    """
    if take == degree:
        for begin in range(0, take, BLOCK):
            offset = begin + tl.arange(0, BLOCK)
            emit(start + offset, row_start, out + offset, offset < take, indices_ptr, position_ptr, neighbor_ptr,
                 edge_ptr, WITH_EDGE, WITH_POSITION)  # fmt: skip
    elif degree <= 64:
        bits = tl.arange(0, 64)
        chosen = ((sample_in_register(key, degree, take) >> bits.to(tl.uint64)) & 1).to(tl.int32)
        emit(start + bits, row_start, out + tl.cumsum(chosen, 0) - chosen, chosen == 1, indices_ptr, position_ptr,
             neighbor_ptr, edge_ptr, WITH_EDGE, WITH_POSITION)  # fmt: skip
    else:
        lanes = tl.arange(0, BLOCK)
        emit(start + sample_by_search(key, degree, take, BLOCK), row_start, out + lanes, lanes < take, indices_ptr,
             position_ptr, neighbor_ptr, edge_ptr, WITH_EDGE, WITH_POSITION)  # fmt: skip


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


@triton.jit(do_not_specialize=["hop_key", "scale_bits"])
def sample_rows_kernel(
    indptr_ptr, indices_ptr, inside_ptr, position_ptr, node_ptr, offset_ptr, neighbor_ptr, edge_ptr, weight_ptr,
    hop_key, scale_bits,
    SPLIT: tl.constexpr, WITH_EDGE: tl.constexpr, WITH_POSITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample offset[i + 1] - offset[i] neighbours of node[i] into the outputs from offset[i] on, for program i.

    Args:
        hop_key: Bits of a uint64.
        scale_bits: Bits of a float64, read if SPLIT.
        inside_ptr, position_ptr: Counts and positions of split rows, read if SPLIT and if WITH_POSITION, respectively.
        edge_ptr: Filled if WITH_EDGE.
        BLOCK: A power of two, at least the fan-out if there is one.
    """
    row = tl.program_id(0).to(tl.int64)
    node = tl.load(node_ptr + row).to(tl.int64)
    start = tl.load(indptr_ptr + node)
    degree = tl.load(indptr_ptr + node + 1) - start
    out = tl.load(offset_ptr + row)
    take = tl.load(offset_ptr + row + 1) - out
    row_key = mix64(hop_key.to(tl.uint64) + node.to(tl.uint64) * GOLDEN)
    if SPLIT:
        first = 1.0 / tl.maximum(degree, 1).to(tl.float64)
        other, count, inside = first, take, degree
        other_key = mix64(row_key)
        if take < degree:
            inside = tl.load(inside_ptr + node).to(tl.int64)
            scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)
            count, first, other = share_samples(scale, take, degree, inside, other_key)
        pick_group(row_key, start, start, inside, count, out, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
                   WITH_EDGE, WITH_POSITION, BLOCK)  # fmt: skip
        pick_group(other_key, start, start + inside, degree - inside, take - count, out + count, indices_ptr,
                   position_ptr, neighbor_ptr, edge_ptr, WITH_EDGE, WITH_POSITION, BLOCK)  # fmt: skip
        for begin in range(0, take, BLOCK):
            lanes = begin + tl.arange(0, BLOCK)
            weight = tl.where(lanes < count, first, other).to(tl.float32)
            tl.store(weight_ptr + out + lanes, weight, mask=lanes < take)
    else:
        pick_group(row_key, start, start, degree, take, out, indices_ptr, position_ptr, neighbor_ptr, edge_ptr,
                   WITH_EDGE, WITH_POSITION, BLOCK)  # fmt: skip
