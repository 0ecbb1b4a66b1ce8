"""Edges in text: .csv, .tsv, .txt and .gz of these, any separator, comments, with or without a header.

A tokeniser of our own instead of pyarrow's streaming reader: that one knows neither comments nor runs of blanks nor
the line an error is on, and is slower.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import EdgeStreamError
from .id_tables import Strings
from .options import StreamOptions
from .stream import EdgeStream, file_identity
from .text_format import TextFormat, detect_format
from .tokens import byte_classes, find_ids, pack_strings, parse_integers

ID_TYPES = ("auto", "integer", "string")
NEWLINE = b"\n"
_BLOCK_BYTES = 1 << 22


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
        self._integers = not options.relabel or text_format.integer_ids

    def _identity(self) -> dict:
        return {"text": file_identity(self._path), **self._given}

    def _blocks(self, first_edge: int) -> Iterator[tuple]:
        num_edges = 0
        for data, starts, ends, line in self._found():
            num_edges += starts.shape[1]
            if self._integers:
                yield tuple(self._parse(data, starts[end], ends[end], line) for end in range(2))
            else:
                yield tuple(self._strings(data, starts[end], ends[end], line) for end in range(2))
        if num_edges == 0:
            raise EdgeStreamError(f"{self.name}: the file holds no edges")

    def _found(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
        """Yield (bytes, starts, ends, number of the first line) of some whole lines, (2, num_edges) ranges."""
        separator = np.frombuffer(self._format.separator, np.uint8)
        classes = byte_classes(self._format.separator, self._format.comment)
        line = self._format.first_line
        for block in _whole_lines(self._path, self._format.first_byte):
            data = np.frombuffer(block, np.uint8)
            starts, ends = np.empty((2, 2, len(data) // 4 + 1), np.int32)
            places = self._format.src_field, self._format.dst_field
            count, bad = find_ids(data, classes, separator, *places, starts, ends)
            if bad >= 0:
                shown = block[bad : block.index(NEWLINE, bad)][:60].decode(errors="replace").strip()
                where = line + block.count(NEWLINE, 0, bad)
                raise EdgeStreamError(
                    f"{self.name}: line {where}: fields {places[0]} and {places[1]} are not both there, got {shown!r}"
                )
            yield data, starts[:, :count], ends[:, :count], line
            line += block.count(NEWLINE)

    def _parse(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray, line: int) -> np.ndarray:
        out = np.empty(len(starts), np.int64)
        bad = parse_integers(data, starts, ends, out)
        if bad >= 0:
            shown = data[starts[bad] : ends[bad]][:60].tobytes().decode(errors="replace")
            where = line + data[: starts[bad]].tobytes().count(NEWLINE)
            remedy = "id_type='string'" if self.node_ids is not None else "relabel=True"
            raise EdgeStreamError(
                f"{self.name}: line {where}: {shown!r} is not a whole number of 64 bits; pass {remedy} to number "
                "arbitrary ids"
            )
        return out

    def _strings(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray, line: int) -> Strings:
        import pyarrow as pa

        offsets = np.empty(len(starts) + 1, np.int32)
        packed = np.empty(int((ends - starts).sum()), np.uint8)
        pack_strings(data, starts, ends, packed, offsets)
        array = pa.StringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(packed))
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            where = line + self._first_unreadable(data, starts, ends)
            raise EdgeStreamError(f"{self.name}: line {where}: an id is not UTF-8 text") from error
        return Strings.read_only(packed, offsets)

    def _first_unreadable(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
        """Return how many lines lie before the first id that is not UTF-8."""
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            try:
                data[start:end].tobytes().decode()
            except UnicodeDecodeError:
                return data[:start].tobytes().count(NEWLINE)
        return 0

    def _position(self, edge: int) -> str:
        """Return the line of an edge, reading the file up to it."""
        first_edge = 0
        for data, starts, _, line in self._found():
            if edge < first_edge + starts.shape[1]:
                before = data[: starts[0, edge - first_edge]].tobytes()
                return f"line {line + before.count(NEWLINE)}"
            first_edge += starts.shape[1]
        return f"edge {edge}"


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
    """Stream a text file.

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
    found = detect_format(str(path), _whole_lines(path, 0), **given)
    return TextStream(path, found, given, options)


def _whole_lines(path: Path, first_byte: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, the last with a newline even where the file lacks it."""
    num_lines, rest = 0, b""
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
        while True:
            try:
                data = file.read(_BLOCK_BYTES)
            except (EOFError, zlib.error, OSError) as error:
                raise EdgeStreamError(f"{path}: after line {num_lines}: damaged or cut short: {error}") from error
            block = rest + data
            cut = block.rfind(NEWLINE) + 1 if data else len(block)
            block, rest = block[:cut], block[cut:]
            num_lines += block.count(NEWLINE)
            if first_byte:
                skipped = min(first_byte, len(block))
                block, first_byte = block[skipped:], first_byte - skipped
            if block:
                yield block if block.endswith(NEWLINE) else block + NEWLINE
            if not data:
                return
