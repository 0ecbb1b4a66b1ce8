"""`gnnscale verify`: one line, and the exit code says whether the store is as it was written."""

import shutil

import numpy as np
import pytest

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.partition_store import write_partition_store
from tests.partition_store.small_graphs import random_graph


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    graph = random_graph(40, 100, 2)
    root = tmp_path_factory.mktemp("stores") / "it's a=store, 1"
    return write_partition_store(root, graph.stream(), graph.given, features=np.ones((40, 3), np.float32)).root


def test_a_whole_store(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "plain")
    for word in (str(whole), "plain", "store=plain"):
        main(["verify", word])
        told = capsys.readouterr()
        assert "files, " in told.out and "bytes, all as written" in told.out and told.out.count("\n") == 1
        assert not told.err
    assert not (tmp_path / "runs").exists() and not (tmp_path / ".hydra").exists()


def test_a_damaged_store(whole, tmp_path, capsys):
    root = shutil.copytree(whole, tmp_path / "store")
    content = bytearray((root / "features.npy").read_bytes())
    content[-1] ^= 1
    (root / "features.npy").write_bytes(content)
    for word, message in (
        (str(root), "features.npy: its content is damaged"),
        (str(tmp_path / "no"), "no such partition"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["verify", word])
        told = capsys.readouterr()
        assert stop.value.code == 1 and message in told.err and told.err.count("\n") == 1 and not told.out


def test_words_that_are_off(capsys):
    for words, message in (([], "store has no value; give store="), (["stor=x"], "stor is not a setting")):
        with pytest.raises(SystemExit) as stop:
            main(["verify", *words])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and message in told and told.count("\n") == 1
