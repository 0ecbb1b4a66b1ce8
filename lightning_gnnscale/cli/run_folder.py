"""The folders of a run: one that is used again, and one for what is temporary, which outlives no run."""

import getpass
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..datamodule.scratch import Scratch
from ..remote.cluster import SYSTEM_TEMPORARY

REPLACED = ("summary.json", "metrics/metrics.csv", "metrics/hparams.yaml")


def keep_earlier_run(folder: Path) -> Path | None:
    """Move files of an earlier run, which this run would replace, to `earlier/1`, `earlier/2`, ... in the run folder.

    Checkpoints stay where they are: Lightning gives those of the next run other names (its last one is last-v1.ckpt).
    Events of all runs are in one log.

    Args:
        folder: Folder of the run.

    Returns:
        The folder that the files were moved to; None if there were none.
    """
    found = [folder / name for name in REPLACED if (folder / name).is_file()]
    if not found:
        return None
    number = 1
    while (folder / "earlier" / str(number)).exists():
        number += 1
    kept = folder / "earlier" / str(number)
    kept.mkdir(parents=True)
    for path in found:
        os.replace(path, kept / path.name)
    return kept


@contextmanager
def temporary_folder() -> Iterator[None]:
    """Have this process, and those that it starts, lay temporary files into one folder, and remove it in the end.

    What killed runs left is removed by the next run. PyG leaves a module for each layer, torch and Lightning a file or
    a folder for each start, Ray the logs of a session; none of them is of use afterwards. Compiled kernels stay.

    Raises:
        OSError: the system's temporary folder cannot be written to.
    """
    before, variables = tempfile.tempdir, dict(os.environ)
    system = tempfile.gettempdir()
    parent = Path(system) / f"gnnscale-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        yield  # somebody else's: the system's folder is used as it is
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{system}/torchinductor_{getpass.getuser()}")
    folder = Scratch(parent, f"run-{secrets.token_hex(3)}")  # short: paths of sockets lie below, of 107 bytes at most
    folder.open()
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder.folder)
    os.environ[SYSTEM_TEMPORARY] = system
    try:
        yield
    finally:
        tempfile.tempdir = before
        for name in ("TMPDIR", SYSTEM_TEMPORARY):
            os.environ.pop(name) if name not in variables else os.environ.update({name: variables[name]})
        folder.close()
