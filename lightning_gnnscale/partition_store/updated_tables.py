"""The per-node files of an updated store: copied in sequence with the new rows in their places, or linked."""

import os
import zlib
from pathlib import Path

import numpy as np

from ..dataset.columns import CSRArrays
from ..dataset.feature_storage import row_code
from .array_file import HEADER_BYTES, map_rows, npy_header
from .features import CSRFeatures, DenseFeatures
from .journal import Journal, file_states
from .merged_rows import FEATURES, LABELS, NEW
from .node_tables import Progress
from .reader import PartitionStore
from .renumbered import Renumbered
from .store_change import ChangedTable, StoreChange
from .verify import compare_once

_MOST_ROWS = 1 << 21


class _Rows:
    """The rows of a per-node file of the updated store: where each was, and which are given.

    Attributes:
        before: (num_rows,) old row of each, -1 of a new node's; ascending but for these.
        given: (num_given,) ascending rows that are given.
        order: (num_given,) place of each among the rows of the change.
    """

    def __init__(self, table: ChangedTable, renumbered: Renumbered):
        self.before = renumbered.rows_before(table.node_type)
        rows = renumbered.rows_of(table.nodes, table.node_type)
        self.order = np.argsort(rows)
        self.given = rows[self.order]

    def given_within(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places from `begin` on of the given rows in [begin, end), and their places in the change."""
        first, last = np.searchsorted(self.given, [begin, end])
        return self.given[first:last] - begin, self.order[first:last]

    def stay(self, num_old: int) -> bool:
        """Whether the file is that of the old store, of `num_old` rows."""
        same = not len(self.given) and len(self.before) == num_old
        return same and bool((self.before == np.arange(num_old)).all())


def changed_nodes(store: PartitionStore, change: StoreChange, renumbered: Renumbered) -> np.ndarray:
    """Return (num_nodes,) uint8: what of each node's own rows the change alters, by store id; equal rows alter nothing.

    Cost: one read of the rows that the given ones replace.
    """
    flags = np.where(renumbered.before < 0, NEW, 0).astype(np.uint8)
    for table in change.tables:
        if table.rows is None:
            continue
        nodes = renumbered.ids.store_nid[renumbered.original[table.nodes]].astype(np.int64)
        order = np.argsort(nodes)
        order = order[renumbered.before[nodes[order]] >= 0]
        if len(order):
            was = renumbered.before[nodes[order]].astype(np.int64)
            old = was if table.node_type is None else renumbered.old_types.locate(was)[1]
            kind = LABELS if table.name == "labels" or table.name.startswith("mask_") else FEATURES
            flags[nodes[order][_differ(store, table, old, order)]] |= kind
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
    for table in change.tables:
        if journal.is_done(table.name):
            continue
        rows, old = _Rows(table, renumbered), _old_table(store, table)
        if rows.stay(old.num_rows if isinstance(old, CSRFeatures) else len(old)):
            link_files(journal, store, table.name, _files_of(store, table.name))
        elif isinstance(old, CSRFeatures):
            _write_sparse(journal, table, old, rows, block_bytes, progress)
        else:
            _write_dense(journal, table, old, rows, block_bytes, progress)


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


def map_table(journal: Journal, table: ChangedTable, storage: str | None) -> DenseFeatures | CSRFeatures:
    """Map features that the updated store has, once they are written; storage: how it holds them."""
    path = journal.folder / f"{table.name}.npy"
    if path.is_file():
        return DenseFeatures(_mapped(path), row_code(storage, table.width))
    parts = (journal.folder / f"{table.name}_{part}.npy" for part in ("indptr", "indices", "data"))
    return CSRFeatures(*map(_mapped, parts), table.width)


def _mapped(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode=None if path.stat().st_size == HEADER_BYTES else "r")


def _files_of(store: PartitionStore, name: str) -> list[str]:
    names = [name, *(f"{name}_{part}" for part in ("indptr", "indices", "data"))]
    return [one for one in names if one in store.manifest["files"]]


def _old_table(store: PartitionStore, table: ChangedTable) -> np.ndarray | CSRFeatures:
    """Return the rows of the old store, compared as `PartitionStore.open` says; of a new node type there are none."""
    files = _files_of(store, table.name)
    compare_once(store, files)
    if not files:
        if isinstance(table.rows, CSRArrays):
            empty = table.rows.indices[:0], table.rows.data[:0]
            return CSRFeatures(np.zeros(1, np.int64), *empty, table.width)
        return table.rows[:0]
    entry = store.manifest["files"].get(table.name)
    if entry is not None:
        return map_rows(store.root / f"{table.name}.npy", np.dtype(entry["dtype"]), tuple(entry["shape"]))
    return CSRFeatures(*(store.mapped(name) for name in files), table.width)


def _differ(store: PartitionStore, table: ChangedTable, old: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return (num,) bool: whether each given row differs, bit for bit, from the stored one."""
    stored = _old_table(store, table)
    if isinstance(table.rows, CSRArrays):
        was, now = stored.read(old), _as_features(table.rows).read(rows)
        same = np.diff(was.indptr) == np.diff(now.indptr)
        for place in np.flatnonzero(same):
            one, other = (slice(*found.indptr[place : place + 2]) for found in (was, now))
            same[place] = was.indices[one].tobytes() == now.indices[other].tobytes()
            same[place] &= was.data[one].tobytes() == now.data[other].tobytes()
        return ~same
    was = stored[old]
    if not was.size:
        return np.zeros(len(old), bool)
    bits = [np.ascontiguousarray(one).reshape(len(one), -1).view(np.uint8) for one in (was, table.rows[rows])]
    return (bits[0] != bits[1]).any(axis=1)


def _blocks(before: np.ndarray, first: int, block_rows: int):
    """Yield (begin, end, first old, behind the last old, (num,) place of each row there or -1) of new rows."""
    for begin in range(first, len(before), block_rows):
        end = min(begin + block_rows, len(before))
        was = before[begin:end]
        stays = was[was >= 0]
        low, high = (int(stays[0]), int(stays[-1]) + 1) if len(stays) else (0, 0)
        yield begin, end, low, high, np.where(was >= 0, was - low, -1)


def _write_dense(
    journal: Journal, table: ChangedTable, old: np.ndarray, moved: _Rows, block_bytes: int, progress: Progress
) -> None:
    file = journal.open_file(table.name, f"{table.name}.npy", old.dtype, old.shape[1:])
    block_rows = max(1, min(block_bytes // max(1, file.row_bytes), _MOST_ROWS))
    for begin, end, low, high, place in _blocks(moved.before, file.num_rows, block_rows):
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
            places, chosen = moved.given_within(begin, end)
            rows[places] = table.rows[chosen]
        file.append(rows)
        if journal.due(rows.nbytes):
            file.sync()
            journal.write(table.name, files=file_states(file))
        progress(f"storing {table.name}", end, len(moved.before))
    journal.finish(table.name, file)


def _write_sparse(
    journal: Journal, table: ChangedTable, old: CSRFeatures, moved: _Rows, block_bytes: int, progress: Progress
) -> None:
    name = table.name
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
        moved.before, pointers.num_rows - 1, max(1, min(block_bytes // row_bytes, _MOST_ROWS))
    ):
        joined, _ = old.load(np.arange(low, high))
        if new is not None:
            start = joined.indptr[-1]
            joined = CSRFeatures(
                np.concatenate([joined.indptr, start + new.indptr[1:]]),
                np.concatenate([joined.indices, new.indices]), np.concatenate([joined.data, new.data]), old.dim,
            )  # fmt: skip
            places, chosen = moved.given_within(begin, end)
            place[places] = high - low + chosen
        block = joined.read(place)
        pointers.append(values[0].num_rows + block.indptr[1:])
        values[0].append(block.indices)
        values[1].append(block.data)
        if journal.due(block.nbytes):
            for file in (pointers, *values):
                file.sync()
            journal.write(name, files=file_states(pointers, *values))
        progress(f"storing {name}", end, len(moved.before))
    journal.finish(name, pointers, *values)


def _as_features(rows: CSRArrays) -> CSRFeatures:
    return CSRFeatures(rows.indptr, rows.indices, rows.data, int(rows.shape[1]))
