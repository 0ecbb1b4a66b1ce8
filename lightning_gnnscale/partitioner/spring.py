"""SPRING: clusters grown from one pass over the edges, merged towards their richest neighbours, packed into parts."""

import os
from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .checkpoint import Checkpoint
from .graph_access.layout import ScanState
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import SimpleGraph, graph_facts, open_simple_graph, reopen_simple_graph
from .registry import check_number, refuse_balance, register_partitioner
from .spring_merging import merge_and_assign

# Columns of SpringState.nodes.
CLUSTER, DEGREE, RICHEST, RICHEST_DEGREE = range(4)

_ROWS_AHEAD, _VOLUMES_AHEAD = 24, 12  # edges; a cluster's volume is asked for once its node's row has come


class SpringState(NamedTuple):
    """The clustering pass as a value: saved after any chunk and given back, the pass goes on from there.

    Attributes:
        nodes: (num_nodes, 4) `id_dtype(num_nodes)`: the cluster of a node, named by the node that founded it; its
            degree; its richest neighbour so far (-1: none) and that one's degree. One row is one cache access.
        volume: (num_nodes,) int32 or int64, sum of degrees by cluster name.
        seen: (2,) uint64, edges read and their checksum.
        next_chunk: (1,) int64.
    """

    nodes: np.ndarray
    volume: np.ndarray
    seen: np.ndarray
    next_chunk: np.ndarray

    @classmethod
    def start(cls, degree: np.ndarray, max_volume: int) -> "SpringState":
        """Put every node into a cluster of its own; `degree` becomes the volumes where its dtype is wide enough."""
        nodes = np.empty((len(degree), 4), degree.dtype)
        # A move starts from two clusters within the bound, so no volume passes twice the bound or the top degree.
        wide = 2 * max_volume > np.iinfo(degree.dtype).max
        volume = degree.astype(np.int64) if wide else degree
        _found_clusters(degree, nodes)
        return cls(nodes, volume, np.zeros(2, np.uint64), np.zeros(1, np.int64))


@register_partitioner("spring", memory=lambda num_nodes, *_: 24 * num_nodes)
def spring(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    tau_vol: float | None = None,
    tau_factor: float = 0.1,
    beta: float = 1.05,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Partition by streaming clustering, merging and packing; deterministic, so `seed` has no effect.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed, masks: not used.
        balance: must be None: SPRING's only bound is `beta`.
        progress: called as progress(what, done, total) once a chunk.
        tau_vol: volume (sum of degrees) up to which a cluster takes part in moves, >= 0; tested before the move. None:
            tau_factor * 2 * num_edges / num_parts.
        tau_factor: dimensionless, >= 0.
        beta: a merged cluster has at most beta * num_nodes / num_parts nodes, >= 1.
        deduplicate, scratch: see `open_simple_graph`.
        checkpoint: file to save the state to; when it stands there already, the work goes on from it. It is removed
            at the end. None: nothing is saved.
        checkpoint_every: chunks between two saves, >= 1.

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the least filled parts.

    Raises:
        ValueError: an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.

    Cost: O(num_nodes log num_nodes + num_edges) time in two passes; 24 bytes a node (ids in int32).
    Source: Huang et al., SDT-GNN, Algorithm 1 (also CATGNN). Differs: ties are settled by the lowest id; a node that
        never meets an edge is placed as well.
    """
    refuse_balance("spring", balance)
    check_number("partitioner.tau_factor", tau_factor, at_least=0)
    check_number("partitioner.beta", beta, at_least=1)
    check_number("partitioner.checkpoint_every", checkpoint_every, at_least=1)
    if tau_vol is not None:
        check_number("partitioner.tau_vol", tau_vol, at_least=0)
    settings = {"tau_vol": tau_vol, "tau_factor": tau_factor, "num_parts": num_parts, "deduplicate": deduplicate}
    settings["scratch"] = scratch is not None  # without it repeated edges may stay
    saved = Checkpoint(checkpoint, stream, {"method": "spring", **settings}, checkpoint_every)
    graph, state = _after_degrees(stream, num_parts, settings, scratch, saved, progress)
    with phases.phase("clustering"):
        cluster_edges(graph, state, _max_volume(graph.num_edges, settings), progress, saved)
    nodes, volume = state.nodes, state.volume
    del state
    part_id = merge_and_assign(nodes, volume, num_parts, beta)
    saved.remove()
    return part_id


def cluster_edges(graph: SimpleGraph, state: SpringState, max_volume: int, progress=None, saved=None) -> None:
    """Run the clustering pass, from the state's chunk to the end; the state is changed in place.

    Args:
        graph: the undirected simple graph behind a stream.
        state: where the pass stands.
        max_volume: volume up to which a cluster takes part in moves.
        progress: called as progress("clustering", edges done, edges in all) once a chunk.
        saved: a Checkpoint that may save the state after a chunk; None saves nothing.

    Raises:
        EdgeStreamError: the edges are not those of the first pass.
    """
    for chunk in graph.stream.chunks(int(state.next_chunk[0])):
        for src, dst in graph.blocks(chunk, state.seen):
            _cluster_block(src, dst, state.nodes, state.volume, max_volume)
        state.next_chunk[0] += 1
        if saved is not None:
            saved.after_chunk("clustering", {**state._asdict(), **graph_facts(graph)})
        if progress is not None:
            progress("clustering", int(state.seen[0]), graph.report.num_listed)
    graph.check(state.seen)


def _after_degrees(stream, num_parts, settings, scratch, saved, progress) -> tuple[SimpleGraph, SpringState]:
    """Return the graph and the clustering state at its start, or where a checkpoint left it."""
    phase, arrays = saved.load() or ("", {})
    if phase == "clustering":
        with phases.phase("degrees"):
            graph = reopen_simple_graph(stream, arrays, scratch, progress)
        return graph, SpringState(*(arrays[name] for name in SpringState._fields))
    scan_state = ScanState(*(arrays[name] for name in ScanState._fields)) if phase == "degrees" else None
    with phases.phase("degrees"):
        graph, degree = open_simple_graph(
            stream,
            scan_state,
            settings["deduplicate"],
            scratch,
            progress,
            after_chunk=lambda state: saved.after_chunk("degrees", state._asdict()),
        )
        return graph, SpringState.start(degree, _max_volume(graph.num_edges, settings))


def _max_volume(num_edges: int, settings: dict) -> int:
    """Return tau_vol as a whole number: volumes are whole, and none passes the sum of all degrees."""
    tau_vol = settings["tau_vol"]
    if tau_vol is None:
        tau_vol = settings["tau_factor"] * 2 * num_edges / settings["num_parts"]
    return int(min(tau_vol, 2 * num_edges))


@kernel
def _found_clusters(degree, nodes):
    for v in range(len(degree)):
        nodes[v, CLUSTER], nodes[v, DEGREE] = v, degree[v]
        nodes[v, RICHEST], nodes[v, RICHEST_DEGREE] = -1, 0


@kernel
def _cluster_block(src, dst, nodes, volume, max_volume):
    """Let the ends of each edge move together, and remember each end's richest neighbour."""
    length, rows = len(src), nodes.reshape(-1)
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(rows, 4 * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(rows, 4 * np.int64(dst[i + _ROWS_AHEAD]))
            prefetch(volume, nodes[src[i + _VOLUMES_AHEAD], CLUSTER])
            prefetch(volume, nodes[dst[i + _VOLUMES_AHEAD], CLUSTER])
        u, v = src[i], dst[i]
        cluster_u, cluster_v = nodes[u, CLUSTER], nodes[v, CLUSTER]
        degree_u, degree_v = nodes[u, DEGREE], nodes[v, DEGREE]
        if cluster_u != cluster_v:
            volume_u, volume_v = volume[cluster_u], volume[cluster_v]
            if volume_u <= max_volume and volume_v <= max_volume:
                if volume_u <= volume_v:
                    volume[cluster_u], volume[cluster_v] = volume_u - degree_u, volume_v + degree_u
                    nodes[u, CLUSTER] = cluster_v
                else:
                    volume[cluster_u], volume[cluster_v] = volume_u + degree_v, volume_v - degree_v
                    nodes[v, CLUSTER] = cluster_u
        if degree_v > nodes[u, RICHEST_DEGREE]:
            nodes[u, RICHEST], nodes[u, RICHEST_DEGREE] = v, degree_v
        if degree_u > nodes[v, RICHEST_DEGREE]:
            nodes[v, RICHEST], nodes[v, RICHEST_DEGREE] = u, degree_u
