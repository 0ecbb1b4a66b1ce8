import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from tests.oracles.full_parts import filled
from tests.oracles.spring import simple_edges, spring_parts
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said
from tests.tiers import each_value

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def spring(stream, num_parts, **options):
    return partition(stream, "spring", num_parts, evaluate=False, **options)


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts = data.draw(st.integers(1, num_nodes))
    tau_vol = data.draw(st.sampled_from([None, 0, 2, 3.5, 7, 1e9]))
    beta = data.draw(st.sampled_from([1.0, 1.05, 1.5]))
    # A directed list without any reverse cannot be told from one that lists each edge once: the same edges follow.
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    chunk_edges = data.draw(st.integers(1, 20))
    stream = stream_of(directed_edges, num_nodes, layout=told, chunk_edges=chunk_edges)
    p = spring(stream, num_parts, tau_vol=tau_vol, beta=beta)
    # `auto` may find a short `directed` list to be symmetric by probability, and says so.
    expected = spring_parts(simple_edges(directed_edges, p.notes["layout"]), num_nodes, num_parts, tau_vol, beta)
    assert p.part_id.tolist() == filled(expected, num_parts)


@each_value
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_odd_graphs_equal_the_oracle(name, num_parts):
    num_nodes, edges = ODD[name]
    if num_parts > num_nodes:
        with pytest.raises(ValueError, match=said(f"num_parts [1, {num_nodes}] {num_parts}")):
            spring(stream_of(edges, num_nodes), num_parts)
        return
    p = spring(stream_of(edges, num_nodes), num_parts)
    expected = spring_parts(simple_edges(edges, p.notes["layout"]), num_nodes, num_parts)
    assert p.part_id.tolist() == filled(expected, num_parts)
    assert p.part_id.dtype == np.int32


def random_edges(num_nodes=300, num_edges=900, seed=3):
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.5, num_nodes) + 1
    pairs = rng.choice(num_nodes, (num_edges * 2, 2), p=weight / weight.sum())
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    _, first = np.unique(np.sort(pairs, 1), axis=0, return_index=True)
    return pairs[np.sort(first)][:num_edges]


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".csv", ".parquet"])
def test_file_format_and_chunk_size_change_nothing(tmp_path, suffix):
    edges = random_edges()
    expected = spring_parts([tuple(e) for e in edges.tolist()], 300, 5)
    path = write_edges(stream_of(edges, 300, layout="once"), tmp_path / f"edges{suffix}")
    for chunk_edges in (7, 512, 1 << 20):
        p = spring(open_edge_stream(path, num_nodes=300, layout="once", chunk_edges=chunk_edges), 5)
        assert p.part_id.tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_id_dtype_and_counted_nodes_change_nothing(dtype):
    edges = random_edges()
    edges = np.append(edges, [[299, 0]], axis=0)
    given_count = spring(stream_of(edges, 300), 4)
    counted = spring(stream_of(edges, None, dtype), 4)
    assert counted.part_id.tolist() == given_count.part_id.tolist()


class Killed(Exception):
    pass


def stop_after(saves):
    left = [saves]

    def save(self, phase, arrays):
        original_save(self, phase, arrays)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return save


original_save = Checkpoint.save


@each_value
@pytest.mark.parametrize("layout", ["once", "both_ways", "directed"])
@pytest.mark.parametrize("saves", [1, 3, 6, 8, 11])
def test_resuming_after_a_kill_is_bit_identical(tmp_path, monkeypatch, layout, saves):
    edges = listed([tuple(e) for e in random_edges().tolist()], layout)
    stream = stream_of(edges, 300, chunk_edges=len(edges) // 6 + 1, layout=layout)
    expected = spring(stream, 4).part_id
    options = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}
    monkeypatch.setattr(Checkpoint, "save", stop_after(saves))
    with pytest.raises(Killed):
        spring(stream, 4, **options)
    monkeypatch.setattr(Checkpoint, "save", original_save)
    assert options["checkpoint"].exists()
    read_again = []
    resumed = spring(stream, 4, progress=lambda what, done, total: read_again.append(what), **options)
    assert np.array_equal(resumed.part_id, expected)
    passes = ("degrees", "clustering")
    assert sum(what in passes for what in read_again) == 12 - saves  # six chunks in each of two passes
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_has_a_place_and_leaves_it_empty(tmp_path):
    stream = stream_of(random_edges(), 300)
    for path in (tmp_path, tmp_path / "nothing" / "state.npz"):
        with pytest.raises(ValueError, match=said("partitioner.checkpoint file folder")):
            spring(stream, 4, checkpoint=path)
    (tmp_path / "state.npz.tmp").write_bytes(b"half")  # as a kill leaves it
    spring(stream, 4, checkpoint=tmp_path / "state.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*listed more often")
def test_a_checkpoint_with_scratch_disk_is_not_used_without(tmp_path, monkeypatch):
    edges = random_edges().tolist()
    stream = stream_of(edges + edges[::3], 300, chunk_edges=100)
    for first, then in (("auto", None), (None, "auto")):
        options = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}
        monkeypatch.setattr(Checkpoint, "save", stop_after(len(edges) // 75 + 2))
        with pytest.raises(Killed):
            spring(stream, 4, scratch=first, **options)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        assert options["checkpoint"].exists()
        resumed = spring(stream, 4, scratch=then, **options)
        assert np.array_equal(resumed.part_id, spring(stream, 4, scratch=then).part_id)


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, monkeypatch):
    stream = stream_of(random_edges(), 300, chunk_edges=100)
    path = tmp_path / "state.npz"
    monkeypatch.setattr(Checkpoint, "save", stop_after(10))
    with pytest.raises(Killed):
        spring(stream, 4, checkpoint=path, checkpoint_every=1)
    monkeypatch.setattr(Checkpoint, "save", original_save)
    assert np.array_equal(spring(stream, 5, checkpoint=path).part_id, spring(stream, 5).part_id)
    assert not path.exists()
    path.write_bytes(b"PK not a zip file")
    assert np.array_equal(spring(stream, 5, checkpoint=path).part_id, spring(stream, 5).part_id)


@pytest.mark.parametrize("name", ["notes.txt", "array.npy", "arrays.npz"])
def test_a_file_that_is_no_checkpoint_is_refused_and_left(tmp_path, name):
    path = tmp_path / name
    if name == "notes.txt":
        path.write_text("mine")
    else:
        save = np.save if name == "array.npy" else np.savez
        save(path, np.arange(5))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=said(f"partitioner.checkpoint {name}")):
        spring(stream_of(random_edges(), 300), 5, checkpoint=path, checkpoint_every=1)
    assert path.read_bytes() == before


def test_a_graph_that_changes_between_passes_is_an_error():
    edges = np.ascontiguousarray(random_edges().T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=300, layout="once")

    def rewire(what, done, total):
        if what == "degrees":
            edges[1, 5] = (edges[1, 5] + 1) % 300

    with pytest.raises(EdgeStreamError, match="changed while they were partitioned"):
        spring(stream, 4, progress=rewire)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": float("nan")}, "partitioner.beta >= 1 nan"),
        ({"beta": 0.9}, "partitioner.beta"),
        ({"tau_vol": float("inf")}, "partitioner.tau_vol"),
        ({"tau_vol": -1}, "partitioner.tau_vol"),
        ({"tau_factor": "much"}, "partitioner.tau_factor"),
        ({"checkpoint_every": 0}, "partitioner.checkpoint_every"),
        ({"balance": {"gone": 1.05}}, "mask 'gone'"),
        ({"tau": 1}, "tau tau_vol tau_factor"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=said(message)):
        spring(stream_of([(0, 1)], 2), 2, **options)


@pytest.mark.filterwarnings("default::UserWarning")
def test_an_oversized_cluster_is_reported():
    clique = [(u, v) for u in range(20) for v in range(u)]
    with pytest.warns(UserWarning, match=said("1 clusters nodes part should")):
        p = spring(stream_of(clique, 24, layout="once"), 4, tau_vol=1e6)
    assert p.notes["oversized_clusters"] == 1
    assert p.notes["largest_cluster"] == 20


def test_wide_volumes_give_the_same_parts(monkeypatch):
    from lightning_gnnscale.partitioner.spring import SpringState

    expected = spring(stream_of(random_edges(), 300), 4).part_id
    original = SpringState.start.__func__

    def wide(cls, degree, max_volume):
        state = original(cls, degree, max_volume)
        return state._replace(volume=state.volume.astype(np.int64))

    monkeypatch.setattr(SpringState, "start", classmethod(wide))
    assert np.array_equal(spring(stream_of(random_edges(), 300), 4).part_id, expected)
