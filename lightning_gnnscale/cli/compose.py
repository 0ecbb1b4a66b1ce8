"""Compose a config while another one may be in use."""

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig


def compose_config(config_name: str, overrides: list[str]) -> DictConfig:
    """Return a config of this package, composed apart from the Hydra application that may be running.

    Args:
        config_name: a primary config, for example "train".
        overrides: as on the command line.
    """
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("lightning_gnnscale.conf", version_base="1.3"):
            return compose(config_name, overrides=overrides)
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = running
