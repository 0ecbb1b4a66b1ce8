"""From edges to a partition store; skipped where the same store exists already."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..dataset.columns import EDGE_COLUMNS, load_arrays, masks_by_name
from ..dataset.value_checks import check_values
from ..errors import GNNScaleError, PartitionStoreError
from ..events import held_lock, record, stage
from ..memory import return_freed_memory, trim_heap
from ..partitioner import Partitioning
from ..partitioner import partition as partition_by_name
from ..partitioner.partition import DEFAULT_METHOD
from ..partitioner.quality import quality_of_counts
from ..partitioner.registry import complete_options, decisive_options
from .inputs import changed_inputs, input_files, input_fingerprint
from .journal import check_is_store, journal_head, partial_folder, store_folder
from .manifest import MANIFEST, REMEDY, is_whole, read_manifest, read_source, write_json
from .reader import PartitionStore
from .shared_files import share_files
from .writer import write_partition_store


def preparation_fingerprint(dataset, partitioner: dict, num_parts: int) -> str:
    """Return a digest of everything that a store is made from.

    Args:
        dataset: a `GraphDataset`.
        partitioner: method (see `describe_partitioner`), options and seed, plain values.
        num_parts: parts.

    Cost: that of `input_fingerprint`, which reads no file.
    """
    facts = [_input_fingerprint(dataset), partitioner, num_parts, dataset.source]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def expected_store_fingerprint(
    dataset, partitioner: str | Callable, num_parts: int, seed: int, pack_halo: bool
) -> str | None:
    """Return the fingerprint that the store of this input will have, whatever writes it.

    None where only the finished partitioning could say: it is known for a method's name and a partial of
    `gs.partition`; a store does not say what `balance` it was made with.
    """
    keywords = {"method": partitioner}
    if not isinstance(partitioner, str):
        is_partial = isinstance(partitioner, functools.partial) and partitioner.func is partition_by_name
        if not is_partial or partitioner.args or "balance" in partitioner.keywords:
            return None
        shared = ("num_parts", "seed", "masks", "progress", "evaluate")
        keywords = {name: value for name, value in partitioner.keywords.items() if name not in shared}
    method, weight = keywords.pop("method", DEFAULT_METHOD), keywords.pop("edge_type_weight", None)
    num_machines = keywords.pop("num_machines", None) or 1
    options = decisive_options(method, complete_options(method, keywords))
    options |= {"edge_type_weight": dict(weight)} if weight else {}
    options |= {"num_machines": num_machines} if num_machines > 1 else {}
    return _input_fingerprint(dataset, method, num_parts, seed, options, pack_halo)


def _input_fingerprint(dataset, method="", num_parts=0, seed=0, options=None, pack_halo=False) -> str:
    return input_fingerprint(dataset.stream, method, num_parts, seed, options or {}, dataset, pack_halo)


def prepare_store(
    root: str | os.PathLike,
    dataset,
    partition: Callable[[], Partitioning],
    fingerprint: str,
    overwrite: bool = False,
    progress: Callable[[str, int, int | None], None] | None = None,
    store_fingerprint: Callable[[], str | None] | None = None,
    pack_halo: bool | Callable[[Partitioning], bool] = False,
    verify: bool = True,
    **writer_options,
) -> PartitionStore:
    """Partition and write a store, or open the one that was made from the same input.

    Args:
        root: folder of the store; `root.source.json` beside it remembers what the store was made from, and
            `root.parts` holds the partitioning until the store exists, so that a killed run goes on there.
        dataset: a `GraphDataset`.
        partition: computes the partitioning; called only where none was saved.
        fingerprint: see `preparation_fingerprint`.
        overwrite: write again whatever store exists at root, but for one of this very input whose files all have
            their checksums: ranks and later passes prepare again, and must find what the first one wrote.
        store_fingerprint: see `expected_store_fingerprint`; it lets a store be found that something else wrote.
        pack_halo: See `write_partition_store`; or decides it, once the partitioning is known.
        verify: See `PartitionStore.open`; of a store that exists.
        writer_options: Further ones of `write_partition_store`.

    Raises:
        ValueError: a value would spoil training; dense features are checked while they are stored.
        PartitionStoreError: a store made from other input, or a damaged one, exists there and `overwrite` is off;
            or files that are no store; or a file of the input changed meanwhile.

    Cost: where the store exists, nothing but the fingerprints; with overwrite one read of it, about 3 GB/s. Else a
        read of labels, sparse features and edge values before all other work.
    """
    root = store_folder(root)
    source, parts = _record_path(root), Path(f"{root}.parts-{fingerprint[:12]}")
    if made_from(root) != fingerprint:  # before the partitioning, which may take long, and before a folder is made
        _check_arrays(dataset, finite=writer_options.get("check_finite", True))
    elif not overwrite and not parts.exists():  # a store that exists may be on a disk that cannot be written to
        return _open(root, verify)
    root.parent.mkdir(parents=True, exist_ok=True)
    return_freed_memory()  # training goes on in this process, in what partitioning leaves
    with held_lock(f"{root}.prepare.lock", f"is preparing the store {root}"):
        check_is_store(root)
        made = made_from(root)
        if made == fingerprint:
            store = _whole_store(root) if overwrite else _open(root, verify)
            if store is not None:
                shutil.rmtree(parts, ignore_errors=True)  # of a run that ended between its record and this
                return store
        partitioning = _read_parts(parts)
        # This input's partitioning is still there: a run was cut off, and the writer knows if the store is its own.
        if not overwrite and partitioning is None and root.exists() and any(root.iterdir()):
            expected = store_fingerprint() if store_fingerprint is not None else None
            if not _is_own(root, expected):
                if (root / MANIFEST).is_file():
                    read_manifest(root)  # an older or a damaged store is reported as such
                raise _refusal(root, known=made is not None or expected is not None)
            store = _open(root, verify)
            _write_record(source, fingerprint, store.fingerprint, _facts_of_store(store))
            return store
        if partitioning is None:
            files = _input_files(dataset)
            with stage("partition"):
                partitioning = partition()
            changed = changed_inputs(files, _input_files(dataset))
            if changed:
                raise PartitionStoreError(f"{changed} changed while it was partitioned: run the same command again")
            # The writer counts what the figures need, except for edges in one direction.
            partitioning.save(parts, measure=not dataset.stream.to_undirected)
        store = write_partition_store(
            root,
            dataset.stream,
            partitioning,
            dataset,
            overwrite=overwrite,
            progress=progress,
            pack_halo=pack_halo(partitioning) if callable(pack_halo) else pack_halo,
            **writer_options,
        )
        _write_record(source, fingerprint, store.fingerprint, _facts(partitioning, store, dataset))
        shutil.rmtree(parts)
        del store  # files that other stores hold too are linked while no process maps them
        shared = share_files(root, sorted(path.parent for path in root.parent.glob(f"*/{MANIFEST}")))
        if shared:
            record("shared_files", root=str(root), bytes=shared)
        del partitioning
        trim_heap()
        return _open(root, verify)


def unfinished_packs_halo(root: str | os.PathLike, dataset, made: Partitioning) -> bool | None:
    """Return whether this input's unfinished store beside root packs halos; None where there is none."""
    written = journal_head(partial_folder(store_folder(root))).get("fingerprint")
    for pack_halo in (True, False):
        if written == _input_fingerprint(dataset, made.method, made.num_parts, made.seed, made.options, pack_halo):
            return pack_halo
    return None


def _input_files(dataset) -> dict:
    return input_files(dataset.stream, dataset)


def _check_arrays(dataset, finite: bool) -> None:
    """Refuse arrays that do not fit the graph, or whose values would spoil training."""
    edges = dataset.edge_weight, dataset.edge_features
    columns = (getattr(dataset, name) for name in ("features", "labels", "node_time", *EDGE_COLUMNS))
    if dataset.masks or dataset.node_columns or any(column is not None for column in columns):
        load_arrays(dataset.stream, dataset)
    check_values(dataset.features, None if dataset.regression else dataset.labels, *edges, finite=finite)


def made_from(root: str | os.PathLike) -> str | None:
    """Return the preparation fingerprint of the store at root; None without a store, or where it is unknown.

    The record is beside the store and could be older than it (a kill between the two): it counts only for the
    store that it names. The store itself is not opened.
    """
    record, own = _read_record(root), _own_fingerprint(root)
    return record.get("fingerprint") if own is not None and record.get("store_fingerprint") == own else None


def standing_parts(root: str | os.PathLike, fingerprint: Callable[[int], str], expected: Callable) -> int | None:
    """Return the number of parts of the store at root where it was made from this input, else None.

    Args:
        fingerprint, expected: the two fingerprints of a store of so many parts, see `prepare_store`.
    """
    num_parts = partitioning_facts(root).get("num_parts")
    if num_parts is not None and made_from(root) == fingerprint(num_parts):
        return num_parts
    try:
        num_parts = json.loads((Path(root) / MANIFEST).read_text())["num_parts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return num_parts if isinstance(num_parts, int) and _is_own(root, expected(num_parts)) else None


def standing_edges(root: str | os.PathLike, fingerprint: str) -> int | None:
    """Return the number of edges of the store at root where it was made from this input, else None."""
    if made_from(root) != fingerprint:
        return None
    try:
        num_edges = read_manifest(Path(root))["num_arcs"]
    except (PartitionStoreError, OSError, ValueError, KeyError, TypeError):
        return None
    return num_edges if isinstance(num_edges, int) else None


def partitioning_facts(root: str | os.PathLike) -> dict:
    """Return what partitioning measured when the store was made: method, seconds, quality; empty if unknown."""
    facts = _read_record(root).get("partitioning")
    return facts if isinstance(facts, dict) else {}


def _record_path(root: str | os.PathLike) -> Path:
    return Path(f"{store_folder(root)}.source.json")


def _read_record(root: str | os.PathLike) -> dict:
    """What cannot be read counts as absent: a new record replaces it."""
    try:
        record = json.loads(_record_path(root).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _own_fingerprint(root: str | os.PathLike) -> str | None:
    return read_source(Path(root)).get("fingerprint")


def _is_own(root: str | os.PathLike, expected: str | None) -> bool:
    return expected is not None and _own_fingerprint(root) == expected


def _refusal(root: Path, known: bool) -> PartitionStoreError:
    remedy = "give another root, or overwrite=True"
    if known:
        return PartitionStoreError(
            f"{root}: a store made from other input or by another partitioner exists here; {remedy}"
        )
    return PartitionStoreError(
        f"{root}: a store exists here, but no record in {_record_path(root)} says what it was made from; train on it"
        f" as it is with store=, {remedy}"
    )


def _open(root: Path, verify: bool = True) -> PartitionStore:
    if not (root / MANIFEST).is_file():
        raise PartitionStoreError(f"{root}: {MANIFEST} is missing; {REMEDY}")
    return PartitionStore.open(root, verify)


def _whole_store(root: Path) -> PartitionStore | None:
    """Return the store at root, or None where a file of it differs from what the manifest says; opened only after."""
    return _open(root) if is_whole(root) else None


def _read_parts(folder: Path) -> Partitioning | None:
    """Return the partitioning that a run left, or None where none can be read: then it is made again."""
    try:
        parts = Partitioning.load(folder)
        part_id = parts.part_id
        in_range = not len(part_id) or 0 <= part_id.min() <= part_id.max() < parts.num_parts
    except (GNNScaleError, KeyError, TypeError, AttributeError, ValueError):
        return None
    return parts if in_range else None


def _facts(partitioning: Partitioning, store: PartitionStore, dataset) -> dict:
    counts, quality = store.manifest.get("edge_counts"), None
    if partitioning.is_measured or counts is None:
        quality = partitioning.quality
    else:
        halo = store.part_rows - np.diff(store.part_offsets)
        masks = masks_by_name(dataset.masks)
        quality = quality_of_counts(**counts, part_offsets=store.part_offsets, halo_per_part=halo,
                                    part_id=partitioning.part_id, masks=masks)  # fmt: skip
        if store.num_nodes:
            quality = quality.with_feature_bytes(dataset.feature_bytes / store.num_nodes)
    return {
        "num_parts": partitioning.num_parts,
        "method": partitioning.method,
        "options": partitioning.options,
        "seed": partitioning.seed,
        "seconds": partitioning.seconds,
        "peak_bytes": partitioning.peak_bytes,
        "quality": None if quality is None else asdict(quality),
        "notes": partitioning.notes,
    }


def _facts_of_store(store: PartitionStore) -> dict:
    return {name: store.manifest.get(name) for name in ("num_parts", "method", "seed")}


def _write_record(path: Path, fingerprint: str, store_fingerprint: str, facts: dict) -> None:
    made = {"fingerprint": fingerprint, "store_fingerprint": store_fingerprint, "partitioning": facts}
    write_json(path, json.loads(json.dumps(made, default=str)))
