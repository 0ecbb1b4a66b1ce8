"""Placements side by side: the share of reads that each tier serves, predicted and counted."""

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from ..edge_stream import open_edge_stream
from ..graph import CSC
from ..partitioner import partition
from ..placement import Placement, access_probability, place
from ..placement.access_probability import count_reads
from ..placement.place import RULES, assign_training_nodes, most_read_rows
from ..placement.placement import mean_shares, read_shares
from ..triton_kernels.sample_neighbors import Workspace, check_fanouts
from .partition_graphs import public_root
from .placement_graphs import Workload, check_graphs, load_workload
from .placement_reads import TIERS, Reads, count_epochs
from .placement_tables import draw, print_tables
from .results import machine, write_csv

METHODS = ("rule", "rule_by_cost", "naive", "random", "degree", "metis", "metis_local", "pagraph", "pagraph_local")
LOCAL = "_local"  # each device shuffles its own training nodes only
ARCS_OF_SEARCH = 2e9  # that PaGraph's searches may read before they look fewer hops; about 10 s
_PROBES = 32
_PROBABILITY_SEED = 1 << 20  # none of the counted epochs' seeds


@dataclass(frozen=True)
class Devices:
    """A number of devices and which of them read each other's buffers."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def number(self) -> int:
        return sum(len(group) for group in self.groups)


def run(
    output_dir: str | os.PathLike,
    graphs: Sequence[str],
    devices: Mapping[str, Sequence[int]],
    buffer_shares: Sequence[float] = (0.1, 0.125, 0.2),
    methods: Sequence[str] = METHODS,
    alphas: Sequence[float] = (0.0, 0.2),
    fanouts: Sequence[int] = (15, 10, 5),
    batch_size: int = 512,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    batches_per_device: int = 16,
    probability: str = "vip_sampled",
    data_root: str | None = None,
) -> list[dict]:
    """Place rows by each method, and count from where sampled epochs would read them.

    The batches of one seed are the same for all methods. Only those named `_local` draw each device's batches from the
    training nodes of its own part.

    Args:
        output_dir: Folder for `placement.csv` and `placement.png`.
        graphs: Public graphs, "power_law:NODES", or "power_law:NODES:ARCS".
        devices: Maps a name to the sizes of the groups of devices that read each other's buffers.
        buffer_shares: Sizes of one device's buffer, as shares of all rows, each in (0, 1].
        methods: Methods out of METHODS.
        alphas: Costs of a peer read divided by that of a host read; "rule" and "rule_by_cost" place for each of them.
        fanouts, batch_size: Fan-outs and size of the batches.
        seeds: Seeds of the order of seeds and of sampling; means and deviations are taken over them.
        batches_per_device: Number of batches that each device must have had before sampling of epochs stops.
        probability: Method of `access_probability` by which rows are placed.
        data_root: Folder of public graphs; None: it is searched for.

    Returns:
        One row per graph, devices, buffer and method (for the rules also per alpha).
    """
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise ValueError(f"bench.methods must be of {', '.join(METHODS)}; got {', '.join(unknown)}")
    if "rule" not in methods:
        raise ValueError(f"bench.methods must hold rule, which the others are compared with, got {list(methods)}")
    for name, values in {"alphas": alphas, "buffer_shares": buffer_shares, "seeds": seeds}.items():
        if len(values) == 0:
            raise ValueError(f"bench.{name} must hold at least one value, got none")
    if not all(0 < share <= 1 for share in buffer_shares):
        raise ValueError(f"bench.buffer_shares must be in (0, 1], got {list(buffer_shares)}")
    console = Console(width=max(Console().width, 150))
    root = public_root(data_root)
    check_graphs(list(graphs), root)
    fanouts = check_fanouts(fanouts)
    if any(method.startswith("metis") for method in methods) and importlib.util.find_spec("pymetis") is None:
        console.print("METIS is left out: pymetis is not installed (extra \\[metis])")
        methods = [method for method in methods if not method.startswith("metis")]
    cases = [_devices(name, sizes) for name, sizes in devices.items()]
    rows, facts = [], machine()
    for name in graphs:
        workload = load_workload(name, root)
        console.print(
            f"{name}: {workload.csc.num_rows:,} nodes, {workload.csc.num_arcs:,} arcs, "
            f"{len(workload.train_nodes):,} training nodes"
        )
        graph_bench = _GraphBench(workload, fanouts, batch_size, list(seeds), batches_per_device, probability, console)
        for case in cases:
            rows += graph_bench.rows(case, buffer_shares, methods, alphas)
            write_csv(Path(output_dir) / "placement.csv", rows, facts)
    print_tables(console, rows, facts)
    draw(Path(output_dir) / "placement.png", rows)
    return rows


class _GraphBench:
    """One graph: its access probabilities and its counted reads, shared by all placements."""

    def __init__(
        self, workload: Workload, fanouts, batch_size, seeds, batches_per_device, probability: str, console: Console
    ):
        self.workload, self.fanouts, self.batch_size, self.seeds = workload, fanouts, batch_size, seeds
        self.batches_per_device, self.console = batches_per_device, console
        csc, nodes = workload.csc, workload.train_nodes
        self.workspace = Workspace(csc.num_rows, csc.indices.dtype)
        start = time.perf_counter()
        options = {"method": probability, "fanouts": fanouts, "batch_size": batch_size}
        self.prob = access_probability(workload, nodes, seed=_PROBABILITY_SEED, **options)
        self.prob_s = time.perf_counter() - start
        self._hops: int | None = None

    def rows(self, devices: Devices, buffer_shares, methods, alphas) -> Iterator[dict]:
        """Yield the rows of one set of devices."""
        nodes = self.workload.train_nodes
        part_id = own_rows = owner = None
        searched = {}  # seconds of what a method does once for all buffers
        start = time.perf_counter()
        if any(m.startswith("metis") for m in methods):
            part_id = self._metis(devices.number)
            searched["metis"] = time.perf_counter() - start
        start = time.perf_counter()
        if any(m.startswith("pagraph") for m in methods):
            csc, hops, most = self.workload.csc, self._pagraph_hops(), self._buffer_rows(max(buffer_shares))
            owner = assign_training_nodes(csc, nodes, devices.number, hops)
            own_rows = most_read_rows(csc, nodes, owner, devices.number, hops, most)
            searched["pagraph"] = time.perf_counter() - start
        together = self._count([nodes] * devices.number)
        apart = {}
        if "metis_local" in methods:
            apart["metis"] = self._count([nodes[part_id[nodes] == device] for device in range(devices.number)])
        if "pagraph_local" in methods:
            apart["pagraph"] = self._count([nodes[owner == device] for device in range(devices.number)])
        for share in buffer_shares:
            buffer_rows = self._buffer_rows(share)
            for method in methods:
                kind = method.removesuffix(LOCAL)
                for alpha in alphas if method in RULES else alphas[:1]:
                    start = time.perf_counter()
                    if kind == "pagraph":
                        placement = self._pagraph([rows[:buffer_rows] for rows in own_rows])
                    else:
                        placement = self._place(kind, devices, buffer_rows, alpha, part_id)
                    seconds = time.perf_counter() - start
                    reads = apart[kind] if method.endswith(LOCAL) else together
                    yield {
                        "graph": self.workload.name,
                        "devices": devices.name,
                        "buffer_share": share,
                        "method": method,
                        "alpha": alpha if method in RULES else None,
                        **_measured(placement, reads),
                        "place_s": round(seconds + searched.get(kind, 0.0), 3),
                        "probability_s": round(self.prob_s, 3),
                    }

    def _place(self, method: str, devices: Devices, buffer_rows: int, alpha: float, part_id) -> Placement:
        return place(
            self.prob,
            devices.number,
            buffer_rows,
            alpha=alpha,
            groups=devices.groups,
            method=method,
            store=self.workload,
            part_id=part_id,
        )

    def _pagraph(self, rows: list[np.ndarray]) -> Placement:
        """Return what `place` makes of PaGraph's rows; its searches are done once for all buffers."""
        groups = tuple((device,) for device in range(len(rows)))
        shares = read_shares(tuple(rows), groups, None, self.prob)
        return Placement(tuple(rows), groups, len(self.prob), None, mean_shares(shares), shares, "pagraph")

    def _buffer_rows(self, share: float) -> int:
        return max(1, round(share * self.workload.csc.num_rows))

    def _count(self, train_nodes: list[np.ndarray]) -> list[Reads]:
        """Return the reads of each seed; epochs until each device has had its batches."""
        csc, batch_size = self.workload.csc, self.batch_size
        batches = sum(-(-len(nodes) // batch_size) for nodes in {id(nodes): nodes for nodes in train_nodes}.values())
        num_epochs = max(1, -(-self.batches_per_device * len(train_nodes) // max(1, batches)))
        return [
            count_epochs(csc, train_nodes, self.fanouts, batch_size, seed, num_epochs, self.workspace)
            for seed in self.seeds
        ]

    def _metis(self, num_parts: int) -> np.ndarray:
        csc = self.workload.csc
        target = np.repeat(np.arange(csc.num_rows, dtype=csc.indices.dtype), csc.in_degree)
        stream = open_edge_stream(np.stack([csc.indices, target]), num_nodes=csc.num_rows)
        return partition(stream, "metis", num_parts).part_id

    def _pagraph_hops(self) -> int:
        """Return as many hops as the sampler has, or fewer where the searches would take too long."""
        if self._hops is None:
            self._hops = affordable_hops(self.workload.csc, self.workload.train_nodes, len(self.fanouts))
            if self._hops < len(self.fanouts):
                self.console.print(f"PaGraph looks {self._hops} hops far: {len(self.fanouts)} would take too long here")
        return self._hops


def affordable_hops(csc: CSC, train_nodes: np.ndarray, num_layers: int) -> int:
    """Return the most hops, at least 1, whose searches from all training nodes read at most ARCS_OF_SEARCH arcs."""
    probes = train_nodes[:: max(1, len(train_nodes) // _PROBES)]
    for hops in range(num_layers, 1, -1):
        arcs = 0
        for node in probes:
            degree = np.zeros(csc.num_rows, np.int64)
            count_reads(csc.indptr, csc.indices, np.array([node]), hops, degree)
            arcs += int(degree.sum())
        if arcs / len(probes) * len(train_nodes) <= ARCS_OF_SEARCH:
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


def _devices(name: str, sizes: Sequence[int]) -> Devices:
    if isinstance(sizes, int) or not sizes or any(int(size) != size or size < 1 for size in sizes):
        raise ValueError(f"bench.devices.{name} must list the sizes of groups, each at least 1, got {sizes}")
    starts = np.cumsum([0, *sizes])
    return Devices(name, tuple(tuple(range(starts[i], starts[i + 1])) for i in range(len(sizes))))
