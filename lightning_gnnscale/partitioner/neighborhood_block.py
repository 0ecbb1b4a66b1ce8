"""ByteGNN's partitioner: the neighbourhoods of labelled nodes are grown into blocks, and blocks fill the parts."""

from collections.abc import Mapping

import numpy as np

from ..graph import MASK_NAMES, id_dtype
from ..jit import kernel
from . import phases
from .block_merging import BlockForest, assign_blocks, link_rows, merge_blocks
from .graph_access.simple_graph import BLOCK_EDGES
from .graph_input import GraphInput, graph_partitioner
from .grem import part_cap
from .multilevel.pair_table import PairTable, edge_pairs, rows_of_pairs
from .registry import check_number

MAX_ROUNDS = 32  # passes' worth of nodes that follow their neighbours, one hop a round
# Neighbours by part are counted for so many nodes at a time that their counters stay below the larger of these two.
MIN_COUNTERS, COUNTERS_A_NODE = 1 << 20, 4

_BLOCKS, _QUOTIENT, _LEFTOVERS = "blocks", "quotient", "leftovers"


@graph_partitioner("neighborhood_block")
def neighborhood_block(
    graph: GraphInput,
    num_parts: int,
    *,
    num_hops: int = 2,
    train_weight: float | None = None,
    val_weight: float | None = None,
    test_weight: float | None = None,
    epsilon: float = 0.03,
) -> np.ndarray:
    """Partition by blocks around the training, validation and test nodes; deterministic, so the seed has no effect.

    Breadth-first search runs from all of them at once, whole hops at a time; a node keeps the first block that reaches
    it, the lowest of several. Blocks merge with the neighbour that they share most edges with while they hold at most
    1 / (8 num_parts) of the labelled nodes. Those with the most nodes of one mask come first, each to the part with the
    largest (cross edges / size of the part + 1 / num_nodes) * max(room, 0), where
    room = 1 - a train / mean train - b val / mean val - c test / mean test.

    Args:
        graph: the graph, without `balance`: the masks are balanced by their weights.
        graph.masks: {"train": (num_nodes,) bool, "val": ..., "test": ...}, at least one of them, with nodes in it.
        num_parts: in [1, num_nodes].
        num_hops: hops that a block reaches from its centre, >= 1.
        train_weight, val_weight, test_weight: a, b and c above, dimensionless, >= 0. None: one over the number of
            masks that have nodes, so that a part at the mean of all of them has no room left.
        epsilon: nodes that no block reaches go to parts of at most (1 + epsilon) * ceil(num_nodes / num_parts) nodes,
            >= 0; blocks may pass that.

    Returns:
        (num_nodes,) int32 part ids. Nodes that no block reaches follow most of their neighbours, hop after hop; nodes
        without a path to a block go to the least filled parts.

    Raises:
        ValueError: no masks, an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.

    Cost: num_hops + 2 passes, and one for each hop that is left (at most 32); 12 bytes a node, at most 16 more while
        leftovers are placed, and the quotient graph of the blocks, 27 to 54 bytes a pair of neighbouring blocks (noted
        as `quotient_bytes`; with a label on every node it is the graph itself), twice that while it turns into rows.
    Source: Zheng et al., ByteGNN, VLDB 2022, graph partitioning. Differs: as printed every block holds one labelled
        node and scores divide by empty parts; merging, 1 / num_nodes and max(room, 0) are ours, ties go to the
        smallest part, then to the lowest.
    """
    graph.refuse_balance()
    check_number("partitioner.num_hops", num_hops, at_least=1)
    if num_hops != int(num_hops):
        raise ValueError(f"partitioner.num_hops must be a whole number, got {num_hops!r}")
    check_number("partitioner.epsilon", epsilon, at_least=0)
    labels = _label_masks(graph.masks, graph.num_nodes)
    weights = _mask_weights(labels, {"train": train_weight, "val": val_weight, "test": test_weight})
    graph.open_simple()
    parted = None
    if graph.phase != _LEFTOVERS:
        block = None if graph.phase == _QUOTIENT else _grow_blocks(graph, labels, int(num_hops))
        parted = _part_blocks(graph, block, labels, num_parts, weights)
        del block
    return _place_leftovers(graph, parted, part_cap(graph.num_nodes, num_parts, epsilon))


def _label_masks(masks: Mapping | None, num_nodes: int) -> dict[str, np.ndarray]:
    """Return the masks that have nodes, in the order train, val, test."""
    labels = {}
    for name in MASK_NAMES:
        if masks and masks.get(name) is not None:
            mask = np.ascontiguousarray(masks[name])
            if mask.shape != (num_nodes,) or mask.dtype != bool:
                raise ValueError(f"masks[{name!r}] must be ({num_nodes},) bool, got {mask.shape} {mask.dtype}")
            if mask.any():
                labels[name] = mask
    if not labels:
        raise ValueError(
            "partitioner 'neighborhood_block' grows its blocks from labelled nodes: give masks={'train': "
            f"({num_nodes},) bool, ...}} ('train', 'val' or 'test') with at least one node, got "
            f"{sorted(masks) if masks else masks}"
        )
    return labels


def _any_label(labels: dict[str, np.ndarray]) -> np.ndarray:
    """Return (num_nodes,) bool: the nodes with any label."""
    return np.logical_or.reduce(list(labels.values()))


def _mask_weights(labels: dict[str, np.ndarray], given: dict[str, float | None]) -> np.ndarray:
    for name, value in given.items():
        if value is not None:
            check_number(f"partitioner.{name}_weight", value, at_least=0)
    return np.array([1 / len(labels) if given[name] is None else float(given[name]) for name in labels])


def _grow_blocks(graph: GraphInput, labels: dict[str, np.ndarray], num_hops: int) -> np.ndarray:
    """Return the block of every node: the rank of its centre among the labelled nodes, -1 where none reaches."""
    num_nodes, left = graph.num_nodes, graph.left_in(_BLOCKS)
    if left:
        block, arriving = left["block"], left["arriving"]
    else:
        centres = np.flatnonzero(_any_label(labels))
        block, arriving = np.full(num_nodes, -1, id_dtype(num_nodes)), np.full(num_nodes, -1, id_dtype(num_nodes))
        block[centres] = np.arange(len(centres))
    with phases.phase(_BLOCKS):
        for hop in range(int(left.get("hop", 1)), num_hops + 1):
            state = {"block": block, "arriving": arriving, "hop": np.int64(hop)}
            graph.run_pass(
                _BLOCKS,
                lambda src, dst: _reach_neighbors(src, dst, block, arriving),
                lambda state=state: state,
                f"blocks, hop {hop}",
            )
            if not _arrive(block, arriving):
                break
    return block


def _part_blocks(graph: GraphInput, block, labels, num_parts: int, weights) -> tuple[np.ndarray, np.ndarray]:
    """Merge and assign the blocks; return the (num_nodes,) parts, -1 where no block reaches, and nodes by part."""
    left = graph.left_in(_QUOTIENT)
    block = left.get("block", block)
    num_blocks = int(np.count_nonzero(_any_label(labels)))
    table, keys = PairTable(num_blocks.bit_length(), slots=left.get("pairs")), np.empty(BLOCK_EDGES, np.int64)
    del left

    def add_pairs(src: np.ndarray, dst: np.ndarray) -> None:
        table.add(keys, [(0, edge_pairs(src, dst, block, table.shift, keys))])

    with phases.phase(_QUOTIENT):
        graph.run_pass(_QUOTIENT, add_pairs, lambda: {"block": block, "pairs": np.stack((table.keys, table.weights))})
    with phases.phase("assignment"):
        blocks = _single_blocks(block, labels)
        phases.note(blocks=num_blocks, quotient_pairs=table.size, quotient_bytes=2 * table.keys.nbytes)
        tables, table = [table], None
        edges = link_rows(*rows_of_pairs(tables, num_blocks, np.int64, ascending=False))
        merge_blocks(blocks, edges, num_parts)
        sizes = np.zeros(num_parts, np.int64)
        part_of_block = assign_blocks(blocks, edges, num_parts, len(block), weights, sizes)
        phases.note(merged_blocks=int((blocks.parent == np.arange(num_blocks)).sum()))
        return np.where(block >= 0, part_of_block[block], -1).astype(np.int32), sizes


def _single_blocks(block: np.ndarray, labels: dict[str, np.ndarray]) -> BlockForest:
    centres = np.flatnonzero(_any_label(labels))
    by_mask = np.stack([mask[centres] for mask in labels.values()], axis=1).astype(np.int64)
    nodes = np.bincount(block[block >= 0], minlength=len(centres))
    return BlockForest(np.arange(len(centres)), np.ones(len(centres), np.int64), by_mask, nodes)


def _place_leftovers(graph: GraphInput, parted: tuple[np.ndarray, np.ndarray] | None, cap: int) -> np.ndarray:
    """Let nodes without a part follow most of their neighbours, those at one hop in each round; return all parts."""
    left = graph.left_in(_LEFTOVERS)
    part, sizes = parted or (left["part"], left["sizes"])
    num_nodes, num_parts = len(part), len(sizes)
    max_rows = max(1, max(MIN_COUNTERS, COUNTERS_A_NODE * num_nodes) // num_parts)
    row = np.empty(num_nodes, id_dtype(num_nodes))
    leftovers, first_round = left.get("leftovers", np.count_nonzero(part < 0)), int(left.get("round", 1))
    first_node, placed = int(left.get("first_node", 0)), int(left.get("placed", 0))
    phases.note(leftovers=int(leftovers))
    with phases.phase(_LEFTOVERS):
        for round_number in range(first_round, MAX_ROUNDS + 1):
            while True:
                num_rows, next_node = _number_unplaced(part, first_node, max_rows, row)
                if not num_rows:
                    break
                counts = left.get("counts", np.zeros((num_rows, num_parts), np.int32))
                state = {"part": part, "sizes": sizes, "counts": counts, "leftovers": np.int64(leftovers)}
                state |= {"round": np.int64(round_number), "first_node": np.int64(first_node)}
                state |= {"placed": np.int64(placed)}
                left = {}
                graph.run_pass(
                    _LEFTOVERS,
                    lambda src, dst, counts=counts: _count_placed_neighbors(src, dst, part, row, counts),
                    lambda state=state: state,
                    f"leftovers, round {round_number}",
                )
                placed += _follow_neighbors(row, counts, cap, part, sizes)
                first_node = next_node
            _settle(part)
            if not placed:
                break
            first_node = placed = 0
        _place_least_filled(part, cap, sizes)
    return part


@kernel
def _reach_neighbors(src, dst, block, arriving):
    """Note for every unreached node (block -1) the lowest block that one edge leads from."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        a, b = block[u], block[v]
        if a >= 0 and b < 0:
            if arriving[v] < 0 or a < arriving[v]:
                arriving[v] = a
        elif b >= 0 and a < 0 and (arriving[u] < 0 or b < arriving[u]):
            arriving[u] = b


@kernel
def _arrive(block, arriving):
    """Let the nodes that were reached join their blocks; return how many there are."""
    count = 0
    for v in range(len(block)):
        if block[v] < 0 and arriving[v] >= 0:
            block[v] = arriving[v]
            count += 1
    return count


@kernel
def _number_unplaced(part, first_node, max_rows, row):
    """Number the nodes from `first_node` on that have no part (-1), at most `max_rows` of them.

    Args:
        part: (num_nodes,) int32; below -1: placed in this round.
        row: (num_nodes,) becomes the number of a node, -1 for all others.

    Returns:
        How many were numbered, and the node after the last one that was looked at.
    """
    count = 0
    row[:] = -1
    for v in range(first_node, len(part)):
        if part[v] == -1:
            if count == max_rows:
                return count, v
            row[v] = count
            count += 1
    return count, len(part)


@kernel
def _count_placed_neighbors(src, dst, part, row, counts):
    """Add to counts[row[v], q] for every edge from a numbered node v to a node that part q had before this round."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        p, q = part[u], part[v]
        if p >= 0 and row[v] >= 0:
            counts[row[v], p] += 1
        elif q >= 0 and row[u] >= 0:
            counts[row[u], q] += 1


@kernel
def _follow_neighbors(row, counts, cap, part, sizes):
    """Place the numbered nodes that have placed neighbours, by ascending id, as -2 - part; return how many."""
    placed = 0
    for v in range(len(part)):
        if row[v] < 0:
            continue
        best, met = -1, False
        for q in range(len(sizes)):
            count = counts[row[v], q]
            met = met or count > 0
            if sizes[q] >= cap:
                continue
            if best >= 0:
                most = counts[row[v], best]
                if count < most or (count == most and sizes[q] >= sizes[best]):
                    continue
            best = q
        if met:
            part[v] = -2 - best
            sizes[best] += 1
            placed += 1
    return placed


@kernel
def _settle(part):
    """End a round: what was placed in it counts as placed."""
    for v in range(len(part)):
        if part[v] < -1:
            part[v] = -2 - part[v]


@kernel
def _place_least_filled(part, cap, sizes):
    """Give the nodes that are left to the least filled part."""
    for v in range(len(part)):
        if part[v] < 0:
            best = -1
            for q in range(len(sizes)):
                if sizes[q] < cap and (best < 0 or sizes[q] < sizes[best]):
                    best = q
            part[v] = best
            sizes[best] += 1
