"""METIS, in memory: the yardstick for cut and for memory. Needs the extra `[metis]`, or METIS' shared library."""

import os

import numpy as np

from ..errors import GNNScaleError
from ..graph import CSC, id_dtype
from . import phases
from .constraints import MASK, VOLUME, Constraints, judge, part_loads, resolve_constraints
from .graph_access.adjacency import symmetric_adjacency
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import open_simple_graph
from .metis_library import call_metis, find_metis_library
from .registry import check_number, register_partitioner

_SLACK = 1.03  # METIS' default


@register_partitioner("metis", memory=lambda num_nodes, num_edges, *_: 240 * num_edges)
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
    """Partition with METIS' multilevel method, the whole graph in memory.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: METIS' own seed, in [0, 2**31).
        masks: {"train": (num_nodes,) bool, ...}, those that are balanced.
        balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them: the largest part over the mean; None:
            nodes at METIS' default, 1.03. METIS may break a bound: a warning says by how much.
        progress: called as progress(what, done, total) once a chunk.
        deduplicate, scratch: see `open_simple_graph`.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        GNNScaleError: METIS is not installed, or not the form of it that is needed.
        ValueError: a constraint that cannot be met, or a value outside its range.

    Cost: about 240 bytes an edge of memory.
    Source: Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998, through pymetis, which bisects up to 8 parts and is
        k-way beyond; with other balances than that of nodes, or without pymetis, Karypis and Kumar, Multilevel
        algorithms for multi-constraint graph partitioning, SC 1998, k-way, through METIS' library.
    """
    _check_seed(seed)
    several = bool(balance) and set(balance) != {"nodes"}
    slack = _node_slack(balance)
    pymetis = None if several else _import_pymetis()
    library = _need_library(balance if several else None) if pymetis is None else None
    with phases.phase("degrees"):
        graph, degree = open_simple_graph(stream, None, deduplicate, scratch, progress)
    constraints = resolve_constraints(balance, masks, degree, num_parts) if several else None
    part_id = (np.arange(graph.num_nodes) % num_parts).astype(np.int32)
    if num_parts > 1 and graph.num_edges:
        wide = np.dtype(np.int64) if pymetis is not None else library.id_dtype
        with phases.phase("adjacency"):
            adjacency = symmetric_adjacency(graph, degree, max(wide, id_dtype(graph.num_nodes)), progress)
        with phases.phase("metis"):
            if pymetis is not None:
                found = _call_pymetis(pymetis, adjacency, slack, num_parts, seed)
            else:
                weight, slacks = _node_weight(constraints, degree, wide), np.array([slack])
                slacks = slacks if constraints is None else constraints.slack
                found = call_metis(library, *adjacency, weight, slacks, num_parts, int(seed))
        part_id = np.asarray(found, np.int32)
    if constraints is not None:
        judge(constraints, part_loads(constraints, degree, part_id, num_parts))
    return part_id


def metis_is_installed() -> bool:
    """Whether METIS can be called at all."""
    return _import_pymetis() is not None or find_metis_library() is not None


def _call_pymetis(pymetis, adjacency: CSC, slack: float, num_parts: int, seed: int):
    options = pymetis.Options(seed=int(seed), ufactor=max(1, round((slack - 1) * 1000)))
    if hasattr(pymetis, "CSRAdjacency"):
        lists = pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices)
        return pymetis.part_graph(num_parts, lists, options=options)[1]
    lists = {"xadj": adjacency.indptr, "adjncy": adjacency.indices}  # before 2025
    return pymetis.part_graph(num_parts, **lists, options=options)[1]


def _node_weight(constraints: Constraints | None, degree: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Return (num_nodes, D) weights; None without constraints."""
    if constraints is None:
        return None
    weight = np.ones((len(degree), len(constraints.names)), dtype)
    for d, kind in enumerate(constraints.kinds):
        if kind == VOLUME:
            weight[:, d] = degree
        elif kind == MASK:
            weight[:, d] = (constraints.flags >> np.uint8(d)) & 1
    return weight


def _import_pymetis():
    try:
        import pymetis
    except ImportError:
        return None
    return pymetis


def _need_library(balance):
    library = find_metis_library()
    if library is None:
        what = f"for the balance of {', '.join(balance)} needs METIS' own library" if balance else "needs METIS"
        raise GNNScaleError(
            f"partitioner 'metis' {what}: install it with  pip install 'lightning-gnnscale[metis]'  or from your "
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
