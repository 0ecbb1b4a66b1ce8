"""Whether a data set has what a run needs, asked before anything is partitioned."""

from omegaconf import DictConfig

from .errors import UsageError


def check_dataset(config: DictConfig, dataset) -> None:
    """Refuse a data set that lacks what the run needs.

    Args:
        config: composed from `train.yaml`.
        dataset: a `GraphDataset`.

    Raises:
        UsageError: names the key and the remedy.
    """
    if dataset.features is None:
        raise UsageError(f"dataset.features: {dataset.name} has none; training needs a row of features for every node")
    if dataset.labels is None:
        raise UsageError(f"dataset.labels: {dataset.name} has none; training needs them (-1 where unknown)")
    monitors = [str(callback.get("monitor")) for callback in config.callbacks.values() if callback]
    purposes = {
        "train": ("training", ""),
        "val": ("a callback that monitors val_*", ", or monitor train_loss"),
        "test": ("test=true", ", or say test=false"),
    }
    if not any(name.startswith("val_") for name in monitors):
        del purposes["val"]
    if not config.test:
        del purposes["test"]
    for split, (purpose, remedy) in purposes.items():
        if split not in dataset.masks or not dataset.masks[split].any():
            raise UsageError(f"dataset.{split}_mask: {purpose} needs {split} nodes, and there are none{remedy}")
