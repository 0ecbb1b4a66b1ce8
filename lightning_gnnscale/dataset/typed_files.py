"""Heterogeneous graphs from files: descriptions that a shell can write."""

from collections.abc import Mapping, Sequence
from typing import Any

from .graph_dataset import GraphDataset
from .hetero_graph import HeteroGraph
from .split import held_out

_EXAMPLE = '["author,writes,paper=writes.parquet"]'


def load_hetero(edges: Mapping | Sequence, hold_out: Mapping | None = None, **options: Any) -> GraphDataset:
    """Return the data set of a description from files: the arguments of `HeteroGraph`, with paths instead of arrays.

    Args:
        edges: As of `HeteroGraph`; or a list of "source,name,target=path", or of mappings with the edge type as `type`
            beside the keys of `HeteroGraph`: the command line takes no keys in quotes.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        options: Arguments of `HeteroGraph`.

    Raises:
        ValueError: an entry of the list is of another form, or two entries have the same edge type.
    """
    return held_out(HeteroGraph(edges=_by_relation(edges), **options).dataset(), hold_out)


def _by_relation(edges: Any) -> Mapping[Any, Any]:
    """Return the edges by edge type, also for a list."""
    if isinstance(edges, Mapping):
        return edges
    if isinstance(edges, str):
        edges = [edges]
    found: dict[str, Any] = {}
    for entry in edges:
        name, given = _entry(entry)
        if name in found:
            raise ValueError(f"edges: {name} is listed twice: join its files, or give a folder of Parquet")
        found[name] = given
    return found


def _entry(entry: Any) -> tuple[str, Any]:
    """Return the edge type of an entry of the list, and the description of its edges."""
    if isinstance(entry, Mapping) and "type" in entry:
        return str(entry["type"]), {key: value for key, value in entry.items() if key != "type"}
    name, equals, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
    if not (name.strip() and equals and path.strip()):
        raise ValueError(f'edges: {entry!r} is not "source,name,target=path", as in {_EXAMPLE}, and has no type=')
    return name.strip(), path.strip()
