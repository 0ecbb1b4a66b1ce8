"""The base of the DataModules: an existing partition store, or what one is made from."""

import inspect
import logging
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ..dataset import GraphDataset
from ..errors import GNNScaleError, PartitionStoreError, StrategyError
from ..events import record
from ..foreign import is_pyg
from ..graph import COLUMNS, GraphSchema, check_requires
from ..kernel_sets import compile_ahead
from ..loader import LoaderOptions
from ..memory import format_bytes
from ..model.backbone import check_edge_attr
from ..model.checkpoint_file import LoadsWeightsOnly
from ..object_store import is_url
from ..partition_store import PartitionStore, StoreSource, partitioning_facts
from ..partition_store.manifest import read_manifest
from ..partition_store.verify import compare_once
from ..planner import Plan, plan
from ..traits import ANY, BackboneTraits, ModuleTraits, StrategyTraits
from .tiers import is_placeable, table_bytes


def policy_of(trainer: L.Trainer | None) -> Any:
    """Return the weight policy of a run; None without a trainer, and under another strategy than this package's."""
    return None if trainer is None else StrategyTraits(trainer.strategy).weights


def num_layers_of(module: Any) -> int | None:
    """Return the number of layers of a module's backbone, if it has one."""
    layers = BackboneTraits(ModuleTraits(module).backbone).num_layers
    return layers if isinstance(layers, int) else None


def check_model(module: Any, store: PartitionStore, hops: int | None = None) -> None:
    """Compare widths, classes, edge weights and layers; what a module does not state is not compared.

    Args:
        module: The LightningModule, or None.
        store: A store with features and labels if the module reads them.
        hops: Number of hops that the sampler samples; None: not compared.

    Raises:
        StrategyError: batches would not fit the model; the message names both numbers.
    """
    says = ModuleTraits(module)
    backbone = says.backbone
    try:
        own = {name: name in store.node_columns for name in says.requires if name not in COLUMNS}
        check_requires(says.requires, store.has | own)
    except ValueError as error:
        raise StrategyError(str(error)) from None
    if store.schema is not None and says.check_edge_types is not None:
        own_features = store.features is not None and store.features.by_node_type
        module.check_edge_types(store.schema.num_edge_types > 1, own_features)
    width = BackboneTraits(backbone).in_channels
    if isinstance(width, int) and store.features is not None and says.inputs is None:
        _check_equal("backbone.in_channels", width, "columns of the store's features", store.features.dim)
    classifies, regresses = says.multilabel is not None, says.num_targets is not None
    if store.labels is not None and store.regression != regresses:
        if store.regression and classifies:
            raise StrategyError(
                f"the store has numbers to predict, but {type(module).__name__} classifies: use NodeRegressor"
            )
        if regresses:
            raise StrategyError(
                f"the store has classes, but {type(module).__name__} predicts numbers: use NodeClassifier, or write "
                "the store with regression=True"
            )
    if classifies and store.labels is not None:
        _check_labels(module, store.labels)
    if regresses and isinstance(targets := module.num_targets, int) and store.labels is not None:
        labels = 1 if store.labels.ndim == 1 else store.labels.shape[1]
        _check_equal("out_channels", targets, "targets a node", labels)
    check_edge_weights(backbone, store.least_edge_weight)
    layers = num_layers_of(module)
    if layers is not None and hops and hops != layers:
        rank_zero_warn(
            f"the sampler samples {hops} hops, but the backbone has {layers} layers: give it one hop a layer"
        )


def check_edge_features(module: Any, edge_features: Any, *without: str) -> None:
    """Refuse edge features that the model does not read, and a model that reads others; raises as `check_model`.

    Args:
        module: The LightningModule, or None. One that does not state what it reads is not checked.
        edge_features: (num_edges, edge_dim) of the store, or None.
        without: The remedy without them; by default that of `PartitionDataModule`.
    """
    reads = ModuleTraits(module).reads_edge_features
    if reads is None:
        return
    backbone, given = module.backbone, None if edge_features is None else edge_features.shape[1]
    edge_dim = BackboneTraits(backbone).edge_dim
    edge_dim = (given if reads else None) if edge_dim is ANY else edge_dim
    try:
        check_edge_attr(type(backbone).__name__, edge_dim, given, *without)
    except ValueError as error:
        raise StrategyError(str(error)) from None


def check_edge_weights(backbone: Any, least: float | None) -> None:
    """Refuse edge weights below 0 for a backbone that divides by the root of their sums, or takes their logarithm.

    Args:
        backbone: Backbone of the module, or None.
        least: Smallest weight of an edge; None without weights.

    Raises:
        StrategyError: names the weight, the backbone and the remedy.
    """
    if least is not None and least < 0 and not BackboneTraits(backbone).takes_negative_weights:
        raise StrategyError(
            f"edge_weight goes down to {least:g}, and {type(backbone).__name__} needs weights of at least 0: change "
            "them, or use GraphSAGE, which takes any weights"
        )


def _check_labels(module: Any, labels: Any) -> None:
    several = labels.ndim == 2
    if several != bool(module.multilabel):
        stored = f"{labels.shape[1]} labels a node" if several else "one label a node"
        raise StrategyError(f"the store has {stored}: say multilabel={several} to {type(module).__name__}")
    outputs = ModuleTraits(module).num_classes
    if not isinstance(outputs, int):
        return
    if several:
        _check_equal("out_channels", outputs, "labels a node", labels.shape[1])
    elif (largest := int(labels.max(initial=-1))) >= outputs:
        raise StrategyError(
            f"out_channels={outputs} is less than the classes, the store's labels go up to {largest}: say {largest + 1}"
        )


def _check_equal(name: str, given: int, what: str, stored: int) -> None:
    if given != stored:
        raise StrategyError(f"{name}={given} is not the number of {what}, {stored}: say {stored}")


_log = logging.getLogger(__name__)


class StoredGraphDataModule(LoadsWeightsOnly, L.LightningDataModule):
    """Base of the DataModules: partitions and writes the store in `prepare_data`, opens it in `setup`.

    Give either an existing store, or what one is made from: a `Data` of PyG, or the keywords of `StoreSource.of`:
    `dataset`, or `stream` with `features`, `labels`, `masks`; and `root`, where the store is to be written.

    Args:
        store: Folder or URL of a partition store, an open store, or a `StoreSource`; or a `Data` of PyG, of which one
            is made; None: one is made from `making`.
        seed: Seed of the partitioning's random choices.
        making: Keywords of `StoreSource.of` and `StoreSource`.

    Attributes:
        verify: Whether `prepare_data` compares a store's checksums, once per machine and content (about 1 GB/s, see
            `compare_once`). Set it to False to train on a store as it is.
        store_source: The `StoreSource` that `prepare_data` makes the store from; None where a store was given.

    Raises:
        ValueError: an argument is out of range, or neither or both of store and `making` are given.
    """

    verify = True
    kernel_set = "train"  # compiled ahead, see `kernels.json`
    loader_options: LoaderOptions | None = None  # if batches are sampled
    takes_inputs = True  # whether the model may have rows instead of features

    def __init__(self, store: str | os.PathLike | PartitionStore | StoreSource | None, seed: int, **making):
        super().__init__()
        if is_pyg(store):
            store = StoreSource.of(dataset=store, seed=seed, **making)
        elif store is not None:
            _check_making(making)
        else:
            store = StoreSource.of(seed=seed, **making)
        self.store_source = store if isinstance(store, StoreSource) else None
        self._root = None if self.store_source is not None else _folder(store)
        planner = making.get("planner") or (self.store_source and self.store_source.planner)
        self._planner, self.seed = planner or plan, seed
        self.stored_features = True
        self._store: PartitionStore | None = None

    def __str__(self) -> str:
        """Describe store, graph and batches on one line; only the store's manifest is read."""
        facts = {"store": self._root, "num_parts": None, "num_nodes": None, "num_features": None, "num_classes": None}
        try:
            if self.store_source is not None:
                facts |= self.store_source.facts
            manifest = self._store.manifest if self._store is not None else self._root and read_manifest(self._root)
            names = {"num_parts": "num_parts", "num_nodes": "num_nodes", "feature_dim": "num_features"}
            facts |= {name: manifest[key] for key, name in names.items() if manifest and manifest.get(key) is not None}
        except (GNNScaleError, OSError, ValueError):
            pass  # what does not exist yet, or no longer, is left out
        facts["batch_size"] = self.loader_options and self.loader_options.batch_size
        shown = ", ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
        return f"{type(self).__name__}({shown})"

    @property
    def root(self) -> Path:
        """Folder of the store."""
        return self._root if self.store_source is None else self.store_source.root

    @property
    def dataset(self) -> GraphDataset | None:
        """What the store is made from; None where a store was given."""
        return None if self.store_source is None else self.store_source.dataset

    def prepare_data(self) -> None:
        """Partition and write the store (no-op if an identical store exists); compare its checksums once.

        Raises:
            PartitionStoreError: a file of the store is damaged.
        """
        compile_ahead([self.kernel_set, *(["store"] if self.store_source is not None else [])])
        if self.store_source is None:
            store = PartitionStore.open(self.root, self.verify)
        else:
            store = self.store_source.prepare(self.planned_parts(), self.verify)
            self._store = None
        self.compare_checksums(store)

    def compare_checksums(self, store: PartitionStore | None = None) -> None:
        """With `verify`, read those files of a store (None: this one) that this machine has not compared yet.

        Raises:
            PartitionStoreError: a file is damaged.
        """
        store, began = store or self.store, time.perf_counter()
        num_bytes = compare_once(store) if self.verify else 0
        if num_bytes:
            seconds = time.perf_counter() - began
            record("store_verified", root=str(store.root), bytes=num_bytes, seconds=seconds)
            _log.info(
                f"{store.root}: checksums of {format_bytes(num_bytes)} compared in {seconds:.1f} s,"
                " not again until the files change (verify=false: never)"
            )

    def planned_parts(self) -> int:
        """Return the number of parts: as given; else that of an existing store of this input; else the planner's."""
        if self.store_source is None:
            return self.store.num_parts
        if self.store_source.num_parts != "auto":
            return self.store_source.num_parts
        return self.store_source.standing_parts() or self.store_source.settle(self.make_plan).num_parts

    def make_plan(self, num_devices: int | None = None, **options) -> Plan:
        """Return the plan for this graph and these batches; see `StoreSource.make_plan` for what is read.

        Args:
            num_devices: None takes the Trainer's, or 1 without one.
            options: further arguments of `gs.plan` and `predict_training`; they override the DataModule's own.
        """
        devices, options = num_devices or self._rank_and_world()[1], {**self._batch_shape(), **options}
        if self.trainer is not None:
            options.setdefault("accelerator", accelerator_of(self.trainer))
        if self.store_source is not None:
            return self.store_source.make_plan(devices, **options)
        return self._planner(**{**_sizes(self.store), "num_devices": devices, **options})

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Refuse settings of a Trainer that cannot go with this DataModule, before a store is made; `setup` calls it.

        Raises:
            StrategyError: the message names the setting and the remedy.
        """

    def setup(self, stage: str | None = None) -> None:
        """Open the store.

        Raises:
            PartitionStoreError: it has no features, and the model has no inputs.
            StrategyError: the Trainer does not fit this DataModule; or another rank has opened another store.
        """
        if self.store_source is not None and self._store is not None and self._store.is_replaced():
            self._store = None  # opened before `prepare_data` wrote another, here or on another rank
        if stage == "fit" and self.trainer is not None:
            self.check_trainer(self.trainer)
        if self.store.fetched is not None and self.trainer is not None:
            self._check_same_store()
        inputs = ModuleTraits(self._module).inputs
        if not self.stored_features and inputs is None:
            raise StrategyError("stored_features=False leaves batches without features, and the model has no inputs=")
        if self.store.features is None and (inputs is None or not self.takes_inputs):
            remedy = ", or train embeddings: inputs=DistributedEmbedding(...) of the model" if self.takes_inputs else ""
            raise PartitionStoreError(
                f"{self.root}: the store has no features; write it with features= to train on it{remedy}"
            )

    @property
    def _module(self) -> L.LightningModule | None:
        """The module that is trained or evaluated; None without a trainer, or before it has one."""
        return None if self.trainer is None else self.trainer.lightning_module

    def _check_same_store(self) -> None:
        """Refuse a store that is not the first rank's: machines without a shared folder may find different ones."""
        mine = f"{self.store.fingerprint}-{self.store.manifest_digest}"
        first = self.trainer.strategy.broadcast(mine)
        if mine != first:
            raise StrategyError(
                f"{self.store.fetched.url}: this machine has opened a store with the fingerprint {mine}, the trainer's"
                f" first process another, with {first}: start all machines again on one store"
            )

    @property
    def store(self) -> PartitionStore:
        """The open store; opened on first use.

        Raises:
            PartitionStoreError: there is none yet, or it cannot be opened.
        """
        if self._store is None:
            if self.store_source is not None and not self.root.exists():
                raise PartitionStoreError(f"{self.root}: the store is not made yet: call prepare_data() first")
            self._store = PartitionStore.open(self.root, self.verify)
        return self._store

    @property
    def num_features(self) -> int:
        """Width of the stored features that batches have, of the widest node type; 0 without any.

        By node type: `feature_dims`.
        """
        return 0 if self.store.features is None or not self.stored_features else self.store.features.dim

    @property
    def schema(self) -> GraphSchema | None:
        """The node types and edge types of the graph; None for one node type and one edge type."""
        return self.store.schema if self.dataset is None else self.dataset.schema

    @property
    def feature_dims(self) -> dict[str, int] | None:
        """Width of the stored features by node type, 0 for one without; None: one table for all nodes."""
        table = self.store.features if self.stored_features else None
        if table is None or not table.by_node_type:
            return None
        return dict(zip(self.store.schema.node_types, table.dims, strict=True))

    @property
    def num_edge_features(self) -> int | None:
        """Columns of the stored edge features that batches have; None without."""
        rows = self.store.edge_column("edge_features", whole=False)
        return None if rows is None else int(rows.shape[1])

    @property
    def num_classes(self) -> int:
        """Classes, or labels a node where there are several."""
        if self.dataset is not None and self.dataset.num_classes is not None:
            return self.dataset.num_classes
        labels = self.store.labels
        if self.verify:
            compare_once(self.store, ("labels",))  # a damaged one could imply a model of any width
        if labels is None:
            raise StrategyError(
                f"{self.root}: the store has no labels, so the number of classes is unknown: write it with labels="
            )
        return int(labels.shape[1] if labels.ndim == 2 else labels.max(initial=-1) + 1)

    @property
    def partitioning_facts(self) -> dict:
        """What partitioning measured when the store was made; empty if unknown."""
        return partitioning_facts(self.root)

    def mixed_parts(self, weights: Any) -> int:
        """Return how many parts a batch mixes under a weight policy, at most; 0: none."""
        return 0

    def samples_whole(self, weights: Any) -> bool:
        """Whether batches sample the whole graph under a weight policy."""
        return False

    def _batch_shape(self) -> dict[str, Any]:
        """Return the arguments of `predict_training` for the batches."""
        raise NotImplementedError

    def _check_trainable(self) -> None:
        if self.store.labels is None or "train" not in self.store.masks:
            raise StrategyError(f"{self.root}: training needs labels and a train mask; write the store with both")

    def _without_validation(self, what: str, remedy: str) -> list:
        """Return the loaders of a fit without validation; refuse where only validation was asked for."""
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            raise StrategyError(f"{self.root}: validation needs {what}: {remedy}")
        return []

    def _check_testable(self) -> None:
        if "test" not in self.store.masks:
            raise StrategyError(f"{self.root}: testing needs a test mask; write the store with masks={{'test': ...}}")
        self._check_labels("testing")

    def _check_labels(self, purpose: str) -> None:
        if self.store.labels is None:
            raise StrategyError(f"{self.root}: {purpose} needs labels; write the store with labels=")

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


def _check_making(making: dict[str, Any]) -> None:
    """Refuse keywords for making a store where one is given; their defaults are accepted."""
    parameters = {**inspect.signature(StoreSource).parameters, **inspect.signature(StoreSource.of).parameters}
    for name, value in making.items():
        default = parameters[name].default if name in parameters else None
        if name in ("planner", "progress") or value is None or value is False or value is default:
            continue
        if name in ("dataset", "stream"):
            raise ValueError("give either store, or dataset, or stream with features, labels and masks")
        if isinstance(value, str) and value == default:
            continue
        said = f"{name}={value}" if isinstance(value, str) else name
        raise ValueError(f"{said} says how a store is written, but store= exists: leave it out")


def accelerator_of(trainer: L.Trainer) -> str:
    """Return the planner's accelerator for a Trainer: "gpu" or "cpu"."""
    return "gpu" if isinstance(trainer.accelerator, CUDAAccelerator) else "cpu"


def _sizes(store: PartitionStore) -> dict[str, Any]:
    """Return the planner's figures of a graph, from its store."""
    table = store.features
    return {
        "num_parts": store.num_parts,
        "num_nodes": store.num_nodes,
        "num_edges": store.num_edges,
        "feature_bytes": 0 if table is None else table.nbytes,
        "placeable_bytes": 0 if table is None or not is_placeable(table) else table_bytes(store),
        "edge_row_bytes": store.edge_row_bytes,
        "feature_dim": 0 if table is None else table.dim,
        "feature_row_bytes": 0.0 if table is None else table.batch_row_bytes,
    }


def _folder(store: str | os.PathLike | PartitionStore) -> Path:
    if not isinstance(store, str | os.PathLike | PartitionStore):
        raise ValueError(
            "store must be the folder or URL of a partition store, an open store, a StoreSource or a Data of PyG, got "
            f"{type(store).__name__}: other graphs are given as dataset=, or stream= with features, labels and masks"
        )
    if is_url(store):
        store = PartitionStore.open(store)
    return store.root if isinstance(store, PartitionStore) else Path(store)
