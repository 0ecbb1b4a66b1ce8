"""Placed features in training: the same batches bit for bit, counted reads, and the dial of locality."""

from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.datamodule import placed_training
from lightning_gnnscale.datamodule.placed_training import RankReads, rank_alphas, read_probability
from lightning_gnnscale.errors import PlacementError, StrategyError
from lightning_gnnscale.placement import PlacementSettings, link_cost
from tests.says import said
from tests.tiers import first

METHODS = ["rule", "ranges", "naive", "random", "degree", "metis", "pagraph"]


def trainer(max_epochs=3, **options):
    return L.Trainer(
        accelerator="cpu", devices=1, max_epochs=max_epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()), **options,
    )  # fmt: skip


def make(store_root, **options) -> gs.PartitionDataModule:
    settings = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 32, "seed": 1, "scope": "graph"} | options
    return gs.PartitionDataModule(store=store_root, **settings)


def trained(dm, callbacks=(), **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes), lr=0.02)
    trainer(callbacks=list(callbacks), **options).fit(model, dm)
    return {name: value.clone() for name, value in model.state_dict().items()}


def last(name: str) -> dict:
    return [event for event in events.recent() if event["event"] == name][-1]


@first(3)
@pytest.mark.parametrize("method", METHODS)
def test_training_through_any_placement_changes_no_bit(store_root, method):
    plain = trained(make(store_root))
    settings = PlacementSettings(method, buffer_share=0.2, alpha=0.2, cache_rows=5)
    placed = trained(make(store_root, rows=settings))
    assert all(torch.equal(plain[name], placed[name]) for name in plain)
    assert last("placement")["method"] == method


def test_reads_are_counted_and_predicted(store_root):
    dm = make(store_root, rows=PlacementSettings(buffer_share=0.25, alpha=0.2, host_rows=400 // 2))
    trained(dm)
    placed, reads = last("placement"), last("reads")
    total = sum(reads[tier] for tier in ("local", "peer", "host", "disk", "cache"))
    assert placed["buffer_rows"] == round(0.25 * 400)
    assert reads["peer"] == reads["cache"] == 0
    assert reads["local"] > 0.25 * total
    for tier in ("local", "host", "disk"):
        assert abs(reads[tier] / total - placed["predicted"][tier]) < 0.05
    assert dm.buffer is None, "the rows are gone with the fit"


@first(1)
@pytest.mark.parametrize(
    "sampler",
    [
        gs.LayerwiseSampler([16, 16]),
        gs.NeighborSampler([4, 3], direction="both"),
        gs.SaintSampler("walk", num_roots=8, walk_length=2, batches_per_pass=6, num_norm_samples=10),
    ],
)
def test_any_sampler_is_placed_by_its_own_samples(store_root, sampler):
    options = {"sampler": sampler, "batch_size": 8, "scope": "auto"}
    host = {}
    for probability in ("auto", "vip"):
        dm = make(store_root, **options, rows=PlacementSettings(buffer_share=0.2, alpha=0, probability=probability))
        trained(dm)
        placed, reads = last("placement"), last("reads")
        host[probability] = reads["host"] / (reads["host"] + reads["local"])
        if probability == "auto":
            assert abs(host["auto"] - placed["predicted"]["host"]) < 0.15
    assert host["auto"] < min(0.8, host["vip"] + 0.02)


def test_ranks_are_told_what_they_read_themselves(store_root):
    """Two ranks of parts of their own: each reads its parts' nodes, and few of the other's, as halo nodes."""
    dm = make(store_root, scope="part", sampler=gs.NeighborSampler([4, 3]), halo_hops=0)
    dm.trainer = SimpleNamespace(
        lightning_module=None,
        strategy=SimpleNamespace(weights=gs.ModelAveraging(), broadcast=lambda name: name),
        world_size=2, num_nodes=1, global_rank=0, node_rank=0, local_rank=0, overfit_batches=0,
    )  # fmt: skip
    dm.setup("predict")
    reads = RankReads(False, [dm._targets_of(rank, 2) for rank in range(2)], dm._nodes_sampled)
    prob = read_probability(dm.store, PlacementSettings(), dm.sampler, 32, 0, reads)
    part = np.repeat(np.arange(dm.store.num_parts), np.diff(dm.store.part_offsets))
    for rank in range(2):
        assert prob[rank, part % 2 == rank].mean() > 1.5 * prob[rank, part % 2 != rank].mean()
        assert np.all(prob[rank, reads.targets[rank]] > 0)


@pytest.mark.sweep
def test_belady_goes_by_the_reads_of_batches_sampled_ahead(store_root):
    reads = {}
    for policy in ("lru", "belady"):
        settings = PlacementSettings(buffer_share=0.1, alpha=0, cache_rows=60, cache_policy=policy, lookahead_batches=4)
        weights = trained(make(store_root, rows=settings))
        reads[policy] = last("reads")
        assert all(torch.equal(weights[name], value) for name, value in trained(make(store_root)).items())
    assert reads["belady"]["cache"] > reads["lru"]["cache"] > 0


def linked(links: list[list[int]], alpha: float, count: int = 4):
    """What ranks of one machine cost each other: alpha where a list holds both."""
    alphas = np.ones((count, count)) - np.eye(count)
    for group in links:
        alphas[np.ix_(group, group)] = np.minimum(alphas[np.ix_(group, group)], alpha)
    return alphas


@pytest.mark.parametrize(("kind", "reach"), [("cuda", [[0, 1], [2, 3]]), ("cuda", []), ("cpu", [[0, 1, 2, 3]])])
def test_ranks_are_told_what_each_two_cost(monkeypatch, kind, reach):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    together = [set(group) for group in reach]
    monkeypatch.setattr(
        torch.cuda,
        "can_device_access_peer",
        lambda one, other: any({one.index, other.index} <= group for group in together),
    )
    devices = [torch.device(kind, number) for number in range(4)]
    told = {}
    for machine in (0, 1):
        use_uuids(
            monkeypatch, [f"{machine} {number}" for number in range(4)], [f"{m} {n}" for m in (0, 1) for n in range(4)]
        )
        strategy = SimpleNamespace(
            parallel_devices=devices,
            root_device=devices[0],
            broadcast=lambda value, src: told.get(src) if value is None else told.setdefault(src, value),
        )
        place = SimpleNamespace(num_nodes=2, global_rank=4 * machine, strategy=strategy)
        alphas = rank_alphas(PlacementSettings(alpha=0.3), place, 8)
    assert np.array_equal(alphas[:4, :4], linked(reach, 0.3)) and np.array_equal(alphas[4:, 4:], linked(reach, 0.3))
    assert (alphas[:4, 4:] == 1).all() and (alphas[4:, :4] == 1).all()
    assert rank_alphas(PlacementSettings(), None, 1).tolist() == [[0]]


def use_uuids(monkeypatch, seen: list[str], ranks: list[str]) -> None:
    """Let this process see GPUs of some ids, in their order, and the ranks be on GPUs of some."""
    for module in (placed_training, link_cost):
        monkeypatch.setattr(module, "gpu_uuid", lambda device: seen[device.index])
    monkeypatch.setattr(placed_training, "gather_objects", lambda own: ranks)


@pytest.mark.parametrize(
    ("seen", "ranks", "near"),
    [
        (["c", "a", "b"], ["a", "b", "a"], {(0, 1): 0.3, (1, 2): 0.3, (0, 2): 0}),  # in another order, and one shared
        (["a"], ["a", "b", "c"], {(0, 1): 1, (1, 2): 1, (0, 2): 1}),  # as Slurm's --gpus-per-task leaves it
    ],
)
def test_gpus_are_told_by_their_own_ids(monkeypatch, seen, ranks, near):
    use_uuids(monkeypatch, seen, ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    gpu = torch.device("cuda", 0)
    strategy = SimpleNamespace(parallel_devices=[gpu] * 3, root_device=gpu, broadcast=lambda value, src: value)
    alphas = rank_alphas(
        PlacementSettings(alpha=0.3), SimpleNamespace(num_nodes=1, global_rank=0, strategy=strategy), 3
    )
    for (one, other), cost in near.items():
        assert alphas[one, other] == alphas[other, one] == cost


def on_gpu(dm: gs.PartitionDataModule) -> gs.PartitionDataModule:
    dm._placed.buffer = SimpleNamespace(on="cuda:0")
    return dm


def test_a_rank_without_a_batch_gathers_nothing(store_root):
    dm = on_gpu(make(store_root, rows=gs.PlacementSettings("ranges")))
    assert dm.on_after_batch_transfer(None, 0) is None


def test_a_cache_that_nothing_foretells_is_refused(store_root):
    strategy = SimpleNamespace(weights=gs.GradientAveraging(), root_device=torch.device("cuda", 0))
    placement = PlacementSettings(cache_rows=10, cache_policy="belady")
    trainer = SimpleNamespace(world_size=1, num_nodes=1, strategy=strategy)
    with pytest.raises(StrategyError, match=said("'belady' device_batches 0 'sieve' 'lru'")):
        make(store_root, rows=placement, device_batches=0).check_trainer(trainer)
    make(store_root, rows=placement).check_trainer(trainer)
    strategy.root_device = torch.device("cpu")
    make(store_root, rows=placement, device_batches=0).check_trainer(trainer)


def test_a_placement_made_before_is_taken(store_root):
    store = gs.PartitionStore.open(store_root)
    train = np.flatnonzero(store.masks["train"])
    prob = gs.access_probability(store, train, fanouts=[4, 3], batch_size=32)
    placement = gs.place(prob, 1, 50, alpha=0, store=store)
    dm = make(store_root, rows=placement)
    dm.setup("fit")
    assert dm.buffer.placement is placement
    two = gs.place(prob, 2, 50, alpha=0)
    with pytest.raises(PlacementError, match=said("placement 2 devices training 1 processes")):
        make(store_root, rows=two).setup("fit")


def test_locality_prefers_placed_rows_from_the_next_epoch_on(store_root):
    dm = make(store_root, rows=PlacementSettings(buffer_share=0.1, alpha=0, locality_scale=1))
    dm.setup("fit")
    loader = dm.train_dataloader()
    near = set(dm.buffer.placement.rows[0].tolist())

    def share_near(batches):
        nodes = np.concatenate([batch.n_id.numpy() for batch in batches])
        return np.isin(nodes, list(near)).mean()

    even = list(loader)
    assert all(batch.edge_weight is None for batch in even)
    dm.set_locality_scale(8.0)
    loader.set_epoch(1)
    biased = list(dm.train_dataloader())
    assert all(batch.averaging_weights for batch in biased)
    assert share_near(biased) > share_near(even)
    assert dm.loading_share() > 0


def test_loading_is_gathering_alone(store_root):
    """Of 10 s training waits half, for two threads: they gather 4 of their 20 s, then none, then all of them."""
    dm = make(store_root, rows=gs.PlacementSettings("ranges"))
    dm.setup("fit")
    assert dm.loading_share() == 0
    placed = dm._placed
    dm.buffer.read(np.arange(400))
    dm.buffer.gather_s = 4.0
    assert placed.loading_share(10.0, 0.5, 2) == pytest.approx(0.5 * 4 / 20)
    assert placed.loading_share(10.0, 0.5, 2) == 0, "nothing was read since"
    dm.buffer.read(np.arange(400))
    dm.buffer.gather_s = 24.0
    assert placed.loading_share(10.0, 0.5, 2) == pytest.approx(0.5)
    dm.buffer.read(np.arange(400))
    dm.buffer.gather_s = 25.0
    assert placed.loading_share(10.0, 0.1, 0) == pytest.approx(0.1), "no thread: the one that trains gathers"


def test_rows_that_all_lie_near_leave_the_scale_alone(store_root):
    """A run that waits for sampling all the time, and reads nothing from the host: there is nothing to save."""
    controller = gs.LocalityController(lower=0.0, upper=0.0, max_scale=4)
    dm = make(store_root, rows=PlacementSettings("rule", buffer_share=1.0, locality_scale=1))
    trained(dm, [controller])
    assert dm.sampler.locality.scale == controller.state.scale == 1


@pytest.mark.sweep
def test_the_controller_turns_the_dial(store_root):
    controller = gs.LocalityController(lower=0.0, upper=0.0, max_scale=4)
    dm = make(store_root, rows=PlacementSettings("rule", locality_scale=1))
    trained(dm, [controller], max_epochs=4)
    assert controller.state.scale == dm.sampler.locality.scale == 4
    with pytest.raises(StrategyError, match=said("LocalityController sampler locality")):
        trained(make(store_root, rows=gs.PlacementSettings("rule")), [gs.LocalityController()])


NEAR = PlacementSettings(locality_scale=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": NEAR, "sampler": gs.SaintSampler()}, "rows.locality_scale=2.0 sampler"),
        ({"rows": "best"}, "rows auto tiered owners 'best'"),
        ({"rows": PlacementSettings}, "rows gs.PlacementSettings"),
        ({"placement": "rule"}, "placement rows"),
    ],
)
def test_bad_settings_are_refused(store_root, options, message):
    with pytest.raises((ValueError, TypeError), match=said(message)):
        make(store_root, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_share": 0.0}, "rows.buffer_share (0, 1] 0.0"),
        ({"buffer_share": "half"}, "rows.buffer_share (0, 1] 'half'"),
        ({"alpha": 2}, 'rows.alpha [0, 1] "auto" 2'),
        ({"alpha": None}, 'rows.alpha [0, 1] "auto" None'),
        ({"host_rows": -1}, "rows.host_rows 0 -1"),
        ({"buffer_rows": 0}, "rows.buffer_rows 1 0"),
        ({"cache_rows": -1}, "rows.cache_rows 0 -1"),
        ({"probability": "guess"}, "rows.probability"),
        ({"cache_policy": "fifo"}, "rows.cache_policy lru sieve belady"),
        ({"lookahead_batches": 0}, "rows.lookahead_batches 1 0"),
        ({"method": "best"}, "rows.method rule ranges 'best'"),
    ],
)
def test_bad_placement_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=said(message)):
        PlacementSettings(**options)


def test_a_locality_that_is_not_there_cannot_be_set(store_root):
    with pytest.raises(StrategyError, match=said("sampler locality scale")):
        make(store_root).set_locality_scale(2.0)
