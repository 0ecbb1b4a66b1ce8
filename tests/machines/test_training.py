"""Training on machines that share no folder: the weights of one machine with as many processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from several_machines import CLI, SHORT, cannot_be_made, machines, start_ray, start_training, wait_for

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.partition_store import publish
from tests.s3_server import s3_server

pytestmark = [
    pytest.mark.skipif(cannot_be_made() is not None, reason=str(cannot_be_made())),
    pytest.mark.timeout(900),
]


def write(root: Path, num_nodes: int, num_edges: int, dim: int, edge_dim: int = 0) -> Path:
    """Write a store; edge_dim: width of the features of its edges, which have classes, too; 0: they have neither."""
    graph = SyntheticGraph(num_nodes, num_edges, num_communities=4, homophily=0.9, seed=0)
    stream = graph.stream(to_undirected=True)
    parts = gs.partition(stream, "streaming_multilevel", num_parts=4, seed=1)
    arrays = {"features": graph.features(dim, noise=1.0), "labels": graph.labels(), "masks": graph.masks()}
    if edge_dim:
        rng, num = np.random.default_rng(0), stream.count()[1]
        arrays |= {"edge_features": rng.random((num, edge_dim), np.float32), "edge_label": rng.integers(0, 3, num)}
    gs.write_partition_store(root, stream, parts, **arrays)
    return root


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    """Stores by name: "plain"; "weighted", with weights, times and features of edges; "typed", with times."""
    root = tmp_path_factory.mktemp("machines")
    made = {"plain": write(root / "plain", 3000, 20_000, 16)}
    rng = np.random.default_rng(0)
    graph = SyntheticGraph(1500, 9000, num_communities=4, homophily=0.9, seed=0)
    edges = np.concatenate([np.stack(chunk[:2]) for chunk in graph.stream().chunks()], axis=1)
    stream = gs.open_edge_stream(edges, num_nodes=1500)
    made["weighted"] = root / "weighted"
    gs.write_partition_store(
        made["weighted"], stream, gs.partition(stream, "streaming_multilevel", num_parts=4, seed=1),
        features=graph.features(16, noise=1.0), labels=graph.labels(), masks=graph.masks(),
        edge_weight=rng.random(edges.shape[1], np.float32), edge_features=rng.random((edges.shape[1], 3), np.float32),
        node_time=rng.integers(0, 90, 1500),
    )  # fmt: skip
    sizes = {"paper": 1200, "author": 500}
    ends = {("paper", "cites", "paper"): 6000, ("author", "writes", "paper"): 3000}
    nodes = {
        name: {"features": rng.random((num, 8), np.float32), "time": rng.integers(0, 90, num)}
        for name, num in sizes.items()
    }
    marks = rng.integers(0, 3, sizes["paper"])
    nodes["paper"]["labels"] = rng.integers(0, 3, sizes["paper"])
    nodes["paper"]["masks"] = {name: marks == number for number, name in enumerate(("train", "val", "test"))}
    typed = {
        (a, name, b): {
            "edges": np.stack([rng.integers(0, sizes[a], num), rng.integers(0, sizes[b], num)]),
            "time": rng.integers(0, 90, num),
        }
        for (a, name, b), num in ends.items()
    }
    dataset = gs.hetero_graph(nodes, typed, separate_reverses=True)
    made["typed"] = root / "typed"
    parts = gs.partition(dataset.stream, "streaming_multilevel", num_parts=4, seed=1)
    gs.write_partition_store(made["typed"], dataset.stream, parts, dataset)
    return made


@pytest.fixture(scope="module")
def store(stores) -> Path:
    return stores["plain"]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    last = max(run.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    return torch.load(last, weights_only=False)["state_dict"]


def on_one_machine(folder: Path, store: Path, num: int, words: list[str]) -> dict[str, torch.Tensor]:
    words = ["train", f"store={store}", *SHORT, *words, f"trainer.devices={num}", "hydra.run.dir=run"]
    launch = [f"--nproc-per-node={num}", "--master-port=29511", "--no-python", *CLI]
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *launch, *words], cwd=folder, check=True)
    return weights_of(folder / "run")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def given_by(run: Path) -> dict[str, object]:
    """What a run has told: its accuracies, what all processes exchanged, and each node's prediction."""
    facts = json.loads((run / "summary.json").read_text())["facts"]
    told = {name: fact for name, fact in facts.items() if "_acc" in name or "_loss" in name or "exchange" in name}
    return told | pq.read_table(run / "predictions.parquet").to_pydict()


DISTDGL = ["datamodule.scope=graph", "rows=owners", "strategy/weights=gradient_averaging"]
SAMPLED, EXACT = ["evaluation=sampled"], ["test=true", "predict=true"]
QUANTISED = [
    "recipe=quantised_deltas",
    "model.backbone.hidden_channels=16",
    "trainer.check_val_every_n_epoch=1",
]
EMBEDDINGS = ["recipe=embeddings", "datamodule.stored_features=false", "model.inputs.dim=16"]
WORKER_ROWS = ["recipe=armada_embeddings", "datamodule.stored_features=false", "model.inputs.dim=16"]
WORKER_ROWS += ["source=processes", "model.inputs.num_workers=2"]
ARMADA = ["recipe=armada", "model.backbone.hidden_channels=16", "source.num_workers=2"]


TYPED = ["typed", *DISTDGL, "sampler=hetero", "model=rgcn", *SAMPLED, *EXACT]
TIMES = ["sampler.temporal_strategy=uniform", "sampler.strictly_before=true"]
WEIGHTED = ["weighted", *DISTDGL, "datamodule.stored_edge_features=false", *SAMPLED, *EXACT]
EDGE_FEATURES = ["weighted", *DISTDGL, "sampler.weighted=true", "model=gat", *SAMPLED, *EXACT]
LINKS = ["typed", *DISTDGL, "sampler=links", "sampler@sampler.sampler=hetero", "sampler.positives=edge"]
LINKS += [
    "model=link_predictor",
    "model.backbone._target_=lightning_gnnscale.model.RGCN",
    "callbacks=links",
    "predict=true",
]
LINKS += ["callbacks.checkpoint.monitor=train_loss", "callbacks.checkpoint.mode=min"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(2, [*TYPED, *TIMES], id="typed, by time"),
        pytest.param(3, TYPED, id="typed-3", marks=pytest.mark.slow),
        pytest.param(2, [*WEIGHTED, "sampler.weighted=true"], id="weighted", marks=pytest.mark.slow),
        pytest.param(2, [*WEIGHTED, *TIMES], id="times of nodes", marks=pytest.mark.slow),
        pytest.param(2, [*WEIGHTED, "sampler=layerwise"], id="layer-wise", marks=pytest.mark.slow),
        pytest.param(2, [*WEIGHTED, "sampler.subgraph_type=induced"], id="induced", marks=pytest.mark.slow),
        pytest.param(2, EDGE_FEATURES, id="edge features", marks=pytest.mark.slow),
        pytest.param(2, LINKS, id="links", marks=pytest.mark.slow),
        pytest.param(2, [*DISTDGL, *EXACT], id="distdgl"),
        pytest.param(2, [*DISTDGL, *SAMPLED, *EXACT], id="distdgl-sampled", marks=pytest.mark.slow),
        pytest.param(2, [*DISTDGL, *EXACT, "source.num_threads=3"], id="distdgl-threads", marks=pytest.mark.slow),
        pytest.param(3, [*DISTDGL, *EXACT], id="distdgl-3", marks=pytest.mark.slow),
        pytest.param(2, ["strategy/weights=model_averaging", *EXACT], id="sdt_gnn", marks=pytest.mark.slow),
        pytest.param(2, [*QUANTISED, *EXACT], id="coded_deltas", marks=pytest.mark.slow),
        pytest.param(2, [*EMBEDDINGS, *EXACT], id="learned rows"),
        pytest.param(3, [*EMBEDDINGS, *EXACT], id="learned rows-3", marks=pytest.mark.slow),
        pytest.param(2, [*WORKER_ROWS, *EXACT], id="rows of workers", marks=pytest.mark.slow),
        pytest.param(2, [*ARMADA, *EXACT], id="armada", marks=pytest.mark.slow),
    ],
)
def test_weights_metrics_and_predictions_are_those_of_one_machine(tmp_path, stores, number, words):
    name, words = (words[0], words[1:]) if words[0] in stores else ("plain", words)
    store = stores[name]
    expected = on_one_machine(tmp_path / "one", store, number, words)
    needs_ray = not {DISTDGL[1], ARMADA[0], WORKER_ROWS[0]}.isdisjoint(words)
    words = [*words, "source.address=auto"] if ARMADA[0] in words else words
    words = [*words, "model.inputs.address=auto"] if WORKER_ROWS[0] in words else words
    (tmp_path / "made").mkdir()
    with machines(number, tmp_path / "made") as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        if needs_ray:
            start_ray(made)
        wait_for(made, start_training(made, words))
        run = made[0].folder / "home" / "run"
        assert same(weights_of(run), expected)
        assert given_by(run) == given_by(tmp_path / "one" / "run")
        left = [path for machine in made for path in machine.folder.glob(".store.scratch/*")]
        left += [path for path in (made[1].folder / "home" / "run").rglob("*") if path.suffix in (".ckpt", ".parquet")]
        assert not left, "tables go, and the run's folder is on the first machine"


KILLED = """
import sys, time
from pathlib import Path
from several_machines import machines
with machines(1, Path(sys.argv[1])) as [machine]:
    machine.start(["sleep", "600"])
    print(machine._init.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGALRM, signal.SIGKILL])
def test_machines_end_with_what_made_them(tmp_path, how):
    """However it is killed: nothing of Ray's stays, say, where a benchmark has run out of time."""
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as made:
        first = psutil.Process(int(made.stdout.readline()))
        inside = first.children(recursive=True)
        made.send_signal(how)
        made.wait(30)
    _, left = psutil.wait_procs([first, *inside], timeout=30)
    assert inside and not left


OWNED_ROWS = [*DISTDGL, *SAMPLED, "sampler.fanouts=[5,5]"]
OWNED_EDGES = [*OWNED_ROWS, "model=gat", "model.backbone.hidden_channels=16"]
OWNED_LABELS = [
    *DISTDGL,
    "sampler=edges",
    "sampler.sampler.fanouts=[3,3]",
    "model=edge_gat",
    "model.backbone.hidden_channels=16",
    "callbacks=links",
    "callbacks.checkpoint.monitor=train_loss",
    "callbacks.checkpoint.mode=min",
]


@pytest.mark.slow  # of stores that are larger than the blocks that are fetched
@pytest.mark.parametrize(
    ("file", "sizes", "words"),
    [
        pytest.param("features", (100_000, 400_000, 128), OWNED_ROWS, id="features"),
        pytest.param("edge_features", (40_000, 400_000, 16, 16), OWNED_EDGES, id="edge features"),
        pytest.param("edge_features", (40_000, 400_000, 16, 16), OWNED_LABELS, id="classes of edges"),
    ],
)
def test_a_machine_fetches_the_rows_that_it_owns(tmp_path, s3, file, sizes, words):
    store = write(tmp_path / "store", *sizes)
    publish(store, "s3://graphs/store")
    expected = on_one_machine(tmp_path / "one", store, 2, words)
    (tmp_path / "made").mkdir()
    with machines(2, tmp_path / "made") as made, s3_server("10.77.0.100") as served:
        start_ray(made)
        wait_for(made, start_training(made, words, "s3://graphs/store", AWS_ENDPOINT_URL=served.host))
        assert same(weights_of(made[0].folder / "home" / "run"), expected)
    size = (store / f"{file}.npy").stat().st_size
    assert size - 128 <= served.bytes_given(f"/{file}.npy") < 1.4 * size, "each row on one machine, and whole blocks"
    asked = Counter((key, span) for key, _, span in served.given if key.endswith(f"/{file}.npy"))
    assert max(asked.values()) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [pytest.param(DISTDGL, id="distdgl"), pytest.param(EMBEDDINGS, id="rows")])
def test_a_run_goes_on_from_what_lies_on_the_first_machine(tmp_path, store, words):
    """The checkpoint is a file of the first machine; learned rows are beside it, each on the machine of its owner."""
    expected = on_one_machine(tmp_path / "one", store, 2, [*words, *EXACT])
    (tmp_path / "made").mkdir()
    with machines(2, tmp_path / "made") as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        if words is DISTDGL:
            start_ray(made)
        wait_for(made, start_training(made, [*words, "trainer.max_epochs=1"]))
        folders = [machine.folder / "home" / "run" / "checkpoints" for machine in made]
        assert (folders[0] / "last.ckpt").is_file() and not list(folders[1].glob("*.ckpt"))
        if words is not DISTDGL:
            rows = [{path.name for path in folder.glob("last.ckpt.rows/rows-*")} for folder in folders]
            assert rows[0] and rows[1] and not rows[0] & rows[1], "each machine has the rows that it owns"
            shutil.move(folders[1] / "last.ckpt.rows", tmp_path / "rows")  # these come from the first machine now
            shutil.copytree(tmp_path / "rows", folders[0] / "last.ckpt.rows", dirs_exist_ok=True)
        shutil.copytree(folders[0], folders[0].with_name("first"))
        wait_for(made, start_training(made, [*words, *EXACT, "resume=/mnt/home/run/first/last.ckpt"]))
        assert same(weights_of(folders[0].parent), expected)
        assert given_by(folders[0].parent) == given_by(tmp_path / "one" / "run")


NO_CHECKPOINTS = ["callbacks.checkpoint=null", "callbacks.last=null", "trainer.enable_checkpointing=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "folder", "size", "words", "told"),
    [
        pytest.param(1, "small", "20k", [], "layerwise1.npy: evaluation writes .*; give .*scratch=", id="table"),
        pytest.param(0, "home/run/checkpoints", "16k", [], "ckpt: cannot be written .*; free space", id="checkpoint"),
        pytest.param(
            0, "home/run", "100k", NO_CHECKPOINTS, "parquet.*: cannot be written: .*; free space", id="joined"
        ),
        pytest.param(1, "home/run", "40k", [], "parquet.1: cannot be written: .*; free space", id="predictions"),
    ],
)
def test_a_full_disk_on_one_machine_ends_both_in_one_line(tmp_path, store, full, folder, size, words, told):
    words = ["strategy/weights=model_averaging", *EXACT, "evaluation.scratch=/mnt/small", *words]
    words += ["model.predict_logits=true", "model.backbone.hidden_channels=64", "strategy.timeout=100"]
    (tmp_path / "made").mkdir()
    with machines(2, tmp_path / "made") as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        made[full].run(["mkdir", "-p", f"/mnt/{folder}"])
        made[full].run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", f"/mnt/{folder}"])
        started = start_training(made, words)
        for machine, process in zip(made, started, strict=True):
            assert process.wait(timeout=90) != 0
            lines = (machine.folder / "log.txt").read_text().splitlines()
            lines = [line for line in lines if line.startswith("gnnscale: ")]
            assert [line for line in lines if re.search(told, line) and "No space left on device" in line], lines
