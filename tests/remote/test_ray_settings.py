"""Settings of Ray's workers, and what is reported in one line before anything starts."""

import socket
import sys

import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.train_loader import source_settings
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import RankPlace
from lightning_gnnscale.loader.source_settings import Processes, TaskGraphs
from lightning_gnnscale.partition_store.disk import WriteBudget
from lightning_gnnscale.remote.cluster import check_answers
from tests.says import said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers 1 0"),
        ({"credits": 0}, "credits 1 0"),
        ({"cache_rows": -1}, "cache_rows 0 -1"),
        ({"cache_policy": "belady"}, "cache_policy lru sieve 'belady'"),
        ({"timeout_s": 0}, "timeout_s > 0 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.RayWorkers(**options)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (gs.RayWorkers, "worker_memory_bytes"),
        (gs.RayWorkers, "store_bytes"),
        (Processes, "queue_bytes"),
        (TaskGraphs, "queue_bytes"),
        (WriteBudget, "block_bytes"),
    ],
)
def test_a_size_is_a_number_or_a_text(settings, name):
    assert getattr(settings(**{name: "1GiB"}), name) == 1 << 30
    with pytest.raises(ValueError, match=said(f"{name} bytes 24GiB 500MB 8g 'much'")):
        settings(**{name: "much"})


def test_workers_that_ask_owners_are_settings_of_their_own():
    plain, owners = gs.RayWorkers(batches_per_group=3), gs.OwnerReads(replicate_bytes="1MiB")
    asking = plain.asking(owners)
    assert (asking.owners, asking.batches_per_group, plain.owners) == (owners, 3, None)


def test_the_name_stands_for_the_defaults():
    assert source_settings("ray") == gs.RayWorkers()
    assert gs.RayWorkers(num_workers=3, batches_per_group=4).batches_ahead == 24


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(GNNScaleError, match=said('installed pip "lightning_gnnscale[ray]"')):
        gs.RayWorkers().connect(RankPlace())


def test_ranks_on_several_machines_need_an_address():
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    with pytest.raises(GNNScaleError, match=said("`ray start`")):
        gs.RayWorkers().connect(RankPlace(0, 4, 0, 0, 2))


def test_every_rank_is_told_what_rank_0_found():
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    with pytest.raises(GNNScaleError, match=said("Ray cluster answers")):
        gs.RayWorkers(address="x:1").connect(RankPlace(1, 2, 0, 1, 2, lambda value: "no Ray cluster answers at x:1"))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["refuses", "is mute"])
def test_an_address_that_does_not_answer_is_told_within_its_time(kind):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "is mute":
            server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(GNNScaleError, match=said(f"{address} 0.3")) as caught:
            check_answers(address, 0.3)
        assert "\n" not in str(caught.value)


def test_an_address_is_host_and_port():
    with pytest.raises(GNNScaleError, match=said('"host:port" "auto" null \'nowhere\'')):
        check_answers("nowhere", 0.1)
