"""An updated store has the bytes of one that is written from the whole new graph with the same parts."""

import numpy as np
import pytest

from lightning_gnnscale.dataset.graph_change import GraphChange
from lightning_gnnscale.edge_stream import NodeIds, open_edge_stream
from lightning_gnnscale.partition_store import update_store, write_partition_store
from tests.partition_store.small_graphs import TINY, Given

OWN = ("node_changes.npy", "parent_nid.npy")  # of an update alone


class Grown:
    """A random graph, a change of it, and the graph that comes out, in plain Python."""

    def __init__(self, seed, names=None, removes=True, adds=True, to_undirected=False, columns="all", parallel=False):
        rng = self.rng = np.random.default_rng(seed)
        self.to_undirected, self.num_parts = to_undirected, 3
        num_old, num_new = 40, 7 if adds else 0
        self.ids = np.arange(num_old + num_new) if names is None else np.array(names(num_old + num_new))
        self.old, self.new = np.arange(num_old), np.arange(num_old, num_old + num_new)
        self.part_id = rng.integers(0, self.num_parts, num_old)
        self.edges = self._edges(rng, 0, num_old, 200, parallel)
        present = {tuple(pair) for pair in self.edges.T.tolist()}
        self.removed_nodes = rng.choice(num_old, 4, replace=False) if removes else np.arange(0)
        last = num_old + num_new
        added = [
            pair
            for pair in self._edges(rng, 0, last, 60, parallel).T.tolist()
            if not set(pair) & set(self.removed_nodes)
        ]
        self.added = np.array(added, np.int64).reshape(-1, 2).T
        self.removed_edges = self.edges[:, rng.choice(200, 15, replace=False)] if removes else np.empty((2, 0), int)
        assert present
        self.changed = rng.choice(np.setdiff1d(self.old, self.removed_nodes), 6, replace=False)
        self.nodes = rng.permutation(np.concatenate([self.changed, self.new]))
        self.columns = self._columns(columns, last, 200 + self.added.shape[1])
        self.before = {name: rows.copy() for name, rows in self.columns.items()}
        for name, rows in self.before.items():
            if not name.startswith("edge_"):
                rows[self.changed] = rows[(self.changed + 1) % num_old]

    @staticmethod
    def _edges(rng, first, last, count, parallel):
        pairs = rng.integers(first, last if not parallel else 8, (2, count))
        return pairs

    def _columns(self, wanted, num_nodes, num_edges):
        rng = self.rng
        found = {
            "features": rng.random((num_nodes, 4)).astype(np.float32),
            "labels": rng.integers(-1, 5, num_nodes),
            "node_time": rng.integers(0, 100, num_nodes),
            "edge_weight": rng.random(num_edges).astype(np.float32),
            "edge_features": rng.random((num_edges, 2)),
            "edge_time": rng.integers(0, 100, num_edges),
            "edge_label": rng.integers(-1, 3, num_edges).astype(np.int32),
        }
        return found if wanted == "all" else {name: found[name] for name in wanted}

    def stream(self, edges, ids, **options):
        named = np.asarray(self.ids)
        ends = named[edges]
        return open_edge_stream(ends, to_undirected=self.to_undirected, nodes=NodeIds.of(ids), **options)

    def write_old(self, root, **options):
        rows = {name: rows[:200] if name.startswith("edge_") else rows[self.old] for name, rows in self.before.items()}
        p = Given(self.part_id, self.num_parts)
        return write_partition_store(root, self.stream(self.edges, self.ids[self.old]), p, **rows, **options)

    def change(self):
        rows = {
            name: rows[200:] if name.startswith("edge_") else rows[self.nodes] for name, rows in self.columns.items()
        }
        return GraphChange(
            edges=np.asarray(self.ids)[self.added],
            nodes=self.ids[self.nodes],
            removed_edges=np.asarray(self.ids)[self.removed_edges] if self.removed_edges.size else None,
            removed_nodes=self.ids[self.removed_nodes] if len(self.removed_nodes) else None,
            **rows,
        )

    def write_new(self, root, store, **options):
        """Write the whole new graph, with the parts that the updated store has."""
        gone = {tuple(pair) for pair in self.removed_edges.T.tolist()}
        gone |= {pair[::-1] for pair in gone} if self.to_undirected else set()
        removed = set(self.removed_nodes.tolist())
        stays = [not (tuple(pair) in gone or set(pair) & removed) for pair in self.edges.T.tolist()]
        edges = np.concatenate([self.edges[:, stays], self.added], axis=1)
        new = self.nodes[self.nodes >= len(self.old)]  # behind the old ones, as they are listed
        kept = np.concatenate([np.setdiff1d(self.old, self.removed_nodes), new])
        chosen = np.concatenate([np.flatnonzero(stays), np.arange(200, 200 + self.added.shape[1])])
        rows = {name: rows[chosen] if name.startswith("edge_") else rows[kept] for name, rows in self.columns.items()}
        part_id = store.part_of(store.store_nid[:])
        stream = self.stream(edges, self.ids[kept])
        return write_partition_store(root, stream, Given(part_id, self.num_parts), **rows, **options)


def same_files(one, other):
    """Compare all arrays of two stores, and what the manifests say of the graph."""
    names = {path.name for path in one.root.glob("*.npy")} - {*OWN}
    assert names == {path.name for path in other.root.glob("*.npy")}
    for name in sorted(names):
        assert (one.root / name).read_bytes() == (other.root / name).read_bytes(), name
    for key in other.manifest.keys() - {"files", "version"}:
        assert one.manifest[key] == other.manifest[key], key


SHAPES = {
    "directed": {},
    "directed, repeated edges": {"parallel": True},
    "undirected": {"to_undirected": True, "columns": ("features", "labels", "node_time")},
    "undirected, with times": {"to_undirected": True, "columns": ("features", "edge_time", "edge_weight")},
    "strings": {"names": lambda count: [f"n{i * 7}" for i in range(count)]},
    "sparse names": {"names": lambda count: [i * 1000 - 5 for i in range(count)]},
    "no columns": {"columns": ()},
    "nothing removed": {"removes": False},
    "nothing new": {"adds": False},
}


@pytest.mark.parametrize("pack_halo", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_those_of_the_whole_new_graph(no_disk_wait, tmp_path, shape, pack_halo):
    for seed in range(3):
        graph = Grown(seed, **SHAPES[shape])
        old = graph.write_old(tmp_path / f"{seed}", pack_halo=pack_halo)
        new = update_store(old, graph.change(), budget=TINY if seed else None)
        assert new.root == tmp_path / f"{seed}-v1"
        new.verify()
        same_files(new, graph.write_new(tmp_path / f"{seed}-whole", new, pack_halo=pack_halo))
        assert np.array_equal(new.part_of(new.store_nid[new.original_nid]), new.part_of(np.arange(new.num_nodes)))
