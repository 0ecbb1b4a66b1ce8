"""What every test shares: the interpreter of Triton where no GPU is, one thread, real graphs where they are."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidia0"):
    # Before lightning or torch_geometric is imported: both import triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def public_graphs() -> Path:
    """The folder of public graphs, or a skip that says where it was looked for."""
    from lightning_gnnscale.dataset.npz import data_root

    folder = data_root()
    if folder is None or not (folder / "cora" / "graph.npz").is_file():
        pytest.skip("no public graphs: set GNNSCALE_DATA, or lay them at ../shared/data")
    return folder


@pytest.fixture(autouse=True)
def _quiet_events(monkeypatch):
    """Events of one test stay out of the log of another."""
    monkeypatch.delenv("GNNSCALE_EVENTS", raising=False)
