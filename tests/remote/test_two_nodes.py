"""A Ray cluster of two nodes: workers on both of them, and one that is lost in the middle of an epoch."""

from functools import partial

import numpy as np
import psutil
import pytest
from ray_world import all_contents, contents, make_loader, start_cluster, write_store

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.train_loader import make_interleaved_loader
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader, Threads
from lightning_gnnscale.loader.source_settings import RankPlace
from lightning_gnnscale.loader.staged_part import node_values
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.remote import OwnerReads, RayWorkers
from lightning_gnnscale.sampler import NeighborSampler

pytestmark = pytest.mark.sweep

pytest.importorskip("ray", reason="the extra [ray] is not installed")


@pytest.fixture
def two_nodes():
    """A cluster on this machine, and its second node; the trainer's is the first."""
    nodes, options = start_cluster()
    try:
        yield nodes, nodes.add_node(**options)
    finally:
        nodes.shutdown()


def test_workers_are_on_both_nodes_and_the_end_of_one_changes_no_batch(two_nodes):
    cluster, second = two_nodes
    expected, found = all_contents(make_loader()), []
    loader = make_loader(RayWorkers(address=cluster.address, num_workers=4))
    try:
        for number, batch in enumerate(loader):
            found.append(contents(batch))
            if number == 2:
                raylets = {psutil.Process(pid).ppid() for pid in loader._source.worker_pids}
                assert len(raylets) == 2, "each node has its own"
                cluster.remove_node(second)
        assert found == expected
        assert all_contents(loader) == expected, "of the node that is left"
    finally:
        loader.close()


def test_workers_of_a_machine_hold_rows_together_and_ask_the_other(two_nodes, tmp_path):
    store = write_store(tmp_path / "store")
    load = partial(WholeGraph.of_store, store)
    data = PartData(load, store.features, node_values(store.labels, {}), is_whole=True)
    targets = {0: np.arange(0, store.num_nodes, 3)}
    expected = all_contents(PartLoader([0], data, targets, NeighborSampler([4, 3]), LoaderOptions(16, 1)))
    settings = RayWorkers(address=two_nodes[0].address, num_workers=4).asking(OwnerReads())
    source = settings.connect(RankPlace())
    loader = PartLoader([0], data, targets, NeighborSampler([4, 3]), LoaderOptions(16, 1), source=source)
    try:
        assert all_contents(loader) == expected
        told = loader._source.report()
        assert told["asked"] > 0 and told["unanswered"] == 0
    finally:
        loader.close()


def test_chunks_are_made_where_their_seeds_lie(two_nodes, tmp_path):
    graph = SyntheticGraph(400, 3000, num_communities=4, homophily=0.95, seed=0)
    stream = graph.stream(to_undirected=True)
    arrays = {"features": graph.features(6, noise=1.0), "labels": graph.labels(), "masks": graph.masks()}
    store = gs.write_partition_store(tmp_path, stream, gs.partition(stream, "fennel", num_parts=4, seed=1), **arrays)
    settings = RayWorkers(address=two_nodes[0].address, num_workers=2).asking(OwnerReads())

    def make(source):
        options = LoaderOptions(16, 1)
        return make_interleaved_loader(
            store, NeighborSampler([4, 3]), None, 4, options, store.features, source, RankPlace()
        )

    expected = list(make(Threads()).sampled_chunks())
    loader = make(settings)
    try:
        assert all_contents(loader) == all_contents(make(Threads()))
        told = loader._source.report()
    finally:
        loader.close()
    machine = np.array([0, 0, 1, 1])
    owner = [machine[store.part_of(chunk.n_id.numpy())] for chunk in expected]
    rows, away = (
        sum(map(len, owner)),
        sum((one != machine[chunk.part]).sum() for one, chunk in zip(owner, expected, strict=True)),
    )
    assert told["rows_gathered"] == rows
    assert away / rows <= told["rows_away"] / rows < 0.8 * 0.5, "made by any worker half of them were from the other"


def test_only_machines_with_the_label_prepare(two_nodes):
    nodes, _ = two_nodes
    third = nodes.add_node(num_cpus=2, object_store_memory=100 << 20, resources={"prepare": 1})
    loader = make_loader(RayWorkers(address=nodes.address, num_workers=2, label="prepare"))
    try:
        assert all_contents(loader) == all_contents(make_loader())
        assert loader._source.report()["machines"] == [third.node_id]
    finally:
        loader.close()
