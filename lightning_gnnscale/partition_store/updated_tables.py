"""The per-node files of an updated store: copied in sequence with the new rows in their places, or linked."""

import os
import zlib

import numpy as np

from ..dataset.columns import CSRArrays
from ..dataset.feature_storage import row_code
from .array_file import map_rows, npy_header
from .features import CSRFeatures, DenseFeatures
from .journal import Journal, file_states
from .merged_rows import FEATURES, LABELS, NEW
from .node_tables import Progress
from .reader import PartitionStore
from .renumbered import Renumbered
from .store_change import ChangedTable, StoreChange
from .verify import compare_once

_MOST_ROWS = 1 << 21


class GivenRows:
    """Where the rows of a change belong: by store id of the updated store, ascending.

    Attributes:
        nodes: (num_given,) ascending store ids.
        order: (num_given,) the given row of each.
    """

    def __init__(self, change: StoreChange, renumbered: Renumbered):
        nodes = renumbered.ids.store_nid[renumbered.original[change.known.given]].astype(np.int64)
        self.order = np.argsort(nodes)
        self.nodes = nodes[self.order]

    def within(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places from `begin` on of the given nodes in [begin, end), and their given rows."""
        first, last = np.searchsorted(self.nodes, [begin, end])
        return self.nodes[first:last] - begin, self.order[first:last]


def changed_nodes(store: PartitionStore, change: StoreChange, renumbered: Renumbered) -> np.ndarray:
    """Return (num_nodes,) uint8: what of each node's own rows the change alters, by store id; equal rows alter nothing.

    Cost: one read of the rows that the given ones replace.
    """
    flags = np.where(renumbered.before < 0, NEW, 0).astype(np.uint8)
    given = GivenRows(change, renumbered)
    was = renumbered.before[given.nodes]
    nodes, old, rows = given.nodes[was >= 0], was[was >= 0], given.order[was >= 0]
    for table in change.tables:
        if table.rows is not None and len(nodes):
            kind = LABELS if table.name == "labels" or table.name.startswith("mask_") else FEATURES
            flags[nodes[_differ(store, table, old, rows)]] |= kind
    return flags


def write_tables(
    journal: Journal,
    store: PartitionStore,
    change: StoreChange,
    renumbered: Renumbered,
    block_bytes: int,
    progress: Progress,
) -> None:
    """Write every per-node file; one whose rows stay as they are is linked.

    Cost: one sequential read of the old files, and a block of memory.
    """
    given = GivenRows(change, renumbered)
    for table in change.tables:
        if table.rows is None and not change.renumbers:
            link_files(journal, store, table.name, _files_of(store, table.name))
        elif f"{table.name}_indptr" in store.manifest["files"]:
            _write_sparse(journal, store, table, renumbered, given, block_bytes, progress)
        else:
            _write_dense(journal, store, table, renumbered, given, block_bytes, progress)


def link_files(journal: Journal, store: PartitionStore, step: str, names: list[str], **state) -> None:
    """Let files of the old store be files of the new one; on disks without links they are copied.

    Cost: nothing but the names; the first time on a machine a read of those that have not been compared.
    """
    if journal.is_done(step):
        return
    compare_once(store, names)
    files = {}
    for name in names:
        source, path = store.root / f"{name}.npy", journal.folder / f"{name}.npy"
        path.unlink(missing_ok=True)
        entry = store.manifest["files"][name]
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        try:
            os.link(source, path)
        except OSError:  # another disk, or one without links
            copy = journal.open_file("", f"{name}.npy", dtype, shape[1:])
            rows = map_rows(source, dtype, shape)
            for begin in range(0, len(rows), _MOST_ROWS):
                copy.append(rows[begin : begin + _MOST_ROWS])
            copy.close()
        row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        runs = [(0, shape[0], entry["crc32"])] if shape[0] else []
        files[path.name] = (row_bytes, shape[0], zlib.crc32(npy_header(dtype, shape)), runs)
    journal.write(step, done=True, files=files, **state)


def map_table(journal: Journal, store: PartitionStore, num_nodes: int) -> DenseFeatures | CSRFeatures:
    """Map the features that the updated store has, once they are written."""
    entry = store.manifest["files"].get("features")
    if entry is not None:
        code = row_code(store.feature_storage, store.manifest["feature_dim"])
        return DenseFeatures(
            map_rows(journal.folder / "features.npy", np.dtype(entry["dtype"]), (num_nodes, *entry["shape"][1:])), code
        )
    counts = {name: entry[1] for name, entry in journal.state("features")["files"].items()}
    arrays = (
        map_rows(journal.folder / name, np.dtype(store.manifest["files"][name[:-4]]["dtype"]), (counts[name],))
        for name in (f"features_{part}.npy" for part in ("indptr", "indices", "data"))
    )
    return CSRFeatures(*arrays, store.manifest["feature_dim"])


def _files_of(store: PartitionStore, name: str) -> list[str]:
    names = [name, *(f"{name}_{part}" for part in ("indptr", "indices", "data"))]
    return [one for one in names if one in store.manifest["files"]]


def _differ(store: PartitionStore, table: ChangedTable, old: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return (num,) bool: whether each given row differs, bit for bit, from the stored one."""
    compare_once(store, _files_of(store, table.name))
    if isinstance(table.rows, CSRArrays):
        was, now = _sparse(store, table.name).read(old), _as_features(table.rows).read(rows)
        same = np.diff(was.indptr) == np.diff(now.indptr)
        for place in np.flatnonzero(same):
            one, other = (slice(*found.indptr[place : place + 2]) for found in (was, now))
            same[place] = was.indices[one].tobytes() == now.indices[other].tobytes()
            same[place] &= was.data[one].tobytes() == now.data[other].tobytes()
        return ~same
    entry = store.manifest["files"][table.name]
    was = map_rows(store.root / f"{table.name}.npy", np.dtype(entry["dtype"]), tuple(entry["shape"]))[old]
    if not was.size:
        return np.zeros(len(old), bool)
    bits = [np.ascontiguousarray(one).reshape(len(one), -1).view(np.uint8) for one in (was, table.rows[rows])]
    return (bits[0] != bits[1]).any(axis=1)


def _blocks(renumbered: Renumbered, first: int, block_rows: int):
    """Yield (begin, end, first old, behind the last old, (num,) place of each row there or -1) of new store ids."""
    before = renumbered.before
    for begin in range(first, len(before), block_rows):
        end = min(begin + block_rows, len(before))
        was = before[begin:end]
        stays = was[was >= 0]
        low, high = (int(stays[0]), int(stays[-1]) + 1) if len(stays) else (0, 0)
        yield begin, end, low, high, np.where(was >= 0, was - low, -1)


def _write_dense(
    journal, store, table: ChangedTable, renumbered, given: GivenRows, block_bytes: int, progress: Progress
) -> None:
    if journal.is_done(table.name):
        return
    compare_once(store, [table.name])
    entry = store.manifest["files"][table.name]
    old = map_rows(store.root / f"{table.name}.npy", np.dtype(entry["dtype"]), tuple(entry["shape"]))
    file = journal.open_file(table.name, f"{table.name}.npy", old.dtype, old.shape[1:])
    block_rows = max(1, min(block_bytes // max(1, file.row_bytes), _MOST_ROWS))
    for begin, end, low, high, place in _blocks(renumbered, file.num_rows, block_rows):
        rows = np.array(old[low:high])
        if len(rows) != end - begin or (place != np.arange(end - begin)).any():
            came = place < 0
            rows = (
                np.take(rows, np.maximum(place, 0), axis=0)
                if len(rows)
                else np.empty((end - begin, *old.shape[1:]), old.dtype)
            )
            rows[came] = table.fill
        if table.rows is not None:
            places, chosen = given.within(begin, end)
            rows[places] = table.rows[chosen]
        file.append(rows)
        if journal.due(rows.nbytes):
            file.sync()
            journal.write(table.name, files=file_states(file))
        progress(f"storing {table.name}", end, len(renumbered.before))
    journal.finish(table.name, file)


def _write_sparse(
    journal, store, table: ChangedTable, renumbered, given: GivenRows, block_bytes: int, progress: Progress
) -> None:
    name = table.name
    if journal.is_done(name):
        return
    old = _sparse(store, name)
    pointers = journal.open_file(name, f"{name}_indptr.npy", np.int64)
    values = [
        journal.open_file(name, f"{name}_indices.npy", np.int32),
        journal.open_file(name, f"{name}_data.npy", old.dtype),
    ]
    if pointers.num_rows == 0:
        pointers.append(np.zeros(1, np.int64))
    row_bytes = (len(old.indices) * (4 + old.dtype.itemsize)) // max(1, old.num_rows) + 8
    new = None if table.rows is None else _as_features(table.rows)
    for begin, end, low, high, place in _blocks(
        renumbered, pointers.num_rows - 1, max(1, min(block_bytes // row_bytes, _MOST_ROWS))
    ):
        joined, _ = old.load(np.arange(low, high))
        if new is not None:
            start = joined.indptr[-1]
            joined = CSRFeatures(
                np.concatenate([joined.indptr, start + new.indptr[1:]]),
                np.concatenate([joined.indices, new.indices]), np.concatenate([joined.data, new.data]), old.dim,
            )  # fmt: skip
            places, chosen = given.within(begin, end)
            place[places] = high - low + chosen
        block = joined.read(place)
        pointers.append(values[0].num_rows + block.indptr[1:])
        values[0].append(block.indices)
        values[1].append(block.data)
        if journal.due(block.nbytes):
            for file in (pointers, *values):
                file.sync()
            journal.write(name, files=file_states(pointers, *values))
        progress(f"storing {name}", end, len(renumbered.before))
    journal.finish(name, pointers, *values)


def _sparse(store: PartitionStore, name: str) -> CSRFeatures:
    compare_once(store, _files_of(store, name))
    return store.features if name == "features" else store.node_columns[name.removeprefix("column_")]


def _as_features(rows: CSRArrays) -> CSRFeatures:
    return CSRFeatures(rows.indptr, rows.indices, rows.data, int(rows.shape[1]))
