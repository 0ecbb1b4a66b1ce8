"""OGB's data sets: a folder of the layout of its archives gives the graph that its own loader gives."""

import gzip

import numpy as np
import pytest

from lightning_gnnscale.dataset import load_ogb
from lightning_gnnscale.dataset.columns import opened
from tests.says import said

NUM_NODES, NUM_EDGES = 40, 150
RNG = np.random.default_rng(5)
EDGES = RNG.integers(0, NUM_NODES, (2, NUM_EDGES))
FEATURES = RNG.standard_normal((NUM_NODES, 6)).astype(np.float32)
EDGE_ROWS = RNG.random((NUM_EDGES, 2)).astype(np.float32)
LABELS = np.where(np.arange(NUM_NODES) % 9 == 4, np.nan, np.arange(NUM_NODES) % 5)
SPLIT = {"train": np.arange(0, 20), "valid": np.arange(20, 30), "test": np.arange(30, 40)[::-1]}


def write_text(path, rows) -> None:
    """A .csv.gz as pandas writes it without names and row numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.asarray(rows).reshape(len(rows), -1)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join("" if v != v else repr(v) for v in row) + "\n" for row in rows.tolist())


def write_split(folder, name="sales_ranking") -> None:
    for split, nodes in SPLIT.items():
        write_text(folder / "split" / name / f"{split}.csv.gz", nodes)


def text_folder(root, name="ogbn_products"):
    folder = root / name
    raw = folder / "raw"
    for file, rows in {
        "edge": EDGES.T,
        "node-feat": FEATURES,
        "node-label": LABELS,
        "num-node-list": [NUM_NODES],
        "num-edge-list": [NUM_EDGES],
    }.items():
        write_text(raw / f"{file}.csv.gz", rows)
    write_split(folder)
    return folder


def npz_folder(root, save=np.savez):
    raw = root / "ogbn_papers100M" / "raw"
    raw.mkdir(parents=True)
    arrays = {"edge_index": EDGES, "node_feat": FEATURES.astype(np.float16), "node_year": np.zeros((NUM_NODES, 1), int)}
    save(raw / "data.npz", num_nodes_list=[NUM_NODES], num_edges_list=[NUM_EDGES], **arrays)
    save(raw / "node-label.npz", node_label=LABELS[:, None])
    write_split(root / "ogbn_papers100M", "time")
    return raw.parent


def check(dataset, features) -> None:
    chunks = list(dataset.stream.chunks())
    for end, expected in zip(("src", "dst"), EDGES, strict=True):
        np.testing.assert_array_equal(np.concatenate([getattr(chunk, end) for chunk in chunks]), expected)
    assert dataset.stream.count() == (NUM_NODES, NUM_EDGES)
    np.testing.assert_array_equal(opened(dataset.features), features)
    np.testing.assert_array_equal(dataset.labels, LABELS)
    for name, split in (("train", "train"), ("val", "valid"), ("test", "test")):
        assert np.flatnonzero(dataset.masks[name]).tolist() == sorted(SPLIT[split].tolist())
    assert dataset.num_classes == 5


def test_text(tmp_path):
    folder = text_folder(tmp_path)
    dataset = load_ogb("ogbn-products", str(tmp_path))
    check(dataset, FEATURES)
    assert dataset.stream.to_undirected and dataset.stream.source_files() == [folder / "raw" / "edge.csv.gz"]
    made = sorted(path.name for path in (folder / "gnnscale").glob("*.npy"))
    assert len(made) == 1 and made[0].startswith("node-feat-")
    before = (folder / "gnnscale" / made[0]).stat().st_mtime_ns
    check(load_ogb("ogbn-products", str(tmp_path), chunk_edges=7), FEATURES)
    assert (folder / "gnnscale" / made[0]).stat().st_mtime_ns == before  # written once
    write_text(folder / "raw" / "node-feat.csv.gz", 2 * FEATURES)
    check(load_ogb("ogbn-products", str(tmp_path)), 2 * FEATURES)
    assert load_ogb("ogbn-products", str(tmp_path), use_features=False).features is None


def test_it_is_what_ogbs_own_reader_gives(tmp_path):
    raw = pytest.importorskip("ogb.io.read_graph_raw", reason="the extra [ogb] is not installed")
    folder = text_folder(tmp_path)
    graph = raw.read_csv_graph_raw(str(folder / "raw"))[0]
    dataset = load_ogb("ogbn-products", str(tmp_path))
    chunk = next(dataset.stream.chunks())
    np.testing.assert_array_equal(np.stack([chunk.src, chunk.dst]), graph["edge_index"])
    np.testing.assert_array_equal(opened(dataset.features), graph["node_feat"])


def test_edge_features_and_several_labels(tmp_path):
    """The layout of ogbn-proteins."""
    folder = text_folder(tmp_path, "ogbn_proteins")
    (folder / "raw" / "node-feat.csv.gz").unlink()
    several = (np.arange(NUM_NODES)[:, None] >> np.arange(3)) & 1
    write_text(folder / "raw" / "node-label.csv.gz", several)
    write_text(folder / "raw" / "edge-feat.csv.gz", EDGE_ROWS)
    write_text(folder / "raw" / "node_species.csv.gz", np.zeros(NUM_NODES, int))
    with pytest.warns(UserWarning, match=said("ogbn-proteins node_species")):
        dataset = load_ogb("ogbn-proteins", str(tmp_path))
    assert dataset.features is None and dataset.multilabel and dataset.num_classes == 3 and dataset.edge_dim == 2
    np.testing.assert_array_equal(opened(dataset.edge_features), EDGE_ROWS)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    folder = npz_folder(tmp_path, save)
    dataset = load_ogb("ogbn-papers100M", str(tmp_path))
    check(dataset, FEATURES.astype(np.float16))
    made = sorted(path.name.split("-")[0] for path in (folder / "gnnscale").glob("*.npy"))
    if save is np.savez:  # mapped where they lie: nothing is copied
        assert made == [] and dataset.stream.source_files() == [folder / "raw" / "data.npz"]
    else:
        assert made == ["edge_index", "node_feat", "node_label", "num_nodes_list"]
        assert isinstance(dataset.features, str)


def test_what_is_no_data_set_of_one_node_type(tmp_path):
    folder = text_folder(tmp_path)
    write_text(folder / "raw" / "num-node-list.csv.gz", [20, 20])
    with pytest.raises(ValueError, match=said("num-node-list.csv.gz 2")):
        load_ogb("ogbn-products", str(tmp_path))
    write_text(folder / "raw" / "num-node-list.csv.gz", [NUM_NODES + 1])
    with pytest.raises(ValueError, match=said("node-feat.csv.gz 40 41")):
        load_ogb("ogbn-products", str(tmp_path))
    assert not list((folder / "gnnscale").glob("*.npy*"))
    write_text(folder / "raw" / "num-node-list.csv.gz", [NUM_NODES])
    whole = (folder / "raw" / "node-label.csv.gz").read_bytes()
    (folder / "raw" / "node-label.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=said("node-label.csv.gz damaged cut")):
        load_ogb("ogbn-products", str(tmp_path))
    (folder / "raw" / "triplet-type-list.csv.gz").touch()
    with pytest.raises(ValueError, match=said("node types dataset.dataset=OGB_MAG gs.hetero_graph")):
        load_ogb("ogbn-products", str(tmp_path))


def test_without_files_and_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=said("package ogb downloads installed pip install")):
        load_ogb("ogbn-products", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_names_that_ogb_does_not_have(tmp_path):
    pytest.importorskip("ogb", reason="the extra [ogb] is not installed")
    with pytest.raises(ValueError, match=said("name ogbn-proteins 'ogbn-product'")):
        load_ogb("ogbn-product", str(tmp_path))
    with pytest.raises(ValueError, match=said("name 'ogbn-mag'")):
        load_ogb("ogbn-mag", str(tmp_path))


def test_a_download_is_whole_or_not_there(tmp_path, monkeypatch):
    """The functions of the `ogb` package bring the archive; a failure leaves nothing."""
    url = pytest.importorskip("ogb.utils.url", reason="the extra [ogb] is not installed")

    def fail(address, folder):
        raise OSError("no route to host")

    monkeypatch.setattr(url, "download_url", fail)
    with pytest.raises(ValueError, match=said("products.zip downloaded route")):
        load_ogb("ogbn-products", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".ogbn_products.lock"]
    monkeypatch.setattr(url, "download_url", lambda address, folder: address)
    monkeypatch.setattr(url, "extract_zip", lambda path, folder: text_folder(type(tmp_path)(folder), "products"))
    check(load_ogb("ogbn-products", str(tmp_path)), FEATURES)
