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
BLANKS = " \t"  # allowed around a field
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RUN = re.compile(f"[{BLANKS}]+")
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LONGEST_SPLIT = 1 << 16
_UNIT_SEPARATOR = "\x1f"


class PlainText(io.RawIOBase):
    """A text file as pyarrow wants it: without comments and blank lines, one character between fields.

    A read gives some whole lines, whatever size is asked for. The file is closed with the last reference to this.
    Text that pyarrow would misread, such as `0x10` and `"3"11`, is refused with its line.

    Args:
        separator: between fields; empty: runs of blanks.
        comment: characters of which one begins a comment line.
        numbers: positions of the fields that must be whole numbers.
    """

    def __init__(self, path: Path, separator: bytes, comment: bytes, first_line: int, numbers: tuple[int, ...] = ()):
        self._blocks = _plain_blocks(path, separator, comment, first_line, numbers)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return next(self._blocks, b"")


def delimiter(separator: bytes) -> str:
    """Return the one character between fields in `PlainText`."""
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
    text = text.replace(separator.decode(), delimiter(separator)) if separator else _RUN.sub(" ", text).strip(" ")
    blanks = BLANKS.replace(delimiter(separator), "")
    text = re.sub(f'(^|{re.escape(delimiter(separator))})[{blanks}]+(?=")', r"\1", text)
    return [field.strip(BLANKS) for field in next(csv.reader([text], delimiter=delimiter(separator)))]


def _plain_blocks(
    path: Path, separator: bytes, comment: bytes, first_line: int, numbers: tuple[int, ...]
) -> Iterator[bytes]:
    between = delimiter(separator).encode()
    begins = b"[%b][^\n]*|" % re.escape(comment) if comment else b""
    blanks = BLANKS.encode().replace(between, b"")
    no_edge = re.compile(rb"\n[ \t]*(?:" + begins + rb"\r?)(?=\n)")
    before_quote = re.compile(rb'(\n|%b)[%b]+(?=")' % (re.escape(between), blanks))
    faults = _faults(between, numbers)
    signs = [bytes([character]) for character in comment]
    signs += [b" ", b"\n\t" if between == b"\t" else b"\t"] if separator else []
    number = first_line
    for lines in _whole_lines(path, first_line):
        # pyarrow skips empty lines: each may stay empty between two newlines.
        block = b"\n%b\n" % lines
        if separator != between:
            block = block.replace(separator, between) if separator else _fold_blanks(block)
        if any(sign in block for sign in signs):
            block = no_edge.sub(b"", block)
        if b' "' in block or b'\t"' in block:
            block = before_quote.sub(rb"\1", block)
        for rare, fault, says in faults:
            if any(sign in block for sign in rare) and (found := fault.search(block)):
                line = number + _line_of(block, found.start(1), lines, comment)
                field = found[1].split(b"\n")[0].rstrip(b"\r").partition(between)[0]
                raise EdgeStreamError(f"{path}: line {line}: {field[:60].decode(errors='replace')!r} {says}")
        number += lines.count(b"\n") + 1
        yield block


def _faults(between: bytes, numbers: tuple[int, ...]) -> list[tuple[tuple[bytes, ...], re.Pattern, str]]:
    """Return what lines must not contain: (bytes that it always has, pattern with it as group 1, message)."""
    sep, quoted = re.escape(between), rb'"(?:[^"\n]++|"")*+'
    blanks = BLANKS.encode().replace(between, b"")
    field = rb'(?:%b"[^%b\n]*+|(?!")[^%b\n]*+)' % (quoted, sep, sep)
    before = b"|".join(rb"(?:%b%b){%d}" % (field, sep, place) for place in numbers)
    faults = [
        # pyarrow would read on over line ends up to the next quote, and lose the edges between.
        ((b'"',), rb"(?:\n|%b)(%b)(?=\n)" % (sep, quoted), "opens a quote that the line does not close"),
        (
            (b'"',),
            rb'(?:\n|%b)(%b"[%b]*+(?!%b|\r?\n)[^\n]*)' % (sep, quoted, blanks, sep),
            'goes on after its quote: a quote within quotes is written ""',
        ),
        # pyarrow takes it for the end of a line.
        (
            (b"\r",),
            rb"\n([^\r\n]*+\r(?!\n)[^\n]*)",
            "holds a carriage return: end lines by a line feed, with or without one",
        ),
        # Joined files, each with its mark.
        ((_BYTE_ORDER_MARK[-1:],), rb"\n(%b[^\n]*)" % _BYTE_ORDER_MARK, "begins with a byte order mark: remove it"),
    ]
    if numbers:
        hexadecimal = rb'\n(?:%b)("?[%b]*+0[xX][^\n]*)' % (before, blanks)
        faults.append(
            (
                (b"x", b"X"),
                hexadecimal,
                "is not in decimal; pass relabel=True, id_type='string' to number arbitrary ids",
            )
        )
    return [(rare, re.compile(pattern), says) for rare, pattern, says in faults]


def _line_of(block: bytes, position: int, lines: bytes, comment: bytes) -> int:
    """Return the line, from 0, of a position in the block made of lines."""
    edges_before = sum(1 for text in block[:position].split(b"\n")[:-1] if text.strip())
    texts = (text.strip() for text in lines.split(b"\n"))
    return [i for i, text in enumerate(texts) if text and text[0] not in comment][edges_before]


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
                _check_text(path, number, data)
                number += data.count(b"\n")
                block, newline, rest = (rest + data).rpartition(b"\n")
                if newline:
                    yield block
            if rest:
                yield rest
    except (EOFError, zlib.error, OSError) as error:
        if error.__class__ in (PermissionError, IsADirectoryError, FileNotFoundError):
            raise EdgeStreamError(f"{path}: cannot be read: {error.strerror}") from error
        raise EdgeStreamError(f"{path}: after line {number}: damaged or cut short: {error}") from error


def _check_text(path: Path, number: int, data: bytes) -> None:
    """Raise where bytes after `number` line ends have a NUL or UTF-16's mark, so are not UTF-8 text."""
    if number == 0 and data.startswith(_WIDE_MARKS):
        raise EdgeStreamError(f"{path}: the text is UTF-16, not UTF-8: convert it")
    if (nul := data.find(b"\0")) >= 0:
        line = number + data.count(b"\n", 0, nul) + 1
        raise EdgeStreamError(f"{path}: line {line}: holds a NUL byte: the file is damaged, or not UTF-8 text")
