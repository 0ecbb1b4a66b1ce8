"""The LightningDataModules."""

from .evaluation import EvaluationOptions
from .full_graph import FullGraphDataModule
from .full_graph_batch import FullGraphBatch, FullGraphLoader
from .layer_source import EvaluationPass, StoreLayerSource
from .locality_controller import LocalityController
from .partition import PartitionDataModule
from .peak_recorder import PeakRecorder
from .prediction_writer import PredictionWriter
from .stored_graph import StoredGraphDataModule

__all__ = [
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
