"""METIS' own library, called through ctypes: its Python bindings pass on no more than one balance constraint.

It is looked for in the system (Debian: libmetis5), then inside pymetis (the extra `[metis]`), whose extension module
contains all of METIS.
"""

import ctypes
import ctypes.util
import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import GNNScaleError

_NUM_OPTIONS = 40  # METIS_NOPTIONS
_OK, _MEANINGS = 1, {-2: "it refuses its input", -3: "it ran out of memory", -4: "it gives no reason"}
# Positions in the options; before the seed come the passes of refinement and the cuts to choose from, and since 5.2
# before these the initial partitions.
_SEED, _SEED_SINCE_5_2 = 8, 9
_ONLY_SINCE_5_2 = "libmetis__graph_WriteToDisk"
_BISECTED = 8  # most parts that are made by bisection, as METIS' programs and bindings do


class MetisLibrary(NamedTuple):
    """A METIS that can be called.

    Attributes:
        path: Path of the shared library.
        functions: The loaded library.
        id_dtype, real_dtype: Dtypes that it was compiled for: int32 or int64, float32 or float64.
        seed_option: Index of the seed in its array of options.
    """

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
