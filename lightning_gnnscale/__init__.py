"""Train graph neural networks on graphs that fit neither the GPU nor the host, through the Lightning Trainer.

Importing this package registers `Trainer(strategy="gnnscale")`, whether Lightning is imported before or after it.
Everything else is loaded on first use.
"""

from importlib import import_module

from .registration import register_with_lightning

# Where each public name lives. Submodules (`gs.model`, `gs.events`) are reached as attributes too.
# `__init__.pyi` says the same to type checkers; `tests/test_types.py` compares the two.
_HOME = {
    "open_edge_stream": "edge_stream",
    "EdgeStream": "edge_stream",
    "SyntheticGraph": "edge_stream",
    "lfr_graph": "edge_stream",
    "write_edges": "edge_stream",
    "partition": "partitioner",
    "Partitioning": "partitioner",
    "PartitionQuality": "partitioner",
    "evaluate_partitioning": "partitioner",
    "available_partitioners": "partitioner",
    "register_partitioner": "partitioner",
    "write_partition_store": "partition_store",
    "PartitionStore": "partition_store",
    "update_store": "partition_store",
    "PyGStore": "partition_store.pyg_store",
    "access_probability": "placement",
    "place": "placement",
    "Placement": "placement",
    "PlacementSettings": "placement",
    "FeatureBuffer": "placement",
    "FeatureCache": "placement",
    "TypedBuffers": "placement",
    "plan": "planner",
    "Plan": "planner",
    "GraphDataset": "dataset",
    "GraphChange": "dataset",
    "LinkSet": "dataset",
    "hetero_graph": "dataset",
    "GraphSchema": "graph",
    "hold_out_edges": "dataset",
    "NeighborSampler": "sampler",
    "ClusterSampler": "sampler",
    "SaintSampler": "sampler",
    "LayerwiseSampler": "sampler",
    "LinkSampler": "sampler",
    "LocalityBias": "sampler",
    "MiniBatch": "sampler",
    "NeighborLoader": "loader",
    "LinkNeighborLoader": "loader",
    "Threads": "loader",
    "Processes": "loader",
    "OwnerReads": "remote",
    "RayWorkers": "remote",
    "TaskGraphs": "loader",
    "DistributedEmbedding": "embedding",
    "SparseAdam": "embedding",
    "SparseSGD": "embedding",
    "WorkerEmbedding": "remote",
    "EvaluationOptions": "datamodule",
    "PartitionDataModule": "datamodule",
    "FullGraphDataModule": "datamodule",
    "PredictionWriter": "datamodule",
    "LocalityController": "datamodule",
    "NodeClassifier": "model",
    "NodeRegressor": "model",
    "EdgeClassifier": "model",
    "LinkPredictor": "model",
    "GNNScaleStrategy": "strategy",
    "ModelAveraging": "strategy",
    "GradientAveraging": "strategy",
    "BoundedGradientStaleness": "strategy",
    "NoExchange": "strategy",
    "BroadcastExchange": "strategy",
    "HaloExchange": "strategy",
    "SkipBroadcast": "strategy",
    "EpochFixed": "strategy",
    "EpochAdaptive": "strategy",
    "VariationGap": "strategy",
    "Quantized": "strategy",
    "GNNScaleError": "errors",
    "EdgeStreamError": "errors",
    "PartitionStoreError": "errors",
    "PlacementError": "errors",
    "PlanError": "errors",
    "StrategyError": "errors",
    "CheckpointError": "errors",
}
_SUBMODULES = (
    "dataset",
    "embedding",
    "events",
    "loader",
    "model",
    "partition_store",
    "partitioner",
    "placement",
    "planner",
    "sampler",
    "strategy",
)

__version__ = "0.2.0"
__all__ = sorted(_HOME)

register_with_lightning()


_RENAMED = {"TypedGraph": "hetero_graph, which returns a GraphDataset", "KindBuffers": "TypedBuffers"}


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name in _RENAMED:
        raise AttributeError(f"gs.{name} of 0.2 is gs.{_RENAMED[name]} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
