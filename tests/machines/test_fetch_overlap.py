"""Fetching behind training: links with 1.2 times the capacity that batches need hold training up by at most 5%."""

import json
import shutil

import pytest
from several_machines import Machine, cannot_be_made, machines, start_ray, start_training, wait_for
from test_training import DISTDGL, write

pytestmark = [
    pytest.mark.skipif(cannot_be_made() is not None, reason=str(cannot_be_made())),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]
EPOCHS, SPARE = 4, 1.2
WORDS = [*DISTDGL, f"trainer.max_epochs={EPOCHS}", "trainer.limit_val_batches=0", "datamodule.batch_size=256"]
WORDS += ["model.backbone.hidden_channels=512", "sampler.fanouts=[10,5]", "callbacks.checkpoint=null"]


def trained(made: list[Machine]) -> tuple[float, float, float]:
    """Train; return an epoch's seconds, the bytes that a machine received in it, and the share that it waited."""
    start_ray(made)
    wait_for(made, start_training(made, WORDS), limit_s=800)
    lines = (made[0].folder / "home" / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    averages = [event for event in events if event["event"] == "average" and event["rank"] == 0]
    reads = [event for event in events if event["event"] == "owner_reads"]
    received = sum(event["bytes_away"] for event in reads) / len(made) + sum(event["bytes"] for event in averages)
    seconds = (averages[-1]["time"] - averages[0]["time"]) / (EPOCHS - 1)
    return seconds, received / EPOCHS, max(event["waiting_share"] for event in reads)


def test_training_waits_little_where_links_carry_a_fifth_more_than_batches_need(tmp_path):
    store = write(tmp_path / "store", 60_000, 900_000, 256)
    needed, shares = [], []
    for number in range(2):
        rate = f"{round(SPARE * needed[0] * 8)}bit" if number else "10gbit"
        (tmp_path / f"made{number}").mkdir()
        with machines(2, tmp_path / f"made{number}", rate=rate) as made:
            for machine in made:
                shutil.copytree(store, machine.folder / "store")
            seconds, received, share = trained(made)
        needed.append(received / seconds)
        shares.append(share)
        print(
            f"link {rate}: {seconds:.1f} s an epoch, {received / 1e6:.0f} MB received in it, "
            f"{needed[-1] * 8 / 1e6:.0f} Mbit/s; blocked {shares[-1]:.1%}"
        )
    assert shares[1] <= 0.05
