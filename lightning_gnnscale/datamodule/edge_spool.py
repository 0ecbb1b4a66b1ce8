"""A file of one process that exact evaluation writes edges to, and reads them from, for a layer."""

import os
from pathlib import Path

import numpy as np

from ..errors import GNNScaleError
from ..system import advise


class EdgeSpool:
    """The file; implements the model's `Spool`.

    Args:
        path: where it lies; its folder exists.

    Raises:
        GNNScaleError: the disk is full, or cannot be written to or read.
    """

    def __init__(self, path: Path):
        self.path, self._end = path, 0
        try:
            self._file = open(path, "w+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error, "writes") from None

    def append(self, values: np.ndarray) -> int:
        """Write an array behind what is there, and return the byte where it begins."""
        begin, data, done = self._end, memoryview(np.ascontiguousarray(values)).cast("B"), 0
        try:
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], begin + done)
        except OSError as error:
            raise self._failed(error, "writes") from None
        # The disk begins to write: dirty pages cannot be dropped where memory is capped.
        advise(self._file.fileno(), begin, len(data), "dontneed")
        self._end = begin + len(data)
        return begin

    def read(self, position: int, out: np.ndarray) -> None:
        """Fill a (num,) array from a byte on."""
        view, done = memoryview(out).cast("B"), 0
        try:
            while done < len(view):
                count = os.preadv(self._file.fileno(), [view[done:]], position + done)
                if not count:
                    raise GNNScaleError(f"{self.path}: ends before byte {position + len(view)}: start the run again")
                done += count
        except OSError as error:
            raise self._failed(error, "reads") from None

    def clear(self) -> None:
        """Forget what was written: the next array lies at the beginning again."""
        self._end = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _failed(self, error: OSError, does: str) -> GNNScaleError:
        return GNNScaleError(
            f"{self.path}: evaluation {does} {self._end} bytes of edges and more here, and cannot "
            f"({error.strerror or error}); give EvaluationOptions(scratch=<a folder on another disk>) "
            "(evaluation.scratch=)"
        )
