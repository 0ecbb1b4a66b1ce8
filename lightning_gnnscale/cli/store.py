"""The plan and the store of a run: chosen, named, made, and checked again with what partitioning told."""

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from ..datamodule import StoredGraphDataModule
from ..planner import Plan


def make_store(config: DictConfig, datamodule: StoredGraphDataModule, num_devices: int, **plan_options) -> Plan:
    """Plan the parts, name the folder of the store by what it is made from, and make the store.

    Args:
        config: with `output` (a folder, or None) and `paths.stores`.
        datamodule: its number of parts and its root are settled here.
        num_devices: of the plan.
        plan_options: further arguments of `predict_training`.

    Returns:
        The plan, checked with the halo rows of the largest part where partitioning has counted them.
    """
    plan = datamodule.make_plan(num_devices, **plan_options)
    datamodule.num_parts = plan.num_parts
    name = f"{datamodule.dataset.name}-{config.partitioner.method}-p{plan.num_parts}"
    digest = datamodule.fingerprint(plan.num_parts)[:8]
    datamodule.root = Path(config.output or Path(config.paths.stores) / f"{name}-{digest}")
    datamodule.prepare_data()
    halo = (datamodule.partitioning_facts.get("quality") or {}).get("halo_per_part")
    plan = plan.with_halo(max(halo)) if halo else plan
    if not plan.fits:
        Console(stderr=True).print(f"gnnscale: the plan does not fit: {dict(plan.terms())['fits']}")
    return plan
