"""Compiled loops over bytes of text: where the two ids of a line lie, and what number they spell."""

import numpy as np

from ..jit import kernel

_TAB, _NEWLINE, _RETURN, _SPACE, _QUOTE, _PLUS, _MINUS, _ZERO = (ord(character) for character in '\t\n\r "+-0')
_IS_NEWLINE, _IS_SEPARATOR, _IS_BLANK, _IS_COMMENT = 1, 2, 4, 8
_ENDS_FIELD = _IS_NEWLINE | _IS_SEPARATOR
_LARGEST = np.uint64(2**63 - 1)


def byte_classes(separator: bytes, comment: bytes) -> np.ndarray:
    """Return what each byte can mean, (256,) uint8.

    Args:
        separator: between fields; empty: runs of spaces and tabs.
        comment: bytes of which one begins a comment line.
    """
    classes = np.zeros(256, np.uint8)
    classes[[_TAB, _SPACE, _RETURN]] = _IS_BLANK
    classes[_NEWLINE] = _IS_NEWLINE
    if separator:
        classes[separator[0]] = _IS_SEPARATOR
    else:
        classes[[_TAB, _SPACE]] |= _IS_SEPARATOR
    for byte in comment:
        classes[byte] |= _IS_COMMENT
    return classes


@kernel
def find_ids(data, classes, separator, src_field, dst_field, starts, ends):
    """Find the two ids of every line that is neither blank nor a comment.

    Args:
        data: (num_bytes,) uint8, whole lines, the last byte is a newline.
        classes: (256,) uint8 of `byte_classes`.
        separator: (length,) uint8 between fields; empty: runs of spaces and tabs.
        src_field, dst_field: which fields, from 0.
        starts, ends: (2, max_lines) int32, filled with byte ranges; blanks and quotes around an id are left out.

    Returns:
        (lines found, position of a line that lacks one of the two ids or -1).
    """
    count, here = 0, 0
    while here < len(data):
        line = here
        while classes[data[line]] & _IS_BLANK or data[line] == _TAB:
            line += 1
        if classes[data[line]] & (_IS_NEWLINE | _IS_COMMENT):
            here = _line_end(data, line) + 1
            continue
        field, missing = 0, 2
        while missing:
            start, end, here = _field(data, here, classes, separator)
            if field in (src_field, dst_field):
                if start == end:
                    return count, line
                which = 0 if field == src_field else 1
                starts[which, count] = start
                ends[which, count] = end
                missing -= 1
            field += 1
            if data[here] == _NEWLINE:
                break
            here += max(1, len(separator))
        if missing:
            return count, line
        here = _line_end(data, here) + 1
        count += 1
    return count, -1


@kernel
def _field(data, here, classes, separator):
    """Return (start, end, position of the separator or newline after it) of the field that begins here."""
    while classes[data[here]] & _IS_BLANK:
        here += 1
    quoted = data[here] == _QUOTE
    start = here
    end = here
    if quoted:
        start = here + 1
        here = start
        while data[here] != _QUOTE and data[here] != _NEWLINE:
            here += 1
        end = here
    while True:
        while not classes[data[here]] & _ENDS_FIELD:
            here += 1
        if len(separator) < 2 or data[here] == _NEWLINE or _begins(data, here, separator):
            break
        here += 1
    if not quoted:
        end = here
        while end > start and classes[data[end - 1]] & _IS_BLANK:
            end -= 1
    return start, end, here


@kernel
def _begins(data, here, separator):
    matched = here + len(separator) <= len(data)
    for i in range(len(separator)):
        matched = matched and data[here + i] == separator[i]
    return matched


@kernel
def _line_end(data, here):
    while data[here] != _NEWLINE:
        here += 1
    return here


@kernel
def parse_integers(data, starts, ends, out):
    """Read decimal integers.

    Args:
        data: (num_bytes,) uint8.
        starts, ends: (count,) int32 byte ranges, none empty.
        out: (count,) int64.

    Returns:
        Position of the first range that is no integer of 64 bits, or -1.
    """
    for i in range(len(starts)):
        here, end = starts[i], ends[i]
        negative = data[here] == _MINUS
        if negative or data[here] == _PLUS:
            here += 1
        if here == end or end - here > 19:
            return i
        value = np.uint64(0)
        for j in range(here, end):
            digit = np.int64(data[j]) - _ZERO
            if digit < 0 or digit > 9:
                return i
            value = value * np.uint64(10) + np.uint64(digit)
        if value > _LARGEST:
            return i
        out[i] = -np.int64(value) if negative else np.int64(value)
    return -1


@kernel
def pack_strings(data, starts, ends, out, offsets):
    """Copy byte ranges one behind the other.

    Args:
        data: (num_bytes,) uint8.
        starts, ends: (count,) int32.
        out: uint8 of their whole length.
        offsets: (count + 1,) int32, filled with where each begins.
    """
    offsets[0] = 0
    for i in range(len(starts)):
        at = offsets[i]
        for j in range(starts[i], ends[i]):
            out[at] = data[j]
            at += 1
        offsets[i + 1] = at
