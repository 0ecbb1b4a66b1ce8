"""What a path of a run names: its folder, and the checkpoint in it to go on from."""

from pathlib import Path

from .errors import UsageError

CONFIG = "config.yaml"  # what a run leaves of its settings, all values filled in
CHECKPOINTS = "checkpoints"


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
