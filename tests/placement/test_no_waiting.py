"""What a gather on a device asks of the host: no value of a tensor, and ids cross once; on CPU tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from buffer_cases import placed, table
from oracles.typed_rows import as_rows, indexed, write_typed
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.placed_training import GatherClock, PlacedTraining
from lightning_gnnscale.placement import cuda_tiers
from lightning_gnnscale.sampler.minibatch import rows_by_node_type
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")
WAITS = ("_local_scalar_dense", "nonzero", "bincount", "unique", "masked_select", "equal")


class NoWaiting(TorchDispatchMode):
    """Refuses operations for which a GPU would make the host wait."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        assert name not in WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def crossings(monkeypatch):
    """The arrays of ids that were sent to the device."""
    sent, found = cuda_tiers.sent, []
    monkeypatch.setattr(cuda_tiers, "sent", lambda ids, device: found.append(len(ids)) or sent(ids, device))
    monkeypatch.setattr(cuda_tiers, "device_of", lambda on, device: torch.device("cpu"))
    return found


@pytest.fixture
def no_kernel(monkeypatch):
    """The interpreter of Triton looks into tensors, as no GPU does."""
    monkeypatch.setattr(cuda_tiers, "gather_tiers_with_triton", lambda *_: None)


@pytest.fixture(scope="module", params=["int8", "int4", "float16"])
def store(request, tmp_path_factory):
    return write_typed(tmp_path_factory.mktemp("node_types") / "store", quantised=request.param)


def on_disk_of(share):
    return placed(60, 1, None, share=0.3, on_disk=share), table(60, 16, "f4")


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("policy", [None, "lru"])
def test_a_gather_waits_for_nothing_where_the_host_knows_the_ids(no_kernel, crossings, share, policy):
    placement, features = on_disk_of(share)
    cache = gs.FeatureCache(9, policy) if policy else None
    buffer = gs.FeatureBuffer(placement, features, on="cuda", cache=cache)
    assert buffer.asks_host == bool(share or policy)
    nodes = np.random.default_rng(0).integers(0, 60, 40)
    with NoWaiting():
        buffer.read(torch.from_numpy(nodes), on_host=nodes)
    if not share and not policy:
        assert crossings == [], "ids on the device stay there"


@pytest.mark.parametrize("asks", [True, False])
def test_ids_of_a_batch_that_the_device_made_come_to_the_host_where_a_read_asks_for_them(asks):
    placed, given = PlacedTraining(gs.PlacementSettings(), gs.NeighborSampler([2])), []
    read = lambda ids, on_host: given.append((ids, on_host)) or "rows"  # noqa: E731
    placed.buffer, placed._clock = SimpleNamespace(asks_host=asks, read=read), GatherClock("cpu")
    batch = SimpleNamespace(n_id=torch.arange(3), made=object(), host_ids=np.arange(3), x=None)
    placed.fill(batch, batch.n_id)
    assert batch.x == "rows" and given[0][0] is batch.n_id
    assert given[0][1] is (batch.host_ids if asks else None)


def test_ids_on_the_device_alone_are_not_waited_for_and_said_later(no_kernel, crossings):
    placement, features = on_disk_of(0.0)
    buffer = gs.FeatureBuffer(placement, features, on="cuda")
    with NoWaiting():
        buffer.read(torch.arange(60))
    assert buffer.hits["local"] == 0, "no kernel ran"
    for bad in (torch.tensor([3, 60]), torch.tensor([-1, 5])):
        with NoWaiting():
            buffer.read(bad)
        with pytest.raises(ValueError, match=said(f"nodes [0, 60) {min(0, int(bad[0]))}")):
            _ = buffer.hits
        assert buffer.hits["local"] == 0, "said once"
    buffer.read(torch.tensor([99]))
    with pytest.raises(ValueError, match=said("nodes [0, 60) 99")):
        buffer.close()
    with pytest.raises(gs.errors.PlacementError, match="is closed"):
        buffer.read(torch.arange(3))


def test_an_id_out_of_range_reads_no_foreign_memory(crossings):
    placement, features = on_disk_of(0.0)
    buffer = gs.FeatureBuffer(placement, features, on="cuda")
    rows = buffer.read(torch.tensor([2, 1000, -5])).numpy()
    assert rows.tobytes() == features.array[[2, 59, 0]].tobytes()


@pytest.mark.parametrize("host_rows", [None, 60])
@pytest.mark.parametrize("known", [True, False])
def test_typed_rows_are_found_on_the_device(store, crossings, host_rows, known):
    """By the device's ids alone, and with the host's: the same rows; ids that are there do not cross again."""
    prob = np.random.default_rng(0).random(store.num_nodes) * store.features.has_row
    groups = [[0, 1]]
    placement = gs.place(prob, 2, 80, 0.1, groups, row_bytes=store.features.row_bytes, host_rows=host_rows)
    buffer = gs.TypedBuffers(placement, store.features, 1, on="cuda")
    random = np.random.default_rng(1)
    for size in (0, 1, 70):
        nodes = random.integers(0, store.num_nodes, size)
        before = len(crossings)
        rows = buffer.read(torch.from_numpy(nodes), on_host=nodes if known else None)
        if host_rows is None:
            assert len(crossings) == before
        assert isinstance(rows.node_type, torch.Tensor)
        assert as_rows(rows_by_node_type(rows)) == indexed(store, nodes)
        assert rows.node_type.tolist() == store.node_type(nodes).tolist()
    assert all(buffer.hits[tier] for tier in ("local", "peer", "host")) and bool(host_rows) == bool(buffer.hits["disk"])
    crossings.clear()
    buffer.read(random.integers(0, store.num_nodes, 50))
    if host_rows is None:
        assert crossings == [50], "ids of the host cross once, not once a node type"
    with pytest.raises(ValueError, match=said(f"node ids [0, {store.num_nodes}) {store.num_nodes}")):
        buffer.read(torch.tensor([0, store.num_nodes]))
    buffer.close()


def test_typed_rows_wait_for_nothing_where_the_host_knows_the_ids(store, crossings, no_kernel):
    placement = gs.place(np.ones(store.num_nodes), 1, 80, 0.1, row_bytes=store.features.row_bytes)
    buffer = gs.TypedBuffers(placement, store.features, on="cuda")
    nodes = np.random.default_rng(1).integers(0, store.num_nodes, 70)
    with NoWaiting():
        buffer.read(torch.from_numpy(nodes), on_host=nodes)
