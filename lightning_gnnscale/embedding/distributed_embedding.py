"""`DistributedEmbedding`: learnable rows by node, pulled and pushed, and saved by each rank under checksums."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, PartitionStoreError, check_integer, short
from ..partition_store import PartitionStore
from ..partition_store.array_file import ArrayFile, checksum, map_rows
from ..partition_store.manifest import sync_folder
from ..partition_store.typed_features import NodeTypesWithRows, said_node_types
from ..rng import fold
from .optimizers import OPTIMIZERS, SparseAdam, SparseSGD, sum_duplicates
from .owned_rows import OwnedRows, _as_array
from .row_exchange import Ownership, Requests, push_rows
from .shared_table import SharedColumn, SharedTable, default_scale, fill_initial

CHUNK_ROWS = 1 << 16


def save_rows(
    folder: Path, arrays: dict[str, np.ndarray], share: Iterable[tuple[slice, slice]]
) -> list[dict[str, Any]]:
    """Write ranges of rows; a file has its name only when all of it is on the disk.

    Args:
        folder: created if it is missing.
        arrays: name to (num_rows, width).
        share: (ids, rows) of each range.

    Returns:
        One entry a file: name, array, start and stop (ids), crc.

    Raises:
        CheckpointError: the disk is full, or cannot be written to.
    """
    entries, unfinished = [], None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ids, rows in share:
            for array, values in arrays.items():
                stem = f"{array}-{ids.start:012d}-{ids.stop:012d}"
                unfinished = folder / f"{stem}.{os.getpid()}.part"
                file = ArrayFile(unfinished, values.dtype, values.shape[1:])
                for start in range(rows.start, rows.stop, CHUNK_ROWS):
                    file.append(values[start : min(start + CHUNK_ROWS, rows.stop)])
                file.close()
                name = f"{stem}-{file.crc:08x}.npy"
                os.replace(unfinished, folder / name)
                entries.append({"name": name, "array": array, "start": ids.start, "stop": ids.stop, "crc": file.crc})
        sync_folder(folder)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise CheckpointError(
            f"{folder}: rows cannot be written ({error.strerror or error}); the checkpoint before is kept; free "
            "space, or name another folder for checkpoints, and go on from the last one"
        ) from error
    return entries


def load_rows(
    folder: Path,
    saved: list[dict[str, Any]],
    arrays: dict[str, np.ndarray],
    share: list[tuple[slice, slice]],
    shape: tuple[int, int, str],
) -> None:
    """Read ranges of rows, whatever ranges they were written in.

    Args:
        folder: Folder of the files.
        saved: Entries of all ranks, each with num_nodes (or num_rows), dim, dtype and files.
        arrays: Maps a name to a (num_rows, width) array, filled in place. "rows" must have been saved; other arrays
            stay unchanged if they were not.
        share: (ids, rows) of each range to read.
        shape: The number, dim and dtype that the rows must have.

    Raises:
        PartitionStoreError: a file is missing or damaged, ids are missing, or the rows are of another shape.
    """
    check_shape(folder, saved, shape)
    files = [entry for one in saved for entry in one["files"]]
    for array, values in arrays.items():
        entries = [entry for entry in files if entry["array"] == array]
        if not entries and array != "rows":
            continue
        for ids, rows in share:
            _load_range(folder, entries, values, ids, rows)


def check_shape(folder: Path, saved: list[dict[str, Any]], shape: tuple[int | None, int, str]) -> None:
    """Raise PartitionStoreError unless saved rows have a number (None: any), a dim and a dtype."""
    for one in saved:
        count = None if shape[0] is None else one.get("num_rows", one["num_nodes"])
        given = (count, one["dim"], one["dtype"])
        if given != shape:
            raise PartitionStoreError(
                f"{folder}: holds {given[0]} rows of {given[1]} {given[2]}, the embedding has {shape[0]} of {shape[1]} "
                f"{shape[2]}: make it as it was when it was saved"
            )


def _load_range(folder: Path, entries: list[dict[str, Any]], values: np.ndarray, ids: slice, rows: slice) -> None:
    found = 0
    for entry in entries:
        start, stop = max(ids.start, entry["start"]), min(ids.stop, entry["stop"])
        if start < stop:
            stored = _open(folder / entry["name"], entry, values)
            shift = rows.start - ids.start
            values[start + shift : stop + shift] = stored[start - entry["start"] : stop - entry["start"]]
            found += stop - start
    if found != ids.stop - ids.start:
        raise PartitionStoreError(
            f"{folder}: {ids.stop - ids.start - found} of the rows {ids.start} to {ids.stop} were never saved"
        )


def _load_moved(
    folder: Path, entries: list[dict[str, Any]], values: np.ndarray, rows: slice, places: np.ndarray
) -> None:
    """Read a range of rows from where their nodes were; those of place -1 stay as they are.

    Args:
        folder, entries: As of `_load_range`.
        values: (num_rows, width) array, filled in place.
        rows: Of it.
        places: (num,) saved id of each.
    """
    block, found = np.array(values[rows]), places < 0
    for entry in entries:
        here = np.flatnonzero((places >= entry["start"]) & (places < entry["stop"]))
        if len(here):
            block[here] = _open(folder / entry["name"], entry, values)[places[here] - entry["start"]]
            found[here] = True
    if not found.all():
        raise PartitionStoreError(f"{folder}: row {places[np.argmin(found)]} was never saved")
    values[rows] = block


def _open(path: Path, entry: dict[str, Any], values: np.ndarray) -> np.ndarray:
    if not path.is_file():
        raise PartitionStoreError(
            f"{path}: missing, and the checkpoint needs it; restore it, or take another checkpoint"
        )
    if checksum(path) != entry["crc"]:
        raise PartitionStoreError(f"{path}: damaged (its checksum differs); restore it, or take another checkpoint")
    return map_rows(path, values.dtype, (entry["stop"] - entry["start"], values.shape[1]))


class DistributedEmbedding(OwnedRows):
    """Learnable node embeddings, a row of dim numbers a node, sharded by part, with a sparse optimizer of their own.

    In a heterogeneous graph, `for_store(store, dim, node_types=["author"])` has rows only for nodes of these node
    types.

    `pull` reads rows; `push` updates the rows of a batch by their gradients. The processes of a host write to one table
    without locks (Hogwild): simultaneous steps of the same row may overwrite each other, but rows that no other process
    pushes lose nothing. Rows of another host are pulled from it and pushed to it. Both calls are then collectives that
    every rank must enter; a rank without a batch calls `skip`. If several ranks push to the same row of another host in
    one call, that is one step.

    Give it to `NodeClassifier(inputs=...)`: the rows of `batch.n_id` are then the batch's features, or are appended to
    its stored ones. They are pulled in the forward pass and pushed after the backward pass. Its weights are not
    parameters of the module: weight policies, schedulers and clipping leave them alone.

    Args:
        num_nodes, dim: Number of nodes and length of a row, >= 1.
        part_offsets: (num_parts + 1,) part offsets of the store; see `OwnedRows`.
        optimizer: `SparseAdam`, `SparseSGD`, "adam" or "sgd"; its state lies beside the rows.
        seed: Seed of the initial values.
        scale: Initial values are uniform in [-scale, scale). None: sqrt(3 / dim), which gives rows of length about 1.
        node_keys: (num_nodes,) integers that determine the initial values, for example `store.original_nid`, so that
            they do not depend on the partitioning; None: the ids.
        dtype: "float32" or "float64".
        hosts: See `OwnedRows`.
        node_types: The node types that have rows, which `for_store` finds by their names; None: every node has one.

    Attributes:
        num_rows: Number of rows, of all hosts together.
        nbytes: Memory of this host's rows and of their optimizer's state, bytes.
        received_bytes: Bytes of rows and gradients that have come from other hosts so far.
        store: The store whose nodes have the rows; None where it was made without one.

    Raises:
        ValueError: an argument outside its range.

    Cost: dim * 4 bytes a row; nodes of other node types have none; with Adam three times as much and 4 bytes.
    Source: Zheng et al., DistDGL, sections 5.4 and 5.6. Differs: bias correction by row is an option, and values
        that were pulled together from another host are pushed together.
    """

    what = "DistributedEmbedding"
    remedy = 'take a smaller dim, optimizer="sgd", or more hosts'

    def __init__(
        self,
        num_nodes: int,
        dim: int,
        part_offsets: np.ndarray | None = None,
        optimizer: SparseAdam | SparseSGD | str = "adam",
        seed: int = 0,
        scale: float | None = None,
        node_keys: np.ndarray | None = None,
        dtype: str = "float32",
        hosts: Sequence[int] | None = None,
        node_types: NodeTypesWithRows | None = None,
    ):
        if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, or an optimizer, got {short(optimizer)}"
            )
        if np.dtype(dtype).name not in ("float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, got {short(dtype)}")
        if scale is not None and not (scale >= 0 and np.isfinite(scale)):
            raise ValueError(f"scale must be finite and >= 0, or None, got {scale}")
        if node_keys is not None and len(node_keys) != num_nodes:
            raise ValueError(f"node_keys must have {num_nodes} entries, got {len(node_keys)}")
        self.optimizer = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
        super().__init__(num_nodes, dim, dtype, part_offsets, hosts, node_types)
        check_integer("seed", seed)
        self.seed, self.scale, self.node_keys = seed, default_scale(dim) if scale is None else scale, node_keys
        self.loaded, self.store = False, None
        self._traced: list[tuple[np.ndarray, Tensor]] = []

    @classmethod
    def for_store(
        cls, store: PartitionStore, dim: int, node_types: Sequence[str] | None = None, **options
    ) -> "DistributedEmbedding":
        """Return embeddings of a store's nodes, sharded by its parts; initial values go by original ids.

        Args:
            store: An open `PartitionStore`.
            dim: Length of a row, >= 1.
            node_types: Names of the node types whose nodes have rows, for example those without features; a model must
                read the rows of exactly these. None: every node has one.
            options: Further arguments of the class.

        Raises:
            ValueError: the store has no node types of these names, or an argument is outside its range.
        """
        given = {"part_offsets": store.part_offsets, "node_keys": store.original_nid}
        made = cls(store.num_nodes, dim, **given, node_types=NodeTypesWithRows.of(store, node_types), **options)
        made.store = store
        return made

    @property
    def num_pushes(self) -> int:
        """Pushes to this host's rows so far, each rank's counted."""
        return int(self._table.counter[0]) if self.is_open else 0

    def push(self, nodes: np.ndarray | Tensor, gradients: np.ndarray | Tensor) -> None:
        """Step the rows of some nodes; with several hosts a collective.

        Args:
            nodes: (num,) integers in [0, num_nodes), of node types with rows; gradients of a node that comes twice are
                added up first.
            gradients: (num, dim), of the loss by the rows.

        Raises:
            ValueError: a node is out of range or its node type has no rows, or gradients are of another shape.
            StrategyError: another rank was lost.
        """
        ids = self.row_ids(nodes)
        values = np.ascontiguousarray(_as_array(gradients), self.dtype)
        if values.shape != (len(ids), self.dim):
            raise ValueError(f"gradients must have shape ({len(ids)}, {self.dim}), got {values.shape}")
        ids, values = sum_duplicates(ids, values)
        if self.is_local:
            self._apply(ids, values)
            return
        requests = Requests(ids, self._ownership, self._hosts)
        rows, received = push_rows(
            requests, self._hosts, values, lambda: self._apply(requests.rows, values[requests.here])
        )
        self.received_bytes += received.nbytes
        self._apply(*sum_duplicates(rows, received))

    def __call__(self, nodes: Tensor) -> Tensor:
        """Return the rows of a batch's nodes on their device; with gradients enabled, `step` pushes theirs.

        Args:
            nodes: (num,) int64 tensor.
        """
        rows = self.pull(nodes).to(nodes.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._traced.append((_as_array(nodes), rows))
        return rows

    def step(self) -> None:
        """Push the gradients of all rows that were called for since the last step; rows without one push nothing."""
        traced, self._traced = self._traced, []
        for nodes, rows in traced:
            if rows.grad is None:
                self.push(nodes[:0], np.empty((0, self.dim), self.dtype))
            else:
                self.push(nodes, rows.grad)

    def skip(self) -> None:
        """Take part in a training step without a batch."""
        if not self.is_local:
            nothing = np.empty(0, np.int64)
            self.pull(nothing)
            self.push(nothing, np.empty((0, self.dim), self.dtype))

    def save(self, folder: str | Path, with_state: bool = True) -> dict[str, Any]:
        """Write this rank's share of its host's rows; on every rank.

        Args:
            folder: on this host; created if it is missing, files of earlier saves stay.
            with_state: the optimizer's state too.

        Returns:
            What this rank wrote, plain containers; the list of those of all ranks is what `load` takes.
        """
        self._barrier()  # no rank pushes to rows that another is writing
        arrays = self._arrays()
        chosen = {name: arrays[name] for name in self._columns() if name == "rows" or with_state}
        facts = {"num_nodes": self.num_nodes, "dim": self.dim, "dtype": self.dtype.str, "pushes": self.num_pushes}
        if self.store is not None:
            facts["store"] = self.store.layout_fingerprint
        if self.node_types is not None:
            facts |= {"num_rows": self.num_rows, "node_types": self.node_types.names}
        return facts | {"files": save_rows(Path(folder), chosen, self._share())}

    def load(self, folder: str | Path, saved: list[dict[str, Any]]) -> None:
        """Read this rank's share of its host's rows, however they were sharded when they were saved; on every rank.

        Rows that were saved for an earlier version of the store go to the nodes that had them; those of nodes that came
        later stay as they were initialised.

        Args:
            folder: as given to `save`.
            saved: what `save` returned on every rank then.

        Raises:
            PartitionStoreError: a file is missing or damaged, or the rows are of other shape or other node types.
        """
        self._check_node_types(Path(folder), saved)
        places = self._places_of(saved)
        if places is None:
            load_rows(Path(folder), saved, self._arrays(), self._share(), (self.num_rows, self.dim, self.dtype.str))
        else:
            self._load_earlier(Path(folder), saved, places)
        self._table.counter[0] = max(one["pushes"] for one in saved)
        self.loaded = True
        self._barrier()

    def _places_of(self, saved: list[dict[str, Any]]) -> np.ndarray | None:
        """Return where the nodes of the rows were in the earlier version that was saved; None: where they are now."""
        layout = saved[0].get("store")
        if self.store is None or self.node_types is not None or layout in (None, self.store.layout_fingerprint):
            return None
        try:
            return self.store.places_in(layout)
        except PartitionStoreError:
            if saved[0]["num_nodes"] != self.num_nodes:
                raise
            return None  # another store of the same nodes: as many rows are taken as they are

    def _load_earlier(self, folder: Path, saved: list[dict[str, Any]], places: np.ndarray) -> None:
        check_shape(folder, saved, (None, self.dim, self.dtype.str))
        for array, values in self._arrays().items():
            entries = [entry for one in saved for entry in one["files"] if entry["array"] == array]
            for ids, rows in self._share() if entries else ():
                for start in range(0, ids.stop - ids.start, CHUNK_ROWS):
                    stop = min(start + CHUNK_ROWS, ids.stop - ids.start)
                    block, chunk = (slice(one.start + start, one.start + stop) for one in (ids, rows))
                    _load_moved(folder, entries, values, chunk, places[block])

    def _check_node_types(self, folder: Path, saved: list[dict[str, Any]]) -> None:
        mine = None if self.node_types is None else self.node_types.names
        given = next((one.get("node_types") for one in saved if one.get("node_types") != mine), mine)
        if given != mine:
            told = ["every node" if names is None else f"nodes of {', '.join(names)}" for names in (given, mine)]
            remedy = said_node_types(self.node_types.node_types if given is None else given)
            raise PartitionStoreError(
                f"{folder}: holds rows for {told[0]}, the embedding has them for {told[1]}: make it as it was then, "
                f"with {remedy}"
            )

    def files_read(self, saved: list[dict[str, Any]]) -> list[str]:
        """Return the names of the files that `load` reads on this rank; saved: as for `load`."""
        files = [entry for one in saved for entry in one["files"] if entry["array"] in self._columns()]
        shares = [ids for ids, _ in self._share()] if self._places_of(saved) is None else [slice(0, 1 << 62)]
        return [
            entry["name"]
            for entry in files
            if any(max(ids.start, entry["start"]) < min(ids.stop, entry["stop"]) for ids in shares)
        ]

    def _apply(self, rows: np.ndarray, gradients: np.ndarray) -> None:
        arrays = self._arrays()
        self._table.counter[0] += 1
        self.optimizer.apply(
            rows, gradients, arrays["rows"], arrays.get("moments"), arrays.get("counts"), self.num_pushes
        )

    def _columns(self) -> dict[str, SharedColumn]:
        columns = super()._columns()
        if self.optimizer.num_moments:
            columns["moments"] = SharedColumn(self.optimizer.num_moments * self.dim, self.dtype.str)
            columns["counts"] = SharedColumn(1, "<i4")
        return columns

    def _fill(self, share: list[tuple[slice, slice]], before: tuple[SharedTable, Ownership] | None = None) -> None:
        if before is not None:
            self._copy(share, *before)
            return
        key = np.uint64(fold(self.seed, self.dim))
        for ids, rows in share:
            for nodes, own in [(ids, ids)] if self.node_types is None else self.node_types.runs(ids):
                shift = rows.start - ids.start
                place = slice(own.start + shift, own.stop + shift)
                fill_initial(self._arrays()["rows"][place], self._keys(nodes), key, self.scale)

    def _keys(self, nodes: slice) -> np.ndarray:
        """Return the integers that determine the initial values of some nodes."""
        return np.arange(nodes.start, nodes.stop) if self.node_keys is None else np.asarray(self.node_keys[nodes])

    def _copy(self, share: list[tuple[slice, slice]], table: SharedTable, ownership: Ownership) -> None:
        """Take over rows that this process had before they were shared out."""
        for ids, rows in share:
            _, places = ownership.locate(np.arange(ids.start, ids.stop))
            for name, array in self._arrays().items():
                array[rows] = table.arrays[name][places]
        self._table.counter[0] = table.counter[0]
