"""kill -9 at any moment, then the same command: the store is bit-identical to that of an uninterrupted run."""

import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.build_store import build

NUM_NODES, NUM_EDGES = 100_000, 2_000_000

# Children are forked from a process that has imported the package once, and compiled or loaded its kernels never.
PROCESSES = multiprocessing.get_context("forkserver")


def start(root: Path, die_at_call: int = -1):
    calls = PROCESSES.Value("i", 0)
    process = PROCESSES.Process(target=build, args=(str(root), NUM_NODES, NUM_EDGES, calls, die_at_call))
    process.start()
    return process, calls


def finish(root: Path) -> int:
    """Build undisturbed; return the calls of progress."""
    process, calls = start(root)
    process.join(240)
    assert process.exitcode == 0
    return calls.value


def assert_same_files(root: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in root.iterdir()) == names
    for name in names:
        assert (root / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, calls of progress, seconds) of an uninterrupted run; compiled kernels stand in the cache."""
    root = tmp_path_factory.mktemp("whole") / "store"
    finish(root.with_name("warm"))
    begin = time.perf_counter()
    calls = finish(root)
    return root, calls, time.perf_counter() - begin


def test_killed_again_and_again_between_blocks(whole, tmp_path):
    expected, calls, _ = whole
    generator = random.Random(1)
    for _ in range(3):
        process, _ = start(tmp_path / "store", generator.randint(2, calls // 3))
        process.join(240)
        assert process.exitcode == -signal.SIGKILL
        assert not (tmp_path / "store").exists()
    assert finish(tmp_path / "store") < calls
    assert_same_files(tmp_path / "store", expected)
    assert not (tmp_path / "store.partial").exists()


@pytest.mark.sweep
@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(whole, tmp_path, num_kills):
    expected, _, seconds = whole
    generator = random.Random(num_kills)
    killed = 0
    for i in range(num_kills):
        root = tmp_path / str(i)
        process, _ = start(root)
        time.sleep(generator.uniform(0.05, 0.9) * seconds)
        process.kill()
        process.join(240)
        killed += process.exitcode == -signal.SIGKILL
        finish(root)
        assert_same_files(root, expected)
    assert killed > 0
