"""The exchange of a layer on three ranks in threads: what arrives, what both sides hold, what is counted."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from strategy.exchange_blocks import OFFSETS, READ, make_blocks
from strategy.thread_ranks import ThreadRanks

from lightning_gnnscale.strategy.exchange import (
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    HaloExchange,
    Quantized,
    SkipBroadcast,
    VariationGap,
    layer_exchange,
)
from lightning_gnnscale.strategy.exchange.message import pack_all
from lightning_gnnscale.strategy.exchange.run import ExchangeRun
from tests.tiers import all_pairs, each_value

NUM_NODES, WIDTH, NUM_EPOCHS = OFFSETS[-1], 6, 7
CPU = torch.device("cpu")


def make_runs(policy, pulls=False):
    """A run of two layers for each of three ranks."""
    plan = policy.plan()
    return [
        ExchangeRun(plan, block, [SimpleNamespace(), SimpleNamespace()], [False, pulls], CPU) for block in make_blocks()
    ]


def own(rank):
    return slice(OFFSETS[rank], OFFSETS[rank + 1])


def sequence(dtype=torch.float64):
    """Rows of all nodes in each epoch: some move fast, some slowly, row 4 rests, row 9 is zero until epoch 3."""
    generator = torch.Generator().manual_seed(3)
    pace = torch.logspace(-3, 0, NUM_NODES, dtype=dtype).unsqueeze(1)
    pace[4] = 0
    rows = [torch.randn(NUM_NODES, WIDTH, dtype=dtype, generator=generator)]
    for _ in range(NUM_EPOCHS - 1):
        rows.append(rows[-1] + pace * torch.randn(NUM_NODES, WIDTH, dtype=dtype, generator=generator))
    for epoch in range(3):
        rows[epoch][9] = 0
    return rows


def forward(ranks, runs, epoch, rows):
    """One training step; returns the halo of each rank."""

    def step(rank):
        runs[rank].begin_step(epoch)
        return runs[rank].layers[1].send(rows[own(rank)].clone(), True).wait().clone()

    return ranks.run(step)


def held_on_both_sides(runs, epoch):
    """What each rank keeps of what it has sent to each other, and what that one has received."""
    for sender in runs:
        for reader in runs:
            positions = sender.route.leaving[reader.route.rank]
            kept = reader.layers[1].received.at(epoch).split(list(reader.route.arriving))
            yield sender.layers[1].sent.at(epoch)[positions], kept[sender.route.rank]


EXACT = [
    HaloExchange(),
    BroadcastExchange(),
    *(
        SkipBroadcast(bound, exchange, rows=rows)
        for bound in (EpochFixed(0), EpochAdaptive(0), VariationGap(0))
        for exchange in (HaloExchange(), BroadcastExchange())
        for rows in ("block", "row")
    ),
    SkipBroadcast(EpochFixed(5), warmup_epochs=NUM_EPOCHS),
    Quantized(bits=2, exchange=SkipBroadcast(EpochFixed(5), warmup_epochs=NUM_EPOCHS, stale="extrapolate")),
]


@each_value
@pytest.mark.parametrize("policy", EXACT, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_policies_bring_the_rows_bit_for_bit(policy, dtype, monkeypatch):
    ranks, runs = ThreadRanks(3, monkeypatch), make_runs(policy)
    for epoch, rows in enumerate(sequence(dtype)):
        halos = forward(ranks, runs, epoch, rows)
        for halo, nodes in zip(halos, READ, strict=True):
            assert torch.equal(halo, rows[list(nodes)])


@pytest.mark.parametrize("policy", EXACT, ids=repr)
def test_a_step_that_is_run_again_sends_again_what_was_due(policy, monkeypatch):
    """As LBFGS does: the rows have changed, and the epoch has not."""
    ranks, runs, rows = ThreadRanks(3, monkeypatch), make_runs(policy), sequence()
    for epoch in range(3):
        for again in range(3):
            halos = forward(ranks, runs, epoch, rows[(epoch + 2 * again) % NUM_EPOCHS])
            for halo, nodes in zip(halos, READ, strict=True):
                assert torch.equal(halo, rows[(epoch + 2 * again) % NUM_EPOCHS][list(nodes)])


PACKING = [HaloExchange(), BroadcastExchange(), Quantized(8, delta=False), Quantized(4), SkipBroadcast(EpochFixed(1))]


@pytest.mark.parametrize("policy", PACKING, ids=repr)
@pytest.mark.parametrize("training", [True, False])
def test_packing_counts_as_exchange(policy, training, monkeypatch):
    def pack_slowly(*given):
        time.sleep(0.02)
        return pack_all(*given)

    ranks, runs, rows = ThreadRanks(3, monkeypatch), make_runs(policy), sequence()
    forward(ranks, runs, 0, rows[0])
    monkeypatch.setattr(layer_exchange, "pack_all", pack_slowly)

    def send(rank):
        runs[rank].begin_step(2)
        with torch.set_grad_enabled(training):
            runs[rank].layers[1].send(rows[2][own(rank)], training).wait()
        return runs[rank].ledger.seconds - runs[rank].ledger.wait_seconds

    assert min(ranks.run(send)) >= 0.02


BOUNDS = [EpochFixed(1), EpochFixed(3), EpochAdaptive(1), EpochAdaptive(2), VariationGap(0.3), VariationGap(0.05)]


class Stale:
    """What receivers hold under a bound, a node at a time: slow and obvious. All rows are held, also those not read."""

    def __init__(self, bound, by_row, broadcast):
        self.bound, self.by_row = bound, by_row
        self.boundary = [list(range(*OFFSETS[rank : rank + 2])) for rank in range(3)]
        if not broadcast:
            read = {row for rows in READ for row in rows}
            self.boundary = [[row for row in rows if row in read] for rows in self.boundary]
        self.held, self.version, self.foretold = {}, {}, {}

    def step(self, epoch, rows):
        sent = 0
        for rank, boundary in enumerate(self.boundary):
            groups = [[row] for row in boundary] if self.by_row else [boundary]
            for group in groups:
                source = group[0] if self.by_row else rank
                if epoch == 0 or self.due(epoch, source):
                    self.foretell(epoch, source, group, rows, True)
                    sent += len(group)
                    self.held.update({row: rows[row].clone() for row in group})
                    staggered = epoch == 0 and isinstance(self.bound, EpochAdaptive)
                    self.version[source] = -(source % (self.bound.max_age + 1)) if staggered else epoch
                else:
                    self.foretell(epoch, source, group, rows, False)
        return [torch.stack([self.held[row] for row in read]) for read in READ], sent

    def due(self, epoch, source):
        if not isinstance(self.bound, VariationGap):
            return epoch - self.version[source] > self.bound.max_age
        return self.foretold[source]

    def foretell(self, epoch, source, group, rows, now):
        """Whether the gap will be exceeded in the coming epoch, if it grows as it did since the rows were sent."""
        if isinstance(self.bound, VariationGap):
            held = {row: self.held.get(row, torch.zeros_like(rows[row])) for row in group}
            change = sum(float(((rows[row] - held[row]) ** 2).sum()) for row in group) ** 0.5
            size = sum(float((held[row] ** 2).sum()) for row in group) ** 0.5
            age = max(epoch - self.version.get(source, -1), 1)
            self.foretold[source] = change / age * (1 if now else age + 1) > self.bound.max_gap * size


@all_pairs
@pytest.mark.parametrize("by_row", [False, True], ids=["block", "row"])
@pytest.mark.parametrize("exchange", [HaloExchange(), BroadcastExchange()], ids=["halo", "broadcast"])
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_receivers_hold_what_was_last_due(bound, exchange, by_row, monkeypatch):
    ranks = ThreadRanks(3, monkeypatch)
    runs = make_runs(SkipBroadcast(bound, exchange, rows="row" if by_row else "block"))
    oracle = Stale(bound, by_row, isinstance(exchange, BroadcastExchange))
    num_boundary = sum(len(boundary) for boundary in oracle.boundary)
    for epoch, rows in enumerate(sequence()):
        expected, sent = oracle.step(epoch, rows)
        for halo, wanted in zip(forward(ranks, runs, epoch, rows), expected, strict=True):
            assert torch.equal(halo, wanted)
        ledgers = [run.ledger for run in runs]
        assert sum(ledger.sent_rows[1] for ledger in ledgers) == sent
        assert sum(ledger.skipped_rows[1] for ledger in ledgers) == num_boundary - sent
        for ledger in ledgers:
            ledger.clear()


QUANTISED = [
    Quantized(bits=bits, delta=delta, exchange=exchange)
    for bits in (16, 4, 2)
    for delta in (True, False)
    for exchange in (HaloExchange(), BroadcastExchange())
]
COMPOSED = [
    SkipBroadcast(bound, quantisation, rows=rows, stale=stale)
    for bound in (EpochFixed(1), EpochAdaptive(1), VariationGap(0.1))
    for quantisation in (
        HaloExchange(),
        Quantized(bits=4),
        Quantized(bits=2, delta=False, exchange=BroadcastExchange()),
    )
    for rows in ("block", "row")
    for stale in ("hold", "extrapolate")
]


@pytest.mark.parametrize("policy", QUANTISED + COMPOSED, ids=repr)
def test_both_sides_hold_the_same_bits_and_every_byte_is_counted(policy, monkeypatch):
    ranks, runs = ThreadRanks(3, monkeypatch), make_runs(policy)
    for epoch, rows in enumerate(sequence(torch.float32)):
        halos = forward(ranks, runs, epoch, rows)
        assert all(bool(halo.isfinite().all()) for halo in halos)
        if runs[0].clock.plan.keeps_sent_rows:
            assert all(torch.equal(sent, received) for sent, received in held_on_both_sides(runs, epoch))
    counted = [sum(run.ledger.bytes.values()) for run in runs]
    assert counted == ranks.handed_over
    assert all(run.layers[0].cache_bytes == 0 for run in runs)


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("exchange", [HaloExchange(), BroadcastExchange()], ids=["halo", "broadcast"])
def test_exact_gradients_come_back_to_their_rows(exchange, pulls, monkeypatch):
    ranks, runs = ThreadRanks(3, monkeypatch), make_runs(exchange, pulls)
    rows = sequence()[0]
    grads = [torch.arange(1.0, len(read) * WIDTH + 1).double().view(-1, WIDTH) * 10**rank
             for rank, read in enumerate(READ)]  # fmt: skip

    def step(rank):
        runs[rank].begin_step(0)
        layer = runs[rank].layers[1]
        transfer = layer.send(rows[own(rank)].clone(), True)
        transfer.wait()
        if pulls:
            return layer.pull(rows[own(rank)].clone()).wait()
        transfer.send_back(grads[rank])
        return transfer.wait_back()

    results = ranks.run(step)
    if pulls:
        assert all(torch.equal(halo, rows[list(read)]) for halo, read in zip(results, READ, strict=True))
    else:
        expected = torch.zeros(NUM_NODES, WIDTH, dtype=torch.float64)
        for grad, read in zip(grads, READ, strict=True):
            expected[list(read)] += grad
        assert torch.equal(torch.cat(results), expected)
    assert [sum(run.ledger.bytes.values()) for run in runs] == ranks.handed_over


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
def test_zero_gradient_rows_are_not_sent(pulls, monkeypatch):
    ranks, runs = ThreadRanks(3, monkeypatch), make_runs(Quantized(bits=16, backward="push"), pulls)

    def step(rank):
        runs[rank].begin_step(0)
        layer = runs[rank].layers[1]
        transfer = layer.send(torch.ones(OFFSETS[rank + 1] - OFFSETS[rank], WIDTH), True)
        transfer.wait()
        runs[rank].ledger.clear()
        # rank 0 has one row with a gradient: 4, the first of its halo; pulled, 3, the last it owns
        if pulls:
            grad = torch.zeros(OFFSETS[rank + 1] - OFFSETS[rank], WIDTH)
            grad[-1] = 1.0 if rank == 0 else 0.0
            return layer.pull(grad).wait()
        grad = torch.zeros(len(READ[rank]), WIDTH)
        grad[0] = 1.0 if rank == 0 else 0.0
        transfer.send_back(grad)
        return transfer.wait_back()

    results = ranks.run(step)
    if pulls:
        # 3 is row 1 of the halo of rank 1, and row 0 of that of rank 2; ones are quantised without loss
        assert [result.sum(1).nonzero().flatten().tolist() for result in results] == [[], [1], [0]]
    else:
        assert [result.sum(1).nonzero().flatten().tolist() for result in results] == [[], [0], []]
    # a row of 6 values of 16 bits and a scale of 2 bytes behind a bitmap of a byte; 8 bytes of size for each other
    row = 1 + 2 + 2 * WIDTH
    assert [sum(run.ledger.bytes.values()) for run in runs] == [16 + row * (2 if pulls else 1), 16, 16]


@pytest.mark.parametrize("policy", [Quantized(bits=2), *COMPOSED[::5]], ids=repr)
def test_evaluation_is_exact_and_leaves_what_is_held_alone(policy, monkeypatch):
    ranks, rows = ThreadRanks(3, monkeypatch), sequence(torch.float32)
    disturbed, quiet = make_runs(policy), make_runs(policy)

    def evaluate(rank):
        with torch.no_grad():
            return disturbed[rank].layers[1].send(rows[-1][own(rank)].clone(), False).wait().clone()

    for epoch in range(4):
        for halo, read in zip(ranks.run(evaluate), READ, strict=True):
            assert torch.equal(halo, rows[-1][list(read)])
        one, two = forward(ranks, disturbed, epoch, rows[epoch]), forward(ranks, quiet, epoch, rows[epoch])
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_first_step_after_a_resume_is_exact(monkeypatch):
    ranks, rows = ThreadRanks(3, monkeypatch), sequence()
    runs = make_runs(SkipBroadcast(EpochAdaptive(1), Quantized(bits=2)))
    for halo, read in zip(forward(ranks, runs, 5, rows[5]), READ, strict=True):
        assert torch.equal(halo, rows[5][list(read)])
    # versions are staggered from there: 5, 4, 5, so that rank 1 sends in epoch 6
    assert all(np.array_equal(run.layers[1].versions, [5, 4, 5]) for run in runs)
    for run in runs:
        run.ledger.clear()
    forward(ranks, runs, 6, rows[6])
    assert [run.ledger.sent_rows[1] for run in runs] == [0, 2, 0]


QUANTISED_BOTH_WAYS = Quantized(bits=2, backward_bits=2, backward_threshold=4.0)
EXACT_STEPS = {
    "warm-up": (SkipBroadcast(EpochFixed(1), QUANTISED_BOTH_WAYS, warmup_epochs=3), 0),
    "end of the warm-up": (SkipBroadcast(EpochFixed(1), QUANTISED_BOTH_WAYS, warmup_epochs=3), 2),
    "first under a bound": (SkipBroadcast(EpochFixed(1), QUANTISED_BOTH_WAYS), 0),
    "resume": (QUANTISED_BOTH_WAYS, 5),
}


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("name", list(EXACT_STEPS))
def test_gradients_of_an_exact_step_are_exact(name, pulls, monkeypatch):
    policy, epoch = EXACT_STEPS[name]
    rows = sequence()[0]

    def gradients(policy, epoch):
        ranks, runs = ThreadRanks(3, monkeypatch), make_runs(policy, pulls)

        def step(rank):
            runs[rank].begin_step(epoch)
            layer = runs[rank].layers[1]
            transfer = layer.send(rows[own(rank)].clone(), True)
            halo = transfer.wait()
            if pulls:
                return layer.pull(rows[own(rank)].clone()).wait()
            transfer.send_back(halo)
            return transfer.wait_back()

        return ranks.run(step)

    exact, quantised = gradients(HaloExchange(), 0), gradients(Quantized(2, delta=False, backward_bits=2), 0)
    assert all(torch.equal(got, wanted) for got, wanted in zip(gradients(policy, epoch), exact, strict=True))
    assert not all(torch.equal(got, wanted) for got, wanted in zip(quantised, exact, strict=True))


OVERLAPPING = [
    HaloExchange(),
    BroadcastExchange(),
    Quantized(bits=8, delta=False),
    Quantized(bits=4, backward_threshold=1.0),
    *(
        SkipBroadcast(bound, rows=rows)
        for bound in (EpochFixed(1), EpochAdaptive(1), VariationGap(0.1))
        for rows in ("block", "row")
    ),
]


@each_value
@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("policy", OVERLAPPING, ids=repr)
def test_whoever_sends_can_work_while_others_are_late(policy, pulls, monkeypatch):
    """Rank 2 sends nothing before the others have been given back their time."""
    ranks, runs, rows = ThreadRanks(3, monkeypatch), make_runs(policy, pulls), sequence()

    def in_turn(rank, turns, start):
        if rank == 2:
            assert turns.wait(5), "a rank waits for a late one before it can work"
        transfer = start()
        if rank != 2:
            turns.arrive()
        return transfer

    def step(rank, epoch, turns):
        run, layer = runs[rank], runs[rank].layers[1]
        run.begin_step(epoch)
        transfer = in_turn(rank, turns[0], lambda: layer.send(rows[epoch][own(rank)].clone(), True))
        halo = transfer.wait()
        if pulls:
            in_turn(rank, turns[1], lambda: layer.pull(rows[epoch][own(rank)].clone())).wait()
        else:
            in_turn(rank, turns[1], lambda: transfer.send_back(halo.clone()))
            transfer.wait_back()

    for epoch in range(3):
        turns = Turns(2), Turns(2)
        ranks.run(lambda rank, epoch=epoch, turns=turns: step(rank, epoch, turns))


class Turns:
    """Lets the late one go once so many others have arrived."""

    def __init__(self, num_others):
        self._others = threading.Semaphore(0)
        self._num_others = num_others

    def arrive(self):
        self._others.release()

    def wait(self, timeout):
        return all(self._others.acquire(timeout=timeout) for _ in range(self._num_others))
