"""Cache policies against plain Python, and Belady against every other choice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.placement import FeatureCache
from tests.oracles import row_cache
from tests.says import said

LIMIT, CACHE = 1 << 48, 2 << 48


def hits_of(trace, capacity, policy, batch=1, told=1.0, num_nodes=None):
    """Run a trace through a cache, written at once after each batch; return whether each read was a hit."""
    cache = FeatureCache(capacity, policy)
    num_nodes = num_nodes or max(trace) + 1
    cache.bind(num_nodes)
    places = np.arange(num_nodes)
    batches = [np.array(trace[i : i + batch]) for i in range(0, len(trace), batch)]
    cut = int(len(batches) * told)
    cache.expect(batches[:cut])
    held, hits = {}, []
    for i, nodes in enumerate(batches):
        if i == cut // 2:
            cache.expect(batches[cut:])  # the rest is told on the way
        reads = cache.resolve(nodes, places, LIMIT, CACHE)
        for node, place in zip(nodes, reads.places, strict=True):
            hits.append(bool(place >= CACHE))
            assert held[place - CACHE] == node if place >= CACHE else place == node
        for slot, position in zip(*cache.confirm(nodes, reads), strict=True):
            assert 0 <= slot < capacity
            held[int(slot)] = nodes[position]
    return hits


traces = st.lists(st.integers(0, 9), min_size=1, max_size=80)


@given(trace=traces, capacity=st.integers(1, 6))
def test_lru_and_sieve_equal_plain_python(trace, capacity):
    assert hits_of(trace, capacity, "lru") == row_cache.lru(trace, capacity)
    assert hits_of(trace, capacity, "sieve") == row_cache.sieve(trace, capacity)


@given(trace=traces, capacity=st.integers(1, 6), told=st.sampled_from([1.0, 0.5]))
def test_belady_has_at_least_the_hits_of_the_textbook_and_of_the_others(trace, capacity, told):
    full = sum(hits_of(trace, capacity, "belady"))
    assert full >= sum(row_cache.textbook_min(trace, capacity))
    assert full >= sum(hits_of(trace, capacity, "lru")) and full >= sum(hits_of(trace, capacity, "sieve"))
    assert full >= sum(hits_of(trace, capacity, "belady", told=told))


@given(trace=st.lists(st.integers(0, 5), min_size=1, max_size=14), capacity=st.integers(1, 3))
def test_belady_is_the_best_of_all_choices(trace, capacity):
    assert sum(hits_of(trace, capacity, "belady")) == row_cache.most_hits(trace, capacity)


@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from(["lru", "sieve", "belady"]))
def test_batches_of_distinct_nodes_are_read_one_after_the_other(seed, capacity, policy):
    random = np.random.default_rng(seed)
    trace = [int(node) for _ in range(8) for node in random.permutation(20)[:7]]
    assert hits_of(trace, capacity, policy, batch=7) == hits_of(trace, capacity, policy, batch=1)


def test_reads_in_another_order_than_told_are_taken_by_node():
    cache = FeatureCache(2, "belady")
    cache.bind(5)
    cache.expect([np.array([0, 1]), np.array([2, 0]), np.array([1, 0])])
    for nodes, places in (([2, 0], [2, 0]), ([0, 1], [CACHE, 1]), ([1, 0], [CACHE + 1, CACHE])):
        reads = cache.resolve(np.array(nodes), np.arange(5), LIMIT, CACHE)
        assert reads.places.tolist() == places
        cache.confirm(np.array(nodes), reads)
    assert cache.resolve(np.array([3]), np.arange(5), LIMIT, CACHE).slots.tolist() == [], "never told: not taken"
    cache.expect([np.array([3, 3])])
    assert len(cache.resolve(np.array([3]), np.arange(5), LIMIT, CACHE).slots) == 1
    cache.forget()
    cache.expect([np.array([4, 4])])
    assert len(cache.resolve(np.array([4]), np.arange(5), LIMIT, CACHE).slots) == 1


def test_rows_that_leave_before_they_are_written_are_not_written():
    cache = FeatureCache(1, "lru")
    cache.bind(4)
    nodes = np.array([0, 1, 1, 2, 1])
    reads = cache.resolve(nodes, np.arange(4), LIMIT, CACHE)
    assert reads.places.tolist() == nodes.tolist(), "nothing stands in a slot yet"
    slots, positions = cache.confirm(nodes, reads)
    assert set(nodes[positions]) == {1} and slots.tolist() == [0] * len(slots)
    assert cache.resolve(np.array([1]), np.arange(4), LIMIT, CACHE).places.tolist() == [CACHE]


def test_places_from_the_limit_on_pass_by():
    cache = FeatureCache(2, "lru")
    cache.bind(3)
    places = np.array([5, LIMIT, LIMIT + 7])
    for _ in range(2):
        reads = cache.resolve(np.array([1, 2]), places, LIMIT, CACHE)
        assert reads.places.tolist() == [LIMIT, LIMIT + 7] and len(reads.slots) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "capacity [1, 2**31) 0"),
        ((2.5,), "capacity must be an integer"),
        ((3, "fifo"), "policy lru sieve belady 'fifo'"),
    ],
)
def test_bad_arguments_give_one_line(arguments, message):
    with pytest.raises(ValueError, match=said(message)):
        FeatureCache(*arguments)


def test_a_cache_serves_one_buffer():
    cache = FeatureCache(1)
    cache.bind(3)
    with pytest.raises(ValueError, match=said("FeatureCache")):
        cache.bind(3)
