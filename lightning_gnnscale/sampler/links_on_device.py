"""Links sampled on a device: positives, negatives and their neighbourhoods, those of `LinkSampler` bit for bit."""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..graph import CSC
from ..triton_kernels.random_tensors import below_tensor, combine_tensor, mix64_tensor, unit_tensor
from ..triton_kernels.sample_neighbors.device import DeviceWorkspace, read_at
from ..triton_kernels.sample_neighbors.whole_rows import compressed, summed, without_pairs
from .link_sampler import (
    NEGATIVE_KEY,
    POSITIVE_KEY,
    SOURCE_KEY,
    Links,
    LinkSampler,
    LinkState,
    NodeTypePools,
    edges_at,
    stream_key,
)
from .links import AliasTable
from .neighbor import NeighborSampler
from .protocol import Allocate, Subgraph


class TypePools(NamedTuple):
    """`NodeTypePools` as a device reads them: the pools of all node types one after the other.

    Attributes:
        starts: (num_runs + 1,) int64 of `NodeTypes`.
        halo_nodes: (num_halo,) ids of the halo nodes.
        first: (num_pool_runs,) int64 first node of each run of the pools.
        offsets: (num_pool_runs + 1,) int64 running sum of their lengths.
        begins: (num_node_types + 1,) int64 where each node type's pool begins among all.
        threshold, alias: Of the alias tables, one after the other; a node type without one stands for itself.
        num_node_types, core_start, num_core, shared: As `NodeTypePools` has them.
    """

    starts: np.ndarray | Tensor
    halo_nodes: np.ndarray | Tensor
    first: np.ndarray | Tensor
    offsets: np.ndarray | Tensor
    begins: np.ndarray | Tensor
    threshold: np.ndarray | Tensor
    alias: np.ndarray | Tensor
    num_node_types: int
    core_start: int
    num_core: int
    shared: int | None

    def type_of(self, local: Tensor) -> Tensor:
        """Return the (num,) int64 node types by their local ids."""
        nodes = self.core_start + local
        if len(self.halo_nodes):
            away = read_at(self.halo_nodes, (local - self.num_core).clamp(min=0)).long()
            nodes = torch.where(local < self.num_core, nodes, away)
        return (torch.searchsorted(self.starts, nodes, right=True) - 1) % self.num_node_types

    def sample(self, node_types: Tensor, num: int, key: int) -> Tensor:
        """Return (num_rows, num) int64 local ids, those of row i of node type node_types[i]."""
        of_type = torch.arange(self.num_node_types, device=node_types.device)
        number = (node_types[:, None] == of_type).cumsum(0).gather(1, node_types[:, None]) - 1  # among its node type
        keys = combine_tensor(key, of_type)[node_types][:, None]
        word = combine_tensor(keys, number * num + torch.arange(num, device=node_types.device))
        begin = self.begins[node_types][:, None]
        return self.nodes(self.places(word, begin, self.begins[node_types + 1][:, None] - begin))

    def places(self, word: Tensor, begin: Any, size: Any) -> Tensor:
        """Return places among all pools, sampled by random words from the pools that begin there."""
        slot = below_tensor(word, size)
        stays = unit_tensor(mix64_tensor(word)) < self.threshold[begin + slot]
        return begin + torch.where(stays, slot, self.alias[begin + slot])

    def nodes(self, places: Tensor) -> Tensor:
        """Return the local ids at some places among all pools."""
        run = torch.searchsorted(self.offsets, places.contiguous(), right=True) - 1
        return self.first[run] + places - self.offsets[run]


def pools_of(pools: NodeTypePools) -> TypePools:
    """Return the pools of all node types one after the other."""
    sizes = np.array([int(pool.offsets[-1]) for pool in pools.pools])
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    tables = [
        pool.table or AliasTable(np.ones(size), np.arange(size)) for pool, size in zip(pools.pools, sizes, strict=True)
    ]
    lengths = np.concatenate([np.diff(pool.offsets) for pool in pools.pools])
    return TypePools(
        np.asarray(pools.node_types.starts, np.int64),
        pools.halo_nodes,
        np.concatenate([pool.first for pool in pools.pools]).astype(np.int64),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        begins,
        np.concatenate([table.threshold for table in tables]),
        np.concatenate([table.alias for table in tables]),
        pools.node_types.num_node_types,
        pools.core_start,
        pools.num_core,
        pools.shared,
    )


class DeviceLinks(NamedTuple):
    """A part as links are sampled from it on a device.

    Attributes:
        host: What the sampler on the CPU prepared; what follows from the numbers of items alone is read there.
        inner: State of the wrapped sampler, with tensors.
        csc: The part's edges, tensors.
        table, pools: As `LinkState.table` and `node_types`, with tensors.
    """

    host: LinkState
    inner: Any
    csc: CSC
    table: AliasTable | None
    pools: TypePools | None


def device_links(own: LinkSampler) -> "DeviceLinkSampler":
    """Return the sampler that samples on a device what `own` samples on the CPU."""
    return DeviceLinkSampler(**{one.name: getattr(own, one.name) for one in fields(own)})


class DeviceLinkSampler(LinkSampler):
    """A `LinkSampler` over a part in a `DeviceLinks`; see `device_links`. Waits for the device twice a batch more."""

    def sample(
        self,
        state: DeviceLinks,
        items: np.ndarray,
        key: int,
        workspace: DeviceWorkspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        seeds = workspace.upload(self.first_ends(state.host, items))
        edges = edges_at(state.host, items) if self.positives == "edge" else None
        positives = self._positives(state, seeds, edges, key, workspace)
        negatives = self._negatives(state, seeds, positives, key)
        nodes = torch.cat([seeds, positives, negatives.reshape(-1)])
        if state.host.edge_time is not None:
            time = workspace.upload(np.asarray(state.host.edge_time[edges]))
            place, times = torch.arange(len(nodes), device=nodes.device), {"times": _times(time, negatives)}
            count = nodes
        else:
            workspace.place(nodes[:0])
            (place, count), times = workspace.number(nodes, 0), {}
        subgraph = self._around(state, count, key, workspace, allocate, return_e_id, times)
        return self._with_links(subgraph, state.host, seeds, positives, place, negatives.shape, edges, workspace)

    def _positives(
        self, state: DeviceLinks, seeds: Tensor, edges: np.ndarray | None, key: int, space: DeviceWorkspace
    ) -> Tensor:
        """Return `other_ends`."""
        if edges is not None:
            return read_at(state.csc.indices, space.upload(edges)).long()
        length = self.walk_length if self.positives == "walk" else 1
        return walk_tensors(state.csc, seeds, stream_key(key, POSITIVE_KEY), length)

    def _negatives(self, state: DeviceLinks, seeds: Tensor, positives: Tensor, key: int) -> Tensor:
        """Return `negative_ends`."""
        if self.labelled:
            return seeds.new_empty(len(seeds), 0)
        rows, width = 1 if self.shares and len(seeds) else len(seeds), self.num_negatives
        pools, num_nodes = state.pools, max(1, state.host.num_core)
        if pools is not None and pools.shared is None:
            ends = [seeds, positives] if self.positives == "edge" else [positives, seeds]
            streams = zip(ends[: 2 if self.corrupt == "both" else 1], (NEGATIVE_KEY, SOURCE_KEY), strict=False)
            return torch.cat(
                [pools.sample(pools.type_of(end), width, stream_key(key, by)) for end, by in streams], dim=1
            )
        begin = 0
        if pools is not None:
            begins = state.host.node_types.pools
            begin = sum(int(pool.offsets[-1]) for pool in begins[: pools.shared])
            num_nodes = int(begins[pools.shared].offsets[-1])
            width = width if num_nodes else 0
        if self.negatives == "all":
            num_nodes = state.host.num_core if pools is None else num_nodes
            every = begin + torch.arange(num_nodes, device=seeds.device)
            return (every if pools is None else pools.nodes(every))[None][:rows]
        both = self.corrupt == "both" and not self.shares
        numbers, found = torch.arange(rows * width, device=seeds.device), []
        for by in (NEGATIVE_KEY, SOURCE_KEY) if both else (NEGATIVE_KEY,):
            word = combine_tensor(stream_key(key, by), numbers)
            if pools is not None:
                found.append(pools.nodes(pools.places(word, begin, num_nodes)))
            else:
                found.append(_by_table(word, num_nodes, state.table))
        return torch.cat([nodes.reshape(rows, width) for nodes in found], dim=1)

    def _around(
        self, state: DeviceLinks, count: Tensor, key: int, space: DeviceWorkspace, allocate: Allocate,
        return_e_id: bool, times: dict,
    ) -> Subgraph:  # fmt: skip
        """Sample around the ends of the links; `count` says how many the workspace holds, or with times names them."""
        apart = isinstance(self.sampler, NeighborSampler) and self.sampler.disjoint
        if self.neighborhoods and (times or not apart):
            return self.sampler.sample(state.inner, count, key, space, allocate, return_e_id, **times)
        seeds = count
        if not times:
            (num,) = space.read([count])
            seeds = space.node[:num].clone()
            space.finish(num)
        if self.neighborhoods:
            return self.sampler.sample(state.inner, seeds, key, space, allocate, return_e_id)
        indptr, e_id = seeds.new_zeros(len(seeds) + 1), seeds.new_empty(0) if return_e_id else None
        return Subgraph(seeds, seeds.new_empty(2, 0), indptr, len(seeds), e_id, [len(seeds)], [])

    def _with_links(
        self, subgraph: Subgraph, host: LinkState, seeds: Tensor, positives: Tensor, place: Tensor, shape: torch.Size,
        edges: np.ndarray | None, space: DeviceWorkspace,
    ) -> Subgraph:  # fmt: skip
        """Return a subgraph with its links; without their edges under `exclude_pairs`."""
        size, pair_type = len(seeds), None
        pairs, found = place[: 2 * size].view(2, size), place[2 * size :].view(shape)
        linked = torch.ones_like(seeds, dtype=torch.bool)
        if host.edge_type is None and not self.labelled:
            linked = seeds != positives
            before = summed(linked)
            (num,) = space.read([before[-1]])
            kept = pairs
            pairs = torch.stack(compressed(linked, before, num, *pairs))
            if not self.shares:
                (rows,) = compressed(linked, before, num, torch.arange(size, device=seeds.device))
                found = found[rows]
        else:
            kept = pairs = pairs.flip(0)
            if host.edge_type is not None:
                pair_type = space.upload(np.asarray(host.edge_type[edges]))
        if self.exclude_pairs:
            subgraph = without_pairs(subgraph, kept, linked, space)
        others, sources = found, None
        if self.corrupt == "both":
            others, sources = (found, found) if self.shares else found.tensor_split(2, dim=1)
        given = Links(subgraph.n_id, pairs, others, pair_type, sources, None, edges if self.labelled else None)
        given = {name: value for name, value in given._asdict().items() if name not in ("nodes", "seed_time")}
        return subgraph._replace(**given)


def _times(time: Tensor, negatives: Tensor) -> Tensor:
    return torch.cat([time, time, time.repeat_interleave(negatives.shape[1], output_size=negatives.numel())])


def _by_table(word: Tensor, num_nodes: int, table: AliasTable | None) -> Tensor:
    """Return `sample_negatives` of random words."""
    slot = below_tensor(word, num_nodes)
    if table is None:
        return slot
    stays = unit_tensor(mix64_tensor(word)) < read_at(table.threshold, slot)
    return torch.where(stays, slot, read_at(table.alias, slot))


def walk_tensors(csc: CSC, seeds: Tensor, key: int, length: int) -> Tensor:
    """Return `sample_positives(choose="any")` where tensors are."""
    mine = combine_tensor(key, torch.arange(len(seeds), device=seeds.device))
    steps = 1 + below_tensor(combine_tensor(mine, torch.full_like(mine, length)), length)
    node = seeds
    for step in range(length):
        start = read_at(csc.indptr, node)
        degree = read_at(csc.indptr, node + 1) - start
        goes = (steps > step) & (degree > 0)
        place = below_tensor(combine_tensor(mine, torch.full_like(mine, step)), degree)
        edge = torch.where(goes, start + place, 0)
        if len(csc.indices):
            node = torch.where(goes, read_at(csc.indices, edge).long(), node)
    return node
