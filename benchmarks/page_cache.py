"""The page cache as a measurement needs it: a file's pages dropped, and counted."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from lightning_gnnscale.errors import GNNScaleError


def evict(path: str | os.PathLike) -> None:
    """Drop a file's pages; no process may have mapped and read them.

    Raises:
        GNNScaleError: pages stay, as on a file system in memory.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if cached_bytes(path):
        raise GNNScaleError(f"{path} stays in memory: give a folder on a disk, hydra.run.dir=FOLDER")


def cached_bytes(path: str | os.PathLike) -> int:
    """Return how many bytes of a file are in the page cache, in whole pages."""
    size = Path(path).stat().st_size
    if not size:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        there = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        begin, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size)
        failed = ctypes.CDLL(None, use_errno=True).mincore(begin, length, there.ctypes.data_as(ctypes.c_void_p))
        del view  # or the map could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return int((there & 1).sum()) * mmap.PAGESIZE
