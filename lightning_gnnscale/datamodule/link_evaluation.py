"""Held-out links of a store, with their false ends: what link metrics are computed over."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..dataset import LinkSet
from ..errors import StrategyError
from ..graph import CSC, build_csc
from ..partition_store import PartitionStore
from ..rng import fold
from ..sampler.links import count_joined, draw_false_ends

_LINKS_AT_ONCE = 1 << 16


class EvaluationLinks(NamedTuple):
    """One rank's share of the links of a split; implements the model's `LinkSource`.

    Attributes:
        store: training's graph.
        edges: (2, num_links) int64 store ids, this rank's.
        first: number of the first of them in the split.
        given: (num_links, num_negatives) int64 store ids, or None: they are drawn, free of known links.
        num_negatives: false ends a link.
        held: all held-out links in both directions, by store id.
        key: of the draws.
    """

    store: PartitionStore
    edges: np.ndarray
    first: int
    given: np.ndarray | None
    num_negatives: int
    held: CSC
    key: int

    def chunks(self, num_links: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (pairs (2, num), negatives (num, num_negatives)) of at most num_links; -1 where there is none."""
        for start in range(0, self.edges.shape[1], num_links):
            pairs = self.edges[:, start : start + num_links]
            if self.given is not None:
                yield pairs, self.given[start : start + num_links]
                continue
            first = self.first + start
            yield (
                pairs,
                draw_false_ends(
                    self.store.csc, self.held, pairs[0], self.num_negatives, self.key, first, self.store.store_nid
                ),
            )

    def nodes(self) -> np.ndarray:
        """Return the (num,) ascending store ids whose embeddings these links are ranked by."""
        found = [np.unique(self.edges)]
        for _, negatives in self.chunks(_LINKS_AT_ONCE):
            found = [np.union1d(found[0], negatives[negatives >= 0])]
        return found[0]


def evaluation_links(
    store: PartitionStore,
    links: Mapping[str, LinkSet],
    split: str,
    num_negatives: int,
    seed: int,
    rank: int,
    world_size: int,
) -> EvaluationLinks:
    """Return a rank's share of a split: consecutive links, shares as even as can be.

    Args:
        store: training's graph.
        links: of all splits, in original ids.
        split: "val" or "test".
        num_negatives: false ends drawn for a link where none are given.
        seed: of the draws; ranks, parts and epochs change none of them.
        rank, world_size: this process and how many there are.

    Raises:
        StrategyError: links that stand in the store, which training would see, or of nodes that it does not have.

    Cost: 16 bytes a link of all splits, and 8 a node.
    """
    known = []
    for name, (edges, _) in links.items():
        edges = np.asarray(edges)
        if edges.ndim != 2 or edges.shape[0] != 2:
            raise StrategyError(f"links[{name!r}].edges must have the shape (2, num_links), got {edges.shape}")
        if edges.size and not (edges.min() >= 0 and edges.max() < store.num_nodes):
            raise StrategyError(
                f"links[{name!r}] must be of nodes in [0, {store.num_nodes}), got {edges.min()} to {edges.max()}"
            )
        known.append(np.asarray(store.store_nid)[edges].astype(np.int64))
        leaked = count_joined(store.csc, known[-1])
        if leaked:
            raise StrategyError(
                f"{leaked} of {edges.shape[1]} {name} links are edges of {store.root}, where training sees them: write "
                "the store from the stream of hold_out_edges"
            )
    both = np.concatenate(known, axis=1)
    held = build_csc(np.concatenate([both[0], both[1]]), np.concatenate([both[1], both[0]]), store.num_nodes)
    edges, given = known[list(links).index(split)], links[split].negatives
    bounds = [edges.shape[1] * r // world_size for r in (rank, rank + 1)]
    mine = slice(*bounds)
    if given is not None:
        if len(given) != edges.shape[1]:
            raise StrategyError(
                f"links[{split!r}] has {edges.shape[1]} edges and negatives of {len(given)}: one row each"
            )
        given = _checked_negatives(split, np.asarray(given), store.num_nodes)[mine]
        given = np.where(given < 0, given, np.asarray(store.store_nid)[given]).astype(np.int64)
        num_negatives = given.shape[1]
    key = fold(seed, *split.encode())
    return EvaluationLinks(store, np.ascontiguousarray(edges[:, mine]), bounds[0], given, num_negatives, held, key)


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
