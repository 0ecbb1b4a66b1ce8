"""The finished store: memory-mapped arrays, and parts with their halos as training processes load them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset.columns import EDGE_COLUMNS
from ..dataset.feature_storage import row_code
from ..errors import PartitionStoreError
from ..graph import COLUMNS, CSC, GraphSchema
from ..object_store import is_url
from ..partitioner.multilevel.weighted_graph import RowThreads, num_cores
from .array_file import map_rows
from .coded_neighbors import CODE, OFFSETS, PLAIN, CodedNeighbors, read_run
from .csc_writer import MOST_DEGREE
from .features import Column, CSRFeatures, DenseFeatures, SparseRows
from .halo import degree_dtype
from .halo_depth import assigned_edges, distances, keep_edges, rows_within
from .halo_rows import HaloForm, decode_halo, decode_lengths, halo_of_rows
from .local_ids import localise, number_halo, outside_edges
from .manifest import EDGE_FILES, MANIFEST, REMEDY, digest, read_manifest, read_source, type_prefix
from .packed_features import PackedFeatures, features_of_part
from .part_graph import PartGraph, take_items
from .planned_reads import read_ranges, read_slice
from .published import FETCHED, FetchedFiles, FetchedRows, fetch_store, fetched_again, sparse_rows
from .self_loops import spread
from .typed_features import NodeTypes, TypedFeatures
from .verify import broken, compare_once, read_later, rises, verify_store
from .versions import StoreChanges, changes_of, places_in

_EDGES_LOOKED_AT = 64  # when a store with edge types is opened
_EDGES_A_THREAD = 4 << 20  # of a part that is loaded: a tenth of a second


class PartitionStore:
    """A partitioned graph on disk; open it with `PartitionStore.open`.

    Everything is a read-only memory map that all processes of a host share; pickling sends the path alone.
    All ids are store ids unless said otherwise.

    Attributes:
        root: the folder; of a store behind a URL, what this machine has fetched of it.
        fetched: the files behind a URL, which are fetched as they are read; None of a local store.
        manifest: the description of the store.
        manifest_digest: distinguishes this store from others that were in the same folder.
        verifies: whether files are compared with their checksums before they are first read, see `open`.
        neighbors: the `indices` of `csc`, not compared.
        compared: files that this process has compared.
        kept: what this process keeps open of the store to answer for a few nodes, by what it is.
        part_offsets: (num_parts + 1,) int64, part p owns [part_offsets[p], part_offsets[p + 1]).
        original_nid: (num_nodes,) original id of each store id.
        store_nid: (num_nodes,) store id of each original id.
        labels: (num_nodes,) int64, -1 unknown; (num_nodes, num_labels) float32 for several labels, or numbers to
            predict (`regression`); or None.
        masks: name to (num_nodes,) bool.
        symmetric: whether every edge is stored in both directions, equally often in each.
    """

    def __init__(self, root: Path, manifest: dict, fetched: FetchedFiles | None = None, verify: bool = True):
        self.root, self.manifest, self.fetched, self.verifies = Path(root), manifest, fetched, verify
        self.part_offsets = np.array(self.mapped("part_offsets"))
        self.manifest_digest = digest(manifest)
        self.compared: set[str] = set()
        self.kept: dict[str, Any] = {}
        self._edge_columns: dict[str, np.ndarray | None] = {}
        self.neighbors = self._neighbors()
        self._csc = CSC(self.mapped("csc_indptr"), self.neighbors)
        self.original_nid, self.store_nid = self.mapped("original_nid"), self.mapped("store_nid")
        self.labels = self.mapped("labels")
        self.masks = {name: self.mapped(f"mask_{name}") for name in manifest["masks"]}
        self._halo_offsets = np.array(self.mapped("halo_offsets"))
        self._in_degree, self._halo_nodes = self.mapped("in_degree"), self.mapped("halo_nodes")
        self._halo_code, self._halo_code_offsets = self.mapped("halo_code"), self.mapped("halo_code_offsets")
        has_edge_arrays = not EDGE_FILES.isdisjoint(manifest["files"])
        self._halo_form = HaloForm(rows=not manifest["symmetric"], places=has_edge_arrays)
        num_halo = self._halo_offsets[-1] if self._halo_nodes is None else len(self._halo_nodes)
        checked = [("part_offsets", self.part_offsets, self.num_nodes), ("halo_offsets", self._halo_offsets, num_halo)]
        if self._halo_code is not None:
            checked.append(("halo_code_offsets", self._halo_code_offsets, len(self._halo_code)))
        for name, offsets, last in checked:
            if not rises(offsets, 0, last) or offsets[0] != 0 or offsets[-1] != last:
                raise broken(self, name, f"does not rise from 0 to {last}")
        self._compare(*(name for name in manifest["files"] if not read_later(name)))
        if manifest.get("schema") is not None:
            self._check_schema()

    def _check_schema(self) -> None:
        """Refuse a schema that is of another graph: node types of other sizes, or ends of other node types.

        Of the edges a few are looked at, none of a store that is fetched.
        """
        schema, starts, sizes = self.schema, self.mapped("kind_starts"), self.manifest["schema"]["kind_sizes"]
        if not rises(starts, 0, self.num_nodes):
            raise broken(self, "kind_starts", f"does not rise within [0, {self.num_nodes}]")
        found = np.diff(starts).reshape(-1, schema.num_node_types).sum(axis=0).tolist()
        if found != sizes:
            raise broken(self, "kind_starts", f"node types have {found} nodes, and schema.kind_sizes says {sizes}")
        if self.fetched is not None or not self.num_edges:
            return
        edges = np.unique(np.linspace(0, self.num_edges - 1, _EDGES_LOOKED_AT).astype(np.int64))
        edge_type, source = np.asarray(self.mapped("edge_type")[edges]), np.asarray(self._csc.indices[edges])
        target = np.searchsorted(self._csc.indptr, edges, side="right") - 1
        nodes_fit = (source >= 0) & (source < self.num_nodes) & (target >= 0) & (target < self.num_nodes)
        if not nodes_fit.all() or edge_type.max() >= schema.num_edge_types:
            return  # damage, which is told where the edges are read
        ends = self.node_types.type_of(source), self.node_types.type_of(target)
        wrong = (ends[0] != schema.sources[edge_type]) | (ends[1] != schema.targets[edge_type])
        if wrong.any():
            at = int(np.argmax(wrong))
            joined = " to ".join(schema.node_types[int(end[at])] for end in ends)
            named = ",".join(schema.edge_types[int(edge_type[at])])
            raise broken(self, "edge_type", f"edge {edges[at]} joins {joined}, and schema.edge_types says {named}")

    @classmethod
    def open(cls, root, verify: bool = True, **fetching) -> "PartitionStore":
        """Open a finished store.

        Args:
            root: its folder; or the URL that it was published to, for example s3://bucket/store: a part is then
                fetched when it is first read, in sequence, once for all processes of this machine. Columns of the
                edges, and what is looked up all over the graph (`csc`, `features.array`), are fetched whole when they
                are first asked for.
            verify: whether a folder's files are compared with their checksums, once a machine until they change (see
                `compare_once`): those of a few bytes a node now, edges and the rows of `load_features` when they are
                first asked for. Dense rows that are read from `features` itself are compared by `verify()`, and by the
                DataModules. False: files are read as they are, unless damage could end the process.
            fetching: Options for a URL: cache, cache_bytes, storage_options, timeout_s, see `fetch_store`.

        Raises:
            PartitionStoreError: it is missing, unfinished, of another version, its manifest is damaged, or a file has
                another size than the manifest says, or is damaged.

        Cost: the first time on a machine a read of about 25 bytes a node; after that a look at each of these files.
        """
        if is_url(root):
            return cls._of(fetch_store(root, **fetching))
        if fetching:
            raise ValueError(f"{', '.join(fetching)} goes with a store at a URL such as s3://bucket/store, got {root}")
        root = Path(root).absolute()
        if (root / FETCHED).is_file():  # holes of it must not be read
            return cls._of(FetchedFiles(root))
        return cls._of(None, root, read_manifest(root), verify)

    @classmethod
    def _of(cls, fetched: FetchedFiles | None, root: Path | None = None, manifest: dict | None = None, verify=True):
        if fetched is not None:
            root, manifest = fetched.root, fetched.manifest
        try:
            return cls(root, manifest, fetched, verify)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise PartitionStoreError(f"{root / MANIFEST}: damaged; {REMEDY}") from None

    @staticmethod
    def reopen(root: str, fetching: dict | None, fingerprint: str, verify: bool = True) -> "PartitionStore":
        """Open what another process has open, on this machine or another.

        Args:
            root: Its folder.
            fetching: `fetched.settings` of a store behind a URL; it is fetched where the folder is missing.
            fingerprint: Its `layout_fingerprint`.
            verify: See `open`.

        Raises:
            PartitionStoreError: another store is there, or none.
        """
        if fetching is None:
            store = PartitionStore.open(root, verify)
        else:
            store = PartitionStore._of(fetched_again(root, fetching))
        if store.layout_fingerprint != fingerprint:
            raise PartitionStoreError(
                f"{root}: holds store {store.layout_fingerprint[:12]} here, and {fingerprint[:12]} where it was sent "
                "from: copy that store here, or wait until it is written"
            )
        return store

    def __reduce__(self):
        settings = None if self.fetched is None else self.fetched.settings
        return PartitionStore.reopen, (str(self.root), settings, self.layout_fingerprint, self.verifies)

    def __repr__(self) -> str:
        return (
            f"PartitionStore({str(self.root)!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges},"
            f" num_parts={self.num_parts})"
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the whole graph."""
        return self.manifest["num_nodes"]

    @property
    def num_edges(self) -> int:
        """Number of stored edges; an undirected edge counts as two."""
        return self.manifest["num_arcs"]

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.manifest["num_parts"]

    @property
    def num_machines(self) -> int:
        """Number of machines that the parts were made for, each a range of `num_parts / num_machines`; 1: for any."""
        return self.manifest.get("num_machines", 1)

    @property
    def symmetric(self) -> bool:
        """Whether each edge's reverse is stored too."""
        return self.manifest["symmetric"]

    @property
    def fingerprint(self) -> str:
        """What identifies the input that the store was made from; compare with `input_fingerprint`."""
        return read_source(self.root).get("fingerprint", "")

    @cached_property
    def layout_fingerprint(self) -> str:
        """What identifies the order of nodes and edges: the input, and the part of every node, however chosen."""
        return f"{self.fingerprint}{read_source(self.root).get('part_id_crc32', 0):08x}"

    @property
    def part_rows(self) -> np.ndarray:
        """(num_parts,) int64 nodes of each part with its halo of one hop."""
        return np.diff(self.part_offsets) + np.diff(self._halo_offsets)

    @cached_property
    def csc(self) -> CSC:
        """In-neighbours of every node; indices are store ids, ascending within a row.

        Where edges are coded (`edge_storage`), `indices` are `CodedNeighbors`: slices of them are decoded as they are
        read, and `np.asarray` maps a file of all of them.

        Raises:
            PartitionStoreError: its files are damaged; see `compare_once`, which looks once a machine.
        """
        compare_once(self, ("csc_indptr", self.edge_file))  # where this machine has not, that offsets rise too
        if self.fetched is not None:
            self._check_rises("csc_indptr", self._csc.indptr, self.num_edges)
        return self._csc

    @cached_property
    def whole_csc(self) -> CSC:
        """`csc` with plain indices, to look up single edges anywhere: coded ones are decoded once, see there."""
        return CSC(self.csc.indptr, np.asarray(self.csc.indices))

    def csc_of_parts(
        self,
        parts: Iterable[int],
        nodes: np.ndarray | Sequence[int] = (),
        features: bool = False,
        columns: Collection[str] = (),
    ) -> CSC:
        """Return `csc` to read its offsets, and the rows of some parts and nodes alone: only these are fetched.

        Args:
            parts, nodes: Whose rows are read.
            features: Whether their feature rows are fetched too.
            columns: Columns of the edges of these rows that are fetched too, by the names of their files.
        """
        if self.fetched is None:
            return self.csc
        cores = np.array([self._core(part) for part in parts], np.int64).reshape(-1, 2)
        bounds = np.concatenate([cores, np.stack([nodes, np.asarray(nodes) + 1], 1).astype(np.int64).reshape(-1, 2)])
        first, last = np.asarray(self._csc.indptr[bounds]).reshape(-1, 2).T
        names = [PLAIN, *(name for name in columns if name in EDGE_FILES)]
        with self.fetched.held(*(self.fetched.blocks_of_ranges(name, first, last) for name in names)):
            pass
        if features and self.features is not None:
            self._fetch_rows(bounds)
        return self._csc

    def _fetch_rows(self, bounds: np.ndarray) -> None:
        """Fetch the feature rows of nodes in (num, 2) ranges of ids."""
        nodes = np.concatenate([np.empty(0, np.int64), *(np.arange(*bound) for bound in bounds.tolist())])
        tables = [(self.features, nodes)]
        if self.features.by_node_type:
            node_type, row = self.node_types.locate(nodes)
            tables = [(table, row[node_type == own]) for own, table in enumerate(self.features.tables)]
        for table, rows in tables:
            if table is not None:
                with table.reading(lambda rows=rows: rows):
                    pass

    @property
    def edge_weight(self) -> np.ndarray | None:
        """(num_edges,) float32 or None; compared as `open` says."""
        return self.edge_column("edge_weight")

    @property
    def edge_features(self) -> np.ndarray | None:
        """(num_edges, dim) or None; compared as `open` says."""
        return self.edge_column("edge_features")

    def edge_column(self, name: str, whole: bool = True) -> np.ndarray | None:
        """Return a column of the edges by the name of its file, see `EDGE_COLUMNS`; compared as `open` says.

        Args:
            name: The name.
            whole: Whether all of it may be read. False fetches nothing from a URL: only its shape, and the edges of
                `csc_of_parts(columns=)`, may be read then.
        """
        if whole and self.fetched is not None:
            self.fetched.whole(name)
        if name not in self._edge_columns:
            self._compare(name)
            self._edge_columns[name] = self.mapped(name)
        return self._edge_columns[name]

    def edge_columns(self, without: Collection[str] = (), whole: bool = True) -> dict[str, np.ndarray]:
        """Return the columns of the edges that there are by their names in a batch.

        Args:
            without: Names of files that are left out.
            whole: See `edge_column`.
        """
        names = {name: column.in_batch for name, column in EDGE_COLUMNS.items() if name not in without}
        found = {in_batch: self.edge_column(name, whole) for name, in_batch in names.items()}
        return {name: values for name, values in found.items() if values is not None}

    @property
    def has(self) -> dict[str, bool]:
        """Which columns there are, see `graph.check_requires`; reads the manifest alone."""
        there = {**self.manifest["files"], "edge_types": self.manifest.get("schema"), "reverse_edges": self.symmetric}
        return {name: bool(there.get(name)) for name in COLUMNS}

    @cached_property
    def schema(self) -> GraphSchema | None:
        """The node types and edge types of the graph; None of a graph of one node type and one edge type."""
        schema = self.manifest.get("schema")
        return None if schema is None else GraphSchema.of_json(schema)

    @property
    def type_sizes(self) -> dict[str, int] | None:
        """Number of nodes by node type; None without a schema."""
        node_types = self.manifest.get("schema")
        return (
            None if node_types is None else dict(zip(node_types["node_types"], node_types["kind_sizes"], strict=True))
        )

    @cached_property
    def node_types(self) -> NodeTypes | None:
        """Where the nodes of each node type are: in every part a run of store ids; None without a schema."""
        return (
            None if self.schema is None else NodeTypes.of_runs(self.mapped("kind_starts"), self.schema.num_node_types)
        )

    @property
    def edge_type(self) -> np.ndarray | None:
        """(num_edges,) uint8 or uint16 edge type of each edge, None without a schema; compared as `open` says."""
        return self.edge_column("edge_type")

    @property
    def edge_time(self) -> np.ndarray | None:
        """(num_edges,) int64 time of each edge, or None; compared as `open` says."""
        return self.edge_column("edge_time")

    @property
    def edge_label(self) -> np.ndarray | None:
        """(num_edges,) int32 class of each edge, -1 = unknown, or None; compared as `open` says."""
        return self.edge_column("edge_label")

    @cached_property
    def num_edge_classes(self) -> int:
        """Number of classes of edges, 0 without any; of a store of an older release all of `edge_label` is read."""
        if "num_edge_classes" in self.manifest or not self.has["edge_label"]:
            return self.manifest.get("num_edge_classes", 0)
        return int(self.edge_label.max(initial=-1)) + 1

    @cached_property
    def node_time(self) -> np.ndarray | None:
        """(num_nodes,) int64 time of each node, or None."""
        return self.mapped("node_time")

    def node_type(self, nodes: np.ndarray) -> np.ndarray | None:
        """Return the (num,) int64 node types of store ids; None in a graph of one node type and one edge type."""
        return None if self.node_types is None else self.node_types.type_of(np.asarray(nodes, np.int64))

    @cached_property
    def features(self) -> Column | None:
        """Column of (num_nodes, dim), `TypedFeatures` where node types have their own; None without features."""
        dims = (self.manifest.get("schema") or {}).get("feature_dims")
        if dims is None:
            return self._features("features", self.manifest["feature_dim"], self.feature_storage)
        stored = self.feature_storage
        tables = [self._features(f"{type_prefix(own)}features", width, stored) for own, width in enumerate(dims)]
        return TypedFeatures(tuple(tables), self.node_types)

    @cached_property
    def node_columns(self) -> dict[str, Column]:
        """The further columns of the nodes by name, see `Columns`; rows by node type where they were given so."""
        return {name: self._column(name, widths) for name, widths in self.manifest.get("node_columns", {}).items()}

    def _column(self, name: str, widths: int | list[int | None]) -> Column:
        if not isinstance(widths, list):
            return self._features(f"column_{name}", widths)
        tables = (self._features(f"{type_prefix(own)}column_{name}", width) for own, width in enumerate(widths))
        return TypedFeatures(tuple(tables), self.node_types)

    @cached_property
    def part_features(self) -> Column | None:
        """What batches of parts read: `features`, or with the packed rows of halos where the store has them."""
        if not self.manifest["pack_halo"]:
            return self.features
        if not isinstance(self.features, TypedFeatures):
            return self._packed(None, self.features, self.part_offsets)
        node_types, tables = self.node_types, list(self.features.tables)
        for node_type, table in enumerate(tables):
            if table is not None:
                own = np.append(node_types.rows[node_type :: node_types.num_node_types], table.num_rows)
                tables[node_type] = self._packed(node_type, table, own)
        return TypedFeatures(tuple(tables), node_types)

    def _packed(
        self, node_type: int | None, owned: DenseFeatures | CSRFeatures, part_offsets: np.ndarray
    ) -> PackedFeatures:
        """Return a table, that of a node type or of all nodes, with its packed halo rows; see `PackedFeatures`."""
        prefix = type_prefix(node_type)
        packed = self._features(f"{prefix}halo_features", owned.dim, self.feature_storage)
        halo = (self.mapped(f"{prefix}halo_{name}") for name in ("offsets", "nodes", "places", "count"))
        return PackedFeatures(owned, packed, part_offsets, *halo)

    @cached_property
    def weighted_degree(self) -> np.ndarray:
        """(num_nodes,) float32: the sum of the weights of a node's in-edges; the in-degree without weights.

        Cost: none with weights, whose sums are stored; else 4 bytes a node on first use.
        """
        stored = self.mapped("weighted_degree")
        return np.diff(self.csc.indptr).astype(np.float32) if stored is None else stored

    def self_weight(self, nodes: np.ndarray | None = None) -> np.ndarray | None:
        """Return the (num,) float32 weight of the self-loop that GCN adds to each of some nodes, see `self_weights`.

        Args:
            nodes: (num,) store ids; None: all.

        Returns:
            None where no node has a self-loop (and in a store of an older release): the weight is 1.
        """
        looped = self.mapped("self_loop_nodes")
        if looped is None:
            return None
        wanted = np.arange(self.num_nodes) if nodes is None else np.asarray(nodes)
        return spread(looped, self.mapped("self_loop_weight"), wanted)

    @property
    def regression(self) -> bool:
        """Whether labels are numbers to predict, (num_nodes, num_targets) float32 with NaN = unknown."""
        return self.manifest.get("regression", False)

    @property
    def least_edge_weight(self) -> float | None:
        """The smallest weight of an edge, None without weights (and in a store of an older release)."""
        return self.manifest.get("least_edge_weight")

    @property
    def feature_storage(self) -> str | None:
        """How the features are stored; None: as given (and in a store of an older release)."""
        return self.manifest.get("feature_storage")

    @property
    def edge_storage(self) -> str | None:
        """How neighbours are stored: "delta", see `edge_code`; None: as ids (and in a store of an older release)."""
        return self.manifest.get("edge_storage")

    @property
    def edge_file(self) -> str:
        """Name of the file of the neighbours."""
        return PLAIN if self.edge_storage is None else CODE

    @property
    def edge_row_bytes(self) -> int:
        """Bytes that an edge takes besides its source: its weight and its features."""
        stored = (self.mapped(name) for name in sorted(EDGE_FILES))
        return sum(rows[:1].nbytes for rows in stored if rows is not None)

    @property
    def version(self) -> dict | None:
        """What the update that made this store says of itself, see `versions.version_record`; None of no update."""
        return self.manifest.get("version")

    def changes(self) -> StoreChanges:
        """Return the nodes that the update to this version changed, by original ids; see `StoreChanges`.

        Raises:
            PartitionStoreError: the store is no update.

        Cost: one read of a byte a node, and of the parent's ids where nodes came or went.
        """
        return changes_of(self)

    def places_in(self, layout: str) -> np.ndarray:
        """Return where the nodes of this store are in an earlier version, by store id.

        Args:
            layout: The `layout_fingerprint` of that version, or of this store.

        Returns:
            (num_nodes,) int64 store ids there; -1 of nodes that came later.

        Raises:
            PartitionStoreError: it is no earlier version, or a version between the two is not beside this one.

        Cost: one read of 4 or 8 bytes a node for each version between.
        """
        return places_in(self, layout)

    def is_replaced(self) -> bool:
        """Return whether another store has been written to the folder since this one was opened."""
        return read_manifest(self.root) != self.manifest

    def part_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 part of each store id."""
        return np.searchsorted(self.part_offsets, nodes, side="right") - 1

    def user_ids(self, store_nodes: np.ndarray) -> np.ndarray:
        """Return the user's own ids of store ids: those of `relabel=True`, otherwise the original ids.

        In a heterogeneous graph an id counts within the node's type: its own id, otherwise its row there.

        Returns:
            (num,) integers, or for ids that are strings an object array of str.
        """
        ids, offsets, characters = self.stored_user_ids
        if offsets is None:
            if ids is not None or self.schema is None:
                return (self.original_nid if ids is None else ids)[store_nodes]
            first = np.concatenate([[0], np.cumsum(self.manifest["schema"]["kind_sizes"])])
            return self.original_nid[store_nodes] - first[self.node_type(store_nodes)]
        begins, ends = offsets[store_nodes], offsets[np.asarray(store_nodes) + 1]
        text = [characters[begin:end].tobytes().decode() for begin, end in zip(begins, ends, strict=True)]
        return np.array(text, dtype=object)

    def halo(self, part: int, hops: int = 1) -> np.ndarray:
        """Return the (num_halo,) store ids, ascending, that a part reads beyond its core; see `load_part`.

        Cost: one read of the part's rows; memory of two bits a node of the whole graph.
        """
        begin, end = self._core(part)
        if hops == 1:
            nodes = self.read_beyond(begin, end)
            self._check_halo(part, len(nodes))
            return nodes
        if hops == 0:
            return self.load_part(part, 0).halo_nodes
        distance = distances(self.whole_csc, begin, end, _checked_hops(hops))
        return np.flatnonzero((distance > 0) & (distance <= hops)).astype(self.original_nid.dtype)

    def read_beyond(self, begin: int, end: int) -> np.ndarray:
        """Return the (num,) store ids, ascending, of the sources outside [begin, end) of the rows within it.

        Cost: one read of the rows; memory of two bits a node of the whole graph.
        """
        self._compare(self.edge_file)
        self._check_rises("csc_indptr", self._csc.indptr[begin : end + 1], self.num_edges)
        first, last = self._csc.indptr[[begin, end]].tolist()
        with self._held(PLAIN, first, last):
            held = halo_of_rows(self._csc, begin, end)
        if held is None:
            raise self._no_node(begin, end)
        return held.nodes.astype(self.original_nid.dtype)

    def load_part(self, part: int, hops: int = 1, allocate: Callable[..., np.ndarray] = np.empty) -> PartGraph:
        """Load a part's graph into memory.

        Args:
            part: in [0, num_parts).
            hops: how far the halo reaches. 1: core rows complete, halo rows cut to neighbours in the core. 2 and
                more: rows nearer than `hops` complete, those at `hops` cut to nearer neighbours. 0: each cross edge
                is given to one of its two parts, by a hash of its ends and the store's seed, and only that part
                sees it; where edges go one way, only if the edge's target is in its core or feeds it.
            allocate: Returns memory of a shape and dtype, which the part's arrays of hops 1 are made in.

        Returns:
            PartGraph with arrays of its own.

        Cost: hops 0 and 1: sequential reads of the part's rows, of what is stored of its halo's, and of a byte for
            the degree of each node; at most 8 bytes an edge (16 with edge ids) while it runs, and 27 (35) at the peak
            of hops 0, which cuts what hops 1 has. More hops: 5 bytes a node of the whole graph, and reads of the rows
            of other parts.
        """
        begin, end = self._core(part)
        self._compare(self.edge_file, "halo_code")
        if _checked_hops(hops) >= 2:
            return self._load_far(part, begin, end, hops)
        near = self._load_near(part, begin, end, allocate)
        return near if hops == 1 else self._without_halo(near)

    def fetch_part(self, part: int, rows: bool = True) -> None:
        """Fetch a part ahead of its use, in sequence, rows of features too where they are dense; nothing if local."""
        if self.fetched is not None:
            with self.fetched.held(*self.fetched.of_part(part, rows)):
                pass

    def load_features(self, graph: PartGraph) -> np.ndarray | SparseRows | None:
        """Return the feature rows of a loaded part in local order, codes decoded; packed halo rows are used.

        Raises:
            PartitionStoreError: the features are damaged; they are compared as `open` says.
        """
        rows = (name for name in self.manifest["files"] if read_later(name) and "features" in name)
        self._compare(*(name for name in rows if name != "edge_features"))
        return None if self.features is None else features_of_part(self.part_features, graph.part).read(graph.nodes)

    def verify(self) -> None:
        """Read everything and compare checksums, id maps, order of rows, and halos.

        Raises:
            PartitionStoreError: names the first file that is damaged, and how to go on.

        Cost: two reads of the store.
        """
        if self.fetched is not None:
            self.fetched.whole(*self.manifest["files"])
        verify_store(self)

    def _compare(self, *names: str) -> None:
        """Compare local files before they are first read; those that were fetched have been."""
        if self.verifies and self.fetched is None:
            compare_once(self, names)

    def _load_near(self, part: int, begin: int, end: int, allocate: Callable[..., np.ndarray]) -> PartGraph:
        rows = read_slice(self._csc.indptr[begin : end + 1])
        self._check_rises("csc_indptr", rows, self.num_edges)
        first, last = int(rows[0]), int(rows[-1])
        num_core, num_halo, form = end - begin, int(np.diff(self._halo_offsets[part : part + 2])[0]), self._halo_form
        indptr = allocate(num_core + num_halo + 1, np.int64)
        np.subtract(rows, first, out=indptr[: num_core + 1])
        indptr[num_core + 1 :] = 0
        code, spare = self._halo_code_of(part), last - first
        if form.rows:
            if not decode_lengths(form, code, indptr[num_core:]):
                raise broken(self, "halo_code", f"the halo rows of part {part} are damaged")
            spare = int(indptr[-1]) - spare
        with self._held(PLAIN, first, last):
            sources, indices = read_run(self._csc.indices, first, last, spare, allocate)
        core, num_threads = indptr[: num_core + 1], min(num_cores(), 1 + (last - first) // _EDGES_A_THREAD)
        with closing(RowThreads(num_threads)) as threads:
            outside = outside_edges(core, sources, begin, end, self.num_nodes, allocate=allocate, threads=threads)
            if outside is None:
                raise self._no_node(begin, end)
            if not form.rows:
                indices = indices[: last - first + outside.num_edges]
            csc, halo_nodes = CSC(indptr, indices), allocate(num_halo, self.original_nid.dtype)
            self._check_halo(part, number_halo(outside, halo_nodes, csc, num_core, not form.rows, threads))
            places = allocate(len(indices) if form.places else 0, np.int64)
            localise(core, sources, begin, outside, indices, places, threads)
        del sources, outside
        places[: last - first] += first
        if form.stores_any and not decode_halo(form, code, csc, num_core, self.num_edges, places):
            raise broken(self, "halo_code", f"the halo rows of part {part} are damaged")
        degree = allocate(num_core + num_halo, degree_dtype(self.num_edges))
        np.subtract(core[1:], core[:-1], out=degree[:num_core], casting="unsafe")
        self._find_degrees(halo_nodes, degree[num_core:])
        return PartGraph(
            part=part,
            core_start=begin,
            num_core=num_core,
            halo_nodes=halo_nodes,
            csc=csc,
            degree=degree,
            edge_id=places if form.places else None,
            hops=1,
            symmetric=self.symmetric,
        )

    def _no_node(self, begin: int, end: int) -> PartitionStoreError:
        return broken(self, self.edge_file, f"a row in [{begin}, {end}) names a node that does not exist")

    def _check_halo(self, part: int, num_halo: int) -> None:
        """Refuse a part whose rows name another number of nodes beyond the core than was written."""
        first, last = self._halo_offsets[part : part + 2].tolist()
        if num_halo != last - first:
            what = f"part {part} reads {num_halo} nodes of other parts instead of {last - first}"
            raise broken(self, self.edge_file, what)

    def _halo_code_of(self, part: int) -> np.ndarray:
        if self._halo_code is None:
            return np.empty(0, np.uint8)
        begin, end = self._halo_code_offsets[part : part + 2].tolist()
        with self._held("halo_code", begin, end):
            return read_slice(self._halo_code[begin:end])

    def _find_degrees(self, nodes: np.ndarray, degree: np.ndarray) -> None:
        """Fill in the (num,) in-degrees of ascending ids: from a byte each, and of the few that exceed it."""
        take_items(self._in_degree, nodes, degree)
        large = np.flatnonzero(degree == MOST_DEGREE)
        if len(large):
            known, values = self._large_degrees
            degree[large] = values[np.searchsorted(known, nodes[large])]

    @cached_property
    def _large_degrees(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes whose in-degree exceeds a byte, ascending, and their (num,) int64 in-degrees; read once."""
        nodes = np.flatnonzero(self._in_degree == MOST_DEGREE)
        bounds = read_ranges(self._csc.indptr, nodes * 8, nodes * 8 + 16).view(np.int64).reshape(-1, 2)
        return nodes, bounds[:, 1] - bounds[:, 0]

    def _load_far(self, part: int, begin: int, end: int, hops: int) -> PartGraph:
        distance = distances(self.whole_csc, begin, end, hops)
        halo_nodes = np.flatnonzero((distance > 0) & (distance <= hops)).astype(self.original_nid.dtype)
        nodes = np.concatenate([np.arange(begin, end, dtype=halo_nodes.dtype), halo_nodes])
        csc, edge_id = rows_within(self.whole_csc, nodes, end - begin, distance, hops)
        degree = (self.csc.indptr[nodes + 1] - self.csc.indptr[nodes]).astype(degree_dtype(self.num_edges))
        edge_id = edge_id if self._halo_form.places else None
        return PartGraph(part, begin, end - begin, halo_nodes, csc, degree, edge_id, hops, self.symmetric)

    def _without_halo(self, near: PartGraph) -> PartGraph:
        original = self.original_nid[near.nodes].astype(np.int64)
        keep = assigned_edges(near.csc, near.num_core, original, self.manifest["seed"])
        stays, csc, positions = keep_edges(near.csc, near.num_core, keep)
        return replace(
            near,
            halo_nodes=near.halo_nodes[stays],
            csc=csc,
            degree=np.concatenate([near.degree[: near.num_core], near.degree[near.num_core :][stays]]),
            edge_id=None if near.edge_id is None else near.edge_id[positions],
            hops=0,
        )

    def _held(self, name: str, first: int, last: int) -> AbstractContextManager[None]:
        """Return what keeps rows [first, last) of a file here while they are read."""
        return nullcontext() if self.fetched is None else self.fetched.held(self.fetched.slice_of(name, first, last))

    def _core(self, part: int) -> tuple[int, int]:
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part must be in [0, {self.num_parts}), got {part}")
        return int(self.part_offsets[part]), int(self.part_offsets[part + 1])

    def _check_rises(self, name: str, offsets: np.ndarray, last: int) -> None:
        if not rises(offsets, 0, last):
            raise broken(self, name, f"does not rise within [0, {last}]")

    @cached_property
    def stored_user_ids(self) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """The user's ids by store id: integers, or offsets and characters of strings; None: they are original ids."""
        names = ("user_ids", "user_id_offsets", "user_id_bytes")
        compare_once(self, names)
        return tuple(self.mapped(name) for name in names)

    def _neighbors(self) -> np.ndarray | CodedNeighbors:
        if self.edge_storage is None:
            return self.mapped(PLAIN)
        offsets = self.mapped(OFFSETS)
        files = self.root, self.mapped(CODE), offsets
        if not rises(offsets, 0, len(files[1])):
            raise broken(self, OFFSETS, f"does not rise from 0 to {len(files[1])}")
        return CodedNeighbors(*files, self.num_edges, self.num_nodes, self.manifest_digest)

    def mapped(self, name: str) -> np.ndarray | None:
        """Return a file of the store as it lies on the disk, by its name without suffix; None: there is none."""
        entry = self.manifest["files"].get(name)
        if entry is None:
            return None
        return map_rows(self.root / f"{name}.npy", np.dtype(entry["dtype"]), tuple(entry["shape"]))

    def _features(self, name: str, width: int | None, storage: str | None = None) -> DenseFeatures | CSRFeatures | None:
        """Return a table of a store, by the stem of its files; None: there is none."""
        if name in self.manifest["files"]:
            code = row_code(storage, width)
            rows = self.mapped(name)
            return DenseFeatures(rows, code) if self.fetched is None else FetchedRows(self.fetched, name, rows, code)
        indptr = self.mapped(f"{name}_indptr")
        if indptr is None:
            return None
        self._compare(f"{name}_indptr", f"{name}_indices")
        columns, values = self.mapped(f"{name}_indices"), self.mapped(f"{name}_data")
        self._check_rises(f"{name}_indptr", indptr, len(columns))
        if self.fetched is not None:
            return sparse_rows(self.fetched, name, width)
        return CSRFeatures(indptr, columns, values, width)


def _checked_hops(hops: int) -> int:
    if not 0 <= hops < 255:
        raise ValueError(f"hops must be in [0, 254], got {hops}")
    return hops
