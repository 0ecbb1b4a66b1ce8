"""`gnnscale plan`: how many parts, what fits where, and why."""

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table


def run(config: DictConfig) -> None:
    """Print every term of the plan: of the sizes given, or of a recipe's data set."""
    if "dataset" in config:
        from .train import make_datamodule

        plan = make_datamodule(config, instantiate(config.dataset)).make_plan(config.num_devices)
    else:
        plan = instantiate(config.planner)()
    table = Table(title="plan", title_justify="left", show_header=False)
    for term, value in plan.terms():
        table.add_row(term, value)
    Console().print(table)
