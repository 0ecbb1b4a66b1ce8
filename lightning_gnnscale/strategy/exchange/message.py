"""Messages: rows of bytes for each process, with a bitmap of those that are there where some may be missing."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...triton_kernels.quantize_rows import decode_rows, encode_rows
from ...triton_kernels.quantize_rows import row_bytes as quantised_row_bytes


class RawRows:
    """Rows as they are, bit for bit."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return width * dtype.itemsize

    def encode(self, rows: Tensor, key: int, ids: Tensor, held: Tensor | None = None) -> Tensor:
        """Return (num_rows, row_bytes) uint8; `held` becomes what the receiver holds then."""
        if held is not None:
            held.copy_(rows)
        return rows.contiguous().view(torch.uint8)

    def decode(self, codes: Tensor, width: int, dtype: torch.dtype, held: Tensor | None = None) -> Tensor:
        """Return (num_rows, width), where the receiver held `held` before."""
        return codes.reshape(-1).view(dtype).view(-1, width)


class QuantisedRows:
    """Rows in few bits per value, or likewise their differences to the rows that the receiver holds.

    Args:
        bits: Bits per value.
        delta: Whether differences are sent.
    """

    def __init__(self, bits: int, delta: bool = False):
        self.bits, self.delta = bits, delta

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return quantised_row_bytes(width, self.bits)

    def encode(self, rows: Tensor, key: int, ids: Tensor, held: Tensor | None = None) -> Tensor:
        """Return (num_rows, row_bytes) uint8; `held` becomes what the receiver holds then."""
        if self.delta:
            return encode_rows(rows, self.bits, key, ids, held=held)
        codes = encode_rows(rows, self.bits, key, ids)
        if held is not None:
            decode_rows(codes, rows.shape[1], self.bits, dtype=rows.dtype, out=held)
        return codes

    def decode(self, codes: Tensor, width: int, dtype: torch.dtype, held: Tensor | None = None) -> Tensor:
        """Return (num_rows, width), where the receiver held `held` before; with `delta` that is changed in place."""
        if self.delta:
            return decode_rows(codes, width, self.bits, dtype=dtype, add_to=held)
        return decode_rows(codes, width, self.bits, dtype=dtype)


RowCodec = RawRows | QuantisedRows
RAW = RawRows()


class Packed(NamedTuple):
    """What leaves: (num_bytes,) uint8 for all processes in turn, and the bytes for each."""

    payload: Tensor
    sizes: list[int]


class Arrived(NamedTuple):
    """What came: (num, row_bytes) uint8 rows, and the (num,) int64 places they belong to (None: all, in order)."""

    rows: Tensor
    places: Tensor | None


def pack_all(codes: Tensor, leaving: Sequence[Tensor], in_order: bool = False) -> Packed:
    """Pack every row that each process is sent.

    Args:
        codes: (num_rows, row_bytes) uint8.
        leaving: for each process, positions in codes.
        in_order: Whether these are all positions, ascending from process to process: nothing is copied then.
    """
    row_bytes = codes.shape[1]
    if in_order:
        return Packed(codes.flatten(), [len(positions) * row_bytes for positions in leaving])
    payload = codes.index_select(0, torch.cat(list(leaving))).flatten()
    return Packed(payload, [len(positions) * row_bytes for positions in leaving])


def pack_nothing(like: Tensor, num_processes: int) -> Packed:
    """Pack no row for anybody."""
    return Packed(like.new_empty(0, dtype=torch.uint8), [0] * num_processes)


def pack_chosen(codes: Tensor, chosen: Tensor, leaving: Sequence[Tensor]) -> Packed:
    """Pack the chosen rows, behind a bitmap of the rows that a process could have been sent; no row, no bitmap.

    Args:
        codes: (num_chosen, row_bytes) uint8, the chosen rows in order.
        chosen: (num_rows,) bool.
        leaving: for each process, positions among all rows.
    """
    place = chosen.cumsum(0) - 1
    chunks, sizes = [], []
    for positions in leaving:
        there = chosen[positions]
        rows = codes.index_select(0, place[positions[there]])
        if len(rows):
            chunks += [pack_bits(there), rows.flatten()]
        sizes.append(bitmap_bytes(len(positions)) + rows.numel() if len(rows) else 0)
    return Packed(torch.cat(chunks) if chunks else codes.new_empty(0), sizes)


def unpack_all(payload: Tensor, sizes: Sequence[int], counts: Sequence[int], row_bytes: int) -> Arrived:
    """Read messages of `pack_all` and `pack_nothing`.

    Args:
        payload: (sum(sizes),) uint8.
        sizes: Number of bytes from each process.
        counts: Number of rows that each process may send.
        row_bytes: Size of a row, bytes.
    """
    rows = payload.view(-1, row_bytes)
    if list(sizes) == [count * row_bytes for count in counts]:
        return Arrived(rows, None)
    places = torch.arange(sum(counts), device=payload.device).split(list(counts))
    return Arrived(rows, torch.cat([own for own, size in zip(places, sizes, strict=True) if size] or [places[0][:0]]))


def unpack_chosen(payload: Tensor, sizes: Sequence[int], counts: Sequence[int], row_bytes: int) -> Arrived:
    """Read messages of `pack_chosen`; arguments as in `unpack_all`."""
    rows, places, first = [payload.new_empty((0, row_bytes))], [payload.new_empty(0, dtype=torch.int64)], 0
    for chunk, count in zip(payload.split(list(sizes)), counts, strict=True):
        if len(chunk):
            head = bitmap_bytes(count)
            places.append(unpack_bits(chunk[:head], count).nonzero().squeeze(1) + first)
            rows.append(chunk[head:].view(-1, row_bytes))
        first += count
    return Arrived(torch.cat(rows), torch.cat(places))


def bitmap_bytes(count: int) -> int:
    """Return the bytes of a bitmap."""
    return (count + 7) // 8


def pack_bits(bits: Tensor) -> Tensor:
    """Return (ceil(num / 8),) uint8 of (num,) bool, the first in the lowest bit."""
    padded = bits.new_zeros(8 * bitmap_bytes(len(bits)))
    padded[: len(bits)] = bits
    weights = 2 ** torch.arange(8, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the (count,) bool of `pack_bits`."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(1) >> shifts) & 1).bool().flatten()[:count]
