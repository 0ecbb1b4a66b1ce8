"""`source=ray`: batches prepared by workers on other machines, as plain settings."""

import tempfile
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ...errors import GNNScaleError, check_count
from .cluster import ask_for_token, import_ray, join_ray, leave_ray

CONSTRUCTIONS = ("local", "distributed")
CACHE_POLICIES = ("lru", "sieve")
SLOW_S = 10.0  # a group of batches is slow after so long at least


class HubSettings(NamedTuple):
    """What a hub goes by; see `RayWorkers`.

    Attributes:
        shared: it is an actor, whose ranks are other processes.
    """

    batches_per_group: int = 1
    credits: int = 4
    timeout_s: float = 60.0
    cache_rows: int = 0
    cache_policy: str = "lru"
    slow_s: float = SLOW_S
    shared: bool = False


@dataclass
class Meeting:
    """What the ranks of a run agree about before they use Ray; the sources of one rank share it.

    Attributes:
        run: names the run.
        folder: where the ranks of one machine meet, or None: each connects by itself.
        turn: how often they have met; every source that is opened is a turn, on all ranks alike.
    """

    run: str
    folder: str | None = None
    turn: int = 0


@dataclass(frozen=True)
class RayWorkers:
    """Workers that are actors of Ray's, on this machine or on a cluster; see `RaySource`.

    Workers read the store by its path: on a cluster it lies at the same path on every machine.

    Args:
        address: "host:port" of a Ray cluster, "auto" for the one that this machine belongs to; its workers from
            `gnnscale prepare` are used where there are any. None: Ray is started on this machine, and ends with the
            training.
        num_workers: workers, >= 1, where none are prepared.
        construction: "local": a worker draws from what it holds; "distributed": with batches that cross parts, rows of
            the graph are held by their owners, and neighbours are asked of them.
        worker_memory_bytes: most bytes of parts that a worker holds, by which it swaps them; None: those it is dealt.
        batches_per_group: batches of a trainer node that are made in one request and share their rows, >= 1.
        cache_rows: feature rows that each trainer node keeps, which do not travel again; 0: none.
        cache_policy: which of them go first.
        credits: requests of a trainer node under way or ready, >= 1; None: two for each worker.
        replicate_bytes: of rows of the nodes of highest degree that every worker holds, under "distributed".
        store_bytes: most bytes of batches in shared memory, of a Ray that is started.
        timeout_s: seconds for which an address, the hub, all workers, or a batch on its way may be silent. A worker
            that is silent for so long loses its batches to the others.
        slow_s: after which a group that takes four times as long as any before is given to a second worker.

    Raises:
        ValueError: an argument is out of range.
    """

    address: str | None = None
    num_workers: int = 2
    construction: str = "local"
    worker_memory_bytes: int | None = None
    batches_per_group: int = 1
    cache_rows: int = 0
    cache_policy: str = "lru"
    credits: int | None = None
    replicate_bytes: int = 0
    store_bytes: int = 1 << 30
    timeout_s: float = 60.0
    slow_s: float = SLOW_S
    in_process: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("num_workers", "batches_per_group", "store_bytes"):
            check_count(name, getattr(self, name))
        for name in ("worker_memory_bytes", "credits"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("cache_rows", "replicate_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        for name, choices in (("construction", CONSTRUCTIONS), ("cache_policy", CACHE_POLICIES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.replicate_bytes and self.construction == "local":
            raise ValueError(
                f'replicate_bytes={self.replicate_bytes} is of construction="distributed": '
                'under "local" no worker asks another'
            )
        for name in ("timeout_s", "slow_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)!r}")

    @property
    def batches_ahead(self) -> int:
        """One group for each worker, and one more that trains meanwhile."""
        return self.batches_per_group * (self.num_workers + 1)

    def for_hub(self, num_workers: int, shared: bool) -> HubSettings:
        """Return what a hub of so many workers goes by."""
        credits = 2 * num_workers if self.credits is None else self.credits
        return HubSettings(
            self.batches_per_group, credits, self.timeout_s, self.cache_rows, self.cache_policy, self.slow_s, shared
        )

    def connect(self, place) -> Any:
        """Return what makes this rank's source; every rank calls it.

        Args:
            place: a `RankPlace`.

        Raises:
            GNNScaleError: Ray is not installed, or the address does not answer.
        """
        if self.address is None:
            ask_for_token()
        import_ray()
        meeting: Any = None
        if place.rank == 0:
            try:
                meeting = self._meet(place)
            except GNNScaleError as error:  # the others must not wait for it
                meeting = str(error)
        meeting = place.share(meeting)
        if isinstance(meeting, str):
            raise GNNScaleError(meeting)
        from .ray_source import RaySource

        return partial(RaySource, settings=self, meeting=meeting, place=place._replace(share=None))

    def _meet(self, place) -> Meeting:
        run = uuid.uuid4().hex[:12]
        if self.address is None:
            if place.world_size > place.num_local:
                raise GNNScaleError(
                    "source=ray without an address starts Ray on one machine, the ranks are on several: start a "
                    "cluster with `ray start`, and give source.address="
                )
            return Meeting(run, tempfile.mkdtemp(prefix="gnnscale-ray-") if place.world_size > 1 else None)
        join_ray(self.address, self.timeout_s, self.store_bytes)
        leave_ray()
        return Meeting(run)
