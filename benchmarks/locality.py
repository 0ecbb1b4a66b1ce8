"""The dial of locality-aware sampling: reads of far rows on one side, variance and accuracy on the other."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, islice, product
from pathlib import Path
from statistics import stdev

import numpy as np

from lightning_gnnscale.graph import CSC
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.placement import Placement, access_probability, place
from lightning_gnnscale.placement.access_probability import layer_probability
from lightning_gnnscale.rng import batch_key, fold, permutation
from lightning_gnnscale.sampler import LayerwiseSampler, LocalityBias, NeighborSampler
from lightning_gnnscale.sampler.protocol import Subgraph
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace

from .experiment import run_rows
from .graphs import Workload, check_graphs, load_workload, public_root
from .pinned import pinned
from .present import LEFT, average, grouped, lines, mean_of, panels, plain_columns, save, show
from .reduced_graph import reduced_graph
from .runner import Case, Runner, benchmark, check_names, digest, machine_line, write_csv

SAMPLERS = ("neighbor", "layerwise")
VALUES = 8  # random numbers a node whose means are estimated
SPLIT = [0.6, 0.2, 0.2]
FEATURE_DIM = 128
ALPHA = 0.2  # cost of a peer read over that of a host read
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


@dataclass(frozen=True)
class LocalityBench:
    """Count the rows that batches read at each scale, estimate the variance of their means, and train.

    Writes `dial.csv`, `rows.csv` (one row per training, with its losses), `accuracy.csv`, `locality.png`, `losses.png`
    and the runs.

    Attributes:
        graphs: Graphs on which reads and variances are measured; see `PlacementBench`.
        train_graphs: Public graphs on which GraphSAGE is trained, with features reduced to 128; empty: no training.
        scales: Scales of `LocalityBias`; the others are compared with 1.
        samplers: "neighbor" (fanouts) and "layerwise" (nodes_per_layer in each layer, one layer per fan-out).
        num_devices, buffer_share: Number of devices in the placement, and share of the rows in each one's buffer;
            placed by rule with alpha 0.2.
        fanouts, nodes_per_layer: Settings of the samplers.
        neighbor_set_size: See `LocalityBias`.
        batch_size, num_batches: Size and number of the batches whose reads are counted.
        num_keys, num_targets: Number of keys over which the variance of one hop's means is taken, and number of
            targets.
        seeds, max_epochs: Seeds and epochs of the training runs. There is no early stopping; the best checkpoint is
            tested.
    """

    graphs: Sequence[str]
    train_graphs: Sequence[str] = ()
    scales: Sequence[float] = (1, 2, 4, 8)
    samplers: Sequence[str] = SAMPLERS
    num_devices: int = 2
    buffer_share: float = 0.1
    fanouts: Sequence[int] = (15, 10, 5)
    nodes_per_layer: int = 2048
    neighbor_set_size: int = 8192
    batch_size: int = 512
    num_batches: int = 32
    num_keys: int = 64
    num_targets: int = 256
    seeds: Sequence[int] = (0, 1, 2)
    max_epochs: int = 30
    data_root: str | None = None
    overrides: Sequence[str] = ()

    def __post_init__(self):
        check_names("samplers", self.samplers, SAMPLERS)
        if 1 not in self.scales:
            raise ValueError(f"bench.scales must hold 1, which the others are compared with, got {list(self.scales)}")
        check_graphs([*self.graphs, *self.train_graphs], public_root(self.data_root))

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"dial": rows, "accuracy": rows}."""
        facts = (self.num_devices, self.buffer_share, *self.fanouts, self.nodes_per_layer, self.neighbor_set_size)
        facts += (self.batch_size, self.num_batches, self.num_keys, self.num_targets, "by layers")
        dial: list[dict] = []
        for name in self.graphs:
            key, made = {"graph": name, "settings": digest(*facts)}, cache(self._placed)
            cases = [
                Case(
                    {**key, "sampler": kind, "scale": scale}, partial(self._at, partial(made, name, kind), kind, scale)
                )
                for kind, scale in product(self.samplers, self.scales)
            ]
            dial += runner.rows(cases, "dial_rows.csv")
        _against_one(dial)
        if dial:
            write_csv(runner.folder / "dial.csv", dial)
            show(dial, DIAL, "Locality-aware and uniform sampling", machine_line())
            _draw(runner.folder / "locality.png", dial)
        graphs = runner.folder / "graphs"
        files = {name: reduced_graph(name, graphs, FEATURE_DIM, SPLIT) for name in self.train_graphs}
        words = {name: self._words(name, file) for name, file in files.items()}
        trained = [
            (
                {"graph": name, "scale": scale, "seed": seed},
                [*words[name], f"rows.locality_scale={scale}", f"seed={seed}", *self.overrides],
            )
            for seed, name, scale in product(self.seeds, self.train_graphs, self.scales)
        ]
        runs = run_rows(runner, trained, measure=_losses)
        accuracy = _accuracies(runs, self.train_graphs)
        if accuracy:
            _draw_losses(runner.folder / "losses.png", runs)
            title = f"test accuracy of GraphSAGE, %, {mean_of(len(self.seeds))}"
            write_csv(runner.folder / "accuracy.csv", accuracy)
            show(accuracy, plain_columns(accuracy, ("graph",)), title)
        return {"dial": dial, "accuracy": accuracy}

    def _placed(self, name: str, kind: str) -> tuple[Workload, Placement]:
        workload, size = load_workload(name, public_root(self.data_root)), self.batch_size
        if kind == "neighbor":
            prob = access_probability(workload, workload.train_nodes, fanouts=self.fanouts, batch_size=size)
        else:
            sizes = [self.nodes_per_layer] * len(self.fanouts)
            prob = layer_probability(workload, workload.train_nodes, sizes, size)
        buffer_rows = max(1, round(self.buffer_share * workload.csc.num_rows))
        return workload, place(prob, self.num_devices, buffer_rows, alpha=ALPHA)

    def _at(self, made: Callable, kind: str, scale: float) -> dict:
        """Return what a sampler reads at a scale, and the variance of one of its hops."""
        workload, placement = made()
        bias = LocalityBias(placement, scale, self.neighbor_set_size)
        if kind == "neighbor":
            hops, sampler, one_hop = self.fanouts, NeighborSampler, self.fanouts[1 % len(self.fanouts)]
        else:
            hops, sampler, one_hop = [self.nodes_per_layer] * len(self.fanouts), LayerwiseSampler, self.nodes_per_layer
        reads = _reads(workload, placement, sampler(hops, locality=bias), self.batch_size, self.num_batches)
        variance = mean_variance(workload, sampler([one_hop], locality=bias), self.num_targets, self.num_keys)
        return {**reads, "variance": variance}

    def _words(self, name: str, file: Path) -> list[str]:
        own = [
            f"dataset.name={file}",
            f"rows.alpha={ALPHA}",
            f"rows.buffer_share={self.buffer_share}",
            f"sampler.fanouts=[{','.join(map(str, self.fanouts))}]",
            f"model.backbone.num_layers={len(self.fanouts)}",
            f"datamodule.batch_size={self.batch_size}",
            f"rows.neighbor_set_size={self.neighbor_set_size}",
            f"num_parts={self.num_devices}",
            f"trainer.devices={self.num_devices}",
            f"trainer.max_epochs={self.max_epochs}",
            f"name=locality-{name}",
        ]
        return pinned("data_placement", own)


run = benchmark(LocalityBench)


def _reads(workload: Workload, placement: Placement, sampler, batch_size: int, num_batches: int) -> dict:
    """Return what batches read: rows a seed, and the share of them that are on no device of the group."""
    csc, counts, seeds = workload.csc, np.zeros(workload.csc.num_rows, np.int64), 0
    state, space = sampler.prepare(WholeGraph.of(csc, 0), workload.train_nodes, 0), _space(csc)
    keys = ((epoch, items) for epoch in count() for items in sampler.items(state, batch_size, False, fold(0, epoch)))
    for batch, (epoch, items) in enumerate(islice(keys, num_batches)):
        drawn = sampler.sample(state, items, batch_key(0, epoch, 0, batch), space, np.empty, False)
        counts += np.bincount(drawn.n_id, minlength=csc.num_rows)
        seeds += len(items)
    far, total = int(counts[placement.lookup(0)[0] < 0].sum()), int(counts.sum())
    return {
        "rows_a_seed": round(total / seeds, 2),
        "host_rows_a_seed": round(far / seeds, 2),
        "host": round(far / total, 4),
    }


def _space(csc: CSC) -> Workspace:
    return Workspace(csc.num_rows, csc.indices.dtype)


def mean_variance(workload: Workload, sampler, num_targets: int, num_keys: int) -> float:
    """Return the variance over num_keys >= 2 keys of the neighbourhood means that one hop of a sampler estimates.

    It is averaged over num_targets training nodes that have a neighbour, and over random values of each node.
    """
    csc = workload.csc
    degree = csc.in_degree[workload.train_nodes]
    targets = workload.train_nodes[degree > 0]
    targets = targets[permutation(len(targets), fold(0, num_targets))[:num_targets]]
    state, space = sampler.prepare(WholeGraph.of(csc, 0), targets, 0), _space(csc)
    values = np.random.default_rng(0).standard_normal((csc.num_rows, VALUES))
    total, squares = np.zeros((len(targets), VALUES)), np.zeros((len(targets), VALUES))
    for key in range(num_keys):
        estimate = weighted_means(
            sampler.sample(state, targets, batch_key(1, 0, 0, key), space, np.empty, False), values
        )
        total, squares = total + estimate, squares + estimate**2
    return float(((squares - total**2 / num_keys) / (num_keys - 1)).mean())


def weighted_means(drawn: Subgraph, values: np.ndarray) -> np.ndarray:
    """Return (num_targets, num_values) sums over sampled edges by their weights; plain means where they have none."""
    source, target = drawn.n_id[drawn.edge_index[0]], drawn.edge_index[1]
    weight = drawn.edge_weight
    if weight is None:
        weight = 1 / np.diff(drawn.indptr)[target]
    out = np.zeros((drawn.num_seeds, values.shape[1]))
    np.add.at(out, target, values[source] * weight[:, None])
    return out


def _against_one(rows: list[dict]) -> None:
    """Add what each scale saves and costs compared with scale 1, where that was measured."""
    base = {(row["graph"], row["sampler"]): row for row in rows if row["scale"] == 1}
    for row in rows:
        one = base.get((row["graph"], row["sampler"]))
        row["host_reads_saved"] = row["variance_ratio"] = None
        if one is not None:
            host = one["host_rows_a_seed"]
            row["host_reads_saved"] = round(1 - row["host_rows_a_seed"] / host, 4) if host else 0.0
            row["variance_ratio"] = round(row["variance"] / one["variance"], 3) if one["variance"] else None


def _accuracies(rows: list[dict], graphs: Sequence[str]) -> list[dict]:
    """Return means over seeds by graph, with the difference to scale 1 where that was trained."""
    runs, means = grouped(rows, "graph", "scale"), []
    for (graph, scale), own in sorted(runs.items(), key=lambda item: list(graphs).index(item[0][0])):
        one = average(runs.get((graph, 1), []), "test_acc", factor=100)
        accuracy = average(own, "test_acc", factor=100)
        row = {"graph": graph, "scale": scale, "test_acc": round(accuracy, 2)}
        last = [float(run["losses"].split()[-1]) for run in own if run.get("losses")]
        row["last_loss"] = round(float(np.mean(last)), 4) if last else None
        row["std"] = round(stdev(100 * run["test_acc"] for run in own), 2) if len(own) > 1 else 0.0
        means.append(row | {"difference": None if one is None else round(accuracy - one, 2)})
    return means


def _losses(folder: Path) -> dict[str, str]:
    """Return the training loss of each epoch of a run, separated by blanks."""
    with open(folder / "metrics" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    return {"losses": " ".join(f"{float(row['train_loss']):.4f}" for row in rows)}


def _draw_losses(path: Path, rows: list[dict]) -> None:
    """Draw the training loss by epoch, means over seeds; a panel a graph, a line a scale."""
    figure, found = panels((row["graph"] for row in rows), beside=0)
    for (graph, scale), own in grouped(rows, "graph", "scale").items():
        curves = [[float(loss) for loss in row["losses"].split()] for row in own]
        means = [{"epoch": i + 1, "loss": float(np.mean(at))} for i, at in enumerate(zip(*curves, strict=False))]
        lines(found[graph], means, "epoch", "loss", "-", label=f"scale {scale:g}")
    for axes in found.values():
        axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
        axes.legend(fontsize=8)
    save(figure, path)


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
