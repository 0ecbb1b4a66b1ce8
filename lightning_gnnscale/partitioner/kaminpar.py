"""KaMinPar, in memory: a peer for cut and speed. Needs the extra `[kaminpar]`."""

import importlib.util
import sys
from pathlib import Path

import numpy as np

from ..errors import GNNScaleError, short
from ..graph import CSC, id_dtype
from . import phases
from .graph_access.scratch import nameless_file, reserve, scratch_folder, write_at
from .graph_access.simple_graph import symmetric_adjacency
from .graph_input import GraphInput, graph_partitioner
from .registry import check_number

_SLACK = 1.03  # KaMinPar's default

# The ParHIP format: three uint64 (version, nodes, edges), a uint64 file position a row, then the neighbours. The
# version's bits say what is left out or narrow: edge weights, node weights, 64-bit positions (4), 64-bit ids (8).
_NO_WEIGHTS, _NARROW_IDS, _HEADER_BYTES = 3, 8, 24


@graph_partitioner("kaminpar", memory=lambda num_nodes, num_edges, *_: 58 * num_edges, resumable=False, slack=_SLACK)
def kaminpar(graph: GraphInput, num_parts: int, *, threads: int = 1, preset: str = "default") -> np.ndarray:
    """Partition with KaMinPar, the whole graph in memory; it is handed over in a file on scratch disk.

    Args:
        graph: the graph; scratch disk is needed. Its seed is KaMinPar's own, in [0, 2**31).
        graph.balance: None (KaMinPar's default, 1.03) or {"nodes": slack}: the largest part over the mean;
            a warning says where KaMinPar breaks it.
        threads: >= 1; with several threads the result differs from run to run.
        preset: a name of KaMinPar's own settings, for example "fast", "default", "eco", "strong" or "terapart".

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        GNNScaleError: kaminpar is not installed, or scratch disk is full.
        ValueError: a constraint that this method does not have, or a value outside its range.

    Cost: 8 bytes an edge of memory (int32 ids) before KaMinPar starts, and of scratch disk; its own memory is some
        50 bytes an edge.
    Source: Gottesbueren et al., Deep multilevel graph partitioning, ESA 2021, through kaminpar.
    """
    package = _import_kaminpar()
    slack = _node_slack(graph.balance)
    _check_options(package, threads, preset, graph.seed)
    folder = scratch_folder(graph.scratch)
    if folder is None:
        raise ValueError("partitioner 'kaminpar' reads its graph from a file: give scratch=<a folder> or scratch=auto")
    degree = graph.open_simple()
    if num_parts == 1 or not graph.simple.num_edges:
        return (np.arange(graph.num_nodes) % num_parts).astype(np.int32)
    with phases.phase("adjacency"):
        file = _write_parhip(
            folder, symmetric_adjacency(graph.simple, degree, id_dtype(graph.num_nodes), graph.progress)
        )
        with file:
            loaded = package.load_graph(f"/dev/fd/{file.fileno()}", package.GraphFileFormat.PARHIP)
    with phases.phase("kaminpar"):
        package.reseed(int(graph.seed))
        solver = package.KaMinPar(int(threads), package.context_by_name(preset))
        found = solver.compute_partition(loaded, int(num_parts), slack - 1.0)
    return np.asarray(found, np.int32)


def kaminpar_is_installed() -> bool:
    """Whether KaMinPar can be called."""
    return "kaminpar" in sys.modules or importlib.util.find_spec("kaminpar") is not None


def _import_kaminpar():
    try:
        import kaminpar
    except ImportError as error:
        raise GNNScaleError(
            "partitioner 'kaminpar' needs kaminpar: install it with  pip install 'lightning-gnnscale[kaminpar]'"
        ) from error
    return kaminpar


def _write_parhip(folder: Path, adjacency: CSC):
    """Write the adjacency to a file without a name, and return the file."""
    indptr, indices = adjacency
    first = _HEADER_BYTES + 8 * len(indptr)
    narrow = _NARROW_IDS if indices.dtype == np.int32 else 0
    reserve(folder, first + indices.nbytes, f"handing {adjacency.num_edges} neighbours to KaMinPar")
    file = nameless_file(folder)
    head = np.array([_NO_WEIGHTS | narrow, adjacency.num_rows, adjacency.num_edges], np.uint64)
    for values, position in ((head, 0), (indptr * indices.itemsize + first, head.nbytes), (indices, first)):
        write_at(file, values, position)
    return file


def _node_slack(balance) -> float:
    if not balance:
        return _SLACK
    if set(balance) != {"nodes"}:
        raise ValueError(f"partitioner 'kaminpar' can bound the balance of 'nodes' alone, got {sorted(balance)}")
    check_number("partitioner.balance.nodes", balance["nodes"], at_least=1)
    return float(balance["nodes"])


def _check_options(package, threads, preset: str, seed: int) -> None:
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)) or threads < 1:
        raise ValueError(f"partitioner.threads must be a whole number >= 1, got {short(threads)}")
    if preset not in package.context_names():
        names = ", ".join(sorted(package.context_names()))
        raise ValueError(f"partitioner.preset must be one of {names}, got {short(preset)}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"partitioner 'kaminpar' takes a seed in [0, {2**31}), got {seed}")
