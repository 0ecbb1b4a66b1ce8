"""Exchange policies: how the layers of a model read rows that other processes own."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from ...errors import StrategyError, short
from ...model.row_layers import RowLayer
from ...traits import DataTraits, ModuleTraits, StrategyTraits
from .bounds import BOUNDS, Bound, checked_epochs_or_share, checked_number

BACKWARDS = ("auto", "push", "pull")
PRECISIONS = ("32-true", "64-true", "bf16-mixed")


@dataclass(frozen=True)
class RowQuantisation:
    """How rows are encoded for sending.

    Attributes:
        bits: Bits per value; None: values are sent as they are.
        delta: Whether differences to the rows that the receivers hold are sent.
    """

    bits: int | None = None
    delta: bool = False


@dataclass(frozen=True)
class ExchangePlan:
    """The result of composing exchange policies.

    Attributes:
        whole_blocks: Whether every process gets every row; False: it gets the rows that it reads.
        quantisation: Quantisation of rows on their way forward.
        bound: Decides when rows are sent again; None: at every step.
        by_row: Whether the bound is kept by each row separately and not by the whole block.
        warmup_epochs: Number of epochs at the start in which the exchange is exact, or their share of all, in (0, 1).
        cooldown_epochs: Number of epochs at the end in which the exchange is exact, or their share.
        extrapolate: Whether stale rows continue along their last change.
        backward: "push": gradients of halo rows are sent back to their owners; "pull": owners read gradients of their
            readers' outputs; "auto": pull where graph and layer allow it.
        backward_bits: Bits per gradient value; None: values are sent as they are.
        backward_threshold: Gradient rows below this many mean norms are sent with a probability that follows their
            norm, and scaled up, so that the gradient is unbiased.
        remote_gradient: Whether gradients flow back to other processes.
        late_gradient: Whether those of the step before are added, while those of this step are on their way.
        skip_gradients: Whether the bound decides for gradients too; where none come, those that came last are added.
        gradient_clip: Largest norm of the gradients of a layer that a process sends, over the square root of the number
            of processes; None: not clipped.
        seed: Seed of the rounding and of the choice of gradient rows.
    """

    whole_blocks: bool = False
    quantisation: RowQuantisation = RowQuantisation()
    bound: Bound | None = None
    by_row: bool = False
    warmup_epochs: int | float = 0
    cooldown_epochs: int | float = 0
    extrapolate: bool = False
    backward: str = "auto"
    backward_bits: int | None = None
    backward_threshold: float = 0.0
    remote_gradient: bool = True
    late_gradient: bool = False
    skip_gradients: bool = False
    gradient_clip: float | None = None
    seed: int = 0

    @property
    def needs_max_epochs(self) -> bool:
        """Whether exact epochs are counted from the run's last one, or as a share of all."""
        return bool(self.cooldown_epochs) or isinstance(self.warmup_epochs, float)

    def for_epochs(self, num_epochs: int) -> "ExchangePlan":
        """Return the plan of a run of so many epochs, in which exact epochs are numbers and not shares."""
        shares = {"warmup_epochs": self.warmup_epochs, "cooldown_epochs": self.cooldown_epochs}
        counts = {
            name: round(value * num_epochs) if isinstance(value, float) else value for name, value in shares.items()
        }
        return replace(self, **counts)

    @property
    def keeps_rows(self) -> bool:
        """Whether receivers hold rows from step to step."""
        return self.bound is not None or self.quantisation.delta

    @property
    def foretells(self) -> bool:
        """Whether ranks announce to each other a step ahead what they will send."""
        return self.bound is not None and self.bound.needs_change

    @property
    def counts_in_float32(self) -> bool:
        """Whether rows of fewer bits are widened before they are sent: to be quantised, or to be extrapolated."""
        return self.quantisation.bits is not None or self.extrapolate

    @property
    def keeps_sent_rows(self) -> bool:
        """Whether senders hold what the receivers have."""
        return self.quantisation.delta or self.foretells

    @property
    def given_versions(self):
        """The versions before the first epoch that a bound is given, one for each process; None: none."""
        return None if self.bound is None else self.bound.initial_versions


def exchange_layers(model: nn.Module) -> list[Any]:
    """Return what reads rows through an `exchange` (`RowLayer`s), in the model's order."""
    layers = [module for module in model.modules() if isinstance(module, RowLayer)]
    row_model = row_model_of(model)
    return layers if layers or row_model is None else row_model.layers


def row_model_of(model: nn.Module) -> Any:
    """Return what runs a model of PyG's layers over rows (`RowModel`); None where it has its own way, or none."""
    return ModuleTraits(model).row_model


class ExchangePolicy:
    """Base of the exchange policies.

    Attributes:
        live: gradients cross processes while they train. A gradient of another replica must mean something to this
            one, so that models may not be averaged once an epoch or less; joining gradients keeps replicas equal
            (`BoundedGradientStaleness`: nearly so).
    """

    @property
    def live(self) -> bool:
        """Whether gradients flow back to the rows of other processes."""
        plan = self.plan()
        return plan is not None and plan.remote_gradient

    def plan(self) -> ExchangePlan | None:
        """Return how rows travel, or None: they do not."""
        return None

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse settings of the Trainer by themselves, before there is a model or data; `check` asks again.

        Raises:
            StrategyError: the message names the argument and the remedy.
        """
        if self.plan() is not None and trainer.precision not in PRECISIONS:
            raise StrategyError(
                f"{type(self).__name__} sends rows of float32, float64 or bfloat16, not what "
                f'Trainer(precision={trainer.precision!r}) makes: use precision="bf16-mixed" or "32-true"'
            )
        self._check_exact_epochs(trainer)

    def _check_exact_epochs(self, trainer: pl.Trainer) -> None:
        plan = self.plan()
        if plan is None or not plan.needs_max_epochs:
            return
        names = [name for name in ("warmup_epochs", "cooldown_epochs") if getattr(plan, name)]
        told = " and ".join(f"exchange.{name}={getattr(plan, name)}" for name in names)
        if (trainer.max_epochs or -1) < 0:
            raise StrategyError(f"{told} count from the last epoch, which Trainer(max_epochs=...) must name")
        settled = plan.for_epochs(trainer.max_epochs)
        if plan.bound is not None and settled.warmup_epochs + settled.cooldown_epochs >= trainer.max_epochs:
            rank_zero_warn(
                f"{told} make all {trainer.max_epochs} epochs exact, and nothing is ever skipped: lower them, give "
                "shares such as 0.25, or raise max_epochs"
            )

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse what does not fit, before anything is set up.

        Raises:
            StrategyError: model, DataModule or world size do not fit this policy; the message names the remedy.
        """
        plan, name = self.plan(), type(self).__name__
        if plan is None:
            return
        if not DataTraits(trainer.datamodule).trains_full_graph:
            given = "no DataModule" if trainer.datamodule is None else type(trainer.datamodule).__name__
            raise StrategyError(
                f"{name} exchanges rows of the whole graph ({given} gives parts): train with FullGraphDataModule, or "
                "use exchange=NoExchange()"
            )
        layers = exchange_layers(trainer.lightning_module)
        row_model = row_model_of(trainer.lightning_module)
        if not layers or (row_model is not None and not row_model.can_exchange):
            raise StrategyError(
                f"{name} finds no layer in {type(trainer.lightning_module).__name__} that exchanges rows: use a "
                "backbone of torch_geometric's MessagePassing layers or of lightning_gnnscale.model, or "
                "exchange=NoExchange()"
            )
        self.check_trainer(trainer)
        pushing = [layer for layer in layers if not layer.can_pull]
        if plan.backward == "pull" and pushing:
            kind = type(pushing[0] if row_model is None else row_model.backbone).__name__
            raise StrategyError(
                f'{name}(backward="pull"): {kind} is not linear in its neighbours: use backward="auto" or "push"'
            )

    def __repr__(self) -> str:
        fields: dict[str, Any] = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


class HaloExchange(ExchangePolicy):
    """Send each process exactly the rows that its edges read; the result equals that of one process.

    Args:
        backward: "push": gradients of halo rows go back to their owners and are added there; "pull": each process
            reads the gradients of its readers' outputs, which are narrower in the last layer and zero for nodes
            without a label; "auto": pull in undirected, unweighted graphs for layers that are linear in their
            neighbours (GCN, GraphSAGE), push elsewhere.

    Raises:
        ValueError: an unknown backward.

    Cost: forward, per layer but the first: halo rows x width x 4 bytes; pushed back the same.
    """

    def __init__(self, backward: str = "push") -> None:
        if backward not in BACKWARDS:
            raise ValueError(f"exchange.backward must be one of {', '.join(BACKWARDS)}, got {short(backward)}")
        self.backward = backward

    def plan(self) -> ExchangePlan:
        return ExchangePlan(backward=self.backward)


class BroadcastExchange(ExchangePolicy):
    """Send every process all rows of every other, in every layer but the first, forward and backward.

    Cost: num_nodes x (world_size - 1) x width x 4 bytes a layer and direction, over all processes.
    Source: Tripathy et al., Reducing communication in graph neural network training (CAGNET), SC 2020, 1-D; the
    baseline of SANCUS.
    """

    def plan(self) -> ExchangePlan:
        return ExchangePlan(whole_blocks=True, backward="push")


class NoExchange(ExchangePolicy):
    """Layers read nothing of other processes while they train.

    With `PartitionDataModule` what a part needs beyond itself is in its halo. With `FullGraphDataModule` edges
    between processes are dropped, and degrees are those of the edges that are left; evaluation is exact.

    Source: Huang et al., SDT-GNN, training of local models.
    """


BITS = (16, 8, 4, 2)


class Quantized(ExchangePolicy):
    """Send rows in few bits: one scale per row, values rounded at random so that their mean is right.

    With `delta`, the differences to the rows that the receivers hold are sent. Both sides add the same decoded
    differences, so whatever one message loses is part of the next difference (error feedback). Gradients are new in
    every step: with or without `delta` they are quantised directly, and their mean is right.

    Args:
        bits: Bits per value: 16, 8, 4 or 2 (2: -s, 0 or s).
        delta: Whether differences of rows are sent.
        exchange: HaloExchange() by default, or BroadcastExchange().
        backward_bits: Bits per gradient value; None: as `bits`, but at least 4.
        backward_threshold: Gradient rows whose norm is below this many mean norms are sent with probability p = norm /
            (threshold * mean norm), and divided by p, so that the gradient is unbiased; >= 0, 0 sends all rows. Rows of
            zeros are never sent.
        backward: See `HaloExchange`; it takes precedence over that of `exchange`. Default: pull where it is exact, and
            push under BroadcastExchange, which supports nothing else.
        seed: Seed of the rounding and of the choice of gradient rows.

    Raises:
        ValueError: a value out of range.

    Cost: forward (2 + bits / 8 x width) bytes a row. With delta, for each layer but the first, receivers keep the rows
        that they read, and senders keep the rows that others read.
    Source: the closed loop is DPCM; rounding as in QSGD (Alistarh et al., 2017); quantised halo rows as in AdaQP.
    """

    def __init__(
        self,
        bits: int = 4,
        delta: bool = True,
        exchange: ExchangePolicy | None = None,
        backward_bits: int | None = None,
        backward_threshold: float = 0.0,
        backward: str = "auto",
        seed: int = 0,
    ) -> None:
        _check_bits("bits", bits)
        if backward_bits is not None:
            _check_bits("backward_bits", backward_bits)
        backward_threshold = checked_number("exchange.backward_threshold", backward_threshold)
        if backward_threshold == float("inf"):
            raise ValueError("exchange.backward_threshold must be finite, got inf: under it nothing would be sent")
        if backward not in BACKWARDS:
            raise ValueError(f"exchange.backward must be one of {', '.join(BACKWARDS)}, got {short(backward)}")
        if not isinstance(delta, bool):
            raise ValueError(f"exchange.delta must be true or false, got {short(delta)}")
        if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
            raise ValueError(f"exchange.seed must be an integer >= 0, got {short(seed)}")
        self.bits, self.delta = bits, delta
        self.exchange = HaloExchange() if exchange is None else exchange
        self.backward_bits, self.backward = backward_bits, backward
        self.backward_threshold = backward_threshold
        self.seed = seed
        check_wrapped(self, self.exchange)
        if backward == "pull" and self.exchange.plan().whole_blocks:
            raise ValueError(
                'exchange.backward="pull" reads the rows of a halo, and BroadcastExchange sends whole blocks: '
                "wrap HaloExchange(), or leave backward out"
            )

    def plan(self) -> ExchangePlan:
        inner = self.exchange.plan()
        return replace(
            inner,
            quantisation=RowQuantisation(self.bits, self.delta),
            backward="push" if inner.whole_blocks else self.backward,
            backward_bits=self.backward_bits or max(4, self.bits),
            backward_threshold=self.backward_threshold,
            seed=self.seed,
        )


def _check_bits(name: str, bits: int) -> None:
    if not isinstance(bits, Integral) or bits not in BITS:
        raise ValueError(f"exchange.{name} must be one of {', '.join(map(str, BITS))}, got {short(bits)}")


ROWS = ("block", "row")


class SkipBroadcast(ExchangePolicy):
    """Use rows of other processes as they were last sent, as long as a bound allows it.

    A process always reads its own rows fresh. Gradients go back as if stale rows were fresh ones (straight-through);
    the bound may decide for them too.

    Args:
        bound: `EpochFixed`, `EpochAdaptive` or `VariationGap`.
        exchange: how rows travel when they do: HaloExchange() by default, BroadcastExchange(), or Quantized around
            either.
        rows: "block": a process sends all of a layer's rows or none; "row": the rows that exceed the bound.
        warmup_epochs: epochs of exact exchange at the start, rows and gradients; the first epoch always is one,
            unless the bound is given its versions. A number, or a share of `max_epochs` in (0, 1).
        cooldown_epochs: epochs of exact exchange before `max_epochs` of the Trainer, as a number or a share: what stale
            rows have done to the weights is undone there. EarlyStopping begins to count there.
        remote_gradient: "straight_through": gradients go back in the same step, those of stale rows too; "late": they
            are added one step late, and travel meanwhile; "drop": nothing flows back to other processes.
        skip_gradients: Whether gradients too are sent when the bound says so, a layer's all or none; where none come,
            those that came last are added.
        gradient_clip: What a process sends back of a layer is clipped to the norm gradient_clip x sqrt(world_size),
            > 0; None: not clipped. Exact epochs are not.
        stale: "hold": as they were sent; "extrapolate": moved on along their last change, linearly in epochs.

    Raises:
        ValueError: an unknown name, or a number out of range.

    Cost: receivers keep the rows that they read (all rows under BroadcastExchange) of each layer but the first; a
        sender keeps the rows that others read where the bound looks at changes; twice as much with "extrapolate". With
        skip_gradients the gradients that came last, and under such a bound those that were sent.
    Source: Peng et al., SANCUS, VLDB 2022, Algorithms 3 to 6. Differs: one flag a layer and source; by row; halo; late.
    """

    def __init__(
        self,
        bound: Bound,
        exchange: ExchangePolicy | None = None,
        rows: str = "block",
        warmup_epochs: int | float = 0,
        remote_gradient: str = "straight_through",
        stale: str = "hold",
        skip_gradients: bool = False,
        gradient_clip: float | None = None,
        cooldown_epochs: int | float = 0,
    ) -> None:
        if not isinstance(bound, Bound):
            raise ValueError(
                f"exchange.bound must be one of {', '.join(kind.__name__ for kind in BOUNDS.values())}, "
                f"got {short(bound)}"
            )
        _check_choice("rows", rows, ROWS)
        _check_choice("remote_gradient", remote_gradient, ("straight_through", "late", "drop"))
        _check_choice("stale", stale, ("hold", "extrapolate"))
        self.bound, self.exchange, self.rows = bound, HaloExchange() if exchange is None else exchange, rows
        self.warmup_epochs = checked_epochs_or_share("exchange.warmup_epochs", warmup_epochs)
        self.cooldown_epochs = checked_epochs_or_share("exchange.cooldown_epochs", cooldown_epochs)
        self.remote_gradient, self.stale = remote_gradient, stale
        if not isinstance(skip_gradients, bool):
            raise ValueError(f"exchange.skip_gradients must be true or false, got {short(skip_gradients)}")
        if gradient_clip is not None and not checked_number("exchange.gradient_clip", gradient_clip) > 0:
            raise ValueError(f"exchange.gradient_clip must be above 0 or null, got {short(gradient_clip)}")
        self.skip_gradients, self.gradient_clip = skip_gradients, gradient_clip
        check_wrapped(self, self.exchange)
        if skip_gradients and (remote_gradient == "drop" or rows == "row"):
            raise ValueError(
                "exchange.skip_gradients=true sends the gradients of a block, or none: leave rows='block' and "
                "remote_gradient='straight_through' or 'late'"
            )
        if skip_gradients and self.exchange.plan().quantisation.bits is not None:
            raise ValueError("exchange.skip_gradients=true sends gradients as they are: leave Quantized out")
        if rows == "row" and bound.initial_versions is not None:
            raise ValueError('exchange.bound.initial_versions are those of blocks: use rows="block", or leave them out')

    def plan(self) -> ExchangePlan:
        inner = self.exchange.plan()
        return replace(
            inner,
            bound=self.bound,
            by_row=self.rows == "row",
            warmup_epochs=self.warmup_epochs,
            cooldown_epochs=self.cooldown_epochs,
            extrapolate=self.stale == "extrapolate",
            backward="push" if self.skip_gradients else inner.backward,
            remote_gradient=self.remote_gradient != "drop",
            late_gradient=self.remote_gradient == "late",
            skip_gradients=self.skip_gradients,
            gradient_clip=self.gradient_clip,
        )


def check_wrapped(policy: ExchangePolicy, inner: ExchangePolicy) -> None:
    """Refuse an exchange that sends nothing, or one of the same kind at any depth, inside another.

    Raises:
        ValueError: the message says what is allowed there.
    """
    innermost = inner
    while not isinstance(innermost, type(policy)) and StrategyTraits(innermost).exchange is not None:
        innermost = innermost.exchange
    repeated = isinstance(innermost, type(policy))
    if repeated or not isinstance(inner, ExchangePolicy) or inner.plan() is None:
        raise ValueError(
            f"{type(policy).__name__}(exchange=...) must be HaloExchange(), BroadcastExchange() or another wrapper "
            f"around one of them, got {short(inner)}"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"exchange.{name} must be one of {', '.join(allowed)}, got {short(value)}")
