"""`source=ray`: batches prepared by workers on other machines, as plain settings."""

import tempfile
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..errors import GNNScaleError, check_count
from .cluster import Meeting, ask_for_token, import_ray, join_ray, leave_ray
from .messages import SLOW_S, HubSettings
from .ray_source import RaySource

CONSTRUCTIONS = ("local", "distributed")
CACHE_POLICIES = ("lru", "sieve")


@dataclass(frozen=True)
class RayWorkers:
    """Workers that are Ray actors, on this machine or on a cluster; see `RaySource`.

    Workers open the store by its path. On a cluster it must lie at the same path on every machine.

    Args:
        address: "host:port" of a Ray cluster, or "auto" for the cluster that this machine belongs to. If
            `gnnscale prepare` has started workers there, they are used. None: Ray is started on this machine and ends
            with the training.
        num_workers: Number of workers to start where none are running, >= 1.
        construction: "local": a worker draws from the parts it holds. "distributed": for batches that cross parts; each
            worker owns some rows of the graph, and workers ask the owners for neighbours.
        worker_memory_bytes: Upper bound on the bytes of parts that a worker keeps in memory; parts beyond it are
            swapped out. None: a worker keeps every part it was dealt.
        batches_per_group: Batches of a trainer node that are made in one request and share their rows, >= 1.
        cache_rows: Feature rows that each trainer node keeps, so that they do not travel again; 0: none.
        cache_policy: Which cached rows are dropped first.
        credits: Requests of a trainer node that may be under way or ready at a time, >= 1; None: two per worker.
        replicate_bytes: Bytes of rows that every worker holds in addition under "distributed": those of the nodes of
            highest degree.
        store_bytes: Shared memory for batches of a Ray that is started here, bytes.
        timeout_s: How long an address, the hub, all workers together, or a batch on its way may stay silent, seconds. A
            worker that is silent for as long loses its batches to the others.
        slow_s: Least time before a slow group is given to a second worker as well, seconds. A group is slow once it
            takes four times as long as any before; until the first group is done, six times slow_s.

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
