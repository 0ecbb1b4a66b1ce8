"""Which feature rows lie where: how likely each is read, and what goes on which device."""

from .access_probability import access_probability
from .feature_cache import FeatureCache
from .place import place
from .placement import DISK, HOST, Placement

__all__ = ["DISK", "HOST", "FeatureCache", "Placement", "access_probability", "place"]
