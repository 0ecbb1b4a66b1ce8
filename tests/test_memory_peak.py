"""The watcher of memory: what counts between two samples, what started processes share, and what it may cost."""

from pathlib import Path

import pytest

from lightning_gnnscale import memory_peak
from lightning_gnnscale.memory import MemoryCounters, descendants, memory_counters, resident_bytes, stack_start
from lightning_gnnscale.memory_peak import MemoryPeak

ROOT, CHILD, OTHER = 1, 2, 3
on_linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")


@pytest.fixture
def kernel(monkeypatch):
    """Processes as the kernel would tell of them: counters, stacks, and what each holds with pages shared out."""
    told = {"counters": {}, "stacks": {}, "own": {}, "walks": 0}

    def walk(pid):
        told["walks"] += 1
        return told["own"][pid]

    monkeypatch.setattr(memory_peak.os, "getpid", lambda: ROOT)
    monkeypatch.setattr(memory_peak, "descendants", lambda pid: [one for one in told["counters"] if one != pid])
    monkeypatch.setattr(memory_peak, "memory_counters", lambda pid: told["counters"].get(pid))
    monkeypatch.setattr(memory_peak, "stack_start", lambda pid: told["stacks"].get(pid, pid))
    monkeypatch.setattr(memory_peak, "shared_out_bytes", walk)
    monkeypatch.setattr(memory_peak, "_listing", memory_peak._Budget(1.0, 0.0))
    monkeypatch.setattr(memory_peak, "_settling", memory_peak._Budget(0.0, 1.0))  # nothing is affordable
    return told


@pytest.mark.parametrize(
    ("before", "now", "peak"),
    [
        ((100, 50, 150), (100, 50, 400), 350),  # rose to 400, of which 50 file-backed
        ((100, 50, 150), (100, 250, 400), 150),  # the file was read, nothing else
        ((100, 250, 350), (100, 50, 400), 150),  # and was let go
        ((100, 50, 900), (100, 50, 900), 100),  # an earlier peak
        ((100, 50, 150), (300, 50, 350), 300),
        ((100, 0, 0), (300, 0, 0), 300),  # a system without the mark
    ],
)
def test_the_kernels_mark_tells_of_a_peak_between_two_samples(kernel, before, now, peak):
    kernel["counters"] = {ROOT: MemoryCounters(*before)}
    with MemoryPeak(interval_s=60) as watched:
        kernel["counters"] = {ROOT: MemoryCounters(*now)}
        assert (watched.start_bytes, watched.update()) == (100, peak)


def test_a_forked_process_counts_what_it_grows_by_and_another_one_all(kernel):
    kernel["counters"] = {ROOT: MemoryCounters(1000, 0, 0)}
    with MemoryPeak(interval_s=60) as peak:
        kernel["counters"] |= {CHILD: MemoryCounters(1000, 0, 0), OTHER: MemoryCounters(200, 0, 0)}
        kernel["stacks"] = {CHILD: ROOT}
        assert peak.update() == 1200
        kernel["counters"][CHILD] = MemoryCounters(1300, 0, 0)
        assert peak.update() == 1500
        del kernel["counters"][CHILD]
        assert peak.update() == 1500
        kernel["counters"][OTHER] = MemoryCounters(900, 0, 0)
        assert peak.update() == 1900
    assert kernel["walks"] == 0


def test_what_is_shared_is_settled_where_that_is_affordable(kernel, monkeypatch):
    kernel["counters"] = {pid: MemoryCounters(1000, 0, 0) for pid in (ROOT, CHILD, OTHER)}
    kernel["own"] = {ROOT: 400, CHILD: 400, OTHER: 700}  # all three share 300, and the first two 600
    monkeypatch.setattr(memory_peak, "_settling", memory_peak._Budget(1.0, 0.0))
    with MemoryPeak(interval_s=60) as peak:
        assert peak.start_bytes == 1500
        kernel["counters"][OTHER] = MemoryCounters(1100, 0, 0)
        memory_peak._settling.spent_s = 1e9
        walks = kernel["walks"]
        assert peak.update() == pytest.approx(1600, abs=2)
    assert kernel["walks"] == walks


def test_work_waits_until_it_is_earned(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(memory_peak.time, "monotonic", lambda: now[0])
    budget = memory_peak._Budget(0.01, unit_s=0.5)
    assert not budget.affords(1)
    now[0] = 50
    assert budget.affords(1) and not budget.affords(2)
    monkeypatch.setattr(memory_peak.time, "thread_time", iter([0.0, 0.4]).__next__)
    with budget.spending(2):
        pass
    assert budget.affords(0) and not budget.affords(1)  # a unit took 0.2 s, and 0.52 s are earned


def test_samples_become_rarer_as_they_cost_more(kernel, monkeypatch):
    kernel["counters"] = {ROOT: MemoryCounters(1, 0, 0)}
    peak, pauses = MemoryPeak(interval_s=0.05), []
    monkeypatch.setattr(peak._stop, "wait", lambda pause: pauses.append(pause) or len(pauses) > 2)
    times = iter([0.0, 1e-6, 1.0, 1.001])
    monkeypatch.setattr(peak, "_find_processes", lambda: None)
    monkeypatch.setattr(memory_peak.time, "thread_time", lambda: next(times))
    peak._watch()
    assert pauses == pytest.approx([0.05, 0.05, 1.0])


def test_one_process_is_watched_alone(kernel):
    kernel["counters"] = {ROOT: MemoryCounters(100, 0, 0), CHILD: MemoryCounters(1000, 0, 0)}
    with MemoryPeak(interval_s=60, alone=True) as peak:
        assert peak.update() == 100


@on_linux
def test_the_kernels_counters_are_read():
    pid = memory_peak.os.getpid()
    counters = memory_counters(pid)
    assert 0 < counters.held < counters.resident
    assert counters.highest == 0 or counters.highest >= counters.held
    assert memory_counters(2**22 + 1) is None and descendants(2**22 + 1) == [] and stack_start(2**22 + 1) == 0
    assert resident_bytes(2**22 + 1) == 0
    block = b"1" * (64 << 20)
    assert memory_counters(pid).held >= counters.held + (48 << 20) and block


@on_linux
def test_a_process_is_told_apart_by_its_stack():
    pid = memory_peak.os.getpid()
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if "[stack]" in line)
    low, high = (int(word, 16) for word in line.split()[0].split("-"))
    assert low <= stack_start(pid) < high
