"""A step of a run computed again from its receipt, on one process, and compared."""

import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from ..errors import GNNScaleError, StrategyError, is_integer, short
from ..model.checkpoint_file import check_is_lightnings, read_checkpoint
from ..traits import DataTraits, InputsTraits, ModuleTraits, StrategyTraits
from .receipt import (
    BatchRow,
    RunReceipt,
    Section,
    described_run,
    digest_of_weights,
    number_of,
    read_receipt,
    rows_of,
)
from .weights import ModelAveraging

CHECKPOINTS = "checkpoints"
AFTER_BATCH, END_OF_EPOCH = -1, -2
_SAID = {True: "same", False: "not the same", None: "-"}


class Compared(NamedTuple):
    """A thing that was compared.

    Attributes:
        what: "code", "versions", "settings", "processor", "precision", "threads", "store", "processes", "bits",
            "start", "batch", "loss" or "weights".
        same: None: it is not compared.
        told: What it is, or was.
    """

    what: str
    same: bool | None
    told: str

    def line(self) -> str:
        """Return it as a line of text."""
        return f"{self.what:<10} {_SAID[self.same]:<13} {self.told}".rstrip()


class Start(NamedTuple):
    """From where a step is computed: a checkpoint, or with None the seed; the digest of its weights as they were."""

    checkpoint: Path | None
    step: int
    weights: str | None


class Wanted(NamedTuple):
    """What is compared, from the section that has it.

    Attributes:
        step, epoch: As the receipt counts them. rows: The batches of the step.
        by_step: Whether the steps of one process are those of the receipt; else batches are found by their keys, and
            weights after a batch or at the end of the epoch.
        after: Steps taken where the weights are compared, `AFTER_BATCH` or `END_OF_EPOCH`; None: nowhere.
        weights: Their digest.
    """

    step: int
    epoch: int
    rows: list[BatchRow]
    by_step: bool
    after: int | None
    weights: str | None


class _ReachedError(Exception):
    """Everything wanted has been seen: ends the fit."""


def reproduce_step(
    folder: str | os.PathLike,
    step: int,
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: Any,
    settings: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = print,
) -> list[Compared]:
    """Compute a step of a run again on this process, and compare its batches, losses and weights with its receipt.

    It begins at the nearest checkpoint in `folder/checkpoints` at or before the step, or where there is none at the
    beginning of the run; a run that went on from another one's checkpoint begins there.

    Args:
        folder: Folder of the run, with `receipt.jsonl`; in Python that of its logger.
        step: Optimizer steps before the one that is compared: 0 is the first, as in the column `step` of metrics.
        trainer: A new Trainer of one process, whose checkpoints are left out; under gradient averaging its strategy
            needs `logical_ranks` as the run had (the error says how many). Its fit is ended by an exception of its own
            as soon as all is compared.
        model, datamodule: As new as at the run's beginning.
        settings: As those of its `RunReceipt`.
        tell: Called with a line for each thing as it is compared; None: nothing is printed.

    Returns:
        What was compared. Where code, versions, processor, threads and settings differ comes first.

    Raises:
        GNNScaleError: no receipt, another store, or where to start from is gone.
        ValueError: a step that the receipt does not have.
        StrategyError: what was trained depends on the processes of the run, or the Trainer has other ranks than it.

    Cost: the steps from there to this one; under model averaging those of its epoch.
    """
    sections = read_receipt(folder)
    section, wanted = find_step(sections, step, folder)
    start = nearest_start(sections, section, wanted, Path(folder))
    policy = StrategyTraits(trainer.strategy).weights
    if trainer.world_size != 1:
        raise StrategyError(f"a step is computed again on one process, got a Trainer of {trainer.world_size}")
    began = section.began
    if began["shares_steps"] and policy is not None and began["logical_ranks"] is not None:
        here = StrategyTraits(trainer.strategy).logical_ranks or 1
        if here != began["logical_ranks"]:
            raise StrategyError(
                f"the run had {began['logical_ranks']} logical ranks, the Trainer's strategy has {here}: give it "
                f"logical_ranks={began['logical_ranks']}"
            )
    again = _Reproduction(section, wanted, start, settings, tell)
    trainer.callbacks[:] = [one for one in trainer.callbacks if not isinstance(one, RunReceipt | Checkpoint)]
    trainer.callbacks.insert(0, again)
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")  # left out here
            trainer.fit(model, datamodule, ckpt_path=None if start.checkpoint is None else str(start.checkpoint))
    except _ReachedError:
        pass
    finally:
        torch.set_num_threads(threads)
    again.end()
    return again.compared


def find_step(sections: list[Section], step: int, folder: str | os.PathLike) -> tuple[Section, Wanted]:
    """Return the last section of a receipt that has a step, and what of it is compared.

    Raises:
        ValueError: no section has it; the message says which there are.
    """
    steps = [row.step for section in sections for rows in section.epochs.values() for row in rows]
    if not steps:
        raise GNNScaleError(f"{folder}: its receipt has no step: the run ended before the first epoch or checkpoint")
    found = [section for section in sections if is_integer(step) and section.rows(step)[1]]
    if not found:
        raise ValueError(f"step must be in [{min(steps)}, {max(steps)}], the steps of {folder}, got {short(step)}")
    section = found[-1]
    epoch, rows = section.rows(step)
    by_step = section.began["shares_steps"] or section.began["processes"] == 1
    if by_step:
        # Saved within an epoch is the average of the parts, which no process trains on.
        whole = [mark for mark in section.marks if section.began["shares_steps"] or not mark["within"]]
        marks = [(mark["step"], mark["weights"]) for mark in whole]
        marks += [(row.step + 1, row.weights) for rows in section.epochs.values() for row in rows]
        later = [mark for mark in marks if mark[0] > step and mark[1] is not None]
        after, weights = min(later, key=lambda mark: mark[0], default=(None, None))
        return section, Wanted(step, epoch, rows, True, after, weights)
    if all(row.weights is not None for row in rows):
        return section, Wanted(step, epoch, rows, False, AFTER_BATCH, None)
    ends = [mark for mark in section.marks if mark["epoch"] == epoch and not mark["within"] and mark["weights"]]
    after, weights = (END_OF_EPOCH, ends[0]["weights"]) if ends else (None, None)
    return section, Wanted(step, epoch, rows, False, after, weights)


def nearest_start(sections: list[Section], section: Section, wanted: Wanted, folder: Path) -> Start:
    """Return the last point at or before a step from which it can be computed, on one process.

    Raises:
        GNNScaleError: the run went on from a checkpoint that is gone, and no later one is left.
    """
    known, own = {}, folder / CHECKPOINTS
    for one in sections[: sections.index(section) + 1]:
        for mark in one.marks:
            if mark["saved"] and (wanted.by_step or not mark["within"]):
                known[mark["step"]] = mark["weights"]
    found = []
    for path in sorted(own.glob("*.ckpt")):
        saved = check_is_lightnings(read_checkpoint(path, mmap=True), path)
        at = saved.get("global_step")
        if at in known and at <= wanted.step and "optimizer_states" in saved:
            found.append(Start(path, at, known[at]))
    for one in sections[: sections.index(section) + 1]:
        from_file = one.began["checkpoint"]
        path = None if from_file is None else Path(from_file)
        if one.began["step"] > wanted.step or (path is not None and path.resolve().parent == own.resolve()):
            continue
        if path is None or path.is_file():
            found.append(Start(path, one.began["step"], one.began["weights"]))
    if not found:
        raise GNNScaleError(
            f"{folder}: step {wanted.step} is computed from {section.began['checkpoint']}, which is gone, and no "
            "checkpoint between is left: put it back, or choose a step after one that is there"
        )
    return max(found, key=lambda start: start.step)


class _Reproduction(RunReceipt):
    """Watches a fit until a step of a receipt has been computed, compares, and ends it."""

    def __init__(self, section: Section, wanted: Wanted, start: Start, settings: Mapping[str, Any] | None, tell: Any):
        super().__init__(None, settings)
        self.compared: list[Compared] = []
        self._section, self._wanted, self._start, self._tell = section, wanted, start, tell
        self._then = dict(zip(_names(wanted.rows), wanted.rows, strict=True))
        self._now: dict[Any, BatchRow] = {}
        self._weights_now: str | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        began, wanted = self._section.began, self._wanted
        why = None if began["processes"] == 1 else _depends_on_processes(trainer)
        if why is not None:
            raise StrategyError(
                f"step {wanted.step} cannot be computed again on one process, and the run had {began['processes']}: "
                f"{why}"
            )
        if not began["on_gpu"]:
            torch.set_num_threads(began["threads"])
        now = described_run(trainer, pl_module, self.settings)
        _check_store(began["store"], now["store"])
        for one in _ground(began, now):
            self._add(one)
        if began["on_gpu"] or now["on_gpu"]:
            told = "on a GPU many sums have an order that varies: losses and weights are equal to rounding only"
            self._add(Compared("bits", None, told))
        where = "the seed" if self._start.checkpoint is None else str(self._start.checkpoint)
        same = None if self._start.weights is None else self._start.weights == now["weights"]
        told = f"weights of {where}, step {self._start.step}"
        told += ", are not those that the run had there" if same is False else ""
        self._add(Compared("start", same, told))
        if wanted.after == AFTER_BATCH:  # before the policy averages the weights of parts
            trainer.callbacks.remove(self)
            trainer.callbacks.insert(0, self)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wanted, rows = self._wanted, [] if batch is None else rows_of(self._step, batch, outputs, None)
        stepped = trainer.global_step > self._step
        if wanted.by_step:
            if self._step == wanted.step:
                self._rows += rows
                self._now = dict(zip(_names(self._rows), self._rows, strict=True))
            if wanted.after is not None and stepped and trainer.global_step >= wanted.after:
                self._weights_now = digest_of_weights(pl_module)
            if trainer.global_step > wanted.step and (wanted.after is None or self._weights_now is not None):
                raise _ReachedError
            return
        if trainer.current_epoch == wanted.epoch:
            for row in rows:
                if row.key in self._then:
                    weights = digest_of_weights(pl_module) if wanted.after == AFTER_BATCH else None
                    self._now[row.key] = row._replace(weights=weights)
            if trainer.is_last_batch:
                self._weights_now = digest_of_weights(pl_module)
            if trainer.is_last_batch or (len(self._now) == len(self._then) and wanted.after != END_OF_EPOCH):
                raise _ReachedError

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        pass

    def end(self) -> None:
        """Compare what has been seen."""
        pairs = [(row, self._now.get(name)) for name, row in self._then.items()]
        count = "1 batch" if len(pairs) == 1 else f"{len(pairs)} batches"
        keys = ", ".join(str(row.key) for row, _ in pairs[:4]) + (", ..." if len(pairs) > 4 else "")
        other = [row.key for row, now in pairs if now is None or now.batch != row.batch]
        told = (
            f"{count}, key {keys}" if not other else f"{len(other)} of {count} differ, first the one of key {other[0]}"
        )
        self._add(Compared("batch", not other, told))
        losses = [(row.loss, None if now is None else number_of(now.loss)) for row, now in pairs]
        different = [(then, now) for then, now in losses if not _equal(then, now)]
        told = ", ".join(f"{then:.6g}" for then, _ in losses[:4] if then is not None)
        if different:
            told = f"{different[0][1]!r} now, {different[0][0]!r} in the receipt"
        self._add(Compared("loss", None if all(then is None for then, _ in losses) else not different, told))
        self._add(self._compare_weights(pairs))

    def _compare_weights(self, pairs: list[tuple[BatchRow, BatchRow | None]]) -> Compared:
        wanted = self._wanted
        if wanted.after is None:
            return Compared("weights", None, "the receipt has no digest of them from this step to the end of its epoch")
        if wanted.after == AFTER_BATCH:
            same = all(now is not None and now.weights == row.weights for row, now in pairs)
            return Compared("weights", same, f"of the parts, after step {wanted.step}")
        after = f"the average at the end of epoch {wanted.epoch + 1}" if wanted.after == END_OF_EPOCH else ""
        later = "" if wanted.after == wanted.step + 1 else ", the next that the receipt has"
        return Compared(
            "weights", self._weights_now == wanted.weights, after or f"after step {wanted.after - 1}{later}"
        )

    def _add(self, one: Compared) -> None:
        self.compared.append(one)
        if self._tell is not None:
            self._tell(one.line())


def _names(rows: list[BatchRow]) -> list[Any]:
    """Return by what batches of a step are found: their keys, or their places where they have none."""
    return [("place", at) if row.key is None else row.key for at, row in enumerate(rows)]


def _equal(then: float | None, now: float | None) -> bool:
    both = then is not None and now is not None
    return then == now or (both and math.isnan(then) and math.isnan(now))


def _depends_on_processes(trainer: pl.Trainer) -> str | None:
    """Return why the result of several processes is not that of one, or None."""
    inputs, policy = ModuleTraits(trainer.lightning_module).inputs, StrategyTraits(trainer.strategy).weights
    if InputsTraits(inputs).save is not None:
        return f"{type(inputs).__name__} updates its rows as gradients of the processes come to them"
    if isinstance(policy, ModelAveraging) and policy.optimizer_state == "shared":
        return 'optimizer_state="shared" has a state a process'
    return DataTraits(trainer.datamodule).shares_by_process


def _check_store(then: Mapping[str, str] | None, now: Mapping[str, str] | None) -> None:
    if then is not None and now is not None and then["manifest"] != now["manifest"]:
        raise GNNScaleError(
            f"{now['root']}: the store has changed since the run: its manifest is {now['manifest'][:12]}, and that of "
            f"the run {then['manifest'][:12]}: give the run's by store="
        )


def _ground(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Compared]:
    """Compare what a run is computed from and on."""
    found = []
    for what in ("code", "versions", "settings"):
        names = sorted({*then[what], *now[what]})
        other = [name for name in names if then[what].get(name) != now[what].get(name)]
        told = ", ".join(other)
        if what == "versions" and other:
            told = ", ".join(f"{name} {then[what].get(name)} then, {now[what].get(name)} now" for name in other)
        if what == "code" and not other:
            told = f"sources of {', '.join(names)}"
        found.append(Compared(what, not other, told))
    for what in ("processor", "precision", "threads"):
        told = str(now[what]) if then[what] == now[what] else f"{now[what]}, then {then[what]}"
        found.append(Compared(what, then[what] == now[what], told))
    ranks = then["logical_ranks"] if then["shares_steps"] else None
    told = f"{then['processes']} in the run" + (f", {ranks} logical ranks" if ranks and ranks > 1 else "") + "; now 1"
    return [*found, Compared("store", None if then["store"] is None else True, (now["store"] or {}).get("root", "")),
            Compared("processes", None, told)]  # fmt: skip
