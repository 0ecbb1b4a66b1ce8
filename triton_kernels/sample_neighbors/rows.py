"""The rows of one edge type that a batch samples, hop by hop: looked up, picked from, read."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...rng import combine_int
from . import choice, cpu
from .choice import SplitRows
from .cpu import Workspace
from .edge_types import Relation, picked_rows
from .trees import Trees

_NO_WEIGHT = np.empty(0, np.float32)


class SampleOptions(NamedTuple):
    """How edges of a row are sampled, and what is kept of them.

    Attributes:
        replace: With replacement.
        return_e_id: Keep the position of each edge.
        scale: How many times likelier a preferred neighbour is, see `sample_neighbors`.
        disjoint: Each seed has a tree of its own: a node that two of them find is in it twice.
        latest: The last ones of the edges that may be sampled, instead of a uniform sample.
        strict: Edges of a seed's own time may not be sampled.
        with_weight: Fill `SampledNeighbors.edge_weight` without a preference, too.
    """

    replace: bool = False
    return_e_id: bool = False
    scale: float = 1.0
    disjoint: bool = False
    latest: bool = False
    strict: bool = False
    with_weight: bool = False


def fold_hop(key: int, hop: int) -> np.uint64:
    """Return the key of one hop: combine(key, hop)."""
    return np.uint64(combine_int(key, hop))


class SampledRows:
    """One edge type in one batch: in the hop to come its targets are `begin` to `end`, its edges `first` to `last`.

    What decides besides random numbers (edge type, time, weight, a preference) costs nothing where it is not asked for.

    Args:
        relation: The edge type.
        fanouts: Edges a row for each hop, -1 for all, 0 for none.
        key: uint64, of this edge type and batch.
        space: Memory of its edges.
        targets: Workspace of the nodes that have the rows.
        options, times, split: As `HopSampling` has them.
    """

    def __init__(
        self,
        relation: Relation,
        fanouts: Sequence[int],
        key: int,
        space: Workspace,
        targets: Workspace,
        options: SampleOptions,
        times: np.ndarray | None,
        split: Sequence[SplitRows] | None,
    ):
        self.relation, self.fanouts, self.key, self.space, self.targets = relation, fanouts, key, space, targets
        self.options, self.times, self.split = options, times, split
        # Where the latest are taken there is nothing to repeat.
        timed = relation.time is not None and (times is not None or relation.edge_type is None)
        self._latest = options.latest and timed
        self._replace = options.replace and not self._latest
        self._picked, self._weight = None, _NO_WEIGHT  # of the hop to come
        self.hop, self.begin, self.end, self.first, self.last, self.sizes = 0, 0, 0, 0, 0, []
        self._clear()

    def _clear(self) -> None:
        self.space.reserve("indptr", 1)[0] = 0

    @property
    def hop_key(self) -> np.uint64:
        """The key of the hop to come."""
        return fold_hop(self.key, self.hop)

    def names(self, begin: int, end: int) -> np.ndarray:
        """Return (end - begin,) integers that the choices of the targets begin..end-1 are hashed from."""
        name = self.targets.node[begin:end]
        if not self.options.disjoint:
            return name
        return name + self.targets.owner[begin:end].astype(np.int64) * (len(self.relation.indptr) - 1)

    @property
    def num_neighbors(self) -> int:
        """Neighbours that may be sampled in the hop to come, sampled or not."""
        return int(self.space.row_degree[: self.end - self.begin].sum()) if self.fanouts[self.hop] else 0

    def look_up(self, hop: int, begin: int, end: int, node_types: np.ndarray | None) -> None:
        """Look up the rows of the targets begin..end-1, and make space for their samples.

        Args:
            node_types: (end - begin,) node types of the targets, or None: all may have rows.
        """
        space, relation, fanout, first = self.space, self.relation, self.fanouts[hop], self.first
        self.hop, self.begin, self.end = hop, begin, end
        indptr = space.reserve("indptr", end + 1, keep=begin + 1)
        self.last = first
        if fanout == 0:
            indptr[begin + 1 : end + 1] = first
            return
        start, degree = space.reserve("row_start", end - begin), space.reserve("row_degree", end - begin)
        own = cpu.EVERY_ROW if node_types is None or relation.rows_of < 0 else node_types == relation.rows_of
        node, replace = self.targets.node, self._replace
        largest = cpu.count_hop(relation.indptr, node, begin, end, fanout, replace, own, start, degree, indptr)
        if relation.edge_type is not None or relation.time is not None or relation.weight is not None:
            largest = self._narrow(start[: end - begin], degree[: end - begin], indptr[begin : end + 1], largest)
        words, self.last = (largest >> 6) + 1, int(indptr[end])
        if len(space.taken) < words:
            space.taken = np.zeros(words + words // 4, np.uint64)
        space.reserve("edge", self.last, keep=first)
        space.reserve("neighbor", self.last - first)
        if self.split is not None or self.options.with_weight:
            space.reserve("weight", self.last, keep=first)

    def _narrow(self, start: np.ndarray, degree: np.ndarray, indptr: np.ndarray, largest: int) -> int:
        """Leave in rows the edges that edge type and time allow, and lay out their samples; return the largest row."""
        relation, fanout = self.relation, self.fanouts[self.hop]
        if relation.edge_type is not None:
            relation, self._picked, largest = picked_rows(relation, start, degree, self.times is not None)
        if relation.time is not None and self.times is not None:
            owner, strict = self.targets.owner[self.begin : self.end], self.options.strict
            largest = choice.until(
                relation.time, relation.indices, relation.time_by_edge, self.times, owner, strict, start, degree
            )
        self._weight = _NO_WEIGHT if relation.weight is None or fanout < 0 else relation.weight
        if not choice.lay_out(self._weight, start, degree, fanout, self._replace, indptr):
            raise ValueError("weights by which edges are sampled must be >= 0 and finite, got one that is not")
        return largest

    def whole(self) -> tuple:
        """Return what `sample` takes for all targets of a hop."""
        return self.begin, self.end, self.space.neighbor, self.space.taken

    def chunk(self, chunk: int, num_chunks: int) -> tuple[int, int, np.ndarray, np.ndarray]:
        """Return what `sample` takes for one of several chunks of about as many samples; a row is never split."""
        space, first = self.space, self.first
        edges = space.indptr[self.begin : self.end + 1]
        cuts = [first + (self.last - first) * number // num_chunks for number in (chunk, chunk + 1)]
        begin, end = (self.begin + int(place) for place in np.searchsorted(edges, cuts))
        return begin, end, space.neighbor[int(space.indptr[begin]) - first :], np.zeros_like(space.taken)

    def sample(self, begin: int, end: int, neighbor: np.ndarray, taken: np.ndarray) -> None:
        """Sample for the targets begin..end-1.

        Args:
            neighbor: Their neighbours go to its front.
            taken: Zeros, one bit for each edge of the largest row; no other thread's.
        """
        space, first, last = self.space, self.first, self.last
        if end - begin < self.end - self.begin:
            first, last = int(space.indptr[begin]), int(space.indptr[end])
        if first == last:
            return
        self.pick(begin, end, taken)
        edge = space.edge
        if self._picked is not None:
            edge[first:last] = self._picked[edge[first:last]]
        if self.split is None:
            cpu.read_hop(self.relation.indices, edge, first, last, neighbor)
            return
        split = self.split[self.hop]
        cpu.read_hop(split.indices, edge, first, last, neighbor)
        if self.options.return_e_id:
            start = space.row_start[begin - self.begin :]
            cpu.unsplit_hop(split.position, start, space.indptr, begin, end, edge)

    def pick(self, begin: int, end: int, taken: np.ndarray) -> None:
        """Choose the edges of the targets begin..end-1: preferred, latest, by weight, or uniformly."""
        space, options, replace = self.space, self.options, self._replace
        edge, weight, key, fanout = space.edge, self._weight, self.hop_key, self.fanouts[self.hop]
        rows, num = slice(begin - self.begin, end - self.begin), end - begin
        start, degree, indptr = space.row_start[rows], space.row_degree[rows], space.indptr[begin : end + 1]
        name = self.names(begin, end)
        if self.split is not None:
            inside = self.split[self.hop].num_inside
            cpu.pick_split_hop(
                key, name, 0, num, options.scale, inside, start, degree, indptr, taken, edge, space.weight
            )
            return
        if self._latest:
            choice.pick_latest(weight, start, degree, indptr, edge)
        elif len(weight):
            choice.pick_weighted(key, name, weight, fanout, replace, start, degree, indptr, edge)
        else:
            cpu.pick_hop(key, name, 0, num, fanout, replace, start, degree, indptr, taken, edge)
        if options.with_weight:
            choice.weigh(weight, start, degree, fanout, replace, indptr, edge, space.weight)

    def number(self, known: Workspace, trees: Trees | None, count: int) -> int:
        """Number the sampled neighbours, new ones from `count` on, in tree or workspace; return how many there are."""
        space, first, last = self.space, self.first, self.last
        local = space.reserve("local", last, keep=first)
        if trees is None:
            node = known.reserve("node", min(count + last - first, known.num_nodes) + 1, keep=count)
            return cpu.relabel_hop(space.neighbor, first, last, known.base, known.label, node, count, local)
        num = np.diff(space.indptr[self.begin : self.end + 1])
        owner = np.repeat(self.targets.owner[self.begin : self.end], num)
        return trees.find(space.neighbor[: last - first], owner, count, local[first:last])

    def add(self) -> None:
        """Count the edges of a hop, which is sampled and relabelled."""
        self.sizes.append(self.last - self.first)
        self.first, self.begin, self._picked = self.last, self.end, None

    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the sources of all edges, indptr, positions and weights, as `join_edges` takes them."""
        space, edge = self.space, self.space.edge[: self.first]
        if self.options.return_e_id:
            edge = self.relation.named(edge)
        return space.local, space.indptr[: self.begin + 1], edge, space.weight[: self.first]
