"""A checkpoint with any damage is told or passed over, and never trusted."""

import numpy as np

import lightning_gnnscale as gs
from lightning_gnnscale.partitioner.graph_input import Checkpoint


def test_no_damaged_checkpoint_is_trusted(tmp_path):
    stream = gs.open_edge_stream(np.array([[0, 1, 2], [1, 2, 0]]))
    saved = Checkpoint(tmp_path / "state.npz", stream, {"method": "mine"}, 1)
    arrays = {"volume": np.arange(80), "nodes": np.arange(40).reshape(20, 2), "next_chunk": np.array([7])}
    saved.save("clustering", arrays)
    whole, sample, outcomes = saved.path.read_bytes(), np.random.default_rng(0), {"same": 0, "none": 0, "told": 0}
    headers = [whole.replace(b"(80,)", b"(70,)", 1), whole.replace(b"(20, 2)", b"(10, 2)", 1)]
    assert whole not in headers
    cuts = [whole[:end] for end in sample.integers(0, len(whole), 30)]
    flips = [bytearray(whole) for _ in range(400)]
    for data in flips:
        data[sample.integers(len(data))] ^= 1 << int(sample.integers(8))
    for data in [*headers, *cuts, *flips]:
        saved.path.write_bytes(data)
        try:
            found = saved.load()
        except ValueError as error:
            assert "\n" not in str(error) and str(saved.path) in str(error)
            outcomes["told"] += 1
            continue
        outcomes["none" if found is None else "same"] += 1
        if found is not None:  # a date in the archive, say
            assert found[0] == "clustering" and set(found[1]) == set(arrays)
            assert all(np.array_equal(found[1][name], arrays[name]) for name in arrays)
            assert data not in headers
    assert outcomes["none"] > 200 and outcomes["same"] > 5, outcomes
