"""Learned rows for the nodes of some node types alone: against rows for all nodes, which a plain table stands for."""

import dataclasses
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.machine_plan import Machines
from lightning_gnnscale.errors import PartitionStoreError, StrategyError
from lightning_gnnscale.partition_store.typed_features import NodeTypesWithRows
from lightning_gnnscale.planner import predict_training
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize
from lightning_gnnscale.strategy import GradientAveraging

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from processes import launch

from tests.says import said
from tests.tiers import each_value, first

COUNTS, DIM = {"paper": 40, "author": 25, "field": 6}, 6
NUM = sum(COUNTS.values())
OPTIMIZERS = [gs.SparseAdam(0.05), gs.SparseAdam(0.05, bias="step"), gs.SparseSGD(0.1)]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def write_store(root, seed=0, features=("paper",)):
    """Four parts; the second has no author, the third no field, the last no node at all."""
    rng = np.random.default_rng(7)
    nodes = {node_type: {"num_nodes": count} for node_type, count in COUNTS.items()}
    nodes["paper"]["labels"] = np.arange(40) % 3
    for node_type in features:
        nodes[node_type]["features"] = rng.standard_normal((COUNTS[node_type], 5)).astype(np.float32)
    edges = {
        (source, name, "paper"): np.unique(
            np.stack([rng.integers(0, COUNTS[source], num), rng.integers(0, 40, num)]), axis=1
        )
        for source, name, num in (("paper", "cites", 120), ("author", "writes", 90), ("field", "names", 30))
    }
    dataset = gs.hetero_graph(nodes, edges)
    parts = gs.partition(dataset.stream, method="random", num_parts=4, seed=seed)
    part_id = np.random.default_rng(seed).integers(0, 3, NUM)
    part_id[40:65][part_id[40:65] == 1] = 0
    part_id[65:][part_id[65:] == 2] = 1
    parts = dataclasses.replace(parts, part_id=part_id.astype(parts.part_id.dtype))
    given = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    return gs.write_partition_store(root, dataset.stream, parts, **given)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("node_types") / "store")


def nodes_of(store, node_types):
    names = store.schema.node_types
    return np.flatnonzero(
        np.isin(store.node_type(np.arange(NUM)), [names.index(node_type) for node_type in node_types])
    )


def both(store, node_types, **options):
    """Rows of some node types, and rows of all nodes."""
    return (gs.DistributedEmbedding.for_store(store, DIM, node_types=given, **options) for given in (node_types, None))


def pushes(nodes, seed, num=12):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        chosen = rng.choice(nodes, rng.integers(0, 40))  # some come twice
        yield chosen, rng.normal(size=(len(chosen), DIM))


@each_value
@pytest.mark.parametrize("node_types", [["author"], ["field", "author"], ["paper", "field"], ["field"]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_those_of_a_table_of_all_nodes(store, node_types, optimizer):
    some, whole = (one.open() for one in both(store, node_types, optimizer=optimizer, seed=3))
    nodes = nodes_of(store, node_types)
    assert some.node_types.names == [node_type for node_type in COUNTS if node_type in node_types]
    assert np.array_equal(some.row_ids(nodes), np.arange(some.num_rows)), "in the order of the ids"
    assert torch.equal(some.pull(nodes), whole.pull(nodes)), "initial values"
    for chosen, gradients in pushes(nodes, seed=1):
        some.push(chosen, gradients)
        whole.push(torch.from_numpy(chosen), torch.from_numpy(gradients))
        shuffled = np.random.default_rng(2).permutation(nodes)
        assert torch.equal(some.pull(shuffled), whole.pull(shuffled))
    assert some.num_pushes == whole.num_pushes == 12
    rows = np.concatenate([rows for _, rows in some.rows_here()])
    assert np.array_equal(rows, whole.pull(nodes).numpy())


def test_memory_is_that_of_these_nodes(store):
    rows = 25 + 6
    some, whole = both(store, ["author", "field"])
    assert (some.num_nodes, some.num_rows, whole.num_rows) == (NUM, rows, NUM)
    assert some.nbytes == rows * (3 * DIM * 4 + 4) and whole.nbytes == NUM * (3 * DIM * 4 + 4)
    assert sum(array.nbytes for array in some.open()._arrays().values()) == some.nbytes
    for given in (list(COUNTS), None):
        all_node_types = gs.DistributedEmbedding.for_store(store, DIM, node_types=given, optimizer="sgd")
        assert all_node_types.node_types is None and all_node_types.nbytes == NUM * DIM * 4


def test_initial_values_do_not_depend_on_the_parts(store, tmp_path):
    other, found = write_store(tmp_path / "other", seed=5), []
    assert not np.array_equal(other.original_nid, store.original_nid)
    for one in (store, other):
        rows = gs.DistributedEmbedding.for_store(one, DIM, node_types=["author"]).open()
        found.append(rows.pull(one.store_nid[40:65]))
    assert torch.equal(*found)


@pytest.mark.parametrize("node_types", [["author"], ["paper", "field"]])
def test_runs_of_nodes_are_those_of_a_loop_over_nodes(store, node_types):
    found, nodes = NodeTypesWithRows.of(store, node_types), nodes_of(store, node_types)
    for start in range(found.num_rows + 1):
        for stop in range(start, found.num_rows + 1, 5):
            runs = list(found.runs(slice(start, stop)))
            asked = [node for run, _ in runs for node in range(run.start, run.stop)]
            rows = [row for _, run in runs for row in range(run.start, run.stop)]
            assert asked == nodes[start:stop].tolist() and rows == list(range(start, stop))
    assert found.part_offsets.tolist() == [int((nodes < offset).sum()) for offset in store.part_offsets]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda e: e.pull([50, 3]),
            "nodes 'paper'",
        ),
        (lambda e: e.push([0], np.ones((1, DIM))), "node_types=['paper' 'author'] ++model"),
        (lambda e: e.pull([NUM]), f"nodes [0, {NUM}) {NUM} {NUM}"),
    ],
)
def test_nodes_without_rows_are_refused_and_nothing_changes(tmp_path, call, told):
    one_part = write_store_in_order(tmp_path)
    embedding = gs.DistributedEmbedding.for_store(one_part, DIM, node_types=["author"]).open()
    before = embedding.pull(np.arange(40, 65)).clone()
    with pytest.raises(ValueError, match=said(told)) as caught:
        call(embedding)
    assert "\n" not in str(caught.value)
    assert torch.equal(embedding.pull(np.arange(40, 65)), before) and embedding.num_pushes == 0


def write_store_in_order(tmp_path):
    """One part: ids are those of the graph, papers first."""
    dataset = gs.hetero_graph({**COUNTS}, {"author,writes,paper": np.zeros((2, 1), np.int64)})
    parts = gs.partition(dataset.stream, method="random", num_parts=1)
    return gs.write_partition_store(tmp_path / "one", dataset.stream, parts)


@pytest.mark.parametrize(
    ("node_types", "told"),
    [
        (["writer"], "node_types 'writer'"),
        ([], "node_types []"),
        ("author", "node_types 'author'"),
    ],
)
def test_node_types_that_are_not_there_are_refused(store, node_types, told):
    with pytest.raises(ValueError, match=said(told)) as caught:
        gs.DistributedEmbedding.for_store(store, DIM, node_types=node_types)
    assert "\n" not in str(caught.value)


def test_node_types_are_asked_of_a_store_that_has_some(tmp_path, store):
    stream = gs.open_edge_stream(np.array([[0, 1], [1, 0]]))
    plain = gs.write_partition_store(tmp_path / "p", stream, gs.partition(stream, "random", num_parts=1))
    with pytest.raises(ValueError, match=said("node_types=['author'] graph nodes")):
        gs.DistributedEmbedding.for_store(plain, DIM, node_types=["author"])
    with pytest.raises(ValueError, match=said(f"node_types {NUM} nodes .for_store(")):
        gs.DistributedEmbedding(NUM, DIM, node_types=["author"])
    none = gs.hetero_graph({"a": 2, "b": 0}, {"a,to,a": np.array([[0], [1]])})
    empty = gs.write_partition_store(tmp_path / "e", none.stream, gs.partition(none.stream, "random", num_parts=1))
    with pytest.raises(ValueError, match=said("node_types=['b'] nodes store")):
        gs.DistributedEmbedding.for_store(empty, DIM, node_types=["b"])


def push_on_ranks(folder, root, hosts, optimizer):
    """Both embeddings take the same pushes of every rank; where ranks share a host, a node is pushed by one alone."""
    import torch.distributed as dist

    store, rank = gs.PartitionStore.open(root), dist.get_rank()
    node_types, pulled = ["author", "field"], []
    made = [one.join() for one in both(store, node_types, optimizer=optimizer, seed=3, hosts=hosts, dtype="float64")]
    nodes = nodes_of(store, node_types)
    mine = nodes if hosts == [5, 3] else nodes[rank :: dist.get_world_size()]
    for step, (chosen, gradients) in enumerate(pushes(mine, seed=rank)):
        for one in made:
            dist.barrier()
            one.push(chosen, gradients)
            dist.barrier()
            if step == 3:
                one.skip()
        pulled.append(torch.equal(*(one.pull(nodes[step:]) for one in made)))
    some = made[0]
    own = {ids.start: rows.copy() for ids, rows in some.rows_here()}
    return all(pulled), some.pull(nodes).clone(), own, some.nbytes, some.save(folder / "rows")


@first(1)
@pytest.mark.parametrize(("world", "hosts"), [(2, None), (2, [5, 3]), (3, [0, 1, 1])])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[::2])
def test_ranks_and_hosts_share_them_and_other_ranks_load_them(tmp_path, store, world, hosts, optimizer):
    ranks = launch(world, push_on_ranks, tmp_path, store.root, hosts, optimizer, limit_s=120)
    covered = np.zeros(31, int)
    for equal, rows, own, _, saved in ranks:
        assert equal and torch.equal(rows, ranks[0][1])
        assert saved["files"] and saved["node_types"] == ["author", "field"]
        assert (saved["num_nodes"], saved["num_rows"]) == (NUM, 31)
        for start, values in own.items():
            covered[start : start + len(values)] += 1
            assert np.array_equal(values, rows[start : start + len(values)].numpy())
    assert (covered == 1).all()
    by_host = {host: ranks[rank][3] for rank, host in enumerate(hosts or [0] * world)}
    row = DIM * 8 * (3 if optimizer.num_moments else 1) + 4 * bool(optimizer.num_moments)
    assert sum(by_host.values()) == 31 * row
    saved = [one for *_, one in ranks]
    written = [entry for one in saved for entry in one["files"] if entry["array"] == "rows"]
    assert sum(entry["stop"] - entry["start"] for entry in written) == 31
    options = {"optimizer": optimizer, "seed": 9, "dtype": "float64"}
    alone = gs.DistributedEmbedding.for_store(store, DIM, node_types=["field", "author"], **options).open()
    alone.load(tmp_path / "rows", saved)
    assert torch.equal(alone.pull(nodes_of(store, ["author", "field"])), ranks[0][1])
    assert set(alone.files_read(saved)) == {entry["name"] for one in saved for entry in one["files"]}


def test_a_checkpoint_of_other_node_types_is_refused(store, tmp_path):
    made = {
        name: gs.DistributedEmbedding.for_store(store, DIM, node_types=node_types).open()
        for name, node_types in {"author": ["author"], "two": ["author", "field"], "all": None}.items()
    }
    saved = {name: [one.save(tmp_path / name)] for name, one in made.items()}
    assert "node_types" not in saved["all"][0] and "num_rows" not in saved["all"][0]
    for mine, theirs, told in (
        ("two", "author", "field node_types=['author'] ++model.inputs.node_types=[author"),
        ("all", "two", "author field node_types=['author'"),
        ("two", "all", "['paper', 'author' 'field'"),
    ):  # fmt: skip
        with pytest.raises(PartitionStoreError, match=said(told)) as caught:
            made[mine].load(tmp_path / theirs, saved[theirs])
        assert "\n" not in str(caught.value)
    every = gs.DistributedEmbedding.for_store(store, DIM, node_types=list(COUNTS), seed=4).open()
    every.load(tmp_path / "all", saved["all"])
    assert torch.equal(every.pull(np.arange(NUM)), made["all"].pull(np.arange(NUM)))


def fit(folder, store, node_types, widths, hosts=None, devices=1, **options):
    torch.manual_seed(0)
    inputs = gs.DistributedEmbedding.for_store(store, 4, node_types=node_types, hosts=hosts, seed=0)
    dm = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([4, 4]), batch_size=4, **options)
    model = gs.model.RGCN(widths, 8, 3, schema=store.schema)
    module = gs.NodeClassifier(model, lr=0.05, inputs=inputs)
    strategy = gs.GNNScaleStrategy(weights=GradientAveraging())
    trainer = L.Trainer(
        devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, default_root_dir=folder, **QUIET
    )
    trainer.fit(module, dm)
    tested = trainer.test(module, dm, ckpt_path=trainer.checkpoint_callback.best_model_path, verbose=False)[0]
    return inputs, module, tested


def train_on_hosts(folder, root):
    store = gs.PartitionStore.open(root)
    widths, nodes = {"paper": 5, "author": 4, "field": 4}, nodes_of(store, ["author", "field"])
    found = []
    for name, node_types in (("some", ["author", "field"]), ("all", None)):
        inputs, module, tested = fit(folder / name, store, node_types, widths, hosts=[0, 1], devices=2)
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        found.append((inputs.pull(nodes).clone(), weights, tested, inputs.num_rows))
    return found


@pytest.mark.sweep
def test_training_on_hosts_is_that_of_rows_for_all_nodes(tmp_path, store):
    """Exact evaluation reads the owners' rows from a table on disk, which has the rows of these node types alone."""
    for some, whole in launch(2, train_on_hosts, tmp_path, store.root, limit_s=150):
        assert torch.equal(some[0], whole[0]) and some[2] == whole[2]
        assert all(torch.equal(one, other) for one, other in zip(some[1], whole[1], strict=True))
        assert (some[3], whole[3]) == (31, NUM)


@first(1)
@pytest.mark.parametrize(("node_types", "paper"), [(["author", "field"], 5), (list(COUNTS), 9)])
def test_training_is_that_of_rows_for_all_nodes(tmp_path, store, node_types, paper):
    widths = {"paper": paper, "author": 4, "field": 4}
    (some, module, tested), (whole, other, expected) = (
        fit(tmp_path / str(given), store, given, widths) for given in (node_types, None)
    )
    nodes = nodes_of(store, node_types)
    assert torch.equal(some.pull(nodes), whole.pull(nodes)) and tested == expected
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), other.parameters(), strict=True))


@first(1)
@pytest.mark.parametrize("stored_features", [True, False])
def test_a_node_type_may_read_rows_behind_its_features_and_another_have_a_vector(tmp_path, store, stored_features):
    """Where features are left out, node types without rows have their vector too."""
    paper = 5 if stored_features else 0
    widths = {"paper": paper + 4, "author": 0, "field": 4}
    inputs, module, _ = fit(tmp_path, store, ["paper", "field"], widths, stored_features=stored_features)
    nodes = nodes_of(store, ["paper", "field"])
    first = gs.DistributedEmbedding.for_store(store, 4, seed=0).open()
    moved = (first.pull(nodes) != inputs.pull(nodes)).any(dim=1).numpy()
    node_types = store.node_type(nodes)
    assert inputs.num_rows == 46 and moved[node_types == 0].any() and moved[node_types == 2].any()
    assert module.backbone.type_channels == [paper + 4, 0, 4]


@pytest.mark.parametrize(
    ("node_types", "widths", "told"),
    [
        (["author"], {"paper": 5, "author": 4, "field": 4}, "'field' 0 0 RGCN 4 in_channels 0 'field' ['author']"),
        (["paper", "author"], {"paper": 5, "author": 4, "field": 0}, "5 4 RGCN 5 in_channels 9 'paper'"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_read_the_rows_is_refused(tmp_path, store, node_types, widths, told):
    with pytest.raises(StrategyError, match=said(told)) as caught:
        fit(tmp_path, store, node_types, widths)
    assert "\n" not in str(caught.value)


def test_rows_of_another_store_or_behind_one_table_are_refused(tmp_path, store):
    other = write_store(tmp_path / "other", seed=5)
    inputs = gs.DistributedEmbedding.for_store(other, 4, node_types=["author"])
    model = gs.model.RGCN({"paper": 5, "author": 4, "field": 0}, 8, 3, schema=store.schema)
    trainer = L.Trainer(devices=1, strategy="gnnscale", max_epochs=1, default_root_dir=tmp_path, **QUIET)
    with pytest.raises(StrategyError, match=said("node_types=['author'] store for_store(")):
        trainer.fit(gs.NodeClassifier(model, inputs=inputs), gs.PartitionDataModule(store))
    stream = gs.hetero_graph({"a": 4, "b": 4}, {"a,to,b": np.array([[0, 1], [1, 2]])}).stream
    parts, given = gs.partition(stream, "random", num_parts=1), {"features": np.ones((8, 3), np.float32)}
    given |= {"labels": np.arange(8) % 2, "masks": {"train": np.ones(8, bool)}}
    shared = gs.write_partition_store(tmp_path / "shared", stream, parts, **given)
    inputs = gs.DistributedEmbedding.for_store(shared, 4, node_types=["a"])
    model = gs.NodeClassifier(gs.model.RGCN(7, 8, 2, schema=shared.schema), inputs=inputs)
    with pytest.raises(StrategyError, match=said("features node_types=")):
        trainer.fit(model, gs.PartitionDataModule(shared))


def test_the_plan_counts_these_rows(store):
    run = RunSize(10**6, 10**7, num_parts=4, num_processes=2)
    whole, some, all_rows = (
        predict_training(run, BatchShape(embedding_dim=64, embedding_rows=rows)) for rows in (None, 10**5, 10**6)
    )
    assert whole == all_rows
    assert whole - some == 9 * 10**5 * (3 * 4 * 64 + 4) / 2
    with pytest.raises(ValueError, match=said("embedding_rows 0 -1")):
        BatchShape(embedding_dim=64, embedding_rows=-1)


def test_machines_count_these_rows(store):
    data = gs.PartitionDataModule(store, sampler=gs.NeighborSampler([4, 4]), batch_size=4, scope="graph")
    plans = {
        name: Machines(2, batches=100, embedding_dim=dim, embedding_node_types=node_types).plan(
            data, GradientAveraging()
        )
        for name, dim, node_types in (("none", 0, None), ("some", 3, ["author", "field"]), ("all", 3, None))
    }
    held = {name: sum(row.held_bytes for row in rows) for name, rows in plans.items()}
    assert held["some"] - held["none"] == 31 * 36 and held["all"] - held["none"] == NUM * 36
    sent = {name: sum(row.sent_bytes for row in rows) for name, rows in plans.items()}
    assert sent["none"] < sent["some"] < sent["all"]


@pytest.mark.filterwarnings("ignore:.*join two parts:UserWarning")
def test_rows_go_to_the_nodes_that_had_them_in_an_earlier_version(store, tmp_path):
    """As many authors go as come: rows as they were would be those of others."""
    rows = gs.DistributedEmbedding.for_store(store, DIM, node_types=["author", "field"]).open()
    given = np.flatnonzero(store.node_type(np.arange(NUM)) != 0)
    rows.push(given, np.random.default_rng(1).random((len(given), DIM)))
    saved = [rows.save(tmp_path / "rows")]
    first = gs.update_store(
        store, root=tmp_path / "first", nodes={"author": [25, 26]}, removed_nodes={"author": [0, 7]}
    )
    new = gs.update_store(first, root=tmp_path / "second", removed_nodes={"paper": [3]}, nodes={"field": [6]})
    after = gs.DistributedEmbedding.for_store(new, DIM, node_types=["author", "field"]).open()
    own = np.flatnonzero(new.node_type(np.arange(new.num_nodes)) != 0)
    initial = after.pull(own).clone()
    with pytest.raises(PartitionStoreError, match=said("store not there: restore it")):
        after.load(tmp_path / "rows", saved)  # the first version is in another folder
    (tmp_path / store.root.name).symlink_to(store.root)
    after.load(tmp_path / "rows", saved)
    was = new.places_in(store.layout_fingerprint)[own]
    found = after.pull(own)
    assert (was < 0).sum() == 3 and torch.equal(found[was >= 0], rows.pull(was[was >= 0]))
    assert torch.equal(found[was < 0], initial[was < 0])
