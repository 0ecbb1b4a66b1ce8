"""The LightningDataModules."""

from .callbacks import EpochTimes, LocalityController, PeakRecorder, PredictionWriter
from .evaluation import EvaluationOptions
from .full_graph import FullGraphDataModule
from .full_graph_batch import FullGraphBatch, FullGraphLoader
from .layer_source import EvaluationPass, StoreLayerSource
from .partition import PartitionDataModule
from .stored_graph import StoredGraphDataModule

__all__ = [
    "EpochTimes",
    "EvaluationOptions",
    "EvaluationPass",
    "FullGraphBatch",
    "FullGraphDataModule",
    "FullGraphLoader",
    "LocalityController",
    "PartitionDataModule",
    "PeakRecorder",
    "PredictionWriter",
    "StoreLayerSource",
    "StoredGraphDataModule",
]
