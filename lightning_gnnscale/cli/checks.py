"""Settings are checked before work starts: by themselves, against each other, and with the data set at hand."""

import inspect
from collections.abc import Mapping

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from ..object_store import is_url
from ..traits import BackboneTraits, ModuleTraits
from .compose import key_of
from .errors import UsageError
from .typed import check_ranges, is_integer, plain

_OF_MAKING = ("dataset", "partitioner", "num_parts", "output", "overwrite", "pack_halo")
_OF_MAKING += ("feature_storage", "edge_storage")
_BATCH_GROUPS = ("sampler", "source", "rows", "pack_halo", "evaluation")


def check_settings(config: DictConfig) -> None:
    """Refuse what `check_ranges` does, and settings that do not go together; imports what they name."""
    check_ranges(config)
    _check_monitors(config)
    _check_layers(config)


def planned_devices(config: DictConfig) -> int:
    """Return the devices of the plan; UsageError: no number, for example "auto", which only a Trainer resolves."""
    given = config.num_devices
    if isinstance(given, ListConfig) and len(given):
        return len(given)
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if not is_integer(number, 1):
        key = "trainer.devices" if OmegaConf.is_interpolation(config, "num_devices") else "num_devices"
        raise UsageError(
            f"{key}={plain(given)} gives the plan no number of devices; say num_devices=, an integer of at least 1"
        )
    return int(number)


def check_num_parts(num_parts: int, num_processes: int) -> None:
    """Refuse more processes than parts where each process needs a part of its own."""
    if num_processes > num_parts:
        raise UsageError(
            f"trainer.devices={num_processes} is more than the {num_parts} parts; say "
            f"num_parts={num_processes} or more, or trainer.devices={num_parts} or fewer"
        )


def taken_by(target: str) -> Mapping[str, inspect.Parameter]:
    """Return what the class or function of a dotted name takes."""
    return inspect.signature(get_object(target)).parameters


def takes_sampler(config: DictConfig) -> bool:
    """Whether the DataModule makes batches, and so takes a sampler, a source of batches, and a place of their rows."""
    return "sampler" in taken_by(config.datamodule._target_)


def check_unused(config: DictConfig) -> None:
    """Refuse groups that were set but have no effect."""
    unused = {}
    if config.store is not None:
        unused = dict.fromkeys(_OF_MAKING, f"store={config.store} exists")
    elif is_url(config.output):
        raise UsageError(
            f"output={config.output}: a run trains on a store that is published already: gnnscale partition"
            f" output={config.output}, and then gnnscale train store={config.output}"
        )
    if not takes_sampler(config):
        unused |= dict.fromkeys(_BATCH_GROUPS, "full-graph training has no batches of parts")
    elif config.datamodule.get("mode") == "full_batch":
        unused["sampler"] = "with datamodule.mode=full_batch each part is one batch"
    if not config.get("elastic"):
        unused["save_steps"] = "only elastic=true saves within epochs"
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    for word in words:
        group = key_of(word).partition(".")[0]
        if group in unused:
            raise UsageError(f"{word.lstrip('+')} has no effect, {unused[group]}: leave it out")
    if not OmegaConf.is_interpolation(config, "num_devices"):
        raise UsageError(f"num_devices={config.num_devices} has no effect here: say trainer.devices=")


def check_hops(config: DictConfig, num_layers: int | None) -> None:
    """Refuse a sampler whose hops differ from the model's layers; samplers without hops and whole parts pass."""
    if num_layers is None or config.datamodule.get("mode") != "mini_batch":
        return
    samples = config.sampler.get("neighborhoods", True)
    if samples and not num_layers:
        raise UsageError(
            "the sampler samples neighbourhoods, but the model has no layers: say sampler.neighborhoods=false"
        )
    if not samples and num_layers:
        raise UsageError(
            f"sampler.neighborhoods=false samples none, but the model has {num_layers} layers: leave it true"
        )
    sampler = config.sampler.get("sampler") or config.sampler if samples else {}
    for key in ("fanouts", "nodes_per_layer", "num_layers"):
        value = sampler.get(key)
        if OmegaConf.is_dict(value):  # by edge type
            value = next(iter(value.values()), None)
        hops = len(value) if OmegaConf.is_list(value) else value if key == "num_layers" else None
        if hops and hops != num_layers:
            raise UsageError(
                f"sampler.{key} makes {hops} hops, but model.backbone.num_layers is {num_layers}; give one hop a layer"
            )


def _check_layers(config: DictConfig) -> None:
    from ..model import Backbone  # imports Lightning and PyG, which plans do without

    backbone = get_object(config.model.backbone._target_) if "backbone" in config.model else None
    exact = takes_sampler(config) and (config.get("evaluation") or {}).get("mode") == "layerwise"
    if exact and inspect.isclass(backbone) and BackboneTraits(backbone).layer is None:
        raise UsageError(
            f"evaluation=layerwise computes a layer at a time, which {backbone.__name__} does not offer: say "
            "evaluation=sampled"
        )
    if inspect.isclass(backbone) and issubclass(backbone, Backbone):
        taken = inspect.signature(backbone).parameters.get("num_layers")
        num_layers = backbone.num_layers if taken is None else taken.default
        check_hops(config, config.model.backbone.get("num_layers", num_layers))


def _check_monitors(config: DictConfig) -> None:
    """Compare what callbacks watch with what the module logs; a module of the user's own may log anything."""
    from ..model import EdgeClassifier, LinkPredictor, NodeClassifier, NodeRegressor

    module = get_object(config.model._target_)
    own_metrics = {NodeClassifier: ["val_acc"], EdgeClassifier: ["val_acc"], NodeRegressor: ["val_mae", "val_rmse"]}
    if module is LinkPredictor:
        hits = config.model.get("hits", inspect.signature(module).parameters["hits"].default)
        own_metrics[module] = ["val_mrr", *(f"val_hits@{k}" for k in hits)]
    if module not in own_metrics:
        return
    logged = ["train_loss", "val_loss", *own_metrics[module]]
    remedy = {LinkPredictor: "; or say callbacks=links", NodeRegressor: "; or say callbacks=regression"}.get(module, "")
    for name, callback in (config.get("callbacks") or {}).items():
        monitor = callback.get("monitor") if callback else None
        if str(monitor).endswith(("_loss", "_mae", "_rmse")) and callback.get("mode") == "max":
            raise UsageError(f"callbacks.{name}: mode=max keeps the largest {monitor}; say callbacks.{name}.mode=min")
        if monitor is not None and monitor not in logged:
            raise UsageError(
                f"callbacks.{name}.monitor: no {monitor} is logged; {module.__name__} logs {', '.join(logged)}{remedy}"
            )


def trains_on_links(config: DictConfig) -> bool:
    """Return whether the run trains on links; UsageError where only one of model and sampler does."""
    model, sampler = (
        ModuleTraits(get_object(node._target_)).trains_on_links for node in (config.model, config.sampler)
    )
    if model and not sampler:
        raise UsageError("model trains on links, but the sampler samples none: say sampler=links, or another model")
    if sampler and not model:
        raise UsageError(
            "sampler samples links, but the model does not train on them: say model=link_predictor, or another sampler"
        )
    if model and classifies_edges(config) != bool(config.sampler.get("labelled")):
        if classifies_edges(config):
            raise UsageError(
                "model classifies edges, but the sampler reads no classes: say sampler=edges, or another model"
            )
        raise UsageError(
            "sampler.labelled=true reads classes of edges, but the model does not: say model=edge_classifier"
        )
    return bool(model)


def classifies_edges(config: DictConfig) -> bool:
    """Whether the model classifies edges."""
    return "edge_channels" in taken_by(config.model._target_)


def check_dataset(config: DictConfig, dataset, command: str = "train") -> None:
    """Refuse a data set that lacks what "train", "test" or "predict" needs; the last needs features alone, or edges."""
    if dataset.features is None and not config.model.get("inputs"):
        raise UsageError(
            f"dataset.features: {dataset.name} has none; training needs features of every node, or "
            "embeddings instead: model.inputs.dim=64, or recipe=embeddings"
        )
    on_links = trains_on_links(config)
    on_edges = on_links and classifies_edges(config)
    if config.predict and on_edges and not dataset.links.keys() & {"val", "test"}:
        remedy = "" if command == "predict" else ", or predict=false"
        raise UsageError(
            "dataset.hold_out: predictions are made for held-out edges, and there are none: say "
            f"dataset.hold_out.test=0.1{remedy}"
        )
    if command == "predict":
        return
    if on_links and config.datamodule.get("mode") != "mini_batch":
        raise UsageError(
            "training on links needs mini-batches: say datamodule=partition and datamodule.mode=mini_batch"
        )
    if on_edges and dataset.num_edge_classes < 2:
        raise UsageError(
            f"dataset.edge_label: {dataset.name} has {dataset.num_edge_classes} classes of edges; classifying them "
            "needs two or more, -1 where unknown"
        )
    if not on_links and dataset.labels is None:
        raise UsageError(f"dataset.labels: {dataset.name} has none; training needs them (-1 where unknown)")
    for split, (purpose, remedy) in _splits_read(config, command).items():
        if on_links and split != "train" and split not in dataset.links:  # all other links are trained on
            raise UsageError(
                f"dataset.hold_out: no {split} links are held out: say dataset.hold_out.{split}=0.05{remedy}"
            )
        if not on_links and (split not in dataset.masks or not dataset.masks[split].any()):
            raise UsageError(f"dataset.{split}_mask: {purpose} needs {split} nodes, and there are none{remedy}")


def _splits_read(config: DictConfig, command: str) -> dict[str, tuple[str, str]]:
    """Return the splits that a run reads, each with what reads it and how to do without."""
    if command == "test":
        return {"test": ("testing", "")}
    found = {"train": ("training", "")}
    if any(callback and str(callback.get("monitor")).startswith("val_") for callback in config.callbacks.values()):
        found["val"] = ("a callback that monitors val_*", ", or monitor train_loss with mode=min")
    if config.test:
        found["test"] = ("test=true", ", or say test=false")
    return found
