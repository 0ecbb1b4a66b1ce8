"""Memory that a training step frees is there for the next one, and is given back when training ends."""

import os
import platform
import subprocess
import sys

import pytest

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
