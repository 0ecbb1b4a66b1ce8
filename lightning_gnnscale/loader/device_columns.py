"""The columns of a part's nodes and edges in the memory of the device that samples it, looked up there for a batch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..graph import MASK_NAMES
from ..partition_store.part_graph import WholeGraph, edge_values
from ..sampler.device_stream import MadeOnDevice
from ..sampler.on_device import DeviceSampler
from ..sampler.protocol import Allocate, Subgraph
from ..triton_kernels.sample_neighbors.device_graph import placing
from .batch_columns import OF_EDGES, keeps_weights, positions_of, read_column
from .staged_part import StagedPart
from .type_counts import hop_ends, type_table

_WIDE = "edge_attr"  # the one column of edges without which batches can do on the device


class DeviceColumns:
    """What batches of a part look up, as tensors: store ids, node types, columns of nodes and of edges.

    Features of edges that do not fit stay on the host, where batches read them by ids that are copied.

    Args:
        staged: The part.
        nodes, edges: Columns by name, by local id and by position in the part's CSC.
        sampler: What samples the part, on its device.
    """

    def __init__(self, staged: StagedPart, nodes: Mapping[str, np.ndarray], edges: dict, sampler: DeviceSampler):
        self._staged, graph, put = staged, staged.graph, placing(sampler.on, True)
        self._nodes = {name: put(np.asarray(values)) for name, values in nodes.items()}
        self._edges = {name: put(np.asarray(values)) for name, values in edges.items()}
        wide = staged.edges.get(_WIDE)
        if wide is not None and sampler.fits(wide[0:1].nbytes * graph.csc.num_edges):
            self._edges[_WIDE] = put(np.asarray(edge_values(graph, wide)))
        self._halo = put(np.asarray(graph.halo_nodes, np.int64)) if len(graph.halo_nodes) else None
        self._runs = None if graph.node_types is None else put(np.array(graph.node_types.starts, np.int64))

    @classmethod
    def of(cls, sampler: DeviceSampler, staged: StagedPart) -> "DeviceColumns | None":
        """Return the columns of a part; None where the device has no space for them beside its edges."""
        graph = staged.graph
        nodes = {"degree": graph.degree, "masks": staged.masks, "self_weight": graph.self_weight, **staged.nodes}
        types = () if sampler.has_edge_types else ("edge_type",)
        edges = {name: graph.columns.get(name) for name in (*types, "edge_time")} | {"edge_id": graph.edge_id}
        nodes, edges = ({name: one for name, one in each.items() if one is not None} for each in (nodes, edges))
        weight = staged.edges.get("edge_weight")
        given = (*nodes.values(), *edges.values(), graph.halo_nodes)
        needed = sum(one.nbytes for one in given)
        needed += 0 if weight is None else weight.itemsize * graph.csc.num_edges
        if not sampler.fits(needed):
            return None
        if weight is not None:
            edges["edge_weight"] = edge_values(graph, weight)
        return cls(staged, nodes, edges, sampler)

    def look_up(self, sampled: Subgraph, reads_edges: bool, take: Allocate) -> dict[str, Any]:
        """Return the ids, the types and the columns of a batch, by their names in it.

        Args:
            sampled: The batch, which stayed on the device.
            reads_edges: Whether it carries positions of its edges, or columns that are read by them.
            take: Gives the memory of what is read on the host.
        """
        staged, graph = self._staged, self._staged.graph
        of_host = [name for name in OF_EDGES if name in staged.edges and name not in self._edges]
        with sampled.stream.running():
            n_id = self._store_ids(sampled.n_id)
            types = self._of_types(n_id, sampled)
            counts = [] if graph.schema is None else [_type_table(sampled, types)]
            read = [n_id, *([sampled.e_id] if of_host else []), *counts]
            made = MadeOnDevice.begin(sampled.stream, read)
            found = types | self._of_nodes(sampled.n_id) | self._of_edges(sampled)
            e_id = sampled.e_id if reads_edges else None
            if e_id is not None and "edge_id" in self._edges:
                e_id = self._edges["edge_id"][e_id].long()
            found |= {"n_id": n_id, "e_id": e_id, "made": made.end()}
        if of_host:
            places = positions_of(graph, made.read()[1])
            found |= {name: read_column(staged.edges[name], places, take) for name in of_host}
        return found

    def _store_ids(self, local: Tensor) -> Tensor:
        graph = self._staged.graph
        if isinstance(graph, WholeGraph):
            return local
        core = local + graph.core_start
        if self._halo is None:
            return core
        return torch.where(local < graph.num_core, core, self._halo[(local - graph.num_core).clamp(min=0)])

    def _of_nodes(self, local: Tensor) -> dict[str, Tensor]:
        found = {name: values[local] for name, values in self._nodes.items()}
        masks, degree = found.pop("masks"), found["degree"]
        found["degree"] = degree.float() if degree.is_floating_point() else degree.long()
        for name, dtype in self._staged.dtypes.items():
            found[name] = found[name].to(torch.from_numpy(np.empty(0, dtype)).dtype)
        for bit, name in enumerate(MASK_NAMES):
            if name in self._staged.mask_names:
                found[f"{name}_mask"] = ((masks >> bit) & 1).bool()
        return found

    def _of_types(self, n_id: Tensor, sampled: Subgraph) -> dict[str, Any]:
        graph = self._staged.graph
        data = {"schema": graph.schema}
        if "edge_type" in graph.columns and sampled.edge_type is not None:
            data["edge_type"] = sampled.edge_type
        data |= {
            name: self._edges[name][sampled.e_id].long() for name in ("edge_type", "edge_time")
            if name not in data and name in self._edges
        }  # fmt: skip
        if self._runs is not None:
            run = torch.bucketize(n_id, self._runs, right=True) - 1
            data["node_type"] = run % graph.node_types.num_node_types
        return data

    def _of_edges(self, sampled: Subgraph) -> dict[str, Any]:
        """Return features and weights of edges, as `batch_columns.edge_data` does."""
        data: dict[str, Any] = {"averaging_weights": sampled.averaging_weights}
        if _WIDE in self._edges:
            data[_WIDE] = self._edges[_WIDE][sampled.e_id]
        if "edge_weight" not in self._edges or keeps_weights(sampled):
            return data if sampled.edge_weight is None else data | {"edge_weight": sampled.edge_weight}
        weight = self._edges["edge_weight"][sampled.e_id].float()
        if sampled.row_scale is not None:
            num_edges, of_row = len(weight), sampled.indptr.diff()
            weight = weight * torch.repeat_interleave(sampled.row_scale, of_row, output_size=num_edges)
        if sampled.edge_weight is not None:
            weight = weight * sampled.edge_weight
        return data | {"edge_weight": weight, "averaging_weights": False}


def _type_table(sampled: Subgraph, types: Mapping[str, Any]) -> Tensor:
    num_edges, hops = sampled.edge_index.shape[1], (sampled.num_sampled_nodes, sampled.num_sampled_edges)
    ends = hop_ends(len(sampled.n_id), num_edges, *hops)
    given = types["schema"], types.get("node_type"), types.get("edge_type")
    return type_table(*given, sampled.edge_index, ends).flatten()


def columns_there(sampler: DeviceSampler, staged: StagedPart) -> DeviceColumns | None:
    """Return the columns of a part on the device of its sampler, put there once; None: they have no space."""
    return staged.on_device(partial(DeviceColumns.of, sampler))
