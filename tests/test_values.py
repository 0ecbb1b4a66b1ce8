"""Integers and times are taken exactly or refused with the row: one rule for all doors."""

import datetime

import numpy as np
import pytest
import torch

from lightning_gnnscale.values import exact_integers, exact_times, same_clock
from tests.says import said

LARGE = 2**63
NS = 1_577_836_800_000_000_000  # 2020-01-01
DAY = [datetime.date(2020, 1, 1)]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_of_any_width_are_the_same_numbers(dtype):
    values = np.array([0, 1, np.iinfo(dtype).max if dtype != "uint64" else LARGE - 1], dtype)
    assert exact_integers("ids", values, 0).tolist() == values.tolist()
    assert exact_times("times", values).tolist() == values.tolist()
    assert exact_integers("ids", values, 0).dtype == np.int64


@pytest.mark.parametrize(
    "values",
    [
        [3, 4],
        np.array([3, 4], object),
        torch.tensor([3, 4], dtype=torch.int16),
        np.array([3, 4], ">i4"),
        [3, np.int8(4)],
    ],
)
def test_lists_objects_tensors_and_other_byte_orders_are_taken(values):
    assert exact_integers("ids", values).tolist() == [3, 4]


@pytest.mark.parametrize(
    "values, message",
    [
        (np.array([1, LARGE], np.uint64), "row 1 9223372036854775808 int64"),
        ([1, LARGE], "row 1 9223372036854775808 int64"),
        (np.array([5, -2]), "row 1 -2 0"),
        (np.array([[0, 1], [2, -2]]), "row 1 -2 0"),
        (np.array([0.5]), "integers float64 convert"),
        (np.array([True]), "must be integers, got bool"),
        (np.array([1 + 0j]), "integers complex128"),
        (["a"], "integers <U1"),
        ([2**70], "must be integers, got object"),
        ([[1], [1, 2]], "numpy cannot hold it"),
        (torch.ones(2, dtype=torch.bfloat16), "integers float32"),
        (np.array([1], "M8[s]"), "integers datetime64"),
    ],
)
def test_what_is_no_id_is_refused_in_one_line(values, message):
    with pytest.raises(ValueError, match=said(message)) as error:
        exact_integers("ids", values, 0)
    assert str(error.value).startswith("ids") and "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [0.5, np.nan, np.inf, -np.inf, 2.0**63, 1e300])
def test_floats_are_taken_where_all_are_whole(bad):
    assert exact_integers("ids", np.array([[3.0], [4.0]]), whole_floats=True).tolist() == [[3], [4]]
    with pytest.raises(ValueError, match=said("ids 2")):
        exact_integers("ids", np.array([1, 2, bad]), unit="link", whole_floats=True)


def test_a_bad_value_beyond_the_first_block_is_named_by_its_row(monkeypatch):
    monkeypatch.setattr("lightning_gnnscale.values._BLOCK", 4)
    values = np.zeros((2, 10), np.int64)
    values[1, 7] = 9
    with pytest.raises(ValueError, match=said("row 7 9 [0, 5)")):
        exact_integers("ids", values, 0, 4)
    with pytest.raises(ValueError, match=said("row 7 0.5")):
        exact_integers("ids", np.where(values == 9, 0.5, 0), whole_floats=True)


@pytest.mark.parametrize("unit", ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns"])
def test_dates_of_any_unit_are_the_same_nanoseconds(unit):
    given = np.array(["2020-01-01"], "M8[D]").astype(f"M8[{unit}]")
    exact = exact_times("times", given)
    assert exact.dtype == np.int64 and (exact == given.astype("M8[ns]").view(np.int64)).all()
    assert unit == "W" or exact.tolist() == [NS]


def test_objects_of_dates_are_dates():
    assert exact_times("times", DAY).tolist() == [NS]
    assert exact_times("times", np.array([datetime.datetime(2020, 1, 1)], object)).tolist() == [NS]


@pytest.mark.parametrize(
    "values, message",
    [
        (np.array([1, LARGE], np.uint64), "row 1 9223372036854775808 int64"),
        (np.array([0.1, 0.25]), "seconds dates float64 round"),
        (np.array([1.0, np.nan]), "float64 (NaN) 1"),
        (np.array([1, "NaT"], "M8[s]"), "row 1 (NaT)"),
        (np.array(["2020", "3000"], "M8[s]"), "row 1 3000-01-01T00:00:00 1677 2262"),
        (np.array([1], "M8[ps]"), "row 0"),
        (np.array([1], "m8[s]"), "timedelta64 dates durations"),
        (np.array([True]), "got bool"),
    ],
)
def test_times_that_would_change_are_refused(values, message):
    with pytest.raises(ValueError, match=said(message)) as error:
        exact_times("times", values)
    assert "\n" not in str(error.value)


def test_dates_beside_numbers_are_refused():
    dates, numbers = np.array([1], "M8[s]"), np.array([1])
    same_clock({"node_time": dates, "edge_time": np.array([1], "M8[D]"), "other": None})
    same_clock({"node_time": numbers, "edge_time": numbers})
    with pytest.raises(ValueError, match=said("node_time edge_time")):
        same_clock({"node_time": dates, "edge_time": numbers})


def test_what_is_exact_already_is_not_copied():
    values = np.arange(4)
    assert exact_integers("ids", values) is values and exact_times("times", values) is values
    dates = values.astype("M8[ns]")
    assert np.shares_memory(exact_times("times", dates), dates)
