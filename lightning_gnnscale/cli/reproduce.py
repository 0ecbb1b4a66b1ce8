"""`gnnscale reproduce RUN step=N`: a step of a run computed again from its receipt, and compared."""

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ..strategy.receipt import RECEIPT, read_receipt
from ..strategy.reproduction import find_step, reproduce_step
from .compose import settings_of_steps
from .errors import UsageError
from .ranks import started_from_outside
from .run_paths import run_of
from .train import set_up

_LEFT_OUT = (".ModelCheckpoint", ".EarlyStopping")


def run(config: DictConfig) -> None:
    """Print a line for each thing that is compared; exit with 1 where one of the step is not the same."""
    step = config.get("step")
    if config.resume is None:
        raise UsageError("reproduce needs a run: say gnnscale reproduce RUN step=N")
    if started_from_outside():
        raise UsageError("reproduce computes a step on one process: start it without torchrun or srun")
    folder = run_of(str(config.resume))
    sections = read_receipt(folder)
    if step is None:
        steps = [row.step for section in sections for rows in section.epochs.values() for row in rows]
        known = f"in [{min(steps)}, {max(steps)}]" if steps else "of its receipt, which has none yet"
        raise UsageError(f"reproduce needs a step: say step=N, {known}; 0 is the first")
    section, _ = find_step(sections, step, folder)
    settings = settings_of_steps(config)
    _on_one_process(config, section.began)
    command = set_up(config, Path(HydraConfig.get().runtime.output_dir), "reproduce")
    command.prepare(config)
    print(f"step {step} of {folder / RECEIPT}", flush=True)
    compared = reproduce_step(folder, step, command.trainer, command.model, command.datamodule, settings, _say)
    other = [one.what for one in compared if one.same is False and one.what in ("start", "batch", "loss", "weights")]
    if other:
        print(f"step {step} is not the same: {', '.join(other)}")
        sys.exit(1)
    print(f"step {step} is the same")


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _on_one_process(config: DictConfig, began: dict[str, Any]) -> None:
    """Change settings so that one process computes what those of the run did, and nothing is saved or evaluated."""
    OmegaConf.set_struct(config, False)
    watched = str(OmegaConf.select(config, "model.scheduler._target_")).endswith(".ReduceLROnPlateau")
    config.resume, config.logger, config.elastic = None, None, False
    config.test = config.predict = False
    config.num_devices = "${trainer.devices}"
    config.trainer.devices, config.trainer.num_nodes, config.trainer.logger = 1, 1, False
    if not watched:
        config.trainer.limit_val_batches = 0
    config.trainer.enable_progress_bar = False
    config.strategy.start_method = None
    if began["shares_steps"] and began["logical_ranks"]:
        config.strategy.logical_ranks = began["logical_ranks"]
    callbacks = config.callbacks or {}
    config.callbacks = {
        name: one
        for name, one in callbacks.items()
        if one is not None and not str(one.get("_target_", "")).endswith(_LEFT_OUT)
    }
