"""One host's rows and what is kept beside them, in memory that its processes share."""

import uuid
from typing import NamedTuple

import numpy as np
import psutil

from ..errors import PlacementError
from ..jit import kernel
from ..memory import format_bytes
from ..placement.shared_rows import RowHandle, SharedRows
from ..rng import GOLDEN, combine, mix64

HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
STEP = 2.0**-31  # of 32 random bits to [0, 2)


@kernel
def fill_initial(out, nodes, key, scale):
    """Fill rows with values uniform in [-scale, scale).

    Args:
        out: (num, dim) floating, filled in place.
        nodes: (num,) integers that the values go by.
        key: uint64, of the seed.
    """
    for i in range(len(nodes)):
        node_key = combine(key, nodes[i])
        for pair in range((out.shape[1] + 1) // 2):
            random = mix64(node_key + np.uint64(pair) * GOLDEN)  # SplitMix64 itself: its state moves by GOLDEN
            out[i, 2 * pair] = (np.float64(random >> HALF) * STEP - 1.0) * scale
            if 2 * pair + 1 < out.shape[1]:
                out[i, 2 * pair + 1] = (np.float64(random & LOW) * STEP - 1.0) * scale


def default_scale(dim: int) -> float:
    """Return the scale at which a row's expected squared length is 1."""
    return float(np.sqrt(3.0 / max(1, dim)))


_COUNTER = "counter"


class SharedColumn(NamedTuple):
    """One array of a table: its width and dtype."""

    width: int
    dtype: str


class SharedTable:
    """Named arrays with the same number of rows, zero at first, writable by all processes of the host.

    They have no name on the system: they are gone with the last process that maps them, however it ends. A process that
    was forked after they were made has them already.

    Attributes:
        token: Token that identifies these rows on this host.
        arrays: Maps a name to its (num_rows, width) array.
        counter: (1,) int64 counter of the whole table.
    """

    def __init__(self, token: str, rows: dict[str, SharedRows]):
        self.token, self._rows = token, rows
        self.arrays = {name: shared.array for name, shared in rows.items() if name != _COUNTER}
        self.counter = rows[_COUNTER].array[0]

    @classmethod
    def create(cls, num_rows: int, columns: dict[str, SharedColumn], what: str, remedy: str) -> "SharedTable":
        """Make the arrays.

        Args:
            num_rows: >= 0.
            columns: name to width and dtype.
            what, remedy: for the error.

        Raises:
            PlacementError: they need more memory than is free here; raised before any is taken.
        """
        needed, free = table_bytes(num_rows, columns), psutil.virtual_memory().available
        if needed > free:
            raise PlacementError(
                f"{what}: {num_rows} rows need {format_bytes(needed)} of shared memory on this host, "
                f"{format_bytes(free)} are free: {remedy}"
            )
        rows = {name: SharedRows.create(num_rows, width, dtype) for name, (width, dtype) in columns.items()}
        rows[_COUNTER] = SharedRows.create(1, 1, np.int64)
        return cls(uuid.uuid4().hex, rows)

    @property
    def handle(self) -> tuple[str, dict[str, RowHandle]]:
        """What `attach` of another process of the host needs; good while this process lives."""
        return self.token, {name: shared.handle for name, shared in self._rows.items()}

    @classmethod
    def attach(cls, handle: tuple[str, dict[str, RowHandle]]) -> "SharedTable":
        """Map the arrays of another process.

        Raises:
            PlacementError: that process has ended.
        """
        token, handles = handle
        return cls(token, {name: SharedRows.attach(one, write=True) for name, one in handles.items()})

    def close(self) -> None:
        """Let go of the arrays; others that map them keep them."""
        for shared in self._rows.values():
            shared.release()
        self._rows, self.arrays = {}, {}


def table_bytes(num_rows: int, columns: dict[str, SharedColumn]) -> int:
    """Return what the arrays of a table take."""
    return num_rows * sum(width * np.dtype(dtype).itemsize for width, dtype in columns.values())
