"""What a model reads of its nodes: columns of stored features, and learned rows (`model.inputs`)."""

import inspect

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ..graph import GraphSchema
from ..partition_store.typed_features import chosen_node_types
from .errors import UsageError
from .ranks import started_from_outside


def stored_columns(config: DictConfig, dataset) -> int | dict[str, int]:
    """Return the columns of the stored features that are read, by node type where each has its own."""
    if not config.datamodule.get("stored_features", True):
        return 0
    return dataset.feature_dims or dataset.feature_dim


def learned_node_types(
    config: DictConfig, schema: GraphSchema | None, stored: int | dict[str, int]
) -> list[str] | None:
    """Return the node types with learned rows: those of `model.inputs.node_types`, else those without features.

    Args:
        config: composed from `train.yaml`.
        schema: Node types and edge types of the graph, or None.
        stored: Columns of the stored features that are read.

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
    """Return the learned rows that the model reads beside or instead of stored features, or None.

    Args:
        config: composed from `train.yaml`.
        datamodule: its store is the graph's.
        node_types: Node types whose nodes have rows, see `learned_node_types`; passed to a class that takes them.
    """
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
