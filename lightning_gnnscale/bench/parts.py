"""Training on the parts of each partitioner, beside central training: accuracy, and the seconds to come to it."""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median, pstdev

import numpy as np

from ..cli.compose import compose_config
from ..events import read_log
from .experiment import run_rows
from .present import average, grouped, lines, mean_of, panels, plain_columns, save, table, tell
from .reduced_graph import reduced_graph
from .runner import Runner, write_csv


def train_central(folder: Path, overrides: list[str]) -> dict:
    """Train one case in a process of its own with all cores, and return the columns of its row; see `run_rows`.

    Args:
        folder: Not used, nothing is written.
        overrides: Words of `train`; those of dataset, model, sampler, batch size, seed and epochs count.

    Returns:
        `test_acc` of the epoch of the best validation, `best_val_acc`, `epochs`, `train_s` without evaluation,
        `epoch_s` (median) and `curve`, see `curve_text`.
    """
    spawn = multiprocessing.get_context("spawn")  # the runs beside it fork from a parent without threads
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        return executor.submit(_train, overrides).result()


def curve_text(epochs: list[tuple[float, float]]) -> str:
    """Return training seconds and validation accuracy after each epoch as one word: "1.20:0.8125 2.38:0.8301"."""
    return " ".join(f"{seconds:.3f}:{accuracy:.4f}" for seconds, accuracy in epochs)


def seconds_to(curve: str, accuracy: float) -> float | None:
    """Return the training seconds after which a curve has reached a validation accuracy in [0, 1]; None: never."""
    points = [tuple(map(float, point.split(":"))) for point in curve.split()]
    return next((seconds for seconds, found in points if found >= accuracy), None)


def arcs_of(stream) -> np.ndarray:
    """Return (2, num_arcs) int64, the arcs that a store of an edge stream has: its chunks are as they were listed."""
    arcs = np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in stream.chunks()], axis=1).astype(np.int64)
    if stream.remove_self_loops:
        arcs = arcs[:, arcs[0] != arcs[1]]
    if stream.to_undirected:
        arcs = np.concatenate([arcs, arcs[::-1]], axis=1)
    return np.unique(arcs, axis=1)


def _train(overrides: list[str]) -> dict:
    import torch
    import torch.nn.functional as F
    from hydra.utils import instantiate
    from lightning import seed_everything
    from torch_geometric.data import Data

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    config = compose_config("train", overrides)
    dataset = instantiate(config.dataset)
    edge_index = torch.from_numpy(arcs_of(dataset.stream))
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


def _rows_of(features):
    """Return what gives the rows of (num,) node ids: a dense tensor, or sparse rows as this package's models take."""
    import torch

    from ..dataset.graph_dataset import CSRArrays
    from ..sampler.minibatch import SparseFeatures

    if isinstance(features, CSRArrays):
        import scipy.sparse

        values = (features.data.astype(np.float32), features.indices, features.indptr)
        table = scipy.sparse.csr_matrix(values, shape=features.shape)

        def sparse(nodes) -> SparseFeatures:
            part = table[nodes.numpy()]
            arrays = (torch.from_numpy(a) for a in (part.indptr.astype(np.int64), part.indices, part.data))
            return SparseFeatures(*arrays, table.shape[1])

        return sparse
    x = torch.from_numpy(np.array(np.load(features) if isinstance(features, str) else features, np.float32))
    return lambda nodes: x[nodes]


def _loader(data, nodes, fanouts: list[int], batch_size: int, seed: int):
    """Return PyG's loader, or where its compiled sampler is not installed this package's, which draws as it does."""
    from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

    given = {"num_neighbors": fanouts, "input_nodes": nodes, "batch_size": batch_size, "shuffle": True}
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        from torch_geometric.loader import NeighborLoader

        return NeighborLoader(data, **given)
    from ..loader import NeighborLoader

    return NeighborLoader(data, **given, seed=seed)


QUALITY = ("edge_cut_ratio", "replication_factor", "node_balance")
CLOCK = "lightning_gnnscale.bench.epoch_clock.EpochClock"
CENTRAL = "central (PyG's loop)"
SPLIT = (0.7, 0.15, 0.15)  # of nodes, where a graph with reduced features has no split of its own
NEAR = 0.005  # of central training's best validation accuracy: what counts as reaching it
STYLES = ("o-", "s--", "^:")


def run(
    output_dir: str | os.PathLike,
    graphs: Mapping[str, list[str]],
    partitioners: list[str],
    weights: Mapping[str, list[str]],
    num_parts: int = 8,
    devices: int = 2,
    seeds: list[int] = (0, 1, 2),
    max_epochs: int = 15,
    central: bool = False,
    feature_dim: int | None = None,
    overrides: list[str] | None = None,
    minutes: float | None = None,
    again: str = "none",
) -> list[dict]:
    """Train the same model on the parts of each partitioner, with each way of joining the weights.

    Args:
        output_dir: Folder for `rows.csv` (one row per run), `parts.csv` (means over seeds), the plot and the runs.
        graphs: Maps the name of a graph to the overrides of `train` that choose it, or to None, which leaves it out.
        partitioners: Names in the config group `partitioner`.
        weights: Maps the name of a way of joining weights to the overrides of `train` that choose it, or to None, which
            leaves it out.
        num_parts, devices: Number of parts, and of processes.
        seeds: Seeds of the training runs.
        max_epochs: Epochs of every run; there is no early stopping.
        central: Whether each graph is also trained whole in PyG's plain loop; see `train_central`.
        feature_dim: Number of columns that the features of graphs chosen by `dataset.name=` are reduced to, see
            `reduced_graph`; None: features are used as they are.
        overrides: Further overrides of `train`.
        minutes, again: See `Runner`.

    Returns:
        One row per graph, partitioner and way of joining weights: cut, replication factor, node balance, test accuracy
        in percent, seconds per epoch (the median; of the slowest process, without validation), and CPU seconds per
        epoch (of all processes). With `central` also the difference to its accuracy in points, and the training seconds
        until the validation accuracy was within half a point of central training's best ("" if for at least one seed it
        never was).

    Raises:
        ValueError: graphs or weights lack their overrides.
    """
    _check_overrides("graphs", graphs, "{cora: [dataset=npz, dataset.name=cora]}")
    _check_overrides("weights", weights, "{every tenth: [strategy.weights.every_n_epochs=10]}")
    graphs, weights = (
        {name: choice for name, choice in given.items() if choice is not None} for given in (graphs, weights)
    )
    if feature_dim is not None:
        graphs = {name: _reduced(choice, Path(output_dir) / "graphs", feature_dim) for name, choice in graphs.items()}
    common = [
        f"num_parts={num_parts}",
        f"trainer.devices={devices}",
        f"trainer.max_epochs={max_epochs}",
        f"+callbacks.epoch_clock._target_={CLOCK}",
        "evaluation.sample=1",
        *(overrides or []),
    ]
    wholes = [
        ({"graph": graph, "partitioner": "", "weights": CENTRAL, "seed": seed}, [*choice, f"seed={seed}", *common])
        for graph, choice in graphs.items()
        for seed in seeds
    ]
    cases = [
        (
            {"graph": graph, "partitioner": method, "weights": policy, "seed": seed},
            [*choice, f"partitioner={method}", f"name=parts-{graph}", f"seed={seed}", *common, *policy_choice],
        )
        for graph, choice in graphs.items()
        for method in partitioners
        for policy, policy_choice in weights.items()
        for seed in seeds
    ]
    with Runner(output_dir, minutes, again) as runner:
        rows = run_rows(runner, wholes, "central_rows.csv", train_case=train_central) if central else []
        rows += run_rows(runner, cases, measure=_measure)
        means = []
        for (graph,), own in grouped(rows, "graph").items():
            of_case = grouped(own, "partitioner", "weights")
            whole = of_case.get(("", CENTRAL), [])
            found = [
                {"graph": graph, "partitioner": method, "weights": policy, **_means(runs, whole)}
                for (method, policy), runs in of_case.items()
            ]
            title = f"{graph}, {num_parts} parts on {devices} processes, {mean_of(len(seeds))}"
            tell(table(found, plain_columns(found, ("partitioner", "weights"), ("graph",)), title))
            means += found
        write_csv(Path(output_dir) / "parts.csv", means)
        _plot(Path(output_dir) / "parts.png", [row for row in means if row["weights"] != CENTRAL])
    return means


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
        "curve": curve_text(list(zip(itertools.accumulate(seconds), reached, strict=True))),
    }


def _means(runs: list[dict], wholes: list[dict]) -> dict:
    """Return means over seeds, beside central training where there are runs of it."""
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
