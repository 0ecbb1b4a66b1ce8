"""The lines of a text file: in blocks that pyarrow can split, and one by one for detection and messages."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import EdgeStreamError

BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_SPLIT = 1 << 16
_UNIT_SEPARATOR = "\x1f"


class PlainText(io.RawIOBase):
    """A text file as pyarrow wants it: without comments and blank lines, one character between fields.

    A read gives some whole lines, whatever size is asked for. The file is closed with the last reference to this.

    Args:
        path: the file, decompressed on the way where it ends in .gz.
        separator: between fields; empty: runs of blanks.
        comment: characters of which one begins a comment line.
        first_line: where to begin, from 1.
    """

    def __init__(self, path: Path, separator: bytes, comment: bytes, first_line: int):
        self._blocks = _plain_blocks(path, separator, comment, first_line)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return next(self._blocks, b"")


def delimiter(separator: bytes) -> str:
    """Return the one character that stands between fields in `PlainText`."""
    if len(separator) > 1:
        return _UNIT_SEPARATOR
    return separator.decode() or " "


def edge_lines(path: Path, comment: bytes, first_line: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield (number, text) of each line that is neither blank nor a comment; slow."""
    number = first_line - 1
    for block in _whole_lines(path, first_line):
        for line in block.split(b"\n"):
            number += 1
            text = line.strip()
            if text and text[0] not in comment:
                yield number, line


def split_fields(line: bytes, separator: bytes, errors: str = "replace") -> list[str]:
    """Return a line's fields as pyarrow would find them, without the blanks around them."""
    text = line[:_LONGEST_SPLIT].decode(errors=errors).replace("\r", "")
    text = text.replace(separator.decode(), delimiter(separator)) if separator else " ".join(text.split())
    rows = csv.reader([text], delimiter=delimiter(separator), skipinitialspace=bool(separator))
    return [field.strip() for field in next(rows)]


def _plain_blocks(path: Path, separator: bytes, comment: bytes, first_line: int) -> Iterator[bytes]:
    between = delimiter(separator).encode()
    begins = b"[%b][^\n]*|" % re.escape(comment) if comment else b""
    no_edge = re.compile(rb"\n[ \t]*(?:" + begins + rb"\r?)(?=\n)")
    before_quote = re.compile(rb'(\n|%b) +(?=")' % re.escape(between))
    open_quote = re.compile(rb'(?:\n|%b)("(?:[^"\n]++|"")*+)(?=\n)' % re.escape(between))
    signs = [bytes([character]) for character in comment]
    signs += [b" ", b"\n\t" if between == b"\t" else b"\t"] if separator else []
    number = first_line
    for lines in _whole_lines(path, first_line):
        # pyarrow passes over empty lines: each may stand between two newlines, and be left empty.
        block = b"\n%b\n" % lines
        if separator != between:
            block = block.replace(separator, between) if separator else _fold_blanks(block)
        if any(sign in block for sign in signs):
            block = no_edge.sub(b"", block)
        if b' "' in block:
            block = before_quote.sub(rb"\1", block)
        if b'"' in block and (found := open_quote.search(block)):
            # pyarrow would read on over line ends up to the next quote, and lose the edges between.
            field = found[1].rstrip(b"\r").partition(between)[0]
            line = number + next(i for i, text in enumerate(lines.split(b"\n")) if field in text)
            shown = field[:60].decode(errors="replace")
            raise EdgeStreamError(f"{path}: line {line}: {shown!r} opens a quote that the line does not close")
        number += lines.count(b"\n") + 1
        yield block


def _fold_blanks(block: bytes) -> bytes:
    block = block.replace(b"\t", b" ")
    while b"  " in block:
        block = block.replace(b"  ", b" ")
    return block.replace(b" \r\n", b"\n").replace(b" \n", b"\n").replace(b"\n ", b"\n")


def _whole_lines(path: Path, first_line: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, each without its last newline."""
    number, rest = first_line - 1, b""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            for _ in range(number):
                file.readline()
            while data := file.read(BLOCK_BYTES):
                if number == 0:
                    data = data.removeprefix(_BYTE_ORDER_MARK)
                number += data.count(b"\n")
                block, newline, rest = (rest + data).rpartition(b"\n")
                if newline:
                    yield block
            if rest:
                yield rest
    except (EOFError, zlib.error, OSError) as error:
        raise EdgeStreamError(f"{path}: after line {number}: damaged or cut short: {error}") from error
