"""`gnnscale partition` killed at random moments, then typed again: the store is the one of an undisturbed run."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from own_process import OwnProcess, gnnscale, typed

from lightning_gnnscale.edge_stream import SyntheticGraph, write_edges
from lightning_gnnscale.partition_store import PartitionStore
from tests.faults.build_store import digests

NUM_NODES = 100_000


def command(folder: Path, output: Path) -> list[str]:
    """The words behind `gnnscale`."""
    words = ["dataset=files", f"dataset.edges={folder}/edges.bin", "dataset.reader={dtype: int32}"]
    words += [f"dataset.features={folder}/features.npy", f"dataset.num_nodes={NUM_NODES}", "num_parts=8"]
    words += [f"output={output}", f"paths.runs={folder}/runs", "dataset.chunk_edges=200000"]
    return ["partition", *words]


def kill_and_go_on(tmp_path: Path, num_edges: int, num_kills: int) -> None:
    graph = SyntheticGraph(NUM_NODES, num_edges, num_communities=500, homophily=0.9)
    write_edges(graph.stream(), tmp_path / "edges.bin", dtype="int32")
    graph.features(32, "float16", path=tmp_path / "features.npy")
    shell = tmp_path / "shell"
    shell.mkdir()
    start = time.monotonic()
    assert gnnscale(shell, *command(tmp_path, tmp_path / "whole")).returncode == 0
    whole_s = time.monotonic() - start
    moments, output, num_killed = random.Random(0), tmp_path / "killed", 0
    while num_killed < num_kills:
        start = time.monotonic()
        process = OwnProcess(shell, typed, *command(tmp_path, output)).process
        process.join(whole_s * moments.uniform(0.1, 1.0))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            num_killed += 1
        else:
            whole_s = time.monotonic() - start  # the first one was slower: once more, and sooner
            shutil.rmtree(output)
    assert gnnscale(shell, *command(tmp_path, output)).returncode == 0
    assert digests(output) == digests(tmp_path / "whole")
    PartitionStore.open(output).verify()
    left = {path.name for path in tmp_path.iterdir()} - {"shell", "whole", "killed", "runs"}
    left -= {"edges.bin", "features.npy"}
    assert all(name.endswith((".lock", ".source.json", ".verified.json")) for name in left), left


def test_killed_command_goes_on(tmp_path):
    kill_and_go_on(tmp_path, num_edges=1_000_000, num_kills=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_command_goes_on_often(tmp_path):
    kill_and_go_on(tmp_path, num_edges=10_000_000, num_kills=20)
