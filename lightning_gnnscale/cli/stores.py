"""`gnnscale stores`: the partition stores under a folder, their sizes, and what can be removed."""

import fnmatch
import glob
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout
from omegaconf import DictConfig
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import PartitionStoreError
from ..events import held_lock
from ..memory import format_bytes
from ..partition_store.manifest import MANIFEST, read_manifest
from ..partition_store.versions import chain_of, drift_of, said_counts
from ..report.terminal import print_text
from .errors import UsageError, none_such

_DAY_S = 86_400
_OF_KIND = re.compile(r"^kind\d+_")  # before the names of a node type's own files
_KINDS = {
    "features": "features",
    "halo_features": "features of halos",
    "csc": "edges",
    "edge": "edge values",
    "weighted": "edge values",
    "halo": "halos",
    "labels": "labels and masks",
    "mask": "labels and masks",
    "user": "node ids",
    "original": "node ids",
    "store": "node ids",
    "parent": "node ids",
    "node_changes": "node ids",
}
_REST = (".partial", ".old", ".parts-*")  # suffixes of what an unfinished writer leaves
_GROWN = 0.005  # share by which a cut has grown that is worth a word
_NOTES = (".source.json", ".verified.json", ".halos.json")  # beside a store, and under these names while written
_BESIDE = (*_NOTES, *(f"{note}.tmp" for note in _NOTES), ".lock", ".prepare.lock", ".halos.json.lock", ".edges.lock")


class _Store(NamedTuple):
    """A store's folder.

    Attributes:
        manifest: None where it cannot be read; `why` is the reason then.
        own_bytes: Bytes that no other store holds too.
        shared_bytes: Bytes of files that other stores hold as well, by hard links.
        used_s: When a file of it was last read or written, seconds since 1970, from the file system.
        written_s: When it was written, seconds since 1970.
    """

    root: Path
    manifest: dict | None
    why: str
    own_bytes: int
    shared_bytes: int
    used_s: float
    written_s: float


def run(config: DictConfig) -> None:
    """Run `action`."""
    folder = Path(config.paths.stores)
    days = config.unused_days
    if days is not None and (isinstance(days, bool) or not isinstance(days, int | float) or days < 0):
        raise UsageError(f"unused_days must be a number of at least 0, got {days}")
    keep = config.keep_versions
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise UsageError(f"keep_versions must be an integer of at least 1, got {keep}")
    stores = list(_stores(folder))
    known = [one.root.name for one in stores]
    for name in config.names:
        if not fnmatch.filter(known, str(name)):
            raise UsageError(none_such(f"no store {name} in {folder}", name, known))
    chosen = [one for one in stores if any(fnmatch.fnmatch(one.root.name, str(name)) for name in config.names)]
    if config.action == "clean":
        old = [] if days is None else [one for one in stores if one.used_s < time.time() - days * _DAY_S]
        earlier = set() if keep is None else _replaced(stores, keep)
        old += [one for one in stores if one.root.name in earlier and one not in old]
        _clean(folder, [*chosen, *(one for one in old if one not in chosen)], config.dry_run)
    elif config.action == "sizes":
        _show_sizes(folder, chosen or stores)
    else:
        _show(folder, chosen or stores)


def _stores(folder: Path) -> Iterator[_Store]:
    """Yield the finished stores of a folder by name, damaged ones too."""
    for root in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (root / MANIFEST).is_file() or any(fnmatch.fnmatch(root.name, f"*{end}") for end in _REST):
            continue
        manifest, why = None, ""
        try:
            manifest = read_manifest(root)
        except PartitionStoreError as error:
            why = str(error)
        states = [path.stat() for path in root.iterdir() if path.is_file()]
        shared = sum(state.st_size for state in states if state.st_nlink > 1)
        total = sum(state.st_size for state in states)
        # Listing reads the manifest; runs read the arrays.
        arrays = [path.stat() for path in root.glob("*.npy")] or states
        used = max(max(state.st_atime, state.st_mtime) for state in arrays)
        yield _Store(root, manifest, why, total - shared, shared, used, (root / MANIFEST).stat().st_mtime)


def _replaced(stores: list[_Store], keep: int) -> set[str]:
    """Return the names of stores that are none of the `keep` latest versions of any chain."""
    manifests = {one.root.name: one.manifest for one in stores if one.manifest}
    chains = {name: [name, *chain_of(manifests, name)] for name in manifests}
    inner = {name for chain in chains.values() for name in chain[1:]}
    kept = {name for last, chain in chains.items() if last not in inner for name in chain[:keep]}
    return manifests.keys() - kept


def _show_versions(stores: list[_Store]) -> None:
    """Print a line for each version: what it is of, how old it is, what it changed, and how its parts are."""
    now = time.time()
    for one in stores:
        version = (one.manifest or {}).get("version")
        if version is None:
            continue
        share, cut = drift_of(one.manifest), version["cut"]
        grown = "" if share < _GROWN else f" ({cut['first']:.1%} when it was partitioned)"
        print_text(
            f"{one.root.name}: version {version['number']} of {version['parent']['name']}, "
            f"{_age(now - one.written_s)} old: {said_counts(version['counts'])}; "
            f"{cut['after']:.1%} of the edges between parts{grown}"
        )


def _age(seconds: float) -> str:
    """Return a time in the largest unit of which there is one."""
    for unit, length in (("day", _DAY_S), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"{count} {unit}" + "s" * (count != 1)
    return "less than a minute"


def size_by_kind(manifest: dict) -> dict[str, int]:
    """Return the bytes of a store's files by content."""
    sizes: dict[str, int] = {}
    for name, entry in manifest["files"].items():
        name = _OF_KIND.sub("", name)
        kind = _KINDS.get(name) or next((told for head, told in _KINDS.items() if name.startswith(f"{head}_")), "parts")
        sizes[kind] = sizes.get(kind, 0) + entry["bytes"]
    return sizes


def _counted(stores: list[_Store]) -> str:
    return f"{len(stores)} store" + "s" * (len(stores) != 1)


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for heading in headings:
        justify = "left" if heading in ("store", "method") else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading == "store")
    return table


def _show(folder: Path, stores: list[_Store]) -> None:
    headings = ("store", "method", "parts", "nodes", "edges", "features", "size", "shared", "last used")
    table = _table(f"stores in {folder}", headings)
    for one in stores:
        manifest, days = one.manifest or {}, int((time.time() - one.used_s) // _DAY_S)
        counts = [f"{manifest[key]:,}" if manifest else "" for key in ("num_parts", "num_nodes", "num_arcs")]
        size = format_bytes(one.own_bytes + one.shared_bytes)
        shared = format_bytes(one.shared_bytes) if one.shared_bytes else ""
        ago = "today" if days == 0 else f"{days} days ago"
        method = manifest.get("method") or ("" if manifest else "damaged")
        table.add_row(one.root.name, method, *counts, str(manifest.get("feature_dim") or ""), size, shared, ago)
    if stores:
        _print_wide(table)
    _show_versions(stores)
    for one in stores:
        if one.why:
            print_text(one.why)
    rest = [(path, _size(path)) for path in _leftovers(folder)]
    print_text(f"{_counted(stores)} in {folder}, {format_bytes(_disk_bytes(stores))} on the disk")
    if rest:
        print_text(
            f"{len(rest)} leftovers of unfinished runs, {format_bytes(sum(size for _, size in rest))}: the same "
            "command goes on with them, gnnscale stores clean removes them"
        )


def _disk_bytes(stores: list[_Store]) -> int:
    """Return the bytes of all stores; a shared file counts once."""
    states = {
        (state.st_dev, state.st_ino): state.st_size
        for one in stores
        for state in (path.stat() for path in one.root.iterdir() if path.is_file())
    }
    return sum(states.values())


def _show_sizes(folder: Path, stores: list[_Store]) -> None:
    sizes = {one.root.name: size_by_kind(one.manifest) for one in stores if one.manifest}
    totals: Counter = Counter()
    for of in sizes.values():
        totals.update(of)
    kinds = [kind for kind, _ in totals.most_common()]
    table = _table(f"sizes in {folder}", ("store", *kinds, "all", "of it shared"))
    for one in stores:
        if one.manifest:
            of = sizes[one.root.name]
            values = [format_bytes(of[kind]) if kind in of else "" for kind in kinds]
            shared = format_bytes(one.shared_bytes) if one.shared_bytes else ""
            table.add_row(one.root.name, *values, format_bytes(one.own_bytes + one.shared_bytes), shared)
    if stores:
        _print_wide(table)
    print_text(f"{_counted(stores)} in {folder}, {format_bytes(_disk_bytes(stores))} on the disk")


def _leftovers(folder: Path) -> list[Path]:
    """Return what unfinished writers have left in a folder."""
    found = [path for end in _REST for path in folder.glob(f"*{end}")] if folder.is_dir() else []
    return sorted(path for path in found if path.is_dir())


def _clean(folder: Path, stores: list[_Store], dry_run: bool) -> None:
    """Remove leftovers and stores, except those in use by a process."""
    freed, says = 0, "would be removed" if dry_run else "removed"
    for path in _leftovers(folder):
        root = path.with_name(path.name.partition(".partial")[0].partition(".old")[0].partition(".parts-")[0])
        freed += _remove([path], root, says, dry_run)
    for one in stores:
        beside = [one.root.with_name(one.root.name + end) for end in _BESIDE]
        beside += one.root.parent.glob(f"{glob.escape(one.root.name)}.edges-*")
        freed += _remove([one.root, *beside], one.root, says, dry_run)
    print_text(
        f"{format_bytes(freed)} {'would be free' if dry_run else 'freed'} in {folder}" if freed else "nothing to clean"
    )


def _remove(paths: list[Path], root: Path, says: str, dry_run: bool) -> int:
    """Remove paths of a store unless a process writes it; return the bytes that become free."""
    lock = root.with_name(root.name + ".lock")
    there = lock.exists()
    try:
        with held_lock(lock, f"is cleaning {root}", 0), held_lock(f"{root}.prepare.lock", f"is cleaning {root}", 0):
            free = sum(_size(path) for path in paths)
            print_text(f"{says}: {paths[0]} ({format_bytes(free)})")
            for path in () if dry_run else paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
    except Timeout:
        print_text(f"kept: {paths[0]}, a process is at work on it")
        return 0
    finally:
        if not there and not root.exists():
            for end in (".lock", ".prepare.lock"):
                root.with_name(root.name + end).unlink(missing_ok=True)
    return free


def _size(path: Path) -> int:
    """Return the bytes that removing a path frees: files with other names remain."""
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else ()
    return sum(file.lstat().st_size for file in files if file.is_file() and file.lstat().st_nlink == 1)


def _print_wide(table: Table) -> None:
    """Print a table, at least as wide as a store's name needs where the output is not a terminal."""
    console = Console()
    Console(width=None if console.is_terminal else max(console.width, 140)).print(table)
