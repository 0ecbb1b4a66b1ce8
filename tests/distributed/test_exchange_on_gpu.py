"""Exchanges where rows lie on a device: the weights of one process, equal replicas, the same rows on both sides."""

import os

import pytest
import torch
from full_graph_runs import fit, largest_difference, make_model, write_store
from lightning.pytorch.callbacks import Callback
from processes import launch
from user_models import classify, make_user_model

from lightning_gnnscale.strategy import HaloExchange, Quantized, SkipBroadcast, VariationGap

EXACT = {"halo": HaloExchange(backward="push"), "pulled": HaloExchange(backward="pull")}
HELD = {
    "4-bit differences": Quantized(4, backward_threshold=1.0),
    "ternary differences": Quantized(2, backward_threshold=1.0),
    "changed rows": SkipBroadcast(VariationGap(0.05), rows="row"),
    "changed rows in 8 bits": SkipBroadcast(VariationGap(0.05), Quantized(8), rows="row"),
}
USER_MODELS = ("own forward", "GCN", "GAT", "own attention", "SAGE, LSTM")
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]


class Held(Callback):
    """Keeps, of each layer, what this rank holds for the other as its reader, and what it has received."""

    def on_train_end(self, trainer, pl_module):
        run, other = trainer.strategy._exchange_run, 1 - trainer.global_rank
        self.sent, self.received = [], []
        for layer in run.layers[1:]:
            self.sent.append(layer.sent.at(run.clock.epoch)[run.route.leaving[other]].cpu())
            self.received.append(layer.received.at(run.clock.epoch).split(list(run.route.arriving))[other].cpu())


def run_policies(folder, root, device):
    here = {"max_epochs": 8, "limit_val_batches": 1.0}
    world_size = int(os.environ["WORLD_SIZE"])
    if device == "gpu":
        # Each process is a node of its own, so that all may take the first GPU.
        os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        here |= {"accelerator": "gpu", "devices": 1, "num_nodes": world_size}
    results = {}
    for kind in ("gcn", "gat"):
        for name, policy in EXACT.items():
            if (kind, name) != ("gat", "pulled"):
                results[kind, name] = fit(folder, root, make_model(kind, dropout=0.3), policy, **here)[0]
    for name in USER_MODELS:
        results[name, "halo"] = fit(folder, root, classify(make_user_model(name)), EXACT["halo"], **here)[0]
    for name, policy in HELD.items() if world_size == 2 else ():
        held = Held()
        weights, _ = fit(folder, root, make_model("gcn", dropout=0.3), policy, callbacks=[held], **here)
        results[name] = weights, held.sent, held.received
    return {key: _to_cpu(result) for key, result in results.items()}


def _to_cpu(result):
    if isinstance(result, tuple):
        return _to_cpu(result[0]), *result[1:]
    return {name: tensor.cpu() for name, tensor in result.items()}


@pytest.fixture(scope="module", params=DEVICES)
def runs(request, tmp_path_factory):
    """Of one process and of two, each rank's results."""
    folder = tmp_path_factory.mktemp("device")
    root = write_store(folder / "store")
    return {n: launch(n, run_policies, folder / str(n), root, request.param, limit_s=200) for n in (1, 2)}


CASES = [("gcn", "halo"), ("gcn", "pulled"), ("gat", "halo"), *((name, "halo") for name in USER_MODELS)]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_processes_equal_one(runs, case):
    for results in runs[2]:
        assert largest_difference(results[case], runs[1][0][case]) <= 1e-10


@pytest.mark.parametrize("name", list(HELD))
def test_both_sides_hold_the_same_bits(runs, name):
    (weights, *sides), (other_weights, *other_sides) = (results[name] for results in runs[2])
    assert all(torch.equal(tensor, other_weights[key]) for key, tensor in weights.items())
    for sent, received in [(sides[0], other_sides[1]), (other_sides[0], sides[1])]:
        assert len(sent) == 2
        for here, there in zip(sent, received, strict=True):
            assert len(here) and torch.equal(here, there)
