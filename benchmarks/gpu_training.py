"""Batches by pipeline stage and epochs of training for `gnnscale bench gpu`."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gnnscale.graph import CSC, numbered_schema
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader
from lightning_gnnscale.loader.device_batches import DeviceBatches, tensors_of
from lightning_gnnscale.loader.staged_part import node_values
from lightning_gnnscale.model import GAT, RGCN, GraphSAGE, NodeClassifier
from lightning_gnnscale.placement import FeatureBuffer
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import NeighborSampler
from lightning_gnnscale.sampler.on_device import DeviceSampler
from lightning_gnnscale.sampler.protocol import BatchSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import sample_neighbors
from lightning_gnnscale.triton_kernels.sample_neighbors.device import DeviceWorkspace

from .gpu_copies import median_s
from .gpu_graph import NUM_EDGE_TYPES, GPUGraph
from .graphs import NUM_CLASSES

WARM_BATCHES = 3
_KEPT = 4  # batches that compute alone goes round
_AHEAD = 2  # `device_batches`
HEADS = 4


@dataclass(frozen=True)
class Training:
    """How batches are made and trained on.

    Args:
        graph: The graph.
        device: Device that trains.
        fanouts, batch_size: Of the batches.
        hidden_channels: Width of the hidden layers.
        num_threads: Threads that sample.
        limit_s: Seconds after which an epoch is cut off, and its batches counted.
    """

    graph: GPUGraph
    device: torch.device
    fanouts: Sequence[int]
    batch_size: int
    hidden_channels: int
    num_threads: int
    limit_s: float

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.graph.seeds) // self.batch_size)

    def loader(
        self, typed: bool = False, buffer: FeatureBuffer | None = None, ahead: int = 0, sampled: str = "cpu"
    ) -> PartLoader:
        """Return the loader of an epoch.

        Args:
            typed: Whether batches have edge types.
            buffer: Gives the features: on a GPU on the device's copy stream, on a CPU in the loader's threads. None:
                batches have none.
            ahead: Batches copied ahead of their use; 0: they come on the host.
            sampled: Where batches that are copied ahead are sampled: `device` of the sampler.
        """
        graph, on_gpu = self.graph, self.device.type == "cuda"
        whole = graph.whole(typed)
        data = PartData(lambda part: whole, None if on_gpu else buffer, node_values(graph.labels, {}))
        options = LoaderOptions(self.batch_size, num_threads=self.num_threads)
        sampler = NeighborSampler(self.fanouts, device=sampled)
        loader = PartLoader([0], data, {0: graph.seeds}, sampler, options)
        if on_gpu and ahead:
            fill = None if buffer is None else lambda batch, nodes: _fill(batch, buffer, nodes)
            loader.send_to(DeviceBatches(self.device, ahead, fill))
            loader.sample_on(self.device)
        return loader

    def batches(self, typed: bool, buffer: FeatureBuffer, overlapped: bool, sampled: str = "cpu") -> Iterator[Any]:
        """Yield the batches of epoch after epoch, on the device and with features."""
        loader = self.loader(typed, buffer, _AHEAD if overlapped else 0, sampled)
        try:
            while True:
                loader.set_epoch(loader.epoch + 1)
                with closing(iter(loader)) as batches:
                    for batch in batches:
                        if self.device.type == "cuda" and not overlapped:
                            nodes, batch = batch.n_id, batch.to(self.device)
                            _fill(batch, buffer, nodes)
                        yield batch
        finally:
            loader.close()

    def model(self, name: str) -> nn.Module:
        """Return a model of the package, on the device."""
        torch.manual_seed(0)
        width, layers = self.hidden_channels, len(self.fanouts)
        sizes = (self.graph.features.shape[1], width, NUM_CLASSES, layers)
        backbone = {
            "GraphSAGE": lambda: GraphSAGE(*sizes),
            "GAT": lambda: GAT(*sizes, heads=HEADS),
            "R-GCN": lambda: RGCN(*sizes, schema=numbered_schema(NUM_EDGE_TYPES, "bench")),
        }[name]()
        return NodeClassifier(backbone).to(self.device)

    def epoch(self, name: str, buffer: FeatureBuffer, overlapped: bool, sampled: str = "auto") -> dict:
        """Train a model of the package for an epoch, with its features in a buffer."""
        step = training_step(self.model(name))
        with closing(self.batches(name == "R-GCN", buffer, overlapped, sampled)) as batches:
            return self.timed(batches, step, buffer.dim * buffer.dtype.itemsize)

    def compute_alone(self, name: str, buffer: FeatureBuffer) -> dict:
        """Train an epoch on a few batches that are on the device already, in turns."""
        step = training_step(self.model(name))
        with closing(self.batches(name == "R-GCN", buffer, False)) as batches:
            kept = list(islice(batches, min(_KEPT, self.num_batches)))
        return self.timed(cycle(kept), step, 0)

    def timed(self, batches: Iterator[Any], step: Callable[[Any], int], row_bytes: int) -> dict:
        """Return what an epoch takes, after a few batches that do not count.

        Args:
            batches: Batches without end.
            step: Trains on a batch, and returns its nodes.
            row_bytes: Bytes of a node's features that are gathered.
        """
        for batch in islice(batches, WARM_BATCHES):
            step(batch)
        self.wait()
        start, nodes, count = time.perf_counter(), 0, 0
        for batch in islice(batches, self.num_batches):
            nodes += step(batch)
            count += 1
            if time.perf_counter() - start > self.limit_s:
                break
        self.wait()
        seconds = time.perf_counter() - start
        found = {"epoch_s": seconds / count * self.num_batches, "batches": count, "ms": 1e3 * seconds / count}
        return found | {"gb_per_s": nodes * row_bytes / seconds / 1e9 if row_bytes else None}

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sampling(self, num_threads: int) -> dict:
        """Sample the batches of an epoch on the CPU, and nothing else."""
        options = LoaderOptions(self.batch_size, num_threads=num_threads)
        whole = self.graph.whole(False)
        loader = PartLoader(
            [0], PartData(lambda part: whole), {0: self.graph.seeds}, NeighborSampler(self.fanouts), options
        )
        try:
            return self._per_batch(loader)
        finally:
            loader.close()

    def sampling_on_device(self) -> dict:
        """Sample batches from the graph in the device's memory."""
        csc = CSC(*(torch.from_numpy(array).to(self.device) for array in self.graph.csc))
        seeds = torch.from_numpy(self.graph.seeds[: self.batch_size]).to(self.device)
        space = None if self.device.type == "cpu" else DeviceWorkspace(csc.num_rows, self.device)
        numbers = iter(range(1 << 30))

        def sample() -> None:
            key = batch_key(0, 0, 0, next(numbers))
            sample_neighbors(csc, seeds, self.fanouts, int(key), workspace=space)

        seconds = median_s(sample, self.device, 1.0)
        return {"ms": 1e3 * seconds, "seeds_per_s": len(seeds) / seconds}

    def sampling_by(self, sampler: BatchSampler) -> dict:
        """Sample batches by a sampler on the device, from the graph in its memory; they come to the host."""
        there = DeviceSampler(sampler, self.device)
        state = there.prepare(self.graph.whole(False), self.graph.seeds, 0)
        items = cycle(there.items(state, self.batch_size, False, 0))
        numbers = iter(range(1 << 30))

        def sample() -> None:
            key = batch_key(0, 0, 0, next(numbers))
            there.sample(state, next(items), key, None, np.empty, False)

        seconds = median_s(sample, self.device, 1.0)
        return {"ms": 1e3 * seconds, "seeds_per_s": self.batch_size / seconds}

    def filling(self, buffer: FeatureBuffer) -> dict:
        """Gather the features of batches on the host, by one thread, into memory that is reused."""
        batches = self._some_batches()
        outs = [torch.empty((len(one.n_id), buffer.dim), dtype=torch.float32).numpy() for one in batches]
        pairs = cycle(zip(batches, outs, strict=True))

        def fill() -> None:
            batch, out = next(pairs)
            buffer.features.read(batch.n_id.numpy(), out)

        return self._stage(batches, fill, buffer.dim * buffer.dtype.itemsize)

    def crossing(self) -> dict:
        """Pack batches without features into pinned blocks, and copy them to the device."""
        batches = self._some_batches()
        num_bytes = sum(tensor.nbytes for one in batches for tensor in tensors_of(one)) / len(batches)
        sender = DeviceBatches(self.device, _AHEAD)
        with closing(sender.moved(self._round(batches))) as moved:
            found = self._per_batch(moved)
        sender.close()
        return found | {"bytes": round(num_bytes), "gb_per_s": num_bytes / found["ms"] / 1e6}

    def gathering(self, buffer: FeatureBuffer) -> dict:
        """Gather the features of batches from a buffer, where training runs."""
        batches = self._some_batches()
        turns = cycle(batches)
        return self._stage(batches, lambda: buffer.read(_ids(next(turns), self.device)), buffer.dim * 4)

    def _stage(self, batches: list, work: Callable[[], object], row_bytes: int) -> dict:
        rows = sum(len(one.n_id) for one in batches) / len(batches)
        seconds = median_s(work, self.device, 0.5)
        return {"ms": 1e3 * seconds, "gb_per_s": rows * row_bytes / seconds / 1e9, "bytes": round(rows * row_bytes)}

    def _per_batch(self, batches: Iterable[Any]) -> dict:
        """Return the time of each batch, after one that does not count, and the seeds a second."""
        batches = iter(batches)
        first = next(batches)
        start, seeds, count = time.perf_counter(), 0, 0
        for batch in chain(batches, [] if self.num_batches > 1 else [first]):
            seeds, count = seeds + batch.batch_size, count + 1
            if time.perf_counter() - start > self.limit_s:
                break
        self.wait()
        seconds = time.perf_counter() - start
        return {"ms": 1e3 * seconds / count, "seeds_per_s": seeds / seconds, "batches": count}

    def _some_batches(self) -> list:
        loader = self.loader()
        try:
            return list(islice(loader, _KEPT))
        finally:
            loader.close()

    def _round(self, batches: list) -> Iterator[Any]:
        yield from islice(cycle(batches), max(2, self.num_batches))


def training_step(module: nn.Module, targets: Callable[[Any], Any] | None = None) -> Callable[[Any], int]:
    """Return what trains a module on a batch, by Adam, and returns the number of the batch's nodes.

    Args:
        module: Maps a batch to outputs, seeds first.
        targets: Gives the batch as the module takes it; None: as it is.
    """
    optimizer = torch.optim.Adam(module.parameters(), lr=0.003)
    module.train()

    def step(batch: Any) -> int:
        batch = batch if targets is None else targets(batch)
        size = batch.batch_size
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(module(batch)[:size], batch.y[:size]).backward()
        optimizer.step()
        return batch.num_nodes

    return step


def _fill(batch: Any, buffer: FeatureBuffer, nodes: Any) -> None:
    on_host = batch.host_ids if batch.made is not None and buffer.asks_host else None
    batch.x = buffer.read(nodes, on_host=on_host)


def _ids(batch: Any, device: torch.device) -> Any:
    return batch.n_id.numpy() if device.type == "cpu" else batch.n_id
