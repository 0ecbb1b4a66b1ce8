"""What an epoch is predicted to take on several machines, and takes on machines made of namespaces."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_gnnscale.dataset import load_npz
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partition_store import StoreSource
from tests.machines.several_machines import cannot_be_made, machines, start_ray, start_training, wait_for

from .present import LEFT, show
from .runner import Case, Runner, benchmark, digest, machine_line

_MIB = 2**20
COLUMNS = {
    "training": ("train", ">"),
    "preparing": ("prepare", ">"),
    "link_mbit": ("link\nMbit/s", ">"),
    "bound_by": ("bound by", LEFT),
    "predicted_s": ("predicted\ns", ",.1f"),
    "measured_s": ("measured\ns", ",.1f"),
    "seconds_ratio": ("times", ".2f"),
    "predicted_bytes": ("predicted\nMiB", lambda number: f"{number / _MIB:,.1f}"),
    "measured_bytes": ("measured\nMiB", lambda number: f"{number / _MIB:,.1f}"),
    "bytes_ratio": ("times", ".2f"),
}
_COPIES = ["datamodule.scope=graph", "strategy/weights=gradient_averaging"]
_OWNERS = ["datamodule.scope=graph", "rows=owners", "strategy/weights=gradient_averaging"]
_PREPARED = [*_OWNERS, "source=ray", "datamodule.seed_order=part", "source.address=auto", "source.label=prepare"]


@dataclass(frozen=True)
class MachinesBench:
    """Train on machines made of namespaces, and compare seconds and bytes of an epoch with what is predicted.

    The prediction takes the seconds of a batch from a run on one machine, and counts bytes by sampled batches. All
    machines share the processors of this one, so that links bound an epoch only where they are slow. Takes root and the
    extra [ray]. Writes `machines.csv`; each run's page has the same figures.

    Attributes:
        graph: A name that `load_npz` knows.
        num_parts: Parts of its store.
        set_ups: [machines that train, machines that prepare, Mbit/s of a link] of each run. Beside machines that
            prepare one trains.
        owners: Whether machines hold the rows of their parts alone, and ask each other by Ray; False: each reads its
            own copy of the store, and gradients alone travel.
        epochs: Epochs of a run, >= 2: the first is not counted.
        overrides: Further settings of the runs.
    """

    graph: str = "amazon_computers"
    num_parts: int = 4
    set_ups: Sequence[Sequence[int]] = ((2, 0, 20), (2, 0, 10), (3, 0, 10), (1, 2, 10))
    owners: bool = True
    epochs: int = 3
    overrides: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self):
        for one in self.set_ups:
            whole = len(one) == 3 and all(isinstance(number, int) for number in one)
            if not whole or one[0] < 1 or one[1] < 0 or one[2] < 1 or (one[1] and one[0] > 1):
                raise ValueError(
                    "bench.set_ups must hold [training, preparing, Mbit/s], with one that trains beside those that "
                    f"prepare, got {list(one)}"
                )
        if self.epochs < 2:
            raise ValueError(f"bench.epochs must be at least 2, got {self.epochs}")

    def measure(self, runner: Runner) -> list[dict]:
        """Return a row for each set-up: bytes are of rows, batches and averages."""
        if cannot_be_made():
            raise GNNScaleError(f"machines cannot be made here: {cannot_be_made()}")
        store, alone = runner.folder / "store", runner.folder / "alone"

        def case(set_up: Sequence[int]) -> Case:
            training, preparing, link = set_up
            facts = (self.owners, self.graph, self.num_parts, self.epochs, list(self.overrides), self.seed)
            key = {"training": training, "preparing": preparing, "link_mbit": link, "settings": digest(*facts)}
            return Case(key, lambda: self._measured(store, alone, *set_up))

        rows = runner.rows(map(case, self.set_ups), "machines.csv")
        show(rows, COLUMNS, f"an epoch of {self.graph}, predicted and measured", machine_line())
        return rows

    def _measured(self, store: Path, alone: Path, training: int, preparing: int, link: int) -> dict:
        if not store.exists():
            StoreSource(load_npz(self.graph), store, num_parts=self.num_parts, seed=self.seed).prepare(self.num_parts)
        if not (alone / "summary.json").exists():
            self._run(store, alone, _COPIES, 1, 0, 1000)
        shared = _PREPARED if preparing else _OWNERS if self.owners else _COPIES
        words = [*shared, f"machines.link_gbit={link / 1000}", "machines.cores=1"]
        words += ["machines.run=/mnt/alone", f"machines.preparing={preparing}", "machines.price_per_hour=1"]
        words += [f"source.num_workers={preparing}"] if preparing else []
        folder = store.parent / "runs" / f"{training}-{preparing}-{link}"
        found = self._run(store, folder, words, training, preparing, link, alone)["machines"]
        predicted, measured = found["predicted"], found["measured"]
        sent = [one["sent_bytes"] + one["averaged_bytes"] for one in (predicted, measured)]
        return {
            "bound_by": predicted["bound_by"],
            "predicted_s": round(predicted["seconds"], 3),
            "measured_s": round(measured["seconds"], 3),
            "seconds_ratio": round(predicted["seconds"] / measured["seconds"], 3),
            "predicted_bytes": round(sent[0]),
            "measured_bytes": round(sent[1]),
            "bytes_ratio": round(sent[0] / max(sent[1], 1), 3),
        }

    def _run(self, store, folder: Path, words: list[str], training: int, preparing: int, link: int, alone=None) -> dict:
        """Train on machines; leave the run's folder, and return its summary."""
        words = [*words, f"trainer.max_epochs={self.epochs}", "evaluation=sampled", *self.overrides]
        words += [f"seed={self.seed}", f"trainer.check_val_every_n_epoch={self.epochs}"]
        with tempfile.TemporaryDirectory() as made_in:
            with machines(training + preparing, Path(made_in), f"{link}mbit") as made:
                for machine in made:
                    shutil.copytree(store, machine.folder / "store")
                    if alone is not None:
                        shutil.copytree(alone, machine.folder / "alone")
                if training + preparing > 1 and (self.owners or preparing):
                    start_ray(made, "prepare" if preparing else None)
                trains = made[:training]
                wait_for(trains, start_training(trains, words), limit_s=1800.0)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(made_in) / "machine0" / "home" / "run", folder)
        return json.loads((folder / "summary.json").read_text())


run = benchmark(MachinesBench)
