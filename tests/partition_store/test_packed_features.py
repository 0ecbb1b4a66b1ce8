"""Packed halo rows: each part reads its own copy of its halo, and everything else from its owner."""

import numpy as np
import pytest

from lightning_gnnscale.partition_store import CSRFeatures, DenseFeatures, PackedFeatures, features_of_part
from tests.says import said

PART_OFFSETS = np.array([0, 6, 6, 10, 20])  # the second part is empty
HALOS = [[6, 9, 15], [], [], [0, 5, 7, 9]]
HALO_OFFSETS = np.cumsum([0, *map(len, HALOS)])
HALO_NODES = np.concatenate([np.array(halo, np.int32) for halo in HALOS])
# An owner's row of node i holds i, a packed one 100 (part + 1) + i: a row says where it comes from.
OWNED = np.stack([np.arange(20), np.arange(20)], axis=1).astype(np.int16)
PACKED = np.concatenate([100 * (part + 1) + OWNED[halo] for part, halo in enumerate(HALOS)])


def dense() -> PackedFeatures:
    return PackedFeatures(DenseFeatures(OWNED), DenseFeatures(PACKED), PART_OFFSETS, HALO_OFFSETS, HALO_NODES)


def sparse_rows(rows: np.ndarray) -> CSRFeatures:
    """Row i as i % 3 nonzeros of its value: lengths differ, and some rows are empty."""
    lengths = rows[:, 0] % 3
    columns = np.concatenate([np.arange(0), *map(np.arange, lengths)]).astype(np.int32)
    return CSRFeatures(np.concatenate([[0], np.cumsum(lengths)]), columns, np.repeat(rows[:, 0], lengths), 4)


def sparse() -> PackedFeatures:
    return PackedFeatures(sparse_rows(OWNED), sparse_rows(PACKED), PART_OFFSETS, HALO_OFFSETS, HALO_NODES)


def rows_by_hand(part: int, nodes: np.ndarray) -> np.ndarray:
    return np.array([100 * (part + 1) + node if node in HALOS[part] else node for node in nodes], np.int16)


@pytest.mark.parametrize("part", range(4))
def test_a_part_reads_packed_rows_of_its_halo(part):
    rng = np.random.default_rng(part)
    for num in (0, 1, 7, 60):
        nodes = rng.integers(0, 20, num)
        expected, table = rows_by_hand(part, nodes), features_of_part(dense(), part)
        np.testing.assert_array_equal(table.read(nodes), np.stack([expected, expected], axis=1))
        space = np.full((num, 2), -1, np.int16)
        assert table.read(nodes, space) is space
        np.testing.assert_array_equal(space[:, 1], expected)
        found = features_of_part(sparse(), part).read(nodes)
        there = sparse_rows(expected[:, None])
        for name in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(found, name), getattr(there, name))


def test_without_a_part_rows_come_from_their_owners():
    table, nodes = dense(), np.array([15, 0, 9, 15])
    np.testing.assert_array_equal(table.read(nodes), OWNED[nodes])
    assert (table.num_rows, table.dim, table.dtype, table.is_sparse) == (20, 2, np.int16, False)
    np.testing.assert_array_equal(sparse().indptr, sparse_rows(OWNED).indptr)


def test_ids_outside_of_the_graph_are_refused():
    with pytest.raises(ValueError, match=said("ids [0, 20) 3 20")):
        features_of_part(dense(), 0).read(np.array([3, 20]))


def test_other_tables_serve_every_part():
    table = DenseFeatures(OWNED)
    assert features_of_part(table, 2) is table
