"""A run folder that is used again: what the run before left in it, and the next one would replace."""

import os
from pathlib import Path

REPLACED = ("summary.json", "metrics/metrics.csv", "metrics/hparams.yaml")


def keep_earlier_run(folder: Path) -> Path | None:
    """Move what an earlier run left, and this one would replace, to `earlier/1`, `earlier/2`, ... in the run folder.

    Checkpoints stay where they are: Lightning gives those of the next run other names (its last one is last-v1.ckpt).
    Events are one log of all runs.

    Args:
        folder: of the run.

    Returns:
        The folder that the files were moved to; None where there were none.
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
