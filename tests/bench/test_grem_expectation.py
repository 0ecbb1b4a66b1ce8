import itertools
import math

import numpy as np
import pytest

from benchmarks.grem_expectation import expected_greedy_cut
from tests.partitioner.graphs import stream_of
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EDGES = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 4), (4, 5), (4, 6), (5, 6), (1, 6), (2, 6)]
REFERENCE = np.array([0, 0, 0, 1, 2, 1, 2])


def weight(chunk, chunks):
    """Of a chunk among those that meet a node, where counts are averaged with those of each further one."""
    met = sorted(set(chunks))
    after = len(met) - 1 - met.index(chunk)
    return 0.5 ** (after if chunk == met[0] else after + 1)


def placements(share, refine=False):
    """Probability of each part for each node, and the expected cut edges of its own, by listing all samples."""
    num_chunks = round(1 / share)
    probabilities, cut = np.zeros((7, 3)), np.zeros(7)
    for v in range(7):
        parts = [REFERENCE[b if a == v else a] for a, b in EDGES if v in (a, b)]
        for chunks in itertools.product(range(num_chunks), repeat=len(parts)):
            count = [0.0] * 3
            for part, chunk in zip(parts, chunks, strict=True):
                count[part] += weight(chunk, chunks) if refine else chunk == min(chunks)
            best = [b for b in range(3) if count[b] == max(count)]
            for b in best:
                probability = num_chunks ** -len(parts) / len(best)
                probabilities[v, b] += probability
                cut[v] += probability * (len(parts) - parts.count(b))
    return probabilities, cut


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_equals_the_mean_over_all_samples(share, refine):
    samples = 40_000
    probabilities, cut = placements(share, refine)
    stream = stream_of(EDGES, 7)
    degree = np.bincount(np.ravel(EDGES))
    bound = 5 * math.sqrt((degree**2).sum() / samples) / (4 * len(EDGES))  # five standard errors
    found = expected_greedy_cut(stream, REFERENCE, 3, share, samples=samples, refine=refine)
    assert abs(found - cut.sum() / (2 * len(EDGES))) < bound
    both = 1 - np.mean([probabilities[u] @ probabilities[v] for u, v in EDGES])
    found = expected_greedy_cut(stream, REFERENCE, 3, share, samples=samples, ends=2, refine=refine)
    # A frequency is off by at most 5 / (2 sqrt(samples)); so is each factor of a product of two probabilities, in 3
    # parts.
    assert abs(found - both) < 2 * 3 * 5 / (2 * math.sqrt(samples))


def test_a_node_that_sees_all_neighbors_cuts_what_the_majority_leaves():
    edges = [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (2, 3)]
    reference = np.array([0, 0, 0, 1, 1, 1])
    for ends in (1, 2):
        found = expected_greedy_cut(stream_of(edges, 6), reference, 2, 1.0, ends=ends, samples=3)
        assert found == pytest.approx(1 / 7, abs=1e-6)  # probabilities are kept in float32


def test_smaller_chunks_are_expected_to_cut_more():
    rng = np.random.default_rng(0)
    pairs = np.unique(np.sort(rng.integers(0, 50, (4000, 2)) + 50 * rng.integers(0, 2, (4000, 1)), 1), axis=0)
    across = np.stack([rng.integers(0, 50, 200), rng.integers(50, 100, 200)], 1)
    stream = stream_of(np.concatenate([pairs[pairs[:, 0] < pairs[:, 1]], across]), 100)
    reference = np.arange(100) // 50
    cuts = [expected_greedy_cut(stream, reference, 2, share) for share in (1.0, 0.2, 0.05, 0.01)]
    assert cuts == sorted(cuts)
    assert cuts[-1] > 1.2 * cuts[0]


def test_without_edges_nothing_is_cut_and_bad_arguments_are_named():
    assert expected_greedy_cut(stream_of([], 4), np.zeros(4, int), 1, 0.1) == 0.0
    stream = stream_of(EDGES, 7)
    for arguments, message in (
        ((REFERENCE, 3, 0.0), r"chunk_edges_share must be in \(0, 1\], got 0.0"),
        ((REFERENCE, 2, 0.1), r"part_id must lie in \[0, 2\), got 0 to 2"),
        ((REFERENCE[:4], 3, 0.1), r"part_id must be \(7,\) integers, got \(4,\) int64"),
    ):
        with pytest.raises(ValueError, match=message):
            expected_greedy_cut(stream, *arguments)
    with pytest.raises(ValueError, match=said("ends 1 2 3")):
        expected_greedy_cut(stream, REFERENCE, 3, 0.1, ends=3)
    with pytest.raises(ValueError, match=said("samples >= 1 0")):
        expected_greedy_cut(stream, REFERENCE, 3, 0.1, samples=0)
