"""The callback that turns the dial of locality-aware sampling by the share of time that loading takes."""

from dataclasses import replace
from typing import Any

import lightning as L
import torch

from ..errors import StrategyError
from ..sampler.locality import LocalityScale

_STATE = ("scale", "previous", "fixed")


class LocalityController(L.Callback):
    """Set the locality scale after each training epoch, by Algorithm 2.

    The scale starts at 1, doubles while loading takes more than `upper` of an epoch's time, goes back half way to the
    previous value where it takes less than `lower`, and stays for good once it is between them or at `max_scale`.
    Every rank acts on the mean share over ranks, so all have the same scale. Logged at each epoch's end:
    `loading_share`, and `locality_scale` as it was in that epoch. The state is part of checkpoints.

    It reads `trainer.datamodule.loading_share()`, a float in [0, 1] of the epoch that ends, and calls
    `trainer.datamodule.set_locality_scale(scale)` before the first epoch and after each one.

    Args:
        lower, upper: shares of an epoch's time, 0 <= lower <= upper <= 1.
        max_scale: largest scale, finite and >= 1.

    Raises:
        ValueError: an argument out of range.
        StrategyError: at the start of training, a datamodule or a sampler that has no locality.

    Source: Song and Jiang, ICS 2022, Algorithm 2; see `LocalityScale`.
    """

    def __init__(self, lower: float = 0.15, upper: float = 0.20, max_scale: float = 8.0):
        self.state = LocalityScale(lower, upper, max_scale)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        datamodule = trainer.datamodule
        if not all(callable(getattr(datamodule, name, None)) for name in ("set_locality_scale", "loading_share")):
            given = "no datamodule" if datamodule is None else type(datamodule).__name__
            raise StrategyError(
                "LocalityController needs a datamodule with set_locality_scale and loading_share, got "
                f"{given}: use PartitionDataModule, or leave the callback out"
            )
        sampler = getattr(datamodule, "sampler", None)
        if getattr(sampler, "locality", None) is None:
            raise StrategyError(
                f"LocalityController needs a sampler with locality, got {type(sampler).__name__} without one: give "
                "NeighborSampler or LayerwiseSampler locality=LocalityBias(placement), or leave the callback out"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.datamodule.set_locality_scale(self.state.scale)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        share = torch.tensor(trainer.datamodule.loading_share(), dtype=torch.float32, device=pl_module.device)
        share = min(max(float(trainer.strategy.reduce(share, reduce_op="mean")), 0.0), 1.0)
        values = {"loading_share": share, "locality_scale": float(self.state.scale)}
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)
        self.state = self.state.after_epoch(share)
        trainer.datamodule.set_locality_scale(self.state.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the one before it, and whether it is fixed."""
        return {name: getattr(self.state, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; `lower`, `upper` and `max_scale` stay this callback's own.

        Raises:
            ValueError: the checkpoint's scale is above this callback's max_scale.
        """
        self.state = replace(self.state, **{name: state_dict[name] for name in _STATE})
