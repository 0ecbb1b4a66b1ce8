"""Fan-out sampling of tensors: Triton samples the rows of a hop, torch relabels them where they are."""

import struct
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ...graph import CSC
from .choice import SplitRows, checked_split
from .cpu import Workspace
from .hops import SampledNeighbors, check_fanouts, sample_hops
from .rows import SampleOptions, fold_hop

_UNSEEN = torch.iinfo(torch.int64).max


class DeviceWorkspace:
    """Memory to relabel nodes on a device, reused from batch to batch; each stream that samples has its own.

    Args:
        num_nodes: Number of nodes in the graph.
        device: Device that the memory is on.

    Cost: 8 bytes a node.
    """

    def __init__(self, num_nodes: int, device: torch.device | str):
        self.label = torch.full((num_nodes,), _UNSEEN, dtype=torch.int64, device=device)


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
        ValueError: as `sample_neighbors`; on CUDA also for replace=True.
    """
    if csc.indices.device.type == "cuda" and _triton_kernels() is not None:
        if replace:
            raise ValueError("replace must be False on CUDA, got True: sample on the CPU to sample with replacement")
        with torch.cuda.device(csc.indices.device):
            return sample_with_triton(csc, seeds, fanouts, key, return_e_id, workspace, split, scale)
    host = CSC(*(_numpy(array) for array in csc))
    host_split = None if split is None else [SplitRows(*(_numpy(array) for array in rows)) for rows in split]
    sampled = sample_hops(
        host, _numpy(seeds), fanouts, key, SampleOptions(replace, return_e_id, float(scale)), split=host_split,
        workspace=workspace if isinstance(workspace, Workspace) else None,
    )  # fmt: skip
    device = csc.indices.device
    return SampledNeighbors(*(torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for v in sampled))


def sample_with_triton(
    csc: CSC,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: int,
    return_e_id: bool = False,
    workspace: DeviceWorkspace | None = None,
    split: Sequence[SplitRows] | None = None,
    scale: float = 1.0,
) -> SampledNeighbors:
    """Sample on the current device; arguments as for `sample_tensors`. Waits for the device twice a hop."""
    fanouts = check_fanouts(fanouts)
    split = checked_split(split, scale, csc, len(fanouts), False, return_e_id)
    label = (workspace or DeviceWorkspace(csc.num_rows, csc.indices.device)).label
    if len(label) < csc.num_rows:
        raise ValueError(f"workspace is for {len(label)} nodes, the graph has {csc.num_rows}")
    nodes = _checked_seeds(seeds.long().contiguous(), csc.num_rows)
    n_id, sources, indptr, e_id, weight = [nodes], [], [nodes.new_zeros(1)], [], []
    count, num_edges, edges, counts = len(nodes), 0, [], [len(nodes)]
    try:
        label[nodes] = torch.arange(count, device=label.device)
        for hop, fanout in enumerate(fanouts):
            hop_key = int(fold_hop(key, hop))
            offset = _lay_out(csc.indptr, nodes, fanout)
            rows = None if split is None else split[hop]
            neighbor, edge, edge_weight = sample_rows(csc, nodes, offset, fanout, hop_key, return_e_id, rows, scale)
            nodes, local = _relabel(neighbor, label, count)
            for kept, new in zip((n_id, sources, indptr, e_id, weight), (nodes, local, offset[1:] + num_edges, edge,
                                                                        edge_weight), strict=True):  # fmt: skip
                kept.append(new)
            count += len(nodes)
            num_edges += len(local)
            counts.append(len(nodes))
            edges.append(len(local))
    except BaseException:
        label.fill_(_UNSEEN)
        raise
    n_id = torch.cat(n_id)
    label[n_id] = _UNSEEN
    pointers = torch.cat(indptr)
    targets = torch.repeat_interleave(
        torch.arange(len(pointers) - 1, device=label.device), pointers.diff(), output_size=num_edges
    )
    return SampledNeighbors(
        n_id,
        torch.stack([torch.cat(sources), targets]),
        pointers,
        torch.cat(e_id) if return_e_id else None,
        counts,
        edges,
        None if split is None else torch.cat(weight),
    )


def sample_rows(
    csc: CSC,
    nodes: Tensor,
    offset: Tensor,
    fanout: int,
    hop_key: int,
    return_e_id: bool = False,
    split: SplitRows | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sample the rows of one hop: one program a row.

    Args:
        csc: the graph's tensors. nodes: (num_targets,) int64.
        offset: (num_targets + 1,) int64, where each row's samples begin.
        fanout: the most samples of a row, -1 for whole rows. hop_key: combine(key, hop).
        return_e_id: also return positions in `csc.indices`.
        split, scale: as for `sample_neighbors`, of this hop.

    Returns:
        (num_edges,) int64 neighbours; positions or None; float32 weights, or None without `split`.
    """
    num_edges = int(offset[-1])
    device = csc.indices.device
    neighbor = torch.empty(num_edges, dtype=torch.int64, device=device)
    edge = torch.empty_like(neighbor) if return_e_id else None
    weight = None if split is None else torch.empty(num_edges, dtype=torch.float32, device=device)
    if num_edges:
        block = 128 if fanout < 0 else max(32, 1 << (fanout - 1).bit_length())
        _triton_kernels().sample_rows_kernel[(len(nodes),)](
            csc.indptr,
            csc.indices if split is None else split.indices,
            csc.indptr if split is None else split.num_inside,
            split.position if split is not None and return_e_id else csc.indptr,
            nodes, offset, neighbor,
            neighbor if edge is None else edge,
            neighbor if weight is None else weight,
            _signed(hop_key), struct.unpack("<q", struct.pack("<d", scale))[0],
            SPLIT=split is not None, WITH_EDGE=return_e_id, WITH_POSITION=split is not None, BLOCK=block,
            num_warps=min(4, max(1, block // 128)), enable_fp_fusion=False,
        )  # fmt: skip
    return neighbor, edge, weight


def _lay_out(indptr: Tensor, nodes: Tensor, fanout: int) -> Tensor:
    """Return (num_targets + 1,) int64: where the samples of each row begin."""
    degree = indptr[nodes + 1] - indptr[nodes]
    take = degree if fanout < 0 else degree.clamp(max=fanout)
    return torch.cat([take.new_zeros(1), take.cumsum(0)])


def _relabel(neighbor: Tensor, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the nodes without a label in order of appearance, labelled from `count` on, and the labels of all."""
    place = torch.arange(count, count + len(neighbor), device=neighbor.device)
    label.scatter_reduce_(0, neighbor, place, "amin")  # known labels are below count, and stay
    nodes = neighbor[label[neighbor] == place]
    label[nodes] = torch.arange(count, count + len(nodes), device=neighbor.device)
    return nodes, label[neighbor]


def _checked_seeds(seeds: Tensor, num_rows: int) -> Tensor:
    if len(seeds):
        ordered = seeds.sort().values
        least, most, repeats = torch.stack([ordered[0], ordered[-1], (ordered.diff() == 0).sum()]).tolist()
        if least < 0 or most >= num_rows:
            raise ValueError(f"seeds must be in [0, {num_rows}), got {least} to {most}")
        if repeats:
            raise ValueError(f"seeds must be distinct, got {repeats} repeats among {len(seeds)}")
    return seeds


@cache
def _triton_kernels() -> ModuleType | None:
    """Return the module of kernels, or None where Triton is missing; imported when first needed."""
    try:
        from . import kernel
    except ImportError:
        return None
    return kernel


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _numpy(array: Tensor | np.ndarray | None) -> np.ndarray | None:
    return array.cpu().numpy() if isinstance(array, Tensor) else array
