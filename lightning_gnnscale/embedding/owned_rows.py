"""Rows by node that the hosts of a run own, and read from each other."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import PlacementError, check_count, short, wait_for_others
from ..events import record
from ..loader import BufferPool
from ..partition_store.typed_features import NodeTypesWithRows
from ..placement.shared_rows import gather_objects
from ..sampler.minibatch import RowsByNodeType
from ..triton_kernels.gather_rows import gather_rows
from .row_exchange import Hosts, Ownership, Requests, checked_nodes, checked_offsets, pull_rows
from .shared_table import SharedColumn, SharedTable, table_bytes


class OwnedRows:
    """A table with rows of nodes that every rank reads as a whole; each host holds a part of it in memory.

    With one host, a read is a copy out of shared memory, and ranks read independently. With several, `pull` is a
    collective: every rank must enter it in every step; a rank without a batch calls `skip`.

    Args:
        num_nodes, dim: Number of nodes and length of a row, >= 1.
        dtype: Dtype of the rows.
        part_offsets: (num_parts + 1,) offsets of the parts. A part is a range of ids and belongs to the host of the
            rank that trains it. None: each host owns an equal range.
        hosts: Host of each rank; None: found from the machines that the ranks run on.
        node_types: The node types that have rows; None: every node has one.

    Attributes:
        num_rows: Number of rows, of all hosts together; `row_ids` says which is whose; ids where every node has one.

    Raises:
        ValueError: an argument outside its range.
    """

    what = "rows"
    remedy = "take more hosts"

    def __init__(
        self,
        num_nodes: int,
        dim: int,
        dtype,
        part_offsets: np.ndarray | None = None,
        hosts: Sequence[int] | None = None,
        node_types: NodeTypesWithRows | None = None,
    ):
        for name, value in {"num_nodes": num_nodes, "dim": dim}.items():
            check_count(name, value)
        self.num_nodes, self.dim, self.dtype = int(num_nodes), int(dim), np.dtype(dtype)
        self.part_offsets = None if part_offsets is None else checked_offsets(part_offsets)
        if part_offsets is not None and self.part_offsets[-1] != num_nodes:
            raise ValueError(f"part_offsets must end at num_nodes {num_nodes}, got {self.part_offsets[-1]}")
        if node_types is not None and (
            not isinstance(node_types, NodeTypesWithRows) or node_types.num_nodes != num_nodes
        ):
            raise ValueError(
                f"node_types must be those of a store of {num_nodes} nodes: use "
                f"{type(self).__name__}.for_store(store, dim, "
                "node_types=[...])"
            )
        self.node_types, self.num_rows = node_types, self.num_nodes if node_types is None else node_types.num_rows
        if hosts is not None and (isinstance(hosts, str) or not isinstance(hosts, Iterable)):
            raise ValueError(f"hosts must be a list of integers, the host of each rank, got {short(hosts)}")
        self.hosts_given = None if hosts is None else list(hosts)
        self._hosts, self._rank_of_part = Hosts.alone(), None
        self._ownership = self._owners(self._hosts)
        self._table: SharedTable | None = None
        self._pool = BufferPool(1 << 30)
        self.received_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the rows are in memory."""
        return self._table is not None

    @property
    def is_local(self) -> bool:
        """Whether one host owns all rows, so that no call waits for another rank."""
        return self._hosts.num_hosts == 1

    @property
    def nbytes(self) -> int:
        """What the rows of this host take altogether; known before they are made."""
        return table_bytes(self._ownership.num_rows(self._hosts.host), self._columns())

    def open(self) -> "OwnedRows":
        """Make all rows for this process alone, unless they exist; forked processes then share them."""
        if self._table is None:
            self._table = self._create()
            self._fill(self._share())
        return self

    def join(self, rank_of_part: Sequence[int] | None = None) -> "OwnedRows":
        """Share the rows with the other ranks of the run; every rank must call it. Rows that exist are kept.

        Args:
            rank_of_part: (num_parts,) rank that trains each part, the same on every rank. None: as before, at first
                cyclically. Rows that hosts have shared already stay where they are.

        Raises:
            PlacementError: too little memory.
        """
        hosts, owned_before = Hosts.join(self.hosts_given, self._hosts), self._ownership
        settled = self._table is not None and not self.is_local
        if rank_of_part is not None and self.part_offsets is not None and not settled:
            self._rank_of_part = tuple(rank_of_part)
        if len(hosts.host_of_rank) == 1:
            return self.open()
        if self._table is not None and not self.is_local and hosts.host_of_rank != self._hosts.host_of_rank:
            raise PlacementError(f"{self.what}: the hosts of the run have changed: save the rows and load them again")
        kept = self._table is not None and (hosts.num_hosts == 1 or not self.is_local)
        before, self._hosts, self._ownership = self._table, hosts, self._owners(hosts)
        leads = hosts.place[0] == 0
        if leads and not kept:
            self._table = self._create()
        kept, handle = gather_objects((kept, self._table.handle) if leads else None)[hosts.ranks(hosts.host)[0]]
        if not leads and (before is None or before.token != handle[0]):
            self._table = SharedTable.attach(handle)
        if not kept:
            self._fill(self._share(), None if before is None else (before, owned_before))
        gather_objects(None)  # all have mapped and filled
        if before is not None and before is not self._table:
            before.close()
        return self

    def close(self) -> None:
        """Let go of the rows; processes that share them keep them."""
        if self._table is not None:
            self._table.close()
            self._table = None

    def pull(self, nodes: np.ndarray | Tensor) -> Tensor:
        """Return the rows of some nodes; with several hosts a collective.

        Args:
            nodes: (num,) integers in [0, num_nodes), repeats allowed.

        Returns:
            (num, dim) tensor on the CPU, of memory that is used again when it is gone.

        Raises:
            ValueError: a node is out of range, or its node type has no rows.
            StrategyError: another rank was lost.
        """
        ids = self.row_ids(nodes)
        return torch.from_numpy(self._read(ids, self._pool.take((len(ids), self.dim), self.dtype)))

    def without_features(self, nodes: np.ndarray) -> RowsByNodeType:
        """Return the features of (num,) int64 nodes: no node type has features, and some have rows."""
        return RowsByNodeType(
            torch.from_numpy(self.node_types.nodes.type_of(nodes)), [None] * len(self.node_types.node_types)
        )

    def row_ids(self, nodes: np.ndarray | Tensor) -> np.ndarray:
        """Return the (num,) int64 rows of some nodes, in [0, num_rows); raises ValueError as `pull` does."""
        ids = checked_nodes(_as_array(nodes), self.num_nodes)
        return ids if self.node_types is None else self.node_types.row_ids(ids)

    def rows_here(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (row ids, rows) of this rank's share of its host's rows; over all ranks each row comes once."""
        values = self._arrays()["rows"]
        for ids, rows in self._share():
            yield ids, values[rows]

    def _read(self, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        values = self._arrays()["rows"]
        if self.is_local:
            return gather_rows(values, self._ownership.locate(ids)[1] if self._is_split else ids, out)
        requests = Requests(ids, self._ownership, self._hosts)
        self.received_bytes += pull_rows(requests, self._hosts, lambda rows: gather_rows(values, rows), out)
        return out

    @property
    def _is_split(self) -> bool:
        """Whether a row's place is not its id."""
        return self._ownership.num_hosts > 1

    def _columns(self) -> dict[str, SharedColumn]:
        """Return the arrays of a host; "rows" are those that are pulled."""
        return {"rows": SharedColumn(self.dim, self.dtype.str)}

    def _fill(self, share: list[tuple[slice, slice]], before: tuple[SharedTable, Ownership] | None = None) -> None:
        """Fill (ids, rows) of this host; `before`: rows that this process had before they were shared, and whose."""
        raise NotImplementedError

    def _create(self) -> SharedTable:
        num_rows = self._ownership.num_rows(self._hosts.host)
        record("rows", what=self.what, num_rows=num_rows, bytes=self.nbytes, host=self._hosts.host)
        return SharedTable.create(num_rows, self._columns(), self.what, self.remedy)

    def _share(self) -> list[tuple[slice, slice]]:
        """Return (ids, rows) of this rank's share of its host's rows."""
        position, ranks = self._hosts.place
        num_rows = self._ownership.num_rows(self._hosts.host)
        first, last = num_rows * position // ranks, num_rows * (position + 1) // ranks
        chunks = []
        for _, ids, rows in self._ownership.parts(self._hosts.host):
            start, stop = max(rows.start, first), min(rows.stop, last)
            if start < stop:
                shift = ids.start - rows.start
                chunks.append((slice(start + shift, stop + shift), slice(start, stop)))
        return chunks

    def _owners(self, hosts: Hosts) -> Ownership:
        if self.part_offsets is not None:
            offsets = self.part_offsets if self.node_types is None else self.node_types.part_offsets
            given = self._rank_of_part
            known = given is not None and len(hosts.host_of_rank) > max(given)
            return Ownership.by_rank(offsets, hosts.host_of_rank, given if known else None)
        number = hosts.num_hosts
        offsets = [self.num_rows * host // number for host in range(number + 1)]
        return Ownership(np.array(offsets), range(number), number)

    def _arrays(self) -> dict[str, np.ndarray]:
        if self._table is None:
            raise PlacementError(f"{self.what}: the rows are not in memory: call open(), or join() on every rank")
        return self._table.arrays

    def _barrier(self) -> None:
        wait_for_others()

    def __getstate__(self) -> dict:
        """Send the rows to a process that this one starts as a handle: both map the same rows."""
        state = self.__dict__ | {"_pool": None, "_hosts": Hosts.alone(), "_table": None}
        if self._table is not None and not self.is_local:
            raise PlacementError(f"{self.what}: rows that several hosts own cannot be sent to another process")
        state["_ownership"] = self._owners(Hosts.alone())
        state["_ticket"] = None if self._table is None else self._table.handle
        return state

    def __setstate__(self, state: dict) -> None:
        handle = state.pop("_ticket")
        self.__dict__.update(state, _pool=BufferPool(1 << 30))
        if handle is not None:
            self._table = SharedTable.attach(handle)


def _as_array(values: np.ndarray | Tensor) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
