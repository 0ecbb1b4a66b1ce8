"""`gnnscale bench NAME`: one benchmark; its config's `_target_` is what runs."""

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig


def run(config: DictConfig) -> None:
    """Run the benchmark; tables, CSV and plots go to the run folder."""
    instantiate(config.bench, output_dir=HydraConfig.get().runtime.output_dir)
