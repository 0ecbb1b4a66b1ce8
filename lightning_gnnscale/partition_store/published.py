"""A store behind a URL: published with its manifest last, and fetched by the machines that train, slice by slice.

A published store is the files of a local one. Beside each `NAME.npy` is `NAME.npy.json`, the crc32 of each block of its
data, so that a slice is compared as well as the whole. A machine fetches the blocks that it reads into files of the
same layout, with holes for the other parts, so that code that maps or reads them need not know.
"""

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ObjectStoreError, PartitionStoreError, disk_errors
from ..events import held_lock, record, stage
from ..memory import format_bytes, parse_bytes
from ..object_store import TIMEOUT_S, ObjectStore, fetched_folder, is_url
from ..system import sync_data
from ..triton_kernels.gather_rows import RowCode
from .array_file import HEADER_BYTES, crc_joiner, map_rows, npy_header
from .coded_neighbors import CODE, EDGES, OFFSETS, PLAIN
from .edge_code import BLOCK
from .features import CSRFeatures, DenseFeatures, SparseRows, checked_rows, memory_of
from .manifest import EDGE_FILES, MANIFEST, SOURCE, read_manifest, read_sealed_manifest, sealed, unsealed, write_json
from .planned_reads import read_rows

BLOCK_BYTES = 8 << 20
FETCHED = "fetched.json"  # marks the folder of a fetched store, and says where the rest is
_STATE = "fetched.state"
_PINNED, _WRITTEN = np.iinfo(np.int64).max, -1
_RUN_BLOCKS = 8  # between two waits for the disk
# Files of which parts read slices. Others are a few bytes a node, or are looked up anywhere: they are fetched whole.
SLICED = (*EDGES, "halo_code", "features", "halo_features")
# Of these slices are read without a cap alone: rows of node types, sparse rows, columns of the edges.
_SLICED_ROWS = re.compile(r"(kind\d+_)?(halo_)?features(_indices|_data)?")
_LATER = ("user_ids", "user_id_offsets", "user_id_bytes")  # fetched whole when they are first asked for

_log = logging.getLogger(__name__)


class _Blocks(NamedTuple):
    """Checksums of a published file.

    Attributes:
        size: Bytes of a block; the last one is shorter.
        crc: crc32 of each block of the data behind the header.
    """

    size: int
    crc: list[int]


def publish(
    root: str | os.PathLike,
    url: str,
    overwrite: bool = False,
    storage_options: Mapping | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> None:
    """Copy a finished store to a URL; the manifest comes last, so that a store with one is whole.

    Published again after an interruption, files that exist with the same size and checksum are left as they are.

    Args:
        root: Folder of the store.
        url: Where its objects go, for example s3://bucket/products.
        overwrite: Whether another store that exists there may be replaced. Until the new one is whole there is none.
        storage_options, timeout_s: See `ObjectStore`.
        progress: Called with ("publish", bytes done, bytes in all).

    Raises:
        PartitionStoreError: another store exists there, or the local one is damaged.
        ObjectStoreError: the object store is not reachable, refuses, or is full.

    Cost: a read of the store; memory of a few blocks.
    """
    root, objects = Path(root), ObjectStore(url, storage_options, timeout_s)
    manifest = read_manifest(root)
    own = {name: (root / name).read_bytes() for name in (MANIFEST, SOURCE)}
    if not check_free(objects, own, overwrite):
        return
    total, done = sum(entry["bytes"] for entry in manifest["files"].values()), 0
    with stage("publish", url=objects.url):
        objects.delete(MANIFEST)
        for name, entry in manifest["files"].items():
            _publish_file(objects, root, name, entry)
            done += entry["bytes"]
            if progress is not None:
                progress("publish", done, total)
        named = {f"{name}.npy{ending}" for name in manifest["files"] for ending in ("", ".json")}
        for name in objects.names():
            if re.fullmatch(r"\w+\.npy(\.json)?", name) and name not in named:
                objects.delete(name)  # of the store that was there
        objects.write(SOURCE, own[SOURCE])
        objects.write(MANIFEST, own[MANIFEST])


def check_free(objects: ObjectStore, own: Mapping[str, bytes] | None, overwrite: bool) -> bool:
    """Return whether a store is to be published: False where this very one is there.

    Args:
        own: Manifest and source of the store by name; None: not known yet, any store that exists there is another.

    Raises:
        PartitionStoreError: another one exists there, and `overwrite` is off.
    """
    standing = objects.read_whole(MANIFEST)
    if standing is None:
        return True
    if own is not None and (standing, objects.read_whole(SOURCE)) == (own[MANIFEST], own[SOURCE]):
        return False
    if not overwrite:
        raise PartitionStoreError(
            f"{objects.url}: a store of another input or of other options exists here (its fingerprint differs);"
            " replace it with overwrite=True, or give another URL"
        )
    return True


def _publish_file(objects: ObjectStore, root: Path, name: str, entry: dict) -> None:
    wanted, key = {"bytes": entry["bytes"], "crc32": entry["crc32"]}, f"{name}.npy"
    standing = objects.read_whole(f"{key}.json")
    if standing is not None:
        try:
            known = unsealed(standing)
        except ValueError:
            known = {}
        facts = objects.facts(key) if wanted.items() <= known.items() else None
        if facts is not None and facts["size"] == entry["bytes"]:
            return
        objects.delete(f"{key}.json")
    crcs: list[int] = []

    def chunks() -> Iterator[bytes]:
        crcs.clear()
        with open(root / key, "rb", buffering=0) as file:
            yield file.read(HEADER_BYTES)
            while data := file.read(BLOCK_BYTES):
                crcs.append(zlib.crc32(data))
                yield data

    objects.upload(key, entry["bytes"], chunks)
    if _joined(_Blocks(BLOCK_BYTES, crcs), entry["bytes"]) != entry["crc32"]:
        objects.delete(key)
        raise PartitionStoreError(
            f"{root / key}: its content is damaged (crc32 differs), and nothing was published; write the store again"
        )
    objects.write(f"{key}.json", json.dumps(sealed({**wanted, "block_bytes": BLOCK_BYTES, "blocks": crcs})).encode())


def _joined(blocks: _Blocks, num_bytes: int) -> int:
    """Return the crc32 of the data of a file of so many bytes, from those of its blocks."""
    crc, left = 0, num_bytes - HEADER_BYTES
    join = crc_joiner(blocks.size)
    for one in blocks.crc:
        crc = (join if left >= blocks.size else crc_joiner(left))(crc, one)
        left -= blocks.size
    return crc


class _Turn:
    """A process's lock on the folder: `depth` counts how often the thread that holds it took it."""

    def __init__(self):
        self.lock, self.depth = threading.RLock(), 0


class FetchedFiles:
    """The files of a published store on this machine, with holes where nothing has been fetched.

    All processes of the machine share the folder: a block is fetched by one of them, once. Blocks that are fetched
    stay over runs and kills, unless a cap makes space for others.

    Args:
        root: A folder that `fetch_store` has made.

    Attributes:
        root: The folder.
        manifest: The manifest of the store.
        settings: The arguments of `fetch_store` that the folder remembers.
        cap_bytes: Most bytes that the folder takes; None: no cap.
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        try:
            self.manifest, self.settings = read_manifest(root), _read_fetched(self.root)
        except (PartitionStoreError, ValueError) as error:
            told = f"{error}".partition(";")[0]
            raise PartitionStoreError(f"{told}; remove the folder {root}: it is fetched again") from None
        self.cap_bytes, self._size = self.settings["cap_bytes"], self.settings["block_bytes"]
        self._objects = ObjectStore(*(self.settings[name] for name in ("url", "storage_options", "timeout_s")))
        self._first: dict[str, int] = {}
        sizes: list[int] = []
        for name, entry in sorted(self.manifest["files"].items()):
            self._first[name] = len(sizes)
            data = entry["bytes"] - HEADER_BYTES
            sizes += [min(self._size, data - begin) for begin in range(0, data, self._size)]
        self._bytes = np.array(sizes, np.int64)
        # When each block was used last: 0 where it is not here, _WRITTEN until the disk has it, _PINNED where it stays.
        # The last entry is the clock.
        self._used = np.memmap(self.root / _STATE, np.int64, "r+", shape=(len(sizes) + 1,))
        self._complete: set[str] = set()
        self._crcs: dict[str, list[int]] = {}
        self._in_use = np.zeros(len(sizes), bool)
        self._turns: dict[int, _Turn] = {}

    @property
    def url(self) -> str:
        return self._objects.url

    def whole(self, *names: str) -> None:
        """Fetch all of some files, for good: a cap does not evict them.

        Raises:
            PartitionStoreError: the cap is too small for them; or a block is not what was published.
            ObjectStoreError: the object store did not give them in time.
        """
        for name in names:
            name = self._stored(name)
            if name not in self._complete and name in self._first:
                blocks = np.arange(self._num_blocks(name))
                with self.held((name, blocks)):
                    if self.cap_bytes is not None:
                        self._used[self._first[name] + blocks] = _PINNED
                self._complete.add(name)

    def of_part(self, part: int, rows: bool = True) -> list[tuple[str, np.ndarray]]:
        """Return the blocks of a part's graph, and with `rows` of the feature rows of its core and its packed halo."""
        offsets, halo = (self._table(name)[part : part + 2].tolist() for name in ("part_offsets", "halo_offsets"))
        found = [self.slice_of(PLAIN, *self._table("csc_indptr")[offsets].tolist())]
        if "halo_code" in self._first:
            code = self._table("halo_code_offsets")[part : part + 2].tolist()
            found.append(self.slice_of("halo_code", *code))
        for name, (first, last) in (("features", offsets), ("halo_features", halo)) if rows else ():
            if name in self._first:
                found.append(self.slice_of(name, first, last))
        return found

    def slice_of(self, name: str, first: int, last: int) -> tuple[str, np.ndarray]:
        """Return the blocks that hold rows [first, last) of a file; neighbours may be coded."""
        name, first, last = self._stored(name), *self._stored_rows(name, first, last)
        begin, end = first * self._row_bytes(name), last * self._row_bytes(name)
        return name, np.arange(begin // self._size, -(-end // self._size) if end > begin else begin // self._size)

    def blocks_of_rows(self, name: str, rows: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the blocks that hold some rows of a file, ascending; rows: (num,) integers in any order."""
        row_bytes, marked = self._row_bytes(name), np.zeros(self._num_blocks(name), bool)
        if row_bytes and len(rows) and name not in self._complete:
            first, last = rows * row_bytes // self._size, ((rows + 1) * row_bytes - 1) // self._size
            marked[first] = marked[last] = True
            for between in range(1, int((last - first).max())):  # rows longer than a block
                marked[np.minimum(first + between, last)] = True
        return name, np.flatnonzero(marked)

    def blocks_of_ranges(self, name: str, first: np.ndarray, last: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the blocks that hold rows [first[i], last[i]) of a file, ascending; (num,) integers in any order."""
        name, first, last = self._stored(name), *self._stored_rows(name, first, last)
        row_bytes, filled = self._row_bytes(name), last > first
        begin, end = first[filled] * row_bytes // self._size, -(-last[filled] * row_bytes // self._size)
        steps = np.zeros(self._num_blocks(name) + 1, np.int64)
        np.add.at(steps, begin, 1)
        np.subtract.at(steps, end, 1)
        return name, np.flatnonzero(np.cumsum(steps)[:-1])

    def chunks(self, name: str, rows: np.ndarray) -> list[np.ndarray] | None:
        """Return positions of rows, divided so that the blocks of each chunk fit under the cap; None: they all do."""
        if self.cap_bytes is None or not len(rows):
            return None
        space = self.cap_bytes - int(self._bytes[self._used[:-1] == _PINNED].sum())
        if int(self._bytes[self._first[name] + self.blocks_of_rows(name, rows)[1]].sum()) <= space:
            return None
        group = rows * self._row_bytes(name) // self._size // max(1, space // self._size - 1)
        order = np.argsort(group, kind="stable")
        return np.split(order, 1 + np.flatnonzero(np.diff(group[order])))

    @contextmanager
    def held(self, *wanted: tuple[str, np.ndarray]) -> Iterator[None]:
        """Fetch what is missing of some blocks, and keep them while the block of code runs.

        Without a cap nothing is evicted, and this only checks what has been fetched. With one, processes take turns.
        """
        at = np.concatenate([np.empty(0, np.int64), *(self._first[name] + blocks for name, blocks in wanted)])
        if self.cap_bytes is None:
            if (self._used[at] <= 0).any():
                with self._turn():
                    self._fetch(wanted)
            yield
            return
        with self._turn():
            before = self._in_use.copy()
            self._in_use[at] = True
            try:
                self._make_space()
                self._fetch(wanted)
                self._used[-1] += 1
                self._used[at] = np.maximum(self._used[at], self._used[-1])
                yield
            finally:
                self._in_use = before

    def check_cap(self) -> None:
        """Refuse a cap too small for a part and the tables of a few bytes a node; warn of what a cap means."""
        if self.cap_bytes is None:
            return
        stays = int(self._bytes[self._used[:-1] == _PINNED].sum())
        parts = [self._bytes_of(self.of_part(part)) for part in range(self.manifest["num_parts"])]
        if stays + max(parts) > self.cap_bytes:
            raise self._too_small(stays + max(parts))
        total = sum(entry["bytes"] for entry in self.manifest["files"].values())
        if total > self.cap_bytes:
            _log.info(
                f"{self.url}: {format_bytes(total)} do not fit store_cache_bytes={format_bytes(self.cap_bytes)}: parts"
                " that make space for others are fetched again"
            )

    def _table(self, name: str) -> np.ndarray:
        entry = self.manifest["files"][name]
        return map_rows(self.root / f"{name}.npy", np.dtype(entry["dtype"]), tuple(entry["shape"]))

    def _stored(self, name: str) -> str:
        """Return the name of a file as it is there: neighbours may be coded."""
        return CODE if name == PLAIN and PLAIN not in self._first else name

    def _stored_rows(self, name: str, first: Any, last: Any) -> tuple[Any, Any]:
        """Return where rows of a file are in what is there: integers, or arrays of them."""
        if self._stored(name) == name:
            return first, last
        offsets = self._table(OFFSETS)
        begin, end = offsets[first // BLOCK], offsets[-(-last // BLOCK)]
        return begin, np.where(last > first, end, begin)

    def _num_blocks(self, name: str) -> int:
        return -(-(self.manifest["files"][name]["bytes"] - HEADER_BYTES) // self._size)

    def _row_bytes(self, name: str) -> int:
        entry = self.manifest["files"][name]
        return (entry["bytes"] - HEADER_BYTES) // max(entry["shape"][0], 1)

    def _bytes_of(self, wanted: list[tuple[str, np.ndarray]]) -> int:
        return sum(int(self._bytes[self._first[name] + blocks].sum()) for name, blocks in wanted)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the folder against all other threads and processes; one that holds it may hold it again."""
        turn = self._turns.setdefault(os.getpid(), _Turn())  # a process that is forked holds nothing of its parent's
        with turn.lock:
            if turn.depth:
                yield
                return
            with held_lock(self.root / "fetched.lock", f"is fetching {self.url}"):
                turn.depth += 1
                try:
                    yield
                finally:
                    turn.depth -= 1

    def _fetch(self, wanted: tuple[tuple[str, np.ndarray], ...]) -> None:
        remedy = "make space, set GNNSCALE_FETCHED to a larger disk, or give store_cache_bytes="
        with disk_errors(self.root, "written", remedy, PartitionStoreError):
            for name, blocks in wanted:
                missing = blocks[self._used[self._first[name] + blocks] <= 0]
                if len(missing):
                    self._fetch_blocks(name, missing)

    def _fetch_blocks(self, name: str, blocks: np.ndarray) -> None:
        entry, crcs, first = self.manifest["files"][name], self._known_crcs(name), self._first[name]
        spans = {
            i: (HEADER_BYTES + i * self._size, min(HEADER_BYTES + (i + 1) * self._size, entry["bytes"]))
            for i in blocks.tolist()
        }
        fd = os.open(self.root / f"{name}.npy", os.O_RDWR)
        written: list[int] = []

        def settle() -> None:
            sync_data(fd)  # a block counts once it would outlive the machine
            self._used[-1] += 1
            self._used[first + np.array(written, np.int64)] = self._used[-1]
            written.clear()

        try:
            for block in blocks[self._used[first + blocks] == _WRITTEN].tolist():  # by a process that was killed
                begin, end = spans[block]
                if zlib.crc32(os.pread(fd, end - begin, begin)) == crcs[block]:
                    written.append(block)
                    del spans[block]
            for (block, (begin, _)), data in zip(
                spans.items(), self._objects.stream(f"{name}.npy", spans.values()), strict=True
            ):
                if zlib.crc32(data) != crcs[block]:
                    raise self._damaged(name, f"is not what was published at byte {begin} (crc32 differs)")
                done = 0
                while done < len(data):
                    done += os.pwrite(fd, memoryview(data)[done:], begin + done)
                self._used[first + block] = _WRITTEN
                written.append(block)
                if len(written) >= _RUN_BLOCKS:
                    settle()
        finally:
            if written:
                settle()
            os.close(fd)
        record("store_fetched", url=self.url, file=name, bytes=sum(end - begin for begin, end in spans.values()))

    def _known_crcs(self, name: str) -> list[int]:
        """Return the crc32 of each block of a file, which together give that of the manifest."""
        if name not in self._crcs:
            path, entry = self.root / f"{name}.npy.json", self.manifest["files"][name]
            text = path.read_bytes() if path.exists() else self._objects.read_whole(f"{name}.npy.json")
            try:
                known = unsealed(text or b"")
                crcs, size = [int(one) for one in known["blocks"]], known["block_bytes"]
            except (ValueError, KeyError, TypeError):
                raise self._damaged(f"{name}", "has no readable checksums beside it") from None
            fits = size == self._size and len(crcs) == self._num_blocks(name)
            if not fits or _joined(_Blocks(size, crcs), entry["bytes"]) != entry["crc32"]:
                raise self._damaged(name, "has checksums of another content beside it")
            if not path.exists():
                write_json(path, sealed(known))
            self._crcs[name] = crcs
        return self._crcs[name]

    def _damaged(self, name: str, what: str) -> PartitionStoreError:
        return PartitionStoreError(
            f"{self.url}/{name}.npy: {what}: damaged, or replaced since training began; publish the store again, or"
            " start again"
        )

    def _make_space(self) -> None:
        """Evict the blocks used longest ago until those that are wanted fit under the cap."""
        used = self._used[:-1]
        stays = self._in_use | (used == _PINNED)
        old = np.flatnonzero((used != 0) & ~stays)
        old = old[np.argsort(used[old], kind="stable")]
        over = int(self._bytes[stays].sum()) - self.cap_bytes
        if over > 0:
            raise self._too_small(over + self.cap_bytes)
        for block in old.tolist()[::-1]:
            over += int(self._bytes[block])
            if over > 0:
                self._let_go(block)

    def _let_go(self, block: int) -> None:
        name = max(
            (first, one) for one, first in self._first.items() if first <= block < first + self._num_blocks(one)
        )[1]
        self._used[block] = 0
        begin = HEADER_BYTES + (block - self._first[name]) * self._size
        _punch(self.root / f"{name}.npy", begin, int(self._bytes[block]))

    def _too_small(self, needed: int) -> PartitionStoreError:
        return PartitionStoreError(
            f"store_cache_bytes={self.cap_bytes} ({format_bytes(self.cap_bytes)}) is too small: what must be here of"
            f" {self.url} at once takes {needed} ({format_bytes(needed)}); raise it, or leave it out"
        )


def fetch_store(
    url: str,
    cache: str | os.PathLike | None = None,
    cache_bytes: int | str | None = None,
    storage_options: Mapping | None = None,
    timeout_s: float = TIMEOUT_S,
) -> FetchedFiles:
    """Open a published store on this machine: the manifest, and tables of a few bytes a node; parts follow when read.

    Args:
        url: Where it was published.
        cache: Folder of fetched stores; None: `fetched_folder()`.
        cache_bytes: Most bytes that this store takes there, or a size such as "20GiB"; None: no cap.
        storage_options, timeout_s: See `ObjectStore`.

    Raises:
        PartitionStoreError: no store, or a damaged one, is published there; or the cap is below what a part takes.
        ObjectStoreError: the object store is not reachable, or refuses.
    """
    objects, cap_bytes = ObjectStore(url, storage_options, timeout_s), parse_bytes(cache_bytes, "store_cache_bytes")
    texts = {name: objects.read_whole(name) for name in (MANIFEST, SOURCE)}
    if texts[MANIFEST] is None or texts[SOURCE] is None:
        raise PartitionStoreError(
            f"{objects.url}: no store is published here (no {MANIFEST}); publish one: gnnscale partition"
            f" output={objects.url}"
        )
    content = hashlib.blake2b(texts[MANIFEST] + texts[SOURCE] + objects.url.encode(), digest_size=8).hexdigest()
    root = Path(cache or fetched_folder()).absolute() / f"{objects.url.rpartition('/')[2] or 'store'}-{content}"
    if cap_bytes is not None:  # runs without a cap rely on nothing being evicted
        root = root.with_name(f"{root.name}-capped")
    settings = {
        "url": objects.url,
        "storage_options": objects.options,
        "timeout_s": timeout_s,
        "cap_bytes": cap_bytes,
        "block_bytes": BLOCK_BYTES,
    }
    with disk_errors(root, "written", "make space, or set GNNSCALE_FETCHED to another disk", PartitionStoreError):
        root.parent.mkdir(parents=True, exist_ok=True)
        with held_lock(f"{root}.lock", f"is opening {objects.url}"):
            if not (root / FETCHED).is_file():
                _make_folder(root, texts, objects, settings)
            elif (known := _read_fetched(root)) != settings:
                kept = known["block_bytes"]
                write_json(root / FETCHED, {**settings, "block_bytes": kept})
    files = FetchedFiles(root)
    files.whole(*(name for name in files.manifest["files"] if not (name in _LATER or _is_sliced(name, cap_bytes))))
    files.check_cap()
    return files


def _is_sliced(name: str, cap_bytes: int | None) -> bool:
    return name in SLICED or (cap_bytes is None and (name in EDGE_FILES or _SLICED_ROWS.fullmatch(name) is not None))


def _read_fetched(root: Path) -> dict:
    """Return the arguments of `fetch_store` that a folder remembers.

    Raises:
        PartitionStoreError: the file holds something else.
    """
    path = root / FETCHED
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        found = None
    found = found if isinstance(found, dict) else {}

    def is_size(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63

    timeout = found.get("timeout_s")
    fits = {
        "url": is_url(found.get("url")),
        "storage_options": isinstance(found.get("storage_options"), dict),
        "timeout_s": isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < 1e9,
        "cap_bytes": found.get("cap_bytes") is None or is_size(found["cap_bytes"]),
        "block_bytes": is_size(found.get("block_bytes")),
    }
    wrong = next((name for name, right in fits.items() if not right), None)
    if wrong:
        raise PartitionStoreError(f"{path}: {wrong} is damaged; remove the folder {root}: it is fetched again")
    return found


def _make_folder(root: Path, texts: Mapping[str, bytes], objects: ObjectStore, settings: dict) -> None:
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, text in texts.items():
        (partial / name).write_bytes(text)
    try:
        manifest = read_sealed_manifest(partial)
    except PartitionStoreError as error:
        told = str(error).replace(str(partial), objects.url)
        shutil.rmtree(partial)
        raise PartitionStoreError(told) from None
    num_blocks = 0
    for name, entry in manifest["files"].items():
        with open(partial / f"{name}.npy", "wb") as file:
            file.write(npy_header(np.dtype(entry["dtype"]), tuple(entry["shape"])))
            file.truncate(entry["bytes"])
        num_blocks += -(-(entry["bytes"] - HEADER_BYTES) // BLOCK_BYTES)
    with open(partial / _STATE, "wb") as file:
        file.truncate(8 * (num_blocks + 1))
    write_json(partial / FETCHED, settings)
    shutil.rmtree(root, ignore_errors=True)
    partial.rename(root)


def _punch(path: Path, begin: int, num_bytes: int) -> None:
    """Give a range of a file back to the disk; it reads as zeros, and the file keeps its size."""
    keep_size, punch_hole = 1, 2
    fd = os.open(path, os.O_RDWR)
    try:
        fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        arguments: Any = (ctypes.c_int(fd), ctypes.c_int(keep_size | punch_hole))
        if fallocate is None or fallocate(*arguments, ctypes.c_int64(begin), ctypes.c_int64(num_bytes)) != 0:
            code = ctypes.get_errno() or errno.ENOTSUP
            raise ObjectStoreError(
                f"{path}: this disk cannot give back a part of a file ({os.strerror(code)}): leave store_cache_bytes"
                " out, or set GNNSCALE_FETCHED to another disk"
            )
    finally:
        os.close(fd)


class FetchedRows(DenseFeatures):
    """Dense rows of a published store, of which a gather or load fetches what it reads."""

    def __init__(self, files: FetchedFiles, name: str, mapped: np.ndarray, storage: RowCode | None = None):
        for key, value in {"files": files, "name": name, "mapped": mapped, "storage": storage}.items():
            object.__setattr__(self, key, value)  # the base is frozen

    def __reduce__(self):
        settings = self.files.settings
        return _rows_again, (
            str(self.files.root),
            settings,
            self.name,
            self.mapped.dtype,
            self.mapped.shape,
            self.storage,
        )

    @property
    def array(self) -> np.ndarray:
        """All rows, which are fetched, for good."""
        self.files.whole(self.name)
        return self.mapped

    @property
    def raw(self) -> DenseFeatures:
        return FetchedRows(self.files, self.name, self.mapped)

    @property
    def num_rows(self) -> int:
        return self.mapped.shape[0]

    @property
    def dim(self) -> int:
        return self.mapped.shape[1] if self.storage is None else self.storage.dim

    @property
    def dtype(self) -> np.dtype:
        return self.mapped.dtype if self.storage is None else np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return self.mapped.nbytes

    @contextmanager
    def reading(self, rows: Callable[[], np.ndarray]) -> Iterator[np.ndarray]:
        with self.files.held(self.files.blocks_of_rows(self.name, rows())):
            yield self.mapped

    def read(self, ids: np.ndarray, out: Any = None) -> np.ndarray:
        nodes = checked_rows(ids, self.num_rows)
        chunks = self.files.chunks(self.name, nodes)
        if chunks is None:
            with self.reading(lambda: nodes) as array:
                return DenseFeatures(array, self.storage).read(nodes, out)
        out = memory_of(out, (len(nodes), self.dim), self.dtype)
        for positions in chunks:
            with self.reading(lambda positions=positions: nodes[positions]) as array:
                rows = DenseFeatures(array, self.storage).read(nodes[positions])
                out[positions] = rows if isinstance(out, np.ndarray) else torch.from_numpy(rows).to(out.dtype)
        return out

    def load(self, nodes: np.ndarray, out: np.ndarray | None = None) -> tuple[DenseFeatures, None]:
        nodes = checked_rows(nodes, self.num_rows)
        out = np.empty((len(nodes), *self.mapped.shape[1:]), self.mapped.dtype) if out is None else out
        for positions in self.files.chunks(self.name, nodes) or [slice(None)]:
            place = positions if isinstance(positions, slice) else slice(positions[0], positions[-1] + 1)
            with self.reading(lambda place=place: nodes[place]) as array:
                read_rows(array, nodes[place], out[place])
        return DenseFeatures(out, self.storage), None


class FetchedSparse(CSRFeatures):
    """Sparse rows of a published store, of which a read or load fetches what it reads; the offsets are here."""

    def __init__(self, files: FetchedFiles, name: str, mapped: CSRFeatures):
        for key, value in {"files": files, "name": name, "mapped": mapped, "dim": mapped.dim}.items():
            object.__setattr__(self, key, value)  # the base is frozen

    def __reduce__(self):
        return _sparse_again, (str(self.files.root), self.files.settings, self.name, self.dim)

    @property
    def indptr(self) -> np.ndarray:
        return self.mapped.indptr

    @property
    def indices(self) -> np.ndarray:
        """All columns, which are fetched, for good."""
        self.files.whole(f"{self.name}_indices")
        return self.mapped.indices

    @property
    def data(self) -> np.ndarray:
        """All values, which are fetched, for good."""
        self.files.whole(f"{self.name}_data")
        return self.mapped.data

    @property
    def dtype(self) -> np.dtype:
        return self.mapped.dtype

    @property
    def nbytes(self) -> int:
        return self.mapped.nbytes

    @property
    def batch_row_bytes(self) -> float:
        return self.mapped.batch_row_bytes

    @contextmanager
    def reading(self, rows: Callable[[], np.ndarray]) -> Iterator[CSRFeatures]:
        """Fetch rows, and keep them while they are read from the table that is given."""
        nodes = rows()
        ends = np.asarray(self.indptr[nodes]), np.asarray(self.indptr[nodes + 1])
        names = (f"{self.name}_indices", f"{self.name}_data")
        with self.files.held(*(self.files.blocks_of_ranges(name, *ends) for name in names)):
            yield self.mapped

    def read(self, ids: np.ndarray, out: Any = None) -> SparseRows:
        nodes = checked_rows(ids, self.num_rows)
        with self.reading(lambda: nodes) as table:
            return table.read(nodes)

    def load(self, nodes: np.ndarray) -> tuple[CSRFeatures, None]:
        nodes = checked_rows(nodes, self.num_rows)
        with self.reading(lambda: nodes) as table:
            return table.load(nodes)


def sparse_rows(files: FetchedFiles, name: str, dim: int) -> FetchedSparse:
    """Return the sparse rows of a published store by the stem of their files."""
    arrays = []
    for part in ("indptr", "indices", "data"):
        entry = files.manifest["files"][f"{name}_{part}"]
        path = files.root / f"{name}_{part}.npy"
        arrays.append(map_rows(path, np.dtype(entry["dtype"]), tuple(entry["shape"])))
    return FetchedSparse(files, name, CSRFeatures(*arrays, dim))


def _sparse_again(root: str, settings: dict, name: str, dim: int) -> FetchedSparse:
    return sparse_rows(fetched_again(root, settings), name, dim)


def _rows_again(root: str, settings: dict, name: str, dtype: np.dtype, shape: tuple, storage: RowCode | None):
    files = fetched_again(root, settings)
    return FetchedRows(files, name, map_rows(files.root / f"{name}.npy", dtype, shape), storage)


def fetched_again(root: str | os.PathLike, settings: dict) -> FetchedFiles:
    """Return the files of a fetched store in another process: of this machine, or of one that fetches them again.

    Raises:
        PartitionStoreError: the store at the URL is not the one that was opened first.
    """
    if (Path(root) / FETCHED).is_file():
        return FetchedFiles(Path(root))
    names = {"cap_bytes": "cache_bytes"}
    kept = {names.get(key, key): value for key, value in settings.items() if key != "block_bytes"}
    files = fetch_store(**kept)
    if files.root.name != Path(root).name:
        raise PartitionStoreError(
            f"{files.url}: the store that exists here has another fingerprint than the trainer's: start all machines"
            " again on one store"
        )
    return files
