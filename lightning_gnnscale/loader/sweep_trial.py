"""What a sweep will read: its steps are gone through on a small likeness of the graph, without reading any row.

A node of the likeness stands for 2 ** j consecutive ones. It has as many ranges as the table; parts, the slots of rows
and the rows of batches are as much smaller. Chunks use nodes of their part's core and of its halo, in proportion to
powers of their degrees that chunks of some parts have shown.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..partition_store.features import DenseFeatures
from ..partition_store.part_graph import WholeGraph
from ..planner.sweep_plan import EpochUse
from .row_sweep import RowSweep
from .waiting_batch import WaitingBatch

_NODES = 1 << 16  # of the likeness, at least, and fewer than twice as many
_MOST_BATCHES = 600  # of the likeness: of more, several are one
_REGION = 64  # nodes of the likeness of about one density
_BLOCK_BITS, _LEVELS = 4, 32  # a halo lies in blocks of 16 nodes of the likeness
_POWERS = (-1.0, 3.0)
_TRIES = 20  # of a bisection
_SAMPLE = 1 << 14  # degrees of which powers are found
_NODES_AT_ONCE = 1 << 18


class PartUse(NamedTuple):
    """Which rows the chunks of a part use, as its first one has shown.

    Attributes:
        part: The part.
        seeds, own_rows, other_rows: Of the chunk; its rows in the part's core, and elsewhere.
        own_power, other_power: Nodes of the core, and of the halo, are used in proportion to (degree + 1) ** power.
        halo_power: Nodes of the graph are in the halo likewise.
        halo_blocks: (levels,) in how many blocks of 2 ** level consecutive nodes the halo lies.
        degrees: (num,) degrees of some nodes of the core, of all nodes where the chunk crosses parts.
    """

    part: int
    seeds: int
    own_rows: int
    other_rows: int
    own_power: float
    other_power: float
    halo_power: float
    halo_blocks: np.ndarray
    degrees: np.ndarray

    @classmethod
    def of(cls, batch, graph, part: int) -> "PartUse":
        """Return the use of a part by its chunk, sampled from its graph, a union with others, or the whole graph."""
        num_core = 0 if isinstance(graph, WholeGraph) else graph.num_core
        core, halo = _some(graph.degree[:num_core]), _some(graph.degree[num_core : graph.num_local])
        nodes, degree = batch.host_ids - graph.core_start, _some(batch.degree.cpu().numpy(), len(batch.n_id))
        own = (nodes >= 0) & (nodes < num_core)
        num_own, num_others = int(own.sum()), int((~own).sum())
        return cls(
            part,
            batch.batch_size,
            num_own,
            num_others,
            power_of_degree(core, degree[own], num_own / max(num_core, 1)),
            power_of_degree(halo, degree[~own], num_others / max(graph.num_local - num_core, 1)),
            power_of_degree(core, halo, 0.0),
            blocks_touched(graph.halo_nodes if num_core else np.arange(0)),
            core if len(core) else halo,
        )


def blocks_touched(nodes: np.ndarray) -> np.ndarray:
    """Return in how many blocks of 2 ** level nodes (num,) ascending nodes lie, for each level."""
    # Two neighbours of the list are in one block of a level from the highest bit on in which they differ.
    bits = np.zeros(65, np.int64)
    for first in range(0, len(nodes) - 1, _NODES_AT_ONCE):
        some = nodes[first : first + _NODES_AT_ONCE + 1]
        _, lengths = np.frexp(np.bitwise_xor(some[1:], some[:-1]).astype(np.float64))
        bits += np.bincount(lengths, minlength=len(bits))
    return min(len(nodes), 1) + bits.sum() - np.cumsum(bits)[:_LEVELS]


def _some(values: np.ndarray, most: int = _SAMPLE) -> np.ndarray:
    return np.maximum(values[:: max(1, len(values) // max(1, most))], 0).astype(np.float64)


def power_of_degree(degrees: np.ndarray, chosen: np.ndarray, share: float) -> float:
    """Return the power of degree + 1 in proportion to which nodes were chosen, none twice; 0 without nodes.

    Args:
        degrees: (num,) of the nodes.
        chosen: (num_chosen,) of those that were chosen.
        share: How many of the nodes that is.
    """
    if not len(degrees) or not len(chosen):
        return 0.0
    logs, counts = np.unique(np.round(np.log2(np.asarray(degrees, np.float64) + 1) * 8) / 8, return_counts=True)
    target, (least, most) = float(np.log2(np.asarray(chosen, np.float64) + 1).mean()), _POWERS
    for _ in range(_TRIES):
        power = (least + most) / 2
        used = counts * _probability(2.0 ** (power * (logs - logs.mean())), counts, share)
        least, most = (power, most) if used @ logs < target * used.sum() else (least, power)
    return (least + most) / 2


def _probability(weights: np.ndarray, counts: np.ndarray, share: float) -> np.ndarray:
    """Return 1 - exp(-t * weight) for each class, with t such that this share of all nodes is chosen."""
    if share <= 0:
        return weights
    low, high = -60.0, 60.0
    for _ in range(50):
        middle = (low + high) / 2
        found = -np.expm1(-(2.0**middle) * weights)
        low, high = (middle, high) if found @ counts < share * counts.sum() else (low, middle)
    return -np.expm1(-(2.0**low) * weights)


class TrialRun(NamedTuple):
    """What a sweep did in a trial.

    Attributes:
        passes: How often the table was gone through.
        read_bytes: Bytes of rows that it reads.
        waiting_bytes: Most bytes of batches that waited.
    """

    passes: float
    read_bytes: float
    waiting_bytes: float


class _Trial(RowSweep):
    """A sweep that counts what it would read."""

    def __init__(self, num_nodes: int, held_rows: int, waiting_bytes: float | None, use: EpochUse):
        super().__init__(DenseFeatures(np.broadcast_to(np.uint8(0), (num_nodes, 1))), held_rows, waiting_bytes)
        self.use, self.read_nodes, self.most_waiting = use, 0.0, 0.0

    def _read(self, nodes: np.ndarray, slots: np.ndarray) -> None:
        """Count how many nodes a read takes with its gaps: some regions of a range are dense, others sparse."""
        if len(nodes):
            counts = np.bincount((nodes - nodes[0]) // _REGION)
            self.read_nodes += _REGION * sum(map(self.use.read_share, (counts / _REGION).tolist()))

    def run(self, batches: Iterator[WaitingBatch]) -> None:
        """Go through a sweep's steps, in the order of `fill_swept`."""
        try:
            while not (self.is_empty and not self.takes_more):
                added = 0
                while self.takes_more and (added < 2 or not self.is_ready):
                    batch, added = next(batches, None), added + 1
                    self.end() if batch is None else self.add(batch)
                self.most_waiting = max(self.most_waiting, self._waiting)
                self.advance()
                if self.is_ready:
                    self.take()
                    self.free()
                elif not self.is_empty:
                    self.wait()
        finally:
            self.close()


@dataclass(frozen=True, eq=False)
class SweepTrial:
    """The batches of an epoch, in a likeness of the graph.

    Args:
        use: What the epoch uses.
        part_offsets: (num_parts + 1,) first node of each part.
        halo_rows: (num_parts,) nodes of each part's halo; of a batch that crosses parts all nodes.
        batches: Of each batch the parts of its chunks, in order.
        rows: (num_parts, 2) rows of a chunk of each part, in its core and elsewhere.
        parts: What some parts' chunks use; others are like the one that has about as many edges a node.
        like: (num_parts,) which of `parts` each part is like.
    """

    use: EpochUse
    part_offsets: np.ndarray
    halo_rows: np.ndarray
    batches: Sequence[Sequence[int]]
    rows: np.ndarray
    parts: Sequence[PartUse]
    like: np.ndarray

    def together(self, num_processes: int) -> "SweepTrial":
        """Return the trial of a sweep that so many processes share, whose batches at one place use the same parts."""
        use = replace(
            self.use, rows=num_processes * self.use.rows, waiting_bytes=num_processes * self.use.waiting_bytes
        )
        return replace(self, use=use, batches=[[*parts] * num_processes for parts in self.batches])

    @cached_property
    def _bits(self) -> int:
        return max(0, (self.use.num_rows // _NODES).bit_length() - 1)

    @cached_property
    def _num_nodes(self) -> int:
        return -(-self.use.num_rows >> self._bits)

    @cached_property
    def _logs(self) -> np.ndarray:
        """Logarithms of the degrees of the likeness's nodes."""
        random, logs = np.random.default_rng(0), np.empty(self._num_nodes)
        offsets = self._offsets
        for part in range(len(offsets) - 1):
            given = self.parts[self.like[part]].degrees
            num = offsets[part + 1] - offsets[part]
            logs[offsets[part] : offsets[part + 1]] = np.log(given[random.integers(0, len(given), num)] + 1)
        return logs

    @cached_property
    def _offsets(self) -> np.ndarray:
        offsets = np.asarray(self.part_offsets, np.int64) >> self._bits
        offsets[-1] = self._num_nodes
        return offsets

    def _waiting(self) -> Iterator[WaitingBatch]:
        """Yield the batches, several as one where there are many."""
        scale, logs, offsets = 2.0**-self._bits, self._logs, self._offsets
        random, a_row = np.random.default_rng(1), self.use.waiting_bytes / max(self.use.rows, 1)
        together = max(1, -(-len(self.batches) // _MOST_BATCHES))

        @lru_cache(maxsize=64)
        def halo(part: int) -> tuple[np.ndarray, np.ndarray]:
            one, num = self.parts[self.like[part]], round(self.halo_rows[part] * scale)
            others = np.arange(len(logs))
            if self.halo_rows[part] < self.use.num_rows:
                others = others[np.isin(others >> _BLOCK_BITS, self._blocks(part))]
                others = others[(others < offsets[part]) | (others >= offsets[part + 1])]
            found = _choose(others, np.exp(one.halo_power * logs[others]), num, random, 1)
            return found, np.exp(one.other_power * logs[found])

        @lru_cache(maxsize=64)
        def core(part: int) -> tuple[np.ndarray, np.ndarray]:
            nodes = np.arange(offsets[part], offsets[part + 1])
            return nodes, np.exp(self.parts[self.like[part]].own_power * logs[nodes])

        for first in range(0, len(self.batches), together):
            parts, found, rows = Counter(chain(*self.batches[first : first + together])), [], 0.0
            for part, count in parts.items():
                rows += count * float(self.rows[part].sum()) * scale
                for (nodes, weights), num in zip((core(part), halo(part)), self.rows[part], strict=True):
                    found.append(_choose(nodes, weights, int(num * scale + random.random()), random, count))
            yield WaitingBatch(np.concatenate(found), 0, {}, int(rows * a_row))

    def _blocks(self, part: int) -> np.ndarray:
        """Return the blocks of nodes in which the halo of a part lies: few, and those of other halos, in a web."""
        one, level = self.parts[self.like[part]], self._bits + _BLOCK_BITS
        num_blocks = -(-self._num_nodes >> _BLOCK_BITS)
        spread = [
            num_blocks * -np.expm1(np.log1p(-min(rows / self.use.num_rows, 0.999)) * 2**level)
            for rows in (one.halo_blocks[0], self.halo_rows[part])
        ]
        share = one.halo_blocks[level] / spread[0] if level < _LEVELS and spread[0] else 1.0
        num = max(round(min(share, 1.0) * spread[1]), 1 + int(self.halo_rows[part] >> level))
        return np.random.default_rng(2).permutation(num_blocks)[:num]

    def run(self, held_bytes: float, waiting_bytes: float | None = None) -> TrialRun:
        """Return what a sweep reads in the epoch.

        Args:
            held_bytes: Bytes of the rows that it holds.
            waiting_bytes: Most bytes of batches that wait; None: no limit.

        Cost: About a second; the memory of a hundred thousand nodes.
        """
        scale, use = 2.0**-self._bits, self.use
        sweep = _Trial(
            self._num_nodes,
            max(1, int(held_bytes / use.row_bytes * scale)),
            None if waiting_bytes is None else waiting_bytes * scale,
            use,
        )
        sweep.run(self._waiting())
        return TrialRun(sweep.passes, sweep.read_nodes / self._num_nodes * use.table_bytes, sweep.most_waiting / scale)


def _choose(nodes: np.ndarray, weights: np.ndarray, num: int, random: np.random.Generator, times: int) -> np.ndarray:
    """Return the nodes that are among those chosen some times, each time so many, in proportion to weights."""
    if num >= len(nodes):
        return nodes
    keys = random.standard_exponential(len(nodes)) / weights
    return nodes[
        keys < times * np.partition(keys, num)[num]
    ]  # the first of several keys is as one of the sum of weights
