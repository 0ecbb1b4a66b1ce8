"""Invariant 7: layer-wise inference equals the full-graph forward, on any number of ranks, in bounded memory."""

import threading
import tracemalloc

import numpy as np
import pytest
import torch
from model.graphs import MemorySource, SharedTables, make_graph

from lightning_gnnscale.model import GAT, GCN, NGNN, SGC, GraphSAGE, RowBlock, layerwise_inference
from lightning_gnnscale.model.layer_source import split_block

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


def infer_on_ranks(model, graph, world_size, block_arcs, folder=None, **options):
    shared, results = SharedTables(world_size, folder), [None] * world_size
    sources = [MemorySource(graph, rank, shared, world_size, **options) for rank in range(world_size)]

    def run(rank):
        results[rank] = layerwise_inference(model, sources[rank], block_arcs)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("in_channels", [3, 40])  # mapped within blocks, and each node once
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("world_size", "block_arcs"), [(1, None), (1, 1), (2, 25)])
@pytest.mark.parametrize("kind", BACKBONES)
def test_equals_the_full_graph_forward(kind, world_size, block_arcs, sparse, in_channels):
    graph = make_graph(in_channels=in_channels)
    model = build(kind, in_channels).eval()
    with torch.no_grad():
        expected = model(graph.x, graph.edge_index, indptr=graph.indptr, degree=graph.degree)
    results = infer_on_ranks(model, graph, world_size, block_arcs, chunk=13, sparse=sparse)
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


def test_a_model_in_float64():
    graph, model = make_graph(), build(GCN, 12).double().eval()
    expected = model(graph.x, graph.edge_index, degree=graph.degree, indptr=graph.indptr).detach()
    table = layerwise_inference(model, MemorySource(graph)).table
    torch.testing.assert_close(torch.from_numpy(table), expected.float(), rtol=1e-5, atol=1e-5)


def test_a_rank_without_rows_goes_along():
    graph, model = make_graph(), build(GCN, 12).eval()
    results = infer_on_ranks(model, graph, 3, None, chunk=40)  # two blocks for three ranks
    assert [len(result.rows) for result in results] == [40, 20, 0]
    assert np.isfinite(results[2].table).all()


def test_each_node_is_read_once_where_its_map_comes_first():
    graph, model = make_graph(in_channels=40), build(GCN, 40)
    source = MemorySource(graph, chunk=7)
    layerwise_inference(model, source, block_arcs=20)
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
        layerwise_inference(model, source, block_arcs=500)  # compiles
        tracemalloc.start()
        layerwise_inference(model, source, block_arcs=500)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    table_bytes = 4000 * hidden * 4
    assert max(source.gathered) <= 2 * 500  # a block's rows and one source an arc
    assert peaks[1] - peaks[0] < 4000 * 32 < table_bytes / 4


@pytest.mark.parametrize("block_arcs", [1, 2, 3, 100])
def test_blocks_are_split_between_rows(block_arcs):
    indptr = np.array([0, 0, 2, 7, 7, 7, 8, 10])
    block = RowBlock(np.arange(20, 27), indptr, np.arange(10), np.arange(10.0))
    pieces = list(split_block(block, block_arcs))
    assert np.array_equal(np.concatenate([piece.rows for piece in pieces]), block.rows)
    assert np.array_equal(np.concatenate([piece.indices for piece in pieces]), block.indices)
    assert np.array_equal(np.concatenate([piece.edge_weight for piece in pieces]), block.edge_weight)
    assert np.array_equal(np.concatenate([np.diff(piece.indptr) for piece in pieces]), np.diff(indptr))
    for piece in pieces:
        assert len(piece.rows) == 1 or (len(piece.indices) <= block_arcs and len(piece.rows) <= block_arcs)


def test_refuses_blocks_without_arcs():
    with pytest.raises(ValueError, match="block_arcs must be at least 1, got 0"):
        layerwise_inference(build(GCN, 12), MemorySource(make_graph()), block_arcs=0)
