"""Which two columns of a table are the ends of its edges."""

_NAME_PAIRS = (
    ("src", "dst"),
    ("source", "target"),
    ("source", "destination"),
    ("from", "to"),
    ("from_id", "to_id"),
    ("fromnodeid", "tonodeid"),
    ("head", "tail"),
    ("u", "v"),
    ("node1", "node2"),
    ("node_1", "node_2"),
    ("id_1", "id_2"),
)


def known_pair(names: list[str]) -> tuple[int, int] | None:
    """Return the positions of the first pair of customary names (any case) among column names, or None."""
    lowered = [name.strip().lower() for name in names]
    for src, dst in _NAME_PAIRS:
        if src in lowered and dst in lowered:
            return lowered.index(src), lowered.index(dst)
    return None


def pick_columns(source: str, names: list[str], src: str | int | None, dst: str | int | None) -> tuple[int, int]:
    """Return the positions of the columns that hold src and dst.

    Args:
        source: for messages.
        names: the table's columns.
        src, dst: a name or a position each; None: a customary pair of names, else the only two columns.

    Raises:
        ValueError: there is no such column, or more than two and no customary names.
    """
    listed = ", ".join(names)
    if src is None and dst is None:
        pair = known_pair(names) or ((0, 1) if len(names) == 2 else None)
        if pair is None:
            raise ValueError(f"{source}: which columns are the edges? pass src= and dst=; columns: {listed}")
        return pair
    if src is None or dst is None:
        raise ValueError(f"{source}: pass both src= and dst=, or neither; columns: {listed}")
    places = []
    for option, wanted in (("src", src), ("dst", dst)):
        if isinstance(wanted, str) and wanted in names:
            places.append(names.index(wanted))
        elif isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(names):
            places.append(wanted)
        else:
            raise ValueError(f"{source}: {option}={wanted!r} is not a column; columns: {listed}")
    if places[0] == places[1]:
        raise ValueError(f"{source}: src and dst are the same column {src!r}")
    return places[0], places[1]
