"""One decorator for compiled loops: numba with `nogil`, cached on disk in a folder of this package's own."""

import hashlib
import os
import types
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import is_jitted

_PLAIN = (bool, int, float, str, tuple, type(None))


def cache_folder() -> Path:
    """Return the folder of compiled kernels; `NUMBA_CACHE_DIR`, where it is set, is its parent."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    parent = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return parent / "lightning_gnnscale"


def kernel(function: Callable | None = None, **options) -> Callable:
    """Compile a function with `numba.njit(nogil=True)` on first use, once a machine; usable with or without arguments.

    What was compiled is used again until the function's file changes, or one that its kernels and constants come from.

    Args:
        options: passed on to `numba.njit`, for example `fastmath=True` or `inline="always"`.
    """
    if function is None:
        return lambda decorated: kernel(decorated, **options)
    compiled = numba.njit(nogil=True, **options)(function)
    # Numba picks the cache folder while the cache is made: the user's own setting is put back at once.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        compiled._cache = _KernelCache(function)
    except RuntimeError:  # no folder can be written to: compile in every process
        pass
    finally:
        numba.config.CACHE_DIR = before
    return compiled


class _KernelCache(FunctionCache):
    """Numba's cache of one function, which also sees a change in what other files put into it.

    Numba itself compares the function's own file alone.
    """

    def __init__(self, function: Callable):
        self._py_func, self._name = function, repr(function)
        self._impl = self._impl_class(function)
        self._cache_path = self._impl.locator.get_cache_path()
        self._stamp = self._impl.locator.get_source_stamp()  # now: the file may change before the first call
        _file_digest(function.__code__.co_filename)
        self.enable()

    @cached_property
    def _cache_file(self) -> IndexDataCacheFile:
        # Made on first use: by then the module is whole, and helpers below the function are known.
        stamp = self._stamp, sources_digest(self._py_func)
        return IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)


def sources_digest(function: Callable) -> str:
    """Return a digest of what is compiled into a function from elsewhere: the files of its kernels, and constants."""
    files, constants = set(), []
    for code, name, value in _reached(function, set()):
        if isinstance(value, _PLAIN):
            constants.append((code.co_name, name, repr(value)))
        else:
            files.add(value.__code__.co_filename)
    text = repr((sorted(map(_file_digest, files)), sorted(constants)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # within an archive, which nobody edits
        return path


def _reached(function: Callable, seen: set[int]) -> Iterator[tuple[types.CodeType, str, object]]:
    """Yield (code, name, value) for each kernel and constant that a function names, and those that the kernels name."""
    code, names = function.__code__, function.__globals__
    seen.add(id(code))
    found = [(name, names[name]) for name in code.co_names if name in names]
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found += [(name, cell.cell_contents) for name, cell in closure]
    for _, module in [one for one in found if isinstance(one[1], types.ModuleType)]:
        found += [(name, vars(module)[name]) for name in code.co_names if name in vars(module)]
    for name, value in found:
        inner = getattr(value, "py_func", None) if is_jitted(value) else getattr(value, "_defn", None)
        if isinstance(value, _PLAIN):
            yield code, name, value
        elif isinstance(inner, types.FunctionType) and id(inner.__code__) not in seen:
            yield code, name, inner
            yield from _reached(inner, seen)
