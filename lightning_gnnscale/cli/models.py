"""The module of a run: what it reads of its nodes and edges, and its widths, from the data set or the store."""

import inspect
from collections.abc import Callable

import numpy as np
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ..datamodule.stored_graph import check_edge_weights
from ..dataset.value_checks import least_value
from ..graph import GraphSchema
from ..model import Backbone
from ..partition_store.typed_features import chosen_node_types
from ..traits import ANY, BackboneTraits, DataTraits, InputsTraits, ModuleTraits, arguments_of
from .checks import check_hops, classifies_edges, taken_by, takes_sampler, trains_on_links
from .compose import written
from .errors import UsageError, one_line
from .ranks import started_from_outside
from .store import StoredData


def make_model(config: DictConfig, datamodule, saved: dict | None = None):
    """Return the LightningModule, with input and output widths from the store or a checkpoint."""
    from lightning import seed_everything

    seed_everything(config.seed, verbose=False)
    data, saved, store = DataTraits(datamodule), saved or {}, datamodule.store
    stored = datamodule.num_features if data.feature_dims is None else data.feature_dims
    node_types = learned_node_types(config, data.schema, stored)
    inputs = make_inputs(config, datamodule, node_types)
    in_channels = in_channels_of(stored, InputsTraits(inputs).dim, node_types, data.schema)
    outputs = _edge_dim(config, datamodule.num_edge_features) | _schema(config, data.schema, in_channels)

    def edge_classes() -> int:
        return saved.get("num_classes") or (datamodule.dataset or StoredData("", store)).num_edge_classes

    if not trains_on_links(config):
        outputs |= {"out_channels": saved.get("out_channels") or datamodule.num_classes}
    several = store.labels is not None and store.labels.ndim == 2 and not store.regression
    multilabel = saved.get("multilabel", several)
    options = _module_options(config, store.schema, datamodule.num_edge_features, edge_classes, multilabel)
    return _build(config, in_channels, outputs, options, inputs)


def check_model(config: DictConfig, dataset) -> None:
    """Make a model of a data set's widths and the chosen optimizer, and discard both: settings are checked so."""
    inputs, schema, stored = config.model.get("inputs"), dataset.schema, stored_columns(config, dataset)
    node_types = learned_node_types(config, schema, stored)
    in_channels = in_channels_of(stored, (inputs.get("dim") or 0) if inputs else 0, node_types, schema)
    if inputs and in_channels == 0:
        return  # only the store knows the inputs' width
    edge_dim = dataset.edge_dim if config.datamodule.get("stored_edge_features", True) else None
    outputs = _schema(config, schema, in_channels) | _edge_dim(config, edge_dim)
    if not trains_on_links(config):
        outputs |= {"out_channels": dataset.num_classes}
    options = _module_options(config, schema, edge_dim, lambda: dataset.num_edge_classes, dataset.multilabel)
    module = _build(config, in_channels, outputs, options)
    if dataset.edge_weight is not None and not BackboneTraits(module.backbone).takes_negative_weights:
        check_edge_weights(module.backbone, least_value(dataset.edge_weight))
    make_optimizer = ModuleTraits(module).make_optimizer
    if make_optimizer is not None:
        try:
            make_optimizer(module.parameters())
        except (ValueError, TypeError) as error:
            raise UsageError(f"model.optimizer: {one_line(error)}") from None


def _module_options(
    config: DictConfig, schema: GraphSchema | None, edge_dim: int | None, edge_classes: Callable, multilabel: bool
) -> dict:
    """Return the module's own arguments that the graph gives: on labels, or on links and their classes."""
    taken = taken_by(config.model._target_)
    if not trains_on_links(config):
        return {"multilabel": multilabel} if "multilabel" in taken else {}
    found = {}
    if schema is not None and "num_relations" in taken:
        found["num_relations"] = int(np.flatnonzero(schema.listed)[-1]) + 1
    if classifies_edges(config):
        found |= {"num_classes": edge_classes(), "edge_channels": edge_dim or 0}
    return found


def _schema(config: DictConfig, schema: GraphSchema | None, in_channels: int | dict[str, int]) -> dict:
    """Return the backbone's argument for node types and edge types; UsageError: its layers do not fit the graph's."""
    backbone = get_object(config.model.backbone._target_)
    takes = "schema" in inspect.signature(backbone).parameters
    if schema is None:
        if takes:
            raise UsageError(
                f"model: {backbone.__name__} reads edge types, and the graph has none: say model=graphsage, gcn or gat"
            )
        return {}
    if takes:
        return {"schema": schema.as_json()}
    named = arguments_of(backbone)
    if (schema.num_edge_types > 1 and "edge_type" not in named) or (
        isinstance(in_channels, dict) and "node_type" not in named
    ):
        raise UsageError(
            f"model: {backbone.__name__} reads no edge types, and the graph has {schema.num_edge_types} between "
            f"{schema.num_node_types} node types: say model=rgcn, model=rgat or model=hgt"
        )
    return {}


def _edge_dim(config: DictConfig, edge_dim: int | None) -> dict:
    """Return the backbone's argument for the number of edge feature columns, where there are any.

    Raises:
        UsageError: no layer of the model reads them, also on the full graph; or the settings give that argument.
    """
    backbone, given = get_object(config.model.backbone._target_), config.model.backbone.get("edge_dim")
    fills_in = "edge_dim" in inspect.signature(backbone).parameters
    if fills_in and given is not None:
        raise UsageError(
            f"model.backbone.edge_dim={given} has no effect, the run fills it in: say dataset=, whose edge features "
            "tell"
        )
    if edge_dim is None:
        return {}
    is_own = inspect.isclass(backbone) and issubclass(backbone, Backbone)
    leave_out = "leave dataset.edge_features out"
    if is_own and not takes_sampler(config):
        raise UsageError(
            f"dataset.edge_features: full-graph training does not read them: say datamodule=partition, or {leave_out}"
        )
    if fills_in:
        return {"edge_dim": edge_dim}
    if not is_own and "edge_attr" in arguments_of(backbone):
        return {}
    relational = "schema" in inspect.signature(backbone).parameters
    readers = "model=rgat or model=hgt" if relational else "model=gat or model=gine"
    raise UsageError(
        f"dataset.edge_features: no layer of {backbone.__name__} reads them: say {readers}, or "
        f"{leave_out} (of a store: datamodule.stored_edge_features=false)"
    )


def _build(config: DictConfig, in_channels: int, outputs: dict, options: dict, inputs=None):
    """Return the module of the config; `outputs` are further arguments of its backbone, `options` its own."""
    backbone = instantiate(config.model.backbone, in_channels=in_channels, **outputs)
    check_hops(config, BackboneTraits(backbone).num_layers)
    if inputs is not None:
        options = options | {"inputs": inputs}
    own = config.copy().model
    OmegaConf.set_struct(own, False)
    for name in ("backbone", "inputs"):
        own.pop(name, None)
    module = instantiate(own, backbone=backbone, **options)
    if ModuleTraits(module).backbone_settings is not ANY and not isinstance(backbone, Backbone):
        settings = written(config.model)["backbone"]
        module.backbone_settings = {**settings, "in_channels": in_channels, **outputs}
    return module


def stored_columns(config: DictConfig, dataset) -> int | dict[str, int]:
    """Return the columns of the stored features that are read, by node type where each has its own."""
    if not config.datamodule.get("stored_features", True):
        return 0
    return dataset.feature_dims or dataset.feature_dim


def learned_node_types(
    config: DictConfig, schema: GraphSchema | None, stored: int | dict[str, int]
) -> list[str] | None:
    """Return the node types with learned rows: those of `model.inputs.node_types`, else those without features.

    Returns:
        Names in the order of the schema; None: every node has a row, or no node has.

    Raises:
        UsageError: these are not node types of the graph, or no node type would read rows.
    """
    inputs = config.model.get("inputs")
    if not inputs:
        return None
    given = inputs.get("node_types")
    if given is None:
        if isinstance(stored, int):
            return None
        node_types = [node_type for node_type, width in stored.items() if not width]
        if not node_types:
            raise UsageError(
                f"model.inputs: all node types have features ({', '.join(stored)}): name those that have learned "
                "rows beside them, +model.inputs.node_types=[...], or leave model.inputs out"
            )
        return node_types
    given = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    try:
        has_rows = chosen_node_types(given, schema)
    except ValueError as error:
        raise UsageError(f"model.inputs.{error}") from None
    if isinstance(stored, int) and has_rows.all():
        return None
    if isinstance(stored, int) and stored:
        raise UsageError(
            f"model.inputs.node_types={given}: the features of all node types are one table, and every "
            "node has a learned row: "
            "leave it out"
        )
    return [node_type for node_type, has in zip(schema.node_types, has_rows, strict=True) if has]


def in_channels_of(
    stored: int | dict[str, int], learned: int, node_types: list[str] | None, schema: GraphSchema | None
) -> int | dict[str, int]:
    """Return the columns that the model reads: features, and learned rows of the node types that have some."""
    if node_types is None:
        return stored + learned if isinstance(stored, int) else stored
    widths = dict.fromkeys(schema.node_types, stored) if isinstance(stored, int) else stored
    return {node_type: width + learned * (node_type in node_types) for node_type, width in widths.items()}


def make_inputs(config: DictConfig, datamodule, node_types: list[str] | None):
    """Return the learned rows that the model reads, of all nodes or of some node types; None where there are none."""
    if not config.model.get("inputs"):
        return None
    made = instantiate(config.model.inputs, _partial_=True)
    options = made.keywords
    if "node_types" in inspect.signature(made.func.for_store).parameters:
        options = options | {"node_types": node_types}
    inputs = made.func.for_store(datamodule.store, **options)
    if config.strategy.get("start_method") != "popen" and not started_from_outside():
        inputs.open()  # processes that are forked or spawned share the rows, and this one has them afterwards
    return inputs


def model_widths(config: DictConfig, dataset) -> dict:
    """Return the model's figures for the planner, for a `GraphDataset` or what replaces one."""
    widths = {
        "hidden_channels": config.model.backbone.get("hidden_channels"),
        "embedding_dim": (config.model.get("inputs") or {}).get("dim"),
    }
    node_types = learned_node_types(config, dataset.schema, stored_columns(config, dataset))
    if node_types is not None:
        widths["embedding_rows"] = sum(dataset.type_sizes[node_type] for node_type in node_types)
    return {name: width for name, width in widths.items() if width}
