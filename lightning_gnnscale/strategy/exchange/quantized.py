"""Rows in few bits, as differences to what the receivers hold."""

from dataclasses import replace
from numbers import Integral

from .bounds import checked_number
from .halo import HaloExchange
from .policy import BACKWARDS, ExchangePlan, ExchangePolicy, RowCoding
from .skip_broadcast import check_wrapped

BITS = (16, 8, 4, 2)


class Quantized(ExchangePolicy):
    """Send rows in few bits: a scale for each row, values rounded at random so that their mean is right.

    With `delta` the differences to what the receivers hold are sent. Both sides add the same decoded differences, so
    that what one message loses stands in the next one's difference (error feedback). Gradients are new in every step:
    they are coded as they are, with or without `delta`, and right in the mean.

    Args:
        bits: of a value, 16, 8, 4 or 2 (2: -s, 0 or s).
        delta: send differences of rows.
        exchange: HaloExchange() by default, or BroadcastExchange().
        backward_bits: of a gradient value; None: as `bits`, but 4 at least.
        backward_threshold: gradient rows whose norm is below so many mean norms are sent with probability norm over
            that, and scaled by one over it, so that the gradient is unbiased; >= 0, 0 sends all. Rows of zeros are
            never sent.
        backward: see `HaloExchange`, in place of the one that `exchange` says; by default pull where it is exact, and
            push under BroadcastExchange, which has no other.
        seed: of rounding and drawing.

    Raises:
        ValueError: a value out of range.

    Cost: forward (2 + bits / 8 x width) bytes a row. With delta, receivers keep the rows that they read and senders
        those that others read, of each layer but the first.
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
            raise ValueError(f"exchange.backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")
        if not isinstance(delta, bool):
            raise ValueError(f"exchange.delta must be true or false, got {delta!r}")
        if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
            raise ValueError(f"exchange.seed must be an integer >= 0, got {seed!r}")
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
            coding=RowCoding(self.bits, self.delta),
            backward="push" if inner.whole_blocks else self.backward,
            backward_bits=self.backward_bits or max(4, self.bits),
            backward_threshold=self.backward_threshold,
            seed=self.seed,
        )


def _check_bits(name: str, bits: int) -> None:
    if not isinstance(bits, Integral) or bits not in BITS:
        raise ValueError(f"exchange.{name} must be one of {', '.join(map(str, BITS))}, got {bits!r}")
