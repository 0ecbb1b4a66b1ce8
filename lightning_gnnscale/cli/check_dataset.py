"""Whether a data set has what a run needs, asked before anything is partitioned."""

from hydra.utils import get_object
from omegaconf import DictConfig

from .errors import UsageError


def trains_on_links(config: DictConfig) -> bool:
    """Return whether the run trains on links, which takes a model and a sampler that both do.

    Raises:
        UsageError: only one of them does.
    """
    model, sampler = (
        getattr(get_object(node._target_), "trains_on_links", False) for node in (config.model, config.sampler)
    )
    if model and not sampler:
        raise UsageError("model trains on links, the sampler draws none: say sampler=links, or another model")
    if sampler and not model:
        raise UsageError("sampler draws links, the model is not for them: say model=link_predictor, or another sampler")
    return bool(model)


def check_dataset(config: DictConfig, dataset) -> None:
    """Refuse a data set that lacks what the run needs.

    Args:
        config: composed from `train.yaml`.
        dataset: a `GraphDataset`.

    Raises:
        UsageError: names the key and the remedy.
    """
    if dataset.features is None and not config.model.get("inputs"):
        raise UsageError(
            f"dataset.features: {dataset.name} has none; training needs a row of features for every node, or "
            "embeddings in their place: model.inputs, as in recipe=embeddings"
        )
    monitors = [str(callback.get("monitor")) for callback in config.callbacks.values() if callback]
    if trains_on_links(config):
        _check_links(config, dataset, monitors)
        return
    if dataset.labels is None:
        raise UsageError(f"dataset.labels: {dataset.name} has none; training needs them (-1 where unknown)")
    purposes = {
        "train": ("training", ""),
        "val": ("a callback that monitors val_*", ", or monitor train_loss with mode=min"),
        "test": ("test=true", ", or say test=false"),
    }
    if not any(name.startswith("val_") for name in monitors):
        del purposes["val"]
    if not config.test:
        del purposes["test"]
    for split, (purpose, remedy) in purposes.items():
        if split not in dataset.masks or not dataset.masks[split].any():
            raise UsageError(f"dataset.{split}_mask: {purpose} needs {split} nodes, and there are none{remedy}")


def _check_links(config: DictConfig, dataset, monitors: list[str]) -> None:
    if config.datamodule.get("mode") != "mini_batch":
        raise UsageError(
            "links are trained on in mini-batches: say datamodule=partition and datamodule.mode=mini_batch"
        )
    for name in monitors:
        if name.startswith("val_") and not name.startswith(("val_mrr", "val_hits@", "val_loss")):
            raise UsageError(f"callbacks: no {name} is logged for links; say callbacks=links, or monitor val_mrr")
    needed = {"val": any(name.startswith("val_") for name in monitors), "test": config.test}
    remedies = {"val": "monitor train_loss with mode=min", "test": "say test=false"}
    for split, is_needed in needed.items():
        if is_needed and split not in dataset.links:
            raise UsageError(
                f"dataset.hold_out: no {split} links are held out: say dataset.hold_out.{split}=0.05, or "
                f"{remedies[split]}"
            )
