"""A store behind PyG's own doors: its loaders, its models and its explainers read rows where they lie."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE

import lightning_gnnscale as gs
from lightning_gnnscale.sampler.data_sampler import DataSampler
from tests.says import said

NUM = 200


@pytest.fixture(scope="module")
def given():
    sample = np.random.default_rng(0)
    features = sample.normal(size=(NUM, 6)).astype(np.float32)
    return {
        "edges": sample.integers(0, NUM, (2, 1500)),
        "features": features,
        "labels": features[:, :3].argmax(1),
        "train": sample.random(NUM) < 0.5,
        "values": sample.normal(size=(1500, 2)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def store(given, tmp_path_factory):
    stream = gs.open_edge_stream(given["edges"], num_nodes=NUM)
    parts = gs.partition(stream, method="spring", num_parts=4)
    return gs.write_partition_store(
        tmp_path_factory.mktemp("pyg") / "store", stream, parts, features=given["features"], labels=given["labels"],
        masks={"train": given["train"], "val": ~given["train"]}, edge_features=given["values"],
    )  # fmt: skip


def check(batch, store, given) -> None:
    user = store.original_nid[batch.n_id.numpy()]
    assert np.array_equal(batch.x.numpy(), given["features"][user])
    assert np.array_equal(batch.y.numpy(), given["labels"][user])
    assert np.array_equal(batch.train_mask.numpy(), given["train"][user])
    known = {tuple(ends) for ends in given["edges"].T.tolist()}
    assert {tuple(ends) for ends in user[batch.edge_index.numpy()].T.tolist()} <= known


def test_our_loader_reads_the_store(store, given):
    view = gs.PyGStore(store)
    loader = gs.NeighborLoader(view, [4, 3], view.get_tensor(None, "train_mask", None), batch_size=30, num_threads=2)
    batches = list(loader)
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert np.array_equal(np.sort(store.original_nid[seeds.numpy()]), np.flatnonzero(given["train"]))
    for batch in batches:
        check(batch, store, given)
        assert np.array_equal(batch.edge_attr.numpy(), store.edge_features[batch.e_id.numpy()])
        ends = batch.n_id[batch.edge_index].numpy()
        assert np.array_equal(store.csc.indices[batch.e_id.numpy()], ends[0])


def test_pygs_loader_reads_it_too(store, given):
    view = gs.PyGStore(store)
    loader = NodeLoader((view, view), DataSampler((view, view), [4, 3]), input_nodes=torch.arange(50), batch_size=25)
    for batch in loader:
        check(batch, store, given)


def test_a_model_of_pygs_trains_and_is_explained(store):
    torch.manual_seed(0)
    model, view = GraphSAGE(6, 16, 2, 3), gs.PyGStore(store)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(12):
        for batch in gs.NeighborLoader(view, [5, 5], batch_size=50):
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:50]
            loss = torch.nn.functional.cross_entropy(out, batch.y[:50])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    explainer = Explainer(
        model, GNNExplainer(epochs=5), explanation_type="model", node_mask_type="attributes", edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )  # fmt: skip
    found = explainer(batch.x, batch.edge_index, index=0)
    assert found.edge_mask.shape == (batch.edge_index.shape[1],) and found.node_mask.max() > 0


def test_it_says_what_it_holds(store, given):
    view = gs.PyGStore(store.root)
    assert [attr.attr_name for attr in view.get_all_tensor_attrs()] == ["x", "y", "train_mask", "val_mask"]
    assert view.get_tensor_size(group_name=None, attr_name="x") == (NUM, 6)
    assert torch.equal(view.get_tensor(None, "x", torch.tensor([3, 1]))[1], view.get_tensor(None, "x", None)[1])
    assert torch.equal(view.get_tensor(None, "y", slice(5, 9)), view.get_tensor(None, "y", None)[5:9])
    row, colptr, perm = view.csc()
    assert len(row) == store.num_edges and len(colptr) == NUM + 1 and perm is None
    for again in (pickle.loads(pickle.dumps(view)), copy.copy(view)):
        assert torch.equal(again.get_tensor(None, "y", None), view.get_tensor(None, "y", None))
    with pytest.raises(gs.PartitionStoreError, match="a store is read only"):
        view.put_tensor(torch.zeros(2), group_name=None, attr_name="x", index=None)


@pytest.mark.parametrize("form", ["sparse", "float16"])
def test_rows_are_as_models_take_them(given, tmp_path, form):
    import scipy.sparse

    stream = gs.open_edge_stream(given["edges"], num_nodes=NUM)
    parts = gs.partition(stream, method="random", num_parts=2)
    rows = np.maximum(given["features"], 0)
    rows = scipy.sparse.csr_array(rows) if form == "sparse" else rows.astype(np.float16)
    store = gs.write_partition_store(tmp_path / "store", stream, parts, features=rows)
    found = gs.PyGStore(store).get_tensor(None, "x", torch.arange(20))
    dense = rows.toarray() if form == "sparse" else rows
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), dense[store.original_nid[:20]].astype(np.float32))


def test_times_are_refused_where_they_are_not(store):
    with pytest.raises(ValueError, match=said("times HeteroData")):
        gs.NeighborLoader(gs.PyGStore(store), [2], time_attr="time")
