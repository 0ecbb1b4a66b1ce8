"""The queue behind every source: order, first results, lost and hopeless jobs, what is slow, and spaces given back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import work_queue
from lightning_gnnscale.loader.batch_segments import SegmentQueue
from lightning_gnnscale.loader.buffer_pool import rounded_capacity
from lightning_gnnscale.loader.work_queue import Line, WorkQueue
from tests.says import said


class Clock:
    """Seconds that pass only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of(num_jobs: int, **options) -> tuple[WorkQueue, Line, Clock]:
    clock, line = Clock(), Line()
    queue = WorkQueue(clock=clock, **options)
    for key in range(num_jobs):
        queue.add(line, key)
    return queue, line, clock


def begun(queue: WorkQueue, num_jobs: int = 1, worker=None):
    attempt = queue.start(queue.pending[:num_jobs], worker)
    queue.begin(attempt)
    return attempt


def test_jobs_are_wanted_by_their_places_in_whatever_order_they_come():
    queue, line, _ = queue_of(0)
    for place in (2, 0, 1):
        queue.add(line, f"key {place}", place=place)
    assert [job.place for job in line.order] == [job.place for job in queue.pending] == [0, 1, 2]
    assert line.head.key == "key 0" and line.find(1).key == "key 1" and line.find(7) is None
    assert queue.add(line, "next").place == 3


def test_an_empty_line_has_no_head():
    with pytest.raises(ValueError, match=said("request(key) ready")):
        _ = Line().head


def test_an_error_is_a_result_that_is_raised_once_taken():
    queue, line, _ = queue_of(2)
    queue.finish(queue.start(queue.pending[:2]), OSError("disk gone"), "made")
    with pytest.raises(OSError, match="disk gone"):
        queue.take(line).outcome()
    assert queue.take(line).outcome() == "made"


def test_what_a_worker_lost_is_pending_before_what_is_wanted_later():
    queue, line, _ = queue_of(4)
    lost = queue.start(queue.pending[:2], "a")
    assert [job.place for job in queue.lose(lost, str)] == [0, 1]
    assert [job.place for job in queue.pending] == [0, 1, 2, 3]
    assert [job.ends for job in line.order] == [1, 1, 0, 0]
    queue.put_back(queue.start(queue.pending[:1], "a"))
    assert line.head.ends == 1, "nobody ended"


def test_a_job_over_which_too_many_workers_end_is_hopeless():
    queue, line, _ = queue_of(2)
    for number in range(work_queue.MOST_ENDS):
        assert not line.head.is_done
        queue.lose(queue.start(queue.pending[:1], number), lambda job: f"{job.ends} ended")
    assert line.head.is_done and queue.take(line).outcome() == f"{work_queue.MOST_ENDS} ended"
    assert [job.place for job in queue.pending] == [1]


def test_a_job_is_not_hopeless_while_another_worker_is_at_it():
    queue, line, _ = queue_of(1)
    slow = queue.start(queue.pending, "slow")
    for number in range(work_queue.MOST_ENDS):
        queue.double(slow)
        queue.lose(queue.start(queue.pending[:1], number), str)
    assert not line.head.is_done and not queue.pending
    queue.finish(slow, "made after all")
    assert queue.take(line).outcome() == "made after all"


def test_patience_is_as_long_as_what_is_known():
    queue, _, clock = queue_of(9)
    first = begun(queue)
    assert queue.patience_s == work_queue.FIRST_TIMES * work_queue.SLOW_S
    clock.now = queue.patience_s
    assert queue.late() == []
    clock.now += 1
    assert queue.late() == [first]
    queue.finish(first, "made")
    assert queue.late() == [] and queue.patience_s == work_queue.SLOW_TIMES * clock.now
    quick, _, clock = queue_of(2)
    one = begun(quick)
    clock.now = 0.1
    quick.finish(one, "made")
    assert quick.patience_s == work_queue.SLOW_S
    assert WorkQueue(slow_s=3).patience_s == 3 * work_queue.FIRST_TIMES
    assert WorkQueue(slow_s=3, most_slow_s=2).patience_s == 2


def test_what_was_slow_is_no_measure_and_what_has_not_begun_is_not_late():
    queue, _, clock = queue_of(3)
    waiting, slow = queue.start(queue.pending[:1]), begun(queue)
    clock.now = 1e3
    assert queue.late() == [slow] and waiting.begun_s is None
    queue.double(slow)
    queue.finish(slow, "made")
    assert queue.patience_s == work_queue.FIRST_TIMES * work_queue.SLOW_S


@pytest.mark.parametrize("slow_one_first", [True, False])
def test_the_first_result_of_two_counts(slow_one_first):
    given, (queue, line, _) = [], queue_of(2)
    queue._give_back = given.append
    slow = queue.start(queue.pending[:1], "slow")
    assert queue.double(slow) == [line.head] and queue.double(slow) == [], "two workers at most"
    helping = queue.start(queue.pending[:1], "quick")
    assert queue.double(helping) == [] and queue.num_needed == 1
    first, second = (slow, helping) if slow_one_first else (helping, slow)
    assert queue.finish(first, first.worker) == [line.head]
    assert queue.finish(second, second.worker) == [] and given == [second]
    assert queue.take(line).outcome() == first.worker and given == [second, first]


def test_a_slow_worker_may_be_done_before_another_begins():
    queue, line, _ = queue_of(1)
    slow = queue.start(queue.pending[:1], "slow")
    queue.double(slow)
    queue.finish(slow, "made")
    assert queue.pending == [] and queue.take(line).outcome() == "made"


def test_room_is_given_back_when_the_worker_is_through_and_nobody_needs_it():
    given = []
    queue, line, _ = queue_of(4, give_back=given.append)
    made, forgotten = queue.start(queue.pending[:2]), queue.start(queue.pending[:1])
    queue.finish(made, 0, 1)
    queue.take(line)
    assert given == [] and queue.num_needed == 2
    queue.redo(line.head)
    assert given == [made] and line.head.result is None and queue.pending[0] is line.head
    assert [job.place for job in queue.forget(line)] == [1, 2, 3]
    assert given == [made] and queue.num_needed == 0 and queue.pending == []
    assert queue.under_way() == [forgotten], "it goes on for nothing"
    assert queue.finish(forgotten, 2) == []
    assert given == [made, forgotten] and queue.attempts == []
    assert queue.add(line, "anew").place == 0


def test_the_batch_that_is_wanted_next_finds_room_and_later_ones_make_it():
    """Segments for two batches: a third one waits, unless it is the first of the line."""
    size = rounded_capacity(5000)
    queue = SegmentQueue(2 * size, most_slow_s=1e3)
    for key in range(3):
        queue.add(queue.line, key)
    first, second, third = queue.start_next(), queue.start_next(), queue.start_next()
    assert [attempt.space for attempt in (first, second, third)] == [None] * 3, "no size is known"
    queue.largest = 5000
    for attempt in (second, third):
        assert queue.lend(attempt, 5000)
        queue.finish(attempt, f"batch {attempt.jobs[0].key}")
    assert queue.lend(first, 5000), "the first one is wanted next"
    assert queue.pool.held_bytes == 2 * size and [job.place for job in queue.pending] == [2]
    assert queue.start_next() is None, "there is no space"
    queue.finish(first, "batch 0")
    for key in range(2):
        job, memory = queue.take_batch()
        assert job.outcome() == f"batch {key}" and len(memory) == size
        assert queue.pool.held_bytes == (1 - key) * size
    again = queue.start_next()
    assert again.space.capacity == size and again.jobs[0].key == 2, "made again, in a segment that fits"
    assert not queue.pending and queue.add(queue.line, 3) is queue.pending[0]
    queue.short.add(again)
    assert queue.start_next() is None, "what is wanted next waits for space"
    queue.finish(again, GNNScaleError("no luck"))
    job, memory = queue.take_batch()
    assert memory is None and isinstance(job.result, GNNScaleError)
    queue.pool.close()


class Queues(RuleBasedStateMachine):
    """Two consumers, workers that come and go: each consumer gets its jobs in order, each space comes back once."""

    def __init__(self):
        super().__init__()
        self.clock, self.given, self.made, self.lines = Clock(), [], [], (Line(), Line())
        self.queue = WorkQueue(slow_s=1.0, give_back=self.given.append, clock=self.clock)
        self.wanted = [[], []]
        self.number = 0

    @rule(line=st.integers(0, 1))
    def ask(self, line):
        self.number += 1
        self.queue.add(self.lines[line], self.number)
        self.wanted[line].append(self.number)

    @precondition(lambda self: self.queue.pending)
    @rule(size=st.integers(1, 3), begins=st.booleans())
    def start(self, size, begins):
        self.number += 1
        attempt = self.queue.start(self.queue.pending[:size], self.number)
        self.made.append(attempt)
        if begins:
            self.queue.begin(attempt)

    def running(self, data):
        return data.draw(st.sampled_from([attempt for attempt in self.queue.attempts if not attempt.is_over]))

    @precondition(lambda self: any(not attempt.is_over for attempt in self.queue.attempts))
    @rule(data=st.data(), what=st.sampled_from(["finish", "finish", "lose", "put_back", "double"]))
    def answer(self, data, what):
        attempt = self.running(data)
        if what == "finish":
            first = self.queue.finish(attempt, *(("made", job.key) for job in attempt.jobs))
            assert all(job.attempts == [attempt] and job.is_done for job in first)
        elif what == "lose":
            self.queue.lose(attempt, lambda job: ("hopeless", job.key))
        else:
            getattr(self.queue, what)(attempt)

    @precondition(lambda self: any(line.order and line.head.is_done for line in self.lines))
    @rule()
    def take(self):
        for line, wanted in zip(self.lines, self.wanted, strict=True):
            if line.order and line.head.is_done:
                job = self.queue.take(line)
                assert job.key == wanted.pop(0)
                what, key = job.outcome()
                assert key == job.key
                assert what == "made" or job.ends >= work_queue.MOST_ENDS

    @precondition(lambda self: any(line.order and line.head.is_done for line in self.lines))
    @rule()
    def redo(self):
        for line in self.lines:
            if line.order and line.head.is_done:
                self.queue.redo(line.head)

    @rule(line=st.integers(0, 1))
    def forget(self, line):
        assert [job.key for job in self.queue.forget(self.lines[line])] == self.wanted[line]
        self.wanted[line].clear()

    @rule(seconds=st.floats(0, 20))
    def passes(self, seconds):
        self.clock.now += seconds
        assert all(attempt.begun_s is not None and not attempt.is_over for attempt in self.queue.late())

    @invariant()
    def jobs_are_somewhere(self):
        jobs = [job for line in self.lines for job in line.order]
        assert sorted(job.key for job in self.queue.pending) == sorted(job.key for job in jobs if job.is_pending)
        assert [job.place for job in self.queue.pending] == sorted(job.place for job in self.queue.pending)
        for job in jobs:
            assert job.is_done or job.is_pending or job.attempts, "nobody waits for ever"
            assert not (job.is_done and job.is_pending) and len(job.attempts) <= (1 if job.is_done else 2)
            assert all(job in attempt.needed and attempt in self.queue.attempts for attempt in job.attempts)
        assert {job for attempt in self.queue.attempts for job in attempt.needed} <= set(jobs)

    @invariant()
    def rooms_come_back_once(self):
        assert len(self.given) == len(set(map(id, self.given)))
        assert {id(one) for one in self.made} == {id(one) for one in [*self.given, *self.queue.attempts]}
        assert all(attempt.needed or not attempt.is_over for attempt in self.queue.attempts)


Queues.TestCase.settings = settings(stateful_step_count=40)
test_any_order_of_events = Queues.TestCase
