"""How a text file of edges is built, found out from its head."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import EdgeStreamError
from .columns import known_pair, pick_columns
from .text_lines import edge_lines, split_fields

_SAMPLE_LINES = 50
_LARGEST = 2**63 - 1
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_NO_NAME = re.compile(r"\W+|\W*(\d.*|nan|inf|null|none|n/?a)", re.IGNORECASE)
_UNUSUAL = re.compile(rb"[\w.+-]+\s*([^\w\s.+-]+)\s*[\w.+-]+")


class TextFormat(NamedTuple):
    """The format of the lines.

    Attributes:
        separator: Separator between fields; empty: runs of blanks.
        comment: Bytes any of which begins a comment line.
        num_fields: Number of fields in every line.
        src_field, dst_field: Positions of the two ids in a line, counted from 0.
        id_type: Type of all sampled ids: "int64", "uint64" (an id above the largest int64 was sampled) or "string".
        first_line: Number of the first line after a header, counted from 1.
    """

    separator: bytes
    comment: bytes
    num_fields: int
    src_field: int
    dst_field: int
    id_type: str
    first_line: int


def detect_format(path: Path, separator, comment: str, header, src, dst, id_type: str) -> TextFormat:
    """Look at the first lines of a file, and take what the user says for the rest.

    Args:
        path: the file.
        separator, comment, header, src, dst, id_type: as `open_text` takes them.

    Raises:
        EdgeStreamError: no line has two fields.
        ValueError: src or dst name no field.
    """
    sample = list(itertools.islice(edge_lines(path, comment.encode()), _SAMPLE_LINES))
    if not sample:
        raise EdgeStreamError(f"{path}: the file holds no edges")
    if separator is None:
        between = _detect_separator(path, sample)
    elif not isinstance(separator, str) or separator == "" or set(separator) & set('"\r\n'):
        raise ValueError(f"edge_stream.separator must be a string such as ',' or None, got {separator!r}")
    else:
        between = b"" if separator.isspace() and separator != "\t" else separator.encode()
    rows = [split_fields(line, between) for _, line in sample]
    if header is None:
        header = isinstance(src, str) or isinstance(dst, str) or _has_header(rows, src, dst)
    places = _places(str(path), rows[0], header, src, dst)
    first_line = 1
    if header:
        first_line = sample[0][0] + 1
        rows = rows[1:]
    if not rows:
        raise EdgeStreamError(f"{path}: the file holds no edges")
    ids = [row[place] for row in rows for place in places if place < len(row)]
    num_fields = max(len(rows[0]), max(places) + 1)
    return TextFormat(between, comment.encode(), num_fields, *places, _id_type(ids, id_type), first_line)


def _detect_separator(path: Path, sample: list[tuple[int, bytes]]) -> bytes:
    """Return the first separator that gives two fields in the first line and in most others."""
    order = (b",", b";", b"|", b"\t", b"") if ".csv" in path.name.lower() else (b"\t", b",", b";", b"|", b"")
    number, first = sample[0]
    unusual = _UNUSUAL.match(first.strip())
    for separator in (*order, unusual.group(1)) if unusual else order:
        fits = [sum(map(bool, split_fields(line, separator))) >= 2 for _, line in sample]
        if fits[0] and 2 * sum(fits) > len(fits):
            return separator
    shown = first.strip()[:60].decode(errors="replace")
    raise EdgeStreamError(f"{path}: line {number}: no two fields in {shown!r}; pass separator=")


def _has_header(rows: list[list[str]], src, dst) -> bool:
    """Whether the first line holds names: customary ones, or words that begin with no digit above integers."""
    places = (0, 1) if src is None or dst is None else (src, dst)
    first = [rows[0][place] for place in places if place < len(rows[0])]
    if any(map(_NO_NAME.fullmatch, first)):
        return False
    if src is None and known_pair(rows[0]):
        return True
    below = [rows[1][place] for place in places if place < len(rows[1])] if len(rows) > 1 else []
    return bool(below) and all(map(_INTEGER.fullmatch, below))


def _places(name: str, names: list[str], header: bool, src, dst) -> tuple[int, int]:
    if src is None and dst is None:
        return (known_pair(names) if header else None) or (0, 1)
    if not header:
        names = [str(place) for place in range(len(names))]
    return pick_columns(name, names, src, dst)


def is_whole_number(field: str, id_type: str) -> bool:
    """Whether a field is one that "int64" or "uint64" holds: ASCII digits, for int64 also after a minus sign."""
    digits, negative = field.removeprefix("-").lstrip("0") or "0", field.startswith("-")
    if not _INTEGER.fullmatch(field) or len(digits) > 20 or (negative and id_type == "uint64"):
        return False
    return np.iinfo(id_type).min <= (-int(digits) if negative else int(digits)) <= np.iinfo(id_type).max


def _id_type(ids: list[str], given: str) -> str:
    integers = [int(field) for field in ids if _INTEGER.fullmatch(field) and len(field) <= 20]
    if given == "string" or (given == "auto" and len(integers) < len(ids)):
        return "string"
    return "uint64" if max(integers, default=0) > _LARGEST else "int64"
