"""Compiled kernels are used again as long as nothing that was compiled into them has changed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from lightning_gnnscale import jit, rng
from lightning_gnnscale.jit import sources_digest
from lightning_gnnscale.model import dropout
from lightning_gnnscale.partition_store import planned_reads

CALLER = """
from lightning_gnnscale.jit import kernel
import helper
from helper import WEIGHT, add

@kernel
def run(value):
    return add(value) * WEIGHT + helper.more(value) + below(value)

@kernel
def below(value):
    return helper.more(value)

print(run(3), sum(run.stats.cache_hits.values()))
"""
HELPER = """
from lightning_gnnscale.jit import kernel
WEIGHT = {weight}

@kernel
def add(value):
    return value + {added}

@kernel
def more(value):
    return value * {times}
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a helper, and runs its caller in a new process: the result and the cache's hits."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(folder: Path = tmp_path, **values) -> tuple[int, int]:
        folder.mkdir(exist_ok=True)
        (folder / "caller.py").write_text(CALLER)
        (folder / "helper.py").write_text(HELPER.format(**{"weight": 2, "added": 1, "times": 0} | values))
        done = subprocess.run(
            [sys.executable, "caller.py"], cwd=folder, env=env, capture_output=True, text=True, check=True
        )
        return tuple(map(int, done.stdout.split()))

    return run


def test_an_edit_in_another_file_is_seen(run, tmp_path):
    assert run() == (8, 0)
    assert run() == (8, 1), "compiled once"
    assert run(tmp_path / "clone") == (8, 1), "by another copy of the same files"
    assert run(added=2) == (10, 0), "a kernel that is called"
    assert run(times=1) == (14, 0), "one of a module, by a kernel below"
    assert run(weight=3) == (12, 0), "a constant"


def test_files_of_this_package_that_are_compiled_into_others(monkeypatch):
    before = sources_digest(dropout._drop_rows.py_func)
    monkeypatch.setattr("lightning_gnnscale.jit._file_digest", lambda path: "other" * path.endswith("rng.py"))
    assert rng.__file__.endswith("rng.py")
    assert sources_digest(dropout._drop_rows.py_func) != before
    intrinsic = sources_digest(planned_reads._count.py_func)
    monkeypatch.setattr("lightning_gnnscale.jit._file_digest", lambda path: "other" * path.endswith("intrinsics.py"))
    assert sources_digest(planned_reads._count.py_func) != intrinsic


RACER = """
import sys, time
from pathlib import Path
from lightning_gnnscale.jit import kernel

@kernel
def below(values):
    return values.sum()

@kernel
def run(values):
    total = 0.0
    for value in values:
        total += below(values) * value
    return total

import numpy as np
Path(sys.argv[1]).touch()
while not Path("go").exists():
    time.sleep(0.005)
run(np.ones(3))
print(sum(run.stats.cache_misses.values()), sum(below.stats.cache_misses.values()))
"""


def test_two_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path):
    (tmp_path / "racer.py").write_text(RACER)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    racers = [
        subprocess.Popen([sys.executable, "racer.py", name], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    while not all((tmp_path / name).exists() for name in ("a", "b")):
        assert all(racer.poll() is None for racer in racers)
    (tmp_path / "go").touch()
    told = [tuple(map(int, racer.communicate(timeout=120)[0].split())) for racer in racers]
    assert sorted(told)[1] == (1, 1), told
    assert sorted(told)[0] == (0, 0), told
    assert len(list((tmp_path / "cache").rglob("*.kernel"))) == 2
    assert not list((tmp_path / "cache").rglob("*.lock"))


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    entry = tmp_path / "one.kernel"
    holds = f"import filelock, time; lock = filelock.FileLock({str(entry)!r} + '.lock'); lock.acquire()"
    command = [sys.executable, "-c", f"{holds}; print(1, flush=True); time.sleep(99)"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"1\n"
    with pytest.raises(Timeout):
        FileLock(f"{entry}.lock").acquire(timeout=0)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with jit._turn(entry), pytest.raises(Timeout):
        FileLock(f"{entry}.lock").acquire(timeout=0)


@pytest.fixture
def doubled(tmp_path, monkeypatch):
    """A function that makes a kernel of one and the same function again, with a cache of its own."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def double(value):
        return value * 2

    return lambda: jit.kernel(double)


def misses(compiled) -> int:
    assert compiled(4) == 8
    return sum(compiled.stats.cache_misses.values())


def test_a_damaged_entry_is_compiled_again(doubled, tmp_path):
    assert misses(doubled()) == 1
    assert misses(doubled()) == 0
    (entry,) = tmp_path.rglob("*.kernel")
    content = entry.read_bytes()
    for damaged in (b"", content[:-100], content[:500] + bytes([content[500] ^ 1]) + content[501:]):
        entry.write_bytes(damaged)
        assert misses(doubled()) == 1
        assert misses(doubled()) == 0


def test_a_folder_that_cannot_be_written_to(doubled, tmp_path, monkeypatch):
    (tmp_path / "lightning_gnnscale").touch()
    assert misses(doubled()) == 1
    assert misses(doubled()) == 1
    assert (tmp_path / "lightning_gnnscale").read_bytes() == b""


def test_what_is_used_is_kept_young(doubled, tmp_path):
    misses(doubled())
    (entry,) = tmp_path.rglob("*.kernel")
    os.utime(entry, (1e9, 1e9))
    assert misses(doubled()) == 0
    assert entry.stat().st_mtime > 1.5e9


def test_garbage_is_collected_after_compiling(doubled):
    import gc

    assert gc.isenabled()
    misses(doubled())
    assert gc.isenabled()
    with jit._no_garbage_collection():
        assert not gc.isenabled()
        with jit._no_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
