"""Where graphs come from: public folders, a user's own files, PyG, the generator; and what each says of bad input."""

import gzip
import os
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import CSRArrays, GraphDataset, generate, load_files, load_npz, load_pyg
from lightning_gnnscale.dataset.columns import opened
from lightning_gnnscale.dataset.split import random_split
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.object_store import graph_name
from lightning_gnnscale.values import ALWAYS
from tests.says import said


def edges_of(dataset: GraphDataset) -> np.ndarray:
    chunks = [np.stack([chunk.src.copy(), chunk.dst.copy()]) for chunk in dataset.stream.chunks()]
    return np.concatenate(chunks, axis=1)


@pytest.fixture
def npz(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    arrays = {
        "edge_index": np.array([[0, 1, 2], [1, 2, 0]], np.int32),
        "x_data": np.array([1, 1, 2], np.uint8),
        "x_indices": np.array([0, 3, 1], np.int32),
        "x_indptr": np.array([0, 1, 2, 3, 3], np.int32),
        "x_shape": np.array([4, 50]),
        "y": np.array([0, 1, 1, -1], np.int16),
    }
    np.savez(folder / "graph.npz", **arrays)
    return folder


def test_npz_has_sparse_features_and_a_split_of_the_labelled(npz, monkeypatch):
    monkeypatch.setenv("GNNSCALE_DATA", str(npz.parent))
    for name in ("tiny", str(npz), str(npz / "graph.npz")):
        dataset = load_npz(name)
        assert (dataset.stream.num_nodes, dataset.num_classes, dataset.feature_dim) == (4, 2, 50)
        assert isinstance(dataset.features, CSRArrays)
        assert np.array_equal(dataset.features.data, [1, 1, 1])
        assert np.array_equal(load_npz(name, normalize=False).features.data, [1, 1, 2])
        assert sum(mask.sum() for mask in dataset.masks.values()) == 3
        assert np.array_equal(edges_of(dataset), [[0, 1, 2], [1, 2, 0]])
        assert dataset.stream.to_undirected


def test_npz_that_is_not_there_lists_those_that_are(npz, monkeypatch):
    monkeypatch.setenv("GNNSCALE_DATA", str(npz.parent))
    with pytest.raises(FileNotFoundError, match=said("graph 'tony' tiny")):
        load_npz("tony")
    with pytest.raises(ValueError, match=said("public split split=random")):
        load_npz("tiny", split="public")
    with pytest.raises(ValueError, match=said("split auto public random 'own'")):
        load_npz("tiny", split="own")


@pytest.mark.real_data
def test_public_graphs_are_what_their_table_says(public_graphs):
    cora = load_npz("cora", root=str(public_graphs))
    assert (cora.stream.num_nodes, cora.feature_dim, cora.num_classes) == (2708, 1433, 7)
    assert [int(cora.masks[name].sum()) for name in ("train", "val", "test")] == [140, 500, 1000]


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 1, 0, 1]))
    np.save(tmp_path / "train.npy", np.array([0, 3]))
    np.save(tmp_path / "test.npy", np.array([False, True, False, False]))
    return {
        "edges": str(tmp_path / "edges.npy"),
        "features": str(tmp_path / "x.npy"),
        "labels": str(tmp_path / "y.npy"),
    }


def test_files_take_masks_as_bool_or_as_ids(files, tmp_path):
    dataset = load_files(**files, train_mask=str(tmp_path / "train.npy"), test_mask=str(tmp_path / "test.npy"))
    assert dataset.masks["train"].tolist() == [True, False, False, True]
    assert dataset.masks["test"].tolist() == [False, True, False, False]
    assert (dataset.name, dataset.num_classes, dataset.stream.num_nodes) == (tmp_path.name, 2, 4)
    assert (dataset.feature_dim, dataset.features) == (np.load(files["features"]).shape[1], files["features"])


@pytest.mark.parametrize(
    ("edges", "name"),
    [
        ("/data/authors/authors.csv.gz", "authors"),
        ("/data/authors/edges.csv", "authors"),
        ("/data/my authors/edges/part-*.parquet", "part"),
        ("/data/my authors/edges/*.parquet", "my_authors"),
        ("s3://bucket/authors/edges.csv", "authors"),
        ("/edges", "graph"),
    ],
)
def test_a_graph_is_named_by_its_file_or_folder(edges, name):
    assert graph_name(edges) == name


def test_processes_that_are_spawned_are_not_sent_the_rows(files, tmp_path):
    num_edges = np.load(files["edges"]).shape[1]
    np.save(tmp_path / "wide.npy", np.ones((4, 20_000)))
    np.save(tmp_path / "edge_features.npy", np.ones((num_edges, 20_000)))
    rows = {"features": str(tmp_path / "wide.npy"), "edge_features": str(tmp_path / "edge_features.npy")}
    dataset = load_files(**{**files, **rows})
    sent = pickle.dumps(dataset)
    assert len(sent) < 20_000
    assert pickle.loads(sent).feature_dim == 20_000


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("train_mask", np.array([4]), "train_mask ids [0, 4) 4 4"),
        ("val_mask", np.ones(3, bool), "val_mask 3 4"),
        ("test_mask", np.ones(4), "test_mask float64"),
        ("train_mask", np.array([1, 0, 1, 1]), "4 ids 2 different ones mask 0 1"),
        ("train_mask", np.ones((4, 2), bool), "train_mask shape (4, 2)"),
        ("labels", np.zeros(5, int), "nodes differ features 4 labels 5 row"),
    ],
)
def test_files_that_do_not_fit(files, tmp_path, key, array, message):
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(ValueError, match=said(message)):
        load_files(**{**files, key: str(tmp_path / "bad.npy")})


def test_files_that_are_missing_or_no_arrays(files, tmp_path):
    with pytest.raises(FileNotFoundError, match="features: no file"):
        load_files(**{**files, "features": str(tmp_path / "none.npy")})
    (tmp_path / "text.npy").write_text("hello")
    with pytest.raises(ValueError, match=said("labels npy file")):
        load_files(**{**files, "labels": str(tmp_path / "text.npy")})


def test_pyg_data_gives_everything_it_has():
    data = Data(x=torch.eye(3), y=torch.tensor([[0], [1], [1]]), edge_index=torch.tensor([[0, 1], [1, 2]]))
    data.train_mask = torch.tensor([True, False, False])
    dataset = load_pyg(data)
    assert dataset.masks["train"].tolist() == [True, False, False]
    assert dataset.labels.tolist() == [0, 1, 1]
    assert np.array_equal(edges_of(dataset), data.edge_index.numpy())
    assert dataset.edge_weight is None and dataset.edge_features is None
    data.edge_weight, data.edge_attr = torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor([3, 4])
    data.x = torch.eye(3).to_sparse()
    dataset = load_pyg(data)
    assert dataset.edge_weight.tolist() == [0.5, 2.0] and dataset.edge_features.tolist() == [[3], [4]]
    assert dataset.features.indptr.tolist() == [0, 1, 2, 3] and dataset.feature_dim == 3
    with pytest.raises(ValueError, match=said("data edges data.edge_index")):
        load_pyg(Data(x=torch.eye(3)))
    with pytest.raises(ValueError, match="give exactly one of them"):
        load_pyg()
    with pytest.raises(ValueError, match=said("class 'Planetoide'")):
        load_pyg(dataset="Planetoide")


def hetero_data() -> HeteroData:
    data = HeteroData()
    data["author"].num_nodes = 3
    data["paper"].x, data["paper"].y = torch.eye(2), torch.tensor([[0.5], [float("nan")]])
    data["paper"].train_mask = torch.tensor([[True, False], [False, False]])
    data["paper"].time = torch.tensor([7, 8])
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2], [1, 0]])
    data["author", "writes", "paper"].edge_attr = torch.tensor([5.0, 6.0])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0], [1]])
    return data


def test_heterogeneous_data_of_pyg_gives_everything_it_has():
    graph = load_pyg(hetero_data(), regression=True, name="Shop")
    assert (graph.name, graph.type_sizes, graph.stream.to_undirected) == ("shop", {"author": 3, "paper": 2}, False)
    assert graph.schema.edge_types == (("author", "writes", "paper"), ("paper", "cites", "paper"))
    assert edges_of(graph).tolist() == [[0, 2, 3], [4, 3, 4]]
    assert list(graph.features) == ["paper"] and graph.edge_features.tolist() == [[5], [6], [0]]
    np.testing.assert_array_equal(graph.labels[:, 0], [np.nan] * 3 + [0.5, np.nan])
    assert graph.masks["train"].tolist() == [False] * 3 + [True, False]
    assert graph.node_time.tolist() == [ALWAYS] * 3 + [7, 8]
    both = load_pyg(hetero_data(), to_undirected=True, separate_reverses=True, regression=True)
    assert [name for _, name, _ in both.schema.edge_types[2:]] == ["rev_writes", "rev_cites"]


def test_a_class_of_pyg_with_several_node_types_is_read_under_a_name_of_its_own():
    torch.manual_seed(0)
    options = {"num_node_types": 2, "num_edge_types": 2, "avg_num_nodes": 20}
    graph = load_pyg(dataset="FakeHeteroDataset", name="Toy", **options)
    assert graph.name == "toy" and list(graph.type_sizes) == ["v0", "v1"] and graph.num_classes > 1
    assert set(graph.features) == {"v0", "v1"} and graph.masks["train"].any() and not graph.stream.to_undirected


def test_what_pyg_s_graphs_do_not_take_is_refused():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    with pytest.raises(ValueError, match=said("option 'regresion' num_classes regression did you mean regression")):
        load_pyg(data, regresion=True)
    with pytest.raises(ValueError, match=said("separate_reverses HeteroData Data")):
        load_pyg(data, separate_reverses=True)
    with pytest.raises(ValueError, match=said("data HeteroData 7")):
        load_pyg(7)


def test_generated_once_and_read_again(tmp_path):
    calls = []
    options = {"num_nodes": 300, "num_edges": 900, "num_communities": 6, "num_classes": 3, "feature_dim": 8}
    first = generate(**options, folder=str(tmp_path), progress=lambda *report: calls.append(report))
    assert calls
    calls.clear()
    again = generate(**options, folder=str(tmp_path), progress=lambda *report: calls.append(report))
    assert not calls
    assert again.stream.fingerprint() == first.stream.fingerprint()
    assert (again.num_classes, set(again.labels)) == (3, {0, 1, 2})
    assert np.load(again.features).shape == (300, 8)
    with pytest.raises(ValueError, match=said("num_classes [1, 6]")):
        generate(**{**options, "num_classes": 7}, folder=str(tmp_path))


def test_generated_with_communities_of_uneven_sizes(tmp_path):
    options = {"num_nodes": 600, "num_edges": 2000, "num_communities": 6, "feature_dim": 3, "folder": str(tmp_path)}
    even = generate(**options)
    uneven = generate(**options, community_exponent=1.2, max_community=400)
    sizes = [np.bincount(dataset.labels, minlength=6).max() for dataset in (even, uneven)]
    assert sizes[0] < 200 < sizes[1] <= 400 + 6 * 20
    assert len(list(tmp_path.iterdir())) == 2
    assert even.source != uneven.source


def test_masks_of_unknown_names():
    stream = open_edge_stream(np.zeros((2, 1), int))
    with pytest.raises(ValueError, match=said("masks train val test valid")):
        GraphDataset("x", stream, masks={"valid": np.zeros(1, bool)})


KINDS_OF_IDS = {
    "names.csv": np.array(["alice", "bob", "carol", "dave"]),
    "names.parquet": np.array(["alice", "bob", "carol", "dave"]),
    "numbers.parquet": np.array([2**63 + 9, 0, 7, 5], np.uint64),
    "numbers.npy": np.array([900, -1, 7, 10**12]),
    "numbers.bin": np.array([900, -1, 7, 10**12]),
}


@pytest.fixture(params=KINDS_OF_IDS)
def named(request, tmp_path):
    """Files of a graph of four nodes with ids of their own, of which the last has no edge, and these ids."""
    ids, path = KINDS_OF_IDS[request.param], tmp_path / request.param
    src, dst = ids[[2, 0]], ids[[0, 1]]
    if path.suffix == ".csv":
        path.write_text("src,dst\n" + "".join(f"{u},{v}\n" for u, v in zip(src, dst, strict=True)))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"src": src, "dst": dst}), path)
    elif path.suffix == ".npy":
        np.save(path, np.stack([src, dst]))
    else:
        np.stack([src, dst], axis=1).tofile(path)
    options = {"edges": str(path), "relabel": True}
    if path.suffix == ".bin":
        options["reader"] = {"dtype": "int64"}
    for key, array in {"nodes": ids, "features": np.eye(4, dtype=np.float32)}.items():
        np.save(tmp_path / f"{key}.npy", array)
        options[key] = str(tmp_path / f"{key}.npy")
    return options, ids


def test_ids_of_any_node_type_go_by_the_rows_that_name_them(named):
    options, ids = named
    dataset = load_files(**options)
    assert np.array_equal(edges_of(dataset), [[2, 0], [0, 1]])
    assert np.asarray(dataset.stream.node_ids).tolist() == ids.tolist()
    assert dataset.stream.count() == (4, 2)


def test_other_names_of_rows_are_another_graph(named):
    options, ids = named
    before = load_files(**options).stream.fingerprint()
    assert load_files(**options).stream.fingerprint() == before
    np.save(options["nodes"], ids[[1, 0, 2, 3]])
    assert load_files(**options).stream.fingerprint() != before


def test_names_of_rows_that_do_not_fit(named, tmp_path):
    options, ids = named
    without = {key: value for key, value in options.items() if key != "nodes"}
    with pytest.raises(ValueError, match=said("nodes relabel=True")):
        load_files(**without)
    with pytest.raises(ValueError, match=said("nodes relabel=True")):
        load_files(**{**options, "relabel": False})
    np.save(tmp_path / "nodes.npy", ids[:3])
    with pytest.raises(ValueError, match=said("features 4 3")):
        load_files(**options)
    np.save(tmp_path / "nodes.npy", ids[[0, 1, 2, 1]])
    with pytest.raises(ValueError, match=said(f"nodes {ids[1].item()!r} 3")):
        load_files(**options)
    np.save(tmp_path / "nodes.npy", ids[[0, 1, 3]])
    del options["features"]
    with pytest.raises(EdgeStreamError, match=said(f"{ids[2].item()!r} 3")):
        edges_of(load_files(**options))


@pytest.mark.parametrize("listed", [True, False])
def test_masks_name_nodes_as_the_edges_do(named, tmp_path, listed):
    options, ids = named
    if not listed:
        del options["nodes"], options["features"]
    np.save(tmp_path / "mask.npy", ids[[1, 2]])
    dataset = load_files(**options, train_mask=str(tmp_path / "mask.npy"))
    assert set(np.asarray(dataset.stream.node_ids)[dataset.masks["train"]].tolist()) == set(ids[[1, 2]].tolist())
    np.save(tmp_path / "mask.npy", ids[:3] if listed else ids[[3]])
    if not listed:
        with pytest.raises(ValueError, match=said("train_mask node id")):
            load_files(**options, train_mask=str(tmp_path / "mask.npy"))
        np.save(tmp_path / "mask.npy", np.ones(3, bool))
        with pytest.raises(ValueError, match=said("train_mask nodes=nodes.csv:id")):
            load_files(**options, train_mask=str(tmp_path / "mask.npy"))


ROWS = {
    "features": np.eye(3, dtype=np.float32),
    "labels": np.arange(3),
    "masks": {"train": np.ones(3, bool)},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_arbitrary_ids_are_refused_until_their_order_is_known(tmp_path, name):
    def stream_of_names():
        return open_edge_stream(np.array([[30, 10], [10, 20]]), relabel=True)

    message = f"{name}: the stream's relabel=True numbers ids by first appearance and it has not been read"
    with pytest.raises(ValueError, match=message):
        GraphDataset("x", stream_of_names(), **{name: ROWS[name]})
    with pytest.raises(ValueError, match=message):
        gs.PartitionDataModule(root=tmp_path / "s", stream=stream_of_names(), **{name: ROWS[name]})
    GraphDataset("x", stream_of_names(), edge_weight=np.ones(2))
    stream = stream_of_names()
    stream.count()
    assert np.asarray(stream.node_ids).tolist() == [30, 10, 20]
    GraphDataset("x", stream, **{name: ROWS[name]})


def test_rows_placed_by_index_of_stand_at_their_ids(tmp_path):
    ids, stream = np.array([10, 20, 30]), open_edge_stream(np.array([[30, 10], [10, 20]]), relabel=True)
    stream.count()
    features = np.empty((3, 1), np.float32)
    features[stream.node_ids.index_of(ids)] = ids[:, None]
    dm = gs.PartitionDataModule(
        root=tmp_path / "s", stream=stream, features=features, partitioner="random", num_parts=2
    )
    dm.prepare_data()
    assert np.array_equal(dm.store.user_ids(np.arange(3)), dm.store.features.array[:, 0])


@pytest.mark.parametrize(
    ("labels", "num_classes", "message"),
    [
        ([0, -7], None, "labels -1 0 -7 1"),
        ([-1, -1], None, "labels: no node has one"),
        ([0, 3], 3, "labels num_classes 3 3 1"),
        ([0, 2_000_000], None, "labels 2000000 1 2"),
    ],
)
def test_labels_that_cannot_be_meant(labels, num_classes, message):
    stream = open_edge_stream(np.zeros((2, 1), int), num_nodes=2)
    with pytest.raises(ValueError, match=said(message)):
        GraphDataset("x", stream, labels=np.array(labels), num_classes=num_classes)


def test_unsigned_edges_and_labels_that_are_words(tmp_path):
    np.savez(tmp_path / "u.npz", edge_index=np.array([[0, 1], [1, 2]], np.uint32))
    assert load_npz(str(tmp_path / "u.npz")).stream.num_nodes == 3
    with pytest.raises(ValueError, match=said("labels numbers <U1")):
        random_split(np.array(["a", "b"]))


@pytest.mark.parametrize("content", [b"", b"no array", b"PK"])
def test_a_file_of_features_that_is_none_is_named(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    stream = open_edge_stream(np.array([[0, 1], [1, 2]]), num_nodes=3)
    with pytest.raises(ValueError, match=said("x.npy .npy file")):
        GraphDataset("mine", stream, features=tmp_path / "x.npy")


def test_what_a_kill_left_of_a_generated_graph_goes(tmp_path):
    folder = Path(generate(40, 100, str(tmp_path), num_communities=4).features).parent
    (folder / "edges.bin").unlink()
    for name in (".edges.bin.tmp7", "features.npy.tmp7"):  # as kills leave them
        (folder / name).write_bytes(b"half")
    generate(40, 100, str(tmp_path), num_communities=4)
    assert sorted(path.name for path in folder.iterdir()) == ["edges.bin", "features.npy", "lock"]


class _Touch:
    """What unpickling would run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_files_of_pygs_data_sets_are_loaded_without_running_them(tmp_path):
    folder = tmp_path / "Cora" / "processed"
    folder.mkdir(parents=True)
    (tmp_path / "Cora" / "raw").mkdir()
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (tmp_path / "Cora" / "raw" / f"ind.cora.{name}").touch()
    torch.save(_Touch(tmp_path / "trap"), folder / "data.pt")
    with pytest.raises(ValueError, match=said("dataset=Planetoid posix.mkdir")):
        load_pyg(dataset="Planetoid", name="Cora", root=str(tmp_path))
    assert not (tmp_path / "trap").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


TABLE = """id,category,train,x,y,split,note
ann,0,true,.5,1,Train,"a
b"
bob,1,true,NA,2,val,
cyd,,false,2,3,validation,c
dan,1,false,2,4,test,d
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A folder with a CSV file of four nodes, in three forms, and edges of their names."""
    monkeypatch.chdir(tmp_path)
    Path("nodes.csv").write_text(TABLE)
    Path("nodes.tsv").write_text(TABLE.replace(",", "\t"))
    Path("semicolons.csv").write_text(TABLE.replace(",", ";"))
    Path("nodes.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    Path("edges.csv").write_text("src,dst\nann,bob\nbob,cyd\ncyd,dan\n")
    return {"edges": "edges.csv", "nodes": "nodes.csv:id"}


@pytest.mark.parametrize("name", ["nodes.csv", "nodes.tsv", "nodes.csv.gz", "semicolons.csv"])
def test_columns_of_text_files(table, name):
    dataset = load_files(
        "edges.csv", nodes=f"{name}:id", labels=f"{name}:category", features=f"{name}:x,y", train_mask=f"{name}:train"
    )
    np.testing.assert_array_equal(dataset.labels, [0, 1, np.nan, 1])
    np.testing.assert_array_equal(dataset.features, [[0.5, 1], [np.nan, 2], [2, 3], [2, 4]])
    assert dataset.masks["train"].tolist() == [True, True, False, False]
    assert dataset.stream.node_ids.plain(np.arange(4)) == ["ann", "bob", "cyd", "dan"]
    same = GraphDataset("x", dataset.stream, Path(f"{name}:x,y"), f"{name}:category", {"train": f"{name}:train"})
    np.testing.assert_array_equal(same.labels, dataset.labels)
    np.testing.assert_array_equal(opened(same.features), dataset.features)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "nodes.csv"}, "nodes nodes.csv nodes.csv:COLUMN id category train"),
        ({"nodes": "nodes.csv:name"}, "nodes nodes.csv 'name' id category"),
        ({"nodes": "nodes.csv:category"}, "nodes 2"),
        ({"nodes": "none.csv:id"}, "nodes none.csv"),
        ({"labels": "none.csv:id"}, "labels none.csv"),
        ({"train_mask": "nodes.csv"}, "train_mask nodes.csv nodes.csv:COLUMN"),
        (
            {"features": "nodes.csv"},
            "features nodes.csv 'id' nodes.csv:y",
        ),
        ({"features": "words.csv"}, "words.csv 'a'"),
        ({"labels": "numbers.csv"}, "labels numbers.csv '0;1'"),
        ({"labels": "empty.csv:a"}, "labels empty.csv"),
        ({"labels": "ragged.csv:a"}, "labels ragged.csv 2"),
    ],
)
def test_columns_of_text_files_that_are_not_there(table, given, message):
    Path("words.csv").write_text("a,b\nx,y\n")
    Path("numbers.csv").write_text("0;1\n2;3\n")
    Path("empty.csv").touch()
    Path("ragged.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises((ValueError, FileNotFoundError), match=said(message)):
        load_files(**table | given)


def test_numbers_as_ids_keep_their_digits_and_words_stay_words(table):
    Path("edges.csv").write_text(f"src,dst\n{2**63 + 9},7\n7,0\n")
    Path("nodes.csv").write_text(f"id,version\n{2**63 + 9},1.10\n7,1.1\n0,2\n")
    assert np.asarray(load_files(**table).stream.node_ids).tolist() == [2**63 + 9, 7, 0]
    Path("edges.csv").write_text("src,dst\n1.10,1.1\n1.1,2\n")
    ids = load_files("edges.csv", nodes="nodes.csv:version", reader={"id_type": "string"}).stream.node_ids
    assert ids.plain(np.arange(3)) == ["1.10", "1.1", "2"]


def test_words_beside_numbers_have_a_remedy(table):
    Path("edges.csv").write_text("src,dst\n1,2\n2,1\n")
    Path("nodes.csv").write_text("id\n1\n2\nx\n")
    with pytest.raises(EdgeStreamError, match=said("ones strings id_type='string'")):
        edges_of(load_files(**table))
    assert edges_of(load_files(**table, reader={"id_type": "string"})).tolist() == [[0, 1], [1, 0]]
    Path("edges.csv").write_text("src,dst\n1,2\n2,x\n")
    Path("nodes.csv").write_text("id\n1\n2\n3\n")
    with pytest.raises(EdgeStreamError, match=said("ones integers nodes=")):
        edges_of(load_files(**table))
    with pytest.raises(EdgeStreamError, match=said("relabel=True nodes=")):
        edges_of(load_files("edges.csv", labels="nodes.csv:id"))


def test_a_column_of_words_splits_the_nodes(table):
    dataset = load_files(**table, labels="nodes.csv:category", masks="nodes.csv:split")
    expected = {"train": [0], "val": [1, 2], "test": [3]}
    assert {name: np.flatnonzero(mask).tolist() for name, mask in dataset.masks.items()} == expected
    words = np.array(["train", "VALID", "test", "none"])
    for masks in ("nodes.csv:split", words, pd.Series(words), pd.Series(words).astype("category"), words.tolist()):
        made = GraphDataset("x", dataset.stream, labels=dataset.labels, masks=masks).masks
        assert [*made] == ["train", "val", "test"] and made["train"].tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "a", None], "masks holds"),
        ([0, 1, 2, 2], "masks words train val test int64"),
        (["train", "vaild", "test", "test"], "masks node val"),
    ],
)
def test_words_that_split_nothing(table, words, message):
    Path("split.csv").write_text("split,\n" + "".join(f"{'' if word is None else word},\n" for word in words))
    expect, kind = (pytest.warns, UserWarning) if "vaild" in words else (pytest.raises, ValueError)
    with expect(kind, match=said(message)):
        load_files(**table, masks="split.csv:split")


def test_two_forms_of_masks_at_once_are_refused(table):
    with pytest.raises(ValueError, match=said("masks train_mask")):
        load_files(**table, masks="nodes.csv:split", train_mask="nodes.csv:train")


@pytest.mark.parametrize("given", [{}, {"relabel": None}, {"relabel": True}])
def test_nodes_imply_relabel(table, given):
    assert load_files(**table, **given).stream.count() == (4, 3)
    assert open_edge_stream("edges.csv", nodes=["dan", "cyd", "bob", "ann"], **given).count() == (4, 3)
    with pytest.raises(ValueError, match=said("nodes relabel=True")):
        open_edge_stream("edges.csv", nodes="nodes.csv:id", relabel=False)


def test_messages_name_no_file_where_there_is_none(table):
    with pytest.raises(ValueError, match=r"nodes=nodes.csv:id$"):
        load_files("edges.csv", relabel=True, features="nodes.csv:x,y")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "nodes.csv:id"}, "labels 3 4 4 y.npy"),
        ({"num_nodes": 4}, "labels 3 4 num_nodes 4"),
        ({"num_nodes": 3}, "features 4 3 num_nodes 3"),
        ({"num_nodes": 4, "features": "y.npy"}, "num_nodes 4 3 3"),
        ({"num_nodes": 4, "features": None}, "labels 3 num_nodes 4 y.npy"),
        ({"train_mask": "nodes.csv:train"}, "labels 3 4 train_mask 4"),
        ({}, "nodes differ features 4 labels 3 row node"),
    ],
)
def test_the_array_of_another_length_is_named(table, given, message):
    np.save("x.npy", np.ones((4, 2)))
    np.save("y.npy", np.zeros(3, int))
    np.save("edges.npy", np.array([[0, 1], [1, 2]]))
    edges = "edges.csv" if "nodes" in given else "edges.npy"
    with pytest.raises(ValueError, match=said(message)):
        load_files(**{"edges": edges, "features": "x.npy", "labels": "y.npy"} | given)


@pytest.mark.parametrize("key", ["nodes", "train_mask", "labels"])
def test_strings_that_were_saved_as_objects_have_a_remedy(table, key):
    np.save("objects.npy", np.array(["ann", "bob"], dtype=object), allow_pickle=True)
    Path("ids.txt").write_text("ann\nbob\n")
    for path, told in (("objects.npy", "numpy.array(ids, dtype=str)"), ("ids.txt", ".npy")):
        with pytest.raises(ValueError, match=said(f"{key} {path} {told} CSV x.csv:id")):
            load_files(**table | {key: path})


def test_arrays_that_are_not_read_are_named(tmp_path):
    arrays = {
        "edge_index": np.array([[0, 1], [1, 2]]),
        "edge_type": np.array([0, 1]),
        "edge_year": np.array([1990, 2001]),
        "names": np.array(["a", "b", "c"]),
    }
    np.savez(tmp_path / "graph.npz", **arrays)
    with pytest.warns(UserWarning, match=said("graph.npz edge_year")):
        data = load_npz(str(tmp_path))
    assert data.edge_type.tolist() == [0, 1]
