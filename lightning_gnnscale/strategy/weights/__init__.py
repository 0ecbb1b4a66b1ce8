"""Weight policies: how the replicas of a model become one. One policy a file."""

from .gradient_averaging import GradientAveraging
from .model_averaging import ModelAveraging
from .policy import WeightPolicy

WEIGHT_POLICIES: dict[str, type[WeightPolicy]] = {
    "gradient_averaging": GradientAveraging,
    "model_averaging": ModelAveraging,
}

__all__ = ["WEIGHT_POLICIES", "GradientAveraging", "ModelAveraging", "WeightPolicy"]
