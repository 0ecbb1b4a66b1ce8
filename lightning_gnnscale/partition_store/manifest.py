"""The manifest of a store: what files there are, of what shape, with what checksum. It is written last."""

import json
import os
from pathlib import Path

import numpy as np

from ..errors import PartitionStoreError
from .array_file import HEADER_BYTES, checksum, little_endian

FORMAT_VERSION = 2
CODED_VERSION = 3  # of a store whose feature rows are codes: a reader of version 2 would take them for numbers
MANIFEST = "manifest.json"
REMEDY = "write the store again with overwrite=True, or restore the file"
SOURCE = "source.json"  # the fingerprint of the input: apart, since it tells files apart that hold the same graph


def describe_files(folder: Path) -> dict[str, dict]:
    """Return dtype, shape and checksum of every .npy file in a folder, by name.

    Cost: one read of all files, about 3 GB/s from the page cache.
    """
    entries = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode=None if path.stat().st_size == HEADER_BYTES else "r")
        entries[path.stem] = {
            "dtype": np.lib.format.dtype_to_descr(little_endian(array.dtype)),
            "shape": list(array.shape),
            "bytes": path.stat().st_size,
            "crc32": checksum(path),
        }
    return entries


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file so that it is either whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_manifest(root: Path) -> dict:
    """Return the manifest of a finished store whose files have the sizes it states.

    Raises:
        PartitionStoreError: nothing is there, the store is unfinished, of another version, or a file does not fit.
    """
    root = Path(root)
    if not (root / MANIFEST).is_file():
        raise PartitionStoreError(_what_is_missing(root))
    try:
        manifest = json.loads((root / MANIFEST).read_text())
        version = manifest["format_version"]
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PartitionStoreError(f"{root / MANIFEST}: damaged; write the store again with overwrite=True") from None
    if version not in (FORMAT_VERSION, CODED_VERSION):
        raise PartitionStoreError(
            f"{root}: store of format {version}, this version reads {FORMAT_VERSION} and {CODED_VERSION};"
            " write it again with overwrite=True, or use the version that wrote it"
        )
    for name, wanted in sizes.items():
        path = root / f"{name}.npy"
        size = path.stat().st_size if path.is_file() else None
        if size != wanted:
            found = "is missing" if size is None else f"has {size} bytes instead of {wanted}"
            raise PartitionStoreError(f"{path}: {found}; {REMEDY}")
    return manifest


def read_source(root: Path) -> dict:
    """Return the record of a store's input: its fingerprint, and the checksum of part_id; {} if it is not there."""
    try:
        source = json.loads((Path(root) / SOURCE).read_text())
    except (OSError, ValueError):
        return {}
    return source if isinstance(source, dict) else {}


def _what_is_missing(root: Path) -> str:
    partial = root.with_name(root.name + ".partial")
    if partial.is_dir():
        return (
            f"{root}: the store is not finished ({partial} holds what is done);"
            " run the command that writes it again: it goes on from there"
        )
    if root.is_dir():
        return f"{root}: no {MANIFEST} in this folder, so it is no partition store; check the path"
    return f"{root}: no such partition store; make one with write_partition_store or `gnnscale partition`"
