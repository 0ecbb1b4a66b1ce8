"""Node types with features of their own from Ray's workers:

the same batches bit for bit, cached rows of every width.
"""

from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.typed_rows import as_rows, indexed, write_typed

import lightning_gnnscale as gs
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partition_store.features import SparseRows
from lightning_gnnscale.remote.coordinator_link import table_of
from lightning_gnnscale.remote.held_rows import DistributedFeatures, HeldFeatures, HeldNodes, PartOwners
from lightning_gnnscale.remote.versioned_cache import TrainerCache, WorkerView
from tests.says import said

INST = 2
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")


@pytest.fixture(scope="module", params=[False, True, pytest.param("bfloat16", marks=pytest.mark.sweep)])
def store(request, tmp_path_factory):
    return write_typed(tmp_path_factory.mktemp("node_types") / "store", quantised=request.param)


def contents(batch) -> dict:
    """Everything in a batch, comparable bit for bit."""
    held = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    told = {name: (value.dtype, value.numpy().tobytes()) for name, value in held.items()}
    dtypes = [getattr(table, "dtype", None) for table in batch.x.tables]
    return told | {
        "x": as_rows(batch.x),
        "node_type": (batch.x.node_type.dtype, batch.x.node_type.tolist()),
        "dtypes": dtypes,
    }


def loader_of(store, source, **options):
    settings = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 16, "seed": 1} | options
    dm = gs.PartitionDataModule(store=store, source=source, **settings)
    dm.setup("fit")
    return dm.train_dataloader()


CASES = {
    "a part": ({"scope": "part"}, {}),
    "a part by edge type": ({"scope": "part", "sampler": gs.NeighborSampler({"*": [3, 2]})}, {"cache_rows": 60}),
    "groups across parts": ({"scope": "graph"}, {"batches_per_group": 3, "cache_rows": 60}),
    "chunks of parts": ({"scope": "part", "interleave_parts": 2}, {"cache_rows": 60, "cache_policy": "sieve"}),
    "owners": ({"scope": "graph", "rows": gs.OwnerReads(replicate_bytes=2000)}, {"cache_rows": 60}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_workers_change_no_bit(pool, store, case):
    options, workers = CASES[case]
    ray, local = (
        loader_of(store, gs.RayWorkers(address="auto", **workers), **options),
        loader_of(store, "threads", **options | {"rows": "auto"}),
    )
    asked = 0
    try:
        for epoch in (0, 1):
            for one in (ray, local):
                one.set_epoch(epoch)
            found, expected = list(map(contents, ray)), list(map(contents, local))
            assert found == expected and len(found) > 3
            asked += sum(sum(map(len, one["x"])) for one in expected)
        source = ray._source
        assert 0 < source.rows_received <= source.rows_asked <= asked
        assert (source.rows_received < source.rows_asked) == ("cache_rows" in workers)
        assert workers.get("batches_per_group", 1) > 1 or source.rows_asked == asked, (
            "nodes without features do not count"
        )
        assert source.bytes_received > source.row_bytes > 0
    finally:
        ray.close()
        local.close()


@given(
    capacity=st.integers(1, 40),
    spare=st.integers(1, 8),
    policy=st.sampled_from(["lru", "sieve"]),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_cached_rows_of_node_types_are_those_of_the_store(store, capacity, spare, policy, weighted, seed):
    features, random = store.features.raw, np.random.default_rng(seed)
    cache = TrainerCache(store.num_nodes, capacity, 0, "", policy, spare, node_types=table_of(features).node_types)
    view, counts = WorkerView(store.num_nodes), Counter()
    open_requests = []
    for _ in range(12):
        node_types = random.choice(4, random.integers(1, 4), replace=False)  # now of some node types, now of others
        near = np.flatnonzero(np.isin(store.node_type(np.arange(store.num_nodes)), node_types))
        union = random.permutation(near)[: random.integers(0, 30)]
        open_requests.append((cache.begin("worker"), union))
        while open_requests and random.random() < 0.7:
            update, nodes = open_requests.pop(0)
            version, missing = view.missing(update, nodes)
            weight = random.integers(0, 9, len(nodes)) if weighted else None
            sent = features.read(nodes[missing])
            rows = cache.complete(update.request, version, nodes, missing, sent, weight=weight)
            whole = features.read(nodes)
            assert np.array_equal(rows.node_type, whole.node_type) and same_tables(rows.tables, whole.tables)
            counts["asked"] += whole.num_featured
            counts["sent"] += sent.num_featured
    assert (cache.counts.rows_asked, cache.counts.rows_sent) == (counts["asked"], counts["sent"])
    assert not np.any(store.node_type(cache._contents.ids()) == INST), "no row is kept that is none"
    held = cache._slots
    assert held._num_used.sum() - held._num_free.sum() <= capacity + spare


def same_tables(found, expected) -> bool:
    def raw(table):
        parts = (table.indptr, table.indices, table.data) if isinstance(table, SparseRows) else (table,)
        return None if table is None else [(part.dtype, part.shape, part.tobytes()) for part in parts]

    return list(map(raw, found)) == list(map(raw, expected))


def test_rows_of_node_types_come_from_all_owners_in_order(store):
    offsets, owner_of, replicated = store.part_offsets, ["a", "b", "a"], np.arange(0, store.num_nodes, 9)
    raw, told = store.features.raw, []

    def nodes_of(owner):
        return HeldNodes(offsets, [part for part, name in enumerate(owner_of) if name == owner], replicated)

    held = {owner: HeldFeatures.read(raw, nodes_of(owner)) for owner in "ab"}

    def ask(owner, nodes):
        told.append(len(nodes))
        answer = Future()
        answer.set_result(held[owner].answer(nodes))
        return answer

    table = DistributedFeatures.of(store.features, held["b"], PartOwners(offsets, owner_of), ask)
    for nodes in (np.random.default_rng(0).permutation(store.num_nodes), np.empty(0, np.int64), replicated):
        rows = table.read(nodes)
        assert np.array_equal(rows.node_type, store.node_type(nodes)) and as_rows(rows) == indexed(store, nodes)
        dtypes = [None if own is None else own.dtype for own in store.features.tables]
        assert [own if own is None else getattr(own, "data", own).dtype if isinstance(own, SparseRows) else own.dtype
                for own in rows.tables] == dtypes  # fmt: skip
    assert len(told) == 1, "replicated rows are at hand"
    taken = []
    table.read(np.arange(9), lambda shape, dtype: taken.append(shape) or np.empty(shape, dtype))
    assert len(taken) == (3 if store.features.storage else 0)
    assert held["b"].num_bytes < held["a"].num_bytes + held["b"].num_bytes < 2 * raw.nbytes + 10_000
    short = DistributedFeatures.of(store.features, held["b"], table.owners, lambda owner, nodes: ask(owner, nodes[1:]))
    with pytest.raises(GNNScaleError, match=said("2 feature rows sent 1")):
        short.read(np.array([1, 2]))
