"""`NeighborLoader` and `LinkNeighborLoader` of heterogeneous graphs, times and weights: PyG's batches, by a key."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.sampler import NegativeSampling

import lightning_gnnscale as gs
from tests.says import said

WRITES, CITES, BY = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")


@pytest.fixture(scope="module")
def data() -> HeteroData:
    sample = torch.Generator().manual_seed(1)
    graph = HeteroData()
    for node_type, count in (("paper", 80), ("author", 50)):
        graph[node_type].x = torch.randn(count, 6, generator=sample)
        graph[node_type].time = torch.randint(0, 100, (count,), generator=sample)
    graph["paper"].y = torch.randint(0, 3, (80,), generator=sample)
    for (source, name, target), num in ((WRITES, 300), (CITES, 500), (BY, 300)):
        ends = [
            torch.randint(0, graph[node_type].num_nodes, (num,), generator=sample) for node_type in (source, target)
        ]
        graph[source, name, target].edge_index = torch.stack(ends)
        graph[source, name, target].edge_attr = torch.arange(num)[:, None].float()
    return graph


def test_batches_are_cut_from_the_data(data):
    loader = gs.NeighborLoader(
        data, {WRITES: [4, 2], CITES: [3, 3], BY: [0, 2]}, ("paper", torch.arange(60)), batch_size=20
    )
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    for number, batch in enumerate(batches):
        assert batch["paper"].n_id[:20].tolist() == list(range(20 * number, 20 * number + 20))
        assert batch["paper"].batch_size == 20 and len(batch["paper"].input_id) == 20
        for node_type in data.node_types:
            assert torch.equal(batch[node_type].x, data[node_type].x[batch[node_type].n_id])
            assert sum(batch[node_type].num_sampled_nodes) == batch[node_type].num_nodes
        for edge_type in data.edge_types:
            part = batch[edge_type]
            ends = data[edge_type].edge_index[:, part.e_id]
            for side, node_type in ((0, edge_type[0]), (1, edge_type[2])):
                assert torch.equal(batch[node_type].n_id[part.edge_index[side]], ends[side])
            assert torch.equal(part.edge_attr, data[edge_type].edge_attr[part.e_id])
        assert batch[BY].num_sampled_edges[0] == 0


def test_both_directions_have_no_edge_attributes(data):
    """As in PyG, which has numbers for neither the edges nor their reverses then."""
    graph = data.edge_type_subgraph([CITES])
    batch = next(iter(gs.NeighborLoader(graph, [3], "paper", batch_size=8, subgraph_type="bidirectional")))
    assert "edge_attr" not in batch[CITES] and batch[CITES].num_edges > 0
    assert torch.equal(batch["paper"].x, graph["paper"].x[batch["paper"].n_id])


@pytest.mark.parametrize("node_types", [True, False])
def test_attributes_of_every_form_are_those_of_the_nodes_and_edges_sampled(data, node_types):
    """Tables are gathered into pooled memory, and what is none is left to PyG: neither shows in a batch."""
    graph = (
        data.clone() if node_types else Data(edge_index=data[CITES].edge_index, time=data["paper"].time, num_nodes=80)
    )
    nodes, edges = (graph["paper"], graph[CITES]) if node_types else (graph, graph)
    nodes.half, nodes.bf16 = torch.randn(80, 5).half(), torch.randn(80, 2, 3).bfloat16()
    nodes.array, nodes.turned = np.arange(240).reshape(80, 3), torch.arange(160).view(2, 80).T
    edges.wide, edges.flat = torch.arange(1000).view(500, 2), torch.arange(500)
    seeds = ("paper", torch.arange(40)) if node_types else torch.arange(40)
    loader = gs.NeighborLoader(graph, [4, 3], seeds, batch_size=10, time_attr="time")
    loader(range(3))
    nodes.half = torch.ones(80, 4).half()  # what is replaced is seen
    held = list(loader)
    assert len(held) == 4
    for batch in held:
        own, directed_edges = (batch["paper"], batch[CITES]) if node_types else (batch, batch)
        assert own.half.shape == (len(own.n_id), 4) and own.half.dtype == torch.float16 and bool((own.half == 1).all())
        assert torch.equal(own.bf16, nodes.bf16[own.n_id]) and own.bf16.dtype == torch.bfloat16
        assert torch.equal(own.array, torch.from_numpy(nodes.array)[own.n_id])
        assert torch.equal(own.turned, nodes.turned[own.n_id])
        assert torch.equal(directed_edges.flat, directed_edges.e_id) and torch.equal(
            directed_edges.wide, edges.wide[directed_edges.e_id]
        )


def test_threads_ranks_and_resume_change_nothing(data):
    options = {"num_neighbors": [4, 3], "input_nodes": "paper", "batch_size": 10, "shuffle": True, "seed": 5}

    def sampled(loader, epoch=0):
        loader.set_epoch(epoch)
        return [torch.cat([batch[node_type].n_id for node_type in data.node_types]) for batch in loader]

    alone = sampled(gs.NeighborLoader(data, **options, num_threads=0))
    threads = gs.NeighborLoader(data, **options, num_threads=3)
    together = sampled(threads)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(alone, sampled(threads, 1), strict=True))
    ranks = [gs.NeighborLoader(data, **options, rank=rank, world_size=2) for rank in (0, 1)]
    seeds = torch.cat([batch["paper"].input_id for loader in ranks for batch in loader])
    assert seeds.sort().values.tolist() == list(range(80))
    first = gs.NeighborLoader(data, **options)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    rest = gs.NeighborLoader(data, **options)
    rest.load_state_dict(state)
    assert all(torch.equal(torch.cat([b[node_type].n_id for node_type in data.node_types]), one)
               for b, one in zip(rest, alone[3:], strict=True))  # fmt: skip


def test_a_model_with_node_types_trains(data):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList([SAGEConv((-1, -1), 16), SAGEConv((-1, -1), 3)])

        def forward(self, x, edge_index):
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    torch.manual_seed(0)
    model = to_hetero(Net(), data.metadata())
    loader = gs.NeighborLoader(data, [5, 5], "paper", batch_size=40)
    losses = []
    optimizer = None
    for _ in range(15):
        for batch in loader:
            out = model(batch.x_dict, batch.edge_index_dict)["paper"][:40]
            loss = torch.nn.functional.cross_entropy(out, batch["paper"].y[:40])
            optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.02)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:2])


@pytest.mark.parametrize("strict", [False, True])
def test_no_neighbour_is_later_than_its_seed(data, strict):
    loader = gs.NeighborLoader(
        data, [5, 5], "paper", batch_size=16, time_attr="time", temporal_strategy="last", strictly_before=strict
    )
    for batch in loader:
        limit = batch["paper"].time[:16]
        for node_type in data.node_types:
            own = batch["paper"].batch_size if node_type == "paper" else 0
            when, seed = batch[node_type].time[own:], limit[batch[node_type].batch[own:]]
            assert (when < seed).all() if strict else (when <= seed).all()


def test_one_node_type_has_times_weights_and_disjoint_subgraphs():
    sample = torch.Generator().manual_seed(2)
    one = Data(edge_index=torch.randint(0, 100, (2, 2000), generator=sample), num_nodes=100)
    one.when, one.w = torch.randint(0, 50, (2000,), generator=sample), torch.rand(2000, generator=sample)
    given = torch.full((30,), 25)
    timed = gs.NeighborLoader(one, [5, 5], torch.arange(30), batch_size=10, time_attr="when", input_time=given)
    for batch in timed:
        assert (batch.when <= 25).all() and batch.seed_time.tolist() == [25] * 10
    apart = next(iter(gs.NeighborLoader(one, [5], torch.arange(30), batch_size=10, disjoint=True)))
    assert len(torch.stack([apart.batch, apart.n_id]).unique(dim=1).T) == apart.num_nodes
    assert torch.equal(apart.batch[apart.edge_index[0]], apart.batch[apart.edge_index[1]])
    weighted = next(iter(gs.NeighborLoader(one, [5], torch.arange(30), batch_size=30, weight_attr="w")))
    plain = next(iter(gs.NeighborLoader(one, [5], torch.arange(30), batch_size=30)))
    assert weighted.w.mean() > plain.w.mean() + 0.1


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_links_and_false_ends(data, mode):
    options = {"edge_label_index": WRITES, "batch_size": 25, "neg_sampling": NegativeSampling(mode, 2), "seed": 3}
    loader = gs.LinkNeighborLoader(data, [4, 4], **options, num_threads=2)
    again = gs.LinkNeighborLoader(data, [4, 4], **options, num_threads=0)
    edges = data[WRITES].edge_index
    for number, (batch, same) in enumerate(zip(loader, again, strict=True)):
        true = edges[:, 25 * number : 25 * number + 25]
        author, paper = batch["author"].n_id, batch["paper"].n_id
        assert torch.equal(author, same["author"].n_id) and torch.equal(paper, same["paper"].n_id)
        if mode == "binary":
            link, label = batch[WRITES].edge_label_index, batch[WRITES].edge_label
            assert torch.equal(torch.stack([author[link[0, :25]], paper[link[1, :25]]]), true)
            assert label.tolist() == [1.0] * 25 + [0.0] * 50
        else:
            assert torch.equal(author[batch["author"].src_index], true[0])
            assert torch.equal(paper[batch["paper"].dst_pos_index], true[1])
            assert batch["paper"].dst_neg_index.shape == (25, 2)


def test_false_ends_follow_their_weights(data):
    weight = torch.zeros(80)
    weight[[7, 8]] = torch.tensor([1.0, 3.0])
    negatives = NegativeSampling("triplet", 4, dst_weight=weight)
    counts = torch.zeros(80)
    for batch in gs.LinkNeighborLoader(data, [1], WRITES, batch_size=100, neg_sampling=negatives):
        counts += torch.bincount(batch["paper"].n_id[batch["paper"].dst_neg_index.flatten()], minlength=80)
    assert counts.sum() == counts[[7, 8]].sum() == 1200
    assert abs(float(counts[8]) - 900) < 5 * 15


def test_links_have_times(data):
    times = torch.arange(300) % 100
    links = (WRITES, data[WRITES].edge_index)
    options = {"edge_label_time": times, "time_attr": "time", "batch_size": 30, "neg_sampling": "binary"}
    loader = gs.LinkNeighborLoader(data, [5, 5], links, **options)
    for number, batch in enumerate(loader):
        limit = times[30 * number : 30 * number + 30]
        for node_type in data.node_types:
            found = torch.cat([torch.zeros(60, dtype=bool), torch.ones(batch[node_type].num_nodes - 60, dtype=bool)])
            assert (batch[node_type].time[found] <= limit[batch[node_type].batch[found]]).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda d: gs.NeighborLoader(d, [2], "venue"), "seeds HeteroData 'venue'"),
        (lambda d: gs.NeighborLoader(d, [2], ("paper", [80])), "seeds [0, 80) 80 80"),
        (lambda d: gs.NeighborLoader(d, [2], "paper", time_attr="time", input_time=torch.arange(3)), "80 seeds 3"),
        (lambda d: gs.NeighborLoader(d, {WRITES: [2]}, "paper"), "Missing neighbors"),
        (lambda d: gs.LinkNeighborLoader(d, [2], WRITES, time_attr="time"), "edge_label_time time_attr"),
        (lambda d: gs.LinkNeighborLoader(d, [2], WRITES, input_time=1), "pass edge_label_time"),
        (lambda d: gs.LinkNeighborLoader(d, [2], WRITES, generator=1), "LinkNeighborLoader follow"),
        (lambda d: gs.NeighborLoader(d, [2], "paper", locality=object()), "locality node type"),
    ],
)  # fmt: skip
def test_what_is_refused(data, make, message):
    with pytest.raises(ValueError, match=said(message)):
        make(data)


def test_another_argument_is_none_of_pygs(data):
    with pytest.raises(TypeError, match=said("LinkNeighborLoader 'fanouts'")):
        gs.LinkNeighborLoader(data, [2], WRITES, fanouts=[2])


@pytest.mark.parametrize("form", [tuple, list])
def test_an_edge_type_is_named_by_its_two_ends(form):
    data = HeteroData({"user": {"x": torch.eye(3)}, "item": {"x": torch.eye(4)}})
    data["user", "buys", "item"].edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
    data["item", "like", "item"].edge_index = torch.empty(2, 0, dtype=torch.long)
    whole = next(iter(gs.LinkNeighborLoader(data, [2], form(("user", "item")), batch_size=3)))
    assert whole["user", "buys", "item"].input_id.tolist() == [0, 1, 2]
    some = gs.LinkNeighborLoader(data, [2], (form(("user", "item")), torch.tensor([[0], [3]])))
    assert next(iter(some))["user", "buys", "item"].edge_label_index.shape == (2, 1)
    data["user", "sells", "item"].edge_index = torch.tensor([[0], [0]])
    with pytest.raises(ValueError, match=said("seeds ('user', 'item'")):
        gs.LinkNeighborLoader(data, [2], form(("user", "item")))
    data["user", "to", "item"].edge_index = torch.tensor([[1], [0]])
    named_to = next(iter(gs.LinkNeighborLoader(data, [2], form(("user", "item")))))
    assert named_to["user", "to", "item"].input_id.tolist() == [0]
    with pytest.raises(ValueError, match=said("seeds ('user', 'item'")):
        gs.NeighborLoader(data, [2], ("user", "item"))
    assert gs.NeighborLoader(data, [2], "item")([1, 2])["item"].n_id[:2].tolist() == [1, 2]
