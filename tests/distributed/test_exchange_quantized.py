"""Rows in few bits: how far runs stay from the exact one, and that sampled gradients are right on average."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from blocks_in_one_process import Simulation, read_graph
from full_graph_runs import fit, largest_difference, make_model, write_store
from processes import launch

from lightning_gnnscale.partition_store import PartitionStore
from lightning_gnnscale.partition_store.block_rows import load_block_rows
from lightning_gnnscale.strategy import BroadcastExchange, EpochFixed, HaloExchange, Quantized, SkipBroadcast
from lightning_gnnscale.strategy.exchange.run import ExchangeRun

pytestmark = pytest.mark.sweep

WORLD_SIZE, NUM_EPOCHS = 3, 8
BITS = (16, 8, 4)
RUNS = {
    "exact": HaloExchange(),
    **{f"{bits} bits": Quantized(bits) for bits in BITS},
    **{f"{bits} bits, pushed": Quantized(bits, backward="push") for bits in BITS},
    "8 bits, again": Quantized(8),
    "8 bits, another seed": Quantized(8, seed=1),
    "8 bits, broadcast": Quantized(8, exchange=BroadcastExchange()),
    # The first epoch is exact for both, and gradients are fine: the forward of the later ones tells the difference.
    "values": SkipBroadcast(EpochFixed(0), Quantized(8, delta=False, backward_bits=16)),
    "differences": SkipBroadcast(EpochFixed(0), Quantized(8, delta=True, backward_bits=16)),
}


def train_all(folder, root):
    results = {}
    for name, policy in RUNS.items():
        model = make_model("gcn", scheduler=False)
        # Adam's steps do not shrink with the error of a gradient; those of SGD do.
        model.make_optimizer = partial(torch.optim.SGD, lr=0.1)
        weights, metrics = fit(folder, root, model, policy, max_epochs=NUM_EPOCHS)
        results[name] = weights, [epoch["train_loss"] for epoch in metrics]
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    return launch(WORLD_SIZE, train_all, tmp_path_factory.mktemp("quantized"), root, limit_s=250)


@torch.no_grad()
def largest_error_of_the_first_loss(graph, bits):
    """Follow the largest error of every value through the layers of a GCN.

    A value of a row that travels is off by less than a step, s / (2**(bits - 1) - 1), where s is the row's largest
    magnitude rounded up to bfloat16, at most 1 + 2**-7 times as large. Sums and maps carry errors on by the magnitudes
    of their weights, relu does not make them larger, and cross-entropy changes by at most twice the largest error of a
    row's outputs.
    """
    simulation = Simulation(graph, make_model("gcn"))
    convs, edges = simulation.replicas[0].convs, simulation.edges
    h, error = graph.x, torch.zeros_like(graph.x)
    for layer, conv in enumerate(convs):
        weight = conv.lin.weight
        step = (h.abs() + error).amax(dim=1, keepdim=True) * (1 + 2**-7) / (2 ** (bits - 1) - 1)
        travelled = step if layer else torch.zeros_like(step)
        error = (edges @ error + (edges * graph.crossing) @ travelled) @ weight.abs().t()
        h = edges @ h @ weight.t() + conv.bias
        h = F.relu(h) if layer < len(convs) - 1 else h
    return float(2 * error.amax(dim=1)[graph.train].mean())


@pytest.mark.parametrize("bits", BITS)
def test_the_first_loss_is_within_the_error_of_rounding(runs, root, bits):
    bound = largest_error_of_the_first_loss(read_graph(root, WORLD_SIZE), bits)
    for results in runs:
        difference = abs(results[f"{bits} bits"][1][0] - results["exact"][1][0])
        assert 0 < difference <= bound
    assert bits < 16 or bound < 1e-3


@pytest.mark.parametrize("backward", ["", ", pushed"])
def test_more_bits_stay_nearer(runs, backward):
    """Small errors carry on in proportion to the step: 258 times from 16 to 8 bits, 18 times from 8 to 4."""
    for results in runs:
        exact = results["exact"][0]
        off = {bits: largest_difference(results[f"{bits} bits{backward}"][0], exact) for bits in BITS}
        # an eighth of it, and a quarter: rounding is random
        assert 0 < off[16] * 32 < off[8] and off[8] * 4 < off[4]


def test_differences_stay_nearer_than_values(runs):
    """Rows change by a few per cent an epoch, so that steps of differences are many times smaller."""
    for results in runs:
        exact = results["exact"][0]
        off = {name: largest_difference(results[name][0], exact) for name in ("values", "differences")}
        assert 0 < off["differences"] * 4 < off["values"]


def test_a_seed_gives_the_same_run_on_every_rank(runs):
    first = runs[0]
    for results in runs:
        for name in RUNS:
            assert largest_difference(results[name][0], first[name][0]) == 0
        assert largest_difference(results["8 bits"][0], results["8 bits, again"][0]) == 0
        assert largest_difference(results["8 bits"][0], results["8 bits, another seed"][0]) > 0
        # The same rows with the same ids and keys, whatever else travels: the first loss has the same bits.
        assert results["8 bits"][1][0] == pytest.approx(results["8 bits, broadcast"][1][0], abs=1e-12)


# -- gradients

NUM_SEEDS, WIDTH = 400, 6
SAMPLED = {
    "4 bits, sampled": {"bits": 4, "backward_threshold": 1.0},
    "2 bits, sampled more": {"bits": 2, "backward_bits": 2, "backward_threshold": 2.0},
}


def exchange_of(root, policy, pulls):
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    blocks = load_block_rows(PartitionStore.open(root), rank, world_size)
    layers = [SimpleNamespace(), SimpleNamespace()]
    run = ExchangeRun(policy.plan(), blocks, layers, [pulls, pulls], torch.device("cpu"))
    run.begin_step(0)
    return run, layers[1].exchange, blocks


def pulled(exchange, grad, halo_grad):
    return exchange.pull(grad).wait()


def pushed(exchange, grad, halo_grad):
    transfer = exchange.send(grad, True)
    transfer.wait()
    transfer.send_back(halo_grad)
    return transfer.wait_back()


def gradients(count, seed):
    """Rows of very different norms, some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return rows * torch.tensor([0.0, 0.3, 1.0, 3.0]).double()[torch.arange(count) % 4].unsqueeze(1)


def average_gradients(folder, root):
    rank, results = torch.distributed.get_rank(), {}
    for backward, read in {"pull": pulled, "push": pushed}.items():
        for name, options in SAMPLED.items():
            run, exchange, blocks = exchange_of(root, Quantized(**options, backward=backward), backward == "pull")
            given = gradients(blocks.num_local, rank), gradients(blocks.num_halo, 10 + rank)
            sampled = []
            for seed in range(NUM_SEEDS):
                run.clock.plan = replace(run.clock.plan, seed=seed)
                sampled.append(read(exchange, *given))
            exact = read(exchange_of(root, HaloExchange(backward), backward == "pull")[1], *given)
            results[name, backward] = torch.stack(sampled), exact
    return results


def test_sampled_gradients_are_right_on_average(root, tmp_path):
    directions = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for rank, results in enumerate(launch(WORLD_SIZE, average_gradients, tmp_path, root, limit_s=250)):
        for where, (sampled, exact) in results.items():
            # A value that is small in its row is rounded away nearly always: rows are summed up in random directions,
            # whose deviation is that of their large values.
            summed, truth = sampled @ directions, exact @ directions
            off, sigma = (summed.mean(dim=0) - truth).abs(), summed.std(dim=0) / NUM_SEEDS**0.5
            # Random bits are sixteen: a value may be off by 2**-16 of a step, which is at most the largest value.
            slack = WIDTH * directions.abs().amax() * 2**-16 * sampled.abs().amax()
            assert (off <= 5 * sigma + slack).all(), (where, rank)
            assert (off > 0).any() and (sampled[:, (exact == 0).all(dim=1)] == 0).all(), (where, rank)
            # Some rows are left out now and then, and never all of them.
            left_out = (sampled == 0).all(dim=2)[:, (exact != 0).any(dim=1)].double().mean()
            assert 0.01 < left_out < 0.9, (where, rank)
