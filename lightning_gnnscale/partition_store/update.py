"""Update a store: a new version beside the old one, in sequential passes over its files and the change."""

import warnings
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset.graph_change import GraphChange
from ..dataset.value_checks import least_value, num_classes_of
from ..errors import EdgeStreamError, PartitionStoreError, check_seconds, disk_errors, short
from ..events import record, stage
from ..graph import CSC
from ..keywords import passes_on
from ..object_store import is_url
from .array_file import ArrayFile, map_rows
from .coded_neighbors import EDGES, OFFSETS, code_neighbors
from .disk import WriteBudget, check_space
from .halo import pack_halo_features
from .journal import (
    Journal,
    check_partial,
    clear_folder,
    delete_files,
    finish_publishing,
    partial_folder,
    publish,
    stands,
    store_folder,
    writer_lock,
)
from .manifest import (
    EDGE_COUNTS,
    EDGE_FILES,
    FORMAT_VERSION,
    describe_files,
    digest,
    type_prefix,
    without_prefix,
    write_manifest,
)
from .merged_rows import FEATURES, LABELS, count_cut
from .node_tables import Progress
from .place_nodes import SLACK
from .reader import PartitionStore
from .renumbered import Renumbered, balances, renumber
from .store_change import ChangedTable, StoreChange, read_change
from .updated_edges import map_csc, write_edges
from .updated_tables import changed_nodes, link_files, map_table, write_tables
from .versions import NODE_CHANGES, PARENT_NID, drift_of, version_record

_ROWS = {
    "csc_indptr",
    *EDGES,
    OFFSETS,
    "in_degree",
    "weighted_degree",
    "self_loop_nodes",
    "self_loop_weight",
    *EDGE_FILES,
}
_HALO = {"halo_offsets", "halo_code", "halo_code_offsets", "halo_nodes"}
_PACKED = ("halo_count", "halo_places", "halo_features", *(f"halo_features_{n}" for n in ("indptr", "indices", "data")))
_IDS = ("part_offsets", "original_nid", "store_nid", "kind_starts", "user_ids", "user_id_offsets", "user_id_bytes")


@passes_on(GraphChange)
def update_store(
    store,
    change: Any = None,
    root=None,
    slack: float = SLACK,
    drift: float = 0.1,
    progress: Progress | None = None,
    overwrite: bool = False,
    budget: WriteBudget | None = None,
    lock_timeout_s: float = 0,
    check_finite: bool = True,
    **named,
) -> PartitionStore:
    """Write the next version of a store beside it: nodes and edges that come, change or go. Nothing is partitioned.

    Old nodes keep their part; new ones are placed by their neighbours, see `place_nodes`. The data set of the old store
    is not needed. What did not change is linked: the old store stays whole, and may be removed later. After a kill the
    same call goes on with what is done.

    Args:
        store: The store before, or its folder.
        change: A `GraphChange`, or a `GraphDataset` or PyG's `Data` whose nodes and edges are added or changed; None:
            what `named` says.
        root: Folder of the new version; None: beside the old one, "NAME-v1", "NAME-v2", ...
        slack: Share above the mean that a part may be filled to by new nodes, of nodes, edges and nodes of each mask;
            where the store's balance is worse, up to that.
        drift: By which share the cut may grow since the first version before a warning names the remedy.
        progress: Called with (what, done, total) about once a block.
        overwrite: Write again even if a store exists at root, and discard an unfinished one of another change.
        budget: Sizes of buffers; None: those of `WriteBudget`, smaller where little memory is free.
        lock_timeout_s: How long to wait for another process that updates the store, or writes at root.
        check_finite: Refuse features and edge values with NaN or infinities.
        named: Arguments of `GraphChange`; beside a data set removed_edges, removed_nodes and reader alone.

    Returns:
        PartitionStore of the new version, opened; see `PartitionStore.changes`.

    Raises:
        ValueError, EdgeStreamError: an edge that names an unknown node, a removal of what is not there, or columns that
            are not the store's; nothing is written.
        PartitionStoreError: the store is not finished, or damaged; another process updates it; another store is at
            root; or the disk is too small.

    Cost: one sequential read and write of the old files that change, and two passes over the new edges; memory of a few
        numbers a node, the buffers of `budget`, the new rows, the edges of new nodes, and edges that are removed.
    """
    if lock_timeout_s != 0:
        check_seconds("lock_timeout_s", lock_timeout_s)
    for name, value in (("slack", slack), ("drift", drift)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number of at least 0, got {short(value)}")
    old = _opened(store)
    root = store_folder(root or _next_root(old))
    if root == old.root:
        raise ValueError(f"root must be another folder than the store's, got {root}: leave it out")
    given = GraphChange.of(change, **named)
    remedy = "make space, and run the same command: it goes on from there"
    disk = disk_errors(partial_folder(root), "written", remedy, PartitionStoreError)
    with disk, writer_lock(old.root, lock_timeout_s, "updating"), stage("update", root=str(root)):
        wanted = read_change(old, given, check_finite)
        nodes = renumber(old, wanted, slack)
        root.parent.mkdir(parents=True, exist_ok=True)
        with writer_lock(root, lock_timeout_s):
            _write_version(old, wanted, nodes, root, budget, progress or _silent, overwrite)
    found = PartitionStore.open(root)
    tell_drift(found, drift)
    return found


def tell_drift(store: PartitionStore, most: float) -> None:
    """Record the cut of a version, and warn where it has grown by more than a share since the first."""
    share, cut = drift_of(store.manifest), store.version["cut"]
    record("update", root=str(store.root), cut=cut, balance=store.version["balance"], **store.version["counts"])
    if share is not None and share > most:
        again = f"gnnscale partition dataset=store dataset.store={store.root}"
        if store.schema is not None:
            again = "the whole graph from its data set"
        warnings.warn(
            f"{store.root}: {cut['after']:.1%} of the edges join two parts, {cut['first']:.1%} when the nodes were "
            f"partitioned, and drift={most:g} is the share by which that may grow: partition again, {again}",
            stacklevel=4,
        )


def _opened(store) -> PartitionStore:
    if isinstance(store, PartitionStore):
        found = store
    elif is_url(store):
        raise ValueError(
            f"store must be a folder, got {store}: update the folder that was published, and publish it again"
        )
    else:
        found = PartitionStore.open(store)
    if found.fetched is not None:
        raise ValueError(
            f"store must be a folder of its own, got what was fetched to {found.root}: update the published one"
        )
    return found


def _next_root(store: PartitionStore) -> Path:
    number = 0 if store.version is None else store.version["number"]
    base = store.root.name.removesuffix(f"-v{number}") if number else store.root.name
    return store.root.with_name(f"{base}-v{number + 1}")


def _write_version(
    old: PartitionStore,
    change: StoreChange,
    nodes: Renumbered,
    root: Path,
    budget: WriteBudget | None,
    progress: Progress,
    overwrite: bool,
) -> None:
    """Write the new version in its partial folder, and let it appear."""
    made = {"parent": old.manifest_digest, "layout": old.layout_fingerprint, "change": change.digest}
    source = {"fingerprint": digest(made) * 2, "part_id_crc32": zlib.crc32(nodes.part_id)}
    folder = partial_folder(root)
    if finish_publishing(root, source, overwrite) or stands(root, source, overwrite):
        return
    check_partial(folder, source, overwrite)
    budget = budget or WriteBudget.fitting(len(nodes.part_id), folder, source)
    journal = Journal(
        folder, {"format_version": FORMAT_VERSION, **source, "budget": asdict(budget)}, budget.checkpoint_bytes
    )
    try:
        _check_disk(old, change, journal)
        journal.write_undamaged(partial(_write_files, journal, old, change, nodes, budget, progress), stacklevel=5)
        _write_manifest(journal, old, change, nodes, source)
    except (ValueError, EdgeStreamError):
        clear_folder(folder)
        folder.rmdir()
        raise
    finally:
        journal.close()
    publish(folder, root)


def _write_files(
    journal: Journal,
    old: PartitionStore,
    change: StoreChange,
    nodes: Renumbered,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    manifest, files = old.manifest, old.manifest["files"]
    flags = changed_nodes(old, change, nodes)
    _write_ids(journal, old, change, nodes)
    write_tables(journal, old, change, nodes, budget.block_bytes, progress)
    if not change.changes_edges:
        counts = manifest.get("edge_counts")
        counts = None if counts is None else np.array([counts[name] for name in EDGE_COUNTS]).T.tolist()
        facts = {"num_arcs": old.num_edges, "symmetric": old.symmetric}
        link_files(journal, old, "rows", [name for name in files if name in _ROWS], **facts)
        link_files(journal, old, "halo", [name for name in files if without_prefix(name) in _HALO], counts=counts)
        _write_array(journal, "changes", f"{NODE_CHANGES}.npy", flags)
    else:
        write_edges(journal, old, change, nodes, flags, budget, progress)
        if old.edge_storage is not None:
            code_neighbors(journal, len(nodes.before))
    for table in change.tables:
        if not manifest["pack_halo"] or without_prefix(table.name) != "features":
            continue
        prefix = type_prefix(table.node_type)
        if change.changes_edges or table.rows is not None:
            rows = map_table(journal, table, old.feature_storage)
            pack_halo_features(journal, prefix, rows, old.num_parts, budget, progress)
        else:
            link_files(journal, old, f"{prefix}halo_features", [prefix + n for n in _PACKED if prefix + n in files])


def _write_ids(journal: Journal, old: PartitionStore, change: StoreChange, nodes: Renumbered) -> None:
    if not change.renumbers:
        link_files(journal, old, "ids", [name for name in _IDS if name in old.manifest["files"]])
        return
    if journal.is_done("ids"):
        return
    arrays = nodes.ids._asdict() | {PARENT_NID: nodes.before}
    if change.schema is not None:
        arrays["kind_starts"] = nodes.new_types.starts
    if change.known.has_names or len(change.removed):  # else the original ids are the user's
        arrays |= change.known.names(nodes.known)
    made = [ArrayFile(journal.folder / f"{name}.npy", array.dtype) for name, array in arrays.items()]
    for file, array in zip(made, arrays.values(), strict=True):
        file.append(array)
    journal.finish("ids", *made)


def _write_array(journal: Journal, step: str, name: str, array: np.ndarray) -> None:
    if not journal.is_done(step):
        file = ArrayFile(journal.folder / name, array.dtype)
        file.append(array)
        journal.finish(step, file)


def _write_manifest(
    journal: Journal, old: PartitionStore, change: StoreChange, nodes: Renumbered, source: dict
) -> None:
    rows, checksums, num_nodes = journal.state("rows"), journal.checksums(), len(nodes.before)
    delete_files(path for path in journal.folder.glob("*.npy") if path.name not in checksums)
    manifest = {name: value for name, value in old.manifest.items() if name not in ("edge_counts", "version", "files")}
    manifest |= _typed_fields(manifest, change, nodes)
    manifest |= {"num_nodes": num_nodes, "num_arcs": rows["num_arcs"], "symmetric": rows["symmetric"]}
    if manifest["least_edge_weight"] is not None and change.changes_edges:
        weights = map_rows(journal.folder / "edge_weight.npy", np.float32, (rows["num_arcs"],))
        manifest["least_edge_weight"] = least_value(weights)
    if "num_edge_classes" in manifest and change.edge_values.get("edge_label") is not None:
        manifest["num_edge_classes"] = max(old.num_edge_classes, num_classes_of(change.edge_values["edge_label"]))
    counts = journal.state("halo")["counts"]
    if counts is not None:
        manifest["edge_counts"] = dict(zip(EDGE_COUNTS, np.array(counts).reshape(-1, 3).T.tolist(), strict=True))
    flags = map_rows(journal.folder / f"{NODE_CHANGES}.npy", np.uint8, (num_nodes,))
    number_of = {
        "new_nodes": change.known.num_new,
        "removed_nodes": len(change.removed),
        "changed_features": int(np.count_nonzero(flags & FEATURES)),
        "changed_labels": int(np.count_nonzero(flags & LABELS)),
        "new_edges": change.num_edges,
        "removed_edges": len(change.dropped.row),
    }
    cut = {"before": _cut_of(old.manifest, old.csc, old.part_offsets)}
    cut["after"] = _cut_of(manifest, map_csc(journal, num_nodes), nodes.ids.part_offsets)
    balance = {"before": balances(old.part_offsets), "after": balances(nodes.ids.part_offsets)}
    manifest["version"] = version_record(old, number_of, change.digest, change.renumbers, cut, balance)
    manifest["files"] = describe_files(journal.folder, checksums)
    write_manifest(journal.folder, manifest, source)


def _typed_fields(manifest: dict, change: StoreChange, nodes: Renumbered) -> dict:
    """Return what the manifest says of node types and edge types, and of the columns that node types have."""
    if change.schema is None:
        return {}
    widths: dict[str, list[int | None]] = {}
    for table in change.tables:
        if table.node_type is not None:
            own = widths.setdefault(without_prefix(table.name), [None] * len(nodes.sizes))
            own[table.node_type] = table.width
    found = {"schema": change.schema.as_json() | {"kind_sizes": nodes.sizes, "feature_dims": widths.get("features")}}
    columns = manifest.get("node_columns", {})
    if columns:
        found["node_columns"] = {name: widths.get(f"column_{name}", width) for name, width in columns.items()}
    return found


def _cut_of(manifest: dict, csc: CSC, part_offsets: np.ndarray) -> float:
    """Return the share of edges, self-loops left out, that join two parts."""
    counts = manifest.get("edge_counts")
    if counts is not None:
        cut = sum(counts["cut"]) / 2
        return cut / max(1, sum(counts["inside"]) + cut)
    edges, cut = count_cut(csc, part_offsets)
    return cut / max(1, edges)


def _check_disk(old: PartitionStore, change: StoreChange, journal: Journal) -> None:
    """Refuse where the disk may not hold the new files: those of the old store, grown, and the sorted new edges."""
    files = old.manifest["files"]
    grown = 1 + change.known.num_new / max(1, old.num_nodes)
    edge_files, given = _ROWS | _HALO, {table.name for table in change.tables if table.rows is not None}
    rewritten = [
        name
        for name in files
        if change.renumbers or name in given or (change.changes_edges and without_prefix(name) in edge_files)
    ]
    of_edges = sum(entry["bytes"] for name, entry in files.items() if name in EDGE_FILES | {*EDGES})
    per_edge = of_edges / max(1, old.num_edges)
    both = 2 if old.manifest["to_undirected"] else 1
    needed = sum(files[name]["bytes"] * grown for name in rewritten)
    needed += sum(np.asarray(table.rows).nbytes for table in change.tables if _is_new_file(table, files))
    needed += change.num_edges * both * (per_edge + 20) + 6 * old.num_nodes
    check_space(journal, int(needed))


def _is_new_file(table: ChangedTable, files: dict) -> bool:
    return table.name not in files and isinstance(table.rows, np.ndarray)


def _silent(what: str, done: int, total: int | None) -> None:
    pass
