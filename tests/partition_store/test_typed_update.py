"""An update of a graph with node types and edge types has the bytes of a store written from the whole new graph."""

import json
import os
import signal
import traceback

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import lightning_gnnscale as gs
from lightning_gnnscale.dataset.columns import Columns
from lightning_gnnscale.edge_stream.relations import HeteroStream
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.partition_store import update_store, write_partition_store
from lightning_gnnscale.partition_store.journal import Journal
from lightning_gnnscale.partition_store.typed_change import MappedEdges
from tests.partition_store.small_graphs import TINY, Given, all_bytes
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
        self.reverses, self.temporal, self.names = reverses, temporal, names
        self.weights, self.storage, self.sparse = weights, storage, sparse
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
        self.changed = {
            n: rng.choice(np.setdiff1d(np.arange(c), self.gone[n]), 3, replace=False) for n, c in TYPES.items()
        }
        self.listed = {n: np.append(self.changed[n], np.arange(c, self.total[n])) for n, c in TYPES.items()}
        papers = self.total["paper"]
        dense = rng.random((self.total["author"], 9)).astype(np.float32)
        self.rows = {
            "author": {"features": np.where(dense < 0.2, dense, 0) if sparse else dense[:, :4]},
            "paper": {
                "features": rng.random((papers, 5)),
                "labels": rng.integers(-1, 4, papers),
                "columns": {"year": rng.integers(0, 9, (papers, 1))},
            },
            "inst": {},
        }  # fmt: skip
        self.rows["paper"]["labels"][:4] = np.arange(4)
        self.rows["paper"]["masks"] = {m: rng.random(self.total["paper"]) < 0.4 for m in ("train", "test")}
        if temporal:
            for name in ("author", "paper"):
                self.rows[name]["time"] = rng.integers(0, 99, self.total[name])

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
            are_rows = ends[0].dtype.kind + ends[1].dtype.kind == "ii"
            described[name] = {"edges": np.stack(ends) if are_rows else tuple(ends)}
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
            removed_edges={",".join(name): self.ends(name, gone) for name, gone in self.dropped.items() if gone.size},
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
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (0, 2))])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_those_of_the_whole_new_graph(no_disk_wait, tmp_path, shape, seed):
    graph = Typed(seed, **SHAPES[shape])
    if graph.names is None and len(graph.gone["author"]):
        graph.names = "removed"  # those that stay keep their ids, which are no numbers of rows then
    options = {"pack_halo": seed == 1}
    old = graph.write_old(tmp_path / "old", **options)
    new = update_store(old, graph.change(), budget=TINY if seed == 2 else None)
    new.verify()
    same_files(new, graph.write_new(tmp_path / "whole", new, **options))


def directed_edges(store):
    """(source, name of the edge type, target, time) of all edges into each node, by the user's ids."""
    names = [
        f"{store.schema.node_types[kind]} {name}"
        for kind, name in zip(
            store.node_type(np.arange(store.num_nodes)), store.user_ids(np.arange(store.num_nodes)), strict=True
        )
    ]
    found = {name: [] for name in names}
    for node, name in enumerate(names):
        for at in range(*store.csc.indptr[node : node + 2].tolist()):
            time = 0 if store.edge_time is None else int(store.edge_time[at])
            found[name].append((names[store.csc.indices[at]], store.schema.edge_types[store.edge_type[at]][1], time))
    return {name: sorted(edges) for name, edges in found.items()}, names


@pytest.mark.filterwarnings("ignore:.*listed:UserWarning", "ignore:.*join two parts:UserWarning")
@pytest.mark.parametrize("shape", ["reverses shared", "temporal, reverses", "directed, repeated edges, weights"])
def test_nodes_with_other_in_edges_are_listed(no_disk_wait, tmp_path, shape):
    graph = Typed(7, **SHAPES[shape])
    graph.names = graph.names or "removed"
    old = graph.write_old(tmp_path / "old")
    new = update_store(old, graph.change())
    before, _ = directed_edges(old)
    after, names = directed_edges(new)
    changed = {name for name in names if before.get(name, []) != after[name]}
    listed = {names[node] for node in new.store_nid[new.changes().in_edges]}
    assert listed == changed and 0 < len(listed) < len(names)


def little(**options):
    """A small graph of three node types with ids of their own, and reverses apart."""
    nodes = {
        "author": {"nodes": ["a", "b", "c"], "features": np.eye(3, 2, dtype=np.float32)},
        "paper": {"nodes": [10, 20, 30, 40], "features": np.eye(4, 3, dtype=np.float32), "labels": [0, 1, 0, 1]},
        "inst": 2,
    }
    nodes["paper"]["time"] = [1, 2, 3, 4]
    edges = {
        WRITES: {"edges": (np.array(["a", "b", "c"]), np.array([10, 20, 30])), "time": [1, 2, 3]},
        "paper,cites,paper": np.array([[10, 20], [30, 40]]),
        "author,at,inst": (np.array(["a"]), np.array([1])),
    }
    return gs.hetero_graph(nodes, edges, separate_reverses=True, **options)


WRITES = "author,writes,paper"


def pair(source, target):
    return np.array([source]), np.array([target])


ONE = pair("a", 20)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    graph = little()
    return write_partition_store(
        tmp_path_factory.mktemp("s") / "typed", graph.stream, Given(np.arange(9) % 2, 2), graph
    )


def new_paper(**columns):
    return {"paper": {"nodes": [50], **columns}}


WRONG = {
    "edges without a type": ({"edges": np.array([[0], [1]])}, "edges edge types author,writes,paper by edge type"),
    "nodes without a type": ({"nodes": ["z"]}, "nodes node types author, paper, inst by node type"),
    "an unknown node type": ({"nodes": {"venue": ["x"]}}, "'venue' author, paper, inst new_node_types=[venue]"),
    "an unknown edge type": (
        {"edges": {"author,likes,paper": ONE}},
        "'author,likes,paper' author,writes,paper new_edge_types",
    ),
    "an unknown author": ({"edges": {WRITES: {"edges": pair("z", 20), "time": [3]}}}, "'z' author neither nodes"),
    "an unknown paper": ({"edges": {WRITES: {"edges": pair("a", 99), "time": [3]}}}, "node 99 paper neither"),
    "an unknown row": ({"edges": {"author,at,inst": pair("a", 2)}}, "node 2 inst neither"),
    "an edge without time": ({"edges": {WRITES: ONE}}, "edge_time missing author,writes,paper"),
    "a reverse": (
        {"edges": {"paper,rev_writes,author": {"edges": ONE[::-1], "time": [3]}}},
        "rev_writes reverses author,writes",
    ),
    "an edge that is not there": ({"removed_edges": {WRITES: ONE}}, "removed_edges author,writes,paper 'a' 20"),
    "an edge of another type": ({"removed_edges": {"paper,cites,paper": pair(10, 20)}}, "removed_edges cites 10 20"),
    "a time of what goes": ({"removed_edges": {WRITES: {"edges": ONE, "time": [3]}}}, "removed_edges time"),
    "a node that is not there": ({"removed_nodes": {"paper": [99]}}, "removed_nodes['paper'] 99"),
    "a node type that is not there": ({"removed_nodes": {"venue": [9]}}, "removed_nodes 'venue' author, paper, inst"),
    "nodes that go without a type": ({"removed_nodes": [10]}, "removed_nodes by node type"),
    "a node that comes and goes": (
        {"nodes": {"paper": [10]}, "removed_nodes": {"paper": [10]}},
        "10 nodes removed_nodes",
    ),
    "an edge of a node that goes": (
        {"edges": {WRITES: {"edges": pair("a", 10), "time": [3]}}, "removed_nodes": {"paper": [10]}},
        "edge 0 10 paper",
    ),
    "new nodes without features": ({"nodes": new_paper(time=[3])}, "nodes['paper'] features missing"),
    "new nodes without time": (
        {"nodes": new_paper(features=np.ones((1, 3), np.float32))},
        "nodes['paper'] node_time missing",
    ),
    "features of a type without": (
        {"nodes": {"inst": {"nodes": [0], "features": [[1.0]]}}},
        "nodes['inst'] features no such",
    ),
    "another width": (
        {"nodes": {"author": {"nodes": ["a"], "features": np.ones((1, 3))}}},
        "nodes['author'] 2 columns 3",
    ),
    "not finite": ({"nodes": {"author": {"nodes": ["a"], "features": np.full((1, 2), np.nan)}}}, "nodes['author'] nan"),
    "rows without nodes": (
        {"nodes": {"author": {"features": np.ones((1, 2))}}},
        "nodes['author'] features without nodes",
    ),
    "an unknown key": ({"nodes": {"author": {"feature": np.ones((1, 2))}}}, "nodes['author'] 'feature' features"),
    "a number of nodes": ({"nodes": {"author": 3}}, "nodes['author'] ids 3"),
    "ids of another kind": ({"nodes": {"author": [3]}}, "nodes['author'] integers strings"),
    "rows beside types": (
        {"nodes": {"author": ["a"]}, "features": np.ones((1, 2))},
        "features beside nodes by node type",
    ),
    "values beside types": ({"edges": {WRITES: ONE}, "edge_time": [3]}, "edge_time beside edges by edge type"),
    "a new column": ({"edges": {WRITES: {"edges": ONE, "time": [1], "weight": [1.0]}}}, "edge_weight no such column"),
    "a new type that is there": ({"new_node_types": ["paper"]}, "new_node_types paper already"),
    "a new type without nodes": ({"new_node_types": ["venue"]}, "new_node_types venue no nodes"),
    "a new type without edges": ({"new_edge_types": ["author,likes,paper"]}, "new_edge_types author,likes,paper edges"),
    "a new type of unknown ends": ({"new_edge_types": ["author,likes,x"]}, "new_edge_types author, paper, inst 'x'"),
    "a new type of another form": ({"new_edge_types": "likes"}, "new_edge_types list 'likes'"),
    "dates beside numbers": (
        {
            "edges": {WRITES: {"edges": ONE, "time": np.array(["2020-01-01"], "M8[D]")}},
            "nodes": new_paper(features=np.ones((1, 3), np.float32), time=[3]),
        },
        "dates numbers",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(store, what):
    given, message = WRONG[what]
    with pytest.raises((ValueError, EdgeStreamError), match=said(message)) as told:
        update_store(store, **given)
    assert "\n" not in str(told.value)
    assert {path.name for path in store.root.parent.iterdir()} <= {"typed", "typed.lock", "typed.verified.json"}


def test_types_are_not_for_a_graph_of_one_node_type_and_edge_type(no_disk_wait, tmp_path):
    stream = gs.open_edge_stream(np.array([[0], [1]]), num_nodes=2)
    plain = write_partition_store(tmp_path / "plain", stream, Given(np.zeros(2, int), 1))
    for given in ({"nodes": {"a": [1]}}, {"edges": {"a,b,a": [[0], [1]]}}, {"new_edge_types": ["a,b,a"]}):
        with pytest.raises(
            ValueError, match=said(f"{next(iter(given))} by type plain one node type write a new store")
        ):
            update_store(plain, **given)


@pytest.mark.filterwarnings("ignore:.*join two parts:UserWarning")
def test_new_types_are_those_of_a_store_of_the_grown_schema(no_disk_wait, tmp_path, store):
    venues = {"nodes": ["v", "w"], "features": np.full((2, 7), 3, np.float32), "columns": {}}
    added = {
        "paper,in,venue": {"edges": (np.array([10, 20, 40]), np.array(["v", "w", "v"])), "time": [5, 6, 7]},
        "author,knows,author": (np.array(["a", "c"]), np.array(["b", "a"])),
    }
    new = update_store(
        store, root=tmp_path / "new", nodes={"venue": venues}, edges=added, new_node_types=["venue"],
        new_edge_types=list(added),
    )  # fmt: skip
    new.verify()
    graph = little()
    nodes = dict(
        zip(graph.schema.node_types, ({"nodes": ids} for ids in (list("abc"), [10, 20, 30, 40], [0, 1])), strict=True)
    )
    whole = gs.hetero_graph({**nodes, "venue": venues}, added, separate_reverses=True)
    schema = store.schema
    edge_types = (*schema.edge_types, *(tuple(name.split(",")) for name in added))
    edge_types += (("venue", "rev_in", "paper"), ("author", "rev_knows", "author"))
    grown = GraphSchema((*schema.node_types, "venue"), edge_types, (*schema.reverse, 8, 9, 6, 7))
    more = [one._replace(relation=6 + at) for at, one in enumerate(whole.stream.sources)]
    stream = HeteroStream([*graph.stream.sources, *more], grown, [3, 4, 2, 2], to_undirected=True)
    stream.node_ids = whole.stream.node_ids
    none = np.iinfo(np.int64).min
    features = {name: graph.features.get(name) for name in ("author", "paper")} | {"venue": venues["features"]}
    columns = Columns(
        features=features, labels=np.append(graph.labels, [-1, -1]), node_time=np.append(graph.node_time, [none, none]),
        masks={name: np.append(mask, [False, False]) for name, mask in graph.masks.items()},
        edge_time=np.concatenate([graph.edge_time, [5, 6, 7, none, none]]),
    )  # fmt: skip
    part_id = new.part_of(new.store_nid[:])
    same_files(new, write_partition_store(tmp_path / "whole", stream, Given(part_id, 2), columns))


@pytest.mark.filterwarnings("ignore:.*join two parts:UserWarning")
def test_a_data_set_of_several_types_is_a_change(no_disk_wait, tmp_path, store):
    nodes = {"paper": {"nodes": [50, 10], "features": np.full((2, 3), 2, np.float32), "time": [9, 1]},
             "author": {"nodes": ["c", "a"]}}  # fmt: skip
    edges = {WRITES: {"edges": (np.array(["c", "a"]), np.array([50, 50])), "time": [9, 9]}}
    more = gs.hetero_graph(nodes, edges, to_undirected=False)
    new = update_store(store, more, root=tmp_path / "new", removed_nodes={"paper": [20]})
    assert new.version["counts"] == {"new_nodes": 1, "removed_nodes": 1, "changed_features": 1, "changed_labels": 0,
                                     "new_edges": 2, "removed_edges": 0}  # fmt: skip
    edges, names = directed_edges(new)
    assert edges["paper 50"] == [("author a", "writes", 9), ("author c", "writes", 9)] and "paper 20" not in names
    labels = dict(zip(names, new.labels.tolist(), strict=True))
    assert labels["paper 10"] == 0 and labels["paper 50"] == -1  # a data set without labels changes none
    with pytest.raises(ValueError, match=said("edges 'author,reads,paper' new_edge_types")):
        update_store(store, gs.hetero_graph(nodes, {"author,reads,paper": pair("c", 50)}, to_undirected=False))


def test_new_edges_are_read_from_any_chunk():
    stream = little(chunk_edges=2).stream
    edges = MappedEdges(stream, np.arange(9)[::-1].copy(), stream.sources, stream.schema, [3, 4, 2])
    whole = [(chunk.src.tolist(), chunk.dst.tolist()) for chunk in edges.chunks()]
    assert len(whole) == 3 and whole[0] == ([8, 7], [5, 4])
    for start in range(1, len(whole)):
        assert [(chunk.src.tolist(), chunk.dst.tolist()) for chunk in edges.chunks(start)] == whole[start:]


@pytest.mark.filterwarnings("ignore:.*listed:UserWarning", "ignore:.*join two parts:UserWarning")
@pytest.mark.sweep
def test_a_kill_at_each_line_of_the_journal_leaves_the_old_version_and_is_gone_on_from(no_disk_wait, tmp_path):
    graph = Typed(3, **SHAPES["temporal, reverses"])
    old = graph.write_old(tmp_path / "old", pack_halo=True)
    change, untouched = graph.change(), all_bytes(old.root)
    whole = update_store(old, change, root=tmp_path / "whole")
    kills = 0
    while not (tmp_path / "new").exists():
        assert kills < 200
        child = os.fork()
        if not child:
            _update_until_killed(old, change, tmp_path / "new", before_line=kills % 2 == 0)
        _, status = os.waitpid(child, 0)
        assert all_bytes(old.root) == untouched
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL and not (tmp_path / "new").exists()
            kills += 1
        else:
            assert os.WEXITSTATUS(status) == 0
    assert kills > 30 and all_bytes(tmp_path / "new") == all_bytes(whole.root)


def _update_until_killed(old, change, root, before_line):
    """Update, and die at the first line of the journal that says something new, before or after it is written."""
    write = Journal.write

    def dies(self, step, **state):
        is_new = step != "begin" and self.state(step) != json.loads(json.dumps(state))
        if before_line and is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, step, **state)
        if is_new:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = dies
    try:
        update_store(old, change, root=root)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
