"""How many bytes an epoch will read, swept or part by part, and what a sweep holds; predicted from a first batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..system import PAGE_BYTES

_ROW_OVERHEAD = 16  # bytes of a row that is held: its slot, and the list of those that are read
LABEL_BYTES = 2.35  # of each node of the graph in each process: its label and masks
_NODE_BYTES = 1.4 + LABEL_BYTES  # of each node of the graph: its newest group, and which nodes are read, beside these
RANGES = 32  # of the table, at most: what a step of a sweep reads
LAG = 2  # groups of batches that are sampled and that train, beside those whose ranges are read
STEPS_AHEAD = 2  # of a sweep that are under way at a time
GAP_BYTES = 16 << 10  # of rows that are not needed: reading them takes less time than a second read
_SPACE_SHARE = 0.7  # of the free memory that rows and batches may take: the rest is for a model, and other users
_STEPS_LEFT = 3  # times what a step of the model takes: what it frees is kept for the next, see `FreedMemory`
_MOST_LEFT = 0.5  # of the free memory
WORTH = 0.8  # a sweep reads at most this share of what others read: its batches wait for a whole pass
ROWS_A_SEED, WAITING_BYTES = 171, 12  # of a batch of fan-outs 15, 10, 5, and of each of its rows while it waits
_LEAST_SHARE = 1e-5  # of an epoch
_CLASSES = 8  # of degrees, from one to twice it
_TRIES = 30  # of a bisection
_MARGIN = 1.05  # of rows held: groups are whole batches


@dataclass(frozen=True)
class EpochUse:
    """Which rows of a table the batches of an epoch use.

    A batch's rows are taken to lie in the core of its part, a share of `own_share`, or anywhere in the graph, each node
    in proportion to its degree.

    Attributes:
        num_rows, row_bytes: The table.
        rows: Rows of all batches, repeats counted.
        own_share: Share of them in the core of the batch's part, in [0, 1].
        waiting_bytes: Bytes of all batches while they wait, without features.
        part_rows: (num_parts,) rows of each part with its halo.
        degrees: (num,) degrees of some nodes, evenly chosen.
        edge_bytes: Bytes of edges and other columns that an epoch reads.
    """

    num_rows: int
    row_bytes: float
    rows: float
    own_share: float = 0.0
    waiting_bytes: float = 0.0
    part_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    degrees: np.ndarray = field(default_factory=lambda: np.ones(1))
    edge_bytes: float = 0.0

    @property
    def table_bytes(self) -> float:
        """Bytes of the table."""
        return self.num_rows * self.row_bytes

    @cached_property
    def _classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Degrees, and the share of the nodes that have about each: few classes, for speed."""
        degrees = np.asarray(self.degrees, np.float64)
        _, of_node, times = np.unique(
            np.round(np.log2(degrees + 1) * _CLASSES), return_inverse=True, return_counts=True
        )
        return np.bincount(of_node.reshape(-1), degrees) / times, times / times.sum()

    def densities(self, share: float) -> tuple[float, float]:
        """Return which share of the rows a share of an epoch uses: in the parts that it visits, and elsewhere."""
        degrees, weights = self._classes
        mean = self.rows / self.num_rows * degrees / max(float(degrees @ weights), 1e-9)
        own = -np.expm1(-mean * self.own_share)
        others = -np.expm1(-mean * (1 - self.own_share) * share)
        return float((own + others - own * others) @ weights), float(others @ weights)

    def distinct(self, share: float) -> float:
        """Return the distinct rows that a share of an epoch uses."""
        visited, elsewhere = self.densities(share)
        return self.num_rows * (share * visited + (1 - share) * elsewhere)

    def pass_bytes(self, share: float) -> float:
        """Return the bytes that a pass over the table reads for a share of an epoch."""
        visited, elsewhere = (self.read_share(density) for density in self.densities(share))
        return self.table_bytes * (share * visited + (1 - share) * elsewhere)

    def read_share(self, density: float) -> float:
        """Return which share of a table is read for rows chosen at random: gaps of up to 16 KiB are read too.

        Whole pages are read, and so about one more where a longer gap ends.
        """
        if density <= 0:
            return 0.0
        gap = GAP_BYTES / self.row_bytes
        is_last = (1 - density) ** gap  # before a longer gap
        skipped = is_last * (1 + gap * density)  # of the rows that lie in such gaps
        return min(1 - (1 - density) * min(skipped, 1.0) + density * is_last * PAGE_BYTES / self.row_bytes, 1.0)

    def part_bytes(self, share_read: float, is_packed: bool) -> float:
        """Return the bytes that an epoch reads part by part, all rows of core and halo.

        Args:
            share_read: Share of these rows that does not stay in memory.
            is_packed: Whether halos lie packed.
        """
        if is_packed:
            return float(self.part_rows.sum()) * share_read * self.row_bytes
        densities = self.part_rows * share_read / self.num_rows
        return sum(self.read_share(float(density)) for density in densities) * self.table_bytes


def rows_space(free_bytes: int, step_bytes: int = 0) -> float:
    """Return the bytes that rows and batches may take of free memory.

    Args:
        free_bytes: Memory that this process may still take.
        step_bytes: What a step of the model is predicted to take of it; 0: unknown, or nothing.
    """
    left = (1 - _SPACE_SHARE) * free_bytes
    return free_bytes - max(left, min(_STEPS_LEFT * step_bytes, _MOST_LEFT * free_bytes))


class SweepPlan(NamedTuple):
    """What a sweep holds and reads.

    Attributes:
        held_bytes, waiting_bytes: Of rows, and of batches that wait.
        passes: How often the table is gone through.
        read_bytes: Bytes of rows that an epoch reads.
    """

    held_bytes: int
    waiting_bytes: int
    passes: float
    read_bytes: float


def plan_sweep(use: EpochUse, space_bytes: float, open_bytes: float = 0.0) -> SweepPlan:
    """Choose how many batches wait in a sweep, as many as fit, and predict what it reads.

    Args:
        use: What the epoch uses.
        space_bytes: Memory of rows and of batches that wait.
        open_bytes: Of batches that wait for their turn among parts that take turns.
    """
    space = max(space_bytes - open_bytes - _NODE_BYTES * use.num_rows, 0)
    per_row = _MARGIN * (use.row_bytes + _ROW_OVERHEAD) / use.row_bytes

    def fits(share: float) -> bool:
        waiting = min(share * (1 + LAG / RANGES), 1.0) * use.waiting_bytes
        return per_row * _held_bytes(use, share) + waiting <= space

    share = 1.0 if fits(1.0) else largest_share(fits)
    held = min(_MARGIN * _held_bytes(use, share), space)
    waiting = int(max(space - held * (use.row_bytes + _ROW_OVERHEAD) / use.row_bytes, 0))
    if share == 1.0:
        return SweepPlan(int(held), waiting, 1.0, use.pass_bytes(1.0))
    return SweepPlan(int(held), waiting, 1 / share + 1, _sweep_bytes(use, share))


def held_beside(use: EpochUse, space_bytes: float, waiting_bytes: float) -> float:
    """Return the bytes of rows that fit beside batches that wait; arguments as of `plan_sweep`."""
    space = max(space_bytes - waiting_bytes - _NODE_BYTES * use.num_rows, 0)
    return space * use.row_bytes / (use.row_bytes + _ROW_OVERHEAD)


def largest_share(fits: Callable[[float], bool]) -> float:
    """Return the largest share in (0, 1] that fits, where smaller ones fit too; the least one if none does."""
    least, most = _LEAST_SHARE, 1.0
    for _ in range(_TRIES):
        share = (least * most) ** 0.5
        least, most = (share, most) if fits(share) else (least, share)
    return least


def window_bytes(use: EpochUse, window: float, sampled_bytes: float) -> float:
    """Predict the bytes that an epoch reads window by window, from rows that lie with their owners.

    Args:
        use: What the epoch uses.
        window: Bytes of rows and of sampled batches.
        sampled_bytes: Of all batches of the epoch, without features.
    """
    share = largest_share(lambda share: use.distinct(share) * use.row_bytes + share * sampled_bytes <= window)
    return use.pass_bytes(share) / share


def _held_bytes(use: EpochUse, share: float) -> float:
    """Return the bytes of rows that are held while a share of an epoch waits; the whole of it is held at once."""
    if share >= 1:
        return use.distinct(1.0) * use.row_bytes
    distinct = np.array([use.distinct(share * part / RANGES) for part in range(RANGES + 1)])
    # Rows that the newest groups alone need are held longest, those of the oldest leave first.
    steps = (RANGES - np.arange(RANGES) + STEPS_AHEAD) / RANGES
    return float(np.diff(distinct) @ np.minimum(steps, 1)) * use.row_bytes


def _sweep_bytes(use: EpochUse, share: float) -> float:
    """Return the bytes that a sweep reads in an epoch: fewer batches wait in its first and in its last pass."""
    ramp = sum(use.pass_bytes(share * part / RANGES) for part in range(1, RANGES)) / RANGES
    return max(1 / share - 1, 0) * use.pass_bytes(share) + 2 * ramp
