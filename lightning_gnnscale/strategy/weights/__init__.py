"""Weight policies: how the replicas of a model become one. One policy a file."""

from .gradient_averaging import BoundedGradientStaleness, GradientAveraging
from .model_averaging import ModelAveraging
from .policy import WeightPolicy

WEIGHT_POLICIES: dict[str, type[WeightPolicy]] = {
    "gradient_averaging": GradientAveraging,
    "bounded_gradient_staleness": BoundedGradientStaleness,
    "model_averaging": ModelAveraging,
}

__all__ = ["WEIGHT_POLICIES", "BoundedGradientStaleness", "GradientAveraging", "ModelAveraging", "WeightPolicy"]
