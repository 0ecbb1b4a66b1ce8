"""Another library's loader in its own process and Python: run as a script, it imports nothing of this package.

    python peer_worker.py pyg|graphbolt FOLDER OPTIONS

FOLDER holds indptr.npy, indices.npy (CSC), features.npy and seeds.npy. For a heterogeneous graph it holds kinds.json
and, instead of the CSC, edges-N.npy: the (2, num_edges) edges of edge type N, sorted by target; features and seeds are
those of papers. OPTIONS is JSON with fanouts, batch_size and, where features stay in their memory-mapped file, map.
Answers are lines of JSON: first the versions of what it runs; then, for each line on its standard input (a number of
workers and one of threads), the seeds and the feature rows of one epoch. It ends where its input does.
"""

import importlib.metadata
import json
import os
import sys
import warnings

if __name__ == "__main__":
    del sys.path[0]  # the folder of this script: its names must hide none of the peer's

import numpy as np


def main(kind, folder, options):
    """Answer as the head of this file describes; `options` is a dict."""
    # What the library prints belongs to the error stream: answers have the pipe for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch

    heterogeneous, typed = os.path.join(folder, "kinds.json"), None
    if os.path.exists(heterogeneous):
        with open(heterogeneous) as file:
            typed = json.load(file)
    graph = ("indptr", "indices") if typed is None else [f"edges-{n}" for n in range(len(typed["edge_types"]))]
    names = (*graph, "features", "seeds")
    mapped = {"features": "r"} if options.get("map") else {}
    arrays = {
        name: torch.from_numpy(np.load(os.path.join(folder, f"{name}.npy"), mmap_mode=mapped.get(name)))
        for name in names
    }
    make, packages = {"pyg": (pyg, PYG), "graphbolt": (graphbolt, GRAPHBOLT)}[kind]
    if typed is not None:
        make = pyg_by_node_type(typed)
    make_epoch = make(torch, arrays, options["fanouts"], options["batch_size"])
    print(json.dumps({"versions": versions(packages)}), file=answers)
    epochs = {}
    for line in sys.stdin:
        workers, threads = map(int, line.split())
        torch.set_num_threads(threads)
        if workers not in epochs:
            epochs[workers] = make_epoch(workers)
        seeds = rows = 0
        for batch_seeds, batch_rows in epochs[workers]():
            seeds += batch_seeds
            rows += batch_rows
        print(json.dumps({"seeds": seeds, "rows": rows}), file=answers)


PYG = ("torch", "torch-geometric", "torch-sparse", "pyg-lib")
GRAPHBOLT = ("torch", "dgl")


def versions(packages):
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def pyg(torch, arrays, fanouts, batch_size):
    """Return a function of a number of workers; what that returns yields (seeds, nodes) of each batch."""
    from torch_geometric.data import Data

    num_nodes = len(arrays["features"])
    target = torch.repeat_interleave(torch.arange(num_nodes), arrays["indptr"].diff())
    data = Data(
        x=arrays["features"],
        edge_index=torch.stack([arrays["indices"].long(), target]),
        y=torch.arange(num_nodes) % 47,
        train_mask=torch.ones(num_nodes, dtype=torch.bool),
    )

    return _pyg_epochs(data, fanouts, arrays["seeds"], batch_size, lambda batch: (batch.batch_size, len(batch.x)))


def pyg_by_node_type(typed):
    """Return what `pyg` returns, for a heterogeneous graph."""

    def make(torch, arrays, fanouts, batch_size):
        from torch_geometric.data import HeteroData

        data = HeteroData()
        for kind, count in typed["counts"].items():
            data[kind].num_nodes = count
        data["paper"].x = arrays["features"]
        for number, edge_type in enumerate(typed["edge_types"]):
            data[tuple(edge_type)].edge_index = arrays[f"edges-{number}"]

        def count(batch):
            return batch["paper"].batch_size, sum(store.num_nodes for store in batch.node_stores)

        return _pyg_epochs(data, fanouts, ("paper", arrays["seeds"]), batch_size, count)

    return make


def _pyg_epochs(data, fanouts, seeds, batch_size, count):
    from torch_geometric import typing
    from torch_geometric.loader import NeighborLoader

    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        raise SystemExit("neither torch-sparse nor pyg-lib is installed there")

    def make_epoch(workers):
        loader = NeighborLoader(
            data,
            fanouts,
            seeds,
            batch_size=batch_size,
            shuffle=True,
            is_sorted=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        return lambda: map(count, loader)

    return make_epoch


def graphbolt(torch, arrays, fanouts, batch_size):
    """Return what `pyg` does."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import dgl.graphbolt as gb

    num_nodes = len(arrays["features"])
    graph = gb.fused_csc_sampling_graph(arrays["indptr"], arrays["indices"].long())
    tables = {"x": arrays["features"], "y": (torch.arange(num_nodes) % 47).unsqueeze(1)}
    store = gb.BasicFeatureStore({("node", None, name): gb.TorchBasedFeature(table) for name, table in tables.items()})
    items = gb.ItemSet(arrays["seeds"], names="seed_nodes")

    def make_epoch(workers):
        pipe = gb.ItemSampler(items, batch_size=batch_size, shuffle=True)
        pipe = pipe.sample_neighbor(graph, fanouts[::-1])  # named from the input layer to the output
        pipe = pipe.fetch_feature(store, node_feature_keys=["x", "y"])
        loader = gb.DataLoader(pipe, num_workers=workers)
        return lambda: ((len(batch.seed_nodes), len(batch.node_features["x"])) for batch in loader)

    return make_epoch


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
