"""The row caches of a hub: what its requests tell workers, and how their answers are made whole."""

import asyncio
from typing import Any

from .messages import GroupHeader, GroupPayload, Table
from .versioned_cache import TrainerCache
from .worker_view import CacheUpdate


class HubCaches:
    """One `TrainerCache` for each feature table that batches of a hub are made of.

    Args:
        num_rows: that each keeps, 0: none.
        policy: see `TrainerCache`.
    """

    def __init__(self, num_rows: int, policy: str):
        self._num_rows, self._policy = num_rows, policy
        self._caches: dict[str, TrainerCache] = {}

    def begin(self, table: Table | None, worker: int) -> CacheUpdate | None:
        """Return what goes along with a request to a worker, None where all rows travel."""
        if not self._num_rows or table is None:
            return None
        cache = self._caches.get(table.name)
        if cache is None:
            kept = min(self._num_rows, table.num_rows)
            cache = self._caches[table.name] = TrainerCache(
                table.num_rows, kept, table.dim, table.dtype, self._policy, sparse_width=table.sparse_width
            )
        return cache.begin(worker)

    async def complete(
        self, table: Table, update: CacheUpdate, header: GroupHeader, payload: GroupPayload
    ) -> GroupPayload | None:
        """Return an answer with the rows that were not sent; None where nobody waits for it."""
        cache, group = self._caches[table.name], payload.group
        rows: Any = await asyncio.get_running_loop().run_in_executor(
            None, cache.complete, update.request, header.version, group.union, payload.missing, payload.rows
        )
        return None if rows is None else GroupPayload(group, None, rows)

    def cancel(self, table: Table, update: CacheUpdate) -> None:
        """Wait for a request no longer."""
        self._caches[table.name].cancel(update.request)

    def forget(self, worker: int) -> None:
        """Let go of a worker that ended."""
        for cache in self._caches.values():
            cache.forget(worker)

    def counts(self) -> dict[str, int]:
        """Return bytes of ids that were sent to workers."""
        return {"update_bytes": sum(cache.counts.update_bytes for cache in self._caches.values())}
