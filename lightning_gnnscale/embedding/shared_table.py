"""One host's rows and what is kept beside them: in memory that its processes share, and in files under checksums."""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from ..errors import CheckpointError, PartitionStoreError, PlacementError
from ..jit import kernel
from ..memory import format_bytes
from ..partition_store.array_file import ArrayFile, checksum, map_rows
from ..partition_store.manifest import sync_folder
from ..placement.shared_rows import RowHandle, SharedRows
from ..rng import GOLDEN, combine, mix64

CHUNK_ROWS = 1 << 16  # that are written at once
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
STEP = 2.0**-31  # of 32 random bits to [0, 2)


@kernel
def fill_initial(out, nodes, key, scale):
    """Fill (num, dim) rows with values uniform in [-scale, scale), by the integers `nodes` and the uint64 key."""
    for i in range(len(nodes)):
        node_key = combine(key, nodes[i])
        for pair in range((out.shape[1] + 1) // 2):
            random = mix64(node_key + np.uint64(pair) * GOLDEN)  # SplitMix64 itself: its state moves by GOLDEN
            out[i, 2 * pair] = (np.float64(random >> HALF) * STEP - 1.0) * scale
            if 2 * pair + 1 < out.shape[1]:
                out[i, 2 * pair + 1] = (np.float64(random & LOW) * STEP - 1.0) * scale


def default_scale(dim: int) -> float:
    """Return the scale at which a row's expected squared length is 1."""
    return float(np.sqrt(3.0 / max(1, dim)))


_COUNTER = "counter"


class SharedColumn(NamedTuple):
    """One array of a table: its width and dtype."""

    width: int
    dtype: str


class SharedTable:
    """Named arrays with the same number of rows, zero at first, writable by all processes of the host.

    They have no name on the system: they are gone with the last process that maps them, however it ends. A process that
    was forked after they were made has them already.

    Attributes:
        token: Token that identifies these rows on this host.
        arrays: Maps a name to its (num_rows, width) array.
        counter: (1,) int64 counter of the whole table.
    """

    def __init__(self, token: str, rows: dict[str, SharedRows]):
        self.token, self._rows = token, rows
        self.arrays = {name: shared.array for name, shared in rows.items() if name != _COUNTER}
        self.counter = rows[_COUNTER].array[0]

    @classmethod
    def create(cls, num_rows: int, columns: dict[str, SharedColumn], what: str, remedy: str) -> "SharedTable":
        """Make the arrays; PlacementError, before any memory is taken: they need more than is free here."""
        needed, free = table_bytes(num_rows, columns), psutil.virtual_memory().available
        if needed > free:
            raise PlacementError(
                f"{what}: {num_rows} rows need {format_bytes(needed)} of shared memory on this host, "
                f"{format_bytes(free)} are free: {remedy}"
            )
        rows = {name: SharedRows.create(num_rows, width, dtype) for name, (width, dtype) in columns.items()}
        rows[_COUNTER] = SharedRows.create(1, 1, np.int64)
        return cls(uuid.uuid4().hex, rows)

    @property
    def handle(self) -> tuple[str, dict[str, RowHandle]]:
        """What `attach` of another process of the host needs; good while this process lives."""
        return self.token, {name: shared.handle for name, shared in self._rows.items()}

    @classmethod
    def attach(cls, handle: tuple[str, dict[str, RowHandle]]) -> "SharedTable":
        """Map the arrays of another process; PlacementError: it has ended."""
        token, handles = handle
        return cls(token, {name: SharedRows.attach(one, write=True) for name, one in handles.items()})

    def close(self) -> None:
        """Let go of the arrays; others that map them keep them."""
        for shared in self._rows.values():
            shared.release()
        self._rows, self.arrays = {}, {}


def table_bytes(num_rows: int, columns: dict[str, SharedColumn]) -> int:
    """Return what the arrays of a table take."""
    return num_rows * sum(width * np.dtype(dtype).itemsize for width, dtype in columns.values())


def save_rows(
    folder: Path, arrays: dict[str, np.ndarray], share: Iterable[tuple[slice, slice]]
) -> list[dict[str, Any]]:
    """Write ranges of rows; a file has its name only when all of it is on the disk.

    Args:
        arrays: name to (num_rows, width).
        share: (ids, rows) of each range.

    Returns:
        One entry a file: name, array, start and stop (ids), crc.

    Raises:
        CheckpointError: the disk is full, or cannot be written to.
    """
    entries, unfinished = [], None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ids, rows in share:
            for array, values in arrays.items():
                stem = f"{array}-{ids.start:012d}-{ids.stop:012d}"
                unfinished = folder / f"{stem}.{os.getpid()}.part"
                file = ArrayFile(unfinished, values.dtype, values.shape[1:])
                for start in range(rows.start, rows.stop, CHUNK_ROWS):
                    file.append(values[start : min(start + CHUNK_ROWS, rows.stop)])
                file.close()
                name = f"{stem}-{file.crc:08x}.npy"
                os.replace(unfinished, folder / name)
                entries.append({"name": name, "array": array, "start": ids.start, "stop": ids.stop, "crc": file.crc})
        sync_folder(folder)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise CheckpointError(
            f"{folder}: rows cannot be written ({error.strerror or error}); the checkpoint before is kept; free "
            "space, or name another folder for checkpoints, and go on from the last one"
        ) from error
    return entries


def load_rows(
    folder: Path,
    saved: list[dict[str, Any]],
    arrays: dict[str, np.ndarray],
    share: list[tuple[slice, slice]],
    shape: tuple[int, int, str],
) -> None:
    """Read ranges of rows, whatever ranges they were written in.

    Args:
        saved: Entries of all ranks, each with num_nodes (or num_rows), dim, dtype and files.
        arrays: Maps a name to a (num_rows, width) array, filled in place. "rows" must have been saved; other arrays
            stay unchanged if they were not.
        share: (ids, rows) of each range to read.
        shape: The number, dim and dtype that the rows must have.

    Raises:
        PartitionStoreError: a file is missing or damaged, ids are missing, or the rows are of another shape.
    """
    check_shape(folder, saved, shape)
    files = [entry for one in saved for entry in one["files"]]
    for array, values in arrays.items():
        entries = [entry for entry in files if entry["array"] == array]
        if not entries and array != "rows":
            continue
        for ids, rows in share:
            _load_range(folder, entries, values, ids, rows)


def check_shape(folder: Path, saved: list[dict[str, Any]], shape: tuple[int | None, int, str]) -> None:
    """Raise PartitionStoreError unless saved rows have a number (None: any), a dim and a dtype."""
    for one in saved:
        count = None if shape[0] is None else one.get("num_rows", one["num_nodes"])
        given = (count, one["dim"], one["dtype"])
        if given != shape:
            raise PartitionStoreError(
                f"{folder}: holds {given[0]} rows of {given[1]} {given[2]}, the embedding has {shape[0]} of {shape[1]} "
                f"{shape[2]}: make it as it was when it was saved"
            )


def load_moved(
    folder: Path, entries: list[dict[str, Any]], values: np.ndarray, rows: slice, places: np.ndarray
) -> None:
    """Read a range of rows from where their nodes were; those of place -1 stay as they are.

    Args:
        folder, entries: As of `_load_range`.
        values: (num_rows, width) array, filled in place.
        rows: Of it.
        places: (num,) saved id of each.
    """
    block, found = np.array(values[rows]), places < 0
    for entry in entries:
        here = np.flatnonzero((places >= entry["start"]) & (places < entry["stop"]))
        if len(here):
            block[here] = _open(folder / entry["name"], entry, values)[places[here] - entry["start"]]
            found[here] = True
    if not found.all():
        raise PartitionStoreError(f"{folder}: row {places[np.argmin(found)]} was never saved")
    values[rows] = block


def _load_range(folder: Path, entries: list[dict[str, Any]], values: np.ndarray, ids: slice, rows: slice) -> None:
    found = 0
    for entry in entries:
        start, stop = max(ids.start, entry["start"]), min(ids.stop, entry["stop"])
        if start < stop:
            stored = _open(folder / entry["name"], entry, values)
            shift = rows.start - ids.start
            values[start + shift : stop + shift] = stored[start - entry["start"] : stop - entry["start"]]
            found += stop - start
    if found != ids.stop - ids.start:
        raise PartitionStoreError(
            f"{folder}: {ids.stop - ids.start - found} of the rows {ids.start} to {ids.stop} were never saved"
        )


def _open(path: Path, entry: dict[str, Any], values: np.ndarray) -> np.ndarray:
    if not path.is_file():
        raise PartitionStoreError(
            f"{path}: missing, and the checkpoint needs it; restore it, or take another checkpoint"
        )
    if checksum(path) != entry["crc"]:
        raise PartitionStoreError(f"{path}: damaged (its checksum differs); restore it, or take another checkpoint")
    return map_rows(path, values.dtype, (entry["stop"] - entry["start"], values.shape[1]))
