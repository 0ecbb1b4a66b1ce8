"""Which batches go out together, and when: groups, credits, and nobody who waits for ever."""

import random

import pytest

from lightning_gnnscale.loader import BatchKey
from lightning_gnnscale.remote.job_board import JobBoard, Rank, Stage
from lightning_gnnscale.remote.messages import Setup

PARTS = tuple(range(6))


def board_of(num_workers=2, batches_per_group=3, credits=4, num_ranks=1) -> tuple[JobBoard, list[Rank]]:
    board = JobBoard(num_workers, batches_per_group, credits, object)
    ranks = [Rank(Setup("setup", [], PARTS)) for _ in range(num_ranks)]
    board.ranks = {str(number): rank for number, rank in enumerate(ranks)}
    return board, ranks


def keys(*parts: int) -> list[BatchKey]:
    return [BatchKey(0, 0, part, number) for number, part in enumerate(parts)]


def test_a_group_is_full_unless_a_rank_has_little_ahead():
    board, (rank,) = board_of(num_workers=1)
    board.add(rank, 0, keys(0, 0, 0, 0))
    first = board.next_group(0)
    assert [job.place for job in first.jobs] == [0, 1, 2]
    assert board.next_group(0) is None, "the fourth waits for others: three are ahead of it"
    for job in first.jobs:
        board.finish(job)
    board.take(rank, 1)
    assert [job.place for job in board.next_group(0).jobs] == [3]


def test_messages_may_come_twice_and_in_any_order():
    board, (rank,) = board_of()
    board.add(rank, 2, keys(0))
    board.add(rank, 0, keys(1, 2))
    board.add(rank, 2, keys(0))
    assert [job.place for job in rank.order] == [0, 1, 2]


def test_credits_are_held_until_batches_are_taken_but_for_what_a_rank_waits_for():
    board, (rank,) = board_of(num_workers=1, batches_per_group=1, credits=2)
    board.add(rank, 0, keys(*[0] * 5))
    groups = [board.next_group(0), board.next_group(0)]
    assert board.next_group(0) is None and board.held == 2
    board.finish(groups[0].jobs[0])
    assert board.next_group(0) is None, "made is not taken"
    board.take(rank, 1)
    assert board.next_group(0).jobs[0].place == 2
    board.take(rank, 3)
    board.held = 9
    assert board.next_group(0).jobs[0].place == 3, "the rank waits for it"


def test_what_a_worker_left_goes_to_the_others():
    board, (rank,) = board_of()
    board.add(rank, 0, keys(*PARTS))
    lost, other = board.next_group(0), board.next_group(1)
    assert sorted(job.key.part for job in lost.jobs + other.jobs) == list(PARTS)
    board.set_able(0, False)
    assert board.put_back(lost) == lost.jobs and board.held == 1
    assert board.next_group(0) is None
    assert board.next_group(1).jobs == lost.jobs
    assert [job.ends for job in lost.jobs] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(30))
def test_every_batch_comes_once_whatever_happens(seed):
    """Random orders of answers, deaths, slow workers and takes: ranks get their batches in order, credits come back."""
    draw = random.Random(seed)
    board, ranks = board_of(3, draw.choice([1, 2, 4]), draw.choice([1, 2, 5]), num_ranks=2)
    wanted = {number: keys(*(draw.choice(PARTS) for _ in range(25))) for number in range(2)}
    told, taken, running = [0, 0], [0, 0], []
    for _ in range(5000):
        for number, rank in enumerate(ranks):
            while told[number] < 25 and told[number] - taken[number] < 4:
                board.add(rank, told[number], wanted[number][told[number] : told[number] + 1])
                told[number] += 1
            if rank.order and rank.order[0].stage is Stage.DONE and draw.random() < 0.5:
                assert rank.order[0].key == wanted[number][taken[number]]
                taken[number] += 1
                board.take(rank, taken[number])
        for worker in range(3):
            group = board.next_group(worker)
            running += [group] if group else []
        if running:
            group = running.pop(draw.randrange(len(running)))
            event = draw.random()
            if event < 0.15 and len(board.able) > 1:
                board.set_able(group.worker, False)
                board.put_back(group)
            elif event < 0.3 and not group.doubled and group.slow is None:
                running += [group, board.twin(group, draw.randrange(3))]
            else:
                for job in group.jobs:
                    board.finish(job)
        if draw.random() < 0.1:
            board.set_able(draw.randrange(3), True)
    assert taken == [25, 25] and board.held == 0 and not running
    assert board._load == [0, 0, 0]
