"""Row gathers as plain indexing."""

import numpy as np

from .tiers import unpack_places


def gather_rows_reference(table: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return table[rows]; arguments as for `gather_rows`."""
    gathered = np.asarray(table)[rows]
    if out is None:
        return gathered
    out[...] = gathered
    return out


def gather_tiers_reference(places, nodes, tables, out, reads=None):
    """Write the row of each node, found in one of several arrays; arguments as for `gather_tiers`."""
    table, row = unpack_places(places if nodes is None else places[nodes])
    for number, rows in enumerate(tables.tables):
        if rows is None or len(rows) == 0:
            continue
        here = table == number
        out[here] = rows[row[here]]
        if reads is not None:
            reads[number] += here.sum()
    return out
