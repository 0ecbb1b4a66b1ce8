"""`gnnscale bench NAME`: one benchmark of the source tree's `benchmarks/`; its config's `_target_` is what runs."""

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from .errors import UsageError

# A benchmark goes over every combination of these.
_AXES = (
    *("graphs", "models", "methods", "partitioners", "policies", "samplers", "sources", "workloads"),
    *("parts", "seeds", "world_sizes", "scales", "threads", "fanouts", "batch_sizes", "groups", "devices", "alphas"),
)
_MAY_BE_ZERO = (
    "sample_ms",
    "minutes",
    "seed",
    "patience",
    "replicate_share",
    "requests_ahead",
    "warm_runs",
    "import_repeats",
)


def run(config: DictConfig) -> None:
    """Run the benchmark; tables, CSV and plots go to the run folder.

    Raises:
        UsageError: a count below 1, or nothing to measure.
    """
    _check_counts(config.bench)
    instantiate(config.bench, output_dir=HydraConfig.get().runtime.output_dir)


def _check_counts(bench: DictConfig) -> None:
    for name, value in bench.items():
        lowest = 0 if name in _MAY_BE_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < lowest:
            raise UsageError(f"bench.{name} must be at least {lowest}, got {value}")
        if name in _AXES and not isinstance(value, int) and not value:
            raise UsageError(f"bench.{name} must name at least one, got {value}")
