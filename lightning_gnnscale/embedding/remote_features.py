"""Features that lie on the hosts of a run, each host's parts in its own memory."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..triton_kernels.gather_rows import RowCode, gather_rows
from .owned_rows import OwnedRows, _as_array
from .row_exchange import Ownership, checked_nodes
from .shared_table import Column, SharedTable

_BLOCK_ROWS = 1 << 14  # decoded at a time


class RemoteFeatures(OwnedRows):
    """A `FeatureTable` whose rows are owned by hosts: own rows through shared memory, others by an uneven all-to-all.

    Give it to a LightningModule as `inputs`: it gathers once in the forward of every training step, and ranks without
    a batch enter by `skip`. Evaluation layer by layer reads a table that the owners write, and enters nothing.

    Args:
        source: (num_nodes, dim) array or memory map, of which each host reads the rows of its own parts, once.
        part_offsets, hosts: see `OwnedRows`.
        storage: The form of a source of codes, (num_nodes, storage.row_bytes) uint8; None: its rows are plain numbers.

    Raises:
        ValueError: source is not two-dimensional, or part_offsets or storage do not fit it.

    Cost: a host keeps its own rows. A gather is three exchanges: counts, ids and rows; each row that another host
        owns travels once, beside the 8 bytes of its id.
    Source: Zheng et al., DistDGL, section 5.4.
    """

    is_sparse = False
    what = "RemoteFeatures"

    def __init__(
        self,
        source: np.ndarray,
        part_offsets: np.ndarray | None = None,
        hosts: Sequence[int] | None = None,
        storage: RowCode | None = None,
    ):
        if getattr(source, "ndim", 0) != 2:
            raise ValueError(f"source must be a (num_nodes, dim) array, got {type(source).__name__}")
        super().__init__(source.shape[0], source.shape[1], source.dtype, part_offsets, hosts)
        self._source, self._stored = source, Column(self.dim, self.dtype.str)
        self.storage = storage
        if storage is not None:  # rows lie and travel as codes, and are decoded where they are read
            if source.dtype != np.uint8 or source.shape[1] != storage.row_bytes:
                raise ValueError(f"source must be {storage.row_bytes} bytes of codes a row, got {source.shape[1]}")
            self.dim, self.dtype = storage.dim, np.dtype(np.float32)

    @classmethod
    def for_store(cls, store, **options) -> "RemoteFeatures":
        """Return the features of a `PartitionStore`, owned by its parts.

        Raises:
            ValueError: it has no features, or sparse ones.
        """
        if store.features is None or store.features.is_sparse:
            kind = "none" if store.features is None else "sparse ones"
            raise ValueError(
                f"RemoteFeatures holds dense features, the store {store.root} has {kind}: read them from it"
            )
        return cls(store.features.array, store.part_offsets, storage=store.features.storage, **options)

    @property
    def num_rows(self) -> int:
        return self.num_nodes

    def gather(self, nodes: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy rows; with several hosts a collective that every rank enters.

        Args:
            nodes: (num,) integers in [0, num_rows); may be empty.
            out: (num, dim) of `dtype`, C-contiguous, filled in place where given.

        Returns:
            (num, dim), bit for bit what is stored; codes decoded to float32.

        Raises:
            ValueError: a node is out of range.
            StrategyError: another rank was lost, or did not enter.
        """
        ids = checked_nodes(_as_array(nodes), self.num_nodes)
        return self._read(ids, np.empty((len(ids), self.dim), self.dtype) if out is None else out)

    def __call__(self, nodes: Tensor) -> Tensor:
        """Return the rows of a batch's nodes on their device."""
        return self.pull(nodes).to(nodes.device)

    def step(self) -> None:
        """End a training step: nothing is learned."""

    def skip(self) -> None:
        """Take part in a training step without a batch."""
        if not self.is_local:
            self.pull(torch.empty(0, dtype=torch.int64))

    def rows_here(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (ids, their rows) of this rank's share of its host's rows, codes decoded a block at a time."""
        for ids, rows in super().rows_here():
            if self.storage is None:
                yield ids, rows
                continue
            for first in range(0, len(rows), _BLOCK_ROWS):
                block = rows[first : first + _BLOCK_ROWS]
                start = ids.start + first
                decoded = gather_rows(block, np.arange(len(block)), code=self.storage)
                yield slice(start, start + len(block)), decoded

    def _columns(self) -> dict[str, Column]:
        return {} if self.is_local else {"rows": self._stored}  # one host reads the source itself

    def _read(self, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        if self.storage is None:
            return super()._read(ids, out)
        stored = super()._read(ids, self._pool.take((len(ids), self._source.shape[1]), self._source.dtype))
        return gather_rows(stored, np.arange(len(ids)), out, self.storage)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"rows": self._source} if self.is_local else super()._arrays()

    def _fill(self, share: list[tuple[slice, slice]], before: tuple[SharedTable, Ownership] | None = None) -> None:
        for ids, rows in share if self._columns() else ():
            self._arrays()["rows"][rows] = self._source[ids]
