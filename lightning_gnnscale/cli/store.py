"""`gnnscale partition` and `gnnscale verify`: plan, name and write the store of a run, and check it byte by byte."""

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from .. import events
from ..errors import PartitionStoreError
from ..memory import process_bytes
from ..object_store import ObjectStore, check_storage_options, is_url
from ..partition_store import PartitionStore, StoreSource, publish
from ..partition_store.composition import store_composition
from ..partition_store.manifest import MANIFEST
from ..partition_store.partitioner_identity import method_name
from ..partition_store.store_source import refusal
from ..planner import Plan
from ..planner.search import PartRows
from ..report.terminal import ProgressBars, print_summary, stage_rows, write_summary
from ..sampler.neighbor import hop_fanouts
from .checks import check_settings, planned_devices
from .errors import UsageError, show_warning
from .ranks import own_start_method
from .run_folder import leave_report

# The plan's numbers of batches prepared ahead, and mixed, where the settings give none.
_BATCHES = {"batch_size": 512, "fanouts": (25, 10), "prefetch_batches": 3, "mixed_parts": 4}


def partition(config: DictConfig) -> dict:
    """Partition, store, and print the cost and the result."""
    warnings.showwarning = show_warning
    check_settings(config)
    num_devices = planned_devices(config)
    folder = Path(HydraConfig.get().runtime.output_dir)
    events.open_log(folder / "events.jsonl")
    events.begin_run(command="partition")
    if config.store is not None:
        raise UsageError(f"store={config.store} exists already: leave it out, or say gnnscale inspect {config.store}")
    to_url = is_url(config.output)
    if to_url:  # an unreachable store fails before the work
        ObjectStore(config.output, *storage(config)).facts(MANIFEST)
    with ProgressBars() as progress:
        with events.stage("load"):
            dataset = instantiate(config.dataset)
        source = store_source(config, dataset, progress)
        held = {"interpreter_bytes": process_bytes(), "start_method": own_start_method(num_devices)}
        make_plan = partial(source.make_plan, num_devices, **held, **_batches(config))
        plan = make_store(config, source, make_plan)
        if to_url:
            publish(source.root, config.output, config.overwrite, *storage(config), progress=progress)
    facts, store = source.partitioning_facts, PartitionStore.open(source.root)
    events.record("parts", **store_composition(store))
    quality = facts.get("quality") or {}
    log = events.last_run(events.read_log(folder / "events.jsonl"))
    summary = {
        "title": f"partition of {dataset.name}",
        "stages": stage_rows(log, dict(plan.host_peak_bytes)),
        "facts": {
            "method": facts.get("method"),
            "nodes": f"{store.num_nodes:,}",
            "edges stored": f"{store.num_edges:,}",
            "store": str(store.root),
            **({"published": config.output} if to_url else {}),
            "report": str(folder / "report.html"),
        },
    }
    print_summary(summary)
    _print_quality(quality)
    write_summary(folder, {"partitioning": facts, "plan": dataclasses.asdict(plan), **summary}, "run.json")
    leave_report(folder)
    return summary


def store_source(config: DictConfig, dataset, progress=None) -> StoreSource:
    """Return the source of a data set's store."""
    made = {name: instantiate(config[name]) for name in ("partitioner", "planner")}
    keys = ("num_parts", "seed", "overwrite", "pack_halo", "feature_storage", "edge_storage")
    given = {key: config[key] for key in keys}
    return StoreSource(dataset, config.paths.stores, **made, **given, progress=progress)


def _batches(config: DictConfig) -> dict:
    """Return the plan's figures of training batches, without importing the classes."""
    size, fanouts = OmegaConf.select(config, "datamodule.batch_size"), OmegaConf.select(config, "sampler.fanouts")
    given = {"batch_size": size, "fanouts": None if fanouts is None else hop_fanouts(OmegaConf.to_container(fanouts))}
    return _BATCHES | {name: value for name, value in given.items() if value is not None}


def _print_quality(quality: dict) -> None:
    table = Table(title="quality", title_justify="left", show_header=False)
    for name, value in quality.items():
        if isinstance(value, (int, float)):
            table.add_row(name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)


def verify(config: DictConfig) -> None:
    """Print what was checked; exit with 1 and one line on stderr where the store differs from what was written."""
    began = time.perf_counter()
    try:
        is_named = "dataset" not in config or config.store is not None
        store = open_store(config) if is_named else found_store(config)
        store.verify()
    except PartitionStoreError as error:
        print(f"gnnscale: {error}", file=sys.stderr)
        sys.exit(1)
    files = store.manifest["files"].values()
    num_bytes, seconds = sum(entry["bytes"] for entry in files), time.perf_counter() - began
    where = config.store if config.store is not None and is_url(config.store) else store.root
    print(f"{where}: {len(files)} files, {num_bytes:,} bytes, all as written ({seconds:.1f} s)")


def found_store(config: DictConfig, dataset=None) -> PartitionStore:
    """Return the store that exists of the data set and the partitioner of a config; UsageError: there is none."""
    dataset = instantiate(config.dataset) if dataset is None else dataset
    store = standing_store(config, store_source(config, dataset))
    if store is None:
        raise UsageError(
            f"no store of {dataset.name} with these settings is in {config.output or config.paths.stores}: make it "
            "with gnnscale partition and the same words, or name a store's folder"
        )
    return store


def storage(config: DictConfig) -> tuple[dict, float]:
    """Return storage_options and timeout_s of a config, see `ObjectStore`."""
    return check_storage_options(OmegaConf.to_container(config.storage_options)), config.storage_timeout_s


def open_store(config: DictConfig) -> PartitionStore:
    """Open the store that `store` names: a folder, or a URL, from which this machine fetches what it reads."""
    if config.store is None:
        raise UsageError("store must be text, got null")
    if not is_url(config.store):
        if config.get("store_cache_bytes") is not None:
            raise UsageError(f"store_cache_bytes goes with a store at a URL, got store={config.store}: leave it out")
        return PartitionStore.open(config.store, verify=config.get("verify", False))  # `gnnscale verify` reads it all
    options, timeout_s = storage(config)
    return PartitionStore.open(
        config.store, cache_bytes=config.get("store_cache_bytes"), storage_options=options, timeout_s=timeout_s
    )


class StoredData:
    """A store instead of the `GraphDataset` that it was made from, for the checks before training."""

    def __init__(self, name: str, store: PartitionStore):
        self.name, self.features, self.labels, self.masks = name, store.features, store.labels, store.masks
        self.links: dict = {}  # a store has no held-out links
        edge_features = store.edge_column("edge_features", whole=False)
        self.edge_dim = None if edge_features is None else int(edge_features.shape[1])
        self.feature_dim = 0 if store.features is None else store.features.dim
        self.num_edge_classes = store.num_edge_classes
        self.schema, self.type_sizes, self.feature_dims = store.schema, store.type_sizes, None
        if store.features is not None and store.features.by_node_type:
            self.feature_dims = dict(zip(store.schema.node_types, store.features.dims, strict=True))
        self.multilabel = store.labels is not None and store.labels.ndim == 2
        self.num_classes = None
        if store.labels is not None:
            self.num_classes = store.labels.shape[1] if self.multilabel else int(store.labels.max(initial=0)) + 1
        self.edge_weight = None if store.least_edge_weight is None else np.array([store.least_edge_weight])


def plan_standing(store: PartitionStore, make_plan: Callable[..., Plan]) -> Plan:
    """Return the plan of training on a store as it is; PlanError: its parts do not fit."""
    rows = store.part_rows
    made = make_plan(part_rows=int(rows.max()))
    peaks = {stage: peak for stage, peak in made.host_peak_bytes.items() if not stage.startswith("partition")}
    plan = dataclasses.replace(made, host_peak_bytes=peaks).with_halo(int((rows - np.diff(store.part_offsets)).max()))
    if not plan.fits:
        raise refusal(plan, make_plan, "with the parts of the store that exists")
    return plan


def make_store(config: DictConfig, source: StoreSource, make_plan: Callable[..., Plan]) -> Plan:
    """Plan the parts, name the store's folder after what the store is made from, and make the store.

    Args:
        source: Source of the store; its number of parts and its root are set here.
        make_plan: Returns the plan of the source in its current state; takes `num_parts` and `part_rows`.

    Returns:
        The plan. If partitioning has counted the halo rows of the largest part, it is checked and predicted with them.

    Raises:
        PlanError: nothing fits, or the parts that were made do not fit.
    """
    source.root = _standing_root(config, source)  # the plan takes its edges from an existing store
    plan = source.settle(make_plan, Path(config.paths.stores) / f"{_name(config, source)}.halos.json")
    source.num_parts = plan.num_parts
    source.root = _root(config, source, plan.num_parts)
    source.prepare(plan.num_parts)
    part = PartRows.of_quality(source.partitioning_facts.get("quality") or {})
    if part is not None:
        told = make_plan(num_parts=plan.num_parts, part_rows=part.rows)
        peaks = plan.host_peak_bytes | told.host_peak_bytes  # those of the store that was made, too
        plan = dataclasses.replace(told, chosen_by=plan.chosen_by, host_peak_bytes=peaks).with_halo(
            part.halo, part.part_bytes
        )
    if not plan.fits:
        raise refusal(plan, make_plan, "with the halos that were counted", "num_parts=auto")
    return plan


def standing_store(config: DictConfig, source: StoreSource) -> PartitionStore | None:
    """Return the existing store that `make_store` would use; None: there is none."""
    root = _standing_root(config, source)
    return PartitionStore.open(root) if root is not None and (Path(root) / MANIFEST).exists() else None


def _standing_root(config: DictConfig, source: StoreSource) -> Path:
    """Return the folder of a store of this input, with any number of parts where the plan chooses it."""
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
    given = None if is_url(config.output) else config.output
    return Path(given or Path(config.paths.stores) / name)


def _name(config: DictConfig, source: StoreSource) -> str:
    return f"{source.dataset.name}-{method_name(source.partitioner)}"
