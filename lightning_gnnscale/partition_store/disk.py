"""How much memory and disk the writer may take, and what it needs, reported before it begins."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..dataset.feature_storage import feature_bytes
from ..errors import PartitionStoreError
from ..events import record
from ..graph import id_dtype
from ..memory import format_bytes, free_memory_bytes, read_sizes
from ..planner.host_memory import STORE_BYTES_A_NODE
from ..traits import PartitioningTraits
from .halo_rows import number_bytes
from .inputs import StoreInputs
from .journal import Journal, journal_head

_LARGEST_BUFFERS = 1 << 28  # bytes of the default budget: of edges that are sorted with their ids
_MOST_HALVINGS = 6
RUN_FILES = 16  # how many files bucketed edges fall into, at most; each is deleted once it is sorted


@dataclass(frozen=True)
class WriteBudget:
    """Sizes of the writer's buffers; they change neither the bytes of a store nor its layout.

    Attributes:
        spill_edges: source edges that are bucketed at once; 24 to 56 bytes each.
        sort_edges: edges that are sorted at once; 16 bytes each, 32 where edges carry weights or features. A single
            row that is longer is sorted whole.
        block_bytes: feature bytes that are copied at once, as they are given, stored or checked, whichever are most;
            twice in memory, three times where they are quantised.
        checkpoint_bytes: bytes written between two lines of the journal.
    """

    spill_edges: int = 1 << 22
    sort_edges: int = 1 << 23
    block_bytes: int | str = 1 << 26
    checkpoint_bytes: int | str = 1 << 28

    def __post_init__(self):
        read_sizes(self, "block_bytes", "checkpoint_bytes")
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"WriteBudget.{name} must be at least 1, got {value}")

    @classmethod
    def fitting(cls, num_nodes: int, folder: Path, source: Mapping) -> "WriteBudget":
        """Return the default budget, halved until its largest buffers take half of the memory that is free.

        Args:
            num_nodes: Of the graph, whose ids are held besides.
            folder: The partial folder. An unfinished store of `source` goes on only with the budget that it began with.
        """
        head = journal_head(folder)
        if "budget" in head and all(head.get(name) == value for name, value in source.items()):
            return cls(**head["budget"])
        spare = max(0, free_memory_bytes() - STORE_BYTES_A_NODE * num_nodes) // 2
        by = next((by for by in range(_MOST_HALVINGS) if _LARGEST_BUFFERS >> by <= spare), _MOST_HALVINGS)
        return cls(cls.spill_edges >> by, cls.sort_edges >> by, cls.block_bytes >> by)


def check_disk(inputs: StoreInputs, p, journal: Journal) -> None:
    """Report how much disk the work needs at most, and refuse if it is not free."""

    def closer() -> int:  # worth the pass that a quality may take
        quality = PartitioningTraits(p).quality
        counted = quality is not None and quality.halo_hops == 1
        halo_rows = sum(quality.halo_per_part) if counted else None
        return disk_bytes(inputs, 1.0 if quality is None else quality.edge_cut_ratio, halo_rows)

    check_space(journal, disk_bytes(inputs), closer)


def check_space(journal: Journal, needed: int, closer: Callable[[], int] | None = None) -> None:
    """Report how many bytes the work of a journal needs at most, and refuse if they are not free.

    Args:
        journal: What is written already counts.
        needed: Bytes.
        closer: Returns a closer bound, where the first one is too high.
    """
    folder = journal.folder
    there, free = sum(path.stat().st_size for path in folder.iterdir()), shutil.disk_usage(folder).free
    if needed - there > free and closer is not None:
        needed = closer()
    record("store_disk", root=str(folder), needed_bytes=needed, written_bytes=there, free_bytes=free)
    if needed - there > free:
        raise PartitionStoreError(
            f"{folder}: writing needs about {format_bytes(needed - there)} at its peak, {format_bytes(free)} are free; "
            "free space or choose another root"
        )


def disk_bytes(inputs: StoreInputs, edge_cut_ratio: float = 1.0, halo_rows: int | None = None) -> int:
    """Return an upper bound of the disk that the writer takes at its peak, scratch included, bytes.

    It counts on no file of bucketed edges being larger than twice its even share.

    Args:
        edge_cut_ratio: share of edges between parts, 1 if it is not known.
        halo_rows: rows of all halos together; None: as many as the cut allows.
    """
    ids = id_dtype(inputs.num_nodes).itemsize
    edge_id = 8 if inputs.carries_edge_ids else 0
    both = bool(inputs.stream.to_undirected)
    num_edges = inputs.stream.num_edges * (2 if both else 1)
    per_edge = sum(_row_bytes(array) for array in inputs.edge_values.values())
    if inputs.relations is not None:
        per_edge += inputs.relations.edge_type_dtype.itemsize
    if inputs.edge_weight is not None:
        per_edge += 4 - _row_bytes(inputs.edge_weight)  # stored as float32
    runs = num_edges * (4 + ids + edge_id)
    cut_edges = int(num_edges * edge_cut_ratio)
    if halo_rows is None:
        halo_rows = min(cut_edges, inputs.num_nodes * max(0, inputs.num_parts - 1))
    cross = 0 if both and not edge_id else cut_edges * (ids + (0 if both else 4) + edge_id)
    halo = halo_rows * (ids + 4) + inputs.num_nodes if inputs.pack_halo else 0  # the nodes, and where their rows are
    if not both:  # the number of edges of each halo node, most in one byte, and their sources
        halo += halo_rows + cut_edges // 64 + cut_edges * number_bytes(inputs.num_nodes)
    if edge_id:
        halo += halo_rows * number_bytes(num_edges)
    coded = 0 if inputs.edge_storage is None else num_edges * (ids + 1)
    rows_bytes = feature_bytes(inputs.features, inputs.feature_storage)
    packed = halo_rows * -(-rows_bytes // max(1, inputs.num_nodes)) if inputs.pack_halo else 0
    degree = 4 if inputs.edge_weight is not None else 0
    rows = num_edges * (ids + per_edge) + (9 + degree) * inputs.num_nodes
    tables = inputs.num_nodes * (2 * ids + 8 + len(inputs.masks)) + rows_bytes
    tables += sum(feature_bytes(rows, None) for _, _, rows in inputs.node_rows)
    if inputs.labels is not None:
        tables += inputs.labels.size * (8 if inputs.labels.ndim == 1 else 4)
    share = min(1, 2 / RUN_FILES)  # bucketed edges go as rows come
    halo += packed + coded  # what is coded is there twice until it is done
    return tables + max(runs + int((rows + cross) * share), rows + cross + max(int(runs * share), halo))


def _row_bytes(array) -> int:
    return array.nbytes // max(1, len(array))
