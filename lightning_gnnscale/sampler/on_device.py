"""Neighbours sampled on the GPU that trains: the batches of the CPU, bit for bit."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from ..graph import CSC
from ..triton_kernels.sample_neighbors import HopSampling, Relation, SampledNeighbors, SplitRows, group_edge_types
from ..triton_kernels.sample_neighbors.device import DeviceWorkspace, has_triton
from ..triton_kernels.sample_neighbors.device_graph import DeviceRelation, fits_on_device, placing, relation_bytes
from .device_stream import CopyStream
from .neighbor import NeighborSampler, NeighborState
from .protocol import _MEMBERS, Allocate, BatchSampler, Subgraph

_log = logging.getLogger("lightning.pytorch.gnnscale")  # below Lightning's own, so that it logs where the Trainer does


def sampler_for(
    sampler: BatchSampler, device: torch.device | None, by_threads: bool = True, stays: bool = False
) -> BatchSampler:
    """Return a sampler, or one that gives its batches by a GPU where `device` of the sampler says so; log why.

    Args:
        sampler: What samples.
        device: The GPU that trains, None: training is on the CPU.
        by_threads: Whether threads of this process sample, each a whole batch.
        stays: Whether subgraphs stay on the GPU.

    Raises:
        ValueError: device="cuda" cannot be followed.
    """
    asked = getattr(sampler, "device", "cpu") if type(sampler) is NeighborSampler else "cpu"
    if asked == "cpu":
        return sampler
    against = reason_against(sampler, device, by_threads)
    if against is not None:
        if asked == "cuda":
            raise ValueError(f"sampler.device must be auto or cpu here, got cuda: {against}")
        if device is not None:
            _log.info("Neighbours are sampled on the CPU: %s", against)
        return sampler
    return DeviceSampler(sampler, device, stays)


def asked_device(sampler: BatchSampler, by_threads: bool) -> str:
    """Return where a sampler's batches are sampled if training is on a GPU: "auto", "cpu" or "cuda"."""
    on_gpu = type(sampler) is NeighborSampler and sampler.hop_by_hop and by_threads
    return sampler.device if on_gpu else "cpu"


def reason_against(sampler: NeighborSampler, device: torch.device | None, by_threads: bool) -> str | None:
    """Return why a sampler's batches are sampled on the CPU; None where a device can."""
    if device is None:
        return "training is not on a GPU"
    if not has_triton():
        return "Triton is not installed"
    if not by_threads:
        return "only source=threads samples in the process that trains, each batch in one thread"
    if not sampler.hop_by_hop:
        return f"subgraph_type={sampler.subgraph_type} reads whole rows"
    return None


class DeviceState(NamedTuple):
    """A part as `DeviceSampler` reads it.

    Attributes:
        host: What the sampler on the CPU prepared.
        device: The same with tensors; None: this part is sampled on the CPU.
    """

    host: NeighborState
    device: NeighborState | None


class DeviceSplits:
    """Rows with preferred neighbours first, copied to a device when first asked for; see `PreferredRows`."""

    def __init__(self, preferred, put: Callable[[np.ndarray], torch.Tensor]):
        self._preferred, self._put, self._host, self._there = preferred, put, None, []

    def split(self, with_position: bool) -> list[SplitRows]:
        """Return the rows of each hop as tensors."""
        rows = self._preferred.split(with_position)
        if rows is not self._host:
            there = [SplitRows(*(None if a is None else self._put(np.asarray(a)) for a in hop)) for hop in rows]
            self._host, self._there = rows, there
        return self._there


class DeviceSampler(BatchSampler):
    """Sample on a device what a `NeighborSampler` samples on the CPU; several threads may, each on a stream of its own.

    The edges of a part go into the device's memory where they take half of what is free there at most. Else "auto"
    samples the part on the CPU, and "cuda" reads its edges from pinned host memory. The host learns the sizes of a
    hop in one read.

    Args:
        own: The sampler.
        device: A CUDA device; on the CPU kernels need Triton's interpreter.
        stays: Whether subgraphs are tensors that stay there; else they come to the host, where columns are looked up.
    """

    def __init__(self, own: NeighborSampler, device: torch.device, stays: bool = False):
        vars(self).update({name: getattr(own, name) for name in _MEMBERS if name not in _REPLACED})
        self.own, self.on, self.stays, self.hop_by_hop = own, device, stays, False
        self._spaces: SimpleQueue[_Space] = SimpleQueue()

    def __repr__(self) -> str:
        return repr(self.own)

    def with_locality(self, locality: Any) -> BatchSampler:
        return DeviceSampler(self.own.with_locality(locality), self.on, self.stays)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        return self.own.num_batches(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> DeviceState:
        host = self.own.prepare(part, targets, seed)
        relations = _by_edge_type(host.relations)
        num_bytes, free = sum(relation_bytes(relation) for relation in relations), self._free_bytes()
        fits = fits_on_device(num_bytes, free)
        if not fits and self.own.device == "auto":
            _log.info("Part %s is sampled on the CPU: edges of %d bytes, %d free on %s", part.part, num_bytes, free,
                      self.on)  # fmt: skip
            return DeviceState(host, None)
        put = placing(self.on, fits)
        there = host._replace(
            relations=[DeviceRelation.put(relation, put) for relation in relations],
            preferred=None if host.preferred is None else DeviceSplits(host.preferred, put),
            type_of=None,
        )
        if there.relations:
            there = there._replace(csc=CSC(there.relations[0].indptr, there.relations[0].indices))
        if self.on.type == "cuda":
            torch.cuda.current_stream(self.on).synchronize()  # streams of other threads read it
        where = "its memory" if fits else "pinned host memory"
        _log.info("Part %s is sampled on %s, from %s", part.part, self.on, where)
        return DeviceState(host, there)

    def items(self, state: DeviceState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        return self.own.items(state.host, batch_size, drop_last, order_key)

    def sample(
        self,
        state: DeviceState,
        items: np.ndarray,
        key: int,
        workspace: Any,
        allocate: Allocate,
        return_e_id: bool,
        with_row_scale: bool = True,
    ) -> Subgraph:
        """Return a batch; arguments as `NeighborSampler.sample` has them; the workspace is of parts on the CPU."""
        if state.device is None:
            return self.own.sample(state.host, items, key, workspace, allocate, return_e_id, with_row_scale)
        with self._space(state.host.csc.num_rows) as (space, stream):
            hops = self.own.begin(state.device, items, key, space, return_e_id, with_row_scale)
            for _ in range(hops.num_hops):
                hops.sample()
            if not self.stays:
                return self.own.finish(state.host, _OnHost(hops), allocate, with_row_scale)
            there = self.own.finish(state.device, hops, allocate, with_row_scale, _scale_rows)
            return there._replace(stream=stream)

    def release(self) -> None:
        """Free the memory that is kept from batch to batch."""
        while not self._spaces.empty():
            self._spaces.get_nowait()

    def fits(self, num_bytes: int) -> bool:
        """Return whether columns of so many bytes belong into the device's memory now."""
        return fits_on_device(num_bytes, self._free_bytes())

    def _free_bytes(self) -> int:
        if self.on.type != "cuda":
            return 1 << 62
        # What torch holds and no tensor has, such as the memory of the part before, is free for the next one.
        held = torch.cuda.memory_reserved(self.on) - torch.cuda.memory_allocated(self.on)
        return torch.cuda.mem_get_info(self.on)[0] + held

    @contextmanager
    def _space(self, num_nodes: int) -> Iterator["_Space"]:
        try:
            space, stream = self._spaces.get_nowait()
        except Empty:
            space, stream = None, CopyStream(self.on)
        with stream.running():
            if space is None or not space.fits(num_nodes, self.on):
                space = DeviceWorkspace(num_nodes, self.on)
            own = _Space(space, stream)
            try:
                yield own
            finally:
                self._spaces.put(own)


_REPLACED = ("prepare", "items", "sample", "with_locality", "num_batches", "hop_by_hop")


class _Space(NamedTuple):
    workspace: DeviceWorkspace
    stream: CopyStream


def host_sampler(sampler: BatchSampler) -> BatchSampler:
    """Return the sampler on the CPU whose batches a sampler gives: itself, or that of a `DeviceSampler`."""
    return sampler.own if isinstance(sampler, DeviceSampler) else sampler


def release(sampler: BatchSampler) -> None:
    """Free the memory of a device that a sampler keeps from batch to batch."""
    if isinstance(sampler, DeviceSampler):
        sampler.release()


def on_host(sampled: Subgraph, allocate: Allocate) -> Subgraph:
    """Return a subgraph that stayed on a device in memory of the host; waits for it."""
    with sampled.stream.running():
        return Subgraph(*(_copied(value, allocate) for value in sampled))._replace(stream=None)


def _copied(value: Any, allocate: Allocate) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    out = allocate(tuple(value.shape), np.float32 if value.is_floating_point() else np.int64)
    torch.from_numpy(out).copy_(value)
    return out


def _scale_rows(csc: CSC | None, sampled: SampledNeighbors) -> torch.Tensor:
    """Return `row_scale` on the device, bit for bit."""
    taken = sampled.indptr.diff()
    if csc is None:
        return torch.ones_like(taken, dtype=torch.float32)
    targets = sampled.n_id[: len(taken)]
    indptr, rows = csc.indptr, targets.to(csc.indptr.device)  # in device memory, or pinned on the host
    length = (indptr[rows + 1] - indptr[rows]).clamp(min=1).to(targets.device)
    if sampled.edge_weight is None:
        return (length.double() / taken.clamp(min=1)).float()
    return length.float()


class _OnHost:
    """Hops whose result is copied to the host."""

    def __init__(self, hops: HopSampling):
        self._hops, self.times = hops, hops.times

    def collect(self, allocate: Allocate, with_edge_type: bool) -> SampledNeighbors:
        found = self._hops.collect(with_edge_type=with_edge_type)
        return SampledNeighbors(*(_copied(value, allocate) for value in found))


def _by_edge_type(relations: list[Relation]) -> list[Relation]:
    """Return edge types whose rows hold edges of their own type alone, as the CPU picks them out of rows of several."""
    first = relations[0] if relations else None
    if first is None or first.edge_type is None:
        return relations
    edge_type = np.asarray(first.edge_type)
    num = max([int(edge_type.max()) if len(edge_type) else 0, *(relation.number for relation in relations)]) + 1
    csc = CSC(first.indptr, first.indices)
    grouped = group_edge_types(csc, edge_type, num, first.time, first.time_by_edge, first.weight)
    return [grouped[relation.number] for relation in relations]
