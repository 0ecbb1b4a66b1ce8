"""Every format gives the same edges in the same chunks (Invariant 4), and writing and reading give back the same."""

import gzip
import time

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

from lightning_gnnscale.edge_stream import open_edge_stream, text_lines, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from tests.says import said
from tests.tiers import all_pairs

NUM_NODES = 40
EDGES = np.random.default_rng(3).integers(0, NUM_NODES, (2, 57))


def text_of(edges, separator=",", header="", end="\n"):
    lines = [f"{u}{separator}{v}{end}" for u, v in edges.T]
    return (header + end if header else "") + "".join(lines)


def parquet_table(edges, names=("src", "dst"), dtype="int64"):
    return pa.table({names[0]: edges[0].astype(dtype), names[1]: edges[1].astype(dtype)})


def written(folder, kind):
    """Return (source, reader options) of the same edges in one format."""
    path = folder / kind
    if kind in ("columns.npy", "pairs.npy", "fortran.npy", "small.npy", "big_endian.npy"):
        arrays = {
            "columns.npy": EDGES,
            "pairs.npy": np.ascontiguousarray(EDGES.T),
            "fortran.npy": np.asfortranarray(EDGES),
            "small.npy": EDGES.astype(np.uint8),
            "big_endian.npy": EDGES.astype(">i4"),
        }
        np.save(path, arrays[kind])
        return path, {}
    if kind.endswith(".bin"):
        dtype = kind.split(".")[0].split("_")[1]
        columns = kind.startswith("columns")
        (EDGES if columns else np.ascontiguousarray(EDGES.T)).astype(dtype).tofile(path)
        return path, {"dtype": dtype, "bin_layout": "columns" if columns else "pairs"}
    if kind.endswith(".gz"):
        with gzip.open(path, "wt") as file:
            file.write(text_of(EDGES, "\t" if ".tsv" in kind else " "))
        return path, {}
    texts = {
        "plain.csv": text_of(EDGES),
        "header.csv": text_of(EDGES, header="source,target"),
        "names.csv": text_of(EDGES, header="alpha,omega"),
        "tabs.tsv": text_of(EDGES, "\t"),
        "blanks.txt": text_of(EDGES, "   "),
        "mixed.txt": text_of(EDGES, " \t "),
        "crlf.csv": text_of(EDGES, ",", end="\r\n"),
        "colons.txt": text_of(EDGES, "::"),
        "semicolons.txt": text_of(EDGES, " ; "),
    }
    if kind in texts:
        path.write_bytes(texts[kind].encode())
        return path, {}
    if kind == "one.parquet":
        pq.write_table(parquet_table(EDGES, dtype="int32"), path, row_group_size=10)
        return path, {}
    if kind == "folder":
        path.mkdir()
        for i, cut in enumerate(np.array_split(np.arange(EDGES.shape[1]), 4)):
            pq.write_table(parquet_table(EDGES[:, cut]), path / f"part-{i}.parquet", row_group_size=7)
        return path, {}
    if kind == "glob":
        return written(folder, "folder")[0] / "part-*.parquet", {}
    if kind == "named.parquet":
        table = parquet_table(EDGES, ("a", "b")).append_column("w", pa.array(np.ones(EDGES.shape[1])))
        pq.write_table(table, path)
        return path, {"src": "a", "dst": "b"}
    memory = {
        "array": EDGES,
        "tensor": torch.from_numpy(EDGES),
        "tensor_pairs": torch.from_numpy(EDGES).T,
        "pair_of_tensors": (torch.from_numpy(EDGES[0]), torch.from_numpy(EDGES[1])),
        "pyg": Data(edge_index=torch.from_numpy(EDGES), num_nodes=NUM_NODES),
    }
    return memory[kind], {}


KINDS = [
    *("columns.npy", "pairs.npy", "fortran.npy", "small.npy", "big_endian.npy"),
    *("pairs_int32.bin", "pairs_int64.bin", "columns_int32.bin", "columns_int64.bin", "pairs_uint16.bin"),
    *("plain.csv", "header.csv", "names.csv", "tabs.tsv", "blanks.txt", "mixed.txt", "crlf.csv", "colons.txt"),
    *("semicolons.txt", "plain.csv.gz", "tabs.tsv.gz", "blanks.gz"),
    *("one.parquet", "folder", "glob", "named.parquet"),
    *("array", "tensor", "tensor_pairs", "pair_of_tensors", "pyg"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relabel", [False, True])
def test_every_format_gives_the_same_chunks(tmp_path, kind, relabel):
    source, reader_options = written(tmp_path, kind)
    options = {} if relabel else {"num_nodes": NUM_NODES}
    stream = open_edge_stream(source, chunk_edges=10, relabel=relabel, **options, **reader_options)
    wanted = EDGES
    if relabel:
        first_seen = list(dict.fromkeys(EDGES.T.ravel().tolist()))
        wanted = np.array([[first_seen.index(i) for i in end] for end in EDGES.tolist()])
    for _ in range(2):
        chunks = list(stream.chunks())
        assert [len(chunk.src) for chunk in chunks] == [10] * 5 + [7]
        assert [chunk.first_edge for chunk in chunks] == list(range(0, 57, 10))
        assert np.array_equal(np.concatenate([chunk.src for chunk in chunks]), wanted[0])
        assert np.array_equal(np.concatenate([chunk.dst for chunk in chunks]), wanted[1])
    assert stream.count() == ((len(first_seen) if relabel else NUM_NODES), 57)
    if relabel:
        assert np.asarray(stream.node_ids).tolist() == first_seen
    later = list(stream.chunks(3))
    assert np.array_equal(later[0].src, wanted[0, 30:40])
    assert later[0].first_edge == 30
    fresh = open_edge_stream(source, chunk_edges=10, relabel=relabel, **options, **reader_options)
    assert np.array_equal(next(fresh.chunks(3)).dst, wanted[1, 30:40])


def test_pyg_data_says_how_many_nodes_it_has():
    edge_index = torch.tensor([[0, 1], [1, 0]])
    assert open_edge_stream(Data(edge_index=edge_index, num_nodes=9)).num_nodes == 9
    assert open_edge_stream(Data(edge_index=edge_index, x=torch.zeros(7, 2))).num_nodes == 7
    assert open_edge_stream(Data(edge_index=edge_index), num_nodes=5).num_nodes == 5
    assert open_edge_stream(Data(edge_index=edge_index)).num_nodes is None


def test_two_by_two_is_read_as_pyg_reads_it(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[0, 1], [2, 3]]))
    for source in (np.array([[0, 1], [2, 3]]), tmp_path / "a.npy"):
        chunk = next(open_edge_stream(source).chunks())
        assert (chunk.src.tolist(), chunk.dst.tolist()) == ([0, 1], [2, 3])


def test_text_details(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf# head\n%more\n\n  0  1 0.5\n\n# between\n2\t3 x\n   \n  4 05 -  \r\n")
    chunk = next(open_edge_stream(path).chunks())
    assert (chunk.src.tolist(), chunk.dst.tolist()) == ([0, 2, 4], [1, 3, 5])


@all_pairs
@pytest.mark.parametrize("separator", [",", "\t", "   ", "::", " ; "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_where_a_block_of_text_ends_changes_nothing(tmp_path, monkeypatch, separator, end, block_bytes):
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", block_bytes)
    lines = [f"{u}{separator}{v}{' ' * (i % 3)}" for i, (u, v) in enumerate(EDGES.T)]
    for i, extra in enumerate(("# note", "", "   ", "  % note, indented", "#")):
        lines.insert(11 * i, extra)
    lines[20], lines[40] = f'"{lines[20].replace(separator, chr(34) + separator)}', f"  {lines[40]}"
    path = tmp_path / "a.txt"
    path.write_bytes(end.join(lines).encode())
    chunk = next(open_edge_stream(path, num_nodes=NUM_NODES).chunks())
    assert np.array_equal(np.stack([chunk.src, chunk.dst]), EDGES)
    lines[50] = f"7{separator}99"
    path.write_bytes(end.join(lines).encode())
    with pytest.raises(EdgeStreamError, match=said("51 99 num_nodes 40")):
        list(open_edge_stream(path, num_nodes=NUM_NODES, chunk_edges=10).chunks())
    lines[50] = f"7{separator}no"
    path.write_bytes(end.join(lines).encode())
    with pytest.raises(EdgeStreamError, match=said("line 51 'no' 64 bits")):
        list(open_edge_stream(path, num_nodes=NUM_NODES, chunk_edges=10).chunks())


def test_a_text_file_is_closed_after_an_early_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_text("0 1\n" * 20_000)
    chunks = open_edge_stream(path, chunk_edges=10).chunks()
    assert next(chunks).first_edge == 0
    assert str(path) in [file.path for file in psutil.Process().open_files()]
    chunks.close()
    deadline = time.monotonic() + 10
    while str(path) in [file.path for file in psutil.Process().open_files()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_text_columns_by_name_and_position(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('weight,"to node",from node\n0.5,1,0\n0.25,3,2')
    for src, dst in (("from node", "to node"), (2, 1)):
        chunk = next(open_edge_stream(path, src=src, dst=dst).chunks())
        assert (chunk.src.tolist(), chunk.dst.tolist()) == ([0, 2], [1, 3])


def test_text_options_overrule_what_is_found(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("1 2\n!note\n3 4\n")
    assert open_edge_stream(path, header=True, comment="!").count() == (5, 1)
    path.write_text("1x2\n3x4\n")
    assert open_edge_stream(path, separator="x").count() == (5, 2)
    path.write_text("12\t\t7\t\n5\t\t6\n")
    chunk = next(open_edge_stream(path, separator=" ").chunks())
    assert (chunk.src.tolist(), chunk.dst.tolist()) == ([12, 5], [7, 6])


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".parquet", ".csv", ".tsv", ".txt"])
@pytest.mark.parametrize("dtype", [None, "int64"])
def test_written_edges_read_back(tmp_path, suffix, dtype):
    stream = open_edge_stream(EDGES.astype(np.int32), chunk_edges=13)
    path = write_edges(stream, tmp_path / f"out{suffix}", dtype=dtype)
    options = {"dtype": dtype} if suffix == ".bin" else {}
    chunk = next(open_edge_stream(path, **options).chunks())
    assert np.array_equal(np.stack([chunk.src, chunk.dst]), EDGES)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match=said("num_nodes 5")):
        write_edges(open_edge_stream(EDGES, num_nodes=5), path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("name", "dtype"), [("a.xyz", None), ("a.bin", "float32")])
def test_writing_checks_its_arguments(tmp_path, name, dtype):
    with pytest.raises(ValueError, match="path|dtype.* int32.* int64"):
        write_edges(open_edge_stream(EDGES), tmp_path / name, dtype=dtype)


edge_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40)


@given(edge_lists, st.integers(1, 45), st.integers(0, 4), st.booleans())
def test_chunk_size_changes_nothing(tmp_path_factory, edges, chunk_edges, start_chunk, relabel):
    folder = tmp_path_factory.mktemp("chunks")
    whole = np.array(edges, np.int32).T
    whole.T.tofile(folder / "a.bin")
    (folder / "a.txt").write_text("".join(f"{u} {v}\n" for u, v in edges))
    pq.write_table(parquet_table(whole), folder / "a.parquet", row_group_size=3)
    if relabel:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(whole.T.ravel().tolist()))}
        whole = np.array([[numbers[i] for i in end] for end in whole.tolist()])
    for name, options in (("a.bin", {"dtype": "int32"}), ("a.txt", {}), ("a.parquet", {})):
        stream = open_edge_stream(folder / name, chunk_edges=chunk_edges, relabel=relabel, **options)
        chunks = list(stream.chunks(start_chunk))
        skipped = start_chunk * chunk_edges
        assert [chunk.first_edge for chunk in chunks] == list(range(skipped, len(edges), chunk_edges))
        got = [(u, v) for chunk in chunks for u, v in zip(chunk.src.tolist(), chunk.dst.tolist(), strict=True)]
        assert got == [tuple(edge) for edge in whole.T[skipped:].tolist()]


def test_unfinished_parquet_is_left_out_and_folders_named_like_files_are_read(tmp_path):
    for name in ("a.parquet", "_temporary/0/b.parquet", ".cache/c.parquet", "d.parquet/e.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"src": [1], "dst": [2]}), tmp_path / name)
    assert open_edge_stream(tmp_path).num_edges == 2
    assert open_edge_stream(str(tmp_path / "*.parquet")).num_edges == 2
    assert open_edge_stream(str(tmp_path / "**/*.parquet")).num_edges == 3  # a glob means what it matches


def test_a_first_field_may_be_empty_in_the_header_alone(tmp_path):
    (tmp_path / "e.csv").write_text(",src,dst\n0,5,6\n1,6,7\n")
    chunk = next(open_edge_stream(tmp_path / "e.csv").chunks())
    assert (chunk.src.tolist(), chunk.dst.tolist()) == ([5, 6], [6, 7])
