"""Settings judged by themselves and against each other, before data is opened."""

import inspect
import re
from numbers import Integral, Real
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from ..datamodule.stored_graph import check_edge_weights
from ..partition_store.value_checks import least_value
from .check_dataset import trains_on_links
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


_OF_BATCHES = ("sampler", "source", "placement", "pack_halo", "evaluation")


def takes_sampler(config: DictConfig) -> bool:
    """Whether the DataModule makes batches, and so takes a sampler, a source of batches and a placement."""
    return "sampler" in inspect.signature(get_object(config.datamodule._target_)).parameters


def check_unused(config: DictConfig) -> None:
    """Refuse groups that were set and would not be read.

    Args:
        config: composed from `train.yaml`.

    Raises:
        UsageError: names the group and the reason.
    """
    groups, reason = (), ""
    if not takes_sampler(config):
        groups, reason = _OF_BATCHES, "full-graph training has no batches of parts"
    elif config.datamodule.get("mode") == "full_batch":
        groups, reason = ("sampler",), "with datamodule.mode=full_batch each part is one batch"
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    for word in words:
        group = re.match(r"[+~]*(\w*)", word)[1]
        if group in groups:
            raise UsageError(f"{word.lstrip('+')} has no effect, {reason}: leave it out")
    if not OmegaConf.is_interpolation(config, "num_devices"):
        raise UsageError(f"num_devices={config.num_devices} has no effect here: say trainer.devices=")


LARGEST_SEED = 2**32 - 1  # of numpy's generator
# Keys that a run fills in itself: what is said there would be lost.
_FILLED_IN = {
    "trainer.strategy": "strategy= and strategy.weights, strategy.exchange",
    "trainer.callbacks": "callbacks=, for example callbacks=early_stopping",
    "trainer.default_root_dir": "hydra.run.dir=",
    "datamodule.root": "output=, or paths.stores=",
    "datamodule.store": "output=, where the same store is opened again",
    "datamodule.dataset": "dataset=",
    "datamodule.stream": "dataset=",
    "datamodule.features": "dataset=files and dataset.features=",
    "datamodule.labels": "dataset=files and dataset.labels=",
    "datamodule.masks": "dataset=files and dataset.train_mask=, val_mask=, test_mask=",
    "datamodule.edge_weight": "dataset=files and dataset.edge_weight=",
    "datamodule.edge_features": "dataset=files and dataset.edge_features=",
    "datamodule.partitioner": "partitioner=",
    "datamodule.planner": "planner=",
    "datamodule.num_parts": "num_parts=",
    "datamodule.overwrite": "overwrite=",
    "datamodule.pack_halo": "pack_halo=",
    "datamodule.feature_storage": "feature_storage=",
    "datamodule.sampler": "sampler=",
    "datamodule.source": "source=",
    "datamodule.evaluation": "evaluation=",
    "datamodule.placement": "placement=",
    "partitioner.num_parts": "num_parts=",
    "planner.num_parts": "num_parts=",
    "planner.num_devices": "trainer.devices=, or num_devices= where only the store is made",
    "planner.num_nodes": "dataset=, whose graph is planned for",
    "planner.num_edges": "dataset=, whose graph is planned for",
    "planner.feature_bytes": "dataset=, whose features are planned for",
    "planner.edge_row_bytes": "dataset=, whose edges are planned for",
    "planner.feature_dim": "dataset=, whose features are planned for",
    "planner.feature_row_bytes": "dataset=, whose features are planned for",
    "planner.batch_size": "datamodule.batch_size=",
    "planner.fanouts": "sampler.fanouts=",
    "planner.prefetch_batches": "source.prefetch_batches=",
    "model.multilabel": "dataset=, whose labels tell",
    "model.backbone.in_channels": "dataset=, whose features tell",
}


def check_settings(config: DictConfig) -> None:
    """Refuse values that are out of range or without effect, and settings that do not go together.

    Args:
        config: composed from `train.yaml`, or from `partition.yaml`, which has less.

    Raises:
        UsageError: names the key, the value and what is allowed.
    """
    for key, instead in _FILLED_IN.items():
        value = OmegaConf.select(config, key)
        if value is not None:
            raise UsageError(f"{key}={_plain(value)} has no effect, the run fills it in: say {instead}")
    _check_integer(config, "seed", 0, LARGEST_SEED)
    _check_num_parts(config)
    _check_integer(config, "trainer.accumulate_grad_batches", 1)
    _check_integer(config, "trainer.check_val_every_n_epoch", 1)
    _check_logger(config)
    for name, callback in (config.get("callbacks") or {}).items():
        if callback is not None and not OmegaConf.is_dict(callback):
            raise UsageError(f"callbacks.{name} must be null or settings with a _target_, got {_plain(callback)}")
        _check_integer(config, f"callbacks.{name}.patience", 0)
    _check_above_zero(config, "model.lr")
    _check_at_least_zero(config, "model.weight_decay")
    if config.get("model") is not None:
        _check_monitors(config)
        _check_layers(config)


def planned_devices(config: DictConfig) -> int:
    """Return the number of devices of the plan, `num_devices` or the length of a list of devices.

    Raises:
        UsageError: it is no number, for example "auto", which only a Trainer resolves.
    """
    given = config.num_devices
    if isinstance(given, ListConfig) and len(given):
        return len(given)
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        key = "trainer.devices" if OmegaConf.is_interpolation(config, "num_devices") else "num_devices"
        raise UsageError(
            f"{key}={_plain(given)} gives the plan no number of devices; say num_devices=, an integer of at least 1"
        )
    return int(number)


def check_num_parts(num_parts: int, num_processes: int) -> None:
    """Refuse more processes than parts where each process needs a part of its own.

    Raises:
        UsageError: names both.
    """
    if num_processes > num_parts:
        raise UsageError(
            f"trainer.devices={num_processes} is more than the {num_parts} parts; say "
            f"num_parts={num_processes} or more, or trainer.devices={num_parts} or fewer"
        )


def check_hops(config: DictConfig, num_layers: int | None) -> None:
    """Refuse a sampler whose hops differ from the model's layers; samplers without hops, and whole parts, are accepted.

    Args:
        config: Config composed from `train.yaml`.
        num_layers: Number of layers of the backbone; None if it does not say.

    Raises:
        UsageError: the message names both numbers.
    """
    if not num_layers or config.datamodule.get("mode") != "mini_batch":
        return
    sampler = config.sampler.get("sampler") or config.sampler
    for key in ("fanouts", "nodes_per_layer", "num_layers"):
        value = sampler.get(key)
        hops = len(value) if OmegaConf.is_list(value) else value if key == "num_layers" else None
        if hops and hops != num_layers:
            raise UsageError(
                f"sampler.{key} makes {hops} hops, but model.backbone.num_layers is {num_layers}; give one hop a layer"
            )


def _check_layers(config: DictConfig) -> None:
    from ..model import Backbone  # imports Lightning and PyG, which plans do without

    backbone = get_object(config.model.backbone._target_) if "backbone" in config.model else None
    if inspect.isclass(backbone) and issubclass(backbone, Backbone):
        default = inspect.signature(backbone).parameters["num_layers"].default
        check_hops(config, config.model.backbone.get("num_layers", default))


def _check_monitors(config: DictConfig) -> None:
    """Compare what callbacks watch with what the module logs; a module of the user's own may log anything."""
    from ..model import LinkPredictor, NodeClassifier

    module = get_object(config.model._target_)
    logged = ["train_loss", "val_loss"]
    if module is NodeClassifier:
        logged += ["val_acc"]
    elif module is LinkPredictor:
        hits = config.model.get("hits", inspect.signature(module).parameters["hits"].default)
        logged += ["val_mrr", *(f"val_hits@{k}" for k in hits)]
    else:
        return
    for name, callback in (config.get("callbacks") or {}).items():
        monitor = callback.get("monitor") if callback else None
        if str(monitor).endswith("_loss") and callback.get("mode") == "max":
            raise UsageError(f"callbacks.{name}: mode=max keeps the largest {monitor}; say callbacks.{name}.mode=min")
        if monitor is not None and monitor not in logged:
            remedy = "; or say callbacks=links" if module is LinkPredictor else ""
            raise UsageError(
                f"callbacks.{name}.monitor: no {monitor} is logged; {module.__name__} logs {', '.join(logged)}{remedy}"
            )


def _check_logger(config: DictConfig) -> None:
    logger = OmegaConf.select(config, "trainer.logger")
    if logger is not None and not isinstance(logger, bool) and not OmegaConf.is_config(logger):
        raise UsageError(f"trainer.logger must be true, false or a logger with its _target_, got {logger}")


def _check_num_parts(config: DictConfig) -> None:
    if config.get("num_parts") != "auto":
        _check_integer(config, "num_parts", 1, also=", or auto")


def _check_integer(config: DictConfig, key: str, low: int, high: int | None = None, also: str = "") -> None:
    value = OmegaConf.select(config, key)
    if value is None:
        return
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise UsageError(f"{key} must be an integer {allowed}{also}, got {_plain(value)}")


def _check_above_zero(config: DictConfig, key: str) -> None:
    value = OmegaConf.select(config, key)
    if value is not None and not (_is_number(value) and 0 < value < float("inf")):
        raise UsageError(f"{key} must be a number above 0, got {_plain(value)}")


def _check_at_least_zero(config: DictConfig, key: str) -> None:
    value = OmegaConf.select(config, key)
    if value is not None and not (_is_number(value) and 0 <= value < float("inf")):
        raise UsageError(f"{key} must be a number of at least 0, got {_plain(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Return a value as it was typed, not as OmegaConf prints it."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
