"""The cases that the first tier keeps: every value, every pair, and what is left out is marked and still there."""

from itertools import combinations, product

import pytest

from tests.tiers import all_pairs, each_value, first

SIZES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [None, 1.5, 2.5, 3.5]}


def cases(decorate, **sizes):
    """(values, kept) of each case."""

    def test(**values):
        pass

    for name, values in sizes.items():
        test = pytest.mark.parametrize(name, values)(test)
    (mark,) = decorate(test).pytestmark
    assert list(mark.args[0]) == list(sizes)
    return [(case.values, not case.marks) for case in mark.args[1]]


@pytest.mark.parametrize(("decorate", "strength", "most"), [(each_value, 1, 4), (all_pairs, 2, 15)])
def test_kept_cases_cover_and_the_others_are_marked(decorate, strength, most):
    found = cases(decorate, **SIZES)
    assert [values for values, _ in found] == list(product(*SIZES.values()))
    kept = [values for values, keep in found if keep]
    for factors in combinations(range(4), strength):
        seen = {tuple(values[factor] for factor in factors) for values in kept}
        assert seen == set(product(*(list(SIZES.values())[factor] for factor in factors)))
    assert len(kept) <= most


def test_the_first_cases():
    assert [keep for _, keep in cases(first(2), a=[1, 2, 3])] == [True, True, False]


def test_marks_and_ids_are_kept():
    @first(1)
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("kind", [dict, int], ids=lambda kind: kind.__name__.upper())
    @pytest.mark.parametrize(("a", "b"), [pytest.param(1, 2, marks=pytest.mark.slow, id="slow one"), (3, [])])
    def test(a, b, kind):
        pass

    (other, mark) = test.pytestmark
    assert other.name == "filterwarnings" and list(mark.args[0]) == ["a", "b", "kind"]
    told = {case.id: sorted(mark.name for mark in case.marks) for case in mark.args[1]}
    slow = {"slow one-DICT": ["slow", "sweep"], "slow one-INT": ["slow", "sweep"]}
    assert told == {**slow, "3-b1-DICT": [], "3-b1-INT": ["sweep"]}


def test_what_cannot_be_combined_is_refused():
    @pytest.mark.parametrize("a", [1], indirect=True)
    def test(a):
        pass

    with pytest.raises(AssertionError, match="indirect"):
        first(1)(test)
