"""PaGraph's placement: training nodes are dealt out by what their neighbourhoods share, each device caches its own."""

import numpy as np

from ..graph import CSC
from .neighborhoods import assign_seeds, count_reads


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

    Cost: a breadth-first search for each training node; num_devices + 16 bytes a node.
    Source: Lin et al., PaGraph, SoCC 2020, section 4.2.
    """
    device = np.empty(len(train_nodes), np.int32)
    assign_seeds(np.asarray(csc.indptr), np.asarray(csc.indices), train_nodes, num_devices, num_layers, device)
    return device


def most_read_rows(
    csc: CSC, train_nodes: np.ndarray, device: np.ndarray, num_devices: int, num_layers: int, buffer_rows: int
) -> list[np.ndarray]:
    """Return, for each device, the rows of its neighbourhoods with the highest out-degree inside them.

    Args:
        csc, train_nodes, num_devices, num_layers: See `assign_training_nodes`.
        device: The array that `assign_training_nodes` returned.
        buffer_rows: Number of rows in each device's buffer.

    Returns:
        One (num,) int64 array a device, num <= buffer_rows.
    """
    rows = []
    for own in range(num_devices):
        degree = np.zeros(csc.num_rows, np.int64)
        seeds = train_nodes[device == own]
        count_reads(np.asarray(csc.indptr), np.asarray(csc.indices), seeds, num_layers, degree)
        order = np.argsort(-degree, kind="stable")[:buffer_rows]
        rows.append(order[degree[order] > 0])
    return rows
