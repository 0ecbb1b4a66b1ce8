"""What a model reads of each node is what numpy has of it: every column, of one node type or several, every source."""

import itertools

import lightning as L
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store import publish
from lightning_gnnscale.placement import PlacementSettings
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:.*validation")

NODES, DIM = {"paper": 160, "author": 90}, {"paper": 12, "author": 5}
COLUMNS = ("mapped", "quantised", "sparse", "packed", "URL", "cached", "tiered", "owners", "learned")
SOURCES = ("threads", "processes", "ray")
# What is refused, whatever the number of node types: to the names, values and remedies that the one line has.
REFUSED: dict[tuple[str, str], str] = {
    ("owners", "processes"): "rows=owners source=threads task_graphs ray",
}


def rows_of(node_type: str, sparse: bool = False) -> np.ndarray:
    """The features of a node type, by plain numpy: no row is like another, and half of the numbers are 0 if sparse."""
    rng = np.random.default_rng(len(node_type))
    rows = rng.random((NODES[node_type], DIM[node_type]), np.float32) + 0.5
    return np.where(rng.random(rows.shape) < 0.5, 0, rows).astype(np.float32) if sparse else rows


def write(root, several: bool, sparse: bool, storage: str | None, **options) -> tuple[gs.PartitionStore, np.ndarray]:
    """Write a store of three parts; return it and (num_nodes, widest) what numpy has of each node, 0 beyond its width.

    Rows are in the order of the user's ids: those of papers, then those of authors.
    """
    rng = np.random.default_rng(1)
    own = {name: rows_of(name, sparse) for name in NODES}
    given = {name: sp.csr_array(rows) if sparse else rows for name, rows in own.items()}
    labels, train = rng.integers(0, 3, NODES["paper"]), rng.random(NODES["paper"]) < 0.5
    cites = rng.integers(0, NODES["paper"], (2, 900))
    if several:
        wrote = np.stack([rng.integers(0, NODES["author"], 400), rng.integers(0, NODES["paper"], 400)])
        graph = gs.hetero_graph(
            nodes={"paper": {"features": given["paper"], "labels": labels, "masks": {"train": train}},
                   "author": {"features": given["author"]}},
            edges={("author", "writes", "paper"): wrote, ("paper", "cites", "paper"): cites},
        )  # fmt: skip
        stream, columns = graph.stream, graph
        wide = np.zeros((sum(NODES.values()), max(DIM.values())), np.float32)
        for rows, first in zip(own.values(), (0, NODES["paper"]), strict=True):
            wide[first : first + len(rows), : rows.shape[1]] = rows
    else:
        stream = gs.open_edge_stream(cites, num_nodes=NODES["paper"], to_undirected=True)
        columns = gs.GraphDataset("one", stream, features=given["paper"], labels=labels, masks={"train": train})
        wide = own["paper"]
    columns.feature_storage = storage
    p = gs.partition(stream, "random", 3, seed=1)
    return gs.write_partition_store(root, stream, p, columns, **options), wide


class Reads(L.Callback):
    """Keeps which nodes each batch has, and what the backbone reads of them, in one table as numpy has it."""

    def __init__(self, backbone: torch.nn.Module, width: int):
        self.width, self.batches = width, []
        backbone.register_forward_pre_hook(self._note)

    def on_train_batch_start(self, trainer, module, batch, index):
        self.n_id = batch.n_id.numpy()

    def _note(self, backbone, arguments):
        x = arguments[0]
        found = np.zeros((len(self.n_id), self.width), np.float32)
        tables = [(slice(None), x)]
        if hasattr(x, "tables"):
            tables = [(np.flatnonzero(np.asarray(x.node_type) == number), one) for number, one in enumerate(x.tables)]
        for places, table in tables:
            dense = np.asarray(table.dense() if hasattr(table, "indptr") else table.detach())
            found[places, : dense.shape[1]] = dense
        self.batches.append((self.n_id, found))


def trained(dm: gs.PartitionDataModule, several: bool, width: int, inputs=None) -> list[tuple[np.ndarray, np.ndarray]]:
    dm.setup("predict")
    learned = 0 if inputs is None else inputs.dim
    if several:
        channels = {name: columns + learned for name, columns in dm.feature_dims.items()}
        backbone = gs.model.RGCN(channels, 4, 3, schema=dm.schema)
    else:
        backbone = gs.model.GraphSAGE(dm.num_features + learned, 4, 3)
    model, reads = gs.NodeClassifier(backbone, inputs=inputs), Reads(backbone, width + learned)
    L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[reads],
        strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()),
    ).fit(model, dm)  # fmt: skip
    return reads.batches


def settings_of(column: str, source: str) -> tuple[dict, dict]:
    """The options of the store and of the DataModule."""
    store = {"pack_halo": column == "packed", "storage": "int8" if column == "quantised" else None}
    options = {"scope": "part" if column == "packed" else "graph", "interleave_parts": 2}
    options |= {
        "mapped": {"rows": "mapped"},
        "cached": {"rows": PlacementSettings(buffer_share=0.1, alpha=0, cache_rows=30)},
        "tiered": {"rows": PlacementSettings(buffer_share=0.2, alpha=0, host_rows=40)},
        "owners": {"rows": "owners"},
    }.get(column, {})
    sources = {"threads": gs.Threads(2), "processes": gs.Processes(num_workers=1), "ray": gs.RayWorkers(address="auto")}
    if (column, source) == ("cached", "ray"):
        return store, {"scope": "graph", "source": gs.RayWorkers(address="auto", cache_rows=30)}
    if (column, source) == ("owners", "ray"):
        return store, {"scope": "graph", "source": gs.RayWorkers(address="auto"), "rows": "owners"}
    return store, options | {"source": sources[source]}


@pytest.fixture(scope="module")
def ray():
    """One cluster, and a worker that a source with an address finds, for all cases that need Ray."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    from lightning_gnnscale.remote import cluster
    from lightning_gnnscale.remote.messages import WorkerSettings
    from lightning_gnnscale.remote.ray_worker import start_workers

    cluster.join_ray(None, 60.0, 200 << 20)
    workers = start_workers([f"{cluster.PREPARED}0"], WorkerSettings("prepared"))
    ray.get(workers[0].ping.remote())
    yield
    ray.shutdown()


def check(tmp_path, column: str, source: str, several: bool) -> None:
    store_options, options = settings_of(column, source)
    store, wide = write(tmp_path / "store", several, "sparse" in column, **store_options)
    root = tmp_path / "store"
    if column == "URL":
        root = f"file://{tmp_path}/published"
        publish(tmp_path / "store", root)
    inputs = None
    if column == "learned":
        inputs = gs.DistributedEmbedding.for_store(store, 3, optimizer=gs.SparseSGD(lr=1e-30))  # rows stay as they are
        inputs.open()
        learned = inputs.pull(np.arange(store.num_nodes)).numpy()
    dm = gs.PartitionDataModule(store=root, sampler=gs.NeighborSampler([4, 3]), batch_size=32, seed=1, **options)
    try:
        batches = trained(dm, several, wide.shape[1], inputs)
    finally:
        if inputs is not None:
            inputs.close()
    assert batches and sum(len(nodes) for nodes, _ in batches) > 100
    for nodes, found in batches:
        expected = wide[store.original_nid[nodes]]
        if column == "learned":
            own = np.zeros_like(found)
            own[:, : expected.shape[1]] = expected
            dims = np.array([store.features.dim] * len(nodes))
            if several:
                dims = np.array([DIM["paper"], DIM["author"]])[store.node_type(nodes)]
            for row, (node, dim) in enumerate(zip(nodes, dims, strict=True)):
                own[row, dim : dim + 3] = learned[node]
            expected = own
        largest = np.abs(expected).max(axis=1, keepdims=True)
        bound = largest / 254 + 1e-6 if column == "quantised" else 0  # half a step of 255 on both sides of 0
        assert (np.abs(found - expected) <= bound).all(), (column, source, several)


CASES = list(itertools.product(COLUMNS, SOURCES, (False, True)))
# In the first tier each column, each source and each pair of a source and a number of node types comes once.
FIRST = {(column, SOURCES[number % 2], bool(number // 2 % 2)) for number, column in enumerate(COLUMNS)}


@pytest.mark.parametrize(
    ("column", "source", "several"),
    [pytest.param(*case, marks=() if case in FIRST else pytest.mark.sweep) for case in CASES],
)
def test_a_model_reads_what_numpy_has(tmp_path, request, column, source, several):
    refusal = REFUSED.get((column, source))
    if source == "ray" or (column == "owners" and refusal is None):
        request.getfixturevalue("ray")
    if column == "URL":
        request.getfixturevalue("monkeypatch").setenv("GNNSCALE_FETCHED", str(tmp_path / "fetched"))
    if refusal is None:
        check(tmp_path, column, source, several)
        return
    with pytest.raises((ValueError, gs.errors.GNNScaleError), match=said(refusal)):
        check(tmp_path, column, source, several)
