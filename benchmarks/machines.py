"""What an epoch is predicted to take on several machines, and takes on machines made of namespaces."""

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lightning_gnnscale.cli.ranks import exit_on_sigterm
from lightning_gnnscale.dataset import GraphDataset, load_npz
from lightning_gnnscale.dataset.generated import generate
from lightning_gnnscale.edge_stream import lfr_graph
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partition_store import StoreSource
from tests.machines.several_machines import cannot_be_made, machines, start_ray, start_training, wait_for

from .present import LEFT, show
from .runner import Case, Runner, benchmark, check_names, digest, machine_line

_MIB = 2**20
_LFR = re.compile(r"lfr:(\d+):(\d+)")
COLUMNS = {
    "graph": ("graph", LEFT),
    "rows": ("rows", LEFT),
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
    "rows_bytes": ("of them\nrows, MiB", lambda number: f"{number / _MIB:,.1f}"),
    "blocked_share": ("blocked by\nfetching", ".1%"),
    "stale_rows": ("rows\nstale", ","),
    "test_acc": ("test\naccuracy", ".1%"),
    "test_loss": ("test\nloss", ".4f"),
}
_AVERAGED = ["strategy/weights=gradient_averaging"]
_LEARNED = "{_target_: lightning_gnnscale.embedding.DistributedEmbedding, dim: 64, staleness: %d}"
ROWS = {
    "owners": [*_AVERAGED, "datamodule.scope=graph", "rows=owners"],
    "learned": [*_AVERAGED, "datamodule.scope=graph", "rows=owners", f"model.inputs={_LEARNED % 0}"],
    "stale": [*_AVERAGED, "datamodule.scope=graph", "rows=owners", f"model.inputs={_LEARNED % 2}"],
    "copies": [*_AVERAGED, "datamodule.scope=graph"],
    "alone": [*_AVERAGED, "datamodule.repartition_every=1"],
}
_ASKS = ("owners", "learned", "stale")  # machines ask each other
_PREPARED = ["source=ray", "datamodule.seed_order=part", "source.address=auto", "source.label=prepare"]


@dataclass(frozen=True)
class MachinesBench:
    """Train on machines made of namespaces, and compare seconds and bytes of an epoch with what is predicted.

    The prediction takes the seconds of a batch from a run on one machine, and counts bytes by sampled batches. All
    machines share the processors of this one, so that links bound an epoch only where they are slow. Takes root and the
    extra [ray]. Writes `machines.csv`; each run's page has the same figures.

    Nothing is validated; after training the test nodes are evaluated exactly, which is in no figure.

    Attributes:
        graphs: Names that `load_npz` knows; "lfr:EDGES:NODES", with 128 features and 16 classes.
        num_parts: Parts of their stores.
        set_ups: [machines that train, machines that prepare, Mbit/s of a link] of each run. Beside machines that
            prepare one trains.
        rows: Where machines have the rows of their batches from, any of "owners": they hold those of their parts alone,
            and ask each other by Ray; "learned": those, and 64 learned numbers of each node; "stale": the same numbers,
            at most two steps old; "copies": each reads its own copy of the store, and gradients alone travel;
            "alone": they train on their parts alone, which change machines every epoch, and gradients alone travel.
            Set-ups with machines that prepare are left out but for the first three.
        epochs: Epochs of a run, >= 2: the first is not counted.
        overrides: Further settings of the runs.
    """

    graphs: Sequence[str] = ("amazon_computers",)
    num_parts: int = 8
    set_ups: Sequence[Sequence[int]] = ((2, 0, 20), (2, 0, 10), (3, 0, 10), (1, 2, 10))
    rows: Sequence[str] = ("owners",)
    epochs: int = 3
    overrides: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self):
        check_names("rows", self.rows, ROWS)
        for name in self.graphs:
            if name.startswith("lfr:") and _LFR.fullmatch(name) is None:
                raise ValueError(f"bench.graphs must hold names of public graphs, or lfr:EDGES:NODES, got {name!r}")
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
        """Return a row for each set-up: bytes are of rows, learned ones among them, batches and averages."""
        if cannot_be_made():
            raise GNNScaleError(f"machines cannot be made here: {cannot_be_made()}")
        cases = [
            self._case(runner.folder, graph, rows, set_up)
            for graph, rows, set_up in product(self.graphs, self.rows, self.set_ups)
            if rows in _ASKS or not set_up[1]
        ]
        found = runner.rows(cases, "machines.csv")
        show(found, COLUMNS, "an epoch, predicted and measured", machine_line())
        return found

    def _case(self, folder: Path, graph: str, rows: str, set_up: Sequence[int]) -> Case:
        training, preparing, link = set_up
        facts = digest(self.num_parts, self.epochs, list(self.overrides), self.seed)
        key = {"graph": graph, "rows": rows, "training": training, "preparing": preparing, "link_mbit": link}
        return Case({**key, "settings": facts}, lambda: self._measured(folder, graph, rows, *set_up))

    def _measured(self, folder: Path, graph: str, rows: str, training: int, preparing: int, link: int) -> dict:
        name = graph.replace(":", "-")
        store, alone = folder / "stores" / name, folder / "runs" / f"{name}-one"
        if not store.exists():
            store.parent.mkdir(exist_ok=True)
            source = StoreSource(_dataset(graph, folder), store, num_parts=self.num_parts, seed=self.seed)
            source.prepare(self.num_parts)
        if not (alone / "summary.json").exists():
            self._run(store, alone, ROWS["copies"], 1, 0, 1000)
        words = [*ROWS[rows], f"machines.link_gbit={link / 1000}", "machines.cores=1"]
        words += ["machines.run=/mnt/alone", f"machines.preparing={preparing}", "machines.price_per_hour=1"]
        words += [*_PREPARED, f"source.num_workers={preparing}"] if preparing else []
        run = folder / "runs" / f"{name}-{rows}-{training}-{preparing}-{link}"
        found = self._run(store, run, words, training, preparing, link, alone, asks=rows in _ASKS)
        predicted, measured = (found["machines"][name] for name in ("predicted", "measured"))
        sent = [one["sent_bytes"] + one["averaged_bytes"] for one in (predicted, measured)]
        return {
            "bound_by": predicted["bound_by"],
            "predicted_s": round(predicted["seconds"], 3),
            "measured_s": round(measured["seconds"], 3),
            "seconds_ratio": round(predicted["seconds"] / measured["seconds"], 3),
            "predicted_bytes": round(sent[0]),
            "measured_bytes": round(sent[1]),
            "bytes_ratio": round(sent[0] / max(sent[1], 1), 3),
            "rows_bytes": round(measured["sent_bytes"]),
            "blocked_share": found.get("fetch_blocked_share"),
            "stale_rows": found.get("stale_rows", 0),
            "test_acc": round(found["metrics"]["test_acc"], 4),
            "test_loss": round(found["metrics"]["test_loss"], 5),
        }

    def _run(
        self, store, folder: Path, words: list[str], training: int, preparing: int, link: int, alone=None, asks=False
    ) -> dict:
        """Train on machines, which ask each other or not; leave the run's folder, and return its summary."""
        words = [*words, f"trainer.max_epochs={self.epochs}", "trainer.limit_val_batches=0", "test=true"]
        words += [*self.overrides, f"seed={self.seed}"]
        with tempfile.TemporaryDirectory() as made_in:
            with exit_on_sigterm(), machines(training + preparing, Path(made_in), f"{link}mbit") as made:
                for machine in made:
                    shutil.copytree(store, machine.folder / "store")
                    if alone is not None:
                        shutil.copytree(alone, machine.folder / "alone")
                if training + preparing > 1 and asks:
                    start_ray(made, "prepare" if preparing else None)
                trains = made[:training]
                wait_for(trains, start_training(trains, words), limit_s=1800.0)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(made_in) / "machine0" / "home" / "run", folder)
        return json.loads((folder / "summary.json").read_text())


def _dataset(name: str, folder: Path) -> GraphDataset:
    """Return a graph of the configuration; a generated one is written to the folder."""
    lfr = _LFR.fullmatch(name)
    if lfr is None:
        return load_npz(name)
    num_edges, num_nodes = map(int, lfr.groups())
    graph = lfr_graph(num_nodes, num_edges, min_community=min(50, num_nodes / 2))
    num_classes = min(16, graph.num_communities)
    return generate(folder=str(folder), num_classes=num_classes, feature_dim=128, **graph.parameters())


run = benchmark(MachinesBench)
