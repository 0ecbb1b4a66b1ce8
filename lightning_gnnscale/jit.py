"""One decorator for compiled loops: numba with `nogil`, cached on disk in a folder of this package's own."""

import os
from collections.abc import Callable
from pathlib import Path

import numba

from .rng import RNG_VERSION


def cache_folder() -> Path:
    """Return the folder of compiled kernels.

    Kernels call `rng.py`, and numba does not notice an edit in another file: the generator's version is
    therefore part of the folder's name. `NUMBA_CACHE_DIR`, where it is set, stays the parent.
    """
    base = os.environ.get("NUMBA_CACHE_DIR")
    parent = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return parent / f"lightning_gnnscale-rng{RNG_VERSION}"


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
