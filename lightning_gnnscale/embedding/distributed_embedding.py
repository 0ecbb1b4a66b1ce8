"""`DistributedEmbedding`: learnable rows by node that hosts own, pulled and pushed, and saved by each rank."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PartitionStoreError, PlacementError, check_count, check_integer, short, wait_for_others
from ..events import clock, record
from ..loader import BufferPool
from ..partition_store import PartitionStore
from ..partition_store.typed_features import NodeTypesWithRows, said_node_types
from ..partition_store.versions import earlier_version
from ..placement.shared_rows import gather_objects
from ..rng import fold
from ..sampler.minibatch import RowsByNodeType
from ..triton_kernels.gather_rows import gather_rows
from .optimizers import OPTIMIZERS, SparseAdam, SparseSGD, sum_duplicates
from .row_exchange import GroupRows, Hosts, Ownership, PulledRows, RowTransport, checked_nodes, checked_offsets
from .shared_table import (
    CHUNK_ROWS,
    SharedColumn,
    SharedTable,
    check_shape,
    default_scale,
    fill_initial,
    load_moved,
    load_rows,
    save_rows,
    table_bytes,
)


class DistributedEmbedding:
    """Learnable node embeddings, a row of dim numbers a node, sharded by part, with a sparse optimizer of their own.

    In a heterogeneous graph, `for_store(store, dim, node_types=["author"])` has rows only for nodes of these node
    types.

    A step adds up the gradients of a row over the ranks in their order, and steps the row once: the rows of any number
    of processes and machines are those of one, bit for bit. The processes of a host share one table; rows of another
    host are pulled from it and pushed to it. With several ranks the calls of a step are collectives that every rank
    must enter; a rank without a batch calls `skip`.

    Give it to `NodeClassifier(inputs=...)`: the rows of `batch.n_id` are then the batch's features, or are appended to
    its stored ones. Rows of other hosts are pulled a batch ahead, while the batch before trains; those that its step
    changes follow as soon as their owner has stepped them. Gradients are pushed after the backward pass, while those of
    the layers are averaged, and those of rows that no rank's next batch reads while that trains. Its weights are not
    parameters of the module: weight policies, schedulers and clipping leave them alone.

    Args:
        num_nodes, dim: Number of nodes and length of a row, >= 1.
        part_offsets: (num_parts + 1,) part offsets of the store. A part is a range of ids and belongs to the host of
            the rank that trains it. None: each host owns an equal range.
        optimizer: `SparseAdam`, `SparseSGD`, "adam" or "sgd"; its state lies beside the rows.
        seed: Seed of the initial values.
        scale: Initial values are uniform in [-scale, scale). None: sqrt(3 / dim), which gives rows of length about 1.
        node_keys: (num_nodes,) integers that determine the initial values, for example `store.original_nid`, so that
            they do not depend on the partitioning; None: the ids.
        dtype: "float32" or "float64".
        hosts: Host of each rank; None: found from the machines that the ranks run on.
        node_types: The node types that have rows, which `for_store` finds by their names; None: every node has one.
        staleness: Most steps that the rows of a batch may lag behind, >= 0. 0: none, training is exact. Above, rows
            of other hosts are used as they were pulled, so many batches ahead, and no push is waited for; `told`
            counts them.

    Attributes:
        num_rows: Number of rows, of all hosts together; `row_ids` says which is whose.
        nbytes: Memory of this host's rows and of their optimizer's state, bytes.
        store: The store whose nodes have the rows; None where it was made without one.

    Raises:
        ValueError: an argument outside its range.

    Cost: dim * 4 bytes a row; nodes of other node types have none; with Adam three times as much and 4 bytes; on
        several hosts 5 bytes more. On the wire a row that is pulled is dim * 4 + 9 bytes, one that is pushed
        dim * 4 + 8.
    Source: Zheng et al., DistDGL, sections 5.4 and 5.6. Differs: steps are synchronous by default, not Hogwild; bias
        correction by row is an option.
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
        staleness: int = 0,
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
        check_integer("seed", seed)
        for name, value in {"num_nodes": num_nodes, "dim": dim}.items():
            check_count(name, value)
        self.num_nodes, self.dim, self.dtype = int(num_nodes), int(dim), np.dtype(dtype)
        self.seed, self.scale, self.node_keys = seed, default_scale(dim) if scale is None else scale, node_keys
        self.part_offsets = None if part_offsets is None else checked_offsets(part_offsets)
        if part_offsets is not None and self.part_offsets[-1] != num_nodes:
            raise ValueError(f"part_offsets must end at num_nodes {num_nodes}, got {self.part_offsets[-1]}")
        is_known = isinstance(node_types, NodeTypesWithRows) and node_types.num_nodes == num_nodes
        if node_types is not None and not is_known:
            raise ValueError(
                f"node_types must be those of a store of {num_nodes} nodes: use "
                f"{type(self).__name__}.for_store(store, dim, node_types=[...])"
            )
        self.node_types, self.num_rows = node_types, self.num_nodes if node_types is None else node_types.num_rows
        if hosts is not None and (isinstance(hosts, str) or not isinstance(hosts, Iterable)):
            raise ValueError(f"hosts must be a list of integers, the host of each rank, got {short(hosts)}")
        self.hosts_given = None if hosts is None else list(hosts)
        self._hosts, self._rank_of_part = Hosts.alone(), None
        self._ownership = self._owners(self._hosts)
        check_integer("staleness", staleness, 0)
        self.staleness = int(staleness)
        self._table: SharedTable | None = None
        self._pool = BufferPool(1 << 30)
        self.loaded, self.store = False, None
        self._forget()

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

    @property
    def is_open(self) -> bool:
        """Whether the rows are in memory."""
        return self._table is not None

    @property
    def is_local(self) -> bool:
        """Whether one host owns all rows, so that no call waits for another rank."""
        return self._hosts.num_hosts == 1

    @property
    def exact(self) -> bool:
        """Whether the rows are those of one process, whatever the number of processes."""
        return self.staleness == 0

    @property
    def batches_ahead(self) -> int:
        """How many batches ahead of their step rows are pulled; 0: they are in this machine's memory."""
        return 0 if self.is_local else max(1, self.staleness)

    @property
    def received_bytes(self) -> int:
        """Bytes of rows and gradients that have come from other processes so far."""
        return 0 if self._rows is None else self._rows.received_bytes

    @property
    def nbytes(self) -> int:
        """What the rows of this host take altogether; known before they are made."""
        return table_bytes(self._ownership.num_rows(self._hosts.host), self._columns())

    def open(self) -> "DistributedEmbedding":
        """Make all rows for this process alone, unless they exist; forked processes then share them."""
        if self._table is None:
            self._table = self._create()
            self._fill(self._share())
        if self._rows is None:
            self._connect()
        return self

    def join(self, rank_of_part: Sequence[int] | None = None) -> "DistributedEmbedding":
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
        unchanged = self._table is not None and hosts is self._hosts
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
        if not (unchanged and self._table is before):
            self._connect()
        gather_objects(None)  # all have mapped and filled
        if before is not None and before is not self._table:
            before.close()
        return self

    def close(self) -> None:
        """Let go of the rows; processes that share them keep them."""
        self._disconnect()
        if self._table is not None:
            self._table.close()
            self._table = None

    def pull(self, nodes: np.ndarray | Tensor) -> Tensor:
        """Return the rows of some nodes; with several hosts a collective, of one what its ranks have stepped so far.

        Args:
            nodes: (num,) integers in [0, num_nodes), repeats allowed.

        Returns:
            (num, dim) tensor on the CPU, of memory that is used again when it is gone.

        Raises:
            ValueError: a node is out of range, or its node type has no rows.
            StrategyError: another rank was lost.
        """
        ids = self.row_ids(nodes)
        out = self._pool.take((len(ids), self.dim), self.dtype)
        if self.is_local and self._transport().together:
            self._rows.settle()
            return torch.from_numpy(gather_rows(self._arrays()["rows"], ids, out))
        return torch.from_numpy(self._transport().pull(ids, out).result())

    def pull_outside_steps(self, nodes: np.ndarray | Tensor) -> Tensor:
        """Return the rows of some nodes as `pull` does, where ranks ask for rows differently often.

        Where a pull is a collective, a rank that has asked for its last rows calls `end_pulls`, and serves the others.
        """
        if not self.is_local and self._transport().together:
            self._rows.any_asks(True)
        return self.pull(nodes)

    def end_pulls(self) -> None:
        """Serve ranks that still ask for rows by `pull_outside_steps`, until none does; every rank calls it."""
        while not self.is_local and self._transport().together and self._rows.any_asks(False):
            self.pull(np.empty(0, np.int64))

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

    def _transport(self) -> RowTransport:
        self._arrays()  # or an error: they are not there
        return self._rows

    def _connect(self) -> None:
        """Reach the rows as they are owned now; every rank calls it."""
        self._disconnect()
        self._rows = GroupRows(self._table, self._ownership, self._hosts, self.optimizer, self.staleness)

    def _disconnect(self) -> None:
        if self._rows is not None:
            self._rows.end()
        self._forget()

    def _forget(self) -> None:
        """Begin without a step under way."""
        self._rows: RowTransport | None = None
        self._drop_steps()
        self._begun_at, self._waited_s = None, 0.0

    def _drop_steps(self) -> None:
        self._announced: deque[list[np.ndarray]] = deque()  # row ids of the batches of coming steps
        self._ahead: deque[PulledRows] = deque()  # rows of coming steps, the next one's first
        self._under_way = False  # a step has begun, and has not been pushed
        self._batches: deque[tuple[np.ndarray, np.ndarray]] = deque()  # of its batches that were not called for yet
        self._left = 0  # batches of the step whose gradients are missing
        self._traced: list[tuple[np.ndarray, Tensor]] = []  # of the batch that is computed
        self._gradients: list[tuple[np.ndarray, np.ndarray]] = []  # by logical rank

    def _create(self) -> SharedTable:
        num_rows = self._ownership.num_rows(self._hosts.host)
        record("rows", what=self.what, num_rows=num_rows, bytes=self.nbytes, host=self._hosts.host)
        return SharedTable.create(num_rows, self._columns(), self.what, self.remedy)

    def _share(self) -> list[tuple[slice, slice]]:
        """Return (ids, rows) of this rank's share of its host's rows."""
        return self._ownership.share(self._hosts)

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

    def __getstate__(self) -> dict:
        """Send the rows to a process that this one starts as a handle: both map the same rows."""
        own = ("_rows", "_announced", "_ahead", "_batches", "_traced", "_gradients")  # of this process
        state = self.__dict__ | {"_pool": None, "_table": None, "_hosts": Hosts.alone()} | dict.fromkeys(own)
        if self._table is not None and not self.is_local:
            raise PlacementError(f"{self.what}: rows that several hosts own cannot be sent to another process")
        state["_ownership"] = self._owners(Hosts.alone())
        state["_ticket"] = None if self._table is None else self._table.handle
        return state

    def __setstate__(self, state: dict) -> None:
        handle = state.pop("_ticket")
        self.__dict__.update(state, _pool=BufferPool(1 << 30))
        self._forget()
        if handle is not None:
            self._table = SharedTable.attach(handle)
            self._connect()

    def push(self, nodes: np.ndarray | Tensor, gradients: np.ndarray | Tensor) -> None:
        """Step the rows of some nodes, and wait for it; with several ranks a collective.

        Args:
            nodes: (num,) integers in [0, num_nodes), of node types with rows; gradients of a node that comes twice are
                added up first.
            gradients: (num, dim), of the loss by the rows.

        Raises:
            ValueError: a node is out of range or its node type has no rows, or gradients are of another shape.
            StrategyError: another rank was lost.
        """
        self._transport().push(*self._summed(self.row_ids(nodes), gradients), is_step=False)
        self._rows.settle()
        if self._rows.together:
            self._ahead.clear()  # what it changes of them would not follow

    def _summed(self, ids: np.ndarray, gradients: np.ndarray | Tensor) -> tuple[np.ndarray, np.ndarray]:
        values = np.ascontiguousarray(_as_array(gradients), self.dtype)
        if values.shape != (len(ids), self.dim):
            raise ValueError(f"gradients must have shape ({len(ids)}, {self.dim}), got {values.shape}")
        return sum_duplicates(ids, values)

    def announce(self, batches: Sequence[np.ndarray | Tensor]) -> None:
        """Tell which nodes' rows a coming step asks for, so that they are pulled ahead; steps come in this order.

        Args:
            batches: By batch of the step, (num,) integers in [0, num_nodes).
        """
        self._announced.append([self.row_ids(nodes) for nodes in batches])

    def begin(self, batches: Sequence[np.ndarray | Tensor]) -> None:
        """Begin a step: its rows are there when this returns. With several ranks a collective.

        Args:
            batches: By batch of this process, in the order of their logical ranks, the (num,) nodes whose rows are
                called for; each is computed, and ends in a call of `step`.

        Raises:
            ValueError: a node is out of range, or its node type has no rows.
            StrategyError: another rank was lost.
        """
        rows, by_batch = self._transport(), [self.row_ids(nodes) for nodes in batches]
        while self._announced and not _same(self._announced.popleft(), by_batch):
            pass
        if rows.together and self._under_way:
            self._ahead.clear()  # what the step under way changes of them follows when it ends, and they are read now
        ahead = self._ahead.popleft() if self._ahead else None
        with self._waiting():
            rows.meet()
            if ahead is not None and ahead.is_empty:  # of an epoch's first step nobody was told
                ahead = None
        covered = ahead is not None and np.array_equal(ahead.ids, _joined(by_batch))
        if ahead is not None and (covered or rows.together):
            with self._waiting():
                pulled = rows.renew(ahead, None if covered else self._asked(by_batch))
        else:
            pulled = rows.pull(*self._asked(by_batch))
        self._under_way = True
        self._pull_ahead()
        with self._waiting():
            pulled.wait()
        values = pulled.result()  # what is read of this machine's memory has been stepped by all then
        ends = np.cumsum([len(one) for one in by_batch])
        self._batches = deque((one, values[end - len(one) : end]) for one, end in zip(by_batch, ends, strict=True))
        self._left, self._gradients = len(by_batch), []

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        self._begun_at = begun if self._begun_at is None else self._begun_at
        with clock.doing("exchange"):
            yield
        self._waited_s += time.perf_counter() - begun

    def _pull_ahead(self) -> None:
        coming = list(self._announced)
        while len(self._ahead) < self.batches_ahead:
            batches = coming[len(self._ahead)] if len(self._ahead) < len(coming) else []
            self._ahead.append(self._rows.pull(*self._asked(batches), ahead=True))

    def _asked(self, batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return the rows of a step's batches, memory for them, and how many each batch has."""
        ids = _joined(batches)
        return ids, self._pool.take((len(ids), self.dim), self.dtype), [len(one) for one in batches]

    def __call__(self, nodes: Tensor) -> Tensor:
        """Return the rows of a batch's nodes on their device; with gradients enabled, `step` pushes theirs.

        Args:
            nodes: (num,) int64 tensor.
        """
        if not torch.is_grad_enabled():
            return self.pull_outside_steps(nodes).to(nodes.device)
        ids = self.row_ids(nodes)
        if not (self._batches and np.array_equal(self._batches[0][0], ids)):
            if self._left > 1:
                raise PlacementError(
                    f"{self.what}: a step of {self._left} batches was begun with other nodes than these"
                )
            self.begin([nodes])
        ids, values = self._batches.popleft()
        rows = torch.from_numpy(values).to(nodes.device).requires_grad_()
        self._traced.append((ids, rows))
        return rows

    def step(self) -> None:
        """End a batch after its backward; after the last of the step, the gradients of all are pushed."""
        traced, self._traced = self._traced, []
        traced = [(ids, _as_array(rows.grad)) for ids, rows in traced if rows.grad is not None]
        if traced:
            ids, gradients = map(_joined, zip(*traced, strict=True))
            self._gradients.append(self._summed(ids, gradients))
        self._left -= 1
        if self._left <= 0:
            self._push_step()

    def _push_step(self) -> None:
        ids, gradients = np.empty(0, np.int64), np.empty((0, self.dim), self.dtype)
        if self._gradients:
            ids, gradients = map(_joined, zip(*self._gradients, strict=True))
        self._gradients, self._batches = [], deque()
        self._transport().push(ids, gradients, coming=self._ahead[0] if self._ahead else None)
        self._under_way = False
        if self.exact and self.is_local and self._rows.together:
            self._rows.settle()  # another process of the host reads them without asking

    def skip(self) -> None:
        """Take part in a training step without a batch."""
        self.begin([])
        self._push_step()

    def settle(self) -> None:
        """Wait until all that this process pushed is with the owners of its rows."""
        if self._rows is not None:
            self._rows.settle()

    def told(self) -> dict[str, float]:
        """Return what has been counted since the rows were joined, for the log.

        `bytes_away`: bytes of rows and gradients that came; `waiting_share`: share of the time since the first step in
        which this process waited for rows; `rows_stale`, `greatest_age`: rows that were used though a step had changed
        them, and the most steps that one had missed.
        """
        stale, age = (0, 0) if self._rows is None else self._rows.told()
        ran_s = 0.0 if self._begun_at is None else time.perf_counter() - self._begun_at
        counts = {"bytes_away": self.received_bytes, "rows_stale": stale, "greatest_age": age}
        return counts | {"staleness": self.staleness, "waiting_share": self._waited_s / ran_s if ran_s else 0.0}

    def save(self, folder: str | Path, with_state: bool = True) -> dict[str, Any]:
        """Write this rank's share of its host's rows; on every rank.

        Args:
            folder: on this host; created if it is missing, files of earlier saves stay.
            with_state: the optimizer's state too.

        Returns:
            What this rank wrote, plain containers; the list of those of all ranks is what `load` takes.
        """
        self.settle()
        wait_for_others()  # no rank pushes to rows that another is writing
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
        self._drop_steps()
        self._transport().restart(max(one["pushes"] for one in saved))
        self.loaded = True
        wait_for_others()

    def _places_of(self, saved: list[dict[str, Any]]) -> np.ndarray | None:
        """Return where rows were in the earlier version that was saved, -1 of new ones; None: where they are now."""
        layout = saved[0].get("store")
        if self.store is None or layout in (None, self.store.layout_fingerprint):
            return None
        try:
            places = self.store.places_in(layout)
        except PartitionStoreError:
            if saved[0]["num_nodes"] != self.num_nodes:
                raise
            return None  # another store of the same nodes: as many rows are taken as they are
        return places if self.node_types is None else self._row_places(places, layout)

    def _row_places(self, places: np.ndarray, layout: str) -> np.ndarray:
        """Return where rows of some node types were in an earlier version, of where its nodes were."""
        earlier = NodeTypesWithRows.of(earlier_version(self.store, layout), self.node_types.names)
        rows = np.full(self.num_rows, -1)
        for nodes, own in self.node_types.runs(slice(0, self.num_rows)):
            was = places[nodes]
            found = was[was >= 0]
            rows[own][was >= 0] = found if earlier is None else earlier.row_ids(found)
        return rows

    def _load_earlier(self, folder: Path, saved: list[dict[str, Any]], places: np.ndarray) -> None:
        check_shape(folder, saved, (None, self.dim, self.dtype.str))
        for array, values in self._arrays().items():
            entries = [entry for one in saved for entry in one["files"] if entry["array"] == array]
            for ids, rows in self._share() if entries else ():
                for start in range(0, ids.stop - ids.start, CHUNK_ROWS):
                    stop = min(start + CHUNK_ROWS, ids.stop - ids.start)
                    block, chunk = (slice(one.start + start, one.start + stop) for one in (ids, rows))
                    load_moved(folder, entries, values, chunk, places[block])

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

    def _columns(self) -> dict[str, SharedColumn]:
        """Return the arrays of a host; "rows" are those that are pulled."""
        columns = {"rows": SharedColumn(self.dim, self.dtype.str)}
        if self.optimizer.num_moments:
            columns["moments"] = SharedColumn(self.optimizer.num_moments * self.dim, self.dtype.str)
            columns["counts"] = SharedColumn(1, "<i4")
        return columns

    def _fill(self, share: list[tuple[slice, slice]], before: tuple[SharedTable, Ownership] | None = None) -> None:
        """Fill (ids, rows) of this host; `before`: rows that this process had before they were shared, and whose."""
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


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def _as_array(values: np.ndarray | Tensor) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
