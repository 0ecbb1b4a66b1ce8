"""Sentences on the curves of a run: a validation loss that rises again, a run that was stopped too early."""

from .run_record import RunRecord

Curve = list[tuple[int, float]]  # (epoch, value), oldest first

FLAT = 0.002  # a metric that gains less has converged
_RISES = 0.03  # of the lowest loss: a smaller rise is noise
_FALLS = 0.01  # of a loss: the least gain in the last fifth of the validations


def rises_since(loss: Curve) -> int | None:
    """Return the epoch of the lowest value of a loss that has risen since; None where it has not.

    The last fifth of the values is above the lowest, which at least three followed.
    """
    if len(loss) < 4:
        return None
    at = min(range(len(loss)), key=lambda at: loss[at][1])
    late = [value for _, value in loss[-max(1, len(loss) // 5) :]]
    rose = sum(late) / len(late) - loss[at][1]
    return loss[at][0] if at < len(loss) - 3 and rose > _RISES * abs(loss[at][1]) else None


def gained_late(curve: Curve, maximised: bool) -> tuple[float, int]:
    """Return what the last fifth of a curve gained over all before it, and how many values that fifth has.

    (0.0, 0) where the best value was not one of the last two: the curve has turned.
    """
    if len(curve) < 4:
        return 0.0, 0
    sign = 1 if maximised else -1
    late = max(1, len(curve) // 5)
    before = max(sign * value for _, value in curve[:-late])
    best = max(curve, key=lambda one: sign * one[1])
    return (sign * best[1] - before, late) if best[0] >= curve[-2][0] else (0.0, 0)


def not_finished(run: RunRecord) -> str:
    """Return a sentence where the monitored metric, or else the validation loss, still moved at the end; else ""."""
    for name, maximised in {run.monitor: run.is_maximised, "val_loss": False}.items():
        curve = run.curves.get(name, [])
        gained, late = gained_late(curve, maximised)
        least = 2 * FLAT if "loss" not in name else max(_FALLS * abs(curve[-1][1]), 1e-9) if curve else 0.0
        if late and gained > least:
            moved = "rising" if maximised else "falling"
            when = "in the last of" if late == 1 else f"in the last {late} of"
            return (
                f"Not finished: {name} was still {moved} at the end, by {gained:.4f} {when} {len(curve)} validations."
            )
    return ""


def loss_rises(run: RunRecord) -> str:
    """Return a sentence where the validation loss rises since an epoch; else ""."""
    loss = run.curves.get("val_loss", [])
    since = rises_since(loss)
    if since is None:
        return ""
    lowest = dict(loss)[since]
    return f"val_loss rises since epoch {since}: {lowest:.4f} there, {loss[-1][1]:.4f} at the end."


def what_curves_show(run: RunRecord) -> str:
    """Return one or two sentences on the curves of a run; "" where nothing is unusual."""
    return " ".join(text for text in (loss_rises(run), not_finished(run)) if text)
