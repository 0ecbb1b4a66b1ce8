"""Processes of their own for tests: forked from a server that has imported the package, which takes seconds."""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

CONTEXT = multiprocessing.get_context("forkserver")


class OwnProcess:
    """A function that runs in a process of its own, as a program of its own would.

    Args:
        folder: its working folder; what it prints lies there, in a folder told-*.
        interrupt: what SIGINT does at first; a shell's background has it ignored.
        variables: more variables of its environment.
    """

    def __init__(self, folder: Path, function, *arguments, interrupt=signal.SIG_DFL, **variables: str):
        self.told = Path(tempfile.mkdtemp(dir=folder, prefix="told-"))
        environment = dict(os.environ) | variables
        self.process = CONTEXT.Process(
            target=_run, args=(folder, self.told, environment, interrupt, function, arguments)
        )
        self.process.start()
        self.pid = self.process.pid

    def wait(self, limit_s: float) -> CompletedProcess:
        """Wait for its end; return its code, what it printed and what it said of errors."""
        self.process.join(limit_s)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        out, err = ((self.told / name).read_text() for name in ("out", "err"))
        assert code is not None, f"no end within {limit_s} s:\n{out}\n{err}"
        return CompletedProcess(self.pid, code, out, err)


def _run(folder: Path, told: Path, environment: dict[str, str], interrupt, function, arguments: tuple) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment says it
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(told / name, os.O_CREAT | os.O_WRONLY), number)
    signal.signal(signal.SIGINT, signal.default_int_handler if interrupt == signal.SIG_DFL else interrupt)
    os.chdir(folder)
    function(*arguments)


def typed(*words: str) -> None:
    """`gnnscale` on these words."""
    from lightning_gnnscale.cli.main import program

    sys.argv = ["gnnscale", *words]
    program()


def gnnscale(folder: Path, *words: str) -> CompletedProcess:
    """Run a command to its end."""
    return OwnProcess(folder, typed, *words).wait(240)


def script(*words: str) -> None:
    """A file of Python on the words behind it."""
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
