"""The checkpoint that is evaluated: the best of a run and of the runs that it goes on from."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from ..errors import CheckpointError
from ..model.checkpoint_file import check_is_lightnings, read_checkpoint
from .errors import UsageError


class EarlierBest(Callback):
    """Keep in every checkpoint which one was the best before the run; Lightning forgets it in another folder.

    Args:
        path: Path of the best checkpoint so far.
        score: Its value of the quantity that the run's `ModelCheckpoint` monitors.
    """

    def __init__(self, path: str, score: float):
        self.path, self.score = path, score

    def state_dict(self) -> dict[str, Any]:
        return {"path": self.path, "score": self.score}


def earlier_best(resume: str | None, checkpoint: ModelCheckpoint | None) -> EarlierBest | None:
    """Return the best checkpoint that the one to go on from knows of; None where it knows none, or nothing is resumed.

    Args:
        resume: path of a checkpoint, or None.
        checkpoint: the run's `ModelCheckpoint`; what was monitored otherwise does not compare.

    Raises:
        UsageError: resume is missing, damaged, no checkpoint of Lightning, or holds more than plain values.
    """
    if resume is None:
        return None
    try:
        states = _callback_states(resume)
    except CheckpointError as error:
        raise UsageError(f"resume: {error}") from None
    if getattr(checkpoint, "monitor", None) is None:
        return None
    before = states.get(EarlierBest.__qualname__)
    known = [_saved_best(states, checkpoint), EarlierBest(before["path"], before["score"]) if before else None]
    return _best([one for one in known if one is not None], checkpoint.mode)


def best_checkpoint(checkpoint: ModelCheckpoint | None, earlier: EarlierBest | None) -> tuple[str | None, str]:
    """Return the checkpoint to evaluate, and a line on it where it is not, or may not be, simply the run's own best.

    Args:
        checkpoint: the run's `ModelCheckpoint`, after training; None where there is none.
        earlier: the best one before the run, see `earlier_best`.

    Returns:
        (path, or None for the weights as they are; line, or "").
    """
    own = (checkpoint.best_model_path or None) if checkpoint is not None else None
    if earlier is None or (own == earlier.path and Path(own).is_file()):
        return own, ""
    if own is not None and own != earlier.path:
        # Started processes hand back the path alone; the score stands in the file.
        score = _saved_best(_callback_states(own), checkpoint)
        if score is not None and _best([score, earlier], checkpoint.mode) is score:
            return own, ""
    told = f"{earlier.path} ({checkpoint.monitor} {earlier.score:.4f})"
    if Path(earlier.path).is_file():
        return earlier.path, f"{told}, of an earlier run, is better than what this one came to"
    rest = None if own == earlier.path else own
    return rest, f"{rest or 'the last weights'}; {told}, of an earlier run, is better, but the file is gone"


def _saved_best(states: dict[str, Any], checkpoint: ModelCheckpoint) -> EarlierBest | None:
    """Return the best checkpoint that the `ModelCheckpoint` of a file knew of when it was saved."""
    state = states.get(checkpoint.state_key) or {}
    if not state.get("best_model_path") or state.get("best_model_score") is None:
        return None
    return EarlierBest(state["best_model_path"], float(state["best_model_score"]))


def _best(known: list[EarlierBest], mode: str) -> EarlierBest | None:
    """Return the best of some checkpoints, the first of equal ones."""
    choose = min if mode == "min" else max
    return choose(known, key=lambda one: one.score, default=None)


def _callback_states(path: str) -> dict[str, Any]:
    # Tensors stay in the file: only small values are looked at.
    return check_is_lightnings(read_checkpoint(path, mmap=True), path).get("callbacks") or {}
