"""How batches get their feature rows: what memory holds decides, and the rest of the code asks for rows."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..partition_store import LoadedRows, RankedNodes, features_of_part
from ..partition_store.packed_features import PackedFeatures
from ..sampler.minibatch import MiniBatch
from ..units import format_bytes
from .batch_builder import BatchBuilder
from .local_source import THREAD_NAME, stop

HOWS = ("mapped", "resident", "planned")
# Share of the free memory that rows and batches may take: the rest is for a model, its gradients, and other users.
_ROOM_SHARE = 0.7
# A visit that draws this many times the rows of its part reads nearly all of them: repeats are half of what is drawn.
_DENSE_VISIT = 3
_FILLED_AHEAD = 1  # batches filled from rows in memory, beside the one that trains


@dataclass(frozen=True)
class RowReads:
    """How the batches of one loader get their feature rows.

    Args:
        how: "mapped": from the table as it is, for tables that memory holds (or a `FeatureBuffer`). "resident": all
            rows of a part are read in order while the part before it trains. "planned": batches are drawn ahead, and
            the rows of a run of them are read together, each once, in order.
        window_bytes: rows that are read together, bytes; of "planned". Two such windows are in memory.
        fill_here: batches are drawn without features by their source, and filled by threads of this process;
            "planned" and `lookahead_batches` imply it.
        lookahead_batches: batches drawn ahead, whose reads are told to the table's `expect`; of "mapped".
        pool_bytes: most memory that the loader's pool of buffers keeps; None: the pool's own.
        why: the reason, one line.

    Raises:
        ValueError: an argument out of range.
    """

    how: str = "mapped"
    window_bytes: int = 256 << 20
    fill_here: bool = False
    lookahead_batches: int = 0
    pool_bytes: int | None = None
    why: str = ""

    def __post_init__(self):
        if self.how not in HOWS:
            raise ValueError(f"row reads must be one of {', '.join(HOWS)}, got {self.how!r}")
        if self.lookahead_batches < 0:
            raise ValueError(f"lookahead_batches must be >= 0, got {self.lookahead_batches}")

    @property
    def fills_here(self) -> bool:
        """Whether batches come from their source without features."""
        return self.fill_here or self.lookahead_batches > 0 or self.how == "planned"


class Footprint(NamedTuple):
    """What a loader's first batch takes.

    Attributes:
        part_bytes: the part that it is drawn from, in memory, without feature rows.
        rows: its rows.
        drawn_bytes: itself, without features.
    """

    part_bytes: int
    rows: int
    drawn_bytes: int


def fits_in_memory(features, free_bytes: int) -> bool:
    """Whether the page cache can hold all feature rows, with as much again to spare."""
    return 2 * features.nbytes <= free_bytes


def choose_row_reads(
    features,
    first: Footprint,
    *,
    free_bytes: int,
    part_rows: int,
    parts_held: int,
    batches_held: int,
    visit_batches: int,
) -> RowReads:
    """Decide how a loader's batches get their rows.

    Args:
        features: a `FeatureTable` with `nbytes`.
        first: of the loader.
        free_bytes: memory that this process may still take, see `free_memory_bytes`.
        part_rows: rows of the largest part, its halo with it; of the graph, where batches cross parts.
        parts_held: parts in memory at a time.
        batches_held: batches in memory at a time.
        visit_batches: batches of a visit to a part, on average.
    """
    row_bytes = features.nbytes / max(features.num_rows, 1)
    gathered = features.batch_row_bytes if features.is_sparse else features.dim * features.dtype.itemsize
    batch_bytes = int(first.rows * gathered + first.drawn_bytes)
    # Beside the parts: the batch that trains is also there in the model's dtype.
    other = parts_held * first.part_bytes + first.rows * (features.batch_row_bytes - gathered)

    def room(batches: int) -> int:
        return int(max(_ROOM_SHARE * free_bytes - other - batches * batch_bytes, 0))

    if features.nbytes <= room(batches_held):
        return RowReads(why=f"{format_bytes(features.nbytes)} of features fit the {format_bytes(free_bytes)} free")
    at_hand = f"of {format_bytes(free_bytes)} free"
    resident = int(parts_held * part_rows * row_bytes)
    if resident <= room(batches_held) and visit_batches * first.rows >= _DENSE_VISIT * part_rows:
        why = f"the rows of {parts_held} parts take {format_bytes(resident)} {at_hand}"
        return RowReads("resident", pool_bytes=batches_held * batch_bytes * 5 // 4, why=why)
    window = max(room(_FILLED_AHEAD + 2) // 3, int(first.rows * row_bytes))
    why = f"rows are read for a run of batches, {format_bytes(window)} at a time, {at_hand}"
    return RowReads("planned", window, pool_bytes=(_FILLED_AHEAD + 2) * batch_bytes * 5 // 4, why=why)


def fill_told(
    drawn: Iterator[MiniBatch], builder: BatchBuilder, reads: RowReads, num_threads: int, prefetch_batches: int
) -> Iterator[MiniBatch]:
    """Yield drawn batches in order, their features gathered once the reads of those behind them are told.

    Args:
        drawn: batches without features.
        builder: fills them.
        reads: with the batches to look ahead.
        num_threads: that fill batches, at least one.
        prefetch_batches: batches that are filled ahead, >= 1.
    """
    fillers = ThreadPoolExecutor(max(1, num_threads), thread_name_prefix=THREAD_NAME)
    features, ended = builder.features, False
    told: deque[MiniBatch] = deque()
    pending: deque[Future] = deque()
    try:
        while not ended or told or pending:
            while not ended and len(told) + len(pending) < reads.lookahead_batches + prefetch_batches:
                batch = next(drawn, None)
                ended = batch is None
                if not ended:
                    if reads.lookahead_batches:
                        features.expect([batch.n_id.numpy()])
                    told.append(batch)
            while told and len(pending) < prefetch_batches:
                pending.append(fillers.submit(builder.fill, told.popleft()))
            if pending:
                batch = pending.popleft().result()
                if ended and not (told or pending):
                    stop(fillers)  # Lightning stops asking at the last batch: no thread may outlive it
                yield batch
                del batch
    finally:
        drawn.close()
        stop(fillers)
        if reads.lookahead_batches:
            features.forget()


@dataclass
class _Window:
    """Batches whose rows are read together.

    Attributes:
        batches: those that are not being filled yet.
        nodes: part id (None where parts do not matter) to the nodes that are read.
        rows: likewise, what comes of the reads.
        num_bytes: What the rows and the drawn batches take.
        left: batches that have not been handed over.
    """

    batches: deque = field(default_factory=deque)
    nodes: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)
    num_bytes: float = 0.0
    left: int = 0


def fill_windows(drawn: Iterator[MiniBatch], builder: BatchBuilder, reads: RowReads) -> Iterator[MiniBatch]:
    """Yield drawn batches in order, their rows read together a window of batches at a time.

    While the batches of one window are handed over, those of the next are drawn and their rows read.

    Args:
        drawn, builder, reads: see `fill_told`.
    """
    fillers = ThreadPoolExecutor(_FILLED_AHEAD + 1, thread_name_prefix=THREAD_NAME)
    reader = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-rows")
    features, ended = builder.features, False
    row_bytes = features.nbytes / max(features.num_rows, 1)
    windows: deque[_Window] = deque()
    gathering = _Window()
    pending: deque[tuple[Future, _Window]] = deque()

    def take(batch: MiniBatch) -> None:
        key = batch.part if isinstance(features, PackedFeatures) else None
        nodes = gathering.nodes.setdefault(key, RankedNodes.empty(features.num_rows))
        gathering.num_bytes += nodes.add(batch.n_id.numpy()) * row_bytes + drawn_bytes(batch)
        gathering.batches.append(batch)
        gathering.left += 1

    def read(window: _Window) -> None:
        for key, nodes in window.nodes.items():
            table = features if key is None else features_of_part(features, key)
            window.rows[key] = reader.submit(LoadedRows.of, table, nodes)

    def fill(batch: MiniBatch, window: _Window) -> MiniBatch:
        key = batch.part if isinstance(features, PackedFeatures) else None
        return builder.fill(batch, window.rows[key].result())

    try:
        while True:
            draws = 0
            # Two batches are drawn for one that is handed over, so that the next window is read in time.
            while not ended and len(windows) < 2 and (draws < 2 or not windows):
                batch = next(drawn, None)
                ended = batch is None
                if not ended:
                    take(batch)
                    draws += 1
                if gathering.left and (ended or gathering.num_bytes >= reads.window_bytes):
                    read(gathering)
                    windows.append(gathering)
                    gathering = _Window()
            while len(pending) < _FILLED_AHEAD + 1:
                window = next((window for window in windows if window.batches), None)
                if window is None:
                    break
                pending.append((fillers.submit(fill, window.batches.popleft(), window), window))
            if not pending:
                return
            future, window = pending.popleft()
            batch = future.result()
            window.left -= 1
            if not window.left:
                windows.remove(window)
            del future, window  # the rows of a window that is done with
            if ended and not (pending or windows):
                stop(fillers, reader)  # Lightning stops asking at the last batch: no thread may outlive it
            yield batch
            del batch
    finally:
        drawn.close()
        stop(fillers, reader)


def drawn_bytes(batch: MiniBatch) -> int:
    """Return the bytes of a batch without features."""
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
