"""One batch sampled hop by hop, over one edge type or several; the caller does what must happen between two hops."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...rng import combine_int
from . import choice, cpu
from .cpu import Workspace
from .edge_types import Relation, join_edges, picked_rows
from .split import SplitRows, checked_split
from .trees import Trees

Allocate = Callable[[tuple[int, ...], type], np.ndarray]


class SampledNeighbors(NamedTuple):
    """A sampled computation graph in PyG's form.

    Attributes:
        n_id: (num_nodes,) int64, the graph's ids; seeds first, then new nodes hop by hop in order of appearance.
        edge_index: (2, num_edges) int64, source and target as positions in n_id, grouped by target.
        indptr: (num_targets + 1,) int64, the edges of each target; targets are the nodes of all hops but the last.
        e_id: (num_edges,) int64 positions in `csc.indices`, or None.
        num_sampled_nodes: seeds, then new nodes of each hop.
        num_sampled_edges: edges of each hop.
        edge_weight: (num_edges,) float32, None where it was not asked for. With a preference 1 / (length of the row *
            probability of the edge). Otherwise edges that could be sampled over edges sampled from the row; sampled by
            weight: the mean over the samples of the row's sum of weights, over the edge's weight.
        seed_of: (num_nodes,) int64 seed that a node was found for, in disjoint trees; else None.
        edge_type: (num_edges,) int64 `number` of the edge type of each edge, where that was asked for; else None.
    """

    n_id: np.ndarray
    edge_index: np.ndarray
    indptr: np.ndarray
    e_id: np.ndarray | None
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    edge_weight: np.ndarray | None = None
    seed_of: np.ndarray | None = None
    edge_type: np.ndarray | None = None


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


def check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """Return the fan-outs as a tuple of ints.

    Raises:
        ValueError: none given, or one is 0, below -1 or not an integer.
    """
    if isinstance(fanouts, str) or not isinstance(fanouts, Iterable):
        raise ValueError(f"fanouts must be a list of integers like [15, 10, 5], got {fanouts!r}")
    fanouts = tuple(fanouts)
    if not fanouts:
        raise ValueError("fanouts must name at least one hop, got []")
    for hop, fanout in enumerate(fanouts):
        known = isinstance(fanout, int | float | np.number) and not isinstance(fanout, bool)
        if not known or fanout != fanout // 1 or fanout == 0 or fanout < -1:
            raise ValueError(f"fanouts[{hop}] must be an integer >= 1, or -1 for all neighbours, got {fanout}")
    return tuple(int(fanout) for fanout in fanouts)


def check_seeds(seeds: np.ndarray, num_rows: int) -> np.ndarray:
    """Return seeds as a contiguous array of integers.

    Raises:
        ValueError: they are not one-dimensional integers in [0, num_rows).
    """
    seeds = np.ascontiguousarray(seeds)
    if seeds.ndim != 1 or (seeds.dtype.kind not in "iu" and len(seeds)):
        raise ValueError(f"seeds must be one-dimensional integers, got {seeds.dtype} of shape {seeds.shape}")
    if len(seeds) and not (seeds.min() >= 0 and seeds.max() < num_rows):
        raise ValueError(f"seeds must be in [0, {num_rows}), got {seeds.min()} to {seeds.max()}")
    return seeds if len(seeds) else seeds.astype(np.int64)


def place_seeds(space: Workspace, seeds: np.ndarray, num_rows: int) -> int:
    """Begin a batch with its seeds; return how many they are.

    Raises:
        ValueError: they are not distinct integers in [0, num_rows); the workspace is free then.
    """
    seeds = check_seeds(seeds, num_rows)
    space.reserve("indptr", 1)[0] = 0
    count = space.place(seeds)
    if count != len(seeds):
        space.finish(count)
        raise ValueError(
            f"seeds must be distinct, got {len(seeds) - count} repeats among {len(seeds)}: give each once, or sample "
            "disjoint trees where the sampler can"
        )
    return count


def fold_hop(key: int, hop: int) -> np.uint64:
    """Return the key of one hop: combine(key, hop)."""
    return np.uint64(combine_int(key, hop))


class HopSampling:
    """Samples of a batch in steps: `sample` once a hop, then `collect`.

    A hop samples the rows of all nodes that the last one found, edge type by edge type; what decides beside chance
    (time, weight, a preference) is asked of each edge type, and costs nothing where it has none.
    Every choice is a hash of (key, edge type, hop, node, sample), and of the seed in disjoint trees. A row of no more
    edges than the fan-out is taken whole, in its order.

    The workspaces belong to the batch until `collect` or `abandon`. Hops come one after the other, from any thread;
    one may be sampled by several threads side by side, by `sample_chunk` and `relabel` instead of `sample`. Between
    hops the rows of the next one are looked up already, so that `num_neighbors` costs nothing.

    Args:
        relations: What is sampled, in this order.
        seeds: Node types, each once, with (num_seeds,) ids; distinct unless disjoint, when they are numbered in this
            order.
        fanouts: By edge type, edges a row for each hop, -1 for all, 0 for none.
        key: uint64.
        spaces: By node type, a workspace that fits it.
        options: How edges are sampled.
        split: For each hop rows of the one edge type with preferred neighbours first; see `sample_neighbors`.
        times: (num_seeds,) int64 time of each seed, all in one; later edges are not sampled. Only in disjoint trees.
        type_of: Gives (num,) int64 node types of ids, where `rows_of` of an edge type names one; without it rows of
            all nodes are read, and the result is the same.

    Raises:
        ValueError: seeds that are out of range or repeated, a workspace or `split` that does not fit; while sampling, a
            weight below 0 in a row that is sampled from.

    Cost: O(sampled edges + nodes), and a few microseconds a hop and edge type; of a row that is sampled by weight all
        weights are read, and of one that holds several edge types the edge type of every edge.
    Source: order of nodes and edges as `neighbor_sample` and `hetero_neighbor_sample` of pyg-lib have it.
    """

    def __init__(
        self,
        relations: Sequence[Relation],
        seeds: Sequence[tuple[int, np.ndarray]],
        fanouts: Sequence[Sequence[int]],
        key: int,
        spaces: Sequence[Workspace],
        options: SampleOptions = SampleOptions(),  # noqa: B008 - a value
        *,
        split: Sequence[SplitRows] | None = None,
        times: np.ndarray | None = None,
        type_of: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self.fanouts, self.hop, self.times = fanouts, 0, times
        self.num_hops = len(fanouts[0]) if len(fanouts) else 0
        self._relations, self._options, self._spaces, self._type_of = relations, options, spaces, type_of
        self._split = None
        if split is not None or options.scale != 1:
            csc = CSC(relations[0].indptr, relations[0].indices)
            self._split = checked_split(split, options.scale, csc, self.num_hops, options.replace, options.return_e_id)
        _check_spaces(relations, spaces)
        timed = [one.time is not None and (times is not None or one.edge_type is None) for one in relations]
        self._latest = [options.latest and one for one in timed]  # there is nothing to repeat
        self._replace = [options.replace and not latest for latest in self._latest]
        self._keys = [combine_int(key, number) if number else key for number in range(len(relations))]
        self._memory = [spaces[one.source].of_relation(number) for number, one in enumerate(relations)]
        self._narrowed: list[tuple[Relation, np.ndarray | None]] = [(one, None) for one in relations]
        self._trees = [Trees(space) for space in spaces] if options.disjoint else None
        self._count, self._begin = [0] * len(spaces), [0] * len(spaces)  # nodes so far, and before the last hop
        self._first = [0] * len(relations)  # edges before the hop to come
        self._or_freed(lambda: self._place(dict(seeds)))
        self._nodes, self._edges = [[count] for count in self._count], [[] for _ in relations]
        for space in self._memory:
            space.reserve("indptr", 1)[0] = 0
        if self.num_hops:
            self._or_freed(self._look_up)

    @property
    def num_neighbors(self) -> int:
        """Neighbours that the targets of the next hop may be given in all; 0 after the last hop."""
        if self.hop == self.num_hops:
            return 0
        followed = [number for number in range(len(self._relations)) if self.fanouts[number][self.hop]]
        return sum(int(self._rows(number)[1].sum()) for number in followed)

    @property
    def newest(self) -> np.ndarray:
        """(num_new,) ids of the first node type found at the last hop, at first its seeds: a view until `collect`."""
        return self._spaces[0].node[self._count[0] - self._nodes[0][-1] : self._count[0]]

    def sample(self) -> None:
        """Sample the next hop; where that fails (no memory), the workspaces are free again."""
        self._or_freed(self._sample)

    def sample_chunk(self, chunk: int, num_chunks: int) -> None:
        """Sample the neighbours of some targets of the next hop. Sample each chunk once, in any order or concurrently.

        Args:
            chunk: Index of the chunk, in [0, num_chunks).
            num_chunks: Number of chunks that share the samples about evenly; a row is never split.
        """
        for number, relation in enumerate(self._relations):
            space, (offset, end), first = self._memory[number], self._targets(relation), self._first[number]
            edges = space.indptr[offset : end + 1]
            cuts = [first + (int(edges[-1]) - first) * place // num_chunks for place in (chunk, chunk + 1)]
            begin, stop = (offset + int(place) for place in np.searchsorted(edges, cuts))
            neighbor = space.neighbor[int(space.indptr[begin]) - first :]
            taken = np.zeros_like(space.taken)  # the others' chunks have theirs
            self._sample_rows(number, begin, stop, neighbor, taken)

    def relabel(self) -> None:
        """Number the nodes that all chunks of `sample_chunk` found: the hop is sampled then; errors as of `sample`."""
        self._or_freed(self._relabel)

    def collect(self, allocate: Allocate = np.empty, with_edge_type: bool = False) -> SampledNeighbors:
        """Copy a batch of one node type out of the workspace, which is free then; called once, after the last hop.

        Edges are ordered by target, then by edge type.
        """
        try:
            num_targets, parts = self._begin[0], [self._edges_of(number) for number in range(len(self._relations))]
            n_id = allocate((self._count[0],), np.int64)
            n_id[:] = self._spaces[0].node[: self._count[0]]
            numbers = [relation.number for relation in self._relations] if with_edge_type else None
            wanted = self._options.return_e_id, self._weighs, numbers
            edge_index, indptr, e_id, weight, edge_type = join_edges(parts, num_targets, *wanted, allocate)
            seed_of = self._seeds_of(0)
            edges = [sum(hop) for hop in zip(*self._edges, strict=True)]
            return SampledNeighbors(n_id, edge_index, indptr, e_id, self._nodes[0], edges, weight, seed_of, edge_type)
        finally:
            self.abandon()

    def collect_by_type(self) -> SampledNeighbors:
        """As `collect`, for several node types: each array is a list of them, by node type or by edge type."""
        try:
            edge_index, indptr, e_id = [], [], []
            for number, relation in enumerate(self._relations):
                one = [self._edges_of(number)], self._begin[relation.target], True, False, None, np.empty
                for kept, new in zip((edge_index, indptr, e_id), join_edges(*one), strict=False):
                    kept.append(new)
            node_types = range(len(self._spaces))
            n_id = [self._spaces[number].node[: self._count[number]].astype(np.int64) for number in node_types]
            seed_of = [self._seeds_of(number) for number in node_types] if self._trees else None
            return SampledNeighbors(n_id, edge_index, indptr, e_id, self._nodes, self._edges, None, seed_of)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the workspaces without a result; not while a hop is being sampled."""
        if self._trees is None:
            for space, count in zip(self._spaces, self._count, strict=True):
                space.finish(count)

    def _or_freed(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException:
            for space in self._spaces:
                space.finish(space.num_nodes)  # all labels that it gave are old now
            raise

    def _place(self, seeds: dict[int, np.ndarray]) -> None:
        num_rows, first = [space.num_nodes for space in self._spaces], 0
        for relation in self._relations:
            num_rows[relation.target] = len(relation.indptr) - 1
        for node_type, ids in seeds.items():
            space = self._spaces[node_type]
            if self._trees is None:
                self._count[node_type] = place_seeds(space, ids, num_rows[node_type])
                continue
            ids = check_seeds(ids, num_rows[node_type]).astype(space.id_dtype)
            owner, local = np.arange(first, first + len(ids), dtype=np.int32), np.empty(len(ids), np.int32)
            self._count[node_type] = self._trees[node_type].find(ids, owner, 0, local)
            first += len(ids)
        for node_type in set(range(len(self._spaces))) - set(seeds) if self._trees is None else ():
            place_seeds(self._spaces[node_type], np.empty(0, np.int64), 0)

    def _targets(self, relation: Relation) -> tuple[int, int]:
        """Return the range of the nodes whose rows of an edge type the next hop samples."""
        return self._begin[relation.target], self._count[relation.target]

    def _rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the rows of an edge type start, and how many edges they have, of all targets."""
        begin, end = self._targets(self._relations[number])
        return self._memory[number].row_start[: end - begin], self._memory[number].row_degree[: end - begin]

    @property
    def _weighs(self) -> bool:
        return self._split is not None or self._options.with_weight

    def _look_up(self) -> None:
        """Look up the rows of the targets of the next hop, and make space for their samples."""
        node_types = None
        if self._type_of is not None:
            node_types = self._type_of(self._spaces[0].node[self._begin[0] : self._count[0]])
        for number, relation in enumerate(self._relations):
            space, (begin, end), fanout = self._memory[number], self._targets(relation), self.fanouts[number][self.hop]
            first, indptr = self._first[number], space.reserve("indptr", end + 1, keep=begin + 1)
            start, degree = (space.reserve(name, end - begin)[: end - begin] for name in ("row_start", "row_degree"))
            if fanout == 0:
                indptr[begin + 1 : end + 1] = first
                continue
            own = cpu.EVERY_ROW
            if node_types is not None and relation.rows_of >= 0:
                own = node_types == relation.rows_of
            node, replace = self._spaces[relation.target].node, self._replace[number]
            largest = cpu.count_hop(relation.indptr, node, begin, end, fanout, replace, own, start, degree, indptr)
            if relation.narrows:
                largest = self._narrow(number, start, degree, indptr[begin : end + 1], largest)
            words, last = (largest >> 6) + 1, int(indptr[end])
            if len(space.taken) < words:
                space.taken = np.zeros(words + words // 4, np.uint64)
            space.reserve("edge", last, keep=first)
            space.reserve("neighbor", last - first)
            if self._weighs:
                space.reserve("weight", last, keep=first)

    def _narrow(self, number: int, start: np.ndarray, degree: np.ndarray, indptr: np.ndarray, largest: int) -> int:
        """Leave in rows the edges that edge type and time allow, and lay out their samples; return the largest row."""
        relation, picked = self._relations[number], None
        if relation.edge_type is not None:
            relation, picked, largest = picked_rows(relation, start, degree, self.times is not None)
        if relation.time is not None and self.times is not None:
            begin, end = self._targets(relation)
            owner, strict = self._spaces[relation.target].owner[begin:end], self._options.strict
            largest = choice.until(
                relation.time, relation.indices, relation.time_by_edge, self.times, owner, strict, start, degree
            )
        self._narrowed[number] = relation, picked
        fanout = self.fanouts[number][self.hop]
        if not choice.lay_out(relation.sampled_by(fanout), start, degree, fanout, self._replace[number], indptr):
            raise ValueError("weights by which edges are sampled must be >= 0 and finite, got one that is not")
        return largest

    def _sample(self) -> None:
        for number, relation in enumerate(self._relations):
            space = self._memory[number]
            self._sample_rows(number, *self._targets(relation), space.neighbor, space.taken)
        self._relabel()

    def _sample_rows(self, number: int, begin: int, end: int, neighbor: np.ndarray, taken: np.ndarray) -> None:
        """Sample for the targets begin..end-1 of an edge type, which have `neighbor` from its front on."""
        (relation, picked), space = self._narrowed[number], self._memory[number]
        first, last = int(space.indptr[begin]), int(space.indptr[end])
        if first == last:
            return
        edge, indices = space.edge, relation.indices
        if self._split is None:
            self._pick(number, begin, end, taken)
        else:
            split, key, offset = self._split[self.hop], fold_hop(self._keys[0], self.hop), self._begin[0]
            start, degree = (rows[begin - offset :] for rows in self._rows(0))
            cpu.pick_split_hop(
                key, space.node, begin, end, self._options.scale, split.num_inside, start, degree, space.indptr,
                taken, edge, space.weight,
            )  # fmt: skip
            indices = split.indices
        if picked is not None:
            edge[first:last] = picked[edge[first:last]]
        cpu.read_hop(indices, edge, first, last, neighbor)
        if self._split is not None and self._options.return_e_id:
            cpu.unsplit_hop(split.position, start, space.indptr, begin, end, edge)

    def _pick(self, number: int, begin: int, end: int, taken: np.ndarray) -> None:
        """Choose the edges of targets: the latest, by weight, or uniformly."""
        relation, space, fanout = self._narrowed[number][0], self._memory[number], self.fanouts[number][self.hop]
        key, replace, offset = (
            fold_hop(self._keys[number], self.hop),
            self._replace[number],
            self._begin[relation.target],
        )
        start, degree = (rows[begin - offset : end - offset] for rows in self._rows(number))
        indptr, edge, weight = space.indptr[begin : end + 1], space.edge, relation.sampled_by(fanout)
        targets = self._spaces[relation.target]
        name = targets.node[begin:end]
        if self._trees is not None:
            name = name + targets.owner[begin:end].astype(np.int64) * (len(relation.indptr) - 1)
        if self._latest[number]:
            choice.pick_latest(weight, start, degree, indptr, edge)
        elif len(weight):
            choice.pick_weighted(key, name, weight, fanout, replace, start, degree, indptr, edge)
        else:
            cpu.pick_hop(key, name, 0, end - begin, fanout, replace, start, degree, indptr, taken, edge)
        if self._options.with_weight:
            choice.weigh(weight, start, degree, fanout, replace, indptr, edge, space.weight)

    def _relabel(self) -> None:
        ends = list(self._count)
        for number, relation in enumerate(self._relations):
            space, first = self._memory[number], self._first[number]
            begin, last = self._begin[relation.target], int(space.indptr[ends[relation.target]])
            local = space.reserve("local", last, keep=first)
            known, count = self._spaces[relation.source], self._count[relation.source]
            if self._trees is not None:
                rows = slice(begin, ends[relation.target])
                owner = self._spaces[relation.target].owner[rows]
                owner = np.repeat(owner, np.diff(space.indptr[begin : ends[relation.target] + 1]))
                found = space.neighbor[: last - first], owner, count, local[first:last]
                self._count[relation.source] = self._trees[relation.source].find(*found)
            else:
                node = known.reserve("node", min(count + last - first, known.num_nodes) + 1, keep=count)
                self._count[relation.source] = cpu.relabel_hop(
                    space.neighbor, first, last, known.base, known.label, node, count, local
                )
            self._edges[number].append(last - first)
            self._first[number] = last
        for counts, count, end in zip(self._nodes, self._count, ends, strict=True):
            counts.append(count - end)
        self._begin = ends
        self.hop += 1
        if self.hop < self.num_hops:
            self._look_up()

    def _edges_of(self, number: int) -> tuple:
        """Return what `join_edges` takes of an edge type."""
        relation, space, count = self._relations[number], self._memory[number], self._first[number]
        indptr = space.indptr[: self._begin[relation.target] + 1]
        edge = space.edge[:count]
        if relation.position is not None and self._options.return_e_id:
            edge = relation.position[edge]
        return space.local, indptr, edge, space.weight[:count]

    def _seeds_of(self, node_type: int) -> np.ndarray | None:
        owner = self._spaces[node_type].owner[: self._count[node_type]]
        return None if self._trees is None else owner.astype(np.int64)


def _check_spaces(relations: Sequence[Relation], spaces: Sequence[Workspace]) -> None:
    for relation in relations:
        num_rows, space, dtype = len(relation.indptr) - 1, spaces[relation.target], relation.indices.dtype
        if num_rows > space.num_nodes or spaces[relation.source].id_dtype != dtype:
            raise ValueError(
                f"workspace is for {space.num_nodes} nodes of {spaces[relation.source].id_dtype}, the graph has "
                f"{num_rows} of {dtype}"
            )


def sample_hops(
    csc: CSC,
    seeds: np.ndarray,
    fanouts: Sequence[int],
    key: int,
    options: SampleOptions,
    *,
    workspace: Workspace | None = None,
    allocate: Allocate = np.empty,
    split: Sequence[SplitRows] | None = None,
) -> SampledNeighbors:
    """Sample all hops of arrays on the CPU; arguments as for `sample_neighbors`."""
    relation = Relation.of(csc)
    space = workspace or Workspace(csc.num_rows, relation.indices.dtype)
    hops = HopSampling([relation], [(0, seeds)], [check_fanouts(fanouts)], key, [space], options, split=split)
    for _ in range(hops.num_hops):
        hops.sample()
    return hops.collect(allocate)
