"""A folder for what one run needs for a time: tables, temporary files; what killed runs left beside it is removed."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock

from .across_ranks import first_in_folder
from .errors import GNNScaleError, disk_errors
from .events import SYSTEM_TEMPORARY
from .system import preallocate

_LONGEST_OF_SOCKETS = 107 - len("/listener-12345678")  # bytes of a folder: a socket's path has 107 at most

_ALLOWED = "give EvaluationOptions(scratch=<a folder on another disk>) (evaluation.scratch=)"


class Scratch:
    """The folder of one run's tables. Every rank knows it; the first that sees it makes and removes its contents.

    That is rank 0 and, on machines that do not see its folder, the first of those that share one. It holds a lock
    beside the folder as long as the run lives. A folder whose lock is free was left by a killed run.
    """

    def __init__(self, parent: str | os.PathLike, name: str):
        self.parent, self.folder = Path(parent), Path(parent) / name
        self._lock: FileLock | None = None
        self._firsts: list[int] = []

    def firsts(self) -> list[int]:
        """Return, for each rank, the first rank that sees the same folder; every rank calls it."""
        self._firsts = self._firsts or first_in_folder(self.parent, _ALLOWED)
        return self._firsts

    def path(self, table: str) -> Path:
        """Return the file of a table."""
        return self.folder / f"{table}.npy"

    def make_table(self, table: str, num_rows: int, width: int, dtype: type = np.float32) -> None:
        """Make a table whose bytes the disk has set aside, in place of an older one of that name."""
        path, num_bytes = self.path(table), np.dtype(dtype).itemsize * num_rows * width
        try:
            self.open()
            # The old file is not written over, as another rank may still have it mapped, and gives its space back
            # first.
            path.unlink(missing_ok=True)
            np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num_rows, width))
            _set_aside(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise GNNScaleError(
                f"{path}: evaluation writes {num_bytes} bytes here, the outputs of a layer, and cannot "
                f"({error.strerror or error}); {_ALLOWED}"
            ) from None

    def close(self) -> None:
        """Remove the folder."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def open(self) -> None:
        """Make the folder, unless it is there; OSError: it cannot be made."""
        if self._lock is None:
            self.parent.mkdir(parents=True, exist_ok=True)
            _remove_left(self.parent)
            lock = FileLock(f"{self.folder}.lock")
            lock.acquire()
            self._lock = lock
            self.folder.mkdir()


def open_scratch(root: Path, scratch: str | os.PathLike | None, trainer) -> Scratch:
    """Return the run's scratch folder, the same on every rank; nothing is written yet.

    It lies in `scratch`, or beside the store's folder `root`. The trainer's strategy agrees on rank 0's name; None:
    this process is alone.
    """
    name = f"run-{secrets.token_hex(8)}"
    if trainer is not None:
        name = trainer.strategy.broadcast(name)
    return Scratch(Path(root.parent if scratch is None else scratch) / f".{root.name}.scratch", name)


def temporary_scratch() -> Scratch | None:
    """Return a folder for this run's temporary files, in the system's; None where that is somebody else's."""
    parent = Path(tempfile.gettempdir()) / f"gnnscale-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        return None
    folder = Scratch(parent, f"run-{secrets.token_hex(3)}")  # short: paths of sockets lie below, of 107 bytes at most
    folder.open()
    return folder


def keep_sockets() -> None:
    """Let multiprocessing lay its sockets into a temporary folder of this run: its own stays where a run is killed.

    Nothing happens where it has a folder already, the run has one for all temporary files, or paths of sockets would be
    too long.
    """
    config = multiprocessing.current_process()._config
    if config.get("tempdir") is not None or SYSTEM_TEMPORARY in os.environ:
        return
    with contextlib.suppress(OSError):
        folder = temporary_scratch()
        if folder is not None and len(os.fsencode(folder.folder)) > _LONGEST_OF_SOCKETS:
            folder.close()
        elif folder is not None:
            config["tempdir"] = str(folder.folder)
            close_at_exit(folder)


def close_at_exit(folder: Scratch) -> None:
    """Remove a folder after multiprocessing has removed its own in it, at the end of the process."""
    multiprocessing.util.Finalize(None, folder.close, exitpriority=-200)


def _set_aside(path: Path) -> None:
    with path.open("r+b") as file:
        preallocate(file.fileno(), os.fstat(file.fileno()).st_size)


def _remove_left(parent: Path) -> None:
    for lock_file in parent.glob("run-*.lock"):
        lock = FileLock(lock_file, timeout=0)
        try:
            lock.acquire()
        except OSError:  # it is held (a Timeout), or another user's
            continue
        shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        lock.release()


MAKE_SPACE = "make space, or give scratch=<another folder>"
SLICE_EDGES = 1 << 16  # edges read at a time: they stay in the processor's cache


def nameless_file(folder: Path):
    """Open a file without a name, unbuffered: the system frees it when the process ends, however it ends."""
    with disk_errors(folder, "used for scratch files", MAKE_SPACE):
        return tempfile.TemporaryFile(dir=folder, prefix="gnnscale-", buffering=0)


def read_at(file, array: np.ndarray, offset: int) -> None:
    """Fill a contiguous array from a scratch file's bytes at an offset; without a seek, so threads may share it."""
    view, filled = memoryview(array).cast("B") if array.size else b"", 0
    with disk_errors(partial(_folder_of, file), "read as scratch disk", MAKE_SPACE):
        while filled < len(view):
            got = os.preadv(file.fileno(), [view[filled:]], offset + filled)
            if not got:
                raise OSError(f"a scratch file ends at {offset + filled}, {len(view) - filled} bytes too early")
            filled += got


def write_at(file, array: np.ndarray, offset: int) -> None:
    """Write a contiguous array's bytes to a scratch file at an offset."""
    view, done = memoryview(array).cast("B") if array.size else b"", 0
    with disk_errors(partial(_folder_of, file), "written to as scratch disk", MAKE_SPACE):
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done:], offset + done)


def _folder_of(file) -> str:
    """Return the folder of a file without a name, where the system reports it."""
    try:
        return os.path.dirname(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    except OSError:
        return tempfile.gettempdir()


class EdgeFile:
    """A file of edges without a name, all ids of one dtype; the system frees it when it is closed."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder = folder
        self.dtype = np.dtype(dtype)
        self.num_edges = 0
        self._file = nameless_file(folder)

    def append(self, pairs: np.ndarray) -> None:
        """Write (num_pairs, 2) ids, contiguous and of the file's dtype, at the end."""
        self.write(self.num_edges, pairs)
        self.num_edges += len(pairs)

    def write(self, first_edge: int, pairs: np.ndarray) -> None:
        """Write (num_pairs, 2) ids over the edges from `first_edge` on; `num_edges` stays as it is."""
        write_at(self._file, pairs, first_edge * 2 * self.dtype.itemsize)

    def read(self, first_edge: int, pairs: np.ndarray) -> None:
        """Fill (num_pairs, 2) `pairs` with the edges from `first_edge` on."""
        read_at(self._file, pairs, first_edge * 2 * self.dtype.itemsize)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield the edges [start, stop) as (num_pairs, 2) arrays, overwritten by the next step."""
        stop = self.num_edges if stop is None else stop
        buffer = np.empty((min(SLICE_EDGES, max(0, stop - start)), 2), self.dtype)
        while start < stop:
            piece = buffer[: min(SLICE_EDGES, stop - start)]
            self.read(start, piece)
            yield piece
            start += len(piece)

    def close(self) -> None:
        self._file.close()
