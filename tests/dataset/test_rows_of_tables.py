"""Features, labels and masks as tables, columns, tensors and paths; a `Data` of PyG makes a store by itself."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData, TemporalData
from torch_geometric.transforms import ToSparseTensor

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset, load_files, load_pyg
from lightning_gnnscale.dataset.columns import opened
from tests.says import said

polars = pytest.importorskip("polars", reason="the extra [test] is not installed: polars")
NUM_NODES = 30
RNG = np.random.default_rng(3)
EDGES = np.unique(RNG.integers(0, NUM_NODES, (2, 120)), axis=1)
NAMES = np.array([f"node {i}" for i in range(NUM_NODES)])
FEATURES = RNG.random((NUM_NODES, 4))
LABELS = np.arange(NUM_NODES) % 3
TRAIN = np.arange(NUM_NODES) < 20
FRAME = pd.DataFrame(FEATURES, columns=list("abcd")).assign(id=NAMES, label=LABELS, train=TRAIN, test=~TRAIN)


def stream(**options):
    return gs.open_edge_stream(EDGES, num_nodes=NUM_NODES, **options)


def check(dataset: GraphDataset) -> None:
    np.testing.assert_allclose(opened(dataset.features), FEATURES, rtol=1e-6)
    np.testing.assert_array_equal(dataset.labels, LABELS)
    np.testing.assert_array_equal(dataset.masks["train"], TRAIN)
    assert dataset.num_classes == 3


@pytest.mark.parametrize("to", [lambda frame: frame, polars.from_pandas, pa.Table.from_pandas], ids=["pd", "pl", "pa"])
def test_tables_give_the_store_of_the_same_arrays(tmp_path, to):
    table = to(FRAME)
    features = to(FRAME[list("abcd")])
    label, train = (table.column(n) if isinstance(table, pa.Table) else table[n] for n in ("label", "train"))
    dataset = GraphDataset("g", stream(), features, label, {"train": train})
    check(dataset)
    plain = GraphDataset("g", stream(), FEATURES, LABELS, {"train": TRAIN})
    options = {"partitioner": "random", "num_parts": 2}
    made = [gs.PartitionDataModule(root=tmp_path / "s", dataset=one, **options) for one in (plain, dataset)]
    made[0].prepare_data()
    assert made[0].store_source.fingerprint(2) == made[1].store_source.fingerprint(2)


def test_paths_tensors_and_ids_of_masks(tmp_path):
    pq.write_table(pa.Table.from_pandas(FRAME), tmp_path / "nodes.parquet")
    np.save(tmp_path / "y.npy", LABELS)
    np.save(tmp_path / "train.npy", TRAIN)
    nodes = str(tmp_path / "nodes.parquet")
    check(GraphDataset("g", stream(), f"{nodes}:a,b,c,d", tmp_path / "y.npy", {"train": tmp_path / "train.npy"}))
    check(GraphDataset("g", stream(), FEATURES, f"{nodes}:label", {"train": f"{nodes}:train"}))
    tensors = torch.from_numpy(FEATURES).requires_grad_(), torch.from_numpy(LABELS)
    check(GraphDataset("g", stream(), *tensors, {"train": torch.arange(20)}))
    with pytest.raises(ValueError, match=said("masks['train'] ids [0, 30) 0 30")):
        GraphDataset("g", stream(), FEATURES, LABELS, {"train": np.arange(31)})
    with pytest.raises(ValueError, match=said("labels z.npy")):
        GraphDataset("g", stream(), FEATURES, tmp_path / "z.npy")
    with pytest.raises(ValueError, match=said("column 'lable' b c d id label")):
        GraphDataset("g", stream(), FEATURES, f"{nodes}:lable")
    with pytest.raises(ValueError, match=said("labels 'id' .cat.codes")):
        GraphDataset("g", stream(), FEATURES, f"{nodes}:id")


@pytest.mark.parametrize("form", ["coo", "csr", "torch coo", "torch csr"])
def test_sparse_features(tmp_path, form):
    dense = FEATURES * (FEATURES > 0.5)
    matrix = scipy.sparse.coo_matrix(dense)
    if form.startswith("torch"):
        matrix = torch.from_numpy(dense).to_sparse_csr() if "csr" in form else torch.from_numpy(dense).to_sparse_coo()
    else:
        matrix = matrix.asformat(form)
    dm = gs.PartitionDataModule(
        root=tmp_path / "s", stream=stream(), features=matrix, labels=LABELS, masks={"train": TRAIN},
        partitioner="random", num_parts=2,
    )  # fmt: skip
    dm.prepare_data()
    rows = dm.store.features.read(np.arange(NUM_NODES))
    back = scipy.sparse.csr_matrix((rows.data, rows.indices, rows.indptr), shape=dense.shape).toarray()
    np.testing.assert_array_equal(back, dense[dm.store.original_nid])


def test_string_ids_from_tables_on_the_way_to_predictions(tmp_path):
    frame = pd.DataFrame({"src": NAMES[EDGES[0]], "dst": NAMES[EDGES[1]]})
    shuffled = FRAME.sample(frac=1, random_state=1)
    edges = gs.open_edge_stream(polars.from_pandas(frame), relabel=True, nodes=shuffled["id"])
    dm = gs.PartitionDataModule(
        root=tmp_path / "s", stream=edges, features=shuffled[list("abcd")], labels=shuffled["label"],
        masks={"train": shuffled["train"]}, partitioner="random", num_parts=2,
    )  # fmt: skip
    dm.prepare_data()
    names = dm.store.user_ids(np.arange(NUM_NODES))
    number = {name: i for i, name in enumerate(NAMES)}
    rows = np.array([number[str(name)] for name in names])
    np.testing.assert_array_equal(dm.store.features.read(np.arange(NUM_NODES)), FEATURES[rows])
    np.testing.assert_array_equal(dm.store.labels, LABELS[rows])
    np.testing.assert_array_equal(dm.store.masks["train"], TRAIN[rows])


def test_a_file_of_nodes(tmp_path):
    pq.write_table(pa.Table.from_pandas(FRAME), tmp_path / "nodes.parquet")
    pq.write_table(pa.table({"src": NAMES[EDGES[0]], "dst": NAMES[EDGES[1]]}), tmp_path / "edges.parquet")
    pq.write_table(pa.table({"id": NAMES[~TRAIN]}), tmp_path / "test.parquet")
    nodes = str(tmp_path / "nodes.parquet")
    given = {"edges": str(tmp_path / "edges.parquet"), "relabel": True, "nodes": f"{nodes}:id"}
    dataset = load_files(
        **given, features=f"{nodes}:a,b,c,d", labels=f"{nodes}:label", train_mask=f"{nodes}:train",
        test_mask=str(tmp_path / "test.parquet"),
    )  # fmt: skip
    check(dataset)
    np.testing.assert_array_equal(dataset.masks["test"], ~TRAIN)
    for wrong in (nodes, f"{nodes}:a"):
        with pytest.raises(ValueError, match=r"nodes: (must be one column of ids|float64 of shape)"):
            load_files(**{**given, "nodes": wrong})


def data(**more) -> Data:
    masks = {"train_mask": torch.from_numpy(TRAIN), "test_mask": torch.from_numpy(~TRAIN)}
    given = {"x": torch.from_numpy(FEATURES), "y": torch.from_numpy(LABELS), **masks, **more}
    return Data(edge_index=torch.from_numpy(EDGES), **given)


def test_pygs_data_makes_a_store_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dm = gs.PartitionDataModule(data(), num_parts=2, partitioner="random")
    again = gs.PartitionDataModule(data(), num_parts=2, partitioner="random")
    assert dm.root == again.root and str(dm.root).startswith("stores/pyg-random-p2-")
    other = gs.PartitionDataModule(data(x=torch.zeros(NUM_NODES, 1)), num_parts=2, partitioner="random")
    assert other.root != dm.root
    dm.prepare_data()
    assert dm.store.num_edges == EDGES.shape[1]  # as they are: none is added
    assert (dm.num_features, dm.num_classes) == (4, 3)
    rows = dm.store.original_nid
    np.testing.assert_array_equal(dm.store.features.read(np.arange(NUM_NODES)), FEATURES[rows])
    whole = gs.FullGraphDataModule(data(), num_parts=2, partitioner="random", root="mine")
    whole.prepare_data()
    assert whole.store.num_nodes == NUM_NODES and (tmp_path / "mine").is_dir()


def test_adj_t_with_and_without_values():
    weights = torch.arange(EDGES.shape[1], dtype=torch.float32)
    given = data(edge_weight=weights)
    turned = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(given.clone())
    dataset = load_pyg(turned)
    found = np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in dataset.stream.chunks()], axis=1)
    by_edge = dict(zip(map(tuple, EDGES.T.tolist()), weights.tolist(), strict=True))
    assert [by_edge[pair] for pair in map(tuple, found.T.tolist())] == dataset.edge_weight.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (HeteroData(), "node_types must be at least one name, each once, got none"),
        (Data(x=torch.zeros(3, 1)), "data has no edges: set data.edge_index"),
        (
            TemporalData(src=torch.tensor([0]), dst=torch.tensor([1]), t=torch.tensor([5]), y=torch.zeros(1)),
            "data.y of a TemporalData must be integers, classes of events, got float32",
        ),
        (data(train_mask=torch.zeros(NUM_NODES, 2, dtype=torch.bool)), None),
        (7, "store must be the folder or URL .* got int: other graphs are given as dataset=, or stream="),
    ],
)
def test_graphs_of_other_node_types(given, message):
    if message is None:
        with pytest.raises(ValueError, match=said("split [0, 2) train_mask 2")):
            load_pyg(given, split=2)
        return
    with pytest.raises(ValueError, match=message):
        gs.PartitionDataModule(given)


def test_events_are_edges_with_times_features_and_classes(tmp_path):
    rng = np.random.default_rng(0)
    ends, when = rng.integers(0, 30, (2, 200)), np.sort(rng.integers(0, 1000, 200))
    message, kind = rng.random((200, 4)).astype(np.float32), rng.integers(0, 3, 200)
    given = TemporalData(
        src=torch.from_numpy(ends[0]), dst=torch.from_numpy(ends[1]), t=torch.from_numpy(when),
        msg=torch.from_numpy(message), y=torch.from_numpy(kind),
    )  # fmt: skip
    dm = gs.PartitionDataModule(given, root=tmp_path / "store", num_parts=2, sampler=gs.LinkSampler(positives="edge"))
    dm.prepare_data()
    store = gs.PartitionStore.open(tmp_path / "store")
    original, target = np.asarray(store.original_nid), np.repeat(np.arange(store.num_nodes), store.csc.in_degree)
    columns = original[store.csc.indices], original[target], store.edge_time, store.edge_label
    found = sorted(zip(*(column.tolist() for column in columns), map(tuple, store.edge_features.tolist()), strict=True))
    columns = *ends, when, kind
    expected = zip(*(column.tolist() for column in columns), map(tuple, message.tolist()), strict=True)
    assert found == sorted(expected)
    held = load_pyg(given, hold_out={"val": 0.1, "test": 0.1, "by_time": True})
    assert held.links["test"].time.min() > held.links["val"].time.max() > held.edge_time.max()


def test_what_is_not_read_is_told():
    given = data(edge_type=torch.zeros(EDGES.shape[1]), year=torch.zeros(NUM_NODES))
    with pytest.warns(UserWarning, match=said("data.edge_type data.year")):
        gs.PartitionDataModule(given)
    with pytest.raises(ValueError, match=said("labels stream rows")):
        gs.PartitionDataModule(data(), labels=LABELS)


def test_repeated_edges_with_other_features_are_told(tmp_path):
    edges = np.array([[0, 0, 1, 2, 0], [1, 1, 0, 3, 1]])  # 0 - 1 in three edge types, and once the other way
    kinds = np.array([[1.0], [2.0], [9.0], [1.0], [1.0]])
    parts = gs.partition(gs.open_edge_stream(edges), "random", num_parts=2)
    undirected = gs.open_edge_stream(edges, to_undirected=True)
    told = "1 edges are listed after another one of the same two nodes, with other edge_features"
    with pytest.warns(UserWarning, match=told):
        gs.write_partition_store(tmp_path / "s", undirected, parts, edge_features=kinds)


def test_batches_become_data(tmp_path):
    weights = np.arange(EDGES.shape[1], dtype=np.float32)
    dm = gs.PartitionDataModule(
        root=tmp_path / "s", stream=stream(), features=scipy.sparse.csr_matrix(FEATURES), labels=LABELS,
        masks={"train": TRAIN}, edge_features=weights[:, None], partitioner="random", num_parts=2,
        sampler=gs.NeighborSampler([3, 3]), batch_size=8,
    )  # fmt: skip
    dm.prepare_data()
    dm.setup("fit")
    for batch in dm.train_dataloader():
        made = batch.to_data()
        assert type(made) is Data and made.validate() and made.num_nodes == len(batch.n_id)
        rows = dm.store.original_nid[made.n_id.numpy()]
        np.testing.assert_allclose(made.x.numpy(), FEATURES[rows])
        np.testing.assert_array_equal(made.y.numpy(), LABELS[rows])
        assert torch.equal(made.input_id, batch.n_id[: batch.batch_size]) and made.batch_size == batch.batch_size
        for name in ("edge_index", "edge_attr", "n_id"):
            assert getattr(made, name).data_ptr() == getattr(batch, name).data_ptr()
        assert made.num_sampled_nodes == batch.num_sampled_nodes and "edge_weight" not in made
        assert made.is_node_attr("y") and made.is_edge_attr("edge_attr")
    dm.teardown("fit")
