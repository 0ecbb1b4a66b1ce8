"""PyG's loop on the same card: its `NeighborLoader` and its layers, for `gnnscale bench gpu`."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .gpu_graph import NUM_EDGE_TYPES
from .gpu_training import HEADS, Training, training_step
from .graphs import NUM_CLASSES


def missing_sampler() -> str:
    """Return why PyG cannot sample here; "": it can."""
    from torch_geometric import typing

    if typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE:
        return ""
    return "PyG's NeighborLoader needs pyg-lib or torch-sparse, and neither is installed"


def sampler_name() -> str:
    """Return the compiled sampler that PyG uses."""
    from torch_geometric import typing

    return "pyg-lib" if typing.WITH_PYG_LIB else "torch-sparse"


def pyg_epoch(training: Training, name: str, tier: str) -> dict:
    """Train a model of PyG's layers by PyG's loop.

    Args:
        training: The graph, and how batches are made.
        name: "GraphSAGE", "GAT" or "R-GCN".
        tier: "device": features in the device's memory, indexed by `n_id`; "pinned": its workers gather them on the
            host, and its thread pins them, as its examples do.
    """
    resident = torch.from_numpy(training.graph.features).to(training.device) if tier == "device" else None
    loader = _loader(training, name, resident is None)
    step = training_step(PyGModel(training, name).to(training.device), lambda batch: _there(batch, training, resident))
    found = training.timed(_endless(loader), step, training.graph.features.shape[1] * 4)
    return found | {"note": sampler_name()}


def _loader(training: Training, name: str, with_features: bool) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    graph = training.graph
    sources = torch.from_numpy(graph.csc.indices).long()
    targets = torch.from_numpy(np.repeat(np.arange(graph.num_nodes), graph.csc.in_degree))
    data = Data(edge_index=torch.stack([sources, targets]), y=torch.from_numpy(graph.labels), num_nodes=graph.num_nodes)
    if with_features:
        data.x = torch.from_numpy(graph.features)
    if name == "R-GCN":
        data.edge_type = torch.from_numpy(graph.edge_type)
    workers = training.num_threads
    return NeighborLoader(
        data, list(training.fanouts), torch.from_numpy(graph.seeds), batch_size=training.batch_size, shuffle=True,
        is_sorted=True, num_workers=workers, persistent_workers=workers > 0,
        pin_memory=training.device.type == "cuda",
    )  # fmt: skip


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _there(batch: Any, training: Training, resident: Tensor | None) -> Any:
    batch = batch.to(training.device, non_blocking=True)
    if resident is not None:
        batch.x = resident[batch.n_id]
    return batch


class PyGModel(nn.Module):
    """Layers of PyG with the sizes of `Training.model`; a layer computes what later ones read where hops are known."""

    def __init__(self, training: Training, name: str):
        from torch_geometric import nn as pyg

        super().__init__()
        torch.manual_seed(0)
        hidden, layers = training.hidden_channels, len(training.fanouts)
        widths = [training.graph.features.shape[1], *[hidden] * (layers - 1), NUM_CLASSES]
        make = {
            "GraphSAGE": lambda i: pyg.SAGEConv(widths[i], widths[i + 1]),
            "GAT": lambda i: _gat(pyg, widths, i),
            "R-GCN": lambda i: pyg.RGCNConv(widths[i], widths[i + 1], NUM_EDGE_TYPES),
        }[name]
        self.layers, self.typed = nn.ModuleList(make(i) for i in range(layers)), name == "R-GCN"

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.utils import trim_to_layer

        x, edges, edge_type = batch.x, batch.edge_index, batch.edge_type.long() if self.typed else None
        nodes = counts = None
        with suppress(AttributeError, KeyError):  # pyg-lib alone counts the hops
            nodes, counts = batch.num_sampled_nodes, batch.num_sampled_edges
        for number, layer in enumerate(self.layers):
            if nodes is not None:
                x, edges, edge_type = trim_to_layer(number, nodes, counts, x, edges, edge_type)
            x = layer(x, edges, edge_type) if self.typed else layer(x, edges)
            if number < len(self.layers) - 1:
                x = nn.functional.dropout(x.relu(), 0.5, self.training)
        return x


def _gat(pyg: Any, widths: list[int], number: int) -> nn.Module:
    last = number == len(widths) - 2
    width = widths[number + 1] if last else widths[number + 1] // HEADS
    return pyg.GATConv(widths[number], width, heads=HEADS, concat=not last, dropout=0.5)
