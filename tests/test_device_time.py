"""Time by events of a stream that is behind the host: nothing waits, and nothing is lost."""

import pytest
import torch

from lightning_gnnscale import device_time
from lightning_gnnscale.device_time import DeviceTimer, StreamSpans
from lightning_gnnscale.events import ActivityClock

GPU = torch.device("cuda", 0)


class Stream:
    """Events at times of the device; the first `passed` of them have passed."""

    def __init__(self, *times_ms):
        self.times, self.passed, self.made, self.waits = list(times_ms), 0, 0, []

    def mark(self):
        self.made += 1
        return Event(self, self.made - 1)


class Event:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def query(self):
        return self.number < self.stream.passed

    def synchronize(self):
        self.stream.waits.append(self.number)
        self.stream.passed = self.number + 1

    def elapsed_time(self, end):
        assert self.query() and end.query()
        return self.stream.times[end.number] - self.stream.times[self.number]


def test_blocks_add_up_and_only_the_last_is_waited_for():
    stream = Stream(0, 10, 15, 40, 100, 130)
    timer = DeviceTimer(GPU, stream.mark)
    for number in range(3):
        with timer.measure():
            assert stream.waits == []
        stream.passed = 2 if number == 0 else stream.passed
    assert timer.take() == pytest.approx(0.010 + 0.025 + 0.030) and stream.waits == [5]
    assert timer.take() == 0.0 and stream.waits == [5]


def test_spans_of_a_stream_are_told_in_order():
    stream, told = Stream(0, 20, 50, 51), []
    spans = StreamSpans(5.0, lambda *span: told.append(span), stream.mark)
    spans.end_span("forward")
    stream.passed = 2
    spans.end_span("backward")
    assert [name for name, *_ in told] == ["forward"]
    spans.end_span("update")
    spans.finish()
    assert stream.waits == [3]
    assert [name for name, *_ in told] == ["forward", "backward", "update"]
    assert [end for *_, end in told] == pytest.approx([5.02, 5.05, 5.051])


def test_the_clock_of_a_gpu_tells_the_streams_seconds(monkeypatch):
    stream = Stream(0, 1000, 4000, 4500, 4500)
    spans = device_time.StreamSpans
    monkeypatch.setattr("lightning_gnnscale.events.StreamSpans", lambda begin, add: spans(begin, add, stream.mark))
    clock = ActivityClock()
    clock.begin(GPU)
    clock.turn_to("forward")
    clock.turn_to("backward")
    with clock.doing("average"):
        pass
    stream.times += [4500] * 3
    assert stream.waits == [] and clock.end()
    assert clock.training.seconds == pytest.approx({"other": 1.0, "forward": 3.0, "backward": 0.5}, abs=1e-6)


def test_on_the_host_it_is_the_hosts_time():
    timer = DeviceTimer(torch.device("cpu"))
    with timer.measure():
        sum(range(10_000))
    assert 0 < timer.take() < 1
