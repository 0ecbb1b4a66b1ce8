"""When another batch is launched: ByteGNN's score, and the running means that it is made of."""

import math

_NEWEST = 1 / 16  # least weight of the newest value in a running mean


class RunningMean:
    """A mean over all values so far, and from the sixteenth on one that forgets old ones."""

    def __init__(self):
        self.value: float | None = None
        self._num = 0

    def add(self, value: float) -> None:
        self._num += 1
        weight = max(1 / self._num, _NEWEST)
        self.value = value if self.value is None else self.value + weight * (value - self.value)


def launch_score(
    gap_s: float, sample_s: float | None, train_s: float | None, queue_size: int, busy_percent: float
) -> float:
    """Return how much speaks for launching another batch: T_gap * f(C_util) * balance.

    T_gap is in average sampling times, so that the score has no unit; f(C) = 101 - e^(C / c), c = 100 / ln 101, falls
    from 100 for idle cores to 0 for busy ones; balance = sample_s / (train_s * queue_size). The sampling time cancels
    out of the product: with idle cores the score is 50 once half of the time has passed in which the queue is trained.

    Args:
        gap_s: seconds since the last launch.
        sample_s: average seconds from a batch's launch to its end, None: none has ended.
        train_s: average seconds of a training step, None: none has ended.
        queue_size: finished batches that wait for the trainer.
        busy_percent: use of the cores, in [0, 100].

    Returns:
        >= 0; infinite where the queue is empty, or training takes no time.

    Source: ByteGNN (Zheng et al., VLDB 2022), Algorithm 1.
    """
    if queue_size == 0 or sample_s is None or not train_s:
        return math.inf
    if sample_s == 0:
        return 0.0 if gap_s == 0 else math.inf
    idle = max(101 - math.exp(busy_percent * math.log(101) / 100), 0.0)
    return gap_s / sample_s * idle * (sample_s / (train_s * queue_size))
