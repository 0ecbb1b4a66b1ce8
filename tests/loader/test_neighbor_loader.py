"""`gs.NeighborLoader`: PyG's semantics, PyG's order, and one line for what it does not follow."""

import re
import warnings
from itertools import chain

import lightning as L
import numpy as np
import pytest
import torch
from torch_geometric import typing
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ImbalancedSampler
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import index_sort, trim_to_layer

import lightning_gnnscale as gs
from lightning_gnnscale.errors import GNNScaleError
from tests.says import said

NUM_NODES, NUM_EDGES = 120, 700


def make_data(seed: int = 0, is_sorted: bool = False) -> Data:
    """A multigraph with self-loops, repeats, isolated nodes and a hub, its edges in no order."""
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, NUM_NODES - 10, (2, NUM_EDGES))
    edges[1, :80] = 3
    if is_sorted:
        edges = edges[:, np.argsort(edges[1], kind="stable")]
    return Data(
        x=torch.from_numpy(rng.random((NUM_NODES, 5), np.float32)),
        y=torch.from_numpy(rng.integers(0, 4, NUM_NODES)),
        edge_index=torch.from_numpy(edges),
        edge_attr=torch.from_numpy(rng.random((NUM_EDGES, 2))),
        edge_weight=torch.arange(NUM_EDGES).float(),
        half=torch.arange(NUM_NODES * 2).view(NUM_NODES, 2).bfloat16(),
        strided=torch.from_numpy(rng.random((6, NUM_NODES))).t(),
        train_mask=torch.from_numpy(rng.random(NUM_NODES) < 0.5),
        table=np.arange(NUM_NODES, dtype=np.int16),
        graph_value=torch.tensor([1.0, 2.0, 3.0]),
        name="a graph",
    )


DATA = make_data()


def pyg_order(data: Data, seeds: list[int], fanouts: list[int], is_sorted: bool) -> tuple[list, list, list, list]:
    """PyG's documented order where every neighbour is taken: seeds, then new nodes as they appear, hop by hop."""
    incoming: dict[int, list[int]] = {}
    for edge in range(NUM_EDGES) if is_sorted else index_sort(data.edge_index[1])[1].tolist():
        incoming.setdefault(int(data.edge_index[1, edge]), []).append(edge)
    n_id, place = list(seeds), {node: i for i, node in enumerate(seeds)}
    row, col, e_id, begin = [], [], [], 0
    for fanout in fanouts:
        end = len(n_id)
        for local in range(begin, end):
            edges = incoming.get(n_id[local], [])
            assert fanout == -1 or len(edges) <= fanout
            for edge in edges:
                source = int(data.edge_index[0, edge])
                if source not in place:
                    place[source] = len(n_id)
                    n_id.append(source)
                row.append(place[source])
                col.append(local)
                e_id.append(edge)
        begin = end
    return n_id, row, col, e_id


def tensors(batch: Data) -> dict:
    return {k: v.float().numpy().tobytes() if torch.is_tensor(v) else v for k, v in batch.to_dict().items()}


def epoch(loader) -> list[dict]:
    return [tensors(batch) for batch in loader]


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("fanouts", [[-1, -1], [200, -1], [-1]])
def test_whole_neighbourhoods_come_in_pygs_order(is_sorted, fanouts):
    data = make_data(1, is_sorted)
    seeds = torch.tensor([3, 117, 0, 45, 44])
    loader = gs.NeighborLoader(data, fanouts, seeds, batch_size=2, is_sorted=is_sorted)
    for number, batch in enumerate(loader):
        expected = pyg_order(data, seeds[2 * number : 2 * number + 2].tolist(), fanouts, is_sorted)
        assert (batch.n_id.tolist(), *batch.edge_index.tolist(), batch.e_id.tolist()) == expected


@pytest.mark.skipif(not typing.WITH_TORCH_SPARSE, reason="torch-sparse is not installed")
@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_whole_neighbourhoods_equal_torch_sparse(subgraph_type):
    from torch_geometric.loader import NeighborLoader

    options = {"input_nodes": DATA.train_mask, "batch_size": 7, "subgraph_type": subgraph_type}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = list(NeighborLoader(DATA, [200, 200], **options))
    ours = list(gs.NeighborLoader(DATA, [200, 200], **options))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        for key, value in b.to_dict().items():
            if value is not None:
                assert torch.equal(a[key], value) if torch.is_tensor(value) else a[key] == value, key


@pytest.mark.parametrize("replace", [False, True])
def test_a_batch_is_the_data_cut_down_to_it(replace):
    loader = gs.NeighborLoader(DATA, [4, 3], DATA.train_mask, batch_size=16, shuffle=True, replace=replace)
    seen = []
    for batch in loader:
        assert isinstance(batch, Data)
        for key in ("x", "y", "half", "strided", "train_mask"):
            assert torch.equal(batch[key], DATA[key][batch.n_id]), key
            assert batch[key].dtype == DATA[key].dtype
        assert batch.table.tolist() == DATA.table[batch.n_id.numpy()].tolist()
        for key in ("edge_attr", "edge_weight"):
            assert torch.equal(batch[key], DATA[key][batch.e_id])
        assert torch.equal(batch.n_id[batch.edge_index], DATA.edge_index[:, batch.e_id])
        assert batch.name == "a graph" and torch.equal(batch.graph_value, DATA.graph_value)
        assert torch.equal(batch.input_id, batch.n_id[: batch.batch_size])
        assert sum(batch.num_sampled_nodes) == batch.num_nodes == len(batch.n_id.unique())
        assert sum(batch.num_sampled_edges) == batch.num_edges
        sampled = torch.bincount(batch.edge_index[1], minlength=batch.batch_size)[: batch.batch_size]
        degree = torch.bincount(DATA.edge_index[1], minlength=NUM_NODES)[batch.n_id[: batch.batch_size]]
        assert torch.equal(sampled, 4 * (degree > 0) if replace else degree.clamp(max=4))
        seen += batch.input_id.tolist()
    assert sorted(seen) == DATA.train_mask.nonzero().view(-1).tolist() != seen


def test_other_subgraph_types_on_the_same_nodes():
    options = {"batch_size": 20, "input_nodes": range(40)}
    edges = DATA.edge_index
    loaders = [gs.NeighborLoader(DATA, [3, 2], **options, subgraph_type=t) for t in ("bidirectional", "induced")]
    loaders.append(gs.NeighborLoader(DATA, [3, 2], **options, directed=False))
    for sampled, both, induced, older in zip(gs.NeighborLoader(DATA, [3, 2], **options), *loaders, strict=True):
        assert torch.equal(sampled.n_id, both.n_id) and torch.equal(sampled.n_id, induced.n_id)
        assert tensors(induced) == tensors(older)
        inside = torch.isin(edges, sampled.n_id).all(0).nonzero().view(-1)
        assert induced.e_id.sort().values.tolist() == inside.tolist()
        assert torch.equal(induced.n_id[induced.edge_index], edges[:, induced.e_id])
        assert (induced.edge_index[1].diff() >= 0).all() and "num_sampled_nodes" not in induced
        pairs = set(zip(*sampled.edge_index.tolist(), strict=True))
        expected = pairs | {(b, a) for a, b in pairs}
        assert sorted(expected, key=lambda p: p[::-1]) == list(zip(*both.edge_index.tolist(), strict=True))
        assert torch.equal(both.edge_weight, both.e_id.float()) and "num_sampled_nodes" not in both


@pytest.mark.parametrize("threads", [1, 3])
def test_order_and_samples_follow_from_seed_and_epoch(threads):
    options = {"batch_size": 16, "shuffle": True, "seed": 5}
    alone = gs.NeighborLoader(DATA, [4, 3], num_threads=0, **options)
    loader = gs.NeighborLoader(DATA, [4, 3], num_workers=threads, **options)
    first, second = epoch(alone), epoch(alone)
    assert len(first) == len(alone) == 8 and first != second
    assert epoch(loader) == first and epoch(loader) == second
    loader.set_epoch(1)
    assert epoch(loader) == second
    assert epoch(gs.NeighborLoader(DATA, [4, 3], batch_size=16, shuffle=True, seed=6)) != first


def test_batches_share_nothing_with_the_loader():
    loader = gs.NeighborLoader(DATA, [4, 3], batch_size=16)
    first = epoch(loader)
    loader.set_epoch(0)
    for batch in loader:
        batch.input_id.zero_()
    loader.set_epoch(0)
    assert epoch(loader) == first


def test_a_state_goes_on_within_the_epoch_and_after_it():
    options = {"batch_size": 16, "shuffle": True}
    loader = gs.NeighborLoader(DATA, [4, 3], **options)
    epoch(loader)
    batches = iter(loader)
    next(batches)
    within = loader.state_dict()
    rest = [tensors(batch) for batch in batches]
    end = loader.state_dict()
    third = epoch(loader)
    for state, expected in ((within, rest), (end, third)):
        resumed = gs.NeighborLoader(DATA, [4, 3], **options)
        resumed.load_state_dict(state)
        assert epoch(resumed) == expected


def test_input_nodes_in_every_form():
    ids = [7, 3, 90]
    for nodes in (ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), np.array(ids)):
        (batch,) = gs.NeighborLoader(DATA, [2], nodes, batch_size=4)
        assert batch.n_id[:3].tolist() == ids and batch.input_id.tolist() == [0, 1, 2] and batch.batch_size == 3
    mask = torch.zeros(NUM_NODES, dtype=torch.bool)
    mask[ids] = True
    for nodes in (mask, mask.numpy()):
        (batch,) = gs.NeighborLoader(DATA, [2], nodes, batch_size=4)
        assert batch.input_id.tolist() == batch.n_id[:3].tolist() == sorted(ids)
    assert len(gs.NeighborLoader(DATA, [2])) == NUM_NODES
    assert len(gs.NeighborLoader(DATA, [2], batch_size=50, drop_last=True)) == 2
    assert list(gs.NeighborLoader(DATA, [2], [])) == []


def test_ranks_share_the_seeds_evenly():
    loaders = [
        gs.NeighborLoader(DATA, [2], range(99), batch_size=10, shuffle=True, rank=r, world_size=2) for r in (0, 1)
    ]
    seeds = [torch.cat([batch.input_id for batch in loader]).tolist() for loader in loaders]
    assert [len(s) for s in seeds] == [50, 50] and set(seeds[0]) | set(seeds[1]) == set(range(99))


def test_transform_and_replaced_attributes():
    data = make_data()

    def double(batch):
        batch.x = batch.x * 2
        return batch

    loader = gs.NeighborLoader(data, [2], batch_size=64, transform=double, pin_memory=True, is_sorted=False)
    assert all(torch.equal(batch.x, 2 * data.x[batch.n_id]) for batch in loader)
    data.x = data.x + 1
    assert all(torch.equal(batch.x, 2 * data.x[batch.n_id]) for batch in loader)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 4)])
        self.orders = []

    def forward(self, batch, trim=True):
        x, edge_index = batch.x, batch.edge_index
        for i, layer in enumerate(self.layers):
            if trim:
                x, edge_index, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
            x = layer(x, edge_index).relu()
        return x[: batch.batch_size]

    def training_step(self, batch):
        self.orders.append(batch.input_id.tolist())
        return torch.nn.functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch):
        self.log("val", self(batch).sum(), batch_size=batch.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_trimming_changes_no_result():
    model = Model()
    for batch in gs.NeighborLoader(DATA, [4, 3], batch_size=16):
        torch.testing.assert_close(model(batch), model(batch, trim=False))


def test_lightning_trains_from_it(tmp_path):
    def fit(threads):
        L.seed_everything(0)
        model = Model()
        train = gs.NeighborLoader(DATA, [4, 3], DATA.train_mask, batch_size=16, shuffle=True, num_workers=threads)
        valid = gs.NeighborLoader(DATA, [4, 3], ~DATA.train_mask, batch_size=32)
        trainer = L.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, train, valid)
        return model, len(train)

    model, length = fit(1)
    epochs = [list(chain(*model.orders[i : i + length])) for i in range(0, 3 * length, length)]
    assert len(model.orders) == 3 * length and epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    again, _ = fit(2)
    assert again.orders == model.orders
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_no_edges_and_no_attributes():
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=3)
    batches = list(gs.NeighborLoader(data, [2, 2], batch_size=2))
    assert [batch.num_nodes for batch in batches] == [2, 1] and all(batch.num_edges == 0 for batch in batches)


def edge_index(*edges):
    return Data(edge_index=torch.tensor(edges).t(), num_nodes=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_neighbors": [5, 0]}, "num_neighbors[1] must be an integer >= 1, or -1 for all neighbours, got 0"),
        ({"num_neighbors": [-2]}, "num_neighbors[0] must be an integer >= 1"),
        ({"num_neighbors": [2.5]}, "num_neighbors[0] must be an integer >= 1"),
        ({"num_neighbors": 10}, "num_neighbors must be a list with a fan-out for each hop, like [15, 10, 5], got 10"),
        ({"num_neighbors": "15"}, "num_neighbors must be a list"),
        ({"num_neighbors": []}, "at least one hop"),
        ({"num_neighbors": {("a", "to", "b"): [1]}}, "needs a graph with several"),
        ({"input_nodes": [0, NUM_NODES]}, f"input_nodes must be in [0, {NUM_NODES}), got 0 to {NUM_NODES}"),
        ({"input_nodes": [-1]}, "input_nodes must be in [0, "),
        ({"input_nodes": [5, 6, 5]}, "input_nodes must be distinct, node 5 is repeated: disjoint=True gives each seed"),
        ({"input_nodes": torch.ones(3, dtype=torch.bool)}, f"must have {NUM_NODES} entries, one a node, got 3"),
        ({"input_nodes": torch.ones(3)}, "input_nodes must be node ids"),
        ({"input_nodes": ("paper", torch.ones(3))}, "input_nodes must be node ids"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"num_workers": -1}, "num_threads must be an integer of at least 0, got -1"),
        ({"num_workers": 1, "num_threads": 2}, "num_workers is another name of num_threads, got 1 and 2"),
        ({"subgraph_type": "cyclic"}, "must be one of directional, bidirectional, induced, got 'cyclic'"),
        ({"is_sorted": True}, "is_sorted=True needs data.edge_index[1] ascending, got "),
        ({"disjoint": True, "subgraph_type": "induced"}, 'disjoint trees have no subgraph of type "induced"'),
        ({"time_attr": "time"}, "time_attr='time' is an attribute of neither nodes nor edges"),
        ({"weight_attr": "none"}, "weight_attr='none' is no attribute of edges"),
        ({"sampler": [1]}, "does not follow sampler=[1]: pass the seeds that it samples"),
        ({"generator": torch.Generator()}, "pass seed"),
        ({"world_size": 2}, "rank and world_size go together, got rank=None and world_size=2"),
        ({"rank": 1}, "rank and world_size go together, got rank=1 and world_size=None"),
        ({"rank": 2, "world_size": 2}, "rank must be in [0, world_size), got rank 2 of 2"),
        ({"data": HeteroData()}, "seeds of a HeteroData are a node type, or (node type, seeds): got None"),
        ({"data": Data(x=torch.ones(4, 2))}, "data has no edge_index: set it to"),
        ({"data": edge_index([0, 1], [1, 4])}, "data.edge_index[1] must be in [0, 4), data.num_nodes, got 1 to 4"),
        ({"data": edge_index([-1, 1])}, "data.edge_index[0] must be in [0, 4)"),
        ({"data": Data(edge_index=torch.ones(3, 2, dtype=torch.long), num_nodes=4)}, "of shape (2, num_edges)"),
    ],
)
def test_what_it_does_not_follow_is_told_in_one_line(change, message):
    options = {"data": DATA, "num_neighbors": [3, 2]} | change
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        gs.NeighborLoader(**options)
    assert "\n" not in str(error.value)


def test_samples_of_an_imbalanced_sampler_train_as_trees_of_their_own():
    nodes = DATA.train_mask.nonzero().view(-1)
    torch.manual_seed(0)
    sampled = ImbalancedSampler(DATA.y, input_nodes=nodes)
    with pytest.raises(ValueError, match=said("sampler=ImbalancedSampler seeds[list(sampler)] disjoint=True")) as error:
        gs.NeighborLoader(DATA, [3, 2], input_nodes=nodes, sampler=sampled)
    assert "\n" not in str(error.value)
    seeds = nodes[list(sampled)]
    assert len(seeds.unique()) < len(seeds)
    with pytest.raises(ValueError, match=said("repeated disjoint=True")):
        gs.NeighborLoader(DATA, [3, 2], input_nodes=seeds)
    batches = list(gs.NeighborLoader(DATA, [3, 2], input_nodes=seeds, batch_size=16, disjoint=True))
    assert torch.equal(torch.cat([batch.n_id[: batch.batch_size] for batch in batches]), seeds)
    assert all(batch.batch[: batch.batch_size].tolist() == list(range(batch.batch_size)) for batch in batches)


def test_unknown_arguments_and_inert_ones():
    with pytest.raises(TypeError, match=said("argument 'num_neighbours'")):
        gs.NeighborLoader(DATA, [3], num_neighbours=[4])
    inert = {"disjoint": False, "time_attr": None, "temporal_strategy": "uniform", "persistent_workers": True}
    assert epoch(gs.NeighborLoader(DATA, [3], batch_size=30, **inert)) == epoch(
        gs.NeighborLoader(DATA, [3], batch_size=30)
    )


def test_an_error_while_a_batch_is_prepared_reaches_the_reader():
    data = make_data()
    loader = gs.NeighborLoader(data, [3], batch_size=30)
    data.notes = ["a"] * NUM_NODES
    with pytest.raises(GNNScaleError, match=said("batch 0 epoch 1")):
        next(iter(loader))


def near_rows(share: float = 0.2, scale: float = 8.0) -> gs.LocalityBias:
    degree = torch.bincount(DATA.edge_index[0], minlength=NUM_NODES).numpy().astype(np.float32)
    return gs.LocalityBias(gs.place(degree, num_devices=1, buffer_rows=int(share * NUM_NODES), alpha=0), scale)


def test_locality_reads_near_rows_and_keeps_the_mean():
    data = make_data()
    del data.edge_weight
    bias = near_rows()
    options = {"batch_size": 40, "input_nodes": range(40)}
    near = torch.from_numpy(bias.rows)
    shares, means = [], []
    for locality in (None, bias):
        loader = gs.NeighborLoader(data, [3], locality=locality, **options)
        batches = [next(iter(loader)) for _ in range(400)]
        shares.append(np.mean([torch.isin(batch.n_id[40:], near).float().mean() for batch in batches]))
        for batch in batches:
            assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
            assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
            assert batch.get("averaging_weights", False) is (locality is not None)
        weights = [b.edge_weight if locality else torch.ones(b.num_edges) for b in batches]
        sums = [
            torch.zeros(40).index_add_(0, b.edge_index[1], w * b.x[b.edge_index[0], 0])
            for b, w in zip(batches, weights, strict=True)
        ]
        means.append(torch.stack(sums))
    assert shares[1] > 1.2 * shares[0]
    degree = torch.bincount(data.edge_index[1], minlength=NUM_NODES)[:40].float()
    total = torch.zeros(NUM_NODES).index_add_(0, data.edge_index[1], data.x[data.edge_index[0], 0])[:40]
    expected, found = total / degree.clamp(min=1), means[1]
    deviation = found.std(0) / 400**0.5
    # 40 nodes, two sides: a right sampler exceeds 4.5 with a probability of 3e-4; rows that are taken whole have none.
    assert ((found.mean(0) - expected).abs() <= 4.5 * deviation + 1e-5).all()


def test_a_scale_of_one_changes_nothing():
    data = make_data()
    del data.edge_weight
    plain, biased = (
        gs.NeighborLoader(data, [3, 2], batch_size=30, locality=bias) for bias in (None, near_rows(scale=1.0))
    )
    assert epoch(plain) == epoch(biased)


def test_what_locality_does_not_go_with():
    with pytest.raises(ValueError, match=said("data data.edge_weight")):
        gs.NeighborLoader(DATA, [3], locality=near_rows())
    data = make_data()
    del data.edge_weight
    with pytest.raises(ValueError, match=said('locality "induced"')):
        gs.NeighborLoader(data, [3], locality=near_rows(), directed=False)
    with pytest.raises(ValueError, match=said("replace False")):
        gs.NeighborLoader(data, [3], locality=near_rows(), replace=True)
    other = gs.Placement((np.arange(2),), ((0,),), 7, None, {}, ({},), "degree")
    with pytest.raises(gs.PlacementError, match=said("7 nodes graph 120")):
        gs.NeighborLoader(data, [3], locality=gs.LocalityBias(other, 2.0))


@pytest.mark.parametrize("sampled", [{}, {"disjoint": True}])
def test_a_call_is_the_batch_of_seeds_at_positions(sampled):
    loader = gs.NeighborLoader(DATA, [-1, -1], torch.arange(40, 80), batch_size=6, **sampled)
    first, called = next(iter(loader)), loader(torch.arange(6))
    for name in ("n_id", "edge_index", "e_id", "input_id", "x"):
        assert torch.equal(first[name], called[name]), name
    assert loader([39, 3]).n_id[:2].tolist() == [79, 43]
    chosen = gs.NeighborLoader(DATA, [2, 2], batch_size=6, seed=3, **sampled)
    assert torch.equal(chosen([3, 5]).n_id, chosen(np.array([3, 5])).n_id)
    assert chosen([]).batch_size == 0
    with pytest.raises(ValueError, match=said("index 1 40 [0, 40)")):
        loader([0, 40])
    with pytest.raises(ValueError, match=said("index [3, 3]")):
        loader([3, 3])


def test_a_call_transforms_its_batch():
    assert gs.NeighborLoader(DATA, [2], transform=lambda batch: batch.batch_size)([4, 7]) == 2


def test_what_pyg_names_is_there_or_told():
    loader = gs.NeighborLoader(DATA, [2], batch_size=7, drop_last=True, num_workers=2)
    assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.input_time) == (7, True, 2, None)
    assert not hasattr(loader, "collate_fn")
    with pytest.raises(AttributeError, match=said("attribute 'node_sampler' loader")):
        loader.node_sampler  # noqa: B018
    with pytest.raises(AttributeError, match=said("NeighborLoader 'other'")):
        loader.other  # noqa: B018


@pytest.mark.parametrize("make", [gs.NeighborLoader, gs.LinkNeighborLoader])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_rows_of_a_layout_that_has_none_are_refused_in_one_line(make):
    data = Data(x=torch.eye(4).to_sparse_csr(), edge_index=torch.tensor([[0, 1], [1, 2]]))
    kinds = HeteroData({"a": {"x": data.x}, ("a", "to", "a"): {"edge_index": data.edge_index}})
    of_node_type = "a" if make is gs.NeighborLoader else ("a", "to", "a")
    for graph, seeds, name in ((data, None, "data.x"), (kinds, of_node_type, "data['a'].x")):
        with pytest.raises(ValueError, match=said(f"{name} sparse_csr rows")):
            make(graph, [2], seeds)
    data.x = torch.eye(4).to_sparse()
    batch = next(iter(make(data, [2])))
    assert torch.equal(batch.x.to_dense(), torch.eye(4)[batch.n_id])


@pytest.mark.parametrize(
    "values", [[5, 1, 2], np.array([5, 1, 2]), torch.tensor([5, 1, 2])], ids=["list", "numpy", "torch"]
)
def test_times_and_labels_are_lists_arrays_or_tensors(values):
    data = Data(edge_index=DATA.edge_index, time=torch.arange(NUM_NODES), num_nodes=NUM_NODES)
    batch = next(iter(gs.NeighborLoader(data, [2], [9, 8, 7], batch_size=3, time_attr="time", input_time=values)))
    assert batch.seed_time.tolist() == [5, 1, 2]
    links = gs.LinkNeighborLoader(data, [2], DATA.edge_index[:, :3], values, batch_size=3)
    assert next(iter(links)).edge_label.tolist() == [5, 1, 2]


def test_a_graph_without_edges_has_its_seeds():
    data = Data(x=torch.eye(4), edge_index=torch.empty(2, 0, dtype=torch.long))
    batch = next(iter(gs.NeighborLoader(data, [2], batch_size=4)))
    assert batch.n_id.tolist() == [0, 1, 2, 3] and batch.edge_index.shape == (2, 0)
