"""Fan-out neighbour sampling over a CSC."""

from .op import SampledNeighbors, Workspace, check_fanouts, sample_neighbors

__all__ = ["SampledNeighbors", "Workspace", "check_fanouts", "sample_neighbors"]
