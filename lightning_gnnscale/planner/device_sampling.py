"""What sampling on a GPU takes of its memory, and whether `sampler.device=auto` chooses it."""

import math
from dataclasses import dataclass, replace

from ..errors import short
from ..graph import id_dtype
from ..memory import format_bytes
from .host_memory import BatchShape, RunSize, batch_nodes, held_parts, part_reach

DEVICES = ("auto", "cpu", "cuda")  # of a sampler
SHARE = 0.5  # of a GPU's free memory that a part's edges may take, as the sampler has it
COLUMN_BYTES_A_NODE = 24  # degree, label, masks, the store id of a halo node
LABEL_BYTES_A_NODE = 4  # of a workspace, to number nodes
SAMPLE_BYTES_A_NODE = 24  # id, degree, label
SAMPLE_BYTES_AN_EDGE = 16  # both ends
WEIGHTED_BYTES_AN_EDGE = 20  # weight, running sum, count of those above 0
GROUPED_BYTES_AN_EDGE = 13  # edge type, time, position


@dataclass(frozen=True)
class SamplingSize:
    """Sampling on one device.

    Attributes:
        there: Whether it samples.
        graph_bytes: Edges and columns of the parts that are held, or that would be.
        sample_bytes: Sampled batches in flight before their features, and the workspaces of the threads that sample.
        num_parts: Parts that are held at a time.
        free_bytes: Memory of the device that is compared; None: unlimited.
        why: Why the CPU samples; empty: it does not.
    """

    there: bool
    graph_bytes: int
    sample_bytes: int
    num_parts: int
    free_bytes: int | None
    why: str = ""

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that sampling takes."""
        return self.graph_bytes + self.sample_bytes if self.there else 0

    def terms(self) -> list[tuple[str, str]]:
        """Return the (term, value) pairs of the decision, for `Plan.explain`."""
        if not self.there:
            return [("neighbours are sampled", f"on the CPU: {self.why}")]
        held = f"edges and columns of {self.num_parts} part" + "s" * (self.num_parts > 1)
        return [
            ("neighbours are sampled", "on the GPU"),
            (f"on it, {held}", format_bytes(self.graph_bytes)),
            ("on it, samples in flight", format_bytes(self.sample_bytes)),
        ]


def size_sampling(
    run: RunSize,
    shape: BatchShape,
    free_bytes: int | None,
    sampled_on: str = "auto",
    *,
    samples_whole: bool = False,
    part_rows: int | None = None,
    mixed_parts: int = 0,
    sampled_together: bool = False,
    grouped_edge_types: int = 0,
    grouped_weights: bool = False,
) -> SamplingSize:
    """Predict what sampling takes of a GPU, and where it is.

    Args:
        run, shape, part_rows, mixed_parts, sampled_together, grouped_edge_types, grouped_weights: As of
            `predict_training`.
        free_bytes: Memory of a GPU before training; None: unlimited.
        sampled_on: The sampler's `device`, "auto", "cpu" or "cuda".
        samples_whole: Whether batches sample the whole graph, not parts.

    Raises:
        ValueError: another `sampled_on`.
    """
    if sampled_on not in DEVICES:
        raise ValueError(f"planner.sampled_on must be one of {', '.join(DEVICES)}, got {short(sampled_on)}")
    whole = replace(run, num_parts=1) if samples_whole else run
    rows, parts = (
        part_reach(whole, None if samples_whole else part_rows),
        held_parts(whole, mixed_parts, sampled_together),
    )
    edges, id_bytes = math.ceil(whole.num_edges / whole.num_parts), id_dtype(rows).itemsize
    of_edge = id_bytes + (8 + run.edge_row_bytes if run.edge_row_bytes else 0)
    of_edge += GROUPED_BYTES_AN_EDGE * bool(grouped_edge_types) + WEIGHTED_BYTES_AN_EDGE * grouped_weights
    part = int(8 * (rows + 1) * max(1, grouped_edge_types) + edges * of_edge)
    columns = COLUMN_BYTES_A_NODE * rows
    nodes, sampled = batch_nodes(whole, shape, rows, mixed_parts)
    ahead = shape.prefetch_batches
    samples = ahead * (nodes[-1] * SAMPLE_BYTES_A_NODE + sampled * SAMPLE_BYTES_AN_EDGE + LABEL_BYTES_A_NODE * rows)
    # The last part is loaded beside the others, and takes its share of what they leave.
    space = math.inf if free_bytes is None else SHARE * max(0, free_bytes - (parts - 1) * part)
    why = ""
    if sampled_on == "cpu":
        why = "sampler.device=cpu, or its source or sampler does not sample on a GPU"
    elif sampled_on == "auto" and part > space:
        why = f"edges of a part, {format_bytes(part)}, are more than {SHARE:g} of what is free, {format_bytes(space)}"
    return SamplingSize(not why, int(parts * (part + columns)), int(samples), parts, free_bytes, why)
