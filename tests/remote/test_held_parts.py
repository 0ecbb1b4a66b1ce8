"""What a machine holds of parts for its workers: read once, mapped by all, swapped under one cap, safe while in use."""

import threading

import numpy as np
import pytest
from ray_world import WORLD, make_loader, wait_until

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.remote.held_parts import Member, PartHolder, WorkerParts, gather_union, hold_part
from lightning_gnnscale.remote.messages import GroupRequest, Setup

PARTS = tuple(range(5))


class Machine:
    """A holder and workers in this process; a setup whose contents are given as they are."""

    def __init__(self, num_workers: int, memory_bytes: int | None, stage=None):
        """memory_bytes: of all workers together."""
        self.stage = stage or make_loader()._stager
        self.holder = PartHolder()
        self.holder._opened = lambda setup: (self.stage, WORLD.features)
        self.setup = Setup("setup", [], PARTS)
        self.workers = []
        for number in range(num_workers):
            share = memory_bytes and memory_bytes * (number + 1) // num_workers - memory_bytes * number // num_workers
            worker = WorkerParts(Member(number, share, None))
            worker._member, worker._holder = Member(number, share, worker.let_go), self.holder
            self.workers.append(worker)
            self.holder._members[number] = worker._member

    def get(self, worker: int, part: int, wanted=(), owned=PARTS, **told):
        request = GroupRequest("hub", self.setup, [], tuple(owned), (*wanted, part), **told)
        return self.workers[worker].get(part, request, self.stage, WORLD.features)

    @property
    def held(self) -> set[int]:
        return {part for _, part in self.holder._parts}


def size_of(*parts: int) -> int:
    machine = Machine(1, None)
    for part in parts:
        machine.get(0, part)
    return machine.holder.report()["held_bytes"]


SIZES = [size_of(part) for part in PARTS]
LARGEST = max(SIZES)


def test_a_held_part_reads_packed_rows_of_its_halo():
    part = 3
    held = hold_part(make_loader()._stager(part), WORLD.packed_features())
    nodes = held.staged.graph.nodes
    assert held.staged.graph.num_halo
    np.testing.assert_array_equal(held.rows.read(held.locate(nodes)), WORLD.rows_read(part, nodes))


def test_workers_share_a_part_that_is_read_once():
    machine = Machine(3, None)
    parts = [machine.get(worker, 2) for worker in range(3)]
    assert machine.get(0, 2) is parts[0], "it is mapped already"
    assert machine.holder.report()["reads"] == {2: 1}
    assert [worker.reads.total() for worker in machine.workers] == [1, 0, 0]
    nodes = parts[0].staged.graph.nodes
    for held in parts:
        np.testing.assert_array_equal(gather_union(nodes, [held]), WORLD.features.read(nodes))
        held.staged.masks[:] = 7  # what a worker writes, no other sees
    assert not np.array_equal(machine.stage(2).masks, parts[0].staged.masks)
    assert machine.holder.report()["held_bytes"] == size_of(2)


def test_without_a_cap_the_parts_of_an_epoch_stay_and_those_that_are_wanted():
    machine = Machine(1, None)
    for part in (0, 1, 2):
        machine.get(0, part)
    machine.workers[0].release()
    machine.get(0, 4, wanted=(1,), owned=(2, 4))
    assert machine.held == {1, 2, 4}
    machine.holder.leave("hub", ["setup"])
    assert machine.held == {4}, "it is in use"
    machine.workers[0].leave("hub", ["setup"])


def waits_for_space(machine: Machine, worker: int, part: int, wanted=(), **told) -> threading.Thread:
    """Have a worker get a part, and see that it waits."""
    waiting = threading.Thread(target=machine.get, args=(worker, part, wanted), kwargs=told)
    waiting.start()
    assert not wait_until(lambda: not waiting.is_alive(), 0.5)
    return waiting


def test_the_cap_of_a_machine_is_that_of_its_workers_and_no_part_in_use_is_dropped():
    machine = Machine(2, SIZES[0] + SIZES[1] + SIZES[2] - 1)
    machine.holder._sizes = {("setup", part): size for part, size in enumerate(SIZES)}  # as in a second epoch
    machine.get(1, 0)
    machine.workers[1].release()
    machine.get(0, 1)
    assert machine.held == {0, 1}
    machine.get(1, 2)
    assert machine.held == {1, 2}, "part 1 is in use, part 0 was let go of"
    waiting = waits_for_space(machine, 0, 0, wanted=(2, 1))
    machine.workers[1].release()
    waiting.join(10)
    assert machine.held == {0, 1} and not waiting.is_alive()
    assert machine.holder.report()["most_held_bytes"] <= machine.holder._cap


def test_a_part_that_no_batch_is_wanted_of_makes_room_first_though_it_is_in_use():
    machine = Machine(2, SIZES[0] + SIZES[1] + SIZES[2] - 1)
    machine.holder._sizes = {("setup", part): size for part, size in enumerate(SIZES)}  # as in a second epoch
    machine.get(0, 0)
    machine.get(1, 1)
    machine.workers[0].release()  # part 0 is wanted still; part 1 has its last batch made
    waiting = waits_for_space(machine, 0, 2, wanted=(0,))
    assert 0 in machine.held
    machine.workers[1].release()
    waiting.join(10)
    assert machine.held == {0, 2}


def test_a_part_whose_next_batches_are_not_asked_for_yet_stays_while_the_last_batch_of_another_is_made():
    machine = Machine(2, SIZES[0] + SIZES[1] + SIZES[2] - 1)
    machine.holder._sizes = {("setup", part): size for part, size in enumerate(SIZES)}  # as in a second epoch
    machine.get(0, 0)
    machine.get(1, 1)
    machine.workers[0].release()  # its batches so far are made; two parts take turns, and part 2 follows part 1
    waiting = waits_for_space(machine, 0, 2, wanted=(1,), coming=(0, 2))
    assert 0 in machine.held
    machine.workers[1].release()
    waiting.join(10)
    assert machine.held == {0, 2}


def test_of_two_parts_with_batches_to_be_made_the_one_whose_last_comes_first_makes_room():
    machine = Machine(2, SIZES[0] + SIZES[1] + SIZES[2] - 1)
    machine.holder._sizes = {("setup", part): size for part, size in enumerate(SIZES)}  # as in a second epoch
    machine.get(0, 0)
    machine.get(1, 1)
    machine.workers[0].release()
    waiting = waits_for_space(machine, 0, 2, wanted=(1, 0), coming=(2, 3))
    assert 0 in machine.held
    machine.workers[1].release()
    waiting.join(10)
    assert machine.held == {0, 2}


def test_a_request_that_arrives_after_a_later_one_changes_nothing():
    machine = Machine(2, SIZES[0] + SIZES[1] + SIZES[2] - 1)
    machine.holder._sizes = {("setup", part): size for part, size in enumerate(SIZES)}  # as in a second epoch
    machine.get(0, 0, coming=(0, 1), number=1)
    machine.get(1, 1, coming=(0, 1), number=3)
    machine.holder._note_wanted(GroupRequest("hub", machine.setup, [], PARTS, (0,), (0, 2), number=2))
    machine.workers[0].release()
    machine.workers[1].release()
    machine.get(0, 2, wanted=(1,), coming=(1, 2), number=4)
    machine.holder._note_wanted(GroupRequest("hub", machine.setup, [], PARTS, (0, 1), (0, 1), number=3))
    assert machine.held == {1, 2}
    machine.workers[0].release()
    machine.get(1, 0, wanted=(1,), coming=(1, 0), number=5)
    assert machine.held == {0, 1}


@pytest.mark.parametrize("cap", [LARGEST, 2 * LARGEST])
def test_parts_are_read_once_an_epoch_where_one_follows_the_other(cap):
    machine = Machine(1, cap)
    for _ in range(2):
        for part in PARTS:
            for batch in range(4):
                coming = (part + 1,) if batch > 2 and part < 4 else ()
                machine.holder.expect(part + 1, machine.setup) if coming else None
                machine.get(0, part, coming)
                machine.workers[0].release()
    reads = machine.holder.report()["reads"]
    assert max(reads.values()) <= 2 and machine.holder.report()["most_held_bytes"] <= cap


def test_a_part_that_fits_in_no_machine_says_what_it_needs():
    machine = Machine(1, 1000)
    message = (
        r"part 0 needs \d+ bytes, worker_memory_bytes=1000 caps this machine at 1000: "
        r"set worker_memory_bytes=\d+ or more, or cut the graph into more parts"
    )
    for _ in range(2):
        with pytest.raises(GNNScaleError, match=message):
            machine.get(0, 0)
        machine.workers[0].release()
    assert machine.holder.report()["held_bytes"] == 0 and machine.held == set()


def test_an_error_of_reading_goes_to_all_who_wait_and_the_next_one_tries_again():
    fails = threading.Event()

    class Stage:
        is_whole = False

        def __call__(self, part):
            if not fails.is_set():
                fails.set()
                raise OSError("disk")
            return make_loader()._stager(part)

    machine = Machine(1, None, Stage())
    with pytest.raises(OSError, match="disk"):
        machine.get(0, 1)
    assert machine.get(0, 1).staged.graph.part == 1
    assert machine.holder.report()["held_bytes"] == size_of(1)
