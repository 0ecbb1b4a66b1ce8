"""The plan and the store of a run: chosen, named, made, and checked again with what partitioning told."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ..partitioner import Partitioning, partition
from ..planner import Plan
from ..planner.search import PartRows
from ..store_source import StoreSource
from ..store_source.partitioner_identity import method_name
from ..store_source.source import FALLBACK, refusal

# conf/partitioner/spring.yaml, which train.yaml and partition.yaml begin with.
DEFAULT_PARTITIONER = {
    "_target_": "lightning_gnnscale.partitioner.partition",
    "_partial_": True,
    "method": "spring",
}


def make_store(config: DictConfig, source: StoreSource, make_plan: Callable[..., Plan]) -> Plan:
    """Plan the parts, name the folder of the store by what it is made from, and make the store.

    Args:
        config: with `output` (a folder, or None) and `paths.stores`.
        source: of the store; its number of parts and its root are settled here.
        make_plan: returns the plan of the source as it then is; it takes `num_parts` and `part_rows`.

    Returns:
        The plan, checked and predicted with the halo rows of the largest part where partitioning has counted them.

    Raises:
        PlanError: nothing fits, or the parts that were made do not.
    """
    source.root = _standing_root(config, source)  # a store that stands tells the plan its arcs
    given = method_name(source.partitioner)
    plan = source.settle(make_plan, Path(config.paths.stores) / f"{_name(config, source)}.halos.json")
    taken = method_name(source.partitioner)
    if taken != given:
        print(f"gnnscale: parts by {given} do not fit with their halos: they are by {taken}", file=sys.stderr)
    source.num_parts = plan.num_parts
    source.root = _root(config, source, plan.num_parts)
    source.prepare(plan.num_parts)
    part = PartRows.of_quality(source.partitioning_facts.get("quality") or {})
    if part is not None:
        told = make_plan(num_parts=plan.num_parts, part_rows=part.rows)
        plan = replace(told, chosen_by=plan.chosen_by).with_halo(part.halo, part.part_bytes)
    if not plan.fits:
        raise refusal(plan, make_plan, "with the halos that were counted", "num_parts=auto")
    return plan


def fallback_partitioner(config: DictConfig) -> Callable[..., Partitioning] | None:
    """Return the partitioner to take where the default one does not fit; None where the user chose a partitioner."""
    typed = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    is_default = OmegaConf.to_container(config.partitioner) == DEFAULT_PARTITIONER
    if not is_default or any(word.lstrip("+~").startswith("partitioner") for word in typed):
        return None
    return partial(partition, method=FALLBACK)


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
