"""Rows in batches at every door: of readers, queries, lazy tables and data sets, as tables in memory give them."""

import shutil
import sys
import uuid
import warnings

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import lightning_gnnscale as gs
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.run_paths import check_paths
from lightning_gnnscale.dataset import load_files
from lightning_gnnscale.dataset.columns import Columns, load_arrays
from lightning_gnnscale.edge_stream import arrow_rows
from lightning_gnnscale.edge_stream.table import rows_of
from lightning_gnnscale.errors import EdgeStreamError
from tests.says import said

duckdb = pytest.importorskip("duckdb", reason="the extra lightning-gnnscale[duckdb] is not installed")

NUM_NODES, NUM_EDGES = 60, 400
RNG = np.random.default_rng(4)
EDGES = pa.table(
    {
        "src": RNG.integers(0, NUM_NODES, NUM_EDGES),
        "dst": RNG.integers(0, NUM_NODES, NUM_EDGES),
        "w": RNG.random(NUM_EDGES).astype(np.float32),
        "since": RNG.integers(0, 90, NUM_EDGES),
        "kind": RNG.integers(0, 3, NUM_EDGES),
    }
)
NODES = pa.table(
    {
        "id": [f"né{i}" for i in range(NUM_NODES)],
        "row": np.arange(NUM_NODES),
        "a": RNG.random(NUM_NODES).astype(np.float32),
        "b": RNG.random(NUM_NODES).astype(np.float32),
        "vector": pa.array(RNG.random((NUM_NODES, 3)).tolist(), pa.list_(pa.float32(), 3)),
        "y": RNG.integers(0, 4, NUM_NODES),
        "split": ["train", "val", "test"] * (NUM_NODES // 3),
    }
)


class Foreign:
    """What any library may give: the protocol, and nothing besides."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.to_reader(max_chunksize=37).__arrow_c_stream__(requested_schema)


def as_dataset(table, folder):
    path = folder / f"{uuid.uuid4().hex}.parquet"
    pq.write_table(table, path, row_group_size=17)
    return pyarrow.dataset.dataset(path)


def as_delta(table, folder, rows=None):
    deltalake = pytest.importorskip("deltalake", reason="Delta's own package is not installed, pip install deltalake")
    path = folder / uuid.uuid4().hex
    for start in range(0, len(table), rows or len(table)):
        deltalake.write_deltalake(path, table.slice(start, rows), mode="append")
    return deltalake.DeltaTable(path)


def as_iceberg(table, folder, rows=None):
    reason = "Iceberg's own package is not installed, pip install pyiceberg sqlalchemy"
    catalogs = pytest.importorskip("pyiceberg.catalog.sql", reason=reason)
    folder = folder / "lake"
    is_new, name = not folder.is_dir(), f"lake.t{uuid.uuid4().hex}"
    folder.mkdir(exist_ok=True)
    catalog = catalogs.SqlCatalog("here", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    if is_new:
        catalog.create_namespace("lake")
    stored = catalog.create_table(name, schema=table.schema)
    for start in range(0, len(table), rows or len(table)):
        stored.append(table.slice(start, rows))
    return stored


FORMS = {
    "reader": lambda table, folder: table.to_reader(max_chunksize=64),
    "protocol": lambda table, folder: Foreign(table),
    "relation": lambda table, folder: duckdb.from_arrow(table),
    "lazy": lambda table, folder: pl.from_arrow(table).lazy(),
    "data set": as_dataset,
    "scan": lambda table, folder: as_dataset(table, folder).scanner(),
    "delta": as_delta,
    "delta's data set": lambda table, folder: as_delta(table, folder).to_pyarrow_dataset(),
    "iceberg": as_iceberg,
    "iceberg's scan": lambda table, folder: as_iceberg(table, folder).scan(),
    "iceberg's reader": lambda table, folder: as_iceberg(table, folder).scan().to_arrow_batch_reader(),
}


def graph(form):
    """A graph of each column that there is; form: what a table becomes."""
    return gs.GraphDataset(
        "g",
        gs.open_edge_stream(form(EDGES.select(["src", "dst"])), num_nodes=NUM_NODES),
        features=form(NODES.select(["a", "b"])),
        labels=form(NODES.select(["y"])),
        masks=form(NODES.select(["split"])),
        node_time=form(NODES.select(["row"])),
        node_columns={"image": form(NODES.select(["vector"]))},
        edge_weight=form(EDGES.select(["w"])),
        edge_features=form(EDGES.select(["w", "since"])),
        edge_time=form(EDGES.select(["since"])),
        edge_label=form(EDGES.select(["kind"])),
    )


def write(root, dataset):
    p = gs.partition(dataset.stream, "random", num_parts=3, seed=0)
    return gs.write_partition_store(root, dataset.stream, p, columns=Columns.of(dataset))


def content(root):
    names = sorted(path.name for path in root.iterdir() if path.suffix in (".npy", ".json") and path.stem != "source")
    return {name: (root / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def of_tables(tmp_path_factory):
    root = tmp_path_factory.mktemp("tables") / "store"
    return content(write(root, graph(lambda table: table)).root)


@pytest.mark.parametrize("form", FORMS)
def test_a_store_is_the_one_of_tables(of_tables, form, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing so small goes to scratch disk, and no library warns
        dataset = graph(lambda table: FORMS[form](table, tmp_path))
    assert content(write(tmp_path / "store", dataset).root) == of_tables


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == "relation" else [pytest.mark.sweep]) for form in FORMS]
)
def test_an_update_takes_rows_in_batches(form, tmp_path):
    whole = write(tmp_path / "before", graph(lambda table: table)).root
    rows = {"image": NODES.select(["vector"])[:2], "features": NODES.select(["a", "b"])[3:5]}
    edges = {"edges": pa.table({"src": [7, 1], "dst": [NUM_NODES, 2]})}
    edges |= {"edge_features": EDGES.select(["w", "since"])[:2]}
    edges |= {"edge_weight": EDGES.select(["w"])[:2], "edge_time": EDGES.select(["since"])[:2]}
    edges |= {"node_time": NODES.select(["row"])[:2], "removed_edges": EDGES.select(["src", "dst"])[:3]}

    def updated(root, form):
        given = {name: form(value) for name, value in (rows | edges).items()}
        nodes = form(pa.table({"id": [7, NUM_NODES]}))
        change = gs.GraphChange(nodes=nodes, node_columns={"image": given.pop("image")}, **given)
        return content(gs.update_store(whole, change, root).root)

    given = updated(tmp_path / "given", lambda table: FORMS[form](table, tmp_path))
    assert given == updated(tmp_path / "wanted", lambda table: table)


@pytest.mark.parametrize("lake", ["delta", "iceberg"])
def test_columns_of_a_table_in_several_files_go_together(lake, tmp_path):
    """The rows of such a table have no order of their own: all scans of one version have the same."""
    if lake == "delta":
        dataset = as_delta(NODES, tmp_path, rows=7).to_pyarrow_dataset()

        def columns(*names):
            return dataset.scanner(columns=list(names))
    else:
        stored = as_iceberg(NODES, tmp_path, rows=7)

        def columns(*names):
            return stored.scan(selected_fields=names)

    edges = pa.table({end: NODES["id"].take(EDGES[end]) for end in ("src", "dst")})
    stream = gs.open_edge_stream(edges, nodes=columns("id"))
    store = write(tmp_path / "store", gs.GraphDataset("g", stream, features=columns("a", "b"), labels=columns("y")))
    found = dict(zip(store.user_ids(np.arange(NUM_NODES)), store.features.read(np.arange(NUM_NODES)), strict=True))
    for name, a, b in zip(*(NODES[column].to_pylist() for column in ("id", "a", "b")), strict=True):
        np.testing.assert_array_equal(found[name], np.float32([a, b]))


class Counted:
    """Batches of a memory pool of their own, which says how many bytes of them are held when the next one is made."""

    def __init__(self, batch_rows, num_batches, num_columns=2):
        self.pool, self.most = pa.proxy_memory_pool(pa.default_memory_pool()), 0
        self.rows, self.num_batches, self.num_columns = batch_rows, num_batches, num_columns
        self.batch_bytes = 8 * batch_rows * num_columns

    def column(self, number, at):
        base = pa.array(np.arange(self.rows) % 1000)
        return pc.multiply(base, pa.scalar(1 + (number + at) % 3), memory_pool=self.pool)

    def batches(self):
        for number in range(self.num_batches):
            self.most = max(self.most, self.pool.bytes_allocated())
            columns = [self.column(number, at) for at in range(self.num_columns)]
            yield pa.record_batch(columns, ["src", "dst"][: self.num_columns])
            del columns

    def __arrow_c_stream__(self, requested_schema=None):
        schema = pa.schema([(name, pa.int64()) for name in ("src", "dst")[: self.num_columns]])
        return pa.RecordBatchReader.from_batches(schema, self.batches()).__arrow_c_stream__(requested_schema)

    def values(self, at):
        return np.concatenate([self.column(number, at).to_numpy() for number in range(self.num_batches)])


@pytest.mark.parametrize("door", ["edges", "features"])
def test_a_source_is_held_a_batch_at_a_time_and_a_line_says_where_its_rows_are(door, monkeypatch, tmp_path):
    monkeypatch.setattr(arrow_rows, "IN_MEMORY_BYTES", 1 << 18)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = Counted(batch_rows=5000, num_batches=60)
    with pytest.warns(UserWarning, match=said(f"Counted gives once 256 KiB scratch disk {tmp_path} TMPDIR")) as told:
        if door == "edges":
            stream = gs.open_edge_stream(source, chunk_edges=1 << 12)
        else:
            rows = rows_of(source)
    assert len(told) == 1, [str(one.message) for one in told]
    assert source.most <= (1 << 18) + 2 * source.batch_bytes < source.num_batches * source.batch_bytes / 8
    assert not list(tmp_path.iterdir())  # the file has no name: a kill leaves nothing
    if door == "edges":
        for _ in range(2):
            chunks = list(stream.chunks())
            found = [np.concatenate([getattr(chunk, end) for chunk in chunks]) for end in ("src", "dst")]
            np.testing.assert_array_equal(found, [source.values(0), source.values(1)])
    else:
        assert isinstance(rows, np.memmap)
        np.testing.assert_array_equal(rows, np.stack([source.values(0), source.values(1)], 1))


def test_a_missing_number_behind_what_is_on_scratch_disk_makes_floats_of_all(monkeypatch):
    monkeypatch.setattr(arrow_rows, "IN_MEMORY_BYTES", 100)
    table = pa.table({"y": pa.chunked_array([np.arange(50), np.arange(50), pa.array([1, None]), np.arange(9)])})
    with pytest.warns(UserWarning, match=said("RecordBatchReader scratch disk")):
        found = rows_of(table.to_reader())
    np.testing.assert_array_equal(found, rows_of(table))
    assert found.dtype == rows_of(table).dtype == np.float64


def failing():
    yield EDGES.select(["src", "dst"]).to_batches()[0]
    raise OSError("the server\nis gone")


def test_a_source_that_fails_or_has_no_edges_is_named():
    schema = EDGES.select(["src", "dst"]).schema
    with pytest.raises(EdgeStreamError, match=said(f"RecordBatchReader row {NUM_EDGES} cannot be read server is gone")):
        gs.open_edge_stream(pa.RecordBatchReader.from_batches(schema, failing()))
    with pytest.raises(EdgeStreamError, match=said("column 'w' must hold integers float cast it")):
        gs.open_edge_stream(EDGES.to_reader(), src="src", dst="w")
    with pytest.raises(ValueError, match=said("labels shape (60) got (0,)")):
        reader = NODES.select(["y"]).to_reader()
        assert len(reader.read_all()) == NUM_NODES  # a reader that was read gives nothing more
        load_arrays(gs.open_edge_stream(EDGES, num_nodes=NUM_NODES), Columns(labels=reader))


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("database") / "graph.db"
    with duckdb.connect(str(path)) as connection:
        for name, table in {"follows": EDGES, "nodes": NODES}.items():
            connection.register("given", table)
            connection.execute(f"create table {name} as select * from given")
            connection.unregister("given")
    return path


def test_queries_are_the_files_of_a_graph(database, tmp_path):
    def query(text):
        return f"duckdb:{database}?{text}"

    before = database.read_bytes()
    nodes = {"nodes": query("select id from nodes"), "masks": query("select split from nodes")}
    nodes |= {"features": query("select a, b from nodes"), "labels": query("select y from nodes")}
    named = query("select 'né' || src as src, 'né' || dst as dst, kind from follows;")
    found = load_files(named, edge_type="kind", edge_weight=query("select w from follows"), **nodes)
    assert found.name == "graph" and found.schema.edge_types[:3] == tuple(("node", str(i), "node") for i in range(3))
    files = {"nodes": "id", "masks": "split", "features": "a,b", "labels": "y"}
    pq.write_table(NODES, tmp_path / "nodes.parquet")
    ends = {end: pc.binary_join_element_wise("né", EDGES[end].cast(pa.string()), "") for end in ("src", "dst")}
    named_edges = EDGES.set_column(0, "src", ends["src"]).set_column(1, "dst", ends["dst"])
    pq.write_table(named_edges, tmp_path / "graph.parquet")
    given = {name: f"{tmp_path}/nodes.parquet:{columns}" for name, columns in files.items()}
    edges = f"{tmp_path}/graph.parquet"
    wanted = load_files(edges, edge_type="kind", edge_weight=f"{edges}:w", **given)
    assert content(write(tmp_path / "found", found).root) == content(write(tmp_path / "wanted", wanted).root)
    assert database.read_bytes() == before and [path.name for path in database.parent.iterdir()] == ["graph.db"]


def test_queries_of_one_database_are_read_side_by_side(database, monkeypatch):
    opened = f"duckdb:{database}?select src, dst from follows"
    first = arrow_rows.open_reader(opened)
    monkeypatch.setattr("lightning_gnnscale.edge_stream.duckdb_query.free_memory_bytes", lambda: 1 << 30)
    for reader in (arrow_rows.open_reader(opened), first):
        assert reader.read_all().equals(EDGES.select(["src", "dst"]))


def test_a_query_is_known_by_its_text_and_its_database(database, tmp_path):
    def fingerprint(path, text="select src, dst from follows"):
        return gs.open_edge_stream(f"duckdb:{path}?{text}").fingerprint()

    assert fingerprint(database) == fingerprint(database)
    assert fingerprint(database) != fingerprint(database, "select dst, src from follows")
    assert fingerprint(database) != fingerprint(shutil.copy(database, tmp_path / "copy.db"))
    assert gs.open_edge_stream(f"duckdb:{database}?select src, dst from follows").source_files() == [database]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a database ? one SELECT duckdb:graph.db?select"),
        ("selec 1", "Parser Error selec mend"),
        ("select nope from follows", "Binder Error nope mend"),
        ("select 1; select 2", "one SELECT got SELECT, SELECT"),
        ("copy nodes to 'nodes.csv'", "one SELECT got COPY"),
        ("insert into follows values (1, 2, 0, 0, 0)", "one SELECT got INSERT"),
        ("select * from read_csv('/etc/hosts')", "Permission Error disabled"),
        ("select src from follows", "which columns src= dst= src"),
        ("select src, dst, w, kind, since from follows limit 0", ""),
        ("select src, w from follows", "column 'w' integers float w::bigint"),
        ("select id as src, id as dst from nodes", "column 'src' holds strings relabel=True"),
        ("select nullif(src, 5) as src, dst from follows", "the id is missing null leave such rows out"),
    ],
)
def test_a_query_that_gives_no_edges_is_refused_in_one_line(database, text, words):
    opened = f"duckdb:{database}?{text}"
    if not words:
        assert gs.open_edge_stream(opened).count() == (0, 0)
        return
    with pytest.raises((EdgeStreamError, ValueError), match=said(words)) as error:
        gs.open_edge_stream(opened).count()
    assert "\n" not in str(error.value)


def test_columns_of_a_query_are_checked(database):
    def read(**columns):
        return load_arrays(gs.open_edge_stream(EDGES, num_nodes=NUM_NODES), Columns(**columns))

    with pytest.raises(ValueError, match=said("split numbers string")):
        read(features=f"duckdb:{database}?select a, split from nodes")
    with pytest.raises(ValueError, match=said("labels shape (60) got (59,)")):
        read(labels=f"duckdb:{database}?select y from nodes limit 59")
    with pytest.raises(ValueError, match=said("features no such file nope.db")):
        read(features="duckdb:nope.db?select a from nodes")
    with pytest.raises(EdgeStreamError, match=said("nope.db no such file DuckDB database")):
        gs.open_edge_stream("duckdb:nope.db?select src, dst from follows")


def test_a_database_that_is_open_and_a_package_that_is_missing_are_said(database, monkeypatch, tmp_path):
    own = shutil.copy(database, tmp_path / "own.db")
    opened = f"duckdb:{own}?select src, dst from follows"
    with duckdb.connect(str(own)), pytest.raises(EdgeStreamError, match=said("is open in this process already")):
        gs.open_edge_stream(opened)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(EdgeStreamError, match=said("pip install 'lightning-gnnscale[duckdb]'")):
        gs.open_edge_stream(opened)


def test_commands_look_for_the_database_first():
    loader = {"_target_": "lightning_gnnscale.dataset.load_files", "edges": "duckdb:nope.db?select 1"}
    with pytest.raises(UsageError, match=said("dataset.edges nope.db no such file")):
        check_paths(OmegaConf.create({"dataset": loader, "store": None}))
