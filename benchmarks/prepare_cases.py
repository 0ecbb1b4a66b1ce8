"""What is prepared and trained in the benchmark of preparation, workloads, sources, trainers; and one measurement."""

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.datamodule import PartitionDataModule
from lightning_gnnscale.datamodule.train_loader import SOURCES, make_graph_loader, make_part_loader
from lightning_gnnscale.loader import PartLoader, RankPlace, SourceSettings
from lightning_gnnscale.model import GCN, GraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnnscale.partition_store import PartitionStore
from lightning_gnnscale.placement.shared_rows import gather_objects
from lightning_gnnscale.remote.held_rows import DistributedFeatures, HeldFeatures, HeldNodes, HeldRows, PartOwners
from lightning_gnnscale.remote.sampling_owners import OwnedGraph, sampler_of_owners
from lightning_gnnscale.sampler import LinkSampler, MiniBatch, NeighborSampler
from lightning_gnnscale.system import end_with_parent

from .fixed_prefetch import FixedPrefetch
from .graphs import NUM_CLASSES
from .turns import PacedSampler, tree_cpu_s

WORKLOADS = {"gcn": GCN, "graphsage": GraphSAGE, "unsupervised": GraphSAGE}
BASELINE = "fixed_prefetch"  # of task graphs
CPU = "cpu"  # the trainer that is a model on these cores; another one is a number of milliseconds


@dataclass(frozen=True)
class Shape:
    """Shape of batches and model, the same for all sources.

    Attributes:
        fanouts: Fan-outs of the batches.
        batch_size: Number of nodes at the head of a batch.
        hidden_channels: Width of the model that trains on the CPU.
        num_negatives: Negatives per link in the unsupervised workload.
        num_batches: Number of batches in one measurement.
        scope, seed: See `PartitionDataModule`.
        sample_ms: See `PacedSampler`.
        reply_ms: Milliseconds after which an owner of every other part answers; None: the store is read.
    """

    fanouts: tuple[int, ...]
    batch_size: int
    hidden_channels: int
    num_negatives: int
    num_batches: int
    scope: str
    seed: int = 0
    sample_ms: float = 0.0
    reply_ms: float | None = None


class SlowOwners:
    """A graph of which this process holds every other part; the other parts' owner answers after a while.

    It replaces `remote.HeldGraph`, with memory of this process and threads that sleep instead of machines and links.

    Args:
        store: The store.
        reply_ms: Milliseconds from a request to the begin of its answer.
    """

    def __init__(self, store: PartitionStore, reply_ms: float):
        self._reply_s, self._table, self._pool = reply_ms / 1000, store.features, ThreadPoolExecutor(128)
        self._owners = PartOwners(store.part_offsets, [part % 2 for part in range(store.num_parts)])
        nodes = [HeldNodes(store.part_offsets, range(owner, store.num_parts, 2)) for owner in (0, 1)]
        self._rows = [HeldRows.read(store.csc, own) for own in nodes]
        self._held = [HeldFeatures.read(store.features, own) for own in nodes]

    @property
    def features(self) -> DistributedFeatures:
        """The features of the whole graph."""
        ask = partial(self._later, [held.answer for held in self._held])
        return DistributedFeatures.of(self._table, self._held[0], self._owners, ask)

    def sampler(self, sampler: NeighborSampler) -> NeighborSampler:
        """Return a sampler that samples the same."""
        answers = [partial(lambda rows, requests: list(map(rows.sample, requests)), rows) for rows in self._rows]
        return sampler_of_owners(sampler, OwnedGraph(self._rows[0], self._owners, partial(self._later, answers)))

    def close(self, waiting_share: float) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _later(self, answers: Sequence[Callable], owner: int, request: Any) -> Future:
        asked = time.perf_counter()

        def answer() -> Any:
            time.sleep(max(0.0, asked + self._reply_s - time.perf_counter()))
            return answers[owner](request)

        return self._pool.submit(answer)


def source_of(name: str, options: Mapping[str, Any]) -> SourceSettings:
    """Return the settings of a source, which `gnnscale train source=NAME` starts from, or of the baseline.

    Raises:
        ValueError: there is no such source.
    """
    if name == BASELINE:
        return FixedPrefetch(**options)
    if name not in SOURCES:
        raise ValueError(f"bench.sources: no source {name!r}; there are {', '.join(sorted([*SOURCES, BASELINE]))}")
    return instantiate(OmegaConf.merge(_config_of(name), dict(options)))


@cache
def _config_of(source: str) -> DictConfig:
    return compose_config("train", [f"source={source}"]).source


def grid(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every choice of one value for each option."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def make_data(store: PartitionStore, workload: str, shape: Shape, source: SourceSettings) -> PartitionDataModule:
    """Return the data module of a workload, as a Trainer would be given it; ready for `train_dataloader`."""
    sampler, links = NeighborSampler(shape.fanouts), shape.batch_size
    if shape.sample_ms:
        sampler = PacedSampler(shape.fanouts, sample_ms=shape.sample_ms)
    if workload == "unsupervised":
        sampler = LinkSampler(sampler, "walk", walk_length=2, num_negatives=shape.num_negatives)
        links //= 2 + shape.num_negatives
    options = {"batch_size": max(links, 1), "scope": shape.scope, "seed": shape.seed}
    data = PartitionDataModule(store=store, sampler=sampler, source=source, **options)
    data.setup("fit")
    if shape.reply_ms is not None:
        data._held = SlowOwners(store, shape.reply_ms)
    return data


def make_trainer(store: PartitionStore, workload: str, shape: Shape, train: str | float) -> Callable[[MiniBatch], None]:
    """Return a function that trains on a batch, or that only takes as long.

    Args:
        train: "cpu": forward, backward and step of the workload's model on these cores. A number: sleep for this many
            milliseconds, just as a device that takes so long would leave the cores free.
    """
    if train != CPU:
        seconds = float(train) / 1000
        return lambda batch: time.sleep(seconds) if seconds else None
    torch.manual_seed(0)
    links = workload == "unsupervised"
    num_classes = NUM_CLASSES if store.labels is None else int(store.labels.max()) + 1
    channels = (store.features.dim, shape.hidden_channels, shape.hidden_channels if links else num_classes)
    backbone = WORKLOADS[workload](*channels, num_layers=len(shape.fanouts))
    model = LinkPredictor(backbone) if links else NodeClassifier(backbone)
    model.log = lambda *_, **__: None  # there is no Trainer to log to
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: MiniBatch) -> None:
        optimizer.zero_grad()
        model.training_step(batch).backward()
        optimizer.step()

    return step


def measure(
    loader: PartLoader,
    train: Callable[[MiniBatch], None],
    num_batches: int,
    warm_up: int = 2,
    begin: Callable[[], None] = lambda: None,
) -> dict:
    """Train on batches and return the measurements.

    Each epoch is as long as the loader's, or begins late enough to end at the last batch, so that nothing is prepared
    that is not trained on. The wait for an epoch's first batch counts; the order of the first epoch's seeds is made
    before. The epoch's last `warm_up` batches are prepared once before and do not count: they compile kernels and start
    workers; as all of them are held at once, they also take the buffers. Two of them are trained on. Where workers come
    one after another, all of them are waited for, and prepare these batches again.

    Args:
        begin: Called between those batches and the ones that count.

    Returns:
        `batches`, `seeds`, `seconds`, `seeds_per_s`; `wait_share`: share of the seconds in which the trainer waited, in
        [0, 1]; `cpu_share`: share of all cores used by this process and those it started; `peak_queue_mib`: largest
        size of the batches that were ready when the trainer asked, None if the source does not report it; `held_mib`:
        what this machine held for all workers and ranks, None where it is not held separately; `parts`: over the
        epochs, of which batches were taken; `parts_read`: reads of parts, None where workers hold none.
    """
    held = []
    for batch in epochs(loader, warm_up):
        held.append(batch)
        if len(held) <= 2:
            train(batch)
    held.clear()
    source = loader._source
    if hasattr(source, "report"):
        while len(source.worker_pids) < source.num_workers:
            time.sleep(0.1)
        held.extend(epochs(loader, warm_up))
        held.clear()
    begin()
    reads, parts = _parts_read(source), set()
    seeds = batches = 0
    waited, peak, batch = 0.0, None, None
    cpu, begun = tree_cpu_s(os.getpid()), time.perf_counter()
    coming = epochs(loader, num_batches)
    while True:
        ready = getattr(loader._source, "queue_bytes", None)
        peak = ready if peak is None else max(peak, ready)
        asked = time.perf_counter()
        batch = next(coming, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        seeds += batch.batch_size if batch.pairs is None else batch.pairs.shape[1]  # of links their first ends
        batches += 1
        parts.add((loader.epoch, batch.part))
        train(batch)
        del batch
    seconds = time.perf_counter() - begun
    return {
        "batches": batches,
        "seeds": seeds,
        "seconds": round(seconds, 4),
        "seeds_per_s": round(seeds / seconds, 1),
        "wait_share": round(waited / seconds, 4),
        "cpu_share": round((tree_cpu_s(os.getpid()) - cpu) / seconds / psutil.cpu_count(), 4),
        "peak_queue_mib": None if peak is None else round(peak / 2**20, 2),
        "held_mib": round(_held_bytes(source.report()) / 2**20, 2) if hasattr(source, "report") else None,
        "parts": len(parts),
        "parts_read": None if reads is None else _parts_read(source) - reads,
    }


def _parts_read(source) -> int | None:
    """Return how often workers have read parts, for this trainer; None: a source without such workers."""
    return source.report()["parts_read"] if hasattr(source, "report") else None


def _held_bytes(report: dict) -> int:
    """Return the most bytes of parts, and of rows of whole graphs, that machines held."""
    return sum(held.get("most_held_bytes", 0) + held.get("rows_bytes", 0) for held in report["held"])


def measure_ranks(
    store: PartitionStore, workload: str, shape: Shape, source: SourceSettings, train: str | float, num_ranks: int
) -> dict:
    """Measure as `measure` does, with as many trainers on this machine, each a process that takes its own batches.

    Returns:
        What `measure` returns: sums of counts and of shares of cores, the slowest rank's seconds, the mean share that a
        rank waited, and the most bytes, and reads of parts, which are of all ranks.
    """
    spawned = multiprocessing.get_context("spawn")
    # Each rank waits for all the others, so none of the pool's processes is given two of them.
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(num_ranks, spawned, end_with_parent) as pool:
        given = (store.root, workload, shape, source, train, num_ranks, folder)
        ranks = list(pool.map(_measure_rank, range(num_ranks), *map(itertools.repeat, given)))
    total = {name: sum(rank[name] for rank in ranks) for name in ("batches", "seeds", "cpu_share", "parts")}
    seconds = max(rank["seconds"] for rank in ranks)
    most = {name: max((rank[name] for rank in ranks if rank[name] is not None), default=None) for name in _MOST}
    waited = round(statistics.fmean(rank["wait_share"] for rank in ranks), 4)
    rate = {"seconds": seconds, "seeds_per_s": round(total["seeds"] / seconds, 1), "wait_share": waited}
    return total | rate | most


_MOST = ("peak_queue_mib", "held_mib", "parts_read")


def _measure_rank(
    rank: int, root: str, workload: str, shape: Shape, source: SourceSettings, train: str | float, num: int, folder: str
) -> dict:
    """Return one rank's measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num)
    try:
        data = make_data(PartitionStore.open(root), workload, shape, source)
        place = RankPlace(rank, num, local_rank=rank, num_local=num, share=lambda value: gather_objects(value)[0])
        given = (data.loader_options, data.store.features, source, place)
        if shape.scope == "graph":
            loader = make_graph_loader(data.store, data.sampler, *given)
        else:
            loader = make_part_loader(data.store, data.sampler, data.halo_hops, *given)
        with closing(loader):
            measured = measure(
                loader, make_trainer(data.store, workload, shape, train), shape.num_batches,
                source.batches_ahead + 2, dist.barrier,
            )  # fmt: skip
            dist.barrier()  # rank 0 ends Ray
        return measured
    finally:
        dist.destroy_process_group()


def epochs(loader: PartLoader, num_batches: int) -> Iterator[MiniBatch]:
    """Yield so many batches, in whole epochs except the first, which begins late enough to end with them."""
    first = num_batches % len(loader)
    for epoch in itertools.count():
        if num_batches <= 0:
            return
        loader.set_epoch(epoch)
        size = first or len(loader)
        first = 0
        loader.load_state_dict(loader.state_dict() | {"delivered": (len(loader) - size) % len(loader)})
        yield from loader
        num_batches -= size
