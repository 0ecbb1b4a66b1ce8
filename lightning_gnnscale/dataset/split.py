"""Train, validation and test masks where a graph comes without them, and links that are held out of a graph."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..edge_stream.relations import RelationStream
from ..edge_stream.stream import FilteredStream
from ..jit import kernel
from ..partition_store.inputs import load_arrays
from ..rng import combine, fold, permutation, unit
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
        ValueError: fractions out of range, or labels that are no numbers.
    """
    fractions = [float(fraction) for fraction in fractions]
    if len(fractions) != 3 or min(fractions) < 0 or not sum(fractions) <= 1 + 1e-9:
        raise ValueError(f"fractions must be three numbers in [0, 1] that add up to at most 1, got {fractions}")
    labels = np.asarray(labels)
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"labels must be numbers, got {labels.dtype}")
    known = labels >= 0 if labels.dtype.kind != "f" or not regression else np.isfinite(labels)
    labelled = np.flatnonzero(known if labels.ndim == 1 else known.any(axis=1))
    order = labelled[permutation(len(labelled), fold(seed))]
    bounds = [math.floor(len(order) * sum(fractions[:i]) + 0.5) for i in range(4)]
    masks = {}
    for name, start, stop in zip(("train", "val", "test"), bounds[:-1], bounds[1:], strict=True):
        masks[name] = np.zeros(len(labels), bool)
        masks[name][order[start:stop]] = True
    return masks


KEPT, VAL, TEST = 0, 1, 2
SPLITS = {"val": VAL, "test": TEST}


class KeepTraining(NamedTuple):
    """The rule of `hold_out_edges`; a value, so that streams that follow it can go to other processes."""

    key: np.uint64
    val: float
    test: float

    def split(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return (num,) uint8: KEPT, VAL or TEST."""
        return _split_of(src, dst, self.key, self.test, self.test + self.val)

    def __call__(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return (num,) bool, whether training sees the edge."""
        return self.split(src, dst) == KEPT


class LinkSet(NamedTuple):
    """Links to evaluate on, in the node ids of the stream.

    Attributes:
        edges: (2, num_links) int64, first and other end.
        negatives: (num_links, num_negatives) int64 false other ends of each, or None: they are drawn.
        edge_type: (num_links,) integers, relation of each link, which then is a triple: `edges` are heads and tails.
            None without relations.
    """

    edges: np.ndarray
    negatives: np.ndarray | None = None
    edge_type: np.ndarray | None = None


def hold_out_edges(dataset: GraphDataset, val: float = 0.05, test: float = 0.1, seed: int = 0) -> GraphDataset:
    """Return the data set with some edges held out of its stream, as links to validate and test on.

    Whether an edge is held out depends on a hash of its two ends, regardless of their order. Repeats and the reverse of
    an edge share its fate, so no order, chunk size or symmetrising lets a held-out edge back in. Edges from a node to
    itself stay.

    Args:
        dataset: Data set whose stream is read once; edge weights and features follow their edges.
        val, test: Shares of the edges for validation and test, in [0, 1), together below 1.
        seed: Seed of the hash.

    Returns:
        The data set with a filtered stream and `links`. Each held-out edge is in `val` or `test` once (undirected: in
        one direction, chosen by the hash), in ascending order. A split of share 0 is left out.

    Raises:
        ValueError: a share out of range, or one so small that it holds no edge; edge values of another length.

    Cost: O(num_edges) time and one pass; 16 bytes a held-out edge (four times that while they are sorted), one byte
    an edge beside edge weights or features.
    """
    shares = {"val": val, "test": test}
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name} must be in [0, 1), got {share}")
    if not 0 < val + test < 1:
        raise ValueError(f"val + test must be above 0 and below 1, got {val + test}")
    rule, stream = KeepTraining(np.uint64(fold(seed)), float(val), float(test)), dataset.stream
    if isinstance(stream, RelationStream):
        raise ValueError("hold_out is for one relation: give held-out links of a graph with several as links=")
    carries = dataset.edge_weight is not None or dataset.edge_features is not None or dataset.edge_time is not None
    held: dict[int, list[np.ndarray]] = {VAL: [], TEST: []}
    kept = []
    for chunk in stream.chunks():
        split = rule.split(chunk.src, chunk.dst)
        for number, pieces in held.items():
            chosen = split == number
            pieces.append(np.stack([chunk.src[chosen], chunk.dst[chosen]]).astype(np.int64))
        if carries:
            kept.append(split == KEPT)
    edges = dataset.edge_weight, dataset.edge_features, None, dataset.edge_time
    arrays = load_arrays(stream, None, None, None, *edges)
    undirected = stream.to_undirected or stream.layout in ("once", "both_ways")
    links = {}
    for name, number in SPLITS.items():
        if shares[name] == 0:
            continue
        edges = np.concatenate([np.empty((2, 0), np.int64), *held[number]], axis=1)
        if edges.shape[1] == 0:
            raise ValueError(f"{name}={shares[name]} holds none of {stream.num_edges} edges: raise it")
        links[name] = LinkSet(_distinct(edges, undirected, rule.key))
    keep = np.concatenate(kept) if kept else None
    described = {"hold_out": [rule.val, rule.test, seed]}
    return replace(
        dataset,
        stream=FilteredStream(stream, rule, described),
        **{name: rows[keep] for name, rows in arrays.items() if name.startswith("edge_") and rows is not None},
        links=links,
    )


def held_out(dataset: GraphDataset, options: dict | None) -> GraphDataset:
    """Return the data set with edges held out as a config says.

    Args:
        options: arguments of `hold_out_edges` by name; None: the data set as it is.

    Raises:
        ValueError: an option that there is not.
    """
    if options is None:
        return dataset
    if not isinstance(options, Mapping):
        raise ValueError(f"hold_out must be shares by name like {{val: 0.05, test: 0.1}}, got {options!r}")
    unknown = sorted(set(options) - {"val", "test", "seed"})
    if unknown:
        raise ValueError(f"hold_out takes val, test and seed, got {', '.join(unknown)}")
    try:
        return hold_out_edges(dataset, **options)
    except ValueError as error:
        told = str(error)
        raise ValueError(f"hold_out.{told}" if re.match(r"(val|test)\b", told) else told) from error


def _distinct(edges: np.ndarray, undirected: bool, key: np.uint64) -> np.ndarray:
    """Return each link once, in ascending order; undirected ones in the direction that their hash chooses."""
    if not undirected:
        return np.unique(edges, axis=1)
    low, high = np.unique(np.sort(edges, axis=0), axis=1)
    swapped = _direction(low, high, key)
    return np.stack([np.where(swapped, high, low), np.where(swapped, low, high)])


@kernel
def _split_of(src, dst, key, test, held):
    out = np.zeros(len(src), np.uint8)
    for i in range(len(src)):
        low, high = min(src[i], dst[i]), max(src[i], dst[i])
        if low != high:
            chance = unit(combine(combine(key, low), high))
            out[i] = 2 if chance < test else (1 if chance < held else 0)
    return out


@kernel
def _direction(low, high, key):
    out = np.empty(len(low), np.bool_)
    for i in range(len(low)):
        out[i] = combine(combine(combine(key, low[i]), high[i]), 1) & np.uint64(1)
    return out
