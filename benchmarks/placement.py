"""Placements side by side: the share of reads that each tier serves, predicted and counted."""

import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from lightning_gnnscale.datamodule.placed_training import SAMPLED_BATCHES
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.model import GraphSAGE
from lightning_gnnscale.partition_store.features import DenseFeatures
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.placement import FeatureBuffer, Placement, access_probability, place
from lightning_gnnscale.placement.access_probability import METHODS as PROBABILITIES
from lightning_gnnscale.placement.access_probability import (
    count_reads,
    epoch_batches,
    layer_probability,
    sampled_probability,
)
from lightning_gnnscale.placement.place import RULES, Capacity, assign_training_nodes, most_read_rows
from lightning_gnnscale.placement.placement import mean_shares, read_shares
from lightning_gnnscale.rng import batch_key, fold, permutation
from lightning_gnnscale.triton_kernels.sample_layer import check_layer_sizes, sample_layers
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace, check_fanouts, sample_neighbors

from .graphs import check_graphs, load_workload, public_root, stream_of, without_metis
from .page_cache import evict
from .present import LEFT, grouped, legend, panels, save, show, tell
from .runner import Case, Runner, benchmark, check_names, digest, machine_line

METHODS = ("rule", "rule_by_cost", "ranges", "naive", "random", "degree", "metis", "metis_local")
METHODS += ("pagraph", "pagraph_local")
# Those that read each other's buffers and the same batches, as "rule" does.
PEERS = ("ranges", "naive", "random", "degree", "metis")
TIERS = ("local", "peer", "host", "disk")
LOCAL = "_local"  # each device shuffles its own training nodes only
EDGES_OF_SEARCH = 2e9  # that PaGraph's searches may read before they look fewer hops; about 10 s
FEATURE_DIM = 128
_PROBES = 32
_PROBABILITY_SEED = 1 << 20  # not one of the counted epochs' seeds


@dataclass(frozen=True)
class Reads:
    """How often each device read each row.

    Attributes:
        counts: (num_devices, num_nodes) int64.
    """

    counts: np.ndarray

    def shares(self, placement: Placement) -> dict[str, np.ndarray]:
        """Return the share of each device's reads by tier: tier to (num_devices,)."""
        shares = {tier: np.zeros(placement.num_devices) for tier in TIERS}
        for device in range(placement.num_devices):
            counts = self.counts[device]
            total = max(1, int(counts.sum()))
            dev_num, _ = placement.lookup(device)
            for tier, chosen in _tiers(dev_num, device).items():
                shares[tier][device] = counts[chosen].sum() / total
        return shares


@dataclass(frozen=True)
class PlacementBench:
    """Place rows by each method, and count from where sampled epochs would read them.

    The batches of one seed are the same for all methods. Only those named `_local` sample each device's batches from
    the training nodes of its own part. Writes `placement.csv` and `placement.png`; a graph and devices are one case,
    with all buffers and methods.

    Attributes:
        graphs: Public graphs, "power_law:NODES", or "power_law:NODES:EDGES".
        devices: Maps a name to the sizes of the groups of devices that read each other's buffers.
        buffer_shares: Sizes of one device's buffer, as shares of all rows, each in (0, 1].
        methods: Methods out of METHODS.
        alphas: Costs of a peer read divided by that of a host read; "rule" and "rule_by_cost" place for each of them.
        fanouts, batch_size: Fan-outs and size of the batches.
        nodes_per_layer: Nodes that each layer samples, where batches are `LayerwiseSampler`'s; None: they sample
            fan-outs.
        seeds: Seeds of the order of seeds and of sampling; means and deviations are taken over them.
        batches_per_device: Number of batches that each device must have had before sampling of epochs stops.
        timed_batches: Number of batches of the first device whose loading and computing is timed, for seconds an epoch;
            0: none. Rows are 128 float32; those on no device come from pinned memory on a GPU, without one from a file
            that is not in memory. Computing is a training step of GraphSAGE of 128 channels.
        probability: "auto", "samples", or a method of `access_probability`, as in `PlacementSettings`.
    """

    graphs: Sequence[str]
    devices: Mapping[str, Sequence[int]]
    buffer_shares: Sequence[float] = (0.1, 0.125, 0.2)
    methods: Sequence[str] = METHODS
    alphas: Sequence[float] = (0.0, 0.2)
    fanouts: Sequence[int] = (15, 10, 5)
    batch_size: int = 512
    nodes_per_layer: Sequence[int] | None = None
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    batches_per_device: int = 16
    timed_batches: int = 0
    probability: str = "auto"
    data_root: str | None = None

    def __post_init__(self):
        check_names("methods", self.methods, METHODS)
        if "rule" not in self.methods:
            had = list(self.methods)
            raise ValueError(f"bench.methods must hold rule, which the others are compared with, got {had}")
        for name in ("alphas", "buffer_shares", "seeds"):
            if len(getattr(self, name)) == 0:
                raise ValueError(f"bench.{name} must hold at least one value, got none")
        if not all(0 < share <= 1 for share in self.buffer_shares):
            raise ValueError(f"bench.buffer_shares must be in (0, 1], got {list(self.buffer_shares)}")
        check_graphs(list(self.graphs), public_root(self.data_root))
        check_fanouts(self.fanouts)
        if self.nodes_per_layer is not None:
            check_layer_sizes(self.nodes_per_layer, None)
        check_names("probability", [self.probability], ("auto", "samples", *PROBABILITIES))
        for name, sizes in self.devices.items():
            if isinstance(sizes, int) or not sizes or any(int(size) != size or size < 1 for size in sizes):
                raise ValueError(f"bench.devices.{name} must list the sizes of groups, each at least 1, got {sizes}")

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, devices, buffer and method (for the rules also per alpha)."""
        methods = without_metis(self.methods)
        facts = (check_fanouts(self.fanouts), self.batch_size, list(self.seeds), self.batches_per_device)
        facts += () if self.nodes_per_layer is None else (list(self.nodes_per_layer),)
        facts += (self.timed_batches,) if self.timed_batches else ()
        rows: list[dict] = []
        for name in self.graphs:
            graph = cache(partial(_Graph, self, name, methods, runner.folder))
            cases = []
            for devices, sizes in self.devices.items():
                ends = np.cumsum([0, *sizes])
                groups = tuple(tuple(range(ends[i], ends[i + 1])) for i in range(len(sizes)))
                settings = digest(*facts, self.probability, groups, *self.buffer_shares, *methods, *self.alphas)
                key = {"graph": name, "devices": devices, "settings": settings}
                cases.append(Case(key, lambda graph=graph, groups=groups: list(graph().rows(groups)), None))
            rows += runner.rows(cases, "placement.csv")
        if rows:
            _print_tables(rows)
            _draw(runner.folder / "placement.png", rows)
        return rows


run = benchmark(PlacementBench)


class _Graph:
    """One graph: its access probabilities and its counted reads, shared by all placements."""

    def __init__(self, bench: PlacementBench, name: str, methods: Sequence[str], folder: Path):
        self.bench, self.methods, self.fanouts, self.folder = bench, methods, check_fanouts(bench.fanouts), folder
        self.workload = load_workload(name, public_root(bench.data_root))
        self.csc, self.nodes = self.workload.csc, self.workload.train_nodes
        tell(f"{name}: {self.csc.num_rows:,} nodes, {self.csc.num_edges:,} edges, {len(self.nodes):,} training nodes")
        space = Workspace(self.csc.num_rows, self.csc.indices.dtype)
        if bench.nodes_per_layer is None:
            self.sample = lambda seeds, key: sample_neighbors(self.csc, seeds, self.fanouts, key, workspace=space)
        else:
            sizes = tuple(bench.nodes_per_layer)
            self.sample = lambda seeds, key: sample_layers(self.csc, seeds, sizes, key, workspace=space)
        self.sample_nodes = lambda seeds, key: self.sample(seeds, key).n_id
        start = time.perf_counter()
        self.prob = self._probability()
        self.prob_s = time.perf_counter() - start

    def _probability(self) -> np.ndarray:
        bench, method = self.bench, self.bench.probability
        given, layers = (self.workload, self.nodes), bench.nodes_per_layer
        if method == "auto":
            method = "vip_sampled" if layers is None else "samples"
        options = {"fanouts": self.fanouts if layers is None else (-1,) * len(layers), "batch_size": bench.batch_size}
        if method != "samples":
            return access_probability(*given, method=method, seed=_PROBABILITY_SEED, **options)
        if layers is None:
            prior = access_probability(*given, method="vip", **options)
        else:
            prior = layer_probability(*given, layers, bench.batch_size)
        batches = epoch_batches(self.nodes, bench.batch_size, SAMPLED_BATCHES, _PROBABILITY_SEED)
        return sampled_probability(prior, (self.sample_nodes(*batch) for batch in batches))

    def rows(self, groups: tuple[tuple[int, ...], ...]) -> Iterator[dict]:
        """Yield the rows of one set of devices."""
        nodes, num = self.nodes, sum(map(len, groups))
        made, apart, searched = {"groups": groups}, {}, {}  # searched: seconds of what is done once for all buffers
        start = time.perf_counter()
        if any(method.startswith("metis") for method in self.methods):
            made["part_id"] = apart["metis"] = partition(stream_of(self.csc), "metis", num).part_id
            searched["metis"] = time.perf_counter() - start
        start = time.perf_counter()
        if any(method.startswith("pagraph") for method in self.methods):
            hops, most = self.pagraph_hops, self._buffer_rows(max(self.bench.buffer_shares))
            owner = apart["pagraph"] = assign_training_nodes(self.csc, nodes, num, hops)
            made["own_rows"] = most_read_rows(self.csc, nodes, owner, num, hops, Capacity(most))
            searched["pagraph"] = time.perf_counter() - start
        reads = {"": self._count([nodes] * num)}  # by the parts whose devices shuffle their own nodes only
        if "metis_local" in self.methods:
            reads["metis"] = self._count([nodes[apart["metis"][nodes] == device] for device in range(num)])
        if "pagraph_local" in self.methods:
            reads["pagraph"] = self._count([nodes[apart["pagraph"] == device] for device in range(num)])
        for share, method in product(self.bench.buffer_shares, self.methods):
            kind = method.removesuffix(LOCAL)
            for alpha in self.bench.alphas if method in RULES else self.bench.alphas[:1]:
                start = time.perf_counter()
                placement = self._place(kind, num, self._buffer_rows(share), alpha, **made)
                seconds = time.perf_counter() - start
                yield {
                    "buffer_share": share,
                    "method": method,
                    "alpha": alpha if method in RULES else None,
                    **_measured(placement, reads[kind if method.endswith(LOCAL) else ""]),
                    "place_s": round(seconds + searched.get(kind, 0.0), 3),
                    "probability_s": round(self.prob_s, 3),
                    **(self._seconds(placement) if self.bench.timed_batches else {}),
                }

    def _place(self, kind: str, num: int, buffer_rows: int, alpha: float, *, groups, part_id=None, own_rows=None):
        """Return a placement; PaGraph's is what `place` makes of its rows, which are searched once for all buffers."""
        if kind != "pagraph":
            options = {"groups": groups, "method": kind, "store": self.workload, "part_id": part_id}
            return place(self.prob, num, buffer_rows, alpha=alpha, **options)
        rows, alone = tuple(own[:buffer_rows] for own in own_rows), tuple((device,) for device in range(num))
        shares = read_shares(rows, alone, None, self.prob)
        return Placement(rows, alone, len(self.prob), None, mean_shares(shares), shares, "pagraph")

    def _buffer_rows(self, share: float) -> int:
        return max(1, round(share * self.csc.num_rows))

    def _count(self, train_nodes: list[np.ndarray]) -> list[Reads]:
        """Return the reads of each seed; epochs until each device has had its batches."""
        size = self.bench.batch_size
        batches = sum(-(-len(nodes) // size) for nodes in {id(nodes): nodes for nodes in train_nodes}.values())
        num_epochs = max(1, -(-self.bench.batches_per_device * len(train_nodes) // max(1, batches)))
        return [
            count_epochs(self.sample_nodes, self.csc.num_rows, train_nodes, size, seed, num_epochs)
            for seed in self.bench.seeds
        ]

    def _seconds(self, placement: Placement) -> dict[str, float]:
        """Return the seconds that the first device loads features in an epoch, and those that it computes."""
        file, on = self._feature_file, "cuda:0" if torch.cuda.is_available() else "cpu"
        table = np.load(file, mmap_mode="r")
        buffer = FeatureBuffer(placement, DenseFeatures(table), 0, on=on)
        table._mmap.madvise(mmap.MADV_DONTNEED)
        evict(file)
        nodes = [sampled.n_id for sampled in self._timed]
        begun = time.perf_counter()
        for own in nodes:
            rows = buffer.read(own)
        if on != "cpu":
            torch.cuda.synchronize()
        load_s = time.perf_counter() - begun
        buffer.close()
        del rows
        per_epoch = len(self.nodes) / (placement.num_devices * self.bench.batch_size * len(nodes))
        return {"load_s": round(load_s * per_epoch, 4), "compute_s": round(self._compute_s * per_epoch, 4)}

    @cached_property
    def _timed(self) -> list:
        """Batches of the first epochs, sampled."""
        bench = self.bench
        return [self.sample(*batch) for batch in epoch_batches(self.nodes, bench.batch_size, bench.timed_batches, 0)]

    @cached_property
    def _feature_file(self) -> Path:
        path = self.folder / "rows.npy"
        np.save(path, np.random.default_rng(0).standard_normal((self.csc.num_rows, FEATURE_DIM), np.float32))
        return path

    @cached_property
    def _compute_s(self) -> float:
        """Seconds of training steps on the timed batches, all rows in memory."""
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        hops = self.bench.nodes_per_layer or self.fanouts
        model = GraphSAGE(FEATURE_DIM, FEATURE_DIM, FEATURE_DIM, num_layers=len(hops)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        given = [
            (
                torch.randn(len(sampled.n_id), FEATURE_DIM, device=device),
                torch.from_numpy(sampled.edge_index).to(device),
            )
            for sampled in self._timed
        ]

        def train(batches: list) -> float:
            begun = time.perf_counter()
            for x, edge_index in batches:
                optimizer.zero_grad()
                loss = model(x, edge_index)[: self.bench.batch_size].square().mean()
                loss.backward()
                optimizer.step()
            loss.item()
            return time.perf_counter() - begun

        train(given[:1])
        return train(given)

    @cached_property
    def pagraph_hops(self) -> int:
        """As many hops as the sampler has, or fewer where the searches would take too long."""
        hops = affordable_hops(self.csc, self.nodes, len(self.fanouts))
        if hops < len(self.fanouts):
            tell(f"PaGraph looks {hops} hops far: {len(self.fanouts)} would take too long here")
        return hops


def affordable_hops(csc: CSC, train_nodes: np.ndarray, num_layers: int) -> int:
    """Return the most hops, at least 1, whose searches from all training nodes read at most EDGES_OF_SEARCH edges."""
    probes = train_nodes[:: max(1, len(train_nodes) // _PROBES)]
    for hops in range(num_layers, 1, -1):
        edges = 0
        for node in probes:
            degree = np.zeros(csc.num_rows, np.int64)
            count_reads(csc.indptr, csc.indices, np.array([node]), hops, degree)
            edges += int(degree.sum())
        if edges / len(probes) * len(train_nodes) <= EDGES_OF_SEARCH:
            return hops
    return 1


def _measured(placement: Placement, seeds: list[Reads]) -> dict:
    """Return predicted and counted shares, means over devices, with the deviation over seeds."""
    counted = [reads.shares(placement) for reads in seeds]
    row = {f"predicted_{tier}": round(placement.shares[tier], 5) for tier in TIERS}
    for tier in TIERS:
        means = [float(shares[tier].mean()) for shares in counted]
        row[tier] = round(float(np.mean(means)), 5)
        row[f"{tier}_std"] = round(float(np.std(means, ddof=1)) if len(means) > 1 else 0.0, 5)
    row["worst_host"] = round(float(np.mean([shares["host"].max() for shares in counted])), 5)
    return row


def count_epochs(
    sample: Callable[[np.ndarray, int], np.ndarray],
    num_nodes: int,
    train_nodes: list[np.ndarray],
    batch_size: int,
    seed: int,
    num_epochs: int,
) -> Reads:
    """Sample epochs and count the rows that each device reads.

    Args:
        sample: Returns the nodes of a batch of seeds, sampled by a key.
        num_nodes, batch_size, seed, num_epochs: What is sampled.
        train_nodes: One array per device: its own nodes, shuffled among themselves ("local shuffling"). If several
            devices share one array (`is`), it is shuffled once, and they take its batches in turns ("global
            shuffling").
    """
    counts = np.zeros((len(train_nodes), num_nodes), np.int64)
    orders: dict[int, list[int]] = {}
    for device, nodes in enumerate(train_nodes):
        orders.setdefault(id(nodes), []).append(device)
    turn = 0
    for epoch in range(num_epochs):
        for devices in orders.values():
            nodes = train_nodes[devices[0]]
            order = nodes[permutation(len(nodes), fold(seed, epoch, devices[0]))]
            for batch, start in enumerate(range(0, len(order), batch_size)):
                key = batch_key(seed, epoch, devices[0], batch)
                counts[devices[turn % len(devices)], sample(order[start : start + batch_size], key)] += 1
                turn += 1
    return Reads(counts)


def _tiers(dev_num: np.ndarray, device: int) -> dict[str, np.ndarray]:
    local = dev_num == device
    return {"local": local, "peer": (dev_num >= 0) & ~local, "host": dev_num == -1, "disk": dev_num == -2}


def _print_tables(rows: list[dict]) -> None:
    """Print one table for each alpha, and what rule wins or loses in the worst case."""
    for alpha in sorted({row["alpha"] for row in rows if row["alpha"] is not None}):
        _show(rows, alpha)
        for rule, points in _worst_losses(rows, alpha).items():
            tell(f"alpha {alpha:g}: {rule} loses at most {100 * points:.2f} points against {', '.join(PEERS)}")
    if any(row.get("load_s") is not None for row in rows):
        _show_seconds(rows)
    shared = [row for row in rows if not row["method"].endswith(LOCAL)]
    gap = max(abs(row[tier] - row[f"predicted_{tier}"]) for row in shared for tier in ("local", "peer", "host"))
    tell(f"predicted and counted shares differ by at most {100 * gap:.1f} points (batches of all devices alike)")


def _show_seconds(rows: list[dict]) -> None:
    """Print what the first device loads and computes in an epoch, by placement."""
    columns = {name: (name.replace("_", " "), LEFT) for name in ("graph", "devices", "method")}
    columns |= {"buffer_share": ("buffer", "g"), "alpha": ("alpha", "g"), "host": ("host", ".1%")}
    columns |= {"load_s": ("load, s\nan epoch", ".3f"), "compute_s": ("compute, s\nan epoch", ".3f")}
    show([row for row in rows if row.get("load_s") is not None], columns, "one device's seconds", machine_line())


def _costs(case: list[dict], alpha: float) -> dict[str, float]:
    """Return what each method costs at an alpha."""
    what = compared(case, alpha)
    return {row["method"]: cost(row, alpha, what) for row in case if row["alpha"] in (None, alpha)}


def _worst_losses(rows: list[dict], alpha: float) -> dict[str, float]:
    worst: dict[str, float] = {}
    for costs in (_costs(case, alpha) for case in cases_of(rows)):
        for rule in (rule for rule in RULES if rule in costs):
            behind = (costs[rule] - costs[peer] for peer in PEERS if peer in costs)
            worst[rule] = max(worst.get(rule, 0.0), *behind, 0.0)
    return worst


def _show(rows: list[dict], alpha: float) -> None:
    """Print one line a case: the cost of each method in percent."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "rule"))
    columns = {
        "graph": ("graph", LEFT),
        "devices": ("devices", LEFT),
        "buffer_share": ("buffer", "g"),
        "of": ("of", LEFT),
        **{method: (method.replace("_", "\n"), ".1f") for method in ("rule", *methods)},
        "saved": ("less than\nnaive", ".0%"),
        "predicted": ("predicted", ".1f"),
    }
    shown = []
    for case in cases_of(rows):
        rule, what, costs = rule_of(case, alpha), compared(case, alpha), _costs(case, alpha)
        ranges = costs.get("ranges")
        shown.append(
            {**rule, "of": what, **{method: 100 * value for method, value in costs.items()}}
            | {"saved": round(1 - costs["rule"] / ranges, 2) + 0.0 if ranges else None}
            | {"predicted": 100 * cost(rule, alpha, what, "predicted_")}
        )
    if alpha == 0:
        title = "reads that miss, %, peers free: of the host's memory; of peers where all rows fit on the devices"
    else:
        title = f"cost of a read, % of a host read, a peer's read {alpha:g}"
    show(shown, columns, title, machine_line())


def cases_of(rows: list[dict]) -> list[list[dict]]:
    """Group rows by graph, devices and buffer."""
    return list(grouped(rows, "graph", "devices", "buffer_share").values())


def rule_of(case: list[dict], alpha: float, method: str = "rule") -> dict:
    """Return the row of a rule for one alpha."""
    return next(row for row in case if row["method"] == method and row["alpha"] == alpha)


def compared(case: list[dict], alpha: float) -> str:
    """Return what a case is judged by: host reads, peer reads where all rows are on the devices, or the cost."""
    if alpha:
        return "cost"
    return "host" if rule_of(case, alpha)["host"] > 0 else "peer"


def cost(row: Mapping, alpha: float, what: str, prefix: str = "") -> float:
    """Return a share of reads, or the cost of a read in host reads; prefix "predicted_" for what was predicted.

    Where peers are free (alpha 0) and all rows fit, a host read of a placement that leaves rows out counts as a peer's.
    """
    host, peer = row[f"{prefix}host"], row[f"{prefix}peer"]
    return {"host": host, "peer": peer + host, "cost": host + alpha * peer}[what]


def _draw(path: Path, rows: list[dict]) -> None:
    """Draw one panel a graph: host reads of each method at the smallest alpha, bars grouped by devices and buffer."""
    alpha = min(row["alpha"] for row in rows if row["alpha"] is not None)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, found = panels((row["graph"] for row in rows), across=1, size=(12, 2.6), beside=0)
    for (graph,), own in grouped(rows, "graph").items():
        axes, cases, width = found[graph], cases_of(own), 0.8 / len(methods)
        for number, method in enumerate(methods):
            chosen = [row for row in own if row["method"] == method and row["alpha"] in (None, alpha)]
            places = [place + (number - len(methods) / 2) * width for place in range(len(cases))]
            heights, errors = ([100 * row[name] for row in chosen] for name in ("host", "host_std"))
            colour = "black" if method == "rule" else None
            axes.bar(places, heights, width, yerr=errors, label=method, color=colour, error_kw={"linewidth": 0.6})
        labels = [f"{case[0]['devices']}\n{case[0]['buffer_share']:g}" for case in cases]
        axes.set_xticks(range(len(cases)), labels, fontsize=8)
        axes.set_ylabel("host reads, %")
    axes.set_xlabel("devices (groups), rows of a buffer over all rows")
    legend(figure, found, "outside upper center", ncols=len(methods))
    save(figure, path)
