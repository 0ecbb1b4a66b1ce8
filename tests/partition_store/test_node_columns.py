"""Further columns of the nodes: stored under their names, in every batch, given to a backbone that names them."""

from dataclasses import fields
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import train_loader
from lightning_gnnscale.datamodule.stored_graph import check_model
from lightning_gnnscale.dataset.columns import EDGE_COLUMNS, Columns, EdgeColumns
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.loader import RowReads
from lightning_gnnscale.partition_store import array_file, publish
from lightning_gnnscale.partition_store.disk import disk_bytes
from lightning_gnnscale.partition_store.inputs import check_inputs
from lightning_gnnscale.partition_store.part_graph import load_whole_graph
from lightning_gnnscale.partition_store.planned_reads import bytes_read
from lightning_gnnscale.partition_store.preparation import prepare_store
from lightning_gnnscale.sampler.minibatch import MiniBatch
from tests.says import said

NODES = 90
RNG = np.random.default_rng(3)
IMAGE = RNG.integers(0, 255, (NODES, 6)).astype(np.uint8)
WORDS = sp.csr_array(np.where(RNG.random((NODES, 20)) < 0.2, 1.0, 0).astype(np.float32))
EDGES = RNG.integers(0, NODES, (2, 500))


def dataset(**columns) -> gs.GraphDataset:
    stream = gs.open_edge_stream(EDGES, num_nodes=NODES, to_undirected=True)
    features, labels = np.ones((NODES, 2), np.float32), np.arange(NODES) % 3
    masks = {"train": np.arange(NODES) % 2 == 0, "val": np.arange(NODES) % 2 == 1}
    columns = columns or {"image": IMAGE, "words": WORDS}
    return gs.GraphDataset("g", stream, features=features, labels=labels, masks=masks, node_columns=columns)


def write(root, graph, **options) -> gs.PartitionStore:
    parts = gs.partition(graph.stream, "random", 3, seed=1)
    return gs.write_partition_store(root, graph.stream, parts, graph, **options)


def test_a_column_of_edges_has_an_argument_and_a_place_in_batches():
    """Else it would be written and read by no one, or asked of every store and found in none."""
    given, carried = ({field.name for field in fields(cls)} for cls in (EdgeColumns, MiniBatch))
    assert given == set(EDGE_COLUMNS) and carried >= {column.in_batch for column in EDGE_COLUMNS.values()}


def test_columns_are_read_by_store_id_as_they_were_given(tmp_path):
    store = write(tmp_path / "store", dataset(), pack_halo=True)
    nodes = RNG.permutation(NODES)
    image = store.node_columns["image"].read(nodes)
    assert image.dtype == np.uint8 and np.array_equal(image, IMAGE[store.original_nid[nodes]])
    words = store.node_columns["words"].read(nodes)
    assert np.array_equal(words.dense(), WORDS.toarray()[store.original_nid[nodes]])
    store.verify()
    assert write(tmp_path / "plain", dataset(image=IMAGE)).fingerprint != store.fingerprint


def typed_graph() -> gs.GraphDataset:
    papers = {"labels": np.arange(40) % 3, "masks": {"train": np.arange(40) % 4 > 0}, "columns": {"image": IMAGE[:40]}}
    nodes = {
        "paper": {"num_nodes": 40, **papers},
        "author": {"num_nodes": 20, "features": np.ones((20, 2), np.float32)},
    }
    wrote = np.stack([RNG.integers(0, 20, 99), RNG.integers(0, 40, 99)])
    return gs.hetero_graph(nodes, {("author", "writes", "paper"): wrote})


def test_columns_of_node_types_are_read_where_a_type_has_some(tmp_path):
    store = write(tmp_path / "store", typed_graph())
    rows = store.node_columns["image"].read(np.arange(60))
    assert rows.tables[1] is None
    papers = store.original_nid[store.node_type(np.arange(60)) == 0]
    assert np.array_equal(rows.tables[0], IMAGE[papers])
    store.verify()


class Sees(torch.nn.Module):
    """A user's backbone that names a column in its `forward`."""

    num_layers, out_channels = 2, 3

    def __init__(self):
        super().__init__()
        self.layers = gs.model.GraphSAGE(2 + 6, 4, 3)

    def forward(self, x, edge_index, image):
        return self.layers(torch.cat([x, image / 255], dim=1), edge_index)


@pytest.mark.parametrize("source", [gs.Threads(2), gs.TaskGraphs(), gs.Processes(num_workers=1)], ids=str)
@pytest.mark.parametrize("scope", ["part", "graph"])
def test_batches_have_them_and_a_backbone_gets_those_that_it_names(tmp_path, source, scope):
    write(tmp_path / "store", dataset())
    dm = gs.PartitionDataModule(
        store=tmp_path / "store", sampler=gs.NeighborSampler([3, 2]), batch_size=16, source=source, scope=scope
    )
    dm.setup("predict")
    loader, module = dm.train_dataloader(), gs.NodeClassifier(Sees())
    try:
        batches = list(loader)
    finally:
        loader.close()
    assert batches
    for batch in batches:
        expected = IMAGE[dm.store.original_nid[batch.n_id]]
        assert np.array_equal(batch.columns["image"], expected)
        assert np.array_equal(
            batch.to("cpu").columns["words"].dense(), WORDS.toarray()[dm.store.original_nid[batch.n_id]]
        )
        assert np.array_equal(batch.to_data().image, expected)
        assert module(batch).shape == (batch.num_nodes, 3)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("rows", ["mapped", "planned"])
def test_columns_larger_than_memory_are_read_for_a_run_of_batches(tmp_path, monkeypatch, typed, rows):
    graph = typed_graph() if typed else dataset()
    write(tmp_path / "store", graph)
    sampler = gs.NeighborSampler([3, 2])

    def batches(free):
        monkeypatch.setattr(train_loader, "free_memory_bytes", lambda: free)
        dm = gs.PartitionDataModule(store=tmp_path / "store", sampler=sampler, batch_size=8, rows="auto")
        dm.setup("predict")
        loader, before = dm.train_dataloader(), bytes_read.total
        loader.set_reads(RowReads(rows, 4000), dm.store.part_features)
        try:
            found = [batch.columns for batch in loader]
        finally:
            loader.close()
        return found, loader.columns_bytes, bytes_read.total - before

    (mapped, none, _), (ahead, window, read) = batches(1 << 40), batches(320)
    assert none == 0 and window == 320 // 16 and read > 0 and len(mapped) == len(ahead) > 2
    for one, other in zip(mapped, ahead, strict=True):
        assert one.keys() == other.keys() and all(map(torch.equal, flat(one), flat(other)))


@pytest.mark.parametrize("rows", ["auto", "mapped"])
@pytest.mark.parametrize("typed", [False, True])
def test_a_sampled_evaluation_reads_rows_larger_than_memory_for_a_run_of_batches(tmp_path, monkeypatch, typed, rows):
    write(tmp_path / "store", typed_graph() if typed else dataset())

    def batches(free):
        for module in (train_loader, array_file):
            monkeypatch.setattr(module, "free_memory_bytes", lambda: free)
        options = {"evaluation": "sampled", "batch_size": 8, "rows": rows}
        dm = gs.PartitionDataModule(store=tmp_path / "store", sampler=gs.NeighborSampler([3, 2]), **options)
        dm.setup("predict")
        loader = dm.predict_dataloader()
        try:
            return [
                (batch.edge_index, *flat({"x": rows_of(batch)} | batch.columns)) for batch in loader
            ], loader.reads.how
        finally:
            loader.close()

    (in_memory, how), (ahead, how_ahead) = batches(1 << 40), batches(160)
    assert how == "mapped" and how_ahead == {"auto": "planned", "mapped": "mapped"}[rows]
    assert len(in_memory) == len(ahead) > 2
    assert all(
        torch.equal(a, b) for one, other in zip(in_memory, ahead, strict=True) for a, b in zip(one, other, strict=True)
    )


def rows_of(batch):
    return batch.x if batch.x_by_node_type is None else batch.x_by_node_type


def flat(columns) -> list[torch.Tensor]:
    """Return the tensors of all columns of a batch."""
    found: list[torch.Tensor] = []
    for rows in columns.values():
        rows.apply(lambda tensor: found.append(tensor) or tensor) if hasattr(rows, "apply") else found.append(rows)
    return found


def test_columns_of_a_store_behind_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNSCALE_FETCHED", str(tmp_path / "fetched"))
    write(tmp_path / "store", dataset())
    publish(tmp_path / "store", f"file://{tmp_path}/published")
    store = gs.PartitionStore.open(f"file://{tmp_path}/published")
    assert np.array_equal(store.node_columns["image"].read(np.arange(9)), IMAGE[store.original_nid[:9]])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": IMAGE}, "node_columns image 'x'"),
        ({"edge_index": IMAGE}, "node_columns image 'edge_index'"),
        ({"an image": IMAGE}, "node_columns image 'an image'"),
        ({"image": IMAGE[:-1]}, "node_columns['image'] 90 89"),
    ],
)
def test_what_is_no_column_is_refused_in_one_line(tmp_path, columns, message):
    with pytest.raises(ValueError, match=said(message)):
        write(tmp_path / "store", dataset(**columns))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["node_columns", *sorted(EDGE_COLUMNS)])
def test_a_column_that_does_not_fit_is_refused_before_the_graph_is_partitioned(tmp_path, name):
    rows = np.ones((5, 2) if name == "edge_features" else 5, np.int64)
    given = {"node_columns": {"image": IMAGE[:5]}} if name == "node_columns" else {name: rows}
    graph = gs.GraphDataset("g", gs.open_edge_stream(EDGES, num_nodes=NODES), **given)
    with pytest.raises(ValueError, match=said(f"{name} shape 5")):
        prepare_store(tmp_path / "store", graph, lambda: pytest.fail("partitioned"), "0123456789abcdef")
    assert not list(tmp_path.iterdir())


def test_a_compiled_backbone_gets_the_column_that_it_names(tmp_path):
    write(tmp_path / "store", dataset())
    dm = gs.PartitionDataModule(store=tmp_path / "store", sampler=gs.NeighborSampler([3, 2]), batch_size=16)
    dm.setup("predict")
    loader = dm.train_dataloader()
    try:
        batch = next(iter(loader))
    finally:
        loader.close()

    class Linear(torch.nn.Module):
        out_channels = 3

        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(8, 3)

        def forward(self, x, edge_index, image):
            return self.map(torch.cat([x, image / 255], dim=1))

    module = gs.NodeClassifier(torch.compile(Linear(), backend="eager"))
    assert module(batch).shape == (batch.num_nodes, 3)


def test_the_disk_that_columns_take_is_counted(tmp_path):
    sizes = []
    for graph in (dataset(image=IMAGE), dataset(image=np.tile(IMAGE, (1, 10)))):
        parts = gs.partition(graph.stream, "random", 3, seed=1)
        sizes.append(disk_bytes(check_inputs(graph.stream, parts, Columns.of(graph), False)))
    assert sizes[1] - sizes[0] == 9 * IMAGE.nbytes


class Timed(torch.nn.Module):
    """A user's backbone that cannot do without times of edges."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, edge_index, edge_time):
        return self.layer(x)


class Weighing(torch.nn.Module):
    requires: ClassVar = {"edge_weight": "Weighing reads edge weights: write the store with edge_weight="}

    def forward(self, x, edge_index):
        return x


@pytest.mark.parametrize(
    ("backbone", "told"),
    [
        (Timed(), "Timed.forward edge_time edge_time="),
        (Sees(), "Sees.forward image node_columns={"),
        (Weighing(), "Weighing edge_weight="),
    ],
)
def test_what_a_backbone_needs_and_the_store_lacks_is_said_before_the_first_batch(tmp_path, backbone, told):
    stream = gs.open_edge_stream(EDGES, num_nodes=NODES)
    parts, features = gs.partition(stream, "random", num_parts=2), np.ones((NODES, 8), np.float32)
    store = gs.write_partition_store(tmp_path, stream, parts, features=features, labels=np.arange(NODES) % 3)
    with pytest.raises(StrategyError, match=said(told)):
        check_model(gs.NodeClassifier(backbone, num_classes=3), store)


def test_a_sampled_evaluation_with_owners_reads_columns_for_a_run_of_batches(tmp_path, monkeypatch):
    """Owners give neighbours and features; further columns are the store's."""
    write(tmp_path / "store", dataset())
    monkeypatch.setattr(train_loader, "load_whole_graph", lambda store, part, edges: load_whole_graph(store, part))

    def batches(free):
        monkeypatch.setattr(train_loader, "free_memory_bytes", lambda: free)
        dm = gs.PartitionDataModule(
            store=tmp_path / "store", sampler=gs.NeighborSampler([3, 2]), evaluation="sampled", batch_size=8
        )
        dm.setup("predict")
        owners = SimpleNamespace(features=dm.store.features, sampler=lambda sampler: sampler)
        monkeypatch.setattr(dm, "_held_graph", lambda: owners)
        loader = dm.predict_dataloader()
        try:
            return [batch.columns for batch in loader], loader.columns_bytes
        finally:
            loader.close()

    (mapped, none), (ahead, window) = batches(1 << 40), batches(320)
    assert (none, window) == (0, 320 // 16) and len(mapped) == len(ahead) > 2
    assert all(all(map(torch.equal, flat(one), flat(other))) for one, other in zip(mapped, ahead, strict=True))
