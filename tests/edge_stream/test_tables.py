"""Edges of tables, columns and sparse matrices are those of the same arrays; ids may be strings."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToSparseTensor

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.edge_stream.parquet import BATCH_ROWS
from lightning_gnnscale.edge_stream.table import as_column, rows_of
from lightning_gnnscale.errors import EdgeStreamError
from tests.says import said

polars = pytest.importorskip("polars", reason="the extra [test] is not installed: polars")
RNG = np.random.default_rng(11)
EDGES = RNG.integers(0, 50, (2, 400))
NAMES = np.array([f"né{i}" for i in range(50)])
TO = {"pandas": lambda frame: frame, "polars": polars.from_pandas, "arrow": pa.Table.from_pandas}
every_kind = pytest.mark.parametrize("kind", list(TO))


def table(kind, src=EDGES[0], dst=EDGES[1], **more):
    return TO[kind](pd.DataFrame({**more, "src": src, "dst": dst}))


def column(kind, values):
    made = TO[kind](pd.DataFrame({"id": values}))
    return made.column("id") if kind == "arrow" else made["id"]


def edges_of(stream) -> np.ndarray:
    return np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in stream.chunks()], axis=1)


@every_kind
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_integers(kind, dtype):
    stream = open_edge_stream(table(kind, *EDGES.astype(dtype), other=["x"] * 400), chunk_edges=37)
    np.testing.assert_array_equal(edges_of(stream), EDGES)
    np.testing.assert_array_equal(
        np.concatenate([chunk.src for chunk in stream.chunks(start_chunk=3)]), EDGES[0, 3 * 37 :]
    )
    assert stream.fingerprint() == open_edge_stream(EDGES.astype(dtype)).fingerprint()
    assert stream.num_edges == 400


@every_kind
def test_a_pair_of_columns(kind):
    stream = open_edge_stream(tuple(column(kind, end) for end in EDGES))
    np.testing.assert_array_equal(edges_of(stream), EDGES)


@every_kind
@pytest.mark.parametrize("categorical", [False, True])
def test_strings_are_numbered_and_listed(kind, categorical):
    ends = [pd.Categorical(NAMES[end]) if categorical else NAMES[end] for end in EDGES]
    stream = open_edge_stream(table(kind, *ends), relabel=True, chunk_edges=64)
    found = edges_of(stream)
    np.testing.assert_array_equal(np.asarray(stream.node_ids)[found], NAMES[EDGES])
    listed = open_edge_stream(table(kind, *ends), relabel=True, nodes=column(kind, NAMES[::-1]))
    np.testing.assert_array_equal(edges_of(listed), 49 - EDGES)
    assert listed.num_nodes == 50


def test_columns_in_many_pieces_and_more_than_a_batch():
    num = BATCH_ROWS + 1000
    ids = RNG.integers(0, 9, num)
    pieces = np.array_split(ids, [1, 70_000, 100_000])
    chunked = pa.chunked_array([pa.array([f"id{i}" for i in piece]) for piece in pieces])
    plain = pa.chunked_array([pa.array(piece) for piece in pieces])
    np.testing.assert_array_equal(edges_of(open_edge_stream((plain, plain))), np.stack([ids, ids]))
    stream = open_edge_stream((chunked, chunked), relabel=True)
    found = edges_of(stream)
    assert (np.asarray(stream.node_ids)[found[0]] == np.array([f"id{i}" for i in ids])).all()


def test_arrays_of_strings():
    for source in (NAMES[EDGES], NAMES[EDGES].T, tuple(NAMES[EDGES]), NAMES[EDGES].astype(object)):
        stream = open_edge_stream(source, relabel=True)
        found = edges_of(stream)
        np.testing.assert_array_equal(np.asarray(stream.node_ids)[found], NAMES[EDGES])


def test_numbers_are_shared_and_not_copied():
    """Zero-copy: columns of Arrow, pandas and polars give the memory that they hold."""
    values = np.arange(1000, dtype=np.int64)
    frame = pd.DataFrame({"a": values, "b": values}, copy=False)
    for given in (pa.array(values), polars.from_numpy(values[:, None])["column_0"], frame["a"], pd.Series(values)):
        held = as_column(given)
        assert held.num_chunks == 1
        begins = np.frombuffer(held.chunk(0).buffers()[1], np.uint8).ctypes.data
        assert rows_of(given).ctypes.data == begins
    block = pd.DataFrame(RNG.random((10, 3)))
    assert np.shares_memory(rows_of(block), block.to_numpy())


@every_kind
def test_rows(kind):
    rows = RNG.random((6, 3)).astype(np.float32)
    frame = pd.DataFrame(rows, columns=["a", "b", "c"])
    np.testing.assert_array_equal(rows_of(TO[kind](frame)), rows)
    mixed = TO[kind](frame.assign(a=np.arange(6)))
    np.testing.assert_allclose(rows_of(mixed), np.column_stack([np.arange(6), rows[:, 1:]]))
    np.testing.assert_array_equal(rows_of(TO[kind](frame[["b"]])), rows[:, 1])
    np.testing.assert_array_equal(rows_of(column(kind, [True, False])), [True, False])
    with pytest.raises(ValueError, match=said("column 'a'")):
        rows_of(TO[kind](frame.assign(a=list("xxxxxx"))))


def test_lists_of_one_length_are_rows():
    rows = RNG.random((6, 3))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 3)
    np.testing.assert_array_equal(rows_of(fixed.slice(2)), rows[2:])
    np.testing.assert_array_equal(rows_of(polars.Series(rows.tolist())), rows)
    assert np.isnan(rows_of(polars.Series([1, None]))[1])
    with pytest.raises(ValueError, match="lists of several lengths"):
        rows_of(polars.Series([[1.0], [1.0, 2.0]]))


@every_kind
def test_what_is_no_edge_is_refused(kind):
    def refused(message, source, error=EdgeStreamError, **options):
        with pytest.raises(error, match=message):
            edges_of(open_edge_stream(source, **options))

    refused("column 'src' holds strings; pass relabel=True", table(kind, NAMES[EDGES[0]]))
    refused("must hold integers, or strings with relabel=True, got double", table(kind, EDGES[0] / 2))
    names = table(kind, np.where(EDGES[0] == 3, None, NAMES[EDGES[0]]))
    refused(rf"edge {np.flatnonzero(EDGES[0] == 3)[0]}: the id is missing \(null\)", names, relabel=True)
    three = TO[kind](pd.DataFrame({"a": [1], "b": [2], "c": [3]}))
    refused("which columns are the edges", three, ValueError)
    np.testing.assert_array_equal(edges_of(open_edge_stream(three, src="c", dst=0)), [[3], [1]])
    with pytest.warns(UserWarning, match=said("relation edges edge_weight")):
        open_edge_stream(table(kind, relation=["x"] * 400))
    listed = {"relabel": True, "nodes": column(kind, NAMES[:49])}
    refused("node id 'né49' is not among the 49 listed", table(kind, NAMES[EDGES[0]], NAMES[EDGES[1]]), **listed)
    twice = {"relabel": True, "nodes": column(kind, ["a", "b", "a"])}
    refused("nodes: id 'a' is repeated in row 2", table(kind), ValueError, **twice)
    refused("nodes goes with relabel=True", table(kind), ValueError, nodes=[1], relabel=False)


@pytest.mark.parametrize("form", ["coo", "csr", "csc", "lil", "torch coo", "torch csr", "torch csc"])
def test_sparse_matrices(form):
    distinct = np.unique(EDGES, axis=1)
    matrix = scipy.sparse.coo_matrix((np.ones(distinct.shape[1]), distinct), (60, 60))
    if form.startswith("torch"):
        tensor = torch.sparse_coo_tensor(torch.from_numpy(distinct), torch.ones(distinct.shape[1]), (60, 60))
        matrix = {"coo": tensor, "csr": tensor.to_sparse_csr(), "csc": tensor.to_sparse_csc()}[form.split()[1]]
    else:
        matrix = matrix.asformat(form)
    stream = open_edge_stream(matrix, chunk_edges=29)
    found = edges_of(stream)
    assert sorted(map(tuple, found.T.tolist())) == list(map(tuple, distinct.T.tolist()))
    assert stream.count() == (60, distinct.shape[1])
    np.testing.assert_array_equal(np.concatenate([c.src for c in stream.chunks(2)]), found[0, 58:])


def test_values_of_a_matrix_are_told():
    matrix = scipy.sparse.csr_matrix(np.array([[0, 2.0], [3.0, 0]]))
    with pytest.warns(UserWarning, match=said("2 3 edge_weight=")):
        open_edge_stream(matrix)
    with pytest.raises(EdgeStreamError, match=said("(num_nodes, num_nodes) (2, 3)")):
        open_edge_stream(scipy.sparse.csr_matrix((2, 3)))
    with pytest.raises(ValueError, match=said("relabel=True lists edges")):
        open_edge_stream(matrix, relabel=True)


def test_the_adj_t_of_pyg_has_its_edges():
    data = Data(edge_index=torch.from_numpy(np.unique(EDGES, axis=1)), num_nodes=55)
    turned = ToSparseTensor(layout=torch.sparse_csr)(data.clone())
    found = edges_of(open_edge_stream(turned))
    assert sorted(map(tuple, found.T.tolist())) == sorted(map(tuple, data.edge_index.T.tolist()))
    with pytest.raises(EdgeStreamError, match=said("HeteroData load_pyg(data) data.to_homogeneous()")):
        open_edge_stream(HeteroData())
