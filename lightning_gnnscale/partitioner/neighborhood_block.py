"""ByteGNN's partitioner: the neighbourhoods of labelled nodes are grown into blocks, and blocks fill the parts."""

from collections.abc import Mapping

import numpy as np

from ..errors import check_number
from ..graph import MASK_NAMES, id_dtype
from ..jit import kernel
from ..rng import fold
from . import phases
from .constraints import judge, node_weights, resolve_constraints
from .graph_input import GraphInput, graph_partitioner
from .multilevel import Effort
from .multilevel.clustering import cluster_limit
from .multilevel.quotient import build_quotient, number_clusters, quotient_bytes
from .multilevel.weighted_graph import MAX_PARTS, EdgeGraph, RowThreads, WeightedGraph, part_loads
from .streaming_multilevel import MIN_QUOTIENT_EDGES, StreamedParts

MAX_HOPS = 32  # nodes further away make blocks by their ids
BLOCKS_A_PART = 100.0  # full blocks that a part is made of at least
SLACK = 1.05
_QUOTIENT_EDGES_A_NODE, _BYTES_AN_EDGE = 2, 60  # of the graph of blocks

_BLOCKS = "blocks"
_SALT = 0x4E424C4B  # separates this use of the seed from all others


def _memory(num_nodes: int, num_edges: int, *_) -> float:
    edges = min(max(MIN_QUOTIENT_EDGES, _QUOTIENT_EDGES_A_NODE * num_nodes), num_edges)
    return max(75 * num_nodes, 36 * num_nodes + max(quotient_bytes(edges), _BYTES_AN_EDGE * edges))


@graph_partitioner("neighborhood_block", memory=_memory)
def neighborhood_block(graph: GraphInput, num_parts: int, *, refinement_rounds: int = 4) -> np.ndarray:
    """Partition by blocks around the training, validation and test nodes.

    Breadth-first search runs from all of them at once, whole hops at a time; a node keeps the first block that reaches
    it, the lowest of several. A full block is continued by another one. The graph of blocks is partitioned in
    memory: blocks merge by the edges between them, and nodes and each mask are capped. Its parts are refined on the
    stream.

    Args:
        graph: the graph. Its seed decides the parts of blocks; where there is a checkpoint, every hop, the parts of
            blocks and every round of refinement are saved.
        graph.masks: {"train": (num_nodes,) bool, "val": ..., "test": ...}, at least one of them, with nodes in it.
        graph.balance: {"nodes": 1.05, "train": 1.05}, any of nodes and masks: the largest part over the mean. None:
            nodes and each mask that has nodes at 1.05. What cannot be kept is reported with its size.
        refinement_rounds: rounds of Jet refinement over the stream, >= 0.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        ValueError: no masks, an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.

    Cost: a pass for each hop (at most 32), one for the graph of blocks, and two or three for a round of refinement and
        of rebalancing; 63 bytes a node and 4 more a mask, or 36 a node and 60 an edge of the graph of blocks (at most
        two a node), whichever are more.
    Source: Zheng et al., ByteGNN, VLDB 2022, graph partitioning. Differs: the paper fills parts with blocks greedily,
        by edges over the size of the part and space for labelled nodes; there nothing caps nodes or a mask, and a
        quarter of nell's sampled rows is in other parts where METIS leaves 3%.
    """
    if num_parts > MAX_PARTS:
        raise ValueError(f"partitioner.num_parts of 'neighborhood_block' must be in [1, {MAX_PARTS}], got {num_parts}")
    check_number("partitioner.refinement_rounds", refinement_rounds, at_least=0)
    labels = _label_masks(graph.masks, graph.num_nodes)
    graph.open_simple()
    no_degree = np.zeros(graph.num_nodes, np.int32)
    balance = graph.balance or dict.fromkeys(("nodes", *labels), SLACK)
    if "volume" in balance:
        raise ValueError("partitioner.balance of 'neighborhood_block' takes nodes and masks, got volume")
    constraints = resolve_constraints(balance, graph.masks, no_degree, num_parts)
    edges = EdgeGraph(graph.simple, node_weights(constraints, no_degree, np.int32), graph.progress)
    threads, cap = RowThreads(None), np.repeat(constraints.cap[None], num_parts, axis=0)
    try:
        parts = StreamedParts(graph, edges, cap, Effort(), threads)
        part = parts.refined(lambda: _blocks(graph, edges, labels, num_parts, threads), int(refinement_rounds))
        judge(constraints, part_loads(edges.node_weight, part, num_parts))
    finally:
        threads.close()
    return part.astype(np.int32)


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


def _blocks(
    graph: GraphInput, edges: EdgeGraph, labels: dict, num_parts: int, threads: RowThreads
) -> tuple[WeightedGraph, np.ndarray]:
    """Return the graph of blocks, and (num_nodes,) int32, the block of every node."""
    most = max(2, int(graph.num_nodes / (BLOCKS_A_PART * num_parts)))
    with phases.phase(_BLOCKS):
        block = _grow_blocks(graph, np.logical_or.reduce(list(labels.values())), most)
        coarse_of, num_blocks = number_clusters(block)
    with phases.phase("quotient"):
        max_edges = max(MIN_QUOTIENT_EDGES, _QUOTIENT_EDGES_A_NODE * graph.num_nodes)
        largest, key = cluster_limit(edges, num_parts, 1.0), fold(graph.seed, _SALT)
        quotient = build_quotient(edges, coarse_of, num_blocks, max_edges, largest, key, threads)
    phases.note(blocks=num_blocks)
    return quotient, coarse_of


def _grow_blocks(graph: GraphInput, labelled: np.ndarray, most: int) -> np.ndarray:
    """Return the block of every node, of at most `most` >= 2 nodes, grown from the labelled ones."""
    num_nodes, left = graph.num_nodes, graph.left_in(_BLOCKS)
    if left:
        block, arriving, size, goes_on = (left[name] for name in ("block", "arriving", "size", "goes_on"))
    else:
        centres = np.flatnonzero(labelled)
        block, arriving, goes_on = np.full((3, num_nodes), -1, id_dtype(num_nodes))
        size = np.zeros(num_nodes, id_dtype(num_nodes))
        block[centres] = np.arange(len(centres))
        size[: len(centres)] = 1
    num_blocks = np.array([left.get("num_blocks", np.count_nonzero(labelled))])
    for hop in range(int(left.get("hop", 1)), MAX_HOPS + 1):
        state = {"block": block, "arriving": arriving, "size": size, "goes_on": goes_on}
        state |= {"hop": np.int64(hop), "num_blocks": num_blocks[0]}
        graph.run_pass(
            _BLOCKS,
            lambda src, dst: _reach_neighbors(src, dst, block, arriving),
            lambda state=state: state,
            f"blocks, hop {hop}",
        )
        if not _arrive(block, arriving, size, goes_on, num_blocks, most):
            break
    apart = np.flatnonzero(block < 0)  # nodes that no centre has a path to
    block[apart] = num_blocks[0] + np.arange(len(apart)) // most
    return block


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
def _arrive(block, arriving, size, goes_on, num_blocks, most):
    """Let the nodes that were reached join their blocks, or what continues a full one; return how many there are."""
    count = 0
    for v in range(len(block)):
        if block[v] >= 0 or arriving[v] < 0:
            continue
        b = arriving[v]
        if size[b] >= most:
            if goes_on[b] < 0 or size[goes_on[b]] >= most:
                goes_on[b] = num_blocks[0]
                num_blocks[0] += 1
            b = goes_on[b]
        block[v] = b
        size[b] += 1
        count += 1
    return count
