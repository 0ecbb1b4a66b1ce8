"""`gnnscale inspect`: show what a run folder, a checkpoint, a partition store or a data set holds."""

from pathlib import Path

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import PartitionStoreError, plain_text
from ..memory import format_bytes
from ..object_store import is_url
from ..partition_store import PartitionStore
from ..partition_store.manifest import MANIFEST
from ..partition_store.versions import said_counts
from ..report.run_files import read_settings, read_summary
from ..report.terminal import print_facts
from .compose import hidden
from .errors import UsageError
from .run_paths import CHECKPOINTS, CONFIG
from .store import open_store, standing_store, store_source
from .stores import size_by_kind

_MOST_PARTS = 16  # shown one a row
_MOST_NAMED = 20  # edge types


def run(config: DictConfig) -> None:
    """Print what a path holds, or the data set of the settings and the store that they would train on."""
    if "dataset" in config:
        _show_dataset(config)
        return
    path = Path(str(config.path)).expanduser()
    if is_url(config.path):
        _show_store(open_store(OmegaConf.create({**config, "store": config.path, "store_cache_bytes": None})))
    elif (path / MANIFEST).is_file():
        _show_store(PartitionStore.open(path, verify=False))
    elif path.is_dir() and (path / CONFIG).is_file():
        _show_run(path)
    elif path.suffix == ".ckpt":
        _show_checkpoint(path)
    elif not path.exists():
        raise UsageError(f"{config.path}: no such file or folder")
    elif (path / ".hydra").is_dir():
        raise UsageError(
            f"{config.path} is the folder of a run that ended before it trained; the words of its command are in "
            f"{path / '.hydra' / 'overrides.yaml'}"
        )
    else:
        try:
            PartitionStore.open(path)  # its error says what is missing
        except PartitionStoreError as error:
            raise UsageError(f"{error}; inspect takes a run's folder, a checkpoint, or a store") from None


def _show_facts(title: str, facts: dict) -> None:
    told = {name: plain_text(hidden(str(value))) for name, value in facts.items() if value is not None}
    print_facts(plain_text(title), told)


def _version(version: dict) -> str:
    return f"version {version['number']} of {version['parent']['name']}: {said_counts(version['counts'])}"


def _show_store(store: PartitionStore) -> None:
    manifest, features, labels = store.manifest, store.features, store.labels
    told = None
    if features is not None and features.by_node_type:
        told = ", ".join(
            f"{node_type} {table.dim} columns, {'sparse' if table.is_sparse else table.dtype}"
            for node_type, table in zip(store.schema.node_types, features.tables, strict=True)
            if table is not None
        )
    elif features is not None:
        form = "sparse" if features.is_sparse else manifest["feature_storage"] or str(features.dtype)
        told = f"{features.dim} columns, {form}"
    sizes = size_by_kind(manifest)
    facts = {
        "nodes": f"{store.num_nodes:,}",
        "edges": f"{store.num_edges:,} ({'in both directions' if store.symmetric else 'as given'})",
        "version": None if store.version is None else _version(store.version),
        "parts": f"{store.num_parts} by {manifest['method'] or 'the user'}, seed {manifest['seed']}"
        + (f", for {store.num_machines} machines" if store.num_machines > 1 else ""),
        "node types": _node_types(store),
        "edge types": _edge_types(store),
        "features": told,
        "labels": None if labels is None else _targets(labels) if store.regression else _labels(labels),
        "masks": ", ".join(f"{name} {int(mask.sum()):,}" for name, mask in store.masks.items()) or None,
        "node ids": "the user's own" if {"user_ids", "user_id_bytes"} & set(manifest["files"]) else "0, 1, ...",
        "halo rows packed": "yes" if manifest["pack_halo"] else "no",
        "size": f"{format_bytes(sum(sizes.values()))} ("
        + ", ".join(
            f"{content} {format_bytes(size)}" for content, size in sorted(sizes.items(), key=lambda one: -one[1])
        )
        + ")",
        "checksums": f"gnnscale verify {store.root}",
    }
    _show_facts(f"store {store.root}", facts)
    nodes, rows = np.diff(store.part_offsets), store.part_rows
    train = store.masks.get("train")
    table = Table("part", "nodes", "halo nodes", "train nodes", box=SIMPLE)
    for part in range(min(store.num_parts, _MOST_PARTS)):
        own = slice(store.part_offsets[part], store.part_offsets[part + 1])
        trained = "" if train is None else f"{int(train[own].sum()):,}"
        table.add_row(str(part), f"{nodes[part]:,}", f"{int(rows[part] - nodes[part]):,}", trained)
    if store.num_parts > _MOST_PARTS:
        table.add_row("...", f"largest {nodes.max():,}", f"largest {int((rows - nodes).max()):,}", "")
    Console().print(table)


def _edge_types(store: PartitionStore) -> str | None:
    """Return the number of edge types of a graph with several, and the names of the first ones."""
    if store.schema is None:
        return None
    names = [",".join(name) for name in store.schema.edge_types[:_MOST_NAMED]]
    left = store.schema.num_edge_types - len(names)
    return f"{store.schema.num_edge_types:,}: {'; '.join(names)}{f' and {left:,} more' if left else ''}"


def _node_types(store: PartitionStore) -> str | None:
    """Return the node types of a graph with several, and their numbers of nodes."""
    if store.schema is None or store.schema.num_node_types == 1:
        return None
    sizes = zip(store.schema.node_types, store.manifest["schema"]["kind_sizes"], strict=True)
    return ", ".join(f"{node_type} {size:,}" for node_type, size in sizes)


def _targets(labels: np.ndarray) -> str:
    known = int(np.isfinite(labels).any(axis=1).sum())
    return f"{labels.shape[1]} numbers to predict, known of {known:,} nodes"


def _labels(labels: np.ndarray) -> str:
    if labels.ndim == 2:
        return f"{labels.shape[1]} a node"
    if labels.dtype.kind == "f":
        return "numbers"
    return f"{int(labels.max(initial=-1)) + 1} classes, {int((np.asarray(labels) >= 0).sum()):,} nodes labelled"


def _show_run(folder: Path) -> None:
    # Not resolved: references stay as written.
    summary_file, config = folder / "summary.json", read_settings(folder / CONFIG)
    summary = read_summary(summary_file) if summary_file.is_file() else {}
    facts = {
        name: f"{value:.4f}" if isinstance(value, float) else value
        for name, value in (summary.get("facts") or {}).items()
    }
    model = config.get("model") or {}
    backbone = model.get("backbone")
    model = (backbone.get("_target_") if isinstance(backbone, dict) else None) or model.get("_target_")
    checkpoints = sorted((folder / CHECKPOINTS).glob("*.ckpt")) if (folder / CHECKPOINTS).is_dir() else []
    facts = {
        "data set": (config.get("dataset") or {}).get("name"),
        "model": str(model).rpartition(".")[2],
        "finished": "yes" if summary else _how_to_go_on(folder, checkpoints),
        **facts,
        "checkpoints": ", ".join(path.name for path in checkpoints) or "none",
    }
    _show_facts(f"run {config.get('name', folder.name)}", facts)


def _how_to_go_on(folder: Path, checkpoints: list[Path]) -> str:
    if not checkpoints:
        return "no, and no checkpoint was saved: the command that started it starts it again"
    return f"no: gnnscale train resume={folder} goes on with the same settings"


def _show_checkpoint(path: Path) -> None:
    from ..model.checkpoint_file import MODEL_KEY, ROWS_KEY, check_is_lightnings, read_checkpoint

    saved = check_is_lightnings(read_checkpoint(path, mmap=True), path)
    backbone = dict((saved.get(MODEL_KEY) or {}).get("backbone") or {})
    name = str(backbone.pop("_target_", "")).rpartition(".")[2]
    settings = ", ".join(f"{name}={value}" for name, value in backbone.items())
    weights = saved["state_dict"]
    watched = [one for one in (saved.get("callbacks") or {}).values() if isinstance(one, dict) and one.get("monitor")]
    facts = {
        "epoch": saved.get("epoch"),
        "step": saved.get("global_step"),
        "model": f"{name}({settings})" if name else "not saved: load_from_checkpoint needs backbone=",
        "module": ", ".join(f"{name}={value}" for name, value in (saved.get("hyper_parameters") or {}).items()) or None,
        "weights": f"{sum(w.numel() for w in weights.values()):,} numbers in {len(weights)} tensors",
        "learned rows beside it": (saved.get(ROWS_KEY) or {}).get("folder"),
        "written by": f"Lightning {saved.get('pytorch-lightning_version', '?')}",
    }
    for one in watched:
        score = one.get("best_model_score")
        if score is not None:
            facts[f"best {one['monitor']}"] = f"{float(score):.4f} ({Path(one['best_model_path']).name})"
    _show_facts(f"checkpoint {path}", facts)


def _show_dataset(config: DictConfig) -> None:
    if config.store is not None:
        _show_store(open_store(config))
        return
    dataset = instantiate(config.dataset)
    num_nodes, num_edges = dataset.stream.count()
    features = dataset.features
    facts = {
        "nodes": f"{num_nodes:,}",
        "edges": f"{num_edges:,}" + (" (reverses are added)" if dataset.stream.to_undirected else ""),
        "features": None
        if features is None
        else f"{dataset.feature_dim} columns, {format_bytes(dataset.feature_bytes)}",
        "labels": None if dataset.labels is None else _labels(np.asarray(dataset.labels)),
        "masks": ", ".join(f"{name} {int(np.sum(mask)):,}" for name, mask in (dataset.masks or {}).items()) or None,
    }
    _show_facts(f"data set {dataset.name}", facts)
    store = standing_store(config, store_source(config, dataset))
    if store is None:
        print(f"no store of it is in {config.paths.stores}; gnnscale partition and gnnscale train make one")
    else:
        _show_store(store)
