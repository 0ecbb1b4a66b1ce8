"""What a GPU does with a placement, its kernel in Triton's interpreter: the same rows and counts as on the CPU."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from buffer_cases import GROUPS, counted, placed, quantised_table, table
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.placement import cuda_tiers
from lightning_gnnscale.placement.cuda_tiers import CUDATiers, torch_dtype
from lightning_gnnscale.placement.placement import FIRST_DEVICE, RowLayout, group_of, row_places, tier_of_tables
from tests.says import said
from tests.tiers import all_pairs

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def tiers_of(placement, features, device, policy=None, capacity=5, ring_rows=4):
    """What FeatureBuffer makes on a GPU."""
    laid, host_ids = cuda_tiers.lay_here(RowLayout(placement, features.raw, copies_host=True), [device], DEVICE)
    group = {FIRST_DEVICE + peer for peer in group_of(placement, device)}
    tables = [rows if i < FIRST_DEVICE or i in group else None for i, rows in enumerate(laid)]
    cache = None
    if policy:
        cache = gs.FeatureCache(capacity, policy)
        cache.bind(placement.num_nodes)
    places = row_places(placement, device, host_ids)
    return CUDATiers(places, tables, features, cache, torch.device(DEVICE), ring_rows, ring_blocks=2)


def hits_of(tiers, placement, device):
    found = dict.fromkeys(("local", "peer", "host", "disk", "cache"), 0)
    for tier, count in zip(tier_of_tables(device, placement.num_devices), tiers.reads(), strict=True):
        found[tier] += int(count)
    return found


def same_bytes(got, features, nodes):
    return got.cpu().view(torch.uint8).numpy().tobytes() == features.array[nodes].tobytes()


@settings(max_examples=settings.default.max_examples // 4)
@given(
    num_nodes=st.integers(4, 40),
    dim=st.sampled_from([1, 3, 16, 63, 65]),
    dtype=st.sampled_from(["f4", "f2", "i1", "f8", "?"]),
    num_devices=st.sampled_from(sorted(GROUPS)),
    on_disk=st.sampled_from([0.0, 0.5, 1.0]),
    policy=st.sampled_from([None, "lru", "sieve", "belady"]),
    data=st.data(),
)
def test_every_placement_equals_indexing(num_nodes, dim, dtype, num_devices, on_disk, policy, data):
    features = table(num_nodes, dim, dtype)
    groups = data.draw(st.sampled_from(GROUPS[num_devices]))
    placement = placed(num_nodes, num_devices, groups, 0.2, on_disk)
    device = data.draw(st.integers(0, num_devices - 1))
    tiers = tiers_of(placement, features, device, policy)
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    batches = [random.integers(0, num_nodes, random.integers(0, 30)) for _ in range(3)]
    if policy:
        tiers.cache.expect([nodes[placement.dev_num[device][nodes] < 0] for nodes in batches])
    for nodes in batches:
        out = torch.ones(len(nodes), dim, device=DEVICE).to(tiers.dtype) if random.random() < 0.5 else None
        got = tiers.gather(torch.from_numpy(nodes) if random.random() < 0.5 else nodes, out)
        assert out is None or got is out
        assert got.dtype == tiers.dtype and same_bytes(got, features, nodes)
    expected, hits = counted(placement, device, np.concatenate(batches)), hits_of(tiers, placement, device)
    assert (hits["local"], hits["peer"]) == (expected["local"], expected["peer"])
    if policy is None:
        assert hits == {**expected, "cache": 0}
    assert hits["host"] + hits["disk"] + hits["cache"] == expected["host"] + expected["disk"]


@all_pairs
@pytest.mark.parametrize("bits", [8, 4, 16])
@pytest.mark.parametrize("dim", [1, 17, 64])
@pytest.mark.parametrize("policy", [None, "lru"])
@pytest.mark.parametrize("on_disk", [0.0, 0.5])
def test_rows_of_codes_lie_as_stored_and_come_decoded(bits, dim, policy, on_disk):
    features, plain = quantised_table(40, dim, bits)
    placement, random = placed(40, 2, [[0, 1]], 0.2, on_disk), np.random.default_rng(dim)
    tiers = tiers_of(placement, features, 1, policy)
    assert tiers.dtype == torch.float32 and tiers.cache_bytes == (5 * features.array.shape[1] if policy else 0)
    batches = [random.integers(0, 40, num) for num in (30, 0, 1, 29)]
    for nodes in batches:
        # Triton's interpreter cuts what it writes as bfloat16: what is bfloat16 already is not changed.
        for dtype in (None, torch.float32, torch.float16, torch.bfloat16 if bits == 16 else torch.float32):
            out = None if dtype is None else torch.ones(len(nodes), dim, dtype=dtype, device=DEVICE)
            got = tiers.gather(nodes, out).cpu()
            assert torch.equal(got, torch.from_numpy(plain[nodes]).to(got.dtype))
    expected = counted(placement, 1, np.concatenate([batch for batch in batches for _ in range(4)]))
    hits = hits_of(tiers, placement, 1)
    assert (hits["local"], hits["peer"]) == (expected["local"], expected["peer"])
    assert hits["cache"] > 0 or policy is None


@pytest.mark.parametrize("policy", ["lru", "sieve", "belady"])
def test_the_cache_hits_as_it_does_on_the_cpu(policy):
    features, placement = table(60, 8, "f4"), placed(60, 1, None, share=0.2, on_disk=0.5)
    batches = [np.random.default_rng(i).permutation(60)[:25] for i in range(6)]
    tiers = tiers_of(placement, features, 0, policy, capacity=12)
    tiers.cache.expect([nodes[placement.dev_num[0][nodes] < 0] for nodes in batches])
    buffer = gs.FeatureBuffer(placement, features, cache=gs.FeatureCache(12, policy))
    buffer.expect(batches)
    for nodes in batches:
        assert same_bytes(tiers.gather(nodes, None), features, nodes)
        buffer.read(nodes)
    assert hits_of(tiers, placement, 0) == buffer.hits and buffer.hits["cache"] > 0


def test_cached_rows_are_read_from_the_cache():
    features, placement = table(30, 4, "f4"), placed(30, 1, None, on_disk=1.0)
    expected, far = features.array.copy(), np.flatnonzero(placement.dev_num[0] < 0)
    tiers = tiers_of(placement, features, 0, "lru", capacity=30)
    tiers.gather(far, None)
    features.array[:] = 0
    assert tiers.gather(far, None).cpu().numpy().tobytes() == expected[far].tobytes()


def test_threads_share_the_ring():
    features, placement = table(200, 4, "f4"), placed(200, 1, None, on_disk=0.7)
    tiers = tiers_of(placement, features, 0, ring_rows=9)
    batches = [np.random.default_rng(i).permutation(200)[:60] for i in range(8)]
    staged = tiers._stage  # the interpreter of Triton is for one thread: the kernel's part is checked above
    tiers._launch = lambda *_: None

    def work(nodes):
        out = torch.zeros(len(nodes), 4, device=DEVICE)
        staged(tiers._host_places[nodes], nodes, out)
        on_disk = placement.dev_num[0][nodes] == -2
        return same_bytes(out[torch.from_numpy(on_disk)], features, nodes[on_disk])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, batches))


def test_what_does_not_fit_is_refused():
    for on_disk in (0.0, 0.5):
        tiers = tiers_of(placed(30, 1, None, on_disk=on_disk), table(30, 4, "f4"), 0)
        with pytest.raises(ValueError, match=said("nodes[1] [0, 30) 30")):
            tiers.gather(np.array([1, 30]), None)
        with pytest.raises(ValueError, match=said("out torch.float32 (1, 4)")):
            tiers.gather(np.array([1]), torch.empty(1, 4, dtype=torch.float64))
        with pytest.raises(ValueError, match=said("float32 (1, 4)")):
            tiers.gather(np.array([1]), np.empty((1, 4), np.float32))
    with pytest.raises(PlacementError, match=said("GPU float32")):
        torch_dtype(np.dtype("M8[s]"))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [None, "sieve"])
def test_a_gpu_reads_every_tier(policy):
    features, placement = table(20000, 64, "f4"), placed(20000, 2, [[0, 1]], share=0.2, on_disk=0.5)
    caches = [gs.FeatureCache(500, policy) for _ in range(2)] if policy else None
    buffers = gs.FeatureBuffer.in_one_process(placement, features, on="cuda:0", caches=caches)
    for device, buffer in enumerate(buffers):
        nodes = np.random.default_rng(device).integers(0, 20000, 9000)
        for asked in (nodes, torch.from_numpy(nodes), torch.from_numpy(nodes).cuda()):
            assert same_bytes(buffer.read(asked), features, nodes)
        expected, hits = counted(placement, device, np.tile(nodes, 3)), buffer.hits
        assert (hits["local"], hits["peer"]) == (expected["local"], expected["peer"])
        assert hits["host"] + hits["disk"] + hits["cache"] == expected["host"] + expected["disk"]
        buffer.close()


@pytest.mark.gpu
def test_threads_on_a_gpu_gather_on_streams_of_their_own():
    features, placement = table(20000, 64, "f4"), placed(20000, 1, None, share=0.2, on_disk=0.5)
    buffer = gs.FeatureBuffer(placement, features, on="cuda:0", cache=gs.FeatureCache(700, "lru"))
    batches = [np.random.default_rng(i).permutation(20000)[:5000] for i in range(40)]

    def work(nodes):
        with torch.cuda.stream(torch.cuda.Stream()):
            return same_bytes(buffer.read(nodes), features, nodes)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, batches))


@pytest.mark.gpu
def test_a_buffer_larger_than_the_gpu_is_refused():
    features = table(100, 4, "f4")
    with pytest.raises(PlacementError, match=said("buffer_rows [1, 2]")):
        gs.FeatureBuffer(placed(100, 1, None), features, on="cuda:0", memory_bytes=40)


def test_a_lone_process_joins_itself():
    features, placement = table(30, 4, "f4"), placed(30, 1, None)
    layout = RowLayout(placement, features, copies_host=True)
    tables, host_ids = cuda_tiers.lay_jointly(layout, 0, [0], lambda own: [own], None, DEVICE)
    tiers = CUDATiers(row_places(placement, 0, host_ids), tables, features, None, torch.device(DEVICE))
    assert same_bytes(tiers.gather(np.arange(30), None), features, np.arange(30))


def test_rows_of_a_peer_are_on_its_gpu_as_this_process_numbers_it(monkeypatch):
    """The peer's GPU is its number 0, and number 2 here; or not seen at all."""
    made = []
    monkeypatch.setattr(cuda_tiers, "rebuild_cuda_tensor", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(cuda_tiers, "gpus_seen", lambda uuids: [torch.device("cuda", 2)] if uuids == ["b"] else [None])
    arguments = tuple(range(15))
    cuda_tiers.taken_over("b", cuda_tiers.rebuild_cuda_tensor, arguments)
    assert made == [(*arguments[:6], 2, *arguments[7:])]
    with pytest.raises(PlacementError, match=said("GPU c CUDA_VISIBLE_DEVICES groups")):
        cuda_tiers.taken_over("c", cuda_tiers.rebuild_cuda_tensor, arguments)
    rows = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert torch.equal(cuda_tiers.taken_over(*cuda_tiers.handed_over(rows)), rows)
