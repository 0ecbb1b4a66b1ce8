"""The result of partitioning, and its file."""

import json
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from ..errors import UNREADABLE, GNNScaleError, disk_errors, one_line_of
from .quality import PartitionQuality

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Partitioning:
    """Which part owns each node, and how that came about.

    Attributes:
        part_id: (num_nodes,) int32 in [0, num_parts), in the node order of the stream.
        num_parts: number of parts; some may own no node.
        method: name of the partitioner.
        options: its options, defaults filled in; those that decide nothing, see `decisive_options`, at their defaults.
        seed: decides every random choice.
        quality: cut, replication and balances; None if it was not evaluated.
        seconds: wall-clock seconds by phase, and `total`.
        peak_bytes: largest anonymous + shared resident memory of the process tree above what stood at the start,
            sampled by a thread; METIS holds the interpreter while it works, so its own peak goes unseen.
        notes: facts that the method found: the layout, repeats, oversized clusters, warnings.
        edge_files: state of the stream's files before they were read, by which a store of edges that changed since is
            refused; [] of edges that lie in memory.
    """

    part_id: np.ndarray
    num_parts: int
    method: str
    options: dict
    seed: int
    quality: PartitionQuality | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    notes: dict = field(default_factory=dict)
    edge_files: list = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        return len(self.part_id)

    def save(self, path: str | os.PathLike) -> None:
        """Write a folder with `part_id.npy` and, last, `partitioning.json`; each is there whole or not at all.

        Args:
            path: the folder; made where missing.

        Raises:
            GNNScaleError: the disk is full, or fails.
        """
        folder = Path(path)
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("part_id", "quality")}
        facts["quality"] = None if self.quality is None else asdict(self.quality)
        facts["format_version"] = FORMAT_VERSION
        facts["num_nodes"] = self.num_nodes
        facts["part_id_crc32"] = _array_checksum(self.part_id)
        facts = json.loads(json.dumps(facts, default=_plain))
        text = json.dumps({**facts, "crc32": _checksum(facts)}, indent=1)
        # An old description beside new ids would be a lie, so the description goes first and comes back last.
        with disk_errors(folder, "written", "make room, and run the same command again"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "partitioning.json").unlink(missing_ok=True)
            _write(folder / "part_id.npy", lambda file: np.save(file, self.part_id))
            _write(folder / "partitioning.json", lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Partitioning":
        """Read what `save` wrote.

        Raises:
            GNNScaleError: the folder holds no whole partitioning; the message says what is wrong.
        """
        folder = Path(path)
        try:
            facts = json.loads((folder / "partitioning.json").read_text())
            version, crc = facts.get("format_version"), facts.pop("crc32", None)
            if version == FORMAT_VERSION and crc not in (None, _checksum(facts)):
                raise ValueError("partitioning.json was damaged after it was written")
            part_id = np.load(folder / "part_id.npy", allow_pickle=False)
        except (*UNREADABLE, AttributeError) as error:
            told = one_line_of(error)
            raise GNNScaleError(f"{folder}: no partitioning can be read there ({told}); partition again") from error
        if version != FORMAT_VERSION:
            raise GNNScaleError(f"{folder}: format version {version}, this package reads {FORMAT_VERSION}")
        num_nodes, crc = facts.pop("num_nodes", None), facts.pop("part_id_crc32", None)
        if part_id.shape != (num_nodes,):
            raise GNNScaleError(f"{folder}: {num_nodes} nodes announced, part_id.npy has shape {part_id.shape}")
        if crc not in (None, _array_checksum(part_id)):
            raise GNNScaleError(f"{folder}: part_id.npy was damaged after it was written; partition again")
        try:
            del facts["format_version"]
            quality = facts.pop("quality")
            return cls(part_id=part_id, quality=None if quality is None else PartitionQuality(**quality), **facts)
        except (KeyError, TypeError) as error:
            raise GNNScaleError(f"{folder}: partitioning.json is damaged ({error}); partition again") from error


def _write(path: Path, write) -> None:
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    with disk_errors(path, "written", "make room, and run the same command again"):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _array_checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array), zlib.crc32(array.dtype.str.encode()))


def _checksum(facts: dict) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _plain(value):
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
