"""`gnnscale train`: from a config to a trained model, a summary and a run folder."""

import os
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from .. import events
from ..datamodule.prediction_writer import PredictionWriter
from ..report.progress import ProgressBars
from ..report.summary import print_summary, stage_rows, write_summary
from ..units import format_bytes
from .errors import UsageError
from .store_root import store_root


def run(config: DictConfig) -> dict:
    """Run one experiment in Hydra's run folder, and print its summary."""
    summary = train(config, Path(HydraConfig.get().runtime.output_dir))
    print_summary(summary)
    return summary


def train(config: DictConfig, folder: Path) -> dict:
    """Partition, store, train and evaluate as the config says.

    Args:
        config: composed from `train.yaml`.
        folder: of the run: config, events, metrics, checkpoints, summary.

    Returns:
        The summary that is also written to `summary.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    events.open_log(folder / "events.jsonl")
    # The parent starts no thread of OpenMP: forked processes would wait for it for ever.
    torch.set_num_threads(1)
    trainer = make_trainer(config, folder)
    with ProgressBars() as progress, events.stage("load"):
        dataset = instantiate(config.dataset, **_progress_argument(config.dataset, progress))
    model_options = {"fanouts": _fanouts(config), "batch_size": _batch_size(config)}
    with ProgressBars() as progress:
        datamodule = make_datamodule(config, dataset, progress)
        plan = datamodule.make_plan(
            num_devices=trainer.world_size, feature_dim=dataset.feature_dim, **model_options, **_hidden(config)
        )
        datamodule.prepare_data()
    datamodule.progress = None
    model = make_model(config, datamodule)
    with events.stage("train", note=f"{datamodule.store.num_parts} parts on {trainer.world_size} processes"):
        trainer.fit(model, datamodule, ckpt_path=config.resume)
    facts = _fit_facts(trainer)
    best = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else None
    if config.test:
        with events.stage("evaluate", note="exact, full graph"):
            results = trainer.test(model, datamodule, ckpt_path=best or None, verbose=False)
        facts |= {f"{key}": f"{value:.4f}" for key, value in results[0].items()}
    if config.predict:
        with events.stage("predict"):
            trainer.predict(model, datamodule, ckpt_path=best or None, return_predictions=False)
        facts["predictions"] = str(folder / "predictions.parquet")
    summary = _summary(config, folder, datamodule, plan, facts)
    write_summary(folder, summary)
    return summary


def make_trainer(config: DictConfig, folder: Path):
    """Return the Trainer with its strategy, callbacks and loggers; nothing is started."""
    from lightning.pytorch.loggers import CSVLogger

    options = instantiate(config.callbacks) or {}
    callbacks = [callback for callback in options.values() if callback is not None]
    for callback in callbacks:
        if hasattr(callback, "dirpath") and callback.dirpath is None:
            callback.dirpath = str(folder / "checkpoints")
    if config.predict:
        callbacks.append(PredictionWriter(folder / "predictions.parquet"))
    strategy_config = config.strategy.copy()
    if strategy_config.start_method is None:
        strategy_config.start_method = _start_method(config.trainer)
    given = {} if config.trainer.get("logger") is not None else {"logger": CSVLogger(folder, name="", version="")}
    trainer = instantiate(
        config.trainer,
        callbacks=callbacks,
        strategy=instantiate(strategy_config),
        default_root_dir=str(folder),
        **given,
    )
    return trainer


def make_datamodule(config: DictConfig, dataset, progress=None):
    """Return the DataModule with its sampler and partitioner; the store's folder is named by what it is made from."""
    options = {"progress": progress} if progress else {}
    return instantiate(
        config.datamodule,
        root=store_root(config, dataset),
        dataset=dataset,
        partitioner=instantiate(config.partitioner),
        planner=instantiate(config.planner),
        num_parts=config.num_parts,
        sampler=instantiate(config.sampler),
        **options,
    )


def make_model(config: DictConfig, datamodule):
    """Return the LightningModule, its input and output widths taken from the store."""
    from lightning import seed_everything

    seed_everything(config.seed, verbose=False)
    widths = {"in_channels": datamodule.num_features, "out_channels": datamodule.num_classes}
    backbone = instantiate(config.model.backbone, **widths)
    layers, hops = getattr(backbone, "num_layers", None), _fanouts(config)
    if layers and hops and _batch_size(config) and layers != len(hops):
        raise UsageError(
            f"sampler.fanouts has {len(hops)} hops, but model.backbone.num_layers is {layers}; give one fan-out a layer"
        )
    rest = {key: value for key, value in config.model.items() if key != "backbone"}
    return instantiate(OmegaConf.create(rest), backbone=backbone, multilabel=datamodule.store.labels.ndim == 2)


def _start_method(trainer_config: DictConfig) -> str:
    """fork starts in half the time; torchrun has started the processes already; CUDA cannot be forked."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_NTASKS" in os.environ:
        return "popen"
    on_cpu = trainer_config.accelerator == "cpu" or not torch.cuda.is_available()
    return "fork" if on_cpu else "spawn"


def _fanouts(config: DictConfig) -> list[int]:
    return list(config.sampler.get("fanouts") or [])


def _batch_size(config: DictConfig) -> int | None:
    return config.datamodule.batch_size if config.datamodule.mode == "mini_batch" else None


def _hidden(config: DictConfig) -> dict:
    hidden = config.model.backbone.get("hidden_channels")
    return {"hidden_channels": hidden} if hidden else {}


def _progress_argument(node: DictConfig, progress) -> dict:
    return {"progress": progress} if node._target_.endswith(".generate") else {}


def _fit_facts(trainer) -> dict:
    facts = {"epochs": trainer.current_epoch}
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    checkpoint = trainer.checkpoint_callback
    if checkpoint is not None and checkpoint.best_model_score is not None:
        facts[f"best {checkpoint.monitor}"] = f"{float(checkpoint.best_model_score):.4f}"
    elif "val_acc" in metrics:
        facts["val_acc"] = f"{metrics['val_acc']:.4f}"
    return facts


def _summary(config: DictConfig, folder: Path, datamodule, plan, facts: dict) -> dict:
    quality = (datamodule.partitioning_facts.get("quality") or {}) | {}
    predicted = dict(plan.host_peak_bytes)
    shown = {
        "graph": f"{datamodule.store.num_nodes:,} nodes, {datamodule.store.num_arcs:,} arcs",
        "parts": f"{datamodule.store.num_parts} ({datamodule.partitioning_facts.get('method', 'given')})",
    }
    for key in ("edge_cut_ratio", "replication_factor", "node_balance"):
        if key in quality:
            shown[key.replace("_", " ")] = f"{quality[key]:.4f}"
    shown |= facts
    shown |= {
        "device peak, predicted": format_bytes(plan.device_peak_bytes),
        "store": str(datamodule.root),
        "run folder": str(folder),
    }
    return {
        "title": config.name,
        "stages": stage_rows(events.read_log(folder / "events.jsonl"), predicted),
        "facts": shown,
        "quality": quality,
        "plan": dict(plan.terms()),
    }
