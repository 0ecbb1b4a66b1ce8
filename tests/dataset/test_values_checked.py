"""Values that would spoil training in silence: NaN in sparse features, edge values and labels, refused in blocks."""

from types import SimpleNamespace

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import CSRArrays, GraphDataset, load_files, load_npz
from lightning_gnnscale.dataset import value_checks as values
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import write_partition_store
from tests.says import said

NAN, INF = np.nan, np.inf


def stream(num_nodes: int = 4):
    return open_edge_stream(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=num_nodes)


def sparse(data) -> CSRArrays:
    return CSRArrays(np.array([0, 2, 2, 3, 4]), np.array([5, 1, 7, 0], np.int32), np.array(data, np.float32), (4, 50))


@pytest.fixture
def prepare(tmp_path):
    """Prepare a store of a data set, by a partitioner that fails the test where values were to be refused before."""

    def prepared(num_nodes: int = 4, refused: bool = False, **arrays) -> gs.PartitionStore:
        def partitioner(stream, num_parts, **options):
            assert not refused, "partitioned, where a value was to be refused before"
            return gs.partition(stream, "random", num_parts=num_parts, **options)

        partitioner.fingerprint = "random, unless refused"
        dataset = GraphDataset("x", stream(num_nodes), **arrays)
        root = tmp_path / "stores" / str(len(list(tmp_path.glob("stores/*/*"))))
        dm = gs.PartitionDataModule(root=root, dataset=dataset, partitioner=partitioner, num_parts=2)
        dm.prepare_data()
        return dm.store

    return prepared


@pytest.fixture
def refuses(prepare, tmp_path):
    """Expect a refusal before the partitioning, and nothing left behind."""

    def refused(message: str, **arrays) -> None:
        with pytest.raises(ValueError, match=message):
            prepare(refused=True, **arrays)
        assert not (tmp_path / "stores").exists()

    return refused


@pytest.fixture(params=[1, 2, 1 << 20])
def block(request, monkeypatch):
    monkeypatch.setattr(values, "_BLOCK_VALUES", request.param)


@pytest.mark.parametrize(
    ("data", "place"),
    [([NAN, 1, 1, 1], "row 0, column 5 is nan"), ([1, 1, 1, -INF], "row 3, column 0 is -inf")],
)
def test_sparse_features_are_finite(block, refuses, prepare, data, place):
    refuses(f"features: {place}; give finite numbers", features=sparse(data))
    assert prepare(features=sparse([3e38, 3e38, 3e38, -3e38])).features.is_sparse


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"edge_weight": np.ones(3)}, r"edge_weight must have shape \(4\), got \(3,\)"),
        ({"edge_features": np.ones((5, 2))}, r"edge_features must have shape \(4, columns\), got \(5, 2\)"),
        ({"features": np.ones((3, 2))}, r"features must have shape \(4, columns\), got \(3, 2\)"),
        ({"labels": np.zeros(5, int)}, r"labels must have shape .*, got \(5,\)"),
        ({"masks": {"train": np.ones(2, bool)}}, r"masks\['train'\] must be bool of shape \(4,\)"),
    ],
)
def test_arrays_of_another_length_are_refused_before_the_partitioning(refuses, arrays, message):
    refuses(message, **arrays)


def test_a_row_after_empty_ones_is_named(block, refuses):
    features = CSRArrays(np.array([0, 0, 0, 0, 1]), np.array([2], np.int32), np.array([INF]), (4, 3))
    refuses("features: row 3, column 2 is inf", features=features)


def test_scipy_matrices_are_checked(refuses):
    scipy = pytest.importorskip("scipy.sparse", reason="the extra [test] is not installed: scipy")
    refuses("features: row 1, column 1 is nan", features=scipy.csr_matrix(np.diag([1.0, NAN, 1, 1])))


def test_edge_weights_and_features_are_finite(block, refuses, prepare, tmp_path):
    np.save(tmp_path / "w.npy", np.array([1, 1, INF, 1], np.float16))
    for weight, told in [(np.array([1, NAN, 1, 1]), "edge 1 is nan"), (str(tmp_path / "w.npy"), "edge 2 is inf")]:
        refuses(f"edge_weight: {told}; give finite numbers", edge_weight=weight)
    rows = np.ones((4, 3))
    rows[3, 1] = NAN
    refuses("edge_features: edge 3, column 1 is nan", edge_features=rows)
    assert prepare(edge_weight=np.arange(4), edge_features=np.ones((4, 0))).edge_weight is not None


@pytest.mark.parametrize("value", [NAN, 2, 0.5, -2, INF])
def test_labels_of_several_a_node_are_0_1_or_unknown(block, refuses, value):
    labels = np.array([[0, 1, -1], [1, 1, 0], [0, value, 0], [0, 0, 0]])
    refuses(rf"labels .* must each be 0, 1 or -1 .*, got {value:g}(\.0)? in row 2, column 1", labels=labels)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint8, bool, np.int64])
def test_labels_of_several_a_node_of_any_dtype(block, prepare, dtype):
    labels = np.eye(4, 3).astype(dtype)
    dataset = GraphDataset("x", stream(), labels=labels)
    assert (dataset.num_classes, dataset.multilabel) == (3, True)
    store = prepare(labels=labels)
    assert np.array_equal(store.labels, labels[store.original_nid])


def test_labels_of_several_a_node_where_none_is_known_or_their_number_differs():
    with pytest.raises(ValueError, match="labels: no node has one"):
        GraphDataset("x", stream(), labels=np.full((4, 3), -1))
    with pytest.raises(ValueError, match=said("labels 0 1 -1 nan 0 0 np.nan_to_num(labels, nan=-1)")):
        GraphDataset("x", stream(), labels=np.full((4, 3), NAN))
    with pytest.raises(ValueError, match=said("num_classes 3 None 7")):
        GraphDataset("x", stream(), labels=np.zeros((4, 3)), num_classes=7)


def test_one_column_of_labels_is_one_label_a_node_as_in_the_store():
    dataset = GraphDataset("x", stream(), labels=np.array([[0.0], [2], [NAN], [1]]))
    assert (dataset.num_classes, dataset.multilabel, dataset.labels.shape) == (3, False, (4,))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0.5, 1, 1], "labels -1 0.5 1"),
        ([0, 1, INF, 1], "labels -1 inf 2"),
        (["a", "b", "c", "d"], "labels numbers <U1"),
        (np.zeros((4, 2, 2)), "labels (4, 2 2)"),
    ],
)
def test_labels_that_are_no_classes(labels, message):
    with pytest.raises(ValueError, match=said(message)):
        GraphDataset("x", stream(), labels=np.array(labels))


def test_unsigned_labels_are_classes():
    assert GraphDataset("x", stream(), labels=np.array([0, 1, 2, 2], np.uint8)).num_classes == 3


def test_a_memory_map_is_read_in_blocks(monkeypatch, tmp_path):
    np.save(tmp_path / "w.npy", np.ones(1000, np.float32))
    largest = []
    isfinite = np.isfinite
    monkeypatch.setattr(values, "_BLOCK_VALUES", 64)
    monkeypatch.setattr(values.np, "isfinite", lambda rows: largest.append(rows.size) or isfinite(rows))
    values.check_edge_values("edge_weight", tmp_path / "w.npy")
    assert sum(largest) == 1000 and max(largest) == 64


def test_npz_does_not_cut_fractions_and_nan_off_the_labels(tmp_path):
    (tmp_path / "odd").mkdir()
    edges = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "odd" / "graph.npz", edge_index=edges, y=np.array([0.5, 1, 1]))
    with pytest.raises(ValueError, match=said("labels 0.5 0")):
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
        ("labels", "empty.npy", "labels /empty.npy"),
        ("features", "x.npz", "features /x.npz"),
        ("features", "broken.npz", "features /broken.npz"),
    ],
)
def test_files_that_hold_no_array(files, key, name, message):
    with pytest.raises(ValueError, match=said(message)):
        load_files(files["edges"], **{key: f"{files['folder']}/{name}"})


def test_options_that_are_not_by_name(files):
    with pytest.raises(ValueError, match=said("reader 3")):
        load_files(files["edges"], reader=3)
    with pytest.raises(ValueError, match=said("hold_out 0.1")):
        load_files(files["edges"], hold_out=0.1)


def write(folder, features=None, **arrays):
    halves = SimpleNamespace(part_id=np.array([0, 1, 0, 1], np.int32), num_parts=2)
    return write_partition_store(folder, stream(), halves, features=features, **arrays)


@pytest.mark.parametrize("place", [0, 3])
def test_a_store_written_by_hand_has_finite_sparse_features(tmp_path, place):
    data = [1.0, 1, 1, 1]
    data[place] = NAN
    row, column = [(0, 5), None, None, (3, 0)][place]
    with pytest.raises(ValueError, match=said(f"features {row} {column} nan")):
        write(tmp_path / "store", sparse(data))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"edge_weight": np.array([1, 1, INF, 1])}, "edge_weight 2 inf"),
        ({"edge_features": np.array([[1, 1], [1, NAN], [1, 1], [1, 1]])}, "edge_features 1 1 nan"),
        ({"labels": np.array([[0, 1], [1, -1], [0, 0], [7, 0]])}, "labels 7 3 0"),
        ({"labels": np.array([0, -2, 1, 1])}, "labels -1 0 -2 1"),
        ({"edge_weight": np.array([1, 1e300, 1, 1])}, "edge_weight 1 1e+300 float32"),
        ({"labels": np.array([0, 1, 1e30, 1])}, "labels 2**31 1e+30 2"),
        (
            {"labels": np.array([0, 1, 2**63 + 5, 1], np.uint64)},
            "labels 2**31 9223372036854775813 2",
        ),
        ({"labels": np.array([0, 1, INF, NAN])}, "labels inf 2"),
    ],
)
def test_a_store_written_by_hand_has_values_to_learn_from(block, tmp_path, arrays, message):
    with pytest.raises(ValueError, match=said(message)):
        write(tmp_path / "stores" / "x", **arrays)
    assert not (tmp_path / "stores").exists()


def test_every_bit_pattern_is_stored_on_request(tmp_path):
    weight = np.array([1, NAN, INF, 1])
    store = write(tmp_path / "store", edge_weight=weight, check_finite=False)
    assert np.array_equal(np.sort(store.edge_weight), np.sort(weight), equal_nan=True)


def test_values_are_read_when_the_store_is_made_alone(tmp_path, monkeypatch):
    def prepare_once_more():
        arrays = {"edge_weight": np.ones(4), "features": sparse([1, 1, 1, 1]), "labels": np.eye(4, 3)}
        dataset = GraphDataset("x", stream(), **arrays)
        gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, partitioner="random", num_parts=2).prepare_data()

    prepare_once_more()
    for name in ("check_edge_values", "check_sparse_features", "check_label_values"):
        monkeypatch.setattr(values, name, None)
    prepare_once_more()


def test_nodes_in_two_masks_and_labels_without_a_number_are_told(block, prepare, recwarn):
    masks = {"train": [1, 1, 0, 0], "val": [1, 1, 1, 0], "test": [0, 1, 0, 1]}
    masks = {name: np.array(mask, bool) for name, mask in masks.items()}
    prepare(labels=np.array([0, NAN, 1, NAN]), masks=masks)
    told = [str(warning.message) for warning in recwarn if "nodes" in str(warning.message)]
    assert told == [
        "masks share nodes, train and val 2, train and test 1, val and test 1: what is trained or chosen on is no "
        "test; make them disjoint",
        "labels: 2 of 4 nodes have NaN, and count as unlabelled (-1)",
    ]
    recwarn.clear()
    prepare(labels=np.array([0, -1.0, 1, 1]), masks={"train": masks["train"], "test": ~masks["train"]})
    assert not [warning for warning in recwarn if "nodes" in str(warning.message)]


def test_finite_features_whose_sum_is_not_are_stored(tmp_path):
    store = write(tmp_path / "store", np.full((4, 3), 1.7e308))
    assert (store.features.read(np.arange(4)) == 1.7e308).all()


def test_columns_of_very_different_scale_are_told(prepare):
    size, age = np.array([12.0, 9e4, 700, 3e3]), np.array([18.0, 80, 44, 31])
    told = "features: columns are .* column 0 from 12 to 90000 and column 1 from 18 to 80, .*: standardise"
    with pytest.warns(UserWarning, match=told):
        prepare(features=np.stack([size, age], axis=1).astype(np.float32))
    with pytest.warns(UserWarning, match="column 1 from -90000 to -12 and column 0 from 18 to 80"):
        prepare(features=np.stack([age, -size], axis=1), feature_storage="int8")


@pytest.mark.filterwarnings("error")
def test_columns_of_like_scale_and_those_near_zero_are_not_told(prepare):
    size, near = np.array([12.0, 9e4, 700, 3e3]), np.array([0.0, 1e-6, 1e-7, 0])
    for columns in ([size, size / 100], [near, near + 1], [size, np.zeros(4)], [size]):
        prepare(features=np.stack(columns, axis=1).astype(np.float32))


def test_ranges_are_of_all_blocks():
    ranges = values.ColumnRanges()
    for rows in (np.zeros((0, 2)), np.array([[1, 2]]), np.array([[-2000, 3]])):
        ranges.add(rows)
    with pytest.warns(UserWarning, match="x: .* column 0 from -2000 to 1"):
        ranges.tell("x")
