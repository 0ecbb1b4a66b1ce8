import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel import weighted_graph
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads, num_cores, share_of


@given(
    degrees=st.lists(st.sampled_from([0, 0, 1, 2, 3, 50]), max_size=30),
    first=st.integers(0, 5),
    num_threads=st.integers(1, 5),
    min_entries=st.integers(1, 20),
)
def test_every_row_is_covered_once_in_order(degrees, first, num_threads, min_entries):
    indptr = first + np.cumsum([0, *degrees])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighted_graph, "MIN_ENTRIES", min_entries)
        threads = RowThreads(num_threads)
        ranges = threads.run(lambda start, stop, extra: (int(start), int(stop), extra), indptr, "more")
        threads.close()
    assert len(ranges) == max(1, min(num_threads, sum(degrees) // min_entries))
    assert [row for start, stop, _ in ranges for row in range(start, stop)] == list(range(len(degrees)))
    assert {extra for *_, extra in ranges} == {"more"}


def test_ranges_have_about_equal_entries(monkeypatch):
    monkeypatch.setattr(weighted_graph, "MIN_ENTRIES", 1)
    degrees = np.random.default_rng(0).integers(0, 20, 1_000)
    threads = RowThreads(4)
    sums = threads.run(lambda start, stop: int(degrees[start:stop].sum()), np.append(0, np.cumsum(degrees)))
    threads.close()
    assert sum(sums) == degrees.sum()
    assert max(sums) - min(sums) <= 2 * 20


@pytest.mark.parametrize(("num_entries", "num_shares"), [(0, 1), (19, 1), (20, 2), (1_000, 3)])
def test_every_share_is_called_once_and_every_node_has_one(monkeypatch, num_entries, num_shares):
    monkeypatch.setattr(weighted_graph, "MIN_ENTRIES", 10)
    threads = RowThreads(3)
    shares = threads.share(lambda share, among, extra: (share, among, extra), num_entries, "more")
    threads.close()
    assert shares == [(share, num_shares, "more") for share in range(num_shares)]
    owners = np.array([share_of(node, num_shares) for node in range(10_000)])
    assert set(owners) == set(range(num_shares))
    assert np.bincount(owners).max() < 1.2 * 10_000 / num_shares


def test_several_run_at_a_time_and_end_with_close():
    before = threading.active_count()
    threads, meeting = RowThreads(3), threading.Barrier(3)
    assert sorted(threads.map(lambda item: (meeting.wait(timeout=60), item)[1], range(3))) == [0, 1, 2]
    assert threading.active_count() == before + 2  # the caller is the third
    threads.close()
    assert threading.active_count() == before
    threads.close()
    assert threads.map(lambda item: item + 1, [1, 2]) == [2, 3]
    threads.close()


def test_an_error_in_a_thread_reaches_the_caller():
    threads = RowThreads(2)
    with pytest.raises(ZeroDivisionError):
        threads.map(lambda item: 1 // item, [1, 0])
    threads.close()


def test_an_error_ends_what_runs_and_begins_no_more():
    threads, begun = RowThreads(2), []

    def fail_on_the_first(item):
        begun.append(item)
        if item == 0:
            raise ZeroDivisionError
        time.sleep(0.2)

    with pytest.raises(ZeroDivisionError):
        threads.map(fail_on_the_first, range(50))
    now = len(begun)
    time.sleep(0.3)
    assert len(begun) == now < 50
    threads.close()


def test_as_many_threads_as_cores_at_most(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    monkeypatch.setattr(weighted_graph.numba.config, "NUMBA_NUM_THREADS", 8)
    assert num_cores() == RowThreads().num_threads == 3
    monkeypatch.setattr(weighted_graph.numba.config, "NUMBA_NUM_THREADS", 2)
    assert num_cores() == RowThreads().num_threads == 2
    assert RowThreads(7).num_threads == 7
