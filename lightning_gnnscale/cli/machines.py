"""Seconds and money of an epoch on more or fewer machines: for `gnnscale plan`, and for the report of a run."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..datamodule import EpochTimes
from ..datamodule.machine_plan import Machines
from ..loader import RankPlace
from ..memory import format_bytes, format_seconds
from ..planner.machine_cost import (
    BatchSeconds,
    EpochCost,
    MachineRates,
    SetUp,
    cheapest,
    epoch_cost,
    fetch_seconds,
    ring_bytes,
)
from ..report.page import tiers
from ..report.run_record import BESIDE, RunRecord
from ..strategy import ModelAveraging
from ..system import usable_cores
from ..traits import SourceTraits
from .checks import planned_devices
from .errors import UsageError, own_settings
from .models import make_model

_COUNTED = ("preparing", "link_gbit", "batches")  # of `machines`, those of `Machines`
_RATES = ("price_per_hour", "preparing_price_per_hour", "link_gbit", "latency_ms", "disk_gb_per_s")
_NOT_OF_A_STEP = ("wait", "ranks", "average", "exchange", "validation", "save", *BESIDE)
_SENT = ("from other machines", "from workers of Ray", "learned rows and their gradients")  # of the report's `tiers`
_WARM_UP, _TRIED = 3, 20  # batches of a trial
_LEAST_SHARE = 0.1  # of measured preparation that is no waiting for other machines


def asks_for_costs(config: DictConfig) -> bool:
    """Whether a price, or a run to count by, is given."""
    given = config.get("machines") or {}
    return given.get("price_per_hour") is not None or given.get("run") is not None


class _StepTimes(EpochTimes):
    """Times some batches after the first ones, and ends the training."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end()
        if batch_idx + 1 == _WARM_UP:
            self.on_train_epoch_start(trainer, pl_module)
        trainer.should_stop = batch_idx + 1 == _WARM_UP + _TRIED


def batch_seconds(events: list[dict]) -> BatchSeconds:
    """Return what a batch took, from events `epoch_times`.

    Raises:
        ValueError: they have no batches.
    """
    steps = sum(event["counts"].get("batches", 0) for event in events)
    if not steps:
        raise ValueError("its events count no batches: it trained no epoch")

    def seconds(lane: str, names) -> float:
        return sum(event[lane].get(name, 0.0) for event in events for name in names)

    trained = {name for event in events for name in event["training"]} - set(_NOT_OF_A_STEP)
    return BatchSeconds(
        train_s=seconds("training", trained) / steps,
        prepare_s=(seconds("training", BESIDE) + seconds("beside", BESIDE)) / steps,
        disk_bytes=sum(event.get("disk_bytes") or 0 for event in events) / steps,
        on_gpu=any(event.get("device") == "cuda" for event in events),
    )


def seconds_of_run(run: RunRecord) -> BatchSeconds:
    """Return what a batch of a run took, prepared by its own threads or by workers of Ray.

    Raises:
        UsageError: the run trained no batches.
    """
    try:
        found = batch_seconds(run.warm_epochs)
    except ValueError as error:
        raise UsageError(f"machines.run={run.folder}: {error}: name a run of gnnscale train") from None
    last = {event.get("node"): event for event in run.of("preparation") if "busy_s" in event}
    if last:
        batches = sum(event["counts"].get("batches", 0) for event in run.of("epoch_times"))
        found = replace(found, prepare_s=sum(event["busy_s"] for event in last.values()) / max(batches, 1))
    return found


class CostOfMachines:
    """What an epoch costs on some machines, with the DataModule and the model of a command.

    Args:
        config: Settings of the command.
        datamodule: Over a store that exists.
        weights: Weight policy; None: none.
        model: Whose parameters are averaged.
        learned: Width and node types of learned rows, as `Machines` takes them.
    """

    def __init__(self, config: DictConfig, datamodule: Any, weights: Any, model: Any, learned: dict | None = None):
        self.config, self.datamodule, self.weights = config, datamodule, weights
        self.devices, self.learned = planned_devices(config), learned or {}
        of_machines = config.machines
        with own_settings("machines", of_machines):
            given = {name: of_machines[name] for name in _RATES}
            self.rates = MachineRates(**given, cores=usable_cores() if of_machines.cores is None else of_machines.cores)
        self.values = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._setups: dict[tuple[int, int], SetUp] = {}

    def set_up(self, training: int, preparing: int) -> SetUp:
        """Return what so many machines send each other, counted once by sampled batches."""
        if (training, preparing) not in self._setups:
            self._setups[training, preparing] = self._count(training, preparing)
        return self._setups[training, preparing]

    def _count(self, training: int, preparing: int) -> SetUp:
        data, given = self.datamodule, {name: self.config.machines[name] for name in _COUNTED}
        rows = Machines(training, self.devices, **{**given, "preparing": preparing}, **self.learned).plan(
            data, self.weights
        )
        with closing(data.trial_loader(RankPlace(0, training * self.devices), self.weights)) as loader:
            steps = max(1, len(loader))
        trains, makes = rows[:training], rows[training:] or rows
        every_step = self.weights is not None and self.weights.equal_batches
        averages = steps if every_step else 1
        rounds = self.weights.every_n_epochs if isinstance(self.weights, ModelAveraging) else 1
        size = self.values * (4 if every_step else 8 / rounds)
        makers, of_ray = self.devices * (SourceTraits(data.source).num_threads or 1), SourceTraits(data.source).asking
        if of_ray is not None:
            workers = data.source.num_workers if isinstance(data.source.num_workers, int) else self.rates.cores
            makers = max(1, workers // (preparing or training))
        asks = max(row.received_bytes for row in makes) > 0
        return SetUp(
            training=training,
            preparing=preparing,
            devices=self.devices,
            makers=makers,
            steps=steps,
            requests=(len(data.sampler.per_hop or (1,)) + 1) if asks else 0,
            received_bytes=max(row.received_bytes for row in makes),
            sent_bytes=max(row.sent_bytes for row in makes),
            trained_bytes=max(row.received_bytes for row in trains) if preparing else 0.0,
            total_bytes=sum(row.sent_bytes for row in rows),
            averaged_bytes=size * averages,
            averages=averages,
        )

    def cost(self, training: int, preparing: int, batch: BatchSeconds) -> EpochCost:
        """Return what an epoch of so many machines costs."""
        return epoch_cost(self.set_up(training, preparing), batch, self.rates)

    def all_costs(self, batch: BatchSeconds) -> list[EpochCost]:
        """Return the cost of up to `machines.most` machines that train, and that prepare where Ray's workers do."""
        numbers, of_ray = range(1, self.config.machines.most + 1), SourceTraits(self.datamodule.source).asking
        return [self.cost(t, p, batch) for t in numbers for p in ([0, *numbers] if of_ray is not None else [0])]


Make = Callable[[DictConfig, Path], tuple[Any, Any]]  # a Trainer and a DataModule by settings and a folder


def try_batches(config: DictConfig, make: Make) -> BatchSeconds:
    """Train some batches of a store in this process, on one device, by threads; return what one took."""
    trial, times = config.copy(), _StepTimes()
    OmegaConf.set_struct(trial, False)
    alone = {"devices": 1, "num_nodes": 1, "max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    shown = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trial.trainer = {**trial.trainer, **alone, **dict.fromkeys(shown, False)}
    trial.callbacks, trial.logger, trial.rows = {}, {}, {"preset": "auto"}
    trial.predict = trial.test = False
    trial.source = {"_target_": "lightning_gnnscale.loader.Threads", "num_threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer, datamodule = make(trial, Path(folder))
        trainer.callbacks = [*(one for one in trainer.callbacks if not isinstance(one, EpochTimes)), times]
        trainer.fit(make_model(trial, datamodule, None), datamodule)
    return batch_seconds([times.latest])


def plan_costs(config: DictConfig, datamodule: Any, weights: Any, learned: dict, make: Make) -> None:
    """Print seconds and money of an epoch on 1 to `machines.most` machines.

    Args:
        config, datamodule, weights, learned: As for `CostOfMachines`.
        make: Makes what batches are tried with.
    """
    given = config.machines.run
    if given is None:
        print("machines: training some batches of this machine, to see what one takes")
        batch, how = try_batches(config, make), "batches tried here"
    else:
        batch, how = seconds_of_run(RunRecord.open(given)), f"those of {given}"
    costs = CostOfMachines(config, datamodule, weights, make_model(config, datamodule, None), learned)
    found = costs.all_costs(batch)
    table = Table(*_COLUMNS, title="an epoch, by machines", title_justify="left", box=SIMPLE, padding=0)
    for cost in found:
        table.add_row(*_row(cost))
    Console().print(table)
    best, fastest = cheapest(found), min(found, key=lambda cost: cost.seconds)
    least = "" if best is None else f"; least money: {_named(best)}"
    print(
        f"least time: {_named(fastest)}{least}. By {how}: {batch.train_s * 1e3:.1f} ms to train a batch, "
        f"{batch.prepare_s * 1e3:.1f} ms of a thread to prepare it; validation is not in it."
    )


_COLUMNS = ("train", "prepare", "seconds", "bound by", "travels", "averages", "price")


def _row(cost: EpochCost) -> list[str]:
    price = "" if cost.price is None else f"{cost.price:.4g}"
    sizes = [format_bytes(round(size)) for size in (cost.sent_bytes, cost.averaged_bytes)]
    return [str(cost.training), str(cost.preparing), f"{cost.seconds:.2f}", cost.bound_by, *sizes, price]


def _named(cost: EpochCost) -> str:
    beside = f" and {cost.preparing} that prepare" if cost.preparing else ""
    return f"{cost.training} that train{beside}, {format_seconds(cost.seconds)}"


def predicted_against_measured(
    config: DictConfig, folder: Path, datamodule: Any, weights: Any, model: Any, learned: dict
) -> dict:
    """Return what the report says of a run's machines: predicted, measured, and one machine more or less.

    The prediction is from the seconds a batch of `machines.run`; without one, from the run's own, without what it
    waited for other machines.
    """
    run, costs = RunRecord.open(folder), CostOfMachines(config, datamodule, weights, model, learned)
    training, preparing = config.trainer.get("num_nodes") or 1, config.machines.preparing
    given = config.machines.run
    batch = seconds_of_run(run if given is None else RunRecord.open(given))
    if given is None:
        waited = fetch_seconds(costs.set_up(training, preparing), costs.rates)
        batch = replace(batch, prepare_s=max(batch.prepare_s - waited, _LEAST_SHARE * batch.prepare_s))
    others = [(training - 1, preparing), (training + 1, preparing)]
    if SourceTraits(datamodule.source).asking is not None:
        others += [(training, preparing - 1), (training, preparing + 1)]
    found = tiers(run)
    measured = {
        "seconds": trained_seconds(run),
        "sent_bytes": sum(found.get(name, 0.0) for name in _SENT),
    }
    averaged = found.get("sent: averages", 0.0) / costs.devices
    # On CPUs gradients go in slices, counted as they travel; else what ranks hand to the process group is counted.
    in_slices = weights is not None and weights.equal_batches and not batch.on_gpu
    measured["averaged_bytes"] = averaged if in_slices else ring_bytes(averaged, training)
    hourly = costs.rates.price(training, preparing)
    measured["price"] = None if hourly is None else hourly * measured["seconds"] / 3600
    return {
        "seconds_from": str(given) if given is not None else "this run's batches",
        "batch": asdict(batch),
        "predicted": asdict(costs.cost(training, preparing, batch)),
        "measured": measured,
        "others": [asdict(costs.cost(t, p, batch)) for t, p in others if t > 0 and p >= 0],
    }


def told_costs(found: dict) -> dict[str, str]:
    """Return the facts of a run's summary of what `predicted_against_measured` returns."""
    predicted, measured = found["predicted"], found["measured"]
    both = [format_bytes(round(one["sent_bytes"] + one["averaged_bytes"])) for one in (measured, predicted)]
    price = ""
    if measured["price"] is not None:
        price = f", price {measured['price']:.4g} (predicted {predicted['price']:.4g})"
    text = (
        f"{format_seconds(measured['seconds'])} (predicted {format_seconds(predicted['seconds'])} by "
        f"{found['seconds_from']}, bound by {predicted['bound_by']}), {both[0]} between machines "
        f"(predicted {both[1]}){price}"
    )
    return {"an epoch": text}


def trained_seconds(run: RunRecord) -> float:
    """Return the seconds of a mean epoch of a run without validation and saving; the slowest rank's."""
    by_epoch: dict[int, float] = {}
    for event in run.warm_epochs:
        beside = sum(event["training"].get(name, 0.0) for name in ("validation", "save"))
        by_epoch[event["epoch"]] = max(by_epoch.get(event["epoch"], 0.0), event["seconds"] - beside)
    return sum(by_epoch.values()) / max(len(by_epoch), 1)
