"""Models over node types and edge types, and of numbers, on a store:

sampled batches, exact evaluation, learned rows.
"""

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.layer_source import StoreLayerSource
from lightning_gnnscale.edge_stream.relations import EdgesByType, HeteroStream
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.model import HGT, RGAT, RGCN, GraphSAGE, Hetero, layerwise_inference
from tests.says import said
from tests.tiers import each_value, first

COUNTS = {"paper": 40, "author": 25, "field": 6}
SCHEMA = GraphSchema(
    tuple(COUNTS),
    (
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("field", "names", "paper"),
        ("paper", "rev_cites", "paper"),
        ("paper", "rev_writes", "author"),
        ("paper", "rev_names", "field"),
    ),
    (3, 4, 5, 0, 1, 2),
)
WIDTHS = {"paper": 5, "author": 3, "field": 0}
EDGES = ((120, 0), (90, 1), (30, 2))
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
MODELS = [(RGCN, {}), (RGCN, {"num_bases": 2}), (RGAT, {"heads": 2}), (HGT, {"heads": 2})]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng, sources = np.random.default_rng(0), []
    for count, relation in EDGES:
        source, _, target = SCHEMA.edge_types[relation]
        edges = np.stack([rng.integers(0, COUNTS[source], count), rng.integers(0, COUNTS[target], count)])
        sources.append(EdgesByType(gs.open_edge_stream(np.unique(edges, axis=1)), relation))
    stream = HeteroStream(sources, SCHEMA, list(COUNTS.values()), to_undirected=True)
    features = {
        name: rng.standard_normal((COUNTS[name], width)).astype(np.float32) for name, width in WIDTHS.items() if width
    }
    labels = np.full(sum(COUNTS.values()), -1)
    labels[: COUNTS["paper"]] = np.arange(COUNTS["paper"]) % 3
    first = np.arange(len(labels)) < COUNTS["paper"]
    part = {name: first & (np.arange(len(labels)) % 4 == at) for at, name in enumerate(("train", "val", "test"))}
    parts = gs.partition(stream, method="random", num_parts=3, seed=0)
    return gs.write_partition_store(
        tmp_path_factory.mktemp("kinds") / "store", stream, parts, features=features, labels=labels, masks=part
    )


def build(kind, **options):
    torch.manual_seed(0)
    return kind(WIDTHS, 8, 3, num_layers=2, dropout=0.0, schema=SCHEMA, **options)


def whole(model, store):
    """The model's outputs from all edges of the store at once."""
    nodes = np.arange(store.num_nodes)
    rows = store.features.read(nodes)
    x = gs.sampler.minibatch.rows_by_node_type(rows)
    target = np.repeat(nodes, np.diff(store.csc.indptr))
    edge_index = torch.from_numpy(np.stack([np.asarray(store.csc.indices, np.int64), target]))
    edge_type = torch.from_numpy(np.asarray(store.edge_type, np.int64))
    with torch.no_grad():
        return model.eval()(x, edge_index, edge_type=edge_type, node_type=torch.from_numpy(rows.node_type))


@each_value
@pytest.mark.parametrize(("kind", "options"), MODELS)
@pytest.mark.parametrize("block_edges", [7, None])
def test_exact_evaluation_reads_node_types_and_relations(store, tmp_path, kind, options, block_edges):
    dm = gs.PartitionDataModule(store)
    dm.setup("test")
    model, source = build(kind, **options), StoreLayerSource(store, [0, 1, 2], dm._scratch, block_edges=11)
    result = layerwise_inference(model, source, block_edges=block_edges)
    found = result.read(np.arange(store.num_nodes))
    np.testing.assert_allclose(found, whole(model, store).numpy(), rtol=1e-4, atol=1e-5)
    dm.teardown("test")


@first(2)
@pytest.mark.parametrize(("kind", "options"), [*MODELS, (Hetero, {})])
def test_batches_with_all_neighbours_give_the_whole_graphs_outputs(store, kind, options):
    dm = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([-1, -1]), batch_size=4, scope="graph")
    dm.setup("fit")
    if kind is Hetero:
        torch.manual_seed(0)
        model = Hetero(Plain(), SCHEMA, WIDTHS).eval()
    else:
        model = build(kind, **options)
    expected, module, seen = whole(model, store), gs.NodeClassifier(model, num_classes=3), 0
    with torch.no_grad():
        for batch in dm.train_dataloader():
            seeds = batch.n_id[: batch.batch_size]
            torch.testing.assert_close(module(batch)[: len(seeds)], expected[seeds], rtol=1e-4, atol=1e-5)
            seen += len(seeds)
    assert seen == 10
    dm.teardown("fit")


class Plain(torch.nn.Module):
    def __init__(self):
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((8, 8), 3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@each_value
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_a_trainer_fits_tests_and_predicts(store, kind, options, learned):
    dm = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([4, 4]), batch_size=4)
    torch.manual_seed(0)
    widths = WIDTHS | {"field": 4} if learned else WIDTHS
    model = kind(widths, 8, 3, dropout=0.1, schema=SCHEMA, **options)
    inputs = gs.DistributedEmbedding(store.num_nodes, 4, seed=0) if learned else None
    module = gs.NodeClassifier(model, lr=0.05, inputs=inputs)
    trainer = L.Trainer(devices=1, strategy="gnnscale", max_epochs=2, **QUIET)
    trainer.fit(module, dm)
    assert "val_acc" in trainer.callback_metrics
    assert 0 <= trainer.test(module, dm, verbose=False)[0]["test_acc"] <= 1
    predicted = trainer.predict(module, dm)[0]
    assert len(predicted["nodes"]) == store.num_nodes
    if learned:  # and only the rows of kinds that read them were
        kinds = store.node_type(np.arange(store.num_nodes))
        first = gs.DistributedEmbedding(store.num_nodes, 4, seed=0)
        first.open()
        nodes = torch.arange(store.num_nodes)
        moved = (first.pull(nodes) != inputs.pull(nodes)).any(dim=1).numpy()
        assert moved[kinds == 2].any() and not moved[kinds != 2].any()


def test_a_model_without_relations_is_refused(store):
    dm = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([4, 4]), batch_size=4)
    trainer = L.Trainer(devices=1, strategy="gnnscale", max_epochs=1, **QUIET)
    with pytest.raises(StrategyError, match=said("GraphSAGE edge_type")):
        trainer.fit(gs.NodeClassifier(GraphSAGE(5, 8, 3)), dm)
    whole = gs.FullGraphDataModule(store)
    with pytest.raises(gs.GNNScaleError, match=said("edge types 6 PartitionDataModule")):
        trainer.fit(gs.NodeClassifier(build(RGCN)), whole)


@first(1)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("evaluation", ["layerwise", "sampled"])
def test_numbers_of_nodes_are_predicted(tmp_path, columns, evaluation):
    rng = np.random.default_rng(0)
    edges, features = np.unique(rng.integers(0, 60, (2, 200)), axis=1), rng.standard_normal((60, 4)).astype(np.float32)
    targets = features[:, :columns].copy()
    targets[::7] = np.nan
    masks = {name: np.arange(60) % 3 == at for at, name in enumerate(("train", "val", "test"))}
    stream = gs.open_edge_stream(edges, num_nodes=60)
    parts = gs.partition(stream, method="random", num_parts=2, seed=0)
    given = {"features": features, "labels": targets if columns > 1 else targets[:, 0], "masks": masks}
    store = gs.write_partition_store(tmp_path / "s", stream, parts, regression=True, **given)
    dm = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([-1, -1]), batch_size=16, evaluation=evaluation)
    module = gs.NodeRegressor(GraphSAGE(4, 8, columns, dropout=0.0))
    trainer = L.Trainer(devices=1, strategy="gnnscale", max_epochs=2, **QUIET)
    trainer.fit(module, dm)
    found = trainer.test(module, dm, verbose=False)[0]
    target = np.repeat(np.arange(60), np.diff(store.csc.indptr))
    directed_edges = torch.from_numpy(np.stack([np.asarray(store.csc.indices, np.int64), target]))
    with torch.no_grad():
        outputs = module.backbone.eval()(torch.from_numpy(features[store.original_nid]), directed_edges).numpy()
    errors = (outputs - targets[store.original_nid])[masks["test"][store.original_nid]]
    assert found["test_rmse"] == pytest.approx(np.sqrt(np.nanmean(errors**2)), rel=1e-4)
    assert found["test_mae"] == pytest.approx(np.nanmean(np.abs(errors)), rel=1e-4)
    with pytest.raises(StrategyError, match="out_channels|say 1|say 2"):
        trainer.fit(gs.NodeRegressor(GraphSAGE(4, 8, 3)), dm)
