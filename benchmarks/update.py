"""A stored graph that grows: what updates cost beside writing the store, and what becomes of the cut."""

import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial as bound
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.edge_stream.synthetic import lfr_graph
from lightning_gnnscale.memory import format_bytes
from lightning_gnnscale.memory_peak import MemoryPeak
from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.partition_store.update import _cut_of
from lightning_gnnscale.partitioner import partition

from .graphs import TRAIN_SHARE
from .present import LEFT, show
from .runner import Case, Runner, benchmark, check_names, digest, in_fresh_process, machine_line

GRAPHS = ("lfr", "temporal")
WRITE, AGAIN = "write", "partition again"
ALL, CHANGED, LAYERS = "predict all", "predict what changed", "the same, kept layers"
PREDICTIONS = (ALL, CHANGED, LAYERS)
_NODE_TYPES = ("user", "item")  # of the temporal graph: even and odd nodes
_EDGE_TYPES = (("user", "knows", "user"), ("user", "buys", "item"), ("item", "beside", "item"))
_CHUNK = 1 << 22
COLUMNS = {
    "graph": ("graph", LEFT),
    "stage": ("stage", LEFT),
    "partition_cpu_s": ("partition, CPU s", ".1f"),
    "seconds": ("seconds", ".1f"),
    "cpu_s": ("CPU s", ".1f"),
    "of_write": ("of writing", ".2f"),
    "of_all": ("of predicting all", ".2f"),
    "outputs": ("outputs", ","),
    "peak_bytes": ("peak", format_bytes),
    "bytes_a_node": ("bytes a node", ".0f"),
    "written_bytes": ("written", format_bytes),
    "linked_bytes": ("linked", format_bytes),
    "cut": ("cut", ".4f"),
    "of_again": ("of the cut again", ".3f"),
    "node_balance": ("balance", ".3f"),
}


@dataclass(frozen=True)
class UpdateBench:
    """Write a store of a generated graph's first nodes, update it with the others, and partition the whole graph again;
    then predict the last version: all of it, and what the last update has changed, with kept layers and without.

    Nodes come in the order of their ids, each with its edges to those that are there. Each stage runs in a process of
    its own, its compiled loops loaded. Writes `update.csv`; the graph and its stores stay in the run folder.

    Attributes:
        graphs: "lfr": one node type and one edge type; "temporal": the same edges between two node types, of three edge
            types, all nodes and edges with times.
        num_nodes, num_edges: Of the whole graph.
        updates: How many.
        new_share: New nodes of each, over the nodes of the first store; their edges are about twice that share.
        feature_dim: Columns of float16 features.
        partitioner, num_parts: How the first store is cut, and the whole graph.
        num_layers, hidden_channels: Of the model, GraphSAGE or for several types RGCN, which is not trained.
        seed: Of the graph, the partitioner and the model.
    """

    graphs: Sequence[str] = GRAPHS
    num_nodes: int = 1_000_000
    num_edges: int = 10_000_000
    updates: int = 5
    new_share: float = 0.005
    feature_dim: int = 64
    partitioner: str = "streaming_multilevel"
    num_parts: int = 32
    num_layers: int = 2
    hidden_channels: int = 64
    seed: int = 0

    def __post_init__(self):
        check_names("graphs", self.graphs, GRAPHS)
        if self.updates < 1:
            raise ValueError(f"bench.updates must be at least 1, got {self.updates}")
        if not 0 < self.new_share < 1 or self.first_nodes < 2 * self.num_parts:
            raise ValueError(f"bench.new_share must be above 0, and leave nodes to begin with, got {self.new_share}")

    @property
    def first_nodes(self) -> int:
        """Nodes of the first store."""
        return int(self.num_nodes / (1 + self.updates * self.new_share))

    def nodes_after(self, update: int) -> int:
        """Return how many nodes there are after an update; 0: in the first store."""
        grown = self.first_nodes + round(update * self.new_share * self.first_nodes)
        return self.num_nodes if update == self.updates else grown

    def measure(self, runner: Runner) -> list[dict]:
        """Return a row for each stage: of writing, each update, partitioning the whole graph again, and predictions."""
        facts = (self.num_edges, self.updates, self.new_share, self.feature_dim, self.partitioner, self.num_parts)
        settings = digest(*facts, self.num_layers, self.hidden_channels, self.seed)
        stages = [WRITE, *(f"update {number}" for number in range(1, self.updates + 1)), AGAIN, *PREDICTIONS]
        cases = [
            Case(
                {"graph": graph, "nodes": self.num_nodes, "stage": stage, "settings": settings},
                bound(in_fresh_process, measured, self, graph, number, str(runner.folder)),
            )
            for graph in self.graphs
            for number, stage in enumerate(stages)
        ]
        rows = runner.rows(cases, "update.csv")
        first = {row["graph"]: row for row in rows if row["stage"] == WRITE}
        again = {row["graph"]: row for row in rows if row["stage"] == AGAIN}
        every = {row["graph"]: row for row in rows if row["stage"] == ALL}
        for row in rows:
            before = every if row["stage"] in PREDICTIONS else first
            row["of_all" if before is every else "of_write"] = _ratio(
                row["cpu_s"], before.get(row["graph"], {}).get("cpu_s")
            )
            row["of_again"] = _ratio(row.get("cut"), again.get(row["graph"], {}).get("cut"))
        title = f"{self.num_nodes:,} nodes, {self.num_edges:,} edges, {self.num_parts} parts"
        show(rows, COLUMNS, title, machine_line())
        return rows


run = benchmark(UpdateBench)


def measured(bench: UpdateBench, graph: str, number: int, folder: str) -> dict[str, Any]:
    """Return the row of a stage: 0 writes the first store, the last one partitions the whole graph again."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as warm:
        little = replace(bench, num_nodes=3000, num_edges=9000, num_parts=2, new_share=0.01, updates=1)
        warmed = (0, 1, 2) if number in (0, bench.updates + 1) else (0, 1)
        for stage in (*warmed, *(range(3, 6) if number > bench.updates + 1 else ())):
            _stage(little, graph, stage, Path(warm))
    return _stage(bench, graph, number, Path(folder))


def _stage(bench: UpdateBench, graph: str, number: int, folder: Path) -> dict[str, Any]:
    _make_graph(bench, folder)
    if 1 <= number <= bench.updates:
        return _update(bench, graph, number, folder)
    if number > bench.updates + 1:
        return _predict(bench, graph, PREDICTIONS[number - bench.updates - 2], folder)
    return _write(bench, graph, 0 if number == 0 else bench.updates, folder, number == 0)


def _write(bench: UpdateBench, graph: str, updates: int, folder: Path, is_first: bool) -> dict[str, Any]:
    """Partition the graph as it is after some updates, and write its store."""
    num_nodes = bench.nodes_after(updates)
    edges = np.concatenate([np.load(folder / f"edges-{at}.npy") for at in range(updates + 1)], axis=1)
    columns = _columns(bench, folder, slice(0, num_nodes))
    if graph == "lfr":
        dataset = gs.GraphDataset("lfr", open_edge_stream(edges, num_nodes=num_nodes, to_undirected=True), **columns)
    else:
        dataset = gs.hetero_graph(_by_node_type(columns, 0, num_nodes), _by_edge_type(edges), separate_reverses=False)
    del edges
    began, began_cpu = time.perf_counter(), time.process_time()
    parts = partition(dataset.stream, bench.partitioner, bench.num_parts, bench.seed, evaluate=False)
    spent = {"partition_s": time.perf_counter() - began, "partition_cpu_s": time.process_time() - began_cpu}
    root = folder / (graph if is_first else f"{graph}-again")
    shutil.rmtree(root, ignore_errors=True)
    began, began_cpu = time.perf_counter(), time.process_time()
    with MemoryPeak() as peak:
        store = write_partition_store(root, dataset.stream, parts, dataset)
    return spent | _row(store, began, began_cpu, peak)


def _update(bench: UpdateBench, graph: str, number: int, folder: Path) -> dict[str, Any]:
    """Update the store with the nodes and edges that come next."""
    before, num_nodes = bench.nodes_after(number - 1), bench.nodes_after(number)
    edges = np.load(folder / f"edges-{number}.npy")
    columns = _columns(bench, folder, slice(before, num_nodes))
    if graph == "lfr":
        change = gs.GraphChange(edges=edges, nodes=np.arange(before, num_nodes), **columns)
    else:
        change = gs.GraphChange(nodes=_by_node_type(columns, before, num_nodes, True), edges=_by_edge_type(edges))
    root = folder / f"{graph}-v{number}"
    shutil.rmtree(root, ignore_errors=True)
    began, began_cpu = time.perf_counter(), time.process_time()
    with MemoryPeak() as peak:
        store = gs.update_store(folder / (graph if number == 1 else f"{graph}-v{number - 1}"), change, drift=99)
    assert store.num_nodes == num_nodes
    return {"new_edges": store.version["counts"]["new_edges"], **_row(store, began, began_cpu, peak)}


def _predict(bench: UpdateBench, graph: str, stage: str, folder: Path) -> dict[str, Any]:
    """Predict the last version; what changed from predictions of the version before, which are made first."""
    last = gs.PartitionStore.open(folder / f"{graph}-v{bench.updates}")
    before = gs.PartitionStore.open(last.root.with_name(last.version["parent"]["name"]))
    earlier = {ALL: None, CHANGED: folder / f"{graph}-bare.parquet", LAYERS: folder / f"{graph}-kept.parquet"}[stage]
    if earlier is not None and not earlier.is_file():
        _predictions(bench, before, gs.PredictionWriter(earlier, keep_layers=stage == LAYERS))
    writer = gs.PredictionWriter(
        folder / f"{graph}-last.parquet", earlier=[earlier] if earlier else [], keep_layers=stage == LAYERS
    )
    began, began_cpu = time.perf_counter(), time.process_time()
    with MemoryPeak() as peak:
        _predictions(bench, last, writer)
    found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
    computed = last.num_nodes if writer.kept is None else len(writer.kept.altered)
    return {**found, "outputs": computed, "peak_bytes": peak.peak_bytes - peak.start_bytes}


def _predictions(bench: UpdateBench, store: PartitionStore, writer: gs.PredictionWriter) -> None:
    torch.manual_seed(bench.seed)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    data = gs.PartitionDataModule(store=store, sampler=gs.NeighborSampler([-1] * bench.num_layers))
    widths = (bench.hidden_channels, 32, bench.num_layers)
    if store.schema is None:
        backbone = gs.model.GraphSAGE(bench.feature_dim, *widths)
    else:
        dims = dict.fromkeys(store.schema.node_types, bench.feature_dim)
        backbone = gs.model.RGCN(dims, *widths, schema=store.schema)
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = L.Trainer(accelerator="cpu", callbacks=[writer], **options)
    trainer.predict(gs.NodeClassifier(backbone), data, return_predictions=False)


def _row(store: PartitionStore, began: float, began_cpu: float, peak: MemoryPeak) -> dict[str, Any]:
    spent = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
    files = [path.stat() for path in store.root.iterdir()]
    linked = sum(file.st_size for file in files if file.st_nlink > 1)
    held = peak.peak_bytes - peak.start_bytes
    counts = np.diff(store.part_offsets)
    return spent | {
        "edges": store.num_edges,
        "peak_bytes": held,
        "bytes_a_node": held / store.num_nodes,
        "written_bytes": sum(file.st_size for file in files) - linked,
        "linked_bytes": linked,
        "cut": store.version["cut"]["after"]
        if store.version
        else _cut_of(store.manifest, store.csc, store.part_offsets),
        "node_balance": float(counts.max() / counts.mean()),
    }


def _make_graph(bench: UpdateBench, folder: Path) -> None:
    """Write the edges that each update adds, and the columns of all nodes, where they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "masks.npz").is_file():
        return
    graph = lfr_graph(bench.num_nodes, bench.num_edges, seed=bench.seed)
    pieces: list[list[np.ndarray]] = [[] for _ in range(bench.updates + 1)]
    ends = [bench.nodes_after(update) for update in range(bench.updates + 1)]
    for chunk in graph.stream(_CHUNK).chunks():
        comes = np.searchsorted(ends, np.maximum(chunk.src, chunk.dst), side="right")
        for update, piece in enumerate(pieces):
            piece.append(np.stack([chunk.src, chunk.dst])[:, comes == update])
    for update, piece in enumerate(pieces):
        np.save(folder / f"edges-{update}.npy", np.concatenate(piece, axis=1))
    graph.features(dim=bench.feature_dim, noise=1.0, dtype="float16", path=folder / "features.npy")
    np.savez(folder / "masks.npz", labels=graph.labels() % 32, **graph.masks(TRAIN_SHARE, TRAIN_SHARE))


def _columns(bench: UpdateBench, folder: Path, nodes: slice) -> dict[str, Any]:
    saved = np.load(folder / "masks.npz")
    masks = {name: saved[name][nodes] for name in ("train", "val", "test")}
    features = np.load(folder / "features.npy", mmap_mode="r")[nodes]
    return {"features": features, "labels": saved["labels"][nodes], "masks": masks}


def _by_node_type(columns: dict[str, Any], first: int, last: int, as_change: bool = False) -> dict[str, Any]:
    """Return columns of nodes [first, last) by node type, with the time at which each came, their own number."""
    found, nodes = {}, np.arange(first, last)
    for number, name in enumerate(_NODE_TYPES):
        own = nodes % 2 == number
        rows = {"features": columns["features"][own], "labels": columns["labels"][own], "time": nodes[own]}
        rows["masks"] = {mask: values[own] for mask, values in columns["masks"].items()}
        found[name] = {**rows, **({"nodes": nodes[own] // 2} if as_change else {})}
    return found


def _by_edge_type(edges: np.ndarray) -> dict[tuple[str, str, str], Any]:
    """Return edges by edge type; each came when its later end did."""
    kind = edges % 2
    buys = kind[0] != kind[1]
    chosen = (buys == 0) & (kind[0] == 0), buys, (buys == 0) & (kind[0] == 1)
    found = {}
    for at, (edge_type, own) in enumerate(zip(_EDGE_TYPES, chosen, strict=True)):
        ends = edges[:, own]
        times = ends.max(axis=0).astype(np.int64)
        if at == 1:  # users buy
            ends = np.where(ends[0] % 2 == 0, ends, ends[::-1])
        found[edge_type] = {"edges": ends // 2, "time": times}
    return found


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None
