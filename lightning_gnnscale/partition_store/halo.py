"""The halo as it is written: what does not follow from a part's own rows, and feature rows packed for the part."""

import numpy as np

from ..graph import CSC, id_dtype
from ..memory import free_memory_bytes
from .array_file import HEADER_BYTES, ArrayFile, map_rows
from .csc_writer import map_cross
from .disk import WriteBudget
from .features import CSRFeatures, DenseFeatures
from .halo_rows import HaloForm, count_halos, encode_halo, encode_halo_end, halo_and_edges, halo_of_rows
from .inputs import StoreInputs
from .journal import Journal, file_states
from .manifest import type_prefix
from .node_tables import Progress
from .typed_features import NodeTypes

STEP = "halo"
PACK_STEP = "halo_features"
_BLOCK_ROWS = 1 << 16


class _NodeTypeLists:
    """Appends, part after part, the halo nodes of a node type, by their rows among the nodes of that type."""

    def __init__(self, journal: Journal, node_type: int, num_nodes: int):
        self.node_type = node_type
        self.nodes = journal.open_file(STEP, f"{type_prefix(node_type)}halo_nodes.npy", id_dtype(num_nodes))
        self.offsets = journal.open_file(STEP, f"{type_prefix(node_type)}halo_offsets.npy", np.int64)
        if self.offsets.num_rows == 0:
            self.offsets.append(np.zeros(1, np.int64))

    def append(self, node_types: np.ndarray, rows: np.ndarray) -> int:
        """Append the nodes of this node type among those of a part's halo; return the bytes."""
        own = rows[node_types == self.node_type].astype(self.nodes.dtype)
        self.nodes.append(own)
        self.offsets.append(np.array([self.nodes.num_rows], np.int64))
        return own.nbytes + self.offsets.row_bytes


class _HaloWriter:
    """Appends the halo of one part after another."""

    def __init__(
        self, journal: Journal, inputs: StoreInputs, csc: CSC, part_offsets: np.ndarray, node_types: NodeTypes | None
    ):
        self.journal, self.csc, self.part_offsets = journal, csc, part_offsets
        self.part = journal.state(STEP).get("part", 0)
        self.form = HaloForm(rows=not journal.state("rows")["symmetric"], places=inputs.carries_edge_ids)
        self.offsets = journal.open_file(STEP, "halo_offsets.npy", np.int64)
        self.nodes = self.code = self.code_offsets = None
        self.node_types, self.lists = node_types, []
        if inputs.pack_halo and inputs.typed_features:
            sizes = np.diff(inputs.relations.type_offsets).tolist()
            self.lists = [
                _NodeTypeLists(journal, node_type, sizes[node_type]) for node_type in sorted(inputs.typed_features)
            ]
        elif inputs.pack_halo:
            self.nodes = journal.open_file(STEP, "halo_nodes.npy", id_dtype(inputs.num_nodes))
        if self.form.stores_any:
            self.code = journal.open_file(STEP, "halo_code.npy", np.uint8)
            self.code_offsets = journal.open_file(STEP, "halo_code_offsets.npy", np.int64)
            self.cross_index, self.cross = map_cross(journal, inputs)
        self.num_halo = journal.state(STEP).get("num_halo", 0)
        self.counts: list[list[int]] | None = None  # of each part, where the partition's quality follows from the rows
        if journal.state("rows")["symmetric"]:
            self.counts = journal.state(STEP).get("counts", [])
        if self.part == 0:
            for file in (self.offsets, self.code_offsets):
                if file is not None:
                    file.append(np.zeros(1, np.int64))

    def write_part(self, part: int, block_edges: int) -> int:
        """Append the number of a part's halo nodes, and of them and their rows what is stored; return the bytes."""
        core = self.part_offsets[part : part + 2].tolist()
        if self.counts is None:
            held = halo_of_rows(self.csc, *core, block_edges)
        else:
            held, counts = halo_and_edges(self.csc, *core, block_edges)
            self.counts.append([*counts])
        self.num_halo += len(held)
        self.offsets.append(np.array([self.num_halo], np.int64))
        if self.nodes is None and self.code is None and not self.lists:
            return self.offsets.row_bytes
        nodes, before, listed = held.nodes, 0 if self.code is None else self.code.num_rows, 0
        if self.nodes is not None:
            self.nodes.append(nodes.astype(self.nodes.dtype))
            listed = len(nodes) * self.nodes.row_bytes
        if self.lists:
            node_types, rows = self.node_types.locate(np.asarray(nodes))
            listed = sum(one.append(node_types, rows) for one in self.lists)
        if self.code is None:
            return listed
        state = 0, 0
        for begin, end in self.cross_index[:, part : part + 2].tolist():
            cross = tuple(column[begin:end] for column in self.cross)
            code, state = encode_halo(self.form, nodes, held, cross, state)
            self.code.append(code)
        self.code.append(encode_halo_end(self.form, len(nodes), state))
        self.code_offsets.append(np.array([self.code.num_rows], np.int64))
        return self.code.num_rows - before + listed

    @property
    def files(self) -> list[ArrayFile]:
        files = [self.offsets, self.nodes, self.code, self.code_offsets]
        files += [file for one in self.lists for file in (one.nodes, one.offsets)]
        return [file for file in files if file is not None]

    def note(self, next_part: int) -> None:
        """Write a journal line."""
        self.journal.write(
            STEP, part=next_part, num_halo=self.num_halo, counts=self.counts, files=file_states(*self.files)
        )

    def finish(self) -> None:
        self.journal.finish(STEP, *self.files, counts=self.counts)

    def release(self) -> None:
        for file in self.files:
            file.release()


def degree_dtype(num_edges: int) -> np.dtype:
    """Return the dtype of a loaded part's degrees."""
    return np.dtype(np.int32 if num_edges <= np.iinfo(np.int32).max else np.int64)


def write_halo(
    journal: Journal,
    inputs: StoreInputs,
    csc: CSC,
    part_offsets: np.ndarray,
    node_types: NodeTypes | None,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Write, part by part, what of the one-hop halo cannot be derived: see `halo_rows`.

    The halo is the core's in-neighbours outside of it, and their rows within the core. Their number is stored; the
    nodes themselves where their feature rows are packed, node type by node type where node types have features of
    their own; the rows as far as they are not a transpose.

    Cost: one read of the CSC and of the cross edges; two bits a node of memory, and 8 bytes a halo node where more
        than the number is stored.
    """
    if journal.is_done(STEP):
        return
    writer = _HaloWriter(journal, inputs, csc, part_offsets, node_types)
    try:
        for part in range(writer.part, inputs.num_parts):
            written = writer.write_part(part, budget.sort_edges)
            if journal.due(written):
                writer.note(part + 1)
            progress("listing halos", part + 1, inputs.num_parts)
        writer.finish()
    finally:
        writer.release()


def pack_halo_features(
    journal: Journal,
    prefix: str,
    features: DenseFeatures | CSRFeatures,
    num_parts: int,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Copy the feature rows of all halo lists into files of their own, part after part.

    Within a part, rows of nodes that are in many halos come first, so that a process that keeps such rows in memory
    reads the rest of a part in one run. `halo_places` holds where the row of each node is, `halo_count` how many halos
    the node is in.

    Args:
        prefix: What the names of the files begin with: those of a node type, see `type_prefix`; "" where there is one
        table.
        features: The table, of all nodes or of those of the node type.
        budget: Feature bytes that are held at once: `block_bytes`, or as many as a third of the free memory and
            `checkpoint_bytes` allow, where they are more.

    Cost: one read of the halo lists, and for each block up to one of the features, in order; a byte a node of memory
        beside the block.
    """
    step_name = prefix + PACK_STEP
    if journal.is_done(step_name):
        return
    halo_offsets = map_rows(journal.folder / f"{prefix}halo_offsets.npy", np.dtype(np.int64), (num_parts + 1,))
    nodes = _map_halo_nodes(journal, prefix, features.num_rows)
    count = np.zeros(features.num_rows, np.uint8)
    count_halos(nodes, count)
    pack = _PackedRows(journal, prefix, features)
    if pack.count.num_rows == 0:
        pack.count.append(count)
    most_bytes = max(budget.block_bytes, min(budget.checkpoint_bytes, free_memory_bytes() // 3))
    step, begin = max(1, int(most_bytes // pack.row_bytes)), pack.places.num_rows
    while begin < len(nodes):
        end = min(begin + step, len(nodes))
        places, ordered = np.empty(end - begin, np.int32), np.empty(end - begin, nodes.dtype)
        first_part, last_part = np.searchsorted(halo_offsets, [begin + 1, end])
        for part in range(first_part - 1, last_part):
            first, last = halo_offsets[part : part + 2].tolist()
            held = np.array(nodes[first:last])
            order = np.argsort(255 - count[held], kind="stable")
            rank = np.empty(len(order), np.int32)
            rank[order] = np.arange(len(order), dtype=np.int32)
            here = slice(max(first, begin) - first, min(last, end) - first)
            there = slice(here.start + first - begin, here.stop + first - begin)
            places[there], ordered[there] = rank[here], held[order[here]]
        pack.append(places, ordered)
        if journal.due((end - begin) * pack.row_bytes):
            journal.write(step_name, files=file_states(*pack.files))
        progress("packing halo features", end, len(nodes))
        begin = end
    journal.finish(step_name, *pack.files)


class _PackedRows:
    """Appends packed rows, dense or sparse."""

    def __init__(self, journal: Journal, prefix: str, features: DenseFeatures | CSRFeatures):
        self.features, step = features if features.is_sparse else features.raw, prefix + PACK_STEP
        self.count = journal.open_file(step, f"{prefix}halo_count.npy", np.uint8)
        self.places = journal.open_file(step, f"{prefix}halo_places.npy", np.int32)
        if features.is_sparse:
            self.row_bytes = max(1, (features.data.nbytes + features.indices.nbytes) // max(1, features.num_rows))
            self.pointers = journal.open_file(step, f"{step}_indptr.npy", np.int64)
            self.rows = [
                journal.open_file(step, f"{step}_indices.npy", np.int32),
                journal.open_file(step, f"{step}_data.npy", features.dtype),
            ]
            if self.pointers.num_rows == 0:
                self.pointers.append(np.zeros(1, np.int64))
        else:
            dim, dtype = self.features.dim, self.features.dtype
            self.row_bytes = max(1, dim * dtype.itemsize)
            self.pointers, self.rows = None, [journal.open_file(step, f"{step}.npy", dtype, (dim,))]

    def append(self, places: np.ndarray, nodes: np.ndarray) -> None:
        """Append the places of some halo nodes, and the rows of as many others, read once and in the order of ids."""
        self.places.append(places)
        held, place = np.unique(nodes, return_inverse=True)
        loaded, _ = self.features.load(held)
        for begin in range(0, len(place), _BLOCK_ROWS):
            rows = loaded.read(place[begin : begin + _BLOCK_ROWS])
            if self.pointers is None:
                self.rows[0].append(rows)
                continue
            self.pointers.append(self.rows[0].num_rows + rows.indptr[1:])
            for file, block in zip(self.rows, (rows.indices, rows.data), strict=True):
                file.append(block)

    @property
    def files(self) -> list[ArrayFile]:
        pointers = [] if self.pointers is None else [self.pointers]
        return [self.count, self.places, *pointers, *self.rows]


def _map_halo_nodes(journal: Journal, prefix: str, num_nodes: int) -> np.ndarray:
    """Map the finished halo lists, one after the other."""
    path = journal.folder / f"{prefix}halo_nodes.npy"
    dtype = id_dtype(num_nodes)
    num_halo = (path.stat().st_size - HEADER_BYTES) // dtype.itemsize
    return map_rows(path, dtype, (num_halo,))
