"""The halo that a part's rows tell, and the code of its rows, against plain Python."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.partition_store.halo_rows import (
    HaloForm,
    decode_halo,
    decode_lengths,
    encode_halo,
    encode_halo_end,
    halo_of_rows,
)
from lightning_gnnscale.partition_store.local_ids import localise, number_halo, outside_edges
from lightning_gnnscale.partitioner.multilevel import weighted_graph
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads

FORMS = [HaloForm(rows, places) for rows, places in ((True, False), (True, True), (False, True))]


def number(value: int) -> list[int]:
    """LEB128, by the book."""
    low, rest = value & 127, value >> 7
    return [low | 128, *number(rest)] if rest else [low]


def code_by_hand(form: HaloForm, nodes, cross) -> list[int]:
    code, behind = [], 0
    for node in nodes:
        edges = [(source, place) for target, source, place in cross if target == node]
        code += number(len(edges)) if form.rows else []
        if edges and form.places:
            code += number(edges[0][1] - behind)
            behind = edges[-1][1] + 1
        before = 0
        for source, _ in edges if form.rows else ():
            code += number(source - before)
            before = source
    return code


def decoded(form: HaloForm, code, indptr, num_core: int, num_edges: int):
    """Return the sources and places of halo rows, None where the code is refused."""
    part = CSC(np.concatenate([np.zeros(num_core, np.int64), indptr]), np.zeros(indptr[-1], np.int32))
    places = np.zeros(indptr[-1] if form.places else 0, np.int64)
    return (part.indices, places) if decode_halo(form, code, part, num_core, num_edges, places) else None


@st.composite
def part_rows(draw):
    """A graph, the bounds of a part, and (target, local source, position) of the edges out of its core."""
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=60))
    begin = draw(st.integers(0, num_nodes))
    end = draw(st.integers(begin, num_nodes))
    src, dst = np.array(edges, np.int64).reshape(-1, 2).T
    csc = build_csc(src, dst, num_nodes)
    rows = np.repeat(np.arange(num_nodes), np.diff(csc.indptr)).tolist()
    cross = [
        (row, source - begin, place)
        for place, (row, source) in enumerate(zip(rows, csc.indices.tolist(), strict=True))
        if begin <= source < end and not begin <= row < end
    ]
    return csc, begin, end, cross


@given(case=part_rows(), form=st.sampled_from(FORMS), cut=st.integers(0, 12), block=st.integers(1, 5))
def test_halo_rows_are_coded_and_decoded(case, form, cut, block):
    csc, begin, end, cross = case
    held = halo_of_rows(csc, begin, end, block)
    halo = sorted({u for u in csc.indices[csc.indptr[begin] : csc.indptr[end]].tolist() if not begin <= u < end})
    assert held.nodes.tolist() == halo
    if not form.rows:
        halo = [node for node in halo if node in {target for target, _, _ in cross}]  # as where edges go both ways
        held.words[:], held.size = 0, 0
        held.add(np.array(halo, np.int64))
        held.count()
    code, state = [], (0, 0)
    for edges in ([edge for edge in cross if edge[0] < cut], [edge for edge in cross if edge[0] >= cut]):
        columns = np.array(edges, np.int64).reshape(-1, 3).T
        wanted = (True, form.rows, form.places)
        columns = tuple(
            np.ascontiguousarray(column[: len(column) * need]) for column, need in zip(columns, wanted, strict=True)
        )
        chunk, state = encode_halo(form, held.nodes, held, columns, state)
        code.append(chunk)
    code = np.concatenate([*code, encode_halo_end(form, len(halo), state)])
    assert code.tolist() == code_by_hand(form, halo, cross)

    kept = [edge for edge in cross if edge[0] in halo]
    indptr = np.concatenate([[0], np.searchsorted([edge[0] for edge in kept], halo, "right")]).astype(np.int64) + 3
    if form.rows:
        found = np.full(len(halo) + 1, 3, np.int64)  # behind three edges of the core
        assert decode_lengths(form, code, found)
        np.testing.assert_array_equal(found, indptr)
    indices, places = decoded(form, code, indptr, end - begin, csc.num_edges)
    if form.rows:
        assert indices[3:].tolist() == [source for _, source, _ in kept]
    if form.places:
        assert places[3:].tolist() == [place for _, _, place in kept]


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14, 2**31, 2**40, 2**62])
def test_long_numbers_survive(value):
    form = HaloForm(rows=True, places=True)
    held = halo_of_rows(CSC(np.array([0, 1, 1]), np.array([1])), 0, 1)
    columns = np.array([1]), np.array([0]), np.array([value])
    code, state = encode_halo(form, held.nodes, held, columns, (0, 0))
    assert code.tolist() == [1, *number(value), 0] and state == (1, value + 1)
    assert decoded(form, code, np.array([0, 1]), 1, value + 1)[1].tolist() == [value]
    assert decoded(form, code, np.array([0, 1]), 1, value) is None


@given(code=st.binary(max_size=40), rows=st.integers(0, 8), form=st.sampled_from(FORMS))
def test_any_bytes_are_decoded_within_bounds_or_refused(code, rows, form):
    code, indptr = np.frombuffer(code, np.uint8), np.arange(rows + 1, dtype=np.int64)
    if form.rows:
        indptr[:] = 0
        if not decode_lengths(form, code, indptr):
            return
    assert 0 <= indptr[-1] <= max(len(code), rows)
    found = decoded(form, code, indptr, 5, 70)
    if found is not None:
        assert all((values >= 0).all() and (values < most).all() for values, most in zip(found, (5, 70), strict=True))


@pytest.fixture(scope="module")
def three_threads():
    with pytest.MonkeyPatch.context() as patch, closing(RowThreads(3)) as threads:
        patch.setattr(weighted_graph, "MIN_ENTRIES", 1)
        yield threads


@given(case=part_rows(), bits=st.integers(0, 5), row_bits=st.integers(0, 4), options=st.tuples(*2 * [st.booleans()]))
def test_local_ids_and_rows_that_are_a_transpose(three_threads, case, bits, row_bits, options):
    in_place, threads = options[0], three_threads if options[1] else RowThreads(1)
    csc, begin, end, _ = case
    num_core, halo = end - begin, halo_of_rows(csc, begin, end).nodes
    local = np.full(csc.num_rows, -1)
    local[begin:end], local[halo] = np.arange(num_core), num_core + np.arange(len(halo))
    first, last = csc.indptr[[begin, end]]
    sources, core = csc.indices[first:last].astype(np.int32), local[csc.indices[first:last]]
    rows = np.repeat(np.arange(num_core), np.diff(csc.indptr[begin : end + 1]))
    order = np.lexsort([core, rows])
    expected = [sorted(rows[core == node].tolist()) for node in range(num_core, num_core + len(halo))]

    indptr, found = np.zeros(num_core + len(halo) + 1, np.int64), np.full(len(halo), -1, np.int32)
    indptr[: num_core + 1] = csc.indptr[begin : end + 1] - first
    indices, places = np.full(2 * len(sources), -1, np.int32), np.full(len(sources), -1)
    if in_place:
        indices[: len(sources)] = sources
        sources = indices[: len(sources)]
    sizes = csc.num_rows, bits, row_bits
    outside = outside_edges(indptr[: num_core + 1], sources, begin, end, *sizes, threads=threads)
    assert outside.num_edges == (core >= num_core).sum()
    part = CSC(indptr, indices[: len(sources) + outside.num_edges])
    assert number_halo(outside, found, part, num_core, True, threads) == len(halo)
    localise(indptr[: num_core + 1], sources, begin, outside, part.indices, places, threads)
    assert found.tolist() == halo.tolist()
    assert part.indices[: len(core)].tolist() == core[order].tolist() and places.tolist() == order.tolist()
    assert [
        part.indices[indptr[row] : indptr[row + 1]].tolist() for row in range(num_core, len(indptr) - 1)
    ] == expected
    assert indptr[-1] == len(part.indices)


@given(case=part_rows(), num_halo=st.integers(0, 12), threaded=st.booleans())
def test_a_halo_of_another_size_is_counted_within_bounds(three_threads, case, num_halo, threaded):
    csc, begin, end, _ = case
    num_core, sources = end - begin, csc.indices[csc.indptr[begin] : csc.indptr[end]]
    indptr = np.zeros(num_core + num_halo + 1, np.int64)
    indptr[: num_core + 1] = csc.indptr[begin : end + 1] - csc.indptr[begin]
    outside = outside_edges(indptr[: num_core + 1], sources, begin, end, csc.num_rows, 2, 2)
    part = CSC(indptr, np.zeros(len(sources) + outside.num_edges, np.int32))
    threads = three_threads if threaded else RowThreads(1)
    found = number_halo(outside, np.zeros(num_halo, np.int32), part, num_core, True, threads)
    assert found == len(halo_of_rows(csc, begin, end))


def test_a_source_that_is_no_node_is_seen():
    for source in (-1, 4, 2**31 - 1):
        sources = np.array([source], np.int32)
        assert halo_of_rows(CSC(np.array([0, 1, 1, 1, 1]), sources), 0, 2) is None
        assert outside_edges(np.array([0, 1, 1]), sources, 0, 2, 4) is None
