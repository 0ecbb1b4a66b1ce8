"""Node types with features of their own under placements and caches:

plain indexing bit for bit, bytes and reads counted.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.typed_rows import as_rows, indexed, write_typed

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.placement import cuda_tiers
from lightning_gnnscale.placement.place import METHODS, Capacity
from lightning_gnnscale.sampler.minibatch import rows_by_node_type
from tests.says import said
from tests.tiers import each_value

AUTHOR, PAPER, INST, TOPIC = range(4)
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")


@pytest.fixture(scope="module", params=[False, True, pytest.param("bfloat16", marks=pytest.mark.sweep)])
def store(request, tmp_path_factory):
    return write_typed(tmp_path_factory.mktemp("node_types") / "store", quantised=request.param)


def placed(store, num_devices=1, share=0.3, groups=None, **options):
    prob = np.random.default_rng(0).random(store.num_nodes) * store.features.has_row
    rows = max(1, int(share * store.num_nodes))
    options = {"alpha": 0.1, "row_bytes": store.features.row_bytes, "groups": groups} | options
    return gs.place(prob, num_devices, rows, **options), prob


@each_value
@pytest.mark.parametrize("host", ["map", "copy"])
@pytest.mark.parametrize("policy", [None, "lru", "sieve", "belady"])
def test_every_node_type_is_gathered_as_indexed(store, host, policy):
    placement, prob = placed(store, 2, host_rows=60)
    caches = gs.PlacementSettings(cache_rows=20, cache_policy=policy or "lru").caches_by_node_type(
        store.features, placement, 1, prob
    )
    buffer = gs.TypedBuffers(placement, store.features, 1, host=host, caches=caches if policy else ())
    random, pool = np.random.default_rng(3), BufferPool()
    batches = [random.integers(0, store.num_nodes, number) for number in (0, 1, 60, 200, 90)]
    buffer.expect(batches)
    for nodes in batches:
        rows = buffer.read(nodes, pool.take)
        assert np.array_equal(rows.node_type, store.node_type(nodes))
        assert as_rows(rows) == indexed(store, nodes)
    reads, hits = np.concatenate(batches), buffer.hits
    node_type, dev_num = store.node_type(reads), placement.dev_num[1][reads]
    assert hits["local"] == np.count_nonzero(dev_num == 1) > 0
    assert hits["peer"] == np.count_nonzero(dev_num == 0) > 0
    far = np.count_nonzero((dev_num < 0) & (node_type != INST))
    assert hits["host"] + hits["disk"] + hits["cache"] == far
    assert (hits["cache"] > 0) == (policy is not None)
    if policy is None:
        assert hits["disk"] == np.count_nonzero((dev_num == gs.placement.DISK) & (node_type != INST)) > 0
    assert sum(hits.values()) == np.count_nonzero(node_type != INST)
    buffer.reset_hits()
    assert not any(buffer.hits.values())
    buffer.read(np.flatnonzero(store.node_type(np.arange(store.num_nodes)) == TOPIC))
    assert sum(buffer.hits.values()) == 30 and buffer.hits["host"] == (30 if sparse(store) else buffer.hits["host"])
    buffer.close()
    with pytest.raises(PlacementError, match="is closed"):
        buffer.read(np.arange(3))


def test_cached_and_placed_rows_are_not_read_from_the_store(store):
    placement, prob = placed(store, share=0.2)
    settings = gs.PlacementSettings(cache_rows=store.num_nodes)
    tables = [table if table is None or table.is_sparse else copied(table) for table in store.features.tables]
    features = type(store.features)(tuple(tables), store.features.node_types)
    buffer = gs.TypedBuffers(placement, features, caches=settings.caches_by_node_type(features, placement, 0, prob))
    nodes = np.arange(store.num_nodes)
    expected = indexed(store, nodes)
    assert as_rows(buffer.read(nodes)) == expected
    for table in tables:
        if table is not None and not table.is_sparse:
            table.array[:] = 0
    buffer.reset_hits()
    assert as_rows(buffer.read(nodes)) == expected
    assert buffer.hits["host"] == (30 if sparse(store) else 0) and buffer.hits["local"] == len(placement.rows[0])


def sparse(store) -> bool:
    return store.features.tables[TOPIC].is_sparse


def copied(table):
    return type(table)(np.array(table.array), table.storage)


def test_threads_gather_side_by_side(store):
    placement, prob = placed(store, 1, share=0.1)
    caches = gs.PlacementSettings(cache_rows=15, cache_policy="sieve").caches_by_node_type(
        store.features, placement, 0, prob
    )
    buffer, barrier = gs.TypedBuffers(placement, store.features, caches=caches), threading.Barrier(4)

    def gather(seed):
        barrier.wait()
        random = np.random.default_rng(seed)
        for _ in range(8):
            nodes = random.integers(0, store.num_nodes, 100)
            node_type = store.node_type(nodes)
            rows = buffer.read(nodes)
            for number in (AUTHOR, PAPER):
                own = store.features.read(nodes[node_type == number]).tables[number]
                assert rows.tables[number].tobytes() == own.tobytes()
        return 800

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(gather, range(4))) == 3200
    assert buffer.gather_s > 0


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("policy", [None, "sieve"])
def test_kernels_of_a_gpu_gather_every_node_type(store, monkeypatch, on, policy):
    """On the CPU the kernels run in Triton's interpreter."""
    monkeypatch.setattr(cuda_tiers, "device_of", lambda _, device: torch.device(on))
    placement, prob = placed(store, 2, host_rows=60)
    caches = gs.PlacementSettings(cache_rows=20, cache_policy="sieve").caches_by_node_type(
        store.features, placement, 0, prob
    )
    buffer = gs.TypedBuffers(placement, store.features, on="cuda", caches=caches if policy else ())
    for nodes in (np.arange(store.num_nodes), np.random.default_rng(0).integers(0, store.num_nodes, 40)):
        rows = buffer.read(torch.from_numpy(nodes).to(on), None)
        assert all(table.device.type == on for table in rows.tables if isinstance(table, torch.Tensor))
        moved = rows_by_node_type(rows).apply(lambda tensor: tensor.cpu())
        assert as_rows(moved) == indexed(store, nodes) and isinstance(rows.tables[PAPER], torch.Tensor)
    node_type = store.node_type(np.arange(store.num_nodes))
    assert sum(buffer.hits.values()) > np.count_nonzero(node_type != INST)
    buffer.close()


def test_a_process_a_device_reads_its_peers(store, tmp_path):
    placement, _ = placed(store, 2, groups=[[0, 1]])
    told, barrier = [None, None], threading.Barrier(2)

    def run(rank):
        def exchange(own):
            barrier.wait(60)
            told[rank] = own
            barrier.wait(60)
            return list(told)

        options = {"make": gs.FeatureBuffer.join, "exchange": exchange, "folder": tmp_path, "host": "copy"}
        buffer = gs.TypedBuffers(placement, store.features, rank, **options)
        nodes = np.arange(store.num_nodes)
        return as_rows(buffer.read(nodes)) == indexed(store, nodes) and buffer.hits["peer"] > 0

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(run, range(2))) == [True, True]


@given(
    method=st.sampled_from([name for name in METHODS if name not in ("degree", "pagraph", "metis")]),
    num_devices=st.sampled_from([1, 2, 3]),
    widths=st.lists(st.sampled_from([0, 4, 10, 100]), min_size=1, max_size=40),
    share=st.floats(0.05, 1),
    alpha=st.sampled_from([0.0, 0.2, 1.0]),
    by_device=st.booleans(),
    host=st.none() | st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_a_buffer_is_filled_by_bytes(method, num_devices, widths, share, alpha, by_device, host, seed):
    row_bytes, num = np.array(widths), len(widths)
    prob = np.random.default_rng(seed).random((num_devices, num) if by_device else num)
    rows = max(1, int(share * num))
    placement = gs.place(prob, num_devices, rows, alpha, method=method, row_bytes=row_bytes, host_rows=host)
    most = rows * row_bytes.sum() // num
    for own in placement.rows:
        assert len(np.unique(own)) == len(own) and np.all(row_bytes[own] > 0)
        assert row_bytes[own].sum() <= most
    if method == "rule" and num_devices == 1:
        hottest = [node for node in np.argsort(-prob.reshape(-1, num)[0], kind="stable") if row_bytes[node]]
        fits = np.cumsum(row_bytes[hottest]) <= most
        assert set(placement.rows[0].tolist()) == set(np.array(hottest, int)[fits].tolist())
    if host is not None:
        in_host = ~placement.on_disk
        for own in placement.rows:
            in_host[own] = False
        assert row_bytes[in_host].sum() <= host * row_bytes.sum() // num
        assert not placement.on_disk[row_bytes == 0].any()


@given(seed=st.integers(0, 50), method=st.sampled_from(["rule", "rule_by_cost", "ranges", "random", "naive"]))
def test_rows_of_one_width_are_placed_as_without(seed, method):
    prob = np.random.default_rng(seed).random((2, 30))
    plain, alike = (gs.place(prob, 2, 7, 0.2, method=method, row_bytes=w, host_rows=5) for w in (None, np.full(30, 12)))
    for one, other in zip(plain.rows, alike.rows, strict=True):
        assert np.array_equal(np.sort(one), np.sort(other))
    assert np.array_equal(plain.on_disk, alike.on_disk)
    assert plain.costs == pytest.approx(alike.costs) and plain.shares == pytest.approx(alike.shares)


def test_a_group_holds_the_hot_rows_of_every_width():
    """Two devices that read each other for nothing have space for both widths; one alone is filled by the hotter."""
    prob = np.array([1.0] * 10 + [0.9] * 10 + [0.01] * 20)
    row_bytes = np.array([10] * 10 + [20] * 10 + [10] * 20)
    placement = gs.place(prob, 2, 12, alpha=0.0, row_bytes=row_bytes)  # 12 x 12.5 bytes on each
    held = np.unique(np.concatenate(placement.rows))
    assert set(range(20)) <= set(held.tolist())


def test_stores_are_placed_by_every_method(store):
    train = np.flatnonzero(store.masks["train"])
    for method in METHODS:
        setting = gs.PlacementSettings(method, buffer_share=0.2, alpha=0.2)
        placement = setting.place(store, train, 2, [3, 2], 16)
        size = store.features.row_bytes.sum()
        for device, own in enumerate(placement.rows):
            assert len(own) and not set(np.unique(store.node_type(own))) & {INST, TOPIC if sparse(store) else INST}
            assert store.features.row_bytes[own].sum() <= 0.2 * size + 1
            rows = gs.TypedBuffers(placement, store.features, device).read(np.arange(store.num_nodes))
            assert as_rows(rows) == indexed(store, np.arange(store.num_nodes))


def test_caches_share_bytes_by_likelihood(store):
    placement, _ = placed(store, share=0.01)
    prob = np.where(store.node_type(np.arange(store.num_nodes)) == PAPER, 1.0, 0.1)
    setting = gs.PlacementSettings(cache_rows=30)
    author, paper, inst, topic = setting.caches_by_node_type(store.features, placement, 0, prob)
    assert (author, inst, topic) == (None, None, None)
    assert paper.capacity == Capacity(30, store.features.row_bytes).num_bytes // store.features.row_bytes.max()
    author, *_ = setting.caches_by_node_type(store.features, placement, 0, 1 - prob)
    assert author.capacity > paper.capacity


def test_what_no_buffer_has_is_refused(store):
    placement, _ = placed(store)
    with pytest.raises(PlacementError, match=said("node type features gs.TypedBuffers")):
        gs.FeatureBuffer(placement, store.features)
    without = type(store.features)((None, None, None, None), store.features.node_types)
    with pytest.raises(PlacementError, match=said("node type store dense rows placement")):
        gs.TypedBuffers(placement, without)
    with pytest.raises(ValueError, match=said("caches node type 4 1")):
        gs.TypedBuffers(placement, store.features, caches=[None])
    with pytest.raises(PlacementError, match="made for another store"):
        other = replace(placement, fingerprint=store.layout_fingerprint)
        gs.TypedBuffers(other, store.features, fingerprint="another")
    with pytest.raises(ValueError, match=said("row_bytes (4,) 0")):
        gs.place(np.ones(4), 1, 2, row_bytes=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="node ids must be in"):
        gs.TypedBuffers(placement, store.features).read(np.array([store.num_nodes]))
