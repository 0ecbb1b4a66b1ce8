"""Read a store and compare it with what its manifest and its structure say: all of it, or what has not been yet."""

import fcntl
import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import PartitionStoreError
from ..graph import CSC
from ..jit import kernel
from .array_file import map_rows
from .coded_neighbors import CODE, EDGES, OFFSETS
from .features import Column
from .halo_rows import count_halos
from .manifest import EDGE_FILES, REMEDY, check_file, check_size, read_manifest, sealed, type_prefix, unsealed
from .packed_features import PackedFeatures

# Files whose size depends on edges, features or text: they are compared when they are first read, not on opening.
READ_LATER = {
    *EDGES,
    "halo_code",
    *EDGE_FILES,
    "user_ids",
    "user_id_offsets",
    "user_id_bytes",
    "node_changes",
    "parent_nid",
}
_ROWS = re.compile(r"(kind\d+_)?((halo_)?features|column_\w+?)(_indices|_data)?")
_BLOCK_EDGES = 1 << 23
_BLOCK_ROWS = 1 << 16


def read_later(name: str) -> bool:
    """Whether a file is compared when it is first read, and not on opening."""
    return name in READ_LATER or _ROWS.fullmatch(name) is not None


def verify_store(store) -> None:
    """Check a PartitionStore; see its `verify`."""
    read_manifest(store.root)
    verify_content(store)


def verify_content(store) -> None:
    """Compare the files of a PartitionStore with its manifest, and with each other; see `PartitionStore.verify`."""
    states = {}
    for name, entry in store.manifest["files"].items():
        check_size(store.root / f"{name}.npy", entry["bytes"])
        states[name] = _file_state(store, name)
        check_file(store.root, name, entry)
        _check_range(store, name)
    _remember(store, states)
    _check_ids(store)
    _check_rows(store)
    packed = _packed_tables(store)
    columns = [table for column in (store.features, *store.node_columns.values()) for table in _tables(column).values()]
    for table in [*columns, *(one.packed for one in packed.values())]:
        if table is not None and table.is_sparse:
            for begin in range(0, table.num_rows, _BLOCK_ROWS):
                table.read(np.arange(begin, min(begin + _BLOCK_ROWS, table.num_rows)))  # refuses what does not fit
    for part in range(store.num_parts):
        _check_halo(store, part, packed)
    for node_type, table in packed.items():
        count = np.zeros(table.num_rows, np.uint8)
        count_halos(table.halo_nodes, count)
        if not np.array_equal(count, table.halo_count):
            raise broken(store, f"{type_prefix(node_type)}halo_count", "does not count the halos of each node")


def _packed_tables(store) -> dict[int | None, PackedFeatures]:
    """Return the tables with packed halo rows by their node type, None where all nodes have one table."""
    return {
        node_type: table
        for node_type, table in _tables(store.part_features).items()
        if isinstance(table, PackedFeatures)
    }


def _tables(features) -> dict[int | None, Column | None]:
    return dict(enumerate(features.tables)) if features is not None and features.by_node_type else {None: features}


def compare_once(store, names=None) -> int:
    """Compare files with their checksums, unless this machine has done so since they were written or copied.

    Pointers must also rise from 0 to the length of what they point into, and ids be in their range: writers may err.
    What has been compared is noted in `<root>.verified.json` with each file's inode, size and times, or in the user's
    cache folder where nothing can be written beside the store; without either it is compared once a process.

    Args:
        store: a `PartitionStore`.
        names: files, without their suffix; None: all.

    Returns:
        Bytes that were read; 0 where all had been compared before.

    Raises:
        PartitionStoreError: names the first file that is damaged, and how to go on.

    Cost: one read of what is compared, about 1 GB/s; after that a look at each file.
    """
    files = store.manifest["files"]
    if store.fetched is not None:  # which compares each block as it comes
        store.fetched.whole(*(names or ()))
        return 0
    names = [name for name in (files if names is None else names) if name in files]
    known, new = _remembered(store), {}
    for name in names:
        check_size(store.root / f"{name}.npy", files[name]["bytes"])
        state = _file_state(store, name)  # before the file is read, so that no later change of it passes
        if name not in store.compared and known.get(name) != state:
            check_file(store.root, name, files[name])
            _check_range(store, name)
            new[name] = state
    if new:
        _remember(store, new)
    return sum(files[name]["bytes"] for name in new)


def rises(values: np.ndarray, first: int, last: int) -> bool:
    """Return whether offsets never fall, and stay in [first, last]."""
    return len(values) == 0 or (first <= values[0] and values[-1] <= last and bool(_rises(values)))


def broken(store, name: str, what: str) -> PartitionStoreError:
    """Return the error for an array of a store whose content cannot be what was written."""
    return PartitionStoreError(f"{store.root / f'{name}.npy'}: {what}; {REMEDY}")


def _notes(store) -> list[Path]:
    """Return where a machine may remember what it has compared, the preferred place first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_gnnscale_verified"
    name = hashlib.blake2b(str(store.root).encode(), digest_size=16).hexdigest()
    return [store.root.with_name(f"{store.root.name}.verified.json"), cache / f"{name}.json"]


def _remembered(store) -> dict[str, list[int]]:
    known: dict[str, list[int]] = {}
    for path in _notes(store):
        with suppress(OSError, ValueError, KeyError):
            note = unsealed(path.read_bytes())
            known |= note["files"] if note["manifest"] == store.manifest_digest else {}
    return known


def _remember(store, states: dict[str, list[int]]) -> None:
    store.compared.update(states)
    files = {**_remembered(store), **states}
    for path in _notes(store):
        temporary = path.with_name(f"{path.name}.tmp")  # one name, so that the next writer takes over a killed one's
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "a") as file, suppress(BlockingIOError):  # another process notes its own
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(temporary)):
                    file.truncate(0)
                    json.dump(sealed({"manifest": store.manifest_digest, "files": files}), file)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(temporary, path)
            return
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def _file_state(store, name: str) -> list[int]:
    facts = os.stat(store.root / f"{name}.npy")
    return [facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def _check_range(store, name: str) -> None:
    """Refuse pointers that fall or point beyond what they point into, and ids that nothing has."""
    files, schema = store.manifest["files"], store.manifest.get("schema") or {}
    shape, nodes = files[name]["shape"], store.num_nodes
    lengths = {OFFSETS: CODE, "halo_code_offsets": "halo_code", "user_id_offsets": "user_id_bytes"}
    limits = dict.fromkeys(("csc_indices", "original_nid", "store_nid", "self_loop_nodes"), nodes)
    tables = [("", nodes, store.manifest["feature_dim"])]
    for node_type, dim in enumerate(schema.get("feature_dims") or ()):
        tables.append((type_prefix(node_type), schema["kind_sizes"][node_type], dim))
        lengths[f"{type_prefix(node_type)}halo_offsets"] = f"{type_prefix(node_type)}halo_nodes"
    for prefix, rows, dim in tables:
        limits |= {f"{prefix}halo_nodes": rows, f"{prefix}halo_places": shape[0]}
        for to in (f"{prefix}features", f"{prefix}halo_features"):
            lengths[f"{to}_indptr"], limits[f"{to}_indices"] = f"{to}_indices", dim
    counts = {"part_offsets": nodes, "csc_indptr": store.num_edges}
    if name in counts or name in lengths:
        last = counts[name] if name in counts else files[lengths[name]]["shape"][0]
        pointers = map_rows(store.root / f"{name}.npy", np.dtype(np.int64), tuple(shape))
        if not rises(pointers, 0, last) or pointers[0] != 0 or pointers[-1] != last:
            raise broken(store, name, f"does not rise from 0 to {last}")
    elif name == CODE:
        for block in store.neighbors.blocks():
            if block.max() >= nodes:
                raise broken(store, name, f"names what does not exist: its values are in [0, {nodes})")
    elif name in limits:
        values = map_rows(store.root / f"{name}.npy", np.dtype(files[name]["dtype"]), tuple(shape))
        for begin in range(0, len(values), _BLOCK_EDGES):
            block = values[begin : begin + _BLOCK_EDGES]
            if block.min() < 0 or block.max() >= limits[name]:
                raise broken(store, name, f"names what does not exist: its values are in [0, {limits[name]})")


def _check_ids(store) -> None:
    offsets = store.part_offsets
    if offsets[0] != 0 or offsets[-1] != store.num_nodes or (np.diff(offsets) < 0).any():
        raise broken(store, "part_offsets", "does not rise from 0 to num_nodes")
    for begin in range(0, store.num_nodes, _BLOCK_EDGES):
        nodes = np.arange(begin, min(begin + _BLOCK_EDGES, store.num_nodes))
        original = store.original_nid[nodes]
        outside = len(original) and (original.min() < 0 or original.max() >= store.num_nodes)
        if outside or (store.store_nid[original] != nodes).any():
            raise broken(store, "original_nid", "is not the inverse of store_nid")


def _check_rows(store) -> None:
    indptr, indices = store.whole_csc
    if indptr[0] != 0 or indptr[-1] != store.num_edges or not _rises(indptr):
        raise broken(store, "csc_indptr", "does not rise from 0 to num_edges")
    if not _rows_ascend(indptr, indices, store.num_nodes):
        raise broken(store, store.edge_file, "a row is out of order or names a node that does not exist")


def _check_halo(store, part: int, packed: dict[int | None, PackedFeatures]) -> None:
    """Compare a loaded part with the whole graph: its halo's degrees, rows, places of edges, and packed nodes."""
    graph = store.load_part(part)
    if not np.array_equal(graph.degree, store.csc.indptr[graph.nodes + 1] - store.csc.indptr[graph.nodes]):
        raise broken(store, "in_degree", f"part {part} has other degrees")
    core = graph.core_start, graph.core_start + graph.num_core
    places = np.empty(0, np.int64) if graph.edge_id is None else graph.edge_id
    halo = CSC(graph.csc.indptr[graph.num_core :], graph.csc.indices)
    if not _same_restricted_rows(*store.whole_csc, *core, graph.halo_nodes, *halo, places):
        name = "halo_code" if "halo_code" in store.manifest["files"] else store.edge_file
        raise broken(store, name, f"part {part}: halo rows are not those of the graph")
    for node_type, table in packed.items():
        first, last = table.halo_offsets[part : part + 2]
        held, prefix = graph.halo_nodes, type_prefix(node_type)
        if node_type is not None:
            node_types, rows = store.node_types.locate(np.asarray(held))
            held = rows[node_types == node_type]
        if not np.array_equal(table.halo_nodes[first:last], held):
            raise broken(store, f"{prefix}halo_nodes", f"part {part} reads other nodes")
        if not np.array_equal(np.sort(table.halo_places[first:last]), np.arange(last - first)):
            raise broken(store, f"{prefix}halo_places", f"rows of part {part} are packed twice, or not at all")


@kernel
def _rises(values):
    last = values[0]
    for value in values:
        if value < last:
            return False
        last = value
    return True


@kernel
def _rows_ascend(indptr, indices, num_nodes):
    for row in range(len(indptr) - 1):
        for i in range(indptr[row], indptr[row + 1]):
            if indices[i] < 0 or indices[i] >= num_nodes:
                return False
            if i > indptr[row] and indices[i] < indices[i - 1]:
                return False
    return True


@kernel
def _same_restricted_rows(indptr, indices, begin, end, halo, halo_indptr, local_indices, places):
    """Return whether each halo row is its row of the whole graph, cut to [begin, end), and its edges are there."""
    for row in range(len(halo)):
        at = halo_indptr[row]
        for i in range(indptr[halo[row]], indptr[halo[row] + 1]):
            if begin <= indices[i] < end:
                if at == halo_indptr[row + 1] or local_indices[at] != indices[i] - begin:
                    return False
                if len(places) and places[at] != i:
                    return False
                at += 1
        if at != halo_indptr[row + 1]:
            return False
    return True
