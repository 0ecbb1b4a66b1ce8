"""A folder beside the store for the tables of one run; what killed runs left there is removed."""

import os
import shutil
import socket
from pathlib import Path

import psutil


def open_scratch(root: Path, trainer) -> Path:
    """Return the run's scratch folder, the same on every rank.

    Args:
        root: of the store.
        trainer: the Trainer whose strategy agrees on rank 0's name; None: this process is alone.
    """
    parent = root.parent / f".{root.name}.scratch"
    name = f"{socket.gethostname()}-{os.getpid()}"
    if trainer is not None:
        name = trainer.strategy.broadcast(name)
    if trainer is None or trainer.global_rank == 0:
        _remove_dead(parent)
    return parent / name


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{socket.gethostname()}-*"):
        pid = int(folder.name.rpartition("-")[2])
        if not psutil.pid_exists(pid):
            shutil.rmtree(folder, ignore_errors=True)
