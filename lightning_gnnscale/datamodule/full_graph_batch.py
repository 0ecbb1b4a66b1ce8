"""The one batch of full-graph training, a rank's whole block of rows, and the loader that yields it each epoch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..graph import MASK_NAMES, Batch
from ..partition_store import PartitionStore
from ..partition_store.block_rows import BlockRows, edge_feature_rows, halo_in_edges
from ..rng import batch_key
from ..sampler.minibatch import SparseFeatures, sparse_rows_to_torch


@dataclass
class FullGraphBatch(Batch):
    """All rows of a rank's block, with the edges into them: one batch an epoch.

    Nodes are local ids: own rows first, then the halo, grouped by the rank that owns it (`BlockRows`). The tensors
    belong to the DataModule and must not be changed in place.

    Attributes:
        n_id: (num_local + num_halo,) int64 store ids.
        indptr: (num_local + 1,) int64 row offsets.
        indices: (num_edges,) int32 sources as local ids.
        degree: (num_local + num_halo,) int64 in-degree in the full graph; where the store has weights, float32 sums of
            the weights instead.
        batch_size: num_local.
        part: The rank.
        key: uint64 as a Python int, the same on every rank; all randomness of the epoch follows from it.
        epoch: Epoch that the key was made for.
        num_nodes_global: Number of nodes in the whole graph.
        loss_count: Number of known labels, by which the sum of losses is divided.
        loss_nodes: Number of nodes that have them, the divisor of losses that count a node once.
        loss_is_share: Whether these two count the whole graph, so that the losses of all ranks add up to one loss.
        split: "val", "test" or "predict"; None while training.
        x_dense: (num_local + num_halo, dim) features as the store returns them (quantised ones as float32), or None.
        x_csr: The same rows in compressed form, or None.
        y: (num_local,) int64 labels, or (num_local, num_labels) labels or numbers to predict, or None; nodes outside
            the masks have theirs too.
        train_mask, val_mask, test_mask: (num_local,) bool, or None where the store has no such mask.
        edge_weight: (num_edges,) float32, or None.
        self_weight: (num_local + num_halo,) float32, the weight of the self-loop that GCN adds to each node; None: 1.
        memo: Values that models keep from batch to batch; all batches of a DataModule on one device share it.
        moved: Maps a device to the tensors there; all batches of a DataModule share it.
        symmetric: Whether every edge of the graph has its reverse.
        halo_in_edges: Returns the `HaloInEdges` of the block, read when called.
        edge_features: Returns the (num_edges, dim) edge features as stored, of at most as many edges as it is given;
            None: there are none.
        full_graph: Marks the class.
    """

    n_id: Tensor
    indptr: Tensor
    indices: Tensor
    degree: Tensor
    batch_size: int
    part: int
    key: int
    epoch: int
    num_nodes_global: int
    loss_count: int
    loss_nodes: int
    loss_is_share: bool = True
    split: str | None = None
    x_dense: Tensor | None = None
    x_csr: SparseFeatures | None = None
    y: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    edge_weight: Tensor | None = None
    self_weight: Tensor | None = None
    symmetric: bool = False
    halo_in_edges: Callable[[], Any] | None = field(default=None, repr=False)
    edge_features: Callable[[int | None], np.ndarray] | None = field(default=None, repr=False)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    moved: dict[torch.device, dict[str, Any]] = field(default_factory=dict, repr=False)
    full_graph: ClassVar[bool] = True
    edge_index = None  # its edges are `indptr` and `indices`

    def __post_init__(self):
        self._copies: dict[torch.device, FullGraphBatch] = {}

    @property
    def x(self) -> Tensor | None:
        """(num_local + num_halo, dim) features; compressed ones are made dense at first access and kept."""
        if self.x_dense is not None or self.x_csr is None:
            return self.x_dense
        if "x" not in self.memo:
            with torch.inference_mode(False):  # made once, perhaps first by validation
                self.memo["x"] = self.x_csr.dense()
        return self.memo["x"]

    @x.setter
    def x(self, value: Tensor | None) -> None:
        # Now this batch moves its own tensors; other batches keep theirs.
        self.x_dense, self.x_csr, self.moved, self.memo, self._copies = value, None, {}, {}, {}

    @property
    def has_edge_attr(self) -> bool:
        return self.edge_features is not None

    def read_edge_attr(self, most: int | None = None) -> Tensor:
        """Return the (num_edges, dim) features of the edges, in their order, on the device of the batch; not kept.

        Args:
            most: Number of edges needed, from the first on; None: all.
        """
        return _tensor(self.edge_features(most)).to(self.n_id.device)

    @property
    def num_nodes(self) -> int:
        return len(self.n_id)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "FullGraphBatch":
        """Return the batch on a device: itself if it is there, else always the same copy.

        Tensors move once for all batches of the DataModule. The copy has a memo of its own.

        Args:
            device: where to.
            non_blocking: do not wait for copies from pinned memory.
        """
        here = torch.empty(0, device=device).device  # "cuda" and 0 are both cuda:0
        if here == self.n_id.device:
            return self
        if here not in self._copies:
            if here not in self.moved:
                # Validation may come first, and tensors made in inference mode could not train.
                with torch.inference_mode(False):
                    self.moved[here] = self._tensors(lambda tensor: tensor.to(here, non_blocking=non_blocking))
            memo = self.memo.setdefault(here, {})
            self._copies[here] = replace(self, **self.moved[here], memo=memo, moved={})
        return self._copies[here]

    def _tensors(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the fields that hold tensors, with the function applied to each tensor."""
        changed = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = function(value)
            elif isinstance(value, SparseFeatures):
                changed[name] = value.apply(function)
        return changed


def block_batch(store: PartitionStore, blocks: BlockRows) -> FullGraphBatch:
    """Return the batch of a block without key, epoch and count of labels; the loaders make their batches from it.

    Args:
        store: The partition store.
        blocks: Block of this rank.

    Cost: reads the features of own and halo rows, in ascending store ids, straight into the batch's memory; labels
        and masks of the own rows.
    """
    begin, end = int(blocks.offsets[blocks.rank]), int(blocks.offsets[blocks.rank + 1])
    nodes = blocks.nodes
    data: dict[str, Any] = {}
    if store.features is not None:
        rows = store.features.read(nodes)
        data |= {"x_csr": sparse_rows_to_torch(rows)} if store.features.is_sparse else {"x_dense": _tensor(rows)}
    if store.labels is not None:
        labels = np.array(store.labels[begin:end])
        data["y"] = _tensor(labels.astype(np.int64, copy=False) if labels.ndim == 1 else labels)
    for name in MASK_NAMES:
        if name in store.masks:
            data[f"{name}_mask"] = _tensor(np.array(store.masks[name][begin:end]))
    return FullGraphBatch(
        n_id=_tensor(nodes),
        indptr=_tensor(blocks.csc.indptr),
        indices=_tensor(blocks.csc.indices),
        degree=_tensor(blocks.degree),
        batch_size=blocks.num_local,
        part=blocks.rank,
        key=0,
        epoch=0,
        num_nodes_global=store.num_nodes,
        loss_count=0,
        loss_nodes=0,
        edge_weight=None if blocks.edge_weight is None else _tensor(blocks.edge_weight),
        self_weight=None if blocks.self_weight is None else _tensor(blocks.self_weight),
        symmetric=blocks.symmetric,
        halo_in_edges=partial(halo_in_edges, store, blocks),
        edge_features=None if store.edge_features is None else partial(edge_feature_rows, store, blocks),
        **data,
    )


class FullGraphLoader:
    """Yield a rank's block once an epoch; a plain iterable that needs no sharding.

    Args:
        batch: Batch of the block.
        loss_counts: (loss_nodes, loss_count) of its batches.
        loss_is_share: `loss_is_share` of its batches.
        seed: Seed of the keys.
        split: "val", "test" or "predict", whose key is 0; None: training.
    """

    def __init__(
        self,
        batch: FullGraphBatch,
        loss_counts: tuple[int, int],
        loss_is_share: bool,
        seed: int = 0,
        split: str | None = None,
    ):
        self.seed, self.epoch = seed, 0
        nodes, labels = loss_counts
        self._batch = replace(batch, loss_nodes=nodes, loss_count=labels, loss_is_share=loss_is_share, split=split)

    def __len__(self) -> int:
        return 1

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """The object whose `set_epoch` Lightning calls, see `PartLoader`."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields; Lightning calls it."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch; the same on all ranks."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume with the epoch of a state."""
        self.epoch = state["epoch"]

    def release(self) -> None:
        """Drop what models kept and the tensors on other devices; the next batch makes them again."""
        self._batch.memo.clear()
        self._batch.moved.clear()

    def __iter__(self) -> Iterator[FullGraphBatch]:
        # The epoch is read at the first batch: Lightning sets it after making the iterator.
        training = self._batch.split is None
        key = batch_key(self.seed, self.epoch, 0, 0) if training else 0
        yield replace(self._batch, key=key, epoch=self.epoch)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
