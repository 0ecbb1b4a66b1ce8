"""`gnnscale bench NAME`: one benchmark of the source tree's `benchmarks/`; its config's `_target_` is what runs."""

import os
import sys
from pathlib import Path

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
    "draw_ms",
    "minutes",
    "seed",
    "patience",
    "replicate_share",
    "requests_ahead",
    "warm_runs",
    "import_repeats",
)


SOURCE = "GNNSCALE_SOURCE"


def find_benchmarks() -> Path:
    """Let `benchmarks` be imported, here and in processes that this one starts; return the source tree that has it.

    It is that of GNNSCALE_SOURCE where that is set, else the one that this package is installed from, else the current
    folder.

    Raises:
        UsageError: none of them has benchmarks.
    """
    named = os.environ.get(SOURCE)
    trees = [Path(named).expanduser()] if named else [Path(__file__).parents[2], Path.cwd()]
    found = next((tree.absolute() for tree in trees if (tree / "benchmarks" / "runner.py").is_file()), None)
    if found is None:
        looked = " or ".join(str(tree / "benchmarks") for tree in trees)
        raise UsageError(
            f"no benchmarks in {looked}: the source tree has them, and a wheel does not; clone it, and pip install -e "
            f". there, or set {SOURCE} to its folder"
        )
    if str(found) not in sys.path:
        sys.path.insert(0, str(found))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(found) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(found), *filter(None, paths)])
    return found


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
