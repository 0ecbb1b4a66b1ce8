"""Layers by broadcasting: the same outputs as by groups of rows, to the bit whatever memory and ranks there are."""

import logging
import tracemalloc

import numpy as np
import pytest
import torch
from model.graphs import MemorySource, SharedTables, make_graph, make_graph_of
from model.test_inference import build, on_ranks
from model.typed_graphs import ONE_NODE_TYPE, SCHEMA, TypedSource, hetero_graph

from lightning_gnnscale import events
from lightning_gnnscale.datamodule.edge_spool import EdgeSpool
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.model import (
    GAT,
    GCN,
    NGNN,
    RGCN,
    SGC,
    GraphSAGE,
    RowBlock,
    broadcast,
    edge_bins,
    layerwise_inference,
)
from lightning_gnnscale.model.edge_bins import BinSizes, EdgeBins, LayerSize, choose_way, edge_shares, plan_buckets
from lightning_gnnscale.model.inference import _Pass
from lightning_gnnscale.model.layer_source import NodeSet, closure
from tests.says import said
from tests.tiers import all_pairs

STREAMED = [GCN, GraphSAGE, SGC, NGNN]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", 4 * 8 * 64)  # 64 sources of 8 columns
    monkeypatch.setattr(edge_bins, "FIXED_BYTES", 0)
    monkeypatch.setattr(broadcast, "READ_BYTES", 1)  # one step of rows at a time
    monkeypatch.setattr(broadcast, "WINDOW_BYTES", 100)  # little memory reads a chunk's edges in pieces


def run(model, source, **options):
    return np.array(layerwise_inference(model, source, broadcast=True, **options).table)


def widths_of(typed):
    columns = [0 if table is None else table.shape[1] for table in typed.tables]
    return dict(zip(typed.schema.node_types, columns, strict=True))


@all_pairs
@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize("in_channels", [3, 12, 40])  # mapped when summed, as it is read, and into a table
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_equals_the_full_graph_forward(kind, in_channels, weighted, sparse, on_disk, tmp_path):
    graph = make_graph(300, 3000, in_channels=in_channels)
    model = build(kind, in_channels).eval()
    weight = torch.rand(graph.edge_index.shape[1]) * 0.1 + 0.01 if weighted else None
    with torch.no_grad():
        expected = model(graph.x, graph.edge_index, weight, degree=graph.degree, indptr=graph.indptr)
    shared = SharedTables(1, tmp_path if on_disk else None)
    weight = None if weight is None else weight.numpy()
    source = MemorySource(graph, shared=shared, chunk=50, sparse=sparse, edge_weight=weight)
    table = run(model, source, memory_bytes=4096)
    # float32, 3 layers, sums of hundreds of terms in another order
    torch.testing.assert_close(torch.from_numpy(table), expected, rtol=2e-4, atol=2e-5)
    assert not list(tmp_path.glob("edges*")), "nothing is left"


@pytest.mark.parametrize("kind", STREAMED)
def test_memory_and_ranks_change_no_bit(kind, tmp_path):
    graph, model = make_graph(300, 3000), build(kind, 12).eval()
    found = []
    for world_size, memory_bytes in ((1, 1 << 26), (1, 4096), (1, 20_000), (3, 9000)):
        folder = tmp_path / f"{world_size}-{memory_bytes}"
        folder.mkdir()
        results = on_ranks(
            world_size, lambda source, size=memory_bytes: run(model, source, memory_bytes=size), graph, 37, folder
        )
        found += results
    for table in found[1:]:
        assert np.array_equal(table, found[0])


@pytest.mark.parametrize("kind", STREAMED[:3])
@pytest.mark.parametrize("in_channels", [3, 12])
def test_a_layer_in_float64_is_exact(kind, in_channels, monkeypatch):
    graph, written = make_graph(200, 2000, in_channels=in_channels), []
    model = kind(in_channels, 8, 4, num_layers=1).double().eval()
    # What is written to a table, before it is rounded to float32.
    monkeypatch.setattr(_Pass, "_write", lambda self, table, held, nodes, values: written.append((nodes, values)))
    run(model, MemorySource(graph), memory_bytes=4096)
    nodes, values = (torch.cat([torch.as_tensor(one) for one in column]) for column in zip(*written, strict=True))
    with torch.no_grad():
        expected = model(graph.x.double(), graph.edge_index, degree=graph.degree, indptr=graph.indptr)
    torch.testing.assert_close(values, expected[nodes], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", STREAMED)
def test_some_nodes_outputs_are_those_of_all(kind, tmp_path):
    graph, wanted = make_graph(200, 260, hub=False), np.array([3, 50, 51, 199])
    model = build(kind, 12).eval()
    whole = run(model, MemorySource(graph))[wanted]

    def infer(source):
        sets = closure(source, NodeSet.of(wanted, graph.num_nodes), 3)
        return layerwise_inference(model, source, needed=sets, broadcast=True, memory_bytes=2000).read(wanted)

    for outputs in on_ranks(2, infer, graph, 13, tmp_path):
        assert np.array_equal(outputs, whole)


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}])
@pytest.mark.parametrize("schema", [SCHEMA, ONE_NODE_TYPE])
@pytest.mark.parametrize("weighted", [False, True])
def test_edge_types_have_maps_of_their_own(schema, options, weighted):
    typed = hetero_graph(schema, dtype=torch.float32)
    torch.manual_seed(0)
    model = RGCN(widths_of(typed), 8, 4, num_layers=3, schema=schema, **options).eval()
    sources = [TypedSource(typed, chunk=9) for _ in range(3)]
    for source in sources:
        source.edge_weight = np.linspace(0.1, 1, typed.graph.edge_index.shape[1]) if weighted else None
        source.has_weights = weighted
    by_groups = layerwise_inference(model, sources[0], broadcast=False).table
    tables = [run(model, source, memory_bytes=size) for source, size in zip(sources[1:], (1 << 26, 3000), strict=True)]
    assert np.array_equal(*tables)
    np.testing.assert_allclose(tables[0], by_groups, rtol=1e-4, atol=1e-5)


def test_an_unknown_edge_type_is_refused():
    typed = hetero_graph(SCHEMA, dtype=torch.float32)
    model = RGCN(widths_of(typed), 8, 4, schema=SCHEMA)
    typed.edge_type[3] = 99
    with pytest.raises(ValueError, match=said(f"edge_type {SCHEMA.num_edge_types} 99")):
        run(model, TypedSource(typed))


@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize(
    ("src", "dst", "num_nodes"),
    [
        ([], [], 5),
        ([0], [0], 1),
        ([0, 0, 1, 2, 3, 3, 3], [1, 1, 2, 2, 0, 3, 3], 200),
        ([*range(1, 150)], [0] * 149, 150),
    ],
)
def test_odd_graphs(kind, src, dst, num_nodes):
    graph = make_graph_of(np.array(src, np.int64), np.array(dst, np.int64), num_nodes)
    model = build(kind, 12).eval()
    by_groups = layerwise_inference(model, MemorySource(graph, chunk=40), broadcast=False).table
    np.testing.assert_allclose(
        run(model, MemorySource(graph, chunk=40), memory_bytes=3000), by_groups, rtol=1e-4, atol=1e-5
    )


def test_rows_in_any_order_of_parts():
    class Backwards(MemorySource):
        def all_blocks(self):
            yield from reversed(list(super().all_blocks()))

    graph, model = make_graph(200, 900), build(GraphSAGE, 12).eval()
    expected = run(model, MemorySource(graph))
    assert np.array_equal(run(model, Backwards(graph, chunk=30), memory_bytes=5000), expected)


def test_each_source_is_read_once_for_each_bucket():
    graph = make_graph(300, 6000)
    model, source = GraphSAGE(12, 8, 8, num_layers=1), MemorySource(graph)
    memory_bytes = 300 * (4 * 8 + 4 + 8) * 16 // 13 // 2 + 16  # of half the rows' sums
    run(model, source, memory_bytes=memory_bytes)
    assert 300 < sum(source.gathered) <= 1 + 2 * 300


def test_a_derived_layer_is_computed_by_its_own_code():
    class Doubled(GraphSAGE):
        def apply_layer(self, index, x, block):
            return 2 * super().apply_layer(index, x, block)

    graph, model = make_graph(), build(Doubled, 12).eval()
    assert all(model.streamed_layer(index, False, False) is None for index in range(3))
    expected = model(graph.x, graph.edge_index, indptr=graph.indptr, degree=graph.degree).detach()
    torch.testing.assert_close(torch.from_numpy(run(model, MemorySource(graph))), expected, rtol=1e-4, atol=1e-5)
    assert build(GAT, 12).streamed_layer(0, False, False) is None


@pytest.mark.parametrize("in_channels", [12, 40])
def test_the_way_is_chosen_by_bytes_and_logged(caplog, in_channels):
    graph = make_graph(400, 4000, in_channels=in_channels, hub=False)
    model, num_edges = build(GraphSAGE, in_channels).eval(), graph.edge_index.shape[1]
    caplog.set_level(logging.INFO, "lightning.pytorch.evaluation")
    layerwise_inference(model, MemorySource(graph), memory_bytes=1 << 26)
    assert not caplog.text
    layerwise_inference(model, MemorySource(graph), memory_bytes=16_000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, lines
    assert f"layer 1: 400 nodes of {num_edges:,} edges by broadcasting, its inputs read 2 times" in lines[0]
    recorded = [event for event in events.recent() if event["event"] == "broadcast_layer"][-3:]
    assert [(event["layer"], event["num_buckets"]) for event in recorded] == [(0, 2), (1, 2), (2, 1)]


def test_what_fits_memory_stays_and_fewer_bytes_win():
    size = LayerSize(1000, 20_000, 5000, 128, num_groups=9, group_source_bytes=128, mapping_bytes=0)
    fits = choose_way(size._replace(num_groups=1), row_bytes=300, edge_bytes=6, memory_bytes=1 << 30)
    assert not fits.broadcasts and fits.buckets == (1, 1000, (1 << 30) * 13 // 16 - 300_000)
    many = choose_way(size, row_bytes=300, edge_bytes=6, memory_bytes=200_000)
    assert many.broadcasts and many.buckets.num_buckets == 2
    assert many.broadcast_bytes == 2 * 5000 * 128 + 20_000 * 6 - 2 * many.buckets.keep_bytes
    assert many.group_bytes == 9 * 5000 * 128 + 1000 * 128
    wide = choose_way(size, row_bytes=3000, edge_bytes=6, memory_bytes=200_000)
    assert not wide.broadcasts and wide.buckets.num_buckets == 19
    assert plan_buckets(0, 0, 300, 6, 100).most_rows == 1


def test_little_memory_leaves_space_for_chunks(monkeypatch):
    monkeypatch.setattr(edge_bins, "FIXED_BYTES", 48 << 20)
    buckets = [plan_buckets(1 << 20, 0, 100, 6, size << 20).num_buckets for size in (32, 80, 400)]
    assert buckets == [-(-100 // 8), -(-100 // 32), 1]


@pytest.mark.parametrize("num_types", [1, 3])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20, 3000])
@pytest.mark.parametrize("window_bytes", [1, 2000, 1 << 20])
def test_bins_hold_each_edge_once_in_its_order(tmp_path, num_types, keep_bytes, window_bytes):
    rng, spool = np.random.default_rng(0), EdgeSpool(tmp_path / "edges")
    bins = EdgeBins(BinSizes(4, 7, num_types), np.dtype(np.float32), keep_bytes, window_bytes, spool)
    for _ in range(2):  # it serves again
        expected: dict[int, list] = {}
        first = 0
        for num_rows in (5, 1, 40):
            lengths = rng.integers(0, 9, num_rows)
            indptr = np.concatenate([[0], np.cumsum(lengths)])
            indices = rng.integers(0, 100, indptr[-1])
            weight, types = rng.random(len(indices)).astype(np.float32), rng.integers(0, num_types, len(indices))
            rows = np.repeat(np.arange(num_rows), lengths) + first
            for row, source, value, kind in zip(rows, indices, weight, types, strict=True):
                expected.setdefault(int(source >> 4) * num_types + kind, []).append((row, source & 15, value))
            block = RowBlock(np.arange(num_rows), indptr, indices, weight, None, types.astype(np.uint8))
            bins.add(block, first)
            first += num_rows
        for number in range(7 * num_types):
            for _ in range(2):  # a large one is read again
                found = [edge for piece in bins.read(number) for edge in zip(*piece, strict=True)]
                assert found == expected.get(number, [])
            assert bins.counts[number] == len(expected.get(number, []))
        bins.clear()
    spool.close()
    assert not (tmp_path / "edges").exists()


@pytest.mark.parametrize(("num_bins", "edges"), [(2, 20_000), (5000, 500)])  # of many edges; more starts than edges
def test_edges_hold_what_they_may(tmp_path, num_bins, edges):
    spool, rng, keep, window = EdgeSpool(tmp_path / "edges"), np.random.default_rng(0), 1 << 18, 1 << 16
    bins = EdgeBins(BinSizes(4, num_bins), None, keep, window, spool)
    tracemalloc.start()
    try:
        for number in range(40):
            indices = rng.integers(0, 16 * num_bins, edges)
            bins.add(RowBlock(np.arange(1), np.array([0, edges]), indices), number)
            del indices
        held = tracemalloc.get_traced_memory()[0]
        assert held < keep + 8 * num_bins + window, "4.8 MB of edges, or 1.6 MB of where bins begin"
        tracemalloc.reset_peak()
        read = range(min(num_bins, 100))
        assert sum(len(one.slots) for number in read for one in bins.read(number)) == bins.counts[: len(read)].sum()
        assert tracemalloc.get_traced_memory()[1] - held < 8 * window
    finally:
        tracemalloc.stop()
        spool.close()


def test_a_row_of_very_many_edges_holds_no_more_than_others(tmp_path):
    """A hub of 600,000 in-edges, 2.4 MB of ids: sorted at once they took 7.2 MB. Order and bits stay those of a row."""
    hub, sizes, spool = 600_000, BinSizes(6, 50), EdgeSpool(tmp_path / "edges")
    rng = np.random.default_rng(0)
    indices = np.sort(rng.integers(0, 3200, hub + 20).astype(np.int32))
    block = RowBlock(np.arange(3), np.array([0, 10, hub + 10, hub + 20]), indices, rng.random(hub + 20, np.float32))
    whole = EdgeBins(sizes, np.float32, 1 << 30, 1 << 30, None)
    whole.add(block, 5)
    bins = EdgeBins(sizes, np.float32, 1 << 16, 1 << 16, spool)
    tracemalloc.start()
    try:
        bins.add(block, 5)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert np.array_equal(bins.counts, whole.counts)
    for number in range(sizes.num_bins):
        found, (expected,) = (
            [np.concatenate(column) for column in zip(*bins.read(number), strict=True)],
            whole.read(number),
        )
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
    spool.close()


def test_shares_are_those_of_a_rows_edges_of_a_type():
    indptr, types = np.array([0, 3, 3, 6]), np.array([1, 0, 1, 2, 2, 2], np.uint8)
    out = np.empty(6)
    edge_shares(indptr, types, np.empty(0, np.float32), 3, out)
    assert out.tolist() == [0.5, 1, 0.5, 1 / 3, 1 / 3, 1 / 3]
    edge_shares(indptr, types, np.array([1, 5, 3, 0, 0, 0], np.float32), 3, out)
    assert out.tolist() == [0.25, 1, 0.75, 0, 0, 0]


def test_a_spool_on_a_full_disk_ends_in_one_line(tmp_path):
    spool = EdgeSpool(tmp_path / "edges")
    spool.append(np.arange(4))
    with pytest.raises(GNNScaleError, match=said("edges ends before byte 40")):
        spool.read(8, np.empty(4, np.int64))
    spool.close()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(GNNScaleError, match=said("full writes edges No space left scratch")):
        EdgeSpool(tmp_path / "full").append(np.arange(4))
    with pytest.raises(GNNScaleError, match=said("none/edges cannot scratch")):
        EdgeSpool(tmp_path / "none" / "edges")
