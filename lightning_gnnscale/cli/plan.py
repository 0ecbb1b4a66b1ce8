"""`gnnscale plan`: how many parts, what fits where, and why."""

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from .check_settings import check_settings, planned_devices
from .errors import UsageError


def run(config: DictConfig) -> None:
    """Print every term of the plan: of the sizes given, or of a recipe's data set."""
    if "dataset" in config:
        from .train import make_datamodule

        check_settings(config)
        num_devices = planned_devices(config)
        plan = make_datamodule(config, instantiate(config.dataset)).make_plan(num_devices)
    else:
        plan = _plan_of_sizes(config)
    table = Table(title="plan", title_justify="left", show_header=False)
    for term, value in plan.terms():
        table.add_row(term, value)
    Console().print(table)


def _plan_of_sizes(config: DictConfig):
    try:
        return instantiate(config.planner)()
    except ValueError as error:
        is_key = str(error).split(maxsplit=1)[0] in config.planner
        raise UsageError(f"planner.{error}" if is_key else str(error)) from None
