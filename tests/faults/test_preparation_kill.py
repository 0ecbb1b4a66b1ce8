"""A DataModule's preparation killed at 20 random moments, then begun again: the store of an undisturbed one."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph, write_edges
from tests.faults.build_store import digests

NUM_NODES, NUM_EDGES, NUM_KILLS = 100_000, 2_000_000, 20
# Imported once: a child is then killed in its work, not in its imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_gnnscale.datamodule"])


def prepare(folder: Path, root: Path) -> None:
    stream = gs.open_edge_stream(
        folder / "edges.bin", num_nodes=NUM_NODES, dtype="int32", to_undirected=True, chunk_edges=200_000
    )
    dataset = GraphDataset("files", stream, folder / "features.npy")
    gs.PartitionDataModule(root=root, dataset=dataset, num_parts=8).prepare_data()


def start(folder: Path, root: Path) -> multiprocessing.Process:
    process = CONTEXT.Process(target=prepare, args=(folder, root))
    process.start()
    return process


def test_killed_preparation_goes_on(tmp_path):
    graph = SyntheticGraph(NUM_NODES, NUM_EDGES, num_communities=500, homophily=0.9)
    write_edges(graph.stream(), tmp_path / "edges.bin", dtype="int32")
    graph.features(32, "float16", path=tmp_path / "features.npy")
    for _ in range(2):  # the first one also compiles
        shutil.rmtree(tmp_path / "whole", ignore_errors=True)
        begun, whole = time.monotonic(), start(tmp_path, tmp_path / "whole")
        whole.join()
        whole_s = time.monotonic() - begun
        assert whole.exitcode == 0
    expected, moments = digests(tmp_path / "whole"), random.Random(0)
    root, num_killed, num_finished = tmp_path / "killed", 0, 0
    while num_killed < NUM_KILLS or not num_finished:
        process = start(tmp_path, root)
        process.join(timeout=whole_s * moments.uniform(0.05, 0.95) if num_killed < NUM_KILLS else None)
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
    left = {path.name for path in tmp_path.iterdir()} - {"whole", "edges.bin", "features.npy"}
    assert all(name.endswith((".lock", ".source.json")) for name in left), left
