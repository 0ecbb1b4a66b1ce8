"""From the shell's words to one Hydra application, and errors as one line."""

import atexit
import gc
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path

from .commands import COMMANDS, FLAGS_WITH_VALUE, Command, benches, locate
from .compose import hidden
from .errors import Interrupted, UsageError, none_such, one_line, wants_traceback
from .run_paths import find_benchmarks

USAGE = """gnnscale: train graph neural networks on graphs that fit neither the GPU nor the host

usage: gnnscale COMMAND [recipe=NAME | recipe=path/to/file.yaml] [key=value ...] [--multirun] [--help]
       gnnscale test | predict | inspect RUN [key=value ...]     RUN: a run's folder, or a checkpoint in it
       gnnscale reproduce RUN step=N
       gnnscale report RUN [RUN ...]
       gnnscale verify | inspect STORE
       gnnscale update STORE [key=value ...]
       gnnscale stores [list | sizes | clean] [NAME ...]

commands:
{commands}

benchmarks (gnnscale bench NAME):
{benches}

recipes (gnnscale train recipe=NAME):
  {recipes}

recipes of benchmarks:
{bench_recipes}

`gnnscale COMMAND --help` lists the settings; test, predict, reproduce, partition, plan,
verify and inspect take those of train.
GNNSCALE_TRACEBACK=1 shows the traceback of an error."""


_HELP = ("-h", "--help", "help")
# The module and the function of each command.
_RUN = {
    "train": ("train", "run"),
    "test": ("evaluate", "test"),
    "predict": ("evaluate", "predict"),
    "reproduce": ("reproduce", "run"),
    "partition": ("store", "partition"),
    "plan": ("train", "plan"),
    "report": ("report", "run"),
    "bench": ("run_paths", "run_bench"),
    "update": ("update", "run"),
    "verify": ("store", "verify"),
    "inspect": ("inspect", "run"),
    "stores": ("stores", "run"),
    "doctor": ("doctor", "run"),
    "prepare": ("prepare", "run"),
}


def program() -> None:
    """The `gnnscale` program: `main` on the shell's words, and then its end.

    Exit handlers run, but the interpreter is not torn down: that takes seconds with torch's modules.
    """
    hold_garbage_collection()
    # Before torch is imported: its threads that wait for each other would spin on cores that prepare batches.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    threading._shutdown()  # waits for threads, as the interpreter's own end does
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a pipe without a reader
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def hold_garbage_collection() -> None:
    """Collect no garbage until `resume_garbage_collection`, while the program imports.

    Nearly all objects of imports live as long as the process: searching them for garbage takes a second of a command,
    and writes to pages that forked ranks could share.
    """
    gc.disable()
    atexit.register(gc.unfreeze)  # bindings count what the last collection leaves, and report it as leaked


def resume_garbage_collection() -> None:
    """Collect garbage again, among objects made from here on; no-op if it was not held."""
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
        command = _pick(words)
        if command is not None:
            with _own_modules():
                _run(command)
    except KeyboardInterrupt as stop:
        code = stop.code if isinstance(stop, Interrupted) else 130
        how = "interrupted" if code == 130 else "ended by SIGTERM"
        print(f"gnnscale: {how}; {stop or 'the same command goes on where it stopped'}", file=sys.stderr)
        sys.exit(code)
    except BrokenPipeError:  # the reader has ended, for example head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if wants_traceback():
            raise
        print(f"gnnscale: {_told(error)}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _own_modules() -> Iterator[None]:
    """Find modules of the current folder, after all others; processes that this one starts take its `sys.path`."""
    folder, before = os.getcwd(), list(sys.path)
    sys.path += [] if folder in sys.path else [folder]
    try:
        yield
    finally:
        sys.path[:] = before


def _pick(words: list[str]) -> Command | None:
    """Return the parsed command line; None: everything is printed already."""
    if words[:1] == ["--version"]:
        from importlib.metadata import version

        print(version("lightning-gnnscale"))
        return None
    if len(words) > 1 and words[0] in _HELP:  # gnnscale --help model, gnnscale help train
        words = [words[1], "--help"] if words[1] in COMMANDS else ["train", "--help", *words[1:]]
    if not words or words[0] in _HELP:
        print(_usage())
        return None
    name, *rest = words
    if name == "completion":
        from .help import complete

        complete(rest)
        return None
    if name not in COMMANDS:
        raise UsageError(none_such(f"no command {name!r}", name, COMMANDS))
    if name == "bench":
        if not rest or rest[0] in _HELP:
            print(_usage())
            return None
        if rest[0] not in benches():
            raise UsageError(none_such(f"no benchmark {rest[0]!r}", rest[0], benches()))
        find_benchmarks()
    flag = next((number for number, word in enumerate(rest) if word in _HELP[:2]), None)
    if flag is None:
        return locate(name, rest)
    from .help import print_help

    is_topic = rest[flag + 1 :] and re.fullmatch(r"\w[\w./]*[.=]?", rest[flag + 1])
    topic = rest[flag + 1] if is_topic else ""
    print_help(locate(name, rest[:flag] + rest[flag + (2 if is_topic else 1) :]), topic)
    return None


def _usage() -> str:
    from .recipes import available_recipes, bench_of, recipes_folder

    bench_of_recipe = {name: bench_of(recipes_folder() / f"{name}.yaml") for name in available_recipes()}
    return USAGE.format(
        commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        benches="\n".join(f"  {name:<10} {text}" for name, text in benches().items()),
        recipes=", ".join(name for name, bench in bench_of_recipe.items() if bench is None),
        bench_recipes="\n".join(
            f"  gnnscale {bench.replace('/', ' ')} recipe={name}" for name, bench in bench_of_recipe.items() if bench
        ),
    )


def flags_first(words: list[str]) -> list[str]:
    """Put Hydra's own flags before the overrides, which it wants in one row behind them."""
    flags, overrides = [], []
    words = iter(words)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
        elif word in FLAGS_WITH_VALUE:
            flags += [word, *islice(words, 1)]
        else:
            flags.append(word)
    return [*flags, *overrides]


def shared_run_folder(words: list[str]) -> list[str]:
    """Give the ranks that torchrun started one run folder: else each names its own by its start time."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or any(word.startswith("hydra.run.dir=") for word in words):
        return []
    port = "${meeting_port:${oc.select:elastic,false}}"  # as the recipe, or a word, has it
    return [f'hydra.run.dir="${{paths.runs}}/${{name}}/torchrun-{run_id}{port}"']


def _run(command: Command) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import ConfigCompositionException

    from .compose import GROUPS, prepare_overrides, register_choices
    from .recipes import check_no_credentials, for_other_choices
    from .settings import described, not_a_setting

    check_no_credentials(command.config_name, command.config_dir, command.words)
    config_dir, other, left_out = for_other_choices(command.config_dir, command.config_name, command.words)
    command = command._replace(config_dir=config_dir)
    if left_out and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        told = f"{', '.join(left_out)} of the recipe {'is' if len(left_out) == 1 else 'are'} left out"
        print(f"gnnscale: {told}: the choice that replaces its own does not have it", file=sys.stderr)
    words = [*shared_run_folder(command.words), *other, *command.words]
    register_choices()
    for name in ("botocore", "aiobotocore"):  # they log where they found credentials
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs the error that it raises
    # Hydra prints its own report of an error and exits; asked for the full error, it hands it on to `one_line`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    failures: list[Exception] = []
    sweep: list[Path] = []

    def task(config):
        if HydraConfig.get().mode.name == "MULTIRUN" and not sweep:
            sweep.append(Path(HydraConfig.get().sweep.dir).absolute())
        try:
            with _run_folder(config):
                return _checked_run(command, config)
        except Exception as error:  # a sweep goes on; its end reports the first failure
            if wants_traceback():
                raise
            failures.append(error)
            if sweep:
                _note_failure(error, HydraConfig.get().runtime.output_dir)

    location = [f"--config-dir={command.config_dir}"] if command.config_dir else []
    before = sys.argv
    sys.argv = [f"gnnscale {command.name}", *flags_first([*location, *prepare_overrides(words)])]
    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{GROUPS}", config_name=command.config_name)(task)()
    except ConfigCompositionException as error:
        key = re.match(r"Could not override '(\w+)'", str(error))
        if key is None:
            raise
        allowed = list(described()["commands"][command.primary])
        if command.config_name == "config" and key[1] in allowed:
            raise UsageError(
                f"{key[1]}= would change a choice of the run: say {command.name} resume=RUN with all settings"
            ) from None
        allowed += [] if command.name == "stores" else ["recipe"]
        raise UsageError(not_a_setting(key[1], allowed, "the top level")) from None
    finally:
        sys.argv = before
    if sweep:
        from .report import end_sweep

        end_sweep(sweep[0])
    if failures:
        raise failures[0]


def kernel_sets_of(command: str, config) -> list[str]:
    """Return the sets of kernels that a command may need, see `kernels.json`; nothing is imported."""
    if command == "prepare":
        return ["train"]
    if command not in ("train", "test", "predict", "reproduce", "partition", "bench") or "dataset" not in config:
        return []
    method, dataset = config.partitioner.get("method"), config.dataset.get("_target_", "")
    names = ["store", f"partition:{method}"] if config.store is None else []
    names += ["synthetic"] if dataset.endswith(".generate") and config.store is None else []
    if command == "partition":
        return names
    if config.datamodule._target_.endswith(".FullGraphDataModule"):
        return [*names, "full_graph"]
    of_links = config.model.get("_target_", "").endswith(("LinkPredictor", "EdgeClassifier"))
    backbone = (config.model.get("backbone") or {}).get("_target_", "")
    of_node_types = backbone.rpartition(".")[2] in ("RGCN", "RGAT", "HGT", "Hetero")
    return [*names, "links" if of_links else "hetero" if of_node_types else "train"]


def _checked_run(command: Command, config):
    """Check a config, and run the command with it."""
    from ..kernel_sets import compile_ahead
    from .compose import fill_inputs
    from .run_paths import check_paths
    from .typed import check_config, check_ranges

    fill_inputs(config)
    # First without imports: errors appear within a second.
    check_config(config, command.primary, command.recipe, imported=False)
    check_ranges(config)
    check_paths(config)
    compile_ahead(kernel_sets_of(command.name, config))
    with _temporary_files(command.name):
        check_config(config, command.primary, command.recipe)
        resume_garbage_collection()
        module, function = _RUN[command.name]
        run = getattr(importlib.import_module(f".{module}", __package__), function)
        with _stage_lines(command.name, config):
            return run(config)


def _run_folder(config) -> AbstractContextManager:
    """Return the block in which a run has its folder; a job of a sweep keeps it, with the reason of its failure."""
    from hydra.core.hydra_config import HydraConfig

    from .run_paths import removed_unless_begun

    hydra = HydraConfig.get()
    if hydra.mode.name == "MULTIRUN" or hydra.output_subdir is None or "paths" not in config:
        return nullcontext()
    return removed_unless_begun(Path(hydra.runtime.output_dir), Path(config.paths.runs).absolute())


def _temporary_files(command: str) -> AbstractContextManager:
    """Return the block in which a command runs; its temporary files are removed at its end."""
    if command in ("prepare", "stores"):  # others must find the Ray of prepare; stores has no such files
        return nullcontext()
    from .run_folder import temporary_folder

    return temporary_folder()


def _stage_lines(command: str, config) -> AbstractContextManager:
    """Return the block that prints a line a stage: where progress bars are on but cannot be shown."""
    from ..report.terminal import is_terminal, stage_lines

    wanted = command in ("train", "test", "predict", "partition") and "trainer" in config
    if not wanted or config.trainer.get("enable_progress_bar") is False or is_terminal():
        return nullcontext()
    from .ranks import is_first_rank

    return stage_lines() if is_first_rank() else nullcontext()


def _told(error: Exception) -> str:
    """Return an error as one line, without values of environment variables."""
    return hidden(one_line(error))


def _note_failure(error: Exception, folder: str) -> None:
    """Leave a line in the folder of a sweep's job that failed."""
    from .report import FAILED

    (Path(folder) / FAILED).write_text(_told(error) + "\n")
