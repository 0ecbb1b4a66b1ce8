"""The state of a pass on disk, so that a killed partitioning goes on where it was saved."""

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from ..edge_stream.array import load_npz_arrays
from ..errors import disk_errors


class Checkpoint:
    """One file that holds the latest state of one run; without a path every call does nothing.

    Args:
        path: the file; it is replaced in one step, so it is never half there.
        stream: the EdgeStream that is read; another source, or another chunk size, does not match the file.
        settings: plain values that must be the same for the state to be of use.
        every: chunks between two saves, >= 1.

    Raises:
        ValueError: the path is a folder, or lies in none.
    """

    def __init__(self, path: str | os.PathLike | None, stream, settings: dict, every: int):
        self.path = None if path is None else Path(path)
        self.every = every
        self._chunks = 0
        self._key = ""
        if self.path is not None:
            if self.path.is_dir() or not self.path.parent.is_dir():
                raise ValueError(f"partitioner.checkpoint must be a file in a folder that exists, got {self.path}")
            facts = [stream.fingerprint(), stream.chunk_edges, settings]
            self._key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def load(self) -> tuple[str, dict[str, np.ndarray]] | None:
        """Return the phase and the arrays of the saved state, or None where there is none for this run.

        Raises:
            ValueError: the file is not a checkpoint; it is left as it is.
        """
        if self.path is None or not self.path.exists():
            return None
        if not _may_be_checkpoint(self.path):
            raise ValueError(f"partitioner.checkpoint: {self.path} is no checkpoint: give a path of its own")
        try:
            arrays = load_npz_arrays(self.path)
        except ValueError:
            return None  # damaged: the work starts again and replaces it
        phase, key = str(arrays.pop("phase")), str(arrays.pop("key"))
        return (phase, arrays) if key == self._key else None

    def after_chunk(self, phase: str, arrays: dict[str, np.ndarray]) -> None:
        """Count one chunk, and save the arrays when `every` chunks have gone by."""
        if self.path is None:
            return
        self._chunks += 1
        if self._chunks % self.every == 0:
            self.save(phase, arrays)

    def save(self, phase: str, arrays: dict[str, np.ndarray]) -> None:
        """Write the arrays under a temporary name, flush them to disk, and rename.

        Raises:
            GNNScaleError: the disk is full, or cannot be written to; the state before stays.
        """
        temporary = self._temporary()
        with disk_errors(self.path, "saved", "make room, or give checkpoint=<another file>; what was saved stays"):
            try:
                with open(temporary, "wb") as file:
                    np.savez(file, phase=phase, key=self._key, **arrays)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    def remove(self) -> None:
        """Delete the file: the run is over."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self._temporary().unlink(missing_ok=True)  # of a process that was killed while it saved

    def _temporary(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tmp")


def _may_be_checkpoint(path: Path) -> bool:
    """Whether a file is one of ours, as it was saved or damaged since."""
    try:
        with zipfile.ZipFile(path) as file:
            return {"phase.npy", "key.npy"} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        with path.open("rb") as file:
            return file.read(2) in (b"", b"PK")
