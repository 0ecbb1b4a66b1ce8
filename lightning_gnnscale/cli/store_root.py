"""The folder of a store, named by what it is made from."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ..rng import fold


def store_root(config: DictConfig, dataset) -> Path:
    """Return `paths.stores/<data set>-<method>-<parts>-<digest of the settings that decide the store>`."""
    settings = OmegaConf.to_yaml(OmegaConf.create({key: config[key] for key in ("dataset", "partitioner", "seed")}))
    digest = fold(*settings.encode(), *dataset.stream.fingerprint().encode()) >> 32
    parts = f"p{config.num_parts}"
    return Path(config.paths.stores) / f"{dataset.name}-{config.partitioner.method}-{parts}-{digest:08x}"
