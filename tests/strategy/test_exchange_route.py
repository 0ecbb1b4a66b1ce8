"""Routes: every halo row arrives at its place, and gradients come back to the row they belong to."""

import pytest
import torch
from hypothesis import given
from strategy.exchange_blocks import blocks, make_blocks

from lightning_gnnscale.strategy.exchange.route import block_route, halo_route

CPU = torch.device("cpu")
ROUTES = {"halo": halo_route, "block": block_route}


def carry(routes, rows):
    """Let rows travel; rows: one list a process. Returns the halo of each process."""
    halos = []
    for receiver, route in enumerate(routes):
        arriving = []
        for sender, other in enumerate(routes):
            boundary = [rows[sender][row] for row in other.boundary.tolist()]
            chunk = [boundary[position] for position in other.leaving[receiver].tolist()]
            assert len(chunk) == route.arriving[sender] == other.returned[receiver]
            arriving += chunk
        assert len(arriving) == route.num_arriving
        halos.append(arriving if route.pick is None else [arriving[place] for place in route.pick.tolist()])
    return halos


def carry_back(routes, grads, num_local):
    """Let gradients of the halos travel back; returns the sum for each own row."""
    full = []
    for route, grad in zip(routes, grads, strict=True):
        places = range(len(grad)) if route.pick is None else route.pick.tolist()
        arrived = [0.0] * route.num_arriving
        for place, value in zip(places, grad, strict=True):
            arrived[place] = value
        full.append([[arrived[place] for place in positions.tolist()] for positions in route.returning])
    sums = []
    for owner, route in enumerate(routes):
        returned = [value for reader in range(len(routes)) for value in full[reader][owner]]
        own = [0.0] * num_local[owner]
        for row, value in zip(route.returned_rows.tolist(), returned, strict=True):
            own[row] += value
        sums.append(own)
    return sums


def check(kind, processes):
    routes = [ROUTES[kind](block, CPU) for block in processes]
    ids = [list(range(block.offsets[block.rank], block.offsets[block.rank + 1])) for block in processes]
    halos = carry(routes, ids)
    assert halos == [block.halo_nodes.tolist() for block in processes]
    for route, own in zip(routes, ids, strict=True):
        assert [own[row] for row in route.boundary.tolist()] == route.boundary_ids.tolist()
    # reader r gives row i of its halo the gradient 2**r * (1 + i / 64): exact sums that tell readers and rows apart
    grads = [[2.0**rank * (1 + i / 64) for i in range(len(halo))] for rank, halo in enumerate(halos)]
    expected = {}
    for halo, grad in zip(halos, grads, strict=True):
        for node, value in zip(halo, grad, strict=True):
            expected[node] = expected.get(node, 0.0) + value
    sums = carry_back(routes, grads, [len(own) for own in ids])
    assert sums == [[expected.get(node, 0.0) for node in own] for own in ids]


@pytest.mark.parametrize("kind", ROUTES)
def test_rows_of_three_processes_arrive_and_return(kind):
    check(kind, make_blocks())


@pytest.mark.parametrize("kind", ROUTES)
@given(processes=blocks())
def test_rows_of_any_blocks_arrive_and_return(kind, processes):
    check(kind, processes)


def test_the_halo_route_by_hand():
    first, second, third = (halo_route(block, CPU) for block in make_blocks())
    # rank 0 owns 0 to 3: rank 1 reads 0 and 3, rank 2 reads 3
    assert first.boundary.tolist() == first.boundary_ids.tolist() == [0, 3]
    assert [positions.tolist() for positions in first.leaving] == [[], [0, 1], [1]]
    assert first.arriving == (0, 2, 1) and first.pick is None
    assert first.returned == (0, 2, 1) and first.returned_rows.tolist() == [0, 3, 3]
    assert [positions.tolist() for positions in first.returning] == [[], [0, 1], [2]]
    # rank 1 owns 4 to 6: rank 0 reads 4 and 5
    assert second.boundary.tolist() == [0, 1] and second.boundary_ids.tolist() == [4, 5]
    assert second.arriving == (2, 0, 1)
    assert third.boundary_ids.tolist() == [8, 9] and third.arriving == (1, 0, 0)


def test_the_block_route_by_hand():
    first, second, third = (block_route(block, CPU) for block in make_blocks())
    assert first.boundary.tolist() == [0, 1, 2, 3] and second.boundary_ids.tolist() == [4, 5, 6]
    assert [positions.tolist() for positions in second.leaving] == [[0, 1, 2], [], [0, 1, 2]]
    # rank 0 gets 4 to 9 and reads 4, 5, 9; rank 1 gets 0 to 3 and 7 to 9 and reads 0, 3, 8; rank 2 gets 0 to 6
    assert first.arriving == (0, 3, 3) and first.pick.tolist() == [0, 1, 5]
    assert second.arriving == (4, 0, 3) and second.pick.tolist() == [0, 3, 5]
    assert third.arriving == (4, 3, 0) and third.pick.tolist() == [3]


@pytest.mark.parametrize("kind", ROUTES)
def test_a_single_process_sends_nothing(kind):
    route = ROUTES[kind](*make_blocks((0, 5), ((),)), CPU)
    assert route.num_arriving == 0 and [len(positions) for positions in route.leaving] == [0]
    assert route.returned_rows.tolist() == []
