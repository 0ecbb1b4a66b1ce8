"""What each stage is predicted to hold: anonymous and shared memory on one host, and on one training device."""

import math
from collections.abc import Sequence
from numbers import Real

from .checks import check_fanouts, check_integer

# Measured: torch, lightning and torch_geometric imported, one CPU process, Linux; a user's own may differ.
INTERPRETER_BYTES = 350 << 20
WORKER_BYTES = 450 << 20  # the same once it trains: compiled loops, autograd, Lightning's loops
SPRING_BYTES_A_NODE = 24
STORE_BYTES_A_NODE = 24
CHUNKS_HELD = 2
TRAINING_BYTES = 64 << 20  # of a process that has begun to train, whatever the graph: pools, compiled loops
STORE_BUFFER_BYTES = 256 << 20


def predict_host_peak(
    *,
    num_nodes: int,
    num_edges: int,
    num_parts: int,
    num_processes: int,
    training_bytes: int,
    chunk_edges: int = 1 << 22,
    interpreter_bytes: int = INTERPRETER_BYTES,
) -> dict[str, int]:
    """Predict the peak memory of partitioning, storing and training on one host.

    Args:
        num_nodes, num_edges: of the graph; edges as stored (arcs).
        num_parts: parts it is cut into.
        num_processes: training processes on this host.
        training_bytes: of one process, see `predict_training`.
        chunk_edges: edges a chunk.
        interpreter_bytes: what the starting process holds before any work.

    Returns:
        {"partition": bytes, "partition_store": bytes, "train": bytes}.
    """
    chunk_bytes = CHUNKS_HELD * chunk_edges * 8
    store_part = min(STORE_BUFFER_BYTES * 2, 48 * math.ceil(num_edges / num_parts))
    return {
        "partition": int(interpreter_bytes + SPRING_BYTES_A_NODE * num_nodes + min(chunk_bytes, 16 * num_edges)),
        "partition_store": int(
            interpreter_bytes + STORE_BYTES_A_NODE * num_nodes + min(3 * chunk_bytes, 48 * num_edges) + store_part
        ),
        "train": int(interpreter_bytes + num_processes * (WORKER_BYTES + training_bytes)),
    }


def predict_training(
    *,
    num_nodes: int,
    num_edges: int,
    num_parts: int,
    num_processes: int,
    feature_dim: int = 0,
    feature_row_bytes: float | None = None,
    edge_row_bytes: int = 0,
    batch_size: int | None = None,
    fanouts: Sequence[int] = (),
    hidden_channels: int = 256,
    prefetch_batches: int = 3,
    embedding_dim: int = 0,
    part_rows: int | None = None,
) -> int:
    """Predict what one training process (or device) holds beyond its interpreter, bytes.

    The part and the next one, the batches prepared ahead, the activations of one step, and the model: its
    parameters, gradients and Adam's two moments, the latter and a copy of the weights for each of its parts.

    Args:
        num_nodes, num_edges, num_parts, num_processes: see `predict_host_peak`.
        feature_dim: columns of the features.
        feature_row_bytes: of one row in a batch; None: dense float32.
        edge_row_bytes: weight and features of one edge, which batches take with them.
        batch_size: seeds a batch; None trains each part as one batch.
        fanouts: neighbours a hop; -1 takes all.
        hidden_channels: width of the hidden layers.
        prefetch_batches: batches held at once.
        embedding_dim: columns of learnable node embeddings, which processes of a host share with Adam's two moments.
        part_rows: nodes of the largest part with its halo; None: three times a part's share of the nodes.

    Raises:
        ValueError: a count, a width or a fan-out out of range.
    """
    _check_shape(
        feature_dim, feature_row_bytes, batch_size, fanouts, hidden_channels, prefetch_batches, embedding_dim, part_rows
    )
    part_nodes = math.ceil(num_nodes / num_parts)
    part_arcs = math.ceil(num_edges / num_parts)
    average_degree = num_edges / max(num_nodes, 1)
    reach = min(3 * part_nodes if part_rows is None else part_rows, num_nodes)  # core and halo
    inputs = float(reach)
    arcs = part_arcs
    if batch_size is not None and fanouts:
        rows = sampled = float(batch_size)
        for fanout in fanouts:
            sampled *= average_degree if fanout < 0 else min(fanout, average_degree)
            rows += sampled
        inputs = min(rows, inputs)
        arcs = min(rows - batch_size, num_edges)
    row_bytes = 4 * feature_dim if feature_row_bytes is None else feature_row_bytes
    layers = max(len(fanouts), 2)
    # Each layer keeps its aggregated input, its output, and the gradients of both.
    activations = 4 * layers * inputs * hidden_channels * 4
    parameters = 4 * hidden_channels * (2 * (feature_dim + embedding_dim) + 2 * hidden_channels * (layers - 1))
    model = parameters * (4 + 3 * math.ceil(num_parts / num_processes))
    parts = 2 * (8 * part_arcs + 24 * reach)
    embeddings = num_nodes * (12 * embedding_dim + 4) / num_processes if embedding_dim else 0
    batches = prefetch_batches * (inputs * (row_bytes + 24) + arcs * (16 + edge_row_bytes))
    batches += inputs * 2 * 4 * embedding_dim  # rows of embeddings, and their gradients
    return int(TRAINING_BYTES + parts + batches + activations + model + embeddings)


def _check_shape(
    feature_dim, feature_row_bytes, batch_size, fanouts, hidden_channels, prefetch_batches, embedding_dim, part_rows
) -> None:
    check_integer("feature_dim", feature_dim, 0)
    check_integer("hidden_channels", hidden_channels, 1)
    check_integer("prefetch_batches", prefetch_batches, 1)
    check_integer("embedding_dim", embedding_dim, 0)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    if part_rows is not None:
        check_integer("part_rows", part_rows, 0)
    if feature_row_bytes is not None and not (isinstance(feature_row_bytes, Real) and feature_row_bytes >= 0):
        raise ValueError(f"feature_row_bytes must be at least 0, or None, got {feature_row_bytes!r}")
    check_fanouts(fanouts)
