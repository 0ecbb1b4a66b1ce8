"""Per-node arrays into store order: the source is read once from front to back, each part written as runs."""

import math
from collections.abc import Callable

import numpy as np

from ..dataset.columns import CSRArrays, check_whole
from ..dataset.feature_storage import held_values, largest_held
from ..dataset.value_checks import bad_value, not_finite
from ..jit import kernel
from .array_file import ArrayFile
from .features import as_bits, copy_sparse_rows, row_lengths
from .inputs import StoreIds, group_by_part
from .journal import Journal, file_states

_MOST_ROWS = 1 << 21  # of one block, whatever the row is: the order of a block is held as int64

Progress = Callable[[str, int, int | None], None]


def write_table(
    journal: Journal,
    step: str,
    name: str,
    source: np.ndarray,
    part_id: np.ndarray,
    ids: StoreIds,
    block_bytes: int,
    progress: Progress,
    convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    finite: bool = False,
    storage: str | None = None,
) -> None:
    """Write `source` as the file `name`, its rows permuted into store order.

    Args:
        source: (num_nodes, ...) in original order, memory-mapped or not.
        convert: what is done to a block of rows before it is written.
        finite: refuse NaN and infinities, which would spoil every weight that they reach.
        storage: Of features, which with `finite` must hold the values, see `held_values`; None: as given.

    Raises:
        ValueError: a value is not finite, or beyond what `storage` holds; names its row.

    Cost: one sequential read of the source; two blocks of memory.
    """
    if journal.is_done(step):
        return
    num_nodes = len(part_id)
    like = convert(source[:0])
    file = journal.open_file(step, name, like.dtype, like.shape[1:], num_nodes)
    start = journal.state(step).get("rows", 0)
    held = held_values(source[:0], storage) if finite else source[:0]
    row_bytes = max(file.row_bytes, *(rows.itemsize * math.prod(rows.shape[1:]) for rows in (source[:0], held)))
    block_rows = max(1, min(block_bytes // max(1, row_bytes), _MOST_ROWS))
    cursor = _cursor(ids.part_offsets, part_id[:start])
    for begin in range(start, num_nodes, block_rows):
        end = min(begin + block_rows, num_nodes)
        order, offsets = _order(part_id[begin:end], len(cursor))
        check_whole(source)
        if finite:
            _check_finite(step, source[begin:end], begin, storage)
        rows = np.take(convert(source[begin:end]), order, axis=0)
        for part in np.flatnonzero(np.diff(offsets)):
            run = rows[offsets[part] : offsets[part + 1]]
            file.write_at(cursor[part], run)
            cursor[part] += len(run)
        if journal.due(rows.nbytes):
            file.sync()
            journal.write(step, rows=end, files=file_states(file))
        progress(f"storing {step}", end, num_nodes)
    journal.finish(step, file)


def write_sparse_table(
    journal: Journal,
    source: CSRArrays,
    part_id: np.ndarray,
    ids: StoreIds,
    block_bytes: int,
    progress: Progress,
    finite: bool = True,
    dtype: np.dtype | None = None,
    name: str = "features",
) -> None:
    """Write CSR features in store order as three files; a row's values keep their order.

    Args:
        name: Name of the step, and head of the names of the files.
        finite: refuse NaN and infinities, also those that `dtype` would make.
        dtype: The dtype of stored values; None: as given.

    Raises:
        ValueError: a column is outside [0, dim), or twice in a row, or a value is not finite; the message names
            the row.

    Cost: one sequential read of the source; 16 bytes a node and two blocks of memory.
    """
    if journal.is_done(name):
        return
    num_nodes = len(part_id)
    dtype = np.dtype(dtype or source.data.dtype)
    indptr = np.zeros(num_nodes + 1, np.int64)
    row_lengths(np.asarray(source.indptr), ids.original_nid, indptr)
    pointers = ArrayFile(journal.folder / f"{name}_indptr.npy", np.int64)
    pointers.append(indptr)
    files = [
        journal.open_file(name, f"{name}_indices.npy", np.int32, num_rows=int(indptr[-1])),
        journal.open_file(name, f"{name}_data.npy", dtype, num_rows=int(indptr[-1])),
    ]
    start = journal.state(name).get("rows", 0)
    cursor = _cursor(ids.part_offsets, part_id[:start])
    most_values = max(1, block_bytes // (4 + dtype.itemsize))
    while start < num_nodes:
        limit = min(int(source.indptr[start]) + most_values, int(source.indptr[num_nodes]))
        # In the array's own dtype, or searchsorted would copy the whole array to a wider one.
        end = int(np.searchsorted(source.indptr, source.indptr.dtype.type(limit), side="right")) - 1
        end = min(max(end, start + 1), start + _MOST_ROWS, num_nodes)
        if finite:
            _check_finite_sparse(source, start, end, dtype)
        written = _copy_sparse_block(source, start, end, part_id, indptr, cursor, files)
        start = end
        if journal.due(written):
            for file in files:
                file.sync()
            journal.write(name, rows=start, files=file_states(*files))
        progress(f"storing {name}", start, num_nodes)
    journal.finish(name, pointers, *files)


def _copy_sparse_block(source, begin, end, part_id, indptr, cursor, files) -> int:
    first, last = int(source.indptr[begin]), int(source.indptr[end])
    block_indptr = np.asarray(source.indptr[begin : end + 1], np.int64) - first
    bad = _bad_sparse_row(block_indptr, np.asarray(source.indices[first:last]), source.shape[1])
    if bad >= 0:
        raise ValueError(
            f"features: row {begin + bad} must name columns in [0, {source.shape[1]}), each at most once"
            " (scipy: sum_duplicates)"
        )
    columns = np.asarray(source.indices[first:last], np.int32)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(source.data[first:last], files[1].dtype.newbyteorder("="))
    order, offsets = _order(part_id[begin:end], len(cursor))
    out_indptr = np.zeros(len(order) + 1, np.int64)
    row_lengths(block_indptr, order, out_indptr)
    out_columns, out_values = np.empty_like(columns), np.empty_like(values)
    copy_sparse_rows(block_indptr, columns, as_bits(values), order, out_indptr, out_columns, as_bits(out_values))
    for part in np.flatnonzero(np.diff(offsets)):
        run = slice(out_indptr[offsets[part]], out_indptr[offsets[part + 1]])
        target = int(indptr[cursor[part]])
        files[0].write_at(target, out_columns[run])
        files[1].write_at(target, out_values[run])
        cursor[part] += offsets[part + 1] - offsets[part]
    return out_columns.nbytes + out_values.nbytes


def _check_finite(name: str, rows: np.ndarray, first_row: int, storage: str | None) -> None:
    held = held_values(rows, storage)
    if held.dtype.kind != "f" or np.isfinite(np.sum(held, dtype=np.float64)):
        return
    bad = np.argwhere(~np.isfinite(held))
    if len(bad) == 0:  # finite numbers whose sum is not
        return
    row, column = bad[0]
    place = f"{name}: row {first_row + row}, column {column}"
    raise bad_value(place, rows[row, column], *largest_held(storage, held.dtype))


def _check_finite_sparse(source: CSRArrays, begin: int, end: int, dtype: np.dtype) -> None:
    first, last = int(source.indptr[begin]), int(source.indptr[end])
    values = np.asarray(source.data[first:last])
    with np.errstate(over="ignore"):
        held = values.astype(dtype, copy=False)
    bad = np.flatnonzero(~np.isfinite(held)) if held.dtype.kind == "f" else ()
    if len(bad):
        raise not_finite(source, first + int(bad[0]), dtype)


def _cursor(part_offsets: np.ndarray, written: np.ndarray) -> np.ndarray:
    """Where the next row of each part goes, after the rows `written` have been."""
    return part_offsets[:-1] + np.bincount(written, minlength=len(part_offsets) - 1)


def _order(part_id: np.ndarray, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
    return group_by_part(part_id, num_parts, np.empty(len(part_id), np.int64))


@kernel
def _bad_sparse_row(indptr, indices, dim):
    """Return the first row with a column outside [0, dim) or a repeated one, or -1."""
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        rising = True
        for i in range(begin, end):
            if indices[i] < 0 or indices[i] >= dim:
                return row
            if i > begin and indices[i] <= indices[i - 1]:
                rising = False
        if not rising:
            ordered = np.sort(indices[begin:end])
            for i in range(1, end - begin):
                if ordered[i] == ordered[i - 1]:
                    return row
    return -1
