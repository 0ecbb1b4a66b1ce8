"""What a worker holds of a part."""

import numpy as np
from ray_world import WORLD, make_loader

from lightning_gnnscale.remote.ray_worker import hold_part


def test_a_held_part_reads_packed_rows_of_its_halo():
    part = 3
    held = hold_part(make_loader()._stager(part), WORLD.packed_features())
    nodes = held.staged.graph.nodes
    assert held.staged.graph.num_halo
    np.testing.assert_array_equal(held.rows.gather(held.locate(nodes)), WORLD.rows_read(part, nodes))
