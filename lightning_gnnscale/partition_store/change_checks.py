"""What a change brings, compared with the columns that the store has: the same ones, of the same form."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dataset.columns import EDGE_COLUMNS, Columns, CSRArrays
from ..dataset.feature_storage import check_storage, held_values
from ..dataset.graph_change import GraphChange
from ..dataset.value_checks import blocks, check_sparse_features, check_values, tell_odd_nodes
from .features import Column
from .known_ids import KnownIds
from .reader import PartitionStore


def checked_columns(store: PartitionStore, change: GraphChange, known: KnownIds, num_edges: int) -> Columns:
    """Return the columns of a change, once they are those of the store."""
    files = store.manifest["files"]
    has = {name: name in files for name in ("labels", "node_time", *EDGE_COLUMNS)}
    has["features"] = store.features is not None
    given = {name: getattr(change, name) is not None for name in has}
    for kind, names in (("masks", store.manifest["masks"]), ("node_columns", list(store.node_columns))):
        own = getattr(change, kind)
        has |= {f"{kind}[{name!r}]": name in names for name in {*names, *own}}
        given |= {f"{kind}[{name!r}]": name in own for name in {*names, *own}}
    for name in sorted(has):
        if given[name] and not has[name] and not _is_empty_mask(change, name):
            raise ValueError(
                f"{name}: the store has no such column: a new one needs a new store, written from the whole graph"
            )
        needed = num_edges if name in EDGE_COLUMNS else known.num_new
        may_lack = name in ("labels", "edge_label") or name.startswith("masks[")
        if has[name] and not given[name] and needed and not may_lack:
            what = "edges" if name in EDGE_COLUMNS else "nodes"
            raise ValueError(f"{name} is missing: the store has it, and {needed} new {what} need theirs")
    edge_label = change.edge_label
    if has["edge_label"] and edge_label is None and num_edges:
        edge_label = np.full(num_edges, -1, np.int32)
    masks = {name: mask for name, mask in change.masks.items() if has[f"masks[{name!r}]"]}
    return Columns(
        features=change.features, labels=change.labels, masks=masks, node_time=change.node_time,
        node_columns=change.node_columns, edge_weight=change.edge_weight, edge_features=change.edge_features,
        edge_time=change.edge_time, edge_label=edge_label,
    )  # fmt: skip


def _is_empty_mask(change: GraphChange, name: str) -> bool:
    """Whether a mask that the store lacks has no node: one of the three that a column of words makes."""
    mask = change.masks.get(name[len("masks['") : -len("']")]) if name.startswith("masks[") else None
    return isinstance(mask, np.ndarray) and mask.dtype == bool and not mask.any()


def check_change_values(store: PartitionStore, arrays: Mapping[str, Any], finite: bool) -> None:
    """Refuse values that would spoil training, and rows of another form than the store's."""
    classes = None if store.regression else arrays["labels"]
    check_values(arrays["features"], classes, arrays["edge_weight"], arrays["edge_features"], finite)
    tell_odd_nodes(classes, arrays["masks"])
    check_storage(store.feature_storage if arrays["features"] is not None else None, arrays["features"])
    tables = [("features", arrays["features"], store.features, store.feature_storage)]
    for name, rows in arrays["node_columns"].items():
        tables.append((f"node_columns[{name!r}]", rows, store.node_columns[name], None))
    for name, rows, column, storage in tables:
        if rows is not None:
            _check_rows(name, rows, column, storage, finite)
    rows, labels = arrays["edge_features"], arrays["labels"]
    if rows is not None:
        if rows.shape[1:] != store.edge_features.shape[1:]:
            width = store.edge_features.shape[1]
            raise ValueError(f"edge_features must have {width} columns as those of the store, got {rows.shape[1]}")
        _check_dtype("edge_features", rows, store.edge_features.dtype)
    if labels is not None:
        own = (1,) if labels.ndim == 1 and store.labels.ndim == 2 else labels.shape[1:]
        if own != store.labels.shape[1:]:
            wanted = ", ".join(map(str, ("num_rows", *store.labels.shape[1:])))
            raise ValueError(f"labels must have shape ({wanted}) as those of the store, got {labels.shape}")


def _check_rows(name: str, rows: Any, column: Column, storage: str | None, finite: bool) -> None:
    """Refuse rows that are not of a column's form, or that are not finite."""
    sparse = isinstance(rows, CSRArrays)
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
