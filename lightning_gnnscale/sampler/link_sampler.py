"""Batches for losses over links: seeds with positives and negatives, and the neighbourhoods of them all."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import check_count
from ..jit import kernel
from ..rng import combine_int, distinct_positions
from ..triton_kernels.sample_neighbors import Workspace
from .layerwise import LayerwiseSampler
from .links import AliasTable, draw_negatives, draw_positives
from .neighbor import NeighborSampler
from .protocol import Allocate, Subgraph, num_slices, seed_slices

POSITIVES = ("neighbor", "walk", "edge")
NEGATIVES = ("degree", "uniform")
# Far above the hops of a batch, whose keys are folded from the same one.
_POSITIVE_KEY, _NEGATIVE_KEY = np.uint64(1 << 40), np.uint64((1 << 40) + 1)


class LinkState(NamedTuple):
    """A part in the form that `LinkSampler` reads.

    Attributes:
        inner: State of the wrapped sampler.
        targets: (num_targets,) local ids of the target nodes.
        num_core: Number of core nodes; negatives are drawn from [0, num_core).
        table: Alias table of the core's degrees; None: negatives are uniform.
        offsets: (num_targets + 1,) int64 running sum of the targets' row lengths, for positives="edge"; else None.
    """

    inner: Any
    targets: np.ndarray
    num_core: int
    table: AliasTable | None
    offsets: np.ndarray | None


class Links(NamedTuple):
    """The links of a batch.

    Attributes:
        nodes: (num_distinct,) int64 local ids, the seeds of its neighbourhood.
        pairs, negatives: positions among them, see `MiniBatch`.
    """

    nodes: np.ndarray
    pairs: np.ndarray
    negatives: np.ndarray


@dataclass(frozen=True)
class LinkSampler:
    """Draw links to train on, and draw the neighbourhoods of all their nodes by another sampler.

    The seeds of a batch are the distinct nodes of [seeds | positives | negatives]; `pairs` and `negatives` say which of
    them form the links. Every core node is a target, with a label or without. A link whose two ends are the same node
    is left out: seeds without neighbours give such links, and so do walks that return.

    Args:
        sampler: Draws the neighbourhoods: a `NeighborSampler` or a `LayerwiseSampler`; None: fan-outs 25 and 10.
        positives: "neighbor": a uniform neighbour of each seed; "walk": a node of a random walk from it; "edge": edges
            of the targets, drawn uniformly and without replacement, in place of seeds.
        walk_length: Steps of a walk, >= 1; each of its nodes is equally likely to be drawn, as in the source.
        num_negatives: Negatives per positive, >= 1.
        negatives: "degree": in proportion to degree ** degree_power; "uniform": all nodes alike. They are drawn from
            the core of the part, or from all nodes where batches cross parts (scope="graph").
        degree_power: Exponent of the degree under negatives="degree".
        share_negatives: Whether all positives of a batch share one draw of `num_negatives` nodes. A batch then has
            fewer seeds.
        edges_per_node: Edges drawn per target in a pass, >= 1; only for positives="edge".
        exclude_pairs: Whether the arcs of a batch's positives, in both directions, are left out of its neighbourhoods,
            so that a link cannot be told from its own message. An otherwise unbiased mean lacks those arcs.

    Raises:
        ValueError: an argument is out of range, or a sampler that cannot be wrapped.

    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, equation (1); degree ** 0.75 as in word2vec. Differs: one walk per
    seed and pass; each positive has its own negatives unless they are shared (the published code shares 20 over a
    batch).
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

    def __post_init__(self):
        if self.sampler is None:
            object.__setattr__(self, "sampler", NeighborSampler([25, 10]))
        if not isinstance(self.sampler, NeighborSampler | LayerwiseSampler):
            raise ValueError(
                f"sampler of LinkSampler must be a NeighborSampler or a LayerwiseSampler, got "
                f"{type(self.sampler).__name__}"
            )
        for name, allowed in (("positives", POSITIVES), ("negatives", NEGATIVES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.exclude_pairs and not isinstance(self.sampler, NeighborSampler):
            raise ValueError(
                "exclude_pairs must be False with a LayerwiseSampler, whose batches repeat nodes, got True"
            )
        for name in ("walk_length", "num_negatives", "edges_per_node"):
            check_count(name, getattr(self, name))
        if not math.isfinite(self.degree_power):
            raise ValueError(f"degree_power must be finite, got {self.degree_power}")

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
        """Neighbours of a node for each hop of the wrapped sampler; empty where it has none."""
        return getattr(self.sampler, "per_hop", ())

    @property
    def seeds_per_item(self) -> int:
        """Most nodes that a seed or an edge puts at the head of a batch."""
        return 2 + (0 if self.share_negatives else self.num_negatives)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of one pass: `batch_size` seeds or edges each."""
        return num_slices(self._num_items(num_targets), batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> LinkState:
        """Return the wrapped sampler's state, and what links are drawn from."""
        table = None
        if self.negatives == "degree":
            degree = np.asarray(part.degree[: part.num_core], np.float64)
            if degree.any():
                table = AliasTable.of(degree**self.degree_power)
        offsets = None
        if self.positives == "edge":
            indptr = np.asarray(part.csc.indptr)
            offsets = np.concatenate([[0], np.cumsum(indptr[targets + 1] - indptr[targets])]).astype(np.int64)
        return LinkState(self.sampler.prepare(part, targets, seed), targets, part.num_core, table, offsets)

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

    def draw(
        self,
        state: LinkState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        """Draw a batch's links, and the neighbourhoods of all their nodes."""
        seeds = self.first_ends(state, items)
        positives = self.other_ends(state, items, seeds, key)
        links = self.join(seeds, positives, self.false_ends(state, len(seeds), key), workspace)
        subgraph = self.sampler.draw(state.inner, links.nodes, key, workspace, allocate, return_e_id)
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
            place = items - state.offsets[_rows_of(state, items)]
            return csc.indices[csc.indptr[seeds] + place].astype(np.int64)
        length = self.walk_length if self.positives == "walk" else 1
        return draw_positives(csc, seeds, _stream(key, _POSITIVE_KEY), length, "any")

    def false_ends(self, state: LinkState, num_links: int, key: int) -> np.ndarray:
        """Return (num_links, num_negatives) int64 local ids, or (1, num_negatives) where all links share them."""
        rows = 1 if self.share_negatives and num_links else num_links
        num, key = rows * self.num_negatives, _stream(key, _NEGATIVE_KEY)
        return draw_negatives(max(1, state.num_core), num, key, state.table).reshape(rows, self.num_negatives)

    def join(self, seeds: np.ndarray, positives: np.ndarray, negatives: np.ndarray, workspace: Workspace) -> Links:
        """Return the distinct nodes of all links, in order of appearance, and the links among them."""
        nodes = np.concatenate([seeds, positives, negatives.reshape(-1)])
        count = workspace.place(nodes)
        place = workspace.label[nodes].astype(np.int64) - workspace.base
        distinct = workspace.node[:count].astype(np.int64)
        workspace.finish(count)
        linked, size = seeds != positives, len(seeds)
        pairs = np.ascontiguousarray(place[: 2 * size].reshape(2, size)[:, linked])
        found = place[2 * size :].reshape(negatives.shape)
        return Links(distinct, pairs, found if self.share_negatives else found[linked])

    def attach(self, subgraph: Subgraph, links: Links, allocate: Allocate) -> Subgraph:
        """Return the neighbourhood of the links' nodes with its links; without their arcs under `exclude_pairs`."""
        if self.exclude_pairs:
            subgraph = _without_pairs(subgraph, links.pairs, allocate)
        return subgraph._replace(pairs=links.pairs, negatives=links.negatives)

    def _num_items(self, num_targets: int) -> int:
        return num_targets * self.edges_per_node if self.positives == "edge" else num_targets


def _rows_of(state: LinkState, items: np.ndarray) -> np.ndarray:
    """Return the target that each edge belongs to, as a position among them."""
    return np.searchsorted(state.offsets, items, side="right") - 1


def _stream(key: int, number: np.uint64) -> int:
    return combine_int(key, number)


def _without_pairs(drawn: Subgraph, pairs: np.ndarray, allocate: Allocate) -> Subgraph:
    """Return the subgraph without the arcs between the two ends of any pair."""
    size = np.int64(drawn.num_seeds)
    codes = np.unique(np.concatenate([pairs[0] * size + pairs[1], pairs[1] * size + pairs[0]]))
    kept = np.ones(drawn.edge_index.shape[1], np.bool_)
    indptr = allocate((len(drawn.indptr),), np.int64)
    _mark_kept(drawn.edge_index, drawn.indptr, size, codes, kept, indptr)
    edge_index = allocate((2, int(indptr[-1])), np.int64)
    np.compress(kept, drawn.edge_index, axis=1, out=edge_index)
    arcs = None
    if drawn.num_sampled_nodes is not None:
        hops = np.minimum(np.cumsum([0, *drawn.num_sampled_nodes[:-1]]), len(indptr) - 1)
        arcs = np.diff(indptr[hops]).tolist()
    return drawn._replace(
        edge_index=edge_index,
        indptr=indptr,
        e_id=None if drawn.e_id is None else drawn.e_id[kept],
        edge_weight=None if drawn.edge_weight is None else drawn.edge_weight[kept],
        num_sampled_edges=arcs,
    )


@kernel
def _mark_kept(edge_index, indptr, num_seeds, codes, kept, out_indptr):
    out_indptr[0] = 0
    for target in range(len(indptr) - 1):
        count = 0
        for arc in range(indptr[target], indptr[target + 1]):
            source = edge_index[0, arc]
            if source < num_seeds and target < num_seeds and len(codes):
                code = source * num_seeds + target
                found = np.searchsorted(codes, code)
                kept[arc] = found == len(codes) or codes[found] != code
            count += kept[arc]
        out_indptr[target + 1] = out_indptr[target] + count
