"""Paths are looked at before anything is imported; a start that fails leaves no folder, one that did something does."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cli.refusals import refused
from omegaconf import OmegaConf

from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.run_paths import check_paths, removed_unless_begun
from tests.says import said


@pytest.fixture(autouse=True)
def _in_a_folder_with_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("edges.csv").write_text("0,1\n1,2\n")
    Path("nodes.csv").write_text("id,label\n0,1\n1,0\n2,1\n")
    np.save("x.npy", np.ones((3, 2)))


def config(target: str = "load_files", **dataset):
    return OmegaConf.create({"dataset": {"_target_": f"lightning_gnnscale.dataset.{target}", **dataset}, "store": None})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"edges": "edgs.csv"}, "dataset.edges edgs.csv edges.csv?"),
        ({"edges": "edges.csv", "labels": "node.csv:label"}, "dataset.labels node.csv"),
        ({"edges": "edges.csv", "features": "/no/x.npy"}, "dataset.features /no/x.npy"),
        ({"edges": "edges.csv", "masks": "no/m.csv:split"}, "dataset.masks no/m.csv"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_there(given, told):
    with pytest.raises(UsageError, match=said(told)):
        check_paths(config(**given))


def test_a_file_of_a_node_type_or_of_a_relation_that_is_not_there():
    nodes = {"paper": {"num_nodes": 3, "features": "x.npy"}}
    check_paths(config("hetero_graph", nodes=nodes, edges={"paper,cites,paper": "edges.csv"}))
    with pytest.raises(UsageError, match=said("dataset.edges.paper,cites,paper none.csv")):
        check_paths(config("hetero_graph", nodes=nodes, edges={"paper,cites,paper": "none.csv"}))
    with pytest.raises(UsageError, match=said("dataset.nodes.paper.features y.npy")):
        check_paths(config("hetero_graph", nodes={"paper": {"features": "y.npy"}}, edges={}))


def test_what_may_be_there_is_left_to_whoever_reads_it():
    check_paths(config(edges="edges.csv", labels="nodes.csv:label", features="x.npy", reader={"src": "no"}))
    check_paths(config(edges="part-*.parquet", features="s3://bucket/x.npy", labels="${oc.env:HOME}/y.npy"))
    check_paths(config(edges="???"))
    check_paths(config("load_npz", edges="none.csv"))
    check_paths(OmegaConf.create({"store": "none"}))  # of verify, which tells by its exit code


def test_a_checkpoint_that_is_not_there():
    made = config(edges="edges.csv")
    made.resume = "none.ckpt"
    with pytest.raises(UsageError, match=said("resume none.ckpt")):
        check_paths(made)
    Path("last.ckpt").touch()
    with pytest.raises(UsageError, match=said("last.ckpt")):
        check_paths(made)
    made.resume = "last.ckpt"
    check_paths(made)


def test_a_store_that_is_not_there():
    made = config(edges="none.csv")
    made.store = "."
    check_paths(made)  # the data set is not read
    made.store = "stores/none"
    with pytest.raises(UsageError, match=said("store stores/none")):
        check_paths(made)


@pytest.mark.parametrize(
    "words", [["model.lrr=1"], ["seed=-1"], ["dataset=files", "dataset.edges=none.csv"], ["mdel.lr=1"]]
)
def test_a_start_that_fails_leaves_nothing(capsys, words):
    before = sorted(Path().iterdir())
    refused(capsys, "train", *words)
    assert sorted(Path().iterdir()) == before
    Path("runs/mine").mkdir(parents=True)
    refused(capsys, "train", *words)
    assert [str(path) for path in Path("runs").rglob("*")] == ["runs/mine"]


def fail_in(folder: Path, error: type[BaseException] = ValueError) -> None:
    with pytest.raises(error), removed_unless_begun(folder.absolute(), Path("runs").absolute()):
        raise error


def write(folder: Path, stages: tuple = (), **files: str) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").touch()
    events = [{"event": "run"}, *({"event": "stage", "stage": stage} for stage in stages)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_has_done_something_stays(monkeypatch, error):
    for name, folder, stays in (
        ("opened", write(Path("runs/a/opened"), ("load",)), False),
        ("partitioned", write(Path("runs/a/partitioned"), ("load", "partition")), True),
        ("earlier", write(Path("runs/b/earlier"), **{"summary.json": "{}"}), True),
        ("elsewhere", write(Path("else/where")), False),
    ):
        fail_in(folder, error)
        assert folder.exists() == stays, name
    assert Path("runs/a").exists() and Path("else").exists()
    monkeypatch.chdir(write(Path("here")))  # as with hydra.run.dir=.
    fail_in(Path("."))
    assert Path(".hydra").exists()
    monkeypatch.setenv("RANK", "1")
    folder = write(Path("runs/c/rank"))
    fail_in(folder)
    assert folder.exists()


JOBS = """
import multiprocessing
from lightning_gnnscale.cli.run_folder import temporary_folder

if __name__ == "__main__":
    for _ in range(2):  # jobs of a sweep
        with temporary_folder():
            process = multiprocessing.get_context("forkserver").Process(target=print, args=("ran",))
            process.start()
            process.join()
"""


def test_the_second_job_of_a_sweep_starts_processes_and_the_end_leaves_nothing():
    Path("jobs.py").write_text(JOBS)
    with tempfile.TemporaryDirectory() as folder:  # a short name: paths of sockets lie below
        env = {**os.environ, "TMPDIR": folder}
        ended = subprocess.run([sys.executable, "jobs.py"], env=env, capture_output=True, text=True)
        assert (ended.stdout, ended.stderr) == ("ran\nran\n", "")
        assert not [path for path in Path(folder, f"gnnscale-{os.getuid()}").iterdir() if path.is_dir()]
