"""The input of this package's methods: the graph behind a stream, scratch disk, checkpoints and progress.

`GraphInput` opens the graph (with or without scratch disk, repeated edges dropped or not), goes on where a killed run
was saved, and reports progress; `graph_partitioner` makes a registered partitioner of a function that takes one.
"""

import functools
import hashlib
import inspect
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..edge_stream.array import load_npz_arrays
from ..errors import check_number
from ..system import whole_file
from . import phases
from .graph_access.external_csc import ExternalCSC, open_external_csc
from .graph_access.layout import ScanState
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import SimpleGraph, graph_facts, open_simple_graph, reopen_simple_graph
from .registry import WITHOUT_EFFECT, register_partitioner

_UNFINISHED = ".tmp"
FIRST_PASS = "degrees"  # its phase, in checkpoints as in `Partitioning.seconds`

_SEEN, _NEXT_CHUNK = "pass.seen", "pass.next_chunk"  # arrays of a checkpoint: edges read and their hashes; a number


class GraphInput:
    """An edge stream, what a run may use to read it, and the state that an earlier process saved.

    A method opens the graph once, by `open_simple` or `open_rows`; it then asks `left_in` for what was saved in each of
    its phases, and reads the edges by `run_pass`, or saves by `after_chunk` and `save`.

    Args:
        method: the method's name.
        stream, seed, masks, balance, progress: as given to `partition`.
        options: the number of parts and the method's own; a checkpoint of a run with other ones is not used.
        deduplicate: see `open_simple_graph`.
        scratch: folder for scratch files; "auto": the system's folder for temporary files; None: no scratch disk.
        checkpoint: file to save the state to; where it exists already, the work goes on from it. It is removed
            at the end. None: nothing is saved.
        checkpoint_every: chunks (or blocks of rows) between two saves, >= 1.

    Attributes:
        simple: the SimpleGraph, once `open_simple` has been called.
        phase: the phase after the first pass in which an earlier process left the run; "": in none.
        left: what it saved there, except what this class saves itself.
        facts: further arrays by name that every later save must hold.
    """

    def __init__(
        self,
        method: str,
        stream,
        options: Mapping,
        seed: int = 0,
        masks: Mapping | None = None,
        balance: Mapping | None = None,
        progress=None,
        deduplicate: bool | None = None,
        scratch: str | os.PathLike | None = AUTO,
        checkpoint: str | os.PathLike | None = None,
        checkpoint_every: int = 8,
    ):
        check_number("partitioner.checkpoint_every", checkpoint_every, at_least=1)
        self.method, self.stream, self.seed, self.masks, self.balance = method, stream, seed, masks, balance
        self.progress, self.deduplicate, self.scratch = progress, deduplicate, scratch
        self.simple: SimpleGraph | None = None
        self.phase, self.left, self.facts = "", {}, {}
        settings = {key: value for key, value in options.items() if key not in WITHOUT_EFFECT}
        settings |= {"method": method, "seed": seed, "balance": balance}
        settings |= {"deduplicate": deduplicate, "scratch": scratch is not None}  # without it repeated edges may stay
        if checkpoint is not None:
            settings["masks"] = {name: _checksum(mask) for name, mask in (masks or {}).items() if mask is not None}
        self._saved = Checkpoint(checkpoint, stream, settings, checkpoint_every)
        self._scan: ScanState | None = None
        self._position: dict[str, np.ndarray] = {}

    @property
    def num_nodes(self) -> int:
        """The stream's nodes, counted where their number was not given."""
        if self.stream.num_nodes is None:
            self.stream.count()
        return self.stream.num_nodes

    def open_simple(self) -> np.ndarray | None:
        """Open the undirected simple graph as `simple`, without the passes that an earlier process has made.

        Returns:
            (num_nodes,) degrees of `id_dtype(num_nodes)`; None where the run was left after the first pass.
        """
        self._load()
        with phases.phase(FIRST_PASS):
            if self.phase:
                self.simple = reopen_simple_graph(self.stream, self.left, self.scratch, self.progress)
                self.left.pop("graph")
                return None
            scan, self._scan = self._scan, None  # its degrees are the method's from here on
            given = (scan, self.deduplicate, self.scratch, self.progress, self._save_scan)
            self.simple, degree = open_simple_graph(self.stream, *given)
        return degree

    def open_rows(self, block_edges: int, threads=None, held_blocks: int = 0) -> ExternalCSC:
        """Open the graph as rows on scratch disk, see `open_external_csc`; a run that goes on sorts them again."""
        self._load()
        scan, self._scan = self._scan, None
        after_chunk = None if self.phase or self._saved.path is None else self._save_scan
        given = (self.scratch, block_edges, self.deduplicate, self.progress, scan, after_chunk, threads)
        return open_external_csc(self.stream, *given, held_blocks)

    def left_in(self, phase: str) -> dict[str, np.ndarray]:
        """Return the arrays that an earlier process saved in a phase, once; {} where it was left in another one."""
        left, self.left = (self.left, {}) if phase == self.phase else ({}, self.left)
        return left

    def run_pass(self, phase: str, per_block: Callable, arrays: Callable[[], dict], what: str | None = None) -> None:
        """Read all simple edges once, or those that are left of the pass that an earlier process was in.

        Args:
            phase: its name in checkpoints.
            per_block: called as per_block(src, dst) with at most `simple_graph.BLOCK_EDGES` edges.
            arrays: called without arguments after a chunk that is saved for the state by name.
            what: its name for progress. None: the phase's.
        """
        position = self._position or {_SEEN: np.zeros(2, np.uint64), _NEXT_CHUNK: np.zeros(1, np.int64)}
        self._position = {}
        seen, next_chunk = position[_SEEN], position[_NEXT_CHUNK]
        for chunk in self.stream.chunks(int(next_chunk[0])):
            for src, dst in self.simple.blocks(chunk, seen):
                per_block(src, dst)
            next_chunk[0] += 1
            self.after_chunk(phase, lambda: {**arrays(), **position})
            self.tell(what or phase, int(seen[0]), self.simple.report.num_listed)
        self.simple.check(seen)

    def tell(self, what: str, done: int, total: int | None) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(what, done, total)

    def after_chunk(self, phase: str, arrays: Callable[[], dict[str, np.ndarray]]) -> None:
        """Count one chunk, and save what `arrays` returns when `checkpoint_every` chunks have gone by."""
        if self._saved.is_due():
            self.save(phase, arrays())

    def save(self, phase: str, arrays: dict[str, np.ndarray]) -> None:
        """Save the state of a phase, where there is a checkpoint, with what opening the graph again needs."""
        if self._saved.path is not None:
            opened = {} if self.simple is None else graph_facts(self.simple)
            self._saved.save(phase, {**arrays, **opened, **self.facts})

    def finish(self) -> None:
        """Remove the checkpoint: the run is over."""
        self._saved.remove()

    def _load(self) -> None:
        self.phase, self.left = self._saved.load() or ("", {})
        if self.phase == FIRST_PASS:
            self._scan, self.phase, self.left = ScanState(**self.left), "", {}
        self._position = {name: self.left.pop(name) for name in (_SEEN, _NEXT_CHUNK) if name in self.left}

    def _save_scan(self, state: ScanState) -> None:
        if self._saved.is_due():
            self._saved.save(FIRST_PASS, state._asdict())


def graph_partitioner(
    name: str,
    memory: Callable[..., float] | None = None,
    resumable: bool = True,
    slack: float | Callable[..., float | None] | None = None,
) -> Callable[[Callable], Callable]:
    """Register a partitioner that is written as a function of a `GraphInput`.

    Args:
        name, memory, slack: see `register_partitioner`.
        resumable: it saves its state, and takes the options `checkpoint` and `checkpoint_every`.

    Returns:
        A decorator for `fn(graph, num_parts, *, **options)`; what it returns is the registered function, which takes
        the stream instead of the graph, and the keyword arguments of `GraphInput` besides the options.
    """
    shared = inspect.signature(GraphInput).parameters
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in shared.values() if p.default is not p.empty]
    keywords = [p for p in keywords if resumable or not p.name.startswith("checkpoint")]

    def decorate(function: Callable) -> Callable:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(function)
        def partitioner(stream, num_parts: int, **given) -> np.ndarray:
            options = {p.name: given.pop(p.name, p.default) for p in own}
            graph = GraphInput(name, stream, {**options, "num_parts": num_parts}, **given)
            part_id = function(graph, num_parts, **options)
            graph.finish()
            return part_id

        # What a caller may give: the method's own options go between `progress` and `deduplicate`.
        required = inspect.signature(partitioner, follow_wrapped=False).parameters
        shown = [required["stream"], required["num_parts"], *keywords[:4], *own, *keywords[4:]]
        partitioner.__signature__ = inspect.Signature(shown)
        return register_partitioner(name, memory, slack)(partitioner)

    return decorate


def _checksum(mask) -> int:
    return zlib.crc32(np.ascontiguousarray(mask).tobytes())


class Checkpoint:
    """One file that holds the latest state of one run; without a path there is none, and nothing is due.

    Args:
        path: the file; it is replaced in one step, so it is never half there.
        stream: the EdgeStream that is read; another source, or another chunk size, does not match the file.
        settings: plain values that must be the same for the state to be of use.
        every: chunks between two saves, >= 1.

    Raises:
        ValueError: the path is a folder, or its folder does not exist.
    """

    def __init__(self, path: str | os.PathLike | None, stream, settings: dict, every: int):
        self.path = None if path is None else Path(path)
        self.every = every
        self._chunks = 0
        self._key = ""
        if self.path is not None:
            if self.path.is_dir() or not self.path.parent.is_dir():
                raise ValueError(f"partitioner.checkpoint must be a file in a folder that exists, got {self.path}")
            facts = [stream.fingerprint(), stream.chunk_edges, settings]
            self._key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def load(self) -> tuple[str, dict[str, np.ndarray]] | None:
        """Return the phase and the arrays of the saved state, or None where there is none for this run.

        Raises:
            ValueError: the file is not a checkpoint; it is left as it is.
        """
        if self.path is None or not self.path.exists():
            return None
        if not _may_be_checkpoint(self.path):
            raise ValueError(f"partitioner.checkpoint: {self.path} is not a checkpoint: give another path")
        try:
            arrays = load_npz_arrays(self.path)
        except ValueError:
            return None  # damaged: the work starts again and replaces it
        phase, key = str(arrays.pop("phase")), str(arrays.pop("key"))
        return (phase, arrays) if key == self._key else None

    def is_due(self) -> bool:
        """Count one chunk, and return whether the state is to be saved after it."""
        self._chunks += self.path is not None
        return self.path is not None and self._chunks % self.every == 0

    def save(self, phase: str, arrays: dict[str, np.ndarray]) -> None:
        """Write the arrays, whole or not at all.

        Raises:
            GNNScaleError: the disk is full, or cannot be written to; the state before stays.
        """
        remedy = "make space, or give checkpoint=<another file>; what was saved stays"
        with whole_file(self.path, remedy, "saved", _UNFINISHED) as file:
            np.savez(file, phase=phase, key=self._key, **arrays)

    def remove(self) -> None:
        """Delete the file: the run is over."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            # of a process that was killed while it saved
            self.path.with_name(self.path.name + _UNFINISHED).unlink(missing_ok=True)


def _may_be_checkpoint(path: Path) -> bool:
    """Whether a file is one of ours, intact or damaged since."""
    try:
        with zipfile.ZipFile(path) as file:
            return {"phase.npy", "key.npy"} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        with path.open("rb") as file:
            return file.read(2) in (b"", b"PK")
