"""An update of a graph with node types and edge types has the bytes of a store written from the whole new graph."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import lightning_gnnscale as gs
from lightning_gnnscale.dataset.columns import Columns
from lightning_gnnscale.edge_stream.relations import HeteroStream
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.partition_store import update_store, write_partition_store
from tests.partition_store.small_graphs import TINY, Given
from tests.partition_store.test_update import same_files
from tests.says import said

TYPES = {"author": 30, "paper": 40, "inst": 8}
NEW = {"author": 5, "paper": 6, "inst": 0}
EDGES = {("author", "writes", "paper"): 90, ("paper", "cites", "paper"): 80, ("author", "at", "inst"): 30}
PARTS = 3


class Typed:
    """A random typed graph, a change of it, and the graph that comes out, in plain Python."""

    def __init__(self, seed, reverses=None, temporal=False, sparse=False, names=None, weights=False, removes=True,
                 storage=None, few=False):  # fmt: skip
        rng = self.rng = np.random.default_rng(seed)
        self.reverses, self.temporal, self.names, self.weights, self.storage = reverses, temporal, names, weights, storage
        self.total = {name: TYPES[name] + NEW[name] for name in TYPES}
        self.gone = {name: rng.choice(count, 3 if removes else 0, replace=False) for name, count in TYPES.items()}
        self.edges, self.added, self.dropped, self.times, self.weight = {}, {}, {}, {}, {}
        for name, count in EDGES.items():
            ends = [4 if few else TYPES[name[at]] for at in (0, 2)]
            self.edges[name] = np.stack([rng.integers(0, size, count) for size in ends])
            more = np.stack([rng.integers(0, self.total[name[at]], count // 3) for at in (0, 2)])
            stays = [not (s in self.gone[name[0]] or d in self.gone[name[2]]) for s, d in more.T.tolist()]
            self.added[name] = more[:, stays]
            self.dropped[name] = self.edges[name][:, rng.choice(count, 5, replace=False)] if removes else more[:, :0]
            size = count + self.added[name].shape[1]
            self.times[name], self.weight[name] = rng.integers(0, 99, size), rng.random(size).astype(np.float32)
        self.changed = {n: rng.choice(np.setdiff1d(np.arange(c), self.gone[n]), 3, replace=False) for n, c in TYPES.items()}
        self.listed = {n: np.append(self.changed[n], np.arange(c, self.total[n])) for n, c in TYPES.items()}
        dense = rng.random((self.total["author"], 9)).astype(np.float32)
        self.rows = {
            "author": {"features": np.where(dense < 0.2, dense, 0) if sparse else dense[:, :4]},
            "paper": {"features": rng.random((self.total["paper"], 5)), "labels": rng.integers(-1, 4, self.total["paper"]),
                      "columns": {"year": rng.integers(0, 9, (self.total["paper"], 1))}},
            "inst": {},
        }  # fmt: skip
        self.rows["paper"]["labels"][:4] = np.arange(4)
        self.rows["paper"]["masks"] = {m: rng.random(self.total["paper"]) < 0.4 for m in ("train", "test")}
        if temporal:
            for name in ("author", "paper"):
                self.rows[name]["time"] = rng.integers(0, 99, self.total[name])
        self.sparse = sparse

    def ids(self, name):
        """The user's ids of all nodes of a type, or None."""
        rows = np.arange(self.total[name])
        if self.names == "removed" and len(self.gone[name]):
            return rows
        if self.names == "strings" and name == "inst":
            return rows if len(self.gone[name]) else None  # which the store has as texts, too
        if self.names == "strings":
            return np.array([f"{name[0]}{row * 3}" for row in rows])
        return np.array(rows * 1000 - 7) if self.names == "sparse" else None

    def taken(self, name, rows, before=False):
        """Rows of a node type; before: with those of the old graph where they change."""
        found, places = {}, np.array(rows)
        if before:
            places = np.where(np.isin(places, self.changed[name]), (places + 1) % TYPES[name], places)
        for key, value in self.rows[name].items():
            if key in ("columns", "masks"):
                found[key] = {own: column[places] for own, column in value.items()}
            else:
                found[key] = value[places]
        if self.sparse and "features" in found and name == "author":
            found["features"] = csr_matrix(found["features"])
        return found

    def graph(self, kept, edges, values, before=False):
        """The data set of some nodes of each type, and of edges between all rows."""
        nodes, place = {}, {}
        for name, rows in kept.items():
            nodes[name] = {"num_nodes": len(rows), **self.taken(name, rows, before)}
            if self.ids(name) is not None:
                nodes[name]["nodes"] = self.ids(name)[rows]
            place[name] = np.full(self.total[name], -1)
            place[name][rows] = np.arange(len(rows))
        described = {}
        for name, pairs in edges.items():
            ends = [place[name[at]][pairs[0 if at == 0 else 1]] for at in (0, 2)]
            ends = [end if self.ids(name[at]) is None else self.ids(name[at])[kept[name[at]]][end]
                    for end, at in zip(ends, (0, 2), strict=True)]  # fmt: skip
            described[name] = {"edges": ends[0].dtype.kind + ends[1].dtype.kind != "ii" and tuple(ends) or np.stack(ends)}
            if self.temporal and name[1] != "at":
                described[name]["time"] = self.times[name][values[name]]
            if self.weights:
                described[name]["weight"] = self.weight[name][values[name]]
        return gs.hetero_graph(nodes, described, to_undirected=self.reverses is not None,
                               separate_reverses=self.reverses, feature_storage=self.storage)  # fmt: skip

    def write_old(self, root, **options):
        kept = {name: np.arange(count) for name, count in TYPES.items()}
        graph = self.graph(kept, self.edges, {name: slice(0, count) for name, count in EDGES.items()}, before=True)
        part_id = self.rng.integers(0, PARTS, sum(TYPES.values()))
        return write_partition_store(root, graph.stream, Given(part_id, PARTS), graph, **options)

    def ends(self, name, pairs):
        ends = [pairs[at // 2] if self.ids(name[at]) is None else self.ids(name[at])[pairs[at // 2]] for at in (0, 2)]
        return tuple(ends)

    def change(self):
        nodes = {}
        for name, rows in self.listed.items():
            own = self.taken(name, rows)
            if own or NEW[name]:
                nodes[name] = {"nodes": rows if self.ids(name) is None else self.ids(name)[rows], **own}
        edges = {}
        for name, pairs in self.added.items():
            edges[name] = {"edges": self.ends(name, pairs)}
            if self.temporal and name[1] != "at":
                edges[name]["time"] = self.times[name][EDGES[name] :]
            if self.weights:
                edges[name]["weight"] = self.weight[name][EDGES[name] :]
        gone = {name: rows if self.ids(name) is None else self.ids(name)[rows] for name, rows in self.gone.items()}
        return gs.GraphChange(
            nodes=nodes, edges=edges,
            removed_edges={",".join(name): self.ends(name, pairs) for name, pairs in self.dropped.items() if pairs.size},
            removed_nodes={name: rows for name, rows in gone.items() if len(rows)},
        )  # fmt: skip

    def write_new(self, root, store, **options):
        kept, edges, chosen = {}, {}, {}
        for name, count in TYPES.items():
            kept[name] = np.append(np.setdiff1d(np.arange(count), self.gone[name]), np.arange(count, self.total[name]))
        for name, pairs in self.edges.items():
            gone = {tuple(pair) for pair in self.dropped[name].T.tolist()}
            if self.reverses is False and name[0] == name[2]:
                gone |= {pair[::-1] for pair in gone}
            stays = [
                not ((s, d) in gone or s in self.gone[name[0]] or d in self.gone[name[2]]) for s, d in pairs.T.tolist()
            ]
            edges[name] = np.concatenate([pairs[:, stays], self.added[name]], axis=1)
            count = EDGES[name]
            chosen[name] = np.append(np.flatnonzero(stays), np.arange(count, count + self.added[name].shape[1]))
        graph = self.graph(kept, edges, chosen)
        part_id = store.part_of(store.store_nid[:])
        return write_partition_store(root, graph.stream, Given(part_id, PARTS), graph, **options)


SHAPES = {
    "directed": {},
    "directed, repeated edges, weights": {"few": True, "weights": True},
    "reverses apart": {"reverses": True},
    "reverses shared": {"reverses": False, "sparse": True},
    "temporal": {"temporal": True, "weights": True},
    "temporal, reverses": {"temporal": True, "reverses": True, "names": "sparse"},
    "strings of some types": {"names": "strings", "removes": False, "sparse": True},
    "strings, some removed": {"names": "strings", "reverses": True},
    "8 bits": {"storage": "int8", "removes": False},
}


@pytest.mark.filterwarnings("ignore:.*listed:UserWarning", "ignore:.*join two parts:UserWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_those_of_the_whole_new_graph(no_disk_wait, tmp_path, shape):
    for seed in range(3):
        graph = Typed(seed, **SHAPES[shape])
        if graph.names is None and len(graph.gone["author"]):
            graph.names = "removed"  # those that stay keep their ids, which are no numbers of rows then
        options = {"pack_halo": seed == 1}
        old = graph.write_old(tmp_path / f"{seed}", **options)
        new = update_store(old, graph.change(), budget=TINY if seed else None)
        new.verify()
        same_files(new, graph.write_new(tmp_path / f"{seed}-whole", new, **options))
