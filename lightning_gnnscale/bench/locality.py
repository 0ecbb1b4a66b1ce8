"""The dial of locality-aware sampling: reads of far rows on one side, variance and accuracy on the other."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..partition_store import WholeGraph
from ..placement import Placement, access_probability, place
from ..rng import batch_key, fold, permutation
from ..sampler import LayerwiseSampler, LocalityBias, NeighborSampler
from ..sampler.protocol import Subgraph
from ..triton_kernels.sample_neighbors import Workspace
from .experiment import run_rows
from .partition_graphs import public_root
from .placement_graphs import Workload, check_graphs, load_workload
from .reduced_graph import reduced_graph
from .results import machine, machine_line, mean_of, write_csv

SAMPLERS = ("neighbor", "layerwise")
VALUES = 8  # random numbers a node whose means are estimated
SPLIT = [0.6, 0.2, 0.2]
FEATURE_DIM = 128


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

    Returns:
        {"dial": rows, "accuracy": rows}.
    """
    unknown = sorted(set(samplers) - set(SAMPLERS))
    if unknown:
        raise ValueError(f"bench.samplers must be of {', '.join(SAMPLERS)}; got {', '.join(unknown)}")
    if 1 not in scales:
        raise ValueError(f"bench.scales must hold 1, which the others are compared with, got {list(scales)}")
    console, output = Console(width=max(Console().width, 120)), Path(output_dir)
    root, facts = public_root(data_root), machine()
    check_graphs([*graphs, *train_graphs], root)
    makers = {"neighbor": NeighborSampler(fanouts), "layerwise": LayerwiseSampler([nodes_per_layer] * len(fanouts))}
    dial = []
    for name in graphs:
        workload = load_workload(name, root)
        prob = access_probability(workload, workload.train_nodes, fanouts=fanouts, batch_size=batch_size)
        placement = place(prob, num_devices, max(1, round(buffer_share * workload.csc.num_rows)), alpha=0.2)
        for kind in samplers:
            for scale in scales:
                bias = LocalityBias(placement, scale, neighbor_set_size)
                counted = _reads(workload, placement, replace(makers[kind], locality=bias), batch_size, num_batches)
                one_hop = [nodes_per_layer] if kind == "layerwise" else [fanouts[1 % len(fanouts)]]
                sampler = type(makers[kind])(one_hop, locality=bias)
                variance = mean_variance(workload, sampler, num_targets, num_keys)
                dial.append({"graph": name, "sampler": kind, "scale": scale, **counted, "variance": variance})
    _against_one(dial)
    if dial:
        write_csv(output / "dial.csv", dial, facts)
        console.print(_dial_table(dial, machine_line(facts)))
        _draw(output / "locality.png", dial)
    accuracy = []
    if train_graphs:
        cases = [
            ({"graph": name, "scale": scale, "seed": seed},
             [*_overrides(name, output, num_devices, buffer_share, fanouts, batch_size, neighbor_set_size, max_epochs),
              f"placement.locality_scale={scale}", f"seed={seed}", *overrides])
            for seed in seeds for name in train_graphs for scale in scales
        ]  # fmt: skip
        accuracy = _accuracies(run_rows(output, cases), train_graphs, scales)
        write_csv(output / "accuracy.csv", accuracy, facts)
        console.print(_accuracy_table(accuracy, len(seeds)))
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
    """Add what each scale saves and costs beside scale 1."""
    base = {(row["graph"], row["sampler"]): row for row in rows if row["scale"] == 1}
    for row in rows:
        one = base[row["graph"], row["sampler"]]
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


def _accuracies(rows: list[dict], graphs, scales) -> list[dict]:
    table = []
    for graph in graphs:
        found = {
            scale: [100 * float(r["test_acc"]) for r in rows if (r["graph"], float(r["scale"])) == (graph, scale)]
            for scale in scales
        }
        for scale, values in found.items():
            table.append(
                {
                    "graph": graph,
                    "scale": scale,
                    "test_acc": round(mean(values), 2),
                    "std": round(stdev(values), 2) if len(values) > 1 else 0.0,
                    "difference": round(mean(values) - mean(found[1]), 2),
                }
            )
    return table


def _dial_table(rows: list[dict], caption: str) -> Table:
    table = Table(title="Locality-aware sampling beside uniform", caption=caption, box=SIMPLE, title_justify="left")
    for name in ("graph", "sampler"):
        table.add_column(name)
    for name in ("scale", "rows a\nseed", "host rows\na seed", "host share", "host reads\nsaved", "variance\nratio"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = row["variance_ratio"]
        table.add_row(
            row["graph"],
            row["sampler"],
            f"{row['scale']:g}",
            f"{row['rows_a_seed']:.1f}",
            f"{row['host_rows_a_seed']:.1f}",
            f"{row['host']:.1%}",
            f"{row['host_reads_saved']:.0%}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    return table


def _accuracy_table(rows: list[dict], num_seeds: int) -> Table:
    table = Table(title=f"test accuracy of GraphSAGE, %, {mean_of(num_seeds)}", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "graph" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def _draw(path: Path, rows: list[dict]) -> None:
    """Draw host rows a seed, as a share of scale 1's, against the variance ratio; a line a graph and sampler."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for graph, sampler in dict.fromkeys((row["graph"], row["sampler"]) for row in rows):
        own = [row for row in rows if (row["graph"], row["sampler"]) == (graph, sampler) and row["variance_ratio"]]
        saved = [100 * (1 - row["host_reads_saved"]) for row in own]
        ratios = [row["variance_ratio"] for row in own]
        axes.plot(ratios, saved, "o-" if sampler == "neighbor" else "s--", label=f"{graph}, {sampler}")
        for x, y, row in zip(ratios, saved, own, strict=True):
            axes.annotate(f"{row['scale']:g}", (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set(xlabel="variance of a mean over neighbours, over uniform's", ylabel="host reads a seed, % of uniform's")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
