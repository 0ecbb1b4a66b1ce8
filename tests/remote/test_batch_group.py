"""Groups of batches: what comes back is what `BatchMaker.make` gives, bit for bit, and what travels is lean."""

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.parts import small_world

from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.loader.batch_maker import BatchMaker, BatchOrder
from lightning_gnnscale.loader.batch_source import BatchKey
from lightning_gnnscale.loader.staged_part import PartStager, node_values
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import CSRFeatures, DenseFeatures
from lightning_gnnscale.remote import pack_group, unpack_group, unpack_one
from lightning_gnnscale.remote.batch_group import narrowed, unite, widened
from lightning_gnnscale.sampler import ClusterSampler, FullBatchSampler, LayerwiseSampler, NeighborSampler, SaintSampler
from lightning_gnnscale.sampler.minibatch import MiniBatch, SparseFeatures
from tests.says import said
from tests.tiers import each_value

WORLD = small_world()
SAMPLERS = {
    "neighbor": NeighborSampler([4, 3]),
    "replace": NeighborSampler([4, 3], replace=True),
    "layerwise": LayerwiseSampler([20, 20]),
    "full": FullBatchSampler(),
    "cluster": ClusterSampler(4, 2),
    "saint": SaintSampler("walk", num_roots=9, batches_per_pass=3, num_norm_samples=2),
}


def sparse_features(seed=0) -> CSRFeatures:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, WORLD.csc.num_rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    columns = [np.sort(rng.choice(40, length, replace=False)) for length in lengths]
    return CSRFeatures(indptr, np.concatenate(columns).astype(np.int32), rng.random(indptr[-1], np.float32), dim=40)


FEATURES = {
    "float32": WORLD.features,
    "float16": DenseFeatures(WORLD.features.array[:, :7].astype(np.float16)),
    "uint8": DenseFeatures((WORLD.features.array * 255).astype(np.uint8)),
    "csr": sparse_features(),
    "none": None,
}


def same(one, other) -> bool:
    if isinstance(one, SparseFeatures):
        return isinstance(other, SparseFeatures) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        fits = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return fits and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    return type(one) is type(other) and one == other


def assert_same(one: MiniBatch, other: MiniBatch) -> None:
    for field in fields(MiniBatch):
        assert same(getattr(one, field.name), getattr(other, field.name)), field.name


class Made:
    """Batches of a part with and without their features."""

    def __init__(
        self, sampler, features, load_part=WORLD.load_part, targets=WORLD.targets, labels=None, edges=None, **options
    ):
        nodes = node_values(WORLD.labels if labels is None else labels, WORLD.masks)
        maker = BatchMaker(sampler, features, order=BatchOrder(16), **options)
        stager = PartStager(load_part, {part: targets(part) for part in range(3)}, sampler, nodes, 5, edges or {})
        staged = {part: stager(part) for part in range(3)}
        self.rows = None if features is None else features.read
        sizes = {part: sampler.num_batches(len(targets(part)), 16, False) for part in staged}
        self.keys = [BatchKey(5, 0, part, batch) for part in staged for batch in range(min(3, sizes[part]))]
        self.batches = [maker.make(key, lambda key=key: staged[key.part], fill=False) for key in self.keys]
        self.expected = [maker.make(key, lambda key=key: staged[key.part]) for key in self.keys]


def travelled(group):
    """The group as another machine receives it, in memory that cannot be written to; and the bytes of its arrays."""
    buffers = []
    meta = pickle.dumps(group, 5, buffer_callback=buffers.append)
    copies = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(meta, buffers=copies), len(meta), sum(len(copy) for copy in copies)


def gathered(made: Made, union: np.ndarray):
    return None if made.rows is None else made.rows(union)


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_of_every_sampler_come_back_bit_for_bit(name):
    made = Made(SAMPLERS[name], WORLD.features)
    group, _, _ = travelled(pack_group(made.batches))
    for batch, expected in zip(unpack_group(group, gathered(made, group.union)), made.expected, strict=True):
        assert_same(batch, expected)


@each_value
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_of_every_node_type_come_back_bit_for_bit(name, size):
    made = Made(SAMPLERS["neighbor"], FEATURES[name])
    pool = BufferPool()
    for start in range(0, len(made.batches), size):
        group, _, _ = travelled(pack_group(made.batches[start : start + size]))
        rows = gathered(made, group.union)
        for number in reversed(range(len(group.batches))):  # in any order, each alone
            assert_same(unpack_one(group, number, rows, pool.take), made.expected[start + number])


def test_weights_and_positions_of_edges_and_labels_of_several_columns_come_back():
    labels = np.random.default_rng(1).random((WORLD.csc.num_rows, 3), np.float32)
    weight = np.random.default_rng(2).random(WORLD.csc.num_edges).astype(np.float32)
    made = Made(SAMPLERS["neighbor"], WORLD.features, labels=labels, edges={"edge_weight": weight}, return_e_id=True)
    group, _, _ = travelled(pack_group(made.batches))
    for batch, expected in zip(unpack_group(group, gathered(made, group.union)), made.expected, strict=True):
        assert batch.e_id is not None and batch.y.shape[1] == 3
        assert_same(batch, expected)


def test_whole_graph_batches_share_most_of_their_rows():
    graph = WholeGraph.of(WORLD.csc, 0)
    made = Made(SAMPLERS["neighbor"], WORLD.features, load_part=lambda part: graph)
    group = pack_group(made.batches)
    met = {}
    for batch in made.batches:
        for node in batch.n_id.tolist():
            met.setdefault(node, len(met))
    assert group.union.tolist() == list(met)
    assert len(group.union) < sum(batch.num_nodes for batch in made.batches) / 2


def test_what_travels_beside_rows_is_counted_and_lean():
    graph = WholeGraph.of(WORLD.csc, 0)
    made = Made(SAMPLERS["neighbor"], WORLD.features, load_part=lambda part: graph)
    for size in (1, 4):
        group = pack_group(made.batches[:size])
        _, meta_bytes, array_bytes = travelled(group)
        assert array_bytes == group.num_bytes
        assert meta_bytes < 3000 * size
        nodes = sum(batch.num_nodes for batch in made.batches[:size])
        edges = sum(batch.num_edges for batch in made.batches[:size])
        rows = sum(batch.num_targets + 1 for batch in made.batches[:size])
        beside = nodes - made.batches[0].num_nodes  # positions; the first batch needs none
        # What is below 65,536 has two bytes at most. An id has four, a degree two, a label one, and three masks a bit.
        assert group.num_bytes <= 2 * (edges + rows + beside) + 7 * len(group.union) + 3 * (len(group.union) // 8 + 1)


def test_values_too_large_for_32_bits_travel_whole():
    batch = Made(SAMPLERS["neighbor"], None).batches[0]
    batch = replace(batch, n_id=batch.n_id + (1 << 40), y=batch.y - (1 << 50), degree=batch.degree << 20)
    group, _, _ = travelled(pack_group([batch]))
    assert group.union.dtype == np.int64
    assert_same(unpack_one(group, 0, None), batch)


def test_batches_of_parts_that_disagree_about_a_node_keep_their_own_values():
    made = Made(SAMPLERS["neighbor"], None)
    one = made.batches[0]
    other = replace(one, part=one.part + 1, degree=one.degree + 1, y=None, train_mask=~one.train_mask)
    group, _, _ = travelled(pack_group([one, other]))
    assert set(group.node_values) == {"val_mask", "test_mask"}
    for batch, expected in zip(unpack_group(group, None), (one, other), strict=True):
        assert_same(batch, expected)


def test_edges_in_another_order_travel_whole():
    batch = Made(SAMPLERS["neighbor"], None).batches[0]
    batch = replace(batch, edge_index=batch.edge_index.flip(1).contiguous())
    group, _, _ = travelled(pack_group([batch]))
    assert group.batches[0].sources is None
    assert_same(unpack_one(group, 0, None), batch)


def test_rows_of_a_batch_alone_become_its_own_only_where_they_can_be_written_to():
    made = Made(SAMPLERS["neighbor"], WORLD.features)
    group = pack_group(made.batches[:1])
    rows = gathered(made, group.union)
    assert unpack_one(group, 0, rows).x.data_ptr() == rows.ctypes.data
    rows.flags.writeable = False
    assert unpack_one(group, 0, rows).x.data_ptr() != rows.ctypes.data


@given(st.lists(st.lists(st.integers(0, 60), max_size=40), min_size=1, max_size=4), st.sampled_from([1, 97, 1 << 45]))
def test_the_union_is_in_order_of_first_appearance(lists, step):
    ids = [np.array(own, np.int64) * step for own in lists]  # wide steps: by hash
    union, positions = unite(ids)
    assert union.tolist() == list(dict.fromkeys(int(node) for own in ids for node in own))
    for own, places in zip(ids, positions, strict=True):
        assert np.array_equal(union[places], own)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-200, 300) | st.integers(-40000, 70000)))
def test_integers_travel_as_narrow_as_they_fit(values):
    array = np.array(values, np.int64)
    wire = narrowed(array)
    back = widened(wire, np.empty)
    assert back.dtype == np.int64 and back.tolist() == values
    if values and min(values) >= 0:
        assert wire.values.itemsize == next(size for size in (1, 2, 4, 8) if max(values) < 1 << 8 * size - (size > 2))


def test_empty_batches_and_wrong_rows():
    empty = MiniBatch(
        torch.empty(0, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
        0, 0, 1, degree=torch.empty(0, dtype=torch.int64),
    )  # fmt: skip
    group = pack_group([empty, empty])
    for batch in unpack_group(group, None):
        assert_same(batch, empty)
    with pytest.raises(ValueError, match="at least one batch"):
        pack_group([])
    made = Made(SAMPLERS["neighbor"], WORLD.features)
    with pytest.raises(ValueError, match=said("batches[1] features")):
        pack_group([made.batches[0], made.expected[1]])
    group = pack_group(made.batches[:1])
    with pytest.raises(ValueError, match=said(f"{len(group.union)} 3")):
        unpack_one(group, 0, np.zeros((3, 16), np.float32))
