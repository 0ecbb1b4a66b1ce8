"""Training on the parts of each partitioner, compared with central training: accuracy, and the seconds to reach it."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import mean, median, pstdev

import numpy as np
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from lightning import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.dataset import CSRArrays
from lightning_gnnscale.events import read_log
from lightning_gnnscale.loader import NeighborLoader
from lightning_gnnscale.partition_store.features import CSRFeatures
from lightning_gnnscale.sampler.minibatch import sparse_rows_to_torch

from .experiment import run_rows
from .present import average, grouped, lines, mean_of, panels, plain_columns, save, show
from .reduced_graph import reduced_graph
from .runner import Runner, benchmark, in_fresh_process, write_csv

QUALITY = ("edge_cut_ratio", "replication_factor", "node_balance")
CLOCK = "benchmarks.epoch_clock.EpochClock"
CENTRAL = "central (PyG's loop)"
SPLIT = (0.7, 0.15, 0.15)  # of nodes, where a graph with reduced features has no split of its own
NEAR = 0.005  # of central training's best validation accuracy: what counts as reaching it
STYLES = ("o-", "s--", "^:")


@dataclass(frozen=True)
class PartsBench:
    """Train the same model on the parts of each partitioner, with each way of joining the weights.

    Writes `rows.csv` (one row per run), `central_rows.csv`, `parts.csv` (means over seeds), `parts.png` and the runs.

    Attributes:
        graphs: Maps the name of a graph to the overrides of `train` that choose it, or to None, which leaves it out.
        partitioners: Names in the config group `partitioner`.
        weights: Maps the name of a way of joining weights to the overrides of `train` that choose it, or to None, which
            leaves it out.
        num_parts, devices: Number of parts, and of processes.
        max_epochs: Epochs of every run; there is no early stopping.
        central: Whether each graph is also trained whole in PyG's plain loop; see `train_central`.
        feature_dim: Number of columns that the features of graphs chosen by `dataset.name=` are reduced to, see
            `reduced_graph`; None: features are used as they are.
    """

    graphs: Mapping[str, list[str]]
    partitioners: list[str]
    weights: Mapping[str, list[str]]
    num_parts: int = 8
    devices: int = 2
    seeds: list[int] = (0, 1, 2)
    max_epochs: int = 15
    central: bool = False
    feature_dim: int | None = None
    overrides: list[str] | None = None

    def __post_init__(self):
        _check_overrides("graphs", self.graphs, "{cora: [dataset=npz, dataset.name=cora]}")
        _check_overrides("weights", self.weights, "{every tenth: [strategy.weights.every_n_epochs=10]}")

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, partitioner and way of joining weights.

        It has cut, replication factor, node balance, test accuracy in percent, seconds per epoch (the median; of the
        slowest process, without validation), and CPU seconds per epoch (of all processes). With `central` also the
        difference to its accuracy in points, and the training seconds until the validation accuracy was within half a
        point of central training's best ("" if for at least one seed it never was).
        """
        common = [
            f"num_parts={self.num_parts}",
            f"trainer.devices={self.devices}",
            f"trainer.max_epochs={self.max_epochs}",
            f"+callbacks.epoch_clock._target_={CLOCK}",
            "evaluation.sample=1",
            *(self.overrides or []),
        ]
        wholes, cases = [], []
        for graph, words in self.graphs.items():
            if words is None:
                continue
            chosen = words if self.feature_dim is None else _reduced(words, runner.folder / "graphs", self.feature_dim)
            for seed in self.seeds if self.central else ():
                key = {"graph": graph, "partitioner": "", "weights": CENTRAL, "seed": seed}
                wholes.append((key, [*chosen, f"seed={seed}", *common]))
            for method, (policy, weights), seed in product(self.partitioners, self.weights.items(), self.seeds):
                key = {"graph": graph, "partitioner": method, "weights": policy, "seed": seed}
                own = [f"partitioner={method}", f"name=parts-{graph}", f"seed={seed}"]
                if weights is not None:
                    cases.append((key, [*chosen, *own, *common, *weights]))
        rows = run_rows(runner, wholes, "central_rows.csv", train_case=train_central)
        rows += run_rows(runner, cases, measure=_measure)
        means = []
        for (graph,), own in grouped(rows, "graph").items():
            of_case = grouped(own, "partitioner", "weights")
            whole = of_case.get(("", CENTRAL), [])
            found = [
                {"graph": graph, "partitioner": method, "weights": policy, **_means(runs, whole)}
                for (method, policy), runs in of_case.items()
            ]
            title = f"{graph}, {self.num_parts} parts on {self.devices} processes, {mean_of(len(self.seeds))}"
            show(found, plain_columns(found, ("partitioner", "weights"), ("graph",)), title)
            means += found
        write_csv(runner.folder / "parts.csv", means)
        _plot(runner.folder / "parts.png", [row for row in means if row["weights"] != CENTRAL])
        return means


run = benchmark(PartsBench)


def _reduced(choice: list[str], folder: Path, dim: int) -> list[str]:
    """Return the overrides of a graph with those that name it naming one with fewer features."""
    key = "dataset.name="
    names = [word.removeprefix(key) for word in choice if word.startswith(key)]
    return [word for word in choice if not word.startswith(key)] + [
        f"{key}{reduced_graph(name, folder, dim, list(SPLIT))}" for name in names
    ]


def _check_overrides(name: str, given, example: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"bench.{name} must name overrides of train for each of its {name}, got {given}; for example "
            f"'~bench.{name}' '+bench.{name}={example}'"
        )


def _measure(folder: Path) -> dict:
    """Return what a run says of its parts and its epochs."""
    quality = json.loads((folder / "summary.json").read_text())["quality"]
    epochs: dict[int, list[dict]] = {}
    for event in read_log(folder / "events.jsonl"):
        if event["event"] == "epoch":
            epochs.setdefault(event["epoch"], []).append(event)
    seconds = [max(event["seconds"] for event in of_ranks) for of_ranks in epochs.values()]
    reached = [of_ranks[0].get("val_acc", 0.0) for of_ranks in epochs.values()]
    return {
        **{name: round(quality[name], 4) for name in QUALITY},
        "epoch_s": round(median(seconds), 4),
        "epoch_cpu_s": round(median(sum(event["cpu_s"] for event in of_ranks) for of_ranks in epochs.values()), 4),
        "curve": curve_text(list(zip(accumulate(seconds), reached, strict=True))),
    }


def _means(runs: list[dict], wholes: list[dict]) -> dict:
    """Return means over seeds, compared with central training where there are runs of it."""
    row = {name: average(runs, name, 4) for name in QUALITY}
    row["test_acc"] = average(runs, "test_acc", 2, factor=100)
    row["test_acc_std"] = round(pstdev(100 * run["test_acc"] for run in runs), 2)
    row |= {name: average(runs, name, 3) for name in ("epoch_s", "epoch_cpu_s")}
    if not wholes:
        return row
    targets = {whole["seed"]: whole["best_val_acc"] - NEAR for whole in wholes}
    times = [seconds_to(run["curve"], targets[run["seed"]]) for run in runs if run["seed"] in targets]
    row["difference"] = round(mean(100 * r["test_acc"] for r in runs) - mean(100 * w["test_acc"] for w in wholes), 2)
    row["to_central_s"] = None if None in times or not times else round(mean(times), 2)
    return row


def _plot(path: Path, rows: list[dict]) -> None:
    figure, found = panels(["", " "], size=(5, 4), beside=0)
    graphs, policies = (list(dict.fromkeys(row[name] for row in rows)) for name in ("graph", "weights"))
    for axes, name in zip(found.values(), ("test_acc", "epoch_s"), strict=True):
        for (graph, policy), own in grouped(rows, "graph", "weights").items():
            style, color = STYLES[policies.index(policy) % len(STYLES)], f"C{graphs.index(graph)}"
            note = "partitioner" if policy == policies[0] else None
            lines(axes, own, "edge_cut_ratio", name, style, note, color=color, label=f"{graph}, {policy}")
        axes.set_xlabel("share of edges cut")
    left, right = found.values()
    left.set_ylabel("test accuracy, %")
    right.set(ylabel="seconds an epoch", ylim=(0, None))
    if rows:
        left.legend(fontsize="x-small")
    save(figure, path)


def train_central(folder: Path, overrides: list[str]) -> dict:
    """Train one case in a process of its own with all cores, and return the columns of its row; see `run_rows`.

    The words of dataset, model, sampler, batch size, seed and epochs count; nothing is written to the folder.

    Returns:
        `test_acc` of the epoch of the best validation, `best_val_acc`, `epochs`, `train_s` without evaluation,
        `epoch_s` (median) and `curve`, see `curve_text`.
    """
    return in_fresh_process(_train, overrides)  # the runs beside it fork from a parent without threads


def curve_text(epochs: list[tuple[float, float]]) -> str:
    """Return training seconds and validation accuracy after each epoch as one word: "1.20:0.8125 2.38:0.8301"."""
    return " ".join(f"{seconds:.3f}:{accuracy:.4f}" for seconds, accuracy in epochs)


def seconds_to(curve: str, accuracy: float) -> float | None:
    """Return the training seconds after which a curve has reached a validation accuracy in [0, 1]; None: never."""
    points = [tuple(map(float, point.split(":"))) for point in curve.split()]
    return next((seconds for seconds, found in points if found >= accuracy), None)


def edges_of(stream) -> np.ndarray:
    """Return (2, num_edges) int64, the edges that a store of an edge stream has: its chunks are as they were listed."""
    edges = np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in stream.chunks()], axis=1).astype(np.int64)
    if stream.remove_self_loops:
        edges = edges[:, edges[0] != edges[1]]
    if stream.to_undirected:
        edges = np.concatenate([edges, edges[::-1]], axis=1)
    return np.unique(edges, axis=1)


def _train(overrides: list[str]) -> dict:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    config = compose_config("train", overrides)
    dataset = instantiate(config.dataset)
    edge_index = torch.from_numpy(edges_of(dataset.stream))
    labels = torch.from_numpy(np.asarray(dataset.labels)).long()
    rows = _rows_of(dataset.features)
    seed_everything(config.seed, verbose=False)
    widths = {"in_channels": dataset.features.shape[1], "out_channels": int(labels.max()) + 1}
    backbone = instantiate(config.model.backbone, **widths)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=config.model.lr, weight_decay=config.model.weight_decay)
    data = Data(edge_index=edge_index, num_nodes=len(labels))
    train = torch.from_numpy(np.flatnonzero(np.asarray(dataset.masks["train"]) & (labels.numpy() >= 0)))
    loader = _loader(data, train, list(config.sampler.fanouts), config.datamodule.batch_size, config.seed)
    everything = rows(torch.arange(len(labels)))
    spent, epochs, took = 0.0, [], []
    for _ in range(config.trainer.max_epochs):
        backbone.train()
        began = time.perf_counter()
        for batch in loader:
            optimizer.zero_grad()
            outputs = backbone(rows(batch.n_id), batch.edge_index)[: batch.batch_size]
            F.cross_entropy(outputs, labels[batch.n_id[: batch.batch_size]]).backward()
            optimizer.step()
        took.append(time.perf_counter() - began)
        spent += took[-1]
        backbone.eval()
        with torch.no_grad():
            right = (backbone(everything, edge_index).argmax(dim=-1) == labels).numpy()
        epochs.append((spent, *(right[np.asarray(dataset.masks[split])].mean() for split in ("val", "test"))))
    best = max(epochs, key=lambda epoch: epoch[1])
    return {
        "test_acc": round(float(best[2]), 4),
        "best_val_acc": round(float(best[1]), 4),
        "epochs": len(epochs),
        "train_s": round(spent, 2),
        "epoch_s": round(float(np.median(took)), 4),
        "curve": curve_text([epoch[:2] for epoch in epochs]),
        "loader": type(loader).__module__.split(".")[0],
    }


def _rows_of(features) -> Callable:
    """Return a function of (num,) node ids that gives their rows: a dense tensor, or sparse rows for this package."""
    if isinstance(features, CSRArrays):
        data = features.data.astype(np.float32)
        table = CSRFeatures(features.indptr, features.indices, data, features.shape[1])
        return lambda nodes: sparse_rows_to_torch(table.read(nodes.numpy()))
    x = torch.from_numpy(np.array(np.load(features) if isinstance(features, str) else features, np.float32))
    return lambda nodes: x[nodes]


def _loader(data, nodes, fanouts: list[int], batch_size: int, seed: int):
    """Return PyG's loader, or where its compiled sampler is not installed this package's, which samples as it does."""
    given = {"num_neighbors": fanouts, "input_nodes": nodes, "batch_size": batch_size, "shuffle": True}
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        return PyGNeighborLoader(data, **given)
    return NeighborLoader(data, **given, seed=seed)
