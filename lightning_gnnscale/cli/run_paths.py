"""What a path of a run names: its folder, and the checkpoint in it to go on from; and where benchmarks are."""

import os
import sys
from pathlib import Path

from .errors import UsageError

CONFIG = "config.yaml"  # what a run leaves of its settings, all values filled in
CHECKPOINTS = "checkpoints"
SOURCE = "GNNSCALE_SOURCE"  # names a source tree, for its benchmarks


def run_of(path: str) -> Path:
    """Return the folder of the run that a path names: the folder itself, or a checkpoint in it.

    Raises:
        UsageError: it is neither.
    """
    given = Path(path).expanduser().absolute()
    if not given.exists():
        raise UsageError(f"{path}: no such run; a run's folder is printed at its end, and lies under paths.runs")
    folders = [given] if given.is_dir() else [given.parent.parent, given.parent]
    found = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if found is not None:
        return found
    jobs = sorted(one.parent.name for one in given.glob(f"*/{CONFIG}"))
    if jobs:
        shown = ", ".join(jobs[:5]) + (", ..." if len(jobs) > 5 else "")
        raise UsageError(f"{path} holds several runs: give one of them ({shown})")
    raise UsageError(
        f"{path}: no run's folder, and no checkpoint in one ({CONFIG} is missing): give the settings of train, "
        f"dataset= and model= among them, and resume={path}"
    )


def last_checkpoint(path: str) -> str:
    """Return the checkpoint that `resume=` names: a file as it is, of a run's folder the one of its last epoch.

    Raises:
        UsageError: the folder holds none.
    """
    given = Path(path).expanduser()
    if not given.is_dir():
        return path
    folder = given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given
    found = [one for one in folder.glob("*.ckpt") if one.exists()]
    if not found:
        raise UsageError(f"resume={path}: there is no checkpoint in {folder}")
    # Lightning names the second one of a folder last-v1.ckpt; the last epoch's is also written after the best one.
    last = [one for one in found if one.name.startswith("last")]
    return str(max(last or found, key=lambda one: one.stat().st_mtime))


def find_benchmarks() -> Path:
    """Let `benchmarks` be imported, here and in processes that this one starts; return the source tree that has it.

    It is that of GNNSCALE_SOURCE where that is set, else the one that this package is installed from, else the current
    folder.

    Raises:
        UsageError: none of them has benchmarks.
    """
    named = os.environ.get(SOURCE)
    trees = [Path(named).expanduser()] if named else [Path(__file__).parents[2], Path.cwd()]
    found = next((tree.absolute() for tree in trees if (tree / "benchmarks" / "runner.py").is_file()), None)
    if found is None:
        looked = " or ".join(str(tree / "benchmarks") for tree in trees)
        raise UsageError(
            f"no benchmarks in {looked}: the source tree has them, and a wheel does not; clone it, and pip install -e "
            f". there, or set {SOURCE} to its folder"
        )
    if str(found) not in sys.path:
        sys.path.insert(0, str(found))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(found) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(found), *filter(None, paths)])
    return found
