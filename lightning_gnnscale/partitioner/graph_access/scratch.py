"""Scratch disk: which folder, whether it has room, and files that vanish with the process."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from ... import events
from ...errors import GNNScaleError
from .. import phases

AUTO = "auto"


def scratch_folder(scratch: str | os.PathLike | None) -> Path | None:
    """Return the folder for scratch files.

    Args:
        scratch: a folder; "auto": the system's folder for temporary files; None: no scratch disk may be used.

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
    """Tell how much scratch disk comes into use, and check that it is free before anything is written.

    Args:
        folder: where the files will lie.
        needed: bytes.
        what: what they hold, for the message: "dropping the repeats of 5 edges".

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
    return tempfile.TemporaryFile(dir=folder, prefix="gnnscale-", buffering=0)


def nameless_map(folder: Path, shape: tuple[int, ...], dtype) -> np.memmap:
    """Return an array of zeros on scratch disk that is freed with its last user."""
    file = nameless_file(folder)
    file.truncate(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
    return np.memmap(file, dtype, "r+", shape=shape)
