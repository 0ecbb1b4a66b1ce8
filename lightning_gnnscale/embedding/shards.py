"""Rows on disk: each rank writes its own ranges, under names that hold their checksums, and reads any others."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, PartitionStoreError
from ..partition_store.array_file import ArrayFile, checksum, map_rows
from ..partition_store.manifest import sync_folder

CHUNK_ROWS = 1 << 16


def save_rows(
    folder: Path, arrays: dict[str, np.ndarray], share: Iterable[tuple[slice, slice]]
) -> list[dict[str, Any]]:
    """Write ranges of rows; a file has its name only when all of it is on the disk.

    Args:
        folder: created if it is missing.
        arrays: name to (num_rows, width).
        share: (ids, rows) of each range.

    Returns:
        One entry a file: name, array, start and stop (ids), crc.

    Raises:
        CheckpointError: the disk is full, or cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for ids, rows in share:
        for array, values in arrays.items():
            stem = f"{array}-{ids.start:012d}-{ids.stop:012d}"
            unfinished = folder / f"{stem}.{os.getpid()}.part"
            try:
                file = ArrayFile(unfinished, values.dtype, values.shape[1:])
                for start in range(rows.start, rows.stop, CHUNK_ROWS):
                    file.append(values[start : min(start + CHUNK_ROWS, rows.stop)])
                file.close()
                name = f"{stem}-{file.crc:08x}.npy"
                os.replace(unfinished, folder / name)
            except OSError as error:
                unfinished.unlink(missing_ok=True)
                raise CheckpointError(
                    f"{folder}: rows cannot be written ({error.strerror or error}); the checkpoint before stands; free "
                    "space, or name another folder for checkpoints, and go on from the last one"
                ) from error
            entries.append({"name": name, "array": array, "start": ids.start, "stop": ids.stop, "crc": file.crc})
    sync_folder(folder)
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
        folder: Folder of the files.
        saved: Entries of all ranks, each with num_nodes, dim, dtype and files.
        arrays: Maps a name to a (num_rows, width) array, filled in place. "rows" must have been saved; other arrays
            stay unchanged if they were not.
        share: (ids, rows) of each range to read.
        shape: The num_nodes, dim and dtype that the rows must have.

    Raises:
        PartitionStoreError: a file is missing or damaged, ids are missing, or the rows are of another shape.
    """
    for one in saved:
        given = (one["num_nodes"], one["dim"], one["dtype"])
        if given != shape:
            raise PartitionStoreError(
                f"{folder}: holds {given[0]} rows of {given[1]} {given[2]}, the embedding has {shape[0]} of {shape[1]} "
                f"{shape[2]}: make it as it was when it was saved"
            )
    files = [entry for one in saved for entry in one["files"]]
    for array, values in arrays.items():
        entries = [entry for entry in files if entry["array"] == array]
        if not entries and array != "rows":
            continue
        for ids, rows in share:
            _load_range(folder, entries, values, ids, rows)


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
