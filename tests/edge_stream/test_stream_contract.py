"""What every stream keeps to: chunks, threads, memory, counts, fingerprints, options."""

import threading
import time

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import EdgeChunk, EdgeStream, open_edge_stream
from lightning_gnnscale.edge_stream.options import StreamOptions
from lightning_gnnscale.edge_stream.read_ahead import ChunkPool, read_ahead
from lightning_gnnscale.errors import EdgeStreamError
from tests.says import said
from tests.tiers import all_pairs

BIG_CHUNK = 1 << 18  # 2 MiB of int32 pairs: large enough for buffers to be reused


def edges(num_edges, num_nodes=50, seed=0, dtype=np.int32):
    return np.random.default_rng(seed).integers(0, num_nodes, (2, num_edges)).astype(dtype)


def collected(stream, start_chunk=0):
    chunks = list(stream.chunks(start_chunk))
    if not chunks:
        return np.empty((2, 0), stream.dtype)
    return np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in chunks], axis=1)


def edge_threads():
    return [thread for thread in threading.enumerate() if thread.name == "gnnscale-edges"]


def test_chunks_are_exact_and_numbered_by_their_first_edge():
    given = edges(10)
    chunks = list(open_edge_stream(given, chunk_edges=4).chunks())
    assert [chunk.first_edge for chunk in chunks] == [0, 4, 8]
    assert [len(chunk.src) for chunk in chunks] == [4, 4, 2]
    assert all(type(chunk) is EdgeChunk and chunk.reverse is False for chunk in chunks)
    assert np.array_equal(collected(open_edge_stream(given, chunk_edges=4)), given)


@pytest.mark.parametrize("start_chunk", [0, 1, 2, 3, 7])
def test_start_chunk_leaves_out_whole_chunks(start_chunk):
    given = edges(10)
    stream = open_edge_stream(given, chunk_edges=4)
    assert np.array_equal(collected(stream, start_chunk), given[:, 4 * start_chunk :])


@all_pairs
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int16", "uint32", "uint64", ">i4", ">i8"])
@pytest.mark.parametrize("shape", ["columns", "pairs", "fortran", "strided", "read_only", "tuple"])
def test_compiled_loops_see_one_form_of_array(dtype, shape):
    given = edges(11, dtype=dtype)
    source = {
        "columns": given,
        "pairs": np.ascontiguousarray(given.T),
        "fortran": np.asfortranarray(given),
        "strided": np.repeat(given, 2, axis=1)[:, ::2],
        "read_only": given.copy(),
        "tuple": (given[0], given[1]),
    }[shape]
    if shape == "read_only":
        source.flags.writeable = False
    stream = open_edge_stream(source, chunk_edges=4)
    for chunk in stream.chunks():
        for end in (chunk.src, chunk.dst):
            assert type(end) is np.ndarray
            assert end.ndim == 1
            assert end.flags.c_contiguous and end.flags.aligned and end.flags.writeable
            assert end.dtype == stream.dtype
            assert stream.dtype in (np.dtype("int32"), np.dtype("int64"))
    assert np.array_equal(collected(stream), given)


def test_count_fills_the_attributes_and_streams_repeat():
    stream = open_edge_stream(np.array([[0, 7, 3], [1, 2, 9]]))
    assert stream.num_nodes is None
    assert stream.count() == (10, 3)
    assert (stream.num_nodes, stream.num_edges) == (10, 3)
    assert np.array_equal(collected(stream), collected(stream))


def test_a_pass_that_begins_later_counts_nothing():
    stream = open_edge_stream(np.array([[0, 7, 3], [1, 2, 9]]), chunk_edges=1)
    list(stream.chunks(1))
    assert stream.num_nodes is None


def test_no_edges_in_memory_is_a_graph_of_isolated_nodes():
    stream = open_edge_stream(np.empty((2, 0), np.int64), num_nodes=5)
    assert list(stream.chunks()) == []
    assert stream.count() == (5, 0)


def test_sparse_ids_are_not_taken_for_node_numbers():
    stream = open_edge_stream(np.array([[5, 10**12], [6, 7]]))
    with pytest.raises(EdgeStreamError, match=said("1000000000000 2 relabel=True")):
        stream.count()
    assert open_edge_stream(np.array([[5, 10**12], [6, 7]]), num_nodes=10**12 + 1).count() == (10**12 + 1, 2)


def test_held_chunks_are_never_overwritten():
    given = edges(6 * BIG_CHUNK).T.copy()
    stream = open_edge_stream(given, chunk_edges=BIG_CHUNK)
    assert np.array_equal(collected(stream), given.T)


def test_a_dropping_consumer_is_served_from_two_buffers():
    given = edges(8 * BIG_CHUNK).T.copy()
    addresses = set()
    for chunk in open_edge_stream(given, chunk_edges=BIG_CHUNK).chunks():
        addresses.add(chunk.src.ctypes.data)
    assert len(addresses) == 2


def test_a_buffer_comes_back_only_when_no_view_is_left():
    pool = ChunkPool(BIG_CHUNK, np.dtype(np.int32))
    first = pool.take()[0, :10]
    second = pool.take()[0, :10]
    third = pool.take()[0, :10]
    assert len({view.ctypes.data for view in (first, second, third)}) == 3
    free = second.ctypes.data
    del second
    assert pool.take().ctypes.data == free


def test_the_thread_is_one_item_ahead_and_no_more():
    made = []

    def produce(stop):
        for i in range(100):
            made.append(i)
            yield i

    items = read_ahead(produce)
    for wanted in range(3):
        assert next(items) == wanted
        deadline = time.monotonic() + 5
        while len(made) < wanted + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(made) == wanted + 2
    items.close()
    assert edge_threads() == []


@pytest.mark.parametrize("leave", ["close", "delete", "error"])
def test_an_early_stop_leaves_no_thread(leave):
    chunks = open_edge_stream(edges(1000), chunk_edges=10).chunks()
    next(chunks)
    assert len(edge_threads()) == 1
    if leave == "close":
        chunks.close()
    elif leave == "delete":
        del chunks
    else:
        with pytest.raises(RuntimeError):
            chunks.throw(RuntimeError("consumer"))
    assert edge_threads() == []


def test_exhaustion_leaves_no_thread():
    assert len(list(open_edge_stream(edges(100), chunk_edges=10).chunks())) == 10
    assert edge_threads() == []


def test_an_exception_of_the_reader_reaches_the_consumer():
    class Broken(EdgeStream):
        def _blocks(self, first_edge):
            yield np.array([0, 1], np.int32), np.array([1, 0], np.int32)
            raise KeyError("from the thread")

    stream = Broken("broken", np.dtype(np.int32), StreamOptions(chunk_edges=1))
    chunks = stream.chunks()
    assert next(chunks).first_edge == 0
    assert next(chunks).first_edge == 1
    with pytest.raises(KeyError, match="from the thread"):
        next(chunks)
    assert edge_threads() == []


def test_fingerprints_tell_sources_and_options_apart(tmp_path):
    given = edges(20)
    np.save(tmp_path / "a.npy", given)
    other = given.copy()
    other[0, 3] += 1
    prints = [
        open_edge_stream(given).fingerprint(),
        open_edge_stream(other).fingerprint(),
        open_edge_stream(given, num_nodes=60).fingerprint(),
        open_edge_stream(given, to_undirected=True).fingerprint(),
        open_edge_stream(given, remove_self_loops=True).fingerprint(),
        open_edge_stream(given, layout="once").fingerprint(),
        open_edge_stream(given, relabel=True).fingerprint(),
        open_edge_stream(tmp_path / "a.npy").fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    same = open_edge_stream(given.astype(np.int64).T, chunk_edges=7)
    assert same.fingerprint() == prints[0]
    same.count()
    assert same.fingerprint() == prints[0]


def test_a_rewritten_file_has_another_fingerprint(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, edges(20))
    before = open_edge_stream(path).fingerprint()
    np.save(path, edges(21))
    assert open_edge_stream(path).fingerprint() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": -1}, "num_nodes at least 0 -1"),
        ({"num_nodes": 3.5}, "num_nodes at least 0 3.5"),
        ({"chunk_edges": 0}, "chunk_edges at least 1 0"),
        ({"chunk_edges": True}, "chunk_edges"),
        ({"layout": "twice"}, "auto once both_ways directed 'twice'"),
        ({"to_undirected": "yes"}, "to_undirected True False 'yes'"),
        ({"dtype": "int32"}, "option 'dtype' array"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=said(message)):
        open_edge_stream(edges(3), **options)


def test_a_negative_start_is_refused_at_once():
    with pytest.raises(ValueError, match=said("start_chunk at least 0 -1")):
        open_edge_stream(edges(3)).chunks(-1)
