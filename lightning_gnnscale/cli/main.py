"""From the shell's words to one Hydra application, and from its errors to one line."""

import atexit
import gc
import importlib
import logging
import os
import re
import sys
import threading
from contextlib import nullcontext, suppress
from itertools import islice

from .errors import UsageError, one_line, wants_traceback

COMMANDS = {
    "train": "partition a graph, store the parts, train on them and evaluate on the full graph",
    "partition": "partition a graph and write the partition store",
    "plan": "say how many parts a graph needs and what fits where",
    "bench": "run one benchmark, side by side with its peer",
    "report": "make the report of a run anew, or put several runs side by side on one page",
    "verify": "read a whole partition store and say whether every byte is as it was written",
    "prepare": "start workers that prepare batches for trainers, on this machine or on a Ray cluster",
}

BENCHES = {
    "partition": "partitioners side by side: cut, replication, balances, time and memory",
    "spring": "SPRING's speed, memory and cut",
    "loader": "seeds per CPU-second of the sampler and loader",
    "sample": "NeighborLoader beside PyG's and GraphBolt's, uniform and locality-biased: seeds per CPU-second",
    "gather": "feature rows through placements and caches, beside plain copies",
    "locality": "locality-aware sampling: host reads saved against variance and accuracy",
    "placement": "where feature rows are read from under each placement",
    "prepare": "sources of batches side by side, two-level scheduling beside fixed prefetch, and its replay",
    "halo": "feature bytes that a part's batches read from a cold disk, halo rows packed or not",
    "grouping": "bytes that travel for a batch: groups that share rows, beside a row cache",
    "ownership": "rows and bytes that machines which hold parts ask of each other, by partitioner",
    "averaging": "accuracy and synchronisation time against the averaging interval, accuracy against halo hops",
    "exchange": "exchange policies of full-graph training: bytes beside accuracy",
    "parts": "training on the parts of each partitioner, with and without control variates: accuracy beside the cut",
    "accuracy": "test accuracy of parts with model averaging beside central training",
    "memory": "each stage under caps of memory, page cache counted, beside its uncapped run",
    "startup": "seconds of the package's import beside Lightning's and PyG's, and to a second training's first epoch",
}

USAGE = """gnnscale: train graph neural networks on graphs that fit neither the GPU nor the host

usage: gnnscale COMMAND [recipe=NAME | recipe=path/to/file.yaml] [key=value ...] [--multirun] [--help]

commands:
{commands}

benchmarks (gnnscale bench NAME):
{benches}

recipes (gnnscale train recipe=NAME):
  {recipes}

recipes of benchmarks:
{bench_recipes}

`gnnscale COMMAND --help` lists the settings. GNNSCALE_TRACEBACK=1 shows the traceback of an error."""


_FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"),
    *("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"),
)
# The module and the function of each command.
_RUN = {
    "train": ("train", "run"),
    "partition": ("store", "partition"),
    "plan": ("train", "plan"),
    "bench": ("bench", "run"),
    "report": ("report", "run"),
    "verify": ("store", "verify"),
    "prepare": ("prepare", "run"),
}


def program() -> None:
    """The `gnnscale` program: `main` on the shell's words, and then its end.

    What is registered for the end is run, but the interpreter is not taken apart: torch's modules take it seconds.
    """
    hold_garbage_collection()
    code = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    threading._shutdown()  # waits for threads, as the interpreter's own end does
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a pipe that nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def hold_garbage_collection() -> None:
    """Collect no garbage until `resume_garbage_collection`: while the program imports.

    Nearly all that imports make lives as long as the process: searching it for garbage takes a second of every command,
    and writes to pages that forked ranks could share.
    """
    gc.disable()
    atexit.register(gc.unfreeze)  # bindings count what the last collection leaves, and report it as leaked


def resume_garbage_collection() -> None:
    """Collect garbage again, of what is made from here on; nothing happens where it was not held."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand.

    Args:
        argv: the words after `gnnscale`; None takes the shell's.

    Exits with 0, or with 2 and one line on stderr where the user's input is wrong; `verify` with 1 where the store is.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        command, config_name, words = _pick(words)
        _run(command, config_name, words)
    except KeyboardInterrupt as stop:
        code = getattr(stop, "code", 130)
        how = "interrupted" if code == 130 else "ended by SIGTERM"
        print(f"gnnscale: {how}; {stop or 'the same command goes on where it stopped'}", file=sys.stderr)
        sys.exit(code)
    except Exception as error:
        if wants_traceback():
            raise
        print(f"gnnscale: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _pick(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the command, its primary config, and the words left for Hydra."""
    if words[:1] == ["--version"]:
        from importlib.metadata import version

        print(version("lightning-gnnscale"))
        sys.exit(0)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        sys.exit(0)
    command, *rest = words
    if command not in COMMANDS:
        raise UsageError(f"no command {command!r}; there are {', '.join(COMMANDS)}")
    if command == "verify":
        rest = [f"store={_quoted(word)}" if _is_path(word) else word for word in rest]
    if command == "report":
        folders = [_quoted(word) for word in rest if _is_path(word)]
        rest = [*([f"runs=[{','.join(folders)}]"] if folders else []), *(word for word in rest if not _is_path(word))]
    if command != "bench":
        return command, command, rest
    if not rest or rest[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0)
    if rest[0] not in BENCHES:
        raise UsageError(f"no benchmark {rest[0]!r}; there are {', '.join(BENCHES)}")
    return command, f"bench/{rest[0]}", rest[1:]


def _is_path(word: str) -> bool:
    return not word.startswith("-") and not re.match(r"^[+~]*[\w./@]+=", word)


def _quoted(word: str) -> str:
    """A word as Hydra takes it whatever is in it."""
    return "'" + word.replace("'", "\\'") + "'"


def _usage() -> str:
    from .compose import available_recipes, bench_of, recipes_folder

    benches = {name: bench_of(recipes_folder() / f"{name}.yaml") for name in available_recipes()}
    return USAGE.format(
        commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        benches="\n".join(f"  {name:<10} {text}" for name, text in BENCHES.items()),
        recipes=", ".join(name for name, bench in benches.items() if bench is None),
        bench_recipes="\n".join(
            f"  gnnscale {bench.replace('/', ' ')} recipe={name}" for name, bench in benches.items() if bench
        ),
    )


def prepare_overrides(words: list[str]) -> list[str]:
    """Let `a.b=c` set a key whether or not a YAML file lists it; `check_config` then says which keys exist.

    Hydra wants `+` for a key that no file lists. Whether a class takes an argument is a better test.
    """
    inner_key = re.compile(r"^(?!hydra\.)[A-Za-z_]\w*(\.\w+)+=")
    return [f"++{word}" if inner_key.match(word) else word for word in words]


def flags_first(words: list[str]) -> list[str]:
    """Put Hydra's own flags before the overrides, which it wants in one row behind them."""
    flags, overrides = [], []
    words = iter(words)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
        elif word in _FLAGS_WITH_VALUE:
            flags += [word, *islice(words, 1)]
        else:
            flags.append(word)
    return [*flags, *overrides]


def shared_run_folder(words: list[str]) -> list[str]:
    """Give the ranks that torchrun started one run folder: each would name its own by the second it starts in."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or any(word.startswith("hydra.run.dir=") for word in words):
        return []
    return [f"hydra.run.dir=${{paths.runs}}/${{name}}/torchrun-{run_id}-{os.environ.get('MASTER_PORT', '0')}"]


def _run(command: str, config_name: str, words: list[str]) -> None:
    import hydra
    from hydra.errors import ConfigCompositionException

    from .compose import (
        GROUPS,
        allowed_at_top,
        check_config,
        check_no_credentials,
        fill_inputs,
        for_other_dataset,
        register_choices,
        take_recipe,
    )
    from .run_folder import temporary_folder

    config_dir, config_name, words = take_recipe(config_name, words)
    check_no_credentials(config_name, config_dir, words)
    words = [*shared_run_folder(words), *for_other_dataset(config_dir, config_name, words), *words]
    register_choices()
    for name in ("botocore", "aiobotocore"):  # which say where they have found credentials
        logging.getLogger(name).setLevel(logging.WARNING)
    # Hydra prints its own report of an error and exits; asked for the full error, it hands it on to `one_line`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    failures: list[Exception] = []

    def task(config):
        try:
            fill_inputs(config)
            check_config(config, config_name, config_dir)  # imports whatever the settings name
            resume_garbage_collection()
            module, function = _RUN[command]
            return getattr(importlib.import_module(f".{module}", __package__), function)(config)
        except Exception as error:  # a sweep goes on; the first failure is told at its end
            if wants_traceback():
                raise
            failures.append(error)

    location = [f"--config-dir={config_dir}"] if config_dir else []
    before = sys.argv
    sys.argv = [f"gnnscale {command}", *flags_first([*location, *prepare_overrides(words)])]
    try:
        with nullcontext() if command == "prepare" else temporary_folder():  # the Ray of "prepare" is found by others
            hydra.main(version_base="1.3", config_path=f"pkg://{GROUPS}", config_name=config_name)(task)()
    except ConfigCompositionException as error:
        key = re.match(r"Could not override '(\w+)'", str(error))
        if key is None:
            raise
        raise UsageError(f"{key[1]} is not a setting; there are {allowed_at_top(config_name, config_dir)}") from None
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
