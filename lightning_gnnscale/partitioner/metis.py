"""METIS, in memory: the reference for cut and for memory. Needs the extra `[metis]`, or METIS' shared library."""

import numpy as np

from ..errors import GNNScaleError
from ..graph import CSC, id_dtype
from ..jit import kernel
from ..rng import combine, fold
from . import phases
from .constraints import judge, node_weights, part_loads, resolve_constraints
from .graph_access.simple_graph import symmetric_adjacency
from .graph_input import GraphInput, graph_partitioner
from .metis_library import call_metis, find_metis_library
from .registry import check_number

_SLACK = 1.03  # METIS' default
KEPT_EDGES = 16  # of a node, where `fast` looks at few


@graph_partitioner("metis", memory=lambda num_nodes, num_edges, *_: 240 * num_edges, resumable=False, slack=_SLACK)
def metis(graph: GraphInput, num_parts: int, *, fast: bool = False) -> np.ndarray:
    """Partition with METIS' multilevel method, the whole graph in memory.

    Args:
        graph: the graph. Its seed is METIS' own, in [0, 2**31); its masks are those that are balanced.
        graph.balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them: the largest part over the mean;
            None: nodes at METIS' default, 1.03. METIS may break a bound, with many parts above all: a warning says by
            how much.
        num_parts: in [1, num_nodes].
        fast: what DistDGL does for power-law graphs: of a node with many neighbours few edges are looked at, one
            initial partition is made where METIS allows it to be asked for, and refined once.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        GNNScaleError: METIS is not installed.
        ValueError: a constraint that cannot be met, or a value outside its range.

    Cost: about 240 bytes an edge of memory; with `fast` those of the edges that are looked at, at most KEPT_EDGES a
        node, and 8 bytes an edge.
    Source: Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998, bisected up to 8 parts and k-way beyond; with other
        balances than that of nodes Karypis and Kumar, Multilevel algorithms for multi-constraint graph partitioning,
        SC 1998, k-way. Fast, k-way: Zheng et al., DistDGL, section 5.2. Differs: edges are left out of the graph
        itself, by a hash, not of each coarser one.
    """
    balance, seed = graph.balance, graph.seed
    _check_seed(seed)
    several = bool(balance) and set(balance) != {"nodes"}
    slack = _node_slack(balance)
    library = _need_library()
    degree = graph.open_simple()
    constraints = resolve_constraints(balance, graph.masks, degree, num_parts) if several else None
    part_id = (np.arange(graph.num_nodes) % num_parts).astype(np.int32)
    if num_parts > 1 and graph.simple.num_edges:
        wide = library.id_dtype
        with phases.phase("adjacency"):
            adjacency = symmetric_adjacency(graph.simple, degree, max(wide, id_dtype(graph.num_nodes)), graph.progress)
        if fast:
            with phases.phase("edges"):
                adjacency = with_few_edges(adjacency, KEPT_EDGES, seed)
        with phases.phase("metis"):
            weight, slacks = None, np.array([slack])
            if constraints is not None:
                weight, slacks = node_weights(constraints, degree, wide), constraints.slack
            found = call_metis(library, *adjacency, weight, slacks, num_parts, int(seed), fast)
        part_id = np.asarray(found, np.int32)
    if constraints is not None:
        judge(constraints, part_loads(constraints, degree, part_id, num_parts))
    return part_id


def with_few_edges(adjacency: CSC, most: int, seed: int) -> CSC:
    """Return a symmetric adjacency without some edges between nodes that have many.

    An edge stays where it is among the `most` first of either end, in the order of a hash.

    Args:
        adjacency: symmetric, without repeats.
        most: >= 1.
        seed: that of the hash.
    """
    indptr, indices = adjacency.indptr, adjacency.indices
    last = _last_kept(indptr, indices, most, np.uint64(fold(seed)))
    kept = np.zeros(len(indices), bool)
    _keep(indptr, indices, last, np.uint64(fold(seed)), kept)
    passed = np.concatenate([[0], np.cumsum(kept)])
    return CSC(passed[indptr].astype(indptr.dtype), indices[kept])


@kernel
def _edge_hash(key, one, other):
    return combine(combine(key, min(one, other)), max(one, other))


@kernel
def _last_kept(indptr, indices, most, key):
    """Return (num_nodes,) uint64: the largest hash of a node's `most` first edges."""
    last = np.full(len(indptr) - 1, np.uint64(0xFFFFFFFFFFFFFFFF))
    for v in range(len(indptr) - 1):
        degree = indptr[v + 1] - indptr[v]
        if degree > most:
            hashes = np.empty(degree, np.uint64)
            for i in range(degree):
                hashes[i] = _edge_hash(key, np.int64(v), np.int64(indices[indptr[v] + i]))
            hashes.sort()
            last[v] = hashes[most - 1]
    return last


@kernel
def _keep(indptr, indices, last, key, kept):
    for v in range(len(indptr) - 1):
        for e in range(indptr[v], indptr[v + 1]):
            found = _edge_hash(key, np.int64(v), np.int64(indices[e]))
            kept[e] = found <= last[v] or found <= last[indices[e]]


def metis_is_installed() -> bool:
    """Whether METIS can be called at all."""
    return find_metis_library() is not None


def _need_library():
    library = find_metis_library()
    if library is None:
        raise GNNScaleError(
            "partitioner 'metis' needs METIS: install it with  pip install 'lightning-gnnscale[metis]'  or from your "
            "system (Debian: apt-get install libmetis5, macOS: brew install metis)"
        )
    return library


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise ValueError(f"partitioner 'metis' takes a seed in [0, {2**31}), got {seed}")


def _node_slack(balance) -> float:
    if not balance or "nodes" not in balance:
        return _SLACK
    check_number("partitioner.balance.nodes", balance["nodes"], at_least=1)
    return float(balance["nodes"])
