"""`gnnscale prepare`: workers that a trainer in another process finds, gone when the command is told to stop."""

import re
import signal
import subprocess
import sys

import psutil
import pytest

from lightning_gnnscale.cli import main

pytest.importorskip("ray", reason="the extra [ray] is not installed")

TRAIN = """
import sys
sys.path[:0] = {paths}
from ray_world import RayWorkers, all_contents, make_loader
loader = make_loader(RayWorkers(address="{address}"))
assert all_contents(loader) == all_contents(make_loader())
pids = loader._source.worker_pids
loader.close()
print(sorted(pids))
"""


@pytest.mark.sweep
def test_a_trainer_uses_prepared_workers(tmp_path):
    command = [sys.executable, "-m", "lightning_gnnscale.cli", "prepare", "num_workers=2", "store_bytes=200000000"]
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell's background ignores it
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, **heard) as prepare:
        try:
            lines = [prepare.stdout.readline(), prepare.stdout.readline()]
            assert re.match(r"2 workers prepare batches at [\d.]+:\d+ \(Ctrl-C ends them\)", lines[0]), lines
            address = lines[1].split("source.address=")[1].strip()
            assert lines[1].startswith("train from them: gnnscale train source=ray source.address=")
            pids = _trained(address)
            children = psutil.Process(prepare.pid).children(recursive=True)
            assert len(pids) == 2 and set(pids) <= {child.pid for child in children}, "they stay"
        finally:
            prepare.send_signal(signal.SIGINT)
            try:
                said, _ = prepare.communicate(timeout=60)
            finally:
                prepare.kill()
        assert "the workers have ended" in said
        assert prepare.returncode == 0
    assert not psutil.wait_procs(children, 10)[1]


def _trained(address: str) -> list[int]:
    tests = [path for path in sys.path if path.endswith("tests")] + [__file__.replace("cli/test_prepare.py", "")]
    paths = [*tests, __file__.replace("cli/test_prepare.py", "remote")]
    code = TRAIN.format(paths=paths, address=address)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return [int(pid) for pid in re.findall(r"\d+", run.stdout.splitlines()[-1])]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("address=127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 within 0.2 s"),
        ("address=nowhere", "address must be"),
        ("num_workers=0", "num_workers must be an integer of at least 1, got 0"),
    ],
)
def test_bad_words_are_told_in_one_line(tmp_path, monkeypatch, capsys, word, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["prepare", "timeout_s=0.2", word])
    assert stop.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and message in told[0]
