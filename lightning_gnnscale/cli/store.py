"""The plan and the store of a run: chosen, named, made, and checked again with what partitioning told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from ..planner import Plan
from ..store_source import StoreSource


def make_store(config: DictConfig, source: StoreSource, make_plan: Callable[..., Plan]) -> Plan:
    """Plan the parts, name the folder of the store by what it is made from, and make the store.

    Args:
        config: with `output` (a folder, or None) and `paths.stores`.
        source: of the store; its number of parts and its root are settled here.
        make_plan: returns the plan of the source as it then is; it may be given `part_rows`.

    Returns:
        The plan, checked and predicted with the halo rows of the largest part where partitioning has counted them.
    """
    source.root = _standing_root(config, source)  # a store that stands tells the plan its arcs
    plan = make_plan()
    source.num_parts = plan.num_parts
    source.root = _root(config, source, plan.num_parts)
    source.prepare(plan.num_parts)
    quality = source.partitioning_facts.get("quality") or {}
    nodes, halo = quality.get("nodes_per_part"), quality.get("halo_per_part")
    if nodes and halo:
        told = make_plan(part_rows=max(map(sum, zip(nodes, halo, strict=True))))
        plan = replace(plan, host_peak_bytes=told.host_peak_bytes, device_peak_bytes=told.device_peak_bytes)
        plan = plan.with_halo(max(halo))
    if not plan.fits:
        Console(stderr=True).print(f"gnnscale: the plan does not fit: {dict(plan.terms())['fits']}")
    return plan


def _standing_root(config: DictConfig, source: StoreSource) -> Path:
    """Return the folder of a store of this input: of any number of parts where the plan is to choose it."""
    if source.num_parts != "auto":
        return _root(config, source, source.num_parts)
    for folder in Path(config.paths.stores).glob(f"{_name(config, source)}-p*-*"):
        num_parts = folder.name.split("-p")[-1].split("-")[0]
        if num_parts.isdigit() and folder == _root(config, source, int(num_parts)):
            return folder
    return source.root


def _root(config: DictConfig, source: StoreSource, num_parts: int) -> Path:
    digest = source.fingerprint(num_parts)[:8]
    name = f"{_name(config, source)}-p{num_parts}-{digest}"
    return Path(config.output or Path(config.paths.stores) / name)


def _name(config: DictConfig, source: StoreSource) -> str:
    return f"{source.dataset.name}-{config.partitioner.method}"
