"""METIS and KaMinPar, in memory: the references for cut, speed and memory.

METIS needs the extra `[metis]` or its shared library, KaMinPar the extra `[kaminpar]`.
"""

import ctypes
import ctypes.util
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import GNNScaleError, check_number, is_integer, short
from ..graph import CSC, id_dtype
from ..jit import kernel
from ..rng import combine, fold
from ..scratch import nameless_file, write_at
from . import phases
from .constraints import judge, node_weights, part_loads, resolve_constraints
from .graph_access.scratch import reserve, scratch_folder
from .graph_access.simple_graph import symmetric_adjacency
from .graph_input import GraphInput, graph_partitioner

_SLACK = 1.03  # METIS' default, and KaMinPar's
KEPT_EDGES = 16  # of a node, where `fast` looks at few


@graph_partitioner("metis", memory=lambda num_nodes, num_edges, *_: 240 * num_edges, resumable=False, slack=_SLACK)
def metis(graph: GraphInput, num_parts: int, *, fast: bool = False) -> np.ndarray:
    """Partition with METIS' multilevel method, the whole graph in memory.

    Args:
        graph: the graph. Its seed is METIS' own, in [0, 2**31); its masks are those that are balanced.
        graph.balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them: the largest part over the mean;
            None: nodes at METIS' default, 1.03. METIS may break a bound, with many parts above all: a warning says by
            how much.
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
    _check_seed("metis", seed)
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

    An edge stays where it is among the `most` first of either end, in the order of a hash of the seed.
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


def _check_seed(method: str, seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise ValueError(f"partitioner {method!r} takes a seed in [0, {2**31}), got {seed}")


def _node_slack(balance) -> float:
    if not balance or "nodes" not in balance:
        return _SLACK
    check_number("partitioner.balance.nodes", balance["nodes"], at_least=1)
    return float(balance["nodes"])


_NUM_OPTIONS = 40  # METIS_NOPTIONS
_OK, _MEANINGS = 1, {-2: "it refuses its input", -3: "it ran out of memory", -4: "it gives no reason"}
# Positions in the options; before the seed come the passes of refinement and the cuts to choose from, and since 5.2
# before these the initial partitions.
_SEED, _SEED_SINCE_5_2 = 8, 9
_ONLY_SINCE_5_2 = "libmetis__graph_WriteToDisk"
_BISECTED = 8  # most parts that are made by bisection, as METIS' programs and bindings do


class MetisLibrary(NamedTuple):
    """A METIS that can be called, the dtypes it was compiled for, and where its options have the seed."""

    path: str
    functions: ctypes.CDLL
    id_dtype: np.dtype
    real_dtype: np.dtype
    seed_option: int


@cache
def find_metis_library() -> MetisLibrary | None:
    """Return the first METIS library that loads and answers, or None."""
    for path in _candidates():
        try:
            functions = ctypes.CDLL(path)
            functions.METIS_SetDefaultOptions, functions.METIS_PartGraphKway  # noqa: B018 (AttributeError if missing)
        except (OSError, AttributeError):
            continue
        id_dtype = _id_dtype(functions)
        seed_option = _SEED_SINCE_5_2 if hasattr(functions, _ONLY_SINCE_5_2) else _SEED
        for real_dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            library = MetisLibrary(path, functions, id_dtype, real_dtype, seed_option)
            if _reads_slack(library):
                return library
    return None


def call_metis(
    library: MetisLibrary,
    indptr: np.ndarray,
    indices: np.ndarray,
    node_weight: np.ndarray | None,
    slack: np.ndarray,
    num_parts: int,
    seed: int,
    fast: bool = False,
) -> np.ndarray:
    """Partition for the smallest cut: by bisection up to 8 parts, k-way beyond, with node weights and where fast.

    Args:
        library: what `find_metis_library` returned.
        indptr, indices: symmetric adjacency without repeats and self-loops.
        node_weight: (num_nodes, D) of the library's id dtype, each column with a sum above 0; None: 1 for each node.
        slack: (D,) the largest part over the mean, per column, >= 1.
        num_parts: >= 2.
        seed: in [0, 2**31).
        fast: one pass of refinement a level, and one initial partition since METIS 5.2.

    Returns:
        (num_nodes,) of the library's id dtype.

    Raises:
        GNNScaleError: METIS fails, or the graph is too large for its ids.
    """
    if len(indices) > np.iinfo(library.id_dtype).max:
        raise GNNScaleError(
            f"{library.path} counts with {library.id_dtype.name}, too few bits for {len(indices)} neighbours: a METIS "
            "with 64-bit ids is part of  pip install 'lightning-gnnscale[metis]'"
        )
    num_nodes = len(indptr) - 1
    options = np.full(_NUM_OPTIONS, -1, library.id_dtype)
    options[library.seed_option] = seed
    if fast:
        options[library.seed_option - (3 if library.seed_option == _SEED_SINCE_5_2 else 2) : library.seed_option] = 1
    part_id, cut = np.zeros(num_nodes, library.id_dtype), np.zeros(1, library.id_dtype)
    count, width, parts = (np.array([value], library.id_dtype) for value in (num_nodes, len(slack), num_parts))
    arrays = [
        count,
        width,
        np.ascontiguousarray(indptr, library.id_dtype),
        np.ascontiguousarray(indices, library.id_dtype),
        None if node_weight is None else np.ascontiguousarray(node_weight, library.id_dtype),
        None,
        None,
        parts,
        None,
        np.ascontiguousarray(slack, library.real_dtype),
        options,
        cut,
        part_id,
    ]
    bisects = num_parts <= _BISECTED and node_weight is None and not fast
    function = "METIS_PartGraphRecursive" if bisects else "METIS_PartGraphKway"
    status = getattr(library.functions, function)(*(_address(array) for array in arrays))
    if status != _OK:
        raise GNNScaleError(f"METIS ({library.path}) failed: {_MEANINGS.get(status, f'status {status}')}")
    return part_id


def _candidates() -> list[str]:
    system = ctypes.util.find_library("metis")
    found = [system] if system else []
    spec = importlib.util.find_spec("pymetis")
    if spec is not None and spec.origin:
        found += [str(path) for path in sorted(Path(spec.origin).parent.glob("_internal*.so"))]
    return found


def _id_dtype(functions: ctypes.CDLL) -> np.dtype:
    """Return the dtype whose 40 values METIS_SetDefaultOptions fills."""
    space = np.zeros(2 * _NUM_OPTIONS, np.int32)
    functions.METIS_SetDefaultOptions(_address(space))
    return np.dtype(np.int64 if space[_NUM_OPTIONS:].any() else np.int32)


def _reads_slack(library: MetisLibrary) -> bool:
    """Whether the library takes slacks of this real dtype; one of doubles finds two floats to be a negative number."""
    indptr, indices = np.array([0, 1, 3, 5, 6]), np.array([1, 0, 2, 1, 3, 2])
    slack = np.array([1.1, -1.0], library.real_dtype)[:1]
    try:
        call_metis(library, indptr, indices, None, slack, 2, 0)
    except GNNScaleError:
        return False
    return True


def _address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


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
    if graph.balance and set(graph.balance) != {"nodes"}:
        told = sorted(graph.balance)
        raise ValueError(f"partitioner 'kaminpar' can bound the balance of 'nodes' alone, got {told}")
    slack = _node_slack(graph.balance)
    _check_kaminpar(package, threads, preset, graph.seed)
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


def _check_kaminpar(package, threads, preset: str, seed: int) -> None:
    if not is_integer(threads) or threads < 1:
        raise ValueError(f"partitioner.threads must be a whole number >= 1, got {short(threads)}")
    if preset not in package.context_names():
        names = ", ".join(sorted(package.context_names()))
        raise ValueError(f"partitioner.preset must be one of {names}, got {short(preset)}")
    _check_seed("kaminpar", seed)
