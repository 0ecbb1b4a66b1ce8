"""What each stage is predicted to hold and read: memory of a host and of a training device, and reads of evaluation.

Memory is anonymous and shared. Mapped files are not counted: the page cache gives their pages back when it is short.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import check_integer, short
from ..memory import pass_bytes, sums_bytes
from .tier_sizes import PLACE_BYTES_A_NODE


@dataclass(frozen=True)
class RunSize:
    """The graph of a run, and how many parts and processes it is for.

    Attributes:
        num_nodes, num_edges: counts of the graph; edges as stored (directed).
        num_parts: parts it is cut into.
        num_processes: training processes on one host.
        edge_row_bytes: weight and features of one edge.
    """

    num_nodes: int
    num_edges: int
    num_parts: int = 1
    num_processes: int = 1
    edge_row_bytes: int = 0


@dataclass(frozen=True)
class BatchShape:
    """How large batches and the rows of the model are.

    Attributes:
        feature_dim: columns of the features.
        feature_row_bytes: bytes of one row in a batch; None: dense float32.
        batch_size: seeds a batch; None trains each part as one batch.
        fanouts: neighbours a hop; -1 takes all.
        hidden_channels: width of the hidden layers.
        prefetch_batches: batches held at once.
        device_batches: batches on a GPU at once: the one that trains, and those that are copied ahead.
        embedding_dim: columns of learnable node embeddings, which processes of a host share with Adam's two moments.
        embedding_rows: nodes with learnable embeddings, where some node types have none; None: all.

    Raises:
        ValueError: a count, a width or a fan-out out of range.
    """

    feature_dim: int = 0
    feature_row_bytes: float | None = None
    batch_size: int | None = None
    fanouts: Sequence[int] = ()
    hidden_channels: int = 256
    prefetch_batches: int = 3
    device_batches: int = 3
    embedding_dim: int = 0
    embedding_rows: int | None = None

    def __post_init__(self):
        least = {"feature_dim": 0, "hidden_channels": 1, "prefetch_batches": 1, "device_batches": 1, "embedding_dim": 0}
        least |= {} if self.batch_size is None else {"batch_size": 1}
        least |= {} if self.embedding_rows is None else {"embedding_rows": 0}
        for name, low in least.items():
            check_integer(name, getattr(self, name), low)
        row_bytes = self.feature_row_bytes
        if row_bytes is not None and not (isinstance(row_bytes, Real) and row_bytes >= 0):
            raise ValueError(f"feature_row_bytes must be at least 0, or None, got {short(row_bytes)}")
        check_fanouts(self.fanouts)


def check_fanouts(fanouts: Any) -> None:
    """Raise ValueError unless fan-outs are integers of at least 1, or -1 for all neighbours, one a hop."""
    if not isinstance(fanouts, Sequence) or isinstance(fanouts, str):
        raise ValueError(f"fanouts must be a list like [25, 10], one a hop, got {short(fanouts)}")
    for fanout in fanouts:
        if not isinstance(fanout, Integral) or isinstance(fanout, bool) or (fanout < 1 and fanout != -1):
            raise ValueError(
                f"fanouts must be integers of at least 1, or -1 for all, got {short(fanout)} in {list(fanouts)}"
            )


# Each of these was measured: Linux, CPU wheels of torch 2.13, Python's default allocator.
INTERPRETER_BYTES = 390 << 20  # torch, lightning and torch_geometric imported
COMPILED_BYTES = 50 << 20  # numba's compiler and loops, once partitioning or storing has begun
LOOPS_BYTES = 50 << 20  # Lightning's loops and autograd, before the first batch
WORKER_BYTES = COMPILED_BYTES + LOOPS_BYTES  # a training process before its first batch, beside the interpreter
FORKED_BYTES = 60 << 20  # of the starting process's interpreter, pages that a forked one writes to
GPU_CONTEXT_BYTES = 600 << 20  # CUDA's context and libraries on a GPU
PARTITION_BYTES_A_NODE = 24  # of a partitioner without an estimate of its own
STORE_BYTES_A_NODE = 24  # ids both ways, degrees, offsets
CHUNKS_HELD = 2  # by a stream that reads ahead
STORE_BYTES_AN_EDGE = 24  # of a chunk that is sorted into buckets
STORE_CHUNK_EDGES = 1 << 22  # `WriteBudget.spill_edges`
WEIGHT_BYTES = 4  # of an edge, float32 as it is stored
GROUPED_EDGE_BYTES = 20  # edge type, time or both, position in the store and in the part, source
STORE_SORT_EDGES = 1 << 23  # `WriteBudget.sort_edges`, 16 bytes each
TRAINING_BYTES = 64 << 20  # of a process that has begun to train, whatever the graph: allocator, autograd, threads
COPIES_OF_OUTPUT = 6  # of a layer's rows: sum, root, activation, dropout, and two gradients on the way back
EVALUATION_BLOCK_BYTES = 256 << 20  # `model.inference.BLOCK_BYTES`: rows that a block's edges gather
EVALUATION_COPIES = 4  # of a block's output rows: sum, two linear maps, activation
EVALUATION_BYTES = 16 << 20  # of evaluation, whatever the graph


def predict_host_peak(
    run: RunSize,
    *,
    training_bytes: int,
    evaluation_bytes: int = 0,
    chunk_edges: int = 1 << 22,
    interpreter_bytes: int = INTERPRETER_BYTES,
    start_method: str = "popen",
    partition_bytes: int | None = None,
) -> dict[str, int]:
    """Predict the peak bytes on one host of "partition", "partition_store", "train" and "evaluate".

    Args:
        run: the graph, its parts, and the training processes on this host.
        training_bytes, evaluation_bytes: what one process takes, see `predict_training` and `predict_evaluation`; 0
            leaves evaluation out.
        chunk_edges: edges a chunk.
        interpreter_bytes: what the starting process holds before any work.
        start_method: see `processes_bytes`.
        partition_bytes: what the partitioner holds, see `partitioner.registry.partition_bytes`; None: not known.
    """
    num_nodes, num_edges, num_processes = run.num_nodes, run.num_edges, run.num_processes
    chunks = CHUNKS_HELD * min(chunk_edges, num_edges) * 8
    begun = interpreter_bytes + COMPILED_BYTES
    buckets = STORE_BYTES_AN_EDGE * min(STORE_CHUNK_EDGES, num_edges)
    sort = (32 if run.edge_row_bytes else 16) * min(STORE_SORT_EDGES, num_edges)
    workers = processes_bytes(num_processes, interpreter_bytes, start_method)
    assigning = PARTITION_BYTES_A_NODE * num_nodes if partition_bytes is None else partition_bytes
    peaks = {
        # Then part ids, and a bit for each part that reads a node.
        "partition": begun + chunks + max(assigning, (4 + math.ceil(run.num_parts / 8)) * num_nodes),
        "partition_store": begun + STORE_BYTES_A_NODE * num_nodes + max(chunks + buckets, sort),
        "train": workers + num_processes * training_bytes,
    }
    if evaluation_bytes:
        peaks["evaluate"] = workers + num_processes * evaluation_bytes
    return {stage: int(peak) for stage, peak in peaks.items()}


def processes_bytes(num_processes: int, interpreter_bytes: int, start_method: str) -> int:
    """Return what training processes of one host hold together before their first batches, bytes.

    "popen": each has its own interpreter, and the starting process is one of them. "fork": they share the interpreter
    of the starting one, which waits. "spawn", "forkserver": each has its own, and the starting one waits.
    interpreter_bytes: what the starting process holds before any work.
    """
    if start_method == "fork":
        return interpreter_bytes + COMPILED_BYTES + num_processes * (FORKED_BYTES + LOOPS_BYTES)
    return (num_processes + (start_method != "popen")) * (interpreter_bytes + WORKER_BYTES)


def predict_evaluation(run: RunSize, batches: BatchShape, free_bytes: int | None = None) -> int:
    """Predict the bytes that one process holds beyond its interpreter while it evaluates exactly, layer by layer.

    It is the widest layer's block: gathered rows, those of the targets, and the numbers of a block's sources; the
    tables between layers are files. Where free_bytes, memory for this process, does not hold the inputs of all nodes,
    `pass_bytes` of it are used; None: it does.
    """
    num_nodes, num_edges, hidden_channels = run.num_nodes, run.num_edges, batches.hidden_channels
    degree = max(1.0, num_edges / max(num_nodes, 1))
    widths = [
        batches.feature_dim + batches.embedding_dim,
        *[hidden_channels] * (max(len(batches.fanouts), 2) - 1),
    ]
    blocks = []
    for width in filter(None, widths):
        edges = min(EVALUATION_BLOCK_BYTES // (4 * width), num_edges)
        targets = min(edges / degree, num_nodes)
        sources = min(num_nodes, targets + distinct(edges, num_nodes))
        row = 4 * width
        if width == widths[0] and batches.feature_row_bytes is not None:
            row = sum(_row_bytes(batches))
        blocks.append(sources * (row + 8) + targets * 4 * (width + EVALUATION_COPIES * hidden_channels) + 20 * edges)
    if free_bytes is not None and 4 * num_nodes * widths[0] > free_bytes:
        blocks += [max(free_bytes * 2 / 3, pass_bytes(free_bytes) - 4 * num_nodes)]  # sources are not numbered then
    return int(EVALUATION_BYTES + max(blocks, default=0) + 4 * num_nodes)


def _row_bytes(batches: BatchShape) -> tuple[float, int]:
    """Return the bytes of a gathered row, and of its float32 copy in the training batch.

    `feature_row_bytes` is with the copy or without; sparse rows, of no whole width, and float32 have none.
    """
    width = batches.feature_dim
    row_bytes = 4 * width if batches.feature_row_bytes is None else batches.feature_row_bytes
    for narrow in (width, 2 * width):
        if row_bytes in (narrow, narrow + 4 * width):
            return narrow, 4 * width
    return row_bytes, 0


def distinct(samples: float, population: float) -> float:
    """Return the expected number of distinct members in uniform samples of a population."""
    return population * -math.expm1(-samples / population) if population else 0.0


def batch_hops(
    num_nodes: float, average_degree: float, batch_size: float, fanouts: Sequence[int]
) -> tuple[list[float], float]:
    """Return the nodes of a batch up to each hop, seeds first, and its edges.

    A node samples at most its neighbours; degrees are assumed to be exponentially distributed, and samples to be
    spread evenly over num_nodes, those that a batch can reach. A fan-out of -1 takes all neighbours.
    """
    nodes, new, edges = [min(batch_size, num_nodes)], min(batch_size, num_nodes), 0.0
    for fanout in fanouts:
        spread = fanout < 0 or not average_degree
        samples = new * (average_degree if spread else average_degree * -math.expm1(-fanout / average_degree))
        left = num_nodes - nodes[-1]
        new = left * -math.expm1(-samples / num_nodes) if num_nodes else 0.0
        edges += samples
        nodes.append(nodes[-1] + new)
    return nodes, edges


def part_reach(run: RunSize, part_rows: int | None) -> int:
    """Return the nodes of core and halo of a part; part_rows as of `predict_training`."""
    part_nodes = math.ceil(run.num_nodes / run.num_parts)
    return min(3 * part_nodes if part_rows is None else max(part_rows, part_nodes), run.num_nodes)


def held_parts(run: RunSize, mixed_parts: int, sampled_together: bool = False) -> int:
    """Return the parts that a process holds: its part, or those of a batch, and the next one, or the next batch's."""
    if mixed_parts:
        return min(mixed_parts + (mixed_parts if sampled_together else 1), run.num_parts)
    return min(2, math.ceil(run.num_parts / run.num_processes))


def batch_nodes(run: RunSize, shape: BatchShape, reach: int, mixed_parts: int) -> tuple[list[float], float]:
    """Return the nodes of a batch up to each hop, seeds first, and its edges; without hops those of a part.

    Args:
        reach: Nodes of a part that batches can reach.
        run, shape, mixed_parts: As of `predict_training`.
    """
    layers = max(len(shape.fanouts), 2)
    if shape.batch_size is None or not shape.fanouts:
        return [float(reach)] * (layers + 1), float(math.ceil(run.num_edges / run.num_parts))
    chunks = max(1, min(mixed_parts, run.num_parts))
    seeds, average_degree = math.ceil(shape.batch_size / chunks), run.num_edges / max(run.num_nodes, 1)
    nodes, edges = batch_hops(reach, average_degree, seeds, shape.fanouts)
    return [chunks * num for num in nodes], chunks * edges


def activation_bytes(targets: float, width: int, hidden_channels: int) -> float:
    """Predict the bytes that rows of layers take in a step: what they sum, of so many columns, and their outputs."""
    return targets * 4 * (width + COPIES_OF_OUTPUT * hidden_channels)


def predict_training(
    run: RunSize,
    shape: BatchShape,
    *,
    part_rows: int | None = None,
    mixed_parts: int = 0,
    sampled_together: bool = False,
    on_gpu: bool = False,
    to_gpu: bool = False,
    grouped_edge_types: int = 0,
    grouped_weights: bool = False,
    placed_rows: int | float | None = None,
    cache_rows: int = 0,
    stored_row_bytes: float | None = None,
) -> int:
    """Predict what one training process (or device) holds beyond its interpreter, bytes.

    The part and the next one, the batches prepared ahead, the activations of one step or the blocks of an exact
    validation, whichever are more, and the model: its parameters, gradients and Adam's two moments, the latter and a
    copy of the weights for each of its parts.

    Args:
        run: the graph, its parts, and the training processes on this host.
        shape: batches, and the rows of the model.
        part_rows: nodes of the largest part with its halo; None: three times a part's share of the nodes.
        mixed_parts: parts that each batch is made of, all trained by every process under gradient averaging, with one
            more in memory; 0: each process trains its own parts, one after the other, and keeps a model for each.
        sampled_together: whether these parts are sampled as one graph: those of the next batch are in memory too.
        on_gpu: a GPU's memory: parts and embeddings stay on the host.
        to_gpu: the host's memory, where batches go to a GPU through pinned copies.
        grouped_edge_types: edge types by which fan-outs, times or weights group a copy of each part's edges; 0: none.
        grouped_weights: Whether these edges have weights, by which they are sampled.
        placed_rows: feature rows that a placement puts into this process's buffer, a number or, as a float, a share of
            all; None: no placement.
        cache_rows: rows of its cache.
        stored_row_bytes: bytes of a placed or cached row, which is kept as it is stored; None: those of a gathered one.

    Raises:
        ValueError: a count out of range.
    """
    num_nodes, num_parts, num_processes = run.num_nodes, run.num_parts, run.num_processes
    embedding_dim, hidden_channels = shape.embedding_dim, shape.hidden_channels
    if part_rows is not None:
        check_integer("part_rows", part_rows, 0)
    if isinstance(placed_rows, float):
        placed_rows = round(placed_rows * num_nodes)
    if placed_rows is not None:
        check_integer("placed_rows", placed_rows, 0)
    check_integer("cache_rows", cache_rows, 0)
    part_edges, reach = math.ceil(run.num_edges / num_parts), part_reach(run, part_rows)
    layers = max(len(shape.fanouts), 2)
    nodes, edges = batch_nodes(run, shape, reach, mixed_parts)
    inputs = nodes[-1]
    width = shape.feature_dim + embedding_dim
    row_bytes, copy_bytes = _row_bytes(shape)
    activations = inputs * (copy_bytes + 4 * embedding_dim)
    for targets in nodes[:-1]:
        activations += activation_bytes(targets, width, hidden_channels)
        width = hidden_channels
    parameters = 4 * hidden_channels * (2 * (shape.feature_dim + embedding_dim) + 2 * hidden_channels * (layers - 1))
    model = parameters * (4 if mixed_parts else 4 + 3 * math.ceil(num_parts / num_processes))
    ahead = shape.device_batches if on_gpu else shape.prefetch_batches + (shape.device_batches if to_gpu else 0)
    batches = ahead * (inputs * (row_bytes + 24) + edges * (16 + run.edge_row_bytes))
    batches += inputs * 2 * 4 * embedding_dim  # rows of embeddings, and their gradients
    # The epoch's validation replaces a step's activations; batches stay in their pool.
    step = max(activations, predict_evaluation(run, shape))
    placed = 0.0
    if placed_rows is not None:
        stored = row_bytes if stored_row_bytes is None else stored_row_bytes
        placed = (placed_rows + cache_rows) * stored + PLACE_BYTES_A_NODE * num_nodes
    if on_gpu:
        return int(batches + step + model + placed)
    held = held_parts(run, mixed_parts, sampled_together)
    parts = held * (2 * 4 * part_edges + 24 * reach)
    if grouped_edge_types:  # edges by edge type, their positions here and in the store; row starts
        edge_bytes = GROUPED_EDGE_BYTES + (WEIGHT_BYTES if grouped_weights else 0)
        parts += held * (edge_bytes * part_edges + 8 * grouped_edge_types * reach)
    learned = num_nodes if shape.embedding_rows is None else shape.embedding_rows
    embeddings = learned * (12 * embedding_dim + 4) / num_processes if embedding_dim else 0
    return int(TRAINING_BYTES + parts + batches + step + model + embeddings + placed)


SPOOLED_EDGE_BYTES = 4  # target and source of an edge that is grouped by source
DISK_BYTES_PER_S = 1e9  # of a disk read in the order of its files


def predict_evaluation_reads(
    run: RunSize, batches: BatchShape, csc_bytes: int, feature_bytes: int, free_bytes: int | None
) -> int:
    """Predict the bytes that all processes together read to evaluate every node by broadcasting; 0: memory holds it.

    A layer's inputs are read once for each bucket of rows whose sums fit memory, edges once a layer, and once more
    where they are grouped by source. Layers are linear maps of sums, as wide as the hidden layers. Where neighbours
    lie near each other, less is read. csc_bytes, feature_bytes: on the disk. free_bytes: memory of one process; None:
    not limited.
    """
    num_nodes, hidden = run.num_nodes, batches.hidden_channels
    width = batches.feature_dim + batches.embedding_dim
    if free_bytes is None or not num_nodes or 4 * num_nodes * width <= free_bytes:
        return 0
    rows = -(-num_nodes // run.num_processes)
    num_buckets = max(1, -(-rows * (4 * hidden + 12) // sums_bytes(pass_bytes(free_bytes))))
    num_layers = max(len(batches.fanouts), 2)
    inputs = feature_bytes + (num_layers - 1) * 4 * hidden * num_nodes
    edges = csc_bytes + SPOOLED_EDGE_BYTES * run.num_edges
    return int(run.num_processes * num_buckets * inputs + num_layers * edges)
