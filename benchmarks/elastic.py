"""Training on numbers of processes that change: the same weights after any schedule, and what that costs."""

import random
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import lightning_gnnscale as gs
from lightning_gnnscale.cli.run_paths import CHECKPOINTS, last_checkpoint
from lightning_gnnscale.errors import GNNScaleError, check_count

from .elastic_process import OPTIMIZERS, Fit, Workers
from .present import LEFT, grouped, show
from .runner import Case, Runner, benchmark, check_names, digest, write_csv

POLICIES = ("gradient_averaging", "model_averaging")
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
NUM_PARTS, NUM_EPOCHS = 8, 3
# What schedules train, by optimizer: batches of parts and of the whole graph, windows of batches, clipped gradients.
_DATA = {
    "momentum": {"scope": "part", "interleave_parts": 2, "batch_size": 4},
    "adam": {"scope": "graph", "batch_size": 2},
}
_TRAINER = {"momentum": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, "adam": {}}
_SOURCES = (gs.Threads(1), gs.Threads(2, prefetch_batches=5))
COLUMNS = {
    "policy": ("policy", LEFT),
    "optimizer": ("optimizer", LEFT),
    "precision": ("precision", LEFT),
    "schedules": ("schedules", "d"),
    "pieces": ("pieces", "d"),
    "kills": ("kills", "d"),
    "digests": ("digests", "d"),
    "digest": ("of the weights", LEFT),
}
PRICE_COLUMNS = {
    "processes": ("processes", "d"),
    "in_any_order_cpu_s": ("CPU-s, any order", ".2f"),
    "cpu_s": ("CPU-s, by logical rank", ".2f"),
    "ratio": ("ratio", ".3f"),
}


@dataclass(frozen=True)
class ElasticBench:
    """Train by random schedules of numbers of processes, and compare all bits of the weights with an undisturbed run's.

    A piece of a schedule runs on 1 to `max_processes` processes, and ends within an epoch: it stops, or SIGKILL ends a
    rank at a random moment. The next one goes on from the last checkpoint, on another number of them. Under model
    averaging checkpoints are those of ends of epochs. Schedule 0 is one process that nobody disturbs.

    Writes `rows.csv` (one row a schedule), `elastic.csv`, `price.csv`, checkpoints and the output of processes.

    Attributes:
        policies, optimizers, precisions: Every combination is trained.
        schedules: Random schedules, over all combinations, >= 1.
        max_processes: Processes at most, and logical ranks, 1 to 8.
        turns: Turns in which CPU time is compared with that of an all-reduce in any order.
        price_processes: Numbers of processes of that comparison, as many as logical ranks; none: it is left out.
        price_nodes: Nodes of its graph, >= 100.
    """

    policies: Sequence[str] = POLICIES
    optimizers: Sequence[str] = ("momentum", "adam")
    precisions: Sequence[str] = ("32-true",)
    schedules: int = 100
    max_processes: int = 8
    turns: int = 5
    price_processes: Sequence[int] = (2, 4)
    price_nodes: int = 20_000
    seed: int = 0

    def __post_init__(self):
        check_names("policies", self.policies, POLICIES)
        check_names("optimizers", self.optimizers, OPTIMIZERS)
        check_names("precisions", self.precisions, PRECISIONS)
        check_count("bench.schedules", self.schedules)
        check_count("bench.turns", self.turns)
        check_count("bench.max_processes", self.max_processes)
        if self.max_processes > NUM_PARTS:
            raise ValueError(f"bench.max_processes must be at most {NUM_PARTS}, one a part, got {self.max_processes}")
        if self.price_nodes < 100:
            raise ValueError(f"bench.price_nodes must be at least 100, got {self.price_nodes}")

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"schedules": a row a combination, with the number of digests of its weights; "price": rows}."""
        with Workers(runner.folder / "processes") as workers:
            rows = runner.rows(self._cases(runner.folder, workers))
            price = runner.rows(self._prices(runner.folder, workers), "price.csv")
        found = [_summary(key, own) for key, own in grouped(rows, "policy", "optimizer", "precision").items()]
        write_csv(runner.folder / "elastic.csv", found)
        caption = "digests: of all bits of the weights, over all schedules and a process that nobody disturbs"
        title = f"Random schedules of 1 to {self.max_processes} processes"
        show(found, COLUMNS, title, caption)
        show(price, PRICE_COLUMNS, "Training, CPU seconds of all processes, medians of turns")
        return {"schedules": found, "price": price}

    def _cases(self, folder: Path, workers: Workers) -> Iterator[Case]:
        combinations = list(product(self.policies, self.optimizers, self.precisions))
        settings = digest(self.max_processes, self.seed, _DATA, _TRAINER, NUM_EPOCHS)
        lengths: dict[tuple, int] = {}
        numbers = [(0, one) for one in combinations]
        numbers += [(1 + at, combinations[at % len(combinations)]) for at in range(self.schedules)]
        for number, combination in numbers:
            key = dict(zip(("policy", "optimizer", "precision"), combination, strict=True))
            key |= {"schedule": number, "settings": settings}
            given = (combination, number, lengths, folder, workers)
            yield Case(key, partial(self._run_schedule, *given))

    def _run_schedule(
        self, combination: tuple, number: int, lengths: dict[tuple, int], folder: Path, workers: Workers
    ) -> dict[str, Any]:
        """Return the row of one schedule."""
        store = _store(folder / "store", 240, self.seed)
        runs = folder / "run"
        shutil.rmtree(runs, ignore_errors=True)
        policy, optimizer, precision = combination
        data, trainer = _DATA[optimizer], _TRAINER[optimizer] | {"max_epochs": NUM_EPOCHS}
        if policy == "model_averaging":
            data, trainer = {"batch_size": data["batch_size"]}, {"max_epochs": 2 * NUM_EPOCHS}
        fit = Fit(store, str(runs), policy, optimizer, precision, self.max_processes, data, trainer)
        if number == 0 or combination not in lengths:
            ((_, whole),) = workers.run(replace(fit, save_steps=None), 1)
            lengths[combination] = whole["batches"]
            if number == 0:
                return _row([1], 0, [whole])
        rng = random.Random(f"{self.seed} {number}")
        told, kills = [], 0
        disturbed = rng.randint(2, 5)
        while True:
            processes = rng.randint(1, self.max_processes)
            told.append(processes)
            piece = replace(
                fit,
                save_steps=rng.randint(1, 3),
                data={**data, "source": rng.choice(_SOURCES)},
                resume=last_checkpoint(str(runs)) if any((runs / CHECKPOINTS).glob("*.ckpt")) else None,
            )
            batches = lengths[combination] if policy == "gradient_averaging" else lengths[combination] // processes
            after, kill = rng.randint(1, max(1, batches // 3)), None
            if len(told) <= disturbed and rng.random() < 0.6:
                kill = (rng.randrange(processes), after, rng.choice((0, 0.01 * rng.random(), 0.1 * rng.random())))
            elif len(told) <= disturbed:
                piece = replace(piece, stop_after=after)
            ended = workers.run(piece, processes, kill)
            kills += any(how == "killed" for how, _ in ended)
            found = [what for how, what in ended if how == "ended"]
            if len(found) == processes and found[0]["digest"] is not None:
                break
            if kill is None and len(found) < processes:
                raise GNNScaleError(f"schedule {number}: nobody was killed, and a process was lost: {ended}")
        return _row(told, kills, found)

    def _prices(self, folder: Path, workers: Workers) -> Iterator[Case]:
        for processes in self.price_processes:
            key = {"processes": processes, "settings": digest(self.price_nodes, self.seed, self.turns)}
            yield Case(key, partial(self._price, processes, folder, workers))

    def _price(self, processes: int, folder: Path, workers: Workers) -> dict[str, Any]:
        """Return CPU seconds of training by logical rank, and with an all-reduce in any order."""
        store = _store(folder / "price_store", self.price_nodes, self.seed)
        data, trainer = {"batch_size": 256}, {"max_epochs": 3}
        given = (store, str(folder / "run"), "gradient_averaging", "adam", "32-true", processes, data, trainer)
        fit, turns = Fit(*given, width=128), []
        for turn in range(self.turns + 1):
            orders = (True, False) if turn % 2 else (False, True)
            taken = {one: workers.run(replace(fit, ordered=one), processes) for one in orders}
            turns.append({one: sum(what["cpu_s"] for _, what in ended) for one, ended in taken.items()})
        turns = turns[1:]
        return {
            "in_any_order_cpu_s": round(statistics.median(turn[False] for turn in turns), 3),
            "cpu_s": round(statistics.median(turn[True] for turn in turns), 3),
            "ratio": round(statistics.median(turn[True] / turn[False] for turn in turns), 4),
        }


run = benchmark(ElasticBench)


def _row(processes: list[int], kills: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a schedule's row says: its pieces, and a digest of the weights that all processes end with."""
    digests = sorted({one["digest"] for one in found})
    return {
        "processes": " ".join(map(str, processes)),
        "kills": kills,
        "steps": found[0]["steps"],
        "digest": " ".join(digests),
    }


def _summary(key: tuple, rows: list[dict]) -> dict[str, Any]:
    """Return what the schedules of a combination have in common."""
    digests = sorted({one for row in rows for one in str(row["digest"]).split()})
    counted = [row for row in rows if row["schedule"]]
    return {
        **dict(zip(("policy", "optimizer", "precision"), key, strict=True)),
        "schedules": len(counted),
        "pieces": sum(len(str(row["processes"]).split()) for row in counted),
        "kills": sum(row["kills"] for row in counted),
        "digests": len(digests),
        "digest": " ".join(digests),
    }


def _store(root: Path, num_nodes: int, seed: int) -> str:
    """Write a generated graph in parts of nearly one size, unless it is there; return its folder."""
    if not root.exists():
        rng, nodes = np.random.default_rng(seed), np.arange(num_nodes)
        ring = np.stack([nodes, (nodes + 1) % num_nodes])  # nobody is alone: a batch norm of one row is refused
        stream = gs.open_edge_stream(
            np.concatenate([ring, rng.integers(0, num_nodes, (2, 4 * num_nodes))], 1), num_nodes, to_undirected=True
        )
        parts = gs.Partitioning((nodes * NUM_PARTS // num_nodes).astype(np.int32), NUM_PARTS, "given", {}, 0)
        chosen, labels = rng.random(num_nodes) < 0.5, rng.integers(0, 4, num_nodes)
        features = rng.normal(size=(num_nodes, 16)).astype(np.float32)
        masks = {"train": chosen, "test": ~chosen}
        gs.write_partition_store(root, stream, parts, features=features, labels=labels, masks=masks)
    return str(root)
