"""The watcher of memory: what counts between two samples, what started processes share, and what it may cost."""

import mmap
from pathlib import Path

import pytest

from lightning_gnnscale import memory_peak
from lightning_gnnscale.memory import Counters, counters, descendants, resident_bytes
from lightning_gnnscale.memory_peak import MemoryPeak

ROOT, CHILD, OTHER = 1, 2, 3
on_linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")


@pytest.fixture
def kernel(monkeypatch):
    """Processes as the kernel would tell of them: counters, and what each holds with pages shared out."""
    told = {"counters": {}, "own": {}, "walks": 0}

    def walk(pid):
        told["walks"] += 1
        return told["own"][pid]

    monkeypatch.setattr(memory_peak.os, "getpid", lambda: ROOT)
    monkeypatch.setattr(memory_peak, "descendants", lambda pid: [one for one in told["counters"] if one != pid])
    monkeypatch.setattr(memory_peak, "counters", lambda pid: told["counters"].get(pid))
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
    kernel["counters"] = {ROOT: Counters(*before)}
    with MemoryPeak(interval_s=60) as watched:
        kernel["counters"] = {ROOT: Counters(*now)}
        assert (watched.start_bytes, watched.update()) == (100, peak)


def test_a_forked_process_counts_what_it_grows_by_and_another_one_all(kernel):
    kernel["counters"] = {ROOT: Counters(1000, stack_start=17)}
    with MemoryPeak(interval_s=60) as peak:
        kernel["counters"] |= {CHILD: Counters(1000, stack_start=17), OTHER: Counters(200, stack_start=18)}
        assert peak.update() == 1200
        kernel["counters"][CHILD] = Counters(1300)
        assert peak.update() == 1500
        del kernel["counters"][CHILD]
        assert peak.update() == 1500
        kernel["counters"][OTHER] = Counters(900)
        assert peak.update() == 1900
    assert kernel["walks"] == 0


def test_what_is_shared_is_settled_where_that_is_affordable(kernel, monkeypatch):
    kernel["counters"] = {pid: Counters(1000) for pid in (ROOT, CHILD, OTHER)}
    kernel["own"] = {ROOT: 400, CHILD: 400, OTHER: 700}  # all three share 300, and the first two 600
    monkeypatch.setattr(memory_peak, "_settling", memory_peak._Budget(1.0, 0.0))
    with MemoryPeak(interval_s=60) as peak:
        assert peak.start_bytes == 1500
        kernel["counters"][OTHER] = Counters(1100)
        memory_peak._settling.spent_s = 1e9
        walks = kernel["walks"]
        assert peak.update() == pytest.approx(1600, abs=2)
    assert kernel["walks"] == walks


def test_work_waits_until_it_is_earned(monkeypatch):
    budget = memory_peak._Budget(0.01, unit_s=0.5)
    assert not budget.affords(1)
    budget.run_s = 50
    assert budget.affords(1) and not budget.affords(2)
    monkeypatch.setattr(memory_peak.time, "thread_time", iter([0.0, 0.4]).__next__)
    with budget.spending(2):
        pass
    assert budget.affords(0) and not budget.affords(1)  # a unit took 0.2 s, and 0.56 s are earned


def test_what_is_watched_earns_by_the_cpu_time_of_all_its_processes(kernel):
    kernel["counters"] = {ROOT: Counters(1, cpu_s=5), CHILD: Counters(1, cpu_s=7)}
    with MemoryPeak(interval_s=60) as peak:
        assert memory_peak._settling.run_s == memory_peak._listing.run_s == 0
        kernel["counters"] = {ROOT: Counters(1, cpu_s=6), CHILD: Counters(1, cpu_s=10)}
        peak.update()
        assert memory_peak._settling.run_s == memory_peak._listing.run_s == 4
        del kernel["counters"][CHILD]
        peak.update()
        assert memory_peak._settling.run_s == 4


@pytest.mark.parametrize(
    ("sample_s", "worked_s", "expected"),
    [
        (1e-6, 1.0, 0.05),
        (1e-3, 1.0, 1.0),  # a thousandth
        (1e-3, 0.25, 4.0),  # of what has worked a quarter of the time
        (1e-3, 8.0, 1.0),
        (1e-3, 0.0, 20.0),
    ],
)
def test_samples_become_rarer_as_they_cost_more(kernel, monkeypatch, sample_s, worked_s, expected):
    peak, pauses = MemoryPeak(interval_s=0.05), []
    monkeypatch.setattr(peak._stop, "wait", lambda pause: pauses.append(pause) or len(pauses) > 1)
    monkeypatch.setattr(peak, "_sample", lambda: worked_s)
    monkeypatch.setattr(peak, "_find_processes", lambda: None)
    monkeypatch.setattr(memory_peak.time, "thread_time", iter([5.0, 5.0 + sample_s, 6.0]).__next__)
    monkeypatch.setattr(memory_peak.time, "monotonic", iter([1.0, 2.0]).__next__)
    peak._watch()
    assert pauses == pytest.approx([0.05, expected])


def test_one_process_is_watched_alone(kernel):
    kernel["counters"] = {ROOT: Counters(100), CHILD: Counters(1000)}
    with MemoryPeak(interval_s=60, alone=True) as peak:
        assert peak.update() == 100


@on_linux
def test_the_kernels_counters_are_read():
    pid = memory_peak.os.getpid()
    before = counters(pid)
    assert 0 < before.held < before.resident and before.cpu_s > 0
    assert before.highest >= before.held
    # Mapped by itself: the C library may hold memory that an earlier test has freed.
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"1" * (64 << 20))
        assert counters(pid).held >= before.held + (48 << 20)
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if "[stack]" in line)
    low, high = (int(word, 16) for word in line.split()[0].split("-"))
    assert low <= before.stack_start < high


def test_a_process_that_is_gone_has_no_counters():
    gone = 2**22 + 1
    assert counters(gone) is None and descendants(gone) == [] and resident_bytes(gone) == 0
