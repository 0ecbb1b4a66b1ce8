"""One Ray for the tests of a module, and two workers that stay."""

import pytest

from lightning_gnnscale.remote import cluster
from lightning_gnnscale.remote.messages import WorkerSettings
from lightning_gnnscale.remote.ray_worker import start_workers


@pytest.fixture(scope="module")
def local_ray():
    """Ray on this machine; everything of it ends with the module."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    cluster.join_ray(None, 60.0, 200 << 20)
    yield ray
    cluster.leave_ray()
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(local_ray):
    """The process ids of two workers that a source with an address finds."""
    workers = start_workers([f"{cluster.PREPARED}{number}" for number in range(2)], WorkerSettings("prepared"))
    yield local_ray.get([worker.ping.remote() for worker in workers[:2]])
    del workers  # an actor ends when the handle that made it is gone
