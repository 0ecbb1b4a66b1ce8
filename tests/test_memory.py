"""The memory that a process may use is found on the machine and in the cgroup that caps it."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lightning_gnnscale.memory import free_memory_bytes, memory_limit_bytes

V1 = Path("/sys/fs/cgroup/memory")

TELL = """
from lightning_gnnscale.memory import free_memory_bytes, memory_limit_bytes
held = bytearray(64 << 20)
print(memory_limit_bytes(), free_memory_bytes())
"""


@pytest.fixture
def group():
    """A memory cgroup of 512 MiB, version 1 or 2."""
    base = V1 if V1.is_dir() else Path("/sys/fs/cgroup")
    folder = base / "gnnscale-test-memory"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if base == V1 else "memory.max")).write_text(str(512 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be written to: {error}")
    yield folder
    folder.rmdir()


def test_without_a_cap_the_machine_is_the_limit():
    assert 0 < free_memory_bytes() <= memory_limit_bytes() <= psutil.virtual_memory().total


def test_a_cgroup_caps_what_is_found(group):
    join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    told = subprocess.run([sys.executable, "-c", join + TELL], capture_output=True, text=True, check=True).stdout
    limit, free = map(int, told.split())
    assert limit == 512 << 20
    assert free < limit - (64 << 20)  # what is held is not free
    assert free > limit - (256 << 20)
