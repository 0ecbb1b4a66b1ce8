"""LDG, linear deterministic greedy: each node to the part with most of its neighbours, weighted by the room left."""

import os

import numpy as np

from .graph_access.external_csc import BLOCK_EDGES, ExternalCSC
from .graph_access.scratch import AUTO
from .node_stream import LINEAR, NodeStreamOptions, SizeRule, stream_nodes
from .registry import register_partitioner

DEFAULT_SLACK = 1.0


@register_partitioner("ldg", memory=lambda num_nodes, *_: 6 * num_nodes)
def ldg(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    passes: int = 1,
    order: str = "given",
    block_edges: int = BLOCK_EDGES,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Partition by linear deterministic greedy over a stream of nodes with their neighbours.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: decides the order "random", nothing else.
        masks: not used.
        balance: {"nodes": slack}: a part holds at most slack * num_nodes / num_parts nodes, >= 1. None: 1.0, the
            paper's. No other constraint is taken.
        progress: called as progress(what, done, total) once a chunk, later once a block.
        passes: times that all nodes are assigned, >= 1; from the second on a neighbour that has not come yet counts
            where the last pass put it, and parts start empty again.
        order: "given": ascending ids. "random": inside each block, by a hash of (seed, pass, node); the blocks stay
            in ascending order, because that is how they lie on disk.
        block_edges: entries of a block at most, >= 1; it has an effect on the result only with order "random".
        deduplicate, scratch: see `open_external_csc`; scratch disk is needed.
        checkpoint: file to save the state to; when it stands there already, the work goes on from it, and the rows
            are sorted again. It is removed at the end. None: nothing is saved.
        checkpoint_every: chunks or blocks between two saves, >= 1.

    Returns:
        (num_nodes,) int32 part ids. A node without neighbours in a part with room goes to the least filled part.

    Raises:
        ValueError: an option outside its range, another constraint, or a layout that the edges contradict.
        GNNScaleError: not enough scratch disk.
        EdgeStreamError: the edges changed between the passes.

    Cost: O(num_nodes + num_edges) time in two passes over the stream and `passes` over its rows on scratch disk; 5
        bytes a node (6 from 129 parts on) and two blocks of memory; see `open_external_csc` for the disk.
    Source: Stanton and Kliot, KDD 2012, "linear deterministic greedy"; restreamed: Nishimura and Ugander, KDD 2013.
        Differs: ties go to the least filled part, then to the lowest index.
    """
    options = NodeStreamOptions(passes, order, block_edges, deduplicate, scratch, checkpoint, checkpoint_every)
    return stream_nodes("ldg", stream, num_parts, _rule, {}, DEFAULT_SLACK, options, seed, balance, progress)


def _rule(csc: ExternalCSC, cap: int) -> SizeRule:
    return SizeRule(LINEAR, cap)
