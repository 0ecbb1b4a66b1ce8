"""Heterogeneous graphs: the door that makes a data set of node types and the edge types between them."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..edge_stream.open import listed_nodes
from ..edge_stream.options import CHUNK_EDGES
from ..edge_stream.relations import HeteroStream, IdsByNodeType
from ..errors import check_integer, check_mapping, is_integer, short
from ..foreign import is_csr
from ..graph import GraphSchema
from ..values import ALWAYS, same_clock
from .columns import masks_by_name, one_column, opened, read_rows, read_values
from .graph_dataset import GraphDataset, as_mask
from .hetero_edges import clocks_of_edges, described_edges, int64_times, joined_columns, keyed, opened_edges
from .split import held_out, random_split

_OF_NODES = ("num_nodes", "features", "labels", "masks", "time", "nodes", "columns")


def hetero_graph(
    nodes: Mapping[str, Any],
    edges: Mapping[Any, Any] | Sequence[Any],
    edge_types: Sequence[Any] | None = None,
    to_undirected: bool = True,
    separate_reverses: bool | None = None,
    remove_self_loops: bool = False,
    chunk_edges: int = CHUNK_EDGES,
    name: str = "typed",
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    split_seed: int = 0,
    num_classes: int | None = None,
    feature_storage: str | None = None,
    regression: bool = False,
    reader: Mapping[str, Any] | None = None,
    hold_out: Mapping[str, Any] | None = None,
) -> GraphDataset:
    """Return the data set of a graph with several node types or edge types.

    Everything may be an array, a tensor, a column, a table or a path, as for `GraphDataset` and `open_edge_stream`. The
    nodes of all node types are in one space, node type after node type.

    Args:
        nodes: By node type, its number of nodes, or a mapping: {paper: {nodes: "papers.csv:id", features:
            "papers.csv:x0,x1", labels: "papers.csv:label"}}, with the keys `num_nodes`; `features`, (num_nodes, dim),
            dense or sparse; `labels`, (num_nodes,) or (num_nodes, num_labels); `masks`, by name or a column of words;
            `time`, (num_nodes,) integers or dates; `columns`, further ones by name; `nodes`, the (num_nodes,) ids by
            which the edges name them, each once. Without `nodes` the edges name rows.
        edges: By edge type, "source,name,target" or a tuple of the three, the edges; or a mapping of `edges` and, one
            an edge, `time`, `weight`, `features`, `labels` (classes of edges, -1 = unknown); `reader`, options of the
            edge reader. Ids of either end are those of its node type. "source,*,target" stands for one source of all
            edge types between two node types, with `relation`, (num_edges,) names or a column of the edge file that
            holds them; "*" for any edge types, names or numbers of `edge_types`. Or a list of
            "source,name,target=path", where an entry with more than a path is a mapping: {type: "author,writes,paper",
            edges: writes.csv, time: "writes.csv:year"}.
        edge_types: The edge types of "*", in this order, before those of other keys of `edges`; None: the keys.
        to_undirected: Whether models gather along both directions of each edge: reverses are added, of an edge type
            within one node type to the edge type itself, of another as an edge type "target,rev_name,source".
        separate_reverses: Whether reverses within one node type have an edge type of their own, too, as models need
            where the direction matters; None: they share it, which a warning says.
        remove_self_loops: Whether edges from a node to itself are left out.
        chunk_edges: See `open_edge_stream`.
        name: Name of the data set.
        fractions, split_seed: Random split of the labelled nodes where no node type has masks; see `random_split`.
        num_classes: Number of classes; None: counted in the labels.
        feature_storage: See `write_partition_store`.
        regression: Whether labels are numbers, see `GraphDataset`.
        reader: Options of the readers of all edge files; an edge type's own `reader` comes first.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.

    Raises:
        ValueError: an unknown node type, edge type or key, rows that do not fit the nodes, or an entry of the list of
            another form.

    Cost: labels and masks of all nodes in memory. Times, weights, features and labels of the edges of several edge
        types are joined: above 64 MiB each in a file in the system's temporary folder.
    """
    check_mapping("nodes", nodes, '{"author": 100, "paper": {"features": "paper.npy"}}')
    check_mapping("reader", {} if reader is None else reader, "{separator: ';'}")
    check_integer("split_seed", split_seed)
    given = {
        str(node_type): keyed(f"nodes[{node_type!r}]", one, _OF_NODES, "num_nodes") for node_type, one in nodes.items()
    }
    listed, sources = described_edges(tuple(given), edges, edge_types)
    if to_undirected and separate_reverses is None:
        _tell_shared_reverses(listed)
    rows = {node_type: _read_nodes(f"nodes[{node_type!r}]", one) for node_type, one in given.items()}
    same_clock({f"times of {one}": rows[one]["time"] for one in rows} | clocks_of_edges(listed, sources))
    streams = [opened_edges(source, listed, rows, chunk_edges, reader or {}) for source in sources]
    stream = HeteroStream(
        streams,
        listed.with_reverses(bool(separate_reverses)) if to_undirected else listed,
        [one["num_nodes"] for one in rows.values()],
        to_undirected=to_undirected,
        chunk_edges=chunk_edges,
        remove_self_loops=remove_self_loops,
    )
    stream.node_ids = _ids_of(rows)
    labels, masks = _rows_of_all("labels", rows, np.nan if regression else -1), _masks(rows)
    if not masks and labels is not None:
        masks = random_split(labels, fractions, split_seed, regression)
    graph = GraphDataset(
        name=name,
        stream=stream,
        features={node_type: one["features"] for node_type, one in rows.items()},
        labels=labels,
        masks=masks,
        num_classes=num_classes,
        feature_storage=feature_storage,
        node_time=_rows_of_all("time", rows, ALWAYS),
        regression=regression,
        node_columns=_node_columns(rows),
        **joined_columns([one for _, one in sources], streams),
    )
    return held_out(graph, hold_out)


def _tell_shared_reverses(schema: GraphSchema) -> None:
    within = [",".join(name) for name in schema.edge_types if name[0] == name[2]]
    if within:
        more = f" and {len(within) - 1} more, each" if len(within) > 1 else ""
        warnings.warn(
            f"reverses of {within[0]}{more} share its edge type: separate_reverses=True gives them one of their "
            "own, which a model needs where the direction matters; False keeps this and says nothing",
            stacklevel=3,
        )


def _read_nodes(where: str, given: dict) -> dict:
    """Return what is known of a node type with its rows read and their number, on which all given values must agree."""
    found, counts = dict(given), {}
    if given["num_nodes"] is not None:
        if not is_integer(given["num_nodes"]):
            raise ValueError(
                f"{where} must be a number of nodes, or a mapping such as {{nodes: x.csv:id, "
                f"features: x.csv:a,b}}, got {given['num_nodes']!r}"
            )
        counts["num_nodes"] = int(given["num_nodes"])
    for name in ("features", "labels", "time"):
        if given[name] is not None:
            told = f"{where}.{name}"
            found[name] = read_rows(told, given[name]) if name == "features" else read_values(told, given[name], False)
            counts[name] = _num_rows(told, found[name])
    if given["nodes"] is not None:
        found["nodes"] = listed_nodes(given["nodes"], f"{where}.nodes")
        counts["nodes"] = len(found["nodes"])
    if not counts:
        raise ValueError(f"{where}: how many are there? give num_nodes, features, labels, time or nodes")
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"{where}: numbers of nodes differ: {told}; give each one row a node")
    found["num_nodes"] = next(iter(counts.values()))
    return found


def _num_rows(where: str, rows: Any) -> int:
    shape = rows.shape if is_csr(rows) else np.shape(opened(rows))
    if not shape:
        raise ValueError(f"{where} must have a row for each node, got {short(rows)}")
    return int(shape[0])


def _ids_of(rows: Mapping[str, dict]) -> IdsByNodeType | None:
    """Return the user's ids of the nodes; None where all are row numbers."""
    ids, sizes = ([one[key] for one in rows.values()] for key in ("nodes", "num_nodes"))
    return IdsByNodeType(ids, sizes) if any(one is not None for one in ids) else None


def _node_columns(rows: Mapping[str, dict]) -> dict[str, dict[str, Any]]:
    """Return the further columns by name, and each by node type."""
    found: dict[str, dict[str, Any]] = {}
    for node_type, given in rows.items():
        columns = {} if given["columns"] is None else given["columns"]
        check_mapping(f"nodes[{node_type!r}].columns", columns, '{"degree": "degree.npy"}')
        for name, values in columns.items():
            found.setdefault(name, {})[node_type] = values
    return found


def _rows_of_all(name: str, rows: Mapping[str, dict], missing: float) -> np.ndarray | None:
    """Return (num_nodes,) values of all node types, `missing` for those without; None if no type has any."""
    given = {node_type: one[name] for node_type, one in rows.items() if one[name] is not None}
    if not given:
        return None
    if name == "time":
        given = {node_type: int64_times(f"nodes[{node_type!r}].time", times) for node_type, times in given.items()}
    given = {node_type: np.asarray(one_column(values)) for node_type, values in given.items()}
    shapes = {values.shape[1:] for values in given.values()}
    if len(shapes) > 1:
        raise ValueError(f"{name}: node types have {sorted(shapes)} columns: give all of them as many")
    least = np.int64 if name == "time" else np.float32 if np.isnan(missing) else np.int8
    dtype = np.result_type(*(values.dtype for values in given.values()), least)
    places, num_nodes = _places(rows)
    out = np.full((num_nodes, *shapes.pop()), missing, dtype)
    for node_type, values in given.items():
        out[places[node_type]] = values
    return out


def _masks(rows: Mapping[str, dict]) -> dict[str, np.ndarray]:
    """Return masks over the nodes of all node types; a node type without them is in none."""
    masks: dict[str, np.ndarray] = {}
    places, num_nodes = _places(rows)
    for node_type, given in rows.items():
        for name, mask in masks_by_name(given["masks"]).items():
            whole = masks.setdefault(name, np.zeros(num_nodes, bool))
            where = f"nodes[{node_type!r}].masks[{name!r}]"
            mask = np.asarray(read_values(where, mask, keep_path=False))
            whole[places[node_type]] = as_mask(where, mask, given["num_nodes"])
    return masks


def _places(rows: Mapping[str, dict]) -> tuple[dict[str, slice], int]:
    """Return where the nodes of each node type are among those of all, and the number of all."""
    ends = list(itertools.accumulate((one["num_nodes"] for one in rows.values()), initial=0))
    return {node_type: slice(*pair) for node_type, pair in zip(rows, itertools.pairwise(ends), strict=True)}, ends[-1]
