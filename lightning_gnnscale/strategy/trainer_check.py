"""What a Trainer must and must not be set to, checked before a run begins. Every error is one line with its remedy."""

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn.parameter import is_lazy

from ..errors import StrategyError
from ..traits import CheckpointTraits
from . import averaging

_OWN_AVERAGES = ("StochasticWeightAveraging", "WeightAveraging")  # the second since Lightning 2.6


def check_module(module: pl.LightningModule) -> None:
    """Refuse a module that no policy can train.

    Raises:
        StrategyError: manual optimization, or parameters without a shape.
    """
    if not module.automatic_optimization:
        raise StrategyError(
            f"{type(module).__name__} optimizes by hand, so that GNNScaleStrategy does not see its steps: "
            "leave automatic_optimization at True"
        )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise StrategyError(f"parameter {lazy[0]} has no shape yet: give the layer its in_channels, or run it once")


def check_on_exception(trainer: pl.Trainer) -> None:
    """Refuse checkpoints of a run that failed: they are saved in the middle of a batch, and by one rank alone.

    Raises:
        StrategyError: the message names the argument and the remedy.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            given = "OnExceptionCheckpoint"
        elif CheckpointTraits(callback).save_on_exception:
            given = f"{type(callback).__name__}(save_on_exception=True)"
        else:
            continue
        raise StrategyError(
            f"{given} saves within a batch, and a process that fails fails alone while saving waits for the others: "
            "use ModelCheckpoint(save_last=True), and resume from last.ckpt"
        )


def check_model_averaging(trainer: pl.Trainer) -> None:
    """Refuse what would cut rounds short, or leave a rank without work.

    Raises:
        StrategyError: the message names the argument and the remedy.
    """
    check_rounds(trainer)
    if trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run:
        rank_zero_warn(
            f"Trainer(limit_train_batches={trainer.limit_train_batches}) ends an epoch before a rank's last parts, "
            "which are then not trained and weigh nothing. To try a run out use fast_dev_run."
        )
    _check_parts(trainer)


def check_rounds(trainer: pl.Trainer) -> None:
    """Refuse settings of a Trainer that would cut rounds short; the Trainer alone is looked at.

    Raises:
        StrategyError: the message names the argument and the remedy.
    """
    _check_limits(trainer)
    _check_checkpoints(trainer)
    _check_averages(trainer)


def _check_limits(trainer: pl.Trainer) -> None:
    if trainer.max_steps not in (-1, None) and not trainer.fast_dev_run:
        raise StrategyError(
            f"Trainer(max_steps={trainer.max_steps}) stops inside a round, and steps differ between ranks: "
            "use max_epochs"
        )
    if trainer.min_steps is not None and not trainer.fast_dev_run:
        raise StrategyError(
            f"Trainer(min_steps={trainer.min_steps}) may stop inside a round, and steps differ between ranks: "
            "use min_epochs"
        )
    # Lightning leaves the attribute out where the interval is a time.
    interval = getattr(trainer, "val_check_interval", "a time")
    whole_epoch = isinstance(interval, float) and interval == 1.0
    if not trainer.fast_dev_run and not whole_epoch:
        raise StrategyError(
            f"Trainer(val_check_interval={interval!r}) validates inside a round: "
            "leave it at 1.0 and use check_val_every_n_epoch"
        )
    if any(isinstance(callback, Timer) and callback._interval == "step" for callback in trainer.callbacks):
        raise StrategyError(
            "Trainer(max_time=...) stops inside a round: leave it out, and use "
            'callbacks=[Timer(duration, interval="epoch")]'
        )
    if trainer.check_val_every_n_epoch is None:
        raise StrategyError(
            "Trainer(check_val_every_n_epoch=None) counts validation in batches: give a number of epochs"
        )
    if trainer.strategy._layer_sync is not None:
        raise StrategyError(
            "Trainer(sync_batchnorm=True) makes ranks wait for each other in every batch, and they have different "
            "numbers of batches: leave it False (BatchNorm statistics are averaged with the weights)"
        )


def _check_checkpoints(trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback._every_n_train_steps:
            given = f"every_n_train_steps={callback._every_n_train_steps}"
        elif callback._train_time_interval is not None:
            given = "train_time_interval"
        else:
            continue
        raise StrategyError(
            f"ModelCheckpoint({given}) saves inside a round, at steps that differ between ranks: use every_n_epochs, "
            "or a callback that calls trainer.save_checkpoint at the same batch_idx on every rank"
        )


def _check_averages(trainer: pl.Trainer) -> None:
    kinds = tuple(getattr(callbacks, name) for name in _OWN_AVERAGES if hasattr(callbacks, name))
    for callback in trainer.callbacks:
        if isinstance(callback, kinds):
            raise StrategyError(
                f"{type(callback).__name__} averages the weights that it finds, and on a rank those are one part's: "
                "leave it out, as ModelAveraging averages them, or use weights=GradientAveraging()"
            )


def _check_parts(trainer: pl.Trainer) -> None:
    datamodule = trainer.datamodule
    missing = [name for name in ("part_weights", "parts_of_rank") if not hasattr(datamodule, name)]
    if missing:
        given = "no DataModule" if datamodule is None else f"{type(datamodule).__name__} has no {missing[0]}"
        raise StrategyError(
            f"ModelAveraging must know the parts ({given}): train with PartitionDataModule, "
            "or use weights=GradientAveraging()"
        )
    weights = [float(weight) for weight in datamodule.part_weights]
    world_size = averaging.world_size()
    idle = [rank for rank in range(world_size) if len(datamodule.parts_of_rank(rank, world_size)) == 0]
    if idle:
        raise StrategyError(
            f"{world_size} processes share {len(weights)} parts, so that rank {idle[0]} has none: "
            f"use Trainer(devices=...) for at most {len(weights)} processes, or more parts"
        )
    if min(weights) < 0 or sum(weights) <= 0:
        raise StrategyError("no part has training nodes (datamodule.part_weights are all 0): check the train mask")


def step_schedulers(trainer: pl.Trainer, num_parts: int) -> list[LRSchedulerConfig]:
    """Return the configurations of schedulers that count optimizer steps; warn where several parts each count theirs.

    Args:
        trainer: with its optimizers.
        num_parts: parts of this process that count for themselves.

    Raises:
        StrategyError: step- and epoch-counting schedulers are mixed, or one that watches a metric counts steps.
    """
    configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
    if configs and len(configs) < len(trainer.lr_scheduler_configs):
        raise StrategyError(
            "schedulers that count steps belong to a part, those that count epochs to all parts: "
            'give all schedulers the same interval, "epoch" or "step"'
        )
    if any(config.reduce_on_plateau for config in configs):
        raise StrategyError(
            'a ReduceLROnPlateau scheduler with interval="step" has no metric inside a round: use interval="epoch"'
        )
    if configs and num_parts > 1:
        rank_zero_warn(
            f"schedulers that count steps count those of each part by itself, and this process trains {num_parts}: a "
            "schedule over all of trainer.estimated_stepping_batches, the steps of all its parts, would not reach its "
            f"end: divide them by {num_parts}"
        )
    return configs
