"""`gnnscale partition`: a graph on disk becomes a partition store."""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from .. import events
from ..memory import process_bytes
from ..partition_store import PartitionStore
from ..report.progress import ProgressBars
from ..report.summary import print_summary, stage_rows
from ..store_source import StoreSource
from .check_settings import check_settings, planned_devices
from .ranks import own_start_method
from .store import make_store

# What will train on the store is not known yet: the plan is of `PartitionDataModule`'s batches, as they are by default.
DEFAULT_BATCHES = {"batch_size": 512, "fanouts": (25, 10), "prefetch_batches": 3, "mixed_parts": 4}


def run(config: DictConfig) -> dict:
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
