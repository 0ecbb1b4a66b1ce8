"""Gradients that come through the exchanges themselves, on three ranks in threads, against finite differences."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model.row_blocks import NUM_NODES, OFFSETS, make_rows
from strategy.thread_ranks import ThreadRanks

from lightning_gnnscale.model import GAT, GCN, SGC, GraphSAGE
from lightning_gnnscale.strategy.exchange import BroadcastExchange, EpochFixed, HaloExchange, NoExchange, SkipBroadcast
from lightning_gnnscale.strategy.exchange.run import ExchangeRun, LocalRows

IN, HIDDEN, OUT, EPOCH = 5, 4, 3, 1
EXCHANGES = {
    "push": HaloExchange(),
    "pull": HaloExchange(backward="pull"),
    "blocks": BroadcastExchange(),
    "none": NoExchange(),
    # halo rows of epoch 0 stand as constants in epoch 1
    "stale, dropped": SkipBroadcast(EpochFixed(1), remote_gradient="drop"),
    "stale blocks, dropped": SkipBroadcast(EpochFixed(1), BroadcastExchange(), remote_gradient="drop"),
}
CASES = [(kind, name) for kind in (GCN, GraphSAGE, GAT, SGC) for name in EXCHANGES if (kind, name) != (GAT, "pull")]
CPU = torch.device("cpu")


def build(kind):
    torch.manual_seed(0)
    if kind is SGC:
        return SGC(IN, None, OUT, num_layers=3, input_dropout=1e-9).double()  # dropout: nothing is kept
    options = {"heads": 2} if kind is GAT else {}
    return kind(IN, HIDDEN, OUT, num_layers=3, dropout=0.0, activation="elu", **options).double()


def start(policy, rows, layers):
    block = SimpleNamespace(
        rank=rows.rank,
        world_size=len(OFFSETS) - 1,
        offsets=np.array(OFFSETS),
        halo_nodes=rows.node_ids[rows.num_local :].numpy(),
        send_rows=tuple(own.numpy() for own in rows.send_rows),
        symmetric=True,
        num_local=rows.num_local,
        num_halo=len(rows.node_ids) - rows.num_local,
    )
    plan = policy.plan()
    if plan is None:
        return LocalRows(block, layers, CPU)
    return ExchangeRun(plan, block, layers, [plan.backward == "pull"] * len(layers), CPU)


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.__name__}, {name}" for kind, name in CASES])
def test_gradients_equal_finite_differences(kind, name, monkeypatch):
    """The loss of all ranks by a parameter of which every rank has its copy, after one step that fills the caches."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_NODES, IN, dtype=torch.float64, generator=generator)
    weight = torch.randn(NUM_NODES, OUT, dtype=torch.float64, generator=generator)
    model, blocks, ranks = build(kind), make_rows(), ThreadRanks(3, monkeypatch)
    first = copy.deepcopy(model)

    def losses(changed, backward=False):
        models = [copy.deepcopy(first) for _ in blocks]
        runs = [start(EXCHANGES[name], rows, list(own.convs)) for own, rows in zip(models, blocks, strict=True)]

        def train(rank):
            own, rows, loss = models[rank], blocks[rank], None
            for epoch in range(EPOCH + 1):
                if epoch == EPOCH:
                    own.load_state_dict(changed.state_dict())
                runs[rank].begin_step(epoch)
                own.zero_grad()
                edges = own.row_edges(rows.block, rows.node_ids, {}, own.local_only)
                out = own.forward_rows(x[edges.node_ids], edges)
                loss = (out * weight[rows.node_ids[: rows.num_local]]).sum()
                if backward or epoch < EPOCH:
                    loss.backward()
            assert bool(runs[rank].ledger.bytes) == (name != "none")
            return float(loss.detach()), [p.grad for p in own.parameters()]

        return ranks.run(train)

    with torch.no_grad():  # what is held is not what is fresh
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    found = [sum(same) for same in zip(*(grads for _, grads in losses(model, backward=True)), strict=True)]
    step = 1e-5
    for parameter, grad in zip(model.parameters(), found, strict=True):
        flat = parameter.data.view(-1)
        place, values = len(flat) // 2, []
        before = float(flat[place])
        for moved in (before + step, before - step):
            flat[place] = moved
            values.append(sum(loss for loss, _ in losses(model)))
        flat[place] = before
        # truncation: step**2 x third derivatives of order 100; rounding: 1e-14 x losses of order 10 / step
        difference = (values[0] - values[1]) / (2 * step)
        assert difference == pytest.approx(float(grad.view(-1)[place]), abs=1e-7)
