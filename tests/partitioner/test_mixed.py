import numpy as np
import pytest

from lightning_gnnscale.partitioner import partition
from tests.partitioner.graphs import stream_of
from tests.says import said

NUM_CLIQUES, SIZE = 24, 8


def cliques():
    """A ring of cliques: each is a natural piece."""
    inside = [(SIZE * c + u, SIZE * c + v) for c in range(NUM_CLIQUES) for u in range(SIZE) for v in range(u)]
    ring = [(SIZE * c, SIZE * ((c + 1) % NUM_CLIQUES) + 1) for c in range(NUM_CLIQUES)]
    return stream_of(inside + ring, NUM_CLIQUES * SIZE, layout="once")


def test_a_part_is_a_union_of_as_many_pieces():
    pieces = partition(cliques(), "streaming_multilevel", 24, seed=3).part_id
    p = partition(cliques(), "mixed", 4, seed=3, pieces=6)
    part_of_piece = [np.unique(p.part_id[pieces == piece]).tolist() for piece in range(24)]
    assert all(len(parts) == 1 for parts in part_of_piece)
    assert np.bincount(np.concatenate(part_of_piece), minlength=4).tolist() == [6] * 4
    assert p.quality.node_balance <= 1.03
    assert p.part_id.dtype == np.int32


def test_one_piece_a_part_is_the_method_itself_with_parts_renamed():
    own = partition(cliques(), "metis", 4, seed=1).part_id
    mixed = partition(cliques(), "mixed", 4, seed=1, of="metis", pieces=1).part_id
    assert len(set(zip(own.tolist(), mixed.tolist(), strict=True))) == 4


@pytest.mark.sweep
def test_the_cut_lies_between_that_of_the_method_and_of_random_nodes():
    cut = {m: partition(cliques(), m, 4).quality.edge_cut_ratio for m in ("streaming_multilevel", "random")}
    mixed = [partition(cliques(), "mixed", 4, pieces=pieces).quality.edge_cut_ratio for pieces in (1, 6, 48)]
    assert cut["streaming_multilevel"] == mixed[0] <= mixed[1] < mixed[2]
    assert mixed[1] < 0.2 * cut["random"]
    assert mixed[2] == pytest.approx(cut["random"], rel=0.15)


def test_the_seed_decides_how_pieces_are_dealt():
    one, same, other = (partition(cliques(), "mixed", 4, seed=seed, pieces=6).part_id for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_balances_and_options_reach_the_method():
    train = np.arange(NUM_CLIQUES * SIZE) % 2 == 0
    p = partition(
        cliques(), "mixed", 4, pieces=6, masks={"train": train}, balance={"nodes": 1.1, "train": 1.1}, passes=2
    )
    assert p.quality.train_balance <= 1.1
    assert p.options["passes"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pieces": 0}, "partitioner.pieces [1, 48] 4 0"),
        ({"pieces": 2.5}, "partitioner.pieces [1, 48] 4 2.5"),
        ({"pieces": 49}, "partitioner.pieces [1, 48] 4 49"),
        ({"of": "best"}, "partitioner 'best'"),
        ({"passez": 2}, "partitioner 'streaming_multilevel' passez"),
    ],
)
def test_bad_options_are_refused_before_work_starts(options, message):
    with pytest.raises(ValueError, match=said(message)):
        partition(cliques(), "mixed", 4, **options)
