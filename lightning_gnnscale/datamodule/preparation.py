"""From edges to a partition store, skipped where the same store stands already."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from filelock import FileLock

from ..errors import PartitionStoreError
from ..events import stage
from ..partition_store import PartitionStore, write_partition_store
from ..partitioner import Partitioning


def preparation_fingerprint(dataset, partitioner: dict, num_parts: int) -> str:
    """Return a digest of everything that a store is made from.

    Args:
        dataset: a `GraphDataset`.
        partitioner: method, options and seed, plain values.
        num_parts: parts.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(dataset.stream.fingerprint().encode())
    digest.update(json.dumps([partitioner, num_parts, dataset.source], sort_keys=True, default=str).encode())
    for name in ("features", "labels", "edge_weight", "edge_features"):
        _add(digest, name, getattr(dataset, name))
    for name in sorted(dataset.masks):
        _add(digest, name, dataset.masks[name])
    return digest.hexdigest()


def _add(digest, name: str, value) -> None:
    digest.update(name.encode())
    if value is None:
        return
    if hasattr(value, "indptr"):
        for part in (value.indptr, value.indices, value.data):
            digest.update(np.ascontiguousarray(part).data)
    elif isinstance(value, (str, os.PathLike)) or (isinstance(value, np.memmap) and value.filename):
        # A file on disk stands for its content by name, size and time: hashing terabytes is not a skip.
        path = Path(value if isinstance(value, (str, os.PathLike)) else value.filename).resolve()
        digest.update(f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}".encode())
    else:
        digest.update(np.ascontiguousarray(value).data)


def prepare_store(
    root: str | os.PathLike,
    dataset,
    partition: Callable[[], Partitioning],
    fingerprint: str,
    overwrite: bool = False,
    progress: Callable[[str, int, int | None], None] | None = None,
    **writer_options,
) -> PartitionStore:
    """Partition and write a store, or open the one that was made from the same input.

    Args:
        root: folder of the store; `root.source.json` beside it remembers what the store was made from, and
            `root.parts` holds the partitioning until the store stands, so that a killed run goes on there.
        dataset: a `GraphDataset`.
        partition: computes the partitioning; called only where none is at hand.
        fingerprint: see `preparation_fingerprint`.
        overwrite: replace a store made from other input.
        writer_options: of `write_partition_store`.

    Raises:
        PartitionStoreError: a store made from other input stands there and `overwrite` is off.
    """
    root = Path(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}.prepare.lock"):
        source = Path(f"{root}.source.json")
        if made_from(root) == fingerprint:
            return PartitionStore.open(root)
        parts = Path(f"{root}.parts-{fingerprint[:12]}")
        # Where this input's partitioning still lies, a run was cut off: the writer knows whether the store is its own.
        if root.exists() and not overwrite and not parts.exists():
            raise PartitionStoreError(
                f"{root}: a store made from other input stands here; give another root (output=), or overwrite=True"
            )
        partitioning = _partition_once(parts, partition)
        store = write_partition_store(
            root,
            dataset.stream,
            partitioning,
            features=dataset.features,
            labels=dataset.labels,
            masks=dataset.masks,
            edge_weight=dataset.edge_weight,
            edge_features=dataset.edge_features,
            overwrite=overwrite,
            progress=progress,
            **writer_options,
        )
        _write_source(source, fingerprint, store.fingerprint, partitioning)
        shutil.rmtree(parts)
        return store


def made_from(root: str | os.PathLike) -> str | None:
    """Return the preparation fingerprint of the store that stands at root; None without one, or where it is unknown.

    The record lies beside the store and could be older than it (a kill between the two): it counts only for the
    store that it names.
    """
    source, store = Path(f"{root}.source.json"), Path(root)
    if not store.exists() or not source.is_file():
        return None
    made = json.loads(source.read_text())
    return made["fingerprint"] if made.get("store_fingerprint") == PartitionStore.open(store).fingerprint else None


def partitioning_facts(root: str | os.PathLike) -> dict:
    """Return what partitioning measured when the store was made: method, seconds, quality; empty if unknown."""
    source = Path(f"{root}.source.json")
    return json.loads(source.read_text()).get("partitioning", {}) if source.is_file() else {}


def _partition_once(path: Path, partition: Callable[[], Partitioning]) -> Partitioning:
    if (path / "partitioning.json").is_file():
        return Partitioning.load(path)
    with stage("partition"):
        partitioning = partition()
    partitioning.save(path)
    return partitioning


def _write_source(path: Path, fingerprint: str, store_fingerprint: str, partitioning: Partitioning) -> None:
    facts = {
        "num_parts": partitioning.num_parts,
        "method": partitioning.method,
        "options": partitioning.options,
        "seed": partitioning.seed,
        "seconds": partitioning.seconds,
        "peak_bytes": partitioning.peak_bytes,
        "quality": None if partitioning.quality is None else asdict(partitioning.quality),
        "notes": partitioning.notes,
    }
    temporary = Path(f"{path}.tmp")
    made = {"fingerprint": fingerprint, "store_fingerprint": store_fingerprint, "partitioning": facts}
    temporary.write_text(json.dumps(made, indent=2, default=str))
    os.replace(temporary, path)
