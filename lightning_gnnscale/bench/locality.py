"""The dial of locality-aware sampling: reads of far rows on one side, variance and accuracy on the other."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import stdev

import numpy as np

from ..partition_store import WholeGraph
from ..placement import Placement, access_probability, place
from ..rng import batch_key, fold, permutation
from ..sampler import LayerwiseSampler, LocalityBias, NeighborSampler
from ..sampler.protocol import Subgraph
from ..triton_kernels.sample_neighbors import Workspace
from .experiment import run_rows
from .graphs import Workload, check_graphs, load_workload, public_root
from .present import LEFT, average, grouped, lines, mean_of, panels, plain_columns, save, table, tell
from .reduced_graph import reduced_graph
from .runner import Case, Runner, digest, machine_line, write_csv

SAMPLERS = ("neighbor", "layerwise")
VALUES = 8  # random numbers a node whose means are estimated
SPLIT = [0.6, 0.2, 0.2]
FEATURE_DIM = 128
DIAL = {
    "graph": ("graph", LEFT),
    "sampler": ("sampler", LEFT),
    "scale": ("scale", "g"),
    "rows_a_seed": ("rows a\nseed", ".1f"),
    "host_rows_a_seed": ("host rows\na seed", ".1f"),
    "host": ("host share", ".1%"),
    "host_reads_saved": ("host reads\nsaved", ".0%"),
    "variance_ratio": ("variance\nratio", ".2f"),
}


def run(
    output_dir: str | os.PathLike,
    graphs: Sequence[str],
    train_graphs: Sequence[str] = (),
    scales: Sequence[float] = (1, 2, 4, 8),
    samplers: Sequence[str] = SAMPLERS,
    num_devices: int = 2,
    buffer_share: float = 0.1,
    fanouts: Sequence[int] = (15, 10, 5),
    nodes_per_layer: int = 2048,
    neighbor_set_size: int = 8192,
    batch_size: int = 512,
    num_batches: int = 32,
    num_keys: int = 64,
    num_targets: int = 256,
    seeds: Sequence[int] = (0, 1, 2),
    max_epochs: int = 30,
    data_root: str | None = None,
    overrides: Sequence[str] = (),
    minutes: float | None = None,
    again: str = "none",
) -> dict[str, list[dict]]:
    """Count the rows that batches read at each scale, estimate the variance of their means, and train.

    Args:
        output_dir: Folder for `dial.csv`, `rows.csv` (one row per training), `accuracy.csv`, the plot and the runs.
        graphs: Graphs on which reads and variances are measured; see `placement.run`.
        train_graphs: Public graphs on which GraphSAGE is trained, with features reduced to 128; empty: no training.
        scales: Scales of `LocalityBias`; the others are compared with 1.
        samplers: "neighbor" (fanouts) and "layerwise" (nodes_per_layer in each layer, one layer per fan-out).
        num_devices, buffer_share: Number of devices in the placement, and share of the rows in each one's buffer;
            placed by rule with alpha 0.2.
        neighbor_set_size: See `LocalityBias`.
        batch_size, num_batches: Size and number of the batches whose reads are counted.
        num_keys, num_targets: Number of keys over which the variance of one hop's means is taken, and number of
            targets.
        seeds, max_epochs: Seeds and epochs of the training runs. There is no early stopping; the best checkpoint is
            tested.
        data_root: Folder of public graphs; None: it is searched for.
        overrides: Further overrides of `train`.
        minutes, again: See `Runner`.

    Returns:
        {"dial": rows, "accuracy": rows}.
    """
    unknown = sorted(set(samplers) - set(SAMPLERS))
    if unknown:
        raise ValueError(f"bench.samplers must be of {', '.join(SAMPLERS)}; got {', '.join(unknown)}")
    if 1 not in scales:
        raise ValueError(f"bench.scales must hold 1, which the others are compared with, got {list(scales)}")
    root, output = public_root(data_root), Path(output_dir)
    check_graphs([*graphs, *train_graphs], root)
    shape = (num_devices, buffer_share, *fanouts, nodes_per_layer, neighbor_set_size, batch_size, num_batches, num_keys)
    makers = {"neighbor": NeighborSampler(fanouts), "layerwise": LayerwiseSampler([nodes_per_layer] * len(fanouts))}
    one_hop = {"neighbor": [fanouts[1 % len(fanouts)]], "layerwise": [nodes_per_layer]}

    def placed(name: str) -> tuple[Workload, Placement]:
        workload = load_workload(name, root)
        prob = access_probability(workload, workload.train_nodes, fanouts=fanouts, batch_size=batch_size)
        return workload, place(prob, num_devices, max(1, round(buffer_share * workload.csc.num_rows)), alpha=0.2)

    def measured(made, kind: str, scale: float) -> dict:
        workload, placement = made()
        bias = LocalityBias(placement, scale, neighbor_set_size)
        counted = _reads(workload, placement, replace(makers[kind], locality=bias), batch_size, num_batches)
        sampler = type(makers[kind])(one_hop[kind], locality=bias)
        return {**counted, "variance": mean_variance(workload, sampler, num_targets, num_keys)}

    dial: list[dict] = []
    with Runner(output, minutes, again) as runner:
        for name in graphs:
            made = cache(partial(placed, name))
            key = {"graph": name, "settings": digest(*shape, num_targets)}
            cases = [
                Case({**key, "sampler": kind, "scale": scale}, partial(measured, made, kind, scale))
                for kind, scale in product(samplers, scales)
            ]
            dial += runner.rows(cases, "dial_rows.csv")
        _against_one(dial)
        if dial:
            write_csv(output / "dial.csv", dial)
            tell(table(dial, DIAL, "Locality-aware sampling beside uniform", machine_line()))
            _draw(output / "locality.png", dial)
        common = (num_devices, buffer_share, fanouts, batch_size, neighbor_set_size, max_epochs)
        own = {name: _overrides(name, output, *common) for name in train_graphs}
        trained = [
            (
                {"graph": name, "scale": scale, "seed": seed},
                [*own[name], f"placement.locality_scale={scale}", f"seed={seed}", *overrides],
            )
            for seed in seeds
            for name in train_graphs
            for scale in scales
        ]
        accuracy = _accuracies(run_rows(runner, trained))
        if accuracy:
            write_csv(output / "accuracy.csv", accuracy)
            title = f"test accuracy of GraphSAGE, %, {mean_of(len(seeds))}"
            tell(table(accuracy, plain_columns(accuracy, ("graph",)), title))
    return {"dial": dial, "accuracy": accuracy}


def _reads(workload: Workload, placement: Placement, sampler, batch_size: int, num_batches: int) -> dict:
    """Return what batches read: rows a seed, and the share of them that lie on no device of the group."""
    csc, nodes = workload.csc, workload.train_nodes
    state, space = sampler.prepare(WholeGraph.of(csc, 0), nodes, 0), Workspace(csc.num_rows, csc.indices.dtype)
    counts, seeds, batch, epoch = np.zeros(csc.num_rows, np.int64), 0, 0, 0
    while batch < num_batches:
        for items in sampler.items(state, batch_size, False, fold(0, epoch))[: num_batches - batch]:
            drawn = sampler.draw(state, items, batch_key(0, epoch, 0, batch), space, np.empty, False)
            counts += np.bincount(drawn.n_id, minlength=csc.num_rows)
            seeds, batch = seeds + len(items), batch + 1
        epoch += 1
    far = placement.lookup(0)[0] < 0
    total = int(counts.sum())
    return {
        "rows_a_seed": round(total / seeds, 2),
        "host_rows_a_seed": round(int(counts[far].sum()) / seeds, 2),
        "host": round(int(counts[far].sum()) / total, 4),
    }


def mean_variance(workload: Workload, sampler, num_targets: int, num_keys: int) -> float:
    """Return the variance over keys of the neighbourhood means that one hop of a sampler estimates.

    It is averaged over targets that have a neighbour, and over random values of each node.

    Args:
        workload: Graph and training nodes; the targets are taken from the latter.
        sampler: Sampler of one hop.
        num_targets: Number of seeds in a batch.
        num_keys: Number of batches drawn, >= 2.
    """
    csc = workload.csc
    degree = csc.in_degree[workload.train_nodes]
    targets = workload.train_nodes[degree > 0]
    targets = targets[permutation(len(targets), fold(0, num_targets))[:num_targets]]
    state, space = sampler.prepare(WholeGraph.of(csc, 0), targets, 0), Workspace(csc.num_rows, csc.indices.dtype)
    values = np.random.default_rng(0).standard_normal((csc.num_rows, VALUES))
    total, squares = np.zeros((len(targets), VALUES)), np.zeros((len(targets), VALUES))
    for key in range(num_keys):
        estimate = weighted_means(sampler.draw(state, targets, batch_key(1, 0, 0, key), space, np.empty, False), values)
        total, squares = total + estimate, squares + estimate**2
    return float(((squares - total**2 / num_keys) / (num_keys - 1)).mean())


def weighted_means(drawn: Subgraph, values: np.ndarray) -> np.ndarray:
    """Return (num_targets, num_values) sums over drawn arcs by their weights; plain means where they have none."""
    source, target = drawn.n_id[drawn.edge_index[0]], drawn.edge_index[1]
    weight = drawn.edge_weight
    if weight is None:
        weight = 1 / np.diff(drawn.indptr)[target]
    out = np.zeros((drawn.num_seeds, values.shape[1]))
    np.add.at(out, target, values[source] * weight[:, None])
    return out


def _against_one(rows: list[dict]) -> None:
    """Add what each scale saves and costs beside scale 1, where that was measured."""
    base = {(row["graph"], row["sampler"]): row for row in rows if row["scale"] == 1}
    for row in rows:
        one = base.get((row["graph"], row["sampler"]))
        row["host_reads_saved"] = row["variance_ratio"] = None
        if one is not None:
            host = one["host_rows_a_seed"]
            row["host_reads_saved"] = round(1 - row["host_rows_a_seed"] / host, 4) if host else 0.0
            row["variance_ratio"] = round(row["variance"] / one["variance"], 3) if one["variance"] else None


def _overrides(name, output, devices, buffer_share, fanouts, batch_size, neighbor_set_size, max_epochs) -> list[str]:
    return [
        "dataset=npz",
        f"dataset.name={reduced_graph(name, output / 'graphs', FEATURE_DIM, SPLIT)}",
        "placement=rule",
        "placement.alpha=0.2",
        f"placement.buffer_share={buffer_share}",
        "strategy/weights=gradient_averaging",
        f"sampler.fanouts=[{','.join(map(str, fanouts))}]",
        f"model.backbone.num_layers={len(fanouts)}",
        f"datamodule.batch_size={batch_size}",
        f"placement.neighbor_set_size={neighbor_set_size}",
        f"num_parts={devices}",
        f"trainer.devices={devices}",
        f"trainer.max_epochs={max_epochs}",
        f"name=locality-{name}",
    ]


def _accuracies(rows: list[dict]) -> list[dict]:
    """Return means over seeds, with the difference to scale 1 where that was trained."""
    runs = grouped(rows, "graph", "scale")
    means = []
    for (graph, scale), own in sorted(runs.items(), key=lambda item: list(grouped(rows, "graph")).index(item[0][:1])):
        one = average(runs.get((graph, 1), []), "test_acc", factor=100)
        accuracy = average(own, "test_acc", factor=100)
        row = {"graph": graph, "scale": scale, "test_acc": round(accuracy, 2)}
        row["std"] = round(stdev(100 * run["test_acc"] for run in own), 2) if len(own) > 1 else 0.0
        means.append(row | {"difference": None if one is None else round(accuracy - one, 2)})
    return means


def _draw(path: Path, rows: list[dict]) -> None:
    """Draw host rows a seed, as a share of scale 1's, against the variance ratio; a line a graph and sampler."""
    figure, found = panels([""], size=(7, 5), beside=0)
    axes = found[""]
    for (graph, sampler), own in grouped(rows, "graph", "sampler").items():
        own = [row | {"host": 100 * (1 - row["host_reads_saved"])} for row in own if row["variance_ratio"]]
        style = "o-" if sampler == "neighbor" else "s--"
        lines(axes, own, "variance_ratio", "host", style, "scale", label=f"{graph}, {sampler}")
    axes.set(xlabel="variance of a mean over neighbours, over uniform's", ylabel="host reads a seed, % of uniform's")
    axes.legend(fontsize=8)
    save(figure, path)
