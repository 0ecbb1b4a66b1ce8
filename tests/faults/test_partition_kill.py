"""`gnnscale partition` killed at random moments, then typed again: the store is the one of an undisturbed run."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_gnnscale.edge_stream import SyntheticGraph, write_edges
from lightning_gnnscale.partition_store import PartitionStore
from tests.faults.build_store import digests

NUM_NODES = 100_000


def command(folder: Path, output: Path) -> list[str]:
    words = ["dataset=files", f"dataset.edges={folder}/edges.bin", "dataset.reader={dtype: int32}"]
    words += [f"dataset.features={folder}/features.npy", f"dataset.num_nodes={NUM_NODES}", "num_parts=8"]
    words += [f"output={output}", f"paths.runs={folder}/runs", "dataset.chunk_edges=200000"]
    return [sys.executable, "-m", "lightning_gnnscale.cli", "partition", *words]


def kill_and_go_on(tmp_path: Path, num_edges: int, num_kills: int) -> None:
    graph = SyntheticGraph(NUM_NODES, num_edges, num_communities=500, homophily=0.9)
    write_edges(graph.stream(), tmp_path / "edges.bin", dtype="int32")
    graph.features(32, "float16", path=tmp_path / "features.npy")
    start = time.monotonic()
    subprocess.run(command(tmp_path, tmp_path / "whole"), check=True, capture_output=True)
    whole_s = time.monotonic() - start
    moments, output, num_killed = random.Random(0), tmp_path / "killed", 0
    while num_killed < num_kills:
        start = time.monotonic()
        process = subprocess.Popen(command(tmp_path, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=whole_s * moments.uniform(0.4, 1.0))
            whole_s = time.monotonic() - start  # the first one was slower: once more, and sooner
            shutil.rmtree(output)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            num_killed += 1
    subprocess.run(command(tmp_path, output), check=True, capture_output=True)
    assert digests(output) == digests(tmp_path / "whole")
    PartitionStore.open(output).verify()
    left = {path.name for path in tmp_path.iterdir()} - {"whole", "killed", "runs", "edges.bin", "features.npy"}
    assert all(name.endswith((".lock", ".source.json", ".verified.json")) for name in left), left


def test_killed_command_goes_on(tmp_path):
    kill_and_go_on(tmp_path, num_edges=2_000_000, num_kills=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_command_goes_on_often(tmp_path):
    kill_and_go_on(tmp_path, num_edges=10_000_000, num_kills=20)
