"""METIS, in memory: the yardstick for cut and for memory. Needs the extra `[metis]`."""

import os

import numpy as np

from ..errors import GNNScaleError
from ..graph import CSC, build_csc
from . import phases
from .registry import check_number, register_partitioner
from .scratch import AUTO
from .simple_graph import SimpleGraph, open_simple_graph


@register_partitioner("metis")
def metis(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
) -> np.ndarray:
    """Partition with METIS' multilevel k-way method, the whole graph in memory.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: METIS' own seed, in [0, 2**31).
        masks: not used.
        balance: None (METIS' default, 1.03) or {"nodes": slack}, slack > 1: the largest part over the mean.
        progress: called as progress(what, done, total) once a chunk.
        deduplicate, scratch: see `open_simple_graph`.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        GNNScaleError: pymetis is not installed.
        ValueError: a constraint that this method does not have.

    Cost: about 240 bytes an edge of memory.
    Source: Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998, through pymetis.
    """
    pymetis = _import_pymetis()
    slack = _node_slack(balance)
    with phases.phase("degrees"):
        graph, _ = open_simple_graph(stream, None, deduplicate, scratch, progress)
    with phases.phase("adjacency"):
        adjacency = symmetric_csc(graph, progress)
    if num_parts == 1 or not graph.num_edges:
        return (np.arange(graph.num_nodes) % num_parts).astype(np.int32)
    with phases.phase("metis"):
        options = pymetis.Options(seed=int(seed), ufactor=max(1, round((slack - 1) * 1000)))
        if hasattr(pymetis, "CSRAdjacency"):
            lists = pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices)
            found = pymetis.part_graph(num_parts, lists, options=options)
        else:  # before 2025
            found = pymetis.part_graph(num_parts, xadj=adjacency.indptr, adjncy=adjacency.indices, options=options)
    return np.asarray(found[1], np.int32)


def symmetric_csc(graph: SimpleGraph, progress=None) -> CSC:
    """Return both directions of every edge of a simple graph as a CSC in memory.

    Cost: O(num_nodes + num_edges) time; about 40 bytes an edge while it runs.
    """
    num_edges = graph.num_edges
    src, dst = np.empty(2 * num_edges, np.int64), np.empty(2 * num_edges, np.int64)
    done = 0
    for block_src, block_dst in graph.one_pass("adjacency", progress):
        stop = done + len(block_src)
        src[done:stop], dst[done:stop] = block_src, block_dst
        src[num_edges + done : num_edges + stop], dst[num_edges + done : num_edges + stop] = block_dst, block_src
        done = stop
    return build_csc(src, dst, graph.num_nodes)


def _import_pymetis():
    try:
        import pymetis
    except ImportError as error:
        raise GNNScaleError(
            "partitioner 'metis' needs pymetis: install it with  pip install 'lightning-gnnscale[metis]'"
        ) from error
    return pymetis


def _node_slack(balance) -> float:
    if not balance:
        return 1.03
    if set(balance) != {"nodes"}:
        raise ValueError(f"partitioner 'metis' can bound the balance of 'nodes' alone, got {sorted(balance)}")
    check_number("partitioner.balance.nodes", balance["nodes"], at_least=1)
    return float(balance["nodes"])
