"""Nodes of disjoint trees: a node that several seeds find stands once for each of them."""

import numpy as np

from ...jit import kernel
from ...rng import mix64
from .cpu import Workspace


class Trees:
    """The positions of (seed, node), for the nodes of one node type in one batch.

    Args:
        space: Holds the nodes, and the seed of each, in `node` and `owner`.
    """

    def __init__(self, space: Workspace):
        self._space, self._table = space, _new_table(64)

    def begin(self, ids: np.ndarray, owner: np.ndarray) -> int:
        """Put the seeds that are the roots; return how many they are."""
        return self.find(ids, owner, 0, np.empty(len(ids), np.int32))

    def find(self, ids: np.ndarray, owner: np.ndarray, count: int, local: np.ndarray) -> int:
        """Find nodes of seeds, and put new ones after the `count` that are there; return how many there are then.

        Args:
            ids, owner: (num,) nodes, and the seed of each.
            local: (num,) int32, filled with positions.
        """
        space, most = self._space, count + len(ids)
        node, seed_of = (space.reserve(name, most + 1, keep=count) for name in ("node", "owner"))
        if 2 * most > len(self._table):
            self._table = _new_table(4 * most)
            _find(
                node[:count], seed_of[:count], space.num_nodes, self._table, node, seed_of, 0, np.empty(count, np.int32)
            )
        return _find(ids, owner, space.num_nodes, self._table, node, seed_of, count, local)


def _new_table(least: int) -> np.ndarray:
    return np.full(1 << max(int(least - 1).bit_length(), 6), -1, np.int64)


@kernel
def _find(ids, owners, num_nodes, table, node, owner, count, local):
    """Find nodes of each seed in a table of positions, new ones at its end; return the number of nodes."""
    mask = len(table) - 1
    for i in range(len(ids)):
        slot = np.int64(mix64(np.uint64(owners[i]) * np.uint64(num_nodes) + np.uint64(ids[i]))) & mask
        while True:
            found = table[slot]
            if found < 0:
                table[slot] = found = count
                node[count] = ids[i]
                owner[count] = owners[i]
                count += 1
                break
            if node[found] == ids[i] and owner[found] == owners[i]:
                break
            slot = (slot + 1) & mask
        local[i] = found
    return count
