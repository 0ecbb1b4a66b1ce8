"""Heterogeneous graphs from files: descriptions that a shell can write."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..keywords import passes_on
from .graph_dataset import GraphDataset
from .hetero_graph import HeteroGraph
from .split import held_out

_EXAMPLE = '["author,writes,paper=writes.parquet"]'


@passes_on(HeteroGraph)
def load_hetero(
    edges: Mapping | Sequence,
    nodes: Mapping,
    edge_types: Sequence | None = None,
    to_undirected: bool = True,
    separate_reverses: bool | None = None,
    hold_out: Mapping | None = None,
    **options: Any,
) -> GraphDataset:
    """Return the data set of a description from files: the arguments of `HeteroGraph`, with paths instead of arrays.

    Args:
        edges: A list of "source,name,target=path"; an entry with more than a path is a mapping, {type:
            "author,writes,paper", edges: writes.csv, time: "writes.csv:year"}, with the keys edges, time, weight,
            features, labels, relation and reader. {type: "paper,*,paper", edges: all.csv, relation: kind} is one file
            of all edge types between two node types, with a column of their names. Or a mapping by edge type, as
            `HeteroGraph` takes it.
        nodes: By node type, their number, or a mapping: {paper: {nodes: "papers.csv:id", features: "papers.csv:x0,x1",
            labels: "papers.csv:label"}}, with the keys num_nodes, nodes (ids of your own), features, labels, masks,
            time and columns.
        edge_types: The edge types of {type: "*", edges: all.csv, relation: kind}, one file of any edge types.
        to_undirected: Whether models gather along both directions of each edge: reverses are added.
        separate_reverses: Whether reverses within one node type have an edge type of their own, as models need where
            the direction matters; None: they share it, which a warning says.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        options: Further arguments of `HeteroGraph`.

    Raises:
        ValueError: an entry of the list is of another form, or two entries have the same edge type.
    """
    options |= {"edge_types": edge_types, "to_undirected": to_undirected, "separate_reverses": separate_reverses}
    return held_out(HeteroGraph(nodes, _by_relation(edges), **options).dataset(), hold_out)


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
