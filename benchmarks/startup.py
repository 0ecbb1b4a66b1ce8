"""How long a user waits: for the package's import compared with its dependencies', and for the first epoch."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from lightning_gnnscale.dataset.npz import data_root
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.events import machine, read_log
from lightning_gnnscale.partition_store.manifest import write_json
from lightning_gnnscale.system import end_with_parent

from .epoch_clock import EpochClock
from .present import LEFT, grouped, show, tell
from .runner import Case, Runner, benchmark, digest, machine_line
from .turns import measure

IMPORTS = {
    "lightning and torch_geometric": "import lightning, torch_geometric",
    "lightning_gnnscale": "import lightning_gnnscale",
    "lightning_gnnscale, every name": "from lightning_gnnscale import *",
}
PEER = "lightning and torch_geometric"
# What is promised: the import costs at most so many times the peer's, a second run on Cora starts training by then.
MOST_IMPORT_RATIO, MOST_FIRST_EPOCH_S = 1.5, 10.0
CORA = ["recipe=cora"]
GENERATED = ["dataset=synthetic", "dataset.num_nodes=2708", "dataset.num_edges=5429", "num_parts=4"]
IMPORT_COLUMNS = {
    "imported": ("imported", LEFT),
    "seconds": ("s", ".2f"),
    "cpu_s": ("CPU-s", ".2f"),
    "ratio": ("ratio", ".2f"),
    "cpu_ratio": ("ratio of CPU-s", ".2f"),
}
TRAINING_COLUMNS = {
    "run": ("run", LEFT),
    "to_first_epoch_s": ("to first epoch", ".2f"),
    "to_its_end_s": ("to its end", ".2f"),
}

_TIMED = """
import time
start, cpu = time.perf_counter(), time.process_time()
{statement}
print(time.perf_counter() - start, time.process_time() - cpu)
"""


@dataclass(frozen=True)
class StartupBench:
    """Measure imports in turns and `gnnscale train` more than once, each in a fresh process.

    Writes `imports.csv`, `training.csv`, `startup.json`, the store and the runs; the imports are one case, and the runs
    another.

    Attributes:
        train: words after `gnnscale train`; None: Cora's recipe, or a generated graph of its size where no public
            graphs are. They are followed for one epoch, without a test.
        import_repeats: turns that count, >= 1, after one that does not; 0 leaves the imports out.
        train_repeats: runs over the store that the first one made, with its compiled kernels; 0 leaves training out.
    """

    train: Sequence[str] | None = None
    import_repeats: int = 5
    train_repeats: int = 3

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return rows by kind.

        Returns:
            {"imports": one row a statement: seconds, CPU seconds and their ratios to the peer's, within a turn;
            "training": one row a run: whether it made the store, seconds from the command to the start of the first
            epoch on the last process, and to its end}.

        Raises:
            GNNScaleError: a process failed, or a second run made a store again.
        """
        found: dict[str, list[dict]] = {"imports": [], "training": []}
        if self.import_repeats:
            case = Case({"settings": digest(self.import_repeats)}, lambda: measure_imports(self.import_repeats), None)
            found["imports"] = runner.rows([case], "imports.csv")
            title = (
                f"Imports in fresh processes, medians of {self.import_repeats} turns; at most {MOST_IMPORT_RATIO} is"
            )
            show(found["imports"], IMPORT_COLUMNS, f"{title} promised", machine_line())
        if self.train_repeats:
            words, repeats = _words(self.train), self.train_repeats
            key = {"settings": digest(*words, repeats)}
            case = Case(key, lambda: measure_training(runner.folder, words, repeats), None)
            found["training"] = rows = runner.rows([case], "training.csv")
            title = (
                f"gnnscale train {' '.join(words)}: seconds from the command; at most {MOST_FIRST_EPOCH_S:.0f} to the "
                "first epoch of a second run on Cora are promised"
            )
            seconds = grouped(rows, "run").get(("second",), [])
            middle = {name: median(row[name] for row in seconds) for name in TRAINING_COLUMNS if name != "run" and rows}
            shown = [*rows, {"run": "second, median", **middle}] if rows else []
            show(shown, TRAINING_COLUMNS, title, machine_line())
        limits = {"import_ratio": MOST_IMPORT_RATIO, "second_run_to_first_epoch_s": MOST_FIRST_EPOCH_S}
        runner.folder.mkdir(parents=True, exist_ok=True)
        write_json(runner.folder / "startup.json", {"limits": limits, **found, "machine": machine()})
        return found


run = benchmark(StartupBench)


def measure_imports(repeats: int) -> list[dict]:
    """Return one row a statement: medians over the turns, and of the ratios within each."""
    ways = {name: lambda statement=statement: _import_seconds(statement) for name, statement in IMPORTS.items()}
    return summarise_imports(measure(ways, repeats))  # the first turn, which does not count, fills the page cache


def summarise_imports(taken: dict[str, list[tuple[float, float]]]) -> list[dict]:
    """Return one row a statement.

    Args:
        taken: statement to (seconds, CPU seconds) of each turn; with the peer's.
    """
    names = ("seconds", "cpu_s", "ratio", "cpu_ratio")
    rows = []
    for name, turns in taken.items():
        figures = np.hstack([turns, np.array(turns) / taken[PEER]])
        medians = np.median(figures, axis=0).round(3).tolist()
        rows.append({"imported": name} | dict(zip(names, medians, strict=True)))
    return rows


def measure_training(output: Path, words: Sequence[str], repeats: int) -> list[dict]:
    """Return one row a run of `gnnscale train`: the first one, then `repeats` over what it left."""
    rows = []
    for index in range(repeats + 1):
        row = _train(output, output / "runs" / str(index), words)
        if index and row["made_store"]:
            raise GNNScaleError(f"{output / 'runs' / str(index)}: the second run made a store again; give no overwrite")
        rows.append({"run": "first" if index == 0 else "second", **row})
    return rows


def _words(train: Sequence[str] | None) -> list[str]:
    if train is not None:
        return list(train)
    root = data_root()
    if root is not None and (root / "cora" / "graph.npz").is_file():
        return CORA
    tell("Cora is left out: no folder of public graphs (set GNNSCALE_DATA); a generated graph of its size")
    return GENERATED


def _import_seconds(statement: str) -> tuple[float, float]:
    seconds, cpu_s = _run([sys.executable, "-c", _TIMED.format(statement=statement)]).splitlines()[-1].split()
    return float(seconds), float(cpu_s)


def _train(output: Path, folder: Path, words: Sequence[str]) -> dict:
    """Run one training; its events carry the same clock as the moment of the command."""
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run's events would be counted again
    own = [
        f"paths.stores={output / 'stores'}",
        f"paths.generated={output / 'generated'}",
        f"hydra.run.dir={folder}",
        f"+callbacks.epoch_clock._target_={EpochClock.__module__}.{EpochClock.__name__}",
        "trainer.max_epochs=1",
        "trainer.enable_progress_bar=false",
        "test=false",
    ]
    start = time.time()
    _run([sys.executable, "-m", "lightning_gnnscale.cli", "train", *own, *words])
    events = read_log(folder / "events.jsonl")

    def came(name: str) -> float:
        times = [event["time"] for event in events if event["event"] == name and event["epoch"] == 0]
        return round(max(times) - start, 3)

    return {
        "made_store": any(event.get("stage") == "partition_store" for event in events),
        "to_first_epoch_s": came("epoch_start"),
        "to_its_end_s": came("epoch"),
        "train": json.dumps(list(words)),
    }


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_parent)
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise GNNScaleError(f"{' '.join(command[1:4])} ...: {told[-1]}")
    return done.stdout
