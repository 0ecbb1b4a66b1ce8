"""Learned rows beside a checkpoint: the folder that ranks write them to, found again wherever it was moved with it."""

import os
import shutil
from pathlib import Path
from typing import Any

CHECKPOINT_KEY = "gnnscale_inputs"


def folder_of(filepath: str | os.PathLike) -> Path:
    """Return the folder of the rows of a checkpoint."""
    path = Path(os.path.abspath(filepath))
    return path.with_name(f"{path.name}.rows")


def located(checkpoint: dict[str, Any], filepath: str | os.PathLike) -> dict[str, Any]:
    """Let a checkpoint name the folder of its rows as it lies now: beside the file, links followed."""
    if CHECKPOINT_KEY in checkpoint:
        beside = folder_of(os.path.realpath(filepath))
        if beside.is_dir():
            checkpoint[CHECKPOINT_KEY]["folder"] = str(beside)
    return checkpoint


def remove_others(filepath: str | os.PathLike, kept: list[dict[str, Any]]) -> None:
    """Remove the rows of an earlier checkpoint of this name, once the new one stands."""
    names = {entry["name"] for one in kept for entry in one["files"]}
    for path in folder_of(filepath).iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)


def remove(filepath: str | os.PathLike) -> None:
    """Remove the rows of a checkpoint that was removed."""
    shutil.rmtree(folder_of(filepath), ignore_errors=True)
