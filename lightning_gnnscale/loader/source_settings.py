"""Settings of a rank's source of batches: plain values that open the source they describe."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..across_ranks import own_ranks
from ..errors import check_count, check_seconds, short
from ..memory import read_sizes
from ..traits import ASKING_THREADS
from .batch_maker import BatchMaker
from .batch_source import BatchSource
from .local_source import LocalSource
from .process_source import QUEUE_BYTES, TIMEOUT_S, ProcessSource
from .scheduling_policy import Policy, TwoLevelPolicy
from .staged_part import StagedPart
from .task_graph import Operators
from .task_source import TaskSource, machine_utilisation

SourceFactory = Callable[[Callable[[int], StagedPart], BatchMaker], BatchSource]


class RankPlace(NamedTuple):
    """Position of a process among those that train together.

    Attributes:
        rank, world_size: Rank among all processes, and their number.
        node: Number of its machine.
        local_rank, num_local: Rank among the processes of its machine, and their number.
        logical_ranks: Ranks by which an epoch is shared out, whoever computes them; None: as many as processes.
        share: Returns rank 0's value on every rank; a collective.
    """

    rank: int = 0
    world_size: int = 1
    node: int = 0
    local_rank: int = 0
    num_local: int = 1
    share: Callable[[Any], Any] = lambda value: value
    logical_ranks: int | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks by which an epoch is shared out."""
        return self.logical_ranks or self.world_size

    @property
    def ranks(self) -> range:
        """The logical ranks that this process computes."""
        return own_ranks(self.rank, self.world_size, self.num_ranks)


class SourceSettings(Protocol):
    """Settings of a `BatchSource`; plain values, the same on every rank."""

    @property
    def in_process(self) -> bool:
        """Whether it prepares batches in the training process, and reaches features there."""

    @property
    def batches_ahead(self) -> int:
        """Batches that are requested ahead of their use."""

    def connect(self, place: RankPlace) -> SourceFactory:
        """Return a factory of this rank's source, called with (stage, maker). Every rank calls this method.

        One whose machines hold parts under a cap may have `machine_bytes`, the least such cap, or None.

        Args:
            place: Place of this rank.
        """


def check_prefetch(prefetch_batches: int | None) -> None:
    """Raise ValueError unless a number of batches ahead is None or at least 1."""
    if prefetch_batches is not None:
        check_count("prefetch_batches", prefetch_batches)


@dataclass(frozen=True)
class Threads:
    """Threads of the training process, each of which prepares a whole batch; see `LocalSource`.

    Args:
        num_threads: >= 1; None: 1, or 4 where batches need rows of other machines.
        prefetch_batches: batches kept ready or under way, >= 1; None: num_threads + 1.

    Raises:
        ValueError: an argument is below 1.
    """

    num_threads: int | None = None
    prefetch_batches: int | None = None
    in_process = True

    def __post_init__(self):
        if self.num_threads is not None:
            check_count("num_threads", self.num_threads)
        check_prefetch(self.prefetch_batches)

    def settled(self, asks: bool) -> "Threads":
        """Return settings with a number of threads; asks: whether batches need rows of other machines."""
        if self.num_threads is not None:
            return self
        return replace(self, num_threads=ASKING_THREADS if asks else 1)

    @property
    def batches_ahead(self) -> int:
        """Batches requested ahead of their use: `prefetch_batches`, or one more than there are threads."""
        return self.prefetch_batches or (self.num_threads or 1) + 1

    def connect(self, place: RankPlace) -> SourceFactory:
        """Return the factory of this rank's `LocalSource`; nothing is started yet."""
        return partial(LocalSource, num_threads=self.num_threads or 1)


@dataclass(frozen=True)
class Processes:
    """Worker processes that map the store themselves and hand batches over in shared memory; see `ProcessSource`.

    Args:
        num_workers: processes of each rank, >= 1.
        queue_bytes: most bytes of ready batches in shared memory, each rank's; or a text such as "1GiB".
        timeout_s: longest time without an answer of any of them while one is waited for, seconds, > 0.
        prefetch_batches: batches kept ready or under way, >= 1; None: num_workers + 1.

    Raises:
        ValueError: an argument is out of range.
    """

    num_workers: int = 1
    queue_bytes: int | str = QUEUE_BYTES
    timeout_s: float = TIMEOUT_S
    prefetch_batches: int | None = None
    in_process = False

    def __post_init__(self):
        read_sizes(self, "queue_bytes")
        check_count("num_workers", self.num_workers)
        check_count("queue_bytes", self.queue_bytes)
        check_seconds("timeout_s", self.timeout_s)
        check_prefetch(self.prefetch_batches)

    @property
    def batches_ahead(self) -> int:
        """Batches requested ahead of their use: `prefetch_batches`, or one more than there are workers."""
        return self.prefetch_batches or self.num_workers + 1

    def connect(self, place: RankPlace) -> SourceFactory:
        """Return the factory of this rank's `ProcessSource`; no process is started yet."""
        return partial(
            ProcessSource, num_workers=self.num_workers, queue_bytes=self.queue_bytes, timeout_s=self.timeout_s
        )


@dataclass(frozen=True)
class TaskGraphs:
    """Threads of the training process that share the small tasks of batches, as ByteGNN does; see `TaskSource`.

    Tasks of older batches go first, then cheaper ones (`TwoLevelPolicy`).

    Args:
        num_threads: >= 1.
        sigma: threshold of ByteGNN's score, >= 0, by which another batch is begun; None: the policy's default.
        queue_bytes: most bytes of batches that are ready or under way, or a text such as "512MiB"; None: 1 GiB. Where
            rows are gathered after the sample (a Belady cache), batches have them beyond the cap, and
            `prefetch_batches` counts.
        chunks: tasks that share the neighbours or the rows of a large hop, >= 1; None: as many as threads, 8 at most.
        operators: your own, instead of those of the sampler.
        prefetch_batches: batches that are requested ahead, >= 1; None: as many as the scheduling can use.

    Raises:
        ValueError: an argument is out of range.
    """

    num_threads: int = 2
    sigma: float | None = None
    queue_bytes: int | str | None = None
    chunks: int | None = None
    operators: Operators | None = None
    prefetch_batches: int | None = None
    in_process = True

    def __post_init__(self):
        read_sizes(self, "queue_bytes")
        check_count("num_threads", self.num_threads)
        for name in ("queue_bytes", "chunks"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not isinstance(self.operators, Operators | None):
            raise ValueError(f"operators must be gs.loader.Operators(...) or None, got {short(self.operators)}")
        check_prefetch(self.prefetch_batches)
        self.policy()

    @property
    def batches_ahead(self) -> int:
        """Batches requested ahead of their use: `prefetch_batches`, or what the scheduling can use."""
        if self.prefetch_batches is not None:
            return self.prefetch_batches
        return 2 * self.num_threads + 2  # one of them is the trainer's; beyond these the policy decides

    @property
    def num_chunks(self) -> int:
        """Tasks that share a large hop."""
        return self.chunks or min(self.num_threads, 8)

    def policy(self) -> Policy:
        """Return a fresh policy."""
        sigma = {} if self.sigma is None else {"sigma": self.sigma}
        most, busy = self.queue_bytes or QUEUE_BYTES, machine_utilisation()
        return TwoLevelPolicy(self.num_threads, queue_bytes=most, utilisation=busy, **sigma)

    def connect(self, place: RankPlace) -> SourceFactory:
        """Return the factory of this rank's `TaskSource`; nothing is started yet."""
        return partial(TaskSource, policy=self.policy, operators=self.operators, chunks=self.num_chunks)
