"""Train, validation and test masks where a graph comes without them, and links held out of a graph."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import NamedTuple

import numpy as np

from ..edge_stream.relations import EdgesByType, HeteroStream
from ..edge_stream.stream import FilteredStream
from ..errors import check_flags, check_integer, short
from ..jit import kernel
from ..rng import combine, fold, permutation, unit
from .columns import EDGE_COLUMNS, Columns, load_arrays
from .graph_dataset import GraphDataset


def random_split(
    labels, fractions: Sequence[float] = (0.7, 0.15, 0.15), seed: int = 0, regression: bool = False
) -> dict[str, np.ndarray]:
    """Split the labelled nodes at random.

    Args:
        labels: (num_nodes,), (num_nodes, 1) or (num_nodes, num_labels) numbers, -1 or NaN = unknown; nodes without a
            known label are left out.
        fractions: Shares of train, validation and test nodes; each in [0, 1], together at most 1.
        seed: Seed of the permutation.

    Returns:
        {"train", "val", "test"}: (num_nodes,) bool, disjoint.

    Raises:
        ValueError: fractions out of range, or labels that are not numbers.
    """
    check_integer("seed", seed)
    three = isinstance(fractions, Iterable) and not isinstance(fractions, str)
    given = list(fractions) if three else []
    numbers = [one for one in given if isinstance(one, Real) and not isinstance(one, bool) and one >= 0]
    if len(given) != 3 or len(numbers) != 3 or not sum(numbers) <= 1 + 1e-9:
        raise ValueError(f"fractions must be three numbers in [0, 1] that add up to at most 1, got {short(fractions)}")
    labels = np.asarray(labels)
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"labels must be numbers, got {labels.dtype}")
    known = labels >= 0 if labels.dtype.kind != "f" or not regression else np.isfinite(labels)
    labelled = np.flatnonzero(known if labels.ndim == 1 else known.any(axis=1))
    order = labelled[permutation(len(labelled), fold(seed))]
    bounds = [math.floor(len(order) * sum(map(float, numbers[:i])) + 0.5) for i in range(4)]
    masks = {}
    for name, start, stop in zip(("train", "val", "test"), bounds[:-1], bounds[1:], strict=True):
        masks[name] = np.zeros(len(labels), bool)
        masks[name][order[start:stop]] = True
    return masks


KEPT, VAL, TEST = 0, 1, 2
SPLITS = {"val": VAL, "test": TEST}


# The rules of `hold_out_edges`: (num,) uint8, KEPT, VAL or TEST, of some consecutive edges. They are functions of this
# module with their arguments bound, so that streams that follow them can go to other processes.


def _by_hash(src, dst, first_edge: int, *, key: np.uint64, val: float, test: float) -> np.ndarray:
    return _split_of(src, dst, key, test, test + val)


def _by_hash_of_type(
    src, dst, first_edge: int, *, key: np.uint64, val: float, test: float, relation, follows, within
) -> np.ndarray:
    """Split edges of one source of a graph with edge types, by a hash of ends and edge type.

    Args:
        relation: Number of the edge type of all edges, or (num_edges,) integers.
        follows: (num_relations,) edge type that is held out together with this one, itself unless it is the reverse of
            another; -1: edges of the edge type are kept.
        within: (num_relations,) bool: both ends are of one node type, and their order has no effect.
    """
    return _split_typed(src, dst, _relations_at(relation, first_edge, len(src)), follows, within, key, test, test + val)


def _by_time(src, dst, first_edge: int, *, time, first: int, val: int, test: int, relation, chosen) -> np.ndarray:
    """Split edges of one source by time.

    Args:
        time: (num_edges,) times of the edges of all sources; the source's begin at `first`.
        val, test: Times from which on edges are held out for validation, and for test.
        relation: As above; None: one edge type.
        chosen: (num_relations,) bool: edge types whose edges are held out.
    """
    time = np.asarray(time[first + first_edge : first + first_edge + len(src)])
    held = (time >= val).astype(np.uint8) + (time >= test)
    if relation is not None:
        held[~chosen[_relations_at(relation, first_edge, len(src))]] = KEPT
    return held


def _keeps(rule: Callable, src, dst, first_edge: int) -> np.ndarray:
    """Return (num,) bool, whether training sees the edges."""
    return rule(src, dst, first_edge) == KEPT


def _relations_at(relation: int | np.ndarray, first_edge: int, num: int) -> np.ndarray:
    if np.ndim(relation) == 0:
        return np.full(num, relation, np.int64)
    return np.asarray(relation[first_edge : first_edge + num]).astype(np.int64)


class LinkSet(NamedTuple):
    """Links to evaluate on, in the node ids of the stream.

    Attributes:
        edges: (2, num_links) int64, first and other end.
        negatives: (num_links, num_negatives) int64 negative other ends of each, or None: they are sampled.
        edge_type: (num_links,) integers, edge type of each link, which then is a triple: `edges` are heads and tails.
            None without edge types.
        time: (num_links,) int64, when each link appears, or None: a sampler that samples by time needs it.
        label: (num_links,) integers, class of each link, -1 = unknown, for `EdgeClassifier`; or None.
        features: (num_links, dim) features of the links as edges; or None.
    """

    edges: np.ndarray
    negatives: np.ndarray | None = None
    edge_type: np.ndarray | None = None
    time: np.ndarray | None = None
    label: np.ndarray | None = None
    features: np.ndarray | None = None


def hold_out_edges(
    dataset: GraphDataset,
    val: float = 0.05,
    test: float = 0.1,
    seed: int = 0,
    relations: Sequence[str | int] | None = None,
    by_time: bool = False,
    reverses: Mapping[str, str] | None = None,
) -> GraphDataset:
    """Return the data set with some edges held out of its stream, as links to validate and test on.

    Whether an edge is held out depends on a hash of its two ends, regardless of their order, and of its edge type where
    there are several; between two node types source and target are distinguished. Repeats and the reverse of an edge
    are held out with it, so no order, chunk size or symmetrising lets a held-out edge back in. Self-loops stay.

    With `by_time` the latest edges are for test, and those before them for validation; edges of one time stay together.
    Each listed edge is an event, repeats and edges from a node to itself too. Edges without a time stay.

    Args:
        dataset: Data set whose stream is read once; edge weights, times and features follow their edges.
        val, test: Shares of the edges for validation and test, in [0, 1), together below 1.
        seed: Seed of the hash; without effect by time.
        relations: Edge types whose edges are held out, by name or number, in a graph with several; None: all.
        by_time: Whether the split is by `edge_time`.
        reverses: {edge type: edge type that it is the reverse of}, for reverses that the graph lists itself; they are
            held out with the edges that they reverse, and are not links. None: "b,rev_name,a" is that of "a,name,b".

    Returns:
        The data set with a filtered stream and `links`. Each held-out edge is in `val` or `test` once (undirected: in
        one direction, chosen by the hash), in ascending order; by time each event, in the order of the times. A split
        of share 0 is left out. Links have edge types, times, classes and features where the edges have.

    Raises:
        ValueError: a share out of range, or one so small that it holds no edge; edge values of another length; an
            unknown edge type; no times.

    Cost: O(num_edges) time and one pass; 16 bytes a held-out edge (four times that while they are sorted) and its
        values, one byte an edge beside edge values; by time 16 bytes an edge.
    """
    if not isinstance(dataset, GraphDataset):
        raise ValueError(f"dataset must be a GraphDataset, got {type(dataset).__name__}: load_pyg makes one of PyG's")
    check_integer("seed", seed, 0)
    check_flags(by_time=by_time)
    if not isinstance(reverses, Mapping | None):
        raise ValueError(f"reverses must be {{edge type: edge type that it is the reverse of}}, got {short(reverses)}")
    if not isinstance(relations, Sequence | np.ndarray | None):
        raise ValueError(f"relations must be a list of edge types, got {short(relations)}")
    shares = {"val": val, "test": test}
    for name, share in shares.items():
        if not isinstance(share, int | float | np.number) or not 0 <= share < 1:
            raise ValueError(f"{name} must be in [0, 1), got {share}")
    if not 0 < val + test < 1:
        raise ValueError(f"val + test must be above 0 and below 1, got {val + test}")
    stream, schema = dataset.stream, dataset.schema
    typed = isinstance(stream, HeteroStream)
    if not typed and (relations is not None or reverses is not None):
        name = "relations" if relations is not None else "reverses"
        raise ValueError(f"{name} needs a graph with several edge types, but this one has one: leave it out")
    of_edges = {name: getattr(dataset, name) for name in EDGE_COLUMNS}
    edges, carries = Columns(**of_edges), typed or any(rows is not None for rows in of_edges.values())
    key, described = np.uint64(fold(seed)), {"hold_out": [float(val), float(test), seed]}
    sources = [one.stream for one in stream.sources] if typed else [stream]
    follows = _followed(schema, relations, reverses) if typed else None
    if by_time:
        time = _values(stream, edges).get("edge_time")
        rules, begin = _rules_by_time(stream, time, float(val), float(test), follows)
        described = {"hold_out": [float(val), float(test)], "from": begin}
    elif typed:
        within = schema.sources == schema.targets
        given = {"key": key, "val": float(val), "test": float(test), "follows": follows, "within": within}
        rules = [partial(_by_hash_of_type, relation=one.relation, **given) for one in stream.sources]
    else:
        rules = [partial(_by_hash, key=key, val=float(val), test=float(test))]
    if typed:
        described["follows"] = follows.tolist()
    held, places = _split_sources(sources, rules, carries)
    values = _values(stream, edges)
    links = {}
    for name, number in SPLITS.items():
        if shares[name] == 0:
            continue
        links[name] = _links_of(stream, held, places, number, values, follows, None if by_time else key)
        if links[name].edges.shape[1] == 0:
            raise ValueError(f"{name}={shares[name]} holds none of {stream.num_edges} edges: raise it")
    keep = None if places is None else places == KEPT
    kept = {name: rows[keep] for name, rows in values.items()}
    if typed and dataset.edge_type is not None:
        kept["edge_type"] = np.asarray(dataset.edge_type)[keep]
    return replace(dataset, stream=_filtered(stream, rules, described, keep), **kept, links=links)


def _values(stream, edges: Columns) -> dict[str, np.ndarray]:
    """Return the edge data of a data set by name; the stream is counted."""
    stream.count()
    arrays = load_arrays(stream, edges)
    return {name: rows for name, rows in arrays.items() if name.startswith("edge_") and rows is not None}


def _followed(schema, relations: Sequence | None, reverses: Mapping | None) -> np.ndarray:
    """Return (num_relations,) int64 `follows`, see `_by_hash_of_type`."""
    if isinstance(relations, str):
        raise ValueError(f"relations must be a list of edge types, got {short(relations)}: write [{relations}]")
    listed = np.flatnonzero(schema.listed)
    numbers = {schema.edge_types[number]: number for number in listed.tolist()}
    found = {}
    if reverses is not None:
        found = {schema.edge_type_number(back): schema.edge_type_number(there) for back, there in reverses.items()}
    else:
        for (source, name, target), number in numbers.items():
            there = numbers.get((target, name.removeprefix("rev_"), source))
            if name.startswith("rev_") and there is not None:
                found[number] = there
    for back, there in found.items():
        if schema.edge_types[back][::-2] != schema.edge_types[there][::2]:
            names = [",".join(schema.edge_types[number]) for number in (back, there)]
            raise ValueError(f"reverses: {names[0]} does not lead back from where {names[1]} leads")
    chosen = listed.tolist() if relations is None else [_relation(schema, one) for one in relations]
    twice = next((number for number in chosen if number in found), None)
    if relations is not None and twice is not None:
        names = [",".join(schema.edge_types[number]) for number in (twice, found[twice])]
        raise ValueError(f"relations: {names[0]} is the reverse of {names[1]}: name {names[1]}")
    follows = np.full(schema.num_edge_types, -1, np.int64)
    for number in chosen:
        if number not in found:
            follows[number] = number
    for back, there in found.items():
        follows[back] = follows[there]
    return follows


def _relation(schema, name: str | int) -> int:
    number = schema.edge_type_number(name) if isinstance(name, str | tuple | list) else int(name)
    if not 0 <= number < schema.num_edge_types or not schema.listed[number]:
        known = "; ".join(",".join(schema.edge_types[at]) for at in np.flatnonzero(schema.listed))
        raise ValueError(f"relations must be among {known}, got {name}")
    return number


def _rules_by_time(stream, time: np.ndarray | None, val: float, test: float, follows: np.ndarray | None) -> tuple:
    """Return the rule of each source, and the times from which on edges are held out for validation and test."""
    if time is None:
        raise ValueError("by_time=True needs edge_time, but the data set has none: give it, or leave by_time out")
    firsts, relations, chosen = [0], [None], None
    if follows is not None:
        chosen = follows >= 0
        counts = [one.stream.num_edges for one in stream.sources]
        firsts, relations = np.cumsum([0, *counts])[:-1].tolist(), [one.relation for one in stream.sources]
    known = time != np.int64(np.iinfo(np.int64).min)
    if chosen is not None:
        own = chosen & (follows == np.arange(len(follows)))
        of_edge = [own[_relations_at(one.relation, 0, one.stream.num_edges)] for one in stream.sources]
        known &= np.concatenate(of_edge) if of_edge else True
    order = np.sort(time[known])
    if not len(order):
        raise ValueError("by_time=True: no edge that may be held out has a time")
    latest = int(order[-1]) + 1
    at = [math.ceil(len(order) * (1 - share)) for share in (val + test, test)]
    from_val, from_test = (int(order[place]) if place < len(order) else latest for place in at)
    rules = [
        partial(_by_time, time=time, first=first, val=from_val, test=from_test, relation=relation, chosen=chosen)
        for first, relation in zip(firsts, relations, strict=True)
    ]
    return rules, [from_val, from_test]


def _split_sources(sources: list, rules: list, with_places: bool) -> tuple[list[dict], np.ndarray | None]:
    """Return the held-out ends by source, in the ids of the sources, and the split of each edge of the stream."""
    places, held = [np.empty(0, np.uint8)], []
    for stream, rule in zip(sources, rules, strict=True):
        chunks: dict[int, list[np.ndarray]] = {VAL: [np.empty((2, 0), np.int64)], TEST: [np.empty((2, 0), np.int64)]}
        for chunk in stream.chunks():
            split = rule(chunk.src, chunk.dst, chunk.first_edge)
            for number, found in chunks.items():
                chosen = split == number
                found.append(np.stack([chunk.src[chosen], chunk.dst[chosen]]).astype(np.int64))
            if with_places:
                places.append(split)
        held.append({number: np.concatenate(found, axis=1) for number, found in chunks.items()})
    return held, np.concatenate(places) if with_places else None


def _links_of(stream, held: list, places, number: int, values: dict, follows: np.ndarray | None, key) -> LinkSet:
    """Return the links of a split; key: of the hash that chooses directions; None: events are returned as they are."""
    edges, relation = np.concatenate([ends[number] for ends in held], axis=1), None
    rows = None if places is None else np.flatnonzero(places == number)
    undirected = stream.to_undirected or stream.layout in ("once", "both_ways")
    if follows is not None:
        relation = np.asarray(stream.edge_type_of(rows)).astype(np.int64)
        links = follows[relation] == relation  # a reverse is not a link
        edges, relation, rows = edges[:, links], relation[links], rows[links]
        schema, offsets = stream.schema, stream.type_offsets
        edges = edges + np.stack([offsets[schema.sources[relation]], offsets[schema.targets[relation]]])
    if key is None:
        if stream.layout == "both_ways":
            edges, rows = edges[:, edges[0] <= edges[1]], rows[edges[0] <= edges[1]]
        chosen = np.argsort(values["edge_time"][rows], kind="stable")
    elif follows is None:
        edges, chosen = _distinct(edges, undirected, key)
        return _with_values(LinkSet(edges), values, rows, chosen)
    else:
        chosen = _distinct_triples(edges, relation, np.array(stream.schema.reverse or range(0)))
    edges, relation = edges[:, chosen], None if relation is None else relation[chosen]
    return _with_values(LinkSet(np.ascontiguousarray(edges), edge_type=relation), values, rows, chosen)


def _with_values(links: LinkSet, values: dict, rows: np.ndarray | None, chosen: np.ndarray) -> LinkSet:
    given = {name: values.get(f"edge_{name}") for name in ("time", "label", "features")}
    return links._replace(**{name: table[rows[chosen]] for name, table in given.items() if table is not None})


def _distinct_triples(edges: np.ndarray, relation: np.ndarray, reverse: np.ndarray) -> np.ndarray:
    """Return positions of each triple once, ascending; for undirected edge types the first one listed."""
    ends = edges.copy()
    if len(reverse):
        both = reverse[relation] == relation
        ends[:, both] = np.sort(ends[:, both], axis=0)
    return np.unique(np.concatenate([relation[None], ends]), axis=1, return_index=True)[1]


def _filtered(stream, rules: list, described: dict, keep: np.ndarray | None):
    """Return the stream without what is held out."""
    if not isinstance(stream, HeteroStream):
        return FilteredStream(stream, partial(_keeps, rules[0]), described)
    sources, at = [], 0
    for one, rule in zip(stream.sources, rules, strict=True):
        kept = keep[at : at + one.stream.num_edges]
        at += one.stream.num_edges
        found = FilteredStream(one.stream, partial(_keeps, rule), described)
        found.num_edges = int(kept.sum())
        relation = one.relation if np.ndim(one.relation) == 0 else np.asarray(one.relation)[kept]
        sources.append(EdgesByType(found, relation))
    options = {name: getattr(stream, name) for name in ("chunk_edges", "to_undirected", "remove_self_loops")}
    found = HeteroStream(sources, stream.schema, np.diff(stream.type_offsets), **options)
    found.node_ids = stream.node_ids
    return found


def held_out(dataset: GraphDataset, options: dict | None) -> GraphDataset:
    """Return the data set with edges held out as a config says.

    Args:
        options: arguments of `hold_out_edges` by name; None: the data set as it is.

    Raises:
        ValueError: an unknown option.
    """
    if options is None:
        return dataset
    if not isinstance(options, Mapping):
        raise ValueError(f"hold_out must be shares by name like {{val: 0.05, test: 0.1}}, got {short(options)}")
    unknown = sorted(set(options) - {"val", "test", "seed", "relations", "by_time", "reverses"})
    if unknown:
        raise ValueError(f"hold_out takes val, test, seed, relations, by_time and reverses, got {', '.join(unknown)}")
    try:
        return hold_out_edges(dataset, **options)
    except ValueError as error:
        told, names = str(error), "val|test|relations|by_time|reverses"
        raise ValueError(f"hold_out.{told}" if re.match(rf"({names})\b", told) else told) from error


def _distinct(edges: np.ndarray, undirected: bool, key: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Return each link once, ascending, in the direction that its hash chooses if undirected; and its position."""
    if not undirected:
        return np.unique(edges, axis=1, return_index=True)
    (low, high), chosen = np.unique(np.sort(edges, axis=0), axis=1, return_index=True)
    swapped = _direction(low, high, key)
    return np.stack([np.where(swapped, high, low), np.where(swapped, low, high)]), chosen


@kernel
def _split_of(src, dst, key, test, held):
    out = np.zeros(len(src), np.uint8)
    for i in range(len(src)):
        low, high = min(src[i], dst[i]), max(src[i], dst[i])
        if low != high:
            probability = unit(combine(combine(key, low), high))
            out[i] = 2 if probability < test else (1 if probability < held else 0)
    return out


@kernel
def _split_typed(src, dst, relation, follows, within, key, test, held):
    out = np.zeros(len(src), np.uint8)
    for i in range(len(src)):
        name = follows[relation[i]]
        first, other = src[i], dst[i]
        if name < 0 or (within[name] and first == other):
            continue
        if (within[name] and first > other) or (not within[name] and name != relation[i]):
            first, other = other, first
        probability = unit(combine(combine(combine(key, name), first), other))
        out[i] = 2 if probability < test else (1 if probability < held else 0)
    return out


@kernel
def _direction(low, high, key):
    out = np.empty(len(low), np.bool_)
    for i in range(len(low)):
        out[i] = combine(combine(combine(key, low[i]), high[i]), 1) & np.uint64(1)
    return out
