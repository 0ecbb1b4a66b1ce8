"""ByteGNN's partitioner: the neighbourhoods of labelled nodes are grown into blocks, and blocks fill the parts."""

import hashlib
import os
from collections.abc import Mapping

import numpy as np

from ..graph import MASK_NAMES, id_dtype
from . import phases
from .block_growing import (
    arrive,
    count_placed_neighbors,
    follow_neighbors,
    number_unplaced,
    place_least_filled,
    reach_neighbors,
    settle,
)
from .block_merging import BlockForest, assign_blocks, link_rows, merge_blocks
from .block_quotient import QuotientTable, add_edges, quotient_rows
from .checkpoint import Checkpoint
from .graph_access.resumed_graph import open_or_reopen
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import SimpleGraph, graph_facts
from .grem import part_cap
from .registry import check_number, refuse_balance, register_partitioner

MAX_ROUNDS = 32  # passes' worth of nodes that follow their neighbours, one hop a round
# Neighbours by part are counted for so many nodes at a time that their counters stay below the larger of these two.
MIN_COUNTERS, COUNTERS_A_NODE = 1 << 20, 4

_BLOCKS, _QUOTIENT, _LEFTOVERS = "blocks", "quotient", "leftovers"


@register_partitioner("neighborhood_block")
def neighborhood_block(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    num_hops: int = 2,
    train_weight: float | None = None,
    val_weight: float | None = None,
    test_weight: float | None = None,
    epsilon: float = 0.03,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Partition by blocks around the training, validation and test nodes; deterministic, so `seed` has no effect.

    Breadth-first search runs from all of them at once, whole hops at a time; a node keeps the first block that reaches
    it, the lowest of several. Blocks merge with the neighbour that they share most edges with while they hold at most
    1 / (8 num_parts) of the labelled nodes. Those with the most nodes of one mask come first, each to the part with the
    largest (cross edges / size of the part + 1 / num_nodes) * max(room, 0), where
    room = 1 - a train / mean train - b val / mean val - c test / mean test.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: not used.
        masks: {"train": (num_nodes,) bool, "val": ..., "test": ...}, at least one of them, with nodes in it.
        balance: must be None: the masks are balanced by their weights.
        progress: called as progress(what, done, total) once a chunk.
        num_hops: hops that a block reaches from its centre, >= 1.
        train_weight, val_weight, test_weight: a, b and c above, dimensionless, >= 0. None: one over the number of
            masks that have nodes, so that a part at the mean of all of them has no room left.
        epsilon: nodes that no block reaches go to parts of at most (1 + epsilon) * ceil(num_nodes / num_parts) nodes,
            >= 0; blocks may pass that.
        deduplicate, scratch: see `open_simple_graph`.
        checkpoint: file to save the state to; when it stands there already, the work goes on from it. It is removed
            at the end. None: nothing is saved.
        checkpoint_every: chunks between two saves, >= 1.

    Returns:
        (num_nodes,) int32 part ids. Nodes that no block reaches follow most of their neighbours, hop after hop; nodes
        without a path to a block go to the least filled parts.

    Raises:
        ValueError: no masks, an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.

    Cost: num_hops + 2 passes, and one for each hop that is left (at most 32); 12 bytes a node, at most 16 more while
        leftovers are placed, and the quotient graph of the blocks, 32 to 64 bytes a pair of neighbouring blocks (noted
        as `quotient_bytes`; with a label on every node it is the graph itself), twice that while it turns into rows.
    Source: Zheng et al., ByteGNN, VLDB 2022, graph partitioning. Differs: as printed every block holds one labelled
        node and scores divide by empty parts; merging, 1 / num_nodes and max(room, 0) are ours, ties go to the
        smallest part, then to the lowest.
    """
    refuse_balance("neighborhood_block", balance)
    check_number("partitioner.num_hops", num_hops, at_least=1)
    if num_hops != int(num_hops):
        raise ValueError(f"partitioner.num_hops must be a whole number, got {num_hops!r}")
    check_number("partitioner.epsilon", epsilon, at_least=0)
    check_number("partitioner.checkpoint_every", checkpoint_every, at_least=1)
    labels = _label_masks(masks, stream)
    weights = _mask_weights(labels, {"train": train_weight, "val": val_weight, "test": test_weight})
    settings = {"num_hops": num_hops, "weights": weights.tolist(), "epsilon": epsilon, "num_parts": num_parts}
    settings |= {"masks": {name: hashlib.sha256(mask).hexdigest() for name, mask in labels.items()}}
    settings |= {"method": "neighborhood_block", "deduplicate": deduplicate, "scratch": scratch is not None}
    saved = Checkpoint(checkpoint, stream, settings, checkpoint_every)
    graph, phase, arrays = open_or_reopen(stream, saved, deduplicate, scratch, progress)
    passes = _Passes(graph, saved, progress, phase, arrays)
    del arrays
    parted = None
    if phase != _LEFTOVERS:
        block = None if phase == _QUOTIENT else _grow_blocks(passes, labels, int(num_hops))
        parted = _part_blocks(passes, block, labels, num_parts, weights)
        del block
    part_id = _place_leftovers(passes, parted, part_cap(graph.num_nodes, num_parts, epsilon))
    saved.remove()
    return part_id


class _Passes:
    """Whole passes over the edges that can be taken up where an earlier process left them."""

    def __init__(self, graph: SimpleGraph, saved: Checkpoint, progress, phase: str, arrays: dict[str, np.ndarray]):
        self.graph = graph
        self._saved, self._progress, self._left = saved, progress, (phase, arrays)

    def left_in(self, phase: str) -> dict[str, np.ndarray]:
        """Return the arrays of the pass that was left if it belongs to the phase, else nothing."""
        left_phase, arrays = self._left
        self._left = ("", {})
        return arrays if phase == left_phase else {}

    def run(self, phase: str, what: str, left: dict, state, per_block) -> None:
        """Read the edges from where `left` says, else all.

        Args:
            phase, what: names for the checkpoint and for progress.
            left: what `left_in` returned.
            state: called without arguments once a chunk for the arrays that are to be saved.
            per_block: called with (src, dst) of each block.
        """
        seen, next_chunk = left.get("seen", np.zeros(2, np.uint64)), left.get("next_chunk", np.zeros(1, np.int64))
        for chunk in self.graph.stream.chunks(int(next_chunk[0])):
            for src, dst in self.graph.blocks(chunk, seen):
                per_block(src, dst)
            next_chunk[0] += 1
            facts = {"seen": seen, "next_chunk": next_chunk, **graph_facts(self.graph)}
            self._saved.after_chunk(phase, {**state(), **facts})
            if self._progress is not None:
                self._progress(what, int(seen[0]), self.graph.report.num_listed)
        self.graph.check(seen)


def _label_masks(masks: Mapping | None, stream) -> dict[str, np.ndarray]:
    """Return the masks that have nodes, in the order train, val, test."""
    if stream.num_nodes is None:
        stream.count()
    labels = {}
    for name in MASK_NAMES:
        if masks and masks.get(name) is not None:
            mask = np.ascontiguousarray(masks[name])
            if mask.shape != (stream.num_nodes,) or mask.dtype != bool:
                raise ValueError(f"masks[{name!r}] must be ({stream.num_nodes},) bool, got {mask.shape} {mask.dtype}")
            if mask.any():
                labels[name] = mask
    if not labels:
        raise ValueError(
            "partitioner 'neighborhood_block' grows its blocks from labelled nodes: give masks={'train': "
            f"({stream.num_nodes},) bool, ...}} ('train', 'val' or 'test') with at least one node, got "
            f"{sorted(masks) if masks else masks}"
        )
    return labels


def _mask_weights(labels: dict[str, np.ndarray], given: dict[str, float | None]) -> np.ndarray:
    for name, value in given.items():
        if value is not None:
            check_number(f"partitioner.{name}_weight", value, at_least=0)
    return np.array([1 / len(labels) if given[name] is None else float(given[name]) for name in labels])


def _grow_blocks(passes: _Passes, labels: dict[str, np.ndarray], num_hops: int) -> np.ndarray:
    """Return the block of every node: the rank of its centre among the labelled nodes, -1 where none reaches."""
    num_nodes = passes.graph.num_nodes
    left = passes.left_in(_BLOCKS)
    if left:
        block, arriving = left["block"], left["arriving"]
    else:
        centres = np.flatnonzero(np.logical_or.reduce(list(labels.values())))
        block, arriving = np.full(num_nodes, -1, id_dtype(num_nodes)), np.full(num_nodes, -1, id_dtype(num_nodes))
        block[centres] = np.arange(len(centres))
    with phases.phase(_BLOCKS):
        for hop in range(int(left.get("hop", 1)), num_hops + 1):
            state = {"block": block, "arriving": arriving, "hop": np.int64(hop)}
            passes.run(
                _BLOCKS,
                f"blocks, hop {hop}",
                left,
                lambda state=state: state,
                lambda src, dst: reach_neighbors(src, dst, block, arriving),
            )
            left = {}
            if not arrive(block, arriving):
                break
    return block


def _part_blocks(passes: _Passes, block, labels, num_parts: int, weights) -> tuple[np.ndarray, np.ndarray]:
    """Merge and assign the blocks; return the (num_nodes,) parts, -1 where no block reaches, and nodes by part."""
    left = passes.left_in(_QUOTIENT)
    block = left.get("block", block)
    table = QuotientTable(*(left[name] for name in QuotientTable._fields)) if left else QuotientTable.empty()

    def add_block(src: np.ndarray, dst: np.ndarray) -> None:
        nonlocal table
        table = add_edges(table, src, dst, block)

    with phases.phase(_QUOTIENT):
        passes.run(_QUOTIENT, _QUOTIENT, left, lambda: {"block": block, **table._asdict()}, add_block)
    with phases.phase("assignment"):
        blocks = _single_blocks(block, labels)
        num_blocks = len(blocks.parent)
        phases.note(blocks=num_blocks, quotient_pairs=int(table.num_pairs[0]), quotient_bytes=table.slots.nbytes)
        edges = link_rows(quotient_rows(table, num_blocks))
        table = None
        merge_blocks(blocks, edges, num_parts)
        sizes = np.zeros(num_parts, np.int64)
        part_of_block = assign_blocks(blocks, edges, num_parts, len(block), weights, sizes)
        phases.note(merged_blocks=int((blocks.parent == np.arange(num_blocks)).sum()))
        return np.where(block >= 0, part_of_block[block], -1).astype(np.int32), sizes


def _single_blocks(block: np.ndarray, labels: dict[str, np.ndarray]) -> BlockForest:
    centres = np.flatnonzero(np.logical_or.reduce(list(labels.values())))
    by_mask = np.stack([mask[centres] for mask in labels.values()], axis=1).astype(np.int64)
    nodes = np.bincount(block[block >= 0], minlength=len(centres))
    return BlockForest(np.arange(len(centres)), np.ones(len(centres), np.int64), by_mask, nodes)


def _place_leftovers(passes: _Passes, parted: tuple[np.ndarray, np.ndarray] | None, cap: int) -> np.ndarray:
    """Let nodes without a part follow most of their neighbours, those at one hop in each round; return all parts."""
    left = passes.left_in(_LEFTOVERS)
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
                num_rows, next_node = number_unplaced(part, first_node, max_rows, row)
                if not num_rows:
                    break
                counts = left.get("counts", np.zeros((num_rows, num_parts), np.int32))
                state = {"part": part, "sizes": sizes, "counts": counts, "leftovers": np.int64(leftovers)}
                state |= {"round": np.int64(round_number), "first_node": np.int64(first_node)}
                state |= {"placed": np.int64(placed)}
                passes.run(
                    _LEFTOVERS,
                    f"leftovers, round {round_number}",
                    left,
                    lambda state=state: state,
                    lambda src, dst, counts=counts: count_placed_neighbors(src, dst, part, row, counts),
                )
                left = {}
                placed += follow_neighbors(row, counts, cap, part, sizes)
                first_node = next_node
            settle(part)
            if not placed:
                break
            first_node = placed = 0
        place_least_filled(part, cap, sizes)
    return part
