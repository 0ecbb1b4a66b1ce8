"""Neighbours of a store that lie coded on the disk, decoded where they are read; see `edge_code`."""

import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..errors import PartitionStoreError, disk_errors
from ..events import held_lock
from ..graph import id_dtype
from .array_file import HEADER_BYTES, ArrayFile, map_rows
from .edge_code import BLOCK, PADDING, decode, encode, id_bits
from .journal import Journal
from .manifest import REMEDY
from .planned_reads import read_once, read_ranges, read_slice

CODE, OFFSETS, PLAIN = "csc_code", "csc_code_offsets", "csc_indices"
EDGES = (PLAIN, CODE)  # one of which a store has
STEP = "edge_code"
_AT_ONCE = 1 << 22  # neighbours


class CodedNeighbors:
    """The `indices` of a store's `CSC` whose edges are coded: what is sliced, or read by position, is decoded.

    `np.asarray` decodes all, into a file beside the store that the processes of this machine share: for code that looks
    up single edges anywhere in the graph. It takes 4 or 8 bytes an edge of the disk, and is there for the next run.

    Args:
        root: Folder of the store.
        code, offsets: Its files, see `edge_code`.
        num_edges, num_nodes: Of the graph.
        digest: What distinguishes this store from others that were in the folder.
    """

    ndim = 1

    def __init__(self, root: Path, code: np.ndarray, offsets: np.ndarray, num_edges: int, num_nodes: int, digest: str):
        self._root, self._code, self._offsets, self._digest = root, code, offsets, digest
        self.dtype, self._bits, self._num = id_dtype(num_nodes), id_bits(num_nodes), num_edges
        self.itemsize, self.shape, self.nbytes = self.dtype.itemsize, (num_edges,), num_edges * self.dtype.itemsize

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, key) -> np.ndarray:
        """Return neighbours of a slice, or of (num,) positions in any order, newly decoded.

        Raises:
            PartitionStoreError: the code is damaged, or ends early.
        """
        if not isinstance(key, slice):
            key = np.asarray(key, np.int64)
            order = np.argsort(key, axis=None, kind="stable")
            ascending, out = key.reshape(-1)[order], np.empty(key.size, self.dtype)
            out[order] = self.read(ascending, ascending + 1)
            return out.reshape(key.shape)
        first, last, step = key.indices(self._num)
        if step != 1:
            return self[first : max(first, last)][::step] if step > 0 else self[:][key]
        if last <= first:
            return np.empty(0, self.dtype)
        begin, end = first // BLOCK, -(-last // BLOCK)
        offsets = np.array(self._offsets[begin : end + 1])
        code = np.empty(int(offsets[-1] - offsets[0]) + PADDING, np.uint8)
        read_slice(self._code[offsets[0] : offsets[-1]], code[:-PADDING])
        out = np.empty(min(end * BLOCK, self._num) - begin * BLOCK, self.dtype)
        self._decode(code, offsets - offsets[0], out)
        return out[first - begin * BLOCK : last - begin * BLOCK]

    def read(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return neighbours [begins[i], ends[i]) of each i, concatenated; the ranges ascend.

        Cost: planned reads of the blocks that hold them, each once, and their decoding.
        """
        begins, ends = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
        begins, ends = begins[ends > begins], ends[ends > begins]
        first, last = begins // BLOCK, -(-ends // BLOCK)
        opens = np.append(True, first[1:] > last[:-1])[: len(first)]  # else it goes on in the blocks before
        first, closes = first[opens], np.append(np.flatnonzero(opens)[1:] - 1, len(last) - 1)[: int(opens.sum())]
        last = last[closes]
        counts = last - first
        blocks = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        sizes = self._offsets[blocks + 1] - self._offsets[blocks]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        code = np.empty(int(offsets[-1]) + PADDING, np.uint8)
        read_ranges(self._code, self._offsets[first], self._offsets[last], code[:-PADDING])
        held = np.empty(len(blocks) * BLOCK, self.dtype)
        if len(blocks) and blocks[-1] == len(self._offsets) - 2:
            held = held[: len(held) - (-self._num % BLOCK)]
        self._decode(code, offsets, held)
        places = (np.searchsorted(blocks, begins // BLOCK) * BLOCK + begins % BLOCK) * self.itemsize
        return read_ranges(held, places, places + (ends - begins) * self.itemsize).view(self.dtype)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Return all, mapped from a file beside the store that is made once."""
        found = self._whole()
        return found if dtype is None or np.dtype(dtype) == found.dtype else found.astype(dtype)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all neighbours in order, some MiB at a time."""
        for first in range(0, self._num, _AT_ONCE):
            yield self[first : first + _AT_ONCE]

    def _decode(self, code: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
        if not decode(code, offsets, self._bits, out):
            raise PartitionStoreError(f"{self._root / f'{CODE}.npy'}: a block of neighbours is damaged; {REMEDY}")

    def _whole(self) -> np.ndarray:
        folder = self._root.parent
        if not os.access(folder, os.W_OK):
            folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_gnnscale_edges"
        path = folder / f"{self._root.name}.edges-{self._digest}.npy"
        if not self._num or not _is_whole(path, self.nbytes):
            remedy = "make space, or write the store again without edge_storage"
            with disk_errors(path, "written", remedy, PartitionStoreError):
                self._write(path)
        return map_rows(path, self.dtype, self.shape)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held_lock(path.with_name(f"{self._root.name}.edges.lock"), f"is decoding the edges of {self._root}"):
            if _is_whole(path, self.nbytes):
                return
            for old in path.parent.glob(f"{glob.escape(self._root.name)}.edges-*"):
                old.unlink(missing_ok=True)
            temporary = path.with_suffix(".tmp")
            try:
                file = ArrayFile(temporary, self.dtype)
                for block in self.blocks():
                    file.append(block)
                file.close()
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == HEADER_BYTES + num_bytes


def read_run(
    indices: np.ndarray | CodedNeighbors,
    first: int,
    last: int,
    spare: int = 0,
    allocate: Callable[..., np.ndarray] = np.empty,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a copy of neighbours [first, last) of a store's CSC, read once, and memory for as many ids of a part.

    Args:
        spare: How many more ids the memory is for; pages of theirs that are not written take none.
        allocate: Returns memory of a shape and dtype.

    Returns:
        (last - first,) neighbours, and (last - first + spare,) int32, which begins with them where they are int32.
    """
    if isinstance(indices, CodedNeighbors) or indices.dtype != np.int32:
        coded = isinstance(indices, CodedNeighbors)
        found = indices[first:last] if coded else read_once(indices[first:last])
        return found, allocate(last - first + spare, np.int32)
    memory = read_once(indices[first:last], spare, allocate)
    return memory[: last - first], memory


def read_runs(indices: np.ndarray | CodedNeighbors, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a copy of neighbours [begins[i], ends[i]) of each i, concatenated, by planned reads; the ranges ascend."""
    if isinstance(indices, CodedNeighbors):
        return indices.read(begins, ends)
    size = indices.itemsize
    return read_ranges(indices, np.asarray(begins) * size, np.asarray(ends) * size).view(indices.dtype)


def map_neighbors(journal: Journal, num_nodes: int, num_edges: int) -> np.ndarray | CodedNeighbors:
    """Map the neighbours that a writer has sorted, coded or not yet."""
    files = {**journal.state("rows")["files"], **journal.state(STEP).get("files", {})}
    code, offsets = (files.get(f"{name}.npy") for name in (CODE, OFFSETS))
    if code is None:
        return map_rows(journal.folder / f"{PLAIN}.npy", id_dtype(num_nodes), (num_edges,))
    mapped = (
        map_rows(journal.folder / f"{name}.npy", np.dtype(dtype), (entry[1],))
        for name, dtype, entry in ((CODE, np.uint8, code), (OFFSETS, np.int64, offsets))
    )
    return CodedNeighbors(journal.folder, *mapped, num_edges, num_nodes, "")


def code_neighbors(journal: Journal, num_nodes: int) -> None:
    """Code the neighbours that a writer has sorted, and delete them: a step of its journal.

    Cost: one read of them, at about 0.2 GB/s; a few MiB of memory.
    """
    rows = journal.state("rows")
    if not journal.is_done(STEP):
        indices = map_rows(journal.folder / f"{PLAIN}.npy", id_dtype(num_nodes), (rows["num_arcs"],))
        code_file = ArrayFile(journal.folder / f"{CODE}.npy", np.uint8)
        offsets_file = ArrayFile(journal.folder / f"{OFFSETS}.npy", np.int64)
        offsets_file.append(np.zeros(1, np.int64))
        for first in range(0, len(indices), _AT_ONCE):
            code, sizes = encode(np.ascontiguousarray(indices[first : first + _AT_ONCE]), id_bits(num_nodes))
            offsets_file.append(code_file.num_rows + np.cumsum(sizes))
            code_file.append(code)
        journal.finish(STEP, code_file, offsets_file)
    # The journal forgets them first.
    kept = {name: entry for name, entry in rows["files"].items() if name != f"{PLAIN}.npy"}
    if len(kept) < len(rows["files"]):
        journal.write("rows", **{**rows, "files": kept})
    (journal.folder / f"{PLAIN}.npy").unlink(missing_ok=True)
