"""Policies: what each composition comes to, what it says of itself, what it refuses."""

import math
import warnings
from types import SimpleNamespace

import pytest

from lightning_gnnscale.errors import StrategyError, short
from lightning_gnnscale.strategy.exchange import (
    EXCHANGE_POLICIES,
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    HaloExchange,
    NoExchange,
    Quantized,
    SkipBroadcast,
    VariationGap,
)
from lightning_gnnscale.strategy.exchange.policies import ExchangePlan, ExchangePolicy, RowQuantisation
from tests.says import said

BOUND = EpochFixed(1)


def skipped(**fields):
    return ExchangePlan(backward="push", bound=BOUND, **fields)


FOUR_BITS = {"quantisation": RowQuantisation(4, True), "backward_bits": 4}
PLANS = [
    (HaloExchange(), ExchangePlan(backward="push")),
    (HaloExchange(backward="auto"), ExchangePlan(backward="auto")),
    (HaloExchange(backward="pull"), ExchangePlan(backward="pull")),
    (BroadcastExchange(), ExchangePlan(whole_blocks=True, backward="push")),
    (Quantized(), ExchangePlan(backward="auto", **FOUR_BITS)),
    (
        Quantized(bits=2, delta=False, backward_threshold=0.25, backward="push", seed=9),
        ExchangePlan(
            quantisation=RowQuantisation(2), backward="push", backward_bits=4, backward_threshold=0.25, seed=9
        ),
    ),
    (
        Quantized(bits=16, backward_bits=2),
        ExchangePlan(quantisation=RowQuantisation(16, True), backward="auto", backward_bits=2),
    ),
    (Quantized(bits=8), ExchangePlan(quantisation=RowQuantisation(8, True), backward="auto", backward_bits=8)),
    # whole blocks are always pushed
    (
        Quantized(exchange=BroadcastExchange()),
        ExchangePlan(whole_blocks=True, backward="push", **FOUR_BITS),
    ),
    (SkipBroadcast(BOUND), skipped()),
    (SkipBroadcast(BOUND, BroadcastExchange()), skipped(whole_blocks=True)),
    (SkipBroadcast(BOUND, rows="row", warmup_epochs=5), skipped(by_row=True, warmup_epochs=5)),
    (
        SkipBroadcast(BOUND, stale="extrapolate", remote_gradient="drop"),
        skipped(extrapolate=True, remote_gradient=False),
    ),
    (
        SkipBroadcast(BOUND, HaloExchange(backward="pull")),
        ExchangePlan(backward="pull", bound=BOUND),
    ),
    (SkipBroadcast(BOUND, Quantized(backward="push")), skipped(**FOUR_BITS)),
    (Quantized(exchange=SkipBroadcast(BOUND), backward="push"), skipped(**FOUR_BITS)),
    (
        SkipBroadcast(BOUND, Quantized(exchange=BroadcastExchange()), rows="row"),
        skipped(whole_blocks=True, by_row=True, **FOUR_BITS),
    ),
    (
        Quantized(exchange=SkipBroadcast(BOUND, BroadcastExchange(), warmup_epochs=2)),
        skipped(whole_blocks=True, warmup_epochs=2, **FOUR_BITS),
    ),
]


@pytest.mark.parametrize(("policy", "plan"), PLANS, ids=[repr(policy) for policy, _ in PLANS])
def test_a_composition_comes_to_its_plan(policy, plan):
    assert policy.plan() == plan
    assert policy.live == plan.remote_gradient


def test_no_exchange_has_no_plan():
    assert NoExchange().plan() is None
    assert not NoExchange().live


@pytest.mark.parametrize("policy", [policy for policy, _ in PLANS] + [NoExchange()], ids=repr)
def test_a_policy_is_rebuilt_from_what_it_says(policy):
    names = {kind.__name__: kind for kind in [*EXCHANGE_POLICIES.values(), EpochFixed, EpochAdaptive, VariationGap]}
    again = eval(repr(policy), names)
    assert repr(again) == repr(policy)


def test_a_policy_says_its_arguments():
    assert repr(HaloExchange()) == "HaloExchange(backward='push')"
    assert repr(SkipBroadcast(VariationGap(0.3), rows="row")) == (
        "SkipBroadcast(bound=VariationGap(max_gap=0.3, norm='relative'), exchange=HaloExchange(backward='push'), "
        "rows='row', warmup_epochs=0, cooldown_epochs=0, remote_gradient='straight_through', stale='hold', "
        "skip_gradients=False, gradient_clip=None)"
    )


WRAPPERS = {
    "Quantized": lambda inner: Quantized(exchange=inner),
    "SkipBroadcast": lambda inner: SkipBroadcast(BOUND, inner),
}
REFUSED = [
    ("Quantized", Quantized()),
    ("SkipBroadcast", SkipBroadcast(BOUND)),
    ("Quantized", SkipBroadcast(EpochFixed(3), Quantized(bits=8))),
    ("SkipBroadcast", Quantized(exchange=SkipBroadcast(EpochFixed(3)))),
    ("Quantized", NoExchange()),
    ("SkipBroadcast", NoExchange()),
    ("SkipBroadcast", ExchangePolicy()),
    ("Quantized", "halo"),
    ("SkipBroadcast", HaloExchange),
    ("SkipBroadcast", BOUND),
]


@pytest.mark.parametrize(("wrapper", "inner"), REFUSED)
def test_what_cannot_be_wrapped_is_refused_in_one_line(wrapper, inner):
    with pytest.raises(ValueError) as error:
        WRAPPERS[wrapper](inner)
    assert str(error.value) == (
        f"{wrapper}(exchange=...) must be HaloExchange(), BroadcastExchange() or another wrapper around one of them, "
        f"got {short(inner)}"
    )


BAD = [
    (lambda: HaloExchange(backward="both"), "exchange.backward must be one of auto, push, pull, got 'both'"),
    (lambda: Quantized(backward="both"), "exchange.backward must be one of auto, push, pull, got 'both'"),
    (lambda: Quantized(delta="false"), "exchange.delta must be true or false, got 'false'"),
    (lambda: Quantized(seed="x"), "exchange.seed must be an integer >= 0, got 'x'"),
    (lambda: Quantized(seed=1.5), "exchange.seed must be an integer >= 0, got 1.5"),
    (lambda: Quantized(seed=-1), "exchange.seed must be an integer >= 0, got -1"),
    (lambda: Quantized(bits=3), "exchange.bits must be one of 16, 8, 4, 2, got 3"),
    (lambda: Quantized(bits=None), "exchange.bits must be one of 16, 8, 4, 2, got None"),
    (lambda: Quantized(backward_bits=32), "exchange.backward_bits must be one of 16, 8, 4, 2, got 32"),
    (lambda: Quantized(backward_bits=0), "exchange.backward_bits must be one of 16, 8, 4, 2, got 0"),
    (
        lambda: SkipBroadcast(BOUND, gradient_clip=0),
        "exchange.gradient_clip must be above 0 or null, got 0",
    ),
    (
        lambda: SkipBroadcast(BOUND, skip_gradients=True, rows="row"),
        "exchange.skip_gradients=true sends the gradients of a block, or none: leave rows='block' and "
        "remote_gradient='straight_through' or 'late'",
    ),
    (
        lambda: SkipBroadcast(BOUND, Quantized(8), skip_gradients=True),
        "exchange.skip_gradients=true sends gradients as they are: leave Quantized out",
    ),
    (
        lambda: Quantized(backward_threshold=-0.5),
        "exchange.backward_threshold must be a number of at least 0, got -0.5",
    ),
    (
        lambda: Quantized(backward_threshold=math.inf),
        "exchange.backward_threshold must be finite, got inf: under it nothing would be sent",
    ),
    (
        lambda: Quantized(backward_threshold=math.nan),
        "exchange.backward_threshold must be a number of at least 0, got nan",
    ),
    (lambda: Quantized(backward_threshold="x"), "exchange.backward_threshold must be a number of at least 0, got 'x'"),
    (lambda: Quantized(bits=4.0), "exchange.bits must be one of 16, 8, 4, 2, got 4.0"),
    (
        lambda: Quantized(exchange=BroadcastExchange(), backward="pull"),
        'exchange.backward="pull" reads the rows of a halo, and BroadcastExchange sends whole blocks: '
        "wrap HaloExchange(), or leave backward out",
    ),
    (
        lambda: SkipBroadcast(1),
        "exchange.bound must be one of EpochFixed, EpochAdaptive, VariationGap, got 1",
    ),
    (lambda: SkipBroadcast(BOUND, rows="rows"), "exchange.rows must be one of block, row, got 'rows'"),
    (
        lambda: SkipBroadcast(BOUND, remote_gradient="old"),
        "exchange.remote_gradient must be one of straight_through, late, drop, got 'old'",
    ),
    (lambda: SkipBroadcast(BOUND, stale="guess"), "exchange.stale must be one of hold, extrapolate, got 'guess'"),
    (
        lambda: SkipBroadcast(BOUND, warmup_epochs=-1),
        "exchange.warmup_epochs must be a number of epochs, or a share of max_epochs between 0 and 1, got -1",
    ),
    (
        lambda: SkipBroadcast(BOUND, warmup_epochs=2.5),
        "exchange.warmup_epochs must be a number of epochs, or a share of max_epochs between 0 and 1, got 2.5",
    ),
    (
        lambda: SkipBroadcast(BOUND, warmup_epochs=None),
        "exchange.warmup_epochs must be a number of epochs, or a share of max_epochs between 0 and 1, got None",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_argument_is_one_line(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


def test_every_policy_has_its_name():
    assert {name: kind.__name__ for name, kind in EXCHANGE_POLICIES.items()} == {
        "no_exchange": "NoExchange",
        "broadcast": "BroadcastExchange",
        "halo": "HaloExchange",
        "quantized": "Quantized",
        "skip_broadcast": "SkipBroadcast",
    }


@pytest.mark.parametrize("max_epochs", [None, -1])
@pytest.mark.parametrize("exact", [{"cooldown_epochs": 3}, {"warmup_epochs": 0.25}])
def test_an_end_that_is_nowhere_is_refused(max_epochs, exact):
    trainer = SimpleNamespace(precision="32-true", max_epochs=max_epochs)
    SkipBroadcast(BOUND, warmup_epochs=3).check_trainer(trainer)
    with pytest.raises(StrategyError, match=said(f"{next(iter(exact))}= max_epochs")):
        SkipBroadcast(BOUND, **exact).check_trainer(trainer)


def test_shares_are_of_the_epochs_of_the_run():
    plan = SkipBroadcast(BOUND, warmup_epochs=0.25, cooldown_epochs=0.5).plan()
    counts = [(one.warmup_epochs, one.cooldown_epochs) for one in map(plan.for_epochs, (200, 60, 10))]
    assert counts == [(50, 100), (15, 30), (2, 5)]


@pytest.mark.parametrize(
    ("exact", "warned"), [((50, 50), True), ((0.5, 0.5), True), ((0.25, 0.25), False), ((9, 90), False)]
)
def test_a_run_that_never_skips_is_told(exact, warned):
    trainer = SimpleNamespace(precision="32-true", max_epochs=100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SkipBroadcast(BOUND, warmup_epochs=exact[0], cooldown_epochs=exact[1]).check_trainer(trainer)
    assert [("warmup_epochs" in str(one.message), "100 epochs" in str(one.message)) for one in caught] == [
        (True, True)
    ] * warned
