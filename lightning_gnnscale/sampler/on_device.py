"""Batches sampled on the GPU that trains: those of the CPU, bit for bit."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from ..graph import CSC
from ..triton_kernels.sample_neighbors import Relation, group_edge_types
from ..triton_kernels.sample_neighbors.device import DeviceWorkspace, has_triton
from ..triton_kernels.sample_neighbors.device_graph import (
    fits_on_device,
    free_bytes,
)
from .cluster import ClusterSampler, ClusterState
from .device_state import held_bytes, put_on_device
from .device_stream import CopyStream
from .layerwise import LayerState, LayerwiseSampler
from .link_sampler import LinkSampler, LinkState
from .links_on_device import DeviceLinks, device_links, pools_of
from .neighbor import NeighborSampler, NeighborState
from .protocol import _MEMBERS, Allocate, BatchSampler, Subgraph

_log = logging.getLogger("lightning.pytorch.gnnscale")  # below Lightning's own, so that it logs where the Trainer does


class _Refusal(NamedTuple):
    """Why a GPU does not sample batches, and what to do about it.

    Attributes:
        applies: Called with the sampler, the GPU that trains or None, and whether threads of this process sample.
        line: What is told, with the sampler's class as {name}.
    """

    applies: Callable[[BatchSampler, torch.device | None, bool], bool]
    line: str


NO_TRITON = _Refusal(lambda *_: not has_triton(), "Triton is not installed: pip install triton")
REFUSALS = (
    _Refusal(
        lambda sampler, device, by_threads: device is None, "training is not on a GPU: say trainer.accelerator=gpu"
    ),
    NO_TRITON,
    _Refusal(
        lambda sampler, device, by_threads: not by_threads,
        "other processes sample, and only the one that trains has the GPU: say source=threads",
    ),
    _Refusal(
        lambda sampler, *_: type(sampler) not in _SAMPLED_THERE,
        "{name} has no form for GPUs: say sampler=neighbor, hetero, layerwise, cluster, links or edges",
    ),
)


def sampler_for(
    sampler: BatchSampler, device: torch.device | None, by_threads: bool = True, stays: bool = False
) -> BatchSampler:
    """Return a sampler, or one that gives its batches by a GPU where `device` of the sampler says so; log why.

    Args:
        sampler: What samples.
        device: The GPU that trains, None: training is on the CPU.
        by_threads: Whether threads of this process sample, each a whole batch.
        stays: Whether subgraphs of sampled neighbours stay on the GPU.

    Raises:
        ValueError: device="cuda" cannot be followed.
    """
    asked = _device_of(sampler)
    if asked == "cpu":
        return sampler
    against = reason_against(sampler, device, by_threads)
    if against is not None:
        if asked == "cuda":
            raise ValueError(f"sampler.device must be auto or cpu here, got cuda: {against}")
        if device is not None:
            _log.info("Batches are sampled on the CPU: %s", against)
        return sampler
    return DeviceSampler(sampler, device, stays)


def asked_device(sampler: BatchSampler, by_threads: bool) -> str:
    """Return where the neighbours of batches are sampled if training is on a GPU: "auto", "cpu" or "cuda"."""
    return sampler.device if by_threads and _stays_there(sampler) else "cpu"


def _stays_there(sampler: BatchSampler) -> bool:
    """Whether columns of the sampler's batches can be looked up on a device."""
    return type(sampler) is NeighborSampler and sampler.hop_by_hop


def reason_against(sampler: BatchSampler, device: torch.device | None, by_threads: bool) -> str | None:
    """Return why a sampler's batches are sampled on the CPU, by `REFUSALS`; None where a device can."""
    lines = (one.line for one in REFUSALS if one.applies(sampler, device, by_threads))
    line = next(lines, None)
    return None if line is None else line.format(name=type(sampler).__name__)


def _device_of(sampler: BatchSampler) -> str:
    """Return where a sampler asks to be sampled; "auto" of one that cannot say."""
    if isinstance(sampler, DeviceSampler):
        return "cpu"  # it is there
    inner = sampler.sampler if isinstance(sampler, LinkSampler) else sampler
    return inner.device if isinstance(inner, NeighborSampler | LayerwiseSampler | ClusterSampler) else "auto"


class DeviceState(NamedTuple):
    """A part as `DeviceSampler` reads it.

    Attributes:
        host: What the sampler on the CPU prepared.
        device: The same with tensors; None: this part is sampled on the CPU.
    """

    host: NeighborState | LayerState | ClusterState | LinkState
    device: NeighborState | LayerState | ClusterState | DeviceLinks | None

    @property
    def csc(self) -> CSC:
        """The part's edges on the host."""
        return (self.host.inner if isinstance(self.host, LinkState) else self.host).csc


class DeviceSpaces:
    """Memory to sample batches on a device, each in use on a stream of its own; several threads may ask for some.

    Args:
        device: A CUDA device, or the CPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._free: SimpleQueue[tuple[list[DeviceWorkspace], CopyStream]] = SimpleQueue()

    @contextmanager
    def lend(self, *sizes: int) -> Iterator[tuple[list[DeviceWorkspace], CopyStream]]:
        """Lend a workspace for each of some numbers of nodes, and the stream that what runs within runs on."""
        try:
            spaces, stream = self._free.get_nowait()
        except Empty:
            spaces, stream = [], CopyStream(self.device)
        with stream.running():
            if len(spaces) != len(sizes) or not all(
                space.fits(size, self.device) for space, size in zip(spaces, sizes, strict=True)
            ):
                spaces = [DeviceWorkspace(size, self.device) for size in sizes]
            try:
                yield spaces, stream
            finally:
                self._free.put((spaces, stream))

    def release(self) -> None:
        """Free the memory that is not in use."""
        while not self._free.empty():
            self._free.get_nowait()


class DeviceSampler(BatchSampler):
    """Sample on a device what another sampler samples on the CPU; several threads may, each on a stream of its own.

    The edges of a part go into the device's memory where they take half of what is free there at most. Else "auto"
    samples the part on the CPU, and "cuda" reads its edges from pinned host memory. The host learns the sizes of a
    hop in one read.

    Args:
        own: A `NeighborSampler`, `LayerwiseSampler`, `ClusterSampler` or `LinkSampler`.
        device: A CUDA device; on the CPU kernels need Triton's interpreter.
        stays: Whether subgraphs of sampled neighbours are tensors that stay there; others come to the host, where the
            columns of their nodes are looked up.
    """

    def __init__(self, own: BatchSampler, device: torch.device, stays: bool = False):
        vars(self).update({name: getattr(own, name) for name in _MEMBERS if name not in _REPLACED})
        self.own, self.on, self.stays, self.hop_by_hop = own, device, stays and _stays_there(own), False
        self._there = device_links(own) if isinstance(own, LinkSampler) else own
        self._spaces = DeviceSpaces(device)

    def __repr__(self) -> str:
        return repr(self.own)

    def with_locality(self, locality: Any) -> BatchSampler:
        return DeviceSampler(self.own.with_locality(locality), self.on, self.stays)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        return self.own.num_batches(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> DeviceState:
        host = self.own.prepare(part, targets, seed)
        chosen = _SAMPLED_THERE[type(self.own)](self.own, host)
        num_bytes, free = held_bytes(chosen), free_bytes(self.on)
        fits = fits_on_device(num_bytes, free)
        if not fits and _device_of(self.own) == "auto":
            line = "Part %s is sampled on the CPU: edges of %d bytes, %d free on %s, half of which is for them"
            remedy = "; sampler.device=cuda reads them from pinned memory"
            _log.info(line + remedy, part.part, num_bytes, free, self.on)
            return DeviceState(host, None)
        there = put_on_device(chosen, self.on, fits)
        if self.on.type == "cuda":
            torch.cuda.current_stream(self.on).synchronize()  # streams of other threads read it
        where = "its memory" if fits else "pinned host memory"
        _log.info("Part %s is sampled on %s, from %s", part.part, self.on, where)
        return DeviceState(host, there)

    def with_targets(self, state: DeviceState, targets: np.ndarray) -> DeviceState:
        return state._replace(host=self.own.with_targets(state.host, targets))

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
        **options: bool,
    ) -> Subgraph:
        """Return a batch; arguments as `sample` of the sampler has them; the workspace is of parts on the CPU."""
        if state.device is None:
            return self.own.sample(state.host, items, key, workspace, allocate, return_e_id, **options)
        with self._spaces.lend(state.csc.num_rows) as ((space,), stream):
            sampled = self._there.sample(state.device, items, key, space, allocate, return_e_id, **options)
            if self.stays:
                return sampled._replace(stream=stream)
            return Subgraph(*(_copied(value, allocate) for value in sampled))

    def release(self) -> None:
        """Free the memory that is kept from batch to batch."""
        self._spaces.release()

    def fits(self, num_bytes: int) -> bool:
        """Return whether columns of so many bytes belong into the device's memory now."""
        return fits_on_device(num_bytes, free_bytes(self.on))


_REPLACED = ("prepare", "items", "sample", "with_locality", "num_batches", "hop_by_hop")


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
    """Return a copy of a tensor on the host, in memory of its own; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    out = allocate(tuple(value.shape), np.float32 if value.is_floating_point() else np.int64)
    torch.from_numpy(out).copy_(value)
    return out


def _neighbors_there(own: NeighborSampler, host: NeighborState) -> NeighborState:
    """Return what a device reads of a part to sample neighbours: as it is on the host, edge types apart."""
    relations = _by_edge_type(host.relations)
    reads_rows = not own.by_edge_type or own.subgraph_type != "directional"
    csc = CSC(np.asarray(host.csc.indptr), np.asarray(host.csc.indices)) if reads_rows else None
    return host._replace(csc=csc, relations=relations, type_of=None)


def _layers_there(own: LayerwiseSampler, host: LayerState) -> LayerState:
    masks = None if host.preferred is None else tuple(mask.view(np.uint8) for mask in host.preferred)
    return LayerState(CSC(np.asarray(host.csc.indptr), np.asarray(host.csc.indices)), host.targets, masks)


def _clusters_there(own: ClusterSampler, host: ClusterState) -> ClusterState:
    return host._replace(csc=CSC(np.asarray(host.csc.indptr), np.asarray(host.csc.indices)))


def _links_there(own: LinkSampler, host: LinkState) -> DeviceLinks:
    inner = _SAMPLED_THERE[type(own.sampler)](own.sampler, host.inner)
    csc = CSC(np.asarray(host.inner.csc.indptr), np.asarray(host.inner.csc.indices))
    return DeviceLinks(host, inner, csc, host.table, None if host.node_types is None else pools_of(host.node_types))


_SAMPLED_THERE = {
    NeighborSampler: _neighbors_there,
    LayerwiseSampler: _layers_there,
    ClusterSampler: _clusters_there,
    LinkSampler: _links_there,
}


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
