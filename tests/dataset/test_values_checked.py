"""Values that would spoil training in silence: NaN in sparse features, edge values and labels, refused in blocks."""

from types import SimpleNamespace

import numpy as np
import pytest

from lightning_gnnscale.dataset import CSRFeatures, GraphDataset, checks, load_files, load_npz
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import write_partition_store

NAN, INF = np.nan, np.inf


def stream(num_nodes: int = 4):
    return open_edge_stream(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=num_nodes)


def sparse(data) -> CSRFeatures:
    return CSRFeatures(np.array([0, 2, 2, 3, 4]), np.array([5, 1, 7, 0], np.int32), np.array(data, np.float32), (4, 50))


@pytest.fixture(params=[1, 2, 1 << 20])
def block(request, monkeypatch):
    monkeypatch.setattr(checks, "_BLOCK_VALUES", request.param)


@pytest.mark.parametrize(
    ("data", "place"),
    [([NAN, 1, 1, 1], "row 0, column 5 is nan"), ([1, 1, 1, -INF], "row 3, column 0 is -inf")],
)
def test_sparse_features_are_finite(block, data, place):
    with pytest.raises(ValueError, match=f"features: {place}; give finite numbers"):
        GraphDataset("x", stream(), features=sparse(data))
    GraphDataset("x", stream(), features=sparse([3e38, 3e38, 3e38, -3e38]))


def test_a_row_after_empty_ones_is_named(block):
    features = CSRFeatures(np.array([0, 0, 0, 0, 1]), np.array([2], np.int32), np.array([INF]), (4, 3))
    with pytest.raises(ValueError, match="features: row 3, column 2 is inf"):
        GraphDataset("x", stream(), features=features)


def test_scipy_matrices_are_checked():
    scipy = pytest.importorskip("scipy.sparse")
    with pytest.raises(ValueError, match="features: row 1, column 1 is nan"):
        GraphDataset("x", stream(2), features=scipy.csr_matrix(np.diag([1.0, NAN])))


def test_edge_weights_and_features_are_finite(block, tmp_path):
    np.save(tmp_path / "w.npy", np.array([1, 1, INF, 1], np.float16))
    for weight, told in [(np.array([1, NAN, 1, 1]), "edge 1 is nan"), (str(tmp_path / "w.npy"), "edge 2 is inf")]:
        with pytest.raises(ValueError, match=f"edge_weight: {told}; give finite numbers"):
            GraphDataset("x", stream(), edge_weight=weight)
    rows = np.ones((4, 3))
    rows[3, 1] = NAN
    with pytest.raises(ValueError, match="edge_features: edge 3, column 1 is nan"):
        GraphDataset("x", stream(), edge_features=rows)
    GraphDataset("x", stream(), edge_weight=np.arange(4), edge_features=np.ones((4, 0)))


@pytest.mark.parametrize("value", [NAN, 2, 0.5, -2, INF])
def test_labels_of_several_a_node_are_0_1_or_unknown(block, value):
    labels = np.array([[0, 1, -1], [1, 1, 0], [0, value, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=rf"labels .* must be 0, 1 or -1 .*, got {value:g}(\.0)? in row 2, column 1"):
        GraphDataset("x", stream(), labels=labels)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint8, bool, np.int64])
def test_labels_of_several_a_node_of_any_dtype(block, dtype):
    dataset = GraphDataset("x", stream(), labels=np.eye(4, 3).astype(dtype))
    assert (dataset.num_classes, dataset.multilabel) == (3, True)


def test_labels_of_several_a_node_where_none_is_known_or_their_number_differs():
    with pytest.raises(ValueError, match="labels: no node has one"):
        GraphDataset("x", stream(), labels=np.full((4, 3), -1))
    with pytest.raises(ValueError, match="num_classes must be 3, the columns of the labels, or None; got 7"):
        GraphDataset("x", stream(), labels=np.zeros((4, 3)), num_classes=7)


def test_one_column_of_labels_is_one_label_a_node_as_in_the_store():
    dataset = GraphDataset("x", stream(), labels=np.array([[0.0], [2], [NAN], [1]]))
    assert (dataset.num_classes, dataset.multilabel, dataset.labels.shape) == (3, False, (4,))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0.5, 1, 1], "labels must be whole numbers, -1 where unknown, got 0.5 in row 1"),
        ([0, 1, INF, 1], "labels must be whole numbers, -1 where unknown, got inf in row 2"),
        (["a", "b", "c", "d"], "labels must be numbers, got <U1"),
        (np.zeros((4, 2, 2)), r"labels must have shape .*, got \(4, 2, 2\)"),
    ],
)
def test_labels_that_are_no_classes(labels, message):
    with pytest.raises(ValueError, match=message):
        GraphDataset("x", stream(), labels=np.array(labels))


def test_unsigned_labels_are_classes():
    assert GraphDataset("x", stream(), labels=np.array([0, 1, 2, 2], np.uint8)).num_classes == 3


def test_a_memory_map_is_read_in_blocks(monkeypatch, tmp_path):
    np.save(tmp_path / "w.npy", np.ones(1000, np.float32))
    largest = []
    isfinite = np.isfinite
    monkeypatch.setattr(checks, "_BLOCK_VALUES", 64)
    monkeypatch.setattr(checks.np, "isfinite", lambda rows: largest.append(rows.size) or isfinite(rows))
    checks.check_edge_values("edge_weight", tmp_path / "w.npy")
    assert sum(largest) == 1000 and max(largest) == 64


def test_npz_does_not_cut_fractions_and_nan_off_the_labels(tmp_path):
    (tmp_path / "odd").mkdir()
    edges = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "odd" / "graph.npz", edge_index=edges, y=np.array([0.5, 1, 1]))
    with pytest.raises(ValueError, match="labels must be whole numbers, .*, got 0.5 in row 0"):
        load_npz(str(tmp_path / "odd"))
    np.savez(tmp_path / "odd" / "graph.npz", edge_index=edges, y=np.array([0, 1, NAN]))
    dataset = load_npz(str(tmp_path / "odd"))
    assert dataset.num_classes == 2 and not any(mask[2] for mask in dataset.masks.values())


@pytest.fixture
def files(tmp_path) -> dict:
    np.save(tmp_path / "edges.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    np.savez(tmp_path / "x.npz", x=np.ones((4, 3)), other=np.ones(2))
    (tmp_path / "empty.npy").touch()
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    return {"edges": str(tmp_path / "edges.npy"), "folder": str(tmp_path)}


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("labels", "empty.npy", r"dataset.labels: \S+/empty.npy is not a .npy file that numpy can map"),
        ("features", "x.npz", r"dataset.features: \S+/x.npz is an archive of x, other; save one of them"),
        ("features", "broken.npz", r"dataset.features: \S+/broken.npz is not a .npy file"),
    ],
)
def test_files_that_hold_no_array(files, key, name, message):
    with pytest.raises(ValueError, match=message):
        load_files(files["edges"], **{key: f"{files['folder']}/{name}"})


def test_options_that_are_not_by_name(files):
    with pytest.raises(ValueError, match="dataset.reader must be options by name .*, got 3"):
        load_files(files["edges"], reader=3)
    with pytest.raises(ValueError, match="dataset.hold_out must be shares by name .*, got 0.1"):
        load_files(files["edges"], hold_out=0.1)


def write(folder, features):
    halves = SimpleNamespace(part_id=np.array([0, 1, 0, 1], np.int32), num_parts=2)
    return write_partition_store(folder, stream(), halves, features=features)


@pytest.mark.parametrize("place", [0, 3])
def test_a_store_written_by_hand_has_finite_sparse_features(tmp_path, place):
    data = [1.0, 1, 1, 1]
    data[place] = NAN
    row, column = [(0, 5), None, None, (3, 0)][place]
    with pytest.raises(ValueError, match=f"features: row {row}, column {column} is nan; give finite numbers"):
        write(tmp_path / "store", sparse(data))


def test_finite_features_whose_sum_is_not_are_stored(tmp_path):
    store = write(tmp_path / "store", np.full((4, 3), 1.7e308))
    assert (store.features.gather(np.arange(4)) == 1.7e308).all()
