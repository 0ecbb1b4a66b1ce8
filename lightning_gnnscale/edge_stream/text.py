"""Edges in text: .csv, .tsv, .txt and .gz of these, any separator, comments, with or without a header.

pyarrow's streaming reader splits and converts. It handles neither comments nor runs of blanks nor separators of
several characters, which are removed before, and does not give the line of an error, which is found afterwards.
"""

import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ..errors import EdgeStreamError, short
from .array import native_ids
from .id_tables import Strings
from .options import COLUMN_WORDS, LIST_NODES, StreamOptions, known_pair, pick_columns, tell_unread
from .relabel import NodeIds
from .stream import EdgeStream, file_identity
from .text_lines import BLANKS, BLOCK_BYTES, PlainText, delimiter, edge_lines, split_fields

_SAMPLE_LINES = 50
_LARGEST = 2**63 - 1
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_NO_NAME = re.compile(r"\W+|\W*(\d.*|nan|inf|null|none|n/?a)", re.IGNORECASE)
_UNUSUAL = re.compile(rb"[\w.+-]+\s*([^\w\s.+-]+)\s*[\w.+-]+")
_FEWEST_BELOW = 3  # lines that must differ from the first where only its form makes it a header


class TextFormat(NamedTuple):
    """The format of the lines.

    Attributes:
        separator: Separator between fields; empty: runs of blanks.
        comment: Bytes any of which begins a comment line.
        num_fields: Number of fields in every line.
        src_field, dst_field: Positions of the two ids in a line, counted from 0.
        id_type: Type of all sampled ids: "int64", "uint64" (an id above the largest int64 was sampled) or "string".
        first_line: Number of the first line after a header, counted from 1.
        doubtful: The ids of the first line, where it was read as an edge of words that could be names; else ().
    """

    separator: bytes
    comment: bytes
    num_fields: int
    src_field: int
    dst_field: int
    id_type: str
    first_line: int
    doubtful: tuple[str, ...] = ()


def detect_format(path: Path, separator, comment: str, header, src, dst, id_type: str) -> TextFormat:
    """Detect the format from the first lines of a file, except for what the user gives, as `open_text` takes it."""
    sample = list(itertools.islice(edge_lines(path, comment.encode()), _SAMPLE_LINES))
    if not sample:
        raise EdgeStreamError(f"{path}: the file holds no edges")
    if separator is None:
        between = _detect_separator(path, sample)
    elif not isinstance(separator, str) or separator == "" or set(separator) & set('"\r\n'):
        raise ValueError(f"edge_stream.separator must be a string such as ',' or None, got {short(separator)}")
    else:
        between = b"" if separator.isspace() and separator != "\t" else separator.encode()
    rows = [split_fields(line, between) for _, line in sample]
    guesses = header is None
    if guesses:
        header = isinstance(src, str) or isinstance(dst, str) or _has_header(rows, src, dst)
    guessed = guesses and not header and _looks_like_names(rows, (0, 1) if src is None else (src, dst))
    header = header or guessed
    places = _places(str(path), rows[0], header, src, dst)
    first_line, first = 1, tuple(rows[0][place] for place in places if place < len(rows[0]))
    if guessed:
        _tell_header(str(path), sample[0][0], first)
    if header:
        tell_unread(str(path), rows[0])
        first_line = sample[0][0] + 1
        rows = rows[1:]
    if not rows:
        raise EdgeStreamError(f"{path}: the file holds no edges")
    ids = [row[place] for row in rows for place in places if place < len(row)]
    num_fields, kind = max(len(rows[0]), max(places) + 1), _id_type(ids, id_type)
    doubtful = () if header or not guesses or kind != "string" or any(map(_NO_NAME.fullmatch, first)) else first
    return TextFormat(between, comment.encode(), num_fields, *places, kind, first_line, doubtful)


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


def _looks_like_names(rows: list[list[str]], places: tuple[int, int]) -> bool:
    """Whether the first line holds names of columns above ids that are words themselves.

    It does where another column has a word above numbers; where its two ids are customary column names, and are not
    ids below; or where every id below has a digit, and neither of the two has one.
    """
    first, below = rows[0], [row for row in rows[1:] if len(row) > max(places)]
    ids = [first[place] for place in places if place < len(first)]
    if len(ids) < 2 or ids[0] == ids[1] or not below or any(map(_NO_NAME.fullmatch, ids)):
        return False
    others = [column for column in range(len(first)) if column not in places]
    fields = {column: [row[column] for row in below if column < len(row)] for column in (*others, *places)}
    if any(not _NUMBER.fullmatch(first[c]) and all(map(_NUMBER.fullmatch, fields[c])) for c in others if first[c]):
        return True
    listed = {field for place in places for field in fields[place]}
    if listed & set(ids):
        return False
    if all(COLUMN_WORDS & set(re.split(r"[^a-z]+", name.lower())) for name in ids):
        return True
    digits = [any(map(str.isdigit, field)) for field in listed]
    return len(below) >= _FEWEST_BELOW and all(digits) and not any(map(str.isdigit, "".join(ids)))


def _tell_header(name: str, line: int, first: tuple[str, ...]) -> None:
    warnings.warn(
        f"{name}: line {line} ({', '.join(first)}) is taken for the names of the columns and left out: say "
        "header=True if that is right, header=False if it is an edge",
        stacklevel=2,
    )


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
    """Edges of one text file, decompressed where it ends in .gz, one a line; blank lines and comments are left out."""

    def __init__(self, path: Path, text_format: TextFormat, given: dict, options: StreamOptions):
        super().__init__(str(path), options.out_dtype(np.dtype(np.int64)), options)
        self._path = path
        self._format = text_format
        self._given = given
        self._id_type = text_format.id_type if options.relabel else "int64"

    def source_files(self) -> list[Path]:
        return [Path(self._path)]

    def list_nodes(self, node_ids: NodeIds) -> None:
        """Take the ids of all nodes; a first line that has none of them, above one that has, is a header."""
        super().list_nodes(node_ids)
        if not self._format.doubtful:
            return
        lines = list(itertools.islice(edge_lines(self._path, self._format.comment), 2))
        rows = [split_fields(line, self._format.separator) for _, line in lines]
        places = self._format.src_field, self._format.dst_field
        known = [[node_ids.has(row[place]) for place in places if place < len(row)] for row in rows]
        if len(rows) == 2 and not any(known[0]) and all(known[1]):
            _tell_header(self.name, lines[0][0], self._format.doubtful)
            self._format = self._format._replace(first_line=lines[0][0] + 1, doubtful=())

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

    def _numbered_blocks(self, first_edge: int) -> Iterator:
        """Also warn of a first line that shares no id with other lines: it may hold the names of the columns."""
        first = self._format.doubtful
        looks = bool(first) and self.node_ids is not None and not self.node_ids.complete
        num_edges, alone = 0, looks
        try:
            for src, dst in super()._numbered_blocks(first_edge):
                if alone:  # ids are numbered by appearance: the first line has 0 and 1
                    rest = slice(1 if num_edges == 0 else 0, None)
                    alone = src[0] != dst[0] if num_edges == 0 else True
                    alone = alone and not ((src[rest] < 2) | (dst[rest] < 2)).any()
                num_edges += len(src)
                yield src, dst
        except EdgeStreamError as error:
            strange = re.search(r"node id '(.*)' is not among", str(error))
            line, text = next(edge_lines(self._path, self._format.comment))
            given = split_fields(text, self._format.separator)
            if strange is None or line < self._format.first_line or strange[1] not in given:
                raise
            raise EdgeStreamError(
                f"{error}; or say header=True if line {line} holds the names of the columns"
            ) from None
        if alone and num_edges > 1:
            warnings.warn(
                f"{self.name}: the first line is read as an edge of {first[0]!r} and {first[1]!r}, which no other line "
                "has: if they are the names of the columns say header=True, else header=False",
                stacklevel=2,
            )

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
            return f"fields {places[0]} and {places[1]} are not both there, got {short(shown)}"
        if len(fields) != self._format.num_fields:
            return f"{len(fields)} fields where the lines before have {self._format.num_fields}, got {short(shown)}"
        for field in ids:
            if self._id_type == "string" and not field.isascii():
                try:
                    field.encode()
                except UnicodeEncodeError:
                    return "an id is not UTF-8 text"
            elif self._id_type != "string" and not is_whole_number(field, self._id_type):
                remedy = f"relabel=True to number arbitrary ids{LIST_NODES}"
                remedy = remedy if self.node_ids is None else "id_type='string' to number arbitrary ids"
                return f"{field[:60]!r} is not a whole number of 64 bits; pass {remedy}"
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
    relabel they may be any UTF-8 text, `5" pipe` too. Anything else is refused with its line: `0x10`, `+1`, `1_000`,
    `1.0`, `1e3`, other digits, `"3"11`, a NUL byte, a carriage return in a line, any byte order mark but the first.

    Args:
        path: .csv, .tsv, .txt, also with .gz.
        options: the options of all streams.
        separator: between fields, any string; " " or "\\t " is any run of blanks; None: detected from the head.
        comment: characters that begin a comment line.
        header: whether the first line holds names; None: detected, with a warning where ids are words too.
        src, dst: which fields, by position or by the header's names; None: by customary names, else the first two.
        id_type: with relabel, "integer" or "string"; "auto": from the head.
    """
    if id_type not in ID_TYPES:
        raise ValueError(f"edge_stream.id_type must be one of {', '.join(ID_TYPES)}, got {short(id_type)}")
    if path.stat().st_size == 0:
        raise EdgeStreamError(f"{path}: the file is empty")
    if not isinstance(comment, str) or not comment.isascii():
        raise ValueError(f"edge_stream.comment must be ASCII characters, got {short(comment)}")
    if header is not None and not isinstance(header, bool):
        raise ValueError(f"edge_stream.header must be True, False or None (found out), got {short(header)}")
    given = {"separator": separator, "comment": comment, "header": header, "src": src, "dst": dst, "id_type": id_type}
    return TextStream(path, detect_format(path, **given), given, options)
