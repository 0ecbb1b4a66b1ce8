"""`gnnscale partition` and `gnnscale verify`: the store of a run is planned, named, made, and checked byte by byte."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from .. import events
from ..errors import PartitionStoreError
from ..memory import process_bytes
from ..partition_store import PartitionStore
from ..planner import Plan
from ..planner.search import PartRows
from ..report.terminal import ProgressBars, print_summary, stage_rows
from ..store_source import StoreSource
from ..store_source.partitioner_identity import method_name
from ..store_source.source import refusal
from .checks import check_settings, planned_devices
from .ranks import own_start_method

# What will train on the store is not known yet: the plan is of `PartitionDataModule`'s batches, as they are by default.
DEFAULT_BATCHES = {"batch_size": 512, "fanouts": (25, 10), "prefetch_batches": 3, "mixed_parts": 4}


def partition(config: DictConfig) -> dict:
    """Partition, store, and print what it cost and what came of it."""
    check_settings(config)
    num_devices = planned_devices(config)
    folder = Path(HydraConfig.get().runtime.output_dir)
    events.open_log(folder / "events.jsonl")
    events.begin_run(command="partition")
    with ProgressBars() as progress:
        with events.stage("load"):
            dataset = instantiate(config.dataset)
        source = StoreSource(
            dataset,
            config.paths.stores,
            partitioner=instantiate(config.partitioner),
            planner=instantiate(config.planner),
            num_parts=config.num_parts,
            seed=config.seed,
            overwrite=config.overwrite,
            pack_halo=config.pack_halo,
            feature_storage=config.feature_storage,
            progress=progress,
        )
        held = {"interpreter_bytes": process_bytes(), "start_method": own_start_method(num_devices)}
        make_plan = partial(source.make_plan, num_devices, **held, **DEFAULT_BATCHES)
        plan = make_store(config, source, make_plan)
    facts, store = source.partitioning_facts, PartitionStore.open(source.root)
    quality = facts.get("quality") or {}
    log = events.last_run(events.read_log(folder / "events.jsonl"))
    summary = {
        "title": f"partition of {dataset.name}",
        "stages": stage_rows(log, dict(plan.host_peak_bytes)),
        "facts": {
            "method": facts.get("method"),
            "nodes": f"{store.num_nodes:,}",
            "arcs stored": f"{store.num_arcs:,}",
            "store": str(store.root),
        },
    }
    print_summary(summary)
    _print_quality(quality)
    temporary = folder / "run.json.tmp"
    temporary.write_text(json.dumps({"partitioning": facts, "plan": dataclasses.asdict(plan), **summary}, indent=2))
    os.replace(temporary, folder / "run.json")
    return summary


def _print_quality(quality: dict) -> None:
    table = Table(title="quality", title_justify="left", show_header=False)
    for name, value in quality.items():
        if isinstance(value, (int, float)):
            table.add_row(name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)


def verify(config: DictConfig) -> None:
    """Print what was checked; exit with 1, and one line on stderr, where the store is not as it was written."""
    began = time.perf_counter()
    try:
        store = PartitionStore.open(config.store)
        store.verify()
    except PartitionStoreError as error:
        print(f"gnnscale: {error}", file=sys.stderr)
        sys.exit(1)
    files = store.manifest["files"].values()
    num_bytes, seconds = sum(entry["bytes"] for entry in files), time.perf_counter() - began
    print(f"{store.root}: {len(files)} files, {num_bytes:,} bytes, all as written ({seconds:.1f} s)")


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
        plan = dataclasses.replace(told, chosen_by=plan.chosen_by, host_peak_bytes=peaks).with_halo(
            part.halo, part.part_bytes
        )
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
