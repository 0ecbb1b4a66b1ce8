"""How batches get their feature rows: chosen by what memory holds; the rest of the code only asks for rows."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import short
from ..events import clock
from ..memory import format_bytes
from ..partition_store.features import Column, LoadedRows
from ..partition_store.packed_features import features_of_part
from ..partition_store.planned_reads import RankedNodes
from ..planner.sweep_plan import rows_space
from ..sampler.minibatch import MiniBatch
from .batch_maker import BatchMaker
from .local_source import THREAD_NAME, stop

HOWS = ("mapped", "resident", "planned")
MOST_HALOS = 255  # the largest count of a node's halos in a store
# A visit that samples this many times the rows of its part reads nearly all of them: repeats are half of what is
# sampled.
_DENSE_VISIT = 3
# Batches whose buffers planned reads keep for others: one trains, one is handed over, one is filled, sizes are rounded
# up. With fewer, half of the memory was new, whose pages the system clears.
POOLED_BATCHES = 3.5
_ROW_USES = 6  # of a row in a window, about
_END = object()


@dataclass(frozen=True)
class RowReads:
    """How the batches of one loader get their feature rows.

    Args:
        how: "mapped": from the table as it is, for tables that memory holds (or a `FeatureBuffer`). "resident": all
            rows of a part are read in order while the part before it trains. "planned": batches are sampled ahead, and
            the rows of a run of them are read together, each once, in order.
        window_bytes: rows that are read together, bytes; of "planned". Swept: rows that are held.
        windows_held: such windows in memory, 1 or 2: with 2 the next one is read while batches of the first train.
        kept_halos: rows of nodes in at least so many parts' halos are read once and stay in memory, if the table has
            these counts; 0: none do.
        fill_here: batches are sampled without features by their source, and filled by threads of this process;
            "planned" and `lookahead_batches` imply it.
        lookahead_batches: batches sampled ahead, whose reads are announced to the table's `expect`; of "mapped".
        batches_ahead: batches that are prepared ahead; None: as many as the loader was given.
        pool_bytes: most memory that the loader's pool of buffers keeps; None: the pool's own.
        is_swept: Rows are read range after range of their table for all batches that wait, see `RowSweep`; of
            "planned", from a dense table.
        waiting_bytes: Most bytes of batches that wait so, without features; None: no limit.
        shared_by: Processes of the machine that share the sweep, >= 1; window_bytes, waiting_bytes and predicted_bytes
            are those of all together.
        by_part: Batches that wait are sampled part after part, also where they mix several: two parts are in memory.
        share_read: Of "resident" and "planned" the share of rows of parts and halos that does not stay in memory.
        predicted_bytes: bytes of rows that an epoch is predicted to read; None: unknown.
        why: the reason, one line.

    Raises:
        ValueError: an argument out of range.
    """

    how: str = "mapped"
    window_bytes: int = 256 << 20
    windows_held: int = 2
    kept_halos: int = 0
    fill_here: bool = False
    lookahead_batches: int = 0
    batches_ahead: int | None = None
    pool_bytes: int | None = None
    is_swept: bool = False
    waiting_bytes: int | None = None
    shared_by: int = 1
    by_part: bool = False
    share_read: float = 1.0
    predicted_bytes: int | None = None
    why: str = ""

    def __post_init__(self):
        if self.how not in HOWS:
            raise ValueError(f"row reads must be one of {', '.join(HOWS)}, got {short(self.how)}")
        if self.windows_held not in (1, 2):
            raise ValueError(f"windows_held must be 1 or 2, got {self.windows_held}")
        if not 0 <= self.kept_halos <= MOST_HALOS:
            raise ValueError(f"kept_halos must be in [0, {MOST_HALOS}], got {self.kept_halos}")
        if (self.is_swept and self.how != "planned") or (self.by_part and not self.is_swept):
            raise ValueError(f"is_swept needs planned reads and by_part needs is_swept, got how={self.how!r}")
        if self.lookahead_batches < 0:
            raise ValueError(f"lookahead_batches must be >= 0, got {self.lookahead_batches}")
        if self.batches_ahead is not None and self.batches_ahead < 1:
            raise ValueError(f"batches_ahead must be >= 1, got {self.batches_ahead}")

    @property
    def fills_here(self) -> bool:
        """Whether batches come from their source without features."""
        return self.fill_here or self.lookahead_batches > 0 or self.how == "planned"


class Footprint(NamedTuple):
    """The sizes of a loader's first batch, or of the mean of some.

    Attributes:
        part_bytes: its part in memory, without feature rows.
        rows: its rows.
        sampled_bytes: the batch, without features.
        waiting_bytes: the same as it waits, see `WaitingBatch`.
        own_rows: rows in the core of its part.
        part_edges, part_rows: edges and nodes of its part, with the halo.
        uses: `PartUse` of its part, or of all those whose mean this is.
        target_rows: rows that the layers compute, of all layers together; of one layer where hops are not told apart.
    """

    part_bytes: int
    rows: int
    sampled_bytes: int
    waiting_bytes: int = 0
    own_rows: int = 0
    part_edges: int = 0
    part_rows: int = 0
    uses: tuple = ()
    target_rows: int = 0


def fits_in_memory(features, free_bytes: int) -> bool:
    """Whether the page cache can hold all feature rows, with as much again to spare."""
    return 2 * features.nbytes <= free_bytes


def choose_row_reads(
    features,
    first: Footprint,
    *,
    free_bytes: int,
    part_rows: int,
    held_rows: int,
    parts_held: int,
    batches_held: int,
    visit_batches: int,
    least_ahead: int | None = None,
    keeps: bool = True,
    part_bytes: int | None = None,
    step_bytes: int = 0,
) -> RowReads:
    """Decide how a loader's batches get their rows.

    Args:
        features: A `Column` with `nbytes`.
        first: Footprint of the loader's first batch.
        free_bytes: Memory that this process may still take, bytes; see `free_memory_bytes`.
        part_rows: Rows of the largest part with its halo; rows of the whole graph where batches cross parts.
        held_rows: Upper bound on the rows of all parts that are in memory at a time.
        parts_held: Number of parts that are in memory at a time.
        batches_held: Number of batches that are in memory at a time.
        visit_batches: Average number of batches in a visit to a part.
        least_ahead: Batches to prepare ahead where memory is short, so that every thread has one; None: `batches_held`
            - 2, that is, without the batch that trains and one more.
        keeps: Whether parts with a halo of one hop are loaded in this process, where they share rows that stay.
        part_bytes: Bytes of all parts that are in memory at a time; None: `parts_held` times those of the first.
        step_bytes: What a step of the model is predicted to take of this memory; 0: unknown.
    """
    row_bytes = features.nbytes / max(features.num_rows, 1)
    gathered = features.batch_row_bytes if features.is_sparse else features.dim * features.dtype.itemsize
    batch_bytes = int(first.rows * gathered + first.sampled_bytes)
    # Beside the parts: the batch that trains is also there in the model's dtype.
    other = parts_held * first.part_bytes if part_bytes is None else part_bytes
    other += first.rows * (features.batch_row_bytes - gathered)

    def space(batches: int) -> int:
        return int(max(rows_space(free_bytes, step_bytes) - other - batches * batch_bytes, 0))

    if features.nbytes <= space(batches_held):
        return RowReads(why=f"{format_bytes(features.nbytes)} of features fit the {format_bytes(free_bytes)} free")
    at_hand = f"of {format_bytes(free_bytes)} free"
    least_ahead = batches_held - 2 if least_ahead is None else least_ahead
    choices = _kept_rows(features)
    # Packed rows are two runs on disk, which planned reads would read nearly whole, once a window.
    dense = features.is_packed or visit_batches * first.rows >= _DENSE_VISIT * part_rows
    for kept in choices[0 if keeps else -1 :] if dense else ():
        beside, resident = kept.rows * row_bytes, held_rows * row_bytes * kept.share_read
        if beside + resident <= space(least_ahead + 2):
            why = f"the rows of {parts_held} parts take {format_bytes(int(resident))} {at_hand}{kept.told(row_bytes)}"
            pool_bytes = (least_ahead + 2) * batch_bytes * 5 // 4
            ahead = {"batches_ahead": least_ahead, "pool_bytes": pool_bytes}
            return RowReads("resident", kept_halos=kept.halos, share_read=kept.share_read, why=why, **ahead)
    # Beside the batch that trains and the one that is filled: two windows of rows, and half of one to spare. Where they
    # do not hold a visit, whose rows are read again for each of its windows: one window of twice the rows.
    visit = held_rows * row_bytes * max(1, parts_held - 1) / parts_held
    for kept in choices:
        left = space(2) - kept.rows * row_bytes
        held = 2 if visit * kept.share_read <= left * 2 / 5 else 1
        if held == 2 or kept.rows * row_bytes <= space(2) // 2:
            break
    window = max(int(left * 4 / (5 * held)), int(first.rows * row_bytes * kept.share_read))
    why = f"rows are read for a run of batches, {format_bytes(window)} at a time, {at_hand}{kept.told(row_bytes)}"
    # The pool's are also the sampled batches of the windows.
    sampled = first.sampled_bytes / max(first.sampled_bytes + first.rows * row_bytes * kept.share_read / _ROW_USES, 1)
    pool_bytes = int(POOLED_BATCHES * batch_bytes + held * window * sampled)
    return RowReads("planned", window, held, kept.halos, pool_bytes=pool_bytes, share_read=kept.share_read, why=why)


class _Kept(NamedTuple):
    """Rows that may stay in memory: see `RowReads.kept_halos`.

    Attributes:
        halos: the fewest halos that contain their nodes; 0: there are none.
        rows: how many they are.
        share_read: the share of the rows of parts and halos that is then still read, in (0, 1].
    """

    halos: int
    rows: int
    share_read: float

    def told(self, row_bytes: float) -> str:
        """Describe what is kept, as the end of a sentence."""
        return f"; {format_bytes(int(self.rows * row_bytes))} of the rows read most stay" if self.rows else ""


def _kept_rows(features) -> list[_Kept]:
    """Return choices of rows that may stay in memory, from most rows to none."""
    counts = features.halo_count
    if counts is None:
        return [_Kept(0, 0, 1.0)]
    nodes = np.bincount(counts, minlength=MOST_HALOS + 1)
    visits = nodes * (1 + np.arange(MOST_HALOS + 1))  # of a node's row: by its part, and by those with it in a halo
    rows, kept = nodes[::-1].cumsum()[::-1], visits[::-1].cumsum()[::-1] / max(visits.sum(), 1)
    return [_Kept(halos, int(rows[halos]), float(1 - kept[halos])) for halos in range(1, MOST_HALOS + 1)] + [
        _Kept(0, 0, 1.0)
    ]


def keep_rows(features, reads: RowReads) -> LoadedRows | None:
    """Read the rows that stay in memory; None where none do.

    Cost: one pass over the table, without gaps of more than 16 KiB between such rows.
    """
    if not reads.kept_halos:
        return None
    if features.halo_count is None:
        raise ValueError(
            f"kept_halos={reads.kept_halos} needs a store with packed halo rows: write it with pack_halo=True"
        )
    held = RankedNodes.empty(features.num_rows)
    held.add(np.flatnonzero(features.halo_count >= reads.kept_halos))
    return LoadedRows.of(features.owned, held)


def fill_told(
    sampled: Iterator[MiniBatch], maker: BatchMaker, reads: RowReads, num_threads: int, prefetch_batches: int
) -> Iterator[MiniBatch]:
    """Yield sampled batches in order, their features gathered once the reads of later ones are announced.

    Args:
        sampled: Batches without features.
        maker: Fills the batches.
        reads: How rows are read, with the number of batches to look ahead.
        num_threads: Number of threads that fill batches; at least one is used.
        prefetch_batches: Number of batches that are filled ahead, >= 1.
    """
    fillers = ThreadPoolExecutor(max(1, num_threads), thread_name_prefix=THREAD_NAME)
    features, ended = maker.features, False
    told: deque[MiniBatch] = deque()
    pending: deque[Future] = deque()
    try:
        while not ended or told or pending:
            while not ended and len(told) + len(pending) < reads.lookahead_batches + prefetch_batches:
                batch = next(sampled, None)
                ended = batch is None
                if not ended:
                    if reads.lookahead_batches:
                        features.expect([batch.n_id.numpy()])
                    told.append(batch)
            while told and len(pending) < prefetch_batches:
                pending.append(fillers.submit(maker.fill, told.popleft()))
            if pending:
                batch = pending.popleft().result()
                if ended and not (told or pending):
                    stop(fillers)  # Lightning stops at the last batch: no thread may outlive it
                yield batch
                del batch
    finally:
        sampled.close()
        stop(fillers)
        if reads.lookahead_batches:
            features.forget()


@dataclass(frozen=True)
class NamedColumns:
    """Several columns of the same nodes, read and loaded together by name, as one `Column` is.

    Attributes:
        columns: The columns by name.
    """

    columns: Mapping[str, Column]
    is_packed = False

    @property
    def num_rows(self) -> int:
        """Number of nodes."""
        return next(iter(self.columns.values())).num_rows

    @property
    def nbytes(self) -> int:
        """Bytes as they are stored."""
        return sum(column.nbytes for column in self.columns.values())

    def read(self, ids: np.ndarray, out: None = None) -> dict[str, Any]:
        """Return the rows of each column, by its name; see `Column.read`."""
        return {name: column.read(ids, out) for name, column in self.columns.items()}

    def load(self, ids: np.ndarray) -> "tuple[NamedColumns, None]":
        """Read the rows of (num,) ascending ids into columns in memory; see `Column.load`."""
        return NamedColumns({name: _loaded(column, ids) for name, column in self.columns.items()}), None


def _loaded(column: Column, ids: np.ndarray) -> Column:
    rows, order = column.load(ids)
    if order is None:
        return rows
    held = RankedNodes.empty(len(ids))
    held.add(np.arange(len(ids)))
    return LoadedRows(held.count(), rows, len(ids), order)


@dataclass
class _Window:
    """Batches whose rows are read together.

    Attributes:
        features: the table of the rows.
        kept: rows that stay in memory, and are not read.
        batches: those that have not been handed over.
        nodes: part id (None where parts do not matter) to the nodes that are read.
        rows: likewise, the results of the reads; empty until they begin.
        num_bytes: What the rows and the sampled batches take.
    """

    features: Any
    kept: LoadedRows | None
    batches: deque = field(default_factory=deque)
    nodes: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)
    num_bytes: float = 0.0

    def key(self, batch: MiniBatch) -> int | None:
        """Return the nodes whose rows a batch reads."""
        return batch.part if self.features.is_packed else None

    def add(self, batch: MiniBatch) -> None:
        """Append a batch."""
        nodes = self.nodes.get(self.key(batch))
        if nodes is None:
            nodes = self.nodes[self.key(batch)] = RankedNodes.empty(self.features.num_rows)
        row_bytes = self.features.nbytes / self.features.num_rows
        new = nodes.add(batch.host_ids, self.kept and self.kept.held)
        self.num_bytes += new * row_bytes + sampled_bytes(batch)
        self.batches.append(batch)

    def read(self, reader: ThreadPoolExecutor) -> None:
        """Begin to read, unless that has begun."""
        if not self.rows:
            for key, nodes in self.nodes.items():
                table = self.features if key is None else features_of_part(self.features, key)
                self.rows[key] = reader.submit(_read_rows, table, nodes, self.kept)


def _read_rows(table, nodes: RankedNodes, kept: LoadedRows | None) -> LoadedRows:
    with clock.doing("read"):
        return LoadedRows.of(table, nodes, kept)


def _windows(
    sampled: Iterator[MiniBatch], features, kept: LoadedRows | None, most_bytes: int, visits_together: int = 1
) -> Iterator[_Window | None]:
    """Yield windows in order, and None after a batch that does not end one.

    A part whose rows are read in two windows is read nearly twice, so a window ends where few visits go on.
    """
    batches: list[MiniBatch] = []
    ended, fits, forming = False, None, _Window(features, kept)
    while not ended or batches:
        while fits is None and len(forming.batches) < len(batches):
            forming.add(batches[len(forming.batches)])
            if forming.num_bytes > most_bytes:
                fits = max(1, len(forming.batches) - 1)
        if not ended and (fits is None or len(batches) < fits + visits_together):
            batch = next(sampled, None)
            ended = batch is None
            if not ended:
                batches.append(batch)
                del batch
                yield None
            continue
        if not batches:
            return
        end = len(batches) if fits is None else window_end([batch.part for batch in batches], fits)
        if end != len(forming.batches):
            forming = _Window(features, kept)
            for batch in batches[:end]:
                forming.add(batch)
            del batch
        del batches[:end]
        window, fits, forming = [forming], None, _Window(features, kept)
        yield window.pop()  # its rows are gone as soon as its last batch


def window_end(parts: Sequence[int], most: int) -> int:
    """Return how many batches make a window, at least half of those that fit: as few visits a batch as may be go on.

    Args:
        parts: (num,) of the batches to come.
        most: So many fit, at most num.
    """
    first = {part: i for i, part in reversed([*enumerate(parts)])}
    last = {part: i for i, part in enumerate(parts)}
    open_visits = np.zeros(len(parts) + 1, np.int64)  # of a window of so many batches
    for part, i in first.items():
        open_visits[i + 1 : last[part] + 1] += 1
    ends = np.arange(max(1, most // 2), most + 1)
    return int(ends[::-1][np.argmin((open_visits[ends] / ends)[::-1])])


def fill_windows(
    sampled: Iterator[MiniBatch],
    features: Any,
    fill: Callable[[MiniBatch, LoadedRows], Any],
    reads: RowReads,
    kept: LoadedRows | None = None,
    visits_together: int = 1,
) -> Iterator[MiniBatch]:
    """Yield sampled batches in order, their rows read together a window of batches at a time.

    While the batches of one window are handed over, those of the next are sampled, and with two windows its rows read.

    Args:
        sampled, reads: see `fill_told`.
        features: The column whose rows are read, or `NamedColumns`.
        fill: Gives a batch its rows, from those of its window, or tells it where they are.
        kept: rows that stay in memory, see `keep_rows`.
        visits_together: Parts whose batches take turns.
    """
    reader = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-rows")
    coming, ended = _windows(sampled, features, kept, reads.window_bytes, visits_together), False
    windows: deque[_Window] = deque()
    try:
        while True:
            samples = 0
            # Two batches are sampled for one that is handed over, so that the next window is read in time.
            while not ended and len(windows) < 2 and (samples < 2 or not windows):
                window = next(coming, _END)
                ended, samples = window is _END, samples + 1
                if isinstance(window, _Window):
                    windows.append(window)
                    if len(windows) <= reads.windows_held:
                        window.read(reader)
            if not windows:
                return
            batch = windows[0].batches.popleft()
            fill(batch, windows[0].rows[windows[0].key(batch)].result())
            if not windows[0].batches:
                windows.popleft()  # frees its rows
                if windows:
                    windows[0].read(reader)
            if ended and not windows:
                stop(reader)  # Lightning stops at the last batch: no thread may outlive it
            window = None
            yield batch
            del batch
    finally:
        coming.close()
        sampled.close()
        stop(reader)


def sampled_bytes(batch: MiniBatch) -> int:
    """Return the bytes of a batch without features."""
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
