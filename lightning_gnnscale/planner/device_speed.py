"""Bytes and seconds of a batch by stage on a named card: bounds by its links and its memory, not measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import short
from ..memory import format_bytes, format_seconds
from .host_memory import BatchShape


@dataclass(frozen=True)
class Card:
    """What bounds a card, from its maker's data sheet.

    Attributes:
        memory_gib: Bytes of its memory, in GiB.
        memory_gb_per_s: Its memory, read and written together.
        link_gb_per_s: The link to the host, one way.
        tflops: Products of float32 matrices as TF32 on tensor cores, without sparsity, 10^12 operations a second.
    """

    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    tflops: float


CARDS = {
    "h200": Card(131.0, 4800.0, 64.0, 495.0),
    "h100": Card(74.0, 3350.0, 64.0, 495.0),
    "a100": Card(74.0, 2039.0, 32.0, 156.0),
    "l40s": Card(44.0, 864.0, 32.0, 183.0),
    "l4": Card(22.0, 300.0, 32.0, 60.0),
    "rtx4090": Card(22.0, 1008.0, 32.0, 83.0),
}
# Of the host, by core and as a whole; measured on two cores of an AMD EPYC, see docs, What was measured.
SAMPLED_EDGES_PER_S = 10e6  # a core
HOST_COPY_GB_PER_S = 5.0  # rows in random order, a core
DISK_GB_PER_S = 1.1
ID_BYTES = 8
# Of sampling on a card: each edge reads its source, and looks up, writes and reads its number; of each target the ends
# of its row. Such reads lie apart, and each moves a sector.
SECTOR_BYTES = 32
SECTORS_AN_EDGE, SECTORS_A_TARGET = 5, 2
ANSWER_S = 10e-6  # until the host has read the sizes of a hop
TIERS = ("device", "pinned", "host", "disk")


@dataclass(frozen=True)
class StageBound:
    """What one stage of a batch moves, and takes at least.

    Attributes:
        stage: Its name.
        num_bytes: Bytes that it moves; of "compute", those that layers read and write.
        seconds: Bound by what it uses.
    """

    stage: str
    num_bytes: int
    seconds: float


def card_of(name: str) -> Card:
    """Return a card by its name, or raise ValueError."""
    if not isinstance(name, str) or name.lower() not in CARDS:
        raise ValueError(f"planner.device must be one of {', '.join(CARDS)}, got {short(name)}")
    return CARDS[name.lower()]


def batch_counts(num_nodes: int, num_edges: int, shape: BatchShape) -> tuple[list[int], list[int]]:
    """Return the nodes that each hop adds, seeds first, and the edges of each hop, as if no node were found twice.

    Each is at most the graph's; of all neighbours (-1) a node has the mean number.
    """
    mean = math.ceil(num_edges / num_nodes) if num_nodes else 0
    nodes, edges = [min(shape.batch_size or num_nodes, num_nodes)], []
    for fanout in shape.fanouts:
        edges.append(min(num_edges, nodes[-1] * (mean if fanout < 0 else fanout)))
        nodes.append(max(0, min(num_nodes - sum(nodes), edges[-1])))
    return nodes, edges


def stage_bounds(
    num_nodes: int,
    num_edges: int,
    shape: BatchShape,
    device: str,
    tier: str = "pinned",
    num_cores: int = 1,
    sampled_there: bool = False,
) -> list[StageBound]:
    """Return the bound of each stage of one batch; stages overlap, so that the longest one bounds a step.

    Args:
        num_nodes, num_edges: Counts of the graph.
        shape: Sizes of a batch.
        device: A name of CARDS.
        tier: Where feature rows are: "device"; "pinned", host memory that the card reads in place; "host", gathered
            there by its cores; "disk".
        num_cores: Cores of the host that sample and gather.
        sampled_there: Whether the card samples: ids do not cross to it, and come to the host instead.

    Raises:
        ValueError: an unknown card or tier.
    """
    card = card_of(device)
    if tier not in TIERS:
        raise ValueError(f"planner.rows_on must be one of {', '.join(TIERS)}, got {short(tier)}")
    nodes, edges = batch_counts(num_nodes, num_edges, shape)
    row = 4.0 * shape.feature_dim if shape.feature_row_bytes is None else float(shape.feature_row_bytes)
    rows, ids = math.ceil(sum(nodes) * row), ID_BYTES * (2 * sum(nodes) + 2 * sum(edges))
    on_host = tier in ("host", "disk")
    crossing, read = rows * on_host + (0 if sampled_there else ids), rows * on_host
    back = ID_BYTES * sum(nodes) if sampled_there else 0  # beside it: the link carries both ways at once
    host = DISK_GB_PER_S if tier == "disk" else HOST_COPY_GB_PER_S * num_cores
    link = {"device": card.memory_gb_per_s / 2, "pinned": card.link_gb_per_s}
    moved, operations = _layers(nodes, edges, shape)
    compute = max(moved / card.memory_gb_per_s / 1e9, operations / card.tflops / 1e12)
    return [
        _sample_bound(nodes, edges, card if sampled_there else None, num_cores),
        StageBound("read", read, read / host / 1e9),
        StageBound("cross", crossing + back, max(crossing, back) / card.link_gb_per_s / 1e9),
        StageBound("gather", rows * (not on_host), rows / link[tier] / 1e9 if tier in link else 0.0),
        StageBound("compute", moved, compute),
    ]


def _sample_bound(nodes: list[int], edges: list[int], card: Card | None, num_cores: int) -> StageBound:
    """Return the bound of sampling, by a card or by cores of the host."""
    if card is None:
        return StageBound("sample", ID_BYTES * sum(edges), sum(edges) / (SAMPLED_EDGES_PER_S * num_cores))
    moved = SECTOR_BYTES * (SECTORS_AN_EDGE * sum(edges) + SECTORS_A_TARGET * sum(nodes[:-1]))
    return StageBound("sample", moved, moved / card.memory_gb_per_s / 1e9 + ANSWER_S * len(edges))


def _layers(nodes: list[int], edges: list[int], shape: BatchShape) -> tuple[int, int]:
    """Return the bytes and operations of GraphSAGE's layers, forward and twice that backward."""
    moved = operations = 0
    width = shape.feature_dim
    for layer in range(len(edges)):
        hops = len(edges) - layer
        targets, read = sum(nodes[:hops]), sum(edges[:hops])
        moved += 4 * width * (read + targets) + 4 * shape.hidden_channels * targets
        operations += 2 * targets * 2 * width * shape.hidden_channels
        width = shape.hidden_channels
    return 3 * moved, 3 * operations


def speed_terms(bounds: Sequence[StageBound], num_batches: int) -> list[tuple[str, str]]:
    """Return (term, value) pairs of bounds, for `Plan.explain`; num_batches: of a pass over all nodes."""
    rows = [
        (f"{one.stage}, a batch", f"{format_bytes(one.num_bytes)}, at least {1e3 * one.seconds:.3f} ms")
        for one in bounds
    ]
    longest = max(bounds, key=lambda one: one.seconds)
    rows += [("a batch is bound by", f"{longest.stage}, {1e3 * longest.seconds:.3f} ms")]
    seconds = format_seconds(num_batches * longest.seconds)
    return [*rows, ("a pass over all nodes, at least", f"{seconds}, {num_batches:,} batches")]
