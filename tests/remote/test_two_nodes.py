"""A Ray cluster of two nodes: workers on both of them, and one that is lost in the middle of an epoch."""

import psutil
import pytest
from ray_world import all_contents, contents, make_loader

from lightning_gnnscale.remote import RayWorkers

pytest.importorskip("ray", reason="Ray is not installed: make test installs it")


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster on this machine, and its second node; the trainer's is the first."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    options = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=options)
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
