"""The plan and the store of a run: chosen, named, made, and checked again with what partitioning told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from ..planner import Plan
from ..planner.search import PartRows
from ..store_source import StoreSource
from ..store_source.partitioner_identity import method_name
from ..store_source.source import refusal


def make_store(config: DictConfig, source: StoreSource, make_plan: Callable[..., Plan]) -> Plan:
    """Plan the parts, name the store's folder after what the store is made from, and make the store.

    Args:
        config: Config with `output` (a folder, or None) and `paths.stores`.
        source: Source of the store; its number of parts and its root are set here.
        make_plan: Returns the plan of the source in its current state; takes `num_parts` and `part_rows`.

    Returns:
        The plan. If partitioning has counted the halo rows of the largest part, it is checked and predicted with them.

    Raises:
        PlanError: nothing fits, or the parts that were made do not fit.
    """
    source.root = _standing_root(config, source)  # a store that stands tells the plan its arcs
    plan = source.settle(make_plan, Path(config.paths.stores) / f"{_name(config, source)}.halos.json")
    source.num_parts = plan.num_parts
    source.root = _root(config, source, plan.num_parts)
    source.prepare(plan.num_parts)
    part = PartRows.of_quality(source.partitioning_facts.get("quality") or {})
    if part is not None:
        told = make_plan(num_parts=plan.num_parts, part_rows=part.rows)
        peaks = plan.host_peak_bytes | told.host_peak_bytes  # of what was made, too
        plan = replace(told, chosen_by=plan.chosen_by, host_peak_bytes=peaks).with_halo(part.halo, part.part_bytes)
    if not plan.fits:
        raise refusal(plan, make_plan, "with the halos that were counted", "num_parts=auto")
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
    return f"{source.dataset.name}-{method_name(source.partitioner)}"
