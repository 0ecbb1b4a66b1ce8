"""The arrays of a store on disk: plain .npy files that grow at their end or are filled by position."""

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ..memory import free_memory_bytes
from ..system import MADV_RANDOM, sync_data

HEADER_BYTES = 128  # fixed, so that the shape can be written last and the data are aligned
_BLOCK_BYTES = 1 << 24
_CRC_ONE, _CRC_BYTE = 1 << 31, 1 << 23  # x^0 and x^8


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
    """A .npy file that is still being written.

    Rows are appended, or written by position into a file of known length. Either way the crc32 of each run of rows is
    updated as the run is written. `close` writes the header; until then zeros fill its place.

    Args:
        path: The file, created if it is missing.
        dtype: Dtype of the elements; stored little-endian.
        row_shape: Shape of one row; () for a vector.
        num_rows: Rows that the file already holds, or its full length where rows are written by position. Anything
            behind them is cut off.
        runs: (first row, end row, crc32) of each run that is already written.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        row_shape: tuple[int, ...] = (),
        num_rows: int = 0,
        runs: Iterable[Sequence[int]] = (),
    ):
        self.path = Path(path)
        self.dtype = little_endian(dtype)
        self.row_shape = tuple(row_shape)
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))
        self.num_rows = num_rows
        self.head_crc: int | None = None  # crc32 of the header, once it is written
        self._runs = {int(end): (int(first), int(crc)) for first, end, crc in runs}  # by the row behind each
        self._fd = -1
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, HEADER_BYTES + num_rows * self.row_bytes)

    def append(self, rows: np.ndarray) -> None:
        """Write rows behind those that are there; rows: (count, *row_shape)."""
        self.write_at(self.num_rows, rows)
        self.num_rows += len(rows)

    def write_at(self, row: int, rows: np.ndarray) -> None:
        """Write rows from position `row` on; the rows of one run come in order."""
        if len(rows) == 0:
            return
        data = self._bytes(rows)
        _write_all(self._fd, data, HEADER_BYTES + row * self.row_bytes)
        first, crc = self._runs.pop(row, (row, 0))
        self._runs[int(row) + len(rows)] = int(first), zlib.crc32(data, crc)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(first row, end row, crc32) of what has been written, ascending; runs that touch are joined."""
        joined: list[tuple[int, int, int]] = []
        for first, end, crc in sorted((first, end, crc) for end, (first, crc) in self._runs.items()):
            if joined and joined[-1][1] == first:
                begin, _, before = joined.pop()
                joined.append((begin, end, join_crc(before, crc, (end - first) * self.row_bytes)))
            else:
                joined.append((first, end, crc))
        return joined

    @property
    def crc(self) -> int:
        """crc32 of all rows, which have been written."""
        runs = self.runs
        if sum(end - first for first, end, _ in runs) != self.num_rows or len(runs) > 1:
            raise AssertionError(f"{self.path}: closed with rows that were never written")
        return runs[0][2] if runs else 0

    def sync(self) -> None:
        """Wait until what was written is on the disk itself."""
        sync_data(self._fd)

    def close(self) -> None:
        """Write the header, wait for the disk, close."""
        header = npy_header(self.dtype, (self.num_rows, *self.row_shape))
        _write_all(self._fd, memoryview(header), 0)
        self.head_crc = zlib.crc32(header)
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


def mapped_at_random(array: np.ndarray) -> np.ndarray:
    """Return an array whose rows are read in any order: a mapped one, where free memory does not hold it, mapped again.

    Each fault of that map reads one page. A fault of another reads ahead, by up to megabytes, what is let go of before
    it is used.

    Cost: none where twice the array's bytes are free, or it maps no file.
    """
    place = None if MADV_RANDOM is None or fits_twice(array.nbytes) else file_place(array)
    if place is None:
        return array
    path, offset = place
    again = np.memmap(path, dtype=array.dtype, mode="r", offset=offset, shape=array.shape)
    again._mmap.madvise(MADV_RANDOM)
    return np.asarray(again)


def fits_twice(num_bytes: int) -> bool:
    """Return whether free memory holds twice so many bytes: then the page cache keeps a file of them."""
    return 2 * num_bytes <= free_memory_bytes()


def file_place(array: np.ndarray) -> tuple[Path, int] | None:
    """Return the file of a contiguous array that maps one, and where it begins there, bytes; None of any other."""
    if not array.flags.c_contiguous or array.size == 0:
        return None
    root = _mapping(array)
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    return Path(root.filename), root.offset + array.ctypes.data - root.ctypes.data


def _mapping(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def checksum(path: Path, num_bytes: int | None = None, start: int = 0) -> int:
    """Return the crc32 of a file's data (the header left out), of num_bytes from `start` on where given."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(HEADER_BYTES + start)
        left = num_bytes if num_bytes is not None else os.fstat(file.fileno()).st_size - HEADER_BYTES - start
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(left, 1))))
        while left > 0:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                break
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


def join_crc(first: int, second: int, num_bytes: int) -> int:
    """Return the crc32 of two chunks of data, one behind the other, from the crc32 of each.

    Args:
        num_bytes: length of the second chunk.
    """
    return crc_joiner(num_bytes)(first, second)


def crc_joiner(num_bytes: int) -> Callable[[int, int], int]:
    """Return `join_crc` for second chunks of one length.

    Source: zlib's crc32_combine: the first checksum is multiplied by x^(8 num_bytes) modulo the polynomial.
    """
    power, base = _CRC_ONE, _CRC_BYTE
    while num_bytes:
        if num_bytes & 1:
            power = _crc_product(power, base)
        base = _crc_product(base, base)
        num_bytes >>= 1
    return lambda first, second: _crc_product(power, first) ^ second


def _crc_product(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2) modulo crc32's, lowest power in the highest bit."""
    product = 0
    while a:
        if a & _CRC_ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], offset + done)
