"""HeiStream and CUTTANA as the benchmark of partitioners has them: what their papers say, on graphs that are small."""

import numpy as np
import pytest

from benchmarks import streaming_peers
from lightning_gnnscale.partitioner import partition
from tests.oracles.fennel import fennel_parts
from tests.partitioner.graphs import stream_of
from tests.partitioner.streamed_runs import cut_of, planted


def rows_of(edges, num_nodes):
    rows = [[] for _ in range(num_nodes)]
    for u, v in edges.tolist():
        rows[u].append(v)
        rows[v].append(u)
    return rows


def test_batches_of_one_node_are_fennel():
    edges, _ = planted(size=50, outside=4)
    p = partition(stream_of(edges, 200, layout="once"), "heistream", 3, evaluate=False, buffer_nodes=1)
    assert p.part_id.tolist() == list(fennel_parts(rows_of(edges, 200), 3, 68))


def test_a_larger_batch_cuts_less():
    edges, _ = planted(size=100, inside=14, outside=2)
    edges = np.random.default_rng(0).permutation(400)[edges]
    stream = stream_of(edges, 400, layout="once")
    few, all_at_once = (partition(stream, "heistream", 4, evaluate=False, buffer_nodes=n) for n in (2, 400))
    assert cut_of(edges, all_at_once.part_id) == 400 < 0.5 * cut_of(edges, few.part_id)
    assert np.bincount(all_at_once.part_id).tolist() == [100] * 4


@pytest.mark.parametrize("buffer_nodes", [1, 20])
def test_a_buffer_and_trades_cut_less_than_fennel_within_the_cap(buffer_nodes):
    edges, _ = planted(size=100, inside=14, outside=2)
    edges = np.random.default_rng(0).permutation(400)[edges]
    stream, own = stream_of(edges, 400, layout="once"), {"buffer_nodes": buffer_nodes, "sub_parts": 200}
    p = partition(stream, "cuttana", 4, evaluate=False, **own)
    assert np.bincount(p.part_id, minlength=4).max() <= 103
    assert cut_of(edges, p.part_id) < 0.9 * cut_of(edges, partition(stream, "fennel", 4, evaluate=False).part_id)


def test_trades_end_where_no_move_of_a_sub_part_lowers_the_cut():
    sample = np.random.default_rng(1)
    weight = np.triu(sample.integers(0, 4, (24, 24)), 1)
    weight += weight.T
    src, dst = np.nonzero(weight)
    indptr, size, cap = np.searchsorted(src, np.arange(25)), sample.integers(1, 5, (24, 1)), 22
    part = np.arange(24) % 3

    def cut():
        return weight[part[:, None] != part].sum() // 2

    before = cut()
    streaming_peers._trade(indptr, dst, weight[src, dst], size, part, 3, cap)
    after, load = cut(), np.bincount(part, size[:, 0], 3)
    assert after < before
    for s in range(24):
        own = part[s]
        for other in range(3):
            if load[other] + size[s, 0] <= cap:
                part[s] = other
                assert cut() >= after
        part[s] = own
