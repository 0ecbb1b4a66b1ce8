"""Rows as bytes: as they are, or in few bits."""

import torch
from torch import Tensor

from ...triton_kernels.quantize_rows import decode_rows, encode_rows
from ...triton_kernels.quantize_rows import row_bytes as coded_row_bytes


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


class CodedRows:
    """Rows in few bits per value, or likewise their differences to the rows that the receiver holds.

    Args:
        bits: Bits per value.
        delta: Whether differences are sent.
    """

    def __init__(self, bits: int, delta: bool = False):
        self.bits, self.delta = bits, delta

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return coded_row_bytes(width, self.bits)

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


RowCodec = RawRows | CodedRows
RAW = RawRows()
