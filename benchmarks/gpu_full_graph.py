"""Steps on the full graph for `gnnscale bench gpu`: the model's, and what an exchange writes and reads in one."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lightning_gnnscale.datamodule.full_graph_batch import FullGraphBatch
from lightning_gnnscale.model import GCN, NodeClassifier
from lightning_gnnscale.strategy.exchange.message import RAW, QuantisedRows, pack_all, unpack_all

from .gpu_copies import median_s
from .gpu_graph import GPUGraph
from .graphs import NUM_CLASSES


def full_graph_step(graph: GPUGraph, hidden_channels: int, num_layers: int, device: torch.device) -> dict:
    """Train a GCN on the whole graph, on one device: forward, backward and Adam."""
    batch = _batch(graph).to(device)
    torch.manual_seed(0)
    module = NodeClassifier(GCN(graph.features.shape[1], hidden_channels, NUM_CLASSES, num_layers)).to(device)
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(module(batch), batch.y).backward()
        optimizer.step()

    return {"ms": 1e3 * median_s(step, device, 2.0), "bytes": 8 * graph.csc.num_edges}


def exchange_step(num_rows: int, width: int, bits: int | None, device: torch.device) -> dict:
    """Write the rows that another process reads and read as many, as a layer of a step does; no link between.

    Args:
        num_rows, width: Rows of the boundary, and their columns.
        bits: Bits a value; None: float32 as it is.
        device: The device.
    """
    codec = RAW if bits is None else QuantisedRows(bits)
    rows = torch.rand((4 * num_rows, width), device=device)
    boundary = torch.randperm(4 * num_rows, device=device)[:num_rows].sort().values
    leaving = (boundary.new_empty(0), torch.arange(num_rows, device=device))
    row_bytes = codec.row_bytes(width, rows.dtype)

    def write_and_read() -> Any:
        codes = codec.encode(rows.index_select(0, boundary), 0, boundary)
        packed = pack_all(codes, leaving)
        arrived = unpack_all(packed.payload, packed.sizes, (0, num_rows), row_bytes)
        return codec.decode(arrived.rows, width, rows.dtype)

    seconds, num_bytes = median_s(write_and_read, device, 0.5), num_rows * width * 4
    return {"ms": 1e3 * seconds, "gb_per_s": num_bytes / seconds / 1e9, "bytes": num_rows * row_bytes}


def _batch(graph: GPUGraph) -> FullGraphBatch:
    num, degree = graph.num_nodes, np.diff(graph.csc.indptr)
    return FullGraphBatch(
        n_id=torch.arange(num),
        indptr=torch.from_numpy(graph.csc.indptr),
        indices=torch.from_numpy(graph.csc.indices),
        degree=torch.from_numpy(degree),
        batch_size=num,
        part=0,
        key=0,
        epoch=0,
        num_nodes_global=num,
        loss_count=num,
        loss_nodes=num,
        x_dense=torch.from_numpy(graph.features),
        y=torch.from_numpy(graph.labels),
    )
