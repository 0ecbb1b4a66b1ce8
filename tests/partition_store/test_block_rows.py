"""Block rows: every edge in exactly one block, and both sides of every exchange list the same rows."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.partition_store import PartitionStore, block_rows, write_partition_store
from lightning_gnnscale.partition_store.block_rows import BlockRows, load_block_rows
from tests.oracles.partition_store import StoreOracle
from tests.partition_store.small_graphs import TINY, SmallGraph, random_graph, small_graphs
from tests.says import said

FAST = settings(
    max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def cut_graphs(draw) -> SmallGraph:
    """Small graphs in up to seven parts, some of them empty."""
    graph = draw(small_graphs())
    num_parts = draw(st.integers(1, 7))
    part = st.integers(0, num_parts - 1)
    part_id = draw(st.lists(part, min_size=graph.num_nodes, max_size=graph.num_nodes))
    return replace(graph, num_parts=num_parts, part_id=part_id)


def write(graph: SmallGraph, folder, **arrays) -> PartitionStore:
    return write_partition_store(Path(folder) / "store", graph.stream(7), graph.given, budget=TINY, **arrays)


def load_all(store: PartitionStore, world_size: int) -> list[BlockRows]:
    return [load_block_rows(store, rank, world_size) for rank in range(world_size)]


def owners(store: PartitionStore, part_id: list[int], world_size: int) -> list[int]:
    """The rank of each original node: the first parts % ranks runs are one part longer than the others."""
    longer = store.num_parts % world_size
    lengths = [store.num_parts // world_size + (rank < longer) for rank in range(world_size)]
    rank_of_part = [rank for rank, length in enumerate(lengths) for _ in range(length)]
    return [rank_of_part[part] for part in part_id]


def check_against_oracle(graph: SmallGraph, store: PartitionStore, world_size: int) -> None:
    """Compare every block with rows in plain Python; weights, where there are some, are edge ids."""
    oracle = StoreOracle(graph.edges, graph.part_id, graph.to_undirected, graph.remove_self_loops)
    rank_of = owners(store, graph.part_id, world_size)
    for rank, block in enumerate(load_all(store, world_size)):
        names = store.original_nid[block.nodes].tolist()
        own = names[: block.num_local]
        assert (block.rank, block.world_size, block.symmetric) == (rank, world_size, oracle.symmetric)
        assert sorted(own) == [node for node, owner in enumerate(rank_of) if owner == rank]
        assert (np.diff(block.nodes[: block.num_local]) == 1).all() and (np.diff(block.halo_nodes) > 0).all()
        read = {source for node in own for source, _ in oracle.rows[node]}
        assert set(names[block.num_local :]) == read - set(own)
        for row, node in enumerate(own):
            edges = slice(block.csc.indptr[row], block.csc.indptr[row + 1])
            sources = block.csc.indices[edges]
            assert (np.diff(block.nodes[sources]) >= 0).all(), "rows keep the order of the store"
            found = [names[source] for source in sources]
            assert sorted(found) == [source for source, _ in oracle.rows[node]]
            if store.edge_weight is not None:
                ids = [(name, int(edge)) for name, edge in zip(found, block.edge_weight[edges], strict=True)]
                assert sorted(ids) == oracle.rows[node]
        if store.edge_weight is None:
            assert block.edge_weight is None
            assert block.degree.tolist() == [len(oracle.rows[name]) for name in names]
        else:
            assert block.degree.tolist() == [sum(edge for _, edge in oracle.rows[name]) for name in names]


@FAST
@given(graph=cut_graphs(), world_size=st.integers(1, 5), weighted=st.booleans())
def test_blocks_are_those_of_the_oracle(no_disk_wait, graph, world_size, weighted):
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder, **({"edge_weight": graph.edge_ids} if weighted else {}))
        check_against_oracle(graph, store, min(world_size, graph.num_parts))


@pytest.mark.parametrize("to_undirected", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_larger_blocks_are_those_of_the_oracle(no_disk_wait, tmp_path, monkeypatch, world_size, to_undirected):
    monkeypatch.setattr(block_rows, "_BLOCK_EDGES", 7)
    graph = random_graph(60, 400, 7, to_undirected=to_undirected)
    store = write(graph, tmp_path, edge_weight=graph.edge_ids)
    assert min(block.num_halo for block in load_all(store, world_size)) > 0 or world_size == 1
    check_against_oracle(graph, store, world_size)


@FAST
@given(graph=cut_graphs(), world_size=st.integers(1, 5))
def test_what_one_rank_sends_is_what_the_other_reads(no_disk_wait, graph, world_size):
    world_size = min(world_size, graph.num_parts)
    with tempfile.TemporaryDirectory() as folder:
        blocks = load_all(write(graph, folder), world_size)
    for sender in blocks:
        assert len(sender.send_rows) == world_size
        assert len(sender.send_rows[sender.rank]) == 0
        begin, end = sender.offsets[sender.rank : sender.rank + 2]
        for reader in blocks:
            halo = reader.halo_nodes
            expected = [node for node in halo.tolist() if begin <= node < end]
            assert sender.nodes[sender.send_rows[reader.rank]].tolist() == expected


@FAST
@given(graph=cut_graphs(), world_size=st.integers(1, 5))
def test_dtypes_and_offsets(no_disk_wait, graph, world_size):
    world_size = min(world_size, graph.num_parts)
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder, edge_weight=graph.edge_ids)
        weighted, plain = load_all(store, world_size), load_all(write(graph, Path(folder) / "plain"), world_size)
    for block in plain + weighted:
        assert block.offsets.tolist() == plain[0].offsets.tolist()
        assert (block.offsets[0], block.offsets[-1]) == (0, graph.num_nodes)
        for array in (block.offsets, block.halo_nodes, block.csc.indptr, *block.send_rows, block.nodes):
            assert array.dtype == np.int64
        assert block.csc.indices.dtype == np.int32
        assert len(block.degree) == block.num_local + block.num_halo == len(block.nodes)
    assert sum(block.csc.num_edges for block in plain) == store.num_edges
    assert {block.degree.dtype for block in plain} == {np.dtype(np.int64)}
    assert {(block.degree.dtype, block.edge_weight.dtype) for block in weighted} == {(np.dtype(np.float32),) * 2}


def test_runs_of_parts_are_contiguous_and_even(no_disk_wait, tmp_path):
    graph = random_graph(70, 200, 7)
    store = write(graph, tmp_path)
    offsets = load_block_rows(store, 2, 3).offsets
    assert offsets.tolist() == store.part_offsets[[0, 3, 5, 7]].tolist()


def test_empty_parts_and_empty_blocks(no_disk_wait, tmp_path):
    graph = SmallGraph(5, [(0, 1), (1, 2), (3, 4), (4, 0)], [0, 0, 2, 2, 2], 4)
    store = write(graph, tmp_path)
    assert [block.num_local for block in load_all(store, 4)] == [2, 0, 3, 0]
    empty = load_block_rows(store, 3, 4)
    assert (empty.num_halo, empty.csc.num_edges, [len(rows) for rows in empty.send_rows]) == (0, 0, [0] * 4)
    assert [block.num_halo for block in load_all(store, 2)] == [1, 1]


def test_one_rank_holds_the_whole_graph(no_disk_wait, tmp_path):
    store = write(random_graph(30, 90, 3), tmp_path)
    block = load_block_rows(store, 0, 1)
    assert block.num_halo == 0
    assert np.array_equal(block.csc.indptr, store.csc.indptr)
    assert np.array_equal(block.csc.indices, store.csc.indices)


def test_more_ranks_than_parts(no_disk_wait, tmp_path):
    store = write(random_graph(10, 20, 2), tmp_path)
    with pytest.raises(StrategyError, match=said("4 2 devices=2")):
        load_block_rows(store, 0, 4)
    with pytest.raises(ValueError, match=said("rank [0, 2) 2")):
        load_block_rows(store, 2, 2)


@FAST
@given(graph=cut_graphs(), world_size=st.integers(1, 3), weighted=st.booleans())
def test_in_edges_of_the_halo_are_those_of_the_graph(no_disk_wait, graph, world_size, weighted):
    ids = np.arange(len(graph.edges), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        store = write(graph, folder, **({"edge_weight": ids} if weighted else {}))
        oracle = StoreOracle(graph.edges, graph.part_id, graph.to_undirected, graph.remove_self_loops)
        for block in load_all(store, min(world_size, store.num_parts)):
            found = block_rows.halo_in_edges(store, block)
            rows = [oracle.rows[node] for node in store.original_nid[block.halo_nodes].tolist()]
            names = store.original_nid[block.halo_nodes].tolist()
            loops = [[edge for source, edge in row if source == node] for node, row in zip(names, rows, strict=True)]
            rest = [[edge for source, edge in row if source != node] for node, row in zip(names, rows, strict=True)]
            assert found.loops.tolist() == [place for place, own in enumerate(loops) for _ in own]
            assert found.counts.tolist() == [len(others) for others in rest]
            assert found.max_degree == max(map(len, oracle.rows.values()), default=0)
            if weighted:
                assert found.weights.tolist() == [sum(others) for others in rest]
                assert sorted(found.loop_weight.tolist()) == sorted(edge for own in loops for edge in own)
            else:
                assert found.weights is None and found.loop_weight is None


def test_edge_features_are_those_of_the_edges(no_disk_wait, tmp_path):
    graph = random_graph(40, 200, 4, seed=3)
    rows = np.stack([np.arange(200.0), -np.arange(200.0)], axis=1)
    store = write(graph, tmp_path, edge_features=rows, edge_weight=np.arange(200, dtype=np.float32))
    for block in load_all(store, 3):
        found = block_rows.edge_feature_rows(store, block)
        assert np.array_equal(found, np.stack([block.edge_weight, -block.edge_weight], axis=1))
        assert np.array_equal(block_rows.edge_feature_rows(store, block, 5), found[:5])
