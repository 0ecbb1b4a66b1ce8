"""Feature rows of one batch, gathered piece by piece while the batch still grows."""

import threading

import numpy as np
import torch

from ..partition_store.features import stack_rows
from ..sampler.minibatch import MiniBatch, sparse_rows_to_torch
from .buffer_pool import BufferPool
from .operators import FetchOperator


class RowSize:
    """Rows of the largest batch so far: how much room the next one is given at first."""

    def __init__(self):
        self.largest = 0


class RowBuffer:
    """Room for the rows of a batch whose size is not known yet; several threads may gather pieces at once.

    Memory is taken at the first piece, for as many rows as the largest batch so far had. A piece that does not fit gets
    memory of its own, and the batch is then assembled in a copy; after the first batches this is rare.

    Args:
        fetch: Gathers rows.
        pool: Pool that the memory comes from.
        size: Largest size so far; shared by the batches of a workflow.
    """

    def __init__(self, fetch: FetchOperator, pool: BufferPool, size: RowSize):
        self._fetch, self._pool, self._size = fetch, pool, size
        self._rows: np.ndarray | None = None
        self._pieces: dict[tuple[int, int], object] = {}  # (first row, end): rows
        self._lock = threading.Lock()

    def gather(self, nodes: np.ndarray, first: int, total: int | None) -> None:
        """Gather the rows first, first + 1, ... of the batch.

        Args:
            nodes: (num,) store ids.
            first: place of the first one in the batch.
            total: rows of the whole batch, None: not known yet.
        """
        end = first + len(nodes)
        if first == end:
            return
        if self._fetch.is_sparse:
            self._pieces[first, end] = self._fetch.gather(nodes)
            return
        with self._lock:
            if self._rows is None:
                self._rows = self._take(max(end, self._size.largest) if total is None else total)
            room = self._rows[first:end] if end <= len(self._rows) else None
        if room is None:
            room = self._take(len(nodes))
            self._pieces[first, end] = room
        self._fetch.gather(nodes, out=room)

    def attach(self, batch: MiniBatch) -> None:
        """Give the batch its rows, all of which are gathered."""
        total = batch.num_nodes
        self._size.largest = max(self._size.largest, total)
        if self._fetch.is_sparse:
            pieces = [self._pieces[place] for place in sorted(self._pieces)]
            batch.x_csr = sparse_rows_to_torch(stack_rows(pieces or [self._fetch.gather(np.empty(0, np.int64))]))
            return
        rows = self._take(0) if self._rows is None else self._rows
        if self._pieces:
            rows = self._take(total)
            kept = min(self._pieces)[0]
            rows[:kept] = self._rows[:kept]
            for (first, end), piece in self._pieces.items():
                rows[first:end] = piece
        batch.x_dense = torch.from_numpy(rows[:total])

    def _take(self, num_rows: int) -> np.ndarray:
        return self._pool.take((num_rows, self._fetch.dim), self._fetch.dtype)
