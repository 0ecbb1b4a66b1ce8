"""How a text file of edges is built, found out from its head."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import EdgeStreamError
from .columns import known_pair, pick_columns

_SAMPLE_LINES = 50
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INTEGER = re.compile(rb"[+-]?\d+")
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|inf", re.IGNORECASE)
_UNUSUAL = re.compile(rb"[\w.+-]+\s*([^\w\s.+-]+)\s*[\w.+-]+")


class TextFormat(NamedTuple):
    """How lines are built.

    Attributes:
        separator: between fields; empty: runs of blanks.
        comment: bytes of which one begins a comment line.
        src_field, dst_field: positions from 0.
        integer_ids: whether all sampled ids are integers, or the user says that all are.
        first_byte, first_line: where the first line after byte order mark and header lies; lines count from 1.
    """

    separator: bytes
    comment: bytes
    src_field: int
    dst_field: int
    integer_ids: bool
    first_byte: int
    first_line: int


def detect_format(
    name: str, blocks: Iterator[bytes], separator, comment: str, header, src, dst, id_type: str
) -> TextFormat:
    """Look at the first lines of a file, and take what the user says for the rest.

    Args:
        name: the path, for messages.
        blocks: whole lines, from the start of the file.
        separator, comment, header, src, dst, id_type: as `open_text` takes them.

    Raises:
        EdgeStreamError: no line has two fields.
        ValueError: src or dst name no field.
    """
    lines, first_byte = _sample(blocks, comment.encode())
    if not lines:
        raise EdgeStreamError(f"{name}: the file holds no edges")
    if separator is None:
        separator_bytes = _detect_separator(name, lines)
    elif not isinstance(separator, str) or separator == "" or "\n" in separator:
        raise ValueError(f"edge_stream.separator must be a string such as ',' or None, got {separator!r}")
    else:
        separator_bytes = b"" if separator.isspace() and separator != "\t" else separator.encode()
    rows = [_split(line.text, separator_bytes) for line in lines]
    if header is None:
        header = isinstance(src, str) or isinstance(dst, str) or _has_header(rows, src, dst)
    places = _places(name, rows[0], header, src, dst)
    ids = [row[place] for row in rows[int(header) :] for place in places if place < len(row)]
    integer_ids = id_type == "integer" or (id_type == "auto" and all(map(_INTEGER.fullmatch, ids)))
    first_line = 1
    if header:
        first_byte, first_line = lines[0].after, lines[0].number + 1
    return TextFormat(separator_bytes, comment.encode(), *places, integer_ids, first_byte, first_line)


class _Line(NamedTuple):
    number: int
    after: int
    text: bytes


def _sample(blocks: Iterator[bytes], comment: bytes) -> tuple[list[_Line], int]:
    """Return the first lines that are neither blank nor comments, and the bytes of a byte order mark."""
    lines, number, offset, mark = [], 0, 0, 0
    for block in blocks:
        if offset == 0 and block.startswith(_BYTE_ORDER_MARK):
            mark = len(_BYTE_ORDER_MARK)
        here = mark if offset == 0 else 0
        while here < len(block) and len(lines) < _SAMPLE_LINES:
            end = block.index(b"\n", here)
            number += 1
            text = block[here:end].strip()
            if text and text[:1] not in (comment[i : i + 1] for i in range(len(comment))):
                lines.append(_Line(number, offset + end + 1, text))
            here = end + 1
        offset += len(block)
        if len(lines) >= _SAMPLE_LINES:
            break
    return lines, mark


def _detect_separator(name: str, lines: list[_Line]) -> bytes:
    """Return the first separator that gives two fields in the first line and in most others."""
    order = (b",", b";", b"|", b"\t", b"") if ".csv" in name.lower() else (b"\t", b",", b";", b"|", b"")
    unusual = _UNUSUAL.match(lines[0].text)
    for separator in (*order, unusual.group(1)) if unusual else order:
        fits = [all(field for field in _two(line.text, separator)) for line in lines]
        if fits[0] and 2 * sum(fits) > len(fits):
            return separator
    shown = lines[0].text[:60].decode(errors="replace")
    raise EdgeStreamError(f"{name}: line {lines[0].number}: no two fields in {shown!r}; pass separator=")


def _two(text: bytes, separator: bytes) -> tuple[bytes, bytes]:
    fields = _split(text, separator)
    return (fields[0], fields[1]) if len(fields) > 1 else (b"", b"")


def _split(text: bytes, separator: bytes) -> list[bytes]:
    fields = text.split(separator) if separator else text.split()
    return [field.strip().strip(b'"') for field in fields]


def _has_header(rows: list[list[bytes]], src, dst) -> bool:
    """Whether the first line holds names: customary ones, or no numbers above a line of integers."""
    places = (0, 1) if src is None or dst is None else (src, dst)
    first = [rows[0][place] for place in places if place < len(rows[0])]
    if any(map(_NUMBER.fullmatch, first)):
        return False
    if src is None and known_pair([field.decode(errors="replace") for field in rows[0]]):
        return True
    below = [rows[1][place] for place in places if place < len(rows[1])] if len(rows) > 1 else []
    return bool(below) and all(map(_INTEGER.fullmatch, below))


def _places(name: str, first_row: list[bytes], header: bool, src, dst) -> tuple[int, int]:
    names = [field.decode(errors="replace") for field in first_row]
    if src is None and dst is None:
        return (known_pair(names) if header else None) or (0, 1)
    if not header:
        names = [str(place) for place in range(len(names))]
    return pick_columns(name, names, src, dst)
