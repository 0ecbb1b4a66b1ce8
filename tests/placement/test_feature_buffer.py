"""Gathering through any placement, cache and tier equals plain indexing, bit for bit, with exact counts."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from buffer_cases import DTYPES, GROUPS, counted, placed, quantised_table, table
from hypothesis import given
from hypothesis import strategies as st

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.partition_store.features import CSRFeatures
from tests.says import said
from tests.tiers import all_pairs


@given(
    num_nodes=st.integers(4, 60),
    dim=st.sampled_from([1, 3, 16, 17, 63, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    num_devices=st.sampled_from(sorted(GROUPS)),
    share=st.sampled_from([0.1, 0.25, 1.0]),
    on_disk=st.sampled_from([0.0, 0.5, 1.0]),
    host=st.sampled_from(["map", "copy"]),
    policy=st.sampled_from([None, "lru", "sieve", "belady"]),
    out_kind=st.sampled_from([None, "pooled"]),
    data=st.data(),
)
def test_every_placement_equals_indexing(
    num_nodes, dim, dtype, num_devices, share, on_disk, host, policy, out_kind, data
):
    features = table(num_nodes, dim, dtype)
    groups = data.draw(st.sampled_from(GROUPS[num_devices]))
    placement = placed(num_nodes, num_devices, groups, share, on_disk, seed=data.draw(st.integers(0, 99)))
    random, pool = np.random.default_rng(data.draw(st.integers(0, 999))), BufferPool()
    caches = [gs.FeatureCache(1 + num_nodes // 8, policy) for _ in range(num_devices)] if policy else None
    buffers = gs.FeatureBuffer.in_one_process(placement, features, host=host, caches=caches)
    for device, buffer in enumerate(buffers):
        assert (buffer.num_rows, buffer.dim, buffer.dtype) == (num_nodes, dim, np.dtype(dtype))
        batches = [random.integers(0, num_nodes, random.integers(0, 40)) for _ in range(4)]
        buffer.expect(batches)
        for nodes in batches:
            nodes = nodes.astype(random.choice([np.int64, np.int32, np.uint16]))
            out = pool.take((len(nodes), dim), dtype) if out_kind else None
            got = buffer.read(nodes, out)
            assert out is None or got is out
            assert got.dtype == features.dtype and got.tobytes() == features.array[nodes].tobytes()
        expected, hits = counted(placement, device, np.concatenate(batches)), buffer.hits
        assert {name: hits[name] for name in ("local", "peer")} == {name: expected[name] for name in ("local", "peer")}
        if policy is None:
            assert hits == {**expected, "cache": 0}
        assert hits["host"] + hits["disk"] + hits["cache"] == expected["host"] + expected["disk"]
        buffer.reset_hits()
        assert not any(buffer.hits.values())
        row_bytes = dim * np.dtype(dtype).itemsize
        cached = (1 + num_nodes // 8) * row_bytes if policy else 0
        assert buffer.nbytes == len(placement.rows[device]) * row_bytes + 8 * num_nodes + cached


@all_pairs
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dim", [1, 17, 64])
@pytest.mark.parametrize("policy", [None, "lru", "belady"])
@pytest.mark.parametrize("host", ["map", "copy"])
def test_rows_of_codes_lie_as_stored_and_come_decoded(bits, dim, policy, host):
    features, plain = quantised_table(60, dim, bits)
    placement, random = placed(60, 2, [[0, 1]], on_disk=0.5), np.random.default_rng(dim)
    caches = [gs.FeatureCache(8, policy) for _ in range(2)] if policy else None
    for device, buffer in enumerate(gs.FeatureBuffer.in_one_process(placement, features, host=host, caches=caches)):
        assert (buffer.num_rows, buffer.dim, buffer.dtype) == (60, dim, np.float32)
        batches = [random.integers(0, 60, num) for num in (40, 0, 1, 33)]
        buffer.expect(batches)
        for nodes in batches:
            for dtype in (None, np.float32, np.float16):
                out = None if dtype is None else np.empty((len(nodes), dim), dtype)
                assert buffer.read(nodes, out).tobytes() == plain[nodes].astype(dtype or np.float32).tobytes()
            upper = torch.empty(len(nodes), dim, dtype=torch.bfloat16)
            assert torch.equal(buffer.read(nodes, upper), torch.from_numpy(plain[nodes]).bfloat16())
        row_bytes = features.array.shape[1]
        cached = 8 * row_bytes if policy else 0
        assert buffer.nbytes == len(placement.rows[device]) * row_bytes + 8 * 60 + cached
        assert buffer.hits["cache"] > 0 or policy is None
        with pytest.raises(ValueError, match=said("out float32 (2,")):
            buffer.read(np.arange(2), np.empty((2, dim)))


def test_a_lone_buffer_has_the_rows_of_its_group():
    features, placement = table(50, 8, "f4"), placed(50, 4, [[0, 1], [2, 3]])
    buffer = gs.FeatureBuffer(placement, features, device=2)
    nodes = np.arange(50)
    assert buffer.read(nodes).tobytes() == features.array.tobytes()
    assert buffer.hits == {**counted(placement, 2, nodes), "cache": 0} and buffer.hits["peer"] > 0


def test_rows_that_were_read_are_found_in_the_cache():
    features, placement = table(40, 5, "f4"), placed(40, 1, None, share=0.25, on_disk=0.5)
    far = np.flatnonzero(placement.dev_num[0] < 0)
    buffer = gs.FeatureBuffer(placement, features, cache=gs.FeatureCache(len(far)))
    buffer.read(np.arange(40))
    assert buffer.hits["cache"] == 0
    buffer.reset_hits()
    buffer.features.array[far] = 0  # what the cache holds is read from the cache, in truth
    kept = buffer.read(far)
    assert buffer.hits == {"local": 0, "peer": 0, "host": 0, "disk": 0, "cache": len(far)}
    assert kept.tobytes() == table(40, 5, "f4").array[far].tobytes()


def test_peers_are_read_from_their_own_memory():
    features, placement = table(40, 5, "f4"), placed(40, 2, [[0, 1]], share=0.25)
    expected = features.array.copy()
    buffers = gs.FeatureBuffer.in_one_process(placement, features, host="copy")
    features.array[:] = 0
    for buffer in buffers:
        assert buffer.read(np.arange(40)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("policy", [None, "lru", "sieve", "belady"])
def test_threads_gather_side_by_side(policy):
    features, placement = table(3000, 16, "f4"), placed(3000, 2, [[0, 1]], share=0.1, on_disk=0.3)
    cache = gs.FeatureCache(150, policy) if policy else None
    buffer = gs.FeatureBuffer(placement, features, cache=cache)
    batches = [np.random.default_rng(i).permutation(3000)[:700] for i in range(60)]
    buffer.expect(batches)
    start = threading.Barrier(4)

    def work(worker):
        start.wait()
        return all(buffer.read(b).tobytes() == features.array[b].tobytes() for b in batches[worker::4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    expected, hits = counted(placement, 0, np.concatenate(batches)), buffer.hits
    assert hits["local"] == expected["local"] and hits["peer"] == expected["peer"]
    assert hits["host"] + hits["disk"] + hits["cache"] == expected["host"] + expected["disk"]
    assert (hits["cache"] > 0) == (policy is not None)
    if policy is None:
        assert (hits["host"], hits["disk"]) == (expected["host"], expected["disk"])


def test_a_loader_gathers_through_it():
    features, placement = table(30, 4, "f4"), placed(30, 1, None)
    buffer = gs.FeatureBuffer(placement, features)
    assert not buffer.is_sparse
    out = np.empty((3, 4), np.float32)
    assert buffer.read(np.array([5, 5, 29]), out=out) is out


@pytest.mark.parametrize(
    ("nodes", "message"),
    [([3, 30], "nodes[1] [0, 30) 30"), ([-2], "nodes[0] -2"), ([0.5], "integers, got")],
)
@pytest.mark.parametrize("cached", [False, True])
def test_nodes_out_of_range_are_named(nodes, message, cached):
    cache = gs.FeatureCache(2) if cached else None
    buffer = gs.FeatureBuffer(placed(30, 1, None), table(30, 4, "f4"), cache=cache)
    with pytest.raises(ValueError, match=said(message)):
        buffer.read(np.array(nodes))
    assert not any(buffer.hits.values())


def test_what_does_not_fit_is_refused_in_one_line():
    features, placement = table(30, 4, "f4"), placed(30, 2, [[0, 1]], fingerprint="aaaaaaaaaaaaaaaa")
    buffer = gs.FeatureBuffer(placement, features, fingerprint="aaaaaaaaaaaaaaaa")
    for out in (np.empty((1, 4)), np.empty((2, 4), np.float32), np.empty((4, 1), np.float32).T[:, ::1][:, ::-1]):
        with pytest.raises(ValueError, match=said("out float32 (1, 4)")):
            buffer.read(np.array([1]), out)
    sparse = CSRFeatures(np.zeros(31, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), 4)
    cases = [
        (placement, features, {"fingerprint": "bbbb"}, PlacementError, "made for another store.*this store has bbbb"),
        (placement, table(31, 4, "f4"), {}, PlacementError, "is for 30 nodes, the features have 31 rows"),
        (placement, sparse, {}, PlacementError, r"they are sparse \(CSR\): store dense rows"),
        (placement, None, {}, PlacementError, "there are none"),
        (
            placement,
            features,
            {"memory_bytes": 48},
            PlacementError,
            r"6 rows of 16 bytes need 96 .*must be in \[1, 3\]",
        ),
        (placement, features, {"memory_bytes": 8}, PlacementError, "has 8 bytes, less than one row of 16"),
        (placement, features, {"device": 2}, ValueError, r"device must be in \[0, 2\), got 2"),
        (placement, features, {"host": "disk"}, ValueError, 'host must be "map" or "copy"'),
        (placement, features, {"on": "meta"}, ValueError, 'on must be "cpu", "cuda"'),
        (replace(placement, rows=(np.array([30]), placement.rows[1])), features, {}, PlacementError, "got 30 to 30"),
    ]
    for given_placement, given_features, options, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            gs.FeatureBuffer(given_placement, given_features, **options)
        assert "\n" not in str(caught.value)


def test_a_closed_buffer_keeps_its_counts_and_gathers_no_more():
    buffer = gs.FeatureBuffer(placed(30, 1, None), table(30, 4, "f4"))
    buffer.read(np.arange(30))
    hits = buffer.hits
    buffer.close()
    buffer.close()
    assert buffer.hits == hits and sum(hits.values()) == 30
    with pytest.raises(PlacementError, match="closed"):
        buffer.read(np.array([0]))


def test_belady_through_a_buffer_has_the_most_hits():
    features, placement = table(200, 4, "f4"), placed(200, 1, None, share=0.1)
    batches = [np.random.default_rng(i).permutation(200)[:60] for i in range(30)]
    hits = {}
    for policy in ("lru", "sieve", "belady"):
        buffer = gs.FeatureBuffer(placement, features, cache=gs.FeatureCache(40, policy))
        buffer.expect(batches)
        for batch in batches:
            buffer.read(batch)
        hits[policy] = buffer.hits["cache"]
    assert hits["belady"] >= max(hits["lru"], hits["sieve"]) and hits["belady"] > 1.2 * hits["lru"]
