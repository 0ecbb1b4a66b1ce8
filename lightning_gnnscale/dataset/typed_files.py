"""Graphs with kinds and relations from files: descriptions as a shell can write them."""

from collections.abc import Mapping, Sequence
from typing import Any

from .graph_dataset import GraphDataset
from .split import held_out
from .typed_graph import TypedGraph

_EXAMPLE = '["author,writes,paper=writes.parquet"]'


def load_typed(edges: Mapping | Sequence, hold_out: Mapping | None = None, **options: Any) -> GraphDataset:
    """Return the data set of a description from files: the arguments of `TypedGraph`, paths in place of arrays.

    Args:
        edges: As of `TypedGraph`; or a list of "source,name,target=path", or of mappings with the relation as `type`
            beside what `TypedGraph` takes of one: keys in quotes are none of the command line's.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        options: Arguments of `TypedGraph`.

    Raises:
        ValueError: an entry of the list is of another form, or a relation stands in two of them.
    """
    return held_out(TypedGraph(edges=_by_relation(edges), **options).dataset(), hold_out)


def _by_relation(edges: Any) -> Mapping[Any, Any]:
    """Return the edges by relation, of a list too."""
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
    """Return the relation of an entry of the list, and what is known of its edges."""
    if isinstance(entry, Mapping) and "type" in entry:
        return str(entry["type"]), {key: value for key, value in entry.items() if key != "type"}
    name, equals, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
    if not (name.strip() and equals and path.strip()):
        raise ValueError(f'edges: {entry!r} is not "source,name,target=path", as in {_EXAMPLE}, and has no type=')
    return name.strip(), path.strip()
