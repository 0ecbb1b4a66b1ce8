"""The graph vocabulary that every stage shares: id dtypes, compressed columns, mask names."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .errors import is_integer, short
from .jit import kernel

MASK_NAMES = ("train", "val", "test")
# What samplers and models may require of a graph, by the names of their `requires`.
COLUMNS = ("edge_types", "node_time", "edge_time", "edge_weight", "edge_features", "edge_label", "reverse_edges")
MOST_EDGE_TYPES = 1 << 16  # stores keep the edge type of an edge in two bytes at most


class Batch:
    """What models, strategies and callbacks read of a batch. Ours derive from it; what they leave out is as it is here.

    `MiniBatch` and `FullGraphBatch` say what each is; `source`, `links`, `needed` and `layers` are those of an
    `EvaluationShare`, `edge_label_index` is PyG's name for `pairs`.
    """

    x = x_dense = x_csr = x_by_node_type = y = train_mask = val_mask = test_mask = None
    num_sampled_nodes = num_sampled_edges = node_type = edge_type = type_counts = schema = None
    edge_weight = self_weight = edge_attr = edge_time = seed_time = seed_of = None
    pairs = negatives = source_negatives = pair_type = pair_attr = edge_label = edge_label_index = None
    loss_weight = loss_count = loss_nodes = None
    averaging_weights = loss_is_share = full_graph = False
    source = links = needed = layers = None
    table_dtype = "float32"
    columns: Mapping[str, Any] = MappingProxyType({})


class TypeCounts(NamedTuple):
    """How many nodes and edges of each type a batch has, known on the host: a GPU would have to be asked.

    Of hop h: the seeds and the nodes of the first h hops, and the edges into them; all nodes come last.

    Attributes:
        ends: (num_hops + 1,) number of nodes up to each hop.
        nodes: By hop, the nodes of each node type.
        edges: By hop, the edges of each edge type.
        targets, sources: By hop, the pairs of each edge type and a target, or a source, that have edges.
    """

    ends: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]

    def of(self, what: str, num_nodes: int, num_types: int) -> list[int] | None:
        """Return counts by type.

        Args:
            what: Name of an attribute.
            num_nodes: Number of first nodes; not known unless a hop ends there.
            num_types: Types that there should be.
        """
        hop = bisect_left(self.ends, num_nodes)
        if hop == len(self.ends) or self.ends[hop] != num_nodes:
            return None
        counts = self._asdict()[what][hop]
        return list(counts) if len(counts) == num_types else None

    @classmethod
    def sum(cls, given: "Sequence[TypeCounts]") -> "TypeCounts":
        """Return the counts of batches that are joined hop by hop, with as many hops as the longest has."""
        longest = max(len(one.ends) for one in given)
        at = [[min(hop, len(one.ends) - 1) for hop in range(longest)] for one in given]
        ends = tuple(sum(one.ends[hops[hop]] for one, hops in zip(given, at, strict=True)) for hop in range(longest))
        tables = []
        for number in range(1, len(cls._fields)):
            rows = [[one[number][hop] for hop in hops] for one, hops in zip(given, at, strict=True)]
            tables.append(tuple(tuple(map(sum, zip(*of_hop, strict=True))) for of_hop in zip(*rows, strict=True)))
        return cls(ends, *tables)


class _OthersBatch(Batch):
    """A batch of another class, such as PyG's `Data`, with the defaults of `Batch` for what that does not have."""

    n_id = ()
    edge_index = indptr = indices = degree = batch_size = part = key = None

    def __init__(self, own: Any):
        members = {*vars(Batch), *vars(_OthersBatch)}
        given = {name: getattr(own, name) for name in members if name[0] != "_" and hasattr(own, name)}
        vars(self).update(given, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)


class StepBatches(Batch):
    """The batches of one step that a process computes one after another, one of each of its logical ranks.

    Args:
        batches: In the order of the logical ranks.

    Attributes:
        losses: Of those that have been computed, but the last one's, which Lightning has.
    """

    n_id = ()
    edge_index = indptr = indices = degree = part = key = None

    def __init__(self, batches: Sequence[Any]):
        self.batches, self.losses = tuple(batches), []

    @property
    def batch_size(self) -> int | None:
        """Targets of all of them; None where a batch has no number."""
        sizes = [batch_of(batch).batch_size for batch in self.batches]
        return None if None in sizes else sum(sizes)


def batch_of(batch: Any) -> Any:
    """Return a batch that has all of `Batch`: as it is, or what there is of another's; None has nothing."""
    return batch if isinstance(batch, Batch) else _OthersBatch(batch)


def batches_of(batch: Any) -> tuple[Any, ...]:
    """Return the batches of a step: those of `StepBatches`, or the one that it is."""
    return batch.batches if isinstance(batch, StepBatches) else (batch,)


class CSC(NamedTuple):
    """In-neighbours by destination: row v of the CSC lists the sources of the edges into v.

    Attributes:
        indptr: (num_rows + 1,) int64, row v is indices[indptr[v]:indptr[v + 1]].
        indices: (num_edges,) int32 or int64, source ids, ascending within a row.
    """

    indptr: np.ndarray
    indices: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def in_degree(self) -> np.ndarray:
        """(num_rows,) int64."""
        return np.diff(self.indptr)


@dataclass(frozen=True)
class GraphSchema:
    """The node types of a graph, and the edge types between them.

    A node type and an edge type are known by their numbers, which are their places here.

    Attributes:
        node_types: Names of the node types.
        edge_types: (kind of the sources, name, kind of the targets) of the edge types.
        reverse: (num_edge_types,) edge type that the reverse of an edge belongs to, where reverses were added; the
            edge type itself where both directions are one. Empty: reverses were not added.

    Raises:
        ValueError: a name appears twice, an edge type names a node type that is not there, or there are more than
            65,536.

    Cost: linear in node types and edge types.
    """

    node_types: tuple[str, ...]
    edge_types: tuple[tuple[str, str, str], ...]
    reverse: tuple[int, ...] = ()

    def __post_init__(self):
        for what, names in (("node_types", self.node_types), ("edge_types", self.edge_types)):
            seen: set = set()
            twice = next((name for name in names if name in seen or seen.add(name)), None)
            if twice is not None or not names:
                raise ValueError(f"{what} must be at least one name, each once, got {twice or 'none'}")
        check_num_edge_types(len(self.edge_types))
        node_types = set(self.node_types)
        for edge_type in self.edge_types:
            if len(edge_type) != 3 or not {edge_type[0], edge_type[2]} <= node_types:
                raise ValueError(
                    f"an edge type must be (source type, name, target type) with node types of "
                    f"{', '.join(self.node_types)}, got {edge_type}"
                )
        self._check_reverse()

    def _check_reverse(self) -> None:
        """Refuse reverses that do not join the same node types the other way round, and back again."""
        if not self.reverse:
            return
        known = range(len(self.edge_types))
        if len(self.reverse) != len(known):
            raise ValueError(f"reverse must have {len(known)} entries, one an edge type, got {len(self.reverse)}")
        for at, back in enumerate(self.reverse):
            if not is_integer(back) or back not in known:
                raise ValueError(f"reverse[{at}] must be an edge type in [0, {len(known)}), got {short(back)}")
            (source, _, target), (first, _, last) = self.edge_types[at], self.edge_types[back]
            if self.reverse[back] != at or (source, target) != (last, first):
                raise ValueError(
                    f"reverse[{at}] must be an edge type from {target} to {source} whose reverse is {at}, got {back}"
                )

    @property
    def num_node_types(self) -> int:
        """Number of node types."""
        return len(self.node_types)

    @property
    def num_edge_types(self) -> int:
        """Number of edge types."""
        return len(self.edge_types)

    @property
    def listed(self) -> np.ndarray:
        """(num_edge_types,) bool: whether edges of an edge type were listed, and not added as the reverse of others."""
        there = np.arange(self.num_edge_types)
        return there <= np.array(self.reverse) if self.reverse else np.ones(self.num_edge_types, np.bool_)

    @cached_property
    def sources(self) -> np.ndarray:
        """(num_edge_types,) int64 kind of each edge type's sources."""
        return self._node_types_at(0)

    @cached_property
    def targets(self) -> np.ndarray:
        """(num_edge_types,) int64 kind of each edge type's targets."""
        return self._node_types_at(2)

    def _node_types_at(self, end: int) -> np.ndarray:
        number = {node_type: at for at, node_type in enumerate(self.node_types)}
        return np.array([number[edge_type[end]] for edge_type in self.edge_types])

    @cached_property
    def _numbers(self) -> dict[tuple[str, ...], list[int]]:
        """Numbers of the edge types by their three names, and by the one in the middle."""
        found: dict[tuple[str, ...], list[int]] = {}
        for at, edge_type in enumerate(self.edge_types):
            for name in (edge_type, edge_type[1:2]):
                found.setdefault(name, []).append(at)
        return found

    def with_reverses(self, separate: bool) -> "GraphSchema":
        """Return the schema with the reverse "rev_name" of each edge type, reverses after the others.

        separate: reverses within one node type are an edge type of their own, too.
        """
        names, reverse = list(self.edge_types), [0] * self.num_edge_types
        for number, (source, name, target) in enumerate(self.edge_types):
            if source == target and not separate:
                reverse[number] = number
                continue
            reverse[number] = len(names)
            names.append((target, f"rev_{name}", source))
            reverse.append(number)
        return GraphSchema(self.node_types, tuple(names), tuple(reverse))

    def edge_type_number(self, name) -> int:
        """Return the number of an edge type, by its three names, "source,name,target", or its name where that is one's.

        Raises:
            ValueError: no edge type, or several, are called so.
        """
        wanted = tuple(part.strip() for part in name.split(",")) if isinstance(name, str) else tuple(name)
        found = self._numbers.get(wanted, [])
        if len(found) != 1:
            listed = [",".join(one) for one in self.edge_types[:_MOST_TOLD]]
            if self.num_edge_types > _MOST_TOLD:
                listed.append(f"... {self.num_edge_types} in all")
            raise ValueError(f"edge type {','.join(map(str, wanted))!r} must be one of: {'; '.join(listed)}")
        return found[0]

    def as_json(self) -> dict:
        """Return plain values, of which `of_json` makes the same again."""
        return {
            "node_types": list(self.node_types),
            "edge_types": [list(edge_type) for edge_type in self.edge_types],
            "reverse": list(self.reverse),
        }

    @classmethod
    def of_json(cls, values: dict) -> "GraphSchema":
        """Return the schema of `as_json`."""
        edge_types = tuple(tuple(edge_type) for edge_type in values["edge_types"])
        return cls(tuple(values["node_types"]), edge_types, tuple(values["reverse"]))


def check_requires(requires: Mapping[str, str], has: Mapping[str, bool]) -> None:
    """Refuse a graph that lacks what is required of it: the one place where the two are compared.

    Args:
        requires: A name of `COLUMNS` to the line that refuses a graph without it.
        has: Such a name to whether the graph has it. What it does not name is not compared: a part knows less than its
            store.

    Raises:
        ValueError: the line of the first that is missing.
    """
    for name, line in requires.items():
        if not has.get(name, True):
            raise ValueError(line)


_MOST_TOLD = 50  # names in a message


def check_num_edge_types(num_edge_types: int, what: str = "edge_types") -> None:
    """Raise ValueError for more edge types than a store can distinguish."""
    if num_edge_types > MOST_EDGE_TYPES:
        raise ValueError(
            f"{what}: at most {MOST_EDGE_TYPES} edge types, reverses included, got {num_edge_types}: number them "
            f"from 0, "
            "or leave rare ones out"
        )


def numbered_schema(num_edge_types: int, what: str) -> GraphSchema:
    """Return the schema of one node type whose edge types have no names but numbers; `what` has them, for errors."""
    check_num_edge_types(num_edge_types, what)
    return GraphSchema(("node",), tuple(("node", str(number), "node") for number in range(num_edge_types)))


def id_dtype(num_nodes: int) -> np.dtype:
    """Return int32 where ids below num_nodes fit it, else int64."""
    return np.dtype(np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64)


def build_csc(src: np.ndarray, dst: np.ndarray, num_nodes: int) -> CSC:
    """Sort edges, (num_edges,) integers in [0, num_nodes), by destination, then by source; repeats are kept.

    Returns:
        CSC with indices of `id_dtype(num_nodes)`.

    Cost: O(num_nodes + num_edges) time (two counting sorts); a second copy of the edges while it runs.
    """
    dtype = id_dtype(num_nodes)
    by_src_indptr, by_src_dst = _count_sort(src, np.ascontiguousarray(dst).astype(dtype, copy=False), num_nodes)
    src_sorted = np.repeat(np.arange(num_nodes, dtype=dtype), np.diff(by_src_indptr))
    indptr, indices = _count_sort(by_src_dst, src_sorted, num_nodes)
    return CSC(indptr, indices)


@kernel
def _count_sort(keys, values, num_keys):
    """Sort values by their integer key, stably; return the (num_keys + 1,) offsets and the sorted values."""
    offsets = np.zeros(num_keys + 1, np.int64)
    for i in range(len(keys)):
        offsets[keys[i] + 1] += 1
    for k in range(num_keys):
        offsets[k + 1] += offsets[k]
    cursor = offsets[:-1].copy()
    out = np.empty_like(values)
    for i in range(len(keys)):
        out[cursor[keys[i]]] = values[i]
        cursor[keys[i]] += 1
    return offsets, out
