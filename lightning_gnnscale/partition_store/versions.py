"""Versions of a store: what an update changed, and where the nodes of one version are in another."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import PartitionStoreError
from .manifest import MANIFEST, digest, read_manifest
from .merged_rows import FEATURES, IN_EDGES, LABELS, NEW
from .verify import compare_once

NODE_CHANGES, PARENT_NID = "node_changes", "parent_nid"

_SAID = {
    "new_nodes": "new nodes",
    "removed_nodes": "removed nodes",
    "changed_features": "nodes with changed features",
    "changed_labels": "nodes with changed labels or masks",
    "new_edges": "new edges",
    "removed_edges": "removed edges",
}


class StoreChanges(NamedTuple):
    """The nodes that the update to this version changed, ascending original ids of this version.

    Attributes:
        new: Nodes that its parent lacks.
        features: Old nodes whose features, further columns or times differ.
        labels: Old nodes whose labels or masks differ.
        in_edges: Nodes, new ones too, that other edges come into than before, or edges with other values.
        removed: Store ids, ascending, of the parent's nodes that are gone.
    """

    new: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    in_edges: np.ndarray
    removed: np.ndarray


def changes_of(store) -> StoreChanges:
    """Return what the update to this version changed; see `PartitionStore.changes`."""
    version = store.version
    if version is None:
        raise PartitionStoreError(
            f"{store.root}: was written from a data set, so nothing says what changed: it is no update"
        )
    flags = mapped(store, NODE_CHANGES)
    found = {}
    for name, bit in (("new", NEW), ("features", FEATURES), ("labels", LABELS), ("in_edges", IN_EDGES)):
        found[name] = np.sort(np.asarray(store.original_nid[np.flatnonzero(flags & bit)], np.int64))
    gone, before = np.ones(version["parent"]["num_nodes"], bool), mapped(store, PARENT_NID)
    if before is None:
        gone[:] = False
    else:
        gone[before[before >= 0]] = False
    return StoreChanges(**found, removed=np.flatnonzero(gone))


def places_in(store, layout: str) -> np.ndarray | None:
    """Return where the nodes of a store are in an earlier version; see `PartitionStore.places_in`."""
    places, own, root = None, store.layout_fingerprint, store.root
    version = store.version
    while version is not None and own != layout:
        before = mapped(store, PARENT_NID)
        if before is not None:
            before = np.asarray(before, np.int64)
            places = before if places is None else np.where(places >= 0, before[places], -1)
        parent = version["parent"]
        own = parent["layout"]
        if own == layout:
            break
        store = _open_parent(store, parent, root, layout)
        version = store.version
    if own != layout:
        raise PartitionStoreError(
            f"{root}: is neither store {layout[:12]} nor an update of it: name that store or an update of it"
        )
    return np.arange(len(store.original_nid)) if places is None else places


def earlier_version(store, layout: str):
    """Return the store of an earlier version, or this one, by its `layout_fingerprint`.

    Raises:
        PartitionStoreError: it is no earlier version, or it or one between is not beside this one.
    """
    root = store.root
    while store.layout_fingerprint != layout:
        if store.version is None:
            raise PartitionStoreError(f"{root}: is neither store {layout[:12]} nor an update of it: name that store")
        store = _open_parent(store, store.version["parent"], root, layout)
    return store


def _open_parent(store, parent: dict[str, Any], root: Path, layout: str):
    folder = store.root.with_name(parent["name"])
    if not (folder / MANIFEST).is_file() or digest(read_manifest(folder)) != parent["manifest"]:
        raise PartitionStoreError(
            f"{folder}: the version between {root.name} and store {layout[:12]} is not there: restore it, or "
            "update that store again"
        )
    return type(store).open(folder)


def mapped(store, name: str) -> np.ndarray | None:
    """Return a file of an update, compared as `PartitionStore.open` says; None: it has none."""
    if name not in store.manifest["files"]:
        return None
    compare_once(store, (name,))
    return store.mapped(name)


def version_record(store, number_of: dict[str, int], change: str, renumbered: bool, cut: dict, balance: dict) -> dict:
    """Return what the manifest of an update says of it.

    Args:
        store: The store before.
        number_of: Counts of what came, changed and went, by name.
        change: Digest of the change.
        renumbered: Whether store ids changed.
        cut, balance: Before and after.
    """
    before = store.version or {}
    parent = {
        "name": store.root.name,
        "layout": store.layout_fingerprint,
        "manifest": store.manifest_digest,
        "num_nodes": store.num_nodes,
    }
    return {
        "number": before.get("number", 0) + 1,
        "parent": parent,
        "change": change,
        "renumbered": renumbered,
        "counts": number_of,
        "cut": {"first": before.get("cut", {}).get("first", cut["before"]), **cut},
        "balance": balance,
    }


def said_counts(counts: dict[str, int]) -> str:
    """Return what came, changed and went, in words."""
    return ", ".join(f"{counts[name]:,} {said}" for name, said in _SAID.items() if counts.get(name)) or "no change"


def drift_of(manifest: dict) -> float | None:
    """Return by which share the cut has grown since the first version; None of a store that is no update."""
    version = manifest.get("version")
    if version is None:
        return None
    first, after = version["cut"]["first"], version["cut"]["after"]
    return after / first - 1 if first else float("inf") if after else 0.0


def chain_of(manifests: dict[str, dict], name: str) -> list[str]:
    """Return the names of a store's earlier versions that are there, the latest first.

    Args:
        manifests: Those of the stores of a folder, by name.
        name: Of the store.
    """
    chain: list[str] = []
    while True:
        parent = manifests[name].get("version", {}).get("parent")
        if parent is None or parent["name"] not in manifests or parent["name"] in chain:
            return chain
        if digest(manifests[parent["name"]]) != parent["manifest"]:
            return chain
        name = parent["name"]
        chain.append(name)
