"""Each stage of a run in a process of its own, uncapped and under caps of memory that count the page cache too."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from ..edge_stream import open_edge_stream, write_edges
from ..edge_stream.synthetic import lfr_graph
from ..errors import GNNScaleError
from ..memory import evict, format_bytes, parse_bytes
from ..partitioner import Partitioning
from .present import LEFT, panels, save, table, tell
from .runner import Case, Runner, digest, machine_line
from .turns import Peer

PYG = "pyg"  # what a user would do without this package
STAGES = ("partition", "store", "batches", "train", "evaluate", "predict")
GROUPS = (
    # Folder of the controller, its file of the cap, of the peak, and of the faults.
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes", "total_pgmajfault"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak", "pgmajfault"),
)

COLUMNS = {
    "stage": ("stage", LEFT),
    "cap": ("cap, stores", ">"),
    "seconds": ("seconds", ".2f"),
    "rate": ("seeds/s", ",.0f"),
    "speed_told": ("of uncapped speed", ".2f"),
    "read_bytes": ("read", format_bytes),
    "major_faults": ("major faults", ">"),
    "peak_bytes": ("peak", format_bytes),
    "note": ("note", LEFT),
}


@dataclass(frozen=True)
class MemoryCase:
    """What the stages are run on; plain values, handed to each process.

    Attributes:
        folder: generated graph, partitioning and store.
        num_nodes, partitioner, num_parts: see `run`.
        fanouts, batch_size, hidden_channels: The settings of training.
    """

    folder: str
    num_nodes: int
    partitioner: str
    num_parts: int
    fanouts: list[int]
    batch_size: int
    hidden_channels: int


def run(
    output_dir: str | os.PathLike,
    num_nodes: int = 1_000_000,
    num_edges: int = 10_000_000,
    feature_dim: int = 128,
    partitioner: str = "streaming_multilevel",
    num_parts: int = 32,
    stages: Sequence[str] = STAGES,
    caps: Sequence[float] = (2, 1, 0.5, 0.25),
    interpreter_bytes: int | str = "400MiB",
    fanouts: Sequence[int] = (15, 10, 5),
    batch_size: int = 1024,
    hidden_channels: int = 128,
    train_share: float = 0.08,
    limit_s: float = 600,
    pyg_python: str | None = None,
    peer_batches: int = 32,
    minutes: float | None = None,
    again: str = "none",
) -> list[dict]:
    """Run each stage on a cold cache without a cap and under each cap, one after the other.

    A stage that reads a store reads one that was written under its own cap, since what memory is free decides the
    layout.

    Args:
        output_dir: folder of `memory.csv`, the graph and the store, on a disk.
        num_nodes, num_edges, feature_dim: The generated graph, which has communities and float16 features.
        partitioner, num_parts: How the store is cut.
        stages: Any of "partition", "store", "batches" (an epoch of them), "train" (an epoch), "evaluate" (all nodes,
            exact), "predict".
        caps: in units of the finished store's bytes.
        interpreter_bytes: what a process holds before any work, added to each cap.
        fanouts, batch_size, hidden_channels: The GraphSAGE that trains; it has one layer a fan-out.
        train_share: share of the nodes that train.
        limit_s: seconds after which a case is ended, and its row says so.
        pyg_python: interpreter of an environment with PyG and torch-sparse or pyg-lib. Its NeighborLoader then runs on
            the same memory-mapped features under the same caps, its structure in memory. None: it is left out.
        peer_batches: batches that it makes.
        minutes, again: See `Runner`.

    Returns:
        One row a case: seconds, bytes read, major faults, peak, seeds a second of batches, and speed against the
        uncapped case.

    Raises:
        GNNScaleError: no memory cgroup can be made here.
        ValueError: a stage is unknown, or a cap is not above 0.
    """
    unknown = sorted(set(stages) - set(STAGES))
    if unknown or not all(cap > 0 for cap in caps):
        raise ValueError(
            f"bench.stages must be of {', '.join(STAGES)}, bench.caps above 0, got {unknown or list(caps)}"
        )
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shape = MemoryCase(
        str(folder), num_nodes, partitioner, num_parts, list(fanouts), int(batch_size), int(hidden_channels)
    )
    base = parse_bytes(interpreter_bytes, "bench.interpreter_bytes")
    stages = [*stages, *[PYG] * (pyg_python is not None)]

    @cache
    def store_bytes() -> int:
        _keep_to(folder / "settings", digest(num_nodes, num_edges, feature_dim, train_share, partitioner, num_parts))
        _generate(folder, num_nodes, num_edges, feature_dim, train_share)
        if not (folder / "store-none" / "manifest.json").is_file():
            for stage in ("partition", "store"):
                _make(shape, stage, None, limit_s)
        return sum(path.stat().st_size for path in (folder / "store-none").iterdir())

    def measured(stage: str, cap: float | None, label: str) -> dict:
        limit = None if cap is None else int(cap * store_bytes()) + base
        if cap is None:
            store_bytes()
        stands = (folder / f"store-{label}" / "manifest.json").is_file()
        if not stands and stage not in ("partition", "store", PYG):
            _make(shape, "store", limit, limit_s, label)
        if stage == PYG:
            return {"cap_bytes": limit, **_measure_pyg(shape, str(pyg_python), peer_batches, limit, limit_s)}
        return {"cap_bytes": limit, **_measure(shape, stage, limit, limit_s, label)}

    rows: list[dict] = []
    sizes = (num_edges, feature_dim, train_share, base, peer_batches)
    settings = digest(*(value for name, value in vars(shape).items() if name != "folder"), *sizes)
    with Runner(folder, minutes, again) as runner:
        for cap in (None, *caps):
            label = "none" if cap is None else f"{cap:g}"
            cases = [
                Case({"stage": stage, "cap": label, "settings": settings}, partial(measured, stage, cap, label))
                for stage in stages
            ]
            rows += runner.rows(cases, "memory.csv", failed=lambda row: bool(row["note"] and row["seconds"] is None))
            if cap is not None:
                shutil.rmtree(folder / f"store-{label}", ignore_errors=True)
        rows.sort(key=lambda row: stages.index(row["stage"]))
        uncapped = {row["stage"]: row["seconds"] for row in rows if row["cap"] == "none"}
        for row in rows:
            seconds, before = row["seconds"], uncapped.get(row["stage"])
            row["speed"] = round(before / seconds, 2) if seconds and before else None
        if rows:
            _present(rows, folder / "memory.png", f"store of {format_bytes(store_bytes())}, cold cache")
    return rows


def _keep_to(path: Path, settings: str) -> None:
    """Raise GNNScaleError where the graph and the store of the folder are of other settings."""
    if path.is_file() and path.read_text() != settings:
        raise GNNScaleError(f"{path.parent} holds a graph of other settings: give another hydra.run.dir=")
    path.write_text(settings)


def _generate(folder: Path, num_nodes: int, num_edges: int, dim: int, train_share: float) -> None:
    graph = lfr_graph(num_nodes, num_edges)
    if not (folder / "edges.bin").is_file():
        write_edges(graph.stream(1 << 22), folder / "edges.bin", dtype="int32")
    if not (folder / "features.npy").is_file():
        graph.features(dim=dim, noise=1.0, dtype="float16", path=folder / "features.npy")
    if not (folder / "masks.npz").is_file():
        masks = graph.masks(train_share, train_share / 8)
        np.savez(folder / "masks.npz", labels=graph.labels() % 32, **masks)


def _make(shape: MemoryCase, stage: str, cap_bytes: int | None, limit_s: float, label: str = "none") -> None:
    """Run a stage that others need.

    Raises:
        GNNScaleError: it failed.
    """
    note = _measure(shape, stage, cap_bytes, limit_s, label)["note"]
    if note:
        cap = "without a cap" if cap_bytes is None else f"under a cap of {format_bytes(cap_bytes)}"
        raise GNNScaleError(f"bench memory: the {stage} stage failed {cap}: {note}")


def _measure(shape: MemoryCase, stage: str, cap_bytes: int | None, limit_s: float, label: str = "none") -> dict:
    """Run a stage in a fresh process in a memory group of its own, on a cold cache."""
    with _memory_group(shape, cap_bytes) as (procs, row):
        code = "import sys; from lightning_gnnscale.bench.memory import work; work(*sys.argv[1:])"
        words = [sys.executable, "-c", code, json.dumps(vars(shape)), stage, str(procs), label]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
            told, failed = done.stdout.strip().splitlines()[-1:], done.returncode
        except subprocess.TimeoutExpired:
            told, failed = [], f"over {limit_s:g} s"
        if told and failed == 0:
            row |= json.loads(told[0])
        else:
            error = "" if isinstance(failed, str) else (done.stderr.strip().splitlines() or [""])[-1][:160]
            row["note"] = "killed for memory" if failed == -9 else f"{failed}: {error}".rstrip(": ")
    return row


def _measure_pyg(shape: MemoryCase, python: str, num_batches: int, cap_bytes: int | None, limit_s: float) -> dict:
    """Run PyG's NeighborLoader over memory-mapped features, likewise: an epoch of so many batches."""
    folder = Path(shape.folder)
    _write_for_pyg(shape, num_batches)
    with _memory_group(shape, cap_bytes) as (procs, row):
        options = {"fanouts": shape.fanouts, "batch_size": shape.batch_size, "map": True}
        peer = None
        try:
            peer = Peer("pyg", python, folder, options, procs, limit_s)
            taken = peer.contender(workers=0)()
            row |= {"seconds": round(taken.wall_s, 2), "seeds": taken.seeds}
        except ValueError as error:
            row["note"] = str(error).split(": ", 1)[-1]
        finally:
            if peer is not None:
                peer.close()
    return row


def _write_for_pyg(shape: MemoryCase, num_batches: int) -> None:
    """Write the graph that `peer_worker.py` reads, beside the features."""
    import scipy.sparse

    folder, num_nodes = Path(shape.folder), shape.num_nodes
    if not (folder / "indices.npy").is_file():
        src, dst = np.fromfile(folder / "edges.bin", np.int32).reshape(-1, 2).T
        ones = np.ones(2 * len(src), np.int8)
        both = (np.concatenate([dst, src]), np.concatenate([src, dst]))
        csr = scipy.sparse.coo_matrix((ones, both), shape=(num_nodes, num_nodes)).tocsr()
        np.save(folder / "indptr.npy", csr.indptr.astype(np.int64))
        np.save(folder / "indices.npy", csr.indices)
    with np.load(folder / "masks.npz", allow_pickle=False) as arrays:
        train = np.flatnonzero(arrays["train"])
    seeds = np.random.default_rng(0).permutation(train)[: num_batches * shape.batch_size]
    np.save(folder / "seeds.npy", np.sort(seeds))


@contextmanager
def _memory_group(shape: MemoryCase, cap_bytes: int | None) -> Iterator[tuple[Path, dict]]:
    """Make a memory group on a cold cache; yield its file of processes, and a row that gets its figures at the end."""
    group, names = _new_group(cap_bytes)
    for path in Path(shape.folder).rglob("*.np*"):
        evict(path)
    evict(Path(shape.folder) / "edges.bin")
    row = {"seconds": None, "read_bytes": None, "note": "", "seeds": None}
    began = time.perf_counter()
    try:
        yield group / "cgroup.procs", row
    finally:
        row["process_s"] = round(time.perf_counter() - began, 1)
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        row["peak_bytes"] = _number(group / names[1])
        row["major_faults"] = int(stat.get(names[2], 0))
        time.sleep(0.2)  # the last process leaves the group a moment after it has ended
        group.rmdir()


def _new_group(cap_bytes: int | None) -> tuple[Path, tuple[str, str, str]]:
    for base, *names in GROUPS:
        group = base / f"gnnscale-bench-{os.getpid()}-{time.monotonic_ns()}"
        try:
            group.mkdir()
            if cap_bytes is not None:
                (group / names[0]).write_text(str(cap_bytes))
            if (group / names[0]).is_file():
                return group, tuple(names)
            group.rmdir()
        except OSError:
            continue
    raise GNNScaleError("bench memory needs a memory cgroup that can be written to: run it as root, on Linux")


def _number(path: Path) -> int | None:
    return int(path.read_text()) if path.is_file() else None


def work(shape: str, stage: str, procs: str, label: str) -> None:
    """Join a memory group, run a stage, and print its seconds and bytes read as JSON; the process is fresh."""
    Path(procs).write_text(str(os.getpid()))
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    action = _prepare(MemoryCase(**json.loads(shape)), stage, f"store-{label}")
    begin_bytes, began = _read_bytes(), time.perf_counter()
    told = action()
    seconds = time.perf_counter() - began
    facts = {"seconds": round(seconds, 2), "read_bytes": _read_bytes() - begin_bytes, **(told or {})}
    print(json.dumps(facts), flush=True)
    os._exit(0)  # what threads still hold is of no interest


def _read_bytes() -> int:
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"])


def _prepare(shape: MemoryCase, stage: str, store: str):
    """Return what is to be measured, as a call; what it needs has been imported."""
    import lightning as L

    import lightning_gnnscale as gs

    folder = Path(shape.folder)
    stream = open_edge_stream(folder / "edges.bin", num_nodes=shape.num_nodes, to_undirected=True, dtype="int32")
    if stage == "partition":
        return lambda: gs.partition(stream, method=shape.partitioner, num_parts=shape.num_parts).save(folder / "parts")
    with np.load(folder / "masks.npz", allow_pickle=False) as arrays:
        labels, *masks = (arrays[name] for name in ("labels", "train", "val", "test"))
    if stage == "store":
        options = {"features": folder / "features.npy", "labels": labels}
        options["masks"] = dict(zip(("train", "val", "test"), masks, strict=True))
        kept = partial(_kept_partitioning, str(folder / "parts"))
        making = gs.PartitionDataModule(
            root=folder / store, stream=stream, partitioner=kept, num_parts=shape.num_parts, overwrite=True, **options
        )
        making.verify = False
        return making.prepare_data
    data = gs.PartitionDataModule(
        store=folder / store,
        sampler=gs.NeighborSampler(shape.fanouts),
        batch_size=shape.batch_size,
        source=gs.Threads(2),
    )
    data.verify = False  # a read of its own, once a machine
    backbone = gs.model.GraphSAGE(data.num_features, shape.hidden_channels, 32, num_layers=len(shape.fanouts))
    model = gs.NodeClassifier(backbone, lr=0.01)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, enable_model_summary=False,
        strategy=gs.GNNScaleStrategy(), default_root_dir=folder, **quiet,
    )  # fmt: skip
    if stage == "batches":
        data.trainer = trainer  # whose weights decide how batches are made
        loader = data.train_dataloader()

        def batches() -> dict:
            seeds = sum(batch.batch_size for batch in loader if batch is not None)
            return {"note": loader.reads.how, "seeds": seeds}

        return batches
    if stage == "train":
        return lambda: trainer.fit(model, data)
    if stage == "evaluate":
        return lambda: trainer.test(model, data, verbose=False) and None
    return lambda: trainer.predict(model, data, return_predictions=False)


def _kept_partitioning(path: str, stream, num_parts: int, seed: int, masks, progress) -> Partitioning:
    return Partitioning.load(path)


def _present(rows: list[dict], plot: Path, title: str) -> None:
    """Print the table, and plot the speed of each stage under each cap against its own without one."""
    shown = [
        row
        | {
            "rate": row["seeds"] / row["seconds"] if row.get("seeds") and row["seconds"] else None,
            "speed_told": None if row["cap"] == "none" else row["speed"],
        }
        for row in rows
    ]
    tell(table(shown, COLUMNS, title, machine_line()))
    figure, found = panels([""], size=(7, 4), beside=0)
    axes = found[""]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage and row["speed"] is not None]
        axes.plot([row["cap"] for row in own], [row["speed"] for row in own], "-o", label=stage)
    axes.set(xlabel="cap of memory, stores", ylabel="speed, 1 = without a cap", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    save(figure, plot)
