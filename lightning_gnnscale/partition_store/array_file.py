"""The arrays of a store on disk: plain .npy files that grow at their end or are filled by position."""

import mmap
import os
import zlib
from pathlib import Path

import numpy as np

HEADER_BYTES = 128  # fixed, so that the shape can be written last and the data stand aligned
_BLOCK_BYTES = 1 << 24


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the 128 bytes of a .npy header (format 1.0); its length does not depend on the shape."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    shape = tuple(int(size) for size in shape)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    head = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return head + text.ljust(HEADER_BYTES - 11).encode("latin1") + b"\n"


def little_endian(dtype: np.dtype) -> np.dtype:
    """Return the same dtype in little-endian byte order."""
    return np.dtype(dtype).newbyteorder("<")


class ArrayFile:
    """A .npy file in the making.

    Rows are appended (and their crc32 kept along), or written by position into a file of a known length. The header
    comes with `close`; until then the file has the right length of header, and zeros in it.

    Args:
        path: the file, created if it is missing.
        dtype: of the elements; stored little-endian.
        row_shape: shape of one row; () for a vector.
        num_rows, crc: what stands in the file already, or its whole length where rows are written by position;
            anything behind it is cut off.
    """

    def __init__(self, path: Path, dtype: np.dtype, row_shape: tuple[int, ...] = (), num_rows: int = 0, crc: int = 0):
        self.path = Path(path)
        self.dtype = little_endian(dtype)
        self.row_shape = tuple(row_shape)
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))
        self.num_rows, self.crc = num_rows, crc
        self._fd = -1
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, HEADER_BYTES + num_rows * self.row_bytes)

    def append(self, rows: np.ndarray) -> None:
        """Write rows behind those that stand there; rows: (count, *row_shape)."""
        data = self._bytes(rows)
        _write_all(self._fd, data, HEADER_BYTES + self.num_rows * self.row_bytes)
        self.crc = zlib.crc32(data, self.crc)
        self.num_rows += len(rows)

    def write_at(self, row: int, rows: np.ndarray) -> None:
        """Write rows from position `row` on; `crc` takes no notice of them."""
        _write_all(self._fd, self._bytes(rows), HEADER_BYTES + row * self.row_bytes)

    def sync(self) -> None:
        """Wait until what was written is on the disk itself."""
        sync_data(self._fd)

    def close(self) -> None:
        """Write the header, wait for the disk, close."""
        _write_all(self._fd, memoryview(npy_header(self.dtype, (self.num_rows, *self.row_shape))), 0)
        os.fsync(self._fd)
        self.release()

    def release(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self):
        self.release()  # a refused value must not hold the bytes of a file that is removed

    def _bytes(self, rows: np.ndarray) -> memoryview:
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        return memoryview(rows.reshape(-1).view(np.uint8))


def map_rows(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map the data behind a 128-byte header, read-only, as a plain array; zero elements need no file."""
    if 0 in shape:
        empty = np.empty(shape, dtype)
        empty.flags.writeable = False
        return empty
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=tuple(shape)))


def file_place(array: np.ndarray) -> tuple[Path, int] | None:
    """Return the file of a contiguous array that maps one, and where it begins there, bytes; None of any other."""
    if not array.flags.c_contiguous or array.size == 0:
        return None
    root = _mapping(array)
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    return Path(root.filename), root.offset + array.ctypes.data - root.ctypes.data


def advise_random(array: np.ndarray | None) -> None:
    """Tell the system that a mapped array is read at random: a fault then reads one page, and no 128 KiB around it.

    For arrays that memory does not hold; where it does, reading ahead fills the page cache sooner.
    """
    mapped = None if array is None else getattr(_mapping(array), "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def _mapping(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def checksum(path: Path, num_bytes: int | None = None) -> int:
    """Return the crc32 of a file's data (the header left out), of its first num_bytes where given."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(HEADER_BYTES)
        left = num_bytes if num_bytes is not None else os.fstat(file.fileno()).st_size - HEADER_BYTES
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(left, 1))))
        while left > 0:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                break
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


def sync_data(fd: int) -> None:
    """Wait until a file's data are on the disk."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)  # macOS has the latter alone


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], offset + done)
