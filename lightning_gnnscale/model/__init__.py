"""Backbones, Lightning modules and layer-wise inference."""
