"""Node types, times, weights and disjoint trees, against plain Python and counts: what PyG's loaders are handed."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnnscale.sampler.data_sampler import DataSampler
from tests.says import said

COUNTS = {"paper": 60, "author": 40, "venue": 7}
EDGES = {
    ("author", "writes", "paper"): 250, ("paper", "cites", "paper"): 400, ("venue", "holds", "paper"): 70,
    ("paper", "written_by", "author"): 200, ("paper", "reviewed_by", "author"): 90,
}  # fmt: skip


def hetero_graph(seed: int = 0) -> HeteroData:
    sample = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for node_type, count in COUNTS.items():
        data[node_type].x = torch.arange(count)[:, None].float()
        data[node_type].time = torch.randint(0, 50, (count,), generator=sample)
    for (source, name, target), num in EDGES.items():
        ends = [torch.randint(0, COUNTS[node_type], (num,), generator=sample) for node_type in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
        data[source, name, target].when = torch.randint(0, 50, (num,), generator=sample)
        data[source, name, target].weight = torch.rand(num, generator=sample)
    return data


def plain(data, seeds: dict, num_hops: int, allowed, disjoint: bool):
    """All edges hop by hop, as pyg-lib walks: edge types in their order, nodes of a node type as they are found.

    Args:
        allowed: Given (edge type, number of an edge, seed), whether the edge may be sampled.
    """
    nodes, edges, owner = {}, {edge_type: [] for edge_type in data.edge_types}, 0
    for node_type in data.node_types:
        nodes[node_type] = []
    for node_type, ids in seeds.items():
        for node in ids.tolist():
            nodes[node_type].append((owner if disjoint else 0, node))
            owner += 1
    begin = dict.fromkeys(nodes, 0)
    counts = {node_type: [len(found)] for node_type, found in nodes.items()}
    for _ in range(num_hops):
        end = {node_type: len(found) for node_type, found in nodes.items()}
        for edge_type in data.edge_types:
            source, _, target = edge_type
            for place in range(begin[target], end[target]):
                mine, node = nodes[target][place]
                for edge in allowed(edge_type, node, mine):
                    other = (mine, int(data[edge_type].edge_index[0, edge]))
                    if other not in nodes[source]:
                        nodes[source].append(other)
                    edges[edge_type].append((nodes[source].index(other), place, edge))
        begin = end
        for node_type, found in nodes.items():
            counts[node_type].append(len(found) - end[node_type])
    return nodes, edges, counts


def in_row_order(data, sampler):
    """Return the numbers of the edges into a node, in the order in which PyG sorts them."""

    def edges(edge_type, node):
        perm = torch.from_numpy(sampler._relations[data.edge_types.index(edge_type)].position).long()
        targets = data[edge_type].edge_index[1][perm]
        return [int(edge) for edge in perm[targets == node]]

    return edges


def sample(sampler, node_type, ids, time=None):
    out = sampler.sample_from_nodes(NodeSamplerInput(None, ids, time, node_type))
    return out, {name: list(zip(*(one.tolist() for one in (out.row[name], out.col[name], out.edge[name])), strict=True))
                 for name in out.edge}  # fmt: skip


@pytest.mark.parametrize("disjoint", [False, True])
def test_whole_neighbourhoods_come_in_the_order_of_pyg(disjoint):
    data, seeds = hetero_graph(), torch.tensor([5, 3, 59])
    sampler = DataSampler(data, [-1, -1], disjoint=disjoint)
    out, found = sample(sampler, "paper", seeds)
    rows = in_row_order(data, sampler)
    nodes, edges, counts = plain(data, {"paper": seeds}, 2, lambda node_type, node, _: rows(node_type, node), disjoint)
    assert found == edges
    assert out.num_sampled_nodes == counts
    for node_type, expected in nodes.items():
        assert out.node[node_type].tolist() == [node for _, node in expected]
        if disjoint:
            assert out.batch[node_type].tolist() == [owner for owner, _ in expected]


@pytest.mark.parametrize("of_edges", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_times_leave_out_what_is_later(of_edges, strict):
    data, seeds, times = hetero_graph(), torch.tensor([5, 3, 5]), torch.tensor([20, 49, 3])
    sampler = DataSampler(data, [-1, -1], time_attr="when" if of_edges else "time", strictly_before=strict)
    _, found = sample(sampler, "paper", seeds, times)
    rows = in_row_order(data, sampler)

    def allowed(edge_type, node, owner):
        for edge in rows(edge_type, node):
            source = int(data[edge_type].edge_index[0, edge])
            when = int(data[edge_type].when[edge] if of_edges else data[edge_type[0]].time[source])
            if when < times[owner] or (when == times[owner] and not strict):
                yield edge

    assert found == plain(data, {"paper": seeds}, 2, allowed, True)[1]


def test_the_latest_are_the_last_that_may_be_sampled():
    data = hetero_graph()
    sampler = DataSampler(data, [3], time_attr="when", temporal_strategy="last")
    seeds, times = torch.arange(60), torch.full((60,), 30)
    _, found = sample(sampler, "paper", seeds, times)
    for edge_type, edges in found.items():
        when = data[edge_type].when
        for target in range(60 if edge_type[2] == "paper" else 0):
            may = sorted(int(when[e]) for e in in_row_order(data, sampler)(edge_type, target) if when[e] <= 30)
            assert sorted(int(when[e]) for _, col, e in edges if col == target) == may[-3:]


def test_no_future_in_a_million_samples():
    sample = torch.Generator().manual_seed(0)
    num = 20_000
    data = Data(edge_index=torch.randint(0, num, (2, 400_000), generator=sample), num_nodes=num)
    data.time = torch.randint(0, 1000, (num,), generator=sample)
    sampler = DataSampler(data, [10, 10], time_attr="time", strictly_before=True)
    counted = 0
    for first in range(0, num, 1000):
        out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(first, first + 1000)))
        limit = data.time[first + out.batch]
        later = data.time[out.node][1000:] >= limit[1000:]
        assert not later.any()
        counted += len(out.row)
    assert counted > 1_000_000


def test_fan_outs_count_by_relation_and_hop():
    data = hetero_graph()
    fanouts = {edge_type: [0, 0] for edge_type in EDGES} | {
        ("paper", "cites", "paper"): [2, 1],
        ("author", "writes", "paper"): [0, 3],
    }
    sampler = DataSampler(data, fanouts)
    out, found = sample(sampler, "paper", torch.arange(10))
    assert [edge_type for edge_type, edges in found.items() if edges] == [
        ("author", "writes", "paper"), ("paper", "cites", "paper"),
    ]  # fmt: skip
    degree = torch.bincount(data["paper", "cites", "paper"].edge_index[1], minlength=60)
    assert out.num_sampled_edges["paper", "cites", "paper"][0] == int(degree[:10].clamp(max=2).sum())
    new = out.node["paper"][10 : 10 + out.num_sampled_nodes["paper"][1]]
    assert out.num_sampled_edges["paper", "cites", "paper"][1] == int(degree[new].clamp(max=1).sum())
    writes = torch.bincount(data["author", "writes", "paper"].edge_index[1], minlength=60)
    assert out.num_sampled_edges["author", "writes", "paper"] == [0, int(writes[new].clamp(max=3).sum())]
    for edges in found.values():
        assert len({edge for _, _, edge in edges}) == len(edges)


def test_one_relation_is_sampled_as_ever():
    """The keys, and so the samples, of a homogeneous graph are those of the loader that has no node types."""
    import lightning_gnnscale as gs

    sample = torch.Generator().manual_seed(0)
    data = Data(edge_index=torch.randint(0, 500, (2, 9000), generator=sample), num_nodes=500)
    options = {"num_neighbors": [5, 3], "input_nodes": torch.arange(60), "batch_size": 20, "seed": 3}
    for replace in (False, True):
        plain_batches = list(gs.NeighborLoader(data, **options, replace=replace))
        keep = {"transform_sampler_output": lambda out: out}
        sampled = list(gs.NeighborLoader(data, **options, replace=replace, **keep))
        for one, other in zip(plain_batches, sampled, strict=True):
            assert torch.equal(one.n_id, other.n_id)
            assert torch.equal(one.edge_index, other.edge_index)
            assert torch.equal(one.e_id, other.e_id)
            assert one.num_sampled_nodes == other.num_sampled_nodes


def test_each_relation_and_seed_is_sampled_apart():
    """Two edge types with the same rows, and two seeds with the same node, are not sampled alike."""
    data = HeteroData()
    data["a"].num_nodes = 200
    star = torch.stack([torch.arange(1, 200), torch.zeros(199, dtype=torch.long)])
    data["a", "x", "a"].edge_index = star
    data["a", "y", "a"].edge_index = star
    out, found = sample(DataSampler(data, [20], disjoint=True), "a", torch.tensor([0, 0]))
    sampled = {
        (name, col): {edge for _, at, edge in edges if at == col} for name, edges in found.items() for col in (0, 1)
    }
    assert [len(one) for one in sampled.values()] == [20] * 4
    assert len({frozenset(one) for one in sampled.values()}) == 4
    assert out.batch["a"].tolist()[:2] == [0, 1]


@pytest.mark.parametrize("replace", [False, True])
def test_weights_decide_how_often(replace):
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    data = Data(edge_index=torch.tensor([[1, 2, 3, 4, 5], [0] * 5]), num_nodes=6, w=weight)
    sampler, inputs = (
        DataSampler(data, [1], weight_attr="w", replace=replace),
        NodeSamplerInput(None, torch.tensor([0])),
    )
    counted = Counter()
    for key in range(4000):
        with sampler.keyed(key):
            counted[int(sampler.sample_from_nodes(inputs).edge[0])] += 1
    assert counted[0] == 0
    for edge in range(1, 5):
        expected = 4000 * float(weight[edge]) / 10
        assert abs(counted[edge] - expected) < 5 * expected**0.5


def test_weights_without_replacement_are_distinct_and_bounded():
    sample = np.random.default_rng(0)
    weight = torch.from_numpy(np.where(sample.random(300) < 0.5, 0.0, sample.random(300)))
    data = Data(
        edge_index=torch.stack([torch.arange(1, 301), torch.zeros(300, dtype=torch.long)]), num_nodes=301, w=weight
    )
    positive = int((weight > 0).sum())
    for fanout, expected in ((10, 10), (290, positive), (300, positive), (-1, 300)):
        sampler = DataSampler(data, [fanout], weight_attr="w")
        edge = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0]))).edge
        assert len(edge.unique()) == len(edge) == expected
        assert expected == 300 or (weight[edge] > 0).all()


def test_samples_are_even():
    data = Data(edge_index=torch.stack([torch.arange(1, 41), torch.zeros(40, dtype=torch.long)]), num_nodes=41)
    data.time = torch.cat([torch.tensor([30]), torch.arange(40)])
    sampler = DataSampler(data, [3], time_attr="time")
    counted = np.zeros(40, int)
    for key in range(3000):
        with sampler.keyed(key):
            edge = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0]))).edge
            np.add.at(counted, edge.numpy(), 1)
    assert counted[31:].sum() == 0
    expected = 9000 / 31
    assert np.abs(counted[:31] - expected).max() < 5 * expected**0.5


def test_induced_subgraphs_have_every_edge_between_their_nodes():
    data = hetero_graph()
    sampler = DataSampler(data, [2, 2], subgraph_type="induced")
    out, found = sample(sampler, "author", torch.tensor([1, 2, 3]))
    for (source, name, target), edges in found.items():
        ends = data[source, name, target].edge_index
        inside = torch.isin(ends[0], out.node[source]) & torch.isin(ends[1], out.node[target])
        assert sorted(edge for _, _, edge in edges) == inside.nonzero().flatten().tolist()
        for row, col, edge in edges:
            assert (out.node[source][row], out.node[target][col]) == tuple(ends[:, edge])


def test_threads_and_keys():
    sampler, inputs = DataSampler(hetero_graph(), [3, 3]), NodeSamplerInput(None, torch.arange(20), None, "paper")

    def sampled(key):
        with sampler.keyed(key):
            return torch.cat(list(sampler.sample_from_nodes(inputs).edge.values()))

    alone = [sampled(key) for key in range(32)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(sampled, range(32)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_pygs_own_loader_takes_it():
    data = hetero_graph()
    loader = NodeLoader(data, DataSampler(data, [2, 2], time_attr="time"), input_nodes="paper", batch_size=16)
    batch = next(iter(loader))
    assert torch.equal(batch["author"].x[:, 0].long(), batch["author"].n_id)
    assert batch["paper"].batch_size == 16 and len(batch["paper"].batch) == batch["paper"].num_nodes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_neighbors": [2, -2]}, "[1] integer >= 0 -1 neighbours -2"),
        ({"num_neighbors": [2], "temporal_strategy": "first"}, "uniform last 'first'"),
        ({"num_neighbors": [2], "time_attr": "none"}, "'none' attribute nodes"),
        ({"num_neighbors": [2], "weight_attr": "none"}, "'none' attribute edges"),
        ({"num_neighbors": [2], "weight_attr": "bad"}, ">= 0 -1.0"),
        ({"num_neighbors": [2], "disjoint": True, "subgraph_type": "induced"}, 'subgraph type "induced"'),
    ],
)  # fmt: skip
def test_what_is_refused(options, message):
    data = hetero_graph()
    for edge_type in data.edge_types:
        data[edge_type].bad = torch.full((data[edge_type].num_edges,), -1.0)
    with pytest.raises(ValueError, match=said(message)):
        DataSampler(data, **options)


def test_seeds_are_refused():
    data = hetero_graph()
    with pytest.raises(ValueError, match="seeds must be distinct"):
        DataSampler(data, [2]).sample_from_nodes(NodeSamplerInput(None, torch.tensor([1, 1]), None, "paper"))
    with pytest.raises(ValueError, match=said("times seeds")):
        sampler = DataSampler(data, [2], time_attr="when")
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1]), None, "paper"))
    with pytest.raises(ValueError, match=said("seeds times neighbours")):
        inputs = NodeSamplerInput(None, torch.tensor([1]), torch.tensor([5]), "paper")
        DataSampler(data, [2]).sample_from_nodes(inputs)
    with pytest.raises(ValueError, match=said("seeds [0, 60) 3 60")):
        DataSampler(data, [2]).sample_from_nodes(NodeSamplerInput(None, torch.tensor([3, 60]), None, "paper"))
    data["paper"].short = torch.zeros(59)
    with pytest.raises(ValueError, match=said("paper.short 60")):
        DataSampler(data, [2], time_attr="short")
    # Refused seeds leave no labels behind.
    sampler = DataSampler(data, [-1])
    with pytest.raises(ValueError, match="distinct"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1, 1]), None, "paper"))
    inputs = NodeSamplerInput(None, torch.tensor([1, 2]), None, "paper")
    assert sampler.sample_from_nodes(inputs).node["paper"].tolist()[:2] == [1, 2]


@pytest.mark.parametrize("node_type", ["paper", "author"])
@pytest.mark.parametrize(
    "options",
    [{}, {"disjoint": True}, {"time_attr": "time"}, {"time_attr": "when"},
     {"time_attr": "time", "temporal_strategy": "last"}, {"time_attr": "when", "temporal_strategy": "last"}],
)  # fmt: skip
def test_it_equals_pyg_with_its_compiled_sampler(options, node_type):
    pytest.importorskip("pyg_lib", reason="pyg-lib has no wheel for this torch: build it to compare")
    from torch_geometric.sampler import NeighborSampler

    data, fanouts = hetero_graph(3), [3, 2] if "temporal_strategy" in options else [-1, -1, -1]
    times = torch.tensor([20, 40, 33, 7]) if "time_attr" in options else None
    inputs = NodeSamplerInput(None, torch.tensor([5, 3, 39, 20]), times, node_type)
    ours, theirs = (one(data, fanouts, **options).sample_from_nodes(inputs) for one in (DataSampler, NeighborSampler))
    for name in ("node", "row", "col", "edge", "batch"):
        for key, found in (getattr(theirs, name) or {}).items():
            assert torch.equal(getattr(ours, name)[key], found)
    assert ours.num_sampled_nodes == theirs.num_sampled_nodes
    assert ours.num_sampled_edges == theirs.num_sampled_edges


def test_stores_with_node_types_are_read_as_the_data():
    data = hetero_graph()
    inputs = NodeSamplerInput(None, torch.tensor([5, 3]), None, "paper")
    ours, other = (DataSampler(one, [-1, -1]).sample_from_nodes(inputs) for one in (data, (data, data)))
    for node_type in COUNTS:
        assert set(ours.node[node_type].tolist()) == set(other.node[node_type].tolist())
    for edge_type in EDGES:
        assert len(ours.edge[edge_type]) == len(other.edge[edge_type])


@pytest.mark.parametrize("node_types", [False, True])
def test_edges_that_are_not_sorted_are_refused(node_types):
    data = hetero_graph()
    data = data if node_types else Data(edge_index=data["paper", "cites", "paper"].edge_index, num_nodes=60)
    with pytest.raises(ValueError, match=said("is_sorted=True")):
        DataSampler(data, [2], is_sorted=True)
