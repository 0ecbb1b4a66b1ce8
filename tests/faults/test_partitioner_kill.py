"""Partitioners killed at random moments, their checkpoints damaged in between: the undisturbed result, or one line."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import SyntheticGraph, write_edges
from lightning_gnnscale.errors import GNNScaleError

pytestmark = pytest.mark.sweep

NUM_NODES, NUM_EDGES = 40_000, 600_000
METHODS = {
    "spring": {},
    "streaming_multilevel": {"block_edges": 180_000, "passes": 2},
    "grem": {"chunk_edges": 12_000},
    "hdrf": {},
    "two_phase": {},
}
# Of a server that has imported the package: a child is then killed in its work, not in its imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_gnnscale.partitioner", "lightning_gnnscale.edge_stream"])


def assign(edges: Path, method: str, folder: Path) -> None:
    """Partition with a checkpoint and scratch disk in a folder; leave `part_id.npy`, or `told.txt` with an error."""
    stream = gs.open_edge_stream(edges, num_nodes=NUM_NODES, dtype="int32", chunk_edges=12_000)
    options = {"checkpoint": folder / "state.npz", "checkpoint_every": 3, "scratch": folder / "scratch"}
    try:
        made = gs.partition(stream, method, 8, deduplicate=True, evaluate=False, **options, **METHODS[method])
    except (GNNScaleError, ValueError) as error:
        (folder / "told.txt").write_text(str(error))
        return
    np.save(folder / "part_id.npy", made.part_id)


def run(edges: Path, method: str, folder: Path, kill_after_s: float | None = None) -> bool:
    """Start one process, and kill it after some time; return whether it ended before."""
    process = CONTEXT.Process(target=assign, args=(edges, method, folder))
    process.start()
    process.join(timeout=kill_after_s)
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return False
    assert process.exitcode == 0
    return True


def damage(sample: random.Random, state: Path) -> str:
    """Cut off, change or delete the checkpoint of a killed run; return what was done."""
    data = state.read_bytes()
    way = sample.choice(["cut", "flip", "flip", "flip in the tail", "delete"])
    if way == "delete":
        state.unlink()
    elif way == "cut":
        state.write_bytes(data[: sample.randrange(len(data))])
    else:
        place = sample.randrange(len(data)) if way == "flip" else len(data) - 1 - sample.randrange(min(len(data), 600))
        state.write_bytes(data[:place] + bytes([data[place] ^ 1 << sample.randrange(8)]) + data[place + 1 :])
    return way


def kill_and_go_on(tmp_path: Path, method: str, num_kills: int, seed: int) -> dict:
    """Return how often the run was killed, its checkpoint damaged, and the damage told in one line."""
    edges, whole, folder = tmp_path / "edges.bin", tmp_path / "whole", tmp_path / "killed"
    write_edges(SyntheticGraph(NUM_NODES, NUM_EDGES, num_communities=300).stream(), edges, dtype="int32")
    for made in (whole, folder):
        (made / "scratch").mkdir(parents=True)
    assert run(edges, method, whole)
    start = time.monotonic()
    assert run(edges, method, whole)  # compiled now
    whole_s, sample = time.monotonic() - start, random.Random(seed)
    expected, state = np.load(whole / "part_id.npy"), folder / "state.npz"
    counts = {"kills": 0, "damaged": 0, "told": 0, "resumed": 0}
    while counts["kills"] < num_kills:
        if run(edges, method, folder, whole_s * sample.uniform(0.2, 0.9)):
            finish(folder, expected, counts)
            continue
        counts["kills"] += 1
        if state.exists():
            counts["resumed"] += 1
            if sample.random() < 0.5:
                counts["damaged"] += 1
                damage(sample, state)
    while not run(edges, method, folder) or finish(folder, expected, counts):
        pass
    return counts


def finish(folder: Path, expected: np.ndarray, counts: dict) -> bool:
    """Check what a run that was not killed left; return whether it refused a damaged checkpoint."""
    told = folder / "told.txt"
    if told.exists():
        line = told.read_text()
        assert "\n" not in line and "state.npz" in line, line
        counts["told"] += 1
        told.unlink()
        (folder / "state.npz").unlink()
        return True
    assert np.array_equal(np.load(folder / "part_id.npy"), expected)
    (folder / "part_id.npy").unlink()
    assert [path.name for path in folder.rglob("*")] == ["scratch"], "something is left of the kills"
    return False


@pytest.mark.parametrize("method", ["grem", "streaming_multilevel"])
def test_a_killed_partitioner_goes_on_or_says_why_not(tmp_path, method):
    print(method, kill_and_go_on(tmp_path, method, num_kills=3, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS)
def test_a_partitioner_killed_ten_times_goes_on_or_says_why_not(tmp_path, method):
    print(method, kill_and_go_on(tmp_path, method, num_kills=10, seed=2))
