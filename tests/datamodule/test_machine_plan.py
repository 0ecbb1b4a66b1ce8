"""What machines hold and ask of each other, as `gnnscale plan` counts it, against plain loops over the batches."""

import logging
from contextlib import closing

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.datamodule.machine_plan import Machines
from lightning_gnnscale.edge_stream import lfr_graph
from lightning_gnnscale.loader import RankPlace, rank_of_parts
from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.remote.batch_group import pack_group
from lightning_gnnscale.strategy import GradientAveraging, ModelAveraging
from tests.tiers import first

NODES, DIM = 2000, 6
BATCHES = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 100, "seed": 7}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    graph = lfr_graph(NODES, 20_000, seed=3)
    stream, masks = graph.stream(), graph.masks()
    arrays = {"features": np.random.default_rng(0).random((NODES, DIM), np.float32), "masks": masks}
    parts = gs.partition(stream, "spring", 4, masks=masks)
    return write_partition_store(tmp_path_factory.mktemp("plan") / "s", stream, parts, labels=graph.labels(), **arrays)


def store_stream():
    return lfr_graph(NODES, 20_000, seed=3).stream()


def batches_of(data, rank, ranks, weights) -> list:
    with closing(data.trial_loader(RankPlace(rank, ranks), weights)) as loader:
        return list(loader)


def part_of(store: PartitionStore, node: int) -> int:
    return next(part for part in range(store.num_parts) if node < store.part_offsets[part + 1])


@first(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_owners_ask_each_other_for_what_their_batches_read(store, devices):
    data, weights = gs.PartitionDataModule(store, rows="owners", **BATCHES), GradientAveraging()
    rows = Machines(2, devices, batches=100, embedding_dim=3).plan(data, weights)
    owner = data.owners(2 * devices, weights) // devices
    away, read, received, given = np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2)
    for machine in range(2):
        for batch in batches_of(data, machine * devices, 2 * devices, weights):  # its first rank stands for all
            for place, node in enumerate(batch.n_id.tolist()):
                holder = owner[part_of(store, node)]
                read[machine] += 1
                if holder != machine:
                    sampled = batch.indptr[place + 1] - batch.indptr[place] if place + 1 < len(batch.indptr) else 0
                    size, learned = 4 * (DIM + int(sampled)), 12
                    away[machine] += 1
                    received[machine] += devices * (size + learned)
                    given[machine] += devices * learned  # its gradient
                    given[holder] += devices * (size + learned)
                    received[holder] += devices * learned
    assert [row.away_share for row in rows] == pytest.approx(away / read)
    assert [row.received_bytes for row in rows] == received.tolist()
    assert [row.sent_bytes for row in rows] == given.tolist()
    assert [row.link_s for row in rows] == pytest.approx(np.maximum(received, given) * 8e-9)
    assert [row.parts for row in rows] == [tuple(np.flatnonzero(owner == one).tolist()) for one in range(2)]
    assert sum(row.num_targets for row in rows) == store.masks["train"].sum()
    assert {row.role for row in rows} == {"trains"}
    edges, learned = store.num_edges * store.csc.indices.itemsize, 36 * NODES
    assert sum(row.held_bytes for row in rows) == edges + NODES * (8 + 4 * DIM) + learned


@first(1)
@pytest.mark.parametrize("rows", ["auto", "owners"])
def test_machines_that_prepare_send_groups_of_batches(store, rows):
    source, weights = gs.RayWorkers(batches_per_group=2), GradientAveraging()
    data = gs.PartitionDataModule(store, source=source, rows=rows, **BATCHES)
    trainer, *preparing = Machines(preparing=2, batches=100).plan(data, weights)
    batches = batches_of(data, 0, 1, weights)
    groups = [pack_group(batches[first : first + 2]) for first in range(0, len(batches), 2)]
    assert trainer.received_bytes == sum(group.num_bytes + len(group.union) * 4 * DIM for group in groups)
    assert (trainer.role, trainer.parts, trainer.held_bytes, trainer.away_share) == ("trains", (), 0, None)
    assert [row.role for row in preparing] == ["prepares"] * 2
    assert sorted(part for row in preparing for part in row.parts) == [0, 1, 2, 3]
    asked = sum(row.received_bytes for row in preparing)
    assert sum(row.sent_bytes for row in preparing) == trainer.received_bytes + asked
    assert (asked > 0) == (rows == "owners") == all(row.away_share > 0 for row in preparing)


def test_chunks_whose_seeds_are_of_a_part_are_made_where_it_is_held(store):
    options = {"source": gs.RayWorkers(batches_per_group=2), "rows": "owners", "scope": "graph"}
    plans = {}
    for order in ("graph", "part"):
        data = gs.PartitionDataModule(store, seed_order=order, **options, **BATCHES)
        plans[order] = Machines(preparing=2, batches=100).plan(data, GradientAveraging())[1:]
        assert [row.parts for row in plans[order]] == [(0, 1), (2, 3)]
    for mixed, by_part in zip(plans["graph"], plans["part"], strict=True):
        assert 0 < by_part.away_share < mixed.away_share


def test_parts_that_keep_to_themselves_ask_nothing(store):
    data = gs.PartitionDataModule(store, **BATCHES)
    rows = Machines(2).plan(data, ModelAveraging())
    assert [row.received_bytes for row in rows] == [0, 0] and [row.parts for row in rows] == [(0, 2), (1, 3)]
    counts = [int(store.masks["train"][store.part_offsets[p] : store.part_offsets[p + 1]].sum()) for p in range(4)]
    assert [row.num_targets for row in rows] == [counts[0] + counts[2], counts[1] + counts[3]]
    halos = store.part_rows.sum() - NODES
    assert halos > 0
    edges = store.num_edges * store.csc.indices.itemsize
    assert sum(row.held_bytes for row in rows) == edges + NODES * 8 + (NODES + halos) * 4 * DIM


def test_parts_made_for_two_machines_are_owned_by_them(tmp_path, store, caplog):
    made = gs.partition(store_stream(), "spring", 4, num_machines=2)
    arrays = {"masks": {"train": np.arange(NODES) < 400}, "labels": np.zeros(NODES, np.int64)}
    for_two = write_partition_store(tmp_path / "two", store_stream(), made, **arrays)
    data, weights = gs.PartitionDataModule(for_two, scope="graph", **BATCHES), GradientAveraging()
    assert [row.parts for row in Machines(2).plan(data, weights)] == [(0, 1), (2, 3)]
    assert data.owners(2, weights).tolist() == [0, 0, 1, 1]
    counts = np.add.reduceat(for_two.masks["train"], for_two.part_offsets[:-1], dtype=np.int64)
    assert np.array_equal(data.owners(3, weights), rank_of_parts(counts, np.diff(for_two.part_offsets), 3))
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        for ranks, told in ((1, 0), (2, 0), (4, 0), (3, 1)):
            caplog.clear()
            data._tell_machines("graph", RankPlace(0, ranks))
            assert len(caplog.records) == told
    assert "the store's parts are for 2 machines, and 1 with 3 ranks train: ranks own ranges" in caplog.text
    prepared = gs.PartitionDataModule(for_two, source=gs.RayWorkers(), rows="owners", **BATCHES)
    assert [row.parts for row in Machines(preparing=2).plan(prepared, weights)][1:] == [(0, 1), (2, 3)]


def test_machines_are_told_by_the_command_line(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "recipe=distdgl", f"store={store.root}", "trainer.devices=1"]
    main(words)
    assert "machines" not in capsys.readouterr().out
    main([*words, "trainer.num_nodes=2"])
    told = capsys.readouterr().out
    assert "machines, in an epoch" in told and told.count("trains") == 2 + 1  # and the last line
    assert "travel in an epoch; at 1 Gbit/s the busiest link takes" in told
    main(["plan", "recipe=armada", "dataset=synthetic", "trainer.devices=1", "machines.preparing=2"])
    assert "machines are counted on a store that exists: make it with `gnnscale partition`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["machines.preparing=-1"], "machines.preparing must be an integer of at least 0, got -1"),
        (["machines.link_gbit=0"], "machines.link_gbit must be a number > 0, got 0"),
        (["machines.batches=0"], "machines.batches must be an integer of at least 1, got 0"),
        (["machines.preparing=2"], "machines.preparing=2 machines make batches for source=ray alone: set source=ray"),
    ],
)
def test_bad_settings_of_machines_are_one_line(store, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "recipe=distdgl", f"store={store.root}", "trainer.devices=1", *words])
    assert message in capsys.readouterr().err
