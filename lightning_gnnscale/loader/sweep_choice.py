"""Whether a loader's rows are swept: where that is predicted to read fewer bytes than part by part."""

from dataclasses import replace

from ..memory import format_bytes
from ..partition_store.features import Column
from ..planner.sweep_plan import (
    LABEL_BYTES,
    WORTH,
    EpochUse,
    SweepPlan,
    held_beside,
    plan_sweep,
    rows_space,
    window_bytes,
)
from .row_reads import POOLED_BATCHES, Footprint, RowReads
from .row_sweep import swept_table
from .sweep_trial import SweepTrial

_SPARE = 1.1  # of the memory of batches that wait in a trial


def choose_swept(
    reads: RowReads,
    features: Column,
    first: Footprint,
    trial: SweepTrial,
    *,
    free_bytes: int,
    part_bytes: int,
    two_parts_bytes: int,
    open_share: float,
    num_processes: int = 1,
    step_bytes: int = 0,
) -> RowReads:
    """Return how a loader's batches get their rows: as chosen without a sweep, or swept where that reads fewer bytes.

    Args:
        reads: As `choose_row_reads` chose.
        features, first, free_bytes, step_bytes: As of `choose_row_reads`.
        trial: Tries what a sweep reads.
        part_bytes, two_parts_bytes: Bytes of the parts that are in memory at a time, and where they are sampled one
            after the other.
        open_share: The share of an epoch's batches that lie in the visits that take turns; 0: none do.
        num_processes: Of the machine, which would share a sweep, each with as much free memory and such batches.
    """
    if reads.how == "mapped":
        return reads
    use = trial.use
    told = replace(reads, predicted_bytes=int(_predicted(reads, features, first, use)))
    if swept_table(features) is None:
        return told
    batch_bytes = first.rows * features.dim * features.dtype.itemsize + first.sampled_bytes
    other = 3 * batch_bytes + first.rows * (features.batch_row_bytes - features.dim * features.dtype.itemsize)
    # Part after part, whole visits wait; in turns, all parts are in memory.
    waiting = open_share * use.waiting_bytes if open_share else 0.0
    by_part = open_share > 0 and waiting <= part_bytes - two_parts_bytes
    space = rows_space(free_bytes, step_bytes) - other - (two_parts_bytes if by_part else part_bytes)
    space = num_processes * (space - (waiting if by_part else 0.0)) - (num_processes - 1) * LABEL_BYTES * use.num_rows
    plan = tried(trial.together(num_processes), space)
    if plan.read_bytes > WORTH * num_processes * told.predicted_bytes:
        return told
    whose = f" by {num_processes} processes together" if num_processes > 1 else ""
    why = (
        f"the rows that are read{whose} for batches in waiting, {format_bytes(plan.held_bytes)} at a time, take about "
        f"{plan.passes:.1f} passes over {format_bytes(use.table_bytes)}: {format_bytes(plan.read_bytes)} an epoch, "
        f"{reads.how} reads {format_bytes(num_processes * told.predicted_bytes)}; "
        f"{format_bytes(num_processes * free_bytes)} free"
    )
    pool_bytes = int(POOLED_BATCHES * batch_bytes)
    held = {
        "window_bytes": plan.held_bytes,
        "waiting_bytes": plan.waiting_bytes,
        "pool_bytes": pool_bytes,
        "shared_by": num_processes,
    }
    return RowReads("planned", is_swept=True, by_part=by_part, predicted_bytes=int(plan.read_bytes), why=why, **held)


def tried(trial: SweepTrial, space_bytes: float) -> SweepPlan:
    """Return how many rows a sweep holds beside the batches that wait for them, and what it reads.

    Args:
        trial: Goes through its steps.
        space_bytes: Memory of both.
    """
    waiting = plan_sweep(trial.use, space_bytes).waiting_bytes
    for _ in range(2):
        held = min(held_beside(trial.use, space_bytes, waiting), trial.use.table_bytes)
        run = trial.run(held)
        waiting = run.waiting_bytes * _SPARE
    left = max(held_beside(trial.use, space_bytes, 0.0) - held, waiting)
    return SweepPlan(int(held), int(left), run.passes, run.read_bytes)


def _predicted(reads: RowReads, features: Column, first: Footprint, use: EpochUse) -> float:
    """Predict the bytes that an epoch reads part by part, or window by window."""
    by_part = use.part_bytes(reads.share_read, features.is_packed)
    if reads.how == "resident":
        return by_part
    sampled = use.rows / max(first.rows, 1) * first.sampled_bytes
    if not features.is_packed:
        return window_bytes(use, reads.window_bytes, sampled)
    visit = use.part_rows.mean() * use.row_bytes if len(use.part_rows) else 0.0
    return by_part * max(1.0, visit * reads.share_read / reads.window_bytes)
