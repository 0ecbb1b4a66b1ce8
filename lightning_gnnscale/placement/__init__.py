"""Where feature rows are: how likely each is read, and what goes on which device."""

from .access_probability import access_probability
from .feature_buffer import FeatureBuffer, TypedBuffers
from .feature_cache import FeatureCache
from .place import place
from .placement import DISK, HOST, Placement
from .settings import PlacementSettings

__all__ = [
    "DISK",
    "HOST",
    "FeatureBuffer",
    "FeatureCache",
    "Placement",
    "PlacementSettings",
    "TypedBuffers",
    "access_probability",
    "place",
]
