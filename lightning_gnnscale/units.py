"""Bytes written for people, and sizes written by people read back."""

import re

_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def format_bytes(num_bytes: float) -> str:
    """Return a size with three significant digits, for example '1.53 GiB'."""
    size, suffix = float(num_bytes), _SUFFIXES[0]
    for candidate in _SUFFIXES:
        suffix = candidate
        if abs(size) < 1024 or candidate == _SUFFIXES[-1]:
            break
        size /= 1024
    digits = 0 if suffix == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {suffix}"


def parse_bytes(size: int | float | str | None, name: str = "size") -> int | None:
    """Read a size: a number of bytes, or text like '24GiB', '500 MB', '8g' (a bare letter is binary).

    Raises:
        ValueError: not a size, or negative; the message names `name`.
    """
    if size is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if not match or match[2] not in _FACTORS:
        raise ValueError(f"{name} must be bytes or a size like 24GiB, 500MB, 8g; got {size!r}")
    return int(float(match[1]) * _FACTORS[match[2]])


def format_seconds(seconds: float) -> str:
    """Return a duration as '0.42 s', '12.3 s' or '4 min 05 s'."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
