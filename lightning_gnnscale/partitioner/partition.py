"""`partition`, the one entry to every partitioner, and `Partitioning`, its result with the file format."""

import json
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from .. import events
from ..edge_stream.relations import HeteroStream
from ..edge_stream.stream import file_states
from ..errors import UNREADABLE, GNNScaleError, check_integer, disk_errors, is_integer, one_line_of, short
from ..foreign import has_all
from ..kernel_sets import compile_ahead
from ..memory_peak import MemoryPeak
from ..system import whole_file
from . import phases
from .constraints import balance_by_node_type
from .quality import PartitionQuality, check_masks, evaluate_partitioning, quality_of_counts
from .registry import check_ids, complete_options, decisive_options, fill_empty_parts, get_partitioner, settle_balance
from .two_levels import TwoLevels, check_num_machines

FORMAT_VERSION = 1


class _AskedFor:
    """A field of a frozen dataclass that may be given as a function: called once, when the field is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance, owner: type):
        if instance is None:
            return None  # the field's default
        value = instance.__dict__[self._name]
        if callable(value):
            value = instance.__dict__[self._name] = value()
        return value

    def __set__(self, instance, value) -> None:
        instance.__dict__[self._name] = value


@dataclass(frozen=True)
class Partitioning:
    """The part of each node, and how it was computed.

    Attributes:
        part_id: (num_nodes,) int32 in [0, num_parts), in the node order of the stream.
        num_parts: number of parts.
        method: name of the partitioner.
        options: its options, defaults filled in; those that decide nothing, see `decisive_options`, at their defaults.
        seed: decides every random choice.
        quality: cut, replication and balances. Where the method did not count them on its way, they are measured by a
            pass over the stream when they are first read, printed, pickled or saved; None if they are not to be
            evaluated. May be given as a function without arguments.
        seconds: wall-clock seconds by phase, and `total`; `evaluate` once the quality was measured.
        peak_bytes: largest anonymous + shared resident memory of the process tree above that at the start,
            sampled by a thread. METIS holds the interpreter while it works; only on Linux its peak is seen then.
        notes: facts that the method found: the layout, repeats, oversized clusters, warnings.
        edge_files: state of the stream's files before they were read, by which a store of edges that changed since is
            refused; [] of edges that lie in memory.
    """

    part_id: np.ndarray
    num_parts: int
    method: str
    options: dict
    seed: int
    quality: PartitionQuality | None = _AskedFor()
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    notes: dict = field(default_factory=dict)
    edge_files: list = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the graph."""
        return len(self.part_id)

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)

    @property
    def is_measured(self) -> bool:
        """Whether `quality` is there, so that reading it costs nothing."""
        return isinstance(self.__dict__["quality"], PartitionQuality)

    def save(self, path: str | os.PathLike, measure: bool = True) -> None:
        """Write a folder with `part_id.npy` and, last, `partitioning.json`; each is there whole or not at all.

        Args:
            path: the folder; made where missing.
            measure: whether a quality that was not read yet is measured; else what is saved has none.
        """
        folder = Path(path)
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("part_id", "quality")}
        quality = self.quality if measure or self.is_measured else None
        facts["quality"] = None if quality is None else asdict(quality)
        facts["format_version"] = FORMAT_VERSION
        facts["num_nodes"] = self.num_nodes
        facts["part_id_crc32"] = _array_checksum(self.part_id)
        facts = json.loads(json.dumps(facts, default=_plain))
        text = json.dumps({**facts, "crc32": _checksum(facts)}, indent=1)
        # An old description beside new ids would be wrong: it is removed first and written last.
        remedy = "make space, and run the same command again"
        with disk_errors(folder, "written", remedy):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "partitioning.json").unlink(missing_ok=True)
            with whole_file(folder / "part_id.npy", remedy) as file:
                np.save(file, self.part_id)
            with whole_file(folder / "partitioning.json", remedy) as file:
                file.write(text.encode())

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


DEFAULT_METHOD = "streaming_multilevel"  # of `partition`, as of the DataModules and of the command line


def partition(
    stream,
    method: str = DEFAULT_METHOD,
    num_parts: int | None = None,
    seed: int = 0,
    masks: dict | None = None,
    balance: dict | None = None,
    progress=None,
    evaluate: bool = True,
    edge_type_weight: dict | None = None,
    num_machines: int | None = None,
    **options,
) -> Partitioning:
    """Assign every node of a stream to a part.

    Args:
        stream: an EdgeStream.
        method: one of `available_partitioners()`.
        num_parts: in [1, num_nodes]. A part that a method leaves without nodes gets one of the largest part's; the
            notes say so (`parts_filled`).
        seed: decides every random choice.
        masks: {"train": (num_nodes,) bool, ...}, for methods that balance them and for `train_balance`; of integers,
            how much each node counts.
        balance: {"nodes": 1.05, ...}: the largest part over the mean, for methods that take constraints. In a graph
            with node types also node types, masks of a node type and edge types: {"paper": 1.05, "train:paper": 1.05,
                "cites": 1.1}.
        progress: called as progress(what, done, total) at most once a chunk; total may be None.
        evaluate: let the result have a `quality`. "streaming_multilevel" counts it at its end, where its rows are on
            scratch disk; else the pass that it takes is made when it is first read, and the stream is held till then.
        edge_type_weight: {"cites": 2, "at": 0}: an edge of type "cites" counts as two edges, those of type "at" are
            left out. Whole numbers >= 0; edges of other types count as one. For methods that count repeated edges,
            without `deduplicate=True`.
        num_machines: Number of machines that the parts are for, which divides num_parts: the graph is divided into
            machines, and the nodes of each into its parts, by the same method, see `TwoLevels`. A machine's parts
            follow each other, and a run on so many machines assigns them so. None: parts are made at once.
        options: the method's own.

    Returns:
        The Partitioning.

    Raises:
        ValueError: an unknown method or option, or a value outside its range; the message says what is allowed.
        EdgeStreamError: the source cannot be read, or changed between two passes.
    """
    function = get_partitioner(method)
    check_integer("seed", seed)
    if not has_all(stream, "num_nodes", "chunks", "count"):
        raise ValueError(f"stream must be a stream of edges: gs.open_edge_stream(...), got {short(stream)}")
    compile_ahead([f"partition:{method}"])
    edge_files = file_states(stream)
    options = complete_options(method, options)
    if stream.num_nodes is None:
        stream.count()
    num_parts = _check_num_parts(num_parts, stream.num_nodes)
    num_machines = 1 if num_machines is None else check_num_machines(num_machines, num_parts)
    asked, of_node_types = masks, balance_by_node_type(stream, masks, balance)
    if evaluate:
        check_masks(stream.num_nodes, masks)
    seen = stream if not edge_type_weight else weigh_edge_types(stream, edge_type_weight)
    if edge_type_weight and options.get("deduplicate") and max(edge_type_weight.values()) > 1:
        raise ValueError("partitioner.deduplicate=true drops the repeats that edge_type_weight makes: leave one out")
    asks = {"judges_later": True, "counts_quality": evaluate and seen is stream and num_machines == 1}
    with phases.recording(phases.PhaseRecord(num_parts=num_parts, **asks)) as record, MemoryPeak() as peak:
        with phases.phase("total"):
            given = {"masks": of_node_types or None, "balance": balance, "progress": progress}
            if num_machines > 1:
                made = TwoLevels(method, options, num_machines, seed, **given).parts(seen, num_parts)
            else:
                made = function(seen, num_parts, seed=seed, **given, **options)
            part_id = made
        peak_bytes = max(0, peak.update() - peak.start_bytes)
        part_id = fill_empty_parts(check_ids(method, part_id, stream.num_nodes, num_parts), num_parts)
        settle_balance(method, options, part_id, num_parts, balance, of_node_types)
    counts = record.counts if part_id is made else None  # of other parts where empty ones were filled
    events.record(
        "partition", method=method, num_parts=num_parts, seconds=record.seconds, peak_bytes=peak_bytes, **record.notes
    )
    made_with = decisive_options(method, options)
    if edge_type_weight:
        made_with |= {"edge_type_weight": dict(edge_type_weight)}
    if num_machines > 1:
        made_with |= {"num_machines": num_machines}

    def measure() -> PartitionQuality:
        if counts is not None:
            return quality_of_counts(**counts, part_id=part_id, masks=asked)
        shared = {name: options[name] for name in ("deduplicate", "scratch") if name in options}
        graph = record.graph if seen is stream else None
        with phases.recording(record), phases.phase("evaluate"):
            return evaluate_partitioning(stream, part_id, num_parts, 1, asked, progress=progress, graph=graph, **shared)

    quality = measure if evaluate else None
    return Partitioning(
        part_id, num_parts, method, made_with, seed, quality, record.seconds, peak_bytes, record.notes, edge_files
    )


def weigh_edge_types(stream, edge_type_weight: dict) -> HeteroStream:
    """Return a stream that lists each edge as often as the weight of its edge type says.

    Raises:
        ValueError: the graph has one edge type, a weight is not a whole number >= 0, or edge types share a source.
    """
    if not isinstance(stream, HeteroStream):
        raise ValueError("partitioner.edge_type_weight needs a graph with edge types: leave it out")
    weights = {}
    for name, weight in edge_type_weight.items():
        whole = isinstance(weight, int | np.integer) or (isinstance(weight, float) and weight.is_integer())
        if isinstance(weight, bool) or not whole or weight < 0:
            raise ValueError(f"partitioner.edge_type_weight.{name} must be a whole number >= 0, got {short(weight)}")
        weights[stream.schema.edge_type_number(name)] = int(weight)
    sources = []
    for source in stream.sources:
        if np.ndim(source.relation):
            raise ValueError(
                "partitioner.edge_type_weight needs a source per edge type, but these edges share one: "
                "give each edge type its edges in gs.hetero_graph"
            )
        sources += [source] * weights.get(int(source.relation), 1)
    sizes = np.diff(stream.type_offsets).tolist()
    drops = stream.remove_self_loops
    weighted = HeteroStream(sources, stream.schema, sizes, stream.chunk_edges, stream.to_undirected, drops)
    weighted.layout = "once"  # a repeated edge counts again
    return weighted


def _check_num_parts(num_parts, num_nodes: int) -> int:
    if not is_integer(num_parts) or not 1 <= num_parts <= num_nodes:
        raise ValueError(f"partitioner.num_parts must be in [1, {num_nodes}], got {short(num_parts)}")
    return int(num_parts)


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
