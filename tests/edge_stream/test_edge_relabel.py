"""Numbers for arbitrary ids."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import NodeIds, open_edge_stream
from lightning_gnnscale.edge_stream.id_tables import Strings
from lightning_gnnscale.errors import EdgeStreamError
from tests.says import said

STRINGS = [("b", "a"), ("a", "c d"), ("é", "b"), ("c d", "7")]


def pairs_of(stream):
    return [(u, v) for chunk in stream.chunks() for u, v in zip(chunk.src.tolist(), chunk.dst.tolist(), strict=True)]


def test_integers_of_64_bits():
    ids = np.array([[2**62, -5, 2**62], [-5, 0, 7]])
    stream = open_edge_stream(ids, relabel=True, chunk_edges=2)
    assert pairs_of(stream) == [(0, 1), (1, 2), (0, 3)]
    assert np.asarray(stream.node_ids).tolist() == [2**62, -5, 0, 7]
    assert stream.count() == (4, 3)
    assert stream.dtype == np.int32


def test_unsigned_ids_keep_their_value():
    stream = open_edge_stream(np.array([[2**64 - 1], [3]], np.uint64), relabel=True)
    assert pairs_of(stream) == [(0, 1)]
    assert np.asarray(stream.node_ids).tolist() == [2**64 - 1, 3]


@pytest.mark.parametrize("known", [True, False])
def test_counting_learns_the_ids_where_the_counts_are_known(known):
    stream = open_edge_stream(np.array([[30, 10], [10, 20]]), num_nodes=3 if known else None, relabel=True)
    assert stream.count() == (3, 2)
    assert stream.node_ids.complete
    assert np.asarray(stream.node_ids).tolist() == [30, 10, 20]


def test_signed_and_unsigned_ids_meet_only_where_64_bits_hold_them(tmp_path):
    def stream_of(src, dst):
        pq.write_table(pa.table({"src": src, "dst": dst}), tmp_path / "a.parquet")
        return open_edge_stream(tmp_path / "a.parquet", relabel=True, chunk_edges=1)

    large, signed = np.array([3, 2**63 + 5], np.uint64), np.array([3, 4], np.int64)
    for src, dst in [(large, signed), (signed, large)]:
        stream = stream_of(src, dst)
        stream.count()
        assert sorted(np.asarray(stream.node_ids).tolist()) == [3, 4, 2**63 + 5]
        assert np.asarray(stream.node_ids)[stream.node_ids.index_of(np.array([4]))].tolist() == [4]
        with pytest.raises(ValueError, match="does not appear"):
            stream.node_ids.index_of(np.array([5 - 2**63]))
    with pytest.raises(EdgeStreamError, match=said("negative 2 63")):
        stream_of(np.array([0, -1]), large).count()
    stream = stream_of(signed, np.array([0, -1]))
    stream.count()
    with pytest.raises(ValueError, match="does not appear"):
        stream.node_ids.index_of(np.array([2**64 - 1], np.uint64))


def test_listed_ids_are_numbered_by_their_places():
    listed = NodeIds.of(["b", "a"])
    assert listed.complete and listed.index_of(["a", "b"]).tolist() == [1, 0]
    assert listed.plain(np.array([1, 0, 1])) == ["a", "b", "a"]
    with pytest.raises(EdgeStreamError, match=said("node id 'c' 2")):
        listed.encode(Strings.of(["a"]), Strings.of(["c"]))
    many = [f"node {i}" for i in range(70_000)]
    assert NodeIds.of(many).plain(np.array([69_999, 65_536])) == ["node 69999", "node 65536"]
    with pytest.raises(ValueError, match=said("'node 65535' 65536")):
        NodeIds.of(np.array([*many[:65_536], "node 65535"], dtype=object))
    for wrong in (np.array({}), [1.5, 2.5], [["a"], ["b"]], ["a", "b", "a"]):
        with pytest.raises(ValueError, match="shape|'a'.* row 2"):
            NodeIds.of(wrong)


def test_strings_are_the_same_from_text_and_parquet(tmp_path):
    (tmp_path / "a.csv").write_text("source,target\n" + "".join(f'"{u}",{v}\n' for u, v in STRINGS))
    (tmp_path / "a.tsv").write_text("".join(f"{u}\t{v}\n" for u, v in STRINGS))
    table = pa.table({"src": [u for u, _ in STRINGS], "dst": [v for _, v in STRINGS]})
    pq.write_table(table, tmp_path / "a.parquet")
    encoded = pa.table({name: table[name].dictionary_encode() for name in table.column_names})
    pq.write_table(encoded, tmp_path / "b.parquet")
    for name in ("a.csv", "a.tsv", "a.parquet", "b.parquet"):
        stream = open_edge_stream(tmp_path / name, relabel=True, chunk_edges=3)
        for _ in range(2):
            assert pairs_of(stream) == [(0, 1), (1, 2), (3, 0), (2, 4)]
        assert np.asarray(stream.node_ids).tolist() == ["b", "a", "c d", "é", "7"]
        assert stream.node_ids.index_of(["7", "b"]).tolist() == [4, 0]


def test_quotes_and_blanks_in_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"a,b", "say ""hi"""\n  "a,b" , c d  \n c d,é\n')
    stream = open_edge_stream(path, relabel=True)
    assert pairs_of(stream) == [(0, 1), (0, 2), (2, 3)]
    assert np.asarray(stream.node_ids).tolist() == ["a,b", 'say "hi"', "c d", "é"]
    path.write_text('a,b\nb,c\nc,d\n" ",c\n')
    with pytest.raises(EdgeStreamError, match=said("line 4 fields 0 1")):
        list(open_edge_stream(path, relabel=True).chunks())


def test_large_integers_in_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"{2**64 - 1} 3\n3 {2**63}\n")
    stream = open_edge_stream(path, relabel=True)
    assert pairs_of(stream) == [(0, 1), (1, 2)]
    assert np.asarray(stream.node_ids).tolist() == [2**64 - 1, 3, 2**63]
    with pytest.raises(EdgeStreamError, match=said(f"1 '{2**64 - 1}' 64")):
        list(open_edge_stream(path).chunks())


def test_a_later_start_reads_through_until_all_ids_are_known(tmp_path):
    ids = np.array([[30, 10, 20], [10, 20, 30]])
    stream = open_edge_stream(ids, relabel=True, chunk_edges=1)
    assert [chunk.src.tolist() for chunk in stream.chunks(1)] == [[1], [2]]
    stream.count()
    assert stream.node_ids.complete
    assert [chunk.src.tolist() for chunk in stream.chunks(2)] == [[2]]


def test_more_ids_than_nodes():
    with pytest.raises(EdgeStreamError, match=said("1 num_nodes=2 num_nodes")):
        list(open_edge_stream(np.array([[5, 6], [6, 7]]), relabel=True, num_nodes=2).chunks())
    assert open_edge_stream(np.array([[5, 6], [6, 7]]), relabel=True, num_nodes=9).count() == (9, 2)


def test_strings_after_integers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{i} {i + 1}\n" for i in range(100)) + "x 5\n")
    with pytest.raises(EdgeStreamError, match=said("101 'x' 64 id_type='string'")):
        list(open_edge_stream(path, relabel=True).chunks())
    stream = open_edge_stream(path, relabel=True, id_type="string")
    assert stream.count() == (102, 101)
    assert np.asarray(stream.node_ids)[-1] == "x"
    path.write_text("07 7\n")
    assert open_edge_stream(path, relabel=True, id_type="string").count() == (2, 1)
    assert open_edge_stream(path, relabel=True, id_type="integer").count() == (1, 1)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,b\n\xff\xfe,c\n")
    with pytest.raises(EdgeStreamError, match=said("2 UTF-8")):
        list(open_edge_stream(tmp_path / "a.csv", relabel=True).chunks())


@pytest.mark.parametrize("ids", [[[3, 9], [9, 4]], [["x", "yy"], ["yy", "z"]]])
def test_node_ids_are_saved_and_loaded(tmp_path, ids):
    table = pa.table({"src": ids[0], "dst": ids[1]})
    pq.write_table(table, tmp_path / "a.parquet")
    stream = open_edge_stream(tmp_path / "a.parquet", relabel=True)
    stream.count()
    loaded = NodeIds.load(stream.node_ids.save(tmp_path / "ids.npy"))
    assert np.asarray(loaded).tolist() == np.asarray(stream.node_ids).tolist()
    assert len(loaded) == 3
    assert loaded.complete
    assert loaded.index_of(ids[0]).tolist() == [0, 1]
    with pytest.raises(ValueError, match="does not appear in the edges"):
        loaded.index_of([ids[0][0], ids[0][0] * 50])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.parquet", "ids.npy"]


def test_node_ids_survive_pickling():
    stream = open_edge_stream(np.array([[7, 5], [5, 9]]), relabel=True)
    stream.count()
    copied = pickle.loads(pickle.dumps(stream))
    assert copied.node_ids.index_of([9]).tolist() == [2]
    assert pairs_of(copied) == [(0, 1), (1, 2)]


def test_loading_what_is_not_there(tmp_path):
    (tmp_path / "ids.npy").write_text("no")
    np.save(tmp_path / "floats.npy", np.zeros(3))
    for name in ("ids.npy", "floats.npy", "missing.npy"):
        with pytest.raises(EdgeStreamError, match=said(f"{name} node ids")):
            NodeIds.load(tmp_path / name)


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 300)), min_size=1, max_size=3000))
def test_numbers_go_by_first_appearance(edges):
    array = np.array(edges, np.int64)
    node_ids = NodeIds()
    halves = [node_ids.encode(part[:, 0], part[:, 1]) for part in np.array_split(array, 2)]
    numbers = {}
    wanted = [(numbers.setdefault(u, len(numbers)), numbers.setdefault(v, len(numbers))) for u, v in edges]
    got = np.concatenate([np.stack(half, 1) for half in halves])
    assert got.tolist() == [list(edge) for edge in wanted]
    assert np.asarray(node_ids).tolist() == list(numbers)


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=2)), min_size=1, max_size=300))
def test_strings_go_by_first_appearance(edges):
    node_ids = NodeIds()
    half = len(edges) // 2
    got = []
    for part in (edges[:half], edges[half:]):
        ends = [Strings.of([edge[end] for edge in part]) for end in range(2)]
        got += [list(edge) for edge in zip(*(end.tolist() for end in node_ids.encode(*ends)), strict=True)]
    numbers = {}
    assert got == [[numbers.setdefault(u, len(numbers)), numbers.setdefault(v, len(numbers))] for u, v in edges]
    assert len(node_ids) == len(numbers)


def test_ids_asked_for_are_never_rounded():
    large = open_edge_stream(np.array([[2**63, 1], [2**63 + 5, 2**63]], np.uint64), relabel=True)
    large.count()
    assert large.node_ids.index_of([1, 2**63, 2**63 + 5]).tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match=said("64 bits sign")):
        large.node_ids.index_of([-1, 2**63])
    for ids in ([7.9], np.array([1.0]), [[1]]):
        with pytest.raises(ValueError, match="must be a list of whole numbers"):
            large.node_ids.index_of(ids)
    assert large.node_ids.index_of([]).tolist() == []
