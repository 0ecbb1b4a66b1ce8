"""The row cache whose contents workers know: never a wrong row, bounded memory, whatever order things come in."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import row_cache

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partition_store.features import CSRFeatures
from lightning_gnnscale.remote import CacheUpdate, TrainerCache, WorkerView
from lightning_gnnscale.remote.cache_contents import heaviest_first
from lightning_gnnscale.remote.versioned_cache import NOTHING
from tests.says import said

NUM_NODES, DIM = 24, 3
TABLE = np.random.default_rng(0).random((NUM_NODES, DIM), np.float32)
WORKERS = ("a", "b", "c")


def answered(cache: TrainerCache, view: WorkerView, worker, union) -> np.ndarray:
    """One request, answered at once."""
    union = np.asarray(union)
    update = cache.begin(worker)
    version, missing = view.missing(update, union)
    return cache.complete(update.request, version, union, missing, TABLE[union[missing]])


def contents(cache: TrainerCache) -> set[int]:
    """What a worker that knows nothing is reported."""
    update = cache.begin("asks")
    cache.forget("asks")
    return set(update.contents.tolist())


class Traffic:
    """Workers, requests on their way, answers on their way: in any order, lost, doubled, late."""

    def __init__(self, policy: str, capacity: int, spare: int):
        self.cache = TrainerCache(NUM_NODES, capacity, DIM, np.float32, policy, spare)
        self.views = {worker: WorkerView(NUM_NODES) for worker in WORKERS}
        self.requests: list[tuple[str, CacheUpdate]] = []
        self.answers: list[tuple] = []
        self.open: dict[int, str] = {}
        self.history = {0: set()}

    def ask(self, worker: str) -> None:
        update = self.cache.begin(worker)
        self.open[update.request] = worker
        self.requests.append((worker, update))

    def answer(self, which: int, union: list[int], packed: bool) -> None:
        """A worker answers one of the requests that reached it, maybe not the first, maybe once more."""
        if not self.requests:
            return
        worker, update = self.requests[which % len(self.requests)]
        if which % 5:
            self.requests.remove((worker, update))
        union = np.array(union, np.int64)
        version, missing = self.views[worker].missing(update, union)
        known = set(np.flatnonzero(self.views[worker]._cached).tolist())
        assert known == (set() if version == NOTHING else self.history[version])
        rows = TABLE[union[missing]]
        self.answers.append((update.request, version, union, np.packbits(missing) if packed else missing, rows, known))

    def take(self, which: int) -> None:
        """The trainer takes one of the answers, maybe once more."""
        if not self.answers:
            return
        request, version, union, missing, rows, _ = self.answers[which % len(self.answers)]
        if which % 4:
            del self.answers[which % len(self.answers)]
        weight = None if which % 3 else union % 7
        out = self.cache.complete(request, version, union, missing, rows, weight=weight)
        if self.open.pop(request, None) is None:
            assert out is None
        else:
            assert out.tobytes() == TABLE[union].tobytes()
        self.history[self.cache.version] = set(self.cache._contents.ids().tolist())

    def die(self, worker: str, loses_requests: bool) -> None:
        """A worker ends; its answers under way may still come. Another one comes in its place."""
        self.cache.forget(worker)
        self.views[worker] = WorkerView(NUM_NODES)
        self.open = {request: own for request, own in self.open.items() if own != worker}
        if loses_requests:
            self.requests = [item for item in self.requests if item[0] != worker]

    def restart(self, worker: str) -> None:
        """A worker is started again, and nobody says so."""
        self.views[worker] = WorkerView(NUM_NODES)

    def cancel(self, which: int) -> None:
        if self.open:
            request = list(self.open)[which % len(self.open)]
            self.cache.cancel(request)
            del self.open[request]

    def check(self) -> None:
        cache = self.cache
        assert 0 <= cache.num_rows <= cache.capacity_rows
        assert 0 <= cache.num_retained <= cache.spare_rows
        held = cache._contents._slot_of
        assert np.count_nonzero(held >= 0) == cache.num_rows + cache.num_retained
        for request, _, _, _, _, known in self.answers:
            if request in self.open:
                assert all(held[node] >= 0 for node in known)
        assert cache.open_requests == len(self.open)
        if not self.open:
            assert cache.num_retained == 0


STEPS = {"ask": 8, "answer": 8, "take": 8, "die": 1, "restart": 1, "cancel": 1}


def random_step(rng: random.Random) -> tuple:
    """A step of the traffic; small ids are read most."""
    action = rng.choices(list(STEPS), STEPS.values())[0]
    worker, number = rng.choice(WORKERS), rng.randrange(1000)
    union = list(dict.fromkeys(int(NUM_NODES * rng.random() ** 2) for _ in range(rng.randrange(12))))
    arguments = {
        "ask": (worker,),
        "answer": (number, union, rng.random() < 0.5),
        "take": (number,),
        "die": (worker, rng.random() < 0.5),
        "restart": (worker,),
        "cancel": (number,),
    }
    return action, *arguments[action]


@given(st.sampled_from(["lru", "sieve"]), st.integers(1, 9), st.integers(1, 5), st.integers(0, 1 << 32))
def test_no_interleaving_returns_a_wrong_row_or_exceeds_the_memory(policy, capacity, spare, seed):
    traffic, rng = Traffic(policy, capacity, spare), random.Random(seed)
    for _ in range(250):
        action, *arguments = random_step(rng)
        getattr(traffic, action)(*arguments)
        traffic.check()
    traffic.requests.clear()
    for worker in WORKERS:  # whatever happened, the next request is served
        traffic.ask(worker)
        traffic.answer(1, [0, 5, 7, 9, 11], False)
        traffic.answers = traffic.answers[-1:]
        traffic.take(1)


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_alone_it_keeps_what_the_policy_keeps(policy):
    rng = np.random.default_rng(3)
    cache, view = TrainerCache(NUM_NODES, 6, DIM, np.float32, policy), WorkerView(NUM_NODES)
    trace, policy_hits = [], getattr(row_cache, policy)
    for _ in range(15):
        union = np.array(list(dict.fromkeys((NUM_NODES * rng.random(12) ** 2).astype(int).tolist())))
        known, before = contents(cache), cache.counts.rows_sent
        assert answered(cache, view, "a", union).tobytes() == TABLE[union].tobytes()
        assert cache.counts.rows_sent - before == len(set(union.tolist()) - known)
        trace += union[::-1].tolist()
        assert contents(cache) == {node for node in range(NUM_NODES) if policy_hits([*trace, node], 6)[-1]}


def test_of_a_union_the_heaviest_rows_stay():
    weight = np.array([3, 0, 5, 2, 400, 7, 7, 1], np.int32)
    for policy in ("lru", "sieve"):
        cache, view = TrainerCache(NUM_NODES, 3, DIM, np.float32, policy), WorkerView(NUM_NODES)
        update, union = cache.begin("a"), np.arange(10, 18)
        version, missing = view.missing(update, union)
        out = cache.complete(update.request, version, union, missing, TABLE[union], weight=weight)
        assert out.tobytes() == TABLE[union].tobytes()
        assert contents(cache) == {14, 15, 16}
        answered(cache, view, "a", [14, 16])  # and the rows are theirs


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.data())
def test_the_heaviest_come_first(weights, data):
    most = data.draw(st.integers(0, len(weights)))
    weight = np.array(weights, np.float64)
    order = heaviest_first(weight, most)
    assert len(set(order.tolist())) == most
    left = np.delete(weight, order)
    assert not len(left) or not most or weight[order].min() >= left.max() * 0.88  # within one of eight steps an octave


def test_only_missing_rows_travel_and_all_is_counted():
    cache, view = TrainerCache(NUM_NODES, 8, DIM, np.float32), WorkerView(NUM_NODES)
    answered(cache, view, "a", [1, 2, 3])
    answered(cache, view, "a", [2, 3, 4, 5])
    answered(cache, view, "a", np.array([5, 1], np.int32))
    row = DIM * 4
    counts = cache.counts
    assert (counts.requests, counts.rows_asked, counts.rows_sent) == (3, 9, 5)
    assert (counts.asked_bytes, counts.sent_bytes) == (9 * row, 5 * row)
    assert counts.update_bytes == 4 * (3 + 2)  # ids added by the first and by the second answer


def test_a_worker_far_behind_gets_the_whole_contents():
    cache, near, far = TrainerCache(NUM_NODES, 4, DIM, np.float32), WorkerView(NUM_NODES), WorkerView(NUM_NODES)
    answered(cache, far, "far", [0, 1])
    for start in range(8):
        answered(cache, near, "near", range(start, start + 4))
    update = cache.begin("far")
    assert set(update.contents.tolist()) == {7, 8, 9, 10} and update.changes == ()
    assert update.num_bytes == 16
    assert far.missing(update, np.arange(12)).mask.tolist() == [not 7 <= node <= 10 for node in range(12)]


def test_a_slow_worker_holds_back_no_more_than_the_spare_rows():
    cache, views = TrainerCache(NUM_NODES, 4, DIM, np.float32, spare_rows=2), [WorkerView(NUM_NODES) for _ in "ab"]
    answered(cache, views[0], "a", [0, 1, 2, 3])
    slow = cache.begin("b")
    for start in (4, 8, 12):
        answered(cache, views[0], "a", range(start, start + 4))
    assert cache.num_rows == 4 and cache.num_retained == 2
    assert len(contents(cache) & {0, 1, 2, 3}) == 2  # two gave way, then contents stood still
    union = np.arange(4)
    version, missing = views[1].missing(slow, union)
    assert not missing.any()
    assert cache.complete(slow.request, version, union, missing, TABLE[:0]).tobytes() == TABLE[:4].tobytes()
    answered(cache, views[0], "a", [12, 13, 14, 15])
    assert contents(cache) == {12, 13, 14, 15}


def test_nothing_piles_up_while_contents_stand_still():
    cache, view = TrainerCache(NUM_NODES, 4, DIM, np.float32), WorkerView(NUM_NODES)
    waiting = [cache.begin("b") for _ in range(2)]  # never answered
    for _ in range(20):
        answered(cache, view, "a", [0, 1, 2, 3])
    assert cache.version == 1 and len(cache._changes) <= 1 and not cache._contents._dropped
    cache.forget("b")
    assert cache.complete(waiting[0].request, 0, np.arange(2), np.ones(2, bool), TABLE[:2]) is None
    assert cache.counts.unwanted == 1 and not cache._changes


def test_what_the_contents_of_another_trainer_are_does_not_count():
    view = WorkerView(NUM_NODES)
    one, other = (TrainerCache(NUM_NODES, 8, DIM, np.float32) for _ in range(2))
    answered(one, view, "a", [1, 2, 3])
    answered(one, view, "a", [1, 2, 3])
    assert answered(other, view, "a", [1, 2, 3]).tobytes() == TABLE[1:4].tobytes()
    assert answered(one, view, "a", [1, 2, 3]).tobytes() == TABLE[1:4].tobytes()


def test_sparse_rows_come_back_bit_for_bit():
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 6, NUM_NODES)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.concatenate([np.sort(rng.choice(30, length, replace=False)) for length in lengths]).astype(np.int32)
    table = CSRFeatures(indptr, indices, rng.random(indptr[-1]).astype(np.float16), 30)
    cache = TrainerCache(NUM_NODES, 6, 30, np.float16, sparse_width=int(lengths.max()))
    view = WorkerView(NUM_NODES)
    for _ in range(30):
        union = rng.permutation(NUM_NODES)[:8]
        update = cache.begin("a")
        version, missing = view.missing(update, union)
        out = cache.complete(update.request, version, union, missing, table.read(union[missing]))
        expected = table.read(union)
        for name in ("indptr", "indices", "data"):
            assert getattr(out, name).tobytes() == getattr(expected, name).tobytes()
            assert getattr(out, name).dtype == getattr(expected, name).dtype
    assert cache.counts.rows_sent < cache.counts.rows_asked
    assert cache.counts.sent_bytes < cache.counts.asked_bytes


def test_answers_from_several_threads():
    rng = np.random.default_rng(6)
    cache, wrong = TrainerCache(NUM_NODES, 8, DIM, np.float32, spare_rows=2), []
    unions = {worker: [rng.permutation(NUM_NODES)[:9] for _ in range(200)] for worker in WORKERS}

    def work(worker):
        view = WorkerView(NUM_NODES)
        for union in unions[worker]:
            if answered(cache, view, worker, union).tobytes() != TABLE[union].tobytes():
                wrong.append(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in WORKERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.counts.requests == 600


def test_wrong_answers_are_refused_and_the_request_stays_open():
    cache, view = TrainerCache(NUM_NODES, 4, DIM, np.float32), WorkerView(NUM_NODES)
    answered(cache, view, "a", [1, 2])
    update, union, none = cache.begin("a"), np.array([1, 9]), np.zeros(2, bool)
    with pytest.raises(GNNScaleError, match=said("row node 9")):
        cache.complete(update.request, 1, union, none, TABLE[:0])
    with pytest.raises(GNNScaleError, match=said("row node 1")):
        cache.complete(update.request, NOTHING, union, np.array([False, True]), TABLE[9:10])
    with pytest.raises(GNNScaleError, match=said("version 7 row cache [1, 1]")):
        cache.complete(update.request, 7, union, none, TABLE[:0])
    with pytest.raises(ValueError, match=said("1 missing ones 2 3")):
        cache.complete(update.request, 1, union, np.array([False, True]), TABLE[:3])
    with pytest.raises(ValueError, match=said("float32 (num, 3) float64")):
        cache.complete(update.request, 1, union, np.array([False, True]), TABLE[9:10].astype(float))
    with pytest.raises(ValueError, match=said("ids [0, 24) 1 24")):
        cache.complete(update.request, 1, np.array([1, 24]), np.array([False, True]), TABLE[9:10])
    with pytest.raises(ValueError, match=said("weight 2 rows 3")):
        cache.complete(update.request, 1, union, np.array([False, True]), TABLE[9:10], weight=np.ones(3))
    out = cache.complete(update.request, 1, union, np.array([False, True]), TABLE[9:10])
    assert out.tobytes() == TABLE[union].tobytes()
    for options, match in (
        ({"capacity_rows": 0}, "capacity_rows must be an integer of at least 1, got 0"),
        ({"spare_rows": 0}, "spare_rows must be an integer of at least 1, got 0"),
        ({"policy": "fifo"}, "policy must be one of lru, sieve, got 'fifo'"),
        ({"capacity_rows": 1 << 31}, "must be below"),
    ):
        with pytest.raises(ValueError, match=match):
            TrainerCache(**{"num_nodes": 4, "capacity_rows": 2, "dim": 1, "dtype": np.uint8} | options)


def test_a_hub_keeps_the_rows_of_highest_degree():
    """As the benchmark that measures the cache does."""
    import asyncio

    from ray_world import WORLD, make_loader

    from lightning_gnnscale.remote import pack_group
    from lightning_gnnscale.remote.messages import GroupHeader, GroupPayload, Table
    from lightning_gnnscale.remote.ray_coordinator import CoordinatorCaches

    group = pack_group(list(make_loader(features=None))[:8])
    caches, table = CoordinatorCaches(4, "lru"), Table("table", len(WORLD.labels), 2, "float32")
    update = caches.begin(table, 0)
    rows = np.random.default_rng(0).normal(size=(len(group.union), 2)).astype(np.float32)
    payload = GroupPayload(group, np.ones(len(group.union), bool), rows)
    whole = asyncio.run(caches.complete(table, update, GroupHeader([], [], version=NOTHING), payload))
    assert np.array_equal(whole.rows, rows)
    kept = caches.begin(table, 0).contents
    degree = dict(zip(group.union.tolist(), group.weight.tolist(), strict=True))
    assert min(degree[node] for node in kept.tolist()) >= sorted(degree.values())[-len(kept)] * 0.9
