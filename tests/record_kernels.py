"""`make kernels` writes `lightning_gnnscale/kernels.json`: the kernels that commands need, found by running commands.

A row is [name, types of the arguments, CPU seconds, sets]. A set's kernels are those that its run calls, and those that
they call, without the ones that a set which goes before it has anyway. `NAME ...` records these sets again and leaves
the others as they are.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from lightning_gnnscale.compile_ahead import object_of, types_of, types_text
from lightning_gnnscale.kernel_sets import LIST, recorded

METHODS = ("spring", "streaming_multilevel", "ldg", "fennel", "hdrf", "two_phase")
SMALL = ["dataset.num_nodes=5000", "dataset.num_edges=50000", "dataset.num_communities=50"]
DEMO = ["train", "recipe=demo", "trainer.enable_progress_bar=false", "trainer.max_epochs=1"]
NODE_TYPES = ["recipe=hgt_mag_shape", "dataset.num_nodes=5000", "dataset.num_edges=40000", "datamodule.batch_size=64"]
LINKS = ["dataset=synthetic", "dataset.hold_out={val: 0.05, test: 0.1}", *SMALL]
FULL = ["recipe=cagnet", "dataset=synthetic", "trainer.devices=1", *SMALL]
# What is run, and the sets that go before it. The demo in its own size: types of ids follow from sizes.
SETS: dict[str, tuple[list[str], list[str]]] = {
    "synthetic": (["generate"], []),
    **{f"partition:{method}": (["partition", method], ["synthetic"]) for method in METHODS},
    "store": (["partition", "recipe=demo", "partitioner=random"], ["synthetic"]),
    "train": ([*DEMO, "predict=true"], ["synthetic", "partition:streaming_multilevel", "store"]),
    "links": (["train", "recipe=link_prediction", *LINKS, *DEMO[2:]], ["synthetic", "partition:spring", "store"]),
    "hetero": (["train", *NODE_TYPES, *DEMO[2:]], ["partition:spring", "store"]),
    "full_graph": (["train", *FULL, *DEMO[2:]], ["synthetic", "partition:spring", "store"]),
}
LOG = "GNNSCALE_KERNEL_LOG"


def run(words: list[str]) -> None:
    """Run what a set is found by, in the current folder."""
    if words[0] == "generate" or len(words) == 2:
        import lightning_gnnscale as gs
        from lightning_gnnscale.dataset import generate

        dataset = generate(num_nodes=100_000, num_edges=400_000, num_communities=100, folder="generated")
        if words[0] == "partition":
            for num_parts in (8, 2):  # of two parts few nodes are at the border, and only these are looked at again
                gs.partition(dataset.stream, words[1], num_parts, masks=dataset.masks)
        return
    from lightning_gnnscale.cli import main

    main([*words])


def log_calls(path: str) -> None:
    """Append a line to a file for each kernel that is compiled or loaded: by whom it is called, and what it took."""
    from numba.core.dispatcher import Dispatcher

    from lightning_gnnscale.jit import KernelCache

    compile_or_load, open_calls = Dispatcher.compile, []

    def compile(dispatcher, signature):
        if not isinstance(dispatcher._cache, KernelCache) or isinstance(signature, str):
            return compile_or_load(dispatcher, signature)
        new, misses = tuple(signature) not in dispatcher.overloads, sum(dispatcher._cache_misses.values())
        try:
            call = {"name": _name(dispatcher), "types": types_text(signature), "inner": 0.0}
        except ValueError as error:
            print(f"{_name(dispatcher)} is not recorded: {error}", file=sys.stderr)
            return compile_or_load(dispatcher, signature)
        call["caller"] = [open_calls[-1][key] for key in ("name", "types")] if open_calls else None
        open_calls.append(call)
        began = time.thread_time()
        try:
            return compile_or_load(dispatcher, signature)
        finally:
            seconds, _ = time.thread_time() - began, open_calls.pop()
            if open_calls:
                open_calls[-1]["inner"] += seconds
            call["compiled"] = new and sum(dispatcher._cache_misses.values()) > misses
            call["seconds"] = seconds - call.pop("inner")
            if tuple(signature) in dispatcher.overloads:  # not a trial of types that failed
                with open(path, "a") as file:
                    file.write(json.dumps(call) + "\n")

    Dispatcher.compile = compile


def _name(dispatcher) -> str:
    module = dispatcher.py_func.__module__.removeprefix("lightning_gnnscale.")
    return f"{module}:{dispatcher.py_func.__qualname__}"


def used_by(words: list[str], folder: Path, cache: Path | None) -> list[dict]:
    """Return the calls of a run in a folder, see `log_calls`; kernels are cached where `cache` says, None: as ever."""
    log = folder / "calls.jsonl"
    log.write_text("")
    environment = os.environ | {
        "GNNSCALE_COMPILE_AHEAD": "0",
        LOG: str(log),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environment |= {} if cache is None else {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.record_kernels", "run", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in log.read_text().splitlines()]


def record(names: list[str]) -> list[list]:
    """Return the rows of the list, the given sets recorded again."""
    seconds, callees, order = {}, defaultdict(set), {}
    members = {name: set() for name in SETS}
    for kernel in recorded() if LIST.exists() else ():
        seconds[kernel[:2]] = kernel.seconds
        for name in set(kernel.sets) - set(names):
            members[name].add(kernel[:2])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"recording {name}", file=sys.stderr)
            called = set()
            for call in used_by(SETS[name][0], Path(folder), Path(folder, "cache")):
                key = call["name"], call["types"]
                called.add(key)
                order.setdefault(key, len(order))
                if call["compiled"]:
                    seconds[key] = max(seconds.get(key, 0) * (key in callees), call["seconds"])
                if call["caller"]:
                    callees[tuple(call["caller"])].add(key)
            members[name] = _with_callees(called, callees)
    for name, (_, before) in SETS.items():
        members[name] = members[name] - set().union(*(members[other] for other in before))
    rows = {key: [*key, round(seconds.get(key, 0.1), 1), []] for name in SETS for key in members[name]}
    for name, keys in members.items():
        for key in keys:
            rows[key][3].append(name)
    through = _seconds_through(rows, callees)
    return sorted(rows.values(), key=lambda row: (-through[tuple(row[:2])], row[:2]))


def _with_callees(called: set, callees: dict) -> set:
    found, todo = set(), list(called)
    while todo:
        key = todo.pop()
        if key not in found:
            found.add(key)
            todo += callees[key]
    return found


def _seconds_through(rows: dict, callees: dict) -> dict:
    """Return how long each kernel and the callers that wait for it take: the longest such chain is begun first."""
    callers = defaultdict(set)
    for caller, inner in callees.items():
        for key in inner:
            callers[key].add(caller)
    through = {}

    def of(key) -> float:
        if key not in through:
            own = rows[key][2] if key in rows else 0.0
            through[key] = 0.001 + own + max((of(caller) for caller in callers[key]), default=0.0)
        return through[key]

    for key in rows:
        of(key)
    return through


def main(words: list[str]) -> None:
    """Record sets, all of them where none is named, or run what one is found by (`run ...`)."""
    if words[:1] == ["run"]:
        log_calls(os.environ[LOG])
        run(words[1:])
        return
    rows = record(words or list(SETS))
    for name, types, _, _ in rows:
        assert object_of(name) and types_text(types_of(types)) == types
    LIST.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} kernels, {sum(row[2] for row in rows):.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
