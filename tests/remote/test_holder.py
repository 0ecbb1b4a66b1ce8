"""Holders: rows of a store in one memory a machine, read in place there and asked for by other machines."""

import os
import signal

import numpy as np
import pytest
from ray_world import NUM_NODES, all_contents, start_cluster, wait_until, write_store

from lightning_gnnscale.datamodule.train_loader import RowsSetting
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader, Threads
from lightning_gnnscale.loader.staged_part import node_values
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import SparseRows
from lightning_gnnscale.remote import cluster
from lightning_gnnscale.remote.held_rows import HeldRows, HopRequest
from lightning_gnnscale.remote.holder import (
    HeldGraph,
    HeldMemory,
    StoreHolder,
    assign_shards,
    deal_in_order,
    fitting_parts,
    holder_handle,
    homes_of,
)
from lightning_gnnscale.remote.messages import ShardMap
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("holder") / "store")


@pytest.fixture(scope="module", params=["int8", "sparse"])
def other_form(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("holder") / request.param
    if request.param == "int8":
        return write_store(root, feature_storage="int8")
    import scipy.sparse

    return write_store(root, features=scipy.sparse.random(NUM_NODES, 50, 0.1, "csr", np.float32, random_state=0))


def shard_map_of(store, nodes=("a", "b"), **options) -> ShardMap:
    owners = tuple(part % len(nodes) for part in range(store.num_parts))
    return ShardMap((str(store.root),) * len(nodes), store.layout_fingerprint, owners, tuple(nodes), **options)


def request_for(nodes) -> HopRequest:
    return HopRequest(np.asarray(nodes), 123, 5, False)


def same_neighbors(one, other) -> bool:
    return np.array_equal(one.neighbor, other.neighbor) and one.count is other.count is None


def same_rows(one, other) -> bool:
    if isinstance(one, SparseRows):
        return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("indptr", "indices", "data"))
    return one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("memory_bytes", [None, (1, 1), (40_000, 40_000)])
def test_a_machine_gives_its_rows_whether_memory_holds_them_or_not(store, memory_bytes):
    files = HeldRows.of_files(store.csc)
    for machine in (0, 1):
        holder = StoreHolder(shard_map_of(store, memory_bytes=memory_bytes), machine)
        nodes = np.flatnonzero(store.part_of(np.arange(NUM_NODES)) % 2 == machine)[::3]
        assert same_neighbors(holder.sample_rows([request_for(nodes)])[0], files.sample(request_for(nodes)))
        assert same_rows(holder.gather_rows(nodes), store.features.read(nodes))
        held = holder.report()["held_bytes"]
        assert (held > 0) and (memory_bytes is None or held < 60_000)
    assert holder.report()["requests"] == 2


def test_parts_are_held_up_to_the_cap(store):
    sizes = [
        np.diff(store.csc.indptr[store.part_offsets[part : part + 2]])[0] * store.csc.indices.itemsize
        + np.diff(store.part_offsets)[part] * (8 + 24)
        for part in range(4)
    ]
    assert fitting_parts(store, [0, 1, 3], 24, None) == [0, 1, 3]
    assert fitting_parts(store, [0, 1, 3], 24, int(sizes[0] + sizes[1])) == [0, 1]
    assert fitting_parts(store, [0, 1, 3], 24, int(sizes[0] + sizes[1]) - 1) == [0]
    assert fitting_parts(store, [0, 1, 3], 24, 0) == []


def test_what_a_holder_holds_is_mapped_and_not_copied(other_form):
    holder = StoreHolder(shard_map_of(other_form, replicate_bytes=2000), 0)
    nodes, handles = holder.held()
    arrays = HeldMemory.attach(handles)
    rows = HeldRows(nodes, arrays["indptr"], arrays["indices"])
    chosen = nodes.ids()[::5]
    assert same_neighbors(
        rows.sample(request_for(chosen)), HeldRows.of_files(other_form.csc).sample(request_for(chosen))
    )
    arrays["indices"][:] = 0
    assert not holder._rows._indices.any(), "the same memory"


def test_another_store_at_the_path_is_refused(tmp_path, store):
    shard_map = shard_map_of(store)._replace(roots=(str(write_store(tmp_path / "other", seed=1).root),) * 2)
    with pytest.raises(GNNScaleError, match=said("store copy")):
        StoreHolder(shard_map, 0)


def test_parts_are_dealt_to_machines_by_their_workers(store):
    places = [("a", None), ("b", 5), ("b", 7), ("b", 9)]
    targets = [np.flatnonzero(store.masks["train"])]
    shard_map = assign_shards(store, places, 10, True, targets)
    assert shard_map.nodes == ("a", "b") and shard_map.owners == (0, 1, 1, 1)
    assert shard_map.memory_bytes is None
    assert assign_shards(store, places[1:], 10, True, targets).memory_bytes == (21,)


def test_parts_made_for_so_many_machines_go_to_them_as_they_were_made():
    targets, nodes = [9, 9, 9, 0, 0, 1], [1] * 6
    assert deal_in_order(targets, nodes, [4, 7], 2).tolist() == [4, 4, 4, 7, 7, 7]
    assert deal_in_order(targets, nodes, [7, 4, 4], 2).tolist() == [4, 4, 4, 7, 7, 7], "whatever their workers"
    assert np.array_equal(deal_in_order(targets, nodes, [4, 7], 3), deal_in_order(targets, nodes, [4, 7])), "ranges"


def test_the_home_of_a_batch_is_where_most_of_its_targets_lie(store):
    shard_map, offsets = shard_map_of(store, ("a", "b"))._replace(owners=(0, 0, 1, 1)), store.part_offsets
    of_part = {part: np.arange(offsets[part], offsets[part + 1]) for part in range(4)}
    assert homes_of(shard_map, offsets, of_part) == {0: "a", 1: "a", 2: "b", 3: "b"}
    ranks = {0: np.arange(store.num_nodes), 1: np.arange(offsets[1], offsets[2] + 1)}
    assert homes_of(shard_map, offsets, ranks) == {1: "a"}, "targets of rank 0 lie everywhere"
    assert homes_of(shard_map_of(store, ("a",))._replace(owners=(0,) * 4), offsets, ranks) == {0: "a", 1: "a"}


def loader_over(store, graph: HeldGraph | None) -> PartLoader:
    sampler = NeighborSampler([4, 3])
    whole = WholeGraph.of_store(store, 0)
    nodes = node_values(store.labels, store.masks)
    data = PartData(lambda part: whole, graph.features if graph else store.features, nodes)
    targets = {0: np.flatnonzero(store.masks["train"])}
    return PartLoader([0], data, targets, graph.sampler(sampler) if graph else sampler, LoaderOptions(32, 1))


@pytest.fixture(scope="module")
def two_machines():
    """The ids of two nodes of a Ray cluster on this machine."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    nodes, options = start_cluster()
    try:
        second = nodes.add_node(**options)
        cluster.join_ray(nodes.address, 60.0, 100 << 20)
        here = ray.get_runtime_context().get_node_id()
        yield here, second.node_id
        cluster.leave_ray()
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.sweep
def test_two_machines_give_the_batches_of_the_whole_graph(two_machines, store):
    shard_map = shard_map_of(store, two_machines)
    graph = HeldGraph(shard_map, store, store.features, timeout_s=300)
    expected = all_contents(loader_over(store, None))
    assert all_contents(loader_over(store, graph)) == expected
    told = graph.counts.told()
    assert told["asked"] > 0 and told["unanswered"] == 0
    assert 0.3 < told["rows_away"] / told["rows"] < 0.7 and told["bytes_away"] > 24 * told["rows_away"]


@pytest.mark.sweep
def test_other_forms_of_features_travel_as_they_are_stored(two_machines, other_form):
    graph = HeldGraph(shard_map_of(other_form, two_machines), other_form, other_form.features)
    assert all_contents(loader_over(other_form, graph)) == all_contents(loader_over(other_form, None))


@pytest.mark.sweep
def test_a_holder_that_is_killed_is_stood_in_for_and_comes_back(two_machines, store):
    import ray

    shard_map = shard_map_of(store, two_machines, replicate_bytes=1)
    graph = HeldGraph(shard_map, store, store.features)
    expected = all_contents(loader_over(store, None))
    actor = holder_handle(shard_map, 1)
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    assert all_contents(loader_over(store, graph)) == expected
    assert graph.counts.unanswered > 0
    graph._silent.clear()

    def answers_again():
        before = graph.counts.unanswered
        graph._ask_features(1, np.array([int(store.part_offsets[1])])).result()
        graph._silent.clear()
        return graph.counts.unanswered == before

    assert wait_until(answers_again, 180)
    assert all_contents(loader_over(store, graph)) == expected


def test_threads_that_ask_other_machines_are_several_where_no_number_is_given():
    owners, alone, sampler = RowsSetting.of("owners"), RowsSetting.of("auto"), NeighborSampler([2])
    assert owners.source(Threads(), sampler, "graph") == Threads(4)
    assert owners.source(Threads(2), sampler, "graph") == Threads(2)
    assert alone.source(Threads(), sampler, "graph") == Threads(1)
