"""`gnnscale train`, from a config to a trained model and its summary; `gnnscale plan`, its sizes beforehand."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, ProgressBar
from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .. import events
from ..across_ranks import of_first_rank
from ..datamodule import EpochTimes, PeakRecorder, PredictionWriter
from ..datamodule.stored_graph import accelerator_of, policy_of
from ..loader import RankPlace
from ..memory import format_bytes, process_bytes
from ..partition_store.composition import store_composition
from ..planner.host_memory import INTERPRETER_BYTES, WORKER_BYTES
from ..report.terminal import ProgressBars, is_terminal, print_summary, write_summary
from ..strategy import GNNScaleStrategy, RunReceipt
from ..traits import (
    CheckpointTraits,
    DataTraits,
    StrategyTraits,
)
from .checks import (
    check_dataset,
    check_num_parts,
    check_settings,
    check_unused,
    planned_devices,
    takes_sampler,
)
from .compose import hidden, settings_of_steps, written
from .elastic import planned, save_within_epochs, take_what_is_there
from .errors import Interrupted, UsageError, own_settings, show_warning
from .loggers import EpochLines, log_results, make_loggers
from .models import check_model, learned_node_types, make_model, model_widths, stored_columns
from .ranks import (
    SIGTERM_CODE,
    accelerator,
    end_processes,
    exit_on_sigterm,
    is_first_rank,
    own_start_method,
    products_of,
    set_matmul_precision,
    start_method,
    trains_on,
)
from .run_folder import (
    best_checkpoint,
    bring_events,
    earlier_best,
    fit_facts,
    keep_earlier_run,
    leave_report,
    run_summary,
    sampled_validation,
)
from .run_paths import CONFIG, last_checkpoint
from .store import StoredData, make_store, open_store, plan_standing, standing_store

PREDICTIONS = "predictions.parquet"


def run(config: DictConfig) -> dict:
    """Run one experiment in Hydra's run folder, and print its summary."""
    summary = train(config, Path(HydraConfig.get().runtime.output_dir))
    if is_first_rank():
        print_summary(summary)
    return summary


def train(config: DictConfig, folder: Path) -> dict:
    """Partition, store, train and evaluate according to the config; return the summary, also in `summary.json`."""
    if config.get("elastic"):
        take_what_is_there(config, folder)
    if config.resume is not None:
        config.resume = last_checkpoint(config.resume)
    run = set_up(config, folder, "train")
    if config.get("elastic"):
        save_within_epochs(run.trainer, folder, config.save_steps)
    # Other machines may not see the file: the first rank sends the checkpoint.
    earlier = earlier_best(config.resume, run.trainer.checkpoint_callback) if is_first_rank() else None
    if earlier is not None:
        run.trainer.callbacks.append(earlier)
    run.prepare(config)
    trainer, model, datamodule = run.trainer, run.model, run.datamodule
    if is_first_rank():
        keep_earlier_run(folder)
    with _interruptible(folder, CheckpointTraits(trainer.checkpoint_callback).dirpath):
        with events.stage("train", note=_parts_and_processes(datamodule.store.num_parts, trainer.world_size)):
            fit(trainer, model, datamodule, config.resume)
        facts = fit_facts(folder, trainer.checkpoint_callback, config.resume)
        loggers, trainer.loggers = trainer.loggers, []  # further passes must not replace the metrics of training
        best, note, sampled = of_first_rank(
            lambda: (*best_checkpoint(trainer.checkpoint_callback, earlier), sampled_validation(folder))
        )
        facts |= {"evaluated": note} if note and (config.test or config.predict) else {}
        if sampled:
            facts |= run.validate(best, sampled)
        facts |= run.test(best) if config.test else {}
        facts |= run.predict(best) if config.predict else {}
    summary = run.summarise(config.name, facts)
    if is_first_rank():
        _add_machines(config, run, summary)
        log_results(loggers, summary["metrics"], folder)
        write_summary(folder, summary)
    leave_report(folder)
    return summary


def _add_machines(config: DictConfig, run: "CommandRun", summary: dict) -> None:
    """Add to the summary what an epoch was predicted to cost, and did, and what one machine more or less would do."""
    from .machines import asks_for_costs, predicted_against_measured, told_costs

    if not asks_for_costs(config) or not takes_sampler(config):
        return
    if run.datamodule.store.fetched is not None:
        summary["facts"]["machines"] = "not predicted: this machine has fetched a part of the store alone"
        return
    learned = _learned(config, StoredData(config.name, run.datamodule.store))
    weights = policy_of(run.trainer)
    found = predicted_against_measured(config, run.folder, run.datamodule, weights, run.model, learned)
    summary["machines"] = found
    summary["facts"] |= told_costs(found)


def _parts_and_processes(num_parts: int, num_processes: int) -> str:
    parts = "1 part" if num_parts == 1 else f"{num_parts} parts"
    return f"{parts} on {'1 process' if num_processes == 1 else f'{num_processes} processes'}"


def set_up(config: DictConfig, folder: Path, command: str) -> "CommandRun":
    """Check the settings, open the run's log, and make the Trainer; nothing is read yet."""
    folder.mkdir(parents=True, exist_ok=True)
    _quiet()
    check_settings(config)
    check_unused(config)
    if config.get("step") is not None and command != "reproduce":
        raise UsageError(f"step={config.step} goes with gnnscale reproduce RUN: leave it out")
    if config.get("changed") and not (command == "predict" and config.store):
        raise UsageError(
            f"changed={config.changed} goes with gnnscale predict RUN store=, a store that gnnscale update has "
            "written: leave it out"
        )
    if config.get("keep_layers") and command in ("train", "predict"):
        _check_keeps_layers(config, command)
    if is_first_rank():
        (folder / CONFIG).write_text(OmegaConf.to_yaml(written(config)))
    log = folder / "events.jsonl"
    log.touch()
    begin = log.stat().st_size
    events.open_log(log)
    if is_first_rank():
        events.begin_run(command=command, resume=config.resume)
    # The parent starts no OpenMP thread: forked processes would wait for it forever.
    torch.set_num_threads(1)
    trainer = make_trainer(config, folder)
    if isinstance(trainer.strategy, GNNScaleStrategy):
        trainer.strategy.check_trainer(trainer)
    if command == "train" and is_first_rank():
        print(f"gnnscale {trains_on(trainer, products_of(config))}", flush=True)
    return CommandRun(folder, command, begin, trainer)


def _check_keeps_layers(config: DictConfig, command: str) -> None:
    """Refuse keep_layers where nothing is predicted, or not layer by layer."""
    said = "keep_layers=true keeps the hidden layers of predictions"
    if command == "train" and not config.predict:
        raise UsageError(f"{said}, and none are written: say predict=true, or leave it out")
    if not takes_sampler(config) or config.evaluation.get("mode", "layerwise") != "layerwise":
        raise UsageError(f"{said} that are computed layer by layer: say evaluation=layerwise, or leave it out")
    if OmegaConf.select(config, "model.inputs.dim"):
        raise UsageError(f"{said}, of models without learned rows, and model.inputs.dim gives some: leave it out")


@dataclass
class CommandRun:
    """A run of "train", "test" or "predict"; datamodule, model and plan are None until `prepare`."""

    folder: Path
    command: str
    log_begin: int
    trainer: Any
    datamodule: Any = None
    model: Any = None
    plan: Any = None

    def prepare(self, config: DictConfig, saved: dict | None = None) -> None:
        """Open the data set or the store, make the store where none exists, and make the model.

        saved: Widths of a checkpoint's model; None: those of the data set.
        """
        trainer, store = self.trainer, None
        with ProgressBars() as progress, events.stage("load"):
            if config.store is None:
                dataset = instantiate(config.dataset, **_progress_argument(config.dataset, progress))
            else:
                store = open_store(config)
                dataset = StoredData(config.store, store)
        check_dataset(config, dataset, self.command)
        if saved is None:
            check_model(config, dataset)
        with ProgressBars() as progress:
            datamodule = make_datamodule(config, dataset, progress, store)
            datamodule.check_trainer(trainer)
            if store is None and config.num_parts != "auto" and not _crosses_parts(trainer, datamodule):
                check_num_parts(config.num_parts, trainer.world_size)
            held = {"accelerator": accelerator_of(trainer), "interpreter_bytes": process_bytes()}
            held["start_method"] = StrategyTraits(trainer.strategy).start_method
            held["mixed_parts"] = datamodule.mixed_parts(policy_of(trainer))
            held["samples_whole"] = datamodule.samples_whole(policy_of(trainer))
            make_plan = partial(datamodule.make_plan, trainer.world_size, **held, **model_widths(config, dataset))
            if store is None:
                self.plan = make_store(config, datamodule.store_source, make_plan)
            else:
                self.plan = plan_standing(store, make_plan)
        if is_first_rank():
            datamodule.compare_checksums()
            events.record("parts", **store_composition(datamodule.store))
        if store is None:
            datamodule.store_source.progress = None
        self.datamodule, self.model = datamodule, make_model(config, datamodule, saved)

    def validate(self, checkpoint: str | None, sampled: str) -> dict:
        """Validate on all nodes where training used a sample of them; return the metrics."""
        with events.stage("validate", note="exact, all nodes, the best checkpoint"):
            results = self.trainer.validate(self.model, self.datamodule, ckpt_path=checkpoint, verbose=False)
        exact = {f"{key}_exact": value for key, value in _metrics_of(results).items()}
        return {"validation in training": sampled, **exact}

    def test(self, checkpoint: str | None) -> dict:
        """Test a checkpoint, or with None the current model; return the metrics."""
        with events.stage("evaluate", note="exact, full graph"):
            results = self.trainer.test(self.model, self.datamodule, ckpt_path=checkpoint, verbose=False)
        return _metrics_of(results)

    def predict(self, checkpoint: str | None) -> dict:
        """Write the predictions of a checkpoint, or with None of the current model; return the path."""
        with events.stage("predict"):
            self.trainer.predict(self.model, self.datamodule, ckpt_path=checkpoint, return_predictions=False)
        written = self.folder / PREDICTIONS
        return {"predictions": str(written)} if written.is_file() else {}

    def summarise(self, name: str, facts: dict) -> dict:
        """Return the summary of the run, see `run_summary`; every rank calls it."""
        bring_events(self.folder / "events.jsonl", self.log_begin)
        return hidden(run_summary(name, self.folder, self.datamodule, self.plan, facts, self.command))


def _metrics_of(results: list) -> dict[str, float]:
    return {key: float(value) for result in results for key, value in result.items()}


def fit(trainer, model, datamodule, resume: str | None) -> None:
    """Train, where there are enough parts."""
    if not _crosses_parts(trainer, datamodule):
        check_num_parts(datamodule.store.num_parts, trainer.world_size)
    trainer.fit(model, datamodule, ckpt_path=resume)


@contextmanager
def _interruptible(folder: Path, checkpoints: str | None) -> Iterator[None]:
    """Lightning turns Ctrl+C into an exit; replace it by a line that says how to resume."""
    began = time.time()
    try:
        with exit_on_sigterm():
            yield
    except (SystemExit, KeyboardInterrupt) as stop:
        end_processes()
        leave_report(folder)
        last = None if checkpoints is None else _last_checkpoint(Path(checkpoints), began)
        go_on = f"go on with resume={last}" if last else "no checkpoint was saved; type the same command again"
        raise Interrupted(go_on, isinstance(stop, SystemExit) and stop.code == SIGTERM_CODE) from None
    except Exception:
        leave_report(folder)
        raise


def _last_checkpoint(folder: Path, began: float) -> Path | None:
    """Return the last checkpoint of this run; in a folder used twice Lightning names the second one's last-v1.ckpt."""
    written = {path: path.stat().st_mtime for path in folder.glob("*.ckpt")}
    return max((path for path, at in written.items() if at >= began), key=written.get, default=None)


def _crosses_parts(trainer, datamodule) -> bool:
    """Whether processes need no part of their own: batches cross parts, or all processes share every part."""
    scope = DataTraits(datamodule).scope
    return scope is not None and (scope == "graph" or trainer.strategy.weights.equal_batches)


def _quiet() -> None:
    """Hide Lightning's messages at start; keep its warnings, except five that do not apply."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # what it ends after a failure
    lightning = logging.getLogger("lightning")
    lightning.propagate = not lightning.handlers  # else the root logger repeats its messages
    # They log only what the user turned on.
    for name in ("profilers", "callbacks.early_stopping", "validation", "predictions", "rows"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    warnings.showwarning = show_warning
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # inside Lightning
    warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist.*")  # ranks differ in batches
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")  # inside torch_geometric
    warnings.filterwarnings("ignore", message=".*Couldn't infer the batch indices.*")  # nodes come with predictions
    warnings.filterwarnings("ignore", message="The dirpath has changed from .*")  # `best_checkpoint` compares both


def make_trainer(config: DictConfig, folder: Path):
    """Return the Trainer with its strategy, callbacks and loggers; nothing is started."""
    options = instantiate(config.callbacks) or {}
    callbacks = [*(callback for callback in options.values() if callback is not None), PeakRecorder(), EpochTimes()]
    callbacks.append(LambdaCallback(setup=partial(set_matmul_precision, products_of(config))))
    callbacks.append(RunReceipt(folder, settings_of_steps(config)))
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder / "checkpoints")
    if config.predict:
        callbacks.append(
            PredictionWriter(
                folder / PREDICTIONS,
                earlier=_earlier_predictions(config, folder),
                keep_layers=bool(config.get("keep_layers")),
            )
        )
    trainer_config, strategy_config = config.trainer.copy(), config.strategy.copy()
    trainer_config.accelerator = accelerator(config.trainer)
    strategy_config.start_method = start_method(trainer_config, strategy_config.start_method)
    objects = {"callbacks": callbacks, "strategy": instantiate(strategy_config), "default_root_dir": str(folder)}
    shows_bar = config.trainer.get("enable_progress_bar") is not False
    if shows_bar and not is_terminal() and not any(isinstance(one, ProgressBar) for one in callbacks):
        callbacks.append(EpochLines())
        objects["enable_progress_bar"] = False
    if config.trainer.get("logger") is None:
        objects["logger"] = make_loggers(config.get("logger") or {}, folder)
    elif config.get("logger"):
        raise UsageError("trainer.logger and logger= both choose loggers: leave one of them out")
    if config.trainer.get("logger") is not False:
        callbacks.append(LambdaCallback(on_fit_start=partial(_log_config, written(config))))
    return instantiate(trainer_config, **objects)


def _log_config(config: dict[str, Any], trainer, pl_module) -> None:
    """Give every logger the whole config when training starts; Lightning's loggers write it on rank 0 alone."""
    for logger in trainer.loggers:
        logger.log_hyperparams(config)


def _earlier_predictions(config: DictConfig, folder: Path) -> list[Path]:
    """Return the files that may have the predictions of the version before; none unless `changed` asks for them."""
    changed = config.get("changed", False)
    if isinstance(changed, str):
        given = Path(changed).expanduser()
        if not given.exists():
            raise UsageError(f"changed={changed}: no such file; give {PREDICTIONS} of the version before, or true")
        return [given / PREDICTIONS if given.is_dir() else given]
    if not changed:
        return []
    run = Path(config.resume).parent.parent  # of run/checkpoints/last.ckpt
    return [folder / PREDICTIONS, run / "predict" / PREDICTIONS, run / PREDICTIONS]


def make_datamodule(config: DictConfig, dataset, progress=None, store=None):
    """Return the DataModule with its sampler and partitioner; `make_store` settles its parts and its folder.

    Args:
        dataset: What a store is made from.
        progress: Called while it is made.
        store: An open store to train on instead, or None.
    """
    # Hydra would read a data set or a sampler, which are dataclasses, as configs: they are passed directly.
    options = {}
    if takes_sampler(config):
        options = {
            "sampler": instantiate(config.sampler),
            "source": instantiate(config.source),
            "rows": config.rows.preset if "preset" in config.rows else instantiate(config.rows),
            "evaluation": instantiate(config.evaluation),
        }
    if store is None:
        options |= {"root": config.paths.stores, "dataset": dataset, "partitioner": instantiate(config.partitioner)}
        options |= {key: config[key] for key in ("num_parts", "overwrite", "feature_storage", "edge_storage")}
        options |= {"pack_halo": config.pack_halo} if takes_sampler(config) else {}
    else:
        options["store"] = store  # a recipe's settings for making one have no effect
    planner = instantiate(config.planner)
    with own_settings("datamodule", config.datamodule):
        datamodule = instantiate(config.datamodule, _partial_=True)(planner=planner, progress=progress, **options)
    datamodule.verify = config.get("verify", True)
    return datamodule


def _progress_argument(node: DictConfig, progress) -> dict:
    return {"progress": progress} if node._target_.endswith((".generate", ".load_ogb")) else {}


def plan(config: DictConfig) -> None:
    """Print every term of the plan: of the sizes given, or of a recipe's data set."""
    warnings.showwarning = show_warning
    if "dataset" in config:
        check_settings(config)
        num_devices = planned_devices(config)
        store = None if config.store is None else open_store(config)
        datamodule = make_datamodule(config, instantiate(config.dataset) if store is None else None, store=store)
        accelerator = planned_accelerator(config)
        options = {"accelerator": accelerator, "start_method": own_start_method(num_devices, accelerator)}
        data = datamodule.dataset or StoredData(config.store, store)
        options |= model_widths(config, data)
        weights = instantiate(config.strategy.weights) if config.strategy.get("weights") else None
        if weights is not None:
            options["mixed_parts"] = datamodule.mixed_parts(weights)
            options["samples_whole"] = datamodule.samples_whole(weights)
        make_plan = partial(datamodule.make_plan, num_devices, **options)
        made = datamodule.store_source.estimate(make_plan) if store is None else plan_standing(store, make_plan)
    else:
        with own_settings("planner", config.planner):
            made = instantiate(config.planner)()
    table = Table(title="plan", title_justify="left", show_header=False)
    for term, value in made.terms():
        table.add_row(term, value)
    if "dataset" in config and config.elastic:
        table.add_row("elastic", planned(config, weights))
    Console().print(table)
    if "dataset" in config:
        if config.store is None:
            _plan_partitioning(made, datamodule.store_source)
        store = store or standing_store(config, datamodule.store_source)
        if config.store is None and store is not None and takes_sampler(config):
            datamodule = make_datamodule(config, None, store=store)
        hidden_channels = 0 if made.on_gpu else options.get("hidden_channels", 0)
        _plan_reads(config, made, datamodule, store, weights, hidden_channels)
        _plan_machines(config, data, datamodule, store, weights)


def _plan_partitioning(made, source) -> None:
    """Print what the host's memory holds of the graph that is partitioned in it, and with another GiB of memory."""
    found = source.quotient_by_memory(made, 1 << 30)
    if found is not None:
        now, more, best = found
        print(
            f"partitioning: {format_bytes(made.host_memory_bytes)} hold +partitioner.quotient_edges_per_node={now:.2g},"
            f" and {more:.2g} with 1 GiB more; {best:g} cut best"
        )


def _plan_reads(config: DictConfig, made, datamodule, store, weights, hidden_channels: int) -> None:
    """Print what an epoch reads from a store whose features memory does not hold, and what another GiB would save."""
    memory = made.device_memory_bytes
    if store is None or memory is None or not takes_sampler(config) or not datamodule.stored_features:
        return
    free = max(memory - (0 if made.device_memory_found else INTERPRETER_BYTES + WORKER_BYTES), 0)
    place = RankPlace(0, made.num_devices, num_local=made.num_devices)
    found = datamodule.predicted_reads(place, weights, [free, free + (1 << 30)], hidden_channels)
    if not found or found[0].how == "mapped":
        return
    now, more = found
    of_each = "" if now.shared_by == more.shared_by == 1 else " for each"
    reads = store.features.nbytes if more.how == "mapped" else more.predicted_bytes
    print(
        f"features of {format_bytes(store.features.nbytes)}: an epoch of "
        f"{'each process' if now.shared_by == 1 else f'{now.shared_by} processes together'} reads "
        f"{format_bytes(now.predicted_bytes)}, and {format_bytes(reads)} with 1 GiB more{of_each} ({now.why})"
    )


def _plan_machines(config: DictConfig, data, datamodule, store, weights) -> None:
    """Print what each machine of a run on several holds, receives and sends."""
    from ..datamodule.machine_plan import Machines  # of use on several machines alone
    from .machines import asks_for_costs, plan_costs

    learned = _learned(config, data)
    training = config.trainer.get("num_nodes") or 1
    counted = {name: config.machines[name] for name in ("preparing", "link_gbit", "batches")}
    with own_settings("machines", config.machines):
        machines = Machines(training, planned_devices(config), **learned, **counted)
    if machines.number == 1 and not asks_for_costs(config):
        return
    if not takes_sampler(config):
        print("machines: what full-graph training exchanges is not counted here; `gnnscale bench exchange` measures it")
        return
    if store is None:
        print("machines are counted on a store that exists: make it with `gnnscale partition`, or say store=")
        return
    if machines.number > 1:
        _print_machines(config, machines, datamodule, weights)
    if asks_for_costs(config):
        _quiet()
        torch.set_num_threads(1)  # as in a run
        plan_costs(config, datamodule, weights, learned, lambda trial, folder: _trial(trial, folder, store))


def _learned(config: DictConfig, data) -> dict:
    """Return width and node types of learned rows, as `Machines` takes them."""
    return {
        "embedding_dim": model_widths(config, data).get("embedding_dim", 0),
        "embedding_node_types": learned_node_types(config, data.schema, stored_columns(config, data)),
    }


def _trial(config: DictConfig, folder: Path, store) -> tuple[Any, Any]:
    return make_trainer(config, folder), make_datamodule(config, None, store=store)


def _print_machines(config: DictConfig, machines, datamodule, weights) -> None:
    with own_settings("machines", config.machines):
        rows = machines.plan(datamodule, weights)
    columns = ("", "role", "parts", "holds", "targets", "rows of\nothers", "receives", "sends", "link")
    table = Table(*columns, title="machines, in an epoch", title_justify="left", box=SIMPLE, padding=0)
    for number, row in enumerate(rows):
        away = "" if row.away_share is None else f"{row.away_share:.1%}"
        sizes = [format_bytes(size) for size in (row.received_bytes, row.sent_bytes)]
        parts = ", ".join(map(str, row.parts)) if len(row.parts) <= 4 else f"{len(row.parts)} parts"
        targets = f"{row.num_targets:,}" if row.num_targets else ""
        table.add_row(
            str(number), row.role, parts, format_bytes(row.held_bytes), targets, away, *sizes, f"{row.link_s:.2f} s"
        )
    Console().print(table)
    print(
        f"{format_bytes(sum(row.sent_bytes for row in rows))} travel in an epoch; at {machines.link_gbit:g} Gbit/s the "
        f"busiest link takes {max(row.link_s for row in rows):.2f} s. Counted by {machines.batches} batches of each "
        "machine that trains, without gradients, averaged models, evaluation and what a row cache saves."
    )


def planned_accelerator(config: DictConfig) -> str:
    """Return what the planner asks of the Trainer's settings: "cpu", "gpu", or "auto"."""
    given = str(config.trainer.accelerator)
    return "gpu" if given == "cuda" else given if given in ("cpu", "gpu") else "auto"
