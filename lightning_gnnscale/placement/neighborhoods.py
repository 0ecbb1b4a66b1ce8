"""Walks through the neighbourhoods of training nodes, compiled."""

import numpy as np

from ..jit import kernel


@kernel
def _search(indptr, indices, seed, stamp, num_layers, seen, queue):
    """List the nodes within num_layers hops of a seed in the queue, itself first, and return how many they are."""
    queue[0] = seed
    seen[seed] = stamp
    begin, end = 0, 1
    for _ in range(num_layers):
        last = end
        for q in range(begin, last):
            for e in range(indptr[queue[q]], indptr[queue[q] + 1]):
                u = indices[e]
                if seen[u] != stamp:
                    seen[u] = stamp
                    queue[end] = u
                    end += 1
        begin = last
    return end


@kernel
def count_reached(indptr, indices, train_nodes, num_layers, counts):
    """Count, for each node, the training nodes that have it within num_layers hops."""
    num_nodes = len(indptr) - 1
    seen = np.full(num_nodes, -1, np.int64)
    queue = np.empty(num_nodes, np.int64)
    for i in range(len(train_nodes)):
        end = _search(indptr, indices, train_nodes[i], i, num_layers, seen, queue)
        for q in range(end):
            counts[queue[q]] += 1


@kernel
def assign_seeds(indptr, indices, train_nodes, num_devices, num_layers, device):
    """Write the device of each training node, one after the other; see `pagraph.assign_training_nodes`."""
    num_nodes = len(indptr) - 1
    held = np.zeros((num_devices, num_nodes), np.bool_)
    num_held = np.zeros(num_devices, np.int64)
    num_train = np.zeros(num_devices, np.int64)
    share = len(train_nodes) / num_devices
    seen = np.full(num_nodes, -1, np.int64)
    queue = np.empty(num_nodes, np.int64)
    for i in range(len(train_nodes)):
        end = _search(indptr, indices, train_nodes[i], i, num_layers, seen, queue)
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
def count_reads(indptr, indices, seeds, num_layers, degree):
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
