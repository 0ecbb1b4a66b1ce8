"""The LightningDataModules."""

from .layer_source import EvaluationPass, StoreLayerSource
from .partition import PartitionDataModule
from .peak_recorder import PeakRecorder
from .prediction_writer import PredictionWriter

__all__ = ["EvaluationPass", "PartitionDataModule", "PeakRecorder", "PredictionWriter", "StoreLayerSource"]
