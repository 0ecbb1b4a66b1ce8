"""The public names for type checkers, which cannot follow names that are loaded on first use."""

from . import dataset as dataset
from . import embedding as embedding
from . import events as events
from . import loader as loader
from . import model as model
from . import partition_store as partition_store
from . import partitioner as partitioner
from . import placement as placement
from . import planner as planner
from . import sampler as sampler
from . import strategy as strategy
from .datamodule import (
    EvaluationOptions,
    FullGraphDataModule,
    LocalityController,
    PartitionDataModule,
    PredictionWriter,
)
from .dataset import GraphChange, GraphDataset, LinkSet, hetero_graph, hold_out_edges
from .edge_stream import EdgeStream, SyntheticGraph, lfr_graph, open_edge_stream, write_edges
from .embedding import DistributedEmbedding, SparseAdam, SparseSGD
from .errors import (
    CheckpointError,
    EdgeStreamError,
    GNNScaleError,
    PartitionStoreError,
    PlacementError,
    PlanError,
    StrategyError,
)
from .graph import GraphSchema
from .loader import LinkNeighborLoader, NeighborLoader, Processes, TaskGraphs, Threads
from .model import EdgeClassifier, LinkPredictor, NodeClassifier, NodeRegressor
from .partition_store import PartitionStore, update_store, write_partition_store
from .partition_store.pyg_store import PyGStore
from .partitioner import (
    Partitioning,
    PartitionQuality,
    available_partitioners,
    evaluate_partitioning,
    partition,
    register_partitioner,
)
from .placement import (
    FeatureBuffer,
    FeatureCache,
    Placement,
    PlacementSettings,
    TypedBuffers,
    access_probability,
    place,
)
from .planner import Plan, plan
from .remote import OwnerReads, RayWorkers, WorkerEmbedding
from .sampler import (
    ClusterSampler,
    LayerwiseSampler,
    LinkSampler,
    LocalityBias,
    MiniBatch,
    NeighborSampler,
    SaintSampler,
)
from .strategy import (
    BoundedGradientStaleness,
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    GNNScaleStrategy,
    GradientAveraging,
    HaloExchange,
    ModelAveraging,
    NoExchange,
    Quantized,
    RunReceipt,
    SkipBroadcast,
    VariationGap,
    reproduce_step,
)

__version__: str
__all__ = [
    "BoundedGradientStaleness",
    "BroadcastExchange",
    "CheckpointError",
    "ClusterSampler",
    "DistributedEmbedding",
    "EdgeClassifier",
    "EdgeStream",
    "EdgeStreamError",
    "EpochAdaptive",
    "EpochFixed",
    "EvaluationOptions",
    "FeatureBuffer",
    "FeatureCache",
    "FullGraphDataModule",
    "GNNScaleError",
    "GNNScaleStrategy",
    "GradientAveraging",
    "GraphChange",
    "GraphDataset",
    "GraphSchema",
    "HaloExchange",
    "LayerwiseSampler",
    "LinkNeighborLoader",
    "LinkPredictor",
    "LinkSampler",
    "LinkSet",
    "LocalityBias",
    "LocalityController",
    "MiniBatch",
    "ModelAveraging",
    "NeighborLoader",
    "NeighborSampler",
    "NoExchange",
    "NodeClassifier",
    "NodeRegressor",
    "OwnerReads",
    "PartitionDataModule",
    "PartitionQuality",
    "PartitionStore",
    "PartitionStoreError",
    "Partitioning",
    "Placement",
    "PlacementError",
    "PlacementSettings",
    "Plan",
    "PlanError",
    "PredictionWriter",
    "Processes",
    "PyGStore",
    "Quantized",
    "RayWorkers",
    "RunReceipt",
    "SaintSampler",
    "SkipBroadcast",
    "SparseAdam",
    "SparseSGD",
    "StrategyError",
    "SyntheticGraph",
    "TaskGraphs",
    "Threads",
    "TypedBuffers",
    "VariationGap",
    "WorkerEmbedding",
    "access_probability",
    "available_partitioners",
    "evaluate_partitioning",
    "hetero_graph",
    "hold_out_edges",
    "lfr_graph",
    "open_edge_stream",
    "partition",
    "place",
    "plan",
    "register_partitioner",
    "reproduce_step",
    "update_store",
    "write_edges",
    "write_partition_store",
]
