"""Which kernels a command needs, known before it needs them: those that are missing are compiled while data is read."""

import atexit
import hashlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("kernels.json")
SWITCH = "GNNSCALE_COMPILE_AHEAD"  # 0: kernels are compiled where they are first called; 1: ahead, in tests too
_AHEAD = "lightning_gnnscale.compile_ahead"
_AMPLE_BYTES = 2 << 30  # of free memory; a process that compiles takes up to COMPILER_BYTES
COMPILER_BYTES = 450 << 20

_started: "Ahead | None" = None
_compiled: set[str] = set()  # sets of which this process has seen that nothing was missing


class Kernel(NamedTuple):
    """A kernel that some sets need, for one signature.

    Attributes:
        name: "module:function", the module within this package.
        types: the types of its arguments, as `compile_ahead.types_of` reads them.
        seconds: CPU seconds that it took to compile, the kernels that it calls not among them.
        sets: the sets that need it.
    """

    name: str
    types: str
    seconds: float
    sets: tuple[str, ...]


def cache_folder() -> Path:
    """Return the folder of compiled kernels; `NUMBA_CACHE_DIR`, where it is set, is its parent."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    parent = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return parent / "lightning_gnnscale"


@cache
def recorded() -> tuple[Kernel, ...]:
    """Return all kernels of the list, in the order in which they are best compiled: `make kernels` writes it."""
    rows = json.loads(LIST.read_text())
    return tuple(Kernel(name, types, seconds, tuple(sets)) for name, types, seconds, sets in rows)


def of_sets(names: Iterable[str]) -> list[Kernel]:
    """Return the kernels of some sets; a name that has none adds nothing."""
    wanted = set(names)
    return [kernel for kernel in recorded() if wanted.intersection(kernel.sets)]


def missing(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return those of some kernels that are not known to be compiled, without an import of any.

    Cost: under 50 ms: this package's files are read, and one folder is listed.
    """
    entries = {}
    try:
        there = set(os.listdir(cache_folder()))
        for line in compiled_list().read_text().splitlines():
            name, types, entry = line.split("\t")
            entries[name, types] = entry
    except (OSError, ValueError):  # none yet, or a line that a full disk cut
        there = set()
    return [kernel for kernel in kernels if entries.get((kernel.name, kernel.types)) not in there]


@cache
def sources_digest() -> str:
    """Return the digest of this package's sources, as they are installed. Cost: under 50 ms, once a process."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    roots = [package, package.parent / "triton_kernels"]  # in a source tree that one lies beside the package
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def compiled_list() -> Path:
    """Return the file that says which kernels of the list are compiled: its name says of which sources, and for what.

    Each line is a kernel's name, its types and its entry in the cache folder, with tabs between.
    """
    digest = hashlib.sha256(sources_digest().encode() + LIST.read_bytes())
    versions = [version_of(name) for name in ("numba", "llvmlite", "numpy")]
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    digest.update(repr((versions, settings, sys.version, _processor())).encode())
    return cache_folder() / f"compiled-{digest.hexdigest()[:24]}.txt"


def version_of(name: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Return what processor this is, as the compiler may see it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    first = [line for line in lines[:60] if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return platform.machine() + "".join(first[:2])


class Ahead:
    """Processes that compile kernels while this one goes on, and end with it.

    They are no descendants of this process: what they hold is no memory of the run.

    Attributes:
        total: kernels that they compile, None while they are still looking.
        done: how many of them are compiled.
    """

    def __init__(self, names: Iterable[str], tell: bool):
        self.total: int | None = None
        self.done = 0
        command = [sys.executable, "-W", "ignore", "-m", _AHEAD, *(["--tell"] if tell else []), *names]
        # Their input stays open as long as this process lives. The first one of them ends at once.
        self._first = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        os.set_blocking(self._first.stdout.fileno(), False)
        self._told, self._owner, self.ended = b"", os.getpid(), False
        atexit.register(self.end)

    def update(self) -> None:
        """Read how far they are: a line with the number of kernels, then a byte for each that is done."""
        self._first.poll()
        while not self.ended:
            told = self._first.stdout.read(1 << 16)
            if told is None:  # nothing new
                break
            self.ended = not told
            self._told += told
        number, newline, dots = self._told.partition(b"\n")
        if newline:
            self.total, self.done = int(number), len(dots)

    def wait(self) -> None:
        """Wait until all is compiled."""
        self._first.wait()
        while not self.ended:
            select.select([self._first.stdout], [], [])
            self.update()

    def end(self) -> None:
        """End them: what is half compiled is lost. A process that was forked from this one ends nothing."""
        if os.getpid() != self._owner:
            return
        self.update()
        if not self.ended:
            with suppress(OSError):
                os.killpg(self._first.pid, signal.SIGTERM)


def compile_ahead(names: Iterable[str], tell: bool = True) -> Ahead | None:
    """Compile what is missing of some sets in processes of their own, and go on at once.

    A kernel that this process needs before they are done it compiles itself, or waits for: see `jit`. With `tell` a
    line on stderr says so. Where less than 2 GiB are free, which a run plans with, this waits until they are done.

    Returns:
        What reports how far they are; None where nothing is missing, where others compile for this process already, on
        all ranks of a machine but the first, or where `GNNSCALE_COMPILE_AHEAD=0`, and in tests without `=1`.
    """
    global _started
    if not _wanted() or running() is not None:
        return None
    names = [name for name in names if name not in _compiled]
    if not missing(of_sets(names)):
        _compiled.update(names)
        return None
    from .memory import free_memory_bytes  # of use where something is missing alone

    try:
        _started = Ahead(names, tell)
    except OSError:  # no process can be started: kernels are compiled where they are called
        return None
    if free_memory_bytes() < _AMPLE_BYTES:
        _started.wait()
    return _started


def running() -> Ahead | None:
    """Return what compiles ahead of this process, or of the one that it was forked from; None where nothing does."""
    if _started is not None and not _started.ended:
        _started.update()
    return None if _started is None or _started.ended else _started


def _wanted() -> bool:
    if any(os.environ.get(name, "0") != "0" for name in ("LOCAL_RANK", "SLURM_LOCALID")):
        return False
    given = os.environ.get(SWITCH)
    return given not in ("0", "") if given is not None else "pytest" not in sys.modules and os.name == "posix"
