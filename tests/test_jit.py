"""Compiled kernels are used again as long as nothing that was compiled into them has changed."""

import os
import subprocess
import sys

import pytest

from lightning_gnnscale.jit import sources_digest
from lightning_gnnscale.model import dropout, row_dropout
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
    (tmp_path / "caller.py").write_text(CALLER)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(**values) -> tuple[int, int]:
        (tmp_path / "helper.py").write_text(HELPER.format(**{"weight": 2, "added": 1, "times": 0} | values))
        done = subprocess.run(
            [sys.executable, "caller.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        return tuple(map(int, done.stdout.split()))

    return run


def test_an_edit_in_another_file_is_seen(run):
    assert run() == (8, 0)
    assert run() == (8, 1), "compiled once"
    assert run(added=2) == (10, 0), "a kernel that is called"
    assert run(times=1) == (14, 0), "one of a module, by a kernel below"
    assert run(weight=3) == (12, 0), "a constant"


def test_files_of_this_package_that_are_compiled_into_others(monkeypatch):
    before = sources_digest(row_dropout._drop_rows.py_func)
    monkeypatch.setattr("lightning_gnnscale.jit._file_digest", lambda path: "other" * path.endswith("model/dropout.py"))
    assert dropout.__file__.endswith("model/dropout.py")
    assert sources_digest(row_dropout._drop_rows.py_func) != before
    intrinsic = sources_digest(planned_reads._count.py_func)
    monkeypatch.setattr("lightning_gnnscale.jit._file_digest", lambda path: "other" * path.endswith("intrinsics.py"))
    assert sources_digest(planned_reads._count.py_func) != intrinsic
