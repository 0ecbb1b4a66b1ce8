"""What is evaluated: the settings, a cheap sample of the validation nodes, links with negatives."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..dataset import LinkSet
from ..dataset.graph_dataset import check_link_names
from ..errors import StrategyError, check_count, short
from ..graph import CSC, build_csc
from ..jit import kernel
from ..model.inference import TABLE_DTYPES
from ..model.layer_source import NodeSet, with_sources
from ..partition_store import PartitionStore
from ..partition_store.typed_features import NodeTypes
from ..rng import combine_array, fold
from ..sampler.links import count_joined, count_triples, sample_link_negatives
from ..values import exact_integers, exact_times

MODES = ("layerwise", "sampled")
EPOCH_SHARE = 0.2  # of an epoch's work; a sampled validation may cost as much
TRAINING_FACTOR = 3  # cost of a row or edge in training over one in evaluation: backward costs about twice forward
SMALL_WORK = 1 << 22  # rows and edges evaluated within a second: no sampling below
_LINKS_AT_ONCE, _EDGES_AT_ONCE = 1 << 16, 1 << 22


@dataclass(frozen=True)
class EvaluationOptions:
    """How validation, test and prediction compute their nodes' outputs.

    Args:
        mode: "layerwise": exact, a layer at a time, for backbones with layer(index, x, block); computes only rows
            that the evaluated nodes need. "sampled": for any backbone, batches with all neighbours of as many hops
            as the sampler has fan-outs (2 without). Slower. That is exact where the backbone has no more layers than
            hops, and takes degrees from `degree`, not from `edge_index` as PyG's GCNConv does.
        sample: share of the validation nodes, in (0, 1], that validation during training uses: a fixed sample, by a
            hash of the seed and the node, the same on any number of processes. "auto": 1, or as many as cost a fifth
            of an epoch, by the rows and edges that both read (those of training count three times). Test, prediction
            and `trainer.validate` use all nodes.
        table_dtype: "float32", or "bfloat16": tables of hidden layers take half the disk and are rounded to 8 bits.
        block_edges: edges a block of layer-wise inference, >= 1, where a layer is not one sum over its edges.
        scratch: folder that layer-wise inference writes its tables to; None: beside the store. Machines that do not
            share that folder have whole tables of their own there, and send each other the rows.
        links: {"val": LinkSet, "test": LinkSet} in original ids, edges that the store does not have; None: the data
            set's. They are evaluated instead of masks and labels where the sampler is a `LinkSampler`. A module
            that classifies edges predicts those of test, or without them those of val, with a class or without.
        negatives: Number of negatives that each link is ranked among, >= 1. Where the set has none of its own, they
            are sampled uniformly from all nodes that no edge or held-out link joins to the first end. "all": every such
            node; triples are ranked so in both directions, without the other triples that are known (filtered).
            "auto": all for links with edge types, 100 for others and in mode "sampled". In a graph of several node
            types they have the node type of the end that is asked for.

    Raises:
        ValueError: a value outside what is listed here, or a sample in mode "sampled".
    """

    mode: str = "layerwise"
    sample: str | float = "auto"
    table_dtype: str = "float32"
    block_edges: int = 1 << 20
    scratch: str | os.PathLike | None = None
    links: Mapping[str, LinkSet] | None = None
    negatives: int | str = "auto"

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"evaluation must be one of {', '.join(MODES)}, got {short(self.mode)}")
        is_share = isinstance(self.sample, Real) and not isinstance(self.sample, bool) and 0 < self.sample <= 1
        if self.sample != "auto" and not is_share:
            raise ValueError(f"evaluation.sample must be auto or a share in (0, 1], got {short(self.sample)}")
        if self.mode == "sampled" and self.sample not in ("auto", 1):
            raise ValueError(
                f'evaluation.sample={self.sample} needs mode="layerwise": mode="sampled" evaluates all nodes'
            )
        if self.table_dtype not in TABLE_DTYPES:
            raise ValueError(
                f"evaluation.table_dtype must be one of {', '.join(TABLE_DTYPES)}, got {short(self.table_dtype)}"
            )
        if self.links is not None:
            check_link_names(self.links)
        check_count("evaluation.block_edges", self.block_edges)
        if self.negatives not in ("auto", "all"):
            if isinstance(self.negatives, str):
                raise ValueError(
                    f"evaluation.negatives must be auto, all or a number >= 1, got {short(self.negatives)}"
                )
            check_count("evaluation.negatives", self.negatives)


def evaluation_options(given: str | EvaluationOptions) -> EvaluationOptions:
    """Return the settings of a mode's name, or those given; raises as `EvaluationOptions` does."""
    if isinstance(given, EvaluationOptions):
        return given
    if given not in MODES:
        raise ValueError(f"evaluation must be one of {', '.join(MODES)}, or EvaluationOptions(...), got {short(given)}")
    return EvaluationOptions(given)


class ValidationSample(NamedTuple):
    """The nodes that validation during training uses.

    Attributes:
        nodes: (num,) int64 store ids, ascending.
        num_nodes: nodes of the whole split.
        work: rows and edges that their evaluation reads.
        epoch_work: as predicted: rows and edges that the batches of an epoch hold, times three, for the
            forward and backward passes; None: the share was given.
    """

    nodes: np.ndarray
    num_nodes: int
    work: int
    epoch_work: int | None

    @property
    def share(self) -> float:
        """Share of the split, in (0, 1]."""
        return len(self.nodes) / max(1, self.num_nodes)

    def __str__(self) -> str:
        cost = f", {self.work / self.epoch_work:.0%} of an epoch's work" if self.epoch_work else ""
        return f"a fixed sample of {len(self.nodes):,} of {self.num_nodes:,} nodes ({self.share:.2%}){cost}"


def evaluation_work(source, nodes: np.ndarray, num_layers: int, limit: float = math.inf) -> int:
    """Return how many rows and edges an exact evaluation of some nodes reads, over all processes.

    Args:
        source: a `StoreLayerSource` of all parts.
        nodes: (num,) store ids.
        num_layers: layers of the model.
        limit: counting ends above it.

    Cost: the edges counted, read once.
    """
    current, work = NodeSet.of(nodes, source.num_nodes), 0
    for _ in range(num_layers):
        work += len(current) + source.num_edges(current)
        if work > limit:
            return work
        current = with_sources(source, current, 1.0)
    return work + len(current)


def sample_order(nodes: np.ndarray, original_nid: np.ndarray, seed: int) -> np.ndarray:
    """Return nodes in the order in which samples take them: a function of the seed and of original ids alone."""
    nodes = np.asarray(nodes)
    key = combine_array(fold(seed, *b"validation"), np.asarray(original_nid[nodes]))
    return nodes[np.argsort(key, kind="stable")]


def validation_sample(
    source, ordered: np.ndarray, num_layers: int, share: str | float, epoch_work: int | None
) -> ValidationSample | None:
    """Choose the nodes that validation during training uses; None: all of them.

    Args:
        source: a `StoreLayerSource` of all parts.
        ordered: (num,) nodes of the split, see `sample_order`; a sample is a prefix of them.
        num_layers: layers of the model.
        share: share of the nodes in (0, 1], or "auto".
        epoch_work: rows and edges that the batches of an epoch hold, for "auto".

    Cost: for "auto" the edges of a fifth of an epoch, read about ten times, once a fit.
    """
    total, epoch_work = len(ordered), epoch_work and TRAINING_FACTOR * epoch_work

    def sample(count: int, work: int) -> ValidationSample:
        return ValidationSample(np.sort(ordered[:count]), total, work, epoch_work)

    if share != "auto":
        count = math.ceil(share * total)
        return None if count == total else sample(count, evaluation_work(source, ordered[:count], num_layers))
    limit = EPOCH_SHARE * epoch_work
    if total <= 1 or evaluation_work(source, ordered, num_layers, max(limit, SMALL_WORK)) <= max(limit, SMALL_WORK):
        return None
    low, high, found = 1, total, 0
    while high - low > max(1, low // 8):  # to an eighth
        middle = low * 2 if high == total and low * 2 < total else (low + high) // 2
        work = evaluation_work(source, ordered[:middle], num_layers, limit)
        if work <= limit:
            low, found = middle, work
        else:
            high = middle
    return sample(low, found or evaluation_work(source, ordered[:low], num_layers))


class LinkQueries(NamedTuple):
    """Links whose one end is asked for, among all nodes.

    Attributes:
        ends, answers: (num,) int64 store ids, the known ends and those asked for.
        edge_type: (num,) int64, or None.
        reverse: Whether first ends are asked for.
        num_nodes: Nodes of the graph.
        offsets: (num_keys + 1,) int64, where each key's run of `nodes` begins.
        nodes: (num_known,) int64 nodes that do not count as negatives, ascending within a key.
        places: (num,) int64, the key of each query.
        node_types: Node types of the nodes, where there are several: answers are searched among nodes of their type.
            Else None.
    """

    ends: np.ndarray
    answers: np.ndarray
    relation: np.ndarray | None
    reverse: bool
    num_nodes: int
    offsets: np.ndarray
    nodes: np.ndarray
    places: np.ndarray
    node_types: NodeTypes | None = None

    def of_other_node_types(self, begin: int, stop: int, first: int, last: int) -> np.ndarray | None:
        """Return (num, last - first) bool: nodes that cannot answer the queries [begin, stop); None: all can."""
        if self.node_types is None:
            return None
        wanted = self.node_types.type_of(self.answers[begin:stop])
        return wanted[:, None] != self.node_types.type_of(np.arange(first, last))[None]

    def known(self, begin: int, stop: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what may not count as a negative, of the queries [begin, stop) among the nodes [first, last).

        Returns:
            (num_found,) int64 rows and columns of those scores, from 0. The answers themselves are among them.
        """
        return _known_between(self.offsets, self.nodes, self.places[begin:stop], first, last)


class KnownAnswers(NamedTuple):
    """All true answers to some queries, by (known end, edge type).

    Attributes:
        keys: (num_keys,) int64 ascending: known end * num_relations + edge type.
        offsets: (num_keys + 1,) int64, where the answers of each key begin.
        nodes: (num_known,) int64 store ids, ascending within a key.
    """

    keys: np.ndarray
    offsets: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, wanted: np.ndarray, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> "KnownAnswers":
        """Collect the answers to some queries.

        Args:
            wanted: Keys of the queries, in any order, repeated or not.
            chunks: (keys, answers) of true links, also of other queries.

        Cost: one pass over the chunks; 16 bytes an answer to a query (more while they are sorted).
        """
        keys = np.unique(wanted)
        places, nodes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for key, answer in chunks:
            place = np.searchsorted(keys, key)
            found = place < len(keys)
            found[found] = keys[place[found]] == key[found]
            places.append(place[found])
            nodes.append(answer[found].astype(np.int64))
        place, node = np.unique(np.stack([np.concatenate(places), np.concatenate(nodes)]), axis=1)
        return cls(keys, np.searchsorted(place, np.arange(len(keys) + 1)), node)


class EvaluationLinks(NamedTuple):
    """One rank's share of the links of a split; implements the model's `LinkSource`.

    Attributes:
        store: training's graph.
        edges: (2, num_links) int64 store ids, this rank's.
        first: number of the first of them in the split.
        given: (num_links, num_negatives) int64 store ids, or None: they are sampled among unknown links.
        num_negatives: negatives a link.
        held: all held-out links in both directions, by store id.
        key: The random key of the samples.
        edge_type: (num_links,) int64 edge type of each link, or None.
        known: True answers to the links as queries for the other end, and for the first end; None: links are ranked
            among `num_negatives` negatives.
        time, label, features: Of each link, see `LinkSet`; or None.
        node_types: Node types of the nodes, where there are several; else None.
    """

    store: PartitionStore
    edges: np.ndarray
    first: int
    given: np.ndarray | None
    num_negatives: int
    held: CSC
    key: int
    edge_type: np.ndarray | None = None
    known: tuple[KnownAnswers, KnownAnswers] | None = None
    time: np.ndarray | None = None
    label: np.ndarray | None = None
    features: np.ndarray | None = None
    node_types: NodeTypes | None = None

    @property
    def among_all(self) -> bool:
        """Whether links are ranked among all nodes."""
        return self.known is not None

    def queries(self, num_links: int) -> Iterator[LinkQueries]:
        """Yield at most num_links links at a time as queries for other ends, those of triples for first ends too."""
        for reverse in (False, True) if self.edge_type is not None else (False,):
            known, (ends, answers) = self.known[reverse], self.edges[::-1] if reverse else self.edges
            keys = _keys(ends, self.edge_type, _num_relations(self.store, self.edge_type))
            for start in range(0, len(ends), num_links):
                chosen = slice(start, start + num_links)
                edge_types = None if self.edge_type is None else self.edge_type[chosen]
                places = np.searchsorted(known.keys, keys[chosen])
                yield LinkQueries(
                    ends[chosen],
                    answers[chosen],
                    edge_types,
                    reverse,
                    self.store.num_nodes,
                    known.offsets,
                    known.nodes,
                    places,
                    self.node_types,
                )

    def chunks(self, num_links: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (pairs (2, num), negatives (num, num_negatives)) of at most num_links; -1 where there is none."""
        for start in range(0, self.edges.shape[1], num_links):
            yield self.chunk(start, start + num_links)

    def chunk(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what `chunks` yields for the links [start, stop)."""
        pairs = self.edges[:, start:stop]
        if self.given is not None:
            return pairs, self.given[start:stop]
        if not self.num_negatives:
            return pairs, np.empty((pairs.shape[1], 0), np.int64)
        among = None
        if self.node_types is not None:  # in the numbers of the data set, node type after node type
            sizes = np.diff(self.node_types.starts).reshape(-1, self.node_types.num_node_types).sum(axis=0)
            wanted = self.node_types.type_of(pairs[1])
            among = (np.cumsum(sizes) - sizes)[wanted], sizes[wanted]
        return pairs, sample_link_negatives(
            self.store.whole_csc, self.held, pairs[0], self.num_negatives, self.key, self.first + start,
            self.store.store_nid, among,
        )  # fmt: skip

    def nodes(self) -> np.ndarray:
        """Return the (num,) ascending store ids whose embeddings these links are ranked by."""
        if self.among_all:
            return np.arange(self.store.num_nodes)
        found = [np.unique(self.edges)]
        for _, negatives in self.chunks(_LINKS_AT_ONCE):
            found = [np.union1d(found[0], negatives[negatives >= 0])]
        return found[0]


def evaluation_links(
    store: PartitionStore,
    links: Mapping[str, LinkSet],
    split: str,
    num_negatives: int | str,
    seed: int,
    rank: int,
    world_size: int,
    mode: str = "layerwise",
    by_time: bool = False,
    is_scored: bool = True,
) -> EvaluationLinks:
    """Return a rank's share of a split: consecutive links, in shares as even as possible.

    Args:
        store: training's graph.
        links: The links of all splits, in original ids.
        split: "val" or "test".
        num_negatives: Negatives sampled for a link where none are given, "all" or "auto"; see `EvaluationOptions`.
        seed: The seed of the samples; they do not depend on ranks, parts and epochs.
        rank, world_size: this process and how many there are.
        mode: See `EvaluationOptions`.
        by_time: Whether neighbours are sampled from before the links; then no embedding may see a later edge.
        is_scored: Whether an answer is known; links that are only predicted may be edges of the store.

    Raises:
        StrategyError: links are edges of the store, which training would see (unless they are only predicted), or
            have unknown nodes; or they have no times, or times that the mode does not use.

    Cost: 16 bytes a link of all splits, and 8 a node.
    """
    without = [name for name, given in links.items() if given.edge_type is None]
    if 0 < len(without) < len(links):
        raise StrategyError(f"links must have edge types in all splits or in none, got none in {without[0]}")
    known, node_types = [], {}
    if not num_negatives:  # edges to classify have no negatives
        links = {split: links[split]._replace(negatives=None)}
    for name, given in links.items():
        edges = _exact(exact_integers, f"links[{name!r}].edges", given.edges, unit="link", whole_floats=True)
        if edges.ndim != 2 or edges.shape[0] != 2:
            raise StrategyError(f"links[{name!r}].edges must have the shape (2, num_links), got {edges.shape}")
        if given.time is not None:
            links = links | {
                name: given._replace(time=_exact(exact_times, f"links[{name!r}].time", given.time, "link"))
            }
            given = links[name]
        if edges.size and not (edges.min() >= 0 and edges.max() < store.num_nodes):
            raise StrategyError(
                f"links[{name!r}] must have nodes in [0, {store.num_nodes}), got {edges.min()} to {edges.max()}"
            )
        known.append(np.asarray(store.store_nid)[edges].astype(np.int64))
        node_types[name] = _checked_relations(name, given, edges.shape[1], store)
        _check_values(name, given, edges.shape[1])
        if _are_later(name, given, store, mode, by_time) or not is_scored:
            leaked = 0  # edges between the same nodes may repeat
        elif node_types[name] is None:
            leaked = count_joined(store.whole_csc, known[-1])
        else:  # another edge type may join the same two nodes
            leaked = count_triples(store.whole_csc, store.edge_type, known[-1], node_types[name])
        if leaked:
            raise StrategyError(
                f"{leaked} of {edges.shape[1]} {name} links are edges of {store.root}, where training sees them: write "
                "the store from the stream of hold_out_edges"
            )
    both = np.concatenate(known, axis=1)
    held = build_csc(np.concatenate([both[0], both[1]]), np.concatenate([both[1], both[0]]), store.num_nodes)
    edges, given, edge_type = known[list(links).index(split)], links[split].negatives, node_types[split]
    bounds = [edges.shape[1] * r // world_size for r in (rank, rank + 1)]
    mine = slice(*bounds)
    if given is not None:
        if len(given) != edges.shape[1]:
            raise StrategyError(
                f"links[{split!r}] has {edges.shape[1]} edges and {len(given)} rows of negatives: give one row each"
            )
        given = _checked_negatives(split, np.asarray(given), store.num_nodes)[mine]
        given = np.where(given < 0, given, np.asarray(store.store_nid)[given]).astype(np.int64)
        num_negatives = given.shape[1]
    edges, key = np.ascontiguousarray(edges[:, mine]), fold(seed, *split.encode())
    edge_type = None if edge_type is None else edge_type[mine]
    more = {name: getattr(links[split], name) for name in ("time", "label", "features")}
    more = {name: None if values is None else np.asarray(values)[mine] for name, values in more.items()}
    if store.schema is not None and store.schema.num_node_types > 1:
        more["node_types"] = store.node_types
    if given is None and num_negatives == "auto":
        num_negatives = 100 if edge_type is None or mode == "sampled" else "all"
    if num_negatives == "all" and mode == "sampled":
        raise StrategyError(
            'evaluation.negatives=all ranks links by the embeddings of all nodes, but evaluation="sampled" has '
            "those of a batch: say a number"
        )
    if given is None and num_negatives == "all":
        if edge_type is None:
            both_ways, types = np.concatenate([both, both[::-1]], axis=1), None
        else:
            both_ways, types = both, np.concatenate(list(node_types.values()))
        answers = _known_answers(store, both_ways, edges, edge_type, types)
        return EvaluationLinks(store, edges, bounds[0], None, store.num_nodes, held, key, edge_type, answers, **more)
    if given is None and edge_type is not None and num_negatives and mode == "layerwise":
        raise StrategyError(
            f"evaluation.negatives={num_negatives}: links with edge types are ranked among all nodes: say all, or give "
            "the LinkSet negatives"
        )
    return EvaluationLinks(store, edges, bounds[0], given, num_negatives, held, key, edge_type, **more)


def _exact(rule: Callable, name: str, *values: Any, **options: Any) -> np.ndarray:
    try:
        return rule(name, *values, **options)
    except ValueError as error:
        raise StrategyError(str(error)) from None


def _check_values(split: str, given: LinkSet, num_links: int) -> None:
    """Refuse values of links unless there is one for each link."""
    for name, kinds in (("time", "iu"), ("label", "iu"), ("features", "fiub")):
        values = getattr(given, name)
        if values is None:
            continue
        values, axes = np.asarray(values), 2 if name == "features" else 1
        if values.ndim != axes or len(values) != num_links or values.dtype.kind not in kinds:
            shape = f"({num_links}, dim) numbers" if axes == 2 else f"({num_links},) integers"
            raise StrategyError(
                f"links[{split!r}].{name} must be {shape}, got {values.dtype} of the shape {values.shape}"
            )


def _are_later(split: str, given: LinkSet, store: PartitionStore, mode: str, by_time: bool) -> bool:
    """Return whether no embedding that scores links sees an edge of their time or later.

    Raises:
        StrategyError: neighbours are sampled by time, and links have no times, or are not later than edges seen.
    """
    if given.time is None or store.edge_time is None:
        if by_time:
            raise StrategyError(
                f"links[{split!r}].time is missing, and neighbours are sampled by time: hold_out_edges(by_time=True) "
                "gives it"
            )
        return False
    if by_time and mode == "sampled":
        return True
    first, late = int(np.asarray(given.time).min(initial=np.iinfo(np.int64).max)), 0
    for start in range(0, len(store.edge_time), _EDGES_AT_ONCE):
        late += int((np.asarray(store.edge_time[start : start + _EDGES_AT_ONCE]) >= first).sum())
    if by_time and late:
        raise StrategyError(
            f'evaluation="layerwise" computes a node once, from edges of any time, and {late} edges of {store.root} '
            f'are not before the first {split} link: use evaluation="sampled"'
        )
    return not late


def _checked_relations(split: str, given: LinkSet, num_links: int, store: PartitionStore) -> np.ndarray | None:
    """Return the (num_links,) int64 edge types of a split's links, or None."""
    if given.edge_type is None:
        return None
    if store.edge_type is None:
        raise StrategyError(
            f"links[{split!r}] have edge types, but the edges of {store.root} have none: write it with edge_type="
        )
    edge_type, limit = np.asarray(given.edge_type), store.schema.num_edge_types
    if edge_type.shape != (num_links,) or edge_type.dtype.kind not in "iu":
        raise StrategyError(
            f"links[{split!r}].edge_type must be ({num_links},) integers, got {edge_type.dtype} of {edge_type.shape}"
        )
    if num_links and not (edge_type.min() >= 0 and edge_type.max() < limit):
        raise StrategyError(
            f"links[{split!r}].edge_type must be in [0, {limit}), got {edge_type.min()} to {edge_type.max()}"
        )
    return edge_type.astype(np.int64)


def _num_relations(store: PartitionStore, edge_type: np.ndarray | None) -> int:
    return 1 if edge_type is None else store.schema.num_edge_types


def _keys(ends: np.ndarray, edge_type: np.ndarray | None, num_relations: int) -> np.ndarray:
    """Return (num,) int64 keys of queries."""
    return np.asarray(ends, np.int64) * num_relations + (0 if edge_type is None else edge_type)


def _known_answers(
    store: PartitionStore,
    held: np.ndarray,
    edges: np.ndarray,
    edge_type: np.ndarray | None,
    held_types: np.ndarray | None,
) -> tuple[KnownAnswers, KnownAnswers]:
    """Return the true answers to some links as queries for their other ends, and for their first ends.

    Args:
        store: Training's graph; its edges are read once for each direction, a bounded number at a time.
        held: (2, num_held) held-out links of all splits; without edge types in both directions.
        edges: (2, num_links) the links that are queries.
        edge_type: (num_links,) edge types of these, or None.
        held_types: (num_held,) edge types of the held-out links, or None.
    """
    num_relations = _num_relations(store, edge_type)

    def chunks(reverse: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        ends, answers = held[::-1] if reverse else held
        yield _keys(ends, held_types, num_relations), answers
        if edge_type is None:  # a node is not a negative of its own link
            yield edges[0], edges[0]
        for src, dst, relation in _stored_edges(store, edge_type is not None):
            ends, answers = (dst, src) if reverse else (src, dst)
            yield _keys(ends, relation, num_relations), answers

    forward = KnownAnswers.of(_keys(edges[0], edge_type, num_relations), chunks(False))
    if edge_type is None:
        return forward, forward
    return forward, KnownAnswers.of(_keys(edges[1], edge_type, num_relations), chunks(True))


def _stored_edges(store: PartitionStore, typed: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield sources, targets and edge types of all edges, `_EDGES_AT_ONCE` at a time."""
    indptr, indices = store.csc
    for start in range(0, len(indices), _EDGES_AT_ONCE):
        stop = min(start + _EDGES_AT_ONCE, len(indices))
        dst = np.searchsorted(indptr, np.arange(start, stop), side="right") - 1
        relation = np.asarray(store.edge_type[start:stop]).astype(np.int64) if typed else None
        yield np.asarray(indices[start:stop]).astype(np.int64), dst, relation


@kernel
def _known_between(offsets, nodes, places, first, last):
    count = 0
    for i in range(len(places)):
        for at in range(offsets[places[i]], offsets[places[i] + 1]):
            count += first <= nodes[at] < last
    row, column = np.empty(count, np.int64), np.empty(count, np.int64)
    count = 0
    for i in range(len(places)):
        for at in range(offsets[places[i]], offsets[places[i] + 1]):
            if first <= nodes[at] < last:
                row[count], column[count] = i, nodes[at] - first
                count += 1
    return row, column


def _checked_negatives(split: str, given: np.ndarray, num_nodes: int) -> np.ndarray:
    if given.ndim != 2 or given.dtype.kind not in "iu":
        raise StrategyError(
            f"links[{split!r}].negatives must be integers of the shape (num_links, num_negatives), got {given.dtype} "
            f"of {given.shape}"
        )
    if given.size and not (given.min() >= -1 and given.max() < num_nodes):
        raise StrategyError(
            f"links[{split!r}].negatives must be nodes in [0, {num_nodes}) or -1 for none, got {given.min()} to "
            f"{given.max()}"
        )
    return given
