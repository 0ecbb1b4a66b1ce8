"""What a model reads of its nodes: columns of stored features, and learned rows, `model.inputs`, of which kinds."""

import inspect

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ..graph import GraphSchema
from ..partition_store.kind_features import chosen_kinds
from .errors import UsageError
from .ranks import started_from_outside


def stored_columns(config: DictConfig, dataset) -> int | dict[str, int]:
    """Return the columns of the stored features that are read, by kind where kinds have their own."""
    if not config.datamodule.get("stored_features", True):
        return 0
    return getattr(dataset, "feature_dims", None) or dataset.feature_dim


def learned_kinds(config: DictConfig, schema: GraphSchema | None, stored: int | dict[str, int]) -> list[str] | None:
    """Return the kinds whose nodes have learned rows: those of `model.inputs.kinds`, else those without features.

    Args:
        config: composed from `train.yaml`.
        schema: Kinds and relations of the graph, or None.
        stored: Columns of the stored features that are read.

    Returns:
        Names in the order of the schema; None: every node has a row, or no node has.

    Raises:
        UsageError: these are not kinds of the graph, or there is no kind that would read rows.
    """
    inputs = config.model.get("inputs")
    if not inputs:
        return None
    given = inputs.get("kinds")
    if given is None:
        if isinstance(stored, int):
            return None
        kinds = [kind for kind, width in stored.items() if not width]
        if not kinds:
            raise UsageError(
                f"model.inputs: all kinds of nodes have features ({', '.join(stored)}): name those that have learned "
                "rows beside them, +model.inputs.kinds=[...], or leave model.inputs out"
            )
        return kinds
    given = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    try:
        has_rows = chosen_kinds(given, schema)
    except ValueError as error:
        raise UsageError(f"model.inputs.{error}") from None
    if isinstance(stored, int) and has_rows.all():
        return None
    if isinstance(stored, int) and stored:
        raise UsageError(
            f"model.inputs.kinds={given}: the features of all kinds are one table, behind which every node has a row: "
            "leave it out"
        )
    return [kind for kind, has in zip(schema.node_types, has_rows, strict=True) if has]


def in_channels_of(
    stored: int | dict[str, int], learned: int, kinds: list[str] | None, schema: GraphSchema | None
) -> int | dict[str, int]:
    """Return the columns that the model reads: features, and learned rows of the kinds that have some."""
    if kinds is None:
        return stored + learned if isinstance(stored, int) else stored
    widths = dict.fromkeys(schema.node_types, stored) if isinstance(stored, int) else stored
    return {kind: width + learned * (kind in kinds) for kind, width in widths.items()}


def make_inputs(config: DictConfig, datamodule, kinds: list[str] | None):
    """Return the rows by node that the model reads beside or instead of stored features, or None.

    Args:
        config: composed from `train.yaml`.
        datamodule: its store is the graph's.
        kinds: The kinds whose nodes have rows, see `learned_kinds`; told to a class that takes them.
    """
    if not config.model.get("inputs"):
        return None
    made = instantiate(config.model.inputs, _partial_=True)
    options = made.keywords
    if "kinds" in inspect.signature(made.func.for_store).parameters:
        options = options | {"kinds": kinds}
    inputs = made.func.for_store(datamodule.store, **options)
    if config.strategy.get("start_method") != "popen" and not started_from_outside():
        inputs.open()  # processes that are forked or spawned share the rows, and this one has them afterwards
    return inputs


def model_widths(config: DictConfig, dataset) -> dict:
    """Return what the planner asks of the model, made for a `GraphDataset` or what stands for one."""
    widths = {
        "hidden_channels": config.model.backbone.get("hidden_channels"),
        "embedding_dim": (config.model.get("inputs") or {}).get("dim"),
    }
    kinds = learned_kinds(config, getattr(dataset, "schema", None), stored_columns(config, dataset))
    if kinds is not None:
        widths["embedding_rows"] = sum(dataset.kind_sizes[kind] for kind in kinds)
    return {name: width for name, width in widths.items() if width}
