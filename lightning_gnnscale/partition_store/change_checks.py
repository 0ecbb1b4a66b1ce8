"""What a change brings, compared with the columns that the store has: the same ones, of the same form."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..dataset.columns import Columns, CSRArrays
from ..dataset.feature_storage import check_storage, held_values
from ..dataset.graph_change import GraphChange
from ..dataset.value_checks import blocks, check_sparse_features, check_values, tell_odd_nodes
from .features import Column
from .reader import PartitionStore

_NEW_COLUMN = "the store has no such column: a new one needs a new store, written from the whole graph"


class NodeColumns(NamedTuple):
    """The columns that a store has of the nodes of one node type, or of all.

    Attributes:
        store: The store.
        features: Their features; None: they have none.
        node_columns: Their further columns by name.
        by_type: Whether features and further columns are those of the node type alone.
        is_new: Whether the node type is new, so that it may have columns of its own, of any width.
    """

    store: PartitionStore
    features: Column | None
    node_columns: dict[str, Column]
    by_type: frozenset[str] = frozenset()
    is_new: bool = False

    @classmethod
    def of(cls, store: PartitionStore, node_type: int | None) -> "NodeColumns":
        """Return the columns of a node type; of None, those of all nodes.

        node_type: Its number, from that of the store's node types on of a new one.
        """
        columns = {"features": store.features, **store.node_columns}
        if node_type is None:
            return cls(store, columns.pop("features"), columns)
        is_new = node_type >= store.schema.num_node_types
        by_type = frozenset(name for name, column in columns.items() if column is not None and column.by_node_type)
        for name in by_type:
            columns[name] = None if is_new else columns[name].tables[node_type]
        features = columns.pop("features")
        found = {name: column for name, column in columns.items() if column is not None}
        return cls(store, features, found, by_type, is_new)

    def has(self, name: str) -> bool:
        """Whether the nodes have a column; name: as a change calls it."""
        if name == "features":
            return self.features is not None or (self.is_new and "features" in self.by_type)
        if name.startswith("node_columns["):
            name = name[len("node_columns['") : -len("']")]
            return name in self.node_columns or (self.is_new and name in self.by_type)
        if name.startswith("masks["):
            return name[len("masks['") : -len("']")] in self.store.manifest["masks"]
        return name in self.store.manifest["files"]


def checked_columns(stored: NodeColumns, change: GraphChange, num_new: int, may_lack: Collection[str]) -> Columns:
    """Return the columns of nodes of a change, once they are those of the store.

    Args:
        stored: What the store has of these nodes.
        change: Rows of nodes.
        num_new: How many of the nodes are new.
        may_lack: Columns that new nodes may be without, beside labels and masks.
    """
    given = {name: getattr(change, name) is not None for name in ("features", "labels", "node_time")}
    for kind, names in (("masks", stored.store.manifest["masks"]), ("node_columns", list(stored.node_columns))):
        own = getattr(change, kind)
        given |= {f"{kind}[{name!r}]": name in own for name in {*names, *own}}
    for name in sorted(given):
        if given[name] and not stored.has(name) and not _is_empty_mask(change, name):
            raise ValueError(f"{name}: {_NEW_COLUMN}")
        may_be_missing = name in may_lack or name == "labels" or name.startswith("masks[") or stored.is_new
        if stored.has(name) and not given[name] and num_new and not may_be_missing:
            raise ValueError(f"{name} is missing: the store has it, and {num_new} new nodes need theirs")
    masks = {name: mask for name, mask in change.masks.items() if stored.has(f"masks[{name!r}]")}
    return Columns(
        features=change.features, labels=change.labels, masks=masks, node_time=change.node_time,
        node_columns=change.node_columns,
    )  # fmt: skip


def checked_edge_columns(store: PartitionStore, given: Mapping[str, Any], num_edges: int, may_lack: Mapping) -> Columns:
    """Return the columns of the new edges, once they are those of the store.

    Args:
        store: The store before.
        given: By the names of `EDGE_COLUMNS`; None: not given.
        num_edges: New edges.
        may_lack: By name, what edges have that are given none.
    """
    found, files = dict(given), store.manifest["files"]
    for name, values in given.items():
        if values is not None and name not in files:
            raise ValueError(f"{name}: {_NEW_COLUMN}")
        if values is None and name in files and num_edges:
            if name not in may_lack:
                raise ValueError(f"{name} is missing: the store has it, and {num_edges} new edges need theirs")
            stored = store.edge_column(name)
            found[name] = np.full((num_edges, *stored.shape[1:]), may_lack[name], stored.dtype)
    return Columns(**found)


def _is_empty_mask(change: GraphChange, name: str) -> bool:
    """Whether a mask that the store lacks has no node: one of the three that a column of words makes."""
    mask = change.masks.get(name[len("masks['") : -len("']")]) if name.startswith("masks[") else None
    return isinstance(mask, np.ndarray) and mask.dtype == bool and not mask.any()


def check_node_values(stored: NodeColumns, arrays: Mapping[str, Any], finite: bool) -> None:
    """Refuse rows of nodes that would spoil training, or that are of another form than the store's."""
    store, labels = stored.store, arrays["labels"]
    classes = None if store.regression else labels
    check_values(arrays["features"], classes, None, None, finite)
    tell_odd_nodes(classes, arrays["masks"])
    check_storage(store.feature_storage if arrays["features"] is not None else None, arrays["features"])
    tables = [("features", arrays["features"], stored.features, store.feature_storage)]
    for name, rows in arrays["node_columns"].items():
        tables.append((f"node_columns[{name!r}]", rows, stored.node_columns.get(name), None))
    for name, rows, column, storage in tables:
        if rows is not None:
            _check_rows(name, rows, column, storage, finite)
    if labels is not None:
        own = (1,) if labels.ndim == 1 and store.labels.ndim == 2 else labels.shape[1:]
        if own != store.labels.shape[1:]:
            wanted = ", ".join(map(str, ("num_rows", *store.labels.shape[1:])))
            raise ValueError(f"labels must have shape ({wanted}) as those of the store, got {labels.shape}")


def check_edge_values(store: PartitionStore, arrays: Mapping[str, Any], finite: bool) -> None:
    """Refuse values of edges that would spoil training, or that are of another form than the store's."""
    check_values(None, None, arrays["edge_weight"], arrays["edge_features"], finite)
    rows = arrays["edge_features"]
    if rows is not None:
        if rows.shape[1:] != store.edge_features.shape[1:]:
            width = store.edge_features.shape[1]
            raise ValueError(f"edge_features must have {width} columns as those of the store, got {rows.shape[1]}")
        _check_dtype("edge_features", rows, store.edge_features.dtype)


def _check_rows(name: str, rows: Any, column: Column | None, storage: str | None, finite: bool) -> None:
    """Refuse rows that are not of a column's form, or that are not finite; None: the column is new, of any form."""
    sparse = isinstance(rows, CSRArrays)
    if column is not None:
        if sparse != column.is_sparse:
            kinds = ("sparse", "dense") if sparse else ("dense", "sparse")
            raise ValueError(f"{name} must be {kinds[1]} as those of the store are, got {kinds[0]} rows")
        if rows.shape[1] != column.dim:
            raise ValueError(f"{name} must have {column.dim} columns as those of the store, got {rows.shape[1]}")
        _check_dtype(name, rows.data if sparse else rows, column.dtype, storage)
    if not finite:
        return
    if sparse:
        check_sparse_features(rows)
        return
    for begin, block in blocks(rows):
        bad = np.argwhere(~np.isfinite(held_values(block, storage))) if block.dtype.kind == "f" else ()
        if len(bad):
            row, at = bad[0]
            raise ValueError(f"{name}: row {begin + row}, column {at} is {block[row, at]}; give finite numbers")


def _check_dtype(name: str, values: np.ndarray, stored: np.dtype, storage: str | None = None) -> None:
    """Refuse values that the stored dtype does not hold as they are; those of a `feature_storage` are converted."""
    if values.dtype == stored or (storage is not None and values.dtype.kind == "f"):
        return
    with np.errstate(all="ignore"):
        same = values.astype(stored).astype(values.dtype)
    if (values.dtype.kind != stored.kind and stored.kind != "f") or not np.array_equal(
        same, values, equal_nan=values.dtype.kind == "f"
    ):
        raise ValueError(
            f"{name} must be {stored} as those of the store, got {values.dtype}: convert them, .astype({str(stored)!r})"
        )
