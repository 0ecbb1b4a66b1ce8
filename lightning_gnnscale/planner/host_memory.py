"""What each stage is predicted to hold: anonymous and shared memory on one host, bytes."""

import math
from collections.abc import Sequence

# Measured: torch, lightning and torch_geometric imported, one CPU process, Linux; a user's own may differ.
INTERPRETER_BYTES = 350 << 20
WORKER_BYTES = 450 << 20  # the same once it trains: compiled loops, autograd, Lightning's loops
SPRING_BYTES_A_NODE = 24
STORE_BYTES_A_NODE = 24
CHUNKS_HELD = 2
STORE_BUFFER_BYTES = 256 << 20


def predict_host_peak(
    *,
    num_nodes: int,
    num_edges: int,
    num_parts: int,
    num_processes: int,
    feature_dim: int = 0,
    chunk_edges: int = 1 << 22,
    batch_size: int | None = None,
    fanouts: Sequence[int] = (),
    hidden_channels: int = 256,
    prefetch_batches: int = 3,
    model_bytes: int = 0,
    interpreter_bytes: int = INTERPRETER_BYTES,
) -> dict[str, int]:
    """Predict the peak memory of partitioning, storing and training on one host.

    Args:
        num_nodes, num_edges: of the graph; edges as stored (arcs).
        num_parts: parts it is cut into.
        num_processes: training processes on this host.
        feature_dim: columns of the features as a batch holds them (dense float32).
        chunk_edges: edges a chunk.
        batch_size: seeds a batch; None trains each part as one batch.
        fanouts: neighbours a hop; -1 takes all.
        hidden_channels: width of the hidden layers.
        prefetch_batches: batches held at once by a process.
        model_bytes: parameters, their gradients and optimizer state of one part.
        interpreter_bytes: what the starting process holds before any work.

    Returns:
        {"partition": bytes, "partition_store": bytes, "train": bytes}.
    """
    chunk_bytes = CHUNKS_HELD * chunk_edges * 16
    part_nodes = math.ceil(num_nodes / num_parts)
    part_arcs = math.ceil(num_edges / num_parts)
    average_degree = num_edges / max(num_nodes, 1)
    inputs = part_nodes
    activation_layers = max(len(fanouts), 2)
    if batch_size is not None:
        rows = sampled = float(batch_size)
        for fanout in fanouts:
            sampled *= average_degree if fanout < 0 else min(fanout, average_degree)
            rows += sampled
        inputs = min(rows, 2.0 * part_nodes)
    batch_bytes = inputs * feature_dim * 4
    # Each layer keeps its output, its gradient and the aggregated input.
    activation_bytes = 3 * activation_layers * inputs * hidden_channels * 4
    part_bytes = 2 * (part_arcs * 4 + part_nodes * 24)  # this part and the next, staged by a thread
    training = (
        part_bytes
        + prefetch_batches * batch_bytes
        + activation_bytes
        + model_bytes * (math.ceil(num_parts / num_processes) + 2)
    )
    store_part = min(STORE_BUFFER_BYTES * 2, 48 * part_arcs)
    return {
        "partition": int(interpreter_bytes + SPRING_BYTES_A_NODE * num_nodes + chunk_bytes),
        "partition_store": int(interpreter_bytes + STORE_BYTES_A_NODE * num_nodes + 3 * chunk_bytes + store_part),
        "train": int(interpreter_bytes + num_processes * (WORKER_BYTES + training)),
    }
