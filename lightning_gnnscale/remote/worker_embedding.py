"""`WorkerEmbedding`: learnable rows by node in the memory of Ray's workers."""

from collections.abc import Iterator, Sequence
from uuid import uuid4

import numpy as np
import torch.distributed as dist

from ..embedding.distributed_embedding import DistributedEmbedding
from ..embedding.optimizers import SparseAdam, SparseSGD
from ..embedding.row_exchange import Hosts
from ..embedding.shared_table import CHUNK_ROWS
from ..errors import GNNScaleError, check_count, short
from ..events import record
from ..partition_store.typed_features import NodeTypesWithRows
from ..placement.shared_rows import gather_objects, machine_id
from ..rng import fold
from .shard_keeper import Initial, ShardSpec
from .shard_table import ShardTable


class WorkerEmbedding(DistributedEmbedding):
    """Learnable node embeddings, one row per node, in the memory of workers, on this machine or on a Ray cluster.

    A worker owns the rows of its parts and steps them; a trainer keeps none. Rows are pulled a batch ahead, and again
    where a step has changed them. Gradients are sent to the owners, which wait for those of every trainer, add them up
    in the order of the ranks, and step each row once. Rows equal those of `DistributedEmbedding` bit for bit, and so do
    initial values and files: each can read the other's checkpoint, with any number of workers.

    The rows of a worker that ends are lost: every later call says so, and training can resume from a checkpoint.

    Args:
        num_nodes, dim, part_offsets, optimizer, seed, scale, node_keys, dtype: See `DistributedEmbedding`. Part p
            belongs to worker p mod num_workers; if there are fewer parts than workers, each worker owns an equal range
            of rows.
        address: "host:port" of a Ray cluster, or "auto" for the cluster that this machine belongs to. None: Ray is
            started on this machine for as long as the rows exist, unless this process uses one already.
        num_workers: Number of workers that own rows, >= 1.
        pushes_under_way: Largest number of pushes that each trainer leaves unfinished, >= 1; with several trainers
            at most `staleness`.
        timeout_s: How long an address or a worker may stay silent, seconds, > 0.
        node_types, staleness: See `DistributedEmbedding`.

    Attributes:
        nbytes: Memory of all rows and of their optimizer's state, bytes.

    Raises:
        ValueError: an argument outside its range.

    Cost: memory as for `DistributedEmbedding`, divided among the workers; a pull or push is one message to each
        worker, and a copy of its rows at either end. A start takes some seconds: processes import torch.
    Source: Waleffe et al., Armada: gradients of learnable features return to the worker that owns the rows. Differs:
    rows are as new as `staleness` says, and not as old as the queue of batches is deep.
    """

    what = "WorkerEmbedding"
    remedy = 'take a smaller dim, optimizer="sgd", or more workers'

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
        address: str | None = None,
        num_workers: int = 2,
        pushes_under_way: int = 4,
        timeout_s: float = 60.0,
        node_types: NodeTypesWithRows | None = None,
        staleness: int = 0,
    ):
        options = {"node_types": node_types, "staleness": staleness}
        super().__init__(num_nodes, dim, part_offsets, optimizer, seed, scale, node_keys, dtype, **options)
        check_count("num_workers", num_workers)
        check_count("pushes_under_way", pushes_under_way)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {short(timeout_s)}")
        self.address, self.num_workers, self.timeout_s = address, num_workers, timeout_s
        self.pushes_under_way = pushes_under_way
        self._table: ShardTable | None = None

    def join(self, rank_of_part: Sequence[int] | None = None) -> "WorkerEmbedding":
        """Share the rows with the other ranks of the run; every rank must call it. Rows of rank 0 are kept.

        Args:
            rank_of_part: Not used: workers own the rows.

        Raises:
            GNNScaleError: Ray is not installed, does not answer, or the workers do not start.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.open()._table.connect()
            return self
        hosts = Hosts.join([0] * dist.get_world_size(), self._hosts)  # one table for all ranks
        machines, told = set(gather_objects(machine_id())), None
        if hosts.rank == 0:
            try:
                self._check_reachable(len(machines))
                told = self.open()._table.handle
            except Exception as error:  # the others must not wait for it
                told = str(error)
        told = gather_objects(told)[0]
        if isinstance(told, str):
            raise GNNScaleError(told)
        if self._table is None or self._table.token != told.spec.token:
            self.close()
            self._table = ShardTable(told, self.pushes_under_way, self.staleness)
        self._hosts = hosts
        self._table.connect()  # before a source of batches starts a Ray of its own
        self._connect()
        self._table.share(hosts)
        return self

    @property
    def batches_ahead(self) -> int:
        """How many batches ahead of their step rows are pulled."""
        return max(1, self.staleness)

    def _connect(self) -> None:
        self._disconnect()
        self._rows = self._table

    def rows_here(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (row ids, rows) of this rank's share in blocks; over all ranks each row comes once."""
        values = self._arrays()["rows"]
        for ids, _ in self._share():
            for start in range(ids.start, ids.stop, CHUNK_ROWS):
                block = slice(start, min(start + CHUNK_ROWS, ids.stop))
                yield block, values[block]

    def _create(self) -> ShardTable:
        record("rows", what=self.what, num_rows=self.num_rows, bytes=self.nbytes, host=0)
        offsets, owners = self._owned_by_workers()
        keys = self.node_keys
        if self.node_types is not None:
            keys = np.concatenate([self._keys(nodes) for nodes, _ in self.node_types.runs(slice(0, self.num_rows))])
        initial = Initial(fold(self.seed, self.dim), self.scale, keys)
        spec = ShardSpec(
            f"rows-{uuid4().hex[:12]}", self.address, self.timeout_s, offsets, owners, self.num_workers,
            self._columns(), self.optimizer, initial, None,
        )  # fmt: skip
        return ShardTable.start(spec, self.pushes_under_way, self.staleness)

    def _fill(self, share, before=None) -> None:
        """Do nothing: workers fill their rows when they start."""

    def _owned_by_workers(self) -> tuple[np.ndarray, list[int]]:
        if self.part_offsets is not None and len(self.part_offsets) > self.num_workers:
            offsets = self.part_offsets if self.node_types is None else self.node_types.part_offsets
            return offsets, [part % self.num_workers for part in range(len(self.part_offsets) - 1)]
        workers = np.arange(self.num_workers + 1)
        return self.num_rows * workers // self.num_workers, list(range(self.num_workers))

    def _check_reachable(self, num_machines: int) -> None:
        if self.address is None and num_machines > 1 and not self.is_open:
            raise GNNScaleError(
                "WorkerEmbedding without an address starts Ray on one machine, but the ranks are on several: start a "
                "cluster with `ray start`, and give its address="
            )

    def __setstate__(self, state: dict) -> None:
        handle = state.pop("_ticket")
        super().__setstate__(state | {"_ticket": None})
        if handle is not None:
            self._table = ShardTable(handle, self.pushes_under_way, self.staleness)
            self._connect()
