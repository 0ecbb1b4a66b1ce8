"""What an exchange policy is: how the layers of a model read rows that other processes own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from .bounds import Bound

BACKWARDS = ("auto", "push", "pull")


@dataclass(frozen=True)
class RowCoding:
    """How rows are written for the wire.

    Attributes:
        bits: of a value; None: as they are.
        delta: differences to what the receivers hold.
    """

    bits: int | None = None
    delta: bool = False


@dataclass(frozen=True)
class ExchangePlan:
    """What a composition of policies comes to.

    Attributes:
        whole_blocks: every process gets every row; False: the rows that it reads.
        coding: of rows on their way forward.
        bound: when rows are sent again; None: at every step.
        by_row: the bound is held by every row, not by the block.
        warmup_epochs: epochs of exact exchange at the start.
        extrapolate: stale rows move on along their last change.
        backward: "push": gradients of halo rows go back to their owners; "pull": owners read gradients of their
            readers' outputs; "auto": pull where graph and layer allow it.
        backward_bits: of gradient values; None: as they are.
        backward_threshold: gradient rows below so many mean norms are drawn by their norm and scaled up: unbiased.
        remote_gradient: False: nothing flows back to other processes.
        seed: of rounding and of the rows that are drawn.
    """

    whole_blocks: bool = False
    coding: RowCoding = RowCoding()
    bound: "Bound | None" = None
    by_row: bool = False
    warmup_epochs: int = 0
    extrapolate: bool = False
    backward: str = "auto"
    backward_bits: int | None = None
    backward_threshold: float = 0.0
    remote_gradient: bool = True
    seed: int = 0


class ExchangePolicy:
    """Base of the exchange policies.

    Attributes:
        live: gradients cross processes while they train. A gradient of another replica must mean something to this
            one, so that models may not be averaged once an epoch or less; joining gradients keeps replicas equal
            (`BoundedGradientStaleness`: nearly so).
    """

    @property
    def live(self) -> bool:
        plan = self.plan()
        return plan is not None and plan.remote_gradient

    def plan(self) -> ExchangePlan | None:
        """Return how rows travel, or None: they do not."""
        return None

    def check_trainer(self, trainer: "pl.Trainer") -> None:
        """Refuse settings of the Trainer by themselves, before there is a model or data; `check` asks again.

        Raises:
            StrategyError: the message names the argument and the remedy.
        """
        from .setup import check_precision

        check_precision(self, trainer)

    def check(self, trainer: "pl.Trainer") -> None:
        """Refuse what does not fit, before anything is set up.

        Raises:
            StrategyError: model, DataModule or world size do not fit this policy; the message names the remedy.
        """
        from .setup import check_exchange

        check_exchange(self, trainer)

    def __repr__(self) -> str:
        fields: dict[str, Any] = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
