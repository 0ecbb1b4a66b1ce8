"""Rows of batches that come from other machines, by partitioner, under the recipes armada and distdgl; counts only.

distdgl: each machine trains the targets that are assigned to its rank, and owns the parts of which it has most targets.
armada: machines that prepare hold the parts, and make chunks of batches whose seeds are of one part each. `Assignment`
decides which worker makes which, as in a run; here a chunk takes every worker the same time, and the trainer none.

What the cut of the parts alone implies is counted too: every batch is then made by the machine that owns its seeds,
whatever that does to the balance of work.
"""

import heapq
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_gnnscale.datamodule.train_loader import make_interleaved_loader, part_targets, rank_targets
from lightning_gnnscale.loader import (
    BatchKey,
    LoaderOptions,
    PartData,
    PartLoader,
    RankPlace,
    Threads,
    rank_of_parts,
)
from lightning_gnnscale.loader.work_queue import WorkQueue
from lightning_gnnscale.partition_store import PartitionStore
from lightning_gnnscale.partition_store.part_graph import load_whole_graph
from lightning_gnnscale.remote.assignment import Assignment, Rank
from lightning_gnnscale.remote.held_rows import part_of
from lightning_gnnscale.remote.holder import deal_in_order
from lightning_gnnscale.remote.messages import GROUPS_AT_WORKER, Setup
from lightning_gnnscale.sampler import NeighborSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import check_fanouts

from .graphs import GraphFile, GraphSpec, graph_file, public_root, resolve_graphs
from .ownership import partitioned_store
from .partition_cases import MethodSpec, leave_out_missing_peers, resolve_methods
from .present import LEFT, show, tell
from .runner import Case, Runner, benchmark, digest, in_fresh_process, machine_line

SYSTEMS = ("armada", "distdgl")
COLUMNS = {
    "graph": ("graph", LEFT),
    "machines": ("machines", ">"),
    "method": ("method", LEFT),
    "armada_by_any": ("armada, made\nby any", ".1%"),
    "armada_away": ("armada", ".1%"),
    "armada_cut": ("the cut\nimplies", ".1%"),
    "armada_ratio": ("ratio", ".2f"),
    "armada_busy": ("workers\nbusy", ".0%"),
    "distdgl_away": ("distdgl", ".1%"),
    "distdgl_cut": ("the cut\nimplies", ".1%"),
    "distdgl_ratio": ("ratio", ".2f"),
}


@dataclass(frozen=True)
class RemoteRowsBench:
    """Count the rows of batches that come from other machines, and what the cut of the parts implies.

    A graph and a method are one case, in a process of its own, with all numbers of machines. Writes `remote_rows.csv`.

    Attributes:
        graphs: Public graphs, "lfr:EDGES:NODES", "planted:EDGES:NODES" or "typed:EDGES:NODES", paths, or
            {path, masks, ...}; a mask "train" is needed.
        methods: Names of partitioners, or {method, name, balance, and options of the method}.
        parts: Number of parts.
        machines: Numbers of machines, from 2 to the number of parts.
        fanouts, batch_size: Fan-outs and size of the batches; of graphs with several node types the fan-outs of each
            edge type.
        chunks: Parts that a batch mixes under armada.
        batches_per_group: Chunks of a request there.
        num_batches: Batches that are sampled for each machine, at most; a share of an epoch is extrapolated from them.
        scratch: Folder for edge files and stores; None: the system's folder for temporary files.
    """

    graphs: Sequence[str | dict]
    methods: Sequence[str | dict]
    parts: int = 8
    machines: Sequence[int] = (2, 4)
    fanouts: Sequence[int] = (25, 10)
    batch_size: int = 512
    chunks: int = 4
    batches_per_group: int = 2
    num_batches: int = 64
    seed: int = 0
    data_root: str | None = None
    scratch: str | None = None

    def __post_init__(self):
        if not self.machines or not all(2 <= number <= self.parts for number in self.machines):
            raise ValueError(
                f"bench.machines must be numbers from 2 to bench.parts={self.parts}, got {list(self.machines)}"
            )
        check_fanouts(self.fanouts)
        resolve_methods(self.methods)

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per graph, method and number of machines; see `count_remote`."""
        methods = leave_out_missing_peers(resolve_methods(self.methods), tell)
        rows: list[dict] = []
        for graph in resolve_graphs(list(self.graphs), {}, public_root(self.data_root)):
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder, ExitStack() as stack:
                made = cache(partial(stack.enter_context, graph_file(graph, Path(folder))))
                cases = [self._case(graph, made, Path(folder), one) for one in methods]
                rows += runner.rows(cases, "remote_rows.csv")
        rows.sort(key=lambda row: (row["graph"], row["machines"]))
        title = f"Rows of batches that come from other machines; {self.parts} parts"
        show(rows, COLUMNS, title, machine_line())
        return rows

    def _case(self, graph: GraphSpec, made: Callable[[], GraphFile], folder: Path, spec: MethodSpec) -> Case:
        facts = (spec.method, spec.options, spec.balance, graph.source, self.parts, list(self.fanouts), self.batch_size)
        facts += (self.chunks, self.batches_per_group, self.num_batches, self.seed)
        key = {"graph": graph.name, "method": spec.name, "settings": digest(*facts)}

        def measured() -> list[dict]:
            with tempfile.TemporaryDirectory(dir=folder) as store:
                return in_fresh_process(count_remote, self, made(), store, spec)

        return Case(key, measured, [{"machines": number} for number in self.machines])


run = benchmark(RemoteRowsBench)


def count_remote(bench: RemoteRowsBench, graph: GraphFile, folder: str, spec: MethodSpec) -> list[dict]:
    """Partition and store a graph, and count for each number of machines where the rows of batches come from.

    Returns:
        machines; for both systems the share of rows that come from other machines (away), what the cut implies (cut),
        and their ratio; armada_by_any: the share where any machine makes a chunk; armada_busy: share of the time in
        which the workers are busy, on the mean.

    Raises:
        ValueError: the graph has no training nodes.
    """
    store, _ = partitioned_store(graph, folder, spec, bench.parts, bench.seed)
    chunks, rows = list(_chunks(bench, store)), []
    for number in bench.machines:
        told = {f"armada_{name}": value for name, value in _armada(bench, store, number, chunks).items()}
        told |= {f"distdgl_{name}": value for name, value in _distdgl(bench, store, number).items()}
        rows.append({"machines": number, **{name: round(value, 5) for name, value in told.items()}})
    return rows


class Chunk(NamedTuple):
    """A chunk of a batch: the part of its seeds, and (num_parts,) rows by the part that they are of."""

    part: int
    rows: np.ndarray


def _chunks(bench: RemoteRowsBench, store: PartitionStore) -> Iterator[Chunk]:
    """Yield the chunks that a trainer takes, in order."""
    options, sampler = LoaderOptions(bench.batch_size, bench.seed), _sampler(bench, store)
    most = bench.num_batches * max(bench.machines)
    loader = make_interleaved_loader(store, sampler, None, bench.chunks, options, None, Threads(), RankPlace())
    with closing(loader):
        for chunk in islice(loader.sampled_chunks(), most * loader.chunks):
            yield Chunk(chunk.part, _rows_by_part(store, chunk))


def _sampler(bench: RemoteRowsBench, store: PartitionStore) -> NeighborSampler:
    return NeighborSampler(bench.fanouts if store.schema is None else {"*": list(bench.fanouts)})


def _rows_by_part(store: PartitionStore, batch) -> np.ndarray:
    return np.bincount(part_of(batch.n_id.numpy(), store.part_offsets), minlength=store.num_parts)


def _armada(bench: RemoteRowsBench, store: PartitionStore, number: int, chunks: list[Chunk]) -> dict[str, float]:
    """Return the shares of rows that come from other machines where so many prepare; see `count_remote`."""
    counts = [len(nodes) for nodes in part_targets(store).values()]
    owner = deal_in_order(counts, np.diff(store.part_offsets), range(number))
    held = np.stack([np.bincount(owner, chunk.rows, number) for chunk in chunks])
    homes = owner[[chunk.part for chunk in chunks]]
    makers, busy = makers_of([chunk.part for chunk in chunks], owner, number, bench.batches_per_group, bench.chunks)
    every, total = np.arange(len(chunks)), held.sum()
    away, cut = (1 - held[every, at].sum() / total for at in (makers, homes))
    return {"by_any": 1 - 1 / number, "away": away, "cut": cut, "ratio": away / max(cut, 1e-9), "busy": busy}


def makers_of(
    parts: Sequence[int], owner: np.ndarray, num_machines: int, batches_per_group: int, chunks: int
) -> tuple[np.ndarray, float]:
    """Return (num_chunks,) the machine that makes each chunk, and the share of the time in which the workers are busy.

    Args:
        parts: Part of each chunk's seeds, in the order in which the trainer takes the chunks.
        owner: (num_parts,) machine that holds each part, and has one worker.
        num_machines: Number of machines.
        batches_per_group, chunks: See `RemoteRowsBench`.
    """
    queue = WorkQueue(clock=lambda: 0.0)
    assignment = Assignment(queue, batches_per_group)
    for machine in range(num_machines):
        assignment.add(machine, machine)
    homes = dict(enumerate(owner.tolist()))
    rank = Rank(Setup("chunks", [], tuple(homes), is_whole=True, homes=homes, chunks=chunks))
    makers, ahead = np.full(len(parts), -1), chunks * batches_per_group * GROUPS_AT_WORKER * num_machines
    free, ends, now, asked = [0.0] * num_machines, [], 0.0, 0
    while asked < len(parts) or rank.order:
        while rank.order and rank.head.is_done:
            queue.take(rank)
        while asked < len(parts) and len(rank.order) < ahead:
            queue.add(rank, BatchKey(0, 0, parts[asked], asked))
            asked += 1
        for most in range(1, GROUPS_AT_WORKER + 1):  # as `Coordinator` starts them
            for machine in range(num_machines):
                while len(queue.under_way(machine)) < most and (group := assignment.next_group(machine)):
                    free[machine] = max(free[machine], now) + len(group.jobs)
                    heapq.heappush(ends, (free[machine], group.jobs[0].place, group))
        if ends:
            now, _, group = heapq.heappop(ends)
            makers[[job.place for job in group.jobs]] = group.worker
            queue.finish(group, *([True] * len(group.jobs)))
    return makers, len(parts) / (num_machines * now)


def _distdgl(bench: RemoteRowsBench, store: PartitionStore, number: int) -> dict[str, float]:
    """Return the shares of rows that come from other machines where so many train; see `count_remote`."""
    sampler = _sampler(bench, store)
    targets = part_targets(store)
    owner = rank_of_parts([len(nodes) for nodes in targets.values()], np.diff(store.part_offsets), number)
    own = [np.concatenate([targets[part] for part in np.flatnonzero(owner == rank)]) for rank in range(number)]
    assigned = rank_targets(store, sampler, number)
    away, cut = (_away_share(bench, store, owner, shares) for shares in (assigned, own))
    return {"away": away, "cut": cut, "ratio": away / max(cut, 1e-9)}


def _away_share(bench: RemoteRowsBench, store: PartitionStore, owner: np.ndarray, shares: list[np.ndarray]) -> float:
    """Return the share of rows that come from other machines where machine r makes the batches of shares[r]."""
    options, sampler, rows = LoaderOptions(bench.batch_size, bench.seed), _sampler(bench, store), np.zeros(2)
    for machine, nodes in enumerate(shares):
        if not len(nodes):
            continue
        data = PartData(partial(load_whole_graph, store), is_whole=True)
        counted, seeds = np.zeros(2), 0
        with closing(PartLoader([machine], data, {machine: nodes}, sampler, options)) as loader:
            for batch in islice(loader, bench.num_batches):
                held = _rows_by_part(store, batch)
                counted += held[owner != machine].sum(), held.sum()
                seeds += batch.batch_size
        rows += counted * len(nodes) / seeds  # of an epoch
    return float(rows[0] / rows[1])
