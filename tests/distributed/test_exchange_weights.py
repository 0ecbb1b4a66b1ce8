"""Weight policies beside an exchange: local training, SkipG, model averaging and clipping, against one process."""

from functools import partial

import numpy as np
import pytest
import torch
from blocks_in_one_process import Simulation, add_up, always, average, read_graph
from full_graph_runs import fit, largest_difference, make_model, write_store
from lightning.pytorch.callbacks import Callback
from processes import launch

from lightning_gnnscale import events
from lightning_gnnscale.strategy import (
    BoundedGradientStaleness,
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    GradientAveraging,
    HaloExchange,
    ModelAveraging,
    NoExchange,
    SkipBroadcast,
)

WORLD_SIZE, NUM_EPOCHS = 3, 6
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
LOCAL_CLIP, CLIP = 0.02, 0.03


class Replicas(Callback):
    """Keeps this rank's own weights after each step, and those that validation sees."""

    def __init__(self):
        self.stepped, self.validated = [], []

    def on_train_start(self, trainer, pl_module):
        def keep(*_):
            self.stepped.append(weights_of(pl_module))

        trainer.optimizers[0].register_step_post_hook(keep)

    def on_validation_start(self, trainer, pl_module):
        self.validated.append(weights_of(pl_module))


def weights_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


CASES = {
    "exact": (HaloExchange(), GradientAveraging(), {}),
    "SkipG 0": (HaloExchange(), BoundedGradientStaleness(0), {}),
    "SkipG 0, momentum": (HaloExchange(backward="pull"), BoundedGradientStaleness(0), {"optimizer": MOMENTUM}),
    "exact, momentum": (HaloExchange(backward="pull"), GradientAveraging(), {"optimizer": MOMENTUM}),
    "SkipG 1": (HaloExchange(), BoundedGradientStaleness(1), {}),
    "SkipG 2, momentum": (BroadcastExchange(), BoundedGradientStaleness(2), {"optimizer": MOMENTUM}),
    "SkipG 1, clipped": (
        HaloExchange(),
        BoundedGradientStaleness(1, local_clip=LOCAL_CLIP),
        {"optimizer": MOMENTUM, "gradient_clip_val": CLIP},
    ),
    "SkipG 1, skipped rows": (SkipBroadcast(EpochFixed(1)), BoundedGradientStaleness(1), {}),
    "clipped twice": (
        HaloExchange(),
        GradientAveraging(local_clip=LOCAL_CLIP),
        {"optimizer": MOMENTUM, "gradient_clip_val": CLIP},
    ),
    "clipped by rank": (HaloExchange(), GradientAveraging(local_clip=LOCAL_CLIP), {"optimizer": MOMENTUM}),
    "local models": (NoExchange(), ModelAveraging(), {}),
    "local models, every other epoch": (NoExchange(), ModelAveraging(every_n_epochs=2), {}),
    "models, gradients dropped": (
        SkipBroadcast(EpochAdaptive(1), remote_gradient="drop"),
        ModelAveraging(),
        {},
    ),
    "no exchange": (NoExchange(), GradientAveraging(), {}),
    "statistics": (HaloExchange(), GradientAveraging(), {"norm": "batch"}),
}


def train_all(folder, root):
    results = {}
    for name, (exchange, weights, options) in CASES.items():
        options, kept = dict(options), Replicas()
        model = make_model("gcn", scheduler=False, norm=options.pop("norm", None))
        model.make_optimizer = options.pop("optimizer", None)
        options |= {"max_epochs": NUM_EPOCHS, "limit_val_batches": 1.0, "callbacks": [kept]}
        final, metrics = fit(folder, root, model, exchange, weights, **options)
        results[name] = {
            "weights": final,
            "losses": [epoch["train_loss"] for epoch in metrics],
            "stepped": kept.stepped,
            "validated": kept.validated,
        }
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def graph(root):
    return read_graph(root, WORLD_SIZE)


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    return launch(WORLD_SIZE, train_all, tmp_path_factory.mktemp("weights"), root, limit_s=280)


def simulate(graph, name, join, **options):
    """Return the simulation, and after each epoch's step every replica's weights."""
    model, stepped = make_model("gcn"), []
    model.make_optimizer = CASES[name][2].get("optimizer")
    simulation = Simulation(graph, model, **options)
    for epoch in range(NUM_EPOCHS):
        simulation.step(epoch, join)
        stepped.append([simulation.weights(rank) for rank in graph.ranks])
    return simulation, stepped


def clip(tensors, limit):
    norm = torch.stack([tensor.norm() for tensor in tensors]).norm()
    for tensor in tensors:
        tensor *= torch.clamp(limit / (norm + 1e-6), max=1.0)
    return float(norm)


class SkipG:
    """Join gradients every max_age + 1 epochs; between, add what the others' came to last."""

    def __init__(self, max_age, local_clip=None, clip=None):
        self.max_age, self.local_clip, self.clip = max_age, local_clip, clip
        self.norms = []

    def __call__(self, simulation, epoch):
        gradients = [[tensor.grad for tensor in net.parameters()] for net in simulation.replicas]
        if self.local_clip is not None:
            for own in gradients:
                norm = clip(own, self.local_clip * len(gradients) ** 0.5)
                self.norms.append((norm, self.local_clip * len(gradients) ** 0.5))
        if epoch % (self.max_age + 1) == 0:
            total = [sum(same) for same in zip(*gradients, strict=True)]
            self.others = [[t - own for t, own in zip(total, mine, strict=True)] for mine in gradients]
            if epoch:
                self.average(simulation)
        for mine, others in zip(gradients, self.others, strict=True):
            for tensor, other in zip(mine, others, strict=True):
                tensor += other
            if self.clip is not None:
                self.norms.append((clip(mine, self.clip), self.clip))

    @staticmethod
    def average(simulation):
        for tensors in simulation.parameters():
            states = [opt.state[p] for opt, p in zip(simulation.optimizers, tensors, strict=True)]
            for key, value in states[0].items():
                if torch.is_tensor(value) and value.is_floating_point():
                    average([state[key] for state in states])
            average(tensors)


@pytest.mark.parametrize("kind", ["", ", momentum"])
def test_gradients_of_age_zero_are_gradient_averaging_bit_for_bit(runs, kind):
    for results in runs:
        one, other = results["SkipG 0" + kind], results["exact" + kind]
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["weights"][key], other["weights"][key]) for key in one["weights"])


def every_other_epoch(epoch, fresh, held):
    return torch.full((len(fresh),), epoch % 2 == 0)


SKIPPED = {
    "SkipG 1": (SkipG(1), always),
    "SkipG 2, momentum": (SkipG(2), always),
    "SkipG 1, clipped": (SkipG(1, LOCAL_CLIP, CLIP), always),
    "SkipG 1, skipped rows": (SkipG(1), every_other_epoch),
}


@pytest.mark.parametrize("name", list(SKIPPED))
def test_old_gradients_of_others(runs, graph, name):
    join, due = SKIPPED[name]
    simulation, stepped = simulate(graph, name, join, due=due)
    for rank, results in enumerate(runs):
        result = results[name]
        assert result["losses"] == pytest.approx(simulation.losses, abs=1e-12)
        for epoch in range(NUM_EPOCHS):
            assert largest_difference(result["stepped"][epoch], stepped[epoch][rank]) <= 1e-12, (epoch, rank)
            seen = result["validated"][epoch]
            mean = {key: sum(replica[key] for replica in stepped[epoch]) / WORLD_SIZE for key in seen}
            assert largest_difference(seen, mean) <= 1e-12
            apart = max(largest_difference(stepped[epoch][0], replica) for replica in stepped[epoch][1:])
            assert (apart > 1e-6) == (epoch % (join.max_age + 1) != 0)
        assert largest_difference(result["weights"], result["validated"][-1]) == 0


def test_replicas_are_equal_after_each_joining_step(runs):
    for name in SKIPPED:
        for epoch in range(0, NUM_EPOCHS, SKIPPED[name][0].max_age + 1):
            first, *others = (results[name]["stepped"][epoch] for results in runs)
            assert all(torch.equal(first[key], other[key]) for other in others for key in first)


@pytest.mark.parametrize("name", ["clipped by rank", "clipped twice"])
def test_clipping_by_rank_comes_before_joining_and_the_trainers_after(runs, graph, name):
    join = SkipG(0, LOCAL_CLIP, CLIP if name == "clipped twice" else None)
    simulation, _ = simulate(graph, name, join)
    for results in runs:
        assert largest_difference(results[name]["weights"], simulation.weights()) <= 1e-12
        assert results[name]["losses"] == pytest.approx(simulation.losses, abs=1e-12)
    # Both limits bind.
    assert any(norm > limit for norm, limit in join.norms if limit == CLIP) == (name == "clipped twice")
    assert any(norm > limit for norm, limit in join.norms if limit != CLIP)


class Models:
    """Average replicas by the training nodes of their blocks."""

    def __init__(self, graph):
        counts = torch.stack([(graph.train & (graph.owner == rank)).sum() for rank in graph.ranks]).double()
        self.shares = counts / counts.sum()

    @torch.no_grad()
    def mean(self, tensors):
        return sum(share * tensor for share, tensor in zip(self.shares, tensors, strict=True))

    @torch.no_grad()
    def average(self, simulation):
        for tensors in simulation.parameters():
            mean = self.mean(tensors)
            for tensor in tensors:
                tensor.copy_(mean)


def in_turns(graph):
    def due(epoch, fresh, held):
        # versions 0, -1, 0 after the first epoch
        return torch.full((len(fresh),), True) if epoch == 0 else graph.owner % 2 == epoch % 2

    return due


@pytest.mark.parametrize("name", ["local models", "local models, every other epoch", "models, gradients dropped"])
def test_averaged_models(runs, graph, name):
    _, weights, _ = CASES[name]
    models = Models(graph)
    crossing = name == "models, gradients dropped"
    simulation = Simulation(
        graph, make_model("gcn"), in_turns(graph), remote_gradient=False, crossing=crossing, own_count=True
    )
    assert models.shares[-1] == 0 and (models.shares[:2] > 0).all()  # one block has nothing to learn
    for epoch in range(NUM_EPOCHS):
        if epoch and epoch % weights.every_n_epochs == 0:
            models.average(simulation)
        simulation.step(epoch, lambda simulation, epoch: None)
        mean = [models.mean(tensors) for tensors in simulation.parameters()]
        names = [name for name, _ in simulation.replicas[0].named_parameters()]
        for results in runs:
            seen = results[name]["validated"][epoch]
            assert largest_difference({f"backbone.{n}": m for n, m in zip(names, mean, strict=True)}, seen) <= 1e-12
    for results in runs:
        assert largest_difference(results[name]["weights"], results[name]["validated"][-1]) == 0


def test_no_exchange_trains_separate_graphs(runs, graph):
    simulation, _ = simulate(graph, "no exchange", add_up, crossing=False)
    for results in runs:
        assert largest_difference(results["no exchange"]["weights"], simulation.weights()) <= 1e-12
        assert results["no exchange"]["losses"] == pytest.approx(simulation.losses, abs=1e-12)


AVERAGED = {
    "joined": (GradientAveraging(), {}),
    "every third": (BoundedGradientStaleness(2), {}),
    "every third, evaluated": (BoundedGradientStaleness(2), {"limit_val_batches": 1.0, "check_val_every_n_epoch": 2}),
}


def train_averaged(folder, root):
    """Return of each case its `average` events, and the bytes that the process group was given in float64."""
    results, plain = {}, torch.distributed.all_reduce
    for name, (weights, options) in AVERAGED.items():
        handed, path = [], folder / f"{name}.jsonl"

        def counting(tensor, *arguments, handed=handed, **keywords):
            handed.append(tensor.numel())
            return plain(tensor, *arguments, **keywords)

        events.open_log(path)
        torch.distributed.all_reduce = counting
        fit(folder, root, make_model("gcn"), HaloExchange(), weights, max_epochs=NUM_EPOCHS, **options)
        torch.distributed.all_reduce = plain
        events.open_log(None)
        rank = torch.distributed.get_rank()
        told = [event for event in events.read_log(path) if event["event"] == "average" and event["rank"] == rank]
        results[name] = [(event["purpose"], event["epoch"], event["bytes"]) for event in told], handed
    return results


@pytest.mark.sweep
def test_weights_travel_only_when_gradients_are_joined_or_somebody_looks(root, tmp_path):
    num_values = sum(parameter.numel() for parameter in make_model("gcn").parameters())
    num_tensors = len(list(make_model("gcn").parameters()))
    # float64, in slices for each process and the sum of its own, behind a header
    slices = 8 * (WORLD_SIZE + 1) * -(-num_values // WORLD_SIZE)
    gradients = slices + 8 * (num_tensors + 1)
    weights = 8 * (num_values + 1)
    # Adam's two moments a weight, and its count of steps a tensor
    joined_again = gradients + 8 * (3 * num_values + num_tensors + 1)
    for results in launch(WORLD_SIZE, train_averaged, tmp_path, root):
        told = {
            (name, purpose): {epoch: num_bytes for kind, epoch, num_bytes in results[name][0] if kind == purpose}
            for name in AVERAGED
            for purpose in ("gradients", "evaluation")
        }
        assert told["joined", "gradients"] == dict.fromkeys(range(NUM_EPOCHS), gradients)
        assert told["joined", "evaluation"] == {}
        skipped = {0: gradients, 1: 0, 2: 0, 3: joined_again, 4: 0, 5: 0}
        assert told["every third", "gradients"] == told["every third, evaluated", "gradients"] == skipped
        # replicas are equal after epochs 0 and 3; the end of training looks too
        assert list(told["every third", "evaluation"].values()) == [weights]
        assert told["every third, evaluated", "evaluation"] == {1: weights, 5: weights}
        for name in AVERAGED:
            large = [count for count in results[name][1] if count >= num_values]
            sent = sum(told[name, "gradients"].values()) + sum(told[name, "evaluation"].values())
            others = (slices + 8 * (num_tensors + 1)) * sum(1 for count in told[name, "gradients"].values() if count)
            assert 8 * sum(large) == sent - others


BACKBONES = ("graphsage", "gat", "sgc")


def train_backbones(folder, roots, exchange):
    results = {}
    for kind, root in roots.items():
        for backbone in BACKBONES:
            weights, metrics = fit(folder, root, make_model(backbone), exchange, max_epochs=3)
            results[kind, backbone] = weights, [epoch["train_loss"] for epoch in metrics]
    return results


@pytest.mark.sweep
def test_no_exchange_is_one_process_on_the_graph_without_crossing_edges(tmp_path):
    """Of every backbone, of dense and of sparse features."""
    # write_store's parts on three ranks: parts 0 and 1, 2 and 3, and 4
    owner = np.repeat([0, 1, 2], [48, 34, 8])
    kinds = {"dense": {}, "sparse": {"sparse": True}}
    whole = {kind: write_store(tmp_path / kind, **options) for kind, options in kinds.items()}
    cut = {
        kind: write_store(tmp_path / f"{kind}, cut", keep=lambda edges: owner[edges[0]] == owner[edges[1]], **options)
        for kind, options in kinds.items()
    }
    (single,) = launch(1, train_backbones, tmp_path / "alone", cut, HaloExchange())
    for results in launch(WORLD_SIZE, train_backbones, tmp_path / "run", whole, NoExchange()):
        for key, (weights, losses) in results.items():
            assert largest_difference(weights, single[key][0]) <= 1e-12, key
            assert losses == pytest.approx(single[key][1], abs=1e-12), key


def test_statistics_are_of_all_rows_on_every_rank(runs):
    for epoch in range(NUM_EPOCHS):
        own = [run["statistics"]["stepped"][epoch] for run in runs]
        names = [name for name in own[0] if name.endswith(("running_mean", "running_var"))]
        assert len(names) >= 2
        for name in names:
            for run, state in zip(runs, own, strict=True):
                assert torch.allclose(state[name], own[0][name], atol=1e-12)
                assert torch.allclose(run["statistics"]["validated"][epoch][name], own[0][name], atol=1e-12)
