"""Rows with the preferred neighbours first: in memory for a part, in files beside the store for a whole graph."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ..errors import PartitionStoreError
from ..events import held_lock
from ..graph import CSC
from ..partition_store.array_file import HEADER_BYTES, ArrayFile, map_rows, npy_header
from ..partition_store.manifest import sync_folder
from ..triton_kernels.sample_neighbors import SplitRows, split_range, split_rows
from .locality import LocalityBias

FOLDER = "locality"  # under the root of a store
_FORMAT = "1"  # part of a file's name: files of another format are not looked at
_BLOCK_EDGES = 1 << 22


class PreferredRows:
    """The rows that each hop of a sampler reads, split at the first need; may be asked by several threads.

    Args:
        graph: a `PartGraph`, or a `WholeGraph` (whose `root` and `fingerprint` say what store it lies in).
        locality: what is preferred.
        num_hops: hops of the sampler.
    """

    def __init__(self, graph: Any, locality: LocalityBias, num_hops: int):
        self._graph, self._locality, self._num_hops = graph, locality, num_hops
        self._sets: list[np.ndarray] | None = None
        self._rows: list[SplitRows] | None = None
        self._lock = Lock()

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=Lock())

    def split(self, with_position: bool) -> list[SplitRows]:
        """Return the split rows of each hop, first hop first; those with the positions of edges serve both kinds.

        Raises:
            PlacementError: the placement was made for another store.
            PartitionStoreError: index files cannot be written.
        """
        with self._lock:
            if self._sets is None:
                self._sets = self._locality.neighbor_sets(self._graph, self._num_hops)
            if self._rows is None or (with_position and self._rows[0].position is None):
                self._rows = [self._split(nodes, with_position) for nodes in self._sets]
            return self._rows

    def _split(self, nodes: np.ndarray, with_position: bool) -> SplitRows:
        csc = CSC(np.asarray(self._graph.csc.indptr), np.asarray(self._graph.csc.indices))
        folder = _index_folder(self._graph, self._locality)
        if folder is None or csc.num_edges == 0:
            return split_rows(csc, _as_mask(nodes, csc.num_rows), with_position)
        return stored_split_rows(csc, nodes, folder, self._graph.fingerprint, with_position)


def stored_split_rows(
    csc: CSC, nodes: np.ndarray, folder: str | os.PathLike, fingerprint: str = "", with_position: bool = False
) -> SplitRows:
    """Return split rows as memory maps of files in a folder; missing files are written first.

    Each file appears at once and complete, under a name that follows from the graph and the set. Two processes that
    want the same file wait for each other. What a killed process left behind is written again.

    Args:
        csc: The graph, as arrays or memory maps.
        nodes: (num,) ascending ids, the set Q.
        folder: Folder of the files; created if it is missing.
        fingerprint: Fingerprint of the graph; "": a digest of the CSC takes its place.
        with_position: Whether the positions of edges are kept too, in a file of their own.

    Raises:
        PartitionStoreError: the files cannot be written.

    Cost: once for each set, one read of the edges and a write of as many bytes (as many again for positions); memory
        for a block of edges and one byte a node.
    """
    folder = Path(folder)
    stem = folder / _digest(csc, nodes, fingerprint)
    dtypes = {"indices": csc.indices.dtype, "num_inside": np.dtype(np.int32), "position": np.dtype(np.int32)}
    lengths = {"indices": csc.num_edges, "num_inside": csc.num_rows, "position": csc.num_edges}
    wanted = ["indices", "num_inside", *(["position"] if with_position else [])]

    def missing() -> list[str]:
        return [name for name in wanted if not _stands(_path(stem, name), dtypes[name], lengths[name])]

    if missing():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with held_lock(f"{stem}.lock", f"is writing an index of preferred neighbours to {folder}"):
                if left := missing():  # the last holder of the lock may have written them
                    _write(csc, _as_mask(nodes, csc.num_rows), stem, {name: dtypes[name] for name in left})
        except OSError as error:
            raise PartitionStoreError(
                f"{folder}: the index of preferred neighbours cannot be written ({error}): make space, or give "
                "LocalityBias a folder="
            ) from error
    maps = {name: map_rows(_path(stem, name), dtypes[name], (lengths[name],)) for name in wanted}
    return SplitRows(maps["indices"], maps["num_inside"], maps.get("position"))


def _index_folder(graph: Any, locality: LocalityBias) -> Path | None:
    """Return where a graph's index lies; None: in memory, for parts and for graphs that are in no store."""
    if not hasattr(graph, "fingerprint"):
        return None
    if locality.folder is not None:
        return Path(locality.folder)
    return None if graph.root is None else Path(graph.root) / FOLDER


def _as_mask(nodes: np.ndarray, num_nodes: int) -> np.ndarray:
    mask = np.zeros(num_nodes, np.bool_)
    mask[nodes] = True
    return mask


def _digest(csc: CSC, nodes: np.ndarray, fingerprint: str) -> str:
    """Return the stem of the files of one graph and one set."""
    digest = hashlib.sha256(f"{_FORMAT} {csc.num_rows} {csc.num_edges} {csc.indices.dtype} {fingerprint} ".encode())
    if not fingerprint:
        for array in csc:
            digest.update(np.ascontiguousarray(array).view(np.uint8))
    digest.update(np.ascontiguousarray(nodes, np.int64).view(np.uint8))
    return digest.hexdigest()[:24]


def _path(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}.{name}.npy")


def _stands(path: Path, dtype: np.dtype, length: int) -> bool:
    """Whether a whole file of this dtype and length is there."""
    if not path.is_file() or path.stat().st_size != HEADER_BYTES + length * dtype.itemsize:
        return False
    with open(path, "rb") as file:
        return file.read(HEADER_BYTES) == npy_header(dtype, (length,))


def _write(csc: CSC, inside: np.ndarray, stem: Path, dtypes: dict[str, np.dtype]) -> None:
    """Write the named arrays in one pass over the edges; each gets its name when it is on the disk."""
    unfinished = {name: stem.with_name(f"{stem.name}.{name}.partial") for name in dtypes}
    files = {name: ArrayFile(unfinished[name], dtypes[name]) for name in dtypes}
    try:
        for begin, end in _row_blocks(csc.indptr):
            base = int(csc.indptr[begin])
            num_edges = int(csc.indptr[end]) - base
            lengths = {"indices": num_edges, "position": num_edges, "num_inside": end - begin}
            kinds = {"indices": csc.indices.dtype, "position": np.int32, "num_inside": np.int32}
            block = {name: np.empty(lengths[name] if name in files else 0, kinds[name]) for name in lengths}
            split_range(
                csc.indptr, csc.indices, inside, begin, end, base, block["indices"], block["position"],
                block["num_inside"],
            )  # fmt: skip
            for name, file in files.items():
                file.append(block[name])
        for name, file in files.items():
            file.close()
            os.replace(unfinished[name], _path(stem, name))
        sync_folder(stem.parent)
    finally:
        for file in files.values():
            file.release()
        for path in unfinished.values():  # there where the disk was full
            path.unlink(missing_ok=True)


def _row_blocks(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of consecutive rows with at most `_BLOCK_EDGES` edges, or of one row with more."""
    begin, num_rows = 0, len(indptr) - 1
    while begin < num_rows:
        end = int(np.searchsorted(indptr, indptr[begin] + _BLOCK_EDGES, side="right")) - 1
        end = min(max(end, begin + 1), num_rows)
        yield begin, end
        begin = end
