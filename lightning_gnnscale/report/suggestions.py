"""One suggestion for the next run, by rules over its records with their expected gains; and sentences on its curves."""

from collections.abc import Callable
from typing import NamedTuple

from ..memory import format_bytes, format_seconds
from ..system import PAGE_BYTES
from ..traits import ASKING_THREADS
from .run_record import RunRecord

_FEW = 0.15  # shares of an epoch below this are not worth a suggestion
_EXCHANGED_QUANTISED = 0.1  # of the bytes of whole float32 rows: differences in 4 bits, with their headers
_PATIENCE = 10  # of callbacks=early_stopping
_MOST_LABELS = 24  # that `store_composition` counts
_NO_BETTER = 0.02  # above the share of the largest class: an accuracy that tells nothing apart
_STEPS, _LEAST_BATCH = 10, 32  # an epoch has at least so many steps; a batch has no fewer seeds
_WEIGHT_DECAY = 0.0005  # of the GCN paper


class Suggestion(NamedTuple):
    """A suggestion for the next run.

    Attributes:
        why: the observation, one sentence.
        setting: the words to add to the command; "" for none.
        gain: the share of the run's time that it may save, or an equivalent.
    """

    why: str
    setting: str
    gain: float


Rule = Callable[[RunRecord], Suggestion | None]


def suggest(run: RunRecord) -> Suggestion:
    """Return the suggestion with the largest gain; where no rule applies, other seeds, or training on the parts."""
    found = [suggestion for rule in RULES if (suggestion := rule(run)) is not None]
    default = _SEEDS
    if run.is_partitioning and run.facts.get("store"):
        default = Suggestion("The parts are ready to train on.", f"gnnscale train store={run.facts['store']}", 0.0)
    return max(found, key=lambda one: one.gain, default=default)


_SEEDS = Suggestion(
    "Nothing is unusual in this run. Run other seeds to see how much the result varies.",
    "--multirun seed=0,1,2",
    0.0,
)


def loss_not_finite(run: RunRecord) -> Suggestion | None:
    """The loss became infinite or NaN: a lower learning rate."""
    for row in run.metrics:
        text = row.get("train_loss")
        if text and row.get("epoch") and text.strip().lower() in ("nan", "inf", "-inf"):
            rate = run.get("model.lr")
            setting = f"model.lr={rate / 10:g}" if isinstance(rate, int | float) else "model.lr=..."
            return Suggestion(f"The training loss was not finite from epoch {row['epoch']} on.", setting, 10.0)
    return None


def learns_nothing(run: RunRecord) -> Suggestion | None:
    """The accuracy is hardly above the share of the largest class: check the features' scale and the learning rate."""
    counts = [sum(column) for column in zip(*(run.parts.get("label_counts") or ()), strict=True)]
    best = run.best() if run.monitor == "val_acc" else None
    found = [value for name, value in run.results.items() if name in ("test_acc", "val_acc_exact")]
    found += [best[1]] if best else []
    if len(counts) < 2 or not sum(counts) or not found or run.class_at("model") == "EdgeClassifier":
        return None
    total = sum(counts) if len(counts) < _MOST_LABELS else sum(run.parts["nodes"])  # of more labels the rest is unknown
    share = max(counts) / total
    if min(found) > share + _NO_BETTER:
        return None
    rate = run.get("model.lr")
    setting = f"model.lr={rate / 10:g}" if isinstance(rate, int | float) else "model.lr=..."
    why = (
        f"An accuracy of {min(found):.1%} is hardly above the share of the largest class, {share:.1%}: the model tells "
        "little apart. Check the scale of the features (standardise each column), then the learning rate:"
    )
    return Suggestion(why, setting, 8.0)


def ended_early(run: RunRecord) -> Suggestion | None:
    """The run did not finish: resume from its last checkpoint."""
    if run.is_finished:
        return None
    where = f" in the stage {run.failed_stage}" if run.failed_stage else ""
    if run.last_checkpoint is None:
        return Suggestion(f"The run ended early{where}, and saved no checkpoint.", "the same command again", 9.0)
    why = f"The run ended early{where}, after {run.num_epochs} epochs. It resumes from its last checkpoint."
    return Suggestion(why, f"resume={run.last_checkpoint}", 9.0)


def memory_nearly_full(run: RunRecord) -> Suggestion | None:
    """A stage took most of the machine's memory: smaller batches, or parts where partitioning did."""
    limit = run.memory_limit
    fullest = max(run.stages, key=lambda row: row["peak_bytes"], default=None)
    if not limit or fullest is None or fullest["peak_bytes"] < 0.85 * limit:
        return None
    size = run.get("datamodule.batch_size", 512)
    setting = f"datamodule.batch_size={max(1, size // 2)}" if fullest["stage"] == "train" else "trainer.devices=1"
    held = f"{format_bytes(fullest['peak_bytes'])} of {format_bytes(limit)}"
    return Suggestion(
        f"The stage {fullest['stage']} held {held} of memory: a little more would end the run.", setting, 5.0
    )


def halo_rows_read_separately(run: RunRecord) -> Suggestion | None:
    """Batches waited for small reads of halo rows from disk: pack them beside their part."""
    wait, parts = run.waiting, run.parts
    row_bytes, halo = parts.get("row_bytes") or 0, parts.get("halo")
    if wait < _FEW or not halo or not 0 < row_bytes < PAGE_BYTES or parts.get("packs_halo", True):
        return None
    if run.per_epoch("disk_bytes") < 0.1 * run.per_epoch("row_bytes") or run.prepares("read") < run.prepares("sample"):
        return None
    packed = format_bytes(sum(halo) * row_bytes)
    why = (
        f"Batches waited {wait:.0%} of the epoch, mostly for rows read from disk: {format_bytes(row_bytes)} each, "
        f"but the disk reads {format_bytes(PAGE_BYTES)} at a time. Packed halo rows would take {packed} more space."
    )
    return Suggestion(why, "pack_halo=true overwrite=true", wait)


def waits_for_reads(run: RunRecord) -> Suggestion | None:
    """Batches waited for rows that were gathered or read: rows of half the bytes."""
    wait = run.waiting
    if wait < _FEW or run.prepares("read") <= run.prepares("sample"):
        return None
    stored = run.get("feature_storage") or "as given"
    if stored != "as given" and stored != "float32":
        return None
    size = run.parts.get("row_bytes")
    rows = f"rows of {format_bytes(size)}" if size else "rows"
    why = f"Batches waited {wait:.0%} of the epoch, and reading {rows} took longer than sampling. Half the bytes:"
    return Suggestion(why, "feature_storage=float16", wait / 2)


def waits_for_samples(run: RunRecord) -> Suggestion | None:
    """Batches waited while neighbours were sampled: add a thread where a core is free, else sample fewer."""
    wait = run.waiting
    if wait < _FEW or run.prepares("sample") <= run.prepares("read"):
        return None
    threads = run.get("source.num_threads") or (ASKING_THREADS if run.of("owner_reads") else 1)
    cores = run.machine.get("cores")
    why = f"Batches waited {wait:.0%} of the epoch, mostly for neighbours to be sampled"
    if "num_threads" in (run.config.get("source") or {}) and cores and cores >= run.num_ranks * (threads + 2):
        free = f"by {threads} thread{'s' * (threads > 1)} a process, on {cores} cores"
        return Suggestion(f"{why}, {free}.", f"source.num_threads={threads + 1}", wait * threads / (threads + 1))
    fanouts = run.get("sampler.fanouts")
    if not isinstance(fanouts, list) or not fanouts or min(fanouts) < 4:
        return None
    fewer = ",".join(str(max(2, fanout // 2)) for fanout in fanouts)
    return Suggestion(f"{why}, and no core is free. Half as many neighbours:", f"'sampler.fanouts=[{fewer}]'", wait / 3)


def averages_often(run: RunRecord) -> Suggestion | None:
    """Averaging takes much of the epoch: larger batches make fewer steps."""
    share, size = run.shares.get("average", 0.0), run.get("datamodule.batch_size")
    if share < _FEW or not isinstance(size, int) or run.num_ranks < 2:
        return None
    if run.class_at("strategy.weights") != "GradientAveraging":
        return None
    steps = run.per_epoch("batches") / run.num_ranks
    why = (
        f"Averaging gradients {steps:.0f} times took {share:.0%} of the epoch, waiting for slower processes included. "
        "Batches of twice the size halve that:"
    )
    return Suggestion(why, f"datamodule.batch_size={2 * size}", share / 2)


def exchanges_whole_rows(run: RunRecord) -> Suggestion | None:
    """Exchanging rows takes much of the epoch: differences in few bits."""
    share, policy = run.shares.get("exchange", 0.0), run.get("strategy.exchange._target_", "")
    if share < _FEW or "Quantized" in policy or not run.of("exchange"):
        return None
    sent = sum(entry["bytes"] for event in run.of("exchange") for entry in event["bytes"]) / max(run.num_epochs, 1)
    why = (
        f"Exchanging rows took {share:.0%} of the epoch, {format_bytes(sent)} of it. Differences in 4 bits are about a "
        "tenth of these bytes:"
    )
    setting = "strategy/exchange=quantized strategy.exchange.bits=4 strategy.exchange.backward_threshold=1.0"
    return Suggestion(why, setting, share * (1 - _EXCHANGED_QUANTISED) / 2)


def validates_long(run: RunRecord) -> Suggestion | None:
    """Validation takes much of the epoch: validate less often."""
    share = run.shares.get("validation", 0.0)
    if share < 0.3 or run.num_epochs < 4:
        return None
    every = run.get("trainer.check_val_every_n_epoch", 1) * 3
    why = f"Validation took {share:.0%} of an epoch. Every {every} epochs would suffice:"
    return Suggestion(why, f"trainer.check_val_every_n_epoch={every}", share * 2 / 3)


def came_to_rest(run: RunRecord) -> Suggestion | None:
    """The best epoch was long before the last: stop there."""
    values, best = run.curves.get(run.monitor, []), run.best()
    if best is None or "early_stopping" in (run.config.get("callbacks") or {}):
        return None
    sign = 1 if run.is_maximised else -1
    rest = next(epoch for epoch, value in values if sign * (best[1] - value) <= FLAT)
    last = max(epoch for epoch, _ in values)
    saved = (last - rest - _PATIENCE) / last
    patience = ""
    if saved <= 0.1 and last - rest >= 6:
        patience = " callbacks.early_stopping.patience=3"
        saved = (last - rest - 3) / last
    if saved <= 0.1:
        return None
    told = format_seconds(saved * run.train_seconds) if run.train_seconds else f"{saved:.0%} of the epochs"
    why = f"{run.monitor} came within {FLAT} of its best in epoch {rest} of {last}. Stopping then saves about {told}:"
    return Suggestion(why, f"callbacks=early_stopping{patience}", saved / 2)


def still_moving(run: RunRecord) -> Suggestion | None:
    """The metric was still improving at the end: train longer."""
    why, values = not_finished(run), run.curves.get(run.monitor, [])
    if not why or not values:
        return None
    return Suggestion(f"{why} Twice as many epochs:", f"trainer.max_epochs={2 * values[-1][0]}", 0.25)


def few_steps(run: RunRecord) -> Suggestion | None:
    """The metric was still improving, and an epoch has few steps: smaller batches."""
    why, events = not_finished(run), run.warm_epochs
    if not why or not events or run.get("datamodule.mode") == "full_batch":
        return None
    steps, seeds = (max(event["counts"].get(name, 0) for event in events) for name in ("batches", "seeds"))
    size = max(_LEAST_BATCH, 1 << max(0, int(seeds / _STEPS).bit_length() - 1))
    if not 0 < steps < _STEPS or size > seeds / steps / 2:
        return None
    told = f"an epoch is {steps} {'step' if steps == 1 else 'steps'} of {seeds / steps:,.0f} seeds a process"
    return Suggestion(f"{why} And {told}. Smaller batches make more steps:", f"datamodule.batch_size={size}", 0.3)


def learns_by_heart(run: RunRecord) -> Suggestion | None:
    """The validation loss rises again: add weight decay, or stop there."""
    why, decay = loss_rises(run), run.get("model.weight_decay")
    if not why:
        return None
    if isinstance(decay, int | float) and decay < _WEIGHT_DECAY:
        return Suggestion(f"{why} With weight decay:", f"model.weight_decay={_WEIGHT_DECAY}", 0.3)
    stop = "callbacks=early_stopping callbacks.early_stopping.monitor=val_loss callbacks.early_stopping.mode=min"
    return Suggestion(f"{why} Stopping there:", stop, 0.3)


def cuts_many_edges(run: RunRecord) -> Suggestion | None:
    """A partitioner that cuts many edges: the default one, which cuts fewer."""
    cut, method = run.quality.get("edge_cut_ratio"), run.method
    if cut is None or cut < 0.2 or method in (None, "streaming_multilevel", "metis", "kaminpar"):
        return None
    effect = "over which processes exchange rows" if run.of("exchange") else "which a part's batches follow for one hop"
    why = f"{method} left {cut:.0%} of the edges between parts, {effect}. The default cuts fewer:"
    return Suggestion(why, "partitioner=streaming_multilevel", cut / 3)


def targets_uneven(run: RunRecord) -> Suggestion | None:
    """Parts differ greatly in training nodes: balance these too."""
    train = run.parts.get("train") or []
    if not sum(train) or run.get("store"):
        return None
    balance = max(train) * len(train) / sum(train)
    if balance < 1.3 or run.method != "streaming_multilevel":
        return None
    why = f"The fullest part has {balance:.2f} times the mean of training nodes:"
    return Suggestion(why, "'partitioner.balance={nodes:1.05,train:1.05}'", min(0.1 * balance, 0.3))


RULES: tuple[Rule, ...] = (
    loss_not_finite,
    learns_nothing,
    ended_early,
    memory_nearly_full,
    halo_rows_read_separately,
    waits_for_reads,
    waits_for_samples,
    averages_often,
    exchanges_whole_rows,
    validates_long,
    came_to_rest,
    still_moving,
    few_steps,
    learns_by_heart,
    cuts_many_edges,
    targets_uneven,
)


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
