"""Which batches go out together, and when: groups, credits, and nobody who waits for ever."""

import random

import pytest

from lightning_gnnscale.loader import BatchKey
from lightning_gnnscale.loader.work_queue import WorkQueue
from lightning_gnnscale.remote.dealing import Dealing, Rank
from lightning_gnnscale.remote.messages import Setup

PARTS = tuple(range(6))


def dealing_of(num_workers=2, batches_per_group=3, credits=4, num_ranks=1, parts=PARTS) -> tuple[Dealing, list[Rank]]:
    dealing = Dealing(WorkQueue(), num_workers, batches_per_group, credits)
    return dealing, [Rank(Setup("setup", [], parts)) for _ in range(num_ranks)]


def ask(dealing: Dealing, rank: Rank, *parts: int):
    return [dealing.queue.add(rank, BatchKey(0, 0, part, number)) for number, part in enumerate(parts, rank.next_place)]


def finish(dealing: Dealing, group) -> list:
    return dealing.queue.finish(group, *("made" for _ in group.jobs))


def test_a_group_is_full_unless_a_rank_has_little_ahead():
    dealing, (rank,) = dealing_of(num_workers=1)
    ask(dealing, rank, 0, 0, 0, 0)
    first = dealing.next_group(0)
    assert [job.place for job in first.jobs] == [0, 1, 2]
    assert dealing.next_group(0) is None, "the fourth waits for others: three are ahead of it"
    finish(dealing, first)
    dealing.queue.take(rank)
    assert [job.place for job in dealing.next_group(0).jobs] == [3]


def test_credits_are_held_until_batches_are_taken_but_for_what_a_rank_waits_for():
    dealing, (rank,) = dealing_of(num_workers=1, batches_per_group=1, credits=2)
    queue = dealing.queue
    ask(dealing, rank, *[0] * 5)
    groups = [dealing.next_group(0), dealing.next_group(0)]
    assert dealing.next_group(0) is None and queue.num_needed == 2
    finish(dealing, groups[0])
    assert dealing.next_group(0) is None, "made is not taken"
    queue.take(rank)
    third = dealing.next_group(0)
    assert third.jobs[0].place == 2
    for group in (groups[1], third):
        finish(dealing, group)
        queue.take(rank)
    dealing.credits = 0
    assert dealing.next_group(0).jobs[0].place == 3, "the rank waits for it"
    assert dealing.next_group(0) is None


def test_what_a_worker_left_goes_to_the_others():
    dealing, (rank,) = dealing_of()
    ask(dealing, rank, *PARTS)
    lost, other = dealing.next_group(0), dealing.next_group(1)
    assert sorted(job.key.part for job in lost.jobs + other.jobs) == list(PARTS)
    dealing.able.discard(0)
    assert dealing.queue.lose(lost, str) == lost.jobs and dealing.queue.num_needed == 1
    assert dealing.next_group(0) is None
    assert dealing.next_group(1).jobs == lost.jobs
    assert [job.ends for job in lost.jobs] == [1, 1, 1]


def test_what_a_slow_worker_makes_is_made_by_others_too_and_by_no_worker_twice():
    dealing, (rank,) = dealing_of(credits=2)
    ask(dealing, rank, *PARTS)
    slow, other = dealing.next_group(0), dealing.next_group(1)
    assert dealing.queue.double(slow) == slow.jobs
    assert dealing.next_group(0) is None, "it is at them"
    dealing.able.discard(0)
    helping = dealing.next_group(1)
    assert helping.jobs == slow.jobs, "a slow group leaves its credit to the one that takes its place"
    assert dealing.queue.num_needed == 2
    assert finish(dealing, helping) == slow.jobs and finish(dealing, slow) == []
    assert finish(dealing, other) == other.jobs


def test_the_whole_graph_is_at_every_worker():
    dealing, (rank,) = dealing_of(batches_per_group=1, parts=(0,))
    ask(dealing, rank, 0, 0, 0)
    assert [dealing.next_group(worker).jobs[0].place for worker in (1, 0, 1)] == [0, 1, 2]


@pytest.mark.parametrize("parts", [PARTS, (0,)])
@pytest.mark.parametrize("seed", range(15))
def test_every_batch_comes_once_whatever_happens(seed, parts):
    """Random orders of answers, deaths, slow workers and takes: ranks get their batches in order, credits come back."""
    draw = random.Random(seed)
    dealing, ranks = dealing_of(3, draw.choice([1, 2, 4]), draw.choice([1, 2, 5]), num_ranks=2, parts=parts)
    queue, running = dealing.queue, []
    wanted = [[draw.choice(parts) for _ in range(25)] for _ in ranks]
    taken = [[], []]
    for _ in range(5000):
        for number, rank in enumerate(ranks):
            while rank.next_place < 25 and len(rank.order) < 4:
                ask(dealing, rank, wanted[number][rank.next_place])
            if rank.order and rank.head.is_done and draw.random() < 0.5:
                assert rank.head.result == "made"
                taken[number].append(queue.take(rank).key.part)
        for worker in range(3):
            group = dealing.next_group(worker)
            running += [group] if group else []
        if running:
            group = running.pop(draw.randrange(len(running)))
            event = draw.random()
            if event < 0.15 and len(dealing.able) > 1 and max(job.ends for job in group.jobs) < 3:
                dealing.able.discard(group.worker)
                queue.lose(group, str)
            elif event < 0.3:
                running.append(group)
                queue.double(group)
            else:
                finish(dealing, group)
        if draw.random() < 0.1:
            dealing.able.add(draw.randrange(3))
    assert taken == wanted and queue.num_needed == 0 and not running
    assert queue.attempts == [] and queue.pending == []
