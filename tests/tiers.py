"""Which cases of a test the first tier runs: decorators that stand above a test's `parametrize`s, and mark the others.

`make test` runs what is not marked `sweep`, `make test-all` every case.
"""

from itertools import combinations, product

import pytest


def all_pairs(test):
    """Keep cases that hold every pair of values of two `parametrize`s: a fault of two settings together is seen."""
    return _keep(test, 2)


def each_value(test):
    """Keep cases that hold every value of every `parametrize` once: where settings do not act on one another."""
    return _keep(test, 1)


def first(count: int):
    """Keep the first cases: those that are listed first, or of whose kind the others are."""

    def decorate(test):
        return _combine(test, lambda sizes, free: set(free[:count]))

    return decorate


def _keep(test, strength: int):
    def cover(sizes, free):
        """Choose cases, the one that holds most of what is still missing first."""
        factors = list(combinations(range(len(sizes)), min(strength, len(sizes))))
        held = {case: {(of, tuple(case[factor] for factor in of)) for of in factors} for case in free}
        missing, kept = set().union(*held.values()), set()
        while missing:
            # Of cases that hold as much, one along the diagonal: values of every factor change from case to case.
            best = max(free, key=lambda case: (len(held[case] & missing), -max(case) + min(case)))
            kept.add(best)
            missing -= held[best]
        return kept

    return _combine(test, cover)


def _combine(test, choose):
    """Make one `parametrize` of all that stand below, and mark the cases that are not chosen.

    Args:
        choose: called with the number of values of each `parametrize` and the cases, tuples of places in them, that no
            mark of their own keeps out of the first tier; returns those to keep.
    """
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    lists = [_values(mark) for mark in marks]
    cases = list(product(*(range(len(values)) for values in lists)))
    chosen = {case: [values[place] for values, place in zip(lists, case, strict=True)] for case in cases}
    free = [case for case in cases if not any(marks for _, marks, _ in chosen[case])]
    kept = choose([len(values) for values in lists], free)
    rows = [
        pytest.param(
            *(value for values, _, _ in parts for value in values),
            marks=[*(mark for _, marks, _ in parts for mark in marks), *([] if case in kept else [pytest.mark.sweep])],
            id="-".join(name for _, _, name in parts),
        )
        for case, parts in chosen.items()
    ]
    names = [name for mark in marks for name in _names(mark)]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    return pytest.mark.parametrize(names, rows)(test)


def _names(mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _values(mark) -> list[tuple[tuple, list, str]]:
    """The values of one `parametrize`, each with its marks and its id."""
    assert set(mark.kwargs) <= {"ids"}, "indirect and scope are not combined"
    names, ids, rows = _names(mark), mark.kwargs.get("ids"), []
    given = None if ids is None or callable(ids) else list(ids)
    for place, row in enumerate(mark.args[1]):
        told = isinstance(row, type(pytest.param()))
        values = tuple(row.values) if told else (tuple(row) if len(names) > 1 else (row,))
        name = (row.id if told else None) or (str(given[place]) if given else None)
        if name is None:
            parts = [_id(value, each, place, ids) for each, value in zip(names, values, strict=True)]
            name = "-".join(parts)
        rows.append((values, list(row.marks) if told else [], name))
    return rows


def _id(value, name: str, place: int, ids) -> str:
    told = ids(value) if callable(ids) else None
    if told is not None:
        return str(told)
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    return getattr(value, "__name__", f"{name}{place}")
