"""PyG's `NeighborSampler` without a compiled library: node types, times, weights, disjoint trees, sampled by a key."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, GraphStore, HeteroData, remote_backend_utils
from torch_geometric.sampler import HeteroSamplerOutput, NegativeSampling, SamplerOutput
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler
from torch_geometric.sampler.base import DataType, SubgraphType
from torch_geometric.sampler.utils import to_csc, to_hetero_csc

from ..errors import short
from ..graph import id_dtype
from ..partition_store.pyg_store import PyGStore
from ..rng import combine_array, combine_int, fold
from ..triton_kernels.sample_neighbors import (
    HopSampling,
    Relation,
    SampledNeighbors,
    SampleOptions,
    Workspace,
    check_fanouts,
)
from ..triton_kernels.sample_neighbors.device_graph import (
    DeviceRelation,
    fits_on_device,
    free_bytes,
    placing,
    relation_bytes,
)
from ..values import as_array, exact_times
from .neighbor import STRATEGIES
from .on_device import NO_TRITON, DeviceSpaces
from .protocol import edges_between

_log = logging.getLogger("lightning.pytorch.gnnscale")  # below Lightning's own, so that it logs where the Trainer does
_NODE, _EDGE = (
    "node",
    ("node", "to", "node"),
)  # what the one node type and edge type of a homogeneous graph are called here


class DataSampler(PyGNeighborSampler):
    """Sample neighbours in a PyG graph in memory, of one node type or of several, for PyG's own loaders and ours.

    Every choice follows from the key that `keyed` sets, otherwise from `seed` and the seeds of the call. Where
    neighbourhoods are whole, the result equals that of PyG with pyg-lib bit for bit.

    Args:
        data: A `Data` or `HeteroData`, or PyG's (feature store, graph store), which stay where they are.
        num_neighbors: Neighbours a node for each hop, >= 0, or -1 for all: a list, or one by edge type. An edge type
            with a fan-out of 0 is not followed.
        subgraph_type: "directional", "bidirectional" or "induced", as PyG means them.
        replace: Whether neighbours are sampled with replacement.
        disjoint: Whether each seed has a subgraph of its own; always so with times.
        temporal_strategy: "uniform", or "last": the latest neighbours that may be sampled.
        time_attr: Attribute with the time of nodes, or of edges: no neighbour is sampled that is later than the seed.
            Node types or edge types without it are always there, as in PyG.
        weight_attr: Attribute of edges by which they are sampled, >= 0.
        is_sorted: Whether edges are sorted by target, and within it by time.
        strictly_before: Whether a neighbour of the seed's own time is left out too (PyG's loaders sample it).
        seed: Seed of samples without a key.

    Raises:
        ValueError: an argument is out of range, or no attribute of the data.

    Cost: one sort of the edges unless is_sorted; 4 bytes an edge and 4 for its number (8 from 2**31 on).
    Source: `torch_geometric.sampler.NeighborSampler` (2.6 to 2.8). Differs: weights go with times, and with
        "induced" node types do; edges of weight 0 are sampled by a fan-out of -1
        alone, those of PyG also where a row fits its fan-out.
    """

    def __init__(
        self,
        data,
        num_neighbors,
        subgraph_type: str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        strictly_before: bool = False,
        seed: int = 0,
    ):
        if temporal_strategy not in STRATEGIES:
            raise ValueError(
                f"temporal_strategy must be one of {', '.join(STRATEGIES)}, got {short(temporal_strategy)}"
            )
        self.data, self.data_type = data, DataType.from_data(data)
        self.sample_direction = "forward"
        self.seed, self.strictly_before = seed, strictly_before
        self.num_neighbors, self.replace, self.disjoint = num_neighbors, replace, disjoint
        self.subgraph_type = SubgraphType(subgraph_type)
        self.temporal_strategy, self.keep_orig_edges = temporal_strategy, False
        if self.data_type == DataType.remote:
            node_types, indptrs, rows, perm = self._read_stores(*data, time_attr or weight_attr)
            weights: Mapping = {}
        else:
            node_types, indptrs, rows, perm, weights = self._read_data(data, time_attr, weight_attr, is_sorted)
        self._fanouts = _fanouts(self.num_neighbors, self.edge_types, node_types)
        if self.disjoint and self.subgraph_type == SubgraphType.induced:
            raise ValueError('disjoint trees have no subgraph of type "induced": use "directional"')
        self._relations = [
            self._relation(edge_type, indptrs[edge_type], rows.pop(edge_type), weights, perm.get(edge_type))
            for edge_type in self.edge_types
        ]
        self.perm = None  # edges are numbered as the user has them
        self.edge_weight = weights or None
        self._node_types = node_types
        self._spaces: SimpleQueue[list[Workspace]] = SimpleQueue()
        self._on: DeviceSpaces | None = None
        self._there: list[DeviceRelation] = []
        self._keys = local()

    def sample_on(self, device: torch.device | None) -> None:
        """Sample on a GPU from now on, the same; in the log: where, and why on the CPU. Not while samples are taken.

        Args:
            device: The GPU that trains; None: the CPU.
        """
        self._on, self._there = None, []
        if device is None:
            return
        num_bytes, free = sum(relation_bytes(relation) for relation in self._relations), free_bytes(device)
        if NO_TRITON.applies(None, device, True):
            _log.info("The graph is sampled on the CPU: %s", NO_TRITON.line)
        elif not fits_on_device(num_bytes, free):
            _log.info("The graph is sampled on the CPU: edges of %d bytes, %d free on %s", num_bytes, free, device)
        else:
            put = placing(device, True)
            self._there = [DeviceRelation.put(relation, put) for relation in self._relations]
            self._on = DeviceSpaces(device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # streams of other threads read it
            _log.info("The graph is sampled on %s, from its memory", device)

    def _read_data(self, data, time_attr: str | None, weight_attr: str | None, is_sorted: bool) -> tuple:
        """Note types and times of a graph; return (whether it has several, indptr, rows, numbers, weights)."""
        several = isinstance(data, HeteroData)
        self.node_types, self.edge_types = data.metadata() if several else ([_NODE], [_EDGE])
        self.num_nodes = (
            {node_type: data[node_type].num_nodes for node_type in self.node_types} if several else data.num_nodes
        )
        self._counts = list(self.num_nodes.values()) if several else [data.num_nodes]
        for node_type, count in zip(self.node_types, self._counts, strict=True):
            if count is None:
                raise ValueError(f"{node_type}.num_nodes is not known: set it")
        self.node_time, self.edge_time = _times(data, time_attr)
        weights = {} if weight_attr is None else _collected(data, weight_attr, edges=True)
        if weight_attr is not None and not weights:
            raise ValueError(f"weight_attr={weight_attr!r} is no attribute of edges")
        if several:
            indptrs, rows, perm = to_hetero_csc(
                data, "cpu", is_sorted=is_sorted, node_time_dict=self.node_time, edge_time_dict=self.edge_time
            )
        else:
            found = to_csc(data, "cpu", is_sorted=is_sorted, src_node_time=self.node_time, edge_time=self.edge_time)
            indptrs, rows, perm = ({_EDGE: one} for one in found)
        if is_sorted:
            _check_sorted(data.edge_items() if several else [(_EDGE, data)])
        return several, indptrs, rows, perm, weights

    def _read_stores(self, features: FeatureStore, graph: GraphStore, attribute: str | None) -> tuple:
        """Read node types and edge types of PyG's stores.

        Return whether there are node types; and indptr, rows and numbers of the edges by edge type.
        """
        if attribute is not None:
            raise ValueError(f"{attribute!r}: times and weights need a Data or HeteroData, got stores")
        attrs = graph.get_all_edge_attrs()
        self.node_time = self.edge_time = None
        several = [attr.edge_type for attr in attrs] != [None]
        rows, indptrs, perm = graph.csc()
        if several:
            self.edge_types = [attr.edge_type for attr in attrs]
            self.node_types = list(
                dict.fromkeys(node_type for edge_type in self.edge_types for node_type in edge_type[::2])
            )
            self.num_nodes = {
                node_type: remote_backend_utils.num_nodes(features, graph, node_type) for node_type in self.node_types
            }
            self._counts = list(self.num_nodes.values())
            return several, indptrs, rows, perm
        self.edge_types, self.node_types, self.num_nodes = [_EDGE], [_NODE], max(attrs[0].size)
        self._counts = [self.num_nodes]
        return several, {_EDGE: indptrs}, {_EDGE: rows}, {_EDGE: perm}

    def _relation(
        self, edge_type: tuple, indptr: Tensor, row: Tensor, weights: Mapping, perm: Tensor | None
    ) -> Relation:
        """Return an edge type of its CSC, with the user's numbers, the times and the weights of its edges."""
        source, target = (self.node_types.index(edge_type[end]) for end in (0, 2))
        indices, mapped = row.numpy(), isinstance(self.data, tuple) and isinstance(self.data[1], PyGStore)
        indices = indices if mapped else indices.astype(id_dtype(self._counts[source]))
        if len(indices) and not mapped and not (indices.min() >= 0 and indices.max() < self._counts[source]):
            raise ValueError(
                f"edge_index of {edge_type} must be in [0, {self._counts[source]}), got {indices.min()} to "
                f"{indices.max()}"
            )
        weight = weights.get(edge_type)
        if weight is not None:
            if weight.dtype.kind not in "fiub":
                raise ValueError(f"weights of {edge_type} must be numbers, got {weight.dtype}")
            weight = torch.from_numpy(weight.astype(np.float64))
            if not bool(torch.isfinite(weight).all() and (weight >= 0).all()):
                raise ValueError(
                    f"weights of {edge_type} must be finite and >= 0, got {weight.min()} to {weight.max()}"
                )
            weight = (weight if perm is None else weight[perm]).numpy()
        time, by_edge = None, self.edge_time is not None
        if by_edge:
            time = self.edge_time if edge_type == _EDGE else self.edge_time.get(edge_type)
            time = None if time is None else (time if perm is None else time[perm]).numpy()
        elif self.node_time is not None:
            time = self.node_time if edge_type == _EDGE else self.node_time.get(edge_type[0])
            time = None if time is None else time.numpy()
        position = None if perm is None else perm.numpy().astype(id_dtype(len(perm)))
        return Relation(source, target, indptr.numpy(), indices, time, weight, by_edge, position=position)

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has node types and edges by name."""
        return self._node_types

    @contextmanager
    def keyed(self, key: int) -> Iterator[None]:
        """Let a uint64 decide all samples of this thread in a block."""
        self._keys.key = key
        try:
            yield
        finally:
            del self._keys.key

    def sample_from_edges(self, inputs, neg_sampling: NegativeSampling | None = None):
        """Sample around the ends of edges and of negatives; see PyG."""
        key = self._key(inputs.row.numpy())
        sampled = None if neg_sampling is None else _KeyedNegatives(neg_sampling, combine_int(key, 1))
        return super().sample_from_edges(inputs, sampled)

    def _key(self, seeds: np.ndarray) -> int:
        key = getattr(self._keys, "key", None)
        if key is None:
            hashes = combine_array(combine_array(self.seed, seeds), np.arange(len(seeds)))
            key = fold(self.seed, int(np.bitwise_xor.reduce(hashes)) if len(hashes) else 0)
        return key

    def _sample(self, seed, seed_time=None, **options: Any) -> SamplerOutput | HeteroSamplerOutput:
        """Sample from seeds, in place of the compiled routines that PyG calls here."""
        hetero = isinstance(seed, dict)
        seeds = {self.node_types.index(node_type): ids for node_type, ids in seed.items()} if hetero else {0: seed}
        seeds = [(node_type, ids.cpu().numpy()) for node_type, ids in seeds.items()]
        times = self._seed_times(seed, seed_time)
        options = SampleOptions(
            self.replace,
            return_e_id=True,
            disjoint=self.disjoint,
            latest=self.temporal_strategy == "last",
            strict=self.strictly_before,
        )
        key = self._key(np.concatenate([ids for _, ids in seeds]))
        relations = self._relations if self._on is None else self._there
        with self._workspaces() if self._on is None else self._on.lend(*self._counts) as (spaces, _):
            hops = HopSampling(relations, seeds, self._fanouts, key, spaces, options, times=times)
            for _ in range(hops.num_hops):
                hops.sample()
            sampled = hops.collect_by_type()
            if self.subgraph_type == SubgraphType.induced:
                sampled = _induced(relations, sampled, spaces)
            return self._output(sampled, hetero)

    def _seed_times(self, seed, seed_time) -> np.ndarray | None:
        """Return the times of all seeds in one array, None without times."""
        if not self.is_temporal:
            if seed_time is not None:
                raise ValueError("seeds have times, and neighbours have none: name time_attr")
            return None
        if seed_time is not None:
            times = list(seed_time.values()) if isinstance(seed_time, dict) else [seed_time]
            return np.concatenate([exact_times("times of seeds", one, "seed") for one in times]).astype(np.int64)
        if self.node_time is None:
            raise ValueError("times of edges need the times of the seeds: pass input_time (edge_label_time)")
        if not isinstance(seed, dict):
            return self.node_time[seed].numpy()
        missing = [node_type for node_type in seed if node_type not in self.node_time]
        if missing:
            raise ValueError(f"{missing[0]} nodes have no time: pass input_time (edge_label_time)")
        return torch.cat([self.node_time[node_type][ids] for node_type, ids in seed.items()]).numpy()

    @contextmanager
    def _workspaces(self) -> Iterator[tuple[list[Workspace], None]]:
        try:
            spaces = self._spaces.get_nowait()
        except Empty:
            dtypes = {relation.source: relation.indices.dtype for relation in self._relations}
            spaces = [Workspace(count, dtypes.get(at, np.int32)) for at, count in enumerate(self._counts)]
        try:
            yield spaces, None
        finally:
            self._spaces.put(spaces)

    def _output(self, sampled: SampledNeighbors, hetero: bool) -> SamplerOutput | HeteroSamplerOutput:
        directional = self.subgraph_type == SubgraphType.directional
        both = [ends.reshape(-1) for ends in sampled.edge_index]
        node, both, edge, batch = _on_host(sampled.n_id, both, sampled.e_id, sampled.seed_of or [])
        row, col = ([ends.view(2, -1)[end] for ends in both] for end in (0, 1))
        batch = None if sampled.seed_of is None else batch
        nodes, edges = (sampled.num_sampled_nodes, sampled.num_sampled_edges) if directional else (None, None)
        if not hetero:
            first = [None if part is None else part[0] for part in (batch, nodes, edges)]
            return SamplerOutput(node[0], row[0], col[0], edge[0], *first)
        by_node_type = [
            None if part is None else dict(zip(self.node_types, part, strict=True)) for part in (batch, nodes)
        ]
        return HeteroSamplerOutput(
            dict(zip(self.node_types, node, strict=True)),
            *(dict(zip(self.edge_types, part, strict=True)) for part in (row, col, edge)),
            *by_node_type,
            None if edges is None else dict(zip(self.edge_types, edges, strict=True)),
        )


def _on_host(*parts: list[np.ndarray] | list[Tensor]) -> list[list[Tensor]]:
    """Return lists of int64 arrays as tensors of the host; what is on a device crosses in one copy."""
    flat = [one for part in parts for one in part]
    if flat and isinstance(flat[0], Tensor):
        flat = torch.cat(flat).cpu().split([len(one) for one in flat])
    else:
        flat = [torch.from_numpy(one) for one in flat]
    tensors = iter(flat)
    return [[next(tensors) for _ in part] for part in parts]


def _induced(
    relations: list[Relation] | list[DeviceRelation], sampled: SampledNeighbors, spaces: list
) -> SampledNeighbors:
    """Return all edges between the nodes that were sampled, by edge type."""
    parts = []
    for relation in relations:
        space, targets = spaces[relation.source], sampled.n_id[relation.target]
        count = space.place(sampled.n_id[relation.source])
        edge_index, indptr, e_id = edges_between(relation.indptr, relation.indices, targets, space, np.empty, True)
        parts.append((edge_index, indptr, relation.named(e_id)))
        space.finish(count)
    edge_index, indptr, e_id = (list(part) for part in zip(*parts, strict=True))
    return sampled._replace(edge_index=edge_index, indptr=indptr, e_id=e_id)


class _KeyedNegatives(NegativeSampling):
    """The negatives of one batch, sampled by a key: as often as PyG asks, other ones each time."""

    def __init__(self, asked: NegativeSampling, key: int):
        super().__init__(asked.mode, asked.amount, asked.src_weight, asked.dst_weight)
        self._key, self._calls = key, 0

    def sample(self, num_samples: int, endpoint: str, num_nodes: int | None = None) -> Tensor:
        """Return (num_samples,) int64 nodes, uniform or by the weights of this end; see PyG."""
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is not None and num_nodes is not None and len(weight) != num_nodes:
            raise ValueError(f"{endpoint}_weight must have {num_nodes} entries, one a node, got {len(weight)}")
        self._calls += 1
        words = combine_array(combine_int(self._key, self._calls), np.arange(num_samples))
        share = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        if weight is None:
            return torch.from_numpy((share * num_nodes).astype(np.int64))
        sums = np.cumsum(weight.cpu().numpy().astype(np.float64))
        if not sums[-1] > 0:
            raise ValueError(f"{endpoint}_weight must be >= 0 with a sum above 0, got a sum of {sums[-1]}")
        last = np.searchsorted(sums, sums[-1])  # where share * sum is rounded up to the sum
        return torch.from_numpy(np.minimum(np.searchsorted(sums, share * sums[-1], side="right"), last))


def _check_sorted(relations) -> None:
    """Raise ValueError unless the edges of each edge type are sorted by target."""
    for edge_type, store in relations:
        targets = None if "edge_index" not in store else store.edge_index[1]
        if targets is not None and bool((targets[1:] < targets[:-1]).any()):
            raise ValueError(f"is_sorted=True needs edge_index[1] of {edge_type} ascending: pass is_sorted=False")


def _times(data, name: str | None) -> tuple[Any, Any]:
    """Return the times of nodes and of edges, by type where the graph has several; one of the two is None."""
    if name is None:
        return None, None
    of_nodes, of_edges = _collected(data, name, edges=False), _collected(data, name, edges=True)
    if bool(of_nodes) == bool(of_edges):
        found = "attribute of both nodes and edges" if of_nodes else "attribute of neither nodes nor edges"
        raise ValueError(f"time_attr={name!r} is an {found}: name one of nodes, or of edges")
    for node_type, values in (of_nodes or of_edges).items():
        if values.dtype.kind == "M":
            raise ValueError(
                f"{name} of {node_type} are dates, which no tensor holds: set it to torch.from_numpy("
                "dates.astype('datetime64[ns]').astype('int64'))"
            )
    found = {
        node_type: torch.from_numpy(exact_times(name, values).astype(np.int64, copy=False))
        for node_type, values in (of_nodes or of_edges).items()
    }
    if not isinstance(data, HeteroData):
        found = next(iter(found.values()))
    return (found, None) if of_nodes else (None, found)


def _collected(data, name: str, edges: bool) -> dict:
    """Return the values of this name as arrays, by node type or by edge type."""
    if isinstance(data, HeteroData):
        stores = data.edge_items() if edges else data.node_items()
        found = {node_type: (as_array(name, store[name]), store) for node_type, store in stores if name in store}
        for node_type, (values, store) in found.items():
            count = store.num_edges if edges else store.num_nodes
            if values.size != count:
                raise ValueError(f"{node_type}.{name} must have {count} entries, one each, got {values.shape}")
        return {node_type: values.reshape(-1) for node_type, (values, _) in found.items()}
    if name not in data or not (data.is_edge_attr(name) if edges else data.is_node_attr(name)):
        return {}
    return {_EDGE if edges else _NODE: as_array(name, data[name]).reshape(-1)}


def _fanouts(num_neighbors, edge_types: list, node_types: bool) -> list[tuple[int, ...]]:
    """Return the fan-outs of each hop by edge type.

    Raises:
        ValueError: one is below -1, or edge types have other numbers of hops.
    """
    values = num_neighbors.get_values(edge_types) if node_types else {_EDGE: num_neighbors.get_values()}
    where = {edge_type: f"num_neighbors[{edge_type}]" if node_types else "num_neighbors" for edge_type in edge_types}
    return [check_fanouts(values[edge_type], where[edge_type], least=0) for edge_type in edge_types]
