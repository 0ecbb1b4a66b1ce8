"""One decorator for compiled loops: numba with `nogil`, cached on disk in a folder of this package's own."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numba

# Files whose kernels are compiled into kernels of other files: numba does not notice an edit in them.
_COMPILED_IN = (
    "rng.py",
    "partitioner/constraints.py",
    *(
        f"partitioner/multilevel/{name}.py"
        for name in ("cluster_choice", "counters", "edge_graph", "heap", "potential")
    ),
)


def cache_folder() -> Path:
    """Return the folder of compiled kernels.

    Its name holds a digest of the files in `_COMPILED_IN` and of the kernels' intrinsics. `NUMBA_CACHE_DIR`, where it
    is set, stays the parent.
    """
    base = os.environ.get("NUMBA_CACHE_DIR")
    parent = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return parent / f"lightning_gnnscale-{_sources_digest()}"


@cache
def _sources_digest() -> str:
    package = Path(__file__).parent
    # Beside the package in the source tree, inside it where it is installed.
    (kernels,) = find_spec("lightning_gnnscale.triton_kernels").submodule_search_locations
    files = [Path(kernels) / "intrinsics.py", *(package / name for name in _COMPILED_IN)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def kernel(function: Callable | None = None, **options) -> Callable:
    """Compile a function with `numba.njit(nogil=True, cache=True)`; usable with or without arguments.

    Args:
        options: passed on to `numba.njit`, for example `fastmath=True` or `inline="always"`.
    """
    if function is None:
        return lambda decorated: kernel(decorated, **options)
    # Numba picks the cache folder while it decorates: the user's own setting is put back at once.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to: compile in every process
        return numba.njit(nogil=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = before
