"""What a fit with placed features has more than one without: the buffer, the sampler's bias towards it, its times."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..errors import StrategyError
from ..loader import LoaderOptions, RowReads
from ..partition_store import PartitionStore
from ..placement import FeatureBuffer, Placement, PlacementSettings
from ..sampler import LocalityBias
from .placed_features import close_buffer, open_buffer


class PlacedTraining:
    """The placed features of one process while it trains; open between `open` and `close`.

    Args:
        placement: Settings, the name of a method for its defaults, or a placement made before.
        locality_scale: See `PartitionDataModule`; None: the sampler has no preference.
        neighbor_set_size: See `LocalityBias`.
        sampler: Sampler of the training batches.

    Attributes:
        buffer: The open buffer, or None.

    Raises:
        ValueError: the placement is none of these, or the sampler takes no locality.
    """

    def __init__(
        self,
        placement: PlacementSettings | Placement | str,
        locality_scale: float | None,
        neighbor_set_size: int,
        sampler,
    ):
        self.placement = PlacementSettings(placement) if isinstance(placement, str) else placement
        if not isinstance(self.placement, PlacementSettings | Placement):
            raise ValueError(
                f"placement must be PlacementSettings, a Placement, a method's name or None, got {placement}"
            )
        if locality_scale is not None and not hasattr(sampler, "locality"):
            raise ValueError(
                f"locality_scale={locality_scale} needs a sampler that takes locality, NeighborSampler or "
                f"LayerwiseSampler, got {type(sampler).__name__}"
            )
        self.locality_scale, self.neighbor_set_size = locality_scale, neighbor_set_size
        self.buffer: FeatureBuffer | None = None
        self.clock: GatherClock | None = None

    def open(self, store: PartitionStore, targets, sampler, options: LoaderOptions, trainer) -> Any:
        """Place the rows, and return the sampler, biased towards them where that is asked for; see `open_buffer`."""
        self.buffer = open_buffer(store, self.placement, targets, sampler, options.batch_size, options.seed, trainer)
        self.clock = GatherClock(self.buffer.on)
        if self.locality_scale is None:
            return sampler
        bias = LocalityBias(
            self.buffer.placement, self.locality_scale, self.neighbor_set_size, device=self.buffer.device
        )
        return replace(sampler, locality=bias)

    def check_trainer(self, trainer) -> None:
        """Refuse a cache that nothing foretells.

        Raises:
            StrategyError: "belady" goes by batches that a loader has drawn, on GPUs rows are read when they arrive.
        """
        cached = isinstance(self.placement, PlacementSettings) and self.placement.cache_rows
        if cached and self.placement.cache_policy == "belady" and trainer.strategy.root_device.type == "cuda":
            raise StrategyError(
                "placement.cache_policy='belady' goes by reads of batches drawn ahead, and on GPUs rows are read as "
                "batches arrive: take 'sieve' or 'lru'"
            )

    @property
    def gathers_on_device(self) -> bool:
        """Whether features are gathered where a batch trains, not by its loader."""
        return self.buffer is not None and self.buffer.on != "cpu"

    def loader_options(self, options: LoaderOptions, in_process: bool) -> LoaderOptions:
        """Return the options of a loader that gathers from the buffer: its rows are this process's alone.

        Args:
            options: Its other options.
            in_process: Whether batches are drawn in this process, so that they are filled as they are drawn.
        """
        ahead = self.placement.lookahead_batches if self.buffer.foretold else 0
        reads = RowReads(lookahead_batches=ahead, fill_here=not in_process)
        return replace(options, reads=reads)

    def gather(self, batch: Any) -> None:
        """Give a batch its features out of all tiers, where it trains."""
        with self.clock.measure():
            batch.x = self.buffer.gather(batch.n_id)

    def close(self, trainer) -> None:
        """Let go of the rows."""
        if self.buffer is not None:
            close_buffer(self.buffer, trainer)
            self.buffer = None


class GatherClock:
    """Seconds that gathers take on their device, which runs them later than they are called.

    Args:
        device: "cpu" or a CUDA device.
    """

    def __init__(self, device: str):
        self._on_cuda = torch.device(device).type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of what is called inside."""
        if self._on_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((start, stop))
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Return the seconds since the last call; waits for the last gather."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(stop) for start, stop in self._events) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


def with_scale(sampler, scale: float):
    """Return a sampler that prefers near rows by another scale.

    Raises:
        StrategyError: it has no locality.
    """
    locality = getattr(sampler, "locality", None)
    if locality is None:
        raise StrategyError("the sampler has no locality whose scale could be set: say locality_scale=1")
    return sampler if locality.scale == scale else replace(sampler, locality=replace(locality, scale=scale))
