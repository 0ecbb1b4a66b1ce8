"""Rows and halos of an updated store: the new edges, sorted by row, merged with the rows of the old one."""

import numpy as np

from ..dataset.columns import EDGE_COLUMNS
from ..graph import CSC
from .array_file import map_rows
from .buckets import BucketLayout, bucket_edges, drop_runs, open_runs
from .coded_neighbors import map_neighbors
from .csc_writer import drop_cross
from .disk import WriteBudget
from .halo import write_halo
from .inputs import StoreInputs
from .journal import Journal
from .manifest import without_prefix
from .merged_rows import JoinedValues, OldRows, merge_rows
from .node_tables import Progress
from .reader import PartitionStore
from .renumbered import Renumbered
from .store_change import AddedEdges, StoreChange


def write_edges(
    journal: Journal,
    old: PartitionStore,
    change: StoreChange,
    nodes: Renumbered,
    flags: np.ndarray,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Write rows and halos: the new edges sorted by row, and merged with the old rows."""
    inputs = _inputs(old, change, nodes)
    both = 2 if inputs.stream.to_undirected else 1
    layout = BucketLayout.plan(inputs.num_nodes, old.num_edges + change.num_edges * both, budget.sort_edges)
    if not journal.is_done("rows"):
        bucket_edges(journal, inputs, nodes.ids.store_nid, layout, budget, progress)
        edge_type = np.empty(0, np.uint8) if old.edge_type is None else old.edge_type
        rows = OldRows(old.csc, edge_type, nodes.before, nodes.after, change.dropped)
        merge_rows(
            journal, inputs, nodes.ids, rows, flags, layout, open_runs(journal, inputs, layout), budget, progress
        )
    drop_runs(journal)
    csc = map_csc(journal, inputs.num_nodes)
    write_halo(journal, inputs, csc, nodes.ids.part_offsets, nodes.new_types, budget, progress)
    drop_cross(journal)


def _inputs(old: PartitionStore, change: StoreChange, nodes: Renumbered) -> StoreInputs:
    """Return what the writers of rows and halos read: new edges as a stream, values of old and new edges joined."""
    values = {}
    for name in EDGE_COLUMNS:
        stored = old.edge_column(name)
        if stored is not None:
            new = change.edge_values.get(name)
            values[name] = JoinedValues(stored, stored[:0] if new is None else new)
    manifest = old.manifest
    tables = [table for table in change.tables if without_prefix(table.name) == "features"]
    typed = [table.node_type for table in tables if table.node_type is not None]
    return StoreInputs(
        stream=AddedEdges.of(change, nodes.original, old, nodes.sizes), part_id=nodes.part_id, num_parts=old.num_parts,
        features=dict.fromkeys(typed), seed=manifest["seed"], method=manifest["method"], options={},
        pack_halo=manifest["pack_halo"], **values,
    )  # fmt: skip


def map_csc(journal: Journal, num_nodes: int) -> CSC:
    num_edges = journal.state("rows")["num_arcs"]
    indptr = map_rows(journal.folder / "csc_indptr.npy", np.int64, (num_nodes + 1,))
    return CSC(indptr, map_neighbors(journal, num_nodes, num_edges))
