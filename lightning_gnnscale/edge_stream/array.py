"""Edges in arrays: .npy and raw .bin files, and arrays or tensors in memory."""

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..errors import UNREADABLE, EdgeStreamError, one_line_of, short
from ..foreign import is_pair_of_arrays
from ..system import whole_file
from ..values import as_array, of_tensor
from .options import StreamOptions
from .read_ahead import ChunkPool
from .stream import EdgeStream, backing_file, file_identity, value_range

BIN_LAYOUTS = ("pairs", "columns")
_SLICE_EDGES = 1 << 17  # small enough to stay in the cache between reading and splitting


class ArrayStream(EdgeStream):
    """Edges of an array in memory.

    Contiguous, writable int32 and int64 columns are yielded as views; all else is copied, a chunk at a time.

    Args:
        name: for messages.
        array: (2, num_edges) or (num_edges, 2) integers, or a pair of (num_edges,) arrays; (2, 2) is read as
            (2, num_edges).
        options: the options of all streams.

    Raises:
        EdgeStreamError: not integers, or of another shape.
    """

    seekable = True

    def __init__(self, name: str, array, options: StreamOptions):
        self._src, self._dst = _columns(name, array)
        self._views = not options.relabel and _is_plain(self._src) and _is_plain(self._dst)
        dtype = self._src.dtype if self._views else options.out_dtype(self._src.dtype)
        super().__init__(name, dtype, options, len(self._src))

    def source_files(self) -> list[Path]:
        return sorted({path for path in map(backing_file, (self._src, self._dst)) if path is not None})

    def _identity(self) -> dict:
        digest = hashlib.sha256()
        for start in range(0, self.num_edges, _SLICE_EDGES):
            for end in (self._src, self._dst):
                digest.update(end[start : start + _SLICE_EDGES].astype("<i8").tobytes())
        return {"array": digest.hexdigest(), "num_edges": self.num_edges}

    def _blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(first_edge, self.num_edges, _SLICE_EDGES):
            part = slice(start, start + _SLICE_EDGES)
            yield self._native(self._src[part]), self._native(self._dst[part])

    def _native(self, values: np.ndarray) -> np.ndarray:
        return native_ids(self.name, values, self.node_ids is not None)

    def _ready_chunks(self, first_edge: int, buffers: ChunkPool) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        if not self._views:
            yield from super()._ready_chunks(first_edge, buffers)
            return
        for start in range(first_edge, self.num_edges, self.chunk_edges):
            part = slice(start, start + self.chunk_edges)
            src, dst = self._src[part], self._dst[part]
            low, high = value_range(src, dst)
            self._check(src, dst, low, high, start)
            yield src, dst, int(high)


class ArrayFileStream(EdgeStream):
    """Edges of a file of fixed-width integers, read in chunks: nothing is mapped, and only the chunks are held.

    Args:
        path: the file.
        id_type: dtype of the ids in the file.
        num_edges: edges in it.
        pairs: True where src and dst alternate, False where all src come before all dst.
        offset_bytes: position of the first id.
        options: the options of all streams.
    """

    seekable = True

    def __init__(self, path: Path, id_type: np.dtype, num_edges: int, pairs: bool, offset_bytes: int, options):
        super().__init__(str(path), options.out_dtype(id_type), options, num_edges)
        self._path = path
        self._id_type = id_type
        self._pairs = pairs
        self._offset_bytes = offset_bytes

    def source_files(self) -> list[Path]:
        return [Path(self._path)]

    def _identity(self) -> dict:
        shape = {"dtype": self._id_type.str, "pairs": self._pairs, "offset": self._offset_bytes}
        return {"file": file_identity(self._path), **shape}

    def _blocks(self, first_edge: int) -> Iterator:
        width = self._id_type.itemsize
        scratch = np.empty((2, _SLICE_EDGES), self._id_type)
        with open(self._path, "rb", buffering=0) as file:
            for start in range(first_edge, self.num_edges, _SLICE_EDGES):
                length = min(_SLICE_EDGES, self.num_edges - start)
                if self._pairs:
                    pairs = scratch.reshape(-1)[: 2 * length]
                    self._read(file, self._offset_bytes + 2 * start * width, pairs, start)
                    yield self._native(pairs).reshape(length, 2)
                else:
                    src, dst = scratch[0, :length], scratch[1, :length]
                    self._read(file, self._offset_bytes + start * width, src, start)
                    self._read(file, self._offset_bytes + (self.num_edges + start) * width, dst, start)
                    yield self._native(src), self._native(dst)

    def _native(self, values: np.ndarray) -> np.ndarray:
        return native_ids(self.name, values, self.node_ids is not None)

    def _read(self, file, position: int, out: np.ndarray, edge: int) -> None:
        file.seek(position)
        view = memoryview(out).cast("B")
        while len(view):
            count = file.readinto(view)
            if not count:
                raise EdgeStreamError(f"{self.name}: edge {edge}: the file ends before its {self.num_edges} edges do")
            view = view[count:]


def load_npz_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return all arrays of an .npz file, after comparing every byte with the file's checksums.

    Raises:
        ValueError: the file is damaged or cannot be read, or holds Python objects, which are never unpickled.
    """
    try:
        with zipfile.ZipFile(path) as members:
            if bad := members.testzip():  # numpy reads as much as a header announces, and does not check the rest
                raise ValueError(f"the checksum of {bad} differs")
        with np.load(path, allow_pickle=False) as saved:
            return {name: saved[name] for name in saved.files}
    except UNREADABLE as error:
        told = one_line_of(error)
        raise ValueError(f"{path}: damaged, cut short or not an .npz file of arrays: {told}") from error


def map_npz_member(path: Path, name: str, extracted: Callable[[], Path]) -> np.memmap | None:
    """Return an array of an .npz, mapped in place, or None where it has no such array.

    A compressed one is written once, to the .npy whose path `extracted` returns, and mapped there.

    Raises:
        ValueError: the archive is damaged, or holds something else under that name.
    """
    try:
        with zipfile.ZipFile(path) as members:
            if f"{name}.npy" not in members.namelist():
                return None
            entry = members.getinfo(f"{name}.npy")
            if entry.compress_type == zipfile.ZIP_STORED:
                with open(path, "rb") as file:
                    file.seek(entry.header_offset + 26)
                    name_bytes, extra_bytes = np.frombuffer(file.read(4), "<u2").tolist()
                    file.seek(entry.header_offset + 30 + name_bytes + extra_bytes)
                    shape, fortran, dtype = _npy_header(file)
                    order = "F" if fortran else "C"
                    return np.memmap(path, dtype, "r", file.tell(), shape, order)
            target = extracted()
            if not target.is_file():
                with members.open(entry) as source, whole_file(target) as file:
                    shutil.copyfileobj(source, file, 1 << 20)  # it compares the checksum at its end
        return np.load(target, mmap_mode="r")
    except UNREADABLE as error:
        raise ValueError(f"{name}: damaged, cut short or not an array: {one_line_of(error)}") from error


def _npy_header(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read (shape, Fortran order, dtype) of the .npy that begins here."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read_header = np.lib.format.read_array_header_2_0
    return read_header(file)


def write_npy_header(file, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write the head of a .npy whose values follow, in C order."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def native_ids(name: str, values: np.ndarray, keep_uint64: bool) -> np.ndarray:
    """Return ids as contiguous int32 or int64 of this machine, or, for relabelling, as uint64 too."""
    if _is_plain(values):
        return values
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        if keep_uint64:
            return values.astype(np.uint64)
        if len(values) and values.max() > np.iinfo(np.int64).max:
            raise EdgeStreamError(f"{name}: id {values.max()} does not fit int64; pass relabel=True to number such ids")
    dtype = np.int32 if np.can_cast(values.dtype, np.int32) else np.int64
    return np.array(values, dtype=dtype, order="C")


def _is_plain(array: np.ndarray) -> bool:
    """Whether the array has the form that compiled loops take."""
    flags = array.flags
    native = array.dtype in (np.dtype(np.int32), np.dtype(np.int64)) and array.dtype.isnative
    return native and flags.c_contiguous and flags.aligned and flags.writeable


def _columns(name: str, array) -> tuple[np.ndarray, np.ndarray]:
    """Return two (num_edges,) views."""
    if is_pair_of_arrays(array):
        src, dst = (_integers(name, end) for end in array)
        if src.ndim != 1 or src.shape != dst.shape or src.dtype != dst.dtype:
            got = " and ".join(f"{end.dtype} {end.shape}" for end in (src, dst))
            raise EdgeStreamError(f"{name}: src and dst must be (num_edges,) arrays of one dtype and length, got {got}")
        return src, dst
    array = _integers(name, array)
    if _is_pairs(name, array.shape):
        array = array.T
    return array[0], array[1]


def _is_pairs(name: str, shape: tuple[int, ...]) -> bool:
    """Whether rows are edges (True) or ends (False)."""
    if len(shape) == 2 and 2 in shape:
        return shape[0] != 2
    raise EdgeStreamError(f"{name}: edges must have the shape (2, num_edges) or (num_edges, 2), got {shape}")


def _integers(name: str, array) -> np.ndarray:
    array = np.asarray(of_tensor(array))
    if array.dtype == object:
        array = as_array(name, array)
    _check_integers(name, array.dtype)
    return array


def _check_integers(name: str, dtype: np.dtype) -> None:
    if dtype.kind in "iu":
        return
    if dtype.kind in "fc":
        remedy = "node ids are whole numbers: convert them with .astype('int64'), tensors with .long()"
    else:
        remedy = "give such ids as text or Parquet with relabel=True"
    raise EdgeStreamError(f"{name}: edges must be integers, got {dtype}; {remedy}")


def open_array(source, options: StreamOptions) -> ArrayStream:
    """Stream a (2, num_edges) or (num_edges, 2) array or tensor in memory, or a pair of (num_edges,) ones."""
    kind = "edge arrays" if isinstance(source, tuple | list) else type(source).__name__
    return ArrayStream(kind, source, options)


def open_npy(path: Path, options: StreamOptions) -> ArrayFileStream:
    """Stream a .npy file of integers, (2, num_edges) or (num_edges, 2), C or Fortran order."""
    size = path.stat().st_size
    if size == 0:
        raise EdgeStreamError(f"{path}: the file is empty")
    try:
        with open(path, "rb") as file:
            shape, fortran_order, dtype = _npy_header(file)
            offset = file.tell()
    except UNREADABLE as error:
        raise EdgeStreamError(f"{path}: damaged, or not a .npy file: {one_line_of(error)}") from error
    _check_integers(str(path), dtype)
    rows_are_edges = _is_pairs(str(path), shape)
    num_edges = shape[0] if rows_are_edges else shape[1]
    if min(shape) == 0:
        raise EdgeStreamError(f"{path}: the file holds no edges")
    need = offset + 2 * num_edges * dtype.itemsize
    if size < need:
        raise EdgeStreamError(f"{path}: cut short: {num_edges} edges need {need} bytes, the file has {size}")
    return ArrayFileStream(path, dtype, num_edges, rows_are_edges != fortran_order, offset, options)


def open_bin(path: Path, options: StreamOptions, dtype=None, bin_layout: str = "pairs") -> ArrayFileStream:
    """Stream a raw file of integers.

    Args:
        path: the file; its size must be a multiple of two ids.
        options: the options of all streams.
        dtype: integer dtype of the file; None: int32, refused where the file looks like int64.
        bin_layout: "pairs" (src, dst, src, dst, ...) or "columns" (all src, then all dst).
    """
    if bin_layout not in BIN_LAYOUTS:
        raise ValueError(f"edge_stream.bin_layout must be one of {', '.join(BIN_LAYOUTS)}, got {short(bin_layout)}")
    try:
        id_type = np.dtype("int32" if dtype is None else dtype)
    except TypeError:
        id_type = None
    if id_type is None or id_type.kind not in "iu":
        raise ValueError(f"edge_stream.dtype must be an integer dtype such as int32 or int64, got {short(dtype)}")
    size = path.stat().st_size
    if size == 0:
        raise EdgeStreamError(f"{path}: the file is empty")
    edge_bytes = 2 * id_type.itemsize
    if size % edge_bytes:
        raise EdgeStreamError(
            f"{path}: cut short after {size // edge_bytes} edges: {size} bytes is not a multiple of {edge_bytes}, "
            f"an edge of two {id_type.name} ids; pass dtype= if the ids have another width"
        )
    if dtype is None:
        words = np.fromfile(path, np.int32, count=4096)
        if len(words) >= 4 and not words[1::2].any():
            raise EdgeStreamError(f"{path}: looks like 64-bit ids: pass dtype='int64', or dtype='int32' if it is not")
    return ArrayFileStream(path, id_type, size // edge_bytes, bin_layout == "pairs", 0, options)
