"""What cannot be read as edges is refused in one line with its place and the remedy."""

import gzip
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError, GNNScaleError
from tests.says import said


def refused(source, message, error=EdgeStreamError, **options):
    with pytest.raises(error) as caught:
        for _ in open_edge_stream(source, **options).chunks():
            pass
    told = str(caught.value)
    assert "\n" not in told
    assert re.search(message, told), told


def test_ids_that_a_narrow_file_cannot_hold_are_refused(tmp_path):
    stream = open_edge_stream(np.array([[2**40, 1], [1, 2]]), num_nodes=2**41)
    for name in ("e.bin", "e.npy", "e.csv", "e.parquet"):
        with pytest.raises(EdgeStreamError, match=said("1099511627776 int32 int64")):
            write_edges(stream, tmp_path / name, dtype="int32")
    assert not list(tmp_path.iterdir())


def saved(folder, kind, edges):
    """Write (num_edges, 2) edges in one format and return (path, options, how its positions are told)."""
    path = folder / f"edges.{kind}"
    edges = np.asarray(edges, np.int64)
    if kind == "npy":
        np.save(path, edges.T)
    elif kind == "bin":
        edges.tofile(path)
        return path, {"dtype": "int64"}, "edge {}"
    elif kind == "parquet":
        pq.write_table(pa.table({"src": edges[:, 0], "dst": edges[:, 1]}), path, row_group_size=2)
    elif kind == "csv":
        path.write_text("# comment\nsrc,dst\n" + "".join(f"{u},{v}\n\n" for u, v in edges))
        return path, {}, "line {}"
    return path, {}, "edge {}"


@pytest.mark.parametrize("kind", ["npy", "bin", "parquet", "csv"])
@pytest.mark.parametrize("chunk_edges", [1, 2, 100])
def test_ids_out_of_range_are_told_with_their_place(tmp_path, kind, chunk_edges):
    path, options, place = saved(tmp_path, kind, [[0, 1], [1, 2], [2, 0], [3, 7], [9, 1]])
    where = place.format(9 if kind == "csv" else 3)
    message = rf"{re.escape(str(path))}: {where}: dst 7 is not below num_nodes 5"
    refused(path, message, num_nodes=5, chunk_edges=chunk_edges, **options)
    path, options, place = saved(tmp_path, kind, [[0, 1], [-4, 2]])
    where = place.format(5 if kind == "csv" else 1)
    refused(path, rf"{where}: src -4 is negative; pass relabel=True", chunk_edges=chunk_edges, **options)


def test_ids_are_checked_before_they_are_narrowed():
    refused(np.array([[2**32 + 1], [1]]), "edge 0: src 4294967297 is not below num_nodes 5", num_nodes=5)
    refused(np.array([[2**32 + 1, 1]]).T.copy().T, "src 4294967297 is not below", num_nodes=5)
    refused(np.array([[2**63 + 5], [1]], np.uint64), "does not fit int64; pass relabel=True")


@pytest.mark.parametrize(
    "source",
    [
        np.array([[0.0, 1.0], [1.0, 2.0]]),
        torch.tensor([[0.0, 1.0], [1.0, 2.0]]),
        Data(edge_index=torch.tensor([[0.0, 1.0], [1.0, 2.0]]), num_nodes=3),
    ],
)
def test_floats_are_refused_even_where_they_are_whole(source):
    refused(source, r"edges must be integers, got float(32|64); node ids are whole numbers: convert them")


def test_other_dtypes_are_refused(tmp_path):
    refused(np.array([["a", "b"], ["b", "c"]]), "column 'src' holds strings; pass relabel=True")
    refused(np.array([[True], [False]]), "edges must be integers, got bool")
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    refused(tmp_path / "a.npy", "a.npy: edges must be integers, got float64; node ids are whole numbers")
    refused(tmp_path / "a.npy", "a.npy: edges must be integers, got float64", relabel=True)


@pytest.mark.parametrize("shape", [(3, 4), (6,), (2, 2, 2), ()])
def test_other_shapes_are_refused(tmp_path, shape):
    array = np.zeros(shape, np.int64)
    message = rf"the shape \(2, num_edges\) or \(num_edges, 2\), got {re.escape(str(shape))}"
    refused(array, message)
    np.save(tmp_path / "a.npy", array)
    refused(tmp_path / "a.npy", message)


def test_a_pair_of_arrays_must_agree():
    refused((np.zeros(3, int), np.zeros(4, int)), r"of one dtype and length, got int64 \(3,\) and int64 \(4,\)")


def test_sources_that_are_none():
    refused(7, "source must be a path .*PyG Data, an array or tensor.*got int", ValueError)
    refused(None, "got NoneType", ValueError)
    refused(HeteroData(), "HeteroData: a stream has edges of one type: gs.dataset.load_pyg")
    refused(Data(x=torch.zeros(3, 1)), "Data: has neither edge_index nor adj_t")


def test_missing_files_are_told_with_near_names(tmp_path):
    (tmp_path / "edges.npy").touch()
    refused(tmp_path / "edge.npy", "no such file or folder; .* has edges.npy")
    refused(tmp_path / "zzzzzz.bin", "nothing in .* has a similar name")
    refused(tmp_path / "nowhere" / "edges.npy", r"nor the folder .*nowhere")


@pytest.mark.parametrize("name", ["edges.h5", "edges", "edges.npy.gz", "edges.npz"])
def test_unknown_suffixes_list_the_allowed(tmp_path, name):
    (tmp_path / name).write_text("x")
    refused(tmp_path / name, r"a path must be \.npy, \.bin, \.csv, \.tsv, \.txt", ValueError)


@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a.csv", "a.parquet"])
def test_empty_files(tmp_path, name):
    (tmp_path / name).touch()
    refused(tmp_path / name, rf"{name}: the file is empty")


def test_files_without_edges(tmp_path):
    np.save(tmp_path / "a.npy", np.empty((2, 0), np.int64))
    (tmp_path / "a.csv").write_text("# nothing\nsrc,dst\n")
    (tmp_path / "a.txt").write_text("# nothing\n\n")
    with gzip.open(tmp_path / "a.tsv.gz", "wb"):
        pass
    pq.write_table(pa.table({"src": pa.array([], pa.int64()), "dst": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    for name in ("a.npy", "a.csv", "a.txt", "a.tsv.gz", "a.parquet"):
        refused(tmp_path / name, rf"{name}: the file holds no edges")
    refused(tmp_path / "folder", r"folder: no \.parquet files there")
    refused(tmp_path / "*.parq", r"no \.parquet files there")


def test_truncated_and_damaged_binary_files(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(7, dtype=np.int32).tofile(path)
    refused(path, "cut short after 3 edges: 28 bytes is not a multiple of 8, .*pass dtype=")
    np.save(tmp_path / "a.npy", np.zeros((2, 1000), np.int64))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-100])
    refused(tmp_path / "a.npy", r"cut short: 1000 edges need 16128 bytes, the file has 16028")
    for damaged in (b"garbage" * 10, whole[:40], whole[:6] + b"\x09\x09" + whole[8:], whole[:10] + b"(" * 60):
        (tmp_path / "a.npy").write_bytes(damaged)
        refused(tmp_path / "a.npy", r"a.npy: damaged, or not a \.npy file")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "a.bin"
    np.zeros((1000, 2), np.int32).tofile(path)
    stream = open_edge_stream(path, dtype="int32")
    path.write_bytes(path.read_bytes()[:800])
    with pytest.raises(EdgeStreamError, match=said("edge 0 file 1000 edges")):
        list(stream.chunks())


def test_raw_files_of_64_bits_are_not_read_as_32(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(20, dtype=np.int64).tofile(path)
    refused(path, "looks like 64-bit ids: pass dtype='int64'")
    assert open_edge_stream(path, dtype=np.int64).count() == (20, 10)
    assert open_edge_stream(path, dtype="int32").count() == (20, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "dtype must be an integer dtype such as int32 or int64, got 'float32'"),
        ({"dtype": "nonsense"}, "dtype must be an integer dtype"),
        ({"bin_layout": "rows"}, "bin_layout must be one of pairs, columns, got 'rows'"),
        ({"separator": ","}, "unknown option 'separator' for .bin; allowed: dtype, bin_layout"),
    ],
)
def test_raw_file_options(tmp_path, options, message):
    np.arange(20, dtype=np.int32).tofile(tmp_path / "a.bin")
    refused(tmp_path / "a.bin", message, ValueError, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n1,b\n", "line 2: 'b' is not a whole number of 64 bits; pass relabel=True"),
        ("a,b\n", "line 1: 'a' is not a whole number of 64 bits; pass relabel=True"),
        ("# c\n0,1\n\n1.0,2\n", "line 4: '1.0' is not a whole number"),
        ("1.5,2\n0,1\n", "line 1: '1.5' is not a whole number"),
        ("0,1\n99999999999999999999,2\n", "line 2: '99999999999999999999' is not a whole number of 64 bits"),
        ("0,1\n1,2\n3\n", "line 3: fields 0 and 1 are not both there, got '3'"),
        ("0,1\n1,2\n3,\n", "line 3: fields 0 and 1 are not both there, got '3,'"),
        ("0,1\n,2\n3,4\n", "line 2: fields 0 and 1 are not both there, got ',2'"),
        ("0,1\n-,2\n3,4\n", "line 2: '-' is not a whole number"),
        ("0,1\n+1,2\n", r"line 2: '\+1' is not a whole number"),
        ("0,1\n1,2,5\n", "line 2: 3 fields where the lines before have 2, got '1,2,5'"),
        ("0,1,9\n# c\n1,2\n", "line 3: 2 fields where the lines before have 3, got '1,2'"),
        ("7\n8\n", "line 1: no two fields in '7'; pass separator="),
        ("src,dst\n0,1\n2,x\n", "line 3: 'x' is not a whole number"),
    ],
)
def test_text_errors_tell_the_line(tmp_path, text, message):
    for name in ("a.csv", "a.csv.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        refused(path, rf"{re.escape(str(path))}: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"src": "nope", "dst": "dst"}, "src='nope' is not a column; columns: src, dst, w"),
        ({"src": "src"}, "pass both src= and dst=, or neither; columns: src, dst, w"),
        ({"src": "w", "dst": "w"}, "src and dst are the same column"),
        ({"src": 0, "dst": 5}, "dst=5 is not a column"),
        ({"header": False, "src": "src", "dst": "dst"}, "src='src' is not a column; columns: 0, 1, 2"),
        ({"separator": ""}, "separator must be a string"),
        ({"separator": "\r"}, "separator must be a string"),
        ({"comment": 5}, "comment must be ASCII characters, got 5"),
        ({"relabel": True, "id_type": "float"}, "id_type must be one of auto, integer, string, got 'float'"),
        ({"dtype": "int32"}, "unknown option 'dtype' for text; allowed: separator, comment, header, src, dst, id_type"),
    ],
)
def test_text_options(tmp_path, options, message):
    (tmp_path / "a.csv").write_text("src,dst,w\n0,1,5\n")
    refused(tmp_path / "a.csv", message, ValueError, **options)


def test_truncated_and_damaged_gzip(tmp_path):
    path = tmp_path / "a.csv.gz"
    whole = gzip.compress("".join(f"{i},{i * 7919 % 1000}\n" for i in range(1000)).encode())
    path.write_bytes(whole[:-300])
    refused(path, r"a.csv.gz: after line \d+: damaged or cut short")
    path.write_bytes(b"0,1\n1,2\n")
    refused(path, "damaged or cut short: Not a gzipped file")
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + b"\x00\xff" * 20 + whole[middle + 40 :])
    refused(path, "damaged or cut short")


def test_parquet_columns_and_types(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1], "b": [2], "c": [3]}), path)
    refused(path, "which columns are the edges. pass src= and dst=; columns: a, b, c", ValueError)
    refused(path, "src='x' is not a column; columns: a, b, c", ValueError, src="x", dst="b")
    refused(path, "unknown option 'column' for .parquet; allowed: src, dst", ValueError, column="a")
    pq.write_table(pa.table({"src": [1.0], "dst": [2.0]}), path)
    refused(path, "column 'src' must hold integers, or strings with relabel=True, got double")
    refused(path, "got double", relabel=True)
    pq.write_table(pa.table({"src": ["a"], "dst": ["b"]}), path)
    refused(path, "column 'src' holds strings; pass relabel=True")
    pq.write_table(pa.table({"src": [0, 1, None], "dst": [1, 2, 3]}), path)
    refused(path, r"a.parquet: edge 2: the id is missing \(null\)")


@pytest.mark.parametrize("types", [("int32", "uint32"), ("uint32", "int32"), ("int64", "uint64"), ("uint64", "int8")])
def test_parquet_columns_of_two_integer_types(tmp_path, types):
    path, high = tmp_path / "a.parquet", [100, 3_000_000_000]
    columns = [high if "uint" in name or name == "int64" else [1, 2] for name in types]
    pq.write_table(pa.table({"src": pa.array(columns[0], types[0]), "dst": pa.array(columns[1], types[1])}), path)
    assert open_edge_stream(path).dtype == np.int64
    refused(path, "the largest id is 3000000000 with 2 edges")


def test_damaged_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = np.random.default_rng(0).integers(0, 10**6, 20_000)
    pq.write_table(pa.table({"src": rows, "dst": rows}), path, compression="zstd", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    refused(path, "damaged, cut short or not a Parquet file")
    path.write_bytes(whole[:5000] + bytes(20_000) + whole[25_000:])
    refused(path, "a.parquet: edge 0: damaged or cut short")
    (tmp_path / "b.csv").write_text("0,1\n")
    refused(tmp_path / "*.*", r"a glob may match \.parquet files only, got", ValueError)


def test_the_errors_are_of_one_family():
    assert issubclass(EdgeStreamError, GNNScaleError)


@pytest.mark.parametrize(
    "text, line",
    [
        ('1,2,"x\n2,3,y\n', 1),
        ('# "\n1,2,y\n2,3,"x\n3,4,y\n4,5,"y"\n', 3),
        ('1,2,y\r\n2,3,"a""\r\n3,4,y\r\n', 2),
        ("1,2,y\n" * 200_000 + '2,3,"x\n' + "1,2,y\n" * 200_000, 200_001),
    ],
)
def test_a_quote_that_stays_open_loses_no_edges(tmp_path, text, line):
    (tmp_path / "e.csv").write_text(text)
    refused(tmp_path / "e.csv", f"e.csv: line {line}: .* opens a quote that the line does not close", header=False)


def test_quotes_within_a_line_are_read(tmp_path):
    (tmp_path / "e.csv").write_text('1,2,"a,b"\n"2",3,""\n3,4,5" pipe\n4,5,"say ""x"""\n')
    chunk = next(open_edge_stream(tmp_path / "e.csv").chunks())
    assert chunk.src.tolist() == [1, 2, 3, 4]
