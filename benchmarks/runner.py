"""The one runner of all benchmarks: each case is measured once, and its rows are appended to a CSV.

A case whose rows are in the CSV is not measured again, so the same command, typed again with the same `hydra.run.dir=`,
goes on at the first case that is missing.

A benchmark is a frozen dataclass, whose fields are its keys on the command line, and `run = benchmark(ThatClass)`.
"""

import csv
import inspect
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.events import PACKAGES, machine
from lightning_gnnscale.rng import fold
from lightning_gnnscale.system import end_with_parent

from .present import tell

AGAIN = ("none", "failed", "all")
# Columns that are always text; elsewhere numbers are read as numbers, and empty cells as None.
_TEXT = ("settings", "shape", "family", "partitioner", "options", "balance", "phases", "notes", "note", "broken")
_TEXT += ("error",)


@dataclass(frozen=True)
class Case:
    """One measurement: of one contender, or of several that are measured in turns.

    Attributes:
        key: What its rows say of the case, plain values by column, by which they are found again. `settings` is a
            digest of what decides the rows besides the other columns.
        measure: Returns further columns of its row, or those of one row per contender.
        contenders: One mapping per row: its columns besides the key. The case is done when all of them have rows. The
            default is a case of one row; None: any number of rows.
    """

    key: Mapping[str, Any]
    measure: Callable[[], dict | list[dict]]
    contenders: Sequence[Mapping[str, Any]] | None = ({},)


def digest(*facts: Any) -> str:
    """Return 8 hexadecimal digits: a digest of the facts' `repr`."""
    return digest_of_text(repr(facts))


def digest_of_text(text: str) -> str:
    """Return 8 hexadecimal digits: a digest of a text."""
    return f"{fold(*text.encode()) >> 32:08x}"


class Benchmark(Protocol):
    """A frozen dataclass of settings; `__post_init__` refuses values that are out of range."""

    def measure(self, runner: "Runner") -> Any:
        """Measure the cases, print tables, write CSV files and plots to `runner.folder`, and return the rows."""


def benchmark(settings: type[Benchmark]) -> Callable[..., Any]:
    """Return the `run` of a benchmark: run(output_dir, *, the fields of the settings, minutes=None, again="none").

    The settings are checked before anything is written. Those that mean the same in all benchmarks are documented here:

    - num_nodes, num_edges, dim: the generated graph, and the number of its float32 features per node;
    - seed: of the generated graph, of the methods, and of the order and the sampling of batches;
    - seeds, overrides: of training runs, over which means are taken, and further overrides of `train` for all of them;
    - repeats: number of measurements of each contender, in turns; the median counts;
    - data_root: folder of public graphs; None: it is searched for.

    Args:
        settings: Class of the settings: the one place of their names, types, defaults, docs and checks. Further
            arguments of `run` are those of `Runner`.
    """
    of_runner = inspect.signature(Runner).parameters
    first, *last = of_runner.values()
    signature = inspect.Signature([first, *inspect.signature(settings).parameters.values(), *last])

    def run(*values: Any, **keys: Any) -> Any:
        given = signature.bind(*values, **keys).arguments
        chosen = settings(**{name: value for name, value in given.items() if name not in of_runner})
        with Runner(**{name: value for name, value in given.items() if name in of_runner}) as runner:
            return chosen.measure(runner)

    run.__signature__, run.__doc__, run.__module__ = signature, settings.__doc__, settings.__module__
    return run


def check_names(key: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError unless all that a setting names is among what is allowed."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ValueError(f"bench.{key} must be of {', '.join(allowed)}; got {', '.join(unknown)}")


class Runner:
    """Measures the cases of a benchmark, within a budget of time; a with-block that says at its end what is left.

    Args:
        output_dir: Folder for all that the benchmark writes.
        minutes: Budget; no case is begun after it. None: no budget.
        again: Which cases are measured again although they have rows: "none", "failed" or "all".

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, output_dir: str | os.PathLike, minutes: float | None = None, again: str = "none"):
        if again not in AGAIN:
            raise ValueError(f"bench.again must be one of {', '.join(AGAIN)}, got {again!r}")
        if minutes is not None and not minutes >= 0:
            raise ValueError(f"bench.minutes must be null or at least 0, got {minutes}")
        self.folder, self.minutes, self.again = Path(output_dir), minutes, again
        self.left = self._seen = 0
        self._began = time.monotonic()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, kind, *_) -> None:
        if self.left and kind is None:
            again = " bench.again=none" if self.again == "all" else ""
            tell(
                f"bench.minutes={self.minutes:g} are over, and {self.left} of {self._seen} cases are left: the same "
                f"command with{again} hydra.run.dir={self.folder} goes on with them",
                soft_wrap=True,
            )

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self.minutes is not None and time.monotonic() - self._began >= 60 * self.minutes

    def rows(
        self,
        cases: Iterable[Case],
        log: str = "rows.csv",
        failed: Callable[[Mapping], bool] = lambda row: bool(row.get("error")),
        say: Callable[[dict], None] | None = None,
    ) -> list[dict]:
        """Return the rows of the cases, in order; those that were not begun in time have none.

        Args:
            cases: Cases, each measured when its rows are missing, one after the other.
            log: Name of the CSV.
            failed: Says whether a row is of a case that failed.
            say: Called with each row that was measured; None: its columns are printed, of several rows the key alone.

        Returns:
            One dict per row: the columns of the key as given, the others as the CSV has them.

        Raises:
            GNNScaleError: the CSV lacks a column of the key.
        """
        file = RowFile(self.folder / log)
        rows = []
        for case in cases:
            self._seen += 1
            found = file.find(case.key, case.contenders)
            wanted = self.again == "all" or (self.again == "failed" and any(map(failed, found)))
            if not found or wanted:
                if self.is_over:
                    self.left += 1
                else:
                    measured = case.measure()
                    measured = [measured] if isinstance(measured, dict) else measured
                    found = file.put(case.key, measured, case.contenders)
                    for row in found if say or len(found) == 1 else [case.key]:
                        (say or _say)(row)
            rows += found
        return rows


def in_fresh_process(function: Callable, *arguments: Any) -> Any:
    """Return what a function of a module returns in a process of its own, which is spawned: it shares no thread.

    It ends with this one, however that ends.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as fresh:
        return fresh.submit(function, *arguments).result()


class RowFile:
    """A CSV of measured rows, each with the machine's columns. A last line that was cut short is dropped.

    Args:
        path: Path of the CSV; its folder is made when the first row is written.
    """

    def __init__(self, path: str | os.PathLike):
        self.path, self._machine = Path(path), machine()
        self._columns, self._rows, self._is_cut = [], [], False
        if self.path.is_file():
            whole = self.path.read_bytes()
            kept = whole[: whole.rfind(b"\n") + 1]
            self._is_cut = len(kept) < len(whole)
            reader = csv.DictReader(io.StringIO(kept.decode(), newline=""))
            self._columns, self._rows = list(reader.fieldnames or ()), list(reader)

    @property
    def rows(self) -> list[dict]:
        """All rows without the machine's columns: numbers as numbers, None for empty cells."""
        return list(map(self._parsed, self._rows))

    def find(self, key: Mapping[str, Any], contenders: Sequence[Mapping[str, Any]] | None = ({},)) -> list[dict]:
        """Return the rows of a case, the latest one of each contender; none if some are missing.

        Raises:
            GNNScaleError: there are rows, and they lack a column of the key.
        """
        if self._rows and not key.keys() <= set(self._columns):
            raise GNNScaleError(
                f"{self.path} has other columns than this version writes: move it, or give another hydra.run.dir="
            )
        own = [row for row in self._rows if _has(row, key)]
        if contenders is None:
            if self._is_cut and own and own[-1] is self._rows[-1]:
                return []  # the row that was cut short may be one of these
            return [self._parsed(row) | dict(key) for row in own]
        latest = [next((row for row in reversed(own) if _has(row, one)), None) for one in contenders]
        pairs = zip(latest, contenders, strict=True)
        return [] if None in latest else [self._parsed(row) | {**key, **one} for row, one in pairs]

    def put(
        self, key: Mapping[str, Any], rows: list[dict], contenders: Sequence[Mapping[str, Any]] | None = ({},)
    ) -> list[dict]:
        """Replace the rows of a case, and return them; they are on the disk then."""
        written = [{name: _text(value) for name, value in {**key, **row, **self._machine}.items()} for row in rows]
        replaced = [{**key, **one} for one in contenders or ({},)]
        kept = [row for row in self._rows if not any(_has(row, one) for one in replaced)]
        columns = [*dict.fromkeys([*self._columns, *(name for row in written for name in row)])]
        columns.sort(key=lambda name: name in self._machine)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, columns, kept + written)
        self._columns, self._rows, self._is_cut = columns, kept + written, False
        return self.find(key, contenders)

    def _parsed(self, row: Mapping[str, str]) -> dict:
        own = {name: value for name, value in row.items() if name not in self._machine}
        return {name: value or "" if name in _TEXT else _value(value) for name, value in own.items()}


def _say(row: Mapping) -> None:
    own = {name: value for name, value in row.items() if name != "settings" and value not in (None, "")}
    told = (f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items())
    tell("  ".join(told), markup=False, highlight=False, soft_wrap=True)


def _has(row: Mapping[str, str], key: Mapping[str, Any]) -> bool:
    return all(row.get(name) == _text(value) for name, value in key.items())


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _value(text: str | None) -> Any:
    if not text:
        return None
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def machine_line() -> str:
    """Return the machine in one line, for a table's caption."""
    facts = machine()
    versions = ", ".join(f"{name} {facts[name]}" for name in PACKAGES if facts.get(name))
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB{gpu}; {versions}"


def write_csv(path: Path, rows: Iterable[Mapping]) -> None:
    """Write rows, each with the machine's columns at its end, whole or not at all; the folder is made where missing."""
    rows = [{**row, **machine()} for row in rows]
    own = dict.fromkeys(name for row in rows for name in row if name not in machine())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [*own, *machine()], rows)


def write_whole(path: Path, columns: list[str], rows: Iterable[Mapping]) -> None:
    """Write a CSV under a temporary name, and rename it: all of it is there, or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
