"""State used only with placement: the buffer, the sampler's bias towards it, its times."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import PlacementError, StrategyError, short
from ..events import clock, record
from ..loader import LoaderOptions, RowReads
from ..partition_store import PartitionStore
from ..placement import FeatureBuffer, FeatureCache, Placement, PlacementSettings, TypedBuffers
from ..placement.access_probability import access_probability, layer_probability, sampled_probability
from ..placement.link_cost import gpu_name, gpu_uuid, gpus_seen, link_alphas
from ..placement.place import RULES
from ..placement.settings import CPU_SHARE
from ..placement.shared_rows import gather_objects
from ..planner.tier_sizes import FreeMemory
from ..sampler import LayerwiseSampler, LocalityBias, NeighborSampler
from ..sampler.minibatch import rows_by_node_type
from ..traits import StrategyTraits
from .tiers import buffer_of_store, device_name, free_memory, is_placeable, sizes_of, tier_bytes, told_tiers

# Below Lightning's own logger, so that it logs where the Trainer does.
_log = logging.getLogger("lightning.pytorch.rows")
HOPS_UNKNOWN = 2  # of samplers without fan-outs
SAMPLED_BATCHES = 64  # of each rank, to correct the probabilities


class RankReads(NamedTuple):
    """What the ranks of a run read, according to a DataModule.

    Attributes:
        crosses_parts: Whether batches read the whole graph.
        targets: (num_targets,) store ids of the targets of each rank.
        nodes: Yields the nodes of a rank's batches; takes the rank and the number of batches.
    """

    crosses_parts: bool
    targets: Sequence[np.ndarray]
    nodes: Callable[[int, int], Iterator[np.ndarray]]


def read_probability(
    store: PartitionStore, settings: PlacementSettings, sampler, batch_size: int, seed: int, reads: RankReads
) -> np.ndarray:
    """Return (num_ranks, num_nodes) float32: the probability that a batch of each rank reads each node.

    Args:
        store, settings, sampler, batch_size, seed: See `open_buffer`.
        reads: What the ranks read.

    Cost: a method of `access_probability` for each rank, or SAMPLED_BATCHES sampled batches.
    """
    fanouts, method = fanouts_of(sampler), settings.probability
    closed = isinstance(sampler, NeighborSampler) and sampler.direction == "in" and reads.crosses_parts
    closed = closed and not sampler.by_edge_type
    if method == "auto":
        method = "vip_sampled" if closed else "samples"
    found = []
    for rank, targets in enumerate(reads.targets):
        if not len(targets):
            found.append(np.zeros(store.num_nodes, np.float32))
            continue
        if method != "samples":
            found.append(
                access_probability(
                    store,
                    targets,
                    num_layers=len(fanouts),
                    method=method,
                    fanouts=fanouts,
                    batch_size=batch_size,
                    seed=seed,
                )
            )
            continue
        if isinstance(sampler, LayerwiseSampler):
            prior = layer_probability(store, targets, sampler.nodes_per_layer, batch_size)
        elif sampler.per_hop:
            prior = access_probability(store, targets, method="vip", fanouts=fanouts, batch_size=batch_size)
        else:
            prior = np.ones(store.num_nodes, np.float32)
        found.append(sampled_probability(prior, reads.nodes(rank, SAMPLED_BATCHES)))
    return np.stack(found)


def open_buffer(
    store: PartitionStore,
    settings: PlacementSettings,
    train_nodes: np.ndarray,
    sampler,
    batch_size: int,
    seed: int,
    trainer,
    prob: np.ndarray | None,
    free: FreeMemory | None = None,
) -> FeatureBuffer | TypedBuffers:
    """Place the features and return this process's buffer; a device is a process of the Trainer.

    Args:
        store: A store with dense features, in one table or a table for each node type.
        settings: Settings to place by; a placement that they hold was made for as many devices as there are processes.
        train_nodes: (num_train,) store ids of all targets.
        sampler: Sampler of the batches.
        batch_size: Targets per batch.
        seed: Seed of the placing.
        trainer: The Trainer; None: one process.
        prob: (num_ranks, num_nodes) what the ranks read, see `read_probability`; None: a placement is given.
        free: Memory that rows may take, alike on every rank; None: as many rows as the settings say.

    Raises:
        PlacementError: no features, sparse ones, or a placement for another number of devices or another store.
    """
    if store.features is None:
        raise PlacementError(f"{store.root}: the store has no features to place: say rows=auto")
    rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
    on, by_node_type = device_name(trainer), store.features.by_node_type
    alphas = rank_alphas(settings, trainer, world_size)
    if free is not None and is_placeable(store.features):
        settings = settings.sized(sizes_of(store, settings, free, prob, alphas))
    own = None if prob is None else prob[0] if world_size == 1 else prob
    placement = settings.place(store, train_nodes, world_size, fanouts_of(sampler), batch_size, seed, alphas, own)
    if placement.num_devices != world_size:
        raise PlacementError(
            f"the placement has {placement.num_devices} devices, training has {world_size} processes: place for "
            f"num_devices={world_size}"
        )
    options = {"on": on, "fingerprint": store.layout_fingerprint}
    make = FeatureBuffer.join if world_size > 1 else FeatureBuffer
    if by_node_type:
        caches = (
            settings.caches_by_node_type(store.features, placement, rank, prob[rank]) if settings.cache_rows else ()
        )
        buffer = TypedBuffers(placement, store.features, rank, caches=caches, make=make, **options)
    else:
        cache = FeatureCache(settings.cache_rows, settings.cache_policy) if settings.cache_rows else None
        buffer = make(placement, store.features, rank, cache=cache, **options)
    held = tier_bytes(store, placement, rank, world_size // (1 if trainer is None else trainer.num_nodes), free, on)
    record(
        "placement",
        rank=rank,
        method=placement.method,
        buffer_rows=len(placement.rows[rank]),
        buffer_bytes=buffer.nbytes,
        predicted=placement.device_shares[rank],
        alpha=_mean_alpha(alphas, placement.groups, rank),
        gpu="" if on == "cpu" else gpu_name(torch.device(on)),
        tier_bytes=held,
        free_bytes={} if free is None else free._asdict(),
    )
    if rank == 0:
        _log.info("Feature rows are %s", told_tiers(held, free))
    return buffer


def close_buffer(buffer: FeatureBuffer | TypedBuffers, trainer) -> None:
    """Record what each tier served, and release the rows; on GPUs once no peer reads them any more."""
    record("reads", rank=buffer.device, **buffer.hits)
    if buffer.on != "cpu" and trainer is not None and trainer.world_size > 1:
        trainer.strategy.barrier("close_buffer")
    buffer.close()


def fanouts_of(sampler) -> tuple[int, ...]:
    """Return a sampler's fan-outs; without fan-outs, all neighbours of as many hops as it has layers."""
    return tuple(sampler.per_hop) or (-1,) * (sampler.num_layers or HOPS_UNKNOWN)


def rank_alphas(settings: PlacementSettings, trainer, world_size: int) -> np.ndarray:
    """Return the (world_size, world_size) cost of a read from another rank's buffer over one from host memory.

    It is 1 between machines, and between GPUs without peer access. Each machine measures its own pairs, once
    for all its ranks: two measurements would give two placements.
    """
    size = world_size // (1 if trainer is None else trainer.num_nodes)
    alpha = settings.alpha
    if alpha == "auto" and settings.method not in RULES:
        alpha = 0.0
    alphas, gpus = np.ones((world_size, world_size)), None
    if size > 1 and device_name(trainer) != "cpu":
        # By their own ids: processes that see a GPU each all call it number 0.
        gpus = gather_objects(gpu_uuid(torch.device(device_name(trainer))))
    for first in range(0, world_size, size):
        within = None
        if size == 1:
            within = np.zeros((1, 1))
        elif trainer.global_rank == first:
            devices = StrategyTraits(trainer.strategy).parallel_devices or [torch.device("cpu")] * size
            within = link_alphas(devices if gpus is None else gpus_seen(gpus[first : first + size]), alpha)
        alphas[first : first + size, first : first + size] = (
            within if size == 1 else trainer.strategy.broadcast(within, src=first)
        )
    return alphas


def _mean_alpha(alphas: np.ndarray, groups, rank: int) -> float:
    """Return the mean cost of a read from the peers of a rank; 1 where it has none."""
    peers = [peer for peer in next(group for group in groups if rank in group) if peer != rank]
    return float(alphas[rank, peers].mean()) if peers else 1.0


class PlacedTraining:
    """The placed features of one process while it trains; open between `open` and `close`.

    Args:
        settings: How rows are placed.
        sampler: Sampler of the training batches.

    Attributes:
        buffer: The open buffer, or None.

    Raises:
        ValueError: the sampler takes no locality.
    """

    def __init__(self, settings: PlacementSettings, sampler):
        self.settings = settings
        locality_scale = self.settings.locality_scale
        if locality_scale is not None and not sampler.takes_locality:
            raise ValueError(
                f"rows.locality_scale={locality_scale} needs a sampler that takes locality, NeighborSampler or "
                f"LayerwiseSampler, got {type(sampler).__name__}"
            )
        self.buffer: FeatureBuffer | TypedBuffers | None = None
        self._clock: GatherClock | None = None
        self._counted = (0.0, 0)  # seconds on the CPU and far rows that `loading_share` has counted
        self._open_sized: Callable[[FreeMemory], FeatureBuffer | TypedBuffers] | None = None
        self._ahead: deque = deque()  # batches whose reads are announced
        self._changing = threading.Lock()  # of the buffer, while batches are gathered ahead

    def open(
        self,
        store: PartitionStore,
        sampler,
        options: LoaderOptions,
        trainer,
        reads: RankReads,
        evaluation_bytes: int = 0,
    ) -> Any:
        """Place the rows, and return the sampler, biased towards them if the settings say so; see `open_buffer`.

        On a GPU whose free memory decides, rows are read from the store until `settle`. A bias needs the placement from
        the first batch on: half of what is free before it is then taken.

        Args:
            evaluation_bytes: Memory of the device that evaluation takes, predicted.
        """
        targets, on = np.unique(np.concatenate(reads.targets)), device_name(trainer)
        given, prob = isinstance(self.settings.method, Placement), None
        if not given or (store.features is not None and store.features.by_node_type and self.settings.cache_rows):
            prob = read_probability(store, self.settings, sampler, options.batch_size, options.seed, reads)
        order = (options.batch_size, options.seed, trainer, prob)
        opened = partial(open_buffer, store, self.settings, targets, sampler, *order)
        scale, size = self.settings.locality_scale, self.settings.neighbor_set_size
        if on == "cpu" or given:
            self.buffer = opened()
        elif self.settings.sizes_itself and scale is None:
            self.buffer, self._open_sized = buffer_of_store(store, trainer), opened
        else:
            free = free_memory(trainer, evaluation_bytes)
            self.buffer = opened(free._replace(device=free.device // 2))
        self._evaluation_bytes = evaluation_bytes
        self._clock, self._counted = GatherClock(str(self.buffer.gathers_on or "cpu")), (0.0, 0)
        if scale is None:
            return sampler
        bias = LocalityBias(self.buffer.placement, scale, size, device=self.buffer.device)
        return sampler.with_locality(bias)

    @property
    def is_settled(self) -> bool:
        """Whether rows are where they stay; if not, `settle` is to be called after the first step."""
        return self._open_sized is None

    def settle(self, trainer) -> None:
        """Fill the tiers by what is free now, and read rows there from the next batch on; every rank calls it.

        Raises:
            PlacementError: there is no memory for them.
        """
        opened, self._open_sized = self._open_sized, None
        try:
            buffer = opened(free_memory(trainer, self._evaluation_bytes))
        except torch.OutOfMemoryError as error:
            raise PlacementError(
                f"{device_name(trainer)} has no memory for the rows: say rows=tiered and rows.buffer_rows= of fewer "
                f"({short(str(error))})"
            ) from None
        with self._changing:
            self.buffer.close()  # waits for the device: what was copied to the new one is there
            if buffer.foretold:
                buffer.expect([batch.n_id.numpy() for batch in self._ahead])
            self.buffer, self._counted = buffer, (0.0, 0)

    @property
    def planned_rows(self) -> dict[str, Any]:
        """The arguments of `gs.plan` for a placement."""
        settings = self.settings
        if isinstance(settings.method, Placement):
            rows: int | float | str = max(map(len, settings.method.rows))
        else:
            rows = settings.buffer_rows or settings.buffer_share
        planned = {"placed_rows": rows, "pinned_rows": settings.host_rows, "cache_rows": settings.cache_rows}
        return planned | ({"simulated_rows": CPU_SHARE} if rows == "auto" else {})

    def check_trainer(self, trainer, device_batches: int) -> None:
        """Refuse a Belady cache without reads known ahead.

        Args:
            device_batches: Batches that are copied to a GPU ahead of their use.

        Raises:
            StrategyError: "belady" needs batches sampled ahead; without copies ahead rows are read as batches arrive.
        """
        settings = self.settings
        if not settings.cache_rows or settings.cache_policy != "belady" or device_batches:
            return
        if trainer.strategy.root_device.type == "cuda":
            raise StrategyError(
                "rows.cache_policy='belady' needs reads of batches sampled ahead, and with device_batches=0 a GPU "
                "reads rows as batches arrive: say device_batches=1 or more, or take 'sieve' or 'lru'"
            )

    def foretell(self, batches: Iterator) -> Iterator:
        """Yield an epoch's batches once the reads of the next `lookahead_batches` are announced to the caches.

        Args:
            batches: A generator of `MiniBatch` on the host; it is closed with this one.
        """
        ended = False
        try:
            while True:
                while not ended and len(self._ahead) <= self.settings.lookahead_batches:
                    batch = next(batches, None)
                    if ended := batch is None:
                        break
                    with self._changing:
                        self.buffer.expect([batch.n_id.numpy()])
                        self._ahead.append(batch)
                if not self._ahead:
                    return
                yield self._ahead.popleft()
        finally:
            batches.close()
            with self._changing:
                self._ahead.clear()
                if self.buffer is not None:
                    self.buffer.forget()

    @property
    def gathers_on_device(self) -> bool:
        """Whether features are gathered where a batch trains, not by its loader."""
        return self.buffer is not None and self.buffer.on != "cpu"

    def loader_options(self, options: LoaderOptions, in_process: bool) -> LoaderOptions:
        """Return the options of a loader that gathers from the buffer, whose rows only this process has.

        Args:
            options: Its other options.
            in_process: Whether batches are sampled in this process, so that they are filled as they are sampled.
        """
        ahead = self.settings.lookahead_batches if self.buffer.foretold else 0
        reads = RowReads(lookahead_batches=ahead, fill_here=not in_process)
        return replace(options, reads=reads, **({} if in_process else {"num_threads": self.settings.gather_threads}))

    def fill(self, batch: Any, nodes: Any) -> None:
        """Give a batch its features out of all tiers, where it trains.

        Args:
            batch: `MiniBatch` on its device.
            nodes: Its `n_id`, on the host where it is there too: the device is then not waited for.
        """
        with self._changing, clock.doing("read"), self._clock.measure():
            on_host = None if nodes is batch.n_id else nodes.numpy()
            if on_host is None and batch.made is not None and self.buffer.asks_host:
                on_host = batch.host_ids
            rows = self.buffer.read(batch.n_id, on_host=on_host)
            if isinstance(self.buffer, TypedBuffers):
                rows = rows_by_node_type(rows).apply(lambda tensor: tensor.to(batch.n_id.device, non_blocking=True))
            batch.x = rows

    def loading_share(self, seconds: float, waiting_share: float, num_threads: int) -> float:
        """Return the share of an epoch spent loading features, in [0, 1]; 0 where all rows were near.

        On a GPU it is the time of gathering where training runs. Threads of a loader gather and sample beside training:
        of training's share of waiting for them, the part spent gathering counts.

        Args:
            seconds: Seconds of the epoch.
            waiting_share: Share of them in which training waited for batches.
            num_threads: Threads that gather; 0: the one that trains.
        """
        before, hits = self._counted, self.buffer.hits
        self._counted = self.buffer.gather_s, hits["host"] + hits["disk"]
        gathered = self._clock.take() if self.gathers_on_device else self._counted[0] - before[0]
        if self._counted[1] == before[1]:
            return 0.0
        if num_threads and not self.gathers_on_device:
            gathered *= waiting_share / num_threads
        return min(gathered / seconds, 1.0)

    def close(self, trainer) -> None:
        """Release the rows."""
        if self.buffer is not None:
            close_buffer(self.buffer, trainer)
            self.buffer = self._open_sized = None


class GatherClock:
    """Seconds that gathers take on their device, which runs them asynchronously.

    Args:
        device: "cpu" or a CUDA device.
    """

    def __init__(self, device: str):
        self._on_cuda = torch.device(device).type == "cuda"
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the calls inside."""
        if self._on_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((start, stop))
            self._add_passed()
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Return the seconds since the last call; waits for the last gather."""
        if self._events:
            self._events[-1][1].synchronize()
        self._add_passed()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_passed(self) -> None:
        """Add the gathers that are done: nobody may ask for their time before the end of training."""
        while self._events and self._events[0][1].query():
            start, stop = self._events.popleft()
            self._seconds += start.elapsed_time(stop) / 1e3


def with_scale(sampler, scale: float):
    """Return a sampler that prefers near rows by another scale.

    Raises:
        StrategyError: it has no locality.
    """
    locality = sampler.locality
    if locality is None:
        raise StrategyError("the sampler has no locality scale to set: say rows.locality_scale=1")
    return sampler if locality.scale == scale else sampler.with_locality(replace(locality, scale=scale))
