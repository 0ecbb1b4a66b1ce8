"""What exact evaluation of all nodes reads from the disk where memory does not hold the graph."""

from .sizes import BatchShape, RunSize

SUMS_SHARE = 2 / 3 * 13 / 16  # of free memory, for the sums of a bucket: `model.layer_plan.plan_buckets`
SPOOLED_EDGE_BYTES = 6  # target and source of an edge that is grouped by source
DISK_BYTES_PER_S = 1e9  # of a disk read in the order of its files


def predict_evaluation_reads(
    run: RunSize, batches: BatchShape, csc_bytes: int, feature_bytes: int, free_bytes: int | None
) -> int:
    """Predict the bytes that all processes together read to evaluate every node by broadcasting; 0: memory holds it.

    A layer's inputs are read once for each bucket of rows whose sums fit memory, edges once a layer, and once more
    where they are grouped by source. Layers are linear maps of sums, as wide as the hidden layers. Where neighbours
    lie near each other, less is read.

    Args:
        run: the graph, and how many processes there are.
        batches: widths, and fan-outs, one a layer.
        csc_bytes, feature_bytes: Bytes of the graph and the features on the disk.
        free_bytes: memory of one process; None: not limited.
    """
    num_nodes, hidden = run.num_nodes, batches.hidden_channels
    width = batches.feature_dim + batches.embedding_dim
    if free_bytes is None or not num_nodes or 4 * num_nodes * width <= free_bytes:
        return 0
    rows = -(-num_nodes // run.num_processes)
    num_buckets = max(1, -(-rows * (4 * hidden + 12) // max(1, int(free_bytes * SUMS_SHARE))))
    num_layers = max(len(batches.fanouts), 2)
    inputs = feature_bytes + (num_layers - 1) * 4 * hidden * num_nodes
    edges = csc_bytes + SPOOLED_EDGE_BYTES * run.num_edges
    return int(run.num_processes * num_buckets * inputs + num_layers * edges)
