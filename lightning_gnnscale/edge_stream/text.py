"""Edges in text: .csv, .tsv, .txt and .gz of these, any separator, comments, with or without a header.

pyarrow's streaming reader splits and converts. It knows neither comments nor runs of blanks nor separators of
several characters, which are taken out before, nor the line that an error is on, which is looked for afterwards.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ..errors import EdgeStreamError
from .array import native_ids
from .id_tables import Strings
from .options import StreamOptions, known_pair, pick_columns
from .stream import EdgeStream, file_identity
from .text_lines import BLANKS, BLOCK_BYTES, PlainText, delimiter, edge_lines, split_fields

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


ID_TYPES = ("auto", "integer", "string")


class TextStream(EdgeStream):
    """Edges of one text file, one a line; blank lines and comments are left out.

    Args:
        path: the file, decompressed on the way where it ends in .gz.
        text_format: how its lines are built.
        given: the reader options, for the fingerprint.
        options: what all streams have.
    """

    def __init__(self, path: Path, text_format: TextFormat, given: dict, options: StreamOptions):
        super().__init__(str(path), options.out_dtype(np.dtype(np.int64)), options)
        self._path = path
        self._format = text_format
        self._given = given
        self._id_type = text_format.id_type if options.relabel else "int64"

    def source_files(self) -> list[Path]:
        return [Path(self._path)]

    def _identity(self) -> dict:
        return {"text": file_identity(self._path), **self._given}

    def _blocks(self, first_edge: int) -> Iterator[tuple]:
        num_edges = 0
        try:
            for batch in self._batches():
                if batch.num_rows:
                    yield tuple(self._ids(column) for column in batch.columns)
                num_edges += batch.num_rows
        except pa.ArrowInvalid as error:
            raise self._refusal(num_edges, error) from error

    def _batches(self) -> csv.CSVStreamingReader:
        """Return a reader of the two columns; it reads at most 32 blocks ahead."""
        found = self._format
        names = [str(place) for place in range(found.num_fields)]
        ends = [names[found.src_field], names[found.dst_field]]
        numbers = () if self._id_type == "string" else (found.src_field, found.dst_field)
        text = PlainText(self._path, found.separator, found.comment, found.first_line, numbers)
        return csv.open_csv(
            pa.PythonFile(text, mode="r"),
            csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=names),
            csv.ParseOptions(delimiter=delimiter(found.separator)),
            csv.ConvertOptions(column_types=dict.fromkeys(ends, self._id_type), include_columns=ends, null_values=[]),
        )

    def _ids(self, column: pa.Array) -> np.ndarray | Strings:
        if self._id_type != "string":
            return native_ids(self.name, column.to_numpy(), self.node_ids is not None)
        column = pc.ascii_trim(column, BLANKS)
        if pc.min(pc.binary_length(column)).as_py() == 0:
            raise pa.ArrowInvalid("an id is empty")
        return Strings.from_arrow(column)

    def _refusal(self, first_edge: int, error: pa.ArrowInvalid) -> EdgeStreamError:
        """Return what is wrong with the first line that pyarrow refuses, from an edge on."""
        for line, text in self._lines_from(first_edge):
            fault = self._fault(text)
            if fault is not None:
                return EdgeStreamError(f"{self.name}: line {line}: {fault}")
        return EdgeStreamError(f"{self.name}: edge {first_edge} or later: {' '.join(str(error).split())}")

    def _fault(self, line: bytes) -> str | None:
        places = self._format.src_field, self._format.dst_field
        fields = split_fields(line, self._format.separator, errors="surrogateescape")
        ids = [fields[place] for place in places if place < len(fields) and fields[place]]
        shown = line.strip()[:60].decode(errors="replace")
        if len(ids) < 2:
            return f"fields {places[0]} and {places[1]} are not both there, got {shown!r}"
        if len(fields) != self._format.num_fields:
            return f"{len(fields)} fields where the lines before have {self._format.num_fields}, got {shown!r}"
        for field in ids:
            if self._id_type == "string" and not field.isascii():
                try:
                    field.encode()
                except UnicodeEncodeError:
                    return "an id is not UTF-8 text"
            elif self._id_type != "string" and not is_whole_number(field, self._id_type):
                remedy = "relabel=True" if self.node_ids is None else "id_type='string'"
                return f"{field[:60]!r} is not a whole number of 64 bits; pass {remedy} to number arbitrary ids"
        return None

    def _position(self, edge: int) -> str:
        """Return the line of an edge, reading the file up to it."""
        return next((f"line {line}" for line, _ in self._lines_from(edge)), f"edge {edge}")

    def _lines_from(self, edge: int) -> Iterator[tuple[int, bytes]]:
        return itertools.islice(edge_lines(self._path, self._format.comment, self._format.first_line), edge, None)


def open_text(
    path: Path,
    options: StreamOptions,
    separator: str | None = None,
    comment: str = "#%",
    header: bool | None = None,
    src: str | int | None = None,
    dst: str | int | None = None,
    id_type: str = "auto",
) -> TextStream:
    """Stream a text file; all its lines have the same number of fields, and `"` quotes one within its line.

    Ids are ASCII digits, after a minus sign or zeros if need be; blanks and tabs around a field do not count. With
    relabel they may be any UTF-8 text, `5" pipe` too. Whatever else is refused with its line: `0x10`, `+1`, `1_000`,
    `1.0`, `1e3`, other digits, `"3"11`, a NUL byte, a carriage return within a line, a byte order mark but the first.

    Args:
        path: .csv, .tsv, .txt, also with .gz.
        options: what all streams have.
        separator: between fields, any string; " " or "\\t " is any run of blanks; None: found out from the head.
        comment: characters that begin a comment line.
        header: whether the first line holds names; None: found out.
        src, dst: which fields, by position or by the header's names; None: by customary names, else the first two.
        id_type: with relabel, "integer" or "string"; "auto": from the head.
    """
    if id_type not in ID_TYPES:
        raise ValueError(f"edge_stream.id_type must be one of {', '.join(ID_TYPES)}, got {id_type!r}")
    if path.stat().st_size == 0:
        raise EdgeStreamError(f"{path}: the file is empty")
    if not isinstance(comment, str) or not comment.isascii():
        raise ValueError(f"edge_stream.comment must be ASCII characters, got {comment!r}")
    given = {"separator": separator, "comment": comment, "header": header, "src": src, "dst": dst, "id_type": id_type}
    return TextStream(path, detect_format(path, **given), given, options)
