"""PaGraph's placement: training nodes are dealt out by what their neighbourhoods share, each device caches its own."""

import numpy as np

from ..graph import CSC
from ..jit import kernel


def assign_training_nodes(csc: CSC, train_nodes: np.ndarray, num_devices: int, num_layers: int) -> np.ndarray:
    """Deal training nodes out to devices, one after the other, to the device that holds most of their neighbourhood.

    The score of a device is |its nodes and IN(t)| x (share - |its training nodes|) / |its nodes|, where IN(t) is what
    lies within num_layers hops of t and `share` the mean number of training nodes; ties go to the device with fewest
    training nodes, then to the lowest number.

    Args:
        csc: in-neighbours.
        train_nodes: (num_train,) int64, distinct.
        num_devices: >= 1.
        num_layers: hops, >= 1.

    Returns:
        (num_train,) int32 device of each training node.

    Cost: a breadth-first search for each training node; num_devices bits a node.
    Source: Lin et al., PaGraph, SoCC 2020, section 4.2.
    """
    device = np.empty(len(train_nodes), np.int32)
    _assign(np.asarray(csc.indptr), np.asarray(csc.indices), train_nodes, num_devices, num_layers, device)
    return device


def most_read_rows(
    csc: CSC, train_nodes: np.ndarray, device: np.ndarray, num_devices: int, num_layers: int, buffer_rows: int
) -> list[np.ndarray]:
    """Return, for each device, the rows of its neighbourhoods with the highest out-degree inside them.

    Args:
        csc, train_nodes, num_devices, num_layers: see `assign_training_nodes`.
        device: what that returned.
        buffer_rows: of each device.

    Returns:
        One (num,) int64 array a device, num <= buffer_rows.
    """
    rows = []
    for own in range(num_devices):
        degree = np.zeros(csc.num_rows, np.int64)
        seeds = train_nodes[device == own]
        _count_reads(np.asarray(csc.indptr), np.asarray(csc.indices), seeds, num_layers, degree)
        order = np.argsort(-degree, kind="stable")[:buffer_rows]
        rows.append(order[degree[order] > 0])
    return rows


@kernel
def _assign(indptr, indices, train_nodes, num_devices, num_layers, device):
    num_nodes = len(indptr) - 1
    held = np.zeros((num_devices, num_nodes), np.bool_)
    num_held = np.zeros(num_devices, np.int64)
    num_train = np.zeros(num_devices, np.int64)
    share = len(train_nodes) / num_devices
    seen = np.full(num_nodes, -1, np.int64)
    queue = np.empty(num_nodes, np.int64)
    for i in range(len(train_nodes)):
        queue[0] = train_nodes[i]
        seen[train_nodes[i]] = i
        begin, end = 0, 1
        for _ in range(num_layers):
            last = end
            for q in range(begin, last):
                for e in range(indptr[queue[q]], indptr[queue[q] + 1]):
                    u = indices[e]
                    if seen[u] != i:
                        seen[u] = i
                        queue[end] = u
                        end += 1
            begin = last
        best, best_score = -1, 0.0
        for d in range(num_devices):
            common = 0
            for q in range(end):
                common += held[d, queue[q]]
            score = common * (share - num_train[d]) / max(1, num_held[d])
            if best < 0 or score > best_score or (score == best_score and num_train[d] < num_train[best]):
                best, best_score = d, score
        device[i] = best
        num_train[best] += 1
        for q in range(end):
            if not held[best, queue[q]]:
                held[best, queue[q]] = True
                num_held[best] += 1


@kernel
def _count_reads(indptr, indices, seeds, num_layers, degree):
    """Count, for each node within num_layers hops of the seeds, the arcs by which targets there read it."""
    num_nodes = len(indptr) - 1
    seen = np.zeros(num_nodes, np.bool_)
    queue = np.empty(num_nodes, np.int64)
    end = len(seeds)
    for i in range(end):
        queue[i] = seeds[i]
        seen[seeds[i]] = True
        degree[seeds[i]] += 1
    begin = 0
    for _ in range(num_layers):
        last = end
        for q in range(begin, last):
            for e in range(indptr[queue[q]], indptr[queue[q] + 1]):
                u = indices[e]
                degree[u] += 1
                if not seen[u]:
                    seen[u] = True
                    queue[end] = u
                    end += 1
        begin = last
