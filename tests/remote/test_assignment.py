"""Who makes which batches, which go out together, and when: parts, groups, credits, and nobody who waits for ever."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.loader import BatchKey
from lightning_gnnscale.loader.part_walk import visiting_order
from lightning_gnnscale.loader.work_queue import WorkQueue
from lightning_gnnscale.remote.assignment import Assignment, Rank, assign_parts
from lightning_gnnscale.remote.messages import Setup
from tests.says import said
from tests.tiers import each_value

PARTS = tuple(range(6))


def assignment_of(
    num_workers=2,
    batches_per_group=3,
    credits=4,
    num_ranks=1,
    parts=PARTS,
    is_whole=False,
    num_machines=None,
    capped=False,
) -> tuple[Assignment, list[Rank]]:
    """A assignment whose workers are on machines of their own, or on fewer, and lines of ranks."""
    assignment = Assignment(WorkQueue(), batches_per_group, credits)
    for worker in range(num_workers):
        assignment.add(worker, f"machine {worker % (num_machines or num_workers)}", capped)
    return assignment, [Rank(Setup("setup", [], parts, is_whole=is_whole)) for _ in range(num_ranks)]


def ask(assignment: Assignment, rank: Rank, *parts: int):
    return [
        assignment.queue.add(rank, BatchKey(0, 0, part, number)) for number, part in enumerate(parts, rank.next_place)
    ]


def finish(assignment: Assignment, group) -> list:
    return assignment.queue.finish(group, *("made" for _ in group.jobs))


def test_a_group_is_full_unless_a_rank_has_little_ahead():
    assignment, (rank,) = assignment_of(num_workers=1)
    ask(assignment, rank, 0, 0, 0, 0)
    first = assignment.next_group(0)
    assert [job.place for job in first.jobs] == [0, 1, 2]
    assert assignment.next_group(0) is None, "the fourth waits for others: three are ahead of it"
    finish(assignment, first)
    assignment.queue.take(rank)
    assert [job.place for job in assignment.next_group(0).jobs] == [3]


def test_credits_are_held_until_batches_are_taken_but_for_what_a_rank_waits_for():
    assignment, (rank,) = assignment_of(num_workers=1, batches_per_group=1, credits=2)
    queue = assignment.queue
    ask(assignment, rank, *[0] * 5)
    groups = [assignment.next_group(0), assignment.next_group(0)]
    assert assignment.next_group(0) is None and queue.num_needed == 2
    finish(assignment, groups[0])
    assert assignment.next_group(0) is None, "made is not taken"
    queue.take(rank)
    third = assignment.next_group(0)
    assert third.jobs[0].place == 2
    for group in (groups[1], third):
        finish(assignment, group)
        queue.take(rank)
    assignment._credits = 1
    assert queue.num_needed == 0
    assert assignment.next_group(0).jobs[0].place == 3, "the rank waits for it"
    assert assignment.next_group(0) is None


def test_what_a_worker_left_goes_to_the_others():
    assignment, (rank,) = assignment_of()
    ask(assignment, rank, *PARTS)
    lost, other = assignment.next_group(0), assignment.next_group(1)
    assert sorted(job.key.part for job in lost.jobs + other.jobs) == list(PARTS)
    assignment.suspend(0)
    assert assignment.queue.lose(lost, str) == lost.jobs and assignment.queue.num_needed == 1
    assert assignment.next_group(0) is None
    assert assignment.next_group(1).jobs == lost.jobs
    assert [job.ends for job in lost.jobs] == [1, 1, 1]


def test_what_a_slow_worker_makes_is_made_by_others_too_and_by_no_worker_twice():
    assignment, (rank,) = assignment_of(credits=2)
    ask(assignment, rank, *PARTS)
    slow, other = assignment.next_group(0), assignment.next_group(1)
    assert assignment.queue.double(slow) == slow.jobs
    assert assignment.next_group(0) is None, "it is at them"
    assignment.suspend(0)
    helping = assignment.next_group(1)
    assert helping.jobs == slow.jobs, "a slow group leaves its credit to the one that takes its place"
    assert assignment.queue.num_needed == 2
    assert finish(assignment, helping) == slow.jobs and finish(assignment, slow) == []
    assert finish(assignment, other) == other.jobs


def test_the_whole_graph_is_at_every_worker():
    assignment, (rank,) = assignment_of(batches_per_group=1, parts=(0,), is_whole=True)
    ask(assignment, rank, 0, 0, 0)
    assert [assignment.next_group(worker).jobs[0].place for worker in (1, 0, 1)] == [0, 1, 2]


def of_homes(num_workers=2, batches_per_group=1, credits=99) -> tuple[Assignment, Rank]:
    """A assignment of the whole graph, part p of which is at home on machine p % num_workers."""
    assignment, (rank,) = assignment_of(num_workers, batches_per_group, credits, is_whole=True)
    homes = {part: f"machine {part % num_workers}" for part in PARTS}
    rank.setup = rank.setup._replace(homes=homes)
    return assignment, rank


def test_a_batch_of_the_whole_graph_is_made_where_its_targets_lie():
    assignment, rank = of_homes()
    ask(assignment, rank, 0, 1, 2, 3, 4)
    assert [assignment.next_group(worker).jobs[0].key.part for worker in (1, 0, 0, 1, 0)] == [1, 0, 2, 3, 4]


@pytest.mark.parametrize("batches_per_group", [1, 2])
def test_a_worker_without_own_batches_takes_what_its_holder_will_not_turn_to_next(batches_per_group):
    assignment, rank = of_homes(batches_per_group=batches_per_group)
    ask(assignment, rank, *[0] * (2 * batches_per_group))
    assert assignment.next_group(1) is None, "the holder makes as many next"
    late = ask(assignment, rank, *[2] * batches_per_group)
    assert assignment.next_group(1).jobs == late
    assert assignment.next_group(1) is None
    own = ask(assignment, rank, *[4] * batches_per_group, *[1] * batches_per_group)[batches_per_group:]
    assert assignment.next_group(1).jobs == own, "its own come first"


def test_batches_at_home_on_a_machine_where_nobody_is_able_are_made_by_all():
    assignment, rank = of_homes()
    ask(assignment, rank, 0, 2)
    assert assignment.next_group(1) is None
    assignment.suspend(0)
    assert [assignment.next_group(1).jobs[0].key.part for _ in range(2)] == [0, 2]


def test_batches_of_several_ranks_share_groups():
    """Ten batches of two ranks that train on the whole graph: in three groups, of both ranks each."""
    assignment, ranks = assignment_of(1, batches_per_group=4, credits=9, num_ranks=2, parts=(0, 1), is_whole=True)
    for number, rank in enumerate(ranks):
        ask(assignment, rank, *[number] * 5)
    groups = [assignment.next_group(0) for _ in range(2)]
    finish(assignment, groups[0])
    assignment.queue.take(ranks[0])
    groups.append(assignment.next_group(0))
    assert [len(group.jobs) for group in groups] == [4, 4, 2]
    assert all({job.line for job in group.jobs} == set(ranks) for group in groups)


def test_workers_of_a_machine_share_its_parts():
    assignment, (rank,) = assignment_of(num_workers=4, num_machines=2, batches_per_group=1, credits=9)
    key = BatchKey(0, 0, 0, 0)
    setup = rank.setup
    assert assignment.owned(setup, key, 0) == assignment.owned(setup, key, 2) != assignment.owned(setup, key, 1)
    assert sorted(assignment.owned(setup, key, 0) + assignment.owned(setup, key, 1)) == list(PARTS)
    mine = assignment.owned(setup, key, 0)[0]
    ask(assignment, rank, mine, mine)
    assert assignment.next_group(1) is None and assignment.wanted(setup, 1) == ()
    assert assignment.next_group(0).jobs[0].place == 0 and assignment.next_group(2).jobs[0].place == 1
    assert assignment.wanted(setup, 0) == (mine,)


def test_under_a_cap_a_group_is_of_one_part_and_its_worker_stays_there():
    assignment, (rank,) = assignment_of(num_workers=1, batches_per_group=2, credits=9, capped=True)
    ask(assignment, rank, 0, 1, 0, 1, 0, 1, 0)
    first = assignment.next_group(0)
    assert [job.place for job in first.jobs] == [0, 2]
    assert [job.place for job in assignment.next_group(0).jobs] == [4, 6], "nobody waits for part 1 yet"
    finish(assignment, first)
    assignment.queue.take(rank)
    assert [job.place for job in assignment.next_group(0).jobs] == [1, 3]


@each_value
@pytest.mark.parametrize("parts, is_whole, num_machines, capped", [
    (PARTS, False, 3, False), (PARTS, False, 2, True), (PARTS, False, 1, True), ((0,), True, 3, False),
    (PARTS, True, 3, False), (PARTS, True, 2, True),
])  # fmt: skip
@pytest.mark.parametrize("seed", range(15))
def test_every_batch_comes_once_whatever_happens(seed, parts, is_whole, num_machines, capped):
    """Random orders of answers, deaths, slow workers and takes: ranks get their batches in order, credits come back."""
    sample = random.Random(seed)
    settings = (3, sample.choice([1, 2, 4]), sample.choice([1, 2, 5]), 2, parts, is_whole, num_machines, capped)
    assignment, ranks = assignment_of(*settings)
    homes = {part: f"machine {part % num_machines}" for part in parts} if is_whole and len(parts) > 1 else None
    for rank in ranks:
        rank.setup = rank.setup._replace(homes=homes)
    queue, running = assignment.queue, []
    wanted = [[sample.choice(parts) for _ in range(25)] for _ in ranks]
    taken = [[], []]
    for _ in range(5000):
        for number, rank in enumerate(ranks):
            while rank.next_place < 25 and len(rank.order) < 4:
                ask(assignment, rank, wanted[number][rank.next_place])
            if rank.order and rank.head.is_done and sample.random() < 0.5:
                assert rank.head.result == "made"
                taken[number].append(queue.take(rank).key.part)
        for worker in range(3):
            group = assignment.next_group(worker)
            running += [group] if group else []
        if running:
            group = running.pop(sample.randrange(len(running)))
            event = sample.random()
            if event < 0.15 and len(assignment.able) > 1 and max(job.ends for job in group.jobs) < 3:
                assignment.suspend(group.worker)
                queue.lose(group, str)
            elif event < 0.3:
                running.append(group)
                queue.double(group)
            else:
                finish(assignment, group)
        if sample.random() < 0.1:
            assignment.resume(sample.randrange(3))
    assert taken == wanted and queue.num_needed == 0 and not running
    assert queue.attempts == [] and queue.pending == []


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(0, 5), st.data())
def test_every_part_has_one_machine_that_is_able(num_parts, num_machines, most_workers, epoch, data):
    workers = [data.draw(st.integers(1, most_workers)) for _ in range(num_machines)]
    machines = [machine for machine, count in enumerate(workers) for _ in range(count)]
    able = data.draw(st.sets(st.integers(0, num_machines - 1), min_size=1))
    parts = list(range(3, 3 + num_parts))
    all_able = assign_parts(parts, machines, range(num_machines), 1, epoch)
    owner = assign_parts(parts[::-1], machines[::-1], able, 1, epoch)
    assert sorted(owner) == parts and set(owner.values()) <= able
    assert all(owner[part] == machine for part, machine in all_able.items() if machine in able)
    for machine, count in enumerate(workers):
        share = num_parts * count / len(machines)
        assert abs(list(all_able.values()).count(machine) - share) <= count


def test_epochs_and_seeds_deal_differently_and_evenly():
    assigns = [assign_parts(range(8), range(4), range(4), seed, epoch) for seed in range(20) for epoch in range(20)]
    # 2520 assigns are possible: 370 distinct ones are expected of 400, with a deviation of 5.
    assert len({tuple(sorted(assign.items())) for assign in assigns}) > 340
    share = [sum(assign[0] == machine for assign in assigns) / len(assigns) for machine in range(4)]
    assert all(abs(one - 0.25) < 0.1 for one in share)  # five standard deviations


@pytest.mark.parametrize("epoch", range(4))
def test_parts_that_are_open_together_lie_on_different_machines(epoch):
    order = visiting_order(range(12), 7, epoch, shuffle=True, spread=False)
    owner = assign_parts(range(12), "abc", "abc", 7, epoch)
    assert all(len({owner[part] for part in order[first : first + 3]}) == 3 for first in range(10))


def test_parts_made_for_so_many_machines_stay_on_them_in_every_epoch():
    for epoch in range(5):
        owner = assign_parts(range(12), "abcab", "abc", 7, epoch, made_for=(3, 12))
        assert [owner[part] for part in range(12)] == [*"aaaabbbbcccc"]
        some = assign_parts([2, 5, 11], "abc", "ab", 7, epoch, made_for=(3, 12))
        assert (some[2], some[5]) == ("a", "b") and some[11] in "ab", (
            "the part of a machine that is lost goes to others"
        )
    two = [assign_parts(range(12), "ab", "ab", 7, epoch, made_for=(3, 12)) for epoch in range(2)]
    assert two == [assign_parts(range(12), "ab", "ab", 7, epoch) for epoch in range(2)]


def test_nobody_is_able():
    with pytest.raises(ValueError, match=said("able machines workers []")):
        assign_parts([0], "ab", [], 0, 0)
