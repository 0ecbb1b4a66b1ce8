"""A row cache on the trainer's node whose contents the workers know, so that they send only what is missing.

Contents have a version, one more at each change. A request takes along what changed since the version that its worker
acknowledged; the answer names the version that it was made for and the rows that were missing there. Row memory that
`versions` no longer hold is kept until every request that may count on it is answered or forgotten:

    update = cache.begin(worker)                                # trainer; sent with the request
    version, missing = view.missing(update, union)              # worker; rows[missing] are sent back with both
    rows = cache.complete(update.request, version, union, missing, rows)   # trainer; None: it was answered already

A request has a number of its own, so that an answer that comes twice, or after its worker was forgotten, is seen as
one that nobody waits for. Neither order nor delivery is assumed: a view that misses a change, because its worker was
started again, reports that it knows nothing. All rows are then sent, and the whole contents with the next request.
Rows must not change while they are cached: learnable rows are not cached here.
"""

import secrets
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import GNNScaleError, check_count, short
from ..sampler.protocol import Allocate
from .cache_contents import POLICIES, SENT, CacheContents, RowSlots, slots_of

NOTHING = -1  # the version of a view that knows no contents


class Change(NamedTuple):
    """Changes of the contents from one version to the next.

    Attributes:
        version: Version that the change leads to.
        added, removed: Ids, int32 where they fit; no id is in both.
    """

    version: int
    added: np.ndarray
    removed: np.ndarray


class CacheUpdate(NamedTuple):
    """What a request says about the cache.

    Attributes:
        cache: Number of the cache; each cache has its own.
        request: Number of the request in its cache.
        version: Version of the contents once the update is applied.
        contents: Ids in the cache at that version; None where the changes lead there.
        changes: Changes since the version that the worker acknowledged, in order.
    """

    cache: int
    request: int
    version: int
    contents: np.ndarray | None
    changes: tuple[Change, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the ids."""
        whole = 0 if self.contents is None else self.contents.nbytes
        return whole + sum(change.added.nbytes + change.removed.nbytes for change in self.changes)


class Missing(NamedTuple):
    """What a worker answers with.

    Attributes:
        version: Version of the view.
        mask: (num_union,) bool, True for rows to be sent. `TrainerCache.complete` also takes `np.packbits(mask)`.
    """

    version: int
    mask: np.ndarray


class WorkerView:
    """What a worker knows of one trainer node's cache; a view for each cache. May be used by several threads.

    Args:
        num_nodes: ids are below it.

    Cost: a byte a node.
    """

    def __init__(self, num_nodes: int):
        self._cached = np.zeros(num_nodes, bool)
        self._cache: int | None = None
        self.version = NOTHING
        self._lock = threading.Lock()

    def apply(self, update: CacheUpdate) -> None:
        """Apply an update; one that is older than the view, or came before, changes nothing."""
        with self._lock:
            self._apply(update)

    def missing(self, update: CacheUpdate, union: np.ndarray) -> Missing:
        """Return which rows must be sent in answer to the request of an update, which is applied first.

        Args:
            update: came with the request.
            union: (num_union,) ids.
        """
        with self._lock:
            self._apply(update)
            return Missing(self.version, ~self._cached[union])

    def _apply(self, update: CacheUpdate) -> None:
        if update.cache != self._cache:
            self._clear()
            self._cache = update.cache
        if update.contents is not None:
            if update.version > self.version:
                self._clear()
                self._cached[update.contents] = True
                self.version = update.version
            return
        if update.version > self.version and (not update.changes or update.changes[0].version > self.version + 1):
            self._clear()
            return
        for change in update.changes:
            if change.version > self.version:
                self._cached[change.removed] = False
                self._cached[change.added] = True
                self.version = change.version

    def _clear(self) -> None:
        self._cached[:] = False
        self.version = NOTHING


@dataclass
class CacheCounts:
    """Counts of what was sent between the trainer's node and the workers.

    Attributes:
        requests: Requests that were answered.
        rows_asked, rows_sent: Rows in the unions of the requests, and those among them that were missing and thus sent.
        asked_bytes, sent_bytes: Bytes of these rows.
        update_bytes: Bytes of ids, of contents and changes, sent to workers.
        unwanted: Answers that nobody waited for.
    """

    requests: int = 0
    rows_asked: int = 0
    rows_sent: int = 0
    asked_bytes: int = 0
    sent_bytes: int = 0
    update_bytes: int = 0
    unwanted: int = 0


class _Request(NamedTuple):
    worker: Hashable
    version: int


class TrainerCache:
    """Rows kept on a trainer's node for the answers of several workers. May be used by several threads.

    Args:
        num_nodes: Upper bound of the node ids, exclusive.
        capacity_rows: Largest number of rows in a version, in [1, 2**31).
        dim, dtype: Length and dtype of a row.
        policy: "lru": drops the row that was least recently read. "sieve": see `FeatureCache`. The rows of a union are
            read at once; the heaviest of them counts as the last one read and stays longest.
        spare_rows: Largest number of rows that have left the newest version but that a worker may still count on, >= 1.
            While there are that many, the contents stay as they are. None: a quarter of the capacity.
        sparse_width: Largest number of stored values in a sparse row; None: rows are dense.
        node_types: By node type an object with its `dim`, `dtype` and `sparse_width`, or None for a node type without
            features, whose rows are not kept; empty: all nodes have rows of one table.

    Raises:
        ValueError: an argument is out of its range.

    Cost: memory of capacity_rows + spare_rows rows, touched as it fills, and never more whatever the workers do; where
        rows differ by node type, as many of each type as were there at a time. In addition 58 bytes a row and 8 a
        node. Changes are kept back to the version that every worker has acknowledged, but never more than
        capacity_rows ids: a worker that is further behind gets the whole contents.
    Source: Waleffe et al., Armada, 2025, section on the feature cache. Differs: versions and retention are ours.
    """

    def __init__(
        self,
        num_nodes: int,
        capacity_rows: int,
        dim: int,
        dtype: np.dtype | type,
        policy: str = "lru",
        spare_rows: int | None = None,
        sparse_width: int | None = None,
        node_types: Sequence = (),
    ):
        check_count("capacity_rows", capacity_rows)
        spare_rows = max(1, capacity_rows // 4) if spare_rows is None else spare_rows
        check_count("spare_rows", spare_rows)
        if capacity_rows + spare_rows >= 1 << 31:
            raise ValueError(f"capacity_rows + spare_rows must be below 2**31, got {capacity_rows} + {spare_rows}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {short(policy)}")
        self.num_nodes = num_nodes
        self.capacity_rows, self.spare_rows, self.policy = int(capacity_rows), int(spare_rows), policy
        num_slots = self.capacity_rows + self.spare_rows
        self._slots: RowSlots = slots_of(num_slots, dim, dtype, sparse_width, node_types)
        self._contents = CacheContents(num_nodes, self.capacity_rows, self.spare_rows, policy)
        self._id_dtype = np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64
        self._number = secrets.randbits(62)
        self.version = 0
        self._changes: deque[Change] = deque()
        self._acknowledged: dict[Hashable, int] = {}
        self._requests: dict[int, _Request] = {}
        self._answering: set[int] = set()
        self._next_request = 0
        self.counts = CacheCounts()
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        """Rows in the newest version, at most capacity_rows."""
        return self._contents.num_live

    @property
    def num_retained(self) -> int:
        """Rows in memory that are not in the newest version, at most spare_rows."""
        return self._contents.num_retained

    @property
    def open_requests(self) -> int:
        """Requests that are waited for."""
        return len(self._requests)

    def begin(self, worker: Hashable) -> CacheUpdate:
        """Return the update of a new request; the rows of its version stay until it is completed or forgotten.

        Args:
            worker: names it among the workers.
        """
        with self._lock:
            number, self._next_request = self._next_request, self._next_request + 1
            self._requests[number] = _Request(worker, self.version)
            known = self._acknowledged.setdefault(worker, NOTHING)
            oldest = self._changes[0].version if self._changes else self.version + 1
            if known != NOTHING and oldest <= known + 1:
                changes = tuple(change for change in self._changes if change.version > known)
                update = CacheUpdate(self._number, number, self.version, None, changes)
            else:
                contents = self._contents.ids().astype(self._id_dtype)
                update = CacheUpdate(self._number, number, self.version, contents, ())
            self.counts.update_bytes += update.num_bytes
            return update

    def complete(
        self,
        request: int,
        version: int,
        union: np.ndarray,
        missing: np.ndarray,
        rows,
        allocate: Allocate = np.empty,
        weight: np.ndarray | None = None,
    ):
        """Put the rows of a union together, and let the cache learn from them.

        Args:
            request: Number of the request, from its update.
            version: Version of the worker's view.
            union: (num_union,) distinct ids.
            missing: (num_union,) bool, or its `np.packbits`.
            rows: The missing rows in order: (num_missing, dim), `SparseRows` or `TypedRows`.
            allocate: Allocates the result.
            weight: (num_union,) numbers >= 0, how likely each row is to be read again, for example the node's degree
                (`BatchGroup.weight`); None: rows earlier in the union count as heavier.

        Returns:
            (num_union, dim) rows, `SparseRows` or `TypedRows`; None where the request is not waited for: its answer
            came before, or its worker was forgotten.

        Raises:
            GNNScaleError: the answer counts on rows that its version does not have; the request stays open.
            ValueError: there are more or fewer rows than missing ones, or of another form; likewise.
        """
        if not self._claim(request):
            return None
        try:
            places = self._places(request, version, union, missing, rows, weight)
            if places is None:
                return None
            # Nothing here is overwritten meanwhile: the request is open, and holds what its version had.
            assembled = self._slots.assemble(places, rows, allocate)
        except BaseException:
            with self._lock:
                self._answering.discard(request)
            raise
        with self._lock:
            if self._requests.pop(request, None) is None:  # forgotten while its rows were copied
                self._unwanted(request)
                return None
            self._answering.discard(request)
            self._count(places, rows, assembled)
            self._plan(union, assembled, weight)
        return assembled

    def cancel(self, request: int) -> None:
        """Stop waiting for a request, for example one that its worker answered with an error."""
        with self._lock:
            self._requests.pop(request, None)
            self._release()

    def forget(self, worker: Hashable) -> None:
        """Stop waiting for a worker that has ended; under the same name it may begin again."""
        with self._lock:
            self._requests = {number: open_ for number, open_ in self._requests.items() if open_.worker != worker}
            self._acknowledged.pop(worker, None)
            self._release()
            self._trim()

    def _claim(self, request: int) -> bool:
        with self._lock:
            if request not in self._requests or request in self._answering:
                self.counts.unwanted += 1
                return False
            self._answering.add(request)
            return True

    def _places(self, request: int, version: int, union, missing, rows, weight) -> np.ndarray | None:
        """Return where each row of the union is, and note the acknowledgement; None where nobody waits any more."""
        mask = missing if missing.dtype == np.bool_ else np.unpackbits(missing, count=len(union)).view(np.bool_)
        num_missing, num_rows = int(np.count_nonzero(mask)), getattr(rows, "num_rows", None)
        num_rows = len(rows) if num_rows is None else num_rows
        if len(mask) != len(union) or num_rows != num_missing:
            raise ValueError(f"rows must be the {num_missing} missing ones of {len(union)}, got {num_rows}")
        if weight is not None and len(weight) != len(union):
            raise ValueError(f"weight must be of {len(union)} rows, got {len(weight)}")
        if len(union) and not (union.min() >= 0 and union.max() < self.num_nodes):
            raise ValueError(f"union must hold ids in [0, {self.num_nodes}), got {union.min()} to {union.max()}")
        with self._lock:
            opened = self._requests.get(request)
            if opened is None:
                self._unwanted(request)
                return None
            if version != NOTHING and not opened.version <= version <= self.version:
                raise GNNScaleError(
                    f"worker {opened.worker} answered for version {version} of the row cache, but was asked for one in "
                    f"[{opened.version}, {self.version}]"
                )
            places = np.empty(len(union), np.int64)
            absent = self._contents.locate(union, mask, SENT, places)
            if version == NOTHING and num_missing < len(union):
                absent = int(mask.argmin())
            if absent >= 0:
                raise GNNScaleError(
                    f"worker {opened.worker} sent no row of node {union[absent]}, which version {version} of the row "
                    f"cache does not have"
                )
            known = self._acknowledged.get(opened.worker, NOTHING)
            self._acknowledged[opened.worker] = NOTHING if version == NOTHING else max(known, version)
        return places

    def _unwanted(self, request: int) -> None:
        self._answering.discard(request)
        self.counts.unwanted += 1

    def _plan(self, union: np.ndarray, assembled, weight: np.ndarray | None) -> None:
        """Make the next version, which has what the policy wants of this union and memory allows."""
        kept = self._slots.kept(assembled)
        if kept is not None:
            union, weight = union[kept], None if weight is None else weight[kept]
        added, removed, slots, positions = self._contents.plan(union, self.version + 1, self._oldest(), weight)
        positions = positions if kept is None else kept[positions]
        self._slots.store(slots, positions, assembled)
        if len(added) or len(removed):
            self.version += 1
            self._changes.append(Change(self.version, added.astype(self._id_dtype), removed.astype(self._id_dtype)))
        self._trim()

    def _release(self) -> None:
        self._contents.release(self._oldest())

    def _oldest(self) -> int | None:
        """Return the oldest version that an open request may count on."""
        return min((opened.version for opened in self._requests.values()), default=None)

    def _trim(self) -> None:
        """Drop changes that every worker knows, and the oldest ones once the contents take no more ids."""
        known = min(self._acknowledged.values(), default=self.version)
        size = sum(len(change.added) + len(change.removed) for change in self._changes)
        while self._changes and (self._changes[0].version <= known or size > self.capacity_rows):
            gone = self._changes.popleft()
            size -= len(gone.added) + len(gone.removed)

    def _count(self, places: np.ndarray, rows, assembled) -> None:
        counts = self.counts
        counts.requests += 1
        counts.rows_asked += getattr(assembled, "num_featured", len(places))
        counts.rows_sent += getattr(rows, "num_featured", int(np.count_nonzero(places >= SENT)))
        counts.asked_bytes += self._slots.num_bytes(assembled)
        counts.sent_bytes += self._slots.num_bytes(rows)
