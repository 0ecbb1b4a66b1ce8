"""Parts that a batch mixes are sampled as one graph, `scope="parts"`; the oracle reads rows of the full graph."""

import lightning as L
import numpy as np
import pytest
import torch
from test_part_loader import all_contents, loader_threads
from test_typed_batches import SAMPLERS as TYPED
from test_typed_batches import description, edges_of, told

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.train_loader import make_interleaved_loader
from lightning_gnnscale.loader import LoaderOptions, RankPlace
from lightning_gnnscale.loader.part_walk import PartUnions
from lightning_gnnscale.partition_store.part_graph import load_part_graph, union_of_parts
from tests.says import said
from tests.tiers import each_value

NODES, PARTS = 240, 6
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")


def write(root, undirected: bool, **columns):
    rng = np.random.default_rng(4)
    edges = rng.integers(0, NODES, (2, 1400))
    stream = gs.open_edge_stream(edges, num_nodes=NODES, to_undirected=undirected)
    p = gs.partition(stream, "spring", PARTS, evaluate=False)
    features = rng.random((NODES, 5)).astype(np.float32)
    labels, train = rng.integers(0, 3, NODES), rng.random(NODES) < 0.7
    masks = {"train": train, "val": ~train, "test": ~train}
    return gs.write_partition_store(root, stream, p, features=features, labels=labels, masks=masks, **columns)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("together") / "store", False)


@pytest.fixture(scope="module")
def columned(tmp_path_factory):
    rng = np.random.default_rng(5)
    columns = {
        "edge_weight": rng.random(1400).astype(np.float32) + 0.5,
        "edge_features": np.arange(1400 * 2, dtype=np.float32).reshape(-1, 2),
        "node_time": rng.integers(0, 9, NODES),
        "edge_time": rng.integers(0, 9, 1400),
    }
    return write(tmp_path_factory.mktemp("together") / "columned", False, **columns)


@pytest.fixture(scope="module")
def hetero(tmp_path_factory):
    dataset = gs.hetero_graph(**description())
    columns = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    columns |= {"node_time": dataset.node_time, "edge_time": dataset.edge_time}
    p = gs.partition(dataset.stream, "spring", 4, evaluate=False)
    root = tmp_path_factory.mktemp("together") / "hetero"
    return dataset, gs.write_partition_store(root, dataset.stream, p, **columns)


def part_of(store) -> np.ndarray:
    return np.repeat(np.arange(store.num_parts), np.diff(store.part_offsets))


def row_in(store, parts, node: int) -> np.ndarray:
    """Positions of the edges that a union of parts has of a node."""
    begin, end = store.csc.indptr[node : node + 2]
    part, sources = part_of(store), store.csc.indices[begin:end]
    if part[node] in parts:
        return np.arange(begin, end)
    reads = set(np.repeat(part, np.diff(store.csc.indptr))[store.csc.indices == node])  # parts whose core reads it
    return begin + np.flatnonzero(np.isin(part[sources], [one for one in parts if one in reads]))


@each_value
@pytest.mark.parametrize("kind", ["directed", "undirected", "columned"])
@pytest.mark.parametrize("parts", [(2,), (0, 1), (1, 3, 5), tuple(range(PARTS))], ids=str)
def test_a_union_has_the_rows_of_its_parts_and_their_columns(kind, parts, store, columned, tmp_path):
    if kind == "undirected":
        store = write(tmp_path / "store", True)
    elif kind == "columned":
        store = columned
    graphs = [load_part_graph(store, 1, part) for part in parts]
    union = union_of_parts(graphs)
    nodes = union.halo_nodes
    assert union.num_core == 0 and np.array_equal(nodes, np.unique(np.concatenate([one.nodes for one in graphs])))
    for local, node in enumerate(nodes.tolist()):
        begin, end = union.csc.indptr[local : local + 2]
        expected = row_in(store, parts, node)
        assert nodes[union.csc.indices[begin:end]].tolist() == store.csc.indices[expected].tolist()
        if union.edge_id is not None:
            assert sorted(union.edge_id[begin:end]) == expected.tolist()
    if kind == "columned":
        assert np.array_equal(union.columns["edge_time"], np.asarray(store.edge_column("edge_time"))[union.edge_id])
        assert np.array_equal(union.columns["node_time"], np.asarray(store.node_time)[nodes])
        assert np.array_equal(union.degree, np.asarray(store.weighted_degree)[nodes])
    else:
        assert np.array_equal(union.degree, np.diff(store.csc.indptr)[nodes])


def loader_of(store, sampler, source=None, rank=0, world_size=1, **options):
    place = RankPlace(rank, world_size, 0, rank, world_size)
    options = LoaderOptions(batch_size=24, seed=3, **options)
    features = store.part_features
    given = (store, sampler, 1, 3, options, features, source or gs.Threads(2), place)
    return make_interleaved_loader(*given, together=True)


@pytest.mark.parametrize("epoch", [0, 1])
def test_batches_follow_the_edges_between_the_parts_of_an_epoch(store, epoch):
    """With all neighbours a chunk has all of the union that its seeds reach in two hops, and nothing else."""
    loader = loader_of(store, gs.NeighborSampler([-1, -1]))
    unions = PartUnions(tuple(range(PARTS)), frozenset(), 3, 3)
    loader.set_epoch(epoch)
    seen, crossing = [], 0
    for chunk in loader.sampled_chunks():
        parts, seeds = unions.of(chunk.part, epoch), chunk.n_id[: chunk.batch_size].tolist()
        assert chunk.part in parts and (part_of(store)[seeds] == chunk.part).all()
        hops, frontier, edges = set(seeds), seeds, set()
        for _ in range(2):
            rows = {node: store.csc.indices[row_in(store, parts, node)].tolist() for node in frontier}
            edges |= {(source, node) for node, row in rows.items() for source in row}
            frontier = sorted({source for row in rows.values() for source in row} - hops)
            hops |= set(frontier)
        found = chunk.n_id[chunk.edge_index].numpy()
        assert set(chunk.n_id.tolist()) == hops and set(zip(*found.tolist(), strict=True)) == edges
        ends = part_of(store)[found]
        crossing += int((ends[0] != ends[1])[np.isin(ends[0], parts)].sum())
        seen += seeds
    assert sorted(seen) == np.flatnonzero(store.masks["train"]).tolist() and crossing > 100
    loader.close()


def test_other_parts_are_together_in_another_epoch():
    unions = PartUnions(tuple(range(9)), frozenset([4]), 3, seed=1)
    epochs = [unions.in_order(epoch) for epoch in range(6)]
    assert all(sorted(part for union in one for part in union) == [0, 1, 2, 3, 5, 6, 7, 8] for one in epochs)
    assert len({tuple(sorted(one)) for one in epochs}) > 3
    assert all(part in unions.of(part, epoch) for epoch in range(6) for part in (0, 8))


SAMPLERS = {
    "uniform": gs.NeighborSampler([4, 3]),
    "weighted": gs.NeighborSampler([4, 3], weighted=True),
    "by time": gs.NeighborSampler([4, 3], temporal_strategy="uniform"),
    "both ways": gs.NeighborSampler([3, 3], subgraph_type="bidirectional"),
    "layerwise": gs.LayerwiseSampler([60, 40]),
}
SOURCES = {"processes": gs.Processes(2), "task graphs": gs.TaskGraphs(2), "three threads": gs.Threads(3)}


@each_value
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_source_gives_the_same_batches(columned, name, source):
    with_weights = name != "layerwise"
    loaders = [loader_of(columned, SAMPLERS[name], one) for one in (None, SOURCES[source])]
    found = []
    for loader in loaders:
        loader.set_epoch(1)
        found.append(all_contents(loader))
        loader.close()
    assert found[0] == found[1] and len(found[0]) > 4
    assert with_weights is False or found[0][0]["edge_weight"] is not None
    assert loader_threads() == []


@each_value
@pytest.mark.parametrize("name", ["together", "by edge type", "by time", "induced"])
@pytest.mark.parametrize("source", SOURCES)
def test_typed_batches_hold_what_the_store_has(hetero, name, source):
    dataset, store = hetero
    edges = edges_of(store)
    loaders = [loader_of(store, TYPED[name], one) for one in (None, SOURCES[source])]
    for batch, other in zip(*loaders, strict=True):
        nodes, (sources, targets) = batch.n_id.numpy(), batch.edge_index.numpy()
        assert told(nodes[sources], nodes[targets], batch.edge_type, batch.edge_time) <= edges
        assert np.array_equal(batch.node_type.numpy(), store.node_type(nodes))
        papers = np.asarray(store.original_nid)[nodes[batch.node_type.numpy() == 1]] - dataset.stream.type_offsets[1]
        assert np.array_equal(batch.x.tables[1].numpy(), dataset.features["paper"][papers])
        assert torch.equal(batch.n_id, other.n_id) and torch.equal(batch.edge_index, other.edge_index)
    for loader in loaders:
        loader.close()


def test_ranks_share_an_epoch_and_a_resumed_one_goes_on(store):
    whole = []
    for rank in range(2):
        loader = loader_of(store, SAMPLERS["uniform"], rank=rank, world_size=2)
        batches = iter(loader)
        whole.append([next(batches).n_id.tolist()])
        state = loader.state_dict()
        whole[-1] += [batch.n_id.tolist() for batch in batches]
        again = loader_of(store, SAMPLERS["uniform"], rank=rank, world_size=2)
        again.load_state_dict(state)
        assert [batch.n_id.tolist() for batch in again] == whole[-1][1:]
        loader.close()
    assert len(whole[0]) == len(whole[1]) > 2
    given = (1, 3, LoaderOptions(batch_size=24, seed=3), None, gs.Threads(), RankPlace(0, 2, 0, 0, 2))
    alone = make_interleaved_loader(store, SAMPLERS["uniform"], *given)
    with pytest.raises(ValueError, match="interleave="):
        alone.load_state_dict(state)


@pytest.mark.parametrize("rows", ["mapped", "resident", "planned"])
def test_rows_are_those_of_the_store_however_they_are_read(store, rows):
    dm = gs.PartitionDataModule(
        store=store, scope="parts", interleave_parts=2, batch_size=24, sampler=gs.NeighborSampler([4, 3]), rows=rows
    )
    model = gs.NodeClassifier(gs.model.GraphSAGE(5, 8, 3, num_layers=2))
    seen = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(torch.equal(batch.x, torch.from_numpy(store.features.read(batch.n_id.numpy()))))

    trainer = L.Trainer(
        max_epochs=2, strategy="gnnscale", accelerator="cpu", devices=1, callbacks=[Look()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, dm)
    assert len(seen) > 6 and all(seen)


def test_what_does_not_go_with_it_is_refused_in_one_line(store):
    with pytest.raises(ValueError, match=said("NeighborSampler scope")):
        gs.PartitionDataModule(store=store, scope="parts", sampler=gs.SaintSampler("walk", num_roots=9))
    with pytest.raises(ValueError, match=said("halo_hops 2")):
        gs.PartitionDataModule(store=store, scope="parts", halo_hops=2)
    with pytest.raises(ValueError, match=said("rows=owners scope")):
        gs.PartitionDataModule(store=store, scope="parts", rows="owners")
    dm = gs.PartitionDataModule(store=store, scope="parts")
    model = gs.NodeClassifier(gs.model.GraphSAGE(5, 8, 3, num_layers=2))
    for strategy in (gs.GNNScaleStrategy(weights=gs.ModelAveraging()), "auto"):
        trainer = L.Trainer(max_epochs=1, strategy=strategy, accelerator="cpu", devices=1, logger=False)
        with pytest.raises(gs.StrategyError, match=said("scope parts")):
            trainer.fit(model, dm)
