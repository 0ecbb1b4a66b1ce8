"""What every test shares: the interpreter of Triton where no GPU is, one thread, real graphs where they are."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidia0"):
    # Before lightning or torch_geometric is imported: both import triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from multiprocessing import forkserver, set_forkserver_preload
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Cores are shared, and a kernel's first example compiles it.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


# Tests that start Ray, which others would find, or look for what is left in /dev/shm, where these processes write.
TOGETHER = (
    "cli/test_prepare", "datamodule/test_ray", "datamodule/test_process", "distributed", "embedding",
    "remote", "loader/test_process_source", "loader/test_every_source", "placement/test_joined_buffers",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one process of pytest-xdist run all tests of a file, and of the files that do not go side by side."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "together" if file.removeprefix("tests/").startswith(TOGETHER) else file

    return ByFile(config, log)


# Tests whose processes are forked from a server; its threads are OMP_NUM_THREADS, as above.
FORKED = ("bench/test_experiments", "distributed", "faults", "datamodule/test_process", "loader/test_process_source")


def pytest_collection_finish(session):
    """Start the one server that forks processes: who starts it decides what its children find imported."""
    if any(item.nodeid.removeprefix("tests/").startswith(FORKED) for item in session.items):
        set_forkserver_preload([f"lightning_gnnscale.{name}" for name in ("strategy", "model", "datamodule")])
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def public_graphs() -> Path:
    """The folder of public graphs, or a skip that says where it was looked for."""
    from lightning_gnnscale.dataset.npz import data_root

    folder = data_root()
    if folder is None or not (folder / "cora" / "graph.npz").is_file():
        pytest.skip("no public graphs: set GNNSCALE_DATA, or lay them at ../shared/data")
    return folder


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """What a run leaves in its process (a process group, variables of the environment) stays out of the next test."""
    before = dict(os.environ)
    os.environ.pop("GNNSCALE_EVENTS", None)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in set(os.environ) - set(before):
        if name != "PYTEST_CURRENT_TEST":
            del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})
