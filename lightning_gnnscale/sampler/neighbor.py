"""Fan-out sampling of neighbours, hop by hop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import check_flags, short
from ..graph import CSC, GraphSchema, check_requires
from ..partition_store.part_graph import WholeGraph, edge_values
from ..triton_kernels.sample_neighbors import (
    HopSampling,
    Relation,
    SampleOptions,
    Workspace,
    check_fanouts,
    group_edge_types,
)
from ..triton_kernels.sample_neighbors.whole_rows import both_ways
from .locality import LocalityBias
from .locality_index import PreferredRows
from .protocol import Allocate, BatchSampler, Subgraph, induced_subgraph, num_slices, row_scale, seed_slices

DIRECTIONS = ("in", "both")
DEVICES = ("auto", "cpu", "cuda")
SUBGRAPH_TYPES = ("directional", "bidirectional", "induced")


def check_direction(direction: str) -> None:
    """Raise ValueError unless the direction is a known one."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {short(direction)}")


def check_device(device: str) -> None:
    """Raise ValueError unless a sampler can be asked to sample there."""
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {short(device)}")


class NeighborState(NamedTuple):
    """A part as `NeighborSampler` reads it.

    Attributes:
        csc: its edges.
        targets: (num_targets,) local ids.
        relations: The edge types that are followed; one where all edges are sampled together.
        fanouts: Fan-outs of each.
        preferred: its rows with the preferred neighbours first, None without locality.
        type_of: Gives the node types of local ids, where edge types have rows of one node type; else None.
        seed_time: (num_local,) int64 time of a node as a seed; None: times do not count.
        weighted: Whether edges are weighted, so that their probabilities are wanted, and are not those of plain rows.
    """

    csc: CSC
    targets: np.ndarray
    relations: list[Relation]
    fanouts: list[tuple[int, ...]]
    preferred: PreferredRows | None = None
    type_of: Callable[[np.ndarray], np.ndarray] | None = None
    seed_time: np.ndarray | None = None
    weighted: bool = False


STRATEGIES = ("uniform", "last")
EACH = "*"  # in place of an edge type's name: all that are not named


@dataclass(frozen=True)
class NeighborSampler(BatchSampler):
    """Sample up to `fanouts[h]` neighbours of each node found at hop h - 1, uniformly or near rows rather than far
    ones.

    With `locality` of a scale above 1, edges carry averaging weights 1 / (length of the row * probability of the
    edge): sums weighted by them stay unbiased means. Fixed samples a row, exact probabilities: see `sample_neighbors`.

    Args:
        fanouts: neighbours a node for each hop, >= 1, or -1 for all; one entry a layer of the model. In a graph of
            several edge types a list counts the neighbours of all edge types together; a mapping counts those of each:
            {"author,writes,paper": [10, 5], "*": [5, 5]}, where "*" stands for every edge type that is not named, and
            an edge type that is not named without it, or of fan-outs 0, is not followed.
        replace: sample with replacement.
        direction: "in" follows edges to their sources; "both" also backwards (the part is made symmetric once).
        locality: prefer near rows; not together with `replace`.
        temporal_strategy: None: times do not count. "uniform": neighbours that are not later than the seed; "last": the
            latest of them. A neighbour is as late as its edge where the store has `edge_time`, else as its node
            (`node_time`); a seed is as late as its node. Batches are disjoint trees then.
        strictly_before: leave out neighbours of the seed's own time, too.
        disjoint: give each seed a tree of its own; a node that two of them find stands twice.
        weighted: sample edges in proportion to the store's edge weights; none of weight 0, unless a fan-out of -1
            asks for all. The weights that a batch has are then the row's sum over the number sampled, so that sums
            over a row stay as large; with `replace` they are unbiased, without it heavy edges count for a little less.
        subgraph_type: which edges a batch has between the nodes that are sampled. "directional": those that were
            sampled; "bidirectional": these, once each, and the edges of the graph that go back along one of them;
            "induced": all, of every edge type. Every node is a target under the last two, and weights are the stored
            ones.
        device: Where training batches are sampled, which changes none of them. "cpu"; "cuda": on the GPU that trains,
            from pinned host memory where a part's edges take more than half of what is free there; "auto": there where
            training is on a GPU, threads of the process make batches, and the edges fit, else on the CPU. The log says
            which, and why.

    Raises:
        ValueError: a fan-out is 0 or below -1, none is given, the direction or subgraph_type is unknown, locality with
            replacement, edge types, times or weights, strictly_before without times, weighted with
            temporal_strategy="last", or a subgraph_type beside "directional" with locality, times or disjoint trees.

    Cost: with locality 4 bytes an edge and hop, in memory for a part, in files beside the store for the whole graph.
        With fan-outs by edge type, times or weights: for a part 12 bytes an edge (20 with weights) and 8 bytes a node
        and edge type; in the whole graph a read of the edge types (times, weights) of all edges of a row. With a
        subgraph_type beside "directional": the whole rows of all nodes that are sampled, which the planner does not
        count.
    Source: Hamilton et al., GraphSAGE, NeurIPS 2017; locality: Song and Jiang, ICS 2022, equation (8); edge types and
        times: PyG's `NeighborLoader`.
    """

    fanouts: Sequence[int] | Mapping[str, Sequence[int]]
    replace: bool = False
    direction: str = "in"
    takes_locality = True
    locality: LocalityBias | None = None
    temporal_strategy: str | None = None
    strictly_before: bool = False
    disjoint: bool = False
    weighted: bool = False
    subgraph_type: str = "directional"
    device: str = "auto"

    def __post_init__(self):
        if isinstance(self.fanouts, Mapping):
            object.__setattr__(self, "fanouts", _fanouts_by_edge_type(self.fanouts))
        else:
            object.__setattr__(self, "fanouts", check_fanouts(self.fanouts))
        check_direction(self.direction)
        flags = ("replace", "strictly_before", "disjoint", "weighted")
        check_flags(**{name: getattr(self, name) for name in flags})
        check_device(self.device)
        if self.temporal_strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"temporal_strategy must be one of {', '.join(STRATEGIES)} or None, got {short(self.temporal_strategy)}"
            )
        if self.strictly_before and self.temporal_strategy is None:
            raise ValueError("strictly_before needs temporal_strategy, uniform or last: without it times do not count")
        if self.weighted and self.temporal_strategy == "last":
            raise ValueError('weighted must be False with temporal_strategy="last", which leaves nothing to sample')
        if self.by_edge_type and self.locality is not None:
            raise ValueError("locality must be None with fan-outs by edge type, times, weights or disjoint trees")
        if self.by_edge_type and self.direction != "in":
            raise ValueError('direction must be "in" with fan-outs by edge type, times, weights or disjoint trees')
        if self.replace and self.locality is not None:
            raise ValueError("replace must be False with locality, got True: rows are sampled without replacement")
        self._check_subgraph_type()

    def _check_subgraph_type(self) -> None:
        if self.subgraph_type not in SUBGRAPH_TYPES:
            raise ValueError(
                f"subgraph_type must be one of {', '.join(SUBGRAPH_TYPES)}, got {short(self.subgraph_type)}"
            )
        if self.subgraph_type == "directional":
            return
        for there, name in (
            (self.locality is not None, "locality"),
            (self.temporal_strategy is not None, "temporal_strategy"),
            (self.disjoint, "disjoint=True"),
        ):
            if there:
                raise ValueError(f'subgraph_type must be "directional" with {name}, got {short(self.subgraph_type)}')

    @property
    def hop_by_hop(self) -> bool:
        """Whether `begin` and `finish` sample what `sample` does."""
        return self.subgraph_type == "directional"

    @property
    def by_edge_type(self) -> bool:
        """Whether edges are sampled edge type by edge type, by time, by weight, or in disjoint trees."""
        return self._names_edge_types or self.temporal_strategy is not None or self.disjoint or self.weighted

    @property
    def has_edge_types(self) -> bool:
        """Whether `sample` says which edge type each edge is of."""
        return self._names_edge_types and self.subgraph_type == "directional"

    @property
    def _names_edge_types(self) -> bool:
        return isinstance(self.fanouts, dict)

    @property
    def per_hop(self) -> tuple[int, ...]:
        """Neighbours of a node for each hop, of all edge types that are named together; -1: all."""
        return hop_fanouts(self.fanouts)

    @property
    def num_hops(self) -> int:
        """Number of hops."""
        return len(self.per_hop)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of one pass: `batch_size` target nodes each."""
        return num_slices(num_targets, batch_size, drop_last)

    @property
    def requires(self) -> dict[str, str]:
        """Edge types, times and weights that samples ask for."""
        needs = {}
        if isinstance(self.fanouts, Mapping):
            needs["edge_types"] = (
                "fanouts by edge type need a graph with edge types, and this one has a single one: give a list"
            )
        if self.temporal_strategy is not None:
            needs["node_time"] = (
                f"temporal_strategy={self.temporal_strategy} needs the time of each seed, and the store has no "
                "node_time: write it with node_time=, or leave temporal_strategy out"
            )
        if self.weighted:
            needs["edge_weight"] = (
                "weighted=True samples edges by their weights, and the store has none: write it with edge_weight="
            )
        return needs

    def check_schema(self, schema: GraphSchema | None) -> None:
        """Raise ValueError where fan-outs name an edge type that the graph has not."""
        self._fanouts_of(schema)

    def prepare(self, part: Any, targets: np.ndarray, seed: int, timed_seeds: bool = False) -> NeighborState:
        """Return the part's edges; with `locality` rows that have the preferred neighbours first.

        Args:
            part, targets, seed: As `BatchSampler` has them.
            timed_seeds: Whether `sample` is given the times of seeds; else they are those of their nodes.

        Raises:
            ValueError: an edge type, or times, that the part has not.
        """
        given = ("node_time",) if timed_seeds else ()
        check_requires({name: line for name, line in self.requires.items() if name not in given}, part.has)
        if self.by_edge_type:
            return self._grouped(part, targets)
        state = NeighborState(part.csc, targets, [Relation.of(part.csc)], [self.fanouts])
        if self.locality is None:
            return state
        preferred = PreferredRows(part, self.locality, len(self.fanouts))
        if self.locality.scale > 1:
            preferred.split(with_position=part.edge_id is not None)
        return state._replace(preferred=preferred)

    def items(self, state: NeighborState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return the seeds of each batch, target nodes in the order of the key."""
        return seed_slices(state.targets, batch_size, drop_last, order_key)

    def sample(
        self,
        state: NeighborState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
        with_row_scale: bool = True,
        times: np.ndarray | None = None,
    ) -> Subgraph:
        """Return a batch; arguments as `BatchSampler` has them.

        Args:
            with_row_scale: False leaves out `row_scale`, which only stored edge weights ask for.
            times: (num_seeds,) int64 time of each seed, with `temporal_strategy`; None: those of their nodes.
        """
        with_e_id = return_e_id or self.subgraph_type == "bidirectional"
        hops = self.begin(state, items, key, workspace, with_e_id, with_row_scale, times)
        for _ in range(hops.num_hops):
            hops.sample()
        sampled = self.finish(state, hops, allocate, with_row_scale)
        if self.subgraph_type == "directional":
            return sampled
        whole = self.induced(state, sampled.n_id, sampled.num_seeds, workspace, allocate, with_e_id)
        if self.subgraph_type == "induced":
            return whole
        return _both_ways(whole, sampled) if isinstance(workspace, Workspace) else both_ways(whole, sampled, workspace)

    def begin(
        self,
        state: NeighborState,
        seeds: np.ndarray,
        key: int,
        workspace: Workspace,
        return_e_id: bool,
        with_row_scale: bool = True,
        times: np.ndarray | None = None,
    ) -> HopSampling:
        """Return a batch to be sampled one hop at a time; arguments as for `sample`."""
        options, times = self.options_of(state, seeds, return_e_id, with_row_scale, times)
        split = state.preferred.split(return_e_id) if options.scale > 1 else None
        return HopSampling(
            state.relations, [(0, seeds)], state.fanouts, key, [workspace], options, split=split, times=times,
            type_of=state.type_of,
        )  # fmt: skip

    def options_of(
        self, state: NeighborState, seeds: np.ndarray, return_e_id: bool, with_row_scale: bool, times: np.ndarray | None
    ) -> tuple[SampleOptions, np.ndarray | None]:
        """Return how the edges of a batch are sampled, and the times of its seeds; arguments as for `sample`."""
        if times is None and state.seed_time is not None:
            times = state.seed_time[seeds]
        return SampleOptions(
            self.replace,
            return_e_id or (self.by_edge_type and not self._names_edge_types),
            1.0 if self.locality is None else self.locality.scale,
            self.disjoint or times is not None,
            self.temporal_strategy == "last",
            self.strictly_before,
            state.weighted and with_row_scale,
        ), times

    def induced(
        self, state: NeighborState, nodes: np.ndarray, num_seeds: int, workspace: Workspace, allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:  # fmt: skip
        """Return all edges between nodes; see `induced_subgraph`."""
        return induced_subgraph(state.csc, nodes, num_seeds, workspace, allocate, return_e_id)

    def finish(
        self,
        state: NeighborState,
        hops: HopSampling,
        allocate: Allocate,
        with_row_scale: bool = True,
    ) -> Subgraph:
        """Return what the hops of `begin` sampled, all of which are sampled."""
        sampled = hops.collect(allocate, self._names_edge_types)
        weight, scale = sampled.edge_weight, None
        if self.by_edge_type:
            scale = None if weight is None else row_scale(None, sampled)
        elif with_row_scale and sampled.e_id is not None:
            scale = row_scale(state.csc, sampled)
        return Subgraph(
            sampled.n_id,
            sampled.edge_index,
            sampled.indptr,
            sampled.num_sampled_nodes[0],
            sampled.e_id,
            sampled.num_sampled_nodes,
            sampled.num_sampled_edges,
            edge_weight=weight,
            row_scale=scale,
            averaging_weights=weight is not None and not self.by_edge_type,
            seed_of=sampled.seed_of,
            seed_time=hops.times,
            edge_type=sampled.edge_type,
            node_type=sampled.node_type,
        )

    def _grouped(self, part: Any, targets: np.ndarray) -> NeighborState:
        """Return a part's edges by edge type; those of the whole graph, which is mapped, stay where they are."""
        schema = part.schema
        fanouts = self._fanouts_of(schema)
        edge_type, num_relations = part.columns.get("edge_type"), 1 if schema is None else schema.num_edge_types
        if not self._names_edge_types:
            edge_type, num_relations = None, 1
        time, by_edge, seed_time = self._times(part.columns)
        weight = edge_values(part, part.edge_weight) if self.weighted else None
        if isinstance(part, WholeGraph):
            if edge_type is None and time is not None:  # one edge type; rows are read whole, and put in order of time
                edge_type = np.broadcast_to(np.uint8(0), part.csc.num_edges)
            rows = Relation(0, 0, np.asarray(part.csc.indptr), np.asarray(part.csc.indices), time, weight, by_edge)
            relations = [rows._replace(edge_type=edge_type, number=number) for number in range(num_relations)]
        else:
            if edge_type is None:
                edge_type = np.zeros(part.csc.num_edges, np.uint8)
            relations = group_edge_types(part.csc, edge_type, num_relations, time, by_edge, weight)
        followed = [number for number in range(num_relations) if any(fanouts[number])]
        type_of = None
        if self._names_edge_types and schema.num_node_types > 1:
            own = part.node_types
            if not isinstance(part, WholeGraph):
                own = own.among(np.arange(part.core_start, part.core_start + part.num_core), part.halo_nodes)
            type_of = own.type_of
            ends = zip(relations, schema.targets.tolist(), schema.sources.tolist(), strict=True)
            relations = [one._replace(rows_of=target, sources_of=source) for one, target, source in ends]
        return NeighborState(
            part.csc,
            targets,
            [relations[number] for number in followed],
            [fanouts[number] for number in followed],
            type_of=type_of,
            seed_time=seed_time,
            weighted=part.degree.dtype.kind == "f",
        )

    def _fanouts_of(self, schema) -> list[tuple[int, ...]]:
        """Return the fan-outs of each edge type."""
        if not isinstance(self.fanouts, Mapping):
            return [self.fanouts]
        others = self.fanouts.get(EACH, (0,) * self.num_hops)
        found = [others] * schema.num_edge_types
        for name, fanouts in self.fanouts.items():
            if name != EACH:
                found[schema.edge_type_number(name)] = fanouts
        return found

    def _times(self, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray | None, bool, np.ndarray | None]:
        """Return when neighbours are there, whether that is by edge, and when nodes are seeds; None without times."""
        if self.temporal_strategy is None:
            return None, False, None
        by_edge, node_time = "edge_time" in columns, columns.get("node_time")
        return (columns["edge_time"] if by_edge else node_time), by_edge, node_time


def _both_ways(induced: Subgraph, sampled: Subgraph) -> Subgraph:
    """Return an induced subgraph with the edges alone that were sampled, or go back along one of them."""
    size = len(induced.n_id)
    back = np.unique(sampled.edge_index[1] * size + sampled.edge_index[0])
    kept = np.isin(induced.e_id, sampled.e_id) | np.isin(induced.edge_index[0] * size + induced.edge_index[1], back)
    edge_index = np.ascontiguousarray(induced.edge_index[:, kept])
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(edge_index[1], minlength=size))])
    return induced._replace(edge_index=edge_index, indptr=indptr, e_id=induced.e_id[kept])


def hop_fanouts(fanouts: Sequence[int] | Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return fan-outs a hop: a list as it is; of a mapping the sums over what it names, -1 where one of them is."""
    if not isinstance(fanouts, Mapping):
        return tuple(fanouts)
    return tuple(-1 if min(hop) < 0 else sum(hop) for hop in zip(*fanouts.values(), strict=False))


def _fanouts_by_edge_type(fanouts: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return checked fan-outs by edge type, of as many hops each."""
    checked = {}
    for name, hops in fanouts.items():
        name = name if isinstance(name, str) else ",".join(name)
        checked[name] = check_fanouts(hops, f"fanouts of {name}", least=0)
    lengths = {len(hops) for hops in checked.values()}
    if len(lengths) != 1:
        raise ValueError(f"fanouts must name as many hops for each edge type, got {dict(fanouts)}")
    return checked
