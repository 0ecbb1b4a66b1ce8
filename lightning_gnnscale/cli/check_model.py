"""Whether the model's settings make a model, tried before anything is partitioned."""

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ..datamodule.model_check import check_edge_weights
from ..partition_store.values import least_value
from .check_dataset import trains_on_links
from .check_settings import check_hops
from .errors import UsageError, one_line


def module_settings(config: DictConfig) -> DictConfig:
    """Return the module's own settings, without its backbone and its inputs."""
    return OmegaConf.create({key: value for key, value in config.model.items() if key not in ("backbone", "inputs")})


def check_model(config: DictConfig, dataset) -> None:
    """Make a model of the data set's widths, and the optimizer where one is chosen; then let go of both.

    Args:
        config: composed from `train.yaml`.
        dataset: a `GraphDataset`.

    Raises:
        UsageError: settings that make no model; names the key.
    """
    stored = dataset.feature_dim if config.datamodule.get("stored_features", True) else 0
    inputs = config.model.get("inputs")
    in_channels = stored + ((inputs.get("dim") or 0) if inputs else 0)
    if inputs and in_channels == 0:
        return  # inputs whose width only the store tells
    on_links = trains_on_links(config)
    widths = {"in_channels": in_channels} | ({} if on_links else {"out_channels": dataset.num_classes})
    backbone = _made("model.backbone", config.model.backbone, **widths)
    check_hops(config, getattr(backbone, "num_layers", None))
    _check_weights(backbone, dataset.edge_weight)
    options = {} if on_links else {"multilabel": dataset.multilabel}
    module = _made("model", module_settings(config), backbone=backbone, **options)
    make_optimizer = getattr(module, "make_optimizer", None)
    if make_optimizer is not None:
        try:
            make_optimizer(module.parameters())
        except (ValueError, TypeError) as error:
            raise UsageError(f"model.optimizer: {one_line(error)}") from None


def _check_weights(backbone, edge_weight) -> None:
    if edge_weight is not None and not getattr(backbone, "takes_negative_weights", True):
        check_edge_weights(backbone, least_value(edge_weight))


def _made(key: str, node: DictConfig, **options):
    try:
        return instantiate(node, **options)
    except InstantiationException as error:
        line = one_line(error)
        raise UsageError(line if line.startswith("model") else f"{key}: {line}") from None
