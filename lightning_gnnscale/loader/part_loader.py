"""The iterable that Lightning trains from: this rank's batches, prepared ahead by threads."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import GNNScaleError
from ..graph import MASK_NAMES
from ..rng import batch_key
from ..sampler.minibatch import MiniBatch
from ..sampler.subgraph import BatchSampler
from .batch_builder import BatchBuilder
from .buffer_pool import BufferPool
from .part_walk import PartWalk, Position
from .staged_part import PartShelf, PartStager

_THREAD_NAME = "gnnscale-batch"


class PartLoader:
    """Walk over the parts of a rank and yield their batches; a plain iterable that shards itself.

    A batch is a function of (seed, epoch, part, batch index) alone: threads, prefetch depth, ranks and restarts
    change nothing. While a part trains, a thread loads the next one; at most two are in memory. Parts without
    targets are passed over.

    Args:
        parts: this rank's parts in the order of their visits.
        load_part: part id to `PartGraph` (or `WholeGraph`); called in a thread.
        features: a `FeatureTable` by store id, or None.
        targets: part id to (num_targets,) store ids of its target nodes, core nodes of the part, ascending.
        sampler: what a batch draws.
        labels: (num_nodes,) integers or (num_nodes, num_labels) in store order, or None.
        masks: name to (num_nodes,) bool in store order, or None.
        edge_weight: (num_arcs,) in the store's arc order, or None.
        batch_size: targets a batch, >= 1.
        seed: of order and draws.
        passes: passes over a part before the next one; the key's epoch is epoch * passes + pass.
        num_threads: threads that prepare batches, each a whole one; 0 prepares them in the calling thread.
        prefetch_batches: batches under way or ready, >= 1; None: num_threads + 1.
        lookahead_batches: batches drawn further ahead, whose reads `features.expect` is told before they are gathered:
            what a Belady cache lives on. 0: none.
        pad_to: batches of the longest rank; None is yielded from the own end up to there. None: no padding.
        shuffle: a new order of the targets every pass.
        drop_last: leave out a part's last batch where it is short.
        return_e_id: give each batch its positions in the store's arc arrays.
        pool: memory of the batches; one of its own if None.
        builder: makes the batches, in place of one that is made from features, masks, edge_weight and pool.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        parts: Sequence[int],
        load_part: Callable[[int], Any],
        features,
        targets: Mapping[int, np.ndarray],
        sampler: BatchSampler,
        *,
        labels: np.ndarray | None = None,
        masks: Mapping[str, np.ndarray] | None = None,
        edge_weight: np.ndarray | None = None,
        batch_size: int = 512,
        seed: int = 0,
        passes: int = 1,
        num_threads: int = 1,
        prefetch_batches: int | None = None,
        lookahead_batches: int = 0,
        pad_to: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        return_e_id: bool = False,
        pool: BufferPool | None = None,
        builder: BatchBuilder | None = None,
    ):
        prefetch_batches = num_threads + 1 if prefetch_batches is None else prefetch_batches
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("passes", passes, 1),
            ("num_threads", num_threads, 0),
            ("prefetch_batches", prefetch_batches, 1),
            ("lookahead_batches", lookahead_batches, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        counts = {part: sampler.num_batches(len(targets[part]), batch_size, drop_last) for part in parts}
        self.walk = PartWalk(tuple(parts), counts, passes)
        if pad_to is not None and pad_to < len(self.walk):
            raise ValueError(f"pad_to must be >= {len(self.walk)}, this rank's batches, got {pad_to}")
        self.length = len(self.walk) if pad_to is None else pad_to
        self.batch_size, self.seed = batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.num_threads, self.prefetch_batches = num_threads, prefetch_batches
        self.lookahead_batches = lookahead_batches
        masks = {} if masks is None else masks
        self._stager = PartStager(load_part, targets, sampler, labels, masks, seed)
        self._shelf = PartShelf(self._stager)
        mask_names = tuple(name for name in MASK_NAMES if name in masks)
        self._builder = builder or BatchBuilder(
            sampler, features, pool or BufferPool(), mask_names, edge_weight, return_e_id
        )
        self.epoch = 0
        self._delivered = 0
        self._resume_at = 0
        self._waited_s = self._ran_s = 0.0

    def __len__(self) -> int:
        """Return the batches of an epoch, padding included."""
        return self.length

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Where Lightning looks for `set_epoch`: it calls `loader.batch_sampler.sampler.set_epoch`, not the loader's.

        (It would also look at `loader.sampler`, but replaces that under `overfit_batches`.)
        """
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields; Lightning calls it."""
        if epoch != self.epoch:
            self.epoch, self._delivered, self._resume_at = epoch, 0, 0

    def set_sampler(self, sampler: BatchSampler) -> None:
        """Draw the batches of the next iteration by another sampler; not while one is under way.

        Raises:
            ValueError: it would give another number of batches.
        """
        for part, count in self.walk.num_batches.items():
            found = sampler.num_batches(len(self._stager.targets[part]), self.batch_size, self.drop_last)
            if found != count:
                raise ValueError(f"part {part} has {count} batches, with the new sampler it would have {found}")
        # What stands on the shelf was prepared for the old one.
        self._stager = replace(self._stager, sampler=sampler)
        self._shelf = PartShelf(self._stager)
        self._builder.sampler = sampler

    @property
    def waiting_share(self) -> float:
        """Share of time that the reader waited for batches, in [0, 1]: of the iteration under way, or of the last."""
        return self._waited_s / self._ran_s if self._ran_s else 0.0

    def state_dict(self) -> dict[str, int]:
        """Return where the walk stands, by batches handed over, whatever is prepared already; the same on all ranks."""
        return {
            "epoch": self.epoch,
            "delivered": self._delivered,
            "length": self.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on where the state was taken.

        Raises:
            ValueError: the state was taken within an epoch of another shape.
        """
        if 0 < state["delivered"] < state["length"]:
            for name in ("length", "batch_size", "seed"):
                if state[name] != getattr(self, name):
                    raise ValueError(
                        f"the checkpoint stands within an epoch of {name}={state[name]}, this loader has {name}="
                        f"{getattr(self, name)}: resume with the same setting, or from the end of an epoch"
                    )
        self.epoch = state["epoch"]
        self._resume_at = self._delivered = state["delivered"]

    def __iter__(self) -> Iterator[MiniBatch | None]:
        # Nothing is read before the first batch is asked for: Lightning sets the epoch after it made the iterator.
        start = self._resume_at if self._resume_at < self.length else 0
        self._resume_at, self._delivered = 0, start
        batches = self._batches(start)
        begun, self._waited_s = time.perf_counter(), 0.0
        try:
            while True:
                asked = time.perf_counter()
                batch = next(batches, None)
                given = time.perf_counter()
                self._waited_s, self._ran_s = self._waited_s + given - asked, given - begun
                if batch is None:
                    break
                self._delivered += 1
                yield batch
                del batch
        finally:
            batches.close()
        while self._delivered < self.length:
            self._delivered += 1
            yield None

    def batch_at(self, position: Position) -> MiniBatch:
        """Prepare one batch in the calling thread."""
        return self._prepare(self._builder.build, position, self._shelf.request(position.part, None))

    def _batches(self, start: int) -> Iterator[MiniBatch]:
        prepare = self._builder.draw if self.lookahead_batches else self._builder.build
        batches = self._alone(start, prepare) if self.num_threads == 0 else self._ahead(start, prepare)
        return self._foretold(batches) if self.lookahead_batches else batches

    def _alone(self, start: int, prepare: Callable) -> Iterator[MiniBatch]:
        for position in self.walk.positions(self.epoch, start):
            yield self._prepare(prepare, position, self._shelf.request(position.part, None))

    def _foretold(self, drawn: Iterator[MiniBatch]) -> Iterator[MiniBatch]:
        """Yield drawn batches in order, their features gathered once the reads of those behind them are told."""
        fillers = ThreadPoolExecutor(max(1, self.num_threads), thread_name_prefix=_THREAD_NAME)
        features, ended = self._builder.features, False
        told: deque[MiniBatch] = deque()
        pending: deque[Future] = deque()
        try:
            while not ended or told or pending:
                while not ended and len(told) + len(pending) < self.lookahead_batches + self.prefetch_batches:
                    batch = next(drawn, None)
                    ended = batch is None
                    if not ended:
                        features.expect([batch.n_id.numpy()])
                        told.append(batch)
                while told and len(pending) < self.prefetch_batches:
                    pending.append(fillers.submit(self._builder.fill, told.popleft()))
                if pending:
                    batch = pending.popleft().result()
                    if ended and not (told or pending):
                        _stop(fillers)  # Lightning stops asking at the last batch: no thread may outlive it
                    yield batch
                    del batch
        finally:
            drawn.close()
            _stop(fillers)
            features.forget()

    def _ahead(self, start: int, prepare: Callable) -> Iterator[MiniBatch]:
        """Yield batches in order while threads prepare the next ones, at most one part further."""
        workers = ThreadPoolExecutor(self.num_threads, thread_name_prefix=_THREAD_NAME)
        stager = ThreadPoolExecutor(1, thread_name_prefix=f"{_THREAD_NAME}-part")
        pending: deque[tuple[Position, Future]] = deque()
        positions = self.walk.positions(self.epoch, start)
        coming = next(positions, None)
        try:
            while coming or pending:
                visit = pending[0][0].visit if pending else coming.visit
                while coming and len(pending) < self.prefetch_batches and coming.visit <= visit + 1:
                    staged = self._shelf.request(coming.part, stager)
                    pending.append((coming, workers.submit(self._prepare, prepare, coming, staged)))
                    coming = next(positions, None)
                position, future = pending.popleft()
                after = self.walk.after(position.part)
                if after is not None:
                    self._shelf.request(after, stager)
                batch = future.result()
                del future
                if not (coming or pending):
                    _stop(workers, stager)  # Lightning stops asking at the last batch: no thread may outlive it
                yield batch
                del batch
        finally:
            pending.clear()
            _stop(workers, stager)

    def _prepare(self, prepare: Callable, position: Position, staged: Future) -> MiniBatch:
        try:
            part = staged.result()
            items = part.items(
                self._builder.sampler, self.batch_size, self.drop_last, self.seed, position.epoch, self.shuffle
            )
            key = batch_key(self.seed, position.epoch, position.part, position.batch)
            return prepare(part, items[position.batch], key)
        except Exception as error:
            raise GNNScaleError(
                f"part {position.part}, batch {position.batch} of epoch {position.epoch}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _stop(*executors: ThreadPoolExecutor) -> None:
    """End the threads and wait for them; a thread of theirs that runs this (garbage collection) does not."""
    inside = threading.current_thread().name.startswith(_THREAD_NAME)
    for executor in executors:
        executor.shutdown(wait=not inside, cancel_futures=True)
