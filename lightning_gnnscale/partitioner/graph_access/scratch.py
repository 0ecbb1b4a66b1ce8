"""Scratch disk: which folder, whether it has space, and files that vanish with the process."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from ... import events
from ...errors import GNNScaleError, disk_errors
from ...system import preallocate
from .. import phases

AUTO = "auto"
_REMEDY = "make space, or give scratch=<another folder>"


def scratch_folder(scratch: str | os.PathLike | None) -> Path | None:
    """Return the folder for scratch files; "auto": the system's for temporary files; None: there is to be none.

    Raises:
        GNNScaleError: the folder does not exist or cannot be written to.
    """
    if scratch is None:
        return None
    folder = Path(tempfile.gettempdir() if scratch == AUTO else scratch)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise GNNScaleError(f"scratch must be a folder that can be written to, got {folder}: make it, or give another")
    return folder


def reserve(folder: Path, needed: int, what: str) -> None:
    """Report how many bytes of scratch disk `what` will take, and check that they are free before anything is written.

    Raises:
        GNNScaleError: too little free space; the message says how much is missing, and where.
    """
    free = shutil.disk_usage(folder).free
    phases.note(scratch_bytes=needed)
    events.record("scratch", what=what, folder=str(folder), bytes=needed, free_bytes=free)
    if needed > free:
        raise GNNScaleError(
            f"{what} needs {needed} bytes of scratch disk, but {folder} has {free} free, {needed - free} too few: "
            "give scratch=<another folder>"
        )


def nameless_file(folder: Path):
    """Open a file without a name, unbuffered: the system frees it when the process ends, however it ends."""
    with disk_errors(folder, "used for scratch files", _REMEDY):
        return tempfile.TemporaryFile(dir=folder, prefix="gnnscale-", buffering=0)


def nameless_map(folder: Path, shape: tuple[int, ...], dtype) -> np.memmap:
    """Return an array of zeros on scratch disk that is freed with its last user."""
    file, num_bytes = nameless_file(folder), max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    with disk_errors(folder, f"given {num_bytes} bytes of scratch files", _REMEDY):
        file.truncate(num_bytes)
        preallocate(file.fileno(), num_bytes)
    return np.memmap(file, dtype, "r+", shape=shape)


def read_at(file, array: np.ndarray, offset: int) -> None:
    """Fill a contiguous array from a scratch file's bytes at an offset; without a seek, so threads may share it."""
    view, filled = memoryview(array).cast("B") if array.size else b"", 0
    with disk_errors(_folder_of(file), "read as scratch disk", _REMEDY):
        while filled < len(view):
            got = os.preadv(file.fileno(), [view[filled:]], offset + filled)
            if not got:
                raise OSError(f"a scratch file ends at {offset + filled}, {len(view) - filled} bytes too early")
            filled += got


def write_at(file, array: np.ndarray, offset: int) -> None:
    """Write a contiguous array's bytes to a scratch file at an offset."""
    view, done = memoryview(array).cast("B") if array.size else b"", 0
    with disk_errors(_folder_of(file), "written to as scratch disk", _REMEDY):
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done:], offset + done)


def _folder_of(file) -> str:
    """Return the folder of a file without a name, where the system reports it."""
    try:
        return os.path.dirname(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    except OSError:
        return tempfile.gettempdir()
