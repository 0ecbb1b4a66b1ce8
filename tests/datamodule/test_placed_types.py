"""Training on node types with features of their own through placements and caches: the same batches bit for bit."""

import lightning as L
import numpy as np
import pytest
import torch
from oracles.typed_rows import as_rows, write_typed

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.placement import PlacementSettings
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.sweep)], ids=["plain", "quantised"])
def root(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("node_types") / "store"
    write_typed(path, quantised=request.param)
    return path


def make(root, **options) -> gs.PartitionDataModule:
    settings = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 32, "seed": 1, "scope": "graph"} | options
    return gs.PartitionDataModule(store=root, **settings)


class Batches(L.Callback):
    """Keeps what the batches of a fit hold."""

    def __init__(self):
        self.held = []

    def on_train_batch_start(self, trainer, module, batch, index):
        ids = (batch.n_id.numpy().tobytes(), batch.edge_type.numpy().tobytes())
        self.held.append((ids, as_rows(batch.x), batch.x.node_type.tolist(), [str(t.dtype) for t in dense(batch)]))


def dense(batch):
    return [table for table in batch.x.tables if isinstance(table, torch.Tensor)]


def trained(dm, **options) -> tuple[list, dict]:
    torch.manual_seed(0)
    dm.setup("predict")
    model = gs.NodeClassifier(gs.model.RGCN(dm.feature_dims, 8, dm.num_classes, schema=dm.schema), lr=0.02)
    seen = Batches()
    L.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=[seen],
        strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()), **options,
    ).fit(model, dm)  # fmt: skip
    return seen.held, {name: value.clone() for name, value in model.state_dict().items()}


def last(name: str) -> dict:
    return [event for event in events.recent() if event["event"] == name][-1]


def check_same(found, expected):
    assert len(found[0]) == len(expected[0]) > 0 and found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


SETTINGS = {
    "rows": PlacementSettings(buffer_share=0.3, alpha=0),
    "lru": PlacementSettings("degree", buffer_share=0.1, alpha=0, cache_rows=40),
    "belady": PlacementSettings(buffer_share=0.1, alpha=0, cache_rows=40, cache_policy="belady", lookahead_batches=3),
    "disk": PlacementSettings(buffer_share=0.1, alpha=0, host_rows=30, locality_scale=2.0),
}


CASES = [(name, source) for name in ("rows", "lru", "belady") for source in ("threads", "processes", "task_graphs")]


@first(4)
@pytest.mark.parametrize(("name", "source"), [*CASES, ("disk", "threads")])
def test_placement_changes_no_bit(root, name, source):
    found = trained(make(root, rows=SETTINGS[name], source=source))
    placed, reads = last("placement"), last("reads")
    counts = {tier: reads[tier] for tier in ("local", "peer", "host", "disk", "cache")}
    read = sum(sum(map(len, rows)) for _, rows, *_ in found[0])
    assert sum(counts.values()) == read and counts["local"] > 0 and counts["peer"] == 0
    assert (counts["cache"] > 0) == (SETTINGS[name].cache_rows > 0)
    assert (counts["disk"] > 0) == (SETTINGS[name].host_rows is not None)
    store = gs.PartitionStore.open(root)
    assert placed["buffer_bytes"] >= 8 * sum(table.num_rows for table in store.features.tables[:2])
    if name == "rows":
        assert abs(counts["local"] / read - placed["predicted"]["local"]) < 0.1
    if SETTINGS[name].locality_scale is None:
        check_same(found, trained(make(root)))


def test_a_placement_made_before_has_caches_by_node_type(root):
    store = gs.PartitionStore.open(root)
    train = np.flatnonzero(store.masks["train"])
    prob = gs.access_probability(store, train, fanouts=[4, 3], batch_size=32)
    placement = gs.place(prob, 1, 60, alpha=0, store=store, row_bytes=store.features.row_bytes)
    dm = make(root, rows=PlacementSettings(placement, cache_rows=50))
    dm.setup("fit")
    assert isinstance(dm.buffer, gs.TypedBuffers) and dm.buffer.placement is placement
    assert any(buffer is not None and buffer.cache is not None for buffer in dm.buffer.buffers)
    dm.teardown("fit")


def test_what_is_gathered_where_a_batch_trains_is_the_batch_s(root):
    """As on a GPU, whose batches come without features."""
    dm = make(root, rows=PlacementSettings(buffer_share=0.3, alpha=0))
    dm.setup("fit")
    buffer, dm._placed.buffer = dm.buffer, None
    dm.stored_features = False
    batch = next(iter(dm.train_dataloader()))
    assert batch.x is None
    dm._placed.buffer = buffer
    buffer.on = "cuda:0"  # where `on_after_batch_transfer` gathers
    found = dm.on_after_batch_transfer(batch, 0)
    expected = next(iter(make(root).train_dataloader()))
    assert torch.equal(found.n_id, expected.n_id) and as_rows(found.x) == as_rows(expected.x)
    assert found.x is dm.on_after_batch_transfer(found, 0).x, "gathered once"
    dm.teardown("fit")
