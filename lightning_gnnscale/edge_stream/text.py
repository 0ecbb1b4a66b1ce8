"""Edges in text: .csv, .tsv, .txt and .gz of these, any separator, comments, with or without a header.

pyarrow's streaming reader splits and converts. It knows neither comments nor runs of blanks nor separators of
several characters, which are taken out before, nor the line that an error is on, which is looked for afterwards.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ..errors import EdgeStreamError
from .array import native_ids
from .id_tables import Strings
from .options import StreamOptions
from .stream import EdgeStream, file_identity
from .text_format import TextFormat, detect_format, is_whole_number
from .text_lines import BLANKS, BLOCK_BYTES, PlainText, delimiter, edge_lines, split_fields

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
