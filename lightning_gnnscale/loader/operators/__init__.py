"""ByteGNN's operators: seeds, positives, negatives, neighbourhoods; feature fetching is a `FeatureTable`'s own."""

from .draws import BatchSeeds, LinkNegatives, LinkPositives, NegativeOperator, PositiveOperator, SeedOperator
from .neighborhood import FanoutNeighborhood, FetchOperator, Neighborhood, NeighborhoodOperator
from .random_walk import PinSageNeighborhood

__all__ = [
    "BatchSeeds",
    "FanoutNeighborhood",
    "FetchOperator",
    "LinkNegatives",
    "LinkPositives",
    "NegativeOperator",
    "Neighborhood",
    "NeighborhoodOperator",
    "PinSageNeighborhood",
    "PositiveOperator",
    "SeedOperator",
]
