"""What is evaluated: the settings, a sample of the validation nodes that costs little, links with false ends."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np

from ..dataset import LinkSet
from ..errors import StrategyError, check_count
from ..graph import CSC, build_csc
from ..model.inference import TABLE_DTYPES
from ..model.layer_source import NodeSet, with_sources
from ..partition_store import PartitionStore
from ..rng import combine_array, fold
from ..sampler.links import count_joined, draw_false_ends

MODES = ("layerwise", "sampled")
EPOCH_SHARE = 0.2  # of an epoch's work, which a validation that is sampled may cost
TRAINING_FACTOR = 3  # a row or an arc of a batch against one of evaluation: forward, and backward at about twice that
SMALL_WORK = 1 << 22  # rows and arcs that are evaluated within a second: nothing is sampled below
_LINKS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class EvaluationOptions:
    """How validation, test and prediction compute their nodes' outputs.

    Args:
        mode: "layerwise": exact, a layer at a time, for backbones with layer(index, x, block); only rows that the
            evaluated nodes need are computed. "sampled": for any backbone, batches with all neighbours of as many hops
            as the sampler has fan-outs (2 without). Slower. That is exact where the backbone has no more layers than
            hops, and takes degrees from `degree`, not from `edge_index` as PyG's GCNConv does.
        sample: share of the validation nodes, in (0, 1], that validation while training takes: a fixed sample, by a
            hash of the seed and the node, the same on any number of processes. "auto": 1, or as many as cost a fifth
            of an epoch, by the rows and arcs that both read (those of training count three times). Test, prediction
            and `trainer.validate` take all nodes.
        table_dtype: "float32", or "bfloat16": tables of hidden layers take half the disk and are rounded to 8 bits.
        block_arcs: arcs a block of layer-wise inference, >= 1, where a layer is not one sum over its arcs.
        scratch: folder that layer-wise inference writes its tables to; None: beside the store. Machines that do not see
            one folder under that name have whole tables of their own there, and send each other the rows.
        links: {"val": LinkSet, "test": LinkSet} in original ids, edges that the store does not have; None: the data
            set's. They are evaluated in place of masks and labels where the sampler is a `LinkSampler`.
        negatives: Number of false ends that each link is ranked among, >= 1. Where the set has none of its own, they
            are drawn uniformly from all nodes that no edge or held-out link joins to the first end.

    Raises:
        ValueError: a value outside what is listed here, or a sample in mode "sampled".
    """

    mode: str = "layerwise"
    sample: str | float = "auto"
    table_dtype: str = "float32"
    block_arcs: int = 1 << 20
    scratch: str | os.PathLike | None = None
    links: Mapping[str, LinkSet] | None = None
    negatives: int = 100

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"evaluation must be one of {', '.join(MODES)}, got {self.mode!r}")
        is_share = isinstance(self.sample, Real) and not isinstance(self.sample, bool) and 0 < self.sample <= 1
        if self.sample != "auto" and not is_share:
            raise ValueError(f"evaluation.sample must be auto or a share in (0, 1], got {self.sample!r}")
        if self.mode == "sampled" and self.sample not in ("auto", 1):
            raise ValueError(
                f'evaluation.sample={self.sample} needs mode="layerwise": mode="sampled" evaluates all nodes'
            )
        if self.table_dtype not in TABLE_DTYPES:
            raise ValueError(
                f"evaluation.table_dtype must be one of {', '.join(TABLE_DTYPES)}, got {self.table_dtype!r}"
            )
        check_count("evaluation.block_arcs", self.block_arcs)
        check_count("evaluation.negatives", self.negatives)


def evaluation_options(given: str | EvaluationOptions) -> EvaluationOptions:
    """Return the settings that a mode's name stands for, or those given; raises as `EvaluationOptions` does."""
    if isinstance(given, EvaluationOptions):
        return given
    if given not in MODES:
        raise ValueError(f"evaluation must be one of {', '.join(MODES)}, or EvaluationOptions(...), got {given!r}")
    return EvaluationOptions(given)


class ValidationSample(NamedTuple):
    """The nodes that validation while training takes.

    Attributes:
        nodes: (num,) int64 store ids, ascending.
        num_nodes: nodes of the whole split.
        work: rows and arcs that their evaluation reads.
        epoch_work: as predicted: rows and arcs that the batches of an epoch hold, times three, since they go forward
            and back; None: the share was given.
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
    """Return how many rows and arcs an exact evaluation of some nodes reads; one process counts for all.

    Args:
        source: a `StoreLayerSource` of all parts.
        nodes: (num,) store ids.
        num_layers: layers of the model.
        limit: counting ends above it.

    Cost: the arcs counted, read once.
    """
    current, work = NodeSet.of(nodes, source.num_nodes), 0
    for _ in range(num_layers):
        work += len(current) + source.num_arcs(current)
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
    """Choose the nodes that validation while training takes; None: all of them.

    Args:
        source: a `StoreLayerSource` of all parts.
        ordered: (num,) nodes of the split, see `sample_order`; a sample is the head of them.
        num_layers: layers of the model.
        share: share of the nodes in (0, 1], or "auto".
        epoch_work: rows and arcs that the batches of an epoch hold, for "auto".

    Cost: for "auto" the arcs of a fifth of an epoch, read about ten times, once a fit.
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


class EvaluationLinks(NamedTuple):
    """One rank's share of the links of a split; implements the model's `LinkSource`.

    Attributes:
        store: training's graph.
        edges: (2, num_links) int64 store ids, this rank's.
        first: number of the first of them in the split.
        given: (num_links, num_negatives) int64 store ids, or None: they are drawn, free of known links.
        num_negatives: false ends a link.
        held: all held-out links in both directions, by store id.
        key: The random key of the draws.
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
        links: The links of all splits, in original ids.
        split: "val" or "test".
        num_negatives: false ends drawn for a link where none are given.
        seed: The seed of the draws; ranks, parts and epochs change none of them.
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
