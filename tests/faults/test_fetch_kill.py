"""`gnnscale train store=s3://...` that is killed while it fetches: it goes on, and no byte comes twice."""

import random
import signal
import subprocess
import sys
import time

import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.partition_store import publish

KILLS, BLOCK_BYTES = 5, 8 << 20  # a block is what is fetched, checked and settled as one


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_command_fetches_what_is_left(tmp_path, s3):
    """Beside the bytes of the store: those on their way at a kill, a few blocks each."""
    graph, chosen = SyntheticGraph(1_000_000, 4_000_000, num_communities=8, homophily=0.9, seed=0), random.Random(0)
    stream = graph.stream(to_undirected=True)
    parts = gs.partition(stream, "spring", num_parts=4, seed=1)
    arrays = {"features": graph.features(128, noise=1.0), "labels": graph.labels(), "masks": graph.masks()}
    store = gs.write_partition_store(tmp_path / "store", stream, parts, **arrays)
    publish(store.root, "s3://graphs/store")
    s3.reset()
    data = sum(entry["bytes"] - 128 for entry in store.manifest["files"].values())
    words = ["train", "store=s3://graphs/store", "test=false", "trainer.max_epochs=1", "trainer.accelerator=cpu"]
    words += ["trainer.limit_train_batches=20", "hydra.run.dir=run", "datamodule.interleave_parts=1"]
    command = [sys.executable, "-m", "lightning_gnnscale.cli", *words]
    for kill in range(1, KILLS + 1):
        started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while s3.bytes_given() < data * chosen.uniform(kill - 1, kill) / (KILLS + 1):
            assert started.poll() is None, started.stdout.read().decode()
            time.sleep(0.005)
        started.send_signal(signal.SIGKILL)
        started.communicate()
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout + told.stderr
    given = s3.bytes_given()
    print(f"{given / data:.4f} of the store's {data / 2**20:.0f} MiB given over {KILLS} kills")
    assert given <= data + KILLS * 8 * BLOCK_BYTES
