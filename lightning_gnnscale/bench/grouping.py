"""What travels for a batch: groups that share their rows, and a row cache whose contents the sender knows; bytes only.

Batches are drawn as training draws them, and packed, asked for and answered as between a worker and a trainer's node.
Only the rows themselves are left out: their bytes are counted by their ids.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from ..dataset import load_npz
from ..dataset.graph_dataset import CSRArrays
from ..graph import CSC, build_csc
from ..loader import BufferPool
from ..loader.batch_builder import BatchBuilder
from ..loader.staged_part import PartStager
from ..partition_store import WholeGraph
from ..remote import TrainerCache, WorkerView, pack_group
from ..rng import batch_key, fold, permutation
from ..sampler import NeighborSampler
from ..triton_kernels.sample_neighbors import check_fanouts
from .grouping_tables import add_cuts, draw, table
from .partition_graphs import public_root
from .placement_graphs import check_graphs
from .power_law import power_law_graph
from .results import append_row, machine, machine_line, read_rows, write_csv

NO_CACHE = "none"
LABELS, LABEL_SALT, TARGET_SALT = 40, 21, 22  # of generated graphs
KEY = ("graph", "fanouts", "batch_size", "group", "cache_share", "policy")


@dataclass(frozen=True)
class Traffic:
    """A graph whose batches travel.

    Attributes:
        csc: in-neighbours.
        targets: (num_targets,) ids, ascending.
        labels: (num_nodes,) int64.
        masks: name to (num_nodes,) bool.
        row_bytes: (num_nodes,) int64, of each node's features as they travel.
    """

    name: str
    csc: CSC
    targets: np.ndarray
    labels: np.ndarray
    masks: dict[str, np.ndarray]
    row_bytes: np.ndarray


def run(
    output_dir: str | os.PathLike,
    graphs: Sequence[str],
    fanouts: Sequence[Sequence[int]] = ((15, 10, 5), (25, 10)),
    batch_sizes: Sequence[int] = (64, 256, 1024),
    groups: Sequence[int] = (1, 2, 4, 8),
    cache_shares: Sequence[float] = (0.0, 0.01, 0.05, 0.1),
    policies: Sequence[str] = ("lru",),
    target_share: float = 0.1,
    dim: int = 128,
    requests_ahead: int = 1,
    epochs: int = 1,
    seed: int = 0,
    data_root: str | None = None,
) -> list[dict]:
    """Count the bytes that the batches of whole epochs take, in groups of consecutive batches, with a cache.

    Seeds are in random order over the whole graph, without help from parts. Rows are appended as they are counted. In
    the same folder, the benchmark resumes at the first graph, fan-outs and batch size that lack any row.

    Args:
        output_dir: Folder for `rows.csv`, `grouping.csv` and `grouping.png`.
        graphs: Public graphs with their own features and training nodes, or "power_law:NODES:ARCS".
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
        seed: Seed of the order, of the draws, and of the targets of generated graphs.
        data_root: Folder of public graphs; None: it is searched for.

    Returns:
        One row per graph, fan-outs, batch size, group, cache share and policy.
    """
    if 1 not in groups or 0 not in cache_shares:
        raise ValueError(
            f"bench.groups must hold 1 and bench.cache_shares 0, which the others are compared with; got "
            f"{list(groups)} and {list(cache_shares)}"
        )
    console, output, root = Console(width=max(Console().width, 132)), Path(output_dir), public_root(data_root)
    check_graphs(list(graphs), root)
    output.mkdir(parents=True, exist_ok=True)
    variants = [(group, 0.0, NO_CACHE) for group in groups]
    variants += [(group, share, policy) for group in groups for share in cache_shares if share for policy in policies]
    settings = f"{fold(target_share * 1e9, dim, requests_ahead, epochs, seed) >> 32:08x}"
    rows = []
    for name in graphs:
        traffic = None
        for hops in fanouts:
            for batch_size in batch_sizes:
                case = {"graph": name, "fanouts": ",".join(map(str, check_fanouts(hops))), "batch_size": batch_size}
                found = _finished(output / "rows.csv", case, variants, settings)
                if found is None:
                    traffic = traffic or load_traffic(name, root, target_share, dim, seed)
                    console.print("counting", *(f"{key}={value}" for key, value in case.items()))
                    counted = _count(traffic, hops, batch_size, variants, requests_ahead, epochs, seed)
                    found = [case | own | {"settings": settings} for own in counted]
                    for row in found:
                        append_row(output / "rows.csv", row)
                rows += found
    add_cuts(rows)
    facts = machine()
    write_csv(output / "grouping.csv", rows, facts)
    console.print(table(rows, machine_line(facts)))
    draw(output / "grouping.png", rows)
    return rows


def load_traffic(name: str, root: Path | None, target_share: float, dim: int, seed: int) -> Traffic:
    """Make a graph that `check_graphs` let pass; a generated one has random labels, and features of no content."""
    if name.startswith("power_law:"):
        num_nodes, num_arcs = (int(part) for part in (name + f":{20 * int(name.split(':')[1])}").split(":")[1:3])
        csc = power_law_graph(num_nodes, num_arcs, seed)
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


def _finished(path: Path, case: Mapping, variants, settings: str) -> list[dict] | None:
    """Return the rows of a case where all of them are there."""
    wanted = [case | {"group": g, "cache_share": share, "policy": policy} for g, share, policy in variants]
    done = {tuple(row[name] for name in KEY): row for row in read_rows(path) if row["settings"] == settings}
    rows = [done.get(tuple(str(row[name]) for name in KEY)) for row in wanted]
    if any(row is None for row in rows):
        return None
    counts = [{name: float(value) for name, value in row.items() if name not in (*KEY, "settings")} for row in rows]
    return [own | numbers | {"settings": settings} for own, numbers in zip(wanted, counts, strict=True)]


def _count(traffic: Traffic, fanouts, batch_size: int, variants, ahead: int, epochs: int, seed: int) -> list[dict]:
    wires = [_Wire(traffic, *variant, ahead) for variant in variants]
    most = max(wire.group for wire in wires)
    waiting = []
    for batch, last in _batches(traffic, fanouts, batch_size, epochs, seed):
        waiting.append(batch)
        if len(waiting) < most and not last:
            continue
        for group in sorted({wire.group for wire in wires}):
            for start in range(0, len(waiting), group):
                packed = pack_group(waiting[start : start + group])
                for wire in wires:
                    if wire.group == group:
                        wire.send(packed)
        waiting = []
    return [wire.row() for wire in wires]


def _batches(traffic: Traffic, fanouts, batch_size: int, epochs: int, seed: int) -> Iterator[tuple]:
    """Yield (batch, whether its epoch ends with it); batches come without features."""
    graph, sampler = WholeGraph.of(traffic.csc, 0), NeighborSampler(fanouts)
    builder = BatchBuilder(sampler, None, BufferPool(), tuple(traffic.masks))
    stage = PartStager(lambda part: graph, {0: traffic.targets}, sampler, traffic.labels, traffic.masks, seed)
    staged = stage(0)
    for epoch in range(epochs):
        items = staged.items(sampler, batch_size, False, seed, epoch, True)
        for number, seeds in enumerate(items):
            yield builder.draw(staged, seeds, batch_key(seed, epoch, 0, number)), number == len(items) - 1


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
        self._batches = self._asked = self._sent = self._sent_bytes = self._beside = self._told = 0

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
            self._told += len(np.packbits(missing)) + update.num_bytes
        self._batches += len(packed.batches)
        self._asked += len(union)
        self._sent += int(missing.sum())
        self._sent_bytes += int(self._row_bytes[union[missing]].sum())
        self._beside += packed.num_bytes

    def row(self) -> dict:
        """Return what was counted, a batch."""
        num = self._batches
        return {
            "group": self.group,
            "cache_share": self.share,
            "policy": self.policy,
            "batches": num,
            "union_rows": round(self._asked / num, 1),
            "sent_rows": round(self._sent / num, 1),
            "row_bytes": round(self._sent_bytes / num),
            "beside_bytes": round(self._beside / num),
            "cache_bytes": round(self._told / num),
            "bytes": round((self._sent_bytes + self._beside + self._told) / num),
        }
