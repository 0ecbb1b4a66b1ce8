"""Make the batch of a key: sample a subgraph, and give it ids, features, labels, masks, weights in pooled memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from ..errors import GNNScaleError, short
from ..events import clock
from ..jit import kernel
from ..partition_store.features import Column, LoadedRows
from ..partition_store.packed_features import features_of_part
from ..partition_store.part_graph import WholeGraph
from ..rng import batch_key
from ..sampler.minibatch import MiniBatch
from ..sampler.on_device import on_host, release
from ..sampler.protocol import BatchSampler, Subgraph
from ..triton_kernels.sample_neighbors import Workspace
from .batch_columns import OF_EDGES, edge_data, edge_ids, node_data, pair_data, type_data, with_rows
from .batch_source import BatchKey
from .buffer_pool import BufferPool
from .device_columns import columns_there
from .part_walk import PartShares, PartUnions
from .staged_part import StagedPart


@dataclass(frozen=True)
class BatchOrder:
    """Which items each batch of a part has.

    Args:
        batch_size: Targets per batch.
        shuffle, drop_last: Whether a pass over a part shuffles its targets, and whether it leaves out a short last
            batch.
        num_ranks: Number of ranks that share each part's batches evenly; None: a part belongs to one rank.
        parts_open: Number of parts, or of their unions, that batches are requested from at a time.
        passes: Passes over a part in one epoch. The epochs of keys count these passes.
        unions: Parts that are sampled as one graph; None: each by itself. With `PartShares` a key's part is a rank.
    """

    batch_size: int = 512
    shuffle: bool = True
    drop_last: bool = False
    num_ranks: int | None = None
    parts_open: int = 2
    passes: int = 1
    unions: PartUnions | PartShares | None = None

    def unit(self, key: BatchKey) -> int | tuple[int, ...]:
        """Return what a batch is sampled from: its part, or the union that its part is in."""
        return key.part if self.unions is None else self.unions.of(key.part, key.epoch)


@dataclass(frozen=True, eq=False)
class BatchMaker:
    """Make the batch of a key: sample it and fill it; may be called from several threads at once.

    One value, which is pickled to where batches are made. `make` does it all; `sample` and `fill` are its two halves.
    `dataclasses.replace` gives a maker with another sampler, features or order, which shares the memory.

    Args:
        sampler: What to sample.
        features: A `Column` by store id, or None.
        pool: Memory of the batches.
        order: Which items each batch of a part has.
        gathers: Whether `make` gives batches their features; False leaves them for `fill`, in this process.
        return_e_id: Whether each batch gets the positions of its edges in the store's edge arrays.
        joins: Whether batches are chunks that this process mixes, see `mix`: their features are read then, into the
            memory of the mixed batch. In another process, to which a maker is pickled, it does not.
    """

    sampler: BatchSampler
    features: Column | None = None
    pool: BufferPool = field(default_factory=BufferPool)
    order: BatchOrder = BatchOrder()
    gathers: bool = True
    return_e_id: bool = False
    joins: bool = False
    _spaces: SimpleQueue = field(default_factory=SimpleQueue, repr=False)

    def __getstate__(self) -> dict:
        """Leave out memory: each process takes its own; and features that are read in this process only."""
        state = {name: value for name, value in vars(self).items() if name != "_spaces"}
        return state | {"pool": self.pool.max_bytes, "features": self.table, "joins": False}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, pool=BufferPool(state["pool"]), _spaces=SimpleQueue())

    @property
    def table(self) -> Column | None:
        """The column whose rows `make` gives batches; None where it gives them none."""
        return self.features if self.gathers else None

    def make(self, key: BatchKey, staged: Callable[[], StagedPart], fill: bool = True) -> MiniBatch:
        """Return the batch of a key.

        Args:
            key: Key of the batch.
            staged: Returns the part; called once.
            fill: False leaves out features, as without `gathers`.

        Raises:
            GNNScaleError: whatever went wrong, with part, batch and epoch.
        """
        try:
            part = staged().of(key.part)
            prepare = self.build if fill and self.gathers else self.sample
            return prepare(part, self.items(key, part), batch_key(*key))
        except torch.OutOfMemoryError as error:
            what = short(str(error).splitlines()[0])
            raise batch_error(
                key, f"there is no memory to sample it ({what}): say device=cpu to the sampler, or a smaller batch_size"
            ) from None
        except Exception as error:
            raise batch_error(key, f"{type(error).__name__}: {error}") from error

    def items(self, key: BatchKey, part: StagedPart) -> np.ndarray:
        """Return the items of a key's batch."""
        order = self.order
        pass_of = (key.seed, key.epoch, order.shuffle, order.num_ranks)
        return part.items(self.sampler, order.batch_size, order.drop_last, *pass_of)[key.batch]

    def build(self, staged: StagedPart, items: np.ndarray, key: int) -> MiniBatch:
        """Return the batch of (part, items, key); arguments as in `sample`."""
        return self.fill(self.sample(staged, items, key), staged.features)

    def sample(self, staged: StagedPart, items: np.ndarray, key: int) -> MiniBatch:
        """Return the batch without its features.

        Args:
            staged: the part.
            items: what the batch starts from, for example its seeds.
            key: uint64, see `rng.batch_key`.
        """
        with clock.doing("sample"):
            with self._workspace(staged.graph) as space:
                with_edges = self.asks_edges(staged)
                sampled = self.sampler.sample(staged.state, items, key, space, self.pool.take, with_edges)
            if not hasattr(sampled, "n_id"):
                raise TypeError(
                    f"{type(self.sampler).__name__}.sample must return a Subgraph (n_id, edge_index, indptr, "
                    f"num_seeds), "
                    f"such as induced_subgraph makes, got {type(sampled).__name__}"
                )
            return self.assemble(staged, sampled, key)

    def _reads_edges(self, staged: StagedPart) -> bool:
        """Whether batches carry the positions of their edges, or columns that are read by them."""
        return self.return_e_id or any(name in staged.edges for name in OF_EDGES)

    def asks_edges(self, staged: StagedPart) -> bool:
        """Whether a sampler is asked for the positions of edges, which edge types and times need too."""
        columns = staged.graph.columns
        typed = "edge_type" in columns and not self.sampler.has_edge_types
        return typed or "edge_time" in columns or self._reads_edges(staged)

    def assemble(self, staged: StagedPart, sampled: Subgraph, key: int, with_nodes: bool = True) -> MiniBatch:
        """Return the batch of a sampled subgraph, without its features.

        Args:
            staged: the part that it was sampled from.
            sampled: with `e_id` where `asks_edges`.
            key: uint64, the batch's.
            with_nodes: False leaves out what `node_data` looks up.
        """
        there = None if sampled.stream is None else columns_there(self.sampler, staged)
        if there is not None:
            found = there.look_up(sampled, self._reads_edges(staged), self.pool.take)
        else:
            sampled = sampled if sampled.stream is None else on_host(sampled, self.pool.take)
            found = self._look_up(staged, sampled, with_nodes)
        found["e_id"] = _tensor(found["e_id"]) if self.return_e_id else None
        return MiniBatch(
            edge_index=_tensor(sampled.edge_index),
            indptr=_tensor(sampled.indptr),
            batch_size=sampled.num_seeds,
            part=staged.graph.part,
            key=key,
            num_sampled_nodes=sampled.num_sampled_nodes,
            num_sampled_edges=sampled.num_sampled_edges,
            loss_weight=_tensor(sampled.loss_weight),
            pairs=_tensor(sampled.pairs),
            negatives=_tensor(sampled.negatives),
            pair_type=_tensor(sampled.pair_type),
            source_negatives=_tensor(sampled.source_negatives),
            seed_of=_tensor(sampled.seed_of),
            seed_time=_tensor(sampled.seed_time),
            **found,
        )

    def _look_up(self, staged: StagedPart, sampled: Subgraph, with_nodes: bool) -> dict[str, Any]:
        """Return the ids, the types and the columns of a batch on the host, by their names in it."""
        n_id, take = self.store_ids(staged.graph, sampled.n_id), self.pool.take
        e_id = edge_ids(staged.graph, sampled) if self._reads_edges(staged) else None
        return {
            "n_id": torch.from_numpy(n_id),
            "e_id": e_id,
            **edge_data(staged, sampled, e_id, take),
            **pair_data(staged, sampled, take),
            **type_data(staged.graph, n_id, sampled, take),
            **(node_data(staged, sampled.n_id, take) if with_nodes else {}),
        }

    def fill(self, batch: MiniBatch, loaded: LoadedRows | None = None) -> MiniBatch:
        """Gather the features of a batch, in place, and return it; of a chunk note where they are read from.

        Args:
            batch: sampled.
            loaded: rows already read, its own among them; None: read from the table.
        """
        if self.features is None:
            return batch
        features = features_of_part(self.features, batch.part) if loaded is None else loaded
        if self.joins:
            batch.unread = features
            return batch
        with clock.doing("read"):
            return with_rows(batch, features.read(batch.host_ids, self.pool.take))

    def release(self) -> None:
        """Free the memory that is kept from batch to batch."""
        self.pool.clear()
        while not self._spaces.empty():
            self._spaces.get_nowait()
        release(self.sampler)

    def lend(self, graph) -> Workspace:
        """Return a workspace that fits a part, a returned one where there is one."""
        try:
            space = self._spaces.get_nowait()
        except Empty:
            space = None
        if space is None or not space.fits(graph.num_local, graph.csc.indices.dtype):
            space = Workspace(graph.num_local, graph.csc.indices.dtype)
        return space

    def give_back(self, space: Workspace) -> None:
        """Take a workspace back whose batch is finished or abandoned."""
        self._spaces.put(space)

    @contextmanager
    def _workspace(self, graph) -> Iterator[Workspace]:
        space = self.lend(graph)
        try:
            yield space
        finally:
            self.give_back(space)

    def store_ids(self, graph, local: np.ndarray) -> np.ndarray:
        """Return (num,) int64 store ids of (num,) local ids of a part, in pooled memory; of a whole graph as given."""
        if isinstance(graph, WholeGraph):
            return local
        out = self.pool.take(local.shape, np.int64)
        _to_store_ids(local, graph.core_start, graph.num_core, graph.halo_nodes, out)
        return out


def _tensor(array: np.ndarray | torch.Tensor | None) -> torch.Tensor | None:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


@kernel
def _to_store_ids(local, core_start, num_core, halo_nodes, out):
    for i in range(len(local)):
        node = local[i]
        out[i] = core_start + node if node < num_core else halo_nodes[node - num_core]


def batch_error(key: BatchKey, what: str) -> GNNScaleError:
    """Return the error of a batch that could not be prepared."""
    return GNNScaleError(f"part {key.part}, batch {key.batch} of epoch {key.epoch + 1}: {what}")
