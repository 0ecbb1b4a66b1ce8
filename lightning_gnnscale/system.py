"""What this system does with files: hints, space ahead of writing, files that are whole or not there; cores; ends."""

import ctypes
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import disk_errors

CAN_FORK = hasattr(os, "fork")
CAN_ADVISE = hasattr(os, "posix_fadvise")
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: all reads go through the page cache
MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
MADV_RANDOM = getattr(mmap, "MADV_RANDOM", None)
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before a fork, which must not wait for locks
PAGE_BYTES = 4096  # that a disk reads at a time; reads past the page cache begin and end at them
_NICE = 10  # a tenth of what a thread that is waited for gets of a core
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def usable_cores() -> int:
    """Return the number of cores that this process may run on, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """Ask the system for SIGKILL once the process that started this one has ended, however that was; Linux alone.

    Called in the process that is to end, or as `preexec_fn` of one that takes the place of a fork. Nothing is lost: no
    one is left to take this process's results.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def yield_cores() -> None:
    """Let this thread, which works ahead, and those that it starts go behind the other threads, on Linux alone.

    It takes no right to lower a priority. On other systems it would be that of the process.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(os.nice(0), _NICE))


def advise(fd: int, start: int, num_bytes: int, how: str) -> None:
    """Tell the system how bytes of a file, 0: up to the end, will be read: "random", "willneed" or "dontneed"."""
    if CAN_ADVISE:
        os.posix_fadvise(fd, start, num_bytes, getattr(os, f"POSIX_FADV_{how.upper()}"))


def preallocate(fd: int, num_bytes: int) -> None:
    """Reserve the disk space of a file; a no-op where the system cannot.

    A page of a sparse file that finds no space when it is written ends the process by a signal, without a message.

    Raises:
        OSError: there is no space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)


def sync_data(fd: int) -> None:
    """Wait until a file's data are on the disk."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)  # macOS has the latter alone


@contextmanager
def whole_file(
    path: Path, remedy: str = "make space, or give another path", doing: str = "written", suffix: str = ""
) -> Iterator[BinaryIO]:
    """Yield a file to write that takes its path once the block is over and its bytes are on the disk.

    Args:
        path: the path; what was there stays if the block fails.
        remedy, doing: see `disk_errors`.
        suffix: of its name until then; "": one of this process.

    Raises:
        GNNScaleError: the disk is full, or cannot be written to.
    """
    temporary = path.with_name(path.name + (suffix or f".tmp{os.getpid()}"))
    try:
        with disk_errors(path, doing, remedy):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
