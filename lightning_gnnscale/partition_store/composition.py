"""What the parts of a store contain: nodes, halos, training nodes, labels, and the edges between any two."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from .reader import PartitionStore

_MOST_GROUPS = 128
_MOST_LABELS = 24
_CHUNKS = 16


def store_composition(store: PartitionStore, most_edges: int = 1 << 22) -> dict:
    """Count what each part holds; of a store with more edges, from evenly spaced runs of each part's rows.

    More than 128 parts are counted in groups of consecutive ones.

    Args:
        store: an open store; nothing of one at a URL is fetched for this, so that edges and labels are left out.
        most_edges: edges that are read, >= 1.

    Returns:
        Plain values: `parts`, the first part of each group; `nodes`, `halo`, `train`, counts by group, `train` None
        without a training mask; `row_bytes`, of a feature row on disk, and `packs_halo`, whether halo rows are packed;
        `edges`, group by group the edges into it from each group; `labels`, the most frequent ones, and `label_counts`,
        group by label, both None without labels; `edges_share`, the share of edges that was read. Counts from a share
        of the rows are scaled to all.

    Cost: one read of most_edges edges, and of the training mask.
    """
    num_groups = min(store.num_parts, _MOST_GROUPS)
    group = np.arange(store.num_parts) * num_groups // store.num_parts
    offsets = np.asarray(store.part_offsets)
    nodes = np.diff(offsets)
    train = store.masks.get("train")
    if train is not None:
        train = [int(np.count_nonzero(train[begin:end])) for begin, end in pairwise(offsets)]
    found = {
        "parts": np.searchsorted(group, np.arange(num_groups)).tolist(),
        "nodes": _by_group(nodes, group),
        "halo": _by_group(store.part_rows - nodes, group),
        "train": None if train is None else _by_group(train, group),
        "row_bytes": 0 if store.features is None else store.features.nbytes / max(store.num_nodes, 1),
        "packs_halo": store.part_features is not store.features,
        "edges": None,
        "labels": None,
        "label_counts": None,
        "edges_share": 0.0,
    }
    if store.fetched is not None:
        return found
    num_read, edges, counts = 0, np.zeros((num_groups, num_groups)), []
    share = min(1.0, most_edges / max(store.num_edges, 1))
    for part, (begin, end) in enumerate(pairwise(offsets)):
        from_group, labelled = np.zeros(num_groups), []
        rows = 0
        for first, last in _chunks(int(begin), int(end), share):
            low, high = store.csc.indptr[[first, last]].tolist()
            sources = np.searchsorted(offsets, store.csc.indices[low:high], side="right") - 1
            from_group += np.bincount(group[sources], minlength=num_groups)
            labelled.append(np.asarray(store.labels[first:last]) if store.labels is not None else None)
            rows += last - first
        num_read += int(from_group.sum())
        in_part = int(store.csc.indptr[end] - store.csc.indptr[begin])
        edges[group[part]] += from_group * in_part / max(from_group.sum(), 1)
        if store.labels is not None:
            counts.append((group[part], _label_counts(labelled) * ((end - begin) / max(rows, 1))))
    found |= {"edges": edges.round().astype(int).tolist(), "edges_share": num_read / max(store.num_edges, 1)}
    return found | _labels(counts, num_groups)


def _by_group(values, group: np.ndarray) -> list[int]:
    return np.bincount(group, weights=values).astype(int).tolist()


def _chunks(begin: int, end: int, share: float) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that are together a share of [begin, end), evenly spaced; at least one row of each."""
    if share >= 1 or end - begin <= _CHUNKS:
        if end > begin:
            yield begin, end
        return
    for first, last in pairwise(np.linspace(begin, end, _CHUNKS + 1).astype(int)):
        yield int(first), int(first + max(1, (last - first) * share))


def _label_counts(labelled: list[np.ndarray]) -> np.ndarray:
    """Return (num_labels,) how often each label is known: of a node's several labels those that it has."""
    if not labelled:
        return np.zeros(0)
    values = np.concatenate(labelled)
    if values.ndim == 2:
        return (values > 0).sum(axis=0)
    return np.bincount(values[values >= 0])


def _labels(counts: list[tuple[int, np.ndarray]], num_groups: int) -> dict:
    num_labels = max((len(values) for _, values in counts), default=0)
    if not num_labels:
        return {}
    table = np.zeros((num_groups, num_labels))
    for at, values in counts:
        table[at, : len(values)] += values
    labels = np.sort(np.argsort(-table.sum(axis=0), kind="stable")[:_MOST_LABELS])
    return {"labels": labels.tolist(), "label_counts": table[:, labels].round().astype(int).tolist()}
