"""Words of the command line that the run would not read; what a recipe brings for other runs may stay in it."""

import inspect
import re

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from .errors import UsageError

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
