"""Memory that a training step frees is there for the next one, and is given back when training ends."""

import os
import platform
import subprocess
import sys

import pytest

from lightning_gnnscale.memory import Counters
from lightning_gnnscale.strategy import freed_memory
from lightning_gnnscale.strategy.freed_memory import FreedMemory

STEPS = """
import resource, sys
import torch
from lightning_gnnscale.memory import keep_freed_memory, return_freed_memory, trim_heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(20_000_000)  # 80 MB, 19,532 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

keep_freed_memory()
faults()
kept, held = faults(), resident()
return_freed_memory()
trim_heap()
print(kept, held - resident(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told")
def test_freed_memory_is_kept_for_the_next_step_until_it_is_to_be_returned():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run([sys.executable, "-c", STEPS], env=env, capture_output=True, text=True, check=True)
    kept, given_back, afterwards = map(int, done.stdout.split())
    fresh = 300  # with pages of 4 KiB it is 195,000, with huge ones 380
    assert kept < fresh < afterwards
    assert given_back * 4096 > 60e6


MIB = 1 << 20


class Machine:
    """Memory of a process: a step takes `step` bytes at its peak, and kept memory grows to three times as much."""

    def __init__(self, monkeypatch, free, step):
        self.free, self.step, self.kept, self.keeping, self.told = free, step, 0, False, []
        self.seconds = 0.0
        for name in ("keep_freed_memory", "return_freed_memory", "trim_heap"):
            monkeypatch.setattr(freed_memory, name, lambda name=name: self._do(name))
        monkeypatch.setattr(freed_memory, "free_memory_bytes", lambda: self.free - self.kept)
        monkeypatch.setattr(freed_memory, "counters", lambda pid: Counters(1 << 30, highest=(1 << 30) + self.step))
        monkeypatch.setattr(freed_memory, "_forget_peak", lambda: True)
        monkeypatch.setattr(freed_memory.time, "monotonic", lambda: self.seconds)

    def _do(self, name):
        self.told.append(name)
        self.keeping = self.keeping if name == "trim_heap" else name == "keep_freed_memory"
        self.kept = 0 if name == "trim_heap" else self.kept

    def run(self, memory, steps, took_s=0.1):
        """Take so many steps; none may take more than is free."""
        for _ in range(steps):
            memory.begin_step()
            growth = min(self.step, 3 * self.step - self.kept) if self.keeping else self.step
            assert growth <= self.free - self.kept, "killed for memory"
            self.kept += growth if self.keeping else 0
            self.seconds += took_s
            memory.end_step()


def test_much_memory_is_kept_from_the_first_step_on_without_a_look(monkeypatch):
    machine = Machine(monkeypatch, 9 << 30, 100 * MIB)
    memory = FreedMemory(2)
    monkeypatch.setattr(freed_memory, "free_memory_bytes", lambda: pytest.fail("looked"))
    machine.run(memory, 10)
    assert memory.keeps and machine.told == ["keep_freed_memory"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_little_memory_is_kept_as_far_as_memory_allows(monkeypatch, num_processes):
    ended = {}
    for free in (120, 250, 299, 320, 350, 500):  # MiB of each process; a step takes 100, kept memory up to 300
        machine = Machine(monkeypatch, num_processes * free * MIB, 100 * MIB)
        memory = FreedMemory(num_processes)
        machine.run(memory, 3)
        assert not memory.keeps, "the first steps are measured"
        machine.run(memory, 50)
        ended[free] = memory.keeps, machine.told.count("trim_heap") > 1
    none, some, all_of_it = (False, False), (True, True), (True, False)
    if num_processes == 1:
        assert ended == {120: none, 250: none, 299: none, 320: some, 350: some, 500: all_of_it}
    else:  # another process takes nothing here
        assert ended[120] == ended[250] == ended[299] == none and ended[500] == all_of_it


def test_memory_that_others_take_ends_it_and_that_they_leave_begins_it_again(monkeypatch):
    machine = Machine(monkeypatch, 600 * MIB, 100 * MIB)
    memory = FreedMemory()
    machine.run(memory, 20)
    assert memory.keeps and machine.kept == 300 * MIB
    machine.free = 390 * MIB
    machine.run(memory, 1)
    assert memory.keeps, "as much again is still free"
    machine.free = 280 * MIB
    machine.kept = 0
    machine.run(memory, 20)
    assert not memory.keeps and not machine.keeping and machine.kept == 0
    machine.free = 400 * MIB
    machine.run(memory, 1)
    assert memory.keeps and machine.keeping


def test_it_looks_no_more_often_than_looking_is_worth(monkeypatch):
    machine = Machine(monkeypatch, 290 * MIB, 100 * MIB)
    memory = FreedMemory()
    machine.run(memory, 4)
    looks = []
    monkeypatch.setattr(freed_memory, "free_memory_bytes", lambda: looks.append(1) or 0)
    machine.run(memory, 100, took_s=0.001)
    assert 1 <= len(looks) <= 3


def test_where_the_kernel_does_not_tell_a_step_nothing_is_kept(monkeypatch):
    machine = Machine(monkeypatch, 900 * MIB, 100 * MIB)
    monkeypatch.setattr(freed_memory, "_forget_peak", lambda: False)
    memory = FreedMemory()
    machine.run(memory, 20)
    assert not memory.keeps and memory.step_bytes == 0
    memory.close()
    assert machine.told == ["trim_heap"], "what the C library does stays as it was"


def test_evaluation_has_what_was_kept_and_training_keeps_again(monkeypatch):
    machine = Machine(monkeypatch, 900 * MIB, 100 * MIB)
    memory = FreedMemory()
    machine.run(memory, 10)
    memory.pause()
    assert machine.kept == 0
    machine.keeping = False  # a pass that streams layers has it returned
    memory.resume()
    assert machine.keeping
    memory.close()
    assert not machine.keeping and machine.told[-2:] == ["return_freed_memory", "trim_heap"]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel has no such file")
def test_the_peak_of_a_step_is_measured():
    program = """
import numpy as np
from lightning_gnnscale.memory import return_freed_memory
from lightning_gnnscale.strategy import freed_memory

freed_memory.free_memory_bytes = lambda: 1 << 30
return_freed_memory()
memory = freed_memory.FreedMemory()
np.ones(50 << 20)  # before the first step: not of one
for _ in range(4):
    memory.begin_step()
    np.ones(5 << 20)
    memory.end_step()
print(memory.step_bytes >> 20, memory.keeps)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    mebibytes, keeps = done.stdout.split()
    assert 38 <= int(mebibytes) <= 48 and keeps == "True"
