"""Rows of a block shared out over threads: compiled loops release the interpreter, so plain threads suffice."""

import os
from concurrent.futures import ThreadPoolExecutor, wait

import numba
import numpy as np

MIN_ENTRIES = 1 << 15  # below this many entries a thread costs more than it saves


def num_cores() -> int:
    """Return how many threads the partitioners use: the cores of this process, at most NUMBA_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, numba.config.NUMBA_NUM_THREADS))


class RowThreads:
    """Runs kernels over ranges of rows; a kernel must give every row the same result whatever range it stands in.

    Args:
        num_threads: >= 1; None: `num_cores()`.
    """

    def __init__(self, num_threads: int | None = None):
        self.num_threads = num_cores() if num_threads is None else num_threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, kernel, indptr: np.ndarray, *args) -> list:
        """Call kernel(start_row, stop_row, *args) so that all rows are covered; return the results in row order.

        Args:
            kernel: a compiled function.
            indptr: (num_rows + 1,), by which the ranges get about equal numbers of entries.
        """
        num_rows = len(indptr) - 1
        num_entries = int(indptr[-1] - indptr[0])
        ranges = min(self.num_threads, num_entries // MIN_ENTRIES)
        if ranges <= 1:
            return [kernel(0, num_rows, *args)]
        targets = indptr[0] + num_entries * np.arange(1, ranges) // ranges
        bounds = [0, *np.searchsorted(indptr, targets).tolist(), num_rows]
        return self.map(lambda i: kernel(bounds[i], bounds[i + 1], *args), range(ranges))

    def share(self, kernel, num_entries: int, *args) -> list:
        """Call kernel(share, num_shares, *args) for all shares of the nodes; return the results in order.

        Args:
            kernel: a compiled function that reads all entries and writes to nodes of its own share alone.
            num_entries: what it reads; few of them make one share.
        """
        num_shares = min(self.num_threads, max(1, num_entries // MIN_ENTRIES))
        if num_shares == 1:
            return [kernel(0, 1, *args)]
        return self.map(lambda share: kernel(share, num_shares, *args), range(num_shares))

    def map(self, function, items) -> list:
        """Call function(item) for each item, several at a time, this thread too; return the results in order."""
        items = list(items)
        if self.num_threads == 1 or len(items) <= 1:
            return [function(item) for item in items]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="gnnscale-rows")
        futures = [self._pool.submit(function, item) for item in items[1:]]
        try:
            results = [function(items[0])]
            for item, future in zip(items[1:], futures, strict=True):  # what no thread has begun is done here
                results.append(function(item) if future.cancel() else future.result())
            return results
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
