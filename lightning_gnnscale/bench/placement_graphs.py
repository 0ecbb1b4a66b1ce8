"""The graphs that placements are compared on: public ones with their ids permuted, and power-law graphs."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..graph import CSC, build_csc
from ..rng import fold, permutation
from .power_law import power_law_graph

TRAIN_SHARE = 0.1  # of the nodes, where a graph has no published split
_SEED, _NODE_SALT, _TRAIN_SALT = 0, 11, 12
_GENERATED = re.compile(r"power_law:([\d_]+)(?::([\d_]+))?")
_ARCS_A_NODE = 20  # of generated graphs, unless said otherwise


@dataclass(frozen=True)
class Workload:
    """A graph and the training nodes whose batches read it.

    Attributes:
        name: in rows and tables.
        csc: in-neighbours; public graphs hold both directions of each edge once, without self-loops.
        train_nodes: (num_train,) int64, ascending.
    """

    name: str
    csc: CSC
    train_nodes: np.ndarray


def check_graphs(graphs: list[str], data_root: Path | None) -> None:
    """Raise ValueError, with what there is, unless each graph can be had."""
    for name in graphs:
        check_graph(name, _GENERATED, "power_law:NODES", data_root)


def check_graph(name: str, generated: re.Pattern, form: str, data_root: Path | None) -> None:
    """Raise ValueError, which names what is available, unless the graph is available.

    Args:
        name: Name of a public graph, or one that `generated` matches.
        generated: Pattern of the names of graphs that can be generated; `form` describes them in messages.
        data_root: Folder of public graphs, or None.
    """
    if generated.fullmatch(name) or (data_root is not None and (data_root / name / "graph.npz").is_file()):
        return
    there = [] if data_root is None else sorted(found.parent.name for found in data_root.glob("*/graph.npz"))
    where = data_root or "no folder of public graphs (set GNNSCALE_DATA or bench.data_root)"
    raise ValueError(f"bench.graphs: no graph {name!r} in {where}; there are {', '.join(there) or 'none'}, and {form}")


def load_workload(name: str, data_root: Path | None) -> Workload:
    """Load or generate a graph that `check_graphs` has accepted.

    Public graphs are made undirected, and their ids are permuted. Ids that follow the crawl would give ranges of ids,
    the naive placement, a locality that most data sets do not have.

    Args:
        name: Name of a public graph, or "power_law:NODES" or "power_law:NODES:ARCS"; the default is 20 arcs per node.
        data_root: Folder of public graphs.
    """
    generated = _GENERATED.fullmatch(name)
    if generated:
        num_nodes = int(generated[1])
        num_arcs = int(generated[2]) if generated[2] else _ARCS_A_NODE * num_nodes
        return Workload(name, power_law_graph(num_nodes, num_arcs, _SEED), _some_nodes(num_nodes))
    with np.load(data_root / name / "graph.npz") as arrays:
        edges = arrays["edge_index"].astype(np.int64)
        mask = arrays["train_mask"] if "train_mask" in arrays.files else None
        rows = [int(edges.max(initial=-1)) + 1, *(len(arrays[key]) for key in ("y", "train_mask") if key in arrays)]
    num_nodes = max(rows)
    new_id = permutation(num_nodes, fold(_SEED, _NODE_SALT))
    low, high = np.sort(edges, axis=0)
    pairs = np.unique((low * num_nodes + high)[low != high])
    first, second = new_id[np.stack(np.divmod(pairs, num_nodes))]
    csc = build_csc(np.concatenate([first, second]), np.concatenate([second, first]), num_nodes)
    train_nodes = _some_nodes(num_nodes) if mask is None else np.sort(new_id[np.flatnonzero(mask)])
    return Workload(name, csc, train_nodes)


def _some_nodes(num_nodes: int) -> np.ndarray:
    return np.sort(permutation(num_nodes, fold(_SEED, _TRAIN_SALT))[: max(1, round(TRAIN_SHARE * num_nodes))])
