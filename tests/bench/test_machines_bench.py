import pytest

from benchmarks import machines
from tests.says import said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"set_ups": [[2, 1, 10]]}, "bench.set_ups [training, preparing, Mbit/s] [2, 1, 10]"),
        ({"set_ups": [[0, 0, 10]]}, "bench.set_ups [0, 0, 10]"),
        ({"set_ups": [[1, 0]]}, "bench.set_ups [1, 0]"),
        ({"set_ups": [[1, 0, 0.5]]}, "bench.set_ups [1, 0, 0.5]"),
        ({"epochs": 1}, "bench.epochs 2 1"),
    ],
)
def test_settings_out_of_range_are_told_in_one_line(tmp_path, given, words):
    with pytest.raises(ValueError, match=said(words)):
        machines.run(tmp_path, **given)
    assert not list(tmp_path.iterdir())
