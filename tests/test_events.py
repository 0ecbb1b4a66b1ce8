"""Events: one line an event, stages measured, a cut line left out."""

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import Timeout

from lightning_gnnscale import events, memory
from lightning_gnnscale.memory import resident_bytes
from lightning_gnnscale.memory_peak import MemoryPeak


def test_events_reach_the_file_and_a_cut_line_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(events.ENV_FILE, "")
    path = tmp_path / "run" / "events.jsonl"
    events.open_log(path)
    events.record("average", epoch=1, seconds=0.5)
    with path.open("a") as file:
        file.write('{"event": "half')
    read = events.read_log(path)
    assert [event["event"] for event in read] == ["average"]
    assert read[0]["epoch"] == 1


def test_stage_measures_time_and_memory():
    with events.stage("grow", note="x"):
        block = np.ones(8 << 20)
        time.sleep(0.1)
        assert block[0] == 1
    event = events.recent()[-1]
    assert (event["stage"], event["failed"], event["note"]) == ("grow", False, "x")
    assert event["seconds"] >= 0.1
    assert event["peak_bytes"] >= 64 << 20


def test_failed_stage_says_so():
    try:
        with events.stage("break"):
            raise ValueError("x")
    except ValueError:
        pass
    assert events.recent()[-1]["failed"] is True


def test_peak_counts_memory_that_is_gone_again():
    with MemoryPeak(interval_s=0.01) as peak:
        # Mapped by itself: the C library may hold memory that an earlier test has freed.
        block = mmap.mmap(-1, 128 << 20)
        np.frombuffer(block, np.uint8)[:] = 1
        # A busy machine lets the thread sample late, and the kernel's mark may stand higher from an earlier test.
        until = time.monotonic() + 60
        while peak.peak_bytes - peak.start_bytes < 100 << 20 and time.monotonic() < until:
            time.sleep(0.01)
        block.close()
    assert peak.peak_bytes - peak.start_bytes >= 100 << 20
    assert resident_bytes() < peak.peak_bytes


@pytest.mark.parametrize("listed", [True, False])
def test_memory_of_children_and_theirs_counts(monkeypatch, listed):
    monkeypatch.setattr(memory, "LISTS_CHILDREN", memory.LISTS_CHILDREN and listed)
    alone = resident_bytes()
    hold = "block = bytearray(64 << 20); print(flush=True); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert resident_bytes() >= alone + (64 << 20)
        assert resident_bytes(child.pid) >= 64 << 20
        child.communicate(b"\n")
    assert resident_bytes(child.pid) == 0
    assert resident_bytes() < alone + (64 << 20)


@pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("settles", [True, False])
def test_what_a_forked_process_shares_counts_once(settles):
    code = f"""
import mmap
import os
from lightning_gnnscale import memory_peak
from lightning_gnnscale.memory import resident_bytes
memory_peak._settling.spent_s = {0 if settles else 1e9}
memory_peak._settling.unit_s = 0
block = bytearray(os.urandom(1 << 20)) * 128
alone = resident_bytes()
wait, go_on = os.pipe()
answer, told = os.pipe()
with memory_peak.MemoryPeak(interval_s=60) as peak:
    if os.fork() == 0:
        os.read(wait, 1)
        block[:96 << 20] = bytes(96 << 20)
        os.write(told, b"1")
        os.read(wait, 1)
        os._exit(0)
    print(resident_bytes() - alone, peak.update() - peak.start_bytes)
    os.write(go_on, b"1")
    os.read(answer, 1)
    print(resident_bytes() - alone, peak.update() - peak.start_bytes)
    os.write(go_on, b"1")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = [int(word) for word in done.stdout.split()]
    assert len(told) == 4, done.stderr
    assert max(told[:2]) < 16 << 20
    assert told[2] >= 96 << 20
    assert (told[3] >= 96 << 20) == settles  # what was written to since is seen where page tables are walked


HOLD = """
import sys, time
from lightning_gnnscale.events import held_lock
with held_lock(sys.argv[1], "is at work"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(path, seconds):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_who_is_waited_for_is_told_in_one_line(tmp_path, capsys):
    path = tmp_path / "x.lock"
    process = holder(path, 3)
    with events.held_lock(path, "is preparing the store x"):
        who = f"process {process.pid} on {socket.gethostname()}"
        assert events.lock_holder(path) == f"process {os.getpid()} on {socket.gethostname()}"
    assert capsys.readouterr().err == f"gnnscale: {who} is preparing the store x: waiting until it is done\n"
    assert events.recent()[-1]["event"] == "wait" and events.recent()[-1]["holder"] == who
    assert events.lock_holder(path) == "another process"
    process.wait()


def test_the_note_of_a_killed_holder_does_not_lie(tmp_path, capsys):
    path = tmp_path / "x.lock"
    process = holder(path, 60)
    process.kill()
    process.wait()
    assert str(process.pid) in path.read_text()
    assert events.lock_holder(path) == "another process"
    path.write_text(f"{os.getpid()} 17 {socket.gethostname()}")  # a number that came round again
    assert events.lock_holder(path) == "another process"
    with events.held_lock(path, "is at work"):  # free, and taken without a word
        assert capsys.readouterr().err == ""


def test_a_wait_ends_after_its_time(tmp_path, capsys):
    path = tmp_path / "x.lock"
    process = holder(path, 60)
    with pytest.raises(Timeout), events.held_lock(path, "is at work", timeout_s=0):
        pass
    assert capsys.readouterr().err == ""
    process.kill()
    process.wait()


def test_activities_are_kept_by_time_in_bins_that_widen():
    activities = events.Activities(begin=100.0)
    activities.add("read", 99.0, 100.0005)  # what lies before is left out
    activities.add("read", 100.0, 101.0)
    activities.add("wait", 101.0, 101.5)
    assert activities.seconds == pytest.approx({"read": 1.0005, "wait": 0.5})
    by_time = activities.by_time()
    assert {len(bins) for bins in by_time.values()} == {int(1.5 / activities.bin_s) + 1}
    assert len(by_time["read"]) <= 384
    for name, begin, end in (("read", 0.0, 1.0), ("wait", 1.0, 1.5)):
        whole = [number for number, seconds in enumerate(by_time[name]) if seconds == round(activities.bin_s, 4)]
        assert whole[0] * activities.bin_s == pytest.approx(begin, abs=activities.bin_s)
        assert (whole[-1] + 1) * activities.bin_s == pytest.approx(end, abs=activities.bin_s)
    assert sum(by_time["wait"]) == pytest.approx(0.5, abs=1e-3)


def test_the_training_thread_does_one_thing_at_a_time():
    clock = events.ActivityClock()
    with clock.doing("forward"):  # off: nothing is counted
        pass
    assert clock.end() is False
    begun = time.perf_counter()
    clock.begin()
    clock.turn_to("forward")
    with clock.doing("exchange"):
        time.sleep(0.02)
    time.sleep(0.01)
    clock.turn_to("validation")
    with clock.doing("exchange"):  # of validation
        time.sleep(0.01)

    def prepare():
        clock.turn_to("backward")  # another thread's word does not count
        with clock.doing("sample"):
            time.sleep(0.02)

    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join()
    assert clock.end() is True
    took = time.perf_counter() - begun
    spent = clock.training.seconds
    assert set(spent) == {"other", "forward", "exchange", "validation"}
    assert spent["exchange"] >= 0.02 and spent["forward"] >= 0.01 and spent["validation"] >= 0.03
    assert sum(spent.values()) == pytest.approx(took, abs=0.005)
    assert set(clock.beside.seconds) == {"sample"}
    clock.add_beside([("read", begun, begun + 1.0)])  # after the end nothing is counted
    assert set(clock.beside.seconds) == {"sample"}


def test_an_activity_that_fails_ends():
    clock = events.ActivityClock()
    clock.begin()
    with pytest.raises(ValueError), clock.doing("average"):
        raise ValueError
    clock.turn_to("forward")
    clock.end()
    assert "average" in clock.training.seconds and "forward" in clock.training.seconds


def test_a_run_begins_with_its_machine_and_versions():
    begun = events.begin_run(command="train")
    assert begun["machine"]["torch"] and begun["machine"]["cores"] >= 1
    assert begun["memory_bytes"] > 1 << 20
