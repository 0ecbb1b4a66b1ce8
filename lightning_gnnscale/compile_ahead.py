"""The process that compiles the kernels of some sets: `python -m lightning_gnnscale.compile_ahead SET ...`.

`--prune` in place of sets removes from the cache what was not used for long.

On stdout it writes a line, how many kernels it compiles, and then a byte for each.
"""

import os
import select
import struct
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import time

from .kernel_sets import COMPILER_BYTES, Kernel, cache_folder, compiled_list, missing, of_sets
from .memory import free_memory_bytes
from .system import CAN_FORK, usable_cores

_PACKAGE = __package__
_NICE = 5
_MOST_BYTES = 512 << 20
_UNUSED_DAYS = 30


def object_of(name: str):
    """Return what "module:name" names in this package: a kernel, or a class of the tuples that one takes."""
    module, attribute = name.split(":")
    return getattr(import_module(f".{module}", _PACKAGE), attribute)


def types_of(text: str) -> tuple:
    """Return the types of a signature from its text, see `types_text`."""
    import numpy as np
    from numba.core import types
    from numba.np import numpy_support

    def array(dtype, ndim: int, layout: str, readonly: bool = False, aligned: bool = True):
        return types.Array(dtype, ndim, layout, readonly=readonly, aligned=aligned)

    def record(*fields: tuple):
        return numpy_support.from_dtype(np.dtype(list(fields)))

    def named(name: str, *inner):
        return types.BaseTuple.from_types(inner, object_of(name))

    names = {
        "array": array,
        "record": record,
        "named": named,
        "omitted": types.Omitted,
        "literal": types.literal,
        "none": types.none,
    }
    names |= {"optional": types.Optional, "tuple": lambda *inner: types.Tuple(inner), "unituple": types.UniTuple}
    names |= {str(one): one for one in (*types.number_domain, types.boolean, types.unicode_type)}
    return eval(text, {"__builtins__": {}}, names)


def types_text(arguments: tuple) -> str:
    """Return text that `types_of` makes the same types from; ValueError: a type that has no text here."""
    return "(" + "".join(f"{_type_text(one)}, " for one in arguments).rstrip() + ")"


def _type_text(one) -> str:
    from numba.core import types
    from numba.np import numpy_support

    if isinstance(one, types.Array):
        more = (", readonly=True" if not one.mutable else "") + (", aligned=False" if not one.aligned else "")
        return f"array({_type_text(one.dtype)}, {one.ndim}, {one.layout!r}{more})"
    if isinstance(one, types.Record):
        return f"record{tuple(numpy_support.as_dtype(one).descr)!r}"
    if isinstance(one, types.BaseNamedTuple):
        name = f"{one.instance_class.__module__.removeprefix(_PACKAGE + '.')}:{one.instance_class.__qualname__}"
        return f"named({', '.join([repr(name), *map(_type_text, one)])})"
    if isinstance(one, types.UniTuple):
        return f"unituple({_type_text(one.dtype)}, {one.count})"
    if isinstance(one, types.Tuple):
        return f"tuple({', '.join(map(_type_text, one.types))})"
    if isinstance(one, types.Omitted):
        return f"omitted({one.value!r})"
    if isinstance(one, types.Literal):
        return f"literal({one.literal_value!r})"
    if isinstance(one, types.Optional):
        return f"optional({_type_text(one.type)})"
    if one in types.number_domain or one in (types.boolean, types.none, types.unicode_type):
        return str(one)
    raise ValueError(f"{one} has no text in the list of kernels")


def entry_of(kernel: Kernel) -> Path | None:
    """Return the file in the cache that one kernel of the list is, or will be; its module is imported."""
    dispatcher = object_of(kernel.name)
    return dispatcher._cache.entry(types_of(kernel.types), dispatcher.targetctx.codegen())


def still_missing(kernels: list[Kernel]) -> list[Kernel]:
    """Return those of some kernels that have no file in the cache, and note the others; their modules are imported."""
    found = []
    for kernel in missing(kernels):
        entry = entry_of(kernel)
        if entry is None or not entry.exists():
            found.append(kernel)
        else:
            _note(kernel, entry)
    return found


def main(words: list[str]) -> None:
    """Compile what is missing of some sets, in a process a core but for the one that started this, as memory allows."""
    if CAN_FORK and os.fork():
        os._exit(0)  # whoever started this one has no descendants that compile
    with suppress(OSError):
        os.nice(_NICE)
    todo = still_missing(of_sets(word for word in words if word != "--tell"))
    cores = usable_cores()
    workers = max(1, min(cores - 1, len(todo), free_memory_bytes() // COMPILER_BYTES)) if CAN_FORK else 1
    if "--tell" in words and todo:
        seconds = max(1, round(sum(kernel.seconds for kernel in todo) / min(cores, workers + 1)))
        print(f"compiling {len(todo)} kernels for this machine, about {seconds} s, once", file=sys.stderr, flush=True)
    _write(f"{len(todo)}\n".encode())
    in_processes(todo, workers)
    if todo:
        prune()


def in_processes(todo: list[Kernel], workers: int) -> None:
    """Compile kernels in this process and in forks of it, which share what it has imported; each takes the next one."""
    read_end, write_end = os.pipe()
    # A pipe holds some thousands of numbers; each reader takes one.
    os.write(write_end, b"".join(struct.pack("i", number) for number in range(len(todo))))
    os.close(write_end)
    children = []
    for _ in range(workers - 1):
        child = os.fork()
        if child == 0:
            _compile_next(todo, read_end)
            os._exit(0)
        children.append(child)
    _compile_next(todo, read_end)
    for child in children:
        os.waitpid(child, 0)
    os.close(read_end)


def _compile_next(todo: list[Kernel], queue: int) -> None:
    while _is_wanted() and (number := os.read(queue, 4)):
        kernel = todo[struct.unpack("i", number)[0]]
        with suppress(Exception):  # it is reported where the kernel is called
            object_of(kernel.name).compile(types_of(kernel.types))
        entry = entry_of(kernel)
        if entry is not None and entry.exists():
            _note(kernel, entry)
        _write(b".")


def _is_wanted() -> bool:
    """Whether the process that started this one is there: it holds the other end of the input, and writes nothing."""
    return not select.select([0], [], [], 0)[0]


def _note(kernel: Kernel, entry: Path) -> None:
    """Add a line to the list of what is compiled: one write to a file opened for appending, so lines do not mix."""
    with suppress(OSError), open(compiled_list(), "a") as file:
        file.write(f"{kernel.name}\t{kernel.types}\t{entry.name}\n")


def _write(told: bytes) -> None:
    with suppress(OSError):  # whoever reads has gone
        os.write(1, told)


def prune(most_bytes: int = _MOST_BYTES, unused_days: float = _UNUSED_DAYS) -> int:
    """Remove what was not used for so many days, then the oldest until the cache is small; return how many files."""
    files = []
    for path in cache_folder().rglob("*"):
        with suppress(OSError):
            if path.is_file():
                files.append((path.stat().st_mtime, path.stat().st_size, path))
    size, removed = sum(size for _, size, _ in files), 0
    for modified, file_bytes, path in sorted(files):
        if size <= most_bytes and modified > time() - unused_days * 86_400:
            break
        with suppress(OSError):
            path.unlink()
            removed += 1
        size -= file_bytes
    return removed


if __name__ == "__main__":
    if sys.argv[1:] == ["--prune"]:
        prune()
    else:
        main(sys.argv[1:])
