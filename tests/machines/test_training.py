"""Training on machines that share no folder: the weights of one machine with as many processes."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from several_machines import Machine, cannot_be_made, machines

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.partition_store import publish
from tests.s3_server import s3_server

pytestmark = [
    pytest.mark.skipif(cannot_be_made() is not None, reason=str(cannot_be_made())),
    pytest.mark.timeout(900),
]
RAY_PORT, MEETING_PORT = 6379, 29500
CLI = [sys.executable, "-m", "lightning_gnnscale.cli"]
SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.enable_progress_bar=false", "test=false"]


def write(root: Path, num_nodes: int, num_edges: int, dim: int) -> Path:
    graph = SyntheticGraph(num_nodes, num_edges, num_communities=4, homophily=0.9, seed=0)
    stream = graph.stream(to_undirected=True)
    parts = gs.partition(stream, "streaming_multilevel", num_parts=4, seed=1)
    arrays = {"features": graph.features(dim, noise=1.0), "labels": graph.labels(), "masks": graph.masks()}
    gs.write_partition_store(root, stream, parts, **arrays)
    return root


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("machines") / "store", 3000, 20_000, 16)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    last = max(run.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    return torch.load(last, weights_only=False)["state_dict"]


def on_one_machine(folder: Path, store: Path, num: int, words: list[str]) -> dict[str, torch.Tensor]:
    words = ["train", f"store={store}", *SHORT, *words, f"trainer.devices={num}", "hydra.run.dir=run"]
    launch = [f"--nproc-per-node={num}", "--master-port=29511", "--no-python", *CLI]
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *launch, *words], cwd=folder, check=True)
    return weights_of(folder / "run")


def start_ray(made: list[Machine]) -> None:
    """Start a node of one Ray cluster on each machine."""
    ray, head = str(Path(sys.executable).with_name("ray")), made[0].address
    for machine in made:
        where = [f"--address={head}:{RAY_PORT}"]
        if machine is made[0]:
            where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--temp-dir=/mnt/tmp/ray"]
        size = ["--num-cpus=2", "--object-store-memory=200000000", f"--node-ip-address={machine.address}"]
        machine.run([ray, "start", *where, *size])


def start_training(
    made: list[Machine], words: list[str], store: str = "/mnt/store", **environment: str
) -> list[subprocess.Popen]:
    """Start `gnnscale train` by torchrun, a process a machine."""
    words = ["train", f"store={store}", *SHORT, *words, f"trainer.num_nodes={len(made)}", "trainer.devices=1"]
    started = []
    for machine in made:
        launch = [f"--nnodes={len(made)}", "--nproc-per-node=1", f"--node-rank={machine.number}"]
        launch += [f"--master-addr={made[0].address}", f"--master-port={MEETING_PORT}", "--no-python", *CLI]
        words_here = [*words, "hydra.run.dir=run"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *words_here]
        started.append(machine.start(command, **environment))
    return started


def wait_for(made: list[Machine], started: list[subprocess.Popen], limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    for machine, process in zip(made, started, strict=True):
        try:
            status = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "no end"
        assert status == 0, f"machine {machine.number}, {status}: {(machine.folder / 'log.txt').read_text()[-4000:]}"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


DISTDGL = ["datamodule.scope=graph", "datamodule.row_reads=owners", "strategy/weights=gradient_averaging"]
SAMPLED = ["evaluation=sampled"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(2, [*DISTDGL, *SAMPLED], id="distdgl"),
        pytest.param(2, [*DISTDGL, *SAMPLED, "source.num_threads=3"], id="distdgl-threads", marks=pytest.mark.slow),
        pytest.param(3, [*DISTDGL, *SAMPLED], id="distdgl-3", marks=pytest.mark.slow),
        pytest.param(2, ["strategy/weights=model_averaging", *SAMPLED], id="sdt_gnn", marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_one_machine(tmp_path, store, number, words):
    expected = on_one_machine(tmp_path / "one", store, number, words)
    (tmp_path / "made").mkdir()
    with machines(number, tmp_path / "made") as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        if words[1] == DISTDGL[1]:
            start_ray(made)
        wait_for(made, start_training(made, words))
        assert same(weights_of(made[0].folder / "home" / "run"), expected)
        assert not list((made[1].folder / "home").glob("run/checkpoints/*")), "the run's folder is on the first machine"


@pytest.mark.slow  # of a store that is larger than the blocks that are fetched
def test_a_machine_fetches_the_rows_that_it_owns(tmp_path, s3):
    store, words = write(tmp_path / "store", 100_000, 400_000, 128), [*DISTDGL, *SAMPLED, "sampler.fanouts=[5,5]"]
    publish(store, "s3://graphs/store")
    expected = on_one_machine(tmp_path / "one", store, 2, words)
    (tmp_path / "made").mkdir()
    with machines(2, tmp_path / "made") as made, s3_server("10.77.0.100") as served:
        start_ray(made)
        wait_for(made, start_training(made, words, "s3://graphs/store", AWS_ENDPOINT_URL=served.host))
        assert same(weights_of(made[0].folder / "home" / "run"), expected)
    size = (store / "features.npy").stat().st_size
    assert size - 128 <= served.bytes_given("features.npy") < 1.4 * size, "each row on one machine, and whole blocks"
    asked = Counter((key, span) for key, _, span in served.given if key.endswith("features.npy"))
    assert max(asked.values()) <= 2
