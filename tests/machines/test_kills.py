"""Workers, holders of parts and whole machines that are killed: the same weights, or one line, and no hang."""

import random
import shutil
import time
from contextlib import suppress

import psutil
import pytest
from several_machines import Machine, cannot_be_made, machines, start_ray, start_training
from test_training import DISTDGL, EMBEDDINGS, on_one_machine, same, weights_of, write

pytestmark = [
    pytest.mark.skipif(cannot_be_made() is not None, reason=str(cannot_be_made())),
    pytest.mark.timeout(900),
    pytest.mark.slow,
]
LONGER = ["trainer.max_epochs=12", "model.backbone.hidden_channels=16", "datamodule.batch_size=32"]
PREPARED = ["recipe=armada", *LONGER, "source.num_workers=4", "source.batches_per_group=1"]
ASKED = ["source.address=auto", "source.label=prepare", "source.timeout_s=30"]
END_S = 240  # within which a run ends, whatever was killed


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("kills") / "store", 3000, 20_000, 16)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, store):
    return on_one_machine(tmp_path_factory.mktemp("one") / "here", store, 1, PREPARED)


@pytest.fixture(scope="module")
def owned(tmp_path_factory, store):
    return on_one_machine(tmp_path_factory.mktemp("one") / "here", store, 2, [*DISTDGL, *LONGER])


def wait_until_begun(machine: Machine, process) -> None:
    """Wait for the first lines of the metrics, which are there after an epoch."""
    deadline = time.monotonic() + END_S
    while not list((machine.folder / "home" / "run").rglob("metrics.csv")):
        assert process.poll() is None and time.monotonic() < deadline, printed(machine)[-3000:]
        time.sleep(0.05)


def printed(machine: Machine) -> str:
    return (machine.folder / "log.txt").read_text()


def ended(machine: Machine, process, expected) -> str:
    """Return how a run ended: "" with the weights that are expected, else its line."""
    status = process.wait(timeout=END_S)
    if status == 0:
        assert same(weights_of(machine.folder / "home" / "run"), expected)
        return ""
    lines = [line for line in printed(machine).splitlines() if line.startswith("gnnscale: ")]
    assert lines, printed(machine)[-4000:]
    assert "/lightning_gnnscale/" not in printed(machine), printed(machine)[-4000:]  # a traceback of torchrun's may be
    return lines[-1]


def kill_one(chosen: random.Random, made: list[Machine], kinds: tuple[str, ...]) -> int:
    """Kill a process of one of the kinds, if any runs now; return how many were killed."""
    kind = chosen.choice(kinds)
    victims = [process for machine in made for process in machine.processes(f"ray::{kind}")]
    with suppress(psutil.NoSuchProcess, IndexError):
        chosen.choice(victims).kill()
        return 1
    return 0


@pytest.mark.parametrize("seed", range(3))
def test_workers_and_holders_that_are_killed_change_no_weight(tmp_path, store, prepared, seed):
    """Up to 12 kills a run, of processes that prepare; a batch that meets five of them ends the run."""
    chosen, killed = random.Random(seed), 0
    with machines(3, tmp_path) as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        start_ray(made, "prepare")
        [process] = start_training(made[:1], [*PREPARED, *ASKED])
        wait_until_begun(made[0], process)
        while process.poll() is None and killed < 12:
            killed += kill_one(chosen, made, ("PreparationWorker", "PartHolder"))
            time.sleep(chosen.uniform(2.0, 6.0))
        line = ended(made[0], process, prepared)
    print(f"seed {seed}: {killed} kills, {line or 'same weights'}")
    assert killed >= 4 and (not line or "workers ended while they prepared it" in line)


@pytest.mark.parametrize("seed", range(8))
def test_a_machine_that_prepares_is_lost_and_another_makes_its_batches(tmp_path, store, prepared, seed):
    chosen = random.Random(seed)
    with machines(3, tmp_path) as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        start_ray(made, "prepare")
        [process] = start_training(made[:1], [*PREPARED, *ASKED])
        wait_until_begun(made[0], process)
        time.sleep(chosen.uniform(0.0, 4.0))
        assert process.poll() is None, "lost after the end"
        made[1 + seed % 2].end()
        line = ended(made[0], process, prepared)
    print(f"seed {seed}: {line or 'same weights'}")
    assert not line


@pytest.mark.parametrize(
    ("seed", "words"), [*((seed, DISTDGL) for seed in range(8)), *((seed, EMBEDDINGS) for seed in range(2))]
)
def test_a_machine_that_owns_and_trains_is_lost_and_ends_the_run_in_one_line(tmp_path, store, seed, words):
    chosen = random.Random(seed)
    with machines(2, tmp_path) as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        start_ray(made)
        started = start_training(made, [*words, *LONGER, "strategy.timeout=60"])
        wait_until_begun(made[0], started[0])
        time.sleep(chosen.uniform(0.0, 3.0))
        lost = seed % 2
        made[lost].end()
        line = ended(made[1 - lost], started[1 - lost], None)
    print(f"seed {seed}: {line}")
    assert line


@pytest.mark.parametrize("seed", range(2))
def test_holders_of_owned_rows_that_are_killed_change_no_weight(tmp_path, store, owned, seed):
    chosen, killed = random.Random(seed), 0
    with machines(2, tmp_path) as made:
        for machine in made:
            shutil.copytree(store, machine.folder / "store")
        start_ray(made)
        started = start_training(made, [*DISTDGL, *LONGER])
        wait_until_begun(made[0], started[0])
        while started[0].poll() is None and killed < 6:
            killed += kill_one(chosen, made, ("StoreHolder",))
            time.sleep(chosen.uniform(0.1, 2.0))
        line = ended(made[0], started[0], owned)
    print(f"seed {seed}: {killed} kills, {line or 'same weights'}")
    assert killed >= 2 and not line
