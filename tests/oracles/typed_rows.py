"""A small graph whose node types have features of their own, and its rows by plain indexing."""

import numpy as np
import scipy.sparse as sp

import lightning_gnnscale as gs

COUNTS = {"author": 80, "paper": 150, "inst": 10, "topic": 30}  # narrow, wide, without features, sparse or narrow
WIDTHS = {"author": 3, "paper": 24, "topic": 12}


def description(sparse: bool = True) -> gs.GraphDataset:
    rng = np.random.default_rng(0)
    ends = [("author", "writes", "paper", 400), ("paper", "cites", "paper", 900), ("author", "at", "inst", 100)]
    ends.append(("paper", "about", "topic", 300))
    edges = {
        (a, name, b): np.unique(np.stack([rng.integers(0, COUNTS[a], n), rng.integers(0, COUNTS[b], n)]), axis=1)
        for a, name, b, n in ends
    }
    nodes = {node_type: {"num_nodes": count} for node_type, count in COUNTS.items()}
    nodes["author"]["features"] = rng.random((COUNTS["author"], WIDTHS["author"]), np.float32)
    nodes["paper"] |= {
        "features": rng.random((COUNTS["paper"], WIDTHS["paper"]), np.float32),
        "labels": rng.integers(0, 5, COUNTS["paper"]),
        "masks": {"train": rng.random(COUNTS["paper"]) < 0.6},
    }
    topics = sp.random_array((COUNTS["topic"], WIDTHS["topic"]), density=0.3, rng=rng, dtype=np.float32).tocsr()
    nodes["topic"]["features"] = topics if sparse else topics.toarray()
    return gs.hetero_graph(nodes, edges)


def write_typed(root, quantised: bool | str = False, num_parts: int = 3, **options) -> gs.PartitionStore:
    """Write a store of the graph; quantised: rows are stored as int8, or so, and no node type's are sparse."""
    options |= {"feature_storage": "int8" if quantised is True else quantised} if quantised else {}
    dataset = description(sparse=not quantised)
    p = gs.partition(dataset.stream, "random", num_parts, seed=1, evaluate=False)
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    return gs.write_partition_store(root, dataset.stream, p, **rows, **options)


def indexed(store, nodes) -> list[list[bytes]]:
    """The row of each node by node type, one at a time, from the store's own tables."""
    all_node_types = store.node_type(np.arange(store.num_nodes))
    found = [[] for _ in store.schema.node_types]
    for node in np.asarray(nodes).tolist():
        node_type = int(all_node_types[node])
        table, row = store.features.tables[node_type], np.array([np.count_nonzero(all_node_types[:node] == node_type)])
        if table is not None:
            rows = table.read(row)
            found[node_type].append((rows.dense() if table.is_sparse else rows).tobytes())
    return found


def as_rows(gathered) -> list[list[bytes]]:
    """What `indexed` gives, of `TypedRows` or `RowsByNodeType`."""
    found = []
    for table in gathered.tables:
        rows = [] if table is None else np.asarray(table.dense() if hasattr(table, "indptr") else table)
        found.append([row.tobytes() for row in rows])
    return found
