"""Batches of heterogeneous graphs:

what they hold is the store's, from every source; samples by edge type and by time.
"""

from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import lightning_gnnscale as gs
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader, RowReads
from lightning_gnnscale.loader.mixed_batch import mix
from lightning_gnnscale.loader.waiting_batch import WaitingBatch
from lightning_gnnscale.partition_store.part_graph import load_part_graph, load_whole_graph
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize, predict_training
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.says import said
from tests.tiers import each_value

COUNTS = {"author": 80, "paper": 150, "inst": 10}
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")


def description(seed: int = 0) -> dict[str, dict]:
    rng = np.random.default_rng(seed)
    ends = [("author", "writes", "paper", 400), ("paper", "cites", "paper", 900), ("author", "at", "inst", 100)]
    edges = {
        (a, name, b): {
            "edges": np.stack([rng.integers(0, COUNTS[a], size), rng.integers(0, COUNTS[b], size)]),
            "time": rng.integers(0, 1000, size),
        }
        for a, name, b, size in ends
    }
    nodes = {
        node_type: {"num_nodes": count, "time": rng.integers(0, 1000, count)} for node_type, count in COUNTS.items()
    }
    nodes["author"]["features"] = rng.random((COUNTS["author"], 3)).astype(np.float32)
    nodes["paper"] |= {
        "features": rng.random((COUNTS["paper"], 6)).astype(np.float32),
        "labels": rng.integers(0, 5, COUNTS["paper"]),
        "masks": {"train": rng.random(COUNTS["paper"]) < 0.6},
    }
    return {"nodes": nodes, "edges": edges}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    dataset = gs.hetero_graph(**description())
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    times = {"node_time": dataset.node_time, "edge_time": dataset.edge_time}
    p = gs.partition(dataset.stream, "spring", 3, evaluate=False)
    store = gs.write_partition_store(
        tmp_path_factory.mktemp("node_types") / "store", dataset.stream, p, **rows, **times
    )
    return dataset, store


def edges_of(store) -> set[tuple[int, int, int, int]]:
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    return told(store.csc.indices, target, store.edge_type, store.edge_time)


def told(*columns) -> set[tuple[int, ...]]:
    return set(zip(*(column.tolist() for column in columns), strict=True))


BY_RELATION = {"*": [3, 2], "author,writes,paper": [-1, 0], "at": [0, 0]}
SAMPLERS = {
    "together": gs.NeighborSampler([3, 3]),
    "by edge type": gs.NeighborSampler(BY_RELATION),
    "by time": gs.NeighborSampler({"*": [3, 3]}, temporal_strategy="uniform"),
    "the last": gs.NeighborSampler([2, 2], temporal_strategy="last", strictly_before=True),
    "both ways": gs.NeighborSampler(BY_RELATION, subgraph_type="bidirectional"),
    "induced": gs.NeighborSampler([3, 3], subgraph_type="induced"),
}


def batches_of(store, sampler, source="threads", **options) -> list[gs.MiniBatch]:
    dm = gs.PartitionDataModule(store=store, sampler=sampler, batch_size=32, source=source, **options)
    dm.setup("fit")
    return list(dm.train_dataloader())


@each_value
@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_hold_what_the_store_has(graph, name, scope):
    dataset, store = graph
    edges, original = edges_of(store), np.asarray(store.original_nid)
    batches = batches_of(store, SAMPLERS[name], scope=scope)
    seeds = np.concatenate([batch.n_id[: batch.batch_size].numpy() for batch in batches])
    assert np.array_equal(np.sort(original[seeds]), np.flatnonzero(dataset.masks["train"]))
    for batch in batches:
        nodes, (source, target) = batch.n_id.numpy(), batch.edge_index.numpy()
        sampled = told(nodes[source], nodes[target], batch.edge_type, batch.edge_time)
        assert sampled <= edges
        assert np.all(np.diff(target) >= 0) and batch.indptr[-1] == len(target)
        assert np.array_equal(batch.node_type.numpy(), store.node_type(nodes))
        for node_type, table in zip(COUNTS, batch.x.tables, strict=True):
            number = list(COUNTS).index(node_type)
            own = original[nodes[batch.node_type.numpy() == number]] - dataset.stream.type_offsets[number]
            assert (node_type == "inst" and table is None) or np.array_equal(
                table.numpy(), dataset.features[node_type][own]
            )


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_source_gives_the_same_batches(graph, name):
    _, store = graph
    expected = batches_of(store, SAMPLERS[name])
    for source in (gs.TaskGraphs(), gs.Processes(num_workers=2)):
        for one, other in zip(batches_of(store, SAMPLERS[name], source), expected, strict=True):
            for field in ("n_id", "edge_index", "edge_type", "edge_time", "node_type", "seed_of", "seed_time"):
                mine, theirs = getattr(one, field), getattr(other, field)
                assert (mine is None and theirs is None) or torch.equal(mine, theirs), field
            assert torch.equal(one.x.tables[1], other.x.tables[1])


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("fanouts", [[3, 2], BY_RELATION], ids=["together", "by edge type"])
def test_subgraphs_have_the_edges_between_their_nodes(graph, fanouts, scope):
    """Oracle: the part's edges between the nodes of a batch, and those of them that go back along a sampled one."""
    _, store = graph
    batches = [
        batches_of(store, gs.NeighborSampler(fanouts, subgraph_type=name), scope=scope)
        for name in ("directional", "bidirectional", "induced")
    ]
    edges, back, more = edges_of(store), 0, 0  # a few stand for two equal events
    for group in zip(*batches, strict=True):
        nodes = group[0].n_id.numpy()
        found = []
        for batch in group:
            ends = nodes[batch.edge_index.numpy()]
            assert np.array_equal(batch.n_id, nodes)
            assert torch.equal(batch.indptr.diff(), batch.edge_index[1].bincount(minlength=len(batch.indptr) - 1))
            found.append(told(*ends, batch.edge_type, batch.edge_time))
            assert len(found[-1]) <= len(ends[0]) <= len(found[-1]) + store.num_edges - len(edges)
        sampled, both, whole = found
        pairs = {(source, target) for source, target, *_ in sampled}
        assert both == sampled | {edge for edge in whole if (edge[1], edge[0]) in pairs} and sampled <= whole <= edges
        own = set(nodes.tolist())  # rows of other parts' nodes are not all here
        rows = own if scope == "graph" else set(nodes[store.part_of(nodes) == group[0].part].tolist())
        assert {edge for edge in edges if edge[0] in own and edge[1] in rows} <= whole
        assert scope == "part" or whole == {edge for edge in edges if edge[0] in own and edge[1] in own}
        assert group[1].num_sampled_nodes is None and len(group[1].indptr) == len(nodes) + 1
        back, more = back + len(both) - len(sampled), more + len(whole) - len(both)
    assert back > 0 and more > 0


def rows_by_relation(store, graph, nodes) -> dict[tuple[int, int], list[int]]:
    """Return the edge positions of each (node, edge type)."""
    found: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        for edge in range(graph.csc.indptr[node], graph.csc.indptr[node + 1]):
            found.setdefault((int(node), int(graph.columns["edge_type"][edge])), []).append(edge)
    return found


@pytest.mark.parametrize("scope", ["part", "graph"])
def test_fanouts_are_those_of_each_relation(graph, scope):
    _, store = graph
    part = load_part_graph(store, 1, 0) if scope == "part" else load_whole_graph(store, 0)
    sampler = SAMPLERS["by edge type"]
    seeds = np.flatnonzero(store.node_type(np.arange(part.core_start, part.core_start + part.num_core)) == 1)[:20]
    state = sampler.prepare(part, seeds, 0)
    sampled = sampler.sample(state, seeds, 7, Workspace(part.num_local, part.csc.indices.dtype), np.empty, True)
    rows = rows_by_relation(store, part, sampled.n_id[: len(sampled.indptr) - 1])
    hop_of = np.repeat([0, 1], sampled.num_sampled_nodes[:2])
    for place in range(len(sampled.indptr) - 1):
        edges = sampled.e_id[sampled.indptr[place] : sampled.indptr[place + 1]]
        node_types = part.columns["edge_type"][edges]
        for relation in range(store.schema.num_edge_types):
            have = rows.get((int(sampled.n_id[place]), relation), [])
            fanout = sampler._fanouts_of(store.schema)[relation][hop_of[place]]
            took = edges[node_types == relation]
            assert len(took) == (len(have) if fanout < 0 else min(fanout, len(have)))
            assert set(took.tolist()) <= set(have) and len(np.unique(took)) == len(took)


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("name", ["by edge type", "by time", "the last"])
def test_a_hop_in_chunks_is_the_hop(graph, name, scope):
    """Chunks of each edge type, the last one first."""
    _, store = graph
    part = load_part_graph(store, 1, 0) if scope == "part" else load_whole_graph(store, 0)
    sampler, seeds, space = SAMPLERS[name], np.arange(30), Workspace(part.num_local, part.csc.indices.dtype)
    state = sampler.prepare(part, seeds, 0)
    expected = sampler.sample(state, seeds, 7, space, np.empty, True)
    hops, costs = sampler.begin(state, seeds, 7, space, True), []
    for _ in range(hops.num_hops):
        costs.append(hops.num_neighbors)
        for chunk in (2, 1, 0):
            hops.sample_chunk(chunk, 3)
        hops.relabel()
    assert hops.num_neighbors == 0
    assert all(cost >= sampled for cost, sampled in zip(costs, expected.num_sampled_edges, strict=True))
    for mine, theirs in zip(sampler.finish(state, hops, np.empty), expected, strict=True):
        assert np.array_equal(mine, theirs), "None equals None"


def test_relations_of_the_whole_graph_are_sampled_uniformly(graph):
    """A row that is read from the mapped graph gives each of an edge type's edges alike."""
    _, store = graph
    whole = load_whole_graph(store, 0)
    sampler = gs.NeighborSampler({"cites": [2]})
    relation = store.schema.edge_type_number("cites")
    rows = rows_by_relation(store, whole, range(store.num_nodes))
    node = max((len(edges), node) for (node, node_type), edges in rows.items() if node_type == relation)[1]
    edges, seeds = rows[node, relation], np.array([node])
    state, space = sampler.prepare(whole, seeds, 0), Workspace(whole.num_local, whole.csc.indices.dtype)
    counts = dict.fromkeys(edges, 0)
    for key in range(4000):
        for edge in sampler.sample(state, seeds, key, space, np.empty, True).e_id.tolist():
            counts[edge] += 1
    expected = 4000 * 2 / len(edges)
    spread = sum((count - expected) ** 2 / (expected * (1 - 2 / len(edges))) for count in counts.values())
    assert spread < len(edges) + 5 * np.sqrt(2 * len(edges))


@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("name", ["by time", "the last"])
def test_no_edge_is_later_than_its_seed(graph, name, scope):
    _, store = graph
    for batch in batches_of(store, SAMPLERS[name], scope=scope):
        limit = batch.seed_time[batch.seed_of[batch.edge_index[1]]]
        assert torch.all(batch.edge_time < limit if name == "the last" else batch.edge_time <= limit)
        assert torch.equal(batch.seed_of[: batch.batch_size], torch.arange(batch.batch_size))
        assert torch.equal(batch.seed_of[batch.edge_index[0]], batch.seed_of[batch.edge_index[1]])


@pytest.mark.parametrize("scope", ["part", "graph"])
def test_the_last_edges_are_the_latest_that_may_be_sampled(graph, scope):
    _, store = graph
    part = load_part_graph(store, 1, 1) if scope == "part" else load_whole_graph(store, 0)
    sampler = gs.NeighborSampler([2], temporal_strategy="last")
    seeds = np.arange(10)
    state = sampler.prepare(part, seeds, 0)
    sampled = sampler.sample(state, seeds, 3, Workspace(part.num_local, part.csc.indices.dtype), np.empty, True)
    for place, seed in enumerate(seeds):
        row = np.arange(part.csc.indptr[seed], part.csc.indptr[seed + 1])
        times = part.columns["edge_time"][row]
        allowed = np.sort(times[times <= part.columns["node_time"][seed]])[-2:]
        taken = part.columns["edge_time"][sampled.e_id[sampled.indptr[place] : sampled.indptr[place + 1]]]
        assert np.array_equal(np.sort(taken), allowed)


def test_whole_neighbourhoods_equal_those_of_pyg(graph):
    """With all neighbours, `to_hetero` holds the nodes and edges that the graph has around the seeds."""
    _, store = graph
    batch = batches_of(store, gs.NeighborSampler({"*": [-1]}), scope="graph")[0]
    data = batch.to_hetero()
    assert isinstance(data, HeteroData) and data.validate()
    assert data["paper"].batch_size == batch.batch_size
    assert sum(data[node_type].num_nodes for node_type in COUNTS) == batch.num_nodes
    assert torch.equal(data["paper"].n_id[: batch.batch_size], batch.n_id[: batch.batch_size])
    for number, edge_type in enumerate(store.schema.edge_types):
        source, target = (data[node_type].n_id for node_type in edge_type[::2])
        ends = data[edge_type].edge_index
        mine = {(u, v) for u, v in zip(source[ends[0]].tolist(), target[ends[1]].tolist(), strict=True)}
        seeds = set(batch.n_id[: batch.batch_size].tolist())
        assert mine == {(u, v) for u, v, node_type, _ in edges_of(store) if node_type == number and v in seeds}


def test_mixed_batches_keep_node_types_relations_and_seeds(graph):
    _, store = graph
    chunks = batches_of(store, SAMPLERS["by time"])[:3]
    mixed = mix(chunks, lambda shape, dtype: np.empty(shape, dtype))
    edges = edges_of(store)
    nodes, (source, target) = mixed.n_id.numpy(), mixed.edge_index.numpy()
    sampled = told(nodes[source], nodes[target], mixed.edge_type, mixed.edge_time)
    assert sampled <= edges
    assert torch.equal(mixed.seed_of[: mixed.batch_size], torch.arange(mixed.batch_size))
    rows = store.features.read(nodes)
    for mine, theirs in zip(mixed.x.tables, rows.tables, strict=True):
        assert (mine is None and theirs is None) or np.array_equal(mine.numpy(), theirs)
    assert torch.all(mixed.edge_time <= mixed.seed_time[mixed.seed_of[mixed.edge_index[1]]])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fanouts": {"*": [3], "cites": [3, 2]}}, "as many hops"),
        ({"fanouts": [2], "temporal_strategy": "first"}, "temporal_strategy"),
        ({"fanouts": [2], "strictly_before": True}, "strictly_before temporal_strategy"),
        ({"fanouts": [2], "subgraph_type": "whole"}, "subgraph_type 'whole'"),
        ({"fanouts": [2], "subgraph_type": "induced", "disjoint": True}, '"directional" disjoint=True'),
        (
            {"fanouts": [2], "subgraph_type": "bidirectional", "temporal_strategy": "last"},
            'subgraph_type "directional" temporal_strategy',
        ),
        ({"fanouts": {"*": [2]}, "direction": "both"}, 'direction "in"'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, told):
    with pytest.raises(ValueError, match=said(told)):
        gs.NeighborSampler(**options)


@pytest.mark.parametrize("load", [partial(load_part_graph, halo_hops=2), load_whole_graph])
def test_a_sampler_says_which_relation_it_sampled_an_edge_of(tmp_path, load):
    """Without times positions are not asked for; asked for, the store has the same edge types there."""
    graph = description()
    for given in (*graph["edges"].values(), *graph["nodes"].values()):
        given.pop("time", None)
    dataset = gs.hetero_graph(**graph)
    parts = gs.partition(dataset.stream, "random", 2, evaluate=False)
    store = gs.write_partition_store(tmp_path / "store", dataset.stream, parts, features=dataset.features)
    part = load(store, part=1)
    found = {}
    for asked in (False, True):
        options = LoaderOptions(32, seed=1, num_threads=0, return_e_id=asked)
        data = PartData(lambda number: part, store.features, is_whole=load is load_whole_graph)
        loader = PartLoader(
            [1], data, {1: int(store.part_offsets[1]) + np.arange(60)}, SAMPLERS["by edge type"], options
        )
        found[asked] = list(loader)
    for one, two in zip(*found.values(), strict=True):
        assert one.e_id is None and torch.equal(one.edge_index, two.edge_index)
        assert torch.equal(one.edge_type, torch.from_numpy(store.edge_type[two.e_id.numpy()].astype(np.int64)))
        assert len(one.edge_type) > 0 and torch.equal(one.edge_type, two.edge_type)


@pytest.mark.parametrize(
    "reads",
    [
        RowReads(),
        RowReads("resident"),
        RowReads("planned", window_bytes=2000),
        RowReads("planned", window_bytes=1 << 30),
    ],
    ids=["mapped", "resident", "a few batches a window", "one window"],
)
def test_packed_halo_rows_give_the_same_batches(tmp_path, graph, reads):
    dataset, plain = graph
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    times = {"node_time": dataset.node_time, "edge_time": dataset.edge_time}
    parts = gs.partition(dataset.stream, "spring", 3, evaluate=False)
    store = gs.write_partition_store(tmp_path / "store", dataset.stream, parts, **rows, **times, pack_halo=True)
    seeds = {part: np.arange(*store.part_offsets[part : part + 2])[::2] for part in range(3)}
    found = []
    for one, given in ((plain, RowReads()), (store, reads)):
        assert one.part_features.is_packed == (one is store)
        data = PartData(partial(load_part_graph, one, 1), one.part_features)
        loader = PartLoader(range(3), data, seeds, SAMPLERS["by edge type"], LoaderOptions(32, seed=1, reads=given))
        found.append(list(loader))
        loader.close()
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine.n_id, other.n_id) and torch.equal(mine.x.node_type, other.x.node_type)
        for table, expected in zip(mine.x.tables, other.x.tables, strict=True):
            assert (table is None and expected is None) or torch.equal(table, expected)


def test_batches_of_node_types_and_times_wait_bit_for_bit(graph):
    _, store = graph
    for name, sampler in SAMPLERS.items():
        for batch in batches_of(store, sampler):
            batch.x_by_node_type = None
            again = WaitingBatch.of(batch).batch(np.empty)
            for one in fields(batch):
                mine, other = getattr(batch, one.name), getattr(again, one.name)
                same = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
                assert same and type(mine) is type(other), (name, one.name)


@pytest.mark.parametrize("scope", ["part", "graph"])
def test_edges_keep_their_relations_where_those_of_pairs_are_left_out(graph, scope):
    _, store = graph
    sampler = gs.LinkSampler(SAMPLERS["by edge type"], "edge", exclude_pairs=True)
    left_out = 0
    for batch in batches_of(store, sampler, scope=scope):
        source, target = batch.n_id.numpy()[batch.edge_index.numpy()]
        assert len(batch.edge_type) == len(source) == batch.indptr[-1]
        assert told(source, target, batch.edge_type, batch.edge_time) <= edges_of(store)
        pairs = batch.n_id.numpy()[batch.pairs.numpy()]
        assert not told(source, target) & (told(*pairs) | told(*pairs[::-1]))
        left_out += pairs.shape[1]
    assert left_out > 0


def test_a_relation_that_there_is_not_is_named(graph):
    _, store = graph
    with pytest.raises(ValueError, match=said("edge type 'quotes'")):
        batches_of(store, gs.NeighborSampler({"quotes": [2]}))


def test_times_that_the_store_has_not_are_asked_for(tmp_path):
    graph = description()
    for given in (*graph["edges"].values(), *graph["nodes"].values()):
        given.pop("time", None)
    dataset = gs.hetero_graph(**graph)
    p = gs.partition(dataset.stream, "random", 2, evaluate=False)
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    store = gs.write_partition_store(tmp_path / "store", dataset.stream, p, **rows)
    with pytest.raises(ValueError, match=said("temporal_strategy=uniform node_time=")):
        batches_of(store, SAMPLERS["by time"])


def test_reverses_of_a_directed_store_have_no_relation(tmp_path):
    dataset = gs.hetero_graph(**description(), to_undirected=False)
    p = gs.partition(dataset.stream, "random", 2, evaluate=False)
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    store = gs.write_partition_store(tmp_path / "store", dataset.stream, p, **rows)
    with pytest.raises((ValueError, gs.GNNScaleError), match="edge type of the edge itself"):
        batches_of(store, gs.NeighborSampler([2], direction="both"))


def test_the_plan_counts_the_edges_that_are_grouped(graph):
    _, store = graph
    plain, grouped = (
        gs.PartitionDataModule(store=store, sampler=SAMPLERS[name], batch_size=32)._batch_shape()
        for name in ("together", "by edge type")
    )
    assert "grouped_edge_types" not in plain and grouped["grouped_edge_types"] == store.schema.num_edge_types
    sizes, rows = (RunSize(10**7, 10**8, num_parts=8), BatchShape()), 3 * 10**6
    none, more, weighted = (
        predict_training(*sizes, part_rows=rows, **given)
        for given in ({}, {"grouped_edge_types": 5}, {"grouped_weights": True})
    )
    assert more - none == 2 * (20 * 10**8 // 8 + 8 * 5 * rows)
    assert weighted == none  # nothing is grouped


def test_a_temporal_sampler_leaves_the_mapped_graph_where_it_is(graph):
    """With a list of fan-outs, too: no array of the whole graph's edges is made."""
    _, store = graph
    whole = load_whole_graph(store, 0)
    for options in ({"temporal_strategy": "last"}, {"disjoint": True}):
        (relation,) = gs.NeighborSampler([2], **options).prepare(whole, np.arange(3), 0).relations
        assert np.shares_memory(relation.indices, whole.csc.indices)
        assert relation.edge_type is None or relation.edge_type.strides == (0,)


def test_a_batch_of_node_types_is_no_data(graph):
    _, store = graph
    with pytest.raises(ValueError, match=said("to_hetero")):
        batches_of(store, SAMPLERS["together"])[0].to_data()
