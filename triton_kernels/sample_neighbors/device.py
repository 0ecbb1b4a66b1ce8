"""What `HopSampling` runs on a device: Triton samples the rows of a hop, torch numbers the nodes where they are.

The host learns the sizes of a hop (its new nodes, and the edges to sample next) in one read; nothing else waits.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graph import CSC
from .choice import SplitRows
from .cpu import Workspace
from .device_graph import ROWS, DeviceRelation, has_triton, read_at, triton_kernels
from .hops import Backend, HopSampling, SampledNeighbors, check_fanouts, sample_hops
from .rows import SampledRows, SampleOptions, fold_hop

UNSEEN = torch.iinfo(torch.int32).max
_LARGEST = torch.iinfo(torch.int64).max
_IN_BLOCK = 128  # edges of rows that are read whole


class DeviceWorkspace:
    """Memory to number nodes on a device, reused from batch to batch; each stream that samples has its own.

    Args:
        num_nodes: Number of nodes in the graph.
        device: Device that the memory is on.

    Cost: 4 bytes a node.
    """

    id_dtype = np.dtype(np.int64)

    def __init__(self, num_nodes: int, device: torch.device | str):
        self.num_nodes, self.device = num_nodes, torch.device(device)
        self.label = torch.full((num_nodes + 1,), UNSEEN, dtype=torch.int32, device=device)  # the last one is no node
        self.node = self.owner = self.label.new_empty(0, dtype=torch.int64)
        self.most = 0  # nodes that a batch may have so far

    @property
    def backend(self) -> Backend:
        """What samples with it."""
        return TRITON

    def of_relation(self, number: int) -> "DeviceWorkspace":
        """Return itself: the edges of each edge type are in memory of their own."""
        return self

    def fits(self, num_nodes: int, device: torch.device) -> bool:
        """Return whether graphs of this size on this device can be sampled with it."""
        return num_nodes <= self.num_nodes and device == self.device

    def upload(self, array: np.ndarray | Tensor) -> Tensor:
        """Return (num,) int64 on the device; a tensor is there already."""
        if isinstance(array, Tensor):
            return array
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device, non_blocking=True)

    def place(self, nodes: np.ndarray | Tensor) -> int:
        """Begin a batch with these nodes; return how many were distinct, as tensors are without a look at them."""
        self.node = self.upload(nodes)
        self.most = len(nodes)
        distinct = self.most if isinstance(nodes, Tensor) else len(np.unique(nodes))
        if distinct == self.most:
            self.label[self.node] = torch.arange(self.most, dtype=torch.int32, device=self.device)
        return distinct

    def finish(self, num_labels: int) -> None:
        """End a batch that used this many labels."""
        if num_labels >= self.num_nodes:
            self.label.fill_(UNSEEN)
        else:
            self.label[self.node[:num_labels]] = UNSEEN
        self.most = 0

    def read(self, values: list) -> list[int]:
        """Return numbers that are on the device: the one read of a hop."""
        on_device = [value for value in values if isinstance(value, Tensor)]
        if not on_device:
            return values
        found = iter(torch.stack(on_device).tolist())
        return [next(found) if isinstance(value, Tensor) else value for value in values]

    def ids(self, name: str, count: int, allocate: Callable | None = None) -> Tensor:
        """Return the first `count` nodes or owners."""
        return getattr(self, name)[:count]

    def number(self, ids: Tensor, count: int | Tensor) -> tuple[Tensor, Tensor]:
        """Number nodes, new ones from `count` on in order of appearance; return theirs, and how many there are."""
        num = len(ids)
        place = (torch.arange(num, device=self.device) + count).int()
        self.label.scatter_reduce_(0, ids, place, "amin")  # known labels are below count, and stay
        fresh = self.label[ids] == place
        numbered = count + fresh.cumsum(0) - 1
        most = min(self.most + num, self.num_nodes)
        self.node = extended(self.node, self.most, most, torch.where(fresh, numbered, most), ids)
        self.most = most
        self.label.scatter_(0, torch.where(fresh, ids, self.num_nodes), numbered.int())
        return self.label[ids].long(), count + fresh.sum()


class DeviceTrees:
    """The positions of (seed, node) on a device, found by sorting; see `Trees`."""

    def __init__(self, space: DeviceWorkspace):
        self._space, self._num = space, 0
        self._known = space.node.new_empty(0)
        space.node, space.owner, space.most = self._known, self._known, 0

    def begin(self, ids: np.ndarray | Tensor, owner: np.ndarray) -> int:
        """Put the seeds that are the roots; return how many they are."""
        space = self._space
        space.node, space.owner, space.most = space.upload(ids), space.upload(owner), len(ids)
        self._known = space.owner * space.num_nodes + space.node
        return len(ids)

    def number(self, ids: Tensor, owner: Tensor, count: int | Tensor) -> tuple[Tensor, Tensor]:
        """Number nodes of seeds, new ones from `count` on; return theirs, and how many there are."""
        space, num, before = self._space, len(ids), self._space.most
        key = owner * space.num_nodes + ids
        ordered, order = torch.cat([self._known, key]).sort(stable=True)
        at = torch.arange(before + num, device=space.device)
        begins = torch.ones_like(ordered, dtype=torch.bool)
        begins[1:] = ordered[1:] != ordered[:-1]
        first_at = order[torch.where(begins, at, 0).cummax(0).values]
        first = torch.empty_like(order).scatter_(0, order, first_at)[before:]  # of each, where its like came first
        fresh = first == at[before:]
        numbered = count + fresh.cumsum(0) - 1
        most = before + num
        place = torch.where(fresh, numbered, most)
        space.node = extended(space.node, before, most, place, ids)
        space.owner = extended(space.owner, before, most, place, owner)
        self._known = extended(self._known, before, most, place, key)[:most]
        space.most = most
        local = torch.where(first < before, first, numbered[(first - before).clamp(min=0)])
        return local, count + fresh.sum()


def extended(array: Tensor, before: int, most: int, place: Tensor, values: Tensor) -> Tensor:
    """Return an array of `most` items and one more, with values at their places; `most` is the place of none.

    Those that are not filled are the largest integers, which are no node and no tree's.
    """
    grown = torch.cat([array[:before], array.new_full((most + 1 - before,), _LARGEST)])
    return grown.scatter_(0, place, values)


class DeviceRows(SampledRows):
    """`SampledRows` of one edge type on a device; arguments as there, the edge type a `DeviceRelation`."""

    relation: DeviceRelation
    targets: DeviceWorkspace

    def _clear(self) -> None:
        self._locals, self._offsets, self._edges, self._weights = [], [], [], []
        self._neighbor = self._edge = self._split_weight = None
        if self.times is not None:
            self._limit = self.targets.upload(self.times)

    @property
    def num_neighbors(self) -> int:
        """As of `SampledRows`; waits for the device."""
        return int(self._degree[: self.end - self.begin].sum()) if self.fanouts[self.hop] else 0

    def look_up(self, hop: int, begin: int, end: int | Tensor, node_types: Any = None) -> None:
        """Look up the rows of the targets begin..end-1; `settle` has to follow. All nodes may have rows."""
        relation, targets, fanout = self.relation, self.targets, self.fanouts[hop]
        self.hop, self.begin = hop, begin
        bound = targets.most - begin
        start, degree, take = (targets.node.new_zeros(bound) for _ in range(3))
        timed = relation.time is not None and self.times is not None
        self._weighted = relation.weight is not None and fanout >= 0
        if fanout and bound:
            num = targets.node.new_full((1,), 0) + (end - begin)
            triton_kernels().look_up_kernel[(-(-bound // ROWS),)](
                relation.indptr, targets.node[begin:], num, targets.owner[begin:] if timed else num,
                self._limit if timed else num, relation.time if timed else num, relation.indices,
                relation.positive if self._weighted else num, start, degree, take, bound, fanout, relation.steps,
                TIMED=timed, BY_EDGE=relation.time_by_edge, STRICT=self.options.strict, WEIGHTED=self._weighted,
                REPLACE=self._replace and fanout >= 0, BLOCK=ROWS,
            )  # fmt: skip
        self._start, self._degree = start, degree
        self._offset = torch.cat([take.new_zeros(1), take.cumsum(0)])
        self.last = self.first + self._offset[-1]

    def settle(self, end: int, last: int) -> None:
        """Take `end` and `last` as the device told them."""
        self.end, self.last = end, last
        self._offset = self._offset[: end - self.begin + 1]

    def whole(self) -> tuple:
        """Return what `sample` takes for all targets of a hop."""
        return self.begin, self.end, None, None

    def sample(self, begin: int, end: int, neighbor: None = None, taken: None = None) -> None:
        """Sample for the targets begin..end-1, which are all of a hop."""
        space, options, relation, fanout = self.targets, self.options, self.relation, self.fanouts[self.hop]
        num = self.last - self.first
        split = None if self.split is None else self.split[self.hop]
        self._neighbor = space.node.new_empty(num)
        self._edge = torch.empty_like(self._neighbor) if options.return_e_id or options.with_weight else None
        self._split_weight = None if split is None else self._neighbor.new_empty(num, dtype=torch.float32)
        if num == 0:
            return
        kernels, none = triton_kernels(), self._offset
        position, how = none, kernels.NO_POSITION
        if split is not None and self._edge is not None:
            position, how = split.position, kernels.IN_ROW
        kernels.sample_rows_kernel[(end - begin,)](
            self._start, self._degree, self._offset, space.node[begin:],
            space.owner[begin:] if options.disjoint else none,
            relation.indices if split is None else split.indices, none if split is None else split.num_inside, position,
            relation.weight if self._weighted else none, relation.running if self._weighted else none,
            relation.positive if self._weighted else none, self._neighbor, self._edge, self._split_weight,
            _signed(int(fold_hop(self.key, self.hop))), struct.unpack("<q", struct.pack("<d", options.scale))[0],
            len(relation.indptr) - 1, fanout, relation.steps,
            SPLIT=split is not None, REPLACE=self._replace and fanout >= 0, WEIGHTED=self._weighted,
            LATEST=self._latest, TREES=options.disjoint, POSITION=int(how.value), **_block(fanout),
        )  # fmt: skip

    def number(self, known: DeviceWorkspace, trees: DeviceTrees | None, count: int | Tensor) -> int | Tensor:
        """Number the sampled neighbours as `SampledRows` does."""
        if self.last == self.first:
            self._locals.append(self._neighbor)
            return count
        if trees is None:
            local, count = known.number(self._neighbor, count)
        else:
            owner = repeated(self.targets.owner[self.begin : self.end], self._offset, len(self._neighbor))
            local, count = trees.number(self._neighbor, owner, count)
        self._locals.append(local)
        return count

    def add(self) -> None:
        """Keep the edges of a hop, which is sampled and numbered."""
        self._offsets.append(self._offset[1:] + self.first)
        if self._edge is not None:
            self._edges.append(self._edge)
        if self._split_weight is not None:
            self._weights.append(self._split_weight)
        elif self.options.with_weight:
            self._weights.append(self._weigh())
        super().add()

    def edges(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the sources of all edges, indptr, positions and weights, as `join_device_edges` takes them."""
        none = self.targets.node.new_zeros(1)
        indptr = torch.cat([none, *self._offsets])
        edge = torch.cat(self._edges or [none[:0]]) if self.options.return_e_id else None
        edge = None if edge is None else self.relation.named(edge)
        weight = torch.cat(self._weights or [none[:0].float()]) if self._weights or self.options.with_weight else None
        local = torch.cat(self._locals or [none[:0]])
        return local, indptr, edge, weight

    def _weigh(self) -> Tensor:
        """Return the weights of a hop's edges: `choice.weigh`, operation by operation."""
        num = self.end - self.begin
        start, degree, taken = self._start[:num], self._degree[:num], self._offset.diff()
        if not self._weighted:
            return repeated((degree.double() / taken.clamp(min=1)).float(), self._offset, len(self._neighbor))
        relation, fanout = self.relation, self.fanouts[self.hop]
        last = (start + degree - 1).clamp(min=0)
        total = read_at(relation.running, last)
        own = read_at(relation.weight, self._edge).double()
        total, of_row = (repeated(values, self._offset, len(own)) for values in (total, taken))
        weight = total / (of_row * own)
        if not self._replace:
            weight = torch.where(repeated(degree <= fanout, self._offset, len(own)), 1.0, weight)
        return weight.float()


def join_device_edges(
    parts: Sequence[tuple],
    num_targets: int,
    with_e_id: bool,
    with_weight: bool,
    numbers: Sequence[int] | None,
    allocate: Callable | None = None,
) -> tuple:
    """Return sampled edges of several types as one graph on their device; arguments and result as of `join_edges`."""
    joint = sum(part[1] for part in parts)
    num_edges = sum(len(part[0]) for part in parts)
    cursor = joint[:-1]
    target = joint.new_empty(num_edges)
    source = torch.empty_like(target)
    e_id = torch.empty_like(target) if with_e_id else None
    weight = target.new_empty(num_edges, dtype=torch.float32) if with_weight else None
    edge_type = None if numbers is None else torch.empty_like(target)
    each = torch.arange(num_targets, device=joint.device)
    for at, (local, indptr, edge, own) in enumerate(parts):
        targets = repeated(each, indptr, len(local))
        place = (cursor - indptr[:-1])[targets] + torch.arange(len(local), device=joint.device)
        number = None if numbers is None else numbers[at]
        for out, values in ((target, targets), (source, local), (e_id, edge), (weight, own)):
            if out is not None:
                out[place] = values
        if edge_type is not None:
            edge_type.index_fill_(0, place, number)
        cursor = cursor + indptr.diff()
    return torch.stack([source, target]), joint, e_id, weight, edge_type


TRITON = Backend(DeviceRows, DeviceTrees, join_device_edges)


def sample_tensors(
    csc: CSC,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: int,
    *,
    replace: bool = False,
    return_e_id: bool = False,
    workspace: Workspace | DeviceWorkspace | None = None,
    split: Sequence[SplitRows] | None = None,
    scale: float = 1.0,
) -> SampledNeighbors:
    """Sample as `sample_neighbors` does where the graph is tensors; the result is tensors on its device.

    The same neighbours in the same order for the same key: sampled by Triton on CUDA, else by the CPU form.

    Raises:
        ValueError: as `sample_neighbors`.
    """
    options = SampleOptions(replace, return_e_id, float(scale))
    device = csc.indices.device
    if device.type == "cuda" and has_triton():
        with torch.cuda.device(device):
            return sample_with_triton(csc, seeds, fanouts, key, options, workspace, split)
    host = CSC(*(_numpy(array) for array in csc))
    host_split = None if split is None else [SplitRows(*(_numpy(array) for array in rows)) for rows in split]
    sampled = sample_hops(
        host, _numpy(seeds), fanouts, key, options, split=host_split,
        workspace=workspace if isinstance(workspace, Workspace) else None,
    )  # fmt: skip
    return SampledNeighbors(*(torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for v in sampled))


def sample_with_triton(
    csc: CSC,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: int,
    options: SampleOptions = SampleOptions(),  # noqa: B008 - a value
    workspace: DeviceWorkspace | None = None,
    split: Sequence[SplitRows] | None = None,
) -> SampledNeighbors:
    """Sample on the current device; arguments as for `sample_tensors`. Waits for the device once a hop."""
    relation = DeviceRelation.of(csc)
    space = workspace or DeviceWorkspace(csc.num_rows, csc.indices.device)
    hops = HopSampling([relation], [(0, _numpy(seeds))], [check_fanouts(fanouts)], key, [space], options, split=split)
    for _ in range(hops.num_hops):
        hops.sample()
    return hops.collect()


def _block(fanout: int) -> dict:
    """Return how rows are sampled: a block of a row's edges, and its warps, without fused operations."""
    block = _IN_BLOCK if fanout < 0 else max(32, 1 << (fanout - 1).bit_length())
    return {"BLOCK": block, "num_warps": min(4, max(1, block // 128)), "enable_fp_fusion": False}


def repeated(values: Tensor, indptr: Tensor, num_edges: int) -> Tensor:
    """Return the value of each edge's row."""
    return torch.repeat_interleave(values, indptr.diff(), output_size=num_edges)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _numpy(array: Tensor | np.ndarray | None) -> np.ndarray | None:
    return array.cpu().numpy() if isinstance(array, Tensor) else array
