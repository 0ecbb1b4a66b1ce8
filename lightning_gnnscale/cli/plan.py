"""`gnnscale plan`: how many parts, what fits where, and why."""

from functools import partial

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from .check_settings import check_settings, planned_devices
from .errors import UsageError
from .ranks import own_start_method


def run(config: DictConfig) -> None:
    """Print every term of the plan: of the sizes given, or of a recipe's data set."""
    if "dataset" in config:
        from .train import make_datamodule, model_widths

        check_settings(config)
        num_devices = planned_devices(config)
        datamodule = make_datamodule(config, instantiate(config.dataset))
        accelerator = planned_accelerator(config)
        options = {"accelerator": accelerator, "start_method": own_start_method(num_devices, accelerator)}
        options |= model_widths(config)
        if config.strategy.get("weights"):
            options["mixed_parts"] = datamodule.mixed_parts(instantiate(config.strategy.weights))
        plan = datamodule.store_source.estimate(partial(datamodule.make_plan, num_devices, **options))
    else:
        plan = _plan_of_sizes(config)
    table = Table(title="plan", title_justify="left", show_header=False)
    for term, value in plan.terms():
        table.add_row(term, value)
    Console().print(table)


def planned_accelerator(config: DictConfig) -> str:
    """Return what the planner asks of the Trainer's settings: "cpu", "gpu", or "auto"."""
    given = str(config.trainer.accelerator)
    return "gpu" if given == "cuda" else given if given in ("cpu", "gpu") else "auto"


def _plan_of_sizes(config: DictConfig):
    try:
        return instantiate(config.planner)()
    except ValueError as error:
        is_key = str(error).split(maxsplit=1)[0] in config.planner
        raise UsageError(f"planner.{error}" if is_key else str(error)) from None
