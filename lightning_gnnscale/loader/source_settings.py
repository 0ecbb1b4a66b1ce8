"""What prepares a rank's batches, as plain settings that open the source they describe."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from ..errors import check_count
from .batch_maker import BatchMaker
from .batch_source import BatchSource
from .local_source import LocalSource
from .process_source import QUEUE_BYTES, ProcessSource
from .staged_part import StagedPart

SourceFactory = Callable[[Callable[[int], StagedPart], BatchMaker], BatchSource]


class RankPlace(NamedTuple):
    """Where a process stands among those that train together.

    Attributes:
        rank, world_size: among all.
        node: number of its machine.
        local_rank, num_local: among those of its machine.
        share: returns rank 0's value on every rank; a collective.
    """

    rank: int = 0
    world_size: int = 1
    node: int = 0
    local_rank: int = 0
    num_local: int = 1
    share: Callable[[Any], Any] = lambda value: value


class SourceSettings(Protocol):
    """Settings of a `BatchSource`; plain values, the same on every rank.

    Attributes:
        batches_ahead: batches that are requested ahead of their use, unless the loader is told a number.
        in_process: it prepares them in the training process, and reaches features that lie there.
    """

    batches_ahead: int
    in_process: bool

    def connect(self, place: RankPlace) -> SourceFactory:
        """Return what makes this rank's source of (stage, maker); every rank calls it, so that they may agree.

        Args:
            place: of this rank.
        """


@dataclass(frozen=True)
class Threads:
    """Threads of the training process, each of which prepares a whole batch; see `LocalSource`.

    Args:
        num_threads: >= 1.

    Raises:
        ValueError: num_threads is below 1.
    """

    num_threads: int = 1
    in_process: ClassVar[bool] = True

    def __post_init__(self):
        check_count("num_threads", self.num_threads)

    @property
    def batches_ahead(self) -> int:
        return self.num_threads + 1

    def connect(self, place: RankPlace) -> SourceFactory:
        return partial(LocalSource, num_threads=self.num_threads)


@dataclass(frozen=True)
class Processes:
    """Worker processes that map the store themselves and hand batches over in shared memory; see `ProcessSource`.

    Args:
        num_workers: processes of each rank, >= 1.
        queue_bytes: most bytes of ready batches in shared memory, each rank's.

    Raises:
        ValueError: an argument is below 1.
    """

    num_workers: int = 1
    queue_bytes: int = QUEUE_BYTES
    in_process: ClassVar[bool] = False

    def __post_init__(self):
        check_count("num_workers", self.num_workers)
        check_count("queue_bytes", self.queue_bytes)

    @property
    def batches_ahead(self) -> int:
        return self.num_workers + 1

    def connect(self, place: RankPlace) -> SourceFactory:
        return partial(ProcessSource, num_workers=self.num_workers, queue_bytes=self.queue_bytes)


SOURCES = {"threads": Threads, "processes": Processes}


def source_settings(source: str | SourceSettings) -> SourceSettings:
    """Return the settings that a name stands for, with its defaults; settings as they are.

    Raises:
        ValueError: the name is unknown, or it is neither.
    """
    if isinstance(source, str) and source in SOURCES:
        return SOURCES[source]()
    if isinstance(source, str) or not callable(getattr(source, "connect", None)):
        raise ValueError(
            f"source must be one of {', '.join(SOURCES)}, or settings such as gs.Threads(), got {source!r}"
        )
    return source
