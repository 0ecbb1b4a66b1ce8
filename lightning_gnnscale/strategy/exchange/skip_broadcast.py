"""SANCUS: rows are sent again only when a staleness bound asks for it."""

from dataclasses import replace

from .bounds import BOUNDS, Bound, checked_epochs
from .halo import HaloExchange
from .policy import ExchangePlan, ExchangePolicy

ROWS = ("block", "row")


class SkipBroadcast(ExchangePolicy):
    """Use rows of other processes as they were last sent, as long as a bound allows it.

    The check of a layer's rows comes right after they are computed; a process always reads its own rows fresh. Only
    the forward skips: gradients go back in full, as if stale rows were fresh ones (straight-through).

    Args:
        bound: `EpochFixed`, `EpochAdaptive` or `VariationGap`.
        exchange: how rows travel when they do: HaloExchange() by default, BroadcastExchange(), or Quantized around
            either.
        rows: "block": a process sends all of a layer's rows or none; "row": the rows that exceed the bound.
        warmup_epochs: epochs of exact exchange at the start, rows and gradients; the first epoch always is one,
            unless the bound is given its versions.
        remote_gradient: "straight_through": gradients go back in the same step, those of stale rows too; "drop":
            nothing flows back to other processes.
        stale: "hold": as they were sent; "extrapolate": moved on along their last change, linearly in epochs.

    Raises:
        ValueError: an unknown name, or a number out of range.

    Cost: receivers keep the rows that they read (all rows under BroadcastExchange) of each layer but the first; a
        sender keeps the rows that others read where the bound looks at changes; twice as much with "extrapolate".
    Source: Peng et al., SANCUS, VLDB 2022, Algorithms 3 to 6. Differs: one flag a layer and source; by row; halo.
    """

    def __init__(
        self,
        bound: Bound,
        exchange: ExchangePolicy | None = None,
        rows: str = "block",
        warmup_epochs: int = 0,
        remote_gradient: str = "straight_through",
        stale: str = "hold",
    ) -> None:
        if not isinstance(bound, Bound):
            raise ValueError(
                f"exchange.bound must be one of {', '.join(kind.__name__ for kind in BOUNDS.values())}, got {bound!r}"
            )
        _check_choice("rows", rows, ROWS)
        _check_choice("remote_gradient", remote_gradient, ("straight_through", "drop"))
        _check_choice("stale", stale, ("hold", "extrapolate"))
        self.bound, self.exchange, self.rows = bound, HaloExchange() if exchange is None else exchange, rows
        self.warmup_epochs = checked_epochs("exchange.warmup_epochs", warmup_epochs)
        self.remote_gradient, self.stale = remote_gradient, stale
        check_wrapped(self, self.exchange)
        if rows == "row" and getattr(bound, "initial_versions", None) is not None:
            raise ValueError('exchange.bound.initial_versions are those of blocks: use rows="block", or leave them out')

    def plan(self) -> ExchangePlan:
        return replace(
            self.exchange.plan(),
            bound=self.bound,
            by_row=self.rows == "row",
            warmup_epochs=self.warmup_epochs,
            extrapolate=self.stale == "extrapolate",
            remote_gradient=self.remote_gradient == "straight_through",
        )


def check_wrapped(policy: ExchangePolicy, inner: ExchangePolicy) -> None:
    """Refuse an exchange that sends nothing, or one of the same kind at any depth, inside another.

    Raises:
        ValueError: the message says what may stand there.
    """
    innermost = inner
    while not isinstance(innermost, type(policy)) and hasattr(innermost, "exchange"):
        innermost = innermost.exchange
    repeated = isinstance(innermost, type(policy))
    if repeated or not isinstance(inner, ExchangePolicy) or inner.plan() is None:
        raise ValueError(
            f"{type(policy).__name__}(exchange=...) must be HaloExchange(), BroadcastExchange() or another wrapper "
            f"around one of them, got {inner!r}"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"exchange.{name} must be one of {', '.join(allowed)}, got {value!r}")
