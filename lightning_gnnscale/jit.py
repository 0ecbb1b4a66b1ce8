"""One decorator for compiled loops: numba with `nogil`, each kernel compiled once a machine, whoever needs it first."""

import gc
import hashlib
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path

import llvmlite
import numba
import numpy as np
from filelock import FileLock
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps
from numba.extending import is_jitted

from .kernel_sets import cache_folder

_PLAIN = (bool, int, float, str, tuple, type(None), np.generic, np.ndarray)
_LONGEST_WAIT_S = 300  # for a process that compiles the same kernel: then it is compiled here too
_DAY_S = 86_400
_DIGEST_BYTES = 32
_making: set[Path] = set()  # entries that this process has locked


def kernel(function: Callable | None = None, **options) -> Callable:
    """Compile a function with `numba.njit(nogil=True)` on first use, once a machine; usable with or without arguments.

    What was compiled is used again, by other copies of the same files too, until the function's file changes, or one
    that its kernels and constants come from. A process that needs what another one is compiling waits for it.

    Args:
        options: passed on to `numba.njit`, for example `fastmath=True` or `inline="always"`.
    """
    if function is None:
        return lambda decorated: kernel(decorated, **options)
    compiled = numba.njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if is_jitted(compiled):  # not with NUMBA_DISABLE_JIT=1
        compiled._cache = KernelCache(function)
        compiled.compile = types.MethodType(_compile_once, compiled)
    return compiled


def _compile_once(dispatcher, signature):
    """Compile a kernel for a signature, or load what was compiled: the `compile` of its dispatcher.

    Numba's own lock is taken first, so no thread holds a file that another thread of this process waits for with that
    lock in hand. Processes wait for each other only from a kernel to those that it calls: in no circle.
    """
    compile_or_load = type(dispatcher).compile
    with global_compiler_lock:
        entry = dispatcher._cache.entry(signature, dispatcher.targetctx.codegen())
        if tuple(signature) in dispatcher.overloads or entry is None or entry.exists():
            return compile_or_load(dispatcher, signature)
        with _turn(entry), _no_garbage_collection():
            return compile_or_load(dispatcher, signature)  # which looks into the cache once more


@contextmanager
def _turn(entry: Path) -> Iterator[None]:
    """Let one process at a time make an entry; where files cannot be locked or written, each makes its own."""
    path = entry.with_name(entry.name + ".lock")
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry not in _making:  # a kernel that calls itself
            lock.acquire(timeout=_LONGEST_WAIT_S, poll_interval=0.02)
    except (OSError, NotImplementedError):  # a timeout is an OSError too
        pass
    if not lock.is_locked:
        yield
        return
    _making.add(entry)
    try:
        yield
    finally:
        _making.discard(entry)
        if entry.exists():  # whoever waits for the old file, or makes a new one, looks for the entry first
            with suppress(OSError):
                path.unlink()
        lock.release()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block: it takes an eighth of compiling. Numba's lock is held, so threads take turns."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class KernelCache(_Cache):
    """What one function was compiled to: a file for each signature, named by all that decides what is in it.

    Numba's own files are named by the folder of the source, and two processes that save two signatures at once may
    mix them up.
    """

    def __init__(self, function: Callable):
        self._function = function
        _file_digest(function.__code__.co_filename)  # now: the file may change before the first call

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    @cached_property
    def _source(self) -> tuple:
        # Made on first use: by then the module is whole, and helpers below the function are known.
        code = self._function.__code__
        return _file_digest(code.co_filename), code.co_firstlineno, code.co_code, sources_digest(self._function)

    def entry(self, signature, codegen) -> Path | None:
        """Return the file of one signature, None where its types have no name that another process would give them."""
        types_text = str(signature)
        if " at 0x" in types_text:
            return None
        fields = [getattr(one, "fields", None) for one in signature]  # of named tuples: their types tell a name alone
        decides = types_text, fields, codegen.magic_tuple(), self._source, _compiler()
        digest = hashlib.sha256(repr(decides).encode()).hexdigest()[:24]
        module = Path(self._function.__code__.co_filename).stem
        name = f"{module}.{self._function.__qualname__}".replace("<", "").replace(">", "")
        return cache_folder() / f"{name[-120:]}-{digest}.kernel"

    def load_overload(self, sig, target_context) -> CompileResult | None:
        target_context.refresh()
        entry = self.entry(sig, target_context.codegen())
        try:
            content = entry.read_bytes() if entry else b""
            digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() != digest:
                return None
            if time.time() - entry.stat().st_mtime > _DAY_S:
                with suppress(OSError):  # a folder that cannot be written to
                    os.utime(entry)  # what is used is not pruned
        except OSError:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig, data: CompileResult) -> None:
        entry = self.entry(sig, data.codegen)
        if entry is None or any(not one.can_cache for one in data.lifted) or data.library.has_dynamic_globals:
            return
        content = dumps(data._reduce())
        temporary = entry.with_name(f"{entry.name}.{os.getpid()}.tmp")
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(content).digest() + content)
            os.replace(temporary, entry)
        except OSError:  # no folder can be written to, or the disk is full: compile in every process
            with suppress(OSError):
                temporary.unlink()

    def enable(self) -> None:
        """Nothing: kernels are always cached."""

    def disable(self) -> None:
        """Nothing: kernels are always cached."""

    def flush(self) -> None:
        """Nothing: an entry that is out of date has another name."""


@cache
def _compiler() -> tuple:
    """Return what decides, beside sources and types, what a kernel is compiled to."""
    settings = numba.config.OPT, numba.config.BOUNDSCHECK, numba.config.DEBUGINFO_DEFAULT
    versions = numba.__version__, llvmlite.__version__, np.__version__
    return versions, sys.implementation.cache_tag, getattr(sys, "abiflags", ""), str(settings)


def sources_digest(function: Callable) -> str:
    """Return a digest of what is compiled into a function from elsewhere: the files of its kernels, and constants."""
    files, constants = set(), []
    for code, name, value in _reached(function, set()):
        if isinstance(value, _PLAIN):
            text = (
                repr(value) if not isinstance(value, np.ndarray) else repr((value.dtype, value.shape, value.tobytes()))
            )
            constants.append((code.co_name, name, text))
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
