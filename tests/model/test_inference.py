"""Invariant 7: layer-wise inference equals the full-graph forward, on any number of ranks, in bounded memory."""

import threading
import tracemalloc

import numpy as np
import pytest
import torch
from model.graphs import MemorySource, SharedTables, make_graph, make_graph_of

from lightning_gnnscale.model import GAT, GCN, NGNN, SGC, GraphSAGE, RowBlock, layerwise_inference
from lightning_gnnscale.model.layer_source import NodeSet, closure, split_block
from tests.says import said
from tests.tiers import all_pairs, each_value

BACKBONES = [GCN, GAT, GraphSAGE, SGC, NGNN]


def build(kind, in_channels, norm="batch", **options):
    torch.manual_seed(1)
    rest = {} if kind is SGC else {"norm": norm, "dropout": 0.5}
    model = kind(in_channels, 8, 4, num_layers=3, **rest, **options)
    if norm == "batch" and kind is not SGC:
        for layer in model.norms:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return model


def on_ranks(world_size, run, graph, chunk, folder=None, **options):
    """Return what `run` gives of the source of each rank, in threads."""
    shared, results = SharedTables(world_size, folder), [None] * world_size
    sources = [MemorySource(graph, rank, shared, world_size, chunk, **options) for rank in range(world_size)]

    def one(rank):
        results[rank] = run(sources[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def infer_on_ranks(model, graph, world_size, block_edges, chunk=1000, **options):
    return on_ranks(world_size, lambda source: layerwise_inference(model, source, block_edges), graph, chunk, **options)


@all_pairs
@pytest.mark.parametrize("in_channels", [3, 40])  # mapped within blocks, and each node once
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("world_size", "block_edges"), [(1, None), (1, 1), (2, 25)])
@pytest.mark.parametrize("kind", BACKBONES)
def test_equals_the_full_graph_forward(kind, world_size, block_edges, sparse, in_channels):
    graph = make_graph(in_channels=in_channels)
    model = build(kind, in_channels).eval()
    with torch.no_grad():
        expected = model(graph.x, graph.edge_index, indptr=graph.indptr, degree=graph.degree)
    results = infer_on_ranks(model, graph, world_size, block_edges, chunk=13, sparse=sparse)
    assert sorted(np.concatenate([result.rows for result in results])) == list(range(graph.num_nodes))
    for result in results:
        # float32, 3 layers, sums of up to 58 terms in another order, values of order 1
        torch.testing.assert_close(torch.from_numpy(result.table), expected, rtol=1e-4, atol=1e-5)
        for nodes, outputs in result.chunks(7):
            assert len(nodes) <= 7
            assert np.array_equal(outputs, result.table[nodes])


@pytest.mark.parametrize("kind", [GCN, SGC, GraphSAGE, GAT])
def test_edge_weights_are_used(kind):
    graph = make_graph()
    model = build(kind, 12).eval()
    weight = torch.rand(graph.edge_index.shape[1]) + 0.1
    with torch.no_grad():
        expected = model(graph.x, graph.edge_index, weight, degree=graph.degree, indptr=graph.indptr)
    result = layerwise_inference(model, MemorySource(graph, edge_weight=weight.numpy()), 40)
    torch.testing.assert_close(torch.from_numpy(result.table), expected, rtol=1e-4, atol=1e-5)


def test_mode_and_device_are_as_before():
    graph, model = make_graph(), build(GraphSAGE, 12)
    first = layerwise_inference(model.train(), MemorySource(graph), device="cpu").table.copy()
    assert model.training and model.norms[0].training
    assert np.array_equal(first, layerwise_inference(model.eval(), MemorySource(graph)).table)
    assert not model.training


@pytest.mark.parametrize("in_channels", [3, 40])
@pytest.mark.parametrize("kind", BACKBONES)
def test_a_model_in_float64(kind, in_channels):
    graph, model = make_graph(in_channels=in_channels), build(kind, in_channels).double().eval()
    expected = model(graph.x.double(), graph.edge_index, degree=graph.degree, indptr=graph.indptr).detach()
    table = layerwise_inference(model, MemorySource(graph)).table
    torch.testing.assert_close(torch.from_numpy(table), expected, rtol=1e-12, atol=1e-12)


def test_a_rank_without_rows_goes_along():
    graph, model = make_graph(), build(GCN, 12).eval()
    results = infer_on_ranks(model, graph, 3, None, chunk=40)  # two blocks for three ranks
    assert [len(result.rows) for result in results] == [40, 20, 0]
    assert np.isfinite(results[2].table).all()


def test_each_node_is_read_once_where_its_map_comes_first():
    graph, model = make_graph(in_channels=40), build(GCN, 40)
    source = MemorySource(graph, chunk=7)
    layerwise_inference(model, source, block_edges=20)
    assert sum(source.gathered) == graph.num_nodes + 1  # and one to see whether rows are sparse


@pytest.mark.parametrize("kind", [GCN, GAT, GraphSAGE])
def test_memory_does_not_grow_with_the_graph(kind, tmp_path):
    """Twice the nodes, the same blocks: beyond 4 bytes a node and its id the peak stays (tables are files)."""
    hidden, peaks = 64, []
    for num_nodes in (4000, 8000):
        graph = make_graph(num_nodes, 4 * num_nodes, in_channels=8, hub=False)
        torch.manual_seed(0)
        model = kind(8, hidden, 4, num_layers=2)
        source = MemorySource(graph, shared=SharedTables(1, tmp_path), chunk=500)
        layerwise_inference(model, source, block_edges=500)  # compiles
        tracemalloc.start()
        layerwise_inference(model, source, block_edges=500)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    table_bytes = 4000 * hidden * 4
    assert max(source.gathered) <= 2 * 500  # a block's rows and one source an edge
    assert peaks[1] - peaks[0] < 4000 * 32 < table_bytes / 4


@pytest.mark.parametrize("block_edges", [1, 2, 3, 100])
def test_blocks_are_split_between_rows(block_edges):
    indptr = np.array([0, 0, 2, 7, 7, 7, 8, 10])
    block = RowBlock(np.arange(20, 27), indptr, np.arange(10), np.arange(10.0))
    chunks = list(split_block(block, block_edges))
    assert np.array_equal(np.concatenate([chunk.rows for chunk in chunks]), block.rows)
    assert np.array_equal(np.concatenate([chunk.indices for chunk in chunks]), block.indices)
    assert np.array_equal(np.concatenate([chunk.edge_weight for chunk in chunks]), block.edge_weight)
    assert np.array_equal(np.concatenate([np.diff(chunk.indptr) for chunk in chunks]), np.diff(indptr))
    for chunk in chunks:
        assert len(chunk.rows) == 1 or (len(chunk.indices) <= block_edges and len(chunk.rows) <= block_edges)


def test_refuses_blocks_without_edges():
    with pytest.raises(ValueError, match=said("block_edges 1 0")):
        layerwise_inference(build(GCN, 12), MemorySource(make_graph()), block_edges=0)


def odd_graph():
    """A directed graph with a self-loop, an isolated node, a hub, repeats and a chain that only leads away."""
    src = [0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 3]
    dst = [1, 1, 2, 2, 3, 0, 5, 6, 7, 0, 0, 0, 0, 0, 12]
    return make_graph_of(src, dst, num_nodes=14)


@each_value
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("wanted", [[], [13], [2], [1, 12], [0], list(range(14))])
def test_the_closure_is_that_of_plain_python(wanted, world_size):
    graph = odd_graph()
    expected = [set(wanted)]
    for _ in range(3):
        rows = expected[0]
        sources = {s for s, t in graph.edge_index.t().tolist() if t in rows}
        expected.insert(0, rows | sources)
    found = on_ranks(
        world_size, lambda source: closure(source, NodeSet.of(np.array(wanted, np.int64), 14), 3, most=1.0), graph, 3
    )
    for sets in found:
        assert [set(one.within(0, 14).tolist()) for one in sets] == expected


def test_where_most_of_the_graph_is_needed_all_of_it_is_computed():
    graph, model = make_graph(), build(GCN, 12).eval()
    nodes = np.arange(0, graph.num_nodes, 3)
    sets = closure(MemorySource(graph), NodeSet.of(nodes, graph.num_nodes), 3)
    assert len(sets[3]) == len(nodes) and sets[0] is None
    whole, some = (layerwise_inference(model, MemorySource(graph), needed=needed) for needed in (None, sets))
    assert np.array_equal(some.read(nodes), whole.table[nodes])


@all_pairs
@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("in_channels", [3, 40])
@pytest.mark.parametrize(("world_size", "block_edges"), [(1, None), (2, 25), (4, 1)])
def test_some_nodes_outputs_are_those_of_the_full_graph(kind, in_channels, world_size, block_edges):
    graph = make_graph(200, 260, in_channels=in_channels, hub=False)
    model, wanted = build(kind, in_channels).eval(), np.array([3, 50, 51, 199])
    with torch.no_grad():
        expected = model(graph.x, graph.edge_index, indptr=graph.indptr, degree=graph.degree)[wanted]

    def infer(source):
        sets = closure(source, NodeSet.of(wanted, graph.num_nodes), 3)
        return layerwise_inference(model, source, block_edges, needed=sets)

    results = on_ranks(world_size, infer, graph, 13)
    assert sorted(np.concatenate([result.rows for result in results])) == wanted.tolist()
    for result in results:
        assert result.table.shape[0] == len(wanted)
        torch.testing.assert_close(torch.from_numpy(result.read(wanted)), expected, rtol=1e-4, atol=1e-5)
        chunks = [outputs for _, outputs in result.chunks(1)]
        assert np.array_equal(np.concatenate([np.zeros((0, 4), np.float32), *chunks]), result.read(result.rows))


@pytest.mark.parametrize("kind", [GCN, GraphSAGE, NGNN, SGC])
def test_little_memory_gives_the_same(kind):
    graph, model = make_graph(300, 3000), build(kind, 12).eval()
    tables = [
        layerwise_inference(model, MemorySource(graph, chunk=50), memory_bytes=size).table for size in (4096, 1 << 26)
    ]
    # The sums are equal to the bit (see the tests of add_edges), matrix products of other shapes round otherwise.
    assert np.allclose(*tables, rtol=1e-4, atol=1e-5)


def test_few_nodes_read_few_rows():
    graph, model = make_graph(3000, 6000, hub=False), build(GraphSAGE, 12).eval()
    source = MemorySource(graph)
    sets = closure(source, NodeSet.of(np.array([5]), 3000), 3)
    layerwise_inference(model, source, needed=sets)
    assert sum(source.gathered) <= 1 + 2 * len(sets[0]) < 300


@pytest.mark.parametrize("kind", BACKBONES)
def test_tables_in_bfloat16_round_to_8_bits(kind):
    graph = make_graph(in_channels=40)
    model = build(kind, 40).eval()
    exact, rounded = (
        layerwise_inference(model, MemorySource(graph), table_dtype=dtype).table for dtype in ("float32", "bfloat16")
    )
    # 2**-9 of a value a table, through at most three layers of gain near 1
    assert 0 < np.abs(exact - rounded).max() < 3 * 2**-7 * np.abs(exact).max()
    with pytest.raises(ValueError, match=said("table_dtype float32 bfloat16 'int8'")):
        layerwise_inference(model, MemorySource(graph), table_dtype="int8")


def test_a_derived_layer_is_computed_by_its_own_code():
    class Doubled(GraphSAGE):
        def apply_layer(self, index, x, block):
            return 2 * super().apply_layer(index, x, block)

    graph, model = make_graph(), build(Doubled, 12).eval()
    expected = model(graph.x, graph.edge_index, indptr=graph.indptr, degree=graph.degree).detach()
    table = layerwise_inference(model, MemorySource(graph)).table
    torch.testing.assert_close(torch.from_numpy(table), expected, rtol=1e-4, atol=1e-5)


def test_node_sets_are_sets():
    rng = np.random.default_rng(0)
    for num_nodes in (1, 7, 8, 129, 1000):
        nodes = np.unique(rng.integers(0, num_nodes, num_nodes // 2 + 1))
        found = NodeSet.of(rng.permutation(np.concatenate([nodes, nodes])), num_nodes)
        assert len(found) == len(nodes) and np.array_equal(found.within(0, num_nodes), nodes)
        assert np.array_equal(found.positions(nodes), np.arange(len(nodes)))
        assert np.array_equal(found.contains(np.arange(num_nodes)), np.isin(np.arange(num_nodes), nodes))
        start, stop = sorted(rng.integers(0, num_nodes + 1, 2))
        assert np.array_equal(found.within(start, stop), nodes[(nodes >= start) & (nodes < stop)])
        mask = np.isin(np.arange(num_nodes), nodes)
        assert np.array_equal(NodeSet.of_mask(mask).bits, found.bits)
