"""`gnnscale doctor`: what it measures, and what it advises."""

import socket

import pytest
from cli.refusals import refused

from lightning_gnnscale.cli import doctor
from lightning_gnnscale.cli.main import main


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_tells_of_all_that_matters(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        main(["doctor", "disk_bytes=8388608", f"ports=[{port}]"])
    out = capsys.readouterr().out
    for part in ("versions", "torch", "memory", "/dev/shm", "GPUs", "4 KiB reads", "written, synced", "loopback"):
        assert part in out
    assert f"port {port} is not free (Address already in use)" in out
    assert not list(tmp_path.iterdir())  # neither a run folder nor the measured file


def test_it_advises(monkeypatch, tmp_path):
    advice = []
    monkeypatch.setattr(doctor, "version_of", lambda name: "2.6.2" if name == "lightning" else None)
    monkeypatch.setattr(doctor, "memory_limit_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "_SLOW_DISK", 1 << 60)
    doctor.versions(advice)
    doctor.memory(advice)
    doctor.disk(tmp_path / "not there", 1 << 23, advice)
    for part in ("2.6.2 is a compromised release", "torch is not installed", "caps memory at 1.00 GiB", "faster disk"):
        assert any(part in line for line in advice), advice


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["disk_bytes=-1"], "disk_bytes must be at least 0, got -1"),
        (["ports=[70000]"], "ports must be in [1, 65535], got 70000"),
        (["port=[1]"], "port is not a setting (did you mean ports?)"),
    ],
)
def test_wrong_words_are_one_line(capsys, words, part):
    assert part in refused(capsys, "doctor", *words)
