"""What machines that hold parts of a graph request from each other while they train, by partitioner; bytes only.

Each machine trains the targets that `PartitionDataModule` assigns to its rank, and holds the parts of which it trains
most targets, as with `OwnerReads`. Its batches are sampled from the store; what would come from other machines is
counted by their ids.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, product
from pathlib import Path

import numpy as np

from lightning_gnnscale.datamodule.machine_plan import RowsAsked
from lightning_gnnscale.datamodule.train_loader import make_graph_loader, part_targets
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.loader import LoaderOptions, RankPlace, Threads, rank_of_parts
from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.sampler import NeighborSampler
from lightning_gnnscale.sampler.minibatch import MiniBatch
from lightning_gnnscale.triton_kernels.sample_neighbors import check_fanouts

from .graphs import GraphFile, GraphSpec, graph_file, public_root, resolve_graphs, typed_dataset
from .partition_cases import MethodSpec, leave_out_missing_peers, options_of, resolve_methods
from .present import LEFT, show, tell
from .runner import Case, Runner, benchmark, digest, in_fresh_process, machine_line

_MB = 1e6
COLUMNS = {
    "graph": ("graph", LEFT),
    "machines": ("machines", ">"),
    "parts": ("parts", ">"),
    "method": ("method", LEFT),
    "away_share": ("rows from\nothers", ".1%"),
    "epoch_bytes": ("MB an\nepoch", lambda number: f"{number / _MB:,.0f}"),
    "link_s": ("link s\nan epoch", ",.2f"),
    "away_share_replicated": ("rows,\nreplicated", ".1%"),
    "epoch_bytes_replicated": ("MB,\nreplicated", lambda number: f"{number / _MB:,.0f}"),
    "link_s_replicated": ("link s,\nreplicated", ",.2f"),
    "train_balance": ("training\nbalance", ".2f"),
    "partition_s": ("partition s", ",.1f"),
}


@dataclass(frozen=True)
class OwnershipBench:
    """Count the rows and bytes that machines ask of each other, by the partitioner of the parts that they hold.

    A graph, a method and a number of parts are one case, in a process of its own, with all numbers of machines. Writes
    `ownership.csv`.

    Attributes:
        graphs: Public graphs, "lfr:EDGES:NODES" or "planted:EDGES:NODES", paths, or {path, masks, ...}; a mask "train"
            is needed.
        methods: Names of partitioners, or {method, name, balance, and options of the method}.
        parts: Numbers of parts.
        machines: Numbers of machines, each of one rank; those beyond the number of parts are left out.
        feature_bytes: Size of a feature row, bytes.
        replicate_share: Rows of highest in-degree that each machine holds besides its own, as a share of the features'
            bytes, in [0, 1].
        link_gbit_per_s: Rate at which a machine sends, and at which it receives at the same time.
        fanouts, batch_size: Fan-outs and size of the batches.
        num_batches: Batches that are sampled for each machine, at most; an epoch is extrapolated from them.
        scratch: Folder for edge files and stores; None: the system's folder for temporary files.
    """

    graphs: Sequence[str | dict]
    methods: Sequence[str | dict]
    parts: Sequence[int] = (4,)
    machines: Sequence[int] = (2, 4)
    feature_bytes: int = 512
    replicate_share: float = 0.05
    link_gbit_per_s: float = 1.0
    fanouts: Sequence[int] = (25, 10)
    batch_size: int = 512
    num_batches: int = 64
    seed: int = 0
    data_root: str | None = None
    scratch: str | None = None

    def __post_init__(self):
        for name in ("parts", "machines"):
            wrong = [number for number in getattr(self, name) if number < 1]
            if wrong or not getattr(self, name):
                raise ValueError(f"bench.{name} must be numbers of at least 1, got {list(getattr(self, name))}")
        if min(self.machines) > max(self.parts):
            raise ValueError(
                f"bench.machines must hold one of at most {max(self.parts)}, the largest of bench.parts, "
                f"got {list(self.machines)}"
            )
        if not 0 <= self.replicate_share <= 1:
            raise ValueError(f"bench.replicate_share must be in [0, 1], got {self.replicate_share}")
        if not self.link_gbit_per_s > 0:
            raise ValueError(f"bench.link_gbit_per_s must be above 0, got {self.link_gbit_per_s}")
        check_fanouts(self.fanouts)
        resolve_methods(self.methods)

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, parts, method and number of machines; see `count_asked`."""
        methods = leave_out_missing_peers(resolve_methods(self.methods), tell)
        rows: list[dict] = []
        for graph in resolve_graphs(list(self.graphs), {}, public_root(self.data_root)):
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder, ExitStack() as stack:
                made = cache(partial(stack.enter_context, graph_file(graph, Path(folder))))
                cases = [self._case(graph, made, Path(folder), *one) for one in product(self.parts, methods)]
                rows += runner.rows(filter(None, cases), "ownership.csv")
        rows.sort(key=lambda row: (row["graph"], row["parts"], row["machines"]))
        title = f"What comes from other machines; links of {self.link_gbit_per_s:g} Gbit/s, the busiest one"
        show(rows, COLUMNS, title, machine_line())
        return rows

    def _case(self, graph: GraphSpec, made, folder: Path, num_parts: int, spec: MethodSpec) -> Case | None:
        contenders = [{"machines": machines} for machines in self.machines if machines <= num_parts]
        if not contenders:
            return None
        facts = (spec.method, spec.options, spec.balance, graph.source, self.feature_bytes, self.replicate_share)
        facts += (self.link_gbit_per_s, list(self.fanouts), self.batch_size, self.num_batches, self.seed)
        key = {"graph": graph.name, "method": spec.name, "parts": num_parts, "settings": digest(*facts)}

        def measured() -> list[dict]:
            with tempfile.TemporaryDirectory(dir=folder) as store:
                machines = [one["machines"] for one in contenders]
                return in_fresh_process(count_asked, self, made(), store, spec, num_parts, machines)

        return Case(key, measured, contenders)


run = benchmark(OwnershipBench)


def count_asked(
    bench: OwnershipBench, graph: GraphFile, folder: str, spec: MethodSpec, num_parts: int, machines: list[int]
) -> list[dict]:
    """Partition and store a graph, and count for each number of machines what they ask of each other.

    Returns:
        machines; num_batches: batches sampled, of all machines; away_share: rows of batches that come from another
        machine over all their rows; epoch_bytes: bytes of these rows and of neighbours, of all machines; link_s:
        seconds for which the busiest link sends, or receives if that is more, in an epoch; the same three with rows
        replicated; train_balance: most training nodes that a machine holds, over the mean; partition_s.

    Raises:
        ValueError: the graph has no training nodes.
    """
    store, seconds = partitioned_store(graph, folder, spec, num_parts, bench.seed)
    rows = []
    for number in machines:
        plain, replicated = asked = [Asked(store, number, bench, share) for share in (0.0, bench.replicate_share)]
        sampler, order = NeighborSampler(bench.fanouts), LoaderOptions(bench.batch_size, bench.seed)
        for machine in range(number):
            place = RankPlace(machine, number, machine)
            with closing(make_graph_loader(store, sampler, order, None, Threads(), place)) as loader:
                for batch in islice(loader, bench.num_batches):
                    for one in asked:
                        one.count(machine, batch)
        with_replicas = replicated.told()
        told = {f"{name}_replicated": with_replicas[name] for name in ("away_share", "epoch_bytes", "link_s")}
        rows.append({"machines": number, **plain.told(), **told, "partition_s": round(seconds, 2)})
    return rows


def partitioned_store(
    graph: GraphFile, folder: str, spec: MethodSpec, num_parts: int, seed: int
) -> tuple[PartitionStore, float]:
    """Partition a graph and write its store, without features; return it, and the seconds that partitioning took.

    Raises:
        ValueError: the graph has no training nodes.
    """
    masks = {}
    if graph.masks is not None:
        with np.load(graph.masks) as arrays:
            masks = {name: arrays[name] for name in arrays.files}
    if "train" not in masks:
        raise ValueError(f"bench.graphs: {graph.path} has no training nodes: give masks=, an .npz with the mask train")
    columns = {"labels": np.zeros(graph.num_nodes, np.int64), "masks": masks}
    if graph.node_type is None:
        options = {"num_nodes": graph.num_nodes, "layout": graph.layout, "to_undirected": True, **graph.reader}
        stream = open_edge_stream(graph.path, **options)
    else:
        columns = {"columns": typed_dataset(graph, masks)}
        stream, masks = columns["columns"].stream, columns["columns"].masks
    begun = time.perf_counter()
    shared = {"seed": seed, "masks": masks, "balance": spec.balance, "evaluate": False}
    parts = partition(stream, spec.method, num_parts, **shared, **options_of(spec, "all"))
    seconds = time.perf_counter() - begun
    return write_partition_store(Path(folder) / "store", stream, parts, **columns), seconds


class Asked:
    """What machines ask of each other, counted batch by batch.

    Args:
        store: The store whose parts they hold.
        num_machines: Number of machines, each of one rank.
        bench: Size of feature rows, and rate of links.
        replicate_share: See `OwnershipBench`.
    """

    def __init__(self, store: PartitionStore, num_machines: int, bench: OwnershipBench, replicate_share: float):
        self._bench = bench
        targets = [len(nodes) for nodes in part_targets(store).values()]
        self.owner = rank_of_parts(targets, np.diff(store.part_offsets), num_machines, store.num_machines)
        self._targets, held = sum(targets), np.bincount(self.owner, targets, num_machines)
        self.train_balance = float(held.max() / held.mean())
        budget = int(replicate_share * store.num_nodes * bench.feature_bytes)
        self.traffic = RowsAsked(store, self.owner, num_machines, bench.feature_bytes, budget)
        self.seeds = np.zeros(num_machines, np.int64)

    def count(self, machine: int, batch: MiniBatch) -> None:
        """Count a batch of a machine."""
        self.traffic.count(machine, batch)
        self.seeds[machine] += batch.batch_size

    def told(self) -> dict:
        """Return the columns of a row of the table."""
        traffic, share = self.traffic, -(-self._targets // len(self.seeds))  # targets of a rank in an epoch
        epoch = traffic.num_bytes() * (share / np.maximum(self.seeds, 1))
        busiest = max(epoch.sum(axis=0).max(), epoch.sum(axis=1).max())
        return {
            "num_batches": int(traffic.num_batches.sum()),
            "away_share": round(float(traffic.rows.sum() / max(1, traffic.all_rows.sum())), 5),
            "epoch_bytes": round(epoch.sum()),
            "link_s": round(busiest * 8 / (self._bench.link_gbit_per_s * 1e9), 4),
            "train_balance": round(self.train_balance, 4),
        }
