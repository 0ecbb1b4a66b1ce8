"""Compose a config while another one may be in use."""

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

GROUPS = "lightning_gnnscale.conf"


def compose_config(config_name: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Return a config, composed apart from the Hydra application that may be running.

    Args:
        config_name: a primary config, for example "train".
        overrides: as on the command line.
        config_dir: folder of the primary config; None: this package's own.
    """
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        if config_dir is None:
            with initialize_config_module(GROUPS, version_base="1.3"):
                return compose(config_name, overrides=overrides)
        with initialize_config_dir(config_dir, version_base="1.3"):
            return compose(config_name, overrides=[f"hydra.searchpath=[pkg://{GROUPS}]", *overrides])
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = running
