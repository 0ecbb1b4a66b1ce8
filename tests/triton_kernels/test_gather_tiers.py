"""Rows out of several tables against plain indexing, bit for bit, with counts; on the CPU and in Triton."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tier_tables import TORCH_DTYPES, as_bytes, random_bits, spread

from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.triton_kernels.gather_rows import RowTables, gather_tiers, op, pack_places, unpack_places
from tests.oracles.gather_rows import gather_tiers_reference
from tests.says import said
from tests.tiers import all_pairs

LAUNCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors


def expected(whole, places, nodes, unreachable, filler):
    table, _ = unpack_places(places)
    rows = whole[torch.from_numpy(nodes)].clone()
    left = np.isin(table[nodes], unreachable)
    rows.view(torch.uint8)[torch.from_numpy(left)] = filler
    counts = np.bincount(table[nodes[~left]], minlength=table.max(initial=0) + 1)
    return rows, counts


@given(
    dtype=st.sampled_from(TORCH_DTYPES),
    dim=st.sampled_from([1, 2, 3, 5, 8, 15, 16, 31, 32, 63, 64, 65, 128]),
    num=st.integers(0, 70),
    num_tables=st.integers(1, 6),
    out_kind=st.sampled_from(["fresh", "pooled", "shifted"]),
    by_node=st.booleans(),
    unreachable=st.sampled_from([(), (0,), (0, 2)]),
    seed=st.integers(0, 1000),
)
def test_the_cpu_form_equals_indexing(dtype, dim, num, num_tables, out_kind, by_node, unreachable, seed):
    whole = random_bits(41, dim, dtype, seed)
    places, tables = spread(whole, num_tables, seed, unreachable)
    nodes = np.random.default_rng(seed).integers(0, 41, num)
    num_bytes, size = num * dim * whole.element_size(), whole.element_size()
    raw = BufferPool().take(num_bytes + 64, np.uint8)
    raw[:] = 1
    start = size if out_kind == "shifted" else 0
    out = torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(num, dim)
    if out_kind == "fresh":
        out = torch.ones(num * dim * size, dtype=torch.uint8).view(dtype).view(num, dim)
    reads = np.zeros(num_tables, np.int64)
    got = gather_tiers(places if by_node else places[nodes], nodes if by_node else None, tables, out, reads)
    assert got is out
    rows, counts = expected(whole, places, nodes, unreachable, 1)
    assert as_bytes(out) == as_bytes(rows)
    assert reads.tolist() == counts.tolist()[:num_tables] + [0] * (num_tables - len(counts))
    assert (raw[start + num_bytes :] == 1).all() and (raw[:start] == 1).all(), "nothing outside of out is written"


@all_pairs
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(("dim", "num"), [(1, 5), (3, 300), (63, 40), (64, 129), (65, 17), (128, 33), (2500, 6)])
@pytest.mark.parametrize("by_node", [True, False])
def test_triton_and_plain_indexing_give_the_same_bits(dtype, dim, num, by_node):
    pytest.importorskip("triton")
    whole = random_bits(97, dim, dtype, dim)
    nodes = np.random.default_rng(dim).integers(0, 97, num)
    for unreachable in ((), (0, 3)):
        places, tables = spread(whole, 5, dim, unreachable)
        if LAUNCH_DEVICE == "cuda":
            tables = RowTables([None if table is None else table.cuda() for table in tables.tables], tables.row_bytes)
        out = torch.ones(num * dim * whole.element_size(), dtype=torch.uint8, device=LAUNCH_DEVICE)
        out = out.view(dtype).view(num, dim)
        reads = torch.zeros(5, dtype=torch.int64, device=LAUNCH_DEVICE)
        given_places = torch.from_numpy(places if by_node else places[nodes]).to(LAUNCH_DEVICE)
        given_nodes = torch.from_numpy(nodes).to(LAUNCH_DEVICE) if by_node else None
        op.gather_tiers_with_triton(given_places, given_nodes, tables, out, reads, max_programs=3)
        rows, counts = expected(whole, places, nodes, unreachable, 1)
        assert as_bytes(out) == as_bytes(rows)
        assert reads.tolist() == counts.tolist()[:5] + [0] * (5 - len(counts))


@pytest.mark.parametrize("row_items", [5, 16, 602])
def test_offsets_of_64_bits_and_many_blocks_a_program_give_the_same_bits(row_items, monkeypatch):
    """One program takes block after block, each ahead of the next: nothing is left of what `out` held."""
    pytest.importorskip("triton")
    monkeypatch.setattr(op, "needs_wide_offsets", lambda *sizes: True)
    whole = random_bits(97, row_items, torch.float32, row_items)
    places, tables = spread(whole, 3, row_items)
    if LAUNCH_DEVICE == "cuda":
        tables = RowTables([table.cuda() for table in tables.tables], tables.row_bytes)
    nodes = torch.from_numpy(np.random.default_rng(0).integers(0, 97, 500)).to(LAUNCH_DEVICE)
    out = torch.full((500, row_items), torch.nan, device=LAUNCH_DEVICE)
    op.gather_tiers_with_triton(torch.from_numpy(places).to(LAUNCH_DEVICE), nodes, tables, out, None, max_programs=1)
    assert as_bytes(out) == as_bytes(whole[nodes.cpu()])


def test_triton_reads_what_stands_at_odd_addresses():
    pytest.importorskip("triton")
    whole = random_bits(20, 16, torch.uint8, 0)
    raw = torch.zeros(20 * 16 + 16, dtype=torch.uint8, device=LAUNCH_DEVICE)
    for shift in (1, 2, 4):
        table = raw[shift : shift + 320].view(20, 16)
        table.copy_(whole)
        tables = RowTables([table])
        assert tables.item_bytes == tables.alignment == shift
        out = torch.zeros(20, 16, dtype=torch.uint8, device=LAUNCH_DEVICE)
        places = torch.arange(19, -1, -1, device=LAUNCH_DEVICE)
        op.gather_tiers_with_triton(places, None, tables, out, None, max_programs=1)
        assert torch.equal(out.cpu(), whole.flip(0))


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_the_reference_agrees(dtype):
    whole = np.random.default_rng(0).integers(0, 99, (30, 7)).astype(dtype)
    places, tables = spread(torch.from_numpy(whole), 3, 1)
    tables = RowTables([table.numpy() for table in tables.tables])
    nodes = np.array([3, 3, 29, 0])
    out, reads, counts = np.empty((4, 7), dtype), np.zeros(3, np.int64), np.zeros(3, np.int64)
    assert gather_tiers_reference(places, nodes, tables, out, reads).tobytes() == whole[nodes].tobytes()
    gather_tiers(places, nodes, tables, out, counts)
    assert reads.tolist() == counts.tolist() and counts.sum() == 4


def test_places_hold_large_rows():
    table, row = np.array([0, 5, 1000]), np.array([2**48 - 1, 0, 2**40])
    assert [part.tolist() for part in unpack_places(pack_places(table, row))] == [table.tolist(), row.tolist()]


@pytest.mark.parametrize(("nodes", "message"), [([0, 9], "nodes[1] [0, 9) 9"), ([-1], "nodes[0] -1")])
def test_nodes_out_of_range_are_named_and_not_counted(nodes, message):
    reads = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match=said(message)):
        gather_tiers(np.arange(9), np.array(nodes), RowTables([np.zeros((9, 4))]), np.empty((len(nodes), 4)), reads)
    assert reads[0] == 0


def test_what_does_not_fit_is_refused():
    table = np.zeros((9, 4), np.float32)
    with pytest.raises(ValueError, match=said("table 1 16 8")):
        RowTables([table, np.zeros((3, 2), np.float32)])
    with pytest.raises(ValueError, match=said("table 0")):
        RowTables([table[:, ::2]])
    tables = RowTables([table])
    for out in (np.empty((2, 4)), np.empty((3, 4), np.float32), np.empty((4, 2), np.float32).T):
        with pytest.raises(ValueError, match=said("out 2 16")):
            gather_tiers(np.arange(9), np.array([1, 2]), tables, out)
    with pytest.raises(ValueError, match="one-dimensional integers"):
        gather_tiers(np.arange(9), np.array([0.5]), tables, np.empty((1, 4), np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_cuda_reads_own_rows_and_pinned_rows(dtype):
    for dim in (1, 63, 64, 65, 128):
        whole = random_bits(5000, dim, dtype, dim)
        places, tables = spread(whole, 3, dim)
        own, pinned, more = tables.tables
        tables = RowTables([own.cuda(), pinned.pin_memory(), more.cuda()])
        nodes = torch.from_numpy(np.random.default_rng(dim).integers(0, 5000, 3000)).cuda()
        out = torch.empty(3000, dim, dtype=dtype, device="cuda")
        reads = torch.zeros(3, dtype=torch.int64, device="cuda")
        gather_tiers(torch.from_numpy(places).cuda(), nodes, tables, out, reads)
        assert as_bytes(out) == as_bytes(whole[nodes.cpu()])
        counts = np.bincount(unpack_places(places)[0][nodes.cpu().numpy()], minlength=3)
        assert reads.tolist() == counts.tolist()
        with pytest.raises(ValueError, match=said("nodes [0, 5000) 0 5000")):
            gather_tiers(
                torch.from_numpy(places).cuda(), torch.tensor([0, 5000]).cuda(), tables, out[:2].contiguous(), None
            )
