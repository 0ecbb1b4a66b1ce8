"""A DataModule's preparation killed at random moments, then begun again: the store of an undisturbed one."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph, write_edges
from tests.faults.build_store import digests

pytestmark = pytest.mark.sweep

# Of a server that has imported the package: a child is then killed in its work, not in its imports.
CONTEXT = multiprocessing.get_context("forkserver")


def write_input(folder: Path, num_nodes: int, num_edges: int, feature_dim: int) -> None:
    folder.mkdir()
    graph = SyntheticGraph(num_nodes, num_edges, num_communities=max(num_nodes // 200, 1), homophily=0.9)
    write_edges(graph.stream(), folder / "edges.bin", dtype="int32")
    graph.features(feature_dim, "float16", path=folder / "features.npy")


def prepare(folder: Path, root: Path, num_nodes: int, chunk_edges: int) -> None:
    stream = gs.open_edge_stream(
        folder / "edges.bin", num_nodes=num_nodes, dtype="int32", to_undirected=True, chunk_edges=chunk_edges
    )
    dataset = GraphDataset("files", stream, folder / "features.npy")
    gs.PartitionDataModule(root=root, dataset=dataset, num_parts=8).prepare_data()


def start(*arguments) -> multiprocessing.Process:
    process = CONTEXT.Process(target=prepare, args=arguments)
    process.start()
    return process


def undisturbed_s(*arguments) -> float:
    begun, process = time.monotonic(), start(*arguments)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - begun


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "feature_dim", "chunk_edges", "num_kills"),
    [
        (50_000, 800_000, 32, 80_000, 8),
        pytest.param(100_000, 2_000_000, 32, 200_000, 20, marks=pytest.mark.slow),
        pytest.param(4_000_000, 100_000_000, 64, 1 << 22, 20, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_killed_preparation_goes_on(tmp_path, num_nodes, num_edges, feature_dim, chunk_edges, num_kills):
    """Killed 8 times; `slow` kills 20 times, also with a graph whose store takes minutes."""
    given, compiled, whole, root = (tmp_path / name for name in ("given", "compiled", "whole", "killed"))
    write_input(given, num_nodes, num_edges, feature_dim)
    undisturbed_s(given, compiled, num_nodes, chunk_edges)
    whole_s = undisturbed_s(given, whole, num_nodes, chunk_edges)
    expected, moments = digests(whole), random.Random(0)
    num_killed, num_finished = 0, 0
    while num_killed < num_kills or not num_finished:
        process = start(given, root, num_nodes, chunk_edges)
        process.join(timeout=whole_s * moments.uniform(0.05, 0.95) if num_killed < num_kills else None)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            num_killed += 1
            num_finished = 0
        else:  # finished what the kills before had left: from the start again
            assert process.exitcode == 0 and digests(root) == expected
            gs.PartitionStore.open(root).verify()
            num_finished += 1
            shutil.rmtree(root)
            Path(f"{root}.source.json").unlink()
    ends = (".lock", ".source.json", ".verified.json")
    left = [path.name for path in tmp_path.iterdir() if path not in (given, compiled, whole)]
    assert [name for name in left if not name.endswith(ends)] == []


@pytest.mark.parametrize("note", ["verified.json", "source.json"])
def test_killed_while_a_note_is_written(tmp_path, note):
    """What a kill leaves of a note beside the store is taken over by the next one."""
    given, root = tmp_path / "given", tmp_path / "store"
    write_input(given, 1000, 8000, 4)
    unfinished = tmp_path / f"store.{note}.tmp"
    unfinished.write_text("{ unfin")
    prepare(given, root, 1000, 8000)
    assert not unfinished.exists()
    gs.PartitionStore.open(root).verify()
