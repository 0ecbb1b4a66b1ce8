"""`gnnscale bench elastic` at a small size: schedules with kills, and the price of the order of sums."""

import pytest

from benchmarks import elastic
from tests.says import said


@pytest.mark.sweep
def test_schedules_train_the_weights_of_an_undisturbed_run(tmp_path):
    given = {"optimizers": ["momentum"], "precisions": ["32-true"], "schedules": 4, "max_processes": 3}
    found = elastic.run(tmp_path, **given, turns=1, price_processes=[2], price_nodes=400)
    assert [row["policy"] for row in found["schedules"]] == ["gradient_averaging", "model_averaging"]
    for row in found["schedules"]:
        assert (row["schedules"], row["digests"]) == (2, 1), row
        assert row["pieces"] > 2
    assert sum(row["kills"] for row in found["schedules"]) > 0
    (price,) = found["price"]
    assert price["ratio"] > 0 and price["cpu_s"] > 0


def test_weights_that_differ_are_counted():
    one = {"processes": "2 3", "kills": 1, "schedule": 1, "digest": "a"}
    rows = [one | {"schedule": 0, "processes": "1", "kills": 0}, one, one | {"digest": "a b", "schedule": 2}]
    found = elastic._summary(("gradient_averaging", "adam", "32-true"), rows)
    assert (found["schedules"], found["pieces"], found["kills"], found["digests"]) == (2, 4, 2, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policies": ["mean"]}, "bench.policies gradient_averaging mean"),
        ({"optimizers": ["sgd"]}, "bench.optimizers momentum sgd"),
        ({"schedules": -1}, "bench.schedules -1"),
        ({"max_processes": 9}, "bench.max_processes 8 9"),
        ({"price_nodes": 3}, "bench.price_nodes 100 3"),
    ],
)
def test_what_is_refused(tmp_path, given, words):
    with pytest.raises(ValueError, match=said(words)):
        elastic.run(tmp_path, **given)
