"""A rank that dies in the middle of an epoch: the others end with one line, wherever they wait for it."""

import os
import signal

import pytest
import torch
from full_graph_runs import fit, make_model, write_store
from processes import launch

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import EpochAdaptive, HaloExchange, Quantized, SkipBroadcast
from tests.tiers import first

LOST = 1
POLICIES = {
    "pushed": HaloExchange(),
    "pulled": Quantized(4, backward="pull"),
    "skipped": SkipBroadcast(EpochAdaptive(1)),
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(folder, root, exchange, moment):
    """Kill a rank in epoch 1 between the exchanges of two layers; the others leave without the launcher's barrier."""
    rank, model = torch.distributed.get_rank(), make_model("gcn")

    def on_forward(module, arguments, output):
        if not model.training or model.current_epoch != 1:
            return
        if moment == "forward":
            die()
        output.register_hook(lambda gradient: die())

    def on_validation_batch_end(*arguments):
        # behind the last exchange: the others wait for this rank's metrics
        if model.current_epoch == 1:
            die()

    if rank == LOST and moment == "validation":
        model.on_validation_batch_end = on_validation_batch_end
    elif rank == LOST:
        # what stands between the first exchanged layer and the second
        model.backbone.norms[1].register_forward_hook(on_forward)
    try:
        fit(folder, root, model, exchange, max_epochs=3, limit_val_batches=1.0)
    except StrategyError as error:
        torch.save(("ok", str(error)), folder / f"rank{rank}.pt")
        os._exit(0)


CASES = [(name, moment) for name in POLICIES for moment in ("forward", "backward")] + [("pushed", "validation")]


@first(1)
@pytest.mark.parametrize(("name", "moment"), CASES)
def test_a_killed_rank_ends_the_others_with_one_line(tmp_path, name, moment):
    root = write_store(tmp_path / "store")
    # The process group's timeout is 40 s; starting takes its time too.
    messages = launch(3, train_and_die, tmp_path / "run", root, POLICIES[name], moment, killed=(LOST,), limit_s=120)
    for rank in (0, 2):
        message = messages[rank]
        assert "\n" not in message
        assert message.startswith(f"rank {rank}: ") and "was lost" in message and "last checkpoint" in message
        waited = ["reducing a metric"] if moment == "validation" else ["exchanging rows", "averaging gradients"]
        assert any(what in message for what in waited), message
