"""`gnnscale stores`: what lies there, what of it is shared, and what goes."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.events import held_lock
from lightning_gnnscale.partition_store import update_store, write_partition_store
from lightning_gnnscale.partition_store.shared_files import share_files
from tests.partition_store.small_graphs import random_graph


@pytest.fixture(autouse=True)
def _stores(tmp_path, monkeypatch):
    """Two stores of a graph that differ in their labels, a damaged one, and what a killed run left."""
    monkeypatch.chdir(tmp_path)
    graph = random_graph(3000, 6000, 2)
    features = np.ones((3000, 16), np.float32)
    for name, labels in (("one", np.zeros(3000, np.int64)), ("two", np.ones(3000, np.int64))):
        write_partition_store(f"stores/{name}", graph.stream(), graph.given, features=features, labels=labels)
    share_files(Path("stores/two"), [Path("stores/one")])
    shutil.copytree("stores/one", "stores/torn")
    Path("stores/torn/features.npy").unlink()
    Path("stores/three.partial").mkdir()
    Path("stores/three.partial/features.npy").write_bytes(bytes(5000))


def left() -> list[str]:
    return sorted(path.name for path in Path("stores").iterdir() if path.is_dir())


def test_they_are_listed(capsys):
    main(["stores"])
    out = capsys.readouterr().out
    for part in ("one", "two", "3,000", "damaged", "torn/features.npy: is missing", "3 stores in stores"):
        assert part in out
    assert "1 leftovers of unfinished runs, 4.88 KiB" in out
    main(["stores", "sizes", "t*"])
    out = capsys.readouterr().out
    assert "two" in out and "188 KiB" in out and "one" not in out and "features" in out
    main(["stores", "list", "paths.stores=elsewhere"])
    assert "0 stores in elsewhere" in capsys.readouterr().out


def test_clean_removes_what_it_is_told_to(capsys):
    main(["stores", "clean", "one", "dry_run=true"])
    assert "would be removed: stores/one" in capsys.readouterr().out and left() == [
        "one",
        "three.partial",
        "torn",
        "two",
    ]
    main(["stores", "clean"])
    assert left() == ["one", "torn", "two"]
    main(["stores", "clean", "one", "torn"])
    assert left() == ["two"] and not list(Path("stores").glob("one*"))
    capsys.readouterr()
    main(["verify", "stores/two"])  # what it shared with the removed one is its own now
    assert "all as written" in capsys.readouterr().out
    main(["stores", "clean"])
    assert "nothing to clean" in capsys.readouterr().out


def test_stores_that_no_run_has_used_go_by_age(capsys):
    long_ago = time.time() - 40 * 86_400
    for path in Path("stores/torn").iterdir():
        os.utime(path, (long_ago, long_ago))
    main(["stores", "clean", "unused_days=30"])
    assert left() == ["one", "two"]


def test_versions_are_listed_and_all_but_the_latest_may_go(capsys):
    rows = np.ones((1, 16), np.float32)
    for node, name in ((3000, "stores/one"), (3001, "stores/one-v1"), (3002, "stores/one-v2")):
        update_store(name, nodes=[node], features=rows, edges=np.array([[node], [0]]))
    other = update_store("stores/one-v1", nodes=[0], labels=[4], root="stores/branch")
    os.utime(other.root / "manifest.json", (time.time() - 3 * 86_400, time.time() - 3 * 86_400))
    capsys.readouterr()
    main(["stores"])
    out = capsys.readouterr().out
    assert "one-v2: version 2 of one-v1, less than a minute old: 1 new nodes, 1 new edges; " in out
    assert "branch: version 2 of one-v1, 3 days old: 1 nodes with changed labels or masks; " in out
    main(["stores", "clean", "keep_versions=2", "dry_run=true"])
    assert "would be removed: stores/one (" in capsys.readouterr().out
    main(["stores", "clean", "keep_versions=2"])  # one-v1 is the one before branch
    assert left() == ["branch", "one-v1", "one-v2", "one-v3", "torn", "two"]
    main(["stores", "clean", "keep_versions=1"])
    assert left() == ["branch", "one-v3", "torn", "two"]
    main(["verify", "stores/one-v3"])
    assert "all as written" in capsys.readouterr().out


def test_what_is_written_stays(capsys):
    with held_lock("stores/three.lock", "is writing", 0):
        main(["stores", "clean"])
    assert "kept: stores/three.partial, a process is at work on it" in capsys.readouterr().out
    assert "three.partial" in left()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["clean", "on"], "no store on in stores (did you mean one?); there are one, torn, two"),
        (["list", "keep_versions=0"], "keep_versions must be an integer of at least 1, got 0"),
        (["list", "unused_days=-1"], "unused_days must be a number of at least 0, got -1"),
        (["clear"], "stores clear: no such action (did you mean clean?); there are list, sizes, clean"),
        (["list", "name=x"], "name is not a setting"),
    ],
)
def test_wrong_words_are_one_line(capsys, words, part):
    assert part in refused(capsys, "stores", *words)
