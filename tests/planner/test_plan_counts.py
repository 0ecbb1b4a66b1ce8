"""Counts, widths and fan-outs that no plan can be made from."""

import numpy as np
import pytest

from lightning_gnnscale.planner import plan, predict_training
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize
from tests.says import said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_parts": 2.5}, "num_parts 1 2.5"),
        ({"num_parts": True}, "num_parts 1 True"),
        ({"num_devices": 1.5}, "num_devices 1 1.5"),
        ({"num_devices": "auto"}, "num_devices 1 'auto'"),
        ({"num_devices": [0, 1]}, "num_devices 1 [0, 1]"),
        ({"num_nodes": 10.0}, "num_nodes 0 10.0"),
        ({"batch_size": 0}, "batch_size 1 0"),
        ({"batch_size": "many"}, "batch_size 1 'many'"),
        ({"fanouts": 3}, "fanouts [25, 10] 3"),
        ({"fanouts": "5"}, "fanouts '5'"),
        ({"fanouts": [5, 0]}, "fanouts 1 -1 0 [5, 0]"),
        ({"fanouts": [2.5]}, "fanouts 2.5"),
        ({"hidden_channels": 0}, "hidden_channels 1 0"),
        ({"feature_dim": -1}, "feature_dim 0 -1"),
        ({"feature_row_bytes": float("nan")}, "feature_row_bytes 0 None nan"),
        ({"prefetch_batches": 0}, "prefetch_batches 1 0"),
        ({"embedding_dim": -4}, "embedding_dim 0 -4"),
    ],
)
def test_one_line_names_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=said(message)):
        plan(**{"num_nodes": 100, "num_edges": 400, **options})


def test_integers_of_numpy_and_all_neighbours_are_taken():
    result = plan(num_nodes=np.int64(100), num_edges=400, num_parts=np.int32(4), batch_size=8, fanouts=(-1, 5))
    assert result.num_parts == 4


def test_what_a_part_reaches_is_taken_as_measured():
    sizes = (RunSize(80_000, 2_000_000, 8, 2), BatchShape(feature_dim=100, batch_size=512, fanouts=(-1, -1)))
    guessed, more, all_rows = (predict_training(*sizes, part_rows=rows) for rows in (None, 60_000, 10**9))
    assert guessed == predict_training(*sizes, part_rows=30_000) < more < all_rows
    assert all_rows == predict_training(*sizes, part_rows=80_000)
    with pytest.raises(ValueError, match=said("part_rows 0 -1")):
        predict_training(*sizes, part_rows=-1)
