"""Each stage of a run in a process of its own, uncapped and under caps of memory that count the page cache too."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.edge_stream.synthetic import SyntheticGraph, lfr_graph
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.events import recent
from lightning_gnnscale.memory import format_bytes, parse_bytes
from lightning_gnnscale.partitioner import Partitioning
from lightning_gnnscale.system import end_with_parent

from .page_cache import evict
from .present import LEFT, grouped, panels, save, show
from .runner import Case, Runner, benchmark, digest, machine_line
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
    "written_bytes": ("written", format_bytes),
    "used_bytes": ("used by batches", format_bytes),
    "major_faults": ("major faults", ">"),
    "peak_bytes": ("peak", format_bytes),
    "note": ("note", LEFT),
}


@dataclass(frozen=True)
class MemoryBench:
    """Run each stage on a cold cache without a cap and under each cap, one after the other.

    A stage that reads a store reads one that was written under its own cap, since what memory is free decides the
    layout. Writes `memory.csv`, `memory.png`, the graph and the store; the run folder must be on a disk.

    Attributes:
        num_nodes, num_edges, feature_dim: The generated graph, which has communities and float16 features.
        graph: Arguments of `SyntheticGraph` in place of those of the LFR benchmark; None: LFR.
        overlapping_rows: Row i of the features begins at the i-th of the values in their file, which then takes 2 bytes
            a node. What is stored of them, and read, is as large as ever; they tell nothing of the labels.
        feature_storage: How the store keeps features; None: as they are.
        column_bytes: Bytes a node of a further column of the nodes, which every batch has; 0: none.
        rows: How training batches get their rows, see `PartitionDataModule`.
        partitioner, partition_options, num_parts: How the store is cut.
        stages: Any of "partition", "store", "batches" (an epoch of them), "train" (an epoch), "evaluate" (all nodes,
            exact), "predict".
        caps: in units of the store's bytes that a run without a cap has written; or sizes such as "8GiB".
        interpreter_bytes: what a process holds before any work, added to each cap that is a share of the store.
        uncapped: Also run each stage without a cap. False needs caps that are sizes.
        fanouts, batch_size, hidden_channels: The GraphSAGE that trains; it has one layer a fan-out.
        train_share: share of the nodes that train.
        test_share: share of the nodes that are evaluated; None: all that neither train nor validate.
        table_dtype: of evaluation's tables of hidden layers, see `EvaluationOptions`.
        limit_s: seconds after which a case is ended, and its row says so.
        pyg_python: interpreter of an environment with PyG and torch-sparse or pyg-lib. Its NeighborLoader then runs on
            the same memory-mapped features under the same caps, its structure in memory. None: it is left out.
        peer_batches: batches that it makes.
    """

    num_nodes: int = 1_000_000
    num_edges: int = 10_000_000
    feature_dim: int = 128
    graph: dict | None = None
    overlapping_rows: bool = False
    feature_storage: str | None = None
    column_bytes: int = 0
    rows: str = "auto"
    partitioner: str = "streaming_multilevel"
    partition_options: dict = field(default_factory=dict)
    num_parts: int = 32
    stages: Sequence[str] = STAGES
    caps: Sequence[float | str] = (2, 1, 0.5, 0.25)
    interpreter_bytes: int | str = "400MiB"
    uncapped: bool = True
    fanouts: Sequence[int] = (15, 10, 5)
    batch_size: int = 1024
    hidden_channels: int = 128
    train_share: float = 0.08
    test_share: float | None = None
    table_dtype: str = "float32"
    limit_s: float = 600
    pyg_python: str | None = None
    peer_batches: int = 32

    def __post_init__(self):
        unknown = sorted(set(self.stages) - set(STAGES))
        sizes = [parse_bytes(cap, "bench.caps") if isinstance(cap, str) else cap for cap in self.caps]
        if unknown or not all(cap > 0 for cap in sizes):
            got = unknown or list(self.caps)
            raise ValueError(f"bench.stages must be of {', '.join(STAGES)}, bench.caps above 0, got {got}")
        if not self.uncapped and not all(isinstance(cap, str) for cap in self.caps):
            got = list(self.caps)
            raise ValueError(f"bench.uncapped=false needs bench.caps that are sizes such as 8GiB, got {got}")
        parse_bytes(self.interpreter_bytes, "bench.interpreter_bytes")

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row a case.

        It has seconds, bytes read, major faults, peak, seeds a second of batches, and speed against the uncapped case.

        Raises:
            GNNScaleError: no memory cgroup can be made here.
        """
        folder, base = runner.folder, parse_bytes(self.interpreter_bytes, "bench.interpreter_bytes")
        folder.mkdir(parents=True, exist_ok=True)
        stages = [*self.stages, *[PYG] * (self.pyg_python is not None)]
        store_bytes, graph = cache(partial(self._store_bytes, folder)), cache(partial(self._make_graph, folder))

        def measured(stage: str, cap: float | str | None, label: str) -> dict:
            graph()
            total = store_bytes() if self.uncapped else 0
            limit = int(cap * total) + base if isinstance(cap, int | float) else parse_bytes(cap)
            if stage == PYG:
                return {"cap_bytes": limit, **self._run_pyg(folder, limit)}
            stands = (folder / f"store-{label}" / "manifest.json").is_file()
            if not stands and stage not in ("partition", "store"):
                self._make(folder, "store", limit, label)
            return {"cap_bytes": limit, **self._run_stage(folder, stage, limit, label)}

        rows: list[dict] = []
        facts = (self.num_nodes, self.partitioner, self.num_parts, list(self.fanouts), self.batch_size)
        facts += (self.hidden_channels, self.num_edges, self.feature_dim, self.train_share, base, self.peer_batches)
        facts += (*self._further_facts(), *[("rows", self.rows)] * (self.rows != "auto"))
        for cap in (*[None] * self.uncapped, *self.caps):
            label = "none" if cap is None else cap if isinstance(cap, str) else f"{cap:g}"
            cases = [
                Case({"stage": stage, "cap": label, "settings": digest(*facts)}, partial(measured, stage, cap, label))
                for stage in stages
            ]
            rows += runner.rows(cases, "memory.csv", failed=lambda row: bool(row["note"] and row["seconds"] is None))
            if cap is not None and self.uncapped:
                shutil.rmtree(folder / f"store-{label}", ignore_errors=True)
        rows.sort(key=lambda row: stages.index(row["stage"]))
        uncapped = {row["stage"]: row["seconds"] for row in rows if row["cap"] == "none"}
        for row in rows:
            seconds, before = row["seconds"], uncapped.get(row["stage"])
            row["speed"] = round(before / seconds, 2) if seconds and before else None
        if rows:
            sizes = [path for path in folder.glob("store-*") if (path / "manifest.json").is_file()]
            title = ", ".join(f"{path.name} of {format_bytes(_bytes_in(path))}" for path in sizes)
            _present(rows, folder / "memory.png", f"{title or 'graph'}, cold cache")
        return rows

    def _further_facts(self) -> tuple:
        """Return what other settings than those of older rows decide, where they are not the defaults."""
        names = ("graph", "overlapping_rows", "feature_storage", "column_bytes", "partition_options", "test_share")
        return tuple((name, getattr(self, name)) for name in names if getattr(self, name) not in (None, False, {}, 0))

    def _make_graph(self, folder: Path) -> None:
        """Write edges, features, labels and masks, where they are not there."""
        size = (self.num_nodes, self.num_edges)
        facts = (*size, self.feature_dim, self.train_share, self.partitioner, self.num_parts, *self._further_facts())
        _keep_to(folder / "settings", digest(*facts))
        graph = lfr_graph(*size) if self.graph is None else SyntheticGraph(*size, **self.graph)
        if not (folder / "edges.bin").is_file():
            write_edges(graph.stream(1 << 22), folder / "edges.bin", dtype="int32")
        if not (folder / "features.npy").is_file():
            if self.overlapping_rows:
                values = np.random.default_rng(0).standard_normal(self.num_nodes + self.feature_dim, dtype=np.float32)
                np.save(folder / "features.npy", values.astype(np.float16))
            else:
                graph.features(dim=self.feature_dim, noise=1.0, dtype="float16", path=folder / "features.npy")
        if not (folder / "masks.npz").is_file():
            masks = graph.masks(self.train_share, self.train_share / 8, self.test_share)
            np.savez(folder / "masks.npz", labels=graph.labels() % 32, **masks)

    def _features(self, folder: Path) -> np.ndarray:
        """Return the (num_nodes, feature_dim) float16 features, mapped."""
        values = np.load(folder / "features.npy", mmap_mode="r")
        if not self.overlapping_rows:
            return values
        shape = (self.num_nodes, self.feature_dim)
        return np.ndarray(shape, values.dtype, buffer=values, strides=2 * values.strides)

    def _columns(self, folder: Path) -> dict[str, np.ndarray]:
        """Return the further columns of the nodes, in rows that overlap in a file of a byte a node."""
        if not self.column_bytes:
            return {}
        path = folder / "column.npy"
        if not path.is_file():
            np.save(path, np.random.default_rng(1).integers(0, 256, self.num_nodes + self.column_bytes, dtype=np.uint8))
        values = np.load(path, mmap_mode="r")
        shape = (self.num_nodes, self.column_bytes)
        return {"image": np.ndarray(shape, values.dtype, buffer=values, strides=2 * values.strides)}

    def _store_bytes(self, folder: Path) -> int:
        """Make the graph's store without a cap, where it is not there; return its bytes."""
        if not (folder / "store-none" / "manifest.json").is_file():
            for stage in ("partition", "store"):
                self._make(folder, stage, None, "none")
        return _bytes_in(folder / "store-none")

    def _make(self, folder: Path, stage: str, cap_bytes: int | None, label: str) -> None:
        """Run a stage that others need; raise GNNScaleError where it fails."""
        row = self._run_stage(folder, stage, cap_bytes, label)
        if row["seconds"] is None:
            cap = "without a cap" if cap_bytes is None else f"under a cap of {format_bytes(cap_bytes)}"
            raise GNNScaleError(f"bench memory: the {stage} stage failed {cap}: {row['note']}")

    def _run_stage(self, folder: Path, stage: str, cap_bytes: int | None, label: str) -> dict:
        """Run a stage in a fresh process in a memory group of its own, on a cold cache."""
        with _memory_group(folder, cap_bytes) as (procs, row):
            code = "import sys; from benchmarks.memory import work; work(*sys.argv[1:])"
            words = [sys.executable, "-c", code, json.dumps(asdict(self)), str(folder), stage, str(procs), label]
            try:
                limits = {"timeout": self.limit_s, "preexec_fn": end_with_parent}
                done = subprocess.run(words, capture_output=True, text=True, **limits)
                told = done.stdout.strip().splitlines()[-1:]
                if told and done.returncode == 0:
                    row |= json.loads(told[0])
                elif done.returncode == -9:
                    row["note"] = "killed for memory"
                else:
                    error = (done.stderr.strip().splitlines() or [""])[-1][:160]
                    row["note"] = f"{done.returncode}: {error}".rstrip(": ")
            except subprocess.TimeoutExpired:
                row["note"] = f"over {self.limit_s:g} s"
        return row

    def _run_pyg(self, folder: Path, cap_bytes: int | None) -> dict:
        """Run PyG's NeighborLoader over memory-mapped features, likewise: an epoch of so many batches."""
        self._write_for_pyg(folder)
        options = {"fanouts": list(self.fanouts), "batch_size": self.batch_size, "map": True}
        with _memory_group(folder, cap_bytes) as (procs, row):
            try:
                with Peer(PYG, str(self.pyg_python), folder, options, procs, self.limit_s) as peer:
                    taken = peer.contender(workers=0)()
                    row |= {"seconds": round(taken.wall_s, 2), "seeds": taken.seeds}
            except ValueError as error:
                row["note"] = str(error).split(": ", 1)[-1]
        return row

    def _write_for_pyg(self, folder: Path) -> None:
        """Write the graph that `peer_worker.py` reads, beside the features."""
        import scipy.sparse

        if not (folder / "indices.npy").is_file():
            src, dst = np.fromfile(folder / "edges.bin", np.int32).reshape(-1, 2).T
            ones, both = np.ones(2 * len(src), np.int8), (np.concatenate([dst, src]), np.concatenate([src, dst]))
            csr = scipy.sparse.coo_matrix((ones, both), shape=(self.num_nodes, self.num_nodes)).tocsr()
            np.save(folder / "indptr.npy", csr.indptr.astype(np.int64))
            np.save(folder / "indices.npy", csr.indices)
        with np.load(folder / "masks.npz", allow_pickle=False) as arrays:
            train = np.flatnonzero(arrays["train"])
        seeds = np.random.default_rng(0).permutation(train)[: self.peer_batches * self.batch_size]
        np.save(folder / "seeds.npy", np.sort(seeds))

    def stage(self, folder: Path, stage: str, store: str) -> Callable[[], dict | None]:
        """Return what is to be measured, as a call; what it needs has been imported."""
        import lightning as L

        import lightning_gnnscale as gs

        stream = open_edge_stream(folder / "edges.bin", num_nodes=self.num_nodes, to_undirected=True, dtype="int32")
        if stage == "partition":
            options = {"num_parts": self.num_parts, **self.partition_options}

            def cut() -> dict:
                parts = gs.partition(stream, self.partitioner, **options)
                parts.save(folder / "parts")
                return {"note": f"cut {parts.quality.edge_cut_ratio:.3f}" if parts.quality else ""}

            return cut
        with np.load(folder / "masks.npz", allow_pickle=False) as arrays:
            arrays = dict(arrays)
        if stage == "store":
            columns = {"features": self._features(folder), "labels": arrays.pop("labels"), "masks": arrays}
            columns |= {"node_columns": self._columns(folder)}
            options = {"dataset": gs.GraphDataset("memory", stream, **columns), "feature_storage": self.feature_storage}
            options |= {"partitioner": partial(_kept_partitioning, str(folder / "parts")), "num_parts": self.num_parts}
            making = gs.PartitionDataModule(root=folder / store, overwrite=True, **options)
            making.verify = False
            return making.prepare_data
        options = {"batch_size": self.batch_size, "source": gs.Threads(2), "rows": self.rows}
        options |= {"evaluation": gs.EvaluationOptions(table_dtype=self.table_dtype)}
        data = gs.PartitionDataModule(store=folder / store, sampler=gs.NeighborSampler(self.fanouts), **options)
        data.verify = False  # a read of its own, once a machine
        backbone = gs.model.GraphSAGE(data.num_features, self.hidden_channels, 32, num_layers=len(self.fanouts))
        model = gs.NodeClassifier(backbone, lr=0.01)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "limit_val_batches": 0, "default_root_dir": folder}
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=gs.GNNScaleStrategy(), **quiet)
        if stage == "batches":
            data.trainer = trainer  # whose weights decide how batches are made
            loader = data.train_dataloader()
            return lambda: {
                "seeds": sum(batch.batch_size for batch in loader if batch is not None),
                "note": loader.reads.how,
            }
        if stage == "train":
            return lambda: trainer.fit(model, data)
        if stage == "evaluate":
            return lambda: trainer.test(model, data, verbose=False) and None
        return lambda: trainer.predict(model, data, return_predictions=False)


run = benchmark(MemoryBench)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _keep_to(path: Path, settings: str) -> None:
    """Raise GNNScaleError where the graph and the store of the folder have other settings."""
    if path.is_file() and path.read_text() != settings:
        raise GNNScaleError(f"{path.parent} holds a graph of other settings: give another hydra.run.dir=")
    path.write_text(settings)


@contextmanager
def _memory_group(folder: Path, cap_bytes: int | None) -> Iterator[tuple[Path, dict]]:
    """Make a memory group on a cold cache; yield its file of processes, and a row that gets its figures at the end."""
    group, names = _new_group(cap_bytes)
    for path in (folder / "edges.bin", *folder.rglob("*.np*")):
        evict(path)
    row = {"seconds": None, "read_bytes": None, "note": "", "seeds": None}
    began = time.perf_counter()
    try:
        yield group / "cgroup.procs", row
    finally:
        row["process_s"] = round(time.perf_counter() - began, 1)
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        row["peak_bytes"] = int(peak.read_text()) if (peak := group / names[1]).is_file() else None
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


def work(bench: str, folder: str, stage: str, procs: str, label: str) -> None:
    """Join a memory group, run a stage, and print its seconds and bytes read as JSON; the process is fresh."""
    Path(procs).write_text(str(os.getpid()))
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    action = MemoryBench(**json.loads(bench)).stage(Path(folder), stage, f"store-{label}")
    begin_bytes, began = _disk_bytes(), time.perf_counter()
    told = action()
    seconds = time.perf_counter() - began
    end_bytes = _disk_bytes()
    read_bytes, written_bytes = (end - begin for end, begin in zip(end_bytes, begin_bytes, strict=True))
    facts = {"seconds": round(seconds, 2), "read_bytes": read_bytes, "written_bytes": written_bytes, **(told or {})}
    reads = [event for event in recent() if event["event"] == "rows_read"]
    facts |= {name: reads[-1].get(name) for name in ("used_bytes", "feature_bytes", "passes")} if reads else {}
    print(json.dumps(facts), flush=True)
    os._exit(0)  # what threads still hold does not matter


def _disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from the disk and written to it."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"]), int(facts["write_bytes"])


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
    show(shown, COLUMNS, title, machine_line())
    compared = [row for row in rows if row["speed"] is not None]
    if not compared:
        return
    figure, found = panels([""], size=(7, 4), beside=0)
    axes = found[""]
    for (stage,), own in grouped(compared, "stage").items():
        axes.plot([row["cap"] for row in own], [row["speed"] for row in own], "-o", label=stage)
    axes.set(xlabel="cap of memory, stores", ylabel="speed, 1 = without a cap", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    save(figure, plot)
