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
    datamodule.root = _standing_root(config, datamodule)  # a store that stands tells the plan its arcs
    plan = datamodule.make_plan(num_devices, **plan_options)
    datamodule.num_parts = plan.num_parts
    datamodule.root = _root(config, datamodule, plan.num_parts)
    datamodule.prepare_data()
    halo = (datamodule.partitioning_facts.get("quality") or {}).get("halo_per_part")
    plan = plan.with_halo(max(halo)) if halo else plan
    if not plan.fits:
        Console(stderr=True).print(f"gnnscale: the plan does not fit: {dict(plan.terms())['fits']}")
    return plan


def _standing_root(config: DictConfig, datamodule: StoredGraphDataModule) -> Path:
    """Return the folder of a store of this input: of any number of parts where the plan is to choose it."""
    if datamodule.num_parts != "auto":
        return _root(config, datamodule, datamodule.num_parts)
    for folder in Path(config.paths.stores).glob(f"{_name(config, datamodule)}-p*-*"):
        num_parts = folder.name.split("-p")[-1].split("-")[0]
        if num_parts.isdigit() and folder == _root(config, datamodule, int(num_parts)):
            return folder
    return Path(datamodule.root)


def _root(config: DictConfig, datamodule: StoredGraphDataModule, num_parts: int) -> Path:
    digest = datamodule.fingerprint(num_parts)[:8]
    name = f"{_name(config, datamodule)}-p{num_parts}-{digest}"
    return Path(config.output or Path(config.paths.stores) / name)


def _name(config: DictConfig, datamodule: StoredGraphDataModule) -> str:
    return f"{datamodule.dataset.name}-{config.partitioner.method}"
