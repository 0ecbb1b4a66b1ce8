"""Stores of earlier formats, brought to this one where they lie: compared whole, completed, and sealed.

Formats 2 and 3 stored the rows of halos as a CSR, and the degree of each halo node. What is stored in their place since
format 5 is derived from them and from the graph. Format 2 had no seal.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..errors import PartitionStoreError, disk_errors
from ..graph import CSC
from .array_file import HEADER_BYTES, ArrayFile, map_rows
from .csc_writer import MOST_DEGREE
from .halo_rows import HaloForm, count_halos, encode_halo, encode_halo_end, halo_of_rows
from .journal import store_folder, writer_lock
from .manifest import (
    FORMAT_VERSION,
    MANIFEST,
    OLDER_FORMATS,
    REMEDY,
    SOURCE,
    check_file,
    unsealed,
    write_manifest,
    wrong_field,
    wrong_files,
)
from .reader import PartitionStore
from .value_checks import least_value
from .verify import rises, verify_content

_HALO_FILES = ("halo_degree", "halo_indptr", "halo_indices", "halo_arc")
_BLOCK_ROWS = 1 << 20


def upgrade_store(root, lock_timeout_s: float = 0) -> int | None:
    """Bring a store of format 2 or 3 to the format of this version; its manifest is replaced last.

    Every file is compared with its checksum, and what is derived with the graph, before the store counts as one of this
    version. A kill leaves the old store, and the same call does it anew.

    Args:
        root: Folder of the store.
        lock_timeout_s: How long to wait for a writer of the same root.

    Returns:
        The format that it had; None where it is of no older format.

    Raises:
        PartitionStoreError: the store is damaged, or its folder cannot be written to.

    Cost: three reads of the store, and a write of a byte a node and of the code of the halos' rows.
    """
    root = store_folder(root)
    if _format(root) not in OLDER_FORMATS:
        return None
    remedy = "make room, or copy the store to where it can be"
    with disk_errors(root, "written", remedy, PartitionStoreError), writer_lock(root, lock_timeout_s):
        version = _format(root)
        if version not in OLDER_FORMATS:
            return None  # another process has been faster
        old, source = _read(root / MANIFEST, version), _read(root / SOURCE, version)
        source.pop("manifest", None)
        new = _Upgrade(root, old).manifest()
        verify_content(PartitionStore(root, new, verify=False))
        write_manifest(root, new, source)
        for name in set(old["files"]) - set(new["files"]):
            (root / f"{name}.npy").unlink(missing_ok=True)
    return version


def _format(root: Path) -> int | None:
    """Return the format that a manifest states; None where there is none to be read: opening says what is wrong."""
    try:
        return json.loads((root / MANIFEST).read_bytes())["format_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _read(path: Path, version: int) -> dict:
    try:
        content = path.read_bytes()
        if version == 2 and path.name == MANIFEST:
            return json.loads(content)
        # The record of the input is sealed in a store of format 2, too, if an upgrade was cut off behind it.
        return unsealed(content) if version > 2 or b'"seal"' in content else {**json.loads(content)}
    except (OSError, ValueError, TypeError, RecursionError):
        raise PartitionStoreError(f"{path}: damaged; {REMEDY}") from None


class _Upgrade:
    """Writes the files that an older store lacks."""

    def __init__(self, root: Path, old: dict):
        given = {**old, "format_version": FORMAT_VERSION, "feature_storage": old.get("feature_storage")}
        self.root, self.old = root, {"least_edge_weight": None, **given}
        wrong = wrong_field(self.old)
        for name in ("csc_indptr", "csc_indices", "part_offsets", "halo_offsets", "halo_nodes", *_HALO_FILES[1:3]):
            wrong = wrong or (None if name in old["files"] else f"files: {name} is missing")
        self._refuse(wrong)
        for name, entry in old["files"].items():
            check_file(root, name, entry)
        self.csc = CSC(self._map("csc_indptr"), self._map("csc_indices"))
        self.nodes, self.part_offsets = self._map("halo_nodes"), self._map("part_offsets")
        self.offsets, self.rows = self._map("halo_offsets"), CSC(self._map("halo_indptr"), self._map("halo_indices"))
        pointers = {"csc_indptr": (*self.csc, self.old["num_nodes"]), "halo_indptr": (*self.rows, len(self.nodes))}
        pointers["part_offsets"] = self.part_offsets, self.csc.indptr[1:], self.old["num_parts"]
        pointers["halo_offsets"] = self.offsets, self.nodes, self.old["num_parts"]
        for name, (values, of, count) in pointers.items():
            fits = values.dtype == np.int64 and values.shape == (count + 1,) and rises(values, 0, len(of))
            self._refuse(None if fits else f"files: {name} does not rise to {len(of)}")

    def manifest(self) -> dict:
        """Write the files, and return the manifest of the store with them."""
        files, made = self.old["files"], {}
        form = HaloForm(rows=not self.old["symmetric"], places="halo_arc" in files)
        made["in_degree"] = self._write("in_degree", np.uint8, self._degrees())
        if form.stores_any:
            ends = [0]
            made["halo_code"] = self._write("halo_code", np.uint8, self._codes(form, ends))
            made["halo_code_offsets"] = self._write("halo_code_offsets", np.int64, [np.array(ends)])
        if self.old["pack_halo"]:
            count = np.zeros(self.old["num_nodes"], np.uint8)
            if len(self.nodes) and not 0 <= self.nodes.min() <= self.nodes.max() < len(count):
                self._refuse("files: halo_nodes names nodes that do not exist")
            count_halos(self.nodes, count)
            made["halo_count"] = self._write("halo_count", np.uint8, [count])
            in_order = (np.arange(size) for size in np.diff(self.offsets))
            made["halo_places"] = self._write("halo_places", np.int32, in_order)
        dropped = {*_HALO_FILES, *(() if self.old["pack_halo"] else ("halo_nodes",))}
        new = {**self.old, "files": {name: entry for name, entry in files.items() if name not in dropped} | made}
        if "edge_weight" in files and new["least_edge_weight"] is None:
            new["least_edge_weight"] = least_value(self._map("edge_weight"))
        self._refuse(wrong_field(new) or wrong_files(new))
        return new

    def _degrees(self) -> Iterable[np.ndarray]:
        for begin in range(0, self.old["num_nodes"], _BLOCK_ROWS):
            yield np.minimum(np.diff(self.csc.indptr[begin : begin + _BLOCK_ROWS + 1]), MOST_DEGREE)

    def _codes(self, form: HaloForm, ends: list[int]) -> Iterable[np.ndarray]:
        """Encode the halo rows of one part after another, and append where each ends."""
        places = self._map("halo_arc") if form.places else np.empty(0, np.int64)
        for part in range(self.old["num_parts"]):
            first, last = self.offsets[part : part + 2].tolist()
            held = halo_of_rows(self.csc, *self.part_offsets[part : part + 2])
            if held is None or not np.array_equal(held.nodes, self.nodes[first:last]):
                self._refuse(f"files: halo_nodes of part {part} are not what the graph says")
            begin, end = self.rows.indptr[[first, last]].tolist()
            node = np.repeat(held.nodes, np.diff(self.rows.indptr[first : last + 1]))
            cross = node, self.rows.indices[begin:end].astype(np.int32), places[begin:end]
            code, state = encode_halo(form, held.nodes, held, cross, (0, 0))
            tail = encode_halo_end(form, len(held), state)
            ends.append(ends[-1] + len(code) + len(tail))
            yield code
            yield tail

    def _write(self, name: str, dtype: type, blocks: Iterable[np.ndarray]) -> dict:
        """Write a file, and return its entry in the manifest."""
        file = ArrayFile(self.root / f"{name}.npy", dtype)
        try:
            for block in blocks:
                file.append(block)
            file.close()
        finally:
            file.release()
        size = HEADER_BYTES + file.num_rows * file.row_bytes
        descr = np.lib.format.dtype_to_descr(file.dtype)
        return {"dtype": descr, "shape": [file.num_rows], "bytes": size, "crc32": file.crc}

    def _map(self, name: str) -> np.ndarray:
        entry = self.old["files"][name]
        return map_rows(self.root / f"{name}.npy", np.dtype(entry["dtype"]), tuple(entry["shape"]))

    def _refuse(self, wrong: str | None) -> None:
        if wrong:
            raise PartitionStoreError(f"{self.root / MANIFEST}: damaged ({wrong}); {REMEDY}")
