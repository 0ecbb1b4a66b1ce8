"""Batches for losses over links: seeds with positives and negatives, and the neighbourhoods of them all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..errors import check_count, check_flags, short
from ..graph import CSC, GraphSchema, check_requires
from ..jit import kernel
from ..rng import combine_int, distinct_positions
from ..triton_kernels.sample_neighbors import Workspace
from ..values import ALWAYS
from .layerwise import LayerwiseSampler
from .links import AliasTable, sample_negatives, sample_positives
from .neighbor import NeighborSampler
from .protocol import Allocate, BatchSampler, Subgraph, num_slices, seed_slices

POSITIVES = ("neighbor", "walk", "edge")
NEGATIVES = ("degree", "uniform", "all")
CORRUPT = ("other", "both")
# Far above the hops of a batch, whose keys are folded from the same one.
POSITIVE_KEY, NEGATIVE_KEY, SOURCE_KEY = (np.uint64((1 << 40) + number) for number in range(3))
_AT_ONCE = 1 << 22  # times that are looked at


class LinkState(NamedTuple):
    """A part in the form that `LinkSampler` reads.

    Attributes:
        inner: State of the wrapped sampler.
        targets: (num_targets,) local ids of the target nodes.
        num_core: Number of core nodes; negatives are sampled from [0, num_core).
        table: Alias table of the core's degrees; None: negatives are uniform, or of the node types of what they stand
        for.
        offsets: (num_targets + 1,) int64 running sum of the edges that each target has to sample from, for
            positives="edge"; else None.
        edges: (num_edges,) int64 positions of those edges in the part's CSC; None: all of the targets' rows.
        edge_type: (num_edges,) integers, the edge type of each edge of the part's CSC; None without edge types.
        edge_time: (num_edges,) int64, the time of each of these edges; None: times do not count.
        node_types: The nodes of each node type, in a graph of several; else None.
    """

    inner: Any
    targets: np.ndarray
    num_core: int
    table: AliasTable | None
    offsets: np.ndarray | None
    edges: np.ndarray | None = None
    edge_type: np.ndarray | None = None
    edge_time: np.ndarray | None = None
    node_types: "NodeTypePools | None" = None


class NodeTypePools(NamedTuple):
    """The nodes of a part that negatives are sampled from, by node type.

    Attributes:
        node_types: `NodeTypes` of the store's ids.
        core_start, num_core, halo_nodes: See `PartGraph`.
        pools: By node type, what is sampled from.
        shared: Kind of the negatives that all links of a batch share; None: each link has its own.
    """

    node_types: Any
    core_start: int
    num_core: int
    halo_nodes: np.ndarray
    pools: tuple["NodeTypePool", ...]
    shared: int | None

    @classmethod
    def of(cls, part: Any, power: float | None, shared: int | None) -> "NodeTypePools":
        """Return the node types' core nodes in a part; of a node type without any its halo nodes.

        Args:
            part: A `PartGraph` or `WholeGraph` of several node types.
            power: Exponent of the degree by which nodes are sampled; None: uniformly.
            shared: See `NodeTypePools`.
        """
        node_types, halo = part.node_types, np.asarray(part.halo_nodes)
        edges = np.clip(node_types.starts - part.core_start, 0, part.num_core)
        halo_node_type = node_types.type_of(halo)
        pools = []
        for node_type in range(node_types.num_node_types):
            first, last = (
                edges[:-1][node_type :: node_types.num_node_types],
                edges[1:][node_type :: node_types.num_node_types],
            )
            there = last > first
            first, lengths = first[there], (last - first)[there]
            degree = None
            if not len(first):  # edges may come from nodes of a node type that has none in the core
                first = part.num_core + np.flatnonzero(halo_node_type == node_type)
                lengths = np.ones(len(first), np.int64)
            elif power is not None:
                runs = zip(first.tolist(), lengths.tolist(), strict=True)
                degree = np.concatenate([np.asarray(part.degree[a : a + n], np.float64) for a, n in runs])
            table = AliasTable.of(degree**power) if degree is not None and degree.any() else None
            pools.append(NodeTypePool(first, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), table))
        return cls(node_types, part.core_start, part.num_core, halo, tuple(pools), shared)

    def type_of(self, local: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 node types by their local ids."""
        nodes = self.core_start + local
        if len(self.halo_nodes):
            away = local >= self.num_core
            nodes[away] = self.halo_nodes[local[away] - self.num_core]
        return self.node_types.type_of(nodes)

    def sample(self, node_types: np.ndarray, num: int, key: int) -> np.ndarray:
        """Return (num_rows, num) int64 local ids, those of row i of node type node_types[i]."""
        out = np.empty((len(node_types), num), np.int64)
        for node_type in np.unique(node_types):
            rows = node_types == node_type
            out[rows] = (
                self.pools[node_type].sample(int(rows.sum()) * num, combine_int(key, node_type)).reshape(-1, num)
            )
        return out


class NodeTypePool(NamedTuple):
    """The nodes of a node type that negatives are sampled from, in runs of local ids.

    Attributes:
        first: (num_runs,) int64 first node of each run.
        offsets: (num_runs + 1,) int64 running sum of their lengths.
        table: Alias table over all of them; None: they are sampled uniformly.
    """

    first: np.ndarray
    offsets: np.ndarray
    table: AliasTable | None

    def nodes(self, places: np.ndarray) -> np.ndarray:
        """Return the (num,) local ids at some places among the nodes of the node type."""
        run = np.searchsorted(self.offsets, places, side="right") - 1
        return self.first[run] + places - self.offsets[run]

    def sample(self, num: int, key: int) -> np.ndarray:
        """Return (num,) local ids, sampled with replacement."""
        return self.nodes(sample_negatives(int(self.offsets[-1]), num, key, self.table))


class Links(NamedTuple):
    """The links of a batch.

    Attributes:
        nodes: (num_distinct,) int64 local ids, the seeds of its neighbourhood.
        pairs, negatives, pair_type, source_negatives: Positions among them, and edge types; see `MiniBatch`.
        seed_time: (num_nodes,) int64 time of the link that each node is for, where times count: nodes are not
            distinct then. Else None.
        pair_edges: (num_pairs,) int64 positions of the links in the part's CSC, where their classes are wanted.
        edge_label, pair_attr: These classes and features, where the sampler has them itself; see `MiniBatch`.
    """

    nodes: np.ndarray
    pairs: np.ndarray
    negatives: np.ndarray
    pair_type: np.ndarray | None = None
    source_negatives: np.ndarray | None = None
    seed_time: np.ndarray | None = None
    pair_edges: np.ndarray | None = None
    edge_label: np.ndarray | None = None
    pair_attr: np.ndarray | None = None


@dataclass(frozen=True)
class LinkSampler(BatchSampler):
    """Sample links to train on, and sample the neighbourhoods of all their nodes by another sampler.

    The seeds of a batch are the distinct nodes of [seeds | positives | negatives]; `pairs` and `negatives` say which of
    them form the links. Every core node is a target, with a label or without. A link whose two ends are the same node
    is left out: seeds without neighbours give such links, and so do walks that return.

    In a graph with relations, positives="edge" samples triples: `pairs` are (head, tail), the source and the target of
    an edge, `pair_type` is its edge type, and edges from a node to itself are links like others. Edges that were added
    as
    the reverse of an edge are never sampled: what is trained on are the edges that were listed. In a graph of several
    node types a negative has the node type of the end that it replaces.

    With times, which a `NeighborSampler(temporal_strategy=..., strictly_before=True)` looks at, each link is as late as
    its edge: neighbours of both ends and of its negatives are sampled from the edges before it, each in a tree of its
    own. Edges without a time are no positives.

    Args:
        sampler: Samples the neighbourhoods: a `NeighborSampler` or a `LayerwiseSampler`; None: fan-outs 25 and 10.
        positives: "neighbor": a uniform neighbour of each seed; "walk": a node of a random walk from it; "edge": edges
            of the targets, sampled uniformly and without replacement, in place of seeds.
        walk_length: Steps of a walk, >= 1; each of its nodes is equally likely to be sampled, as in the source.
        num_negatives: Negatives per positive, >= 1.
        negatives: "degree": in proportion to degree ** degree_power; "uniform": all nodes alike. They are sampled from
            the core of the part, or from all nodes where batches cross parts (scope="graph"). "all": each of those
            nodes once, shared by the batch (1-vs-all training); `num_negatives` has no effect.
        degree_power: Exponent of the degree under negatives="degree".
        share_negatives: Whether all positives of a batch share one sample of `num_negatives` nodes. A batch then has
            fewer seeds.
        edges_per_node: Edges sampled per target in a pass, >= 1; only for positives="edge".
        exclude_pairs: Whether the edges of a batch's positives, in both directions, are left out of its neighbourhoods,
            so that a link cannot be learned from its own message. An otherwise unbiased mean lacks those edges.
        corrupt: "other": negatives are false other ends. "both": there are as many false first ends too, as triples
            need; shared ones are the same nodes for either end.
        relations: Relations whose edges are sampled, for positives="edge"; None: all that are no added reverses.
        neighborhoods: Whether neighbourhoods are sampled. False: batches are links alone, for a model without layers.
        labelled: Whether the links are edges to classify, for `EdgeClassifier` and positives="edge": batches have their
            classes, `edge_label` of the store, and their features as `pair_attr`. `pairs` are (source, target), and no
            negatives are sampled.

    Raises:
        ValueError: an argument is out of range, or a sampler that cannot be wrapped.

    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, equation (1); degree ** 0.75 as in word2vec. Differs: one walk per
    seed and pass; each positive has its own negatives unless they are shared (the published code shares 20 over a
    batch). Negatives of both sides: Bordes et al., TransE, NeurIPS 2013; shared by the batch as in DGL-KE (SIGIR
    2020); all nodes as in Lacroix et al., ICML 2018.
    """

    sampler: NeighborSampler | LayerwiseSampler | None = None
    positives: str = "neighbor"
    walk_length: int = 5
    num_negatives: int = 5
    negatives: str = "degree"
    degree_power: float = 0.75
    share_negatives: bool = False
    edges_per_node: int = 1
    exclude_pairs: bool = False
    corrupt: str = "other"
    relations: Sequence[int] | None = None
    neighborhoods: bool = True
    labelled: bool = False

    def __post_init__(self):
        if self.sampler is None:
            object.__setattr__(self, "sampler", NeighborSampler([25, 10]))
        if not isinstance(self.sampler, NeighborSampler | LayerwiseSampler):
            raise ValueError(
                f"sampler of LinkSampler must be a NeighborSampler or a LayerwiseSampler, got "
                f"{type(self.sampler).__name__}"
            )
        for name, allowed in (("positives", POSITIVES), ("negatives", NEGATIVES), ("corrupt", CORRUPT)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.exclude_pairs and not isinstance(self.sampler, NeighborSampler):
            raise ValueError(
                "exclude_pairs must be False with a LayerwiseSampler, whose batches repeat nodes, got True"
            )
        if self.exclude_pairs and self.sampler.disjoint:
            raise ValueError("exclude_pairs must be False with disjoint=True, whose trees repeat nodes, got True")
        for name in ("walk_length", "num_negatives", "edges_per_node"):
            check_count(name, getattr(self, name))
        flags = ("share_negatives", "exclude_pairs", "neighborhoods", "labelled")
        check_flags(**{name: getattr(self, name) for name in flags})
        if self.labelled and self.positives != "edge":
            raise ValueError(f'labelled=True needs positives="edge", got positives={self.positives!r}')
        if self.by_time:
            self._check_times()
        if self.relations is not None:
            if self.positives != "edge":
                raise ValueError(f'edge types need positives="edge", got positives={self.positives!r}')
            object.__setattr__(self, "relations", tuple(int(relation) for relation in self.relations))
            if not self.relations or min(self.relations) < 0:
                raise ValueError(f"relations must be numbers >= 0, at least one, or None, got {self.relations}")
        if not isinstance(self.degree_power, Real) or not math.isfinite(self.degree_power):
            raise ValueError(f"degree_power must be a finite number, got {short(self.degree_power)}")

    def _check_times(self) -> None:
        """Refuse settings that do not go with links that have times."""
        if self.positives != "edge":
            raise ValueError(
                'positives must be "edge" with temporal_strategy, as links are as late as their edges, got '
                f"{self.positives!r}"
            )
        if not self.sampler.strictly_before:
            raise ValueError("strictly_before must be True for links with times: else a link is its own neighbour")
        if self.shares:
            name = "share_negatives=True" if self.share_negatives else 'negatives="all"'
            raise ValueError(f"{name} does not go with temporal_strategy: each link has negatives of its own time")
        if self.exclude_pairs:
            raise ValueError(
                "exclude_pairs must be False with temporal_strategy, whose neighbours are before the link, got True"
            )

    @property
    def by_time(self) -> bool:
        """Whether links have times, and neighbours are sampled before them."""
        return self.sampler.temporal_strategy is not None

    @property
    def requires(self) -> dict[str, str]:
        """What links are sampled by, and what their neighbourhoods are: with times those of the links."""
        needs = {}
        if self.by_time:
            needs["edge_time"] = (
                f"temporal_strategy={self.sampler.temporal_strategy} needs the time of each link, and the store has no "
                "edge_time: write it with edge_time=, or leave temporal_strategy out"
            )
        if self.relations is not None:
            needs["edge_types"] = (
                f"relations={list(self.relations)} need a graph with edge types, and this one has none"
            )
        if self.labelled:
            needs["edge_label"] = (
                "labelled=True needs classes of edges, and the store has none: write it with edge_label="
            )
        given = {*needs, "node_time"} if self.by_time else needs
        return needs | {name: line for name, line in self.sampler.requires.items() if name not in given}

    def check_schema(self, schema: GraphSchema | None) -> None:
        """Raise ValueError where the graph has not the edge types, or links share negatives of several node types."""
        if self.relations is not None and max(self.relations) >= schema.num_edge_types:
            raise ValueError(f"relations must be below {schema.num_edge_types}, got {list(self.relations)}")
        self._shared_node_type(schema)
        self.sampler.check_schema(schema)

    def _shared_node_type(self, schema: GraphSchema | None) -> int | None:
        """Return the node type of negatives that links share; None: they share none, or there is one node type."""
        if not self.shares or self.labelled or schema is None or schema.num_node_types == 1:
            return None
        node_types = {-1, -2}
        if self.positives == "edge":
            chosen = schema.listed if self.relations is None else list(self.relations)
            node_types = {*schema.targets[chosen].tolist()}
            node_types |= {*schema.sources[chosen].tolist()} if self.corrupt == "both" else set()
        if len(node_types) > 1:
            name = "share_negatives=True" if self.share_negatives else 'negatives="all"'
            raise ValueError(
                f'{name} shares negatives of one node type, and links have ends of several: say positives="edge" and '
                "relations= that lead to one node type, or give each link its own"
            )
        return node_types.pop()

    @property
    def trains_on_links(self) -> bool:
        """Targets need no labels."""
        return True

    @property
    def direction(self) -> str:
        """The wrapped sampler's."""
        return self.sampler.direction

    @property
    def per_hop(self) -> tuple[int, ...]:
        """Neighbours of a node for each hop of the wrapped sampler; empty where it has none, or none are sampled."""
        return self.sampler.per_hop if self.neighborhoods else ()

    @property
    def seeds_per_item(self) -> int:
        """Most nodes that a seed or an edge puts at the head of a batch, but for shared negatives."""
        return 2 + (0 if self.shares or self.labelled else self.num_negatives * (2 if self.corrupt == "both" else 1))

    @property
    def shares(self) -> bool:
        """Whether all links of a batch have the same negatives."""
        return self.share_negatives or self.negatives == "all"

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of one pass: `batch_size` seeds or edges each."""
        return num_slices(self._num_items(num_targets), batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> LinkState:
        """Return the wrapped sampler's state, and what links are sampled from.

        Raises:
            ValueError: the graph has not what links are sampled by.
        """
        edge_type, schema = part.columns.get("edge_type"), part.schema
        edge_time = part.columns.get("edge_time") if self.by_time else None
        check_requires(self.requires, part.has)
        self.check_schema(schema)
        table, pools = None, None
        if schema is not None and schema.num_node_types > 1:
            power = self.degree_power if self.negatives == "degree" else None
            pools = NodeTypePools.of(part, power, self._shared_node_type(schema))
        elif self.negatives == "degree":
            degree = np.asarray(part.degree[: part.num_core], np.float64)
            if degree.any():
                table = AliasTable.of(degree**self.degree_power)
        inner = self.sampler.prepare(part, targets, seed, *((True,) if self.by_time else ()))
        if self.positives != "edge":
            return LinkState(inner, targets, part.num_core, table, None, node_types=pools)
        lengths, edges = self.edges_to_sample(
            np.asarray(part.csc.indptr), np.asarray(targets, np.int64), self._sampled_edge_types(schema), edge_type,
            edge_time,
        )  # fmt: skip
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return LinkState(inner, targets, part.num_core, table, offsets, edges, edge_type, edge_time, pools)

    def edges_to_sample(
        self,
        indptr: np.ndarray,
        targets: np.ndarray,
        chosen: np.ndarray | None,
        edge_type: np.ndarray | None,
        edge_time: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return how many edges each target has to sample from, and their positions; None: all of the targets' rows.

        Args:
            indptr: (num_rows + 1,) row offsets.
            targets: (num_targets,) int64 rows.
            chosen: (num_relations,) bool: whose edges are sampled; None: those of all.
            edge_type, edge_time: By position; without a time an edge is not sampled. None: they do not count.
        """
        lengths, edges = indptr[targets + 1] - indptr[targets], None
        if chosen is not None:
            lengths, edges = _edges_of(indptr, targets, np.asarray(edge_type), chosen)
        if edge_time is not None and any((edge_time[a:b] == ALWAYS).any() for a, b in _blocks(len(edge_time))):
            lengths, edges = _timed_edges(indptr, targets, lengths, edges, edge_time)
        return lengths, edges

    def _sampled_edge_types(self, schema: GraphSchema | None) -> np.ndarray | None:
        """Return (num_relations,) bool: whose edges are sampled; None: those of all."""
        if self.relations is not None:
            return np.isin(np.arange(schema.num_edge_types), self.relations)
        return None if schema is None or schema.listed.all() else schema.listed

    def items(self, state: LinkState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return what each batch starts from: its seeds, or with positives="edge" its edges."""
        if self.positives != "edge":
            return seed_slices(state.targets, batch_size, drop_last, order_key)
        num_edges, num_items = int(state.offsets[-1]), self._num_items(len(state.targets))
        count = min(num_edges, num_items)
        order = np.arange(count) if order_key is None else distinct_positions(num_edges, count, order_key)
        if num_edges:
            return seed_slices(np.resize(order, num_items), batch_size, drop_last, None)
        return [order] * self.num_batches(len(state.targets), batch_size, drop_last)

    def sample(
        self,
        state: LinkState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        """Sample a batch's links, and the neighbourhoods of all their nodes."""
        seeds = self.first_ends(state, items)
        positives = self.other_ends(state, items, seeds, key)
        links = self.join(state, items, seeds, positives, self.negative_ends(state, items, key), workspace)
        if self.neighborhoods:
            times = {} if links.seed_time is None else {"times": links.seed_time}
            subgraph = self.sampler.sample(state.inner, links.nodes, key, workspace, allocate, return_e_id, **times)
        else:
            subgraph = _nodes_alone(links.nodes, allocate, return_e_id)
        return self.attach(subgraph, links, allocate)

    def first_ends(self, state: LinkState, items: np.ndarray) -> np.ndarray:
        """Return (num_items,) int64 local ids, the first end of each link: a seed, or the target of an edge."""
        if self.positives != "edge":
            return np.asarray(items, np.int64)
        return np.asarray(state.targets, np.int64)[_rows_of(state, items)]

    def other_ends(self, state: LinkState, items: np.ndarray, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_items,) int64 local ids, the positive of each of `first_ends`; itself where it has none."""
        csc = state.inner.csc
        if self.positives == "edge":
            return self.sources_at(csc, seeds, edges_at(state, items))
        return self.walk(csc, seeds, stream_key(key, POSITIVE_KEY), self.walk_length if self.positives == "walk" else 1)

    def sources_at(self, csc: CSC, targets: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Return (num,) int64, the sources of edges by their targets and their positions in the part's CSC."""
        return csc.indices[edges].astype(np.int64)

    def columns_at(self, state: LinkState, targets: np.ndarray, edges: np.ndarray) -> dict[str, np.ndarray]:
        """Return times and types of edges, where they count, by their targets and their positions in the part's CSC.

        A sampler that has classes and features of `labelled` edges itself returns them, too: "edge_label" and
        "edge_features".
        """
        columns = {"edge_time": state.edge_time, "edge_type": state.edge_type}
        return {name: np.asarray(values[edges]) for name, values in columns.items() if values is not None}

    def walk(self, csc: CSC, seeds: np.ndarray, key: int, length: int) -> np.ndarray:
        """Return (num,) int64, a node of a walk from each seed; see `sample_positives`."""
        return sample_positives(csc, seeds, key, length, "any")

    def negative_ends(self, state: LinkState, items: np.ndarray, key: int) -> np.ndarray:
        """Return (num_links, num_negatives) int64 local ids, or (1, num_negatives) where all links share them.

        With corrupt="both", unless they are shared, the false first ends come behind: (num_links, 2 * num_negatives).
        """
        num_links = len(items)
        if self.labelled:
            return np.empty((num_links, 0), np.int64)
        rows = 1 if self.shares and num_links else num_links
        if state.node_types is not None:
            return self._negatives_by_type(state, items, rows, key)
        if self.negatives == "all":
            return np.arange(state.num_core, dtype=np.int64)[None][:rows]
        num_nodes, shape = max(1, state.num_core), (rows, self.num_negatives)
        streams = (NEGATIVE_KEY,) if self.shares or self.corrupt == "other" else (NEGATIVE_KEY, SOURCE_KEY)
        num = rows * self.num_negatives
        sampled = [sample_negatives(num_nodes, num, stream_key(key, one), state.table) for one in streams]
        return np.concatenate([nodes.reshape(shape) for nodes in sampled], axis=1)

    def _negatives_by_type(self, state: LinkState, items: np.ndarray, rows: int, key: int) -> np.ndarray:
        """Return `negative_ends`, each of the node type of the end that it replaces."""
        pools = state.node_types
        if pools.shared is not None:
            pool, first = pools.pools[pools.shared], stream_key(key, NEGATIVE_KEY)
            if self.negatives == "all":
                return pool.nodes(np.arange(pool.offsets[-1]))[None][:rows]
            width = self.num_negatives if pool.offsets[-1] else 0
            return pool.sample(rows * width, first).reshape(rows, width) if width else np.empty((rows, 0), np.int64)
        seeds = self.first_ends(state, items)
        # The target of an edge is its other end.
        ends = (
            [] if self.positives == "edge" and self.corrupt == "other" else [self.other_ends(state, items, seeds, key)]
        )
        if self.positives == "edge":
            ends = [seeds, *ends]
        elif self.corrupt == "both":
            ends.append(seeds)
        streams = zip(ends, (NEGATIVE_KEY, SOURCE_KEY), strict=False)
        sampled = [pools.sample(pools.type_of(end), self.num_negatives, stream_key(key, one)) for end, one in streams]
        return np.concatenate(sampled, axis=1)

    def join(
        self,
        state: LinkState,
        items: np.ndarray,
        seeds: np.ndarray,
        positives: np.ndarray,
        negatives: np.ndarray,
        workspace: Workspace,
    ) -> Links:
        """Return the distinct nodes of all links, in order of appearance, and the links among them.

        Where links have times, each end of each link stands for itself, at the link's time.
        """
        nodes = np.concatenate([seeds, positives, negatives.reshape(-1)])
        seed_time, edges = None, None if state.offsets is None else edges_at(state, items)
        known = {} if edges is None else self.columns_at(state, seeds, edges)
        if state.edge_time is not None:
            time = known["edge_time"]
            seed_time = np.concatenate([time, time, np.repeat(time, negatives.shape[1])])
            distinct, place = nodes, np.arange(len(nodes))
        else:
            count = workspace.place(nodes)
            place = workspace.label[nodes].astype(np.int64) - workspace.base
            distinct = workspace.node[:count].astype(np.int64)
            workspace.finish(count)
        size, pair_type = len(seeds), None
        pairs, found = place[: 2 * size].reshape(2, size), place[2 * size :].reshape(negatives.shape)
        if state.edge_type is None and not self.labelled:
            linked = seeds != positives
            pairs = np.ascontiguousarray(pairs[:, linked])
            found = found if self.shares else found[linked]
        else:  # an edge's source is its head; a triple of one node is one too
            pairs = np.ascontiguousarray(pairs[::-1])
            if state.edge_type is not None:
                pair_type = known["edge_type"].astype(np.int64)
        others, sources = found, None
        if self.corrupt == "both":
            others, sources = (found, found) if self.shares else np.split(found, 2, axis=1)
            others, sources = np.ascontiguousarray(others), np.ascontiguousarray(sources)
        own = self.labelled and "edge_label" in known
        given = (known["edge_label"].astype(np.int64), known.get("edge_features")) if own else (None, None)
        pair_edges = edges if self.labelled and not own else None
        return Links(distinct, pairs, others, pair_type, sources, seed_time, pair_edges, *given)

    def attach(self, subgraph: Subgraph, links: Links, allocate: Allocate) -> Subgraph:
        """Return the neighbourhood of the links' nodes with its links; without their edges under `exclude_pairs`."""
        if self.exclude_pairs:
            subgraph = _without_pairs(subgraph, links.pairs, allocate)
        given = links._asdict()
        given.pop("nodes")
        if given["seed_time"] is None:  # that of disjoint trees is the subgraph's own
            given.pop("seed_time")
        return subgraph._replace(**given)

    def _num_items(self, num_targets: int) -> int:
        return num_targets * self.edges_per_node if self.positives == "edge" else num_targets


@dataclass(frozen=True)
class GivenLinks(BatchSampler):
    """Links that are given, a few a batch, with the neighbourhoods of their ends: for evaluation in sampled batches.

    Args:
        sampler: Samples the neighbourhoods.
        links: Has `edges`, (2, num_links) int64 ids of the whole graph, `edge_type`, `time`, `label` and `features`,
            each of as many or None, and `chunk(start, stop)` -> pairs and negatives, -1 where there is none.
    """

    sampler: NeighborSampler = field()  # has no default, whatever `BatchSampler` has
    links: Any
    trains_on_links = True

    @property
    def direction(self) -> str:
        """The wrapped sampler's."""
        return self.sampler.direction

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of all links: `batch_size` each, whatever the targets."""
        return num_slices(self.links.edges.shape[1], batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> Any:
        """Return the wrapped sampler's state."""
        return self.sampler.prepare(part, targets, seed, True)

    def items(self, state: Any, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return the numbers of each batch's links, in their order."""
        return seed_slices(np.arange(self.links.edges.shape[1]), batch_size, drop_last, None)

    def sample(
        self, state: Any, items: np.ndarray, key: int, workspace: Workspace, allocate: Allocate, return_e_id: bool
    ) -> Subgraph:
        """Return the links [items[0], items[-1]] with the neighbourhoods of their ends and negatives."""
        chosen = slice(int(items[0]), int(items[-1]) + 1)
        pairs, negatives = self.links.chunk(chosen.start, chosen.stop)
        there = negatives >= 0
        nodes, times = np.concatenate([pairs.reshape(-1), negatives[there]]), {}
        if self.sampler.temporal_strategy is not None:
            time = np.asarray(self.links.time[chosen], np.int64)
            times["times"] = np.concatenate([time, time, np.broadcast_to(time[:, None], negatives.shape)[there]])
            seeds, place = nodes, np.arange(len(nodes))
        else:
            seeds, place = np.unique(nodes, return_inverse=True)
        subgraph = self.sampler.sample(state, seeds, key, workspace, allocate, return_e_id, **times)
        false = np.full(negatives.shape, -1, np.int64)
        false[there] = place[pairs.size :]
        more = {"pair_type": "edge_type", "edge_label": "label", "pair_attr": "features"}
        given = {name: getattr(self.links, field) for name, field in more.items()}
        given = {name: np.ascontiguousarray(rows[chosen]) for name, rows in given.items() if rows is not None}
        return subgraph._replace(pairs=place[: pairs.size].reshape(2, -1), negatives=false, **given)


def _rows_of(state: LinkState, items: np.ndarray) -> np.ndarray:
    """Return the target that each edge belongs to, as a position among them."""
    return np.searchsorted(state.offsets, items, side="right") - 1


def edges_at(state: LinkState, items: np.ndarray) -> np.ndarray:
    """Return (num_items,) int64 positions in the part's CSC of the edges of the items."""
    if state.edges is not None:
        return state.edges[items]
    rows = _rows_of(state, items)
    return state.inner.csc.indptr[np.asarray(state.targets)[rows]] + (items - state.offsets[rows])


def _nodes_alone(nodes: np.ndarray, allocate: Allocate, return_e_id: bool) -> Subgraph:
    """Return some nodes as a subgraph without edges."""
    n_id, indptr = allocate(nodes.shape, np.int64), allocate((len(nodes) + 1,), np.int64)
    n_id[:], indptr[:] = nodes, 0
    edge_index, e_id = np.empty((2, 0), np.int64), np.empty(0, np.int64) if return_e_id else None
    return Subgraph(n_id, edge_index, indptr, len(nodes), e_id, [len(nodes)], [])


def stream_key(key: int, number: np.uint64) -> int:
    """Return the key of one kind of choices in a batch."""
    return combine_int(key, number)


def _without_pairs(sampled: Subgraph, pairs: np.ndarray, allocate: Allocate) -> Subgraph:
    """Return the subgraph without the edges between the two ends of any pair."""
    size = np.int64(sampled.num_seeds)
    codes = np.unique(np.concatenate([pairs[0] * size + pairs[1], pairs[1] * size + pairs[0]]))
    kept = np.ones(sampled.edge_index.shape[1], np.bool_)
    indptr = allocate((len(sampled.indptr),), np.int64)
    _mark_kept(sampled.edge_index, sampled.indptr, size, codes, kept, indptr)
    edge_index = allocate((2, int(indptr[-1])), np.int64)
    np.compress(kept, sampled.edge_index, axis=1, out=edge_index)
    edges = None
    if sampled.num_sampled_nodes is not None:
        hops = np.minimum(np.cumsum([0, *sampled.num_sampled_nodes[:-1]]), len(indptr) - 1)
        edges = np.diff(indptr[hops]).tolist()
    return sampled._replace(
        edge_index=edge_index,
        indptr=indptr,
        e_id=None if sampled.e_id is None else sampled.e_id[kept],
        edge_weight=None if sampled.edge_weight is None else sampled.edge_weight[kept],
        edge_type=None if sampled.edge_type is None else sampled.edge_type[kept],
        columns=sampled.columns and {name: values[kept] for name, values in sampled.columns.items()},
        num_sampled_edges=edges,
    )


@kernel
def _mark_kept(edge_index, indptr, num_seeds, codes, kept, out_indptr):
    out_indptr[0] = 0
    for target in range(len(indptr) - 1):
        count = 0
        for edge in range(indptr[target], indptr[target + 1]):
            source = edge_index[0, edge]
            if source < num_seeds and target < num_seeds and len(codes):
                code = source * num_seeds + target
                found = np.searchsorted(codes, code)
                kept[edge] = found == len(codes) or codes[found] != code
            count += kept[edge]
        out_indptr[target + 1] = out_indptr[target] + count


def _blocks(num: int) -> list[tuple[int, int]]:
    return [(at, min(at + _AT_ONCE, num)) for at in range(0, num, _AT_ONCE)]


def _timed_edges(indptr, rows, lengths, edges, edge_time) -> tuple[np.ndarray, np.ndarray]:
    """Return how many edges that have a time each target has, out of those chosen, and their positions."""
    if edges is None:
        edges = np.concatenate([np.empty(0, np.int64), *(np.arange(indptr[row], indptr[row + 1]) for row in rows)])
    timed = np.asarray(edge_time[edges]) != ALWAYS
    row = np.repeat(np.arange(len(rows)), lengths)[timed]
    return np.bincount(row, minlength=len(rows)), edges[timed]


@kernel
def _edges_of(indptr, targets, edge_type, chosen):
    """Return how many edges of the chosen edge types each target has, and their positions."""
    lengths = np.zeros(len(targets), np.int64)
    for i in range(len(targets)):
        for edge in range(indptr[targets[i]], indptr[targets[i] + 1]):
            lengths[i] += chosen[edge_type[edge]]
    edges, count = np.empty(lengths.sum(), np.int64), 0
    for i in range(len(targets)):
        for edge in range(indptr[targets[i]], indptr[targets[i] + 1]):
            if chosen[edge_type[edge]]:
                edges[count] = edge
                count += 1
    return lengths, edges
