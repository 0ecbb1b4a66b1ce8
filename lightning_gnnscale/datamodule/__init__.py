"""The LightningDataModules."""

from .layer_source import EvaluationPass, StoreLayerSource
from .partition import PartitionDataModule
from .prediction_writer import PredictionWriter

__all__ = ["EvaluationPass", "PartitionDataModule", "PredictionWriter", "StoreLayerSource"]
