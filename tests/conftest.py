"""What every test shares: the interpreter of Triton where no GPU is, one thread, real graphs where they are."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GNNSCALE_COMPILE_AHEAD", "0")  # tests share the cores already
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves its workers beside another test
if not os.path.exists("/dev/nvidia0"):
    # Before lightning or torch_geometric is imported: both import triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from multiprocessing import forkserver, set_forkserver_preload
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from lightning_gnnscale import events

torch.set_num_threads(1)
# No deadline: cores are shared, and a kernel's first example compiles it. `make test-all` asks for the profile `all`.
# A test whose examples are dear takes a share: settings(max_examples=settings.default.max_examples // 4).
settings.register_profile("first", deadline=None, max_examples=40)
settings.register_profile("all", deadline=None, max_examples=300)
settings.load_profile("first")


# Tests that start Ray, which others would find, or look for what is left in /dev/shm, where these processes write.
TOGETHER = (
    "cli/test_prepare", "datamodule/test_every_column", "datamodule/test_ray", "datamodule/test_process", "distributed",
    "embedding", "remote", "loader/test_process_source", "loader/test_every_source", "placement/test_joined_buffers",
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
FORKED = (
    "bench/test_elastic_bench", "bench/test_experiments", "cli/test_train", "datamodule/test_every_column",
    "datamodule/test_process", "datamodule/test_scratch", "distributed", "embedding/test_inputs_in", "faults",
    "loader/test_process_source",
)  # fmt: skip


def pytest_collection_finish(session):
    """Start the one server that forks processes: who starts it decides what its children find imported."""
    if any(item.nodeid.removeprefix("tests/").startswith(FORKED) for item in session.items):
        packages = "strategy", "model", "datamodule", "cli.train"
        set_forkserver_preload([f"lightning_gnnscale.{package}" for package in packages])
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def public_graphs() -> Path:
    """The folder of public graphs, or a skip that says where it was looked for."""
    from lightning_gnnscale.dataset.npz import data_root

    folder = data_root()
    if folder is None or not (folder / "cora" / "graph.npz").is_file():
        pytest.skip("no public graphs: set GNNSCALE_DATA, or lay them at ../shared/data")
    return folder


@pytest.fixture(scope="session")
def _s3_server():
    pytest.importorskip("s3fs", reason="the extra [dev] is not installed: s3fs")
    pytest.importorskip("moto", reason="the extra [dev] is not installed: moto")
    from tests.s3_server import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3_server, tmp_path, monkeypatch):
    """A real S3 server with an empty bucket `graphs`, reached by the environment; this machine has fetched nothing."""
    import fsspec

    from tests.s3_server import SECRET

    for name, value in {
        "AWS_ENDPOINT_URL": _s3_server.host,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEONLY",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "GNNSCALE_FETCHED": str(tmp_path / "fetched"),
    }.items():
        monkeypatch.setenv(name, value)
    _s3_server.reset()
    bucket = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    if bucket.exists("graphs"):
        bucket.rm("graphs", recursive=True)
    bucket.mkdir("graphs")
    _s3_server.reset()
    _s3_server.files = bucket
    yield _s3_server
    _s3_server.reset()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """What a run leaves in its process (a process group, the environment, events) stays out of the next test."""
    before = dict(os.environ)
    os.environ.pop("GNNSCALE_EVENTS", None)
    os.environ.pop("GNNSCALE_HIDDEN", None)
    yield
    events._recent.clear()  # only the latest are kept: a test that counts from len(recent()) needs space
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in set(os.environ) - set(before):
        if name != "PYTEST_CURRENT_TEST":
            del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})
