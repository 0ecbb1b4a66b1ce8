"""A Ray cluster of two nodes: workers on both of them, and one that is lost in the middle of an epoch."""

from functools import partial

import numpy as np
import psutil
import pytest
from ray_world import all_contents, contents, make_loader, start_cluster, write_store

from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader
from lightning_gnnscale.loader.source_settings import RankPlace
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.remote import RayWorkers
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
    data, targets = PartData(load, store.features, store.labels, is_whole=True), {0: np.arange(0, store.num_nodes, 3)}
    expected = all_contents(PartLoader([0], data, targets, NeighborSampler([4, 3]), LoaderOptions(16, 1)))
    settings = RayWorkers(address=two_nodes[0].address, num_workers=4, construction="distributed")
    source = settings.connect(RankPlace())
    loader = PartLoader([0], data, targets, NeighborSampler([4, 3]), LoaderOptions(16, 1), source=source)
    try:
        assert all_contents(loader) == expected
        told = loader._source.report()
        assert told["asked"] > 0 and told["unanswered"] == 0
    finally:
        loader.close()


def test_only_machines_with_the_label_prepare(two_nodes):
    nodes, _ = two_nodes
    third = nodes.add_node(num_cpus=2, object_store_memory=100 << 20, resources={"prepare": 1})
    loader = make_loader(RayWorkers(address=nodes.address, num_workers=2, label="prepare"))
    try:
        assert all_contents(loader) == all_contents(make_loader())
        assert loader._source.report()["machines"] == [third.node_id]
    finally:
        loader.close()
