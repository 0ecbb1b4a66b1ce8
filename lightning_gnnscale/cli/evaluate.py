"""`gnnscale test` and `gnnscale predict`: a checkpoint of a run, or any other, on the run's graph or another."""

import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ..errors import CheckpointError
from ..model.checkpoint_file import saved_model
from ..report.terminal import print_summary, write_summary
from .errors import UsageError
from .ranks import is_first_rank
from .run_folder import earlier_best
from .run_paths import last_checkpoint
from .train import CommandRun, set_up

_CALLBACK = re.compile(r"[+~]*callbacks\.(\w+)")


def test(config: DictConfig) -> dict:
    """Evaluate a checkpoint on the test nodes or links; the results are in `summary.json` of the run folder."""
    return _evaluate(config, "test")


def predict(config: DictConfig) -> dict:
    """Write a checkpoint's `predictions.parquet` into the run folder: a row a node or held-out edge, by your ids."""
    return _evaluate(config, "predict")


def _evaluate(config: DictConfig, command: str) -> dict:
    if config.resume is None:
        raise UsageError(f"{command} needs a checkpoint: say gnnscale {command} RUN, or resume=RUN with its settings")
    OmegaConf.set_struct(config, False)
    given, config.resume = config.resume, last_checkpoint(config.resume)
    config.num_devices = "${trainer.devices}"  # as in train.yaml: a run's own config has its number
    config.test, config.predict = command == "test", command == "predict"
    config.logger, config.trainer.logger = None, False
    config.callbacks = _evaluating(config.callbacks)
    folder = Path(HydraConfig.get().runtime.output_dir)
    run = set_up(config, folder, command)
    checkpoint, note = _checkpoint(given, config.resume, run)
    try:
        saved = saved_model(checkpoint)
    except CheckpointError as error:
        raise UsageError(f"resume: {error}") from None
    run.prepare(config, saved)
    facts = {"checkpoint": checkpoint + note} | (run.test(checkpoint) if command == "test" else run.predict(checkpoint))
    summary = run.summarise(config.name, facts)
    if is_first_rank():
        write_summary(folder, summary)
        print_summary(summary)
    return summary


def _evaluating(callbacks: DictConfig | None) -> dict:
    """Return the callbacks for evaluation: the one that knows the best checkpoint, and those of the command line."""
    given = {found[1] for word in HydraConfig.get().overrides.task if (found := _CALLBACK.match(word))}
    kept = {name: one for name, one in (callbacks or {}).items() if one is not None}
    return {
        name: one
        for name, one in kept.items()
        if name in given or str(one.get("_target_", "")).endswith(".ModelCheckpoint")
    }


def _checkpoint(given: str, last: str, run: CommandRun) -> tuple[str, str]:
    """Return the checkpoint to evaluate, and a note on it: the given file, or the best that a run knows."""
    if not Path(given).expanduser().is_dir():
        return last, ""
    best = earlier_best(last, run.trainer.checkpoint_callback)
    if best is None:
        return last, " (the last one: none is known to be the best)"
    moved = Path(last).parent / Path(best.path).name  # the run's folder may have been moved
    path = next((one for one in (Path(best.path), moved) if one.is_file()), None)
    score = f"{run.trainer.checkpoint_callback.monitor} {best.score:.4f}"
    if path is None:
        return last, f" (the last one: {Path(best.path).name}, of {score}, is gone)"
    return str(path), f" ({score})"
