"""The rows of one worker: an actor of Ray's that fills, gathers and steps them."""

import os
from typing import NamedTuple

import numpy as np

from ..triton_kernels.gather_rows import gather_rows
from .initial_rows import fill_initial
from .optimizers import SparseAdam, SparseSGD
from .ownership import Ownership
from .shared_table import Column


class Initial(NamedTuple):
    """The initial values of rows.

    Attributes:
        key: uint64 key derived from the seed.
        scale: Scale of the values.
        node_keys: (num_nodes,) integers that determine the values; None: the ids.
    """

    key: int
    scale: float
    node_keys: np.ndarray | None = None

    def of(self, ids: slice) -> "Initial":
        """Return what the rows of some ids go by."""
        keys = np.arange(ids.start, ids.stop) if self.node_keys is None else np.asarray(self.node_keys[ids])
        return self._replace(node_keys=keys)


class RowShard:
    """The rows that one worker owns, with the optimizer's state beside them; an actor, or a plain object in tests.

    Calls run one after another; those of one trainer run in the order in which it makes them.

    Args:
        num_rows: Number of rows, >= 0.
        columns: Maps a name to its width and dtype.
        optimizer: Optimizer that steps the rows.
        initial: (first row, initial values of the rows from there on) of each range.
    """

    def __init__(
        self,
        num_rows: int,
        columns: dict[str, Column],
        optimizer: SparseAdam | SparseSGD,
        initial: list[tuple[int, Initial]],
    ):
        self._arrays = {name: np.zeros((num_rows, width), dtype) for name, (width, dtype) in columns.items()}
        self._optimizer, self._pushes = optimizer, 0
        for first, values in initial:
            rows = self._arrays["rows"][first : first + len(values.node_keys)]
            fill_initial(rows, np.array(values.node_keys), np.uint64(values.key), values.scale)

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def pull(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return (num, width) of an array; rows: (num,) int64."""
        return gather_rows(self._arrays[name], np.array(rows))

    def push(self, rows: np.ndarray, gradients: np.ndarray) -> None:
        """Step rows; rows: (num,) int64, distinct, may be empty; gradients: (num, dim)."""
        self._pushes += 1
        arrays = self._arrays
        # Copies: what Ray shares is read-only, for which compiled kernels would be compiled once more.
        self._optimizer.apply(
            np.array(rows), np.array(gradients), arrays["rows"], arrays.get("moments"), arrays.get("counts"),
            self._pushes,
        )  # fmt: skip

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Set rows of an array; rows: (num,) int64, values: (num, width)."""
        self._arrays[name][rows] = values

    def pushes(self, count: int | None = None) -> int:
        """Return the pushes so far, after setting them where a count is given."""
        if count is not None:
            self._pushes = count
        return self._pushes


class ShardSpec(NamedTuple):
    """All shards of a table, as described to the process that starts them.

    Attributes:
        token: Token of the table; shards are named after it.
        address: Address of Ray; None: Ray is started.
        timeout_s: How long Ray or the shards may stay silent, seconds.
        part_offsets, owner_of_part: See `Ownership`.
        num_shards: Number of shards, each of which owns rows.
        columns, optimizer, initial: See `RowShard`; `initial` covers all nodes.
        notes: Folder in which the processes that use a Ray that was started here note that they do.
    """

    token: str
    address: str | None
    timeout_s: float
    part_offsets: np.ndarray
    owner_of_part: list[int]
    num_shards: int
    columns: dict[str, Column]
    optimizer: SparseAdam | SparseSGD
    initial: Initial
    notes: str | None

    @property
    def ownership(self) -> Ownership:
        """Which shard owns which ids."""
        return Ownership(self.part_offsets, self.owner_of_part, self.num_shards)

    def name(self, shard: int) -> str:
        """Return the name of a shard's actor."""
        return f"{self.token}-rows-{shard}"

    def arguments(self, shard: int) -> tuple:
        """Return the arguments of a shard."""
        ownership = self.ownership
        initial = [(rows.start, self.initial.of(ids)) for _, ids, rows in ownership.parts(shard)]
        return ownership.num_rows(shard), self.columns, self.optimizer, initial
