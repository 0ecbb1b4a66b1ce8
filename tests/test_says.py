"""What `said` finds in a message, and what it does not."""

import re

import pytest

from tests.says import said


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("num_parts 1 0", True),
        ("num_parts 0 1", False),
        ("num_part 0", False),
        ("must got", True),
        ("(a.b) 'x'", True),
        ("(a-b) 'x'", False),
        ("1.0", False),
    ],
)
def test_words_are_whole_and_in_order(words, found):
    message = "num_parts must be at least 1,\ngot 0 of (a.b) and 'x', 10 in all"
    assert bool(re.search(said(words), message)) == found


def test_one_letter_says_nothing():
    with pytest.raises(AssertionError, match="any message"):
        said("a")
