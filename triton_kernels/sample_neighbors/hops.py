"""One batch sampled hop by hop, over one edge type or several; the caller does what must happen between two hops."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...graph import CSC
from ...rng import combine_int
from .choice import SplitRows, checked_split
from .cpu import Workspace
from .edge_types import Relation, join_edges
from .rows import SampledRows, SampleOptions
from .trees import Trees

Allocate = Callable[[tuple[int, ...], type], np.ndarray]
_NUMBERS = (int, float, np.number)
_NO_SEEDS = np.empty(0, np.int64)


class Backend(NamedTuple):
    """What samples a hop for `HopSampling`: numba on the CPU, or Triton; see `SampledRows`, `Trees`, `join_edges`."""

    rows: type
    trees: type
    join_edges: Callable[..., tuple]


NUMBA = Backend(SampledRows, Trees, join_edges)


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
        node_type: (num_nodes,) int64 node type of each node, where node types share ids; else None.
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
    node_type: np.ndarray | None = None


def check_fanouts(fanouts: Sequence[int], name: str = "fanouts", least: int = 1) -> tuple[int, ...]:
    """Return the fan-outs as a tuple of ints.

    Args:
        fanouts: A number for each hop, -1 for all neighbours.
        name: What the argument is called.
        least: The smallest number.

    Raises:
        ValueError: none given, or one is not an integer, is below `least` and not -1.
    """
    if not isinstance(fanouts, list | tuple) and (isinstance(fanouts, str) or not isinstance(fanouts, Iterable)):
        raise ValueError(f"{name} must be a list with a fan-out for each hop, like [15, 10, 5], got {fanouts!r}")
    fanouts = tuple(fanouts)
    if not fanouts:
        raise ValueError(f"{name} must name at least one hop, got []")
    for hop, fanout in enumerate(fanouts):
        known = isinstance(fanout, _NUMBERS) and not isinstance(fanout, bool)
        if not known or fanout != fanout // 1 or not (fanout >= least or fanout == -1):
            raise ValueError(f"{name}[{hop}] must be an integer >= {least}, or -1 for all neighbours, got {fanout}")
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
    count = space.place(seeds)
    if count != len(seeds):
        space.finish(count)
        raise ValueError(
            f"seeds must be distinct, got {len(seeds) - count} repeats among {len(seeds)}: give each once, or pass "
            "disjoint=True to a sampler that has it"
        )
    return count


class HopSampling:
    """Samples of a batch in steps: `sample` once a hop, then `collect`.

    A hop samples the rows of all nodes that the last one found, edge type by edge type. What decides besides random
    numbers (time, weight, a preference) is asked of each edge type, and costs nothing where it has none.
    Every choice is a hash of (key, edge type, hop, node, sample), and of the seed in disjoint trees. A row of no more
    edges than the fan-out is taken whole, in its order.

    The workspaces belong to the batch until `collect` or `abandon`. Hops come one after the other, from any thread;
    one may be sampled by several threads side by side, by `sample_chunk` and `relabel` instead of `sample`. Between
    hops the rows of the next one are looked up already, so that `num_neighbors` costs nothing.

    Args:
        relations: What is sampled, in this order.
        seeds: Node types, each once, with (num_seeds,) ids; distinct unless disjoint, when they are numbered in this
            order. On a device also tensors, whose ids are not checked: ids of disjoint trees, else the number of nodes
            that the workspace holds already.
        fanouts: By edge type, edges a row for each hop, -1 for all, 0 for none.
        key: uint64.
        spaces: By node type, a workspace that fits it.
        options: How edges are sampled.
        split: For each hop rows of the one edge type with preferred neighbours first; see `sample_neighbors`.
        times: (num_seeds,) int64 time of each seed, all in one; later edges are not sampled. Only in disjoint trees.
        type_of: Gives (num,) int64 node types of seeds, where `rows_of` and `sources_of` of all edge types name some;
            without it rows of all nodes are read, and the result is the same but for `node_type`.

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
        self.num_hops, self.hop, self.times = len(fanouts[0]) if len(fanouts) else 0, 0, times
        self._options, self._spaces = options, spaces
        if split is not None or options.scale != 1:
            csc = CSC(relations[0].indptr, relations[0].indices)
            split = checked_split(split, options.scale, csc, self.num_hops, options.replace, options.return_e_id)
        self._waits = not isinstance(spaces[0], Workspace)  # for the numbers of a hop, which a device has
        self._backend = spaces[0].backend if self._waits else NUMBA
        self._with_weight = split is not None or options.with_weight
        self._rows = []
        for number, relation in enumerate(relations):
            own_key = combine_int(key, number) if number else key
            source, targets = spaces[relation.source], spaces[relation.target]
            _check_workspace(relation, source, targets)
            memory = source.of_relation(number)
            memory_of = relation, fanouts[number], own_key, memory, targets
            self._rows.append(self._backend.rows(*memory_of, options, times, split))
        self._trees = [self._backend.trees(space) for space in spaces] if options.disjoint else None
        self._count, self._begin = [0] * len(spaces), [0] * len(spaces)  # nodes so far, and before the last hop
        self._or_freed(self._place, seeds)
        # Node types of the seeds; then how many nodes each edge type found at each hop, of the type of its sources.
        self._types = None if type_of is None else type_of(spaces[0].node[: self._count[0]])
        self._found: list[list[int]] = []
        if self.num_hops:
            self._or_freed(self._look_up)
        self._nodes = [[count] for count in self._count]

    @property
    def num_neighbors(self) -> int:
        """Neighbours that the targets of the next hop have in all, sampled or not; 0 after the last hop."""
        return 0 if self.hop == self.num_hops else sum(rows.num_neighbors for rows in self._rows)

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
        for rows in self._rows:
            self._sample_rows(rows, *rows.chunk(chunk, num_chunks))

    def relabel(self) -> None:
        """Number the nodes that all chunks of `sample_chunk` found: the hop is sampled then; errors as of `sample`."""
        self._or_freed(self._relabel)

    def collect(self, allocate: Allocate = np.empty, with_edge_type: bool = False) -> SampledNeighbors:
        """Copy a batch of one node type out of the workspace, which is free then; called once, after the last hop.

        Edges come by target, then by edge type.
        """
        try:
            n_id = self._spaces[0].ids("node", self._count[0], allocate)
            numbers = [rows.relation.number for rows in self._rows] if with_edge_type else None
            wanted = self._options.return_e_id, self._with_weight, numbers
            edge_index, indptr, e_id, weight, edge_type = self._backend.join_edges(
                [rows.edges() for rows in self._rows], self._begin[0], *wanted, allocate
            )
            sizes = [rows.sizes for rows in self._rows]
            sizes = sizes[0] if len(sizes) == 1 else [sum(hop) for hop in zip(*sizes, strict=True)]
            owner = self._owners[0] if self._trees else None
            node_type = None if self._types is None else self._node_types(allocate)
            return SampledNeighbors(
                n_id, edge_index, indptr, e_id, self._nodes[0], sizes, weight, owner, edge_type, node_type
            )
        finally:
            self.abandon()

    def collect_by_type(self) -> SampledNeighbors:
        """As `collect`, of several node types: each attribute is a list, by node type or by edge type; no weights."""
        try:
            n_id = self._ids("node")
            edges = [
                self._backend.join_edges([rows.edges()], self._begin[rows.relation.target], True, False, None, np.empty)
                for rows in self._rows
            ]
            edge_index, indptr, e_id = ([one[part] for one in edges] for part in range(3))
            sizes, owners = [rows.sizes for rows in self._rows], self._owners if self._trees else None
            return SampledNeighbors(n_id, edge_index, indptr, e_id, self._nodes, sizes, seed_of=owners)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the workspaces without a result; not while a hop is being sampled."""
        if self._trees is None:
            for number, space in enumerate(self._spaces):
                space.finish(self._count[number])

    @property
    def _owners(self) -> list[np.ndarray]:
        return self._ids("owner")

    def _node_types(self, allocate: Allocate) -> np.ndarray:
        out, at = allocate((self._count[0],), np.int64), len(self._types)
        out[:at] = self._types
        for found in self._found:
            for rows, count in zip(self._rows, found, strict=True):
                out[at : at + count] = rows.relation.sources_of
                at += count
        return out

    def _ids(self, name: str) -> list[np.ndarray]:
        return [space.ids(name, count) for space, count in zip(self._spaces, self._count, strict=True)]

    def _or_freed(self, step: Callable[..., None], *arguments) -> None:
        try:
            step(*arguments)
        except BaseException:
            for space in self._spaces:
                space.finish(space.num_nodes)  # all labels that it gave are old now
            raise

    def _place(self, seeds: Sequence[tuple[int, np.ndarray]]) -> None:
        num_rows, given, first = [space.num_nodes for space in self._spaces], dict(seeds), 0
        for rows in self._rows:
            num_rows[rows.relation.target] = len(rows.relation.indptr) - 1
        if self._trees is None:
            for node_type, space in enumerate(self._spaces):
                ids = given.get(node_type, _NO_SEEDS)
                is_placed = isinstance(ids, Tensor)
                self._count[node_type] = ids if is_placed else place_seeds(space, ids, num_rows[node_type])
            return
        for node_type, ids in given.items():
            space = self._spaces[node_type]
            if not isinstance(ids, Tensor):
                ids = check_seeds(ids, num_rows[node_type]).astype(space.id_dtype)
            owner = np.arange(first, first + len(ids), dtype=np.int32)
            self._count[node_type] = self._trees[node_type].begin(ids, owner)
            first += len(ids)

    def _look_up(self) -> None:
        """Look up the rows of the targets of the next hop."""
        node_types = self._types
        if self._types is not None and self._found:
            node_types = np.repeat([rows.relation.sources_of for rows in self._rows], self._found[-1])
        for rows in self._rows:
            target = rows.relation.target
            rows.look_up(self.hop, self._begin[target], self._count[target], node_types)
        if self._waits:
            self._settle()

    def _settle(self) -> None:
        """Learn the numbers of nodes and of edges to sample, which a device knows, in its one answer of a hop."""
        coming = self._rows if self.hop < self.num_hops else []
        known = self._spaces[0].read([*self._count, *(rows.last for rows in coming)])
        self._count = known[: len(self._count)]
        for rows, last in zip(coming, known[len(self._count) :], strict=True):
            rows.settle(self._count[rows.relation.target], last)

    def _sample(self) -> None:
        for rows in self._rows:
            self._sample_rows(rows, *rows.whole())
        self._relabel()

    def _sample_rows(self, rows: SampledRows, begin: int, end: int, neighbor: np.ndarray, taken: np.ndarray) -> None:
        rows.sample(begin, end, neighbor, taken)

    def _relabel(self) -> None:
        ends, before = list(self._count), []
        for rows in self._rows:
            source = rows.relation.source
            tree = None if self._trees is None else self._trees[source]
            before.append(self._count[source])
            self._count[source] = rows.number(self._spaces[source], tree, before[-1])
            rows.add()
        if self._types is not None:
            self._found.append(np.diff([*before, self._count[0]]).tolist())
        self._begin = ends
        self.hop += 1
        if self.hop < self.num_hops:
            self._look_up()
        elif self._waits:
            self._settle()
        for number, counts in enumerate(self._nodes):
            counts.append(self._count[number] - ends[number])


def _check_workspace(relation: Relation, source: Workspace, targets: Workspace) -> None:
    num_rows, dtype = len(relation.indptr) - 1, relation.indices.dtype
    if not isinstance(source, Workspace):
        dtype = source.id_dtype  # a device converts as it reads
    if num_rows > targets.num_nodes or source.id_dtype != dtype:
        raise ValueError(
            f"workspace is for {targets.num_nodes} nodes of {source.id_dtype}, the graph has {num_rows} of {dtype}"
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
