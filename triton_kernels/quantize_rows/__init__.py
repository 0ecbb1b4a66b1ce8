"""Rows of floats quantised to 16, 8, 4 or 2 bits with one scale per row, rounded at random without bias."""

from .op import decode_rows, encode_rows, row_bytes

__all__ = ["decode_rows", "encode_rows", "row_bytes"]
