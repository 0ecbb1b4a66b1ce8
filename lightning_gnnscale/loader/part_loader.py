"""The iterable that Lightning trains from: this rank's batches, prepared ahead by a `BatchSource`."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, repeat
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..edge_stream.read_ahead import read_ahead
from ..errors import GNNScaleError, check_count, check_integer
from ..events import clock, record
from ..graph import StepBatches, batches_of
from ..partition_store.features import Column, LoadedRows
from ..sampler.minibatch import MiniBatch, columns_of
from ..sampler.on_device import sampler_for
from ..sampler.protocol import BatchSampler, as_batch_sampler
from ..system import yield_cores
from ..traits import SourceTraits
from .batch_columns import tensors
from .batch_maker import BatchMaker, BatchOrder
from .batch_source import BatchKey, BatchSource
from .buffer_pool import BufferPool
from .device_batches import DeviceBatches
from .epoch_reads import EpochReads
from .local_source import THREAD_NAME, LocalSource
from .mixed_batch import mixed_batches, run_lengths
from .part_walk import (
    Interleave,
    InterleavedWalk,
    PartShares,
    PartUnions,
    PartWalk,
    Position,
    in_order,
    visits_together,
)
from .row_reads import Footprint, NamedColumns, RowReads, fill_told, fill_windows, keep_rows, sampled_bytes
from .row_sweep import RowSweep, fill_swept, swept_table
from .shared_sweep import MachineSweeps, SharedSweep
from .source_settings import SourceFactory
from .staged_part import PartStager
from .sweep_trial import PartUse
from .waiting_batch import WaitingBatch

_OF_NODES = columns_of("nodes")
# Beside the batches that wait for a sweep, those that are prepared before it takes them: about those of parts in turn.
_AHEAD_BYTES, _AHEAD_SHARE = 128 << 20, 16
_AHEAD_NAME = "gnnscale-ahead"  # of threads that are none of a source's: they wait for those to end
_FOOTPRINTS_AT_ONCE = 2
_OF_BATCHES = ("rows", "sampled_bytes", "waiting_bytes", "own_rows", "target_rows")  # of a `Footprint`


@dataclass(frozen=True)
class PartData:
    """What the batches of a loader are made of.

    Args:
        load_part: Maps a part id to its `PartGraph` (or to a `WholeGraph`); called in a thread.
        features: A `Column` by store id, or None.
        nodes: Columns of the nodes by name, by store id. Of what a `MiniBatch` has a field for, arrays that are loaded
            with each part, see `node_values`; further ones are `Column`s, which are read for each batch.
        edges: Columns of the edges by their names in a batch, (num_edges, ...) in the store's edge order.
        is_whole: Whether every part is the whole graph, `load_part` giving a `WholeGraph`.
        shares: Who holds which parts, where each rank samples its own alone; None: they see each other.
        part_offsets: (num_parts + 1,) of the store, where there are shares.
        pool: Memory of the parts that `load_part` takes, used again for the next ones; it keeps nothing at first.
    """

    load_part: Callable[[int], Any]
    features: Column | None = None
    nodes: Mapping[str, np.ndarray | Column] = field(default_factory=dict)
    edges: Mapping[str, np.ndarray] = field(default_factory=dict)
    is_whole: bool = False
    shares: PartShares | None = None
    part_offsets: np.ndarray | None = None
    pool: BufferPool = field(default_factory=lambda: BufferPool(0))

    @property
    def columns(self) -> dict[str, Column]:
        """The further columns of the nodes by name."""
        return {name: column for name, column in self.nodes.items() if name not in _OF_NODES}

    def stager(self, targets: Mapping[int, np.ndarray], sampler: BatchSampler, seed: int) -> PartStager:
        """Return what loads a part, without features; arguments as of `PartStager`."""
        nodes = {name: values for name, values in self.nodes.items() if name in _OF_NODES}
        alone = {"shares": self.shares, "part_offsets": self.part_offsets}
        return PartStager(self.load_part, targets, sampler, nodes, seed, self.edges, is_whole=self.is_whole, **alone)


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader makes its batches.

    Args:
        batch_size: Targets per batch, >= 1.
        seed: Seed of the order of targets and of the samples.
        shuffle: Whether targets get a new order every pass.
        drop_last: Whether a part's short last batch is left out.
        passes: Passes over a part before the next part; the key's epoch is epoch * passes + pass.
        num_threads: Threads that prepare batches, each a whole one; 0: batches are prepared in the calling thread.
        prefetch_batches: Batches that are being prepared or ready at a time, >= 1; None: num_threads + 1.
        reads: How batches get their feature rows.
        return_e_id: Whether each batch gets its positions in the store's edge arrays.
        edge_features: Whether it gets the store's features of its edges.

    Raises:
        ValueError: an argument is out of range.
    """

    batch_size: int = 512
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    passes: int = 1
    num_threads: int = 1
    prefetch_batches: int | None = None
    reads: RowReads = field(default_factory=RowReads)
    return_e_id: bool = False
    edge_features: bool = True

    def __post_init__(self):
        check_count("batch_size", self.batch_size)
        check_integer("seed", self.seed)
        check_count("passes", self.passes)
        check_integer("num_threads", self.num_threads, 0)
        if self.prefetch_batches is not None:
            check_count("prefetch_batches", self.prefetch_batches)
        object.__setattr__(self, "batch_size", int(self.batch_size))  # numpy's own would overflow

    @property
    def batches_ahead(self) -> int:
        """Batches that are being prepared or ready at a time."""
        return self.num_threads + 1 if self.prefetch_batches is None else self.prefetch_batches


class PartLoader:
    """Walk over the parts of a rank and yield their batches; a plain iterable that shards itself.

    A batch is a function of (seed, epoch, part, batch index) alone: threads, prefetch depth, ranks and restarts
    change nothing. While a part trains, a thread loads the next one; at most two are in memory, with `interleave` one
    more than each batch mixes. Parts without targets are skipped.

    Args:
        parts: This rank's parts in the order in which they are visited; with `interleave`, all parts; with
            `data.shares`, the numbers of the ranks that this process computes, whose parts change.
        data: What batches are made of.
        targets: Maps a part id to the (num_targets,) store ids of its target nodes: core nodes of the part, ascending.
        sampler: Samples the contents of a batch.
        options: How batches are made.
        interleave: How parts take turns: each batch consists of one chunk of each open part, and every rank gets
            equally many batches. `parts` must then list the parts of all ranks. None: one part after another, each on
            one rank. Excludes passes and drop_last.
        per_step: Batches of a step, one of each rank that this process computes: more than one come as `StepBatches`.
            With `interleave` as many as its ranks; without, consecutive ones of `parts` take turns.
        source: Prepares batches instead of `options.num_threads` threads: (stage, maker) to `BatchSource`, for example
            `functools.partial(ProcessSource, num_workers=4)`. It is kept from one iteration to the next; `close` ends
            it.
        pad_to: Number of batches of the longest rank. After its own last batch, this rank yields None up to that
            number. None: no padding.
        pool: Memory of the batches; None: the loader makes its own.
        maker: Makes the batches, instead of one made from data, options and pool; it gets the loader's order.

    Attributes:
        columns, columns_bytes: The further columns of the nodes by name, and how they are read: see `set_columns`.
        parts_pool: Memory of its parts; see `PartData`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        parts: Sequence[int],
        data: PartData,
        targets: Mapping[int, np.ndarray],
        sampler: BatchSampler,
        options: LoaderOptions | None = None,
        *,
        interleave: Interleave | None = None,
        per_step: int = 1,
        source: SourceFactory | None = None,
        pad_to: int | None = None,
        pool: BufferPool | None = None,
        maker: BatchMaker | None = None,
    ):
        self.options, sampler = options or LoaderOptions(), as_batch_sampler(sampler)
        options = self.options
        if interleave is not None and (options.passes > 1 or options.drop_last):
            raise ValueError(
                f"interleave takes no passes or drop_last, got passes={options.passes}, drop_last={options.drop_last}"
            )
        self.interleave, self.per_step = interleave, per_step if interleave is None else interleave.num_ranks
        self._shares, self.parts_pool = data.shares, data.pool
        # A batch is this many chunks, each of one part.
        self.chunks = (
            1 if interleave is None else max(1, min(interleave.open_parts, sum(len(targets[p]) > 0 for p in parts)))
        )
        self._chunk_size = -(-options.batch_size // self.chunks)
        counts = {part: self._num_chunks(sampler, targets, part) for part in parts}
        self.walk = self._walk(tuple(parts), counts)
        if pad_to is not None and pad_to < len(self.walk):
            raise ValueError(f"pad_to must be >= {len(self.walk)}, this rank's batches, got {pad_to}")
        self.length = -(-self._rank_chunks // self.chunks) if pad_to is None else pad_to
        self.reads, self.columns, self.columns_bytes = options.reads, data.columns, 0
        self._most_ahead = self.reads.batches_ahead or options.batches_ahead
        self._unions = self._unions_of(tuple(parts), counts)
        self._stager = data.stager(targets, sampler, options.seed)
        maker = maker or BatchMaker(sampler, data.features, pool or BufferPool(), return_e_id=options.return_e_id)
        self._maker = replace(maker, order=self._order(), gathers=not self.reads.fills_here, joins=self._joins)
        self._make_source = source or partial(LocalSource, num_threads=options.num_threads)
        self._kept: LoadedRows | None = None
        self._sweep: RowSweep | SharedSweep | None = None
        self._sweeps: MachineSweeps | None = None
        if self.reads.how == "resident":
            self._stager = replace(self._stager, features=data.features)
        self._source = self._new_source()
        self._device: DeviceBatches | None = None
        self._samples_on: torch.device | None = None
        self.epoch = 0
        self._delivered = 0
        self._resume_at = 0
        self._open: Iterator[MiniBatch] | None = None
        self._steps_ahead, self._announce = 0, lambda step: None
        self._waited_s = self._ran_s = 0.0

    def _walk(self, parts: tuple[int, ...], counts: dict[int, int]) -> PartWalk | InterleavedWalk:
        options, interleave = self.options, self.interleave
        if interleave is not None:
            order = (options.seed, options.shuffle, interleave.spread, interleave.num_ranks)
            return InterleavedWalk(parts, counts, *interleave[:3], *order)
        if self.per_step > 1:
            return InterleavedWalk(parts, counts, 0, 1, self.per_step, options.seed, shuffle=False)
        return PartWalk(parts, counts, options.passes)

    def _unions_of(self, parts: tuple[int, ...], counts: dict[int, int]) -> PartUnions | PartShares | None:
        if self._shares is not None:
            return self._shares
        if self.interleave is None or not self.interleave.together:
            return None
        skipped = frozenset(part for part in parts if not counts[part])
        options, interleave = self.options, self.interleave
        return PartUnions(parts, skipped, interleave.open_parts, options.seed, options.shuffle, interleave.spread)

    @property
    def _rank_chunks(self) -> int:
        """Chunks of one rank in an epoch."""
        return len(self.walk) // self.per_step

    def __len__(self) -> int:
        """Return the steps of an epoch, padding included."""
        return self.length

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """The object whose `set_epoch` Lightning calls: `loader.batch_sampler.sampler.set_epoch`, not the loader's.

        (It would also look at `loader.sampler`, but replaces that under `overfit_batches`.)
        """
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields; Lightning calls it."""
        if epoch != self.epoch:
            self.epoch, self._delivered, self._resume_at = epoch, 0, 0

    def set_sampler(self, sampler: BatchSampler) -> None:
        """Sample the batches of the next iteration by another sampler; not while one is under way.

        Raises:
            ValueError: it would give another number of batches.
        """
        sampler = as_batch_sampler(sampler)
        for part, count in self.walk.num_batches.items():
            found = self._num_chunks(sampler, self._stager.targets, part)
            if found != count:
                raise ValueError(f"part {part} has {count} batches, with the new sampler it would have {found}")
        sampler = self._sampler_for(sampler)
        self._source.close()  # its parts were prepared for the old one
        self._stager = replace(self._stager, sampler=sampler)
        self._maker = replace(self._maker, sampler=sampler)
        self._source = self._new_source()

    def set_reads(self, reads: RowReads, features, sweeps: MachineSweeps | None = None) -> None:
        """Change how the next iteration's batches get their feature rows; not while one is under way.

        Args:
            reads: how.
            features: a `Column` of the same rows.
            sweeps: The processes that sweep together; None: this one sweeps for itself.
        """
        self._source.close()
        self.reads, self._sweeps = reads, sweeps
        given = {"features": features, "gathers": not reads.fills_here, "joins": self._joins}
        self._maker = replace(self._maker, **given, order=self._order())
        self._most_ahead = reads.batches_ahead or self.options.batches_ahead
        if reads.pool_bytes is not None:
            self._maker.pool.max_bytes = reads.pool_bytes
        self._kept = None
        self._stager = replace(self._stager, features=features if reads.how == "resident" else None, kept=None)
        # Where rows are swept, memory is short, and what is not held is read again for each part.
        self._stager = self._stager.with_held_columns() if reads.is_swept else replace(self._stager, held={})
        self._source = self._new_source()

    def set_columns(self, columns: Mapping[str, Column], window_bytes: int) -> None:
        """Change how the next iteration's batches get the further columns of their nodes.

        Args:
            columns: Columns of the same rows, by name.
            window_bytes: Their rows in a run of batches, with the batches that wait for them; twice that is held, and a
                run's are read while the one before trains. 0: each batch's are read where it arrives.
        """
        self.columns, self.columns_bytes = columns, window_bytes

    @property
    def gathers(self) -> bool:
        """Whether batches get feature rows from a column."""
        return self._maker.features is not None

    def send_to(self, device: DeviceBatches | None) -> None:
        """Yield batches that are on a device from the next iteration on; None: where they are made."""
        self._device = device

    def announce_steps(self, steps_ahead: int, announce: Callable[[MiniBatch | StepBatches], None]) -> None:
        """Tell of each step before it is yielded, from the next iteration on.

        Args:
            steps_ahead: Steps that are taken from the source before the one that is yielded, >= 0.
            announce: Called with each step, in order, in the thread that iterates.
        """
        self._steps_ahead, self._announce = steps_ahead, announce

    def sample_on(self, device: torch.device | None) -> None:
        """Sample where the sampler's `device` says from the next iteration on; not while one is under way.

        Args:
            device: The GPU that trains; None: training is on the CPU.

        Raises:
            ValueError: the sampler asks for a GPU, and cannot have it.
        """
        self._samples_on = device
        sampler = self._maker.sampler
        if self._sampler_for(sampler) is not sampler:
            self.set_sampler(sampler)

    def _sampler_for(self, sampler: BatchSampler) -> BatchSampler:
        """Return a sampler, or one that samples on the device."""
        return sampler_for(sampler, self._samples_on, isinstance(self._source, LocalSource), self._stays)

    @property
    def _stays(self) -> bool:
        """Whether batches that are sampled on a device stay there: they go there, and none waits on the host."""
        return self._device is not None and not (self._device.looks_ahead or self.reads.fills_here)

    def first_footprint(self, parts: Sequence[int] = ()) -> Footprint | None:
        """Load a part, sample its first chunk, and return their sizes; None without batches. Two at a time.

        Args:
            parts: Parts with batches, whose first chunks are averaged; sizes of parts are those of the first. None
                given: the first part.
        """
        first = next(self.walk.positions(self.epoch), None)
        if first is None:
            return None
        chosen = [first._replace(part=part) for part in parts or [first.part]]
        if not self._stager.is_whole:
            self._stager = self._stager.with_held_columns()
        with ThreadPoolExecutor(_FOOTPRINTS_AT_ONCE, thread_name_prefix=f"{THREAD_NAME}-part") as pool:
            found = list(pool.map(self._footprint, chosen))
        means = {name: sum(getattr(one, name) for one in found) // len(found) for name in _OF_BATCHES}
        return found[0]._replace(**means, uses=tuple(use for one in found for use in one.uses))

    def chunk_seeds(self) -> dict[int, float]:
        """Return the mean number of targets of the chunks of each part that has any."""
        ranks = 1 if self.interleave is None else self.interleave.world_size
        found, passes = self.walk.num_batches.items(), self.options.passes
        return {part: passes * len(self._stager.targets[part]) / (count * ranks) for part, count in found if count}

    def parts_of_batches(self) -> list[list[int]]:
        """Return which parts the chunks of each batch are of, in the order of the epoch."""
        parts = (position.part for position in self.walk.positions(self.epoch))
        runs = run_lengths(self._rank_chunks, self.chunks, 0, self.per_step)
        return [list(islice(parts, length)) for length in runs]

    def _footprint(self, position: Position) -> Footprint:
        key = self._key(position)
        staged = replace(self._stager, features=None, kept=None)(self._maker.order.unit(key))
        batch, graph = self._maker.make(key, lambda: staged, fill=False), staged.graph
        nodes = batch.n_id.numpy() - graph.core_start
        own = int(np.count_nonzero((nodes >= 0) & (nodes < graph.num_core)))
        by_hop = np.cumsum(batch.num_sampled_nodes or [len(batch.n_id), 0])
        sizes = len(batch.n_id), sampled_bytes(batch), WaitingBatch.of(batch).nbytes, own, int(by_hop[:-1].sum())
        *sizes, targets = (self.chunks * size for size in sizes)
        use = PartUse.of(batch, graph, key.part)
        return Footprint(staged.nbytes, *sizes, len(graph.csc.indices), graph.num_local, (use,), targets)

    def close(self) -> None:
        """End what prepares batches, and free its memory; another iteration starts it again."""
        self._source.close()
        self._maker.release()
        if self._device is not None:
            self._device.close()
        if self._kept is not None:
            self._kept, self._stager = None, replace(self._stager, kept=None)
            self._source = self._new_source()

    @property
    def waiting_share(self) -> float:
        """Share of time that the reader waited for batches, in [0, 1], in the current iteration or the last."""
        return self._waited_s / self._ran_s if self._ran_s else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the current iteration, or of the last one, the reader's own work included."""
        return self._ran_s

    def state_dict(self) -> dict[str, int]:
        """Return the position of the walk in batches handed over, not in prepared ones; the same on all ranks."""
        return {
            "epoch": self.epoch,
            "delivered": self._delivered,
            "length": self.length,
            "batch_size": self.options.batch_size,
            "seed": self.options.seed,
            "interleave": self.interleave and self.interleave.told,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume the next iteration where the state was taken.

        Raises:
            ValueError: the state was taken within an epoch of another shape.
        """
        if 0 < state["delivered"] < state["length"]:
            mine = self.state_dict()
            for name in ("length", "batch_size", "seed", "interleave"):
                if state.get(name) != mine[name]:
                    raise ValueError(
                        f"the checkpoint stands within an epoch of {name}={state.get(name)}, this loader has {name}="
                        f"{mine[name]}: resume with the same setting, or from the end of an epoch"
                    )
        self.epoch = state["epoch"]
        at_end = state["delivered"] >= state["length"]
        self._resume_at = 0 if at_end else state["delivered"]
        self._delivered = self.length if at_end else state["delivered"]

    def __iter__(self) -> Iterator[Any]:
        # Nothing is read before the first batch is requested: Lightning sets the epoch after making the iterator.
        start = self._resume_at if self._resume_at < self.length else 0
        self._resume_at, self._delivered = 0, start
        if self._open is not None:
            self._open.close()  # of an abandoned iteration: the source serves one
        batches = self._open = self._batches(start)
        begun, self._waited_s, coming = time.perf_counter(), 0.0, deque()
        planned = [] if self.reads.how == "mapped" else [self._maker.features]
        planned += list(self.columns.values()) if self.columns_bytes else []
        reads = EpochReads.begin(planned) if planned else None
        try:
            while True:
                if self._open is not batches:
                    raise GNNScaleError("a newer iteration over this loader has begun: take one at a time")
                asked = time.perf_counter()
                with clock.doing("wait"):
                    self._look_ahead(batches, coming)
                given = time.perf_counter()
                self._waited_s, self._ran_s = self._waited_s + given - asked, given - begun
                if not coming:
                    break
                batch = coming.popleft()
                self._delivered += 1
                if reads is not None:
                    for one in batches_of(batch):
                        reads.add(one)
                    one = None
                yield batch
                del batch
        finally:
            batches.close()
            if reads is not None:
                record("rows_read", epoch=self.epoch, **reads.end(self.reads, self._sweep and self._sweep.passes))
            self._sweep = None
            if self._open is batches:
                self._open = None
        while self._delivered < self.length:
            self._delivered += 1
            yield None

    def _look_ahead(self, batches: Iterator[MiniBatch], coming: deque[MiniBatch | StepBatches]) -> None:
        """Take the next step, and as many as are announced ahead; none where there are no more."""
        while len(coming) <= self._steps_ahead and (step := self._next_step(batches)) is not None:
            self._announce(step)
            coming.append(step)

    def _next_step(self, batches: Iterator[MiniBatch]) -> MiniBatch | StepBatches | None:
        if self.per_step == 1:
            return next(batches, None)
        step = list(islice(batches, self.per_step))
        return StepBatches(step) if step else None

    def sampled_chunks(self) -> Iterator[MiniBatch]:
        """Yield the chunks of the epoch's batches, one at a time, instead of the batches."""
        chunks = self._ahead(self.walk.positions(self.epoch))
        return mixed_batches(chunks, repeat(1, len(self.walk)), self._maker.pool.take)

    def _new_source(self) -> BatchSource:
        return self._make_source(self._stager, self._maker)

    @property
    def _joins(self) -> bool:
        """Whether rows are read into mixed batches, where this thread reads them; else threads read those of chunks."""
        return self.chunks > 1 and self.reads.how == "planned"

    @property
    def _parts_open(self) -> int:
        """Number of parts, or of unions of parts, that batches are requested from at a time."""
        if self._shares is not None:
            return self.walk.parts_open
        return min(2, self.walk.parts_open) if self.reads.by_part or self._unions else self.walk.parts_open

    @property
    def parts_together(self) -> int:
        """Number of parts that are sampled as one graph."""
        return 1 if self._unions is None else self._unions.size

    @property
    def parts_held(self) -> int:
        """Number of parts that are in memory at a time."""
        return self.walk.parts_open if self._unions is None else max(2, self.per_step) * self._unions.size

    def _order(self) -> BatchOrder:
        size, num_ranks = self._chunk_size, self.interleave and self.interleave.world_size
        if self._shares is not None:  # so many even batches, whatever targets a rank's parts have
            size, num_ranks = sys.maxsize, self._shares.num_batches
        return BatchOrder(
            size,
            self.options.shuffle,
            self.options.drop_last,
            num_ranks=num_ranks,
            parts_open=self._parts_open,
            unions=self._unions,
            passes=self.options.passes,
        )

    def _num_chunks(self, sampler: BatchSampler, targets: Mapping[int, np.ndarray], part: int) -> int:
        """Return a rank's chunks of one pass over a part; with shares, over all parts of a rank."""
        if self._shares is not None:
            return self._shares.num_batches
        num_ranks = 1 if self.interleave is None else self.interleave.world_size
        return sampler.num_batches(len(targets[part]), self._chunk_size * num_ranks, self.options.drop_last)

    def _keep(self) -> None:
        """Read the rows that stay in memory, before the first iteration that needs them."""
        if not self.reads.kept_halos or self.reads.is_swept or self._kept is not None:
            return
        self._kept = keep_rows(self._maker.features, self.reads)
        if self.reads.how == "resident":
            self._source.close()
            self._stager = replace(self._stager, kept=self._kept)
            self._source = self._new_source()

    def _batches(self, start: int) -> Iterator[MiniBatch]:
        made = self._made(start)
        return made if self._device is None else self._device.moved(made)

    def _made(self, start: int) -> Iterator[MiniBatch]:
        """Yield the batches from a place on, where they are made."""
        self._keep()
        positions = self.walk.positions(self.epoch, start * self.chunks * self.per_step)
        runs = run_lengths(self._rank_chunks, self.chunks, start, self.per_step)
        if self.reads.is_swept:
            batches = self._swept(positions, runs)
        else:
            batches = self._mixed(self._filled(self._ahead(positions)), runs)
        return self._with_columns(batches) if self.columns else batches

    def _mixed(self, chunks: Iterator[MiniBatch], runs: Iterator[int]) -> Iterator[MiniBatch]:
        """Yield the batches that chunks make, in order."""
        return mixed_batches(chunks, runs, self._maker.pool.take) if self.chunks > 1 else chunks

    def _with_columns(self, batches: Iterator[MiniBatch]) -> Iterator[MiniBatch]:
        """Read the further columns of batches where they arrive: their makers need not have them."""
        columns = NamedColumns(self.columns)
        if self.columns_bytes:
            yield from fill_windows(batches, columns, _give_columns, RowReads("planned", self.columns_bytes))
            return
        with closing(batches):
            for batch in batches:
                yield _give_columns(batch, columns)
                del batch

    def _filled(self, batches: Iterator[MiniBatch]) -> Iterator[MiniBatch]:
        if not self.reads.fills_here or self._maker.features is None:
            return batches
        if self.reads.how == "planned":
            return fill_windows(batches, self._maker.features, self._maker.fill, self.reads, self._kept, self.chunks)
        maker = replace(self._maker, joins=False)  # rows are read ahead, by threads
        num_threads, ahead = self.options.num_threads, self.chunks * self.options.batches_ahead
        return fill_told(batches, maker, self.reads, num_threads, ahead)

    def _has_space(self, pending: Sequence[Position], coming: Position, keeping: Sequence[Position]) -> bool:
        """Whether a batch may be requested now: not too many visits ahead, and not of one part too many."""
        further = SourceTraits(self._source).parts_further
        if pending and coming.visit > pending[0].visit + 1 + further:
            return False
        asked, unions = (*pending, *(keeping if pending else ()), coming), self._unions
        there = {one.part if unions is None else unions.of(one.part, one.epoch) for one in asked}
        return len(there) <= self._parts_open + further

    def _key(self, position: Position) -> BatchKey:
        return BatchKey(self.options.seed, position.epoch, position.part, position.batch)

    def _swept(self, positions: Iterator[Position], runs: Iterator[int]) -> Iterator[MiniBatch]:
        """Yield the batches of positions; they wait, in few bytes, for rows that are read for many of them."""
        reads, table = self.reads, swept_table(self._maker.features)
        if table is None:
            got = type(self._maker.features).__name__
            raise ValueError(f"is_swept reads dense rows of one table, got {got}: leave is_swept=False")
        ahead = _AHEAD_BYTES if reads.waiting_bytes is None else min(_AHEAD_BYTES, reads.waiting_bytes // _AHEAD_SHARE)
        if self._sweeps is None:
            self._sweep = RowSweep(table, reads.window_bytes, reads.waiting_bytes)
        else:
            self._sweep = self._sweeps.begin(table, reads)
        chunks = self._by_part(positions) if reads.by_part else self._ahead(positions)
        mixed = self._waiting(self._mixed(chunks, runs))
        waiting = read_ahead(_behind_others(mixed), lambda batch: batch.nbytes, ahead, _AHEAD_NAME)
        filled = fill_swept(waiting, replace(self._maker, joins=False), self._sweep)
        return read_ahead(_behind_others(filled), name=_AHEAD_NAME)  # a batch gets its rows while one trains

    def _waiting(self, batches: Iterator[MiniBatch]) -> Iterator[WaitingBatch]:
        with closing(batches):
            for batch in batches:
                waiting = WaitingBatch.of(batch)
                del batch
                yield waiting

    def _by_part(self, positions: Iterator[Position]) -> Iterator[MiniBatch]:
        """Yield the chunks of positions, which are sampled visit by visit, and wait for their turn in few bytes."""
        places: deque[int] = deque()

        def coming() -> Iterator[Position]:
            for place, position in visits_together(self.walk, positions):
                places.append(place)
                yield position

        with closing(self._waiting(self._ahead(coming()))) as sampled:
            for chunk in in_order((places.popleft(), waiting) for waiting in sampled):
                yield chunk.batch(np.empty)  # small, and gone once it is mixed

    def _ahead(self, positions: Iterator[Position]) -> Iterator[MiniBatch]:
        """Yield chunks in order while the source prepares the next ones, of no more parts than may be in memory."""
        source = self._source
        source.begin()
        pending: deque[Position] = deque()
        # A chunk whose rows came with its part keeps them until it is mixed.
        keeping: deque[Position] = deque(maxlen=self.chunks - 1 if self.reads.how == "resident" else 0)
        coming = next(positions, None)
        try:
            while coming or pending:
                ahead = max(self._most_ahead, SourceTraits(source).batches_ahead) + self.per_step - 1
                most = self.chunks * ahead
                while coming and len(pending) < most and self._has_space(pending, coming, keeping):
                    source.request(self._key(coming))
                    pending.append(coming)
                    coming = next(positions, None)
                taken = pending.popleft()
                keeping.append(taken)
                if taken.following is not None:
                    source.expect_part(self._maker.order.unit(self._key(taken._replace(part=taken.following))))
                _, batch = source.ready()
                if not (coming or pending):
                    source.forget()  # Lightning stops asking at the last batch: no thread may outlive it
                yield batch
                del batch
        finally:
            source.forget()


def _behind_others(items: Iterator) -> Callable[[Event], Iterator]:
    """Return a `produce` of `read_ahead` for items: its thread goes behind those that are waited for."""

    def begin(stop: Event) -> Iterator:
        yield_cores()
        return items

    return begin


def _give_columns(batch: MiniBatch, columns: NamedColumns | LoadedRows) -> MiniBatch:
    """Give a batch the rows of the further columns of its nodes, and return it."""
    with clock.doing("read"):
        batch.columns = {name: tensors(rows) for name, rows in columns.read(batch.host_ids).items()}
    return batch
