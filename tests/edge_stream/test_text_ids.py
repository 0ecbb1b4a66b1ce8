"""What is an id in text and what is not: read as a plain reader reads it, or refused with file and line."""

import gzip
import re

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import open_edge_stream, text_lines
from lightning_gnnscale.errors import EdgeStreamError

SEPARATORS = {"csv": ",", "tsv": "\t", "txt": " "}


def outcome(path, chunk_edges, relabel, **options):
    """Return the user's ids of all edges, or what the one error says."""
    bound = {} if relabel else {"num_nodes": 2**63 - 1}
    try:
        stream = open_edge_stream(path, chunk_edges=chunk_edges, relabel=relabel, **bound, **options)
        chunks = [np.stack([chunk.src, chunk.dst], 1) for chunk in stream.chunks()]
    except EdgeStreamError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path)), error
        return str(error).removeprefix(f"{path}: ")
    edges = np.concatenate(chunks)
    return (np.array(stream.node_ids.plain(edges.ravel())).reshape(-1, 2) if relabel else edges).tolist()


def outcomes(folder, field, place, relabel):
    """Read a file with one odd field in each format, in several chunk sizes and blocks; return the one outcome."""
    found = set()
    for kind, separator in SEPARATORS.items():
        row = f"{field}{separator}7" if place == 0 else f"7{separator}{field}"
        lines = [f"{i}{separator}{i + 1}" for i in range(60)]
        text = "\n".join([*lines, row, f"5{separator}6"]) + "\n"
        for name in (f"e.{kind}", f"e.{kind}.gz"):
            path = folder / name
            data = text.encode(errors="surrogateescape")
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
            for chunk_edges in (1, 7, 1000):
                found.add(str(outcome(path, chunk_edges, relabel)))
    return found


READ = {
    "7": 7,
    "007": 7,
    "-0": 0,
    '"3"': 3,
    ' "3"': 3,
    '"3" ': 3,
    " 3 ": 3,
    '" 3"': 3,
    "9223372036854775806": 2**63 - 2,
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("relabel", [False, True])
@pytest.mark.parametrize("field", READ)
def test_whole_numbers_are_read(tmp_path, monkeypatch, field, relabel, place):
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 64)
    edge = [READ[field], 7] if place == 0 else [7, READ[field]]
    wanted = [[i, i + 1] for i in range(60)] + [edge, [5, 6]]
    assert outcomes(tmp_path, field, place, relabel) == {str(wanted)}


NO_NUMBERS = [
    "1_000",
    "+4",
    "3.0",
    "1e3",
    "\uff13",
    "٣",
    "3\x0b",
    "\xa03",
    "3\u2028",
    "null",
    "NaN",
    "'3'",
    '3"11',
    "--1",
    "-",
]
NO_NUMBERS += ["9223372036854775808", "18446744073709551616", "-9223372036854775809", "9" * 5000, "\udcff3", "\udcc3"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("field", NO_NUMBERS)
def test_what_is_no_whole_number_is_refused_with_its_line(tmp_path, field, place):
    (told,) = outcomes(tmp_path, field, place, relabel=False)
    assert re.match(r"line 61: .* is not a whole number of 64 bits; pass relabel=True", told), told


# pyarrow would read 16, 16, -1, 311, ..., or take a carriage return for the end of a line.
MISREAD = {
    "0x10": "'0x10.*' is not in decimal; pass relabel=True",
    "0X10": "'0X10.*' is not in decimal; pass relabel=True",
    '"0x10"': "'\"0x10\".*' is not in decimal; pass relabel=True",
    "0xFFFFFFFFFFFFFFFF": "'0xF+.*' is not in decimal; pass relabel=True",
    '"3"11': "'\"3\"11.*' goes on after its quote",
    '""3""': '\'""3"".*\' goes on after its quote',
    '"3': "'\"3.*' opens a quote that the line does not close",
    '"3""': '\'"3"".*\' opens a quote that the line does not close',
    "3\x00": "holds a NUL byte: the file is damaged, or not UTF-8 text",
    "\x00": "holds a NUL byte",
    "3\r4": ".* holds a carriage return: end lines by a line feed",
    "\r3": ".* holds a carriage return",
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("field", MISREAD)
def test_what_pyarrow_would_misread_is_refused_with_its_line(tmp_path, monkeypatch, field, place):
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 64)
    for relabel in (False, True):
        told = outcomes(tmp_path, field, place, relabel)
        assert all(re.match(f"line 61: {MISREAD[field]}", one) for one in told), told
        assert len({one.split("'")[-1] for one in told}) == 1


STRINGS = ["0x10", "1_000", "+4", "\uff13", "3\x0b", "\xa03", "null", "NaN", "'3'", '3"11', '5" pipe', "a\u2028b", "-"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("field", STRINGS)
def test_strings_are_free_with_relabel(tmp_path, field, place):
    separators = [separator for separator in SEPARATORS.items() if separator[1] not in field]
    for kind, separator in separators:
        for ending in ("\n", "\r\n"):
            row = [field, "b"] if place == 0 else ["b", field]
            lines = [["a", "b"], row, ["c", '"x""y"']]
            text = ending.join(separator.join(line) for line in lines) + ending
            (tmp_path / f"e.{kind}").write_bytes(text.encode())
            for chunk_edges in (1, 100):
                wanted = [["a", "b"], row, ["c", 'x"y']]
                assert outcome(tmp_path / f"e.{kind}", chunk_edges, True, header=False) == wanted


def test_strings_must_be_utf8(tmp_path):
    (tmp_path / "e.csv").write_bytes(b"a,b\nc,d\ne\xff,f\n")
    assert outcome(tmp_path / "e.csv", 1, True, header=False) == "line 3: an id is not UTF-8 text"
    (tmp_path / "e.csv").write_text("a,b\nc,d\n", encoding="utf-16")
    assert outcome(tmp_path / "e.csv", 1, True) == "the text is UTF-16, not UTF-8: convert it"
    (tmp_path / "e.csv").write_text("1,2\n3,4\n", encoding="utf-16-le")
    assert outcome(tmp_path / "e.csv", 1, False).startswith("line 1: holds a NUL byte")


@pytest.mark.parametrize("relabel", [False, True])
def test_a_byte_order_mark_may_only_stand_first(tmp_path, relabel):
    path = tmp_path / "e.csv"
    path.write_bytes(b"\xef\xbb\xbf1,2\n3,4\n")
    assert outcome(path, 1, relabel) == [[1, 2], [3, 4]]
    path.write_bytes(b"\xef\xbb\xbf1,2\n\xef\xbb\xbf3,4\n")
    assert outcome(path, 1, relabel) == "line 2: '\\ufeff3' begins with a byte order mark: remove it"


@pytest.mark.parametrize(
    "first", ["0x10,0x11", "1_000,2_000", "\uff13,\uff14", "\ufeff\ufeff5,6", "NA,NA", "-,-", "1.5,2.5", "+1,+2"]
)
def test_a_first_line_of_no_ids_is_not_taken_for_a_header(tmp_path, first):
    (tmp_path / "e.csv").write_text(f"{first}\n1,2\n2,3\n")
    assert outcome(tmp_path / "e.csv", 10, False).startswith("line 1: ")


@pytest.mark.parametrize("first", ["src,dst", "alpha,omega", ":START_ID,:END_ID", "~from,~to", "größe,weg", '"a","b"'])
def test_names_are_taken_for_a_header(tmp_path, first):
    (tmp_path / "e.csv").write_text(f"{first}\n1,2\n2,3\n")
    assert outcome(tmp_path / "e.csv", 10, False) == [[1, 2], [2, 3]]


def test_the_line_is_counted_with_comments_blanks_and_what_looks_alike(tmp_path):
    (tmp_path / "e.csv").write_text('# 0x10,1\n\n1,2,0x10\r\n  \n2,3,"0x10"\n \t\n4,0x10,9\n')
    assert outcome(tmp_path / "e.csv", 10, False).startswith("line 7: '0x10' is not in decimal")
    (tmp_path / "e.csv").write_text('1,2,0x10\n2,3,"a,0x1,b"\n4,5,0x0\n')  # addresses in a column that is not read
    assert outcome(tmp_path / "e.csv", 10, False) == [[1, 2], [2, 3], [4, 5]]


def test_lines_that_end_in_carriage_returns_alone_are_refused(tmp_path):
    (tmp_path / "e.csv").write_bytes(b"1,2\r3,4\r5,6\r")
    assert "holds a carriage return: end lines by a line feed" in outcome(tmp_path / "e.csv", 10, False)
