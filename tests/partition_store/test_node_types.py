"""Stores of heterogeneous graphs:

every node, edge, edge type, time and row of features is where the description has it.
"""

import numpy as np
import pytest
import scipy.sparse

import lightning_gnnscale as gs
from lightning_gnnscale.cli.stores import size_by_kind
from lightning_gnnscale.dataset import hetero_edges
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.edge_stream.relations import EdgesByType, HeteroStream
from lightning_gnnscale.errors import EdgeStreamError, PartitionStoreError
from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.partition_store import features_of_part, halo
from lightning_gnnscale.partition_store.part_graph import load_part_graph, load_whole_graph
from lightning_gnnscale.partition_store.verify import read_later
from lightning_gnnscale.values import ALWAYS
from tests.partition_store.small_graphs import reseal, rewrite
from tests.says import said

COUNTS = {"author": 60, "paper": 100, "inst": 12}
TYPES = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("author", "at", "inst")]


def edges_of(seed: int = 0) -> dict[tuple, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = (300, 500, 80)
    return {
        node_type: np.stack([rng.integers(0, COUNTS[node_type[0]], size), rng.integers(0, COUNTS[node_type[2]], size)])
        for node_type, size in zip(TYPES, sizes, strict=True)
    }


def nodes_of() -> dict:
    rng = np.random.default_rng(1)
    return {
        "author": {"num_nodes": COUNTS["author"], "features": rng.random((COUNTS["author"], 3)).astype(np.float16)},
        "paper": {
            "features": rng.random((COUNTS["paper"], 5)).astype(np.float32),
            "labels": rng.integers(0, 4, COUNTS["paper"]),
        },
        "inst": COUNTS["inst"],
    }


def description(sparse: bool = False, **options) -> gs.GraphDataset:
    """The graph; sparse: with sparse rows of authors in place of dense ones."""
    nodes = nodes_of()
    if sparse:
        dense = np.random.default_rng(2).random((COUNTS["author"], 30)).astype(np.float32)
        nodes["author"]["features"] = scipy.sparse.csr_matrix(np.where(dense < 0.1, dense, 0))
    return gs.hetero_graph(nodes, edges_of(), **options)


def written(tmp_path, graph=None, num_parts: int = 4, **options) -> tuple:
    dataset = graph or description()
    p = gs.partition(dataset.stream, "spring", num_parts, evaluate=False)
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    return dataset, gs.write_partition_store(tmp_path / "store", dataset.stream, p, **rows, **options)


def directed_edges_of(store) -> set[tuple[int, int, int]]:
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    original = np.asarray(store.original_nid)
    return set(
        zip(original[store.csc.indices].tolist(), original[target].tolist(), store.edge_type.tolist(), strict=True)
    )


def expected_edges(separate_reverses: bool = False) -> set[tuple[int, int, int]]:
    first = dict(zip(COUNTS, np.cumsum([0, *COUNTS.values()]).tolist(), strict=False))
    names = list(TYPES)
    directed_edges = set()
    for number, (node_type, edges) in enumerate(edges_of().items()):
        back = number
        if node_type[0] != node_type[2] or separate_reverses:
            back = len(names)
            names.append(node_type)
        for a, b in edges.T.tolist():
            u, v = a + first[node_type[0]], b + first[node_type[2]]
            directed_edges |= {(u, v, number)} | ({(v, u, back)} if u != v or back != number else set())
    return directed_edges


@pytest.mark.filterwarnings("ignore:.*listed more often")
@pytest.mark.parametrize("separate_reverses", [False, True])
def test_edges_and_rows_are_those_of_the_description(tmp_path, separate_reverses):
    dataset, store = written(tmp_path, description(separate_reverses=separate_reverses))
    store.verify()
    assert directed_edges_of(store) == expected_edges(separate_reverses) and store.num_edges == len(
        expected_edges(separate_reverses)
    )
    original = np.asarray(store.original_nid)
    node_type = store.node_type(np.arange(store.num_nodes))
    assert np.array_equal(node_type, dataset.stream.type_of(original))
    rows = store.features.read(np.arange(store.num_nodes))
    for number, name in enumerate(COUNTS):
        if name == "inst":
            assert rows.tables[number] is None
            continue
        own = original[node_type == number] - dataset.stream.type_offsets[number]
        assert np.array_equal(rows.tables[number], dataset.features[name][own])
        assert rows.tables[number].dtype == dataset.features[name].dtype


@pytest.mark.filterwarnings("ignore:.*listed more often")
def test_node_types_are_runs_inside_every_part(tmp_path):
    _, store = written(tmp_path)
    node_type = store.node_type(np.arange(store.num_nodes))
    for begin, end in zip(store.part_offsets[:-1], store.part_offsets[1:], strict=True):
        assert np.all(np.diff(node_type[begin:end]) >= 0)


@pytest.mark.filterwarnings("ignore:.*listed more often")
@pytest.mark.parametrize("hops", [0, 1, 2])
def test_parts_know_the_relation_and_the_time_of_each_edge(tmp_path, hops):
    num_edges = sum(edges.shape[1] for edges in edges_of().values())
    times = np.random.default_rng(2).permutation(num_edges)
    node_time = np.arange(sum(COUNTS.values()))
    _, store = written(tmp_path, edge_time=times, node_time=node_time)
    assert store.num_edges > 1.9 * num_edges  # edges with times are events: repeats stay
    for part in range(store.num_parts):
        graph = load_part_graph(store, hops, part)
        assert np.array_equal(graph.columns["edge_type"], store.edge_type[graph.edge_id])
        assert np.array_equal(graph.columns["edge_time"], store.edge_time[graph.edge_id])
        assert np.array_equal(graph.columns["node_time"], node_time[store.original_nid[graph.nodes]])
        row = np.repeat(np.arange(graph.num_local), np.diff(graph.csc.indptr))
        ends = np.stack([store.node_type(graph.nodes[graph.csc.indices]), store.node_type(graph.nodes[row])])
        schema = store.schema
        assert np.array_equal(ends, np.stack([schema.sources, schema.targets])[:, graph.columns["edge_type"]])
    whole = load_whole_graph(store, 0)
    assert np.array_equal(whole.columns["edge_type"], store.edge_type)


@pytest.mark.filterwarnings("ignore:.*listed more often")
def test_a_store_that_was_cut_off_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    _, store = written(tmp_path / "whole")
    from lightning_gnnscale.partition_store import csc_writer

    calls, write = [], csc_writer.RowWriter.write

    def fails_once(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(self, *args)

    budget = gs.partition_store.WriteBudget(spill_edges=64, sort_edges=128, block_bytes=256, checkpoint_bytes=1)
    monkeypatch.setattr(csc_writer.RowWriter, "write", fails_once)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "cut", budget=budget)
    _, again = written(tmp_path / "cut", budget=budget)
    assert again.manifest["files"] == store.manifest["files"]


def test_loaded_features_of_node_types_equal_gathered_ones(tmp_path):
    _, store = written(tmp_path, description(to_undirected=False))
    some = np.sort(np.random.default_rng(0).choice(store.num_nodes, 50, replace=False))
    loaded, order = store.features.load(some)
    assert order is None and loaded.num_rows == 50
    places = np.array([7, 0, 49, 7])
    mine, theirs = loaded.read(places), store.features.read(some[places])
    assert np.array_equal(mine.node_type, theirs.node_type)
    for one, other in zip(mine.tables, theirs.tables, strict=True):
        assert (one is None and other is None) or np.array_equal(one, other)


def test_feature_rows_of_node_types_are_compared_when_they_are_first_read(tmp_path):
    _, store = written(tmp_path, description(to_undirected=False), pack_halo=True)
    rows = [name for name in store.manifest["files"] if name.startswith("kind") and "features" in name]
    assert rows and all(read_later(name) for name in rows)


def test_codes_of_each_node_type_are_within_half_a_scale(tmp_path):
    dataset, store = written(tmp_path, description(to_undirected=False), feature_storage="int8")
    node_type = store.node_type(np.arange(store.num_nodes))
    own = store.original_nid[node_type == 1] - COUNTS["author"]
    rows = store.features.read(np.flatnonzero(node_type == 1)).tables[1]
    given = dataset.features["paper"][own]
    assert np.all(np.abs(rows - given) <= np.abs(given).max(axis=1, keepdims=True) / 127 / 2 * 1.001)


def test_user_ids_may_stand_in_several_node_types(tmp_path):
    nodes = {"user": {"nodes": ["x", "a", "b"]}, "item": {"nodes": np.array([7, 5])}}
    edges = {("user", "buys", "item"): (np.array(["a", "b", "x"]), np.array(["5", "7", "7"]))}
    nodes["item"]["nodes"] = ["7", "5"]
    graph = gs.hetero_graph(nodes, edges, name="shop")
    _, store = written(tmp_path, graph, num_parts=1)
    assert store.user_ids(store.store_nid[np.arange(5)]).tolist() == ["x", "a", "b", "7", "5"]
    assert directed_edges_of(store) == {(1, 4, 0), (4, 1, 1), (2, 3, 0), (3, 2, 1), (0, 3, 0), (3, 0, 1)}


def test_edges_are_streamed_from_any_chunk():
    dataset = description(to_undirected=False, chunk_edges=7)
    stream = dataset.stream
    whole = [np.concatenate(ends) for ends in zip(*[(chunk.src, chunk.dst) for chunk in stream.chunks()], strict=True)]
    for start in (0, 1, 43, 60, 125):
        part = [(chunk.src, chunk.dst, chunk.first_edge) for chunk in stream.chunks(start)]
        for src, dst, first in part:
            assert np.array_equal(src, whole[0][first : first + len(src)])
            assert np.array_equal(dst, whole[1][first : first + len(dst)])
        assert not part or part[0][2] == start * 7


def test_an_edge_of_a_node_that_its_node_type_has_not_is_named():
    graph = gs.hetero_graph({"a": 3, "b": 5}, {("a", "to", "b"): np.array([[0, 3], [4, 1]])})
    with pytest.raises(EdgeStreamError, match=said("edge 1 source 3 a,to,b 3 nodes node type")):
        list(graph.stream.chunks())


@pytest.mark.parametrize(
    ("nodes", "edges", "told"),
    [
        ({"a": {"rows": 3}}, {("a", "to", "a"): np.zeros((2, 1), int)}, "key 'rows'"),
        ({"a": 3}, {("a", "to", "b"): np.zeros((2, 1), int)}, "with node types of a"),
        ({"a": 3}, {("a", "a"): np.zeros((2, 1), int)}, "an edge type must be"),
        ({"a": {}}, {("a", "to", "a"): np.zeros((2, 1), int)}, "how many are there"),
        (
            {"a": {"num_nodes": 2, "labels": [0, 1, 1]}},
            {("a", "to", "a"): np.zeros((2, 1), int)},
            "numbers of nodes differ",
        ),
    ],
)
def test_a_description_that_does_not_fit_is_one_line(nodes, edges, told):
    with pytest.raises(ValueError, match=said(told)) as caught:
        gs.hetero_graph(nodes, edges)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*listed more often")
def test_values_of_edges_of_several_relations_lie_on_disk_where_they_are_many(tmp_path, monkeypatch):
    """The same store as from memory, and the same identity of what it was written from."""
    rng, edges = np.random.default_rng(3), edges_of()
    values = {
        name: {
            "edges": ends,
            "features": rng.random((ends.shape[1], 4), np.float32),
            **({} if name == TYPES[1] else {"time": rng.integers(0, 99, ends.shape[1])}),
        }
        for name, ends in edges.items()
    }
    found = []
    for limit in (1 << 20, 600):  # bytes: a chunk of 37 rows of features, 75 times
        monkeypatch.setattr(hetero_edges, "IN_MEMORY_BYTES", limit)
        dataset = gs.hetero_graph(nodes_of(), values)
        given = {name: getattr(dataset, name) for name in ("edge_time", "edge_features")}
        assert all(isinstance(rows, np.memmap) == (limit == 600) for rows in given.values())
        found.append((given, written(tmp_path / str(limit), dataset, **given)[1]))
    (memory, one), (disk, other) = found
    assert all(np.array_equal(memory[name], disk[name]) for name in memory)
    assert disk["edge_time"].tolist().count(ALWAYS) == edges[TYPES[1]].shape[1]
    assert one.manifest["files"] == other.manifest["files"]


def test_as_many_values_as_edges_are_asked_for():
    edges = {node_type: {"edges": ends, "time": np.zeros(ends.shape[1], int)} for node_type, ends in edges_of().items()}
    edges[TYPES[2]]["time"] = np.zeros(79, int)
    with pytest.raises(ValueError, match=said("edges 80 79")):
        gs.hetero_graph(dict(COUNTS), edges)


def test_relations_must_fit_the_schema():
    schema = GraphSchema(("a",), (("a", "to", "a"),))
    stream = open_edge_stream(np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError, match=said("[0, 1) 0 1")):
        HeteroStream([EdgesByType(stream, np.array([0, 1, 0]))], schema, [1])
    with pytest.raises(ValueError, match="reverse of each edge type"):
        HeteroStream([EdgesByType(stream, 0)], schema, [1], to_undirected=True)


def rows_told(rows) -> list:
    return [
        rows.node_type.tolist(),
        *(table.dense().tolist() if hasattr(table, "dense") else table for table in rows.tables),
    ]


@pytest.mark.filterwarnings("ignore:.*listed more often")
@pytest.mark.parametrize(
    ("options", "storage"),
    [({}, None), ({"to_undirected": False}, "int8"), ({"sparse": True}, None)],
    ids=["dense", "codes", "sparse"],
)
def test_halo_rows_are_packed_node_type_by_node_type(tmp_path, options, storage):
    graph = description(**options)
    _, plain = written(tmp_path / "plain", graph, feature_storage=storage)
    _, store = written(tmp_path / "packed", graph, feature_storage=storage, pack_halo=True)
    store.verify()
    assert not plain.part_features.is_packed and store.part_features.is_packed and not store.features.is_packed
    assert {name for name in store.manifest["files"] if name.endswith("halo_nodes")} == {
        "kind0_halo_nodes",
        "kind1_halo_nodes",
    }
    sizes = size_by_kind(store.manifest)
    assert sizes["features"] == size_by_kind(plain.manifest)["features"] > 0 < sizes["features of halos"]
    rng, before = np.random.default_rng(0), 0
    for part in range(store.num_parts):
        graph = store.load_part(part)
        node_types, rows = store.node_types.locate(graph.halo_nodes)
        own = features_of_part(store.part_features, part)
        for node_type in (0, 1):
            table = own.tables[node_type]
            first, last = table.halo_offsets[part : part + 2].tolist()
            assert np.array_equal(table.halo_nodes[first:last], rows[node_types == node_type])
            before += last - first
        picked = rng.integers(0, store.num_nodes, 200)  # core, halo and beyond
        nodes = np.unique(np.concatenate([graph.nodes[:50], picked[:40]]))
        for asked in (np.asarray(graph.nodes), picked):
            for one, other in zip(rows_told(own.read(asked)), rows_told(plain.features.read(asked)), strict=True):
                assert np.array_equal(one, other) if one is not None else other is None
        loaded, order = own.load(nodes)
        places = np.arange(len(nodes)) if order is None else order
        for one, other in zip(rows_told(loaded.read(places)), rows_told(plain.features.read(nodes)), strict=True):
            assert np.array_equal(one, other) if one is not None else other is None
        assert order is not None or storage is None  # rows that stand in many halos come first
    assert before == sum(len(own.tables[node_type].halo_nodes) for node_type in (0, 1)) > 0


@pytest.mark.filterwarnings("ignore:.*listed more often")
@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        (
            "kind1_halo_places",
            lambda a: a.__setitem__(0, a[1]),
            "kind1_halo_places.npy 0",
        ),
        ("kind0_halo_count", lambda a: a.__setitem__(0, a[0] + 1), "kind0_halo_count.npy count halos"),
        ("kind1_halo_nodes", lambda a: a.__setitem__(0, 10**4), "kind1_halo_nodes.npy names exist"),
        ("kind0_halo_offsets", lambda a: a.__setitem__(1, -1), "kind0_halo_offsets.npy 0"),
    ],
)
def test_damage_of_packed_rows_of_node_types_is_named(tmp_path, name, damage, told):
    _, store = written(tmp_path, pack_halo=True)
    rewrite(store, name, damage)
    with pytest.raises(PartitionStoreError, match=said(told)):
        gs.PartitionStore.open(store.root).verify()


@pytest.mark.filterwarnings("ignore:.*listed more often")
def test_packing_of_node_types_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """After a kill in the rows of the second node type, and after damage to what the first pass has made."""
    _, whole = written(tmp_path / "whole", pack_halo=True)
    budget = gs.partition_store.WriteBudget(spill_edges=64, sort_edges=128, block_bytes=256, checkpoint_bytes=1)
    append, calls = halo._PackedRows.append, []

    def fails_late(self, *args):
        calls.append(self.features.dim)
        if calls.count(5) == 3:
            raise KeyboardInterrupt
        return append(self, *args)

    for name in ("kind0_halo_features", "kind0_features", "kind1_halo_nodes"):
        calls.clear()
        monkeypatch.setattr(halo._PackedRows, "append", fails_late)
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path / name, budget=budget, pack_halo=True)
        assert calls.count(3) > 2  # authors' rows are packed
        monkeypatch.setattr(halo._PackedRows, "append", append)
        path = tmp_path / name / "store.partial" / f"{name}.npy"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        _, again = written(tmp_path / name, budget=budget, pack_halo=True)
        assert again.manifest["files"] == whole.manifest["files"]
        again.verify()


def test_doors_of_one_relation_refuse_several(tmp_path):
    _, store = written(tmp_path, description(to_undirected=False))
    with pytest.raises(ValueError, match=said("PyGStore 3 3")):
        gs.PyGStore(store)


def _swap(schema, name, one, other):
    schema[name][one], schema[name][other] = schema[name][other], schema[name][one]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda schema: schema.update(reverse=[99, *schema["reverse"][1:]]), "manifest.json reverse[0] 99"),
        (lambda schema: schema.update(reverse=schema["reverse"][:-1]), "manifest.json reverse 5 4"),
        (lambda schema: schema.update(reverse=[0] * 5), "manifest.json reverse[0] paper author"),
        (lambda schema: schema.update(reverse=["1"] * 5), "manifest.json reverse[0] '1'"),
        (lambda schema: _swap(schema, "kind_sizes", 0, 1), "manifest.json kind0_features"),
        (lambda schema: schema["kind_sizes"].__setitem__(0, 61), "manifest.json schema.kind_sizes 173 172"),
        (lambda schema: _swap(schema, "node_types", 0, 1), "edge_type edge joins schema.edge_types"),
        (lambda schema: schema["node_types"].__setitem__(0, "x"), "manifest.json author"),
        (lambda schema: schema["edge_types"].__setitem__(0, ["paper", "writes", "paper"]), "manifest.json reverse[0]"),
        (lambda schema: schema["edge_types"].__setitem__(1, ["author", "cites", "author"]), "edge_type author,cites"),
    ],
)
def test_a_resealed_schema_of_another_graph_is_refused(tmp_path, change, message):
    _, store = written(tmp_path)
    reseal(store.root, lambda manifest: change(manifest["schema"]))
    with pytest.raises(PartitionStoreError, match=said(message)) as caught:
        gs.PartitionStore.open(store.root)
    assert "\n" not in str(caught.value)
