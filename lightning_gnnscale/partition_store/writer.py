"""Write a partition store in bounded memory: resumable after a kill, atomic, locked against a second writer."""

import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset.columns import Columns, CSRArrays
from ..dataset.feature_storage import row_code, stored_form
from ..dataset.value_checks import ColumnRanges, check_values, least_value, num_classes_of, tell_odd_nodes
from ..edge_stream import NodeIds
from ..edge_stream.relations import IdsByNodeType
from ..errors import EdgeStreamError, PartitionStoreError, check_seconds, disk_errors, short
from ..events import stage
from ..foreign import has_all
from ..graph import CSC, id_dtype
from ..keywords import passes_on
from ..traits import PartitioningTraits, StreamTraits
from .array_file import ArrayFile, map_rows
from .buckets import bucket_edges, bucket_layout, drop_runs, open_runs
from .coded_neighbors import code_neighbors
from .csc_writer import drop_cross, write_rows
from .disk import WriteBudget, check_disk
from .features import CSRFeatures, DenseFeatures, to_stored
from .halo import pack_halo_features, write_halo
from .inputs import (
    StoreIds,
    StoreInputs,
    changed_inputs,
    check_inputs,
    input_files,
    relabel,
    type_starts,
)
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
from .manifest import EDGE_COUNTS, FORMAT_VERSION, describe_files, type_prefix, write_manifest
from .node_tables import Progress, write_sparse_table, write_table
from .reader import PartitionStore
from .typed_features import NodeTypes


@passes_on(Columns)
def write_partition_store(
    root,
    stream,
    p,
    columns: Columns | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    pack_halo: bool = False,
    budget: WriteBudget | None = None,
    lock_timeout_s: float = 0,
    check_finite: bool = True,
    **named,
) -> PartitionStore:
    """Write the store of a partitioned graph, or go on with one that was interrupted, or open the one that exists.

    The store appears at `root` at once and complete; until then everything is in `<root>.partial`. After a kill the
    same call goes on with what is done and ends in the same bytes. A finished store of the same input is opened.

    Args:
        root: folder of the store.
        stream: EdgeStream. Its `to_undirected` adds reverses and drops repeats of one edge type (of an edge's weights
            that of the first edge in its direction stays, else that of the first one the other way; edges with times
            are all kept). Its `remove_self_loops` drops self-loops, its `node_ids` are kept as the user's ids.
        p: Partitioning, or anything with `part_id` (num_nodes,) and `num_parts`.
        columns: Features, labels, masks and the like: a `GraphDataset` or `Columns`, see there; None: those of `named`.
        progress: called with (what, done, total) about once a block.
        overwrite: write again even if a store exists at root, and discard an unfinished one of other input; the old
            store stays until the new one is complete.
        pack_halo: also store each halo's nodes and feature rows, so that a part loads with sequential reads.
        budget: buffer sizes; None: those of `WriteBudget`, smaller where little memory is free.
        lock_timeout_s: how long to wait for another writer of the same root.
        check_finite: refuse features and edge values with NaN or infinities; False stores every bit pattern.
        named: The columns by their names: features, labels, masks, edge_weight, edge_features, node_time, edge_time,
            edge_label, feature_storage, edge_storage, regression.

    Returns:
        PartitionStore, opened.

    Raises:
        ValueError: an argument does not fit the graph, or a value would spoil training.
        PartitionStoreError: another store, an unfinished one of other input, or another writer is at `root`; the
            disk is too small, or fails; or a file of the input changed since the partitioning, or meanwhile. The
            message says how to go on.

    Cost: one pass over the edges (one more if the stream is not counted yet), one more over labels and edge values,
        and per part one sequential pass over what it owns; memory O(num_nodes) plus the buffers of `budget`; scratch
        disk of about two times the edges, which shrinks as the rows are written.
    """
    if columns is not None and named:
        raise ValueError(f"columns are given, and {', '.join(named)} besides: name them in one place")
    if lock_timeout_s != 0:
        check_seconds("lock_timeout_s", lock_timeout_s)
    if not has_all(p, "part_id", "num_parts"):
        raise ValueError(f"p must be a Partitioning such as gs.partition(stream) gives, got {short(p)}")
    root, columns = store_folder(root), Columns.of(Columns(**named) if columns is None else columns)
    files_now = partial(input_files, stream, columns, p.part_id)
    files = files_now()  # before anything of them is read
    inputs = check_inputs(stream, p, columns, pack_halo)
    # Features, sparse ones too, are checked while they are stored.
    classes = None if inputs.regression else inputs.labels
    check_values(None, classes, inputs.edge_weight, inputs.edge_features, check_finite)
    tell_odd_nodes(classes, inputs.masks)
    source = {"fingerprint": inputs.fingerprint(), "part_id_crc32": zlib.crc32(inputs.part_id)}
    folder = partial_folder(root)
    budget = budget or WriteBudget.fitting(inputs.num_nodes, folder, source)
    remedy = "make space, and run the same command: it goes on from there"
    with disk_errors(folder, "written", remedy, PartitionStoreError):
        root.parent.mkdir(parents=True, exist_ok=True)
        with writer_lock(root, lock_timeout_s), stage("partition_store", root=str(root)):
            if not finish_publishing(root, source, overwrite) and not stands(root, source, overwrite):
                check_partial(folder, source, overwrite)
                head = {"format_version": FORMAT_VERSION, **source, "budget": asdict(budget)}
                journal = Journal(folder, head, budget.checkpoint_bytes)
                try:
                    _check_unchanged(files, _partitioned(p, files), "since it was partitioned: partition again")
                    check_disk(inputs, p, journal)
                    journal.write_undamaged(
                        partial(_write_files, journal, inputs, budget, progress or _silent, check_finite)
                    )
                    _write_manifest(journal, inputs, source)
                    _check_unchanged(files_now(), files, "while the store was written: run the same command again")
                except (ValueError, EdgeStreamError, _InputChanged):
                    clear_folder(folder)  # what was made of input that has to change is worth nothing
                    folder.rmdir()
                    raise
                finally:
                    journal.close()
                publish(folder, root)
    return PartitionStore.open(root)


class _InputChanged(PartitionStoreError):
    """Files of the input are no longer what they were."""


def _check_unchanged(now: dict, before: dict, when: str) -> None:
    changed = changed_inputs(before, now)
    if changed:
        raise _InputChanged(f"{changed} changed {when}; nothing was stored")


def _partitioned(p, files: dict) -> dict:
    """Return the state of the edge files when they were partitioned, of those that are stored now."""
    stored = {path for path, *_ in files["edges"]}
    known = [list(state) for state in PartitioningTraits(p).edge_files if state[0] in stored]
    return {"edges": files["edges"]} if len(known) < len(stored) else {"edges": known}


def _write_files(
    journal: Journal, inputs: StoreInputs, budget: WriteBudget, progress: Progress, check_finite: bool
) -> None:
    ids = relabel(inputs.part_id, inputs.num_parts)
    _write_ids(journal, inputs, ids)
    _write_node_arrays(journal, inputs, ids, budget, progress, check_finite)
    if not journal.is_done("rows"):
        layout = bucket_layout(inputs, budget)
        bucket_edges(journal, inputs, ids.store_nid, layout, budget, progress)
        write_rows(journal, inputs, ids, layout, open_runs(journal, inputs, layout), budget, progress)
    drop_runs(journal)
    if not journal.is_done("halo"):
        node_types = None if inputs.relations is None else inputs.relations.schema.num_node_types
        node_type_numbers = None if node_types is None else NodeTypes.of_runs(_type_starts(inputs), node_types)
        write_halo(journal, inputs, _map_csc(journal, inputs), ids.part_offsets, node_type_numbers, budget, progress)
    drop_cross(journal)
    if inputs.edge_storage is not None:
        code_neighbors(journal, inputs.num_nodes)
    if inputs.pack_halo:
        for node_type, rows in (inputs.typed_features or {None: inputs.features}).items():
            table = _map_features(journal, type_prefix(node_type), rows, inputs.feature_storage)
            pack_halo_features(journal, type_prefix(node_type), table, inputs.num_parts, budget, progress)


def _write_ids(journal: Journal, inputs: StoreInputs, ids: StoreIds) -> None:
    if journal.is_done("ids"):
        return
    arrays = ids._asdict()
    if inputs.relations is not None:
        arrays["kind_starts"] = _type_starts(inputs)
    if StreamTraits(inputs.stream).node_ids is not None:
        arrays |= _user_ids(inputs.stream.node_ids, ids.original_nid)
    files = [ArrayFile(journal.folder / f"{name}.npy", array.dtype) for name, array in arrays.items()]
    for file, array in zip(files, arrays.values(), strict=True):
        file.append(array)
    journal.finish("ids", *files)


def _type_starts(inputs: StoreInputs) -> np.ndarray:
    return type_starts(inputs.part_id, inputs.relations.type_offsets, inputs.num_parts)


def _user_ids(node_ids, original_nid: np.ndarray) -> dict[str, np.ndarray]:
    """Return the user's ids in store order: integers, or strings by their offsets in their bytes."""
    if len(node_ids) != len(original_nid):
        raise ValueError(f"node_ids must name all {len(original_nid)} nodes, got {len(node_ids)}; leave num_nodes out")
    if not isinstance(node_ids, NodeIds | IdsByNodeType):
        node_ids = NodeIds.of(node_ids)
    if not node_ids.are_strings:
        return {"user_ids": np.asarray(node_ids)[original_nid]}
    return dict(zip(("user_id_offsets", "user_id_bytes"), node_ids.strings(original_nid), strict=True))


def _write_node_arrays(
    journal, inputs: StoreInputs, ids: StoreIds, budget: WriteBudget, progress: Progress, check_finite: bool
) -> None:
    common = (inputs.part_id, ids, budget.block_bytes, progress)
    if inputs.labels is not None:
        convert = _stored_targets if inputs.regression else _stored_labels
        write_table(journal, "labels", "labels.npy", inputs.labels, *common, convert=convert)
    if inputs.node_time is not None:
        write_table(journal, "node times", "node_time.npy", inputs.node_time, *common, convert=_as_int64)
    for name, mask in inputs.masks.items():
        write_table(journal, f"mask {name}", f"mask_{name}.npy", mask, *common)
    if inputs.features is not None and not inputs.typed_features:
        _write_features(journal, "features", inputs.features, inputs.feature_storage, check_finite, *common)
    tables = [(f"{type_prefix(own)}features", own, rows) for own, rows in inputs.typed_features.items()]
    tables = [(*table, inputs.feature_storage) for table in tables] + [(*table, None) for table in inputs.node_rows]
    for name, node_type, rows, storage in tables:
        own = common
        if node_type is not None:  # the nodes of a type are numbered as a graph of their own
            part_id = inputs.part_id[slice(*inputs.relations.type_offsets[node_type : node_type + 2].tolist())]
            own = (part_id, relabel(part_id, inputs.num_parts), budget.block_bytes, progress)
        _write_features(journal, name, rows, storage, check_finite, *own)


def _write_features(journal: Journal, name: str, features, storage: str | None, finite: bool, *common) -> None:
    if isinstance(features, CSRArrays):
        write_sparse_table(journal, features, *common, finite=finite, dtype=storage, name=name)
        return
    ranges = ColumnRanges()

    def convert(rows: np.ndarray) -> np.ndarray:
        ranges.add(rows)
        return to_stored(rows, storage)

    write_table(journal, name, f"{name}.npy", features, *common, convert=convert, finite=finite, storage=storage)
    if name.endswith("features"):  # further columns of the nodes may be anything
        ranges.tell(name)


def _stored_labels(labels: np.ndarray) -> np.ndarray:
    """Classes as int64, NaN as -1; several labels as float32."""
    if labels.ndim == 2:
        return labels.astype(np.float32)
    if labels.dtype.kind != "f":
        return labels.astype(np.int64)
    return np.where(np.isnan(labels), -1, labels).astype(np.int64)


def _stored_targets(labels: np.ndarray) -> np.ndarray:
    """Numbers to predict as float32, one column at least."""
    return (labels if labels.ndim == 2 else labels[:, None]).astype(np.float32)


def _as_int64(times: np.ndarray) -> np.ndarray:
    return times.astype(np.int64)


def _map_csc(journal: Journal, inputs: StoreInputs) -> CSC:
    num_edges = journal.state("rows")["num_arcs"]
    indptr = map_rows(journal.folder / "csc_indptr.npy", np.int64, (inputs.num_nodes + 1,))
    return CSC(indptr, map_rows(journal.folder / "csc_indices.npy", id_dtype(inputs.num_nodes), (num_edges,)))


def _map_features(journal: Journal, prefix: str, features, storage: str | None) -> DenseFeatures | CSRFeatures:
    """Map a table that is written, of all nodes or of those of a node type."""
    path, (num_rows, dim) = str(journal.folder / f"{prefix}features"), features.shape
    if not isinstance(features, CSRArrays):
        dtype, items = stored_form(storage, dim, features.dtype)
        rows = map_rows(Path(f"{path}.npy"), dtype.newbyteorder("<"), (num_rows, items))
        return DenseFeatures(rows, row_code(storage, dim))
    num_values, dtype = len(features.indices), np.dtype(storage or features.data.dtype)
    return CSRFeatures(
        map_rows(Path(f"{path}_indptr.npy"), np.int64, (num_rows + 1,)),
        map_rows(Path(f"{path}_indices.npy"), np.int32, (num_values,)),
        map_rows(Path(f"{path}_data.npy"), dtype.newbyteorder("<"), (num_values,)),
        dim,
    )


def _write_manifest(journal: Journal, inputs: StoreInputs, source: dict) -> None:
    rows, checksums = journal.state("rows"), journal.checksums()
    delete_files(path for path in journal.folder.glob("*.npy") if path.name not in checksums)
    manifest = {
        "format_version": FORMAT_VERSION,
        "num_nodes": inputs.num_nodes,
        "num_arcs": rows["num_arcs"],
        "num_parts": inputs.num_parts,
        "symmetric": rows["symmetric"],
        "to_undirected": bool(inputs.stream.to_undirected),
        "remove_self_loops": bool(inputs.stream.remove_self_loops),
        "method": inputs.method,
        "seed": inputs.seed,
        "masks": sorted(inputs.masks),
        "feature_dim": None if inputs.features is None or inputs.typed_features else _dim(inputs.features),
        "feature_storage": inputs.feature_storage,
        "pack_halo": inputs.pack_halo,
        "least_edge_weight": None if inputs.edge_weight is None else least_value(inputs.edge_weight),
        "files": describe_files(journal.folder, checksums),
    }
    counts = journal.state("halo")["counts"]
    if counts is not None:
        manifest["edge_counts"] = dict(zip(EDGE_COUNTS, np.array(counts).reshape(-1, 3).T.tolist(), strict=True))
    if inputs.edge_storage is not None:
        manifest["edge_storage"] = inputs.edge_storage
    if inputs.options.get("num_machines"):
        manifest["num_machines"] = int(inputs.options["num_machines"])
    if inputs.regression:
        manifest["regression"] = True
    if inputs.edge_label is not None:
        manifest["num_edge_classes"] = num_classes_of(inputs.edge_label)
    if inputs.node_columns:
        manifest["node_columns"] = {name: _widths(inputs, rows) for name, rows in inputs.node_columns.items()}
    if inputs.relations is not None:
        sizes = {"kind_sizes": np.diff(inputs.relations.type_offsets).tolist(), "feature_dims": _dims(inputs)}
        manifest["schema"] = inputs.relations.schema.as_json() | sizes
    write_manifest(journal.folder, manifest, source)


def _dims(inputs: StoreInputs) -> list[int | None] | None:
    """Return the feature width of each node type, None for one without; None unless node types have their own."""
    return _widths(inputs, inputs.typed_features) if inputs.typed_features else None


def _widths(inputs: StoreInputs, rows: Any) -> int | list[int | None]:
    """Return the width of rows; of a dict of them by node type a list, None for a node type without."""
    if not isinstance(rows, dict):
        return _dim(rows)
    return [_dim(rows[number]) if number in rows else None for number in range(inputs.relations.num_node_types)]


def _dim(features) -> int:
    return int(features.shape[1])


def _silent(what: str, done: int, total: int | None) -> None:
    pass
