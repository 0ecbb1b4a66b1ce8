"""What is sent for a batch: groups that share their rows, and a row cache whose contents the sender knows; bytes only.

Batches are sampled as training samples them, and packed, asked for and answered as between a worker and a trainer's
node. Only the rows themselves are left out: their bytes are counted by their ids.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np

from lightning_gnnscale.dataset import CSRArrays, load_npz
from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.loader.batch_maker import BatchMaker
from lightning_gnnscale.loader.staged_part import PartStager, node_values
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.remote import TrainerCache, WorkerView, pack_group
from lightning_gnnscale.rng import batch_key, fold, permutation
from lightning_gnnscale.sampler import NeighborSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import check_fanouts

from .graphs import check_graphs, power_law_graph, public_root
from .present import LEFT, grouped, lines, panels, save, show, ticks
from .runner import Case, Runner, benchmark, machine_line, write_csv

NO_CACHE = "none"
LABELS, LABEL_SALT, TARGET_SALT = 40, 21, 22  # of generated graphs
CASE, VARIANT = ("graph", "fanouts", "batch_size"), ("group", "cache_share", "policy")
BYTES = ("row_bytes", "beside_bytes", "cache_bytes")
COLUMNS = {
    "graph": ("graph", LEFT),
    "fanouts": ("fan-outs", LEFT),
    "batch_size": ("batch", ">"),
    "cache": ("cache", ">"),
}
STYLES = ("o-", "s--", "^-.", "v:", "d--", "x-.", "+:")


@dataclass(frozen=True)
class Traffic:
    """A graph whose batches are sent.

    Attributes:
        csc: in-neighbours.
        targets: (num_targets,) ids, ascending.
        labels: (num_nodes,) int64.
        masks: name to (num_nodes,) bool.
        row_bytes: (num_nodes,) int64, of each node's features as they are sent.
    """

    name: str
    csc: CSC
    targets: np.ndarray
    labels: np.ndarray
    masks: dict[str, np.ndarray]
    row_bytes: np.ndarray


@dataclass(frozen=True)
class GroupingBench:
    """Count the bytes that the batches of whole epochs take, in groups of consecutive batches, with a cache.

    Seeds are in random order over the whole graph, without help from parts. Writes `rows.csv`, `grouping.csv` and
    `grouping.png`; a graph, fan-outs and batch size are one case, with all groups and caches.

    Attributes:
        graphs: Public graphs with their own features and training nodes, or "power_law:NODES:EDGES".
        fanouts: Fan-outs of each sampler.
        batch_sizes, groups: Seeds per batch, and batches per group. `groups` must hold 1, which the others are compared
            with.
        cache_shares: Cache sizes, as shares of all rows; a fifth of the cache holds rows that wait for an
            acknowledgement. They must hold 0, no cache.
        policies: Policies of the cache.
        target_share: Share of a generated graph's nodes that are training nodes.
        dim: Number of float32 features per node in a generated graph.
        requests_ahead: Number of requests under way when an answer comes; their knowledge of the cache is older than
            the answer.
        epochs: Number of epochs in a row, for which the cache is kept.
    """

    graphs: Sequence[str]
    fanouts: Sequence[Sequence[int]] = ((15, 10, 5), (25, 10))
    batch_sizes: Sequence[int] = (64, 256, 1024)
    groups: Sequence[int] = (1, 2, 4, 8)
    cache_shares: Sequence[float] = (0.0, 0.01, 0.05, 0.1)
    policies: Sequence[str] = ("lru",)
    target_share: float = 0.1
    dim: int = 128
    requests_ahead: int = 1
    epochs: int = 1
    seed: int = 0
    data_root: str | None = None

    def __post_init__(self):
        if 1 not in self.groups or 0 not in self.cache_shares:
            raise ValueError(
                f"bench.groups must hold 1 and bench.cache_shares 0, which the others are compared with; got "
                f"{list(self.groups)} and {list(self.cache_shares)}"
            )
        check_graphs(list(self.graphs), public_root(self.data_root))

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, fan-outs, batch size, group, cache share and policy."""
        cached = product(self.groups, filter(None, self.cache_shares), self.policies)
        variants = [*((group, 0.0, NO_CACHE) for group in self.groups), *cached]
        contenders = [dict(zip(VARIANT, variant, strict=True)) for variant in variants]
        facts = (self.target_share * 1e9, self.dim, self.requests_ahead, self.epochs, self.seed)
        settings = f"{fold(*facts) >> 32:08x}"
        rows: list[dict] = []
        for name in self.graphs:
            root = public_root(self.data_root)
            traffic = cache(partial(load_traffic, name, root, self.target_share, self.dim, self.seed))
            cases = []
            for hops, batch_size in product(self.fanouts, self.batch_sizes):
                key = {"graph": name, "fanouts": ",".join(map(str, check_fanouts(hops))), "batch_size": batch_size}
                count = partial(self._count, traffic, hops, batch_size, variants)
                cases.append(Case({**key, "settings": settings}, count, contenders))
            rows += runner.rows(cases)
        _add_cuts(rows)
        write_csv(runner.folder / "grouping.csv", rows)
        _present(rows, runner.folder / "grouping.png")
        return rows

    def _count(self, traffic: Callable[[], Traffic], fanouts, batch_size: int, variants) -> list[dict]:
        wires = [_Wire(traffic(), *variant, self.requests_ahead) for variant in variants]
        sizes, waiting = sorted({wire.group for wire in wires}), []
        for batch, last in _batches(traffic(), fanouts, batch_size, self.epochs, self.seed):
            waiting.append(batch)
            if len(waiting) < sizes[-1] and not last:
                continue
            for group in sizes:
                for start in range(0, len(waiting), group):
                    packed = pack_group(waiting[start : start + group])
                    for wire in wires:
                        if wire.group == group:
                            wire.send(packed)
            waiting = []
        return [wire.row() for wire in wires]


run = benchmark(GroupingBench)


def load_traffic(name: str, root: Path | None, target_share: float, dim: int, seed: int) -> Traffic:
    """Make a graph that `check_graphs` accepted; a generated one has random labels, and features without content."""
    if name.startswith("power_law:"):
        num_nodes, num_edges = (int(part) for part in (name + f":{20 * int(name.split(':')[1])}").split(":")[1:3])
        csc = power_law_graph(num_nodes, num_edges, seed)
        order = permutation(num_nodes, fold(seed, TARGET_SALT))
        labels = permutation(num_nodes, fold(seed, LABEL_SALT)) % LABELS
        train = np.zeros(num_nodes, bool)
        train[order[: max(1, round(target_share * num_nodes))]] = True
        row_bytes = np.full(num_nodes, 4 * dim)
        return Traffic(name, csc, np.flatnonzero(train), labels, {"train": train, "val": ~train}, row_bytes)
    dataset = load_npz(name, root=None if root is None else str(root), to_undirected=False)
    chunks = list(dataset.stream.chunks())
    src, dst = (np.concatenate([getattr(chunk, end) for chunk in chunks]) for end in ("src", "dst"))
    features, num_nodes = dataset.features, dataset.stream.num_nodes
    if isinstance(features, CSRArrays):
        a_value = features.indices.dtype.itemsize + features.data.dtype.itemsize
        row_bytes = np.diff(features.indptr).astype(np.int64) * a_value + 8
    else:
        row_bytes = np.full(num_nodes, features.shape[1] * features.dtype.itemsize)
    labels = np.asarray(dataset.labels, np.int64)
    targets = np.flatnonzero(dataset.masks["train"])
    return Traffic(name, build_csc(src, dst, num_nodes), targets, labels, dict(dataset.masks), row_bytes)


def _batches(traffic: Traffic, fanouts, batch_size: int, epochs: int, seed: int) -> Iterator[tuple]:
    """Yield (batch, whether its epoch ends with it); batches come without features."""
    graph, sampler = WholeGraph.of(traffic.csc, 0), NeighborSampler(fanouts)
    maker = BatchMaker(sampler)
    nodes = node_values(traffic.labels, traffic.masks)
    stage = PartStager(lambda part: graph, {0: traffic.targets}, sampler, nodes, seed)
    staged = stage(0)
    for epoch in range(epochs):
        items = staged.items(sampler, batch_size, False, seed, epoch, True)
        for number, seeds in enumerate(items):
            yield maker.sample(staged, seeds, batch_key(seed, epoch, 0, number)), number == len(items) - 1


class _Wire:
    """One worker and one trainer's node, with groups of a size and maybe a cache."""

    def __init__(self, traffic: Traffic, group: int, cache_share: float, policy: str, ahead: int):
        self.group, self.share, self.policy = group, cache_share, policy
        self._row_bytes, num_nodes = traffic.row_bytes, traffic.csc.num_rows
        self._cache, self._requests = None, deque()
        if cache_share:
            total = max(2, round(cache_share * num_nodes))
            spare = max(1, total // 5)
            self._cache = TrainerCache(num_nodes, total - spare, 0, np.uint8, policy, spare)
            self._view = WorkerView(num_nodes)
            self._requests.extend(self._cache.begin(0) for _ in range(ahead))
        self._counts = Counter()

    def send(self, packed) -> None:
        """Count a group on its way."""
        union = packed.union
        missing = np.ones(len(union), bool)
        if self._cache is not None:
            self._requests.append(self._cache.begin(0))
            update = self._requests.popleft()
            version, missing = self._view.missing(update, union)
            rows = np.empty((int(missing.sum()), 0), np.uint8)
            self._cache.complete(update.request, version, union, missing, rows, weight=packed.weight)
            self._counts["cache_bytes"] += len(np.packbits(missing)) + update.num_bytes
        counted = {"batches": len(packed.batches), "union_rows": len(union), "sent_rows": int(missing.sum())}
        self._counts.update(counted, row_bytes=int(self._row_bytes[union[missing]].sum()))
        self._counts.update(beside_bytes=packed.num_bytes)

    def row(self) -> dict:
        """Return what was counted, a batch."""
        row, num = dict(zip(VARIANT, (self.group, self.share, self.policy), strict=True)), self._counts["batches"]
        row["batches"] = num
        row |= {name: round(self._counts[name] / num, 1) for name in ("union_rows", "sent_rows")}
        row |= {name: round(self._counts[name] / num) for name in BYTES}
        return row | {"bytes": round(sum(self._counts[name] for name in BYTES) / num)}


def _add_cuts(rows: list[dict]) -> None:
    """Add to each row how many times fewer bytes it has than batches sent alone without a cache."""
    for own in grouped(rows, *CASE).values():
        alone = next(row for row in own if row["group"] == 1 and row["cache_share"] == 0)
        for row in own:
            row["cut"] = round(alone["bytes"] / row["bytes"], 3)
            row["row_cut"] = round(alone["row_bytes"] / max(1, row["row_bytes"]), 3)


def _present(rows: list[dict], plot: Path) -> None:
    """Print one line a case and cache, with groups side by side; draw the cut against batches a group."""
    columns = COLUMNS | {group: (f"{group} a group", ">") for group in sorted({row["group"] for row in rows})}
    shown = []
    for (*_, share, policy), own in grouped(rows, *CASE, *VARIANT[1:]).items():
        cells = {row["group"]: f"{_bytes(row['bytes'])} {row['cut']:.2f}x" for row in own}
        shown.append(own[0] | {"cache": f"{share:.0%} {policy}" if share else "none"} | cells)
    title = "Bytes sent for a batch, and times fewer than alone without a cache"
    show(shown, columns, title, machine_line())
    if not rows:
        return
    titles = {(row["graph"], row["fanouts"]): f"{row['graph']}, {row['fanouts']}" for row in rows}
    figure, found = panels(titles.values(), across=len(titles), size=(4.6, 4.2), beside=0)
    for panel, own in grouped(rows, "graph", "fanouts").items():
        axes = found[titles[panel]]
        for size, ((batch,), same) in enumerate(grouped(own, "batch_size").items()):
            for kind, ((share, policy), line) in enumerate(grouped(same, "cache_share", "policy").items()):
                label = f"batch {batch}" + (f", cache {share:.0%} {policy}" if share else "")
                lines(axes, line, "group", "cut", STYLES[kind % len(STYLES)], color=f"C{size}", label=label)
        axes.axhline(1.5, color="0.6", linewidth=0.8)
        axes.set(xlabel="batches a group", xscale="log")
        ticks(axes, (row["group"] for row in own))
    figure.axes[0].set_ylabel("times fewer bytes a batch")
    figure.axes[-1].legend(fontsize=6)
    save(figure, plot)


def _bytes(number: float) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"
