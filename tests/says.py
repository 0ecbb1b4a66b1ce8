"""What a refusal has to say, whatever prose stands between: `match=said("num_parts 1 0")`."""

import re


def said(words: str) -> str:
    """Make a pattern of words, split at spaces, that a message holds in this order: a name, what is allowed, the value,
    the remedy. Words are whole: `1` is not found in `10`."""
    assert len(words.replace(" ", "")) > 1, f"{words!r} is in any message"
    return "(?s)" + ".*".join(_whole(word) for word in words.split())


def _whole(word: str) -> str:
    begins, ends = re.match(r"\w", word), re.search(r"\w$", word)
    return r"(?<!\w)" * bool(begins) + re.escape(word) + r"(?!\w)" * bool(ends)
