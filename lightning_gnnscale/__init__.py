"""Train graph neural networks on graphs that fit neither the GPU nor the host, through the Lightning Trainer.

Importing this package registers `Trainer(strategy="gnnscale")`, whether Lightning is imported before or after it.
Everything else is loaded on first use.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

# The public names of each package. Submodules (`gs.model`, `gs.events`) are reached as attributes too.
# `__init__.pyi` says the same to type checkers; `tests/test_types.py` compares the two.
_NAMES = {
    "edge_stream": "open_edge_stream EdgeStream SyntheticGraph lfr_graph write_edges",
    "partitioner": (
        "partition Partitioning PartitionQuality evaluate_partitioning available_partitioners register_partitioner"
    ),
    "partition_store": "write_partition_store PartitionStore update_store",
    "partition_store.pyg_store": "PyGStore",
    "placement": "access_probability place Placement PlacementSettings FeatureBuffer FeatureCache TypedBuffers",
    "planner": "plan Plan",
    "dataset": "GraphDataset GraphChange LinkSet hetero_graph hold_out_edges",
    "graph": "GraphSchema",
    "sampler": "NeighborSampler ClusterSampler SaintSampler LayerwiseSampler LinkSampler LocalityBias MiniBatch",
    "loader": "NeighborLoader LinkNeighborLoader Threads Processes TaskGraphs",
    "remote": "OwnerReads RayWorkers WorkerEmbedding",
    "embedding": "DistributedEmbedding SparseAdam SparseSGD",
    "datamodule": "EvaluationOptions PartitionDataModule FullGraphDataModule PredictionWriter LocalityController",
    "model": "NodeClassifier NodeRegressor EdgeClassifier LinkPredictor",
    "strategy": (
        "GNNScaleStrategy ModelAveraging GradientAveraging BoundedGradientStaleness NoExchange "
        "BroadcastExchange HaloExchange SkipBroadcast EpochFixed EpochAdaptive VariationGap Quantized "
        "RunReceipt reproduce_step"
    ),
    "errors": (
        "GNNScaleError EdgeStreamError PartitionStoreError PlacementError PlanError StrategyError CheckpointError"
    ),
}
_HOME = {name: package for package, names in _NAMES.items() for name in names.split()}
_SUBMODULES = ("dataset", "embedding", "events", "loader", "model", "partition_store", "partitioner", "placement")
_SUBMODULES += ("planner", "sampler", "strategy")
_RENAMED = {"TypedGraph": "hetero_graph, which returns a GraphDataset", "KindBuffers": "TypedBuffers"}
START_METHODS = {"gnnscale": "popen", "gnnscale_fork": "fork", "gnnscale_spawn": "spawn"}

__version__ = "0.2.0"
__all__ = sorted(_HOME)


def _register(strategies: ModuleType) -> None:
    """Make `Trainer(strategy="gnnscale")` known, unless the name is taken."""
    for name, start_method in START_METHODS.items():
        if name not in strategies.StrategyRegistry:
            told = f"Partitioned training, gradients averaged at every step, `start_method` '{start_method}'"
            strategies.StrategyRegistry.register(name, _strategy, description=told, start_method=start_method)


def _strategy(**options: Any):
    return import_module(".strategy", __name__).GNNScaleStrategy(**options)


def _read_nodes(node_classifier: ModuleType) -> None:
    """Give the modules that predict nodes the reader of stores, which `model` does not import."""
    node_classifier.NodeModule.reader_of = staticmethod(_reader_of)


def _reader_of(store: Any):
    """Return the reader of a store, see `NodeModule`."""
    return import_module(".datamodule.few_nodes", __name__).StoreNodes.of(store)


register_post_import_hook(_read_nodes, f"{__name__}.model.node_classifier")
# Now where Lightning is imported, or as soon as it is: commands that partition and processes that only prepare batches
# never import it, and start in half the time.
register_post_import_hook(_register, "lightning.pytorch.strategies")


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
