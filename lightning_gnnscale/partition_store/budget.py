"""How much memory and disk the writer may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteBudget:
    """Sizes of the writer's buffers; they change neither the bytes of a store nor its layout.

    Attributes:
        spill_edges: source edges that are bucketed at once; 24 to 56 bytes each.
        sort_arcs: arcs that are sorted at once; 16 bytes each, 32 where edges carry weights or features. A single
            row that is longer is sorted whole.
        block_bytes: feature bytes that are copied at once, twice in memory.
        checkpoint_bytes: bytes written between two lines of the journal.
    """

    spill_edges: int = 1 << 22
    sort_arcs: int = 1 << 23
    block_bytes: int = 1 << 26
    checkpoint_bytes: int = 1 << 28

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"WriteBudget.{name} must be at least 1, got {value}")
