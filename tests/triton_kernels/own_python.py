"""Code run by a Python of its own, in which kernels are compiled and not interpreted."""

import os
import subprocess
import sys


def run_python(code, **environment):
    """Run code without TRITON_INTERPRET; the test fails with what it printed where it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
