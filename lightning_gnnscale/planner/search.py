"""Growth of halos with the number of parts: estimated on a sample, measured, and searched for what fits."""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from ..edge_stream import open_edge_stream
from ..partitioner import Partitioning
from ..rng import combine_array
from .plan import Plan

SAMPLE_EDGES = 1 << 21  # edges that are held to estimate halos: 16 MiB
MOST_MEASURED = 3  # partitionings of the whole graph by one partitioner, until something fits
MOST_PARTS = 4096  # every part costs a visit an epoch, and optimizer state
GROWTH = 1.15  # from one number of parts tried to the next


@dataclass(frozen=True)
class PartRows:
    """The size of the largest part of a partitioning.

    Attributes:
        rows: nodes that one part reads, core and halo, of the part that reads most.
        halo: halo nodes of the part that has most of them; None: all rows but an average core.
        part_bytes: features and CSC of the largest part, bytes; 0 where they were not counted.
    """

    rows: int
    halo: int | None = None
    part_bytes: int = 0

    @classmethod
    def of_quality(cls, quality: dict) -> "PartRows | None":
        """Return it from the figures of a `PartitionQuality` as plain values; None where halos were not counted."""
        nodes, halo = quality.get("nodes_per_part"), quality.get("halo_per_part")
        if not nodes or not halo:
            return None
        part_bytes = max(quality.get("bytes_per_part") or [0])
        return cls(max(map(sum, zip(nodes, halo, strict=True))), max(halo), part_bytes)


PlanAt = Callable[[int, PartRows], Plan]


def grow(plan_at: PlanAt, rows_at: Callable[[int], float], first: int, most: int) -> Plan | None:
    """Return the plan of the fewest parts in [first, most], tried in steps of 15%, that fits, or None.

    plan_at: a plan by the number of parts and what the largest one holds. rows_at: rows of the largest part by theirs.
    """
    num_parts = first
    while num_parts <= most:
        plan = plan_at(num_parts, PartRows(math.ceil(rows_at(num_parts))))
        if plan.fits:
            return plan
        num_parts = max(num_parts + 1, math.ceil(num_parts * GROWTH))
    return None


def rows_curve(known: dict[int, int], num_nodes: int) -> Callable[[int], float]:
    """Return the rows of the largest part by the number of parts: power laws through known points, one part reads all.

    Beyond the largest known number the last power law goes on; it falls no faster than parts without halos do.
    """
    points = sorted(({1: num_nodes} | known).items())

    def rows(num_parts: int) -> float:
        place = next((i for i, (p, _) in enumerate(points) if p >= num_parts), len(points) - 1)
        if points[place][0] == num_parts or len(points) == 1:
            return max(points[place][1] if points[place][0] == num_parts else num_nodes, num_nodes / num_parts)
        (p0, r0), (p1, r1) = points[place - 1], points[place]
        power = min(1.0, max(0.0, math.log(r0 / r1) / math.log(p1 / p0))) if r1 else 1.0
        return max(r1 * (p1 / num_parts) ** power, num_nodes / num_parts)

    return rows


def search_parts(
    plan_at: PlanAt,
    num_nodes: int,
    first: int,
    most: int,
    known: dict[int, PartRows],
    measure: Callable[[int], PartRows | None],
    guessed: dict[int, int],
) -> Plan | None:
    """Return the plan of a number of parts in [first, most] that fits as measured; None where there is none.

    The next number that is measured is the fewest parts that would fit by the halos known so far. Where none
    would, and fewer than two are known, it is four times as many.

    Args:
        plan_at: number of parts, and what the largest one holds, to a plan.
        known: measurements by the number of parts; extended in place.
        measure: partitions, and returns the largest part's size; None: not counted.
        guessed: number of parts to rows of the largest part, estimated; used while nothing is known.

    Cost: at most `MOST_MEASURED` calls of measure, those of earlier searches among them, or one where they were more.
    """
    fitting = [plan_at(p, one) for p, one in sorted(known.items()) if first <= p <= most]
    fitting = [plan for plan in fitting if plan.fits]
    if fitting:
        return fitting[0]
    low = first
    for _ in range(max(1, MOST_MEASURED - len(known))):
        rows = {p: one.rows for p, one in known.items()} or guessed
        coming = grow(plan_at, rows_curve(rows, num_nodes), low, most) if rows else None
        if coming is not None:
            num_parts = coming.num_parts
        elif len(known) < 2:
            num_parts = min(most, max([low, *(4 * p for p in known)]))
        else:
            return None
        if num_parts in known:
            return None
        part = measure(num_parts)
        if part is None:  # a user's partitioner, which gives no halos
            return plan_at(num_parts, PartRows(math.ceil(num_nodes / num_parts)))
        known[num_parts] = part
        plan = plan_at(num_parts, part)
        if plan.fits:
            return plan
        low = num_parts + 1
    return None


class SampledHalos:
    """Halos of a partitioner, estimated on a sample of the graph that a bounded memory holds.

    The sample is the subgraph of the nodes whose hash falls below a bound; the partitioner cuts it. The number of a
    node's neighbours in the graph is scaled up from the sample by the share of nodes that were left out. The share of
    neighbours in other parts is taken from the sample, and they are assumed to be spread evenly over those parts, so
    halos are over- rather than underestimated. A graph of no more than `SAMPLE_EDGES` edges is its own sample, and its
    halos are counted.

    Args:
        stream: The edges; read once.
        seed: Seed of the sample and of the partitioner.
    """

    def __init__(self, stream, seed: int):
        self.num_nodes, num_edges = stream.count()
        self.seed, self.rate = seed, min(1.0, math.sqrt(SAMPLE_EDGES / max(1, num_edges)))
        bound = np.uint64(min(self.rate * 2**64, 2**64 - 1))
        kept = []
        with closing(stream.chunks()) as chunks:
            for chunk in chunks:
                ends = np.stack([chunk.src, chunk.dst])
                inside = ends[0] != ends[1]
                if self.rate < 1:
                    inside &= (combine_array(np.uint64(seed), ends) < bound).all(axis=0)
                kept.append(ends[:, inside])
        edges = np.concatenate([np.zeros((2, 0), np.int32), *kept], axis=1)
        self.nodes_of_sample, local = np.unique(edges, return_inverse=True)
        self.edges = np.unique(np.sort(local.reshape(2, -1), axis=0), axis=1)

    @property
    def note(self) -> str:
        if self.rate == 1:
            return "counted on the whole graph"
        return f"estimated on a sample of {len(self.nodes_of_sample):,} nodes and {self.edges.shape[1]:,} edges"

    def masks(self, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return masks over the nodes of the sample; an empty one gets the first node, so that it can be balanced."""
        own = {name: np.asarray(mask)[self.nodes_of_sample] for name, mask in masks.items() if mask is not None}
        for mask in own.values():
            mask[:1] |= not mask.any()
        return own

    def rows(self, partition: Callable[..., Partitioning], num_parts: int) -> int:
        """Return the rows of the largest part, core and halo, that this partitioner would make of the graph."""
        num_local = len(self.nodes_of_sample)
        if not 1 < num_parts <= num_local:
            return self.num_nodes
        stream = open_edge_stream(self.edges, num_nodes=num_local, layout="once")
        part_id = partition(stream, num_parts=num_parts, seed=self.seed).part_id
        src, dst = np.concatenate([self.edges, self.edges[::-1]], axis=1)
        foreign = part_id[src] != part_id[dst]
        core = np.bincount(part_id, minlength=num_parts)
        if self.rate == 1:
            pairs = np.unique(src[foreign].astype(np.int64) * num_parts + part_id[dst[foreign]])
            halo = np.bincount(pairs % num_parts, minlength=num_parts)
        else:
            neighbours = np.bincount(src[foreign], minlength=num_local) / self.rate
            read_by = (num_parts - 1) * -np.expm1(neighbours * np.log1p(-1 / num_parts))
            cut = np.bincount(part_id[dst[foreign]], minlength=num_parts)
            halo = read_by.sum() * cut / max(1, cut.sum())
        scale = self.num_nodes / num_local
        return min(self.num_nodes, math.ceil((core + halo).max() * scale))
