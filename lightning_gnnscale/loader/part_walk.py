"""The walk of one rank over its parts: which batch is at which position of an epoch."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, zip_longest
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..rng import fold, permutation


def core_targets(mask: np.ndarray, part_offsets: np.ndarray, part: int) -> np.ndarray:
    """Return the target nodes of a part: its core nodes inside a mask.

    Args:
        mask: (num_nodes,) bool in store order; only the part's own range is read.
        part_offsets: (num_parts + 1,) int64.
        part: part id.

    Returns:
        (num_targets,) int64 store ids, ascending.
    """
    start, end = int(part_offsets[part]), int(part_offsets[part + 1])
    return start + np.flatnonzero(mask[start:end])


def split_targets(targets: np.ndarray, world_size: int) -> list[np.ndarray]:
    """Give every rank the same number of targets, as contiguous ranges of their ids.

    Store ids go by parts, so the ranges follow the parts in order. Each range has ceil(num_targets / world_size)
    targets; where that is not even, a range shares one target with the next: none is left out, and no rank waits.

    Args:
        targets: (num_targets,) store ids, ascending.
        world_size: number of ranks, >= 1.

    Raises:
        ValueError: there are more ranks than targets.

    Source: DistDGL's two-level split of the training set. Differs: counts are exactly equal.
    """
    if not 1 <= world_size <= max(len(targets), 1):
        raise ValueError(f"world_size must be in [1, {len(targets)}], the number of targets, got {world_size}")
    share = -(-len(targets) // world_size)
    starts = [rank * len(targets) // world_size for rank in range(world_size)]
    return [targets[start : start + share] for start in starts]


def rank_of_parts(
    num_targets: Sequence[int], num_nodes: Sequence[int], world_size: int, num_machines: int = 1
) -> np.ndarray:
    """Return the rank that owns each part: ranks take parts in order, as even shares of all targets would.

    Args:
        num_targets, num_nodes: Counts of each part, in the order of the parts.
        world_size: Number of ranks, >= 1.
        num_machines: Machines that the parts were made for. Where it divides the ranks, each run of
            `world_size / num_machines` ranks takes the parts of one machine; else it does not matter.

    Returns:
        (num_parts,) int64. A part belongs to the rank whose range of the targets in order has most of it. A part
        without targets goes to the rank whose parts have the fewest nodes so far; the largest such part goes first.
    """
    if num_machines > 1 and world_size % num_machines == 0:
        ranks = world_size // num_machines
        groups = zip(*(np.split(np.asarray(counts), num_machines) for counts in (num_targets, num_nodes)), strict=True)
        return np.concatenate([one * ranks + rank_of_parts(*group, ranks) for one, group in enumerate(groups)])
    ends = np.cumsum(num_targets, dtype=np.int64)
    starts, total = ends - np.asarray(num_targets), int(ends[-1])
    cuts = [rank * total // world_size for rank in range(world_size + 1)]
    shared = [np.minimum(ends, high) - np.maximum(starts, low) for low, high in pairwise(cuts)]
    owner, sizes = np.argmax(shared, axis=0), np.asarray(num_nodes, np.int64)
    idle = np.flatnonzero(ends == starts)
    busy = np.setdiff1d(np.arange(len(ends)), idle)
    load = np.bincount(owner[busy], sizes[busy], world_size)
    for part in idle[np.argsort(-sizes[idle], kind="stable")]:
        owner[part] = np.argmin(load)
        load[owner[part]] += sizes[part]
    return owner


_MOST_COMPARED = 1 << 16  # targets of a rank whose neighbours are counted, at least; or twice those that leave


def assign_targets(
    targets: Sequence[np.ndarray],
    owner: np.ndarray,
    world_size: int,
    neighbors_by_rank: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """Give every rank the same number of targets: those of the parts that it owns, and the surplus of other ranks.

    Only the surplus leaves its owner. A target that leaves goes where it gains most: to the rank that owns more of its
    neighbours than its own rank does. Where the number is not even, a rank that is one short also trains a target of
    another rank: none is left out, and no rank waits.

    Args:
        targets: (num,) int64 store ids of each part, in the order of the parts.
        owner: (num_parts,) rank that owns each part, see `rank_of_parts`.
        world_size: number of ranks, >= 1.
        neighbors_by_rank: ids, ascending, to (num, world_size) counts of their neighbours by the rank that owns them.
            Called for ranks with a surplus alone.

    Returns:
        (ceil(num_targets / world_size),) store ids of each rank, ascending.

    Raises:
        ValueError: there are more ranks than targets.

    Cost: neighbours of the larger of 65,536 and twice the surplus, of each rank that has one.
    Source: DistDGL's two-level split of the training set. Differs: counts are exactly equal, and what leaves its owner
        is chosen by its neighbours.
    """
    total = sum(map(len, targets))
    if not 1 <= world_size <= max(total, 1):
        raise ValueError(f"world_size must be in [1, {total}], the number of targets, got {world_size}")
    held = [
        np.concatenate([np.empty(0, np.int64), *(targets[part] for part in np.flatnonzero(owner == rank))])
        for rank in range(world_size)
    ]
    loads = np.array([len(nodes) for nodes in held])
    quota = np.full(world_size, total // world_size)
    quota[np.argsort(-loads, kind="stable")[: total % world_size]] += 1  # so that as few as possible leave
    space = np.maximum(quota - loads, 0)
    taken: list[list[np.ndarray]] = [[] for _ in range(world_size)]
    for rank in range(world_size):
        surplus = int(loads[rank] - quota[rank])
        if surplus > 0:
            leaving, to = _best_moves(held[rank], rank, surplus, space, neighbors_by_rank)
            held[rank] = np.setdiff1d(held[rank], leaving, assume_unique=True)
            for other in np.unique(to):
                taken[other].append(leaving[to == other])
    shares = [np.sort(np.concatenate([nodes, *more])) for nodes, more in zip(held, taken, strict=True)]
    most = -(-total // world_size)
    repeated = [shares[(rank + 1) % world_size][0] for rank in range(world_size)]
    return [
        share if len(share) == most else np.sort(np.append(share, again))
        for share, again in zip(shares, repeated, strict=True)
    ]


def _best_moves(
    nodes: np.ndarray,
    rank: int,
    surplus: int,
    space: np.ndarray,
    neighbors_by_rank: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return which `surplus` of a rank's targets leave, and (surplus,) where to; `space` of the ranks is used up."""
    compared = min(len(nodes), max(_MOST_COMPARED, 2 * surplus))
    candidates = nodes[np.arange(compared) * len(nodes) // compared]
    counts = neighbors_by_rank(candidates)
    others = np.flatnonzero(space)
    gain = counts[:, others] - counts[:, [rank]]
    to = np.full(compared, -1)
    for flat in np.argsort(-gain, axis=None, kind="stable"):
        candidate, other = divmod(int(flat), len(others))
        if to[candidate] < 0 and space[others[other]]:
            to[candidate] = others[other]
            space[others[other]] -= 1
            surplus -= 1
            if not surplus:
                break
    leaving = np.flatnonzero(to >= 0)
    return candidates[leaving], to[leaving]


def order_key(seed: int, epoch: int, part: int) -> int:
    """Return the key of the order in which a pass visits the targets of a part."""
    return fold(seed, epoch, part)


def longest_rank(batches_per_part: Sequence[int], world_size: int) -> int:
    """Return the batches of the rank that has most, with parts given to ranks cyclically: what `pad_to` takes."""
    return max(sum(batches_per_part[rank::world_size]) for rank in range(world_size))


class Position(NamedTuple):
    """One batch of the walk.

    Attributes:
        visit: number of the visit in the epoch; a pass over a part is a visit of its own here.
        part: part id.
        epoch: the key's epoch: Lightning's epoch times passes, plus the pass.
        batch: number of the batch in the visit.
        following: part to be loaded by the time that this batch trains, or None.
    """

    visit: int
    part: int
    epoch: int
    batch: int
    following: int | None = None


@dataclass(frozen=True)
class PartWalk:
    """All batches of a rank's epoch, part after part, `passes` times each.

    Args:
        parts: the rank's parts in the order of their visits; parts without batches are skipped.
        num_batches: batches of one pass over each part.
        passes: passes over a part before the next one, >= 1.
    """

    parts: Sequence[int]
    num_batches: Mapping[int, int]
    passes: int = 1
    parts_open: ClassVar[int] = 2  # the one that trains and the next one
    world_size: ClassVar[int] = 1  # ranks that share a visit
    last_rank: ClassVar[int] = 0

    def __len__(self) -> int:
        return self.passes * sum(self.num_batches[part] for part in self.parts)

    def most_held(self, sizes: np.ndarray, parts_held: int) -> int:
        """Return the largest sum over parts that are in memory together.

        Args:
            sizes: (num_parts,) of each part, in the order of `parts`.
            parts_held: how many follow each other in memory.
        """
        held = min(parts_held, len(sizes))
        return int(np.convolve(sizes, np.ones(held, np.int64), "valid").max()) if held else 0

    def positions(self, epoch: int, start: int = 0) -> Iterator[Position]:
        """Yield the batches of an epoch from position `start` on, without touching those before it."""
        visit = 0
        coming = [part for part in self.parts if self.num_batches[part]]
        following = dict(pairwise(coming))
        for part in coming:
            for number in range(self.passes):
                size = self.num_batches[part]
                for batch in range(min(start, size), size):
                    yield Position(visit, part, epoch * self.passes + number, batch, following.get(part))
                start = max(start - size, 0)
                visit += 1


def parts_of_rank(num_parts: int, rank: int, world_size: int) -> list[int]:
    """Return the parts of a rank: rank, rank + world_size, ..."""
    return list(range(rank, num_parts, world_size))


_WALK = 1 << 43  # separates the keys of the order of parts
_DEAL = 1 << 44  # and those of who holds which
_LOOKED_AT = 16  # epochs


def shuffled_parts(parts: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Return the parts in the order in which an `InterleavedWalk` visits them in an epoch."""
    return [parts[place] for place in permutation(len(parts), fold(seed, epoch, _WALK))]


def spread_parts(parts: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Return the parts in a sampled order in which consecutive ones have distant ids.

    Halves of the parts take turns, so do the halves of each, and so on; which half begins is sampled. Machines
    that hold ranges of parts, whatever their number, so hold about as many of the parts that are open at a time.
    """
    if len(parts) < 2:
        return list(parts)
    middle = len(parts) // 2
    halves = [spread_parts(half, seed, epoch) for half in (parts[:middle], parts[middle:])]
    if len(halves[0]) == len(halves[1]) and fold(seed, epoch, _WALK, parts[0], len(parts)) & 1:
        halves.reverse()
    longer, shorter = sorted(halves, key=len, reverse=True)
    return [part for turn in zip_longest(longer, shorter) for part in turn if part is not None]


def visiting_order(parts: Sequence[int], seed: int, epoch: int, shuffle: bool, spread: bool) -> list[int]:
    """Return the parts in the order in which an `InterleavedWalk` opens them in an epoch; arguments as there."""
    if not shuffle:
        return list(parts)
    return (spread_parts if spread else shuffled_parts)(parts, seed, epoch)


@dataclass(frozen=True)
class PartUnions:
    """Which parts are sampled as one graph in an epoch: those that an `InterleavedWalk` opens one after another.

    Args:
        parts: All parts.
        skipped: Those of them that have no batches.
        size: Parts of a union, >= 1; the last one of an epoch may have fewer.
        seed, shuffle, spread: As of the `InterleavedWalk`.

    Source: Chiang et al., Cluster-GCN, KDD 2019, section 3.2: edges between clusters that are chosen together are
        kept; Armada: a worker samples over all parts in its memory. Differs: who is with whom is a function of the
        seed and the epoch, so that batches do not depend on who makes them.
    """

    parts: tuple[int, ...]
    skipped: frozenset[int]
    size: int
    seed: int
    shuffle: bool = True
    spread: bool = False

    def in_order(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the unions of an epoch in the order in which their first parts are visited."""
        order = visiting_order(self.parts, self.seed, epoch, self.shuffle, self.spread)
        order = [part for part in order if part not in self.skipped]
        return [tuple(sorted(order[at : at + self.size])) for at in range(0, len(order), self.size)]

    def of(self, part: int, epoch: int) -> tuple[int, ...]:
        """Return the union of a part in an epoch, ascending."""
        return _union_of(self, epoch)[part]


@lru_cache(maxsize=16)
def _union_of(unions: PartUnions, epoch: int) -> dict[int, tuple[int, ...]]:
    return {part: union for union in unions.in_order(epoch) for part in union}


@dataclass(frozen=True)
class PartShares:
    """Which parts each rank holds in an epoch: it samples them as one graph, and reads nothing of the others.

    Parts are dealt to the ranks again every `every` epochs, those with targets first, so that each rank has about as
    many parts of either sort. Every rank makes `num_batches` batches of an epoch, whatever targets its parts have.

    Args:
        trained, idle: Parts with targets, of which each rank gets one at least, and parts without.
        num_ranks: Number of ranks, >= 1.
        every: Epochs for which the ranks keep their parts, >= 1.
        num_batches: Batches of a rank in an epoch, >= 1.
        seed: Seed of who gets which parts.

    Source: Xu, Siebenbrunner and Bindschaedler, Grappa, 2026: machines train on what they hold, and are given other
        parts periodically. Differs: the parts are those of the store, dealt again, and are not computed again.
    """

    trained: tuple[int, ...]
    idle: tuple[int, ...]
    num_ranks: int
    every: int
    num_batches: int
    seed: int

    @property
    def size(self) -> int:
        """Most parts that a rank holds."""
        return -(-(len(self.trained) + len(self.idle)) // self.num_ranks)

    def in_order(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the parts of each rank in an epoch, ascending."""
        return _dealt(self, epoch // self.every)

    def of(self, rank: int, epoch: int) -> tuple[int, ...]:
        """Return the parts of a rank in an epoch, ascending."""
        return self.in_order(epoch)[rank]

    def together(self) -> np.ndarray:
        """Return (2, 2) float64: the probability that one rank has two parts, by the sorts (trained, idle) of both."""
        dealt = np.arange(len(self.trained) + len(self.idle)) % self.num_ranks
        held = [np.bincount(one, minlength=self.num_ranks) for one in np.split(dealt, [len(self.trained)])]
        sizes = len(self.trained), len(self.idle)
        found = np.zeros((2, 2))
        for one, other in np.ndindex(2, 2):
            pairs = sizes[one] * (sizes[other] - (one == other))
            found[one, other] = np.sum(held[one] * (held[other] - (one == other))) / max(pairs, 1)
        return found


@lru_cache(maxsize=16)
def _dealt(shares: PartShares, deal: int) -> list[tuple[int, ...]]:
    order = []
    for number, parts in enumerate((shares.trained, shares.idle)):
        order += [parts[place] for place in permutation(len(parts), fold(shares.seed, deal, _DEAL + number))]
    return [tuple(sorted(order[rank :: shares.num_ranks])) for rank in range(shares.num_ranks)]


class Interleave(NamedTuple):
    """How a process takes part in an `InterleavedWalk`; see there. `together`: whether parts that are opened one after
    another are sampled as one graph, see `PartUnions`.
    """

    rank: int = 0
    world_size: int = 1
    open_parts: int = 4
    spread: bool = False
    num_ranks: int = 1
    together: bool = False

    @property
    def told(self) -> list[int | str]:
        """What a checkpoint within an epoch keeps of it."""
        return [self.world_size, self.open_parts, *["spread"] * self.spread, *["together"] * self.together]


@dataclass(frozen=True)
class InterleavedWalk:
    """One process's chunks of batches in an epoch in which parts take turns.

    `open_parts` parts are open at a time, in a new order every epoch. One chunk of each is taken in turn; where a part
    ends, the next one replaces it. A run of `open_parts` chunks makes a batch (`mixed_batches`): parts of a low cut
    have few classes each, so batches of a single part would pull the weights to and fro. In each turn of a part every
    rank takes one chunk: rank r takes chunk turn * world_size + r. So all ranks get equally many, and the chunks of a
    turn share neighbours.

    Args:
        parts: All parts; those without batches are skipped.
        num_batches: Number of turns in one pass over each part; every rank takes one chunk per turn.
        rank, world_size: Rank of this process, and number of ranks.
        open_parts: Parts that are open at a time, and chunks per batch, >= 1.
        seed: Seed of the order of parts.
        shuffle: Whether parts come in a new order every epoch; False: in the order of `parts`.
        spread: Whether that order separates neighbouring parts, see `spread_parts`.
        num_ranks: Ranks that this process computes, from `rank` on: a batch of each in turn.

    Source: Chiang et al., Cluster-GCN, KDD 2019, stochastic multiple partitions; Armada, mini-batches of disjoint sets
    of parts that workers prepare side by side.
    """

    parts: Sequence[int]
    num_batches: Mapping[int, int]
    rank: int
    world_size: int
    open_parts: int
    seed: int
    shuffle: bool = True
    spread: bool = False
    num_ranks: int = 1

    def __len__(self) -> int:
        return self.num_ranks * sum(self.num_batches[part] for part in self.parts)

    @property
    def last_rank(self) -> int:
        """The last of the ranks that this process computes."""
        return self.rank + self.num_ranks - 1

    @property
    def parts_open(self) -> int:
        """Parts that are in memory at a time: those that are open, and the next one."""
        return self.open_parts + 1

    def most_held(self, sizes: np.ndarray, parts_held: int) -> int:
        """Return the largest sum over parts that are in memory together, of the first epochs; see `PartWalk`.

        Sizes of parts differ, and the largest of them meet in few of the orders that are sampled.
        """
        size, most = dict(zip(self.parts, np.asarray(sizes).tolist(), strict=True)), 0
        held: dict[int, None] = {}  # the last one is the latest requested; parts stay from epoch to epoch
        for epoch in range(_LOOKED_AT if self.shuffle else 1):
            for position in self.positions(epoch):
                for part in (position.part, position.following):
                    if part is None or next(reversed(held), None) == part:
                        continue
                    held.pop(part, None)
                    held[part] = None
                    if len(held) > parts_held:
                        del held[next(iter(held))]
                most = max(most, sum(size[part] for part in held))
        return most

    def positions(self, epoch: int, start: int = 0) -> Iterator[Position]:
        """Yield the chunks of an epoch from position `start` on."""
        turns = self._turns(epoch)
        if self.num_ranks > 1:
            chunks = min(self.open_parts, sum(self.num_batches[part] > 0 for part in self.parts))
            turns = _rank_by_rank(turns, max(chunks, 1), self.num_ranks)
        return islice(turns, start, None)

    def _turns(self, epoch: int) -> Iterator[Position]:
        """Yield the chunks of the first rank."""
        order = visiting_order(self.parts, self.seed, epoch, self.shuffle, self.spread)
        coming = deque(part for part in order if self.num_batches[part])
        open_parts = deque((coming.popleft(), 0) for _ in range(min(self.open_parts, len(coming))))
        while open_parts:
            part, step = open_parts.popleft()
            following = coming[0] if coming else None
            yield Position(0, part, epoch, step * self.world_size + self.rank, following)
            if step + 1 < self.num_batches[part]:
                open_parts.append((part, step + 1))
            elif coming:
                open_parts.append((coming.popleft(), 0))


def _rank_by_rank(turns: Iterator[Position], chunks: int, num_ranks: int) -> Iterator[Position]:
    """Yield each run of `chunks` positions of a rank, and then those of the ranks after it in the same turns."""
    while run := list(islice(turns, chunks)):
        for number in range(num_ranks):
            yield from (position._replace(batch=position.batch + number) for position in run)


def visits_together(
    walk: "PartWalk | InterleavedWalk", positions: Iterator[Position]
) -> Iterator[tuple[int, Position]]:
    """Yield (place, position) of the positions of a walk visit by visit, in the order in which visits begin.

    `following` is the part of the next visit. Parts that take turns are so sampled one after the other, for batches
    that wait: two are in memory, not all that are open.
    """
    visits: dict[tuple[int, int], list[tuple[int, Position]]] = {}
    whole = set()
    for place, position in enumerate(positions):
        key = position.visit, position.part
        visits.setdefault(key, []).append((place, position))
        turn, rank = divmod(position.batch, walk.world_size)
        if turn + 1 >= walk.num_batches[position.part] and rank == walk.last_rank:
            whole.add(key)
        while len(visits) > 1 and next(iter(visits)) in whole:
            yield from _first_visit(visits)
    while visits:
        yield from _first_visit(visits)


def _first_visit(visits: dict[tuple[int, int], list[tuple[int, Position]]]) -> list[tuple[int, Position]]:
    """Take the first visit out and return it."""
    positions = visits.pop(next(iter(visits)))
    following = next((part for _, part in visits), None)
    return [(place, position._replace(following=following)) for place, position in positions]


def in_order(items: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    """Yield what comes as (place, item) by place: 0, 1, and so on, each once; the iterator is closed with this one."""
    early, coming = {}, 0
    with closing(items):
        for place, item in items:
            early[place] = item
            while coming in early:
                yield early.pop(coming)
                coming += 1


def even_slices(order: np.ndarray, num_slices: int) -> list[np.ndarray]:
    """Return consecutive chunks of (num_items,) whose lengths differ by one at most; with few items some appear twice.

    Args:
        order: at least one item.
        num_slices: >= 1.
    """
    bounds = [number * len(order) // num_slices for number in range(num_slices + 1)]
    return [order[start : max(stop, start + 1)] for start, stop in pairwise(bounds)]
