"""The program's begin and end: the garbage collector held while it imports, and an end without taking all apart."""

import gc
import os
import subprocess
import sys

import pytest

from lightning_gnnscale.cli.main import hold_garbage_collection, resume_garbage_collection


def test_garbage_is_collected_again_once_work_begins():
    resume_garbage_collection()
    assert gc.get_freeze_count() == 0, "where nobody holds it, nothing changes"
    hold_garbage_collection()
    try:
        assert not gc.isenabled()
        resume_garbage_collection()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()


PROGRAM = """
import atexit, sys, threading, time
import lightning_gnnscale.cli

main = sys.modules["lightning_gnnscale.cli.main"]

def work():
    atexit.register(print, "registered")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    print("written", end=" ")
    {end}

main.main = work
main.program()
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [("pass", 0, ""), ("sys.exit()", 0, ""), ("sys.exit(2)", 2, ""), ("sys.exit('a reason')", 1, "a reason\n")],
)
def test_the_end_of_the_program_is_pythons(end, code, told):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, told)
    assert done.stdout.split() == ["written", "thread", "registered"]


def test_a_traceback_that_was_asked_for_is_shown():
    program = PROGRAM.format(end="raise RuntimeError('a defect')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" in done.stderr and "a defect" in done.stderr


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_do_not_spin_while_they_wait_unless_asked(given, found):
    """The policy is read once, when torch is imported."""
    end = "import os; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    program = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split()[:3] == ["written", found, "False"]
